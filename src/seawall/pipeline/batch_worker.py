"""A worker of a stage with `batch=`, and the members of a batch.

Promises: of a batch only those members are tried again that have failed, and none that its source
has lost to another process; while some wait for that, the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from seawall.errors import WorkerDied
from seawall.pipeline.counts import StageCounts
from seawall.pipeline.failures import BLOCKED, REFUSED, reason_to_wait
from seawall.pipeline.invocation import LOST, is_lost
from seawall.pipeline.item import CURRENT, CURRENT_BATCH, DROP, Item
from seawall.pipeline.stage import BatchFailed, BatchSize
from seawall.pipeline.worker import StageWorker
from seawall.runtime.driver import sleep_async

if TYPE_CHECKING:
    from seawall.pipeline.nodes import WorkerStage


class BatchWorker(StageWorker):
    """Does one batch at a time."""

    def __init__(self, node: WorkerStage, batch: BatchSize) -> None:
        super().__init__(node)
        self._batch = batch
        self._items: list[Item] = []

    @property
    def items(self) -> Sequence[Item]:
        """What it works at; from any thread."""
        return self._items

    async def work(self) -> None:
        """Do batches until cancelled."""
        while True:
            items = await self._collect()
            ordered = self._node.stage.ordered_by is not None
            await self._finish(items, {item: item.key for item in items} if ordered else {})
            self._items = []

    async def _collect(self) -> list[Item]:
        """Wait for a batch: until it is full, or its first item has waited for long enough."""
        run, queue, (size, seconds) = self._run, self._queue, self._batch
        while not queue.ready:
            await queue.wait_for_items()
        self._items = items = [queue.ready.popleft()]
        self.since = run.now()
        until = self.since + seconds
        while True:
            while queue.ready and len(items) < size:
                items.append(queue.ready.popleft())
            if queue.blocked:
                queue.wake_blocked()
            if len(items) == size or run.is_ending or run.now() >= until:
                return items
            await queue.wait_for_items(until)

    async def _finish(self, items: list[Item], keys: dict[Item, Hashable]) -> None:
        """Call the function until each member is done or has failed, again for failed ones only.

        Meanwhile the others go on, and so do the next items of their `keys`.
        """
        node, run = self._node, self._run
        members = BatchMembers(
            items, node.counts, is_sink=node.stage.is_sink, may_lose=run.may_lose_items
        )
        pauses, blocked = REFUSED.delays(run.random), BLOCKED.delays(run.random)
        while members.left:
            failure = await self._attempt(members)
            has_killed = isinstance(failure, WorkerDied) and len(members.left) > 1
            failed, seconds = members.lost, 0.0
            if has_killed:
                node.counts.deaths += 1
            elif failure is not None:
                seconds = self._sort_out(members, failed, failure, pauses, blocked)
            done, members.done, members.lost = members.done, [], []
            self._items = members.left or items
            await self._send_on(done)
            self._release(done, keys)
            for item, why in failed:
                await node.failures.give_up(item, why)
                self._release([item], keys)
            if has_killed:  # one of them has: call the function with one at a time
                for item in members.left:
                    await self._finish([item], keys)
                return
            if failure is not None and seconds:
                await self._wait(sleep_async(seconds), reason_to_wait(failure))

    async def _attempt(self, members: BatchMembers) -> Exception | None:
        """Call the function with those that are left; return why that failed, if it did."""
        CURRENT.set(members.left[0])
        try:
            await self._node.invocation.call(members)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - of the user's function
            return self._run.failure_of(error)
        if self._run.is_closing:
            raise asyncio.CancelledError
        return None

    def _sort_out(
        self,
        members: BatchMembers,
        failed: list[tuple[Item, Exception]],
        failure: Exception,
        pauses: Iterator[float],
        blocked: Iterator[float],
    ) -> float:
        """Move members that have failed for good to `failed`; return the pause of the others."""
        node = self._node
        seconds = node.pause_after(failure, members.left[0], pauses)
        if seconds is not None:
            return seconds
        left, longest = [], 0.0
        for item, error in members.failures(failure):
            seconds = node.failures.pause_after(error, pauses)
            if seconds is None and node.stage.when_failed == "block":
                node.counts.add_failure(error)
                seconds = next(blocked)
            if seconds is None:
                failed.append((item, error))
            else:
                left.append(item)
                longest = max(longest, seconds)
        members.left = left
        return longest

    async def _send_on(self, items: list[Item]) -> None:
        """Bring members that are done to the next stage, as many together as have room."""
        if not items:
            return
        node, many = self._node, self._node.batch_following
        node.counts.add_done(items, self._run.now())
        wanted = [item for item in items if item.value is not DROP]
        if len(wanted) < len(items):
            for item in items:
                if item.value is DROP:
                    node.failures.drop(item)
        place = 0
        while place < len(wanted):
            room = 0 if many is None else many.room
            if many is not None and room:
                many.take_many(wanted[place : place + room])
                place += room
                continue
            pending = node.following.take(wanted[place])
            place += 1
            if pending is not None:
                await self._wait(pending, node.no_room)

    def _release(self, items: list[Item], keys: dict[Item, Hashable]) -> None:
        if keys:
            for item in items:
                self._queue.release(keys[item])


class BatchMembers:
    """The members of a batch that are not done yet."""

    def __init__(
        self, items: list[Item], counts: StageCounts, *, is_sink: bool, may_lose: bool
    ) -> None:
        self._counts = counts
        self.left = items
        self.lost: list[tuple[Item, Exception]] = []
        """Those that their sources have lost to another process."""
        self._may_lose = may_lose
        self.done: list[Item] = []
        self._errors: dict[Item, Exception] = {}
        """Why a member failed last, if the function has said so."""
        self._is_sink = is_sink

    def failures(self, failure: Exception) -> Iterator[tuple[Item, Exception]]:
        """Return those that are left, each with its error: its own, or that of the batch."""
        for item in self.left:
            yield item, self._errors.get(item, failure)

    def _leave_lost(self) -> None:
        """Remove those that their sources have lost."""
        self.lost += [(item, LOST) for item in self.left if is_lost(item)]
        lost = {item for item, _ in self.lost}
        self.left = [item for item in self.left if item not in lost]

    async def attempt(self, function: Callable[[list[Any]], Any], *, awaits: bool) -> None:
        """Call `function` with those that are left, and keep what it has done."""
        self._errors.clear()
        if self._may_lose:
            self._leave_lost()
            if not self.left:
                return
        if self.left[0].attempts:
            self._counts.retries += len(self.left)
        values = [item.value for item in self.left]
        for item in self.left:
            item.attempts += 1
        CURRENT_BATCH.set(self.left)
        try:
            results = function(values)
            if awaits:
                results = await results
        except BatchFailed as partial:
            unknown = [place for place in partial.failures if not 0 <= place < len(values)]
            if unknown:
                raise ValueError(
                    f"BatchFailed names the places {unknown!r:.80} of a batch of {len(values)}:"
                    " they count from 0"
                ) from partial
            self._keep(partial.results, partial.failures)
            if not self.left:
                return
            # A guard judges the batch by the first of its errors.
            raise self._errors[self.left[0]] from partial
        self._keep(results, {})

    def _keep(self, results: Any, failures: dict[int, Exception]) -> None:
        """Separate those that are done from those that failed."""
        items = self.left
        if not self._is_sink:
            if not hasattr(results, "__len__") or len(results) != len(items):
                raise TypeError(
                    f"a stage with batch= got {len(items)} items, and its results are"
                    f" {results!r:.80}: return a list with one result for each, or raise"
                    " BatchFailed(failures, results)"
                )
            for place, (item, result) in enumerate(zip(items, results, strict=True)):
                if place not in failures:
                    item.value = result
        if not failures:
            self.done += items
            self.left = []
            return
        self.left = []
        for place, item in enumerate(items):
            if place in failures:
                self._errors[item] = failures[place]
                self.left.append(item)
            else:
                self.done.append(item)
