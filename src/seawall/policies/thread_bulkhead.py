"""Blocking calls in a few threads of their own, so that they cannot use up everybody's.

Promises: at most `workers` calls run and at most `max_queue` wait; both kinds of caller, threads
and tasks, share them; context variables and deadline go along; a call that nobody waits for any
more keeps its thread until it really ends, and is counted; a queued one is withdrawn.
"""

from __future__ import annotations

from typing import Any, ClassVar

from seawall import _checks as check
from seawall.runtime.layers import Host, Kind
from seawall.runtime.policy import Bound, Policy
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.workers import WorkerPool


class ThreadBulkhead(Policy):
    """Run what is inside in one of `workers` threads."""

    kind: ClassVar[str] = "thread_bulkhead"

    def __init__(self, workers: int, *, max_queue: int | None = None) -> None:
        """Have `workers` threads and room for `max_queue` calls to wait; `workers` if not given.

        The guarded function is a plain one: `guard.call(read, path)` blocks the calling thread,
        `await guard.acall(read, path)` only the calling task.
        """
        super().__init__()
        size = check.count("workers", workers)
        queue = size if max_queue is None else check.count("max_queue", max_queue, minimum=0)
        self.pool = WorkerPool(size, queue, "bulkhead")

    def __repr__(self) -> str:
        return f"ThreadBulkhead({self.pool.size}, max_queue={self.pool.queue})"

    def _at_rest(self, now: float) -> bool:
        return not self.pool.in_use and not self.pool.queued

    def _bind(self, host: Host) -> _ThreadBulkheadBound:
        return _ThreadBulkheadBound(self, host)


class _ThreadBulkheadBound(Bound):
    """The pool inside one guard."""

    policy: ThreadBulkhead

    def __init__(self, policy: ThreadBulkhead, host: Host) -> None:
        super().__init__(policy, host)
        self._driver = ThreadDriver(host, policy.pool, policy.kind)

    def layer(self, kind: Kind) -> ThreadDriver:
        return self._driver

    def snapshot(self, now: float) -> dict[str, Any]:
        pool = self.policy.pool
        return {
            "workers": pool.size,
            "in_flight": pool.in_use,
            "waiting": pool.queued,
            "abandoned": pool.abandoned,
            "rejected": self._driver.refused,
        }
