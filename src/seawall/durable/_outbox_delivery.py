"""Giving a batch to a sink: in order within an aggregate, several aggregates at once.

What one event does to a sink is its own aggregate's trouble: a batch that fails as a whole is given
again one by one, to find the event that did it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import iscoroutinefunction
from typing import Any, Final

from seawall.durable._outbox_events import Event
from seawall.durable._outbox_steps import Lane
from seawall.errors import Rejected
from seawall.models.outbox import first_failure

Sink = Callable[[Any], Any]
NOT_TAKEN: Final = "the sink did not take it"


class Progress:
    """How far an aggregate of a batch has come; read also when its delivering was cut short."""

    __slots__ = ("delivered", "error", "lane", "refused")

    def __init__(self, lane: Lane) -> None:
        """Begin with nothing delivered."""
        self.lane = lane
        self.delivered = 0
        self.error: object = None
        """What the next event failed with; None if it did not fail."""
        self.refused: Rejected | None = None
        """A refusal by a guard: nothing was tried, and nothing counts as failed."""

    def fail(self, error: object) -> None:
        """Note why the next event is not delivered."""
        if isinstance(error, Rejected):
            self.refused = error
        else:
            self.error = error


class Delivery:
    """A sink, and how it wants to be called."""

    def __init__(self, sink: Sink, *, batched: bool, concurrency: int) -> None:
        """Call `sink(events)` if `batched`, else `sink(event)` for `concurrency` aggregates."""
        self.sink = sink
        self.batched = batched
        self._concurrency = concurrency
        called = sink if not hasattr(sink, "__call__") else sink.__call__  # noqa: B004
        self._is_async = iscoroutinefunction(sink) or iscoroutinefunction(called)

    async def deliver(self, all_of_it: list[Progress], goes_on: Callable[[int], bool]) -> None:
        """Deliver what is in there; `goes_on(lane)` is asked before each event or batch."""
        if self.batched:
            await self._together(all_of_it, goes_on)
        else:
            await self._each(all_of_it, goes_on)

    # One event at a time

    async def _each(self, all_of_it: list[Progress], goes_on: Callable[[int], bool]) -> None:
        import asyncio

        todo = iter(all_of_it)
        refused = False

        async def work() -> None:
            nonlocal refused
            for progress in todo:
                if refused:
                    return
                if self._is_async:
                    await self._aone_by_one(progress, goes_on)
                else:
                    await asyncio.to_thread(self._one_by_one, progress, goes_on)
                refused = refused or progress.refused is not None

        if self._concurrency == 1 or len(all_of_it) == 1:
            await work()
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(all_of_it))):
                group.create_task(work())

    async def _aone_by_one(self, progress: Progress, goes_on: Callable[[int], bool]) -> None:
        sink, number = self.sink, progress.lane.lane
        for event in progress.lane.events:
            if not goes_on(number):
                return
            try:
                await sink(event)
            except Exception as error:  # noqa: BLE001 - written down
                progress.fail(error)
                return
            progress.delivered += 1

    def _one_by_one(self, progress: Progress, goes_on: Callable[[int], bool]) -> None:
        sink, number = self.sink, progress.lane.lane
        for event in progress.lane.events:
            if not goes_on(number):
                return
            try:
                sink(event)
            except Exception as error:  # noqa: BLE001 - written down
                progress.fail(error)
                return
            progress.delivered += 1

    # A batch at a time

    async def _together(self, all_of_it: list[Progress], goes_on: Callable[[int], bool]) -> None:
        held = [progress for progress in all_of_it if goes_on(progress.lane.lane)]
        events = [event for progress in held for event in progress.lane.events]
        if not events:
            return
        try:
            failed = await self._call(events)
        except Rejected as refusal:
            held[0].fail(refusal)
            return
        except Exception as error:  # noqa: BLE001 - written down
            if len(events) == 1:
                held[0].fail(error)
                return
        else:
            for progress in held:
                ids = [event.id for event in progress.lane.events]
                progress.delivered = first_failure(ids, failed)
                if progress.delivered < len(ids):
                    progress.fail(NOT_TAKEN)
            return
        for progress in held:
            await self._singly(progress, goes_on)
            if progress.refused is not None:
                return

    async def _singly(self, progress: Progress, goes_on: Callable[[int], bool]) -> None:
        for event in progress.lane.events:
            if not goes_on(progress.lane.lane):
                return
            try:
                failed = await self._call([event])
            except Exception as error:  # noqa: BLE001 - written down
                progress.fail(error)
                return
            if event.id in failed:
                progress.fail(NOT_TAKEN)
                return
            progress.delivered += 1

    async def _call(self, events: list[Event]) -> frozenset[str]:
        """Return the ids of those that the sink says it did not take."""
        import asyncio

        if self._is_async:
            said = await self.sink(events)
        else:
            said = await asyncio.to_thread(self.sink, events)
        if said is None:
            return frozenset()
        if isinstance(said, (str, bytes)) or not isinstance(said, Iterable):
            raise TypeError(f"the sink returned {said!r}: return None, or the ids that failed")
        return frozenset(said)
