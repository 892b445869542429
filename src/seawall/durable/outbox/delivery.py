"""Delivery of a batch to a sink: in order within an aggregate, several aggregates at once.

An event affects only its own aggregate: a batch that fails as a whole is delivered again one by
one, to find the event that caused it.

Each call of the sink runs in its own task and has failed after `timeout` seconds, whatever it does.
An async call is cancelled then; if it does not end soon after that, it is abandoned. So is a call
in a thread, which cannot be stopped. An aggregate whose call was abandoned pauses for a lease, and
gets nothing more here until that call has ended. The number of abandoned calls is bounded: at the
limit, the sink gets nothing until one has ended.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import isasyncgen, isawaitable, iscoroutinefunction, isgenerator
from typing import Any, Final

from seawall import _checks as check
from seawall._expiry import EXPIRED
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.outbox.operations import AggregateOutcome, ClaimedAggregate
from seawall.errors import Rejected, TimedOut
from seawall.models.outbox import OutboxSettings, after_failure, first_failure
from seawall.resources.executors.executors import IoPool
from seawall.runtime.abandon import LEAVING, abandon
from seawall.runtime.functions import kind_of

Sink = Callable[[Any], Any]
GoesOn = Callable[[int], bool]
"""Predicate, called before each event or batch: whether to go on delivering an aggregate."""
NOT_TAKEN: Final = "the sink did not take it"
MOST_ABANDONED: Final = 16
"""Maximum number of abandoned calls; `concurrency` if that is higher."""
FULL_PAUSE: Final = 1.0
"""Seconds until the dispatcher tries again at that limit."""


@dataclass(slots=True)
class DeliveryProgress:
    """The progress of an aggregate in a batch; also valid if the delivery was cut short."""

    lane: ClaimedAggregate
    delivered: int = 0
    error: object = None
    """Why the next event failed; None if it did not fail."""
    refused: Rejected | None = None
    """A refusal by a guard: nothing was attempted, so nothing counts as failed."""
    abandoned: bool = False
    """Whether the call for the next event, or for one before it, may still be running."""

    def fail(self, error: object) -> None:
        """Note why the next event was not delivered."""
        if isinstance(error, Rejected):
            self.refused = error
        else:
            self.error = error


def outcome_of(
    progress: DeliveryProgress, settings: OutboxSettings, rng: Callable[[], float], *, rest: int
) -> AggregateOutcome:
    """Return the outcome to store; an abandoned aggregate pauses for `rest` microseconds."""
    lane, delivered = progress.lane, progress.delivered
    least = rest if progress.abandoned else 0
    if progress.error is None:
        attempts = 0 if delivered else lane.attempts
        if not attempts and not least:
            return AggregateOutcome(lane, delivered, "done")
        # no attempt was made: the state does not change
        return AggregateOutcome(lane, delivered, "again", attempts, least)
    verdict = after_failure(settings, lane.attempts, progressed=delivered > 0, rng=rng)
    action, attempts, delay = verdict
    return AggregateOutcome(lane, delivered, action, attempts, max(delay, least), progress.error)


class SinkDelivery:
    """A sink, and how to call it."""

    def __init__(
        self, sink: Sink, *, name: str, batched: bool, concurrency: int, timeout: float | None
    ) -> None:
        """Call `sink(events)` if `batched`, else `sink(event)` for `concurrency` aggregates.

        Each call has `timeout` seconds. `name` is the outbox, for the log.
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
        self._most_abandoned = max(MOST_ABANDONED, self._concurrency)
        self._abandoned: dict[asyncio.Task[Any], OutboxEvent | None] = {}
        """Abandoned calls, each with its event; None for a list of events."""
        self._warned: set[str] = set()
        called = sink if not hasattr(sink, "__call__") else sink.__call__  # noqa: B004
        self._is_async = iscoroutinefunction(sink) or iscoroutinefunction(called)
        self._threads: IoPool | None = None

    @property
    def abandoned(self) -> int:
        """Number of abandoned calls of the sink that are still running."""
        return len(self._abandoned)

    async def deliver(self, all_of_it: list[DeliveryProgress], goes_on: GoesOn) -> None:
        """Deliver the events of a batch."""
        if self._abandoned:  # calls of a closed event loop have ended
            going = [task for task in self._abandoned if not task.get_loop().is_closed()]
            self._abandoned = {task: self._abandoned[task] for task in going}
        await (self._together if self.batched else self._each)(all_of_it, goes_on)

    def after_fork(self) -> None:
        """Forget calls: a child process has none of its parent's."""
        self._abandoned.clear()

    async def _ask(self, given: Any, progress: DeliveryProgress | None = None) -> Any:
        """Return the sink's complete result; raise if it takes too long."""
        if len(self._abandoned) >= self._most_abandoned:
            raise self._too_many()
        if self._threads is None and not self._is_async:
            # A pool of its own: in a shared one, the lease renewal might have to wait for these
            # calls. It has a thread for every possible call, abandoned ones included, so no call
            # waits for a thread.
            size = 2 * self._concurrency + self._most_abandoned
            self._threads = IoPool(f"{self._name}-dispatcher", workers=size)
        call = SinkCall(self.sink, given, self.timeout, self._threads)
        task = call.task
        try:
            await call.ended()
        finally:
            if not task.done():
                self._abandon(task, progress)
        if task.done() and not (task.cancelled() and call.expired):
            return task.result()
        text = f"the sink took longer than timeout={self.timeout:g} seconds"
        if call.in_thread:
            text += "; a plain function is not stopped by that, and goes on in its thread"
        elif not task.done():
            text += "; it was cancelled, and goes on"
        raise TimedOut(text, seconds=self.timeout)

    def _abandon(self, task: asyncio.Task[Any], progress: DeliveryProgress | None) -> None:
        event = None
        if progress is not None:
            progress.abandoned = True
            event = progress.lane.events[progress.delivered]
        self._abandoned[task] = event
        task.add_done_callback(lambda over: self._abandoned.pop(over, None))
        abandon(task)

    def _rests(self, progress: DeliveryProgress) -> bool:
        """Return whether an earlier call for this aggregate is still running: then it must wait.

        For the event of that call, this is another failure. Other events were not attempted.
        """
        if not self._abandoned or not progress.lane.events:
            return False
        event = progress.lane.events[0]
        whose = event[1:3]
        for hung in self._abandoned.values():
            if hung is not None and hung[1:3] == whose:
                progress.abandoned = True
                if hung.id == event.id:
                    progress.fail(TimedOut("an earlier call of the sink with it has not ended yet"))
                return True
        return False

    def _too_many(self) -> Rejected:
        self._warn_once(
            "%d calls of the sink took longer than timeout= and have not ended: it is given nothing"
            " more until one of them has; give the sink's own calls a timeout",
            len(self._abandoned),
        )
        return Rejected(
            "too many calls of the sink have not ended",
            guard=self._name,
            policy="dispatcher",
            retry_after=FULL_PAUSE,
        )

    def _warn_once(self, message: str, *given: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.getLogger("seawall").warning("outbox %r: %s", self._name, message % given)

    # One event at a time

    async def _each(self, all_of_it: list[DeliveryProgress], goes_on: GoesOn) -> None:
        todo = iter(all_of_it)
        refused = False

        async def work() -> None:
            nonlocal refused
            for progress in todo:
                if refused:
                    return
                await self._one_by_one(progress, goes_on)
                refused = refused or progress.refused is not None

        if self._concurrency == 1 or len(all_of_it) == 1:
            await work()
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(all_of_it))):
                group.create_task(work())

    async def _one_by_one(self, progress: DeliveryProgress, goes_on: GoesOn) -> None:
        if self._rests(progress):
            return
        for event in progress.lane.events:
            if not goes_on(progress.lane.lane):
                return
            try:
                said = await self._ask([event] if self.batched else event, progress)
                if not self.batched and (isgenerator(said) or isasyncgen(said)):
                    raise TypeError(  # noqa: TRY301 - its body has not run: the event has failed
                        f"the sink returned {said!r}, which nobody iterates over: deliver before"
                        " returning"
                    )
                failed = self.batched and _failed(said, [event])
            except (Exception, CancelledError) as error:  # noqa: BLE001 - stored
                _raise_if_cut_short(error)
                progress.fail(error)
                return
            if failed:
                progress.fail(NOT_TAKEN)
                return
            progress.delivered += 1

    # A batch at a time

    async def _together(self, all_of_it: list[DeliveryProgress], goes_on: GoesOn) -> None:
        held = [
            progress
            for progress in all_of_it
            if goes_on(progress.lane.lane) and not self._rests(progress)
        ]
        events = [event for progress in held for event in progress.lane.events]
        if not events:
            return
        try:
            whose = held[0] if len(events) == 1 else None
            failed = _failed(await self._ask(events, whose), events)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - stored
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
            await self._one_by_one(progress, goes_on)
            # A sink that timed out may time out for all: leave the others to another round,
            # together.
            if progress.refused is not None or isinstance(progress.error, TimeoutError):
                return


class SinkCall:
    """One call of a sink in its own task, with a timeout."""

    __slots__ = ("_loop", "_over", "_threads", "_timer", "expired", "in_thread", "task")

    def __init__(
        self, sink: Sink, given: Any, timeout: float | None, threads: IoPool | None
    ) -> None:
        """Start the call, in one of `threads` if given; after `timeout` it is `expired`."""
        self._loop = loop = asyncio.get_running_loop()
        self._threads = threads
        self._over = loop.create_future()
        self._timer = None if timeout is None else loop.call_later(timeout, self.expire)
        self.expired = self.in_thread = False
        self.task = loop.create_task(self._run(sink, given))
        self.task.add_done_callback(self._wake)

    async def _run(self, sink: Sink, given: Any) -> Any:
        """Return the sink's result; if that is awaitable, await it as part of the call."""
        if self._threads is None:
            said = await sink(given)
        else:
            self.in_thread = True
            (said,) = await self._threads.arun(lambda: (sink(given),))  # it may return a coroutine
            self.in_thread = False
        return await said if said is not None and isawaitable(said) else said

    async def ended(self) -> None:
        """Wait until the task is done or given up.

        If cancelled, it cancels the task; if the task still succeeds, that counts.
        """
        try:
            await self._over
        except CancelledError:
            self._over = self._loop.create_future()
            self._stop(None)
            await self._over
            if not self.task.done() or self.task.cancelled():
                raise
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def expire(self) -> None:
        """Cancel the call because of its timeout; a guard in it recognises that by the message."""
        self.expired = True
        self._stop(EXPIRED)

    def _stop(self, message: str | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.in_thread:  # a thread cannot be stopped, and a cancelled task would not wait for it
            self._wake()
            return
        self.task.cancel(message)
        self._timer = self._loop.call_later(LEAVING, self._wake)

    def _wake(self, _task: object = None) -> None:
        if not self._over.done():
            self._over.set_result(None)


def _raise_if_cut_short(error: BaseException) -> None:
    """Raise `error` again if this task was cancelled, rather than something in the sink."""
    task = asyncio.current_task()
    if isinstance(error, CancelledError) and (task is None or task.cancelling()):
        raise error


def _failed(said: object, events: list[OutboxEvent]) -> frozenset[str]:
    """Return the ids of the events that the sink reports as failed."""
    if said is None:
        return frozenset()
    if isinstance(said, (str, bytes)) or not isinstance(said, Iterable):
        raise TypeError(f"the sink returned {said!r}: return None, or the ids that failed")
    failed = frozenset(said)
    if not failed <= {event.id for event in events}:
        raise TypeError("the sink returned what is no id of these events: return those that failed")
    return failed
