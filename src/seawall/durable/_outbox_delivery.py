"""Giving a batch to a sink: in order within an aggregate, several aggregates at once.

What one event does to a sink is its own aggregate's trouble: a batch that fails as a whole is given
again one by one, to find the event that did it. A call that takes too long has failed: one that is
awaited is cancelled; one in a thread cannot be, and is left behind, a limited number of them.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from inspect import isasyncgen, isawaitable, iscoroutinefunction, isgenerator
from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall._expiry import Expiry, is_expiry, running_task
from seawall.durable._outbox_events import OutboxEvent
from seawall.durable._outbox_steps import Lane, Settled
from seawall.errors import Rejected, TimedOut
from seawall.models.outbox import Settings, after_failure, first_failure
from seawall.runtime.functions import kind_of

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


class Ended(NamedTuple):
    """What a round brought, and whether there may be more to do at once."""

    delivered: int
    goes_on: bool


class Holding:
    """Which aggregates are still ours, and until when for sure."""

    __slots__ = ("held", "until")

    def __init__(self, lanes: list[Lane], until: float) -> None:
        """Begin with all of `lanes`."""
        self.held = {lane.lane for lane in lanes}
        self.until = until


class Delivery:
    """A sink, and how it wants to be called."""

    def __init__(
        self, sink: Sink, *, name: str, batched: bool, concurrency: int, timeout: float | None
    ) -> None:
        """Call `sink(events)` if `batched`, else `sink(event)` for `concurrency` aggregates.

        Each call has `timeout` seconds. In the log it is the sink of the outbox `name`.
        """
        check.function("sink", sink)
        if not isinstance(sink, type) and "generator" in kind_of(sink):
            raise TypeError(
                f"sink={sink!r} has a yield in it, so that calling it does nothing: pass a function"
                " that delivers when it is called, or awaited"
            )
        self.sink = sink
        self.batched = check.flag("batched", batched)
        self.timeout = None if timeout is None else check.seconds("timeout", timeout)
        self._name = name
        self._concurrency = check.count("concurrency", concurrency, maximum=1_000)
        self._left_behind: list[_InThread] = []
        self._warned: set[str] = set()
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
        # As many as are ever at work, with those left behind: no call waits for another's thread.
        threads = ThreadPoolExecutor(3 * self._concurrency, "seawall-outbox")
        loop = asyncio.get_running_loop()

        async def in_thread(given: Any) -> Any:
            call = _InThread()
            try:
                return await loop.run_in_executor(
                    threads, copy_context().run, call, self.sink, given
                )
            except CancelledError as error:
                if is_expiry(error) and not call.over:
                    self._left_behind.append(call)
                raise

        try:
            await work(all_of_it, goes_on, in_thread)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def after_fork(self) -> None:
        """Know of no threads: a child process has none of its parent's."""
        self._left_behind.clear()

    async def _ask(self, sink: Sink, given: Any) -> Any:
        """Return what `sink` says when all of it is done; raise if that takes too long."""
        if self.timeout is None or (self._left_behind and not self._may_leave_more()):
            return await _done(sink, given)
        expiry = Expiry(running_task(), self.timeout)
        try:
            said = await _done(sink, given)
        except BaseException as error:
            if not expiry.disarm(error):
                raise
            told = f"the sink took longer than timeout={self.timeout:g} seconds"
            if not self._is_async:
                told += "; a plain function is not stopped by that, and may go on in its thread"
            raise TimedOut(told, seconds=self.timeout) from None
        expiry.disarm(None)
        return said

    def _may_leave_more(self) -> bool:
        self._left_behind = [call for call in self._left_behind if not call.over]
        if len(self._left_behind) < self._concurrency:
            return True
        self._warn_once(
            "%d calls of the sink hang in threads, which cannot be stopped: further ones are waited"
            " for without a limit; give the sink's own calls a timeout, or make it async",
            len(self._left_behind),
        )
        return False

    def _warn_once(self, message: str, *given: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.getLogger("seawall").warning("outbox %r: %s", self._name, message % given)

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
                said = await self._ask(sink, [event] if self.batched else event)
                if said is not None and not self.batched:
                    _refuse_what_has_not_run(said)
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
            failed = _failed(await self._ask(sink, events), events)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - written down
            _raise_if_cut_short(error)
            if isinstance(error, Rejected) or len(events) == 1:
                next(progress for progress in held if progress.lane.events).fail(error)
                return
            if isinstance(error, TimedOut):
                self._warn_once(
                    "%s with %d events, which are given again one by one; if so many need longer,"
                    " write a longer timeout= or a smaller batch=",
                    error,
                    len(events),
                )
        else:
            for progress in held:
                ids = [event.id for event in progress.lane.events]
                progress.delivered = first_failure(ids, failed)
                if progress.delivered < len(ids):
                    progress.fail(NOT_TAKEN)
            return
        for progress in held:
            await self._one_by_one(progress, goes_on, sink)
            # Who does not answer may answer none of them: the others have another round, together.
            if progress.refused is not None or isinstance(progress.error, TimeoutError):
                return


class _InThread:
    """One call in a thread, and whether it is over."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False

    def __call__(self, sink: Sink, given: Any) -> Any:
        try:
            return sink(given)
        except StopIteration as error:  # a future cannot hold it, and would never be done
            raise RuntimeError("the sink raised StopIteration") from error
        finally:
            self.over = True


async def _done(sink: Sink, given: Any) -> Any:
    """Return what `sink` says; if that is something to await, it is not done before that."""
    said = await sink(given)
    return await said if said is not None and isawaitable(said) else said


def _refuse_what_has_not_run(said: object) -> None:
    """Raise if a sink of single events returned a generator: its body has not run."""
    if isgenerator(said) or isasyncgen(said):
        raise TypeError(
            f"the sink returned {said!r}, which nobody iterates over: deliver before returning"
        )


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
