"""At most so many calls at once; the rest wait a little, in order, or are refused.

Promises: in flight never exceeds the limit; a slot is held until the work really stops (also when
its caller gave up on a thread); a waiter that is cancelled or late takes nothing with it; threads
and tasks of any loop share the slots and wake each other. With `shed`, a queue that does not drain
is shortened by those who matter least.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.errors import BulkheadFull, DeadlineExceeded, Overloaded, Rejected
from seawall.models.codel import QueueShed
from seawall.models.waiting import ORDERS, Order
from seawall.runtime.layers import Host, Inline, Outcome, Wait
from seawall.runtime.policy import GateBound, GatePolicy, Mode
from seawall.runtime.recent import service_time
from seawall.runtime.slots import Refusal, Slots, SlotWaiter

_BEYOND = object()
"""The ticket of a call let in beyond the limit, where the bulkhead is not enforced."""

KNOWN_AFTER: Final = 3
"""Calls that each slot has to have served before a queue is measured by what calls take."""


class Bulkhead(GatePolicy):
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
        super().__init__(mode)
        self.limit = check.count("limit", limit)
        self.max_wait = check.seconds("max_wait", max_wait, zero=True, infinite=True)
        room = None if max_waiting is None else check.count("max_waiting", max_waiting)
        self.shed = check_shed(shed, self.max_wait)
        self.slots = Slots(
            self.limit,
            order=check.choice("order", order, ORDERS),
            room=room,
            discipline=None if shed is None else shed.start(self._service_time),
            owner=self,
        )

    def __repr__(self) -> str:
        order = self.slots.queue.order
        shed = "" if self.shed is None else f", shed={self.shed!r}"
        return f"Bulkhead({self.limit}, max_wait={self.max_wait:g}, order={order!r}{shed})"

    @property
    def in_flight(self) -> int:
        """How many calls hold a slot now."""
        return self.slots.in_use

    @property
    def waiting(self) -> int:
        """How many calls wait for a slot now."""
        return self.slots.waiting

    def queue_wait(self, now: float) -> float:
        """Return for how long the longest waiting has waited by now."""
        return self.slots.queue_wait(now)

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
        self.mode, self.max_wait, self.limit = fresh.mode, fresh.max_wait, fresh.limit
        if "shed" in changes:
            self.shed = fresh.shed
            state = None if self.shed is None else self.shed.start(self._service_time)
            self.slots.discipline = state
        self.slots.resize(fresh.limit, fresh.slots.room)


def check_shed(shed: QueueShed | None, max_wait: float) -> QueueShed | None:
    """Return `shed` if it is one and somebody can wait, or raise."""
    if shed is None:
        return None
    if isinstance(shed, type) or not hasattr(shed, "start"):
        raise TypeError(f"shed={shed!r}: write codel() or adaptive_lifo()")
    if not max_wait:
        raise ValueError(f"shed={shed!r}: only who waits can be shed; write max_wait=... too")
    return shed


class _BulkheadGate(GateBound):
    """The bulkhead inside one guard."""

    policy: Bulkhead
    until_stopped = True

    def __init__(self, policy: Bulkhead, host: Host) -> None:
        super().__init__(policy, host)
        self._slots = slots = policy.slots
        self._free = slots.free
        self._typical = service_time(host)
        self.inline = Inline(
            names={"free": slots.free, "slots": slots},
            enter=(
                "try:",
                "    {ticket} = {free}.pop()",
                "except IndexError_:",
                "    pass",
                "if {ticket} is ABSENT_:",
                "    {ticket} = {enter}(now_)",
            ),
            leave=(
                "if {ticket} is None:",
                "    {free}.append(None)",
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
        if ticket is None:
            self._slots.give_back()

    def _enter_busy(self, now: float) -> object:
        policy = self.policy
        if policy.mode != "enforce" or not policy.max_wait:
            if self._slots.take():
                return None
            self.refuse(self._full("all are in use"))
            return _BEYOND
        raise Wait(
            SlotWaiter(self._slots, self.host.clock, now, policy.max_wait, self._turned_away)
        )

    def _turned_away(self, why: Refusal) -> object:
        name = self.host.name
        error: Rejected
        if why == "deadline":
            error = DeadlineExceeded(
                f"guard {name!r}: the deadline passed while waiting for a slot"
            )
        elif why == "shed":
            error = Overloaded(
                f"guard {name!r}: shed from a queue that does not drain",
                retry_after=self._typical(self.host.clock.now()),
            )
            error.reason = "shed_by_queue_time"
        elif why == "no room":
            error = self._full("and no room to wait")
        else:
            error = self._full(f"waited {self.policy.max_wait:g} s")
        self.refuse(error)
        return _BEYOND

    def _full(self, why: str) -> BulkheadFull:
        return BulkheadFull(
            f"guard {self.host.name!r}: no free slot of {self.policy.limit}: {why}",
            retry_after=self._typical(self.host.clock.now()),
        )

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return slots, use and waiting."""
        return {
            **super().snapshot(now),
            "limit": self.policy.limit,
            "in_flight": self.policy.in_flight,
            "waiting": self.policy.waiting,
            "queue_wait": self.policy.queue_wait(now),
        }
