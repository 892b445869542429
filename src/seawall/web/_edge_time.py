"""The deadlines of requests: most of them share one timer."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any

from seawall._expiry import Expiry, current_task, running_task
from seawall.clock import Clock
from seawall.runtime.mutex import survives_fork
from seawall.web.sending import Passage

if TYPE_CHECKING:
    import asyncio

    from seawall.policies._async_timeout import Lane


class Cutting:
    """Cuts requests off at their deadlines; most of them in one lane with one timer.

    Where all have the same time, the order of arrival is that of expiry; who has less than the one
    before has a timer of its own.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_afresh()
        survives_fork(self)

    def _begin_afresh(self) -> None:
        self.lane: Any = None
        self.thread = -1
        """That in which the lane's loop was seen to run; -1 where it is not worth to know.

        On 3.11 to ask for the current task takes two calls of the kernel's: see `_expiry`.
        """
        self.last = 0.0

    def find(self) -> tuple[Lane, asyncio.Task[Any]]:
        """Return the lane of the loop that runs, and the task to cut off."""
        task = current_task() or running_task()
        loop = task.get_loop()
        if self.lane is None or self.lane.loop is not loop:
            from seawall.policies._async_timeout import Lane

            self.lane = Lane(loop, self._clock, 0.0)
        if sys.version_info < (3, 12):
            self.thread = get_ident()
        return self.lane, task

    def arm(self, passage: Passage, at: float, clock: Clock) -> None:
        """Cut `passage` off at the instant `at` of `clock`."""
        lane, task = self.find()
        if clock is not self._clock or at < self.last or task in lane.pending:
            passage.cut = Expiry(task, at - clock.now())
            return
        self.last = lane.pending[task] = at
        if lane.timer is None:
            lane.arm(at)
        passage.cut = lane.pending, task, task.cancelling()

    def _after_fork(self) -> None:
        """Forget the loop of the parent process."""
        self._begin_afresh()
