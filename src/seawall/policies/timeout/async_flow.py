"""Timeout of async calls: one timer for each policy and loop, not one for each call.

With a constant limit the order of arrival is the order of expiry. So the running calls are in a
dict (which keeps that order), and one timer of the loop watches the first. Where the end is not
"now + constant" (a nearer deadline that is not enforced elsewhere, an adaptive limit) the call has
a timer of its own.

The limit is the deadline of the inner layers, until the call ends. The ticket of a call is the
scope of that deadline, with the task's count of cancellations and the timer or lane that watches
it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any
from weakref import ref

from seawall._expiry import EXPIRED, Expiry, running_task, take_back
from seawall._forks import survives_fork
from seawall.context import Scope, deadline_scope, deadline_var, nearer_scope
from seawall.errors import DeadlineExceeded, TimedOut
from seawall.policies.timeout.fast_path import join_queue
from seawall.policies.timeout.policy import AdaptiveSeconds, refused_for_time
from seawall.runtime.call import Abandoned
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Flow, Host, Outcome

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.policies.timeout.policy import TimeoutBound
    from seawall.runtime.call import Call

Task = asyncio.Task[Any]


class ExpiryQueue:
    """The running calls of one policy in one loop, oldest first, and their timer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        seconds: float,
        owner: AsyncTimeout | None = None,
    ) -> None:
        self.loop = loop
        self.seconds = seconds
        self._clock = clock
        # Ended scopes stay in contexts and refer to this: they must not keep a guard alive.
        self._owner = None if owner is None else ref(owner)
        self.pending: dict[Any, float] = {}
        """Tasks, or what is cancelled like one, and when each runs out of time."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def host(self) -> Host | None:
        """The guard of the calls in this lane, while it exists."""
        owner = None if self._owner is None else self._owner()
        return None if owner is None else owner.host

    def has_fired(self, task: Task) -> bool:
        """Return whether the call in `task` ran out of time, and was cancelled."""
        return task not in self.pending

    def arm(self, at: float) -> None:
        """Set the timer for the time `at`."""
        self._armed_for = at
        self.timer = self.loop.call_later(max(0.0, at - self._clock.now()), self._fire)

    def _fire(self) -> None:
        self.timer = None
        # The loop's timer decides, even if the guard uses a different clock.
        now = max(self._clock.now(), self._armed_for)
        expired = []
        for holder, at in self.pending.items():
            if at > now:
                self.arm(at)
                break
            expired.append(holder)
        for holder in expired:
            due = self.pending.pop(holder, None)
            if due is not None:
                self._expire(holder, due)
        owner = None if self._owner is None else self._owner()
        if self.timer is None and owner is not None:
            owner.rests(self)

    def _expire(self, holder: Any, due: float) -> None:
        holder.cancel(EXPIRED)


class _OwnTimer(Expiry):
    """The timer of a single call."""

    __slots__ = ("host", "seconds")

    def __init__(self, task: Task, seconds: float, host: Host, left: float | None = None) -> None:
        """Cancel `task` after `seconds`, or after the remaining `left` of them."""
        super().__init__(task, seconds if left is None else left)
        self.seconds = seconds
        self.host = host


def _is_elsewhere(holder: object, task: Task) -> bool:
    """Return whether cancelling `holder` cannot reach `task`, because it is in another loop."""
    return isinstance(holder, asyncio.Task) and holder.get_loop() is not task.get_loop()


class _NoLoop:
    """Placeholder for the loop of the last used lane, while there is none."""

    _thread_id = -1


class AsyncTimeout(Flow):
    """Cancels the task when its time is over, and raises `TimedOut`."""

    passes_refusals = True

    def __init__(self, bound: TimeoutBound) -> None:
        self._bound = bound
        self.host = bound.host
        self._clock = bound.host.clock
        self.refresh()
        survives_fork(self)
        self.inline = join_queue(self, self._clock)

    def refresh(self) -> None:
        """Apply changed settings: another constant needs new lanes."""
        wanted = self._bound.policy.seconds
        self._constant = None if isinstance(wanted, AdaptiveSeconds) else wanted
        self._lanes: dict[asyncio.AbstractEventLoop, ExpiryQueue] = {}
        nowhere: Any = _NoLoop
        self._nowhere = self.lane = ExpiryQueue(nowhere, self._clock, 0.0)
        """The last used lane, if its timer runs: most services have one loop."""

    def rests(self, lane: ExpiryQueue) -> None:
        """Make the next call in `lane` arm its timer: no call is pending in it."""
        if self.lane is lane:
            self.lane = self._nowhere

    def _after_fork(self) -> None:
        """Forget the loops of the parent process."""
        self.refresh()

    def enter(self, now: float) -> Scope:
        """Start the time of a call, and set its deadline."""
        task = running_task()
        seconds = self._bound.seconds(now)
        held = deadline_scope()
        at = now + seconds
        ticket = nearer_scope(at, self._clock, held)
        ticket[3] = task
        if held is not None and (held[3] is True or _is_elsewhere(held[3], task)):
            # In this case no outer layer ends the call.
            seconds = min(seconds, held[0] - held[1].now())
        lane = None if self._constant is None else self._lane(task.get_loop())
        if lane is None or lane.seconds != seconds or lane.pending.setdefault(task, at) is not at:
            # The last condition is a guarded function that calls itself.
            ticket += (task.cancelling(), _OwnTimer(task, seconds, self.host))
        else:
            if lane.timer is None:
                lane.arm(at)
            if sys.version_info >= (3, 12) or hasattr(lane.loop, "_thread_id"):
                self.lane = lane
            ticket += (task.cancelling(), lane)
        deadline_var.set(ticket)
        return ticket

    def _lane(self, loop: asyncio.AbstractEventLoop) -> ExpiryQueue:
        lane = self._lanes.get(loop)
        if lane is None:
            for other in [known for known in list(self._lanes) if known.is_closed()]:
                self._lanes.pop(other, None)
            seconds = self._constant or 0.0
            lane = self._lanes[loop] = ExpiryQueue(loop, self._clock, seconds, self)
        return lane

    def leave(self, ticket: Scope, outcome: Outcome, detail: object, now: float) -> None:
        """Stop the time of a call that returned."""
        self._stop(ticket, None)

    def settle(self, call: Call, ticket: Scope) -> None:
        """Stop the time, and turn our own cancellation into the timeout error."""
        # A busy loop can be too late to cancel the task: then an inner guard noticed it first.
        seconds: float = ticket[5].seconds
        if not self._stop(ticket, call.error) and not refused_for_time(call, ticket):
            return
        error: TimedOut | DeadlineExceeded = self._bound.error(seconds, began=call.reached)
        error.__cause__ = call.error
        left_running = None if call.error is None else Abandoned.of(call.error)
        if left_running is not None:
            left_running.attach(error)
        call.error = error
        if call.reached:
            self._bound.expired(seconds)
        else:
            count_refusal(call.host, "timeout", error.reason)

    def suspend(self, ticket: Scope) -> None:
        """Cancel nothing until `resume`; the time continues."""
        task, watch = ticket[3], ticket[5]
        if watch.has_fired(task):
            return
        if isinstance(watch, ExpiryQueue):
            del watch.pending[task]
            ticket[5] = watch = self._own_timer(ticket, watch.seconds)
        watch.stop()

    def resume(self, ticket: Scope) -> None:
        """Cancel the task when the time is over, or immediately if it already is."""
        watch = ticket[5]
        if not watch.has_fired(ticket[3]):
            ticket[5] = timer = self._own_timer(ticket, watch.seconds)
            if ticket[1].now() >= ticket[0]:
                timer.fire_now()

    def _own_timer(self, ticket: Scope, seconds: float) -> _OwnTimer:
        left = ticket[0] - ticket[1].now()
        return _OwnTimer(ticket[3], seconds, self.host, left)

    def _stop(self, ticket: Scope, error: BaseException | None) -> bool:
        """Stop the time. Return whether `error` is the cancellation that ended it."""
        _at, _clock, _outer, task, cancelling, watch = ticket
        if task is None:
            return False  # already stopped, and a signal came after that
        if isinstance(watch, _OwnTimer):
            fired = watch.disarm(error)
            ticket[3] = ticket[5] = None  # drop the references: it has no effect any more
            return fired
        try:
            fired = watch.pending.pop(task, None) is None
        finally:
            ticket[3] = ticket[5] = None  # also if a signal interrupted the line above
        return fired and take_back(task, cancelling, error)
