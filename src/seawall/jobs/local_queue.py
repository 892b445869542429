"""An in-process job queue: the twin of the shared queue, without a store.

Promises:

- The same as `PriorityQueue`, by the same rules, for as long as the process lives.
- Threads and tasks of any event loop may use it concurrently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seawall import registry
from seawall._failures import split_report
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.events import DeadLetterDropped, JobDied
from seawall.events.bus import emit
from seawall.jobs.queue import JobQueue
from seawall.jobs.records import QueueCall
from seawall.jobs.wakeups import READY
from seawall.models.queue.state import Queue
from seawall.runtime.layers import Kind
from seawall.runtime.mutex import Mutex


class LocalQueue(JobQueue):
    """An in-memory job queue with priorities, leases and dead letters."""

    def __init__(
        self,
        name: str = "queue",
        *,
        head_start: float = 60.0,
        max_attempts: int = 5,
        max_size: int = 100_000,
        max_dead: int = 10_000,
        keep: float = 7 * 86_400.0,
        result_ttl: float = 3600.0,
        dedupe_window: float = 0.0,
        max_payload: int = 262_144,
        clock: Clock | None = None,
    ) -> None:
        """Hold up to `max_size` jobs that have not ended; see `PriorityQueue` for the rest."""
        super().__init__(
            name,
            head_start=head_start,
            max_attempts=max_attempts,
            max_size=max_size,
            max_dead=max_dead,
            keep=keep,
            result_ttl=result_ttl,
            dedupe_window=dedupe_window,
            max_payload=max_payload,
            clock=current_clock() if clock is None else check_clock(clock),
        )
        self._mutex = Mutex()
        self._queue = Queue(self.rules)
        survives_fork(self)
        registry.enter(self, "queue", self.name)

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return self._queue.waiting

    def __repr__(self) -> str:
        return f"LocalQueue({self.name!r})"

    def _answering(self, kind: Kind, ask: QueueCall) -> Callable[[], Any]:
        return lambda: self._perform(ask)

    def _undo(self, ask: QueueCall, lease: int) -> None:
        self._perform(ask)

    def _perform(self, ask: QueueCall) -> Any:
        queue = self._queue
        with self._mutex:
            answer = queue.perform(round(self.clock.now() * 1e6), ask.operation, *ask.args)
            stirred, queue.stirred = queue.stirred, False
            ended, queue.ended = queue.ended, []
            died, queue.died = queue.died, []
            dropped, queue.dropped = queue.dropped, []
        # Wake waiters and emit events only after the lock is released.
        if stirred:
            self._wakeups.ring(READY)
        for id_ in ended:
            self._wakeups.ring(id_)
        for id_, attempts, reason in died:
            cause, trace = split_report(reason)
            fields = {"job": id_, "attempts": attempts, "cause": cause, "traceback": trace}
            emit(JobDied, self.name, **fields)
        for id_ in dropped:
            emit(DeadLetterDropped, self.name, job=id_)
        return answer

    def _after_fork(self) -> None:
        """Start empty in a child process: the jobs belong to the parent's workers."""
        self._mutex = Mutex()
        self._queue = Queue(self.rules)
