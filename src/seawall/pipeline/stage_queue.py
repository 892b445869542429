"""The bounded queue in front of the workers of a stage, with a queue for each key.

Promises:
- It never holds more items than its capacity; callers with more of them wait in FIFO order.
- Items with the same key are handed to workers one by one, in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Hashable, Iterator
from typing import TYPE_CHECKING

from seawall.pipeline.counts import StageCounts
from seawall.pipeline.item import Item
from seawall.pipeline.stage import Stage

if TYPE_CHECKING:
    from seawall.pipeline.run import PipelineRun

Waiters = deque[asyncio.Future[None]]


class StageQueue:
    """Items that wait for the workers of one stage."""

    def __init__(self, run: PipelineRun, stage: Stage, counts: StageCounts) -> None:
        self.name = stage.name
        self.ready: deque[Item] = deque()
        """Items that any worker may begin with."""
        self.blocked: Waiters = deque()
        """Waiters for room."""
        self._run = run
        self._now = run.now
        self._counts = counts
        self._key_of = stage.ordered_by
        self._capacity = stage.capacity
        self._by_key: dict[Hashable, deque[Item]] = {}
        """For each key that is at work, the items that wait for it."""
        self._waiting_by_key = 0
        self._idle: Waiters = deque()

    @property
    def held(self) -> int:
        """Number of items that wait here."""
        return len(self.ready) + self._waiting_by_key

    @property
    def free(self) -> int:
        """Number of items that have room."""
        return self._capacity - self.held

    @property
    def room(self) -> int:
        """Number of items that `take_many` takes; 0 where they must be brought one by one."""
        if self.blocked or self._key_of is not None:
            return 0
        return self._capacity - len(self.ready)

    # Bringing items

    def take(self, item: Item) -> Awaitable[None] | None:
        """Put the item into the queue, or return what waits until there is room."""
        if self.blocked or self.held >= self._capacity:
            return self._wait_for_room(item)
        return self._add(item)

    def take_many(self, items: list[Item]) -> None:
        """Put items into the queue, at most `room` of them."""
        name, now = self.name, self._now()
        for item in items:
            item.stage = name
            item.entered_at = now
            item.attempts = 0
        self.ready.extend(items)
        for _ in range(min(len(items), len(self._idle))):
            _wake(self._idle)

    def _add(self, item: Item) -> Awaitable[None] | None:
        item.stage = self.name
        item.entered_at = self._now()
        item.attempts = 0
        if self._key_of is not None:
            try:
                item.key = self._key_of(item.value)
                waiting = self._by_key.get(item.key)
            except Exception as error:  # noqa: BLE001 - of the user's function, or an unhashable key
                self._counts.add_failure(error)
                return self._run.bury(item, self.name, self._counts, error)
            if waiting is not None:
                waiting.append(item)
                self._waiting_by_key += 1
                return None
            self._by_key[item.key] = deque()
        self.ready.append(item)
        _wake(self._idle)
        return None

    async def _wait_for_room(self, item: Item) -> None:
        await self._wait(self.blocked)
        while self.held >= self._capacity:
            await self._wait(self.blocked, first=True)
        pending = self._add(item)
        if pending is not None:
            await pending

    # Taking items out

    async def wait_for_items(self, until: float | None = None) -> None:
        """Wait until there may be items to begin with, or until the instant `until`."""
        await self._wait(self._idle, until)

    def wake_blocked(self) -> None:
        """Wake those waiting for room once half is free: cheaper than waking them one by one."""
        held = self.held
        if held <= self._capacity // 2:
            for _ in range(self._capacity - held):
                _wake(self.blocked)

    def release(self, key: Hashable) -> None:
        """Let the next item of the same key begin."""
        if self._key_of is None:
            return
        waiting = self._by_key[key]
        if waiting:
            self.ready.append(waiting.popleft())
            self._waiting_by_key -= 1
            _wake(self._idle)
        else:
            del self._by_key[key]

    def wake_all(self) -> None:
        """Wake all idle workers: there may be nothing more to wait for."""
        while self._idle:
            _wake(self._idle)

    async def _wait(
        self, queue: Waiters, until: float | None = None, *, first: bool = False
    ) -> None:
        """Wait to be woken, or until `until`; if cancelled, pass the wake-up on."""
        loop = self._run.loop
        future: asyncio.Future[None] = loop.create_future()
        if first:
            queue.appendleft(future)
        else:
            queue.append(future)
        timer = None if until is None else loop.call_at(until, _resolve, future)
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

    def waiting(self) -> Iterator[Item]:
        """Return the items that no worker has yet; from any thread."""
        yield from list(self.ready)
        for waiting in list(self._by_key.values()):
            yield from list(waiting)


def _wake(queue: Waiters) -> None:
    while queue:
        future = queue.popleft()
        if not future.done():
            future.set_result(None)
            return


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
