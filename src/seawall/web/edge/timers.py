"""Deadlines of requests: most of them share one timer."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any

from seawall._expiry import EXPIRED, Expiry, current_task, current_tasks, running_task
from seawall._forks import survives_fork
from seawall.clock import Clock
from seawall.context import Scope as DeadlineScope
from seawall.context import reserve_of

if TYPE_CHECKING:
    import asyncio

    from seawall.policies.timeout.async_flow import ExpiryQueue
    from seawall.web.edge.passage import Passage


class _PassageExpiry(Expiry):
    """Timer of a single request."""

    __slots__ = ("_passage",)

    def __init__(self, passage: Passage, task: asyncio.Task[Any], delay: float) -> None:
        self._passage = passage
        super().__init__(task, delay)

    def _fire(self) -> None:
        self.fired = True
        self._passage.cancel(EXPIRED)


class RequestTimers:
    """Timers that cancel requests at their deadlines; most requests share one lane with one timer.

    A request that expires before its predecessor gets its own timer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._after_fork()
        survives_fork(self)

    def _after_fork(self) -> None:
        """Start without lanes: the loops of a parent process are not those of its child."""
        self._lanes: dict[asyncio.AbstractEventLoop, ExpiryQueue] = {}
        """Lane of each serving loop, each with its own timer."""
        self.known: tuple[int, Any] = (-1, None)
        """The lane used last, and the thread in which its loop was seen to run; -1 where the thread
        is not needed. One tuple, so that threads that switch in between cannot mix up the two. On
        3.11, asking for the current task takes two system calls: see `_expiry`."""
        self.last = 0.0

    def find(self) -> tuple[ExpiryQueue, asyncio.Task[Any]]:
        """Return the lane of the running loop, and the task to cancel."""
        task = current_task() or running_task()
        loop = task.get_loop()
        thread = get_ident() if sys.version_info < (3, 12) else -1
        lane = self.known[1]
        if lane is None or lane.loop is not loop:
            lane = self._lanes.get(loop) or self._new_lane(loop)
        self.known = thread, lane
        return lane, task

    def _new_lane(self, loop: asyncio.AbstractEventLoop) -> ExpiryQueue:
        from seawall.policies.timeout.async_flow import ExpiryQueue

        for other in [known for known in list(self._lanes) if known.is_closed()]:
            self._lanes.pop(other, None)
        lane = self._lanes[loop] = ExpiryQueue(loop, self._clock, 0.0)
        return lane

    def start(self, passage: Passage, deadline: DeadlineScope, reserve: float | None) -> None:
        """Cancel the app of `passage` at its own deadline; its calls get the time less a reserve.

        Most requests share a timer: they have the same timeout, so they expire in the order of
        arrival.
        """
        at, clock = deadline[0], deadline[1]
        thread, lane = self.known
        task = current_tasks.get(lane.loop) if thread == get_ident() else None
        if task is None:
            lane, task = self.find()
        left = at - clock.now()
        if at < self.last:
            passage.cut = _PassageExpiry(passage, task, left)
        else:
            self.last = lane.pending[passage] = at
            if lane.timer is None:
                lane.arm(at)
            passage.cut = lane.pending, task.cancelling()
        passage.task = task
        deadline[0] = at - reserve_of(left, reserve)

    def arm(self, passage: Passage, at: float, clock: Clock) -> None:
        """Cancel the app of `passage` at the time `at` of `clock`."""
        _, passage.task = self.find()
        passage.cut = _PassageExpiry(passage, passage.task, at - clock.now())
