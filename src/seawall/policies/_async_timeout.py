"""The timeout of async calls: one timer for each policy and loop, not one for each call.

With a constant limit the order of arrival is the order of expiry. So the calls under way stand in
a dict (which keeps that order), and one timer of the loop watches the first. Where the instant is
not "now + constant" (a nearer deadline, an adaptive limit) the call has a timer of its own.
"""

from __future__ import annotations

import asyncio
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any

from seawall._expiry import EXPIRED, Expiry, current_task, running_task, take_back
from seawall.context import deadline_var
from seawall.errors import DeadlineExceeded, TimedOut
from seawall.policies.timeout import AdaptiveSeconds
from seawall.runtime.call import Abandoned
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Flow, Inline, Outcome
from seawall.runtime.mutex import survives_fork

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.policies.timeout import TimeoutBound
    from seawall.runtime.call import Call

Task = asyncio.Task[Any]


class Lane:
    """The calls of one policy under way in one loop, oldest first, and the timer for them."""

    __slots__ = ("_armed_for", "_clock", "loop", "pending", "seconds", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, seconds: float) -> None:
        self.loop = loop
        self.seconds = seconds
        self._clock = clock
        self.pending: dict[Task, float] = {}
        self.timer: asyncio.TimerHandle | None = None

    def arm(self, at: float) -> None:
        self._armed_for = at
        self.timer = self.loop.call_later(max(0.0, at - self._clock.now()), self._fire)

    def _fire(self) -> None:
        self.timer = None
        # The loop says that the time has come, even if the guard's clock is another.
        now = max(self._clock.now(), self._armed_for)
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

    def __init__(self, task: Task, seconds: float, now: float) -> None:
        super().__init__(task, seconds)
        self.seconds = seconds
        self.at = now + seconds


Ticket = tuple[Task, int, Lane] | _OwnTimer


class _NoLoop:
    """Stands for the loop of the lane that was used last, while there is none."""

    _thread_id = -1


if sys.version_info >= (3, 12):
    _FIND_TASK = (
        "{task} = {current_task}()",
        "{lane} = {flow}.lane",
        "if held_ is None and {task} is not None and {task}.get_loop() is {lane}.loop:",
    )
    _TASKS: dict[str, Any] = {"current_task": current_task}
else:
    # As in `_expiry.current_task`, without its frame: on 3.11 the obvious way is slow.
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    _FIND_TASK = (
        "{lane} = {flow}.lane",
        "if held_ is None and {lane}.loop._thread_id == {get_ident}():",
        "    {task} = {tasks}.get({lane}.loop)",
        "else:",
        "    {task} = None",
        "if {task} is not None:",
    )
    _TASKS = {"get_ident": get_ident, "tasks": _current_tasks}


class AsyncTimeout(Flow):
    """Cancels the task when its time is over, and says so as `TimedOut`."""

    passes_refusals = True

    def __init__(self, bound: TimeoutBound) -> None:
        """Take the limit from `bound`."""
        self._bound = bound
        self._clock = bound.host.clock
        self.refresh()
        bound.watchers.append(self.refresh)
        survives_fork(self)
        self.inline = Inline(
            names={"flow": self, **_TASKS},
            enter=(
                *_FIND_TASK,
                "    {at} = now_ + {lane}.seconds",
                "    if {lane}.timer is not None:",
                "        if {lane}.pending.setdefault({task}, {at}) is {at}:",
                "            {ticket} = ({task}, {task}.cancelling(), {lane})",
                "if {ticket} is ABSENT_:",
                "    {ticket} = {enter}(now_)",
            ),
            leave=(
                "if {ticket}.__class__ is tuple_ and {ticket}[0] in {ticket}[2].pending:",
                "    del {ticket}[2].pending[{ticket}[0]]",
                "else:",
                "    {leave}({ticket}, OK_, value_, end_)",
            ),
        )

    def refresh(self) -> None:
        """Take up changed settings: another constant needs lanes of its own."""
        wanted = self._bound.policy.seconds
        self._constant = None if isinstance(wanted, AdaptiveSeconds) else wanted
        self._lanes: dict[asyncio.AbstractEventLoop, Lane] = {}
        self._own: dict[Task, float] = {}
        nowhere: Any = _NoLoop
        self.lane = Lane(nowhere, self._clock, 0.0)
        """The one that was used last: most services have one loop."""

    def _after_fork(self) -> None:
        """Forget the loops of the parent process."""
        self.refresh()

    def enter(self, now: float) -> Ticket:
        """Start the time of a call."""
        task = running_task()
        seconds = self._bound.seconds(now)
        held = deadline_var.get()
        left = seconds if held is None else held[0] - held[1].now()
        if self._constant is None or left < seconds:
            return self._own_timer(task, min(left, seconds), now)
        lane = self._lanes.get(task.get_loop())
        if lane is None or lane.seconds != seconds:
            lane = self._new_lane(task.get_loop(), seconds)
        if lane.pending.setdefault(task, at := now + seconds) is not at:
            return self._own_timer(task, seconds, now)  # the guarded function calls itself
        if lane.timer is None:
            lane.arm(at)
        if sys.version_info >= (3, 12) or hasattr(lane.loop, "_thread_id"):
            self.lane = lane
        return task, task.cancelling(), lane

    def until_of(self, task: Task) -> float | None:
        """Return the instant at which `task` will be cancelled from here, if it is under way."""
        lane = self._lanes.get(task.get_loop())
        return self._own.get(task) if lane is None else lane.pending.get(task, self._own.get(task))

    def _new_lane(self, loop: asyncio.AbstractEventLoop, seconds: float) -> Lane:
        for other in [known for known in list(self._lanes) if known.is_closed()]:
            self._lanes.pop(other, None)
        lane = self._lanes[loop] = Lane(loop, self._clock, seconds)
        return lane

    def _own_timer(self, task: Task, seconds: float, now: float) -> _OwnTimer:
        timer = _OwnTimer(task, seconds, now)
        self._own[task] = timer.at
        return timer

    def leave(self, ticket: Ticket, outcome: Outcome, detail: object, now: float) -> None:
        """Stop the time of a call that returned."""
        self._stop(ticket, None)

    def until(self, ticket: Ticket) -> float | None:
        """Return the instant at which the call will be cancelled; long ago, if it has been."""
        if isinstance(ticket, _OwnTimer):
            return ticket.at
        return ticket[2].pending.get(ticket[0], float("-inf"))

    def settle(self, call: Call, ticket: Ticket) -> None:
        """Stop the time; turn a cancellation of ours into the error that says so."""
        if not self._stop(ticket, call.error):
            return
        seconds = ticket.seconds if isinstance(ticket, _OwnTimer) else ticket[2].seconds
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

    def _stop(self, ticket: Ticket, error: BaseException | None) -> bool:
        """Stop the time; tell whether `error` is the cancellation that it ended with."""
        if isinstance(ticket, _OwnTimer):
            self._own.pop(ticket.task, None)
            return ticket.disarm(error)
        task, cancelling, lane = ticket
        return lane.pending.pop(task, None) is None and take_back(task, cancelling, error)
