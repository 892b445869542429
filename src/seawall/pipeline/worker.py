"""A worker of a stage that does one item at a time, and hands on what it has finished.

Promises:
- A stage whose dependency refuses calls, or whose breaker is open, waits with its item; it does not
  fail it.
- A worker process that dies costs its item one attempt, and no other item anything.
- An item that its source has lost to another process is given back before the next call, also one
  by a guard that tries it again.
- A function that is cancelled by something else than the end of the run has failed. One that
  swallows the cancellation of that end is not called again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from types import coroutine
from typing import TYPE_CHECKING, Any

from seawall.context import deadline_var
from seawall.pipeline.failures import BLOCKED, REFUSED, reason_to_wait
from seawall.pipeline.invocation import LOST, ItemLost, is_lost
from seawall.pipeline.item import CURRENT, CURRENT_BATCH, DROP, Item
from seawall.runtime.driver import sleep_async

if TYPE_CHECKING:
    from seawall.pipeline.nodes import WorkerStage


class StageWorker:
    """Base of `ItemWorker` and `BatchWorker`."""

    def __init__(self, node: WorkerStage) -> None:
        self.since = 0.0
        """When it began with its items."""
        self.waits_for = ""
        """Why it waits with its items, if it does."""
        self._node = node
        self._run = node.run
        self._queue = node.queue

    @property
    def items(self) -> Sequence[Item]:
        """The items at work; from any thread."""
        raise NotImplementedError

    async def work(self) -> None:
        """Do items until cancelled."""
        raise NotImplementedError

    def snapshot(self, items: Sequence[Item], now: float) -> dict[str, Any]:
        """Return the first of its items, how many and how old they are, and why it waits."""
        return {
            "item": items[0].id,
            "items": len(items),
            "since": max(0.0, now - self.since),
            "waits_for": self.waits_for,
        }

    async def _wait(self, pending: Awaitable[None], why: str) -> None:
        """Await something with the items, and show why."""
        self.waits_for = why
        try:
            await pending
        finally:
            self.waits_for = ""


class ItemWorker(StageWorker):
    """Does one item at a time."""

    def __init__(self, node: WorkerStage) -> None:
        super().__init__(node)
        self._item: Item | None = None
        self._suspended: Item | None = None
        """The item whose call was suspended last: `since` is known for it."""
        self._handover = Handover(node)

    @property
    def items(self) -> Sequence[Item]:
        """The items at work; from any thread."""
        item = self._item
        return () if item is None else (item,)

    async def work(self) -> None:
        """Do items until cancelled."""
        self._node.invocation.watch_attempts()
        CURRENT_BATCH.set(None)  # the pipeline may run inside of a batch of another one
        # Guards look this up for each item. Only a value of this very context is cached.
        deadline_var.set(deadline_var.get())
        await with_suspension_hook(self._work(), self._before_suspension)

    def _before_suspension(self) -> None:
        """Hand on what is finished, and wake those that wait for room."""
        self._handover.flush()
        if self._queue.blocked:
            self._queue.wake_blocked()
        if self._item is not self._suspended:
            self._suspended = self._item
            self.since = self._run.now()

    async def _work(self) -> None:
        """Do items; whatever is not plain success is left to other methods."""
        node, run, queue, handover = self._node, self._run, self._queue, self._handover
        call, is_sink = node.invocation.call, node.stage.is_sink
        first_attempt = 0 if node.invocation.counts_attempts else 1
        is_ordered = node.stage.ordered_by is not None
        may_lose, set_current = run.may_lose_items, CURRENT.set
        store = None if node.sink is None else node.sink.store
        ready, done = queue.ready, handover.items
        while True:
            while not ready:
                self._item = None
                await queue.wait_for_items()
                self.since = run.now()
            self._item = item = ready.popleft()
            key = item.key  # the next stage gives it another one
            set_current(item)
            item.attempts = first_attempt
            try:
                value = LOST if may_lose and is_lost(item) else await call(item.value)
            except (Exception, asyncio.CancelledError, ItemLost) as error:  # noqa: BLE001 - of the user's function
                await self._persist(item, run.failure_of(error))
            else:
                if len(done) >= handover.room or value is DROP or value is LOST:
                    await self._finish(item, value)
                else:  # it was not suspended, and there is room: a fast copy of `_finish`
                    if not is_sink:
                        item.value = value
                    if store is None or (pending := store(item)) is None:
                        done.append(item)
                    else:
                        handover.count(item)
                        await self._wait(pending, node.no_room)
            if is_ordered:
                queue.release(key)

    async def _finish(self, item: Item, value: Any) -> None:
        """Send on an item for which the function has returned `value`, or end it."""
        node = self._node
        if self._run.is_closing:
            raise asyncio.CancelledError  # the function has swallowed it
        if value is LOST:
            await node.failures.give_up(item, LOST)
            return
        if not node.stage.is_sink:
            if value is DROP:
                node.failures.drop(item)
                return
            item.value = value
        pending = None if node.sink is None else node.sink.store(item)
        if pending is None:
            pending = self._handover.add(item)
        else:
            self._handover.count(item)
        if pending is not None:
            await self._wait(pending, node.no_room)

    async def _persist(self, item: Item, error: Exception) -> None:
        """Go on with an item whose call has failed, until it is done or has failed for good."""
        node, run = self._node, self._run
        self._handover.flush()  # a degraded item must not pass those before it
        pauses, blocked = REFUSED.delays(run.random), BLOCKED.delays(run.random)
        while error is not LOST:
            seconds = node.pause_after(error, item, pauses)
            if seconds is None:
                if node.stage.when_failed != "block":
                    break
                node.counts.add_failure(error)
                seconds = next(blocked)
            if seconds:
                await self._wait(sleep_async(seconds), reason_to_wait(error))
            if is_lost(item):
                break
            try:
                value = await node.invocation.call_again(item)
            except (Exception, asyncio.CancelledError, ItemLost) as again:  # noqa: BLE001 - of the user's function
                error = run.failure_of(again)
            else:
                await self._finish(item, value)
                return
        await node.failures.give_up(item, error)


class Handover:
    """Items that a worker has finished, and hands on together before it is suspended.

    No other task runs before that. So the order is that of one by one, and the room in front of the
    next stage does not change.
    """

    def __init__(self, node: WorkerStage) -> None:
        self.items: list[Item] = []
        """Those for which there is room."""
        self.room = 0
        """Number of items that the next stage has room for; 0 if that has to be looked up."""
        self._counts = node.counts
        self._now = node.run.now
        self._take = node.following.take
        self._target = node.batch_target

    def add(self, item: Item) -> Awaitable[None] | None:
        """Take a finished item, and look up the room; return what to await, if anything."""
        self.flush()
        target = self._target
        if target is not None and target.room:
            self.room = target.room
            self.items.append(item)
            return None
        self.count(item)
        return self._take(item)

    def count(self, item: Item) -> None:
        """Count an item that is not handed on with others."""
        self._counts.add_done([item], self._now())

    def flush(self) -> None:
        """Hand on all, and count them; others may use the room from now on."""
        self.room = 0
        if self.items and self._target is not None:
            self._counts.add_done(self.items, self._now())
            self._target.take_many(self.items)
            self.items.clear()


@coroutine
def with_suspension_hook(
    work: Coroutine[Any, Any, None], before_suspension: Callable[[], None]
) -> Generator[Any, Any, None]:
    """Run `work`; call `before_suspension` before each suspension, and before an error ends it."""
    step: Callable[[Any], Any] = work.send
    given: Any = None
    while True:
        try:
            awaited = step(given)
        except StopIteration:
            return
        except BaseException:
            before_suspension()
            raise
        before_suspension()
        try:
            given = yield awaited
            step = work.send
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001 - raised where the work waits
            given = error
            step = work.throw
