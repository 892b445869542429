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
    from seawall.web.edge.asgi_request import AsgiRequest


class _RequestExpiry(Expiry):
    """Timer of a single request."""

    __slots__ = ("_request",)

    def __init__(self, request: AsgiRequest, task: asyncio.Task[Any], delay: float) -> None:
        self._request = request
        super().__init__(task, delay)

    def _fire(self) -> None:
        self.fired = True
        self._request.cancel(EXPIRED)


class RequestTimers:
    """Timers that cancel requests at their deadlines; most requests share one queue with one timer.

    A request that expires before its predecessor gets its own timer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._after_fork()
        survives_fork(self)

    def _after_fork(self) -> None:
        """Start without queues: the loops of a parent process are not those of its child."""
        self._queues: dict[asyncio.AbstractEventLoop, ExpiryQueue] = {}
        """Queue of each serving loop, each with its own timer."""
        self.last_used: tuple[int, Any] = (-1, None)
        """The thread in which a loop was last seen to run, and the queue of that loop; -1 where the
        thread is not needed. One tuple, so that threads that switch in between cannot mix up the
        two. On 3.11, asking for the current task takes two system calls: see `_expiry`."""
        self.latest = 0.0
        """The latest deadline in any queue. An earlier one gets its own timer."""

    def find_queue(self) -> tuple[ExpiryQueue, asyncio.Task[Any]]:
        """Return the queue of the running loop, and the task to cancel."""
        task = current_task() or running_task()
        loop = task.get_loop()
        thread = get_ident() if sys.version_info < (3, 12) else -1
        queue = self.last_used[1]
        if queue is None or queue.loop is not loop:
            queue = self._queues.get(loop) or self._new_queue(loop)
        self.last_used = thread, queue
        return queue, task

    def _new_queue(self, loop: asyncio.AbstractEventLoop) -> ExpiryQueue:
        from seawall.policies.timeout.async_flow import ExpiryQueue

        for other in [known for known in list(self._queues) if known.is_closed()]:
            self._queues.pop(other, None)
        queue = self._queues[loop] = ExpiryQueue(loop, self._clock, 0.0)
        return queue

    def start(self, request: AsgiRequest, deadline: DeadlineScope, reserve: float | None) -> None:
        """Cancel the app of `request` at its own deadline; its calls get the time less a reserve.

        Most requests share a timer: they have the same timeout, so they expire in the order of
        arrival.
        """
        at, clock = deadline[0], deadline[1]
        thread, queue = self.last_used
        task = current_tasks.get(queue.loop) if thread == get_ident() else None
        if task is None:
            queue, task = self.find_queue()
        left = at - clock.now()
        if at < self.latest:
            request.timer = _RequestExpiry(request, task, left)
        else:
            self.latest = queue.pending[request] = at
            if queue.timer is None:
                queue.arm(at)
            request.timer = queue.pending, task.cancelling()
        request.task = task
        deadline[0] = at - reserve_of(left, reserve)

    def start_own(self, request: AsgiRequest, at: float, clock: Clock) -> None:
        """Cancel the app of `request` at the time `at` of `clock`."""
        _, request.task = self.find_queue()
        request.timer = _RequestExpiry(request, request.task, at - clock.now())
