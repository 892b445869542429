"""Giving a batch to a sink: in order within an aggregate, several aggregates at once.

What one event does to a sink is its own aggregate's trouble: a batch that fails as a whole is given
again one by one, to find the event that did it.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Final

from seawall.durable._outbox_events import OutboxEvent
from seawall.durable._outbox_steps import Lane, Settled
from seawall.errors import Rejected
from seawall.models.outbox import Settings, after_failure, first_failure

Sink = Callable[[Any], Any]
GoesOn = Callable[[int], bool]
"""Asked before each event or batch whether an aggregate is still to be delivered."""
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


def judged(progress: Progress, settings: Settings, rng: Callable[[], float]) -> Settled:
    """Return what is to be written down of it."""
    lane, delivered = progress.lane, progress.delivered
    if progress.error is None:
        if delivered or not lane.attempts:
            return Settled(lane, delivered, "done")
        return Settled(lane, 0, "again", lane.attempts)  # nothing was tried: as it was
    verdict = after_failure(settings, lane.attempts, progressed=delivered > 0, rng=rng)
    return Settled(lane, delivered, *verdict, progress.error)


class Holding:
    """Which aggregates are still ours, and until when for sure."""

    __slots__ = ("held", "until")

    def __init__(self, lanes: list[Lane], until: float) -> None:
        """Begin with all of `lanes`."""
        self.held = {lane.lane for lane in lanes}
        self.until = until


class Delivery:
    """A sink, and how it wants to be called."""

    def __init__(self, sink: Sink, *, batched: bool, concurrency: int) -> None:
        """Call `sink(events)` if `batched`, else `sink(event)` for `concurrency` aggregates."""
        self.sink = sink
        self.batched = batched
        self._concurrency = concurrency
        called = sink if not hasattr(sink, "__call__") else sink.__call__  # noqa: B004
        self._is_async = iscoroutinefunction(sink) or iscoroutinefunction(called)

    async def deliver(self, all_of_it: list[Progress], goes_on: GoesOn) -> None:
        """Deliver what is in there."""
        work = self._together if self.batched else self._each
        if self._is_async:
            await work(all_of_it, goes_on, self.sink)
            return
        import asyncio

        # Threads of its own: in those that all share, who prolongs the lease might wait for these.
        threads = ThreadPoolExecutor(self._concurrency, "seawall-outbox")
        loop = asyncio.get_running_loop()

        async def in_thread(given: Any) -> Any:
            said = await loop.run_in_executor(threads, copy_context().run, self._called, given)
            # A plain function may return what an async one gave it: it is not done before that.
            return await said if isawaitable(said) else said

        try:
            await work(all_of_it, goes_on, in_thread)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _called(self, given: Any) -> Any:
        try:
            return self.sink(given)
        except StopIteration as error:  # a future cannot hold it, and would never be done
            raise RuntimeError("the sink raised StopIteration") from error

    # One event at a time

    async def _each(self, all_of_it: list[Progress], goes_on: GoesOn, sink: Sink) -> None:
        import asyncio

        todo = iter(all_of_it)
        refused = False

        async def work() -> None:
            nonlocal refused
            for progress in todo:
                if refused:
                    return
                await self._one_by_one(progress, goes_on, sink)
                refused = refused or progress.refused is not None

        if self._concurrency == 1 or len(all_of_it) == 1:
            await work()
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(all_of_it))):
                group.create_task(work())

    async def _one_by_one(self, progress: Progress, goes_on: GoesOn, sink: Sink) -> None:
        for event in progress.lane.events:
            if not goes_on(progress.lane.lane):
                return
            try:
                said = await sink([event] if self.batched else event)
                failed = self.batched and _failed(said, [event])
            except (Exception, CancelledError) as error:  # noqa: BLE001 - written down
                _raise_if_cut_short(error)
                progress.fail(error)
                return
            if failed:
                progress.fail(NOT_TAKEN)
                return
            progress.delivered += 1

    # A batch at a time

    async def _together(self, all_of_it: list[Progress], goes_on: GoesOn, sink: Sink) -> None:
        held = [progress for progress in all_of_it if goes_on(progress.lane.lane)]
        events = [event for progress in held for event in progress.lane.events]
        if not events:
            return
        try:
            failed = _failed(await sink(events), events)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - written down
            _raise_if_cut_short(error)
            if isinstance(error, Rejected) or len(events) == 1:
                next(progress for progress in held if progress.lane.events).fail(error)
                return
        else:
            for progress in held:
                ids = [event.id for event in progress.lane.events]
                progress.delivered = first_failure(ids, failed)
                if progress.delivered < len(ids):
                    progress.fail(NOT_TAKEN)
            return
        for progress in held:
            await self._one_by_one(progress, goes_on, sink)
            if progress.refused is not None:
                return


def _raise_if_cut_short(error: BaseException) -> None:
    """Raise `error` again if it is this task that was cancelled, and not something in the sink."""
    import asyncio

    task = asyncio.current_task()
    if isinstance(error, CancelledError) and (task is None or task.cancelling()):
        raise error


def _failed(said: object, events: list[OutboxEvent]) -> frozenset[str]:
    """Return the ids of those that the sink says it did not take."""
    if said is None:
        return frozenset()
    if isinstance(said, (str, bytes)) or not isinstance(said, Iterable):
        raise TypeError(f"the sink returned {said!r}: return None, or the ids that failed")
    failed = frozenset(said)
    if not failed <= {event.id for event in events}:
        raise TypeError("the sink returned what is no id of these events: return those that failed")
    return failed
