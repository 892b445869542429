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
MayContinue = Callable[[int], bool]
"""Called before each event or batch: whether to continue with the aggregate of that number."""
NOT_TAKEN: Final = "the sink did not take it"
MOST_ABANDONED: Final = 16
"""Maximum number of abandoned calls; `concurrency` if that is higher."""
FULL_PAUSE: Final = 1.0
"""Seconds until the dispatcher tries again at that limit."""


@dataclass(slots=True)
class DeliveryProgress:
    """The progress of an aggregate in a batch; also valid if the delivery was cut short."""

    aggregate: ClaimedAggregate
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
    progress: DeliveryProgress, settings: OutboxSettings, rng: Callable[[], float], *, pause: int
) -> AggregateOutcome:
    """Return the outcome to store; an abandoned aggregate pauses for `pause` microseconds."""
    aggregate, delivered = progress.aggregate, progress.delivered
    least = pause if progress.abandoned else 0
    if progress.error is None:
        attempts = 0 if delivered else aggregate.attempts
        if not attempts and not least:
            return AggregateOutcome(aggregate, delivered, "done")
        # no attempt was made: the state does not change
        return AggregateOutcome(aggregate, delivered, "again", attempts, least)
    verdict = after_failure(settings, aggregate.attempts, progressed=delivered > 0, rng=rng)
    action, attempts, delay = verdict
    return AggregateOutcome(
        aggregate, delivered, action, attempts, max(delay, least), progress.error
    )


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

    async def deliver(self, batch: list[DeliveryProgress], may_continue: MayContinue) -> None:
        """Deliver the events of a batch."""
        if self._abandoned:  # calls of a closed event loop have ended
            going = [task for task in self._abandoned if not task.get_loop().is_closed()]
            self._abandoned = {task: self._abandoned[task] for task in going}
        await (self._deliver_in_one_call if self.batched else self._deliver_each)(
            batch, may_continue
        )

    def after_fork(self) -> None:
        """Forget calls: a child process has none of its parent's."""
        self._abandoned.clear()

    async def _call_sink(self, given: Any, progress: DeliveryProgress | None = None) -> Any:
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
            await call.wait()
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
            event = progress.aggregate.events[progress.delivered]
        self._abandoned[task] = event
        task.add_done_callback(lambda done: self._abandoned.pop(done, None))
        abandon(task)

    def _waits_for_earlier_call(self, progress: DeliveryProgress) -> bool:
        """Return whether an earlier call for this aggregate is still running: then it must wait.

        For the event of that call, this is another failure. Other events were not attempted.
        """
        if not self._abandoned or not progress.aggregate.events:
            return False
        event = progress.aggregate.events[0]
        aggregate = event[1:3]
        for hung in self._abandoned.values():
            if hung is not None and hung[1:3] == aggregate:
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

    async def _deliver_each(self, batch: list[DeliveryProgress], may_continue: MayContinue) -> None:
        todo = iter(batch)
        refused = False

        async def work() -> None:
            nonlocal refused
            for progress in todo:
                if refused:
                    return
                await self._deliver_aggregate(progress, may_continue)
                refused = refused or progress.refused is not None

        if self._concurrency == 1 or len(batch) == 1:
            await work()
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(batch))):
                group.create_task(work())

    async def _deliver_aggregate(
        self, progress: DeliveryProgress, may_continue: MayContinue
    ) -> None:
        if self._waits_for_earlier_call(progress):
            return
        for event in progress.aggregate.events:
            if not may_continue(progress.aggregate.lane):
                return
            try:
                result = await self._call_sink([event] if self.batched else event, progress)
                if not self.batched and (isgenerator(result) or isasyncgen(result)):
                    raise TypeError(  # noqa: TRY301 - its body has not run: the event has failed
                        f"the sink returned {result!r}, which nobody iterates over: deliver before"
                        " returning"
                    )
                failed = self.batched and _failed_ids(result, [event])
            except (Exception, CancelledError) as error:  # noqa: BLE001 - stored
                _raise_if_cancelled(error)
                progress.fail(error)
                return
            if failed:
                progress.fail(NOT_TAKEN)
                return
            progress.delivered += 1

    # A batch at a time

    async def _deliver_in_one_call(
        self, batch: list[DeliveryProgress], may_continue: MayContinue
    ) -> None:
        held = [
            progress
            for progress in batch
            if may_continue(progress.aggregate.lane) and not self._waits_for_earlier_call(progress)
        ]
        events = [event for progress in held for event in progress.aggregate.events]
        if not events:
            return
        try:
            only = held[0] if len(events) == 1 else None
            failed = _failed_ids(await self._call_sink(events, only), events)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - stored
            _raise_if_cancelled(error)
            if isinstance(error, Rejected) or len(events) == 1:
                next(progress for progress in held if progress.aggregate.events).fail(error)
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
                ids = [event.id for event in progress.aggregate.events]
                progress.delivered = first_failure(ids, failed)
                if progress.delivered < len(ids):
                    progress.fail(NOT_TAKEN)
            return
        for progress in held:
            await self._deliver_aggregate(progress, may_continue)
            # A sink that timed out may time out for all: leave the others to another round,
            # together.
            if progress.refused is not None or isinstance(progress.error, TimeoutError):
                return


class SinkCall:
    """One call of a sink in its own task, with a timeout."""

    __slots__ = ("_ended", "_loop", "_threads", "_timer", "expired", "in_thread", "task")

    def __init__(
        self, sink: Sink, given: Any, timeout: float | None, threads: IoPool | None
    ) -> None:
        """Start the call, in one of `threads` if given; after `timeout` it is `expired`."""
        self._loop = loop = asyncio.get_running_loop()
        self._threads = threads
        self._ended = loop.create_future()
        self._timer = None if timeout is None else loop.call_later(timeout, self.expire)
        self.expired = self.in_thread = False
        self.task = loop.create_task(self._run(sink, given))
        self.task.add_done_callback(self._wake)

    async def _run(self, sink: Sink, given: Any) -> Any:
        """Return the sink's result; if that is awaitable, await it as part of the call."""
        if self._threads is None:
            result = await sink(given)
        else:
            self.in_thread = True
            (result,) = await self._threads.arun(
                lambda: (sink(given),)
            )  # it may return a coroutine
            self.in_thread = False
        return await result if result is not None and isawaitable(result) else result

    async def wait(self) -> None:
        """Wait until the task is done or given up.

        If cancelled, it cancels the task; if the task still succeeds, that counts.
        """
        try:
            await self._ended
        except CancelledError:
            self._ended = self._loop.create_future()
            self._stop(None)
            await self._ended
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
        if not self._ended.done():
            self._ended.set_result(None)


def _raise_if_cancelled(error: BaseException) -> None:
    """Raise `error` again if this task was cancelled, rather than something in the sink."""
    task = asyncio.current_task()
    if isinstance(error, CancelledError) and (task is None or task.cancelling()):
        raise error


def _failed_ids(result: object, events: list[OutboxEvent]) -> frozenset[str]:
    """Return the ids of the events that the sink reports as failed."""
    if result is None:
        return frozenset()
    if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
        raise TypeError(f"the sink returned {result!r}: return None, or the ids that failed")
    failed = frozenset(result)
    if not failed <= {event.id for event in events}:
        raise TypeError("the sink returned what is no id of these events: return those that failed")
    return failed
