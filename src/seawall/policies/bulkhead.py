"""Bulkhead: a maximum number of concurrent calls; the rest wait briefly, or are refused.

Promises:
- Calls in flight never exceed the limit.
- A slot is held until the work really stops (even if the caller gave up on a thread).
- A waiter that is cancelled or times out takes no slot with it.
- Threads and tasks of any loop share the slots and wake each other.
- With `shed`, a queue that does not drain is shortened by its least important waiters.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.errors import BulkheadFull
from seawall.models.shedding.codel import QueueShed
from seawall.models.waiting import Order
from seawall.policies.slots import SlotGate, SlotPolicy
from seawall.runtime.layers import Host, Inline, Kind, Outcome
from seawall.runtime.policy import Bound, Mode, Policy, bindings_of
from seawall.runtime.slots import Slot
from seawall.runtime.stats import service_time
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.workers import WorkerPool

KNOWN_AFTER: Final = 3
"""Calls that each slot must have served before their duration is used to judge a queue."""


class Bulkhead(SlotPolicy):
    """Admit at most `limit` concurrent calls."""

    kind: ClassVar[str] = "bulkhead"

    def __init__(
        self,
        limit: int,
        *,
        max_wait: float = 0.0,
        max_waiting: int | None = None,
        order: Order = "fifo",
        shed: QueueShed | None = None,
        mode: Mode = "enforce",
    ) -> None:
        """Admit `limit` calls; others wait up to `max_wait` seconds, at most `max_waiting` of them.

        `max_waiting` defaults to `limit`: a longer queue only adds latency. `order` defines which
        waiter is served first: "fifo", "lifo", or "criticality" (see `Criticality`). `shed` defines
        when a queue has lasted too long and waiters are shed: `codel()` or `adaptive_lifo()`.
        """
        super().__init__(check.count("limit", limit), max_wait, max_waiting, order, shed, mode)

    def __repr__(self) -> str:
        return f"Bulkhead({self.limit}, {self._queue_repr()})"

    def _service_time(self, now: float) -> float | None:
        """Return the duration of a typical call, in the guard where it is longest, once known."""
        known = [bound.host.stats for bound in bindings_of(self)]
        typical = [stats.quantile(0.5, now) for stats in known]
        # The first calls to end are the shortest, so they are not representative.
        if sum(stats.succeeded for stats in known) < KNOWN_AFTER * self.limit:
            return None
        return max((seconds for seconds in typical if seconds is not None), default=None)

    def _bind(self, host: Host) -> _BulkheadGate:
        return _BulkheadGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        fresh = Bulkhead._changed(
            changes,
            limit=self.limit,
            max_wait=self.max_wait,
            max_waiting=self.slots.room,
            shed=self.shed,
            mode=self.mode,
        )
        self._take_over(fresh)
        self.slots.resize(fresh.limit, fresh.slots.room)


class _BulkheadGate(SlotGate):
    """The bulkhead inside one guard."""

    policy: Bulkhead
    refusal_type = BulkheadFull

    def __init__(self, policy: Bulkhead, host: Host) -> None:
        super().__init__(policy, host)
        self._typical = service_time(host)
        self.inline = Inline(
            names={"free": self.free, "slots": self.slots},
            enter=(
                "try:",
                "    {ticket} = {free}.pop()",
                "except IndexError_:",
                "    pass",
                "if {ticket} is ABSENT_:",
                "    {ticket} = {enter}(now_)",
            ),
            leave=(
                "if {left} is not None:",
                "    {free}.append({left})",
                "    if {slots}.attention:",
                "        {slots}.attend()",
            ),
        )

    def enter(self, now: float) -> object:
        """Take a free slot. While calls wait there is none: slots are handed over directly."""
        slot = self.slots.take()
        return self._enter_busy(now) if slot is None else slot

    def leave(self, ticket: object, outcome: Outcome, detail: object, now: float) -> None:
        if isinstance(ticket, Slot):
            self.slots.give_back(ticket)

    def typical(self) -> float | None:
        return self._typical(self.host.clock.now())


class ThreadBulkhead(Policy):
    """Run blocking calls in `workers` dedicated threads, so that they cannot use up all threads.

    Promises:
    - At most `workers` calls run and at most `max_queue` wait; threads and tasks share them.
    - Context variables and the deadline are passed along.
    - A call that its caller has given up keeps its thread until it ends, and is counted; a queued
      one is withdrawn.
    """

    kind: ClassVar[str] = "thread_bulkhead"

    def __init__(self, workers: int, *, max_queue: int | None = None) -> None:
        """Create `workers` threads with room for `max_queue` waiting calls (default: `workers`).

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
