"""The deadlines of requests: most of them share one timer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seawall._expiry import current_task, running_task
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
        self._lane: Lane | None = None
        self._last = 0.0

    def arm(self, passage: Passage, at: float, clock: Clock) -> None:
        """Cut `passage` off at the instant `at` of `clock`."""
        task = current_task() or running_task()
        lane = self._lane
        if lane is None or lane.loop is not task.get_loop():
            lane = self._change_lane(task.get_loop())
        pending = lane.pending
        if clock is not self._clock or at < self._last or task in pending:
            passage.cut_after(at - clock.now(), task)
            return
        self._last = at
        pending[task] = at
        if lane.timer is None:
            lane.arm(at)
        passage.timed = True
        passage.lane = lane
        passage.task = task
        passage.cancelling = task.cancelling()

    def _change_lane(self, loop: asyncio.AbstractEventLoop) -> Lane:
        from seawall.policies._async_timeout import Lane

        lane = self._lane = Lane(loop, self._clock, 0.0)
        return lane

    def _after_fork(self) -> None:
        """Forget the loop of the parent process."""
        self._begin_afresh()
