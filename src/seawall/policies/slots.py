"""Common base of policies with slots: the bulkhead and the adaptive limit."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.context import current_criticality
from seawall.errors import DeadlineExceeded, Overloaded, Rejected
from seawall.models.pressure import crowding
from seawall.models.shedding.codel import QueueShed, QueueState, check_queue_shed
from seawall.models.waiting import ORDERS, Order
from seawall.runtime.call import patience
from seawall.runtime.layers import Host, Wait
from seawall.runtime.policy import GateBound, GatePolicy, Mode
from seawall.runtime.slots import Refusal, Slots, SlotWaiter

BEYOND: Final = None  # the ticket of a call admitted beyond the limit, where it is not enforced

MOST: Final = 1_000_000
"""Maximum limit: each slot takes some bytes, and a larger limit has no effect in practice."""


class SlotPolicy(GatePolicy):
    """A policy that admits a limited number of concurrent calls; others wait for a slot."""

    def __init__(
        self,
        limit: int,
        max_wait: float,
        max_waiting: int | None,
        order: Order,
        shed: QueueShed | None,
        mode: Mode,
    ) -> None:
        super().__init__(mode)
        if limit > MOST:
            raise ValueError(
                f"limit={limit}: write {MOST} or less; for no limit at all leave the policy out"
            )
        self.max_wait = check.seconds("max_wait", max_wait, zero=True, infinite=True)
        room = None if max_waiting is None else check.count("max_waiting", max_waiting)
        if check_queue_shed(shed) is not None and not self.max_wait:
            raise ValueError(f"shed={shed!r}: only who waits can be shed; write max_wait=... too")
        self.shed = shed
        self.slots = Slots(
            limit,
            order=check.choice("order", order, ORDERS),
            room=room,
            discipline=self._discipline(),
            owner=self,
        )

    def _service_time(self, now: float) -> float | None:
        """Return the duration of a typical call, once known."""
        raise NotImplementedError

    @property
    def limit(self) -> int:
        """Number of calls that may run at once now."""
        return self.slots.limit

    @property
    def in_flight(self) -> int:
        """Number of calls that hold a slot now."""
        return self.slots.in_use

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot now."""
        return self.slots.waiting

    def _at_rest(self, now: float) -> bool:
        return not self.in_flight and not self.waiting

    def queue_wait(self, now: float) -> float:
        """Return the age of the oldest waiter in seconds."""
        return self.slots.queue_wait(now)

    def crowding(self, *, own: int) -> float:
        """Return the share of slots that others hold or wait for; the caller holds `own`."""
        return crowding(self.in_flight, self.waiting, self.limit, own=own)

    def _queue_repr(self) -> str:
        shed = "" if self.shed is None else f", shed={self.shed!r}"
        return f"max_wait={self.max_wait:g}, order={self.slots.queue.order!r}{shed}"

    def _take_over(self, fresh: SlotPolicy) -> None:
        """Take over the settings of `fresh` except the limit. Running and waiting calls stay."""
        self.mode, self.max_wait = fresh.mode, fresh.max_wait
        if fresh.shed is not self.shed:
            self.shed = fresh.shed
            self.slots.discipline = self._discipline()

    def _discipline(self) -> QueueState | None:
        return None if self.shed is None else self.shed.start(self._service_time)


class SlotGate(GateBound):
    """A slot policy inside one guard."""

    policy: SlotPolicy
    until_stopped = True
    waiter_type: ClassVar[type[SlotWaiter]] = SlotWaiter
    refusal_type: ClassVar[type[Rejected]]

    def __init__(self, policy: SlotPolicy, host: Host) -> None:
        super().__init__(policy, host)
        self.slots = policy.slots
        self.free = policy.slots.free
        """The free slots. While there are none, `refuse_if_full` may refuse."""

    def typical(self) -> float | None:
        """Return the duration of a typical call, after which a slot may be free."""
        raise NotImplementedError

    def refuse_if_full(self, now: float) -> None:
        """Refuse a call that `enter` would refuse at once; do nothing if it might be admitted.

        For callers that have to do expensive things before they enter.
        """
        policy, slots = self.policy, self.policy.slots
        if policy.mode != "enforce" or slots.free:
            return
        if not policy.max_wait:
            self._enter_busy(now)
        with slots.mutex:
            full = slots.queue.refuses(current_criticality())
        if full:
            self.refuse(self.full("and no room to wait"))

    def _enter_busy(self, now: float) -> object:
        """Refuse a call for which no slot is free, or raise `Wait` if it may wait for one."""
        if self.policy.mode != "enforce" or not self.policy.max_wait:
            self.refuse(self.full("all are in use"))
            return BEYOND
        raise Wait(self.queue(now))

    def full(self, why: str) -> Rejected:
        """Return the refusal of a call for which there is no slot."""
        text = f"guard {self.host.name!r}: no free slot of {self.policy.limit}: {why}"
        return self.refusal_type(text, retry_after=self.typical())

    def waiter(self, now: float, max_wait: float, ticket: Any = None) -> SlotWaiter:
        """Return a waiter for a slot; `ticket` is that of a call that had one before."""
        return self.waiter_type(self.slots, self.host.clock, now, max_wait, self.turned_away)

    def queue(self, now: float, ticket: Any = None) -> SlotWaiter:
        """Return a waiter for `max_wait`, or for the rest of the guard's if that is less."""
        wait, left = self.policy.max_wait, patience(self.host)
        waiter = self.waiter(now, min(wait, left), ticket)
        if left < wait:
            waiter.bounded_by_guard()
        return waiter

    def readmit(self, ticket: Any, now: float) -> Any:
        """Readmit a call that had a slot by `ticket` and left it for a while.

        While no slot is free it waits in the queue with the others, however long that takes: a call
        that has begun can no longer be refused. Raises `Wait`, as `enter` does.
        """
        if ticket is BEYOND:
            return ticket
        enforced = self.policy.mode == "enforce"
        waiter = self.waiter(now, inf if enforced else 0.0, ticket)
        waiter.readmitted = enforced
        raise Wait(waiter)

    def turned_away(self, why: Refusal) -> object:
        """Refuse a call that waited in vain; admit it if the limit is not enforced."""
        self.refuse(self._error(why))
        return BEYOND

    def _error(self, why: Refusal) -> Rejected:
        """Return the refusal.

        The caller must not keep it, to avoid a reference cycle with its frame.
        """
        name = self.host.name
        if why == "deadline":
            return DeadlineExceeded(f"guard {name!r}: the deadline passed while waiting for a slot")
        if why == "no room":
            return self.full("and no room to wait")
        if why == "too long":
            return self.full(f"waited {self.policy.max_wait:g} s")
        if why == "impatient":
            return self.full(f"the guard's max_wait of {self.host.max_wait:g} s is spent")
        message = f"guard {name!r}: shed from a queue that does not drain"
        error = Overloaded(message, retry_after=self.typical())
        error.reason = "shed_by_queue_time"
        return error

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the slots, how many are in use, and the waiters."""
        return {
            **super().snapshot(now),
            "limit": self.policy.limit,
            "in_flight": self.policy.in_flight,
            "waiting": self.policy.waiting,
            "recovered": self.policy.slots.recovered,
            "queue_wait": self.policy.queue_wait(now),
        }
