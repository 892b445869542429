"""The timeout of async calls: one timer for each policy and loop, not one for each call.

With a constant limit the order of arrival is the order of expiry. So the calls under way stand in
a dict (which keeps that order), and one timer of the loop watches the first. Where the instant is
not "now + constant" (a nearer deadline, an adaptive limit) the call has a timer of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from seawall._expiry import EXPIRED, Expiry, current_task, running_task, take_back
from seawall.context import deadline_var
from seawall.errors import DeadlineExceeded, TimedOut
from seawall.policies.timeout import AdaptiveSeconds
from seawall.runtime.layers import Flow, Outcome

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.policies.timeout import TimeoutBound
    from seawall.runtime.call import Call

Task = asyncio.Task[Any]


class _Lane:
    """The calls of one policy under way in one loop, oldest first, and the timer for them."""

    __slots__ = ("_clock", "_loop", "pending", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self.pending: dict[Task, float] = {}
        self.timer: asyncio.TimerHandle | None = None

    def arm(self, at: float) -> None:
        self.timer = self._loop.call_later(max(0.0, at - self._clock.now()), self._fire)

    def _fire(self) -> None:
        self.timer = None
        now = self._clock.now()
        expired = []
        for task, at in self.pending.items():
            if at > now:
                self.arm(at)
                break
            expired.append(task)
        for task in expired:
            del self.pending[task]
            task.cancel(EXPIRED)


class _OwnTimer(Expiry):
    """A call that has a timer to itself."""

    __slots__ = ("at", "seconds")

    def __init__(self, task: Task, seconds: float, at: float) -> None:
        super().__init__(task, seconds)
        self.seconds = seconds
        self.at = at


Ticket = tuple[Task, int, dict[Task, float]] | _OwnTimer


class AsyncTimeout(Flow):
    """Cancels the task when its time is over, and says so as `TimedOut`."""

    def __init__(self, bound: TimeoutBound) -> None:
        """Take the limit from `bound`."""
        self._bound = bound
        self._clock = bound.host.clock
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}
        self.refresh()
        bound.watchers.append(self.refresh)

    def refresh(self) -> None:
        """Take up changed settings: another constant needs lanes of its own."""
        wanted = self._bound.policy.seconds
        self._constant = None if isinstance(wanted, AdaptiveSeconds) else wanted
        self._lanes = {}

    def enter(self, now: float) -> Ticket:
        """Start the time of a call."""
        task = current_task()
        constant = self._constant
        if task is None or constant is None or deadline_var.get() is not None:
            return self._enter_bounded(now)
        lane = self._lanes.get(task.get_loop())
        if lane is None:
            lane = self._new_lane(task.get_loop())
        pending = lane.pending
        at = now + constant
        if pending.setdefault(task, at) is not at:  # the guarded function calls itself
            return self._enter_bounded(now)
        if lane.timer is None:
            lane.arm(at)
        return task, task.cancelling(), pending

    def _new_lane(self, loop: asyncio.AbstractEventLoop) -> _Lane:
        for other in [known for known in list(self._lanes) if known.is_closed()]:
            self._lanes.pop(other, None)
        lane = self._lanes[loop] = _Lane(loop, self._clock)
        return lane

    def _enter_bounded(self, now: float) -> Ticket:
        seconds = self._bound.seconds(now)
        held = deadline_var.get()
        if held is not None:
            seconds = min(seconds, held[0] - held[1].now())
        return _OwnTimer(running_task(), seconds, now + seconds)

    def leave(self, ticket: Ticket, outcome: Outcome, detail: object, now: float) -> None:
        """Stop the time of a call that returned."""
        if ticket.__class__ is tuple:
            task, cancelling, pending = ticket
            try:
                del pending[task]
            except KeyError:  # it expired, and the function returned nevertheless
                take_back(task, cancelling, None)
        else:
            ticket.disarm(None)  # type: ignore[union-attr]

    def until(self, ticket: Ticket) -> float | None:
        """Return the instant at which the call will be cancelled."""
        if isinstance(ticket, _OwnTimer):
            return ticket.at
        return ticket[2].get(ticket[0])

    def settle(self, call: Call, ticket: Ticket) -> None:
        """Stop the time; turn a cancellation of ours into the error that says so."""
        if isinstance(ticket, _OwnTimer):
            ours = ticket.disarm(call.error)
        else:
            task, cancelling, pending = ticket
            ours = pending.pop(task, None) is None and take_back(task, cancelling, call.error)
        if ours:
            seconds = self._constant if self._constant is not None else 0.0
            if isinstance(ticket, _OwnTimer):
                seconds = ticket.seconds
            error: TimedOut | DeadlineExceeded = self._bound.error(seconds, began=call.reached)
            error.__cause__ = call.error
            call.error = error
            self._bound.expired(seconds)
