"""At most so many calls at once; the rest wait a little, in order, or are refused.

Promises: in flight never exceeds the limit; a slot is held until the work really stops (also when
its caller gave up on a thread); a waiter that is cancelled or late takes nothing with it; threads
and tasks of any loop share the slots and wake each other. With `shed`, a queue that does not drain
is shortened by those who matter least.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.errors import BulkheadFull
from seawall.models.shedding.codel import QueueShed
from seawall.models.waiting import Order
from seawall.policies.slots import SlotGate, SlotPolicy
from seawall.runtime.layers import Host, Inline, Kind, Outcome, Wait
from seawall.runtime.policy import Bound, Mode, Policy
from seawall.runtime.recent import service_time
from seawall.runtime.slots import Slot, SlotWaiter
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.workers import WorkerPool

_BEYOND = object()
"""The ticket of a call let in beyond the limit, where the bulkhead is not enforced."""

KNOWN_AFTER: Final = 3
"""Calls that each slot has to have served before a queue is measured by what calls take."""


class Bulkhead(SlotPolicy):
    """Admit at most `limit` calls at once."""

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
        """Let `limit` in; others wait up to `max_wait` seconds, at most `max_waiting` of them.

        `max_waiting` is `limit` unless given: a longer queue only adds latency. `order` says who
        is served first: "fifo", "lifo", or "criticality" (see `Criticality`). `shed` says when the
        queue has stood for too long and somebody has to go: `codel()` or `adaptive_lifo()`.
        """
        super().__init__(check.count("limit", limit), max_wait, max_waiting, order, shed, mode)

    def __repr__(self) -> str:
        return f"Bulkhead({self.limit}, {self._queue_repr()})"

    def _service_time(self, now: float) -> float | None:
        """Return what a typical call takes, in the guard where that is longest, once known."""
        known = [bound.host.stats for bound in self.bindings]
        typical = [stats.quantile(0.5, now) for stats in known]
        # The first to end are the shortest: they are no measure yet.
        if sum(stats.succeeded for stats in known) < KNOWN_AFTER * self.limit:
            return None
        return max((seconds for seconds in typical if seconds is not None), default=None)

    def _bind(self, host: Host) -> _BulkheadGate:
        return _BulkheadGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self._reject_unknown(changes, ("limit", "max_wait", "max_waiting", "shed", "mode"))
        fresh = Bulkhead(
            changes.get("limit", self.limit),
            max_wait=changes.get("max_wait", self.max_wait),
            max_waiting=changes.get("max_waiting", self.slots.room),
            shed=changes.get("shed", self.shed),
            mode=changes.get("mode", self.mode),
        )
        self._take_over(fresh)
        self.slots.resize(fresh.limit, fresh.slots.room)


class _BulkheadGate(SlotGate):
    """The bulkhead inside one guard."""

    policy: Bulkhead
    beyond = _BEYOND

    def __init__(self, policy: Bulkhead, host: Host) -> None:
        super().__init__(policy, host)
        self._slots = slots = policy.slots
        self._free = slots.free
        self._typical = service_time(host)
        self.inline = Inline(
            names={"free": slots.free, "slots": slots, "beyond": _BEYOND},
            enter=(
                "try:",
                "    {ticket} = {free}.pop()",
                "except IndexError_:",
                "    pass",
                "if {ticket} is ABSENT_:",
                "    {ticket} = {enter}(now_)",
            ),
            leave=(
                "if {left} is not {beyond}:",
                "    {free}.append({left})",
                "    if {slots}.attention:",
                "        {slots}.attend()",
            ),
        )

    def enter(self, now: float) -> object:
        """Take a free slot. While others wait there is none: it goes from hand to hand."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        return self._enter_busy(now)

    def leave(self, ticket: object, outcome: Outcome, detail: object, now: float) -> None:
        """Give the slot back, to whoever is next."""
        if isinstance(ticket, Slot):
            self._slots.give_back(ticket)

    def _enter_busy(self, now: float) -> object:
        policy = self.policy
        if policy.mode != "enforce" or not policy.max_wait:
            self.refuse(self.full("all are in use"))
            return _BEYOND
        raise Wait(self.queue(now))

    def waiter(self, now: float, max_wait: float, ticket: Any = None) -> SlotWaiter:
        return SlotWaiter(self._slots, self.host.clock, now, max_wait, self.turned_away)

    def typical(self) -> float | None:
        return self._typical(self.host.clock.now())

    def full(self, why: str) -> BulkheadFull:
        return BulkheadFull(self.no_slot(why), retry_after=self.typical())


class ThreadBulkhead(Policy):
    """Run blocking calls in `workers` threads of their own, so that they cannot use up everybody's.

    Promises: at most `workers` calls run and at most `max_queue` wait; threads and tasks share
    them; context variables and the deadline go along; a call that its caller has given up keeps its
    thread until it ends, and is counted; a queued one is withdrawn.
    """

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
