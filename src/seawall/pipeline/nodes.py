"""The nodes of a running pipeline: where items go, what is done with them, and what if that fails.

A stage with workers has a bounded queue in front of it. A stage without workers is done on the way,
by whoever brings the item. A node takes an item and returns what to await before bringing the next
one: nothing while there is room.

Promises:
- A stage whose dependency refuses calls, or whose breaker is open, waits with its item; it does not
  fail it.
- A worker process that dies costs its item one attempt, and no other item anything.
- Items with the same key are done one after the other, in the order in which they came.
- Of a batch only those members are tried again that have failed.
- An item that its source has lost to another process is given back before the next call, also one
  by a guard that tries it again.
- A function that is cancelled by something else than the end of the run has failed. One that
  swallows that end is asked for nothing more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from seawall._failures import described
from seawall.errors import DeadlineExceeded, Rejected, WorkerDied
from seawall.models.backoff import full_jitter
from seawall.pipeline.counts import MOST_SAMPLES, Counts, branch_snapshot, stage_snapshot
from seawall.pipeline.invocation import LOST, Members, bound_call, is_lost
from seawall.pipeline.item import CURRENT, Ending, Item, Lesser
from seawall.pipeline.stage import BatchSize, Degrade, NotBefore, Stage
from seawall.policies.breaker import Breaker
from seawall.runtime.driver import sleep_async
from seawall.runtime.functions import kind_of

if TYPE_CHECKING:
    from seawall.pipeline.engine import Run

REFUSED: Final = full_jitter(0.05, cap=5.0)
"""Pauses of a stage whose dependency refuses without saying for how long."""
BLOCKED: Final = full_jitter(0.5, cap=60.0)
"""Pauses between the attempts at an item that blocks its key, or that cannot be set aside."""
LONGEST_PAUSE: Final = 60.0
"""Seconds after which a refused item is tried again, whatever the refusal says."""

SINK: Final = Ending.SINK


class _Drop:
    """The type of `DROP`; a worker process returns the same object."""

    def __reduce__(self) -> str:
        return "DROP"

    def __repr__(self) -> str:
        return "DROP"


DROP: Final = _Drop()
"""Returned by a stage for an item that is not wanted: it is dropped, and counted."""


class Node(Protocol):
    """Where items go."""

    name: str

    def take(self, item: Item, now: float) -> Awaitable[None] | None:
        """Take the item; return what to await before bringing the next one, if anything."""


class Exit:
    """Behind the sinks: the item has ended."""

    name = "end"

    def __init__(self, run: Run) -> None:
        """Report ends to `run`."""
        self._run = run

    def take(self, item: Item, now: float) -> None:
        """End the item."""
        self._run.end(item, SINK)

    def take_many(self, items: list[Item], now: float) -> bool:
        """End all of them."""
        for item in items:
            self._run.end(item, SINK)
        return True


class Branch:
    """Sends each item one of two ways."""

    def __init__(self, run: Run, name: str, predicate: Callable[[Any], bool]) -> None:
        """Ask `predicate(value)`; the ways are set when the graph is built."""
        self.yes: Node
        self.no: Node
        self.name = name
        self.counts = Counts(run.now())
        self._run = run
        self._predicate = predicate

    def take(self, item: Item, now: float) -> Awaitable[None] | None:
        """Send the item on; one that cannot be judged is a dead letter."""
        try:
            chosen = self.yes if self._predicate(item.value) else self.no
        except Exception as error:  # noqa: BLE001 - of the user's function
            self.counts.add_failure(error)
            return self._run.bury(item, self.name, self.counts, error)
        self.counts.done += 1
        return chosen.take(item, now)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return how many items it has judged."""
        return branch_snapshot(self.name, self.counts, now)


class InlineStage:
    """A stage without workers: a plain function that is called on the way."""

    def __init__(self, run: Run, stage: Stage) -> None:
        """Do `stage`; the node behind it is set when the graph is built."""
        self.stage = stage
        self.name = stage.name
        self.following: Node
        self.counts = Counts(run.now())
        self._run = run
        self._function = stage.function
        self._is_sink = stage.is_sink
        self._failing = Failing(run, stage, self.counts)

    def take(self, item: Item, now: float) -> Awaitable[None] | None:
        """Do the item and send it on."""
        if self._run.may_lose_items and is_lost(item):
            return self._failing.give_up(item, LOST, self.following)
        item.stage = self.name
        item.attempts = 1
        if CURRENT.get(None) is not item:
            CURRENT.set(item)
        try:
            value = self._function(item.value)
        except Exception as error:  # noqa: BLE001 - of the user's function
            return self._persist(item, error)
        return self._send_on(item, value, now)

    async def _persist(self, item: Item, error: Exception) -> None:
        """Call the function again while it refuses the item; whoever brings it waits."""
        pauses = REFUSED.delays(self._run.random)
        while (seconds := self._failing.pause_after(error, pauses)) is not None:
            self.counts.waits_for = described(error)
            try:
                await sleep_async(seconds)
            finally:
                self.counts.waits_for = ""
            if is_lost(item):
                break
            item.attempts += 1
            self.counts.retries += 1
            CURRENT.set(item)
            try:
                value = self._function(item.value)
            except Exception as again:  # noqa: BLE001 - of the user's function
                error = again
            else:
                pending = self._send_on(item, value, self._run.now())
                if pending is not None:
                    await pending
                return
        await self._failing.give_up(item, error, self.following)

    def _send_on(self, item: Item, value: Any, now: float) -> Awaitable[None] | None:
        self.counts.done += 1
        if not self._is_sink:
            if value is DROP:
                self._failing.drop(item)
                return None
            item.value = value
        return self.following.take(item, now)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what it has done."""
        return stage_snapshot(self.stage, self.counts, now)


class Failing:
    """What a stage does with an item that has failed for good."""

    def __init__(self, run: Run, stage: Stage, counts: Counts) -> None:
        """Do what `stage.on_failure` says."""
        self._run = run
        self._stage = stage
        self._counts = counts

    async def give_up(self, item: Item, error: Exception, following: Node) -> None:
        """Do with a failed item what `on_failure` says; give a lost one back."""
        if error is LOST or is_lost(item):
            self._run.end(item, Ending.RETURNED)
            return
        self._counts.add_failure(error)
        action = self._stage.on_failure
        if isinstance(action, Degrade):
            await self._degrade(item, error, action, following)
        elif action == "drop":
            self._counts.dropped += 1
            self._run.end(item, Ending.DROPPED, error)
        elif action == "stop":
            self._run.stop_because(item, error)
            await asyncio.Event().wait()  # until it is cancelled: nothing more is begun here
        else:
            await self._run.bury(item, self._stage.name, self._counts, error)

    def pause_after(self, error: Exception, pauses: Iterator[float]) -> float | None:
        """Return for how many seconds an item waits that was refused, None if it has failed."""
        asked: float | None
        if isinstance(self._stage.on_failure, Degrade):
            return None
        if isinstance(error, NotBefore):
            asked = error.seconds
        elif isinstance(error, Rejected) and not isinstance(error, DeadlineExceeded):
            asked = None if error.retry_after is None else min(error.retry_after, LONGEST_PAUSE)
        else:
            return None
        self._counts.refused += 1
        pause = next(pauses)
        return pause if asked is None else max(asked, 0.001) + pause / 10

    def drop(self, item: Item) -> None:
        """End an item that the stage does not want."""
        self._counts.dropped += 1
        self._run.end(item, Ending.DROPPED)

    async def _degrade(
        self, item: Item, error: Exception, action: Degrade, following: Node
    ) -> None:
        stage = self._stage
        CURRENT.set(item)
        try:
            value = action.function(item.value, error)
            if kind_of(action.function) == "async":
                value = await value
        except (Exception, asyncio.CancelledError) as second:  # noqa: BLE001 - of the user's function
            failure = self._run.failure_of(second)
            await self._run.bury(item, stage.name, self._counts, failure)
            return
        if self._run.is_closing:
            raise asyncio.CancelledError  # the function has swallowed it
        if not stage.is_sink:
            if value is DROP:
                self.drop(item)
                return
            item.value = value
        self._counts.degraded += 1
        item.lesser = (*item.lesser, Lesser(stage.name, described(error)))
        pending = following.take(item, self._run.now())
        if pending is not None:
            await pending


class WorkerState:
    """What one worker is doing."""

    __slots__ = ("items", "since", "waits_for")

    def __init__(self) -> None:
        """Begin idle."""
        self.items: Sequence[Item] = ()
        self.since = 0.0
        """When it began with these items."""
        self.waits_for = ""
        """Why it waits with its items, if it does."""

    def snapshot(self, items: Sequence[Item], now: float) -> dict[str, Any]:
        """Return the first of its items, how many and how old they are, and why it waits."""
        return {
            "item": items[0].id,
            "items": len(items),
            "since": max(0.0, now - self.since),
            "waits_for": self.waits_for,
        }

    async def pause(self, seconds: float, why: str) -> None:
        """Wait with the item."""
        self.waits_for = why
        try:
            await sleep_async(seconds)
        finally:
            self.waits_for = ""


class WorkerStage:
    """A stage with workers, and the queue in front of them."""

    def __init__(self, run: Run, stage: Stage, *, in_memory: bool) -> None:
        """Do `stage`, with `in_memory` without its pool; the node behind it is set later."""
        self.stage = stage
        self.name = stage.name
        self.following: Node
        self.counts = Counts(run.now())
        self.workers = tuple(WorkerState() for _ in range(stage.workers))
        self._run = run
        self._capacity = stage.capacity
        self._is_ordered = stage.ordered_by is not None
        self._failing = Failing(run, stage, self.counts)
        self._call, self._counts_attempts = bound_call(stage, self.counts, in_memory=in_memory)
        policies = getattr(stage.guard, "policies", ())
        self._breakers = [policy for policy in policies if isinstance(policy, Breaker)]
        self._ready: deque[Item] = deque()
        self._lanes: dict[Hashable, deque[Item]] = {}
        """For each key that is at work, the items that wait for it."""
        self._in_lanes = 0
        self._idle: deque[asyncio.Future[None]] = deque()
        self._blocked: deque[asyncio.Future[None]] = deque()

    # Taking items in

    @property
    def held(self) -> int:
        """How many items wait here."""
        return len(self._ready) + self._in_lanes

    def take(self, item: Item, now: float) -> Awaitable[None] | None:
        """Put the item into the queue, or return what waits until there is room."""
        ready = self._ready
        if len(ready) + self._in_lanes >= self._capacity or self._blocked:
            return self._wait_for_room(item)
        item.stage = self.name
        item.entered_at = now
        item.attempts = 0
        if self._is_ordered:
            return self._take_in_order(item)
        ready.append(item)
        if self._idle:
            _wake(self._idle)
        return None

    def take_many(self, items: list[Item], now: float) -> bool:
        """Put all items into the queue if there is room, and return whether there was."""
        if len(self._ready) + len(items) > self._capacity or self._blocked or self._is_ordered:
            return False
        name = self.name
        for item in items:
            item.stage = name
            item.entered_at = now
            item.attempts = 0
        self._ready.extend(items)
        for _ in range(min(len(items), len(self._idle))):
            _wake(self._idle)
        return True

    def _take_in_order(self, item: Item) -> Awaitable[None] | None:
        key_of = self.stage.ordered_by
        assert key_of is not None  # noqa: S101 - looked at by the caller
        try:
            item.key = key_of(item.value)
            lane = self._lanes.get(item.key)
        except Exception as error:  # noqa: BLE001 - of the user's function, or an unhashable key
            self.counts.add_failure(error)
            return self._run.bury(item, self.name, self.counts, error)
        if lane is not None:
            lane.append(item)
            self._in_lanes += 1
            return None
        self._lanes[item.key] = deque()
        self._ready.append(item)
        _wake(self._idle)
        return None

    async def _wait_for_room(self, item: Item) -> None:
        await self._queued(self._blocked)
        while self.held >= self._capacity:
            await self._queued(self._blocked, first=True)
        blocked, self._blocked = self._blocked, deque()  # its turn has come before theirs
        pending = self.take(item, self._run.now())
        self._blocked = blocked
        if pending is not None:
            await pending

    async def _queued(
        self, queue: deque[asyncio.Future[None]], at: float | None = None, *, first: bool = False
    ) -> None:
        """Wait to be woken, or until `at`; a wake-up that finds nobody goes to the next."""
        loop = self._run.loop
        future: asyncio.Future[None] = loop.create_future()
        if first:
            queue.appendleft(future)
        else:
            queue.append(future)
        timer = None if at is None else loop.call_at(at, _resolve, future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                _wake(queue)
            raise
        finally:
            if timer is not None:
                timer.cancel()
                if future in queue:
                    queue.remove(future)

    def _make_way(self) -> None:
        """Let those bring their items who wait for room, once half of it is free.

        Many at once cost fewer turns of the event loop than one by one.
        """
        held = self.held
        if held <= self._capacity // 2:
            for _ in range(self._capacity - held):
                _wake(self._blocked)

    def _release(self, key: Hashable) -> None:
        """Let the next item of the same key begin."""
        lane = self._lanes[key]
        if lane:
            self._ready.append(lane.popleft())
            self._in_lanes -= 1
            _wake(self._idle)
        else:
            del self._lanes[key]

    def wake_all(self) -> None:
        """Let idle workers look up: there may be nothing more to wait for."""
        while self._idle:
            _wake(self._idle)

    # Working

    async def work(self, state: WorkerState) -> None:  # noqa: C901, PLR0912, PLR0915 - one loop without frames
        """Do items until cancelled."""
        if self.stage.batch is not None:
            while True:
                await self._do_batch(state, self.stage.batch)
        run, call, ready, counts = self._run, self._call, self._ready, self.counts
        now = run.now
        keeps_value, is_ordered = self.stage.is_sink, self.stage.ordered_by is not None
        set_current, times = CURRENT.set, counts.times
        add_time = times.append
        take, is_one_attempt = self.following.take, not self._counts_attempts
        at = now()
        may_lose = run.may_lose_items
        while True:
            while not ready:
                state.items = ()
                await self._queued(self._idle)
                at = now()
            item = ready.popleft()
            key = item.key  # the next stage gives it another one
            if self._blocked:
                self._make_way()
            state.since = at
            if may_lose and is_lost(item):
                await self._failing.give_up(item, LOST, self.following)
                if is_ordered:
                    self._release(key)
                continue
            state.items = (item,)
            set_current(item)
            if is_one_attempt:
                item.attempts += 1
            try:
                value = await call(item.value)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - of the user's function
                failure: Exception | None = await self._persist(item, state, run.failure_of(error))
            else:
                if run.is_closing:
                    raise asyncio.CancelledError  # the function has swallowed it
                failure = None
                if may_lose and value is LOST:
                    failure = LOST
                elif not keeps_value:
                    item.value = value
            at = now()
            if failure is not None:
                await self._failing.give_up(item, failure, self.following)
                at = now()
            elif item.value is DROP:
                self._failing.drop(item)
            else:
                counts.done += 1
                add_time(at - item.entered_at)
                if len(times) >= MOST_SAMPLES:
                    counts.fold_times()
                pending = take(item, at)
                if pending is not None:
                    await self._passed(pending, state)
                    at = now()
            if is_ordered:
                self._release(key)

    async def _passed(self, pending: Awaitable[None], state: WorkerState) -> None:
        """Wait until the next stage has room for what it was brought."""
        state.waits_for = f"no room in {self.following.name!r}"
        try:
            await pending
        finally:
            state.waits_for = ""

    async def _persist(self, item: Item, state: WorkerState, error: Exception) -> Exception | None:
        """Go on with an item whose call has failed; return why it has failed for good."""
        pauses = REFUSED.delays(self._run.random)
        blocked = BLOCKED.delays(self._run.random)
        while True:
            seconds = self._pause_after(error, item, pauses)
            if seconds is None:
                if self.stage.when_failed != "block":
                    return error
                self.counts.add_failure(error)
                seconds = next(blocked)
            if seconds:
                await state.pause(seconds, described(error))
            if is_lost(item):
                return LOST
            try:
                value = await self._call_again(item)
            except (Exception, asyncio.CancelledError) as again:  # noqa: BLE001 - of the user's function
                error = self._run.failure_of(again)
            else:
                if self._run.is_closing:
                    raise asyncio.CancelledError
                return self._keep(item, value)

    def _keep(self, item: Item, value: Any) -> Exception | None:
        """Keep what the function has returned, or return that the item was lost before."""
        lost: Exception | None = LOST if value is LOST else None
        if lost is None and not self.stage.is_sink:
            item.value = value
        return lost

    def _call_again(self, item: Item) -> Awaitable[Any]:
        CURRENT.set(item)
        if not self._counts_attempts:
            item.attempts += 1
            self.counts.retries += 1
        return self._call(item.value)

    def _pause_after(self, error: Exception, item: Item, pauses: Iterator[float]) -> float | None:
        """Return after how many seconds to call again, None if the item has failed."""
        if isinstance(error, WorkerDied):
            self.counts.deaths += 1
            item.deaths += 1
            return 0.0 if item.deaths < self.stage.most_deaths else None
        seconds = self._failing.pause_after(error, pauses)
        if seconds is not None or isinstance(self.stage.on_failure, Degrade):
            return seconds
        if not any(breaker.state == "open" for breaker in self._breakers):
            return None
        self.counts.refused += 1  # the dependency is down, and not the item bad
        return next(pauses)

    # Working in batches

    async def _do_batch(self, state: WorkerState, batch: BatchSize) -> None:
        while not self._ready:
            await self._queued(self._idle)
        ready, size = self._ready, batch.size
        items = [ready.popleft()]
        state.since = self._run.now()
        state.items = items
        until = state.since + batch.seconds
        while True:
            while ready and len(items) < size:
                items.append(ready.popleft())
            if self._blocked:
                self._make_way()
            if len(items) == size or self._run.is_ending or self._run.now() >= until:
                break
            await self._queued(self._idle, until)
        keys = {item: item.key for item in items} if self._is_ordered else {}
        await self._finish(items, keys, state)
        state.items = ()

    async def _send_on(self, items: list[Item], state: WorkerState) -> None:
        now, following, counts = self._run.now(), self.following, self.counts
        counts.done += len(items)
        times = counts.times
        if len(times) >= MOST_SAMPLES:
            counts.fold_times()
        times.extend([now - item.entered_at for item in items])
        wanted = [item for item in items if item.value is not DROP]
        if len(wanted) < len(items):
            for item in items:
                if item.value is DROP:
                    self._failing.drop(item)
        if isinstance(following, WorkerStage | Exit) and following.take_many(wanted, now):
            return
        for item in wanted:
            pending = following.take(item, now)
            if pending is not None:
                await self._passed(pending, state)

    async def _finish(  # noqa: C901 - one loop over what an attempt may come to
        self, items: list[Item], keys: dict[Item, Hashable], state: WorkerState
    ) -> None:
        """Call the function until each member is done or has failed; only failed ones again.

        While some wait for that, the others go on, and so do the next items of their `keys`.
        """
        may_lose = self._run.may_lose_items
        members = Members(items, self.counts, is_sink=self.stage.is_sink, may_lose=may_lose)
        pauses = REFUSED.delays(self._run.random)
        blocked = BLOCKED.delays(self._run.random)
        while members.left:
            CURRENT.set(members.left[0])
            failure: Exception | None = None
            try:
                await self._call(members)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - of the user's function
                failure = self._run.failure_of(error)
            else:
                if self._run.is_closing:
                    raise asyncio.CancelledError
            has_killed = isinstance(failure, WorkerDied) and len(members.left) > 1
            failed, seconds = members.lost, 0.0
            if has_killed:
                self.counts.deaths += 1
            elif failure is not None:
                seconds = self._sort_out(members, failed, failure, pauses, blocked)
            done, members.done, members.lost = members.done, [], []
            state.items = members.left or items
            await self._send_on(done, state)
            self._release_all(done, keys)
            for item, why in failed:
                await self._failing.give_up(item, why, self.following)
                self._release_all([item], keys)
            if has_killed:  # one of them has: call the function with one at a time
                for item in members.left:
                    await self._finish([item], keys, state)
                return
            if failure is not None and seconds:
                await state.pause(seconds, described(failure))

    def _sort_out(
        self,
        members: Members,
        failed: list[tuple[Item, Exception]],
        failure: Exception,
        pauses: Iterator[float],
        blocked: Iterator[float],
    ) -> float:
        """Move members that have failed for good to `failed`.

        Return after how many seconds the others are tried again.
        """
        seconds = self._pause_after(failure, members.left[0], pauses)
        if seconds is not None:
            return seconds
        left, longest = [], 0.0
        for item, error in members.failures(failure):
            seconds = self._failing.pause_after(error, pauses)
            if seconds is None and self.stage.when_failed == "block":
                self.counts.add_failure(error)
                seconds = next(blocked)
            if seconds is None:
                failed.append((item, error))
            else:
                left.append(item)
                longest = max(longest, seconds)
        members.left = left
        return longest

    def _release_all(self, items: list[Item], keys: dict[Item, Hashable]) -> None:
        if keys:
            for item in items:
                self._release(keys[item])

    # Looking on

    def waiting(self) -> Iterator[Item]:
        """Return the items that nobody works at yet; from any thread."""
        yield from list(self._ready)
        for lane in list(self._lanes.values()):
            yield from list(lane)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what it is doing, and what it has done; from any thread."""
        at_work = [(state, items) for state in self.workers if (items := state.items)]
        seen = stage_snapshot(self.stage, self.counts, now)
        reasons = (state.waits_for for state, _ in at_work if state.waits_for)
        seen["busy"] = len(at_work)
        seen["waiting"] = self.held
        seen["oldest"] = now - min((item.entered_at for item in self.waiting()), default=now)
        seen["at_work"] = [state.snapshot(items, now) for state, items in at_work]
        seen["waits_for"] = seen["waits_for"] or next(reasons, "")
        return seen


def _wake(queue: deque[asyncio.Future[None]]) -> None:
    while queue:
        future = queue.popleft()
        if not future.done():
            future.set_result(None)
            return


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
