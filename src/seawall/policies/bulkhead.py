"""At most so many calls at once; the rest wait a little, in order, or are refused.

Promises: in flight never exceeds the limit; a slot is held until the work really stops (also when
its caller gave up on a thread); a waiter that is cancelled or late takes nothing with it; threads
and tasks of any loop share the slots and wake each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final
from weakref import WeakSet

from seawall import _checks as check
from seawall.context import current_criticality, deadline_var
from seawall.errors import BulkheadFull, DeadlineExceeded
from seawall.models.waiting import ORDERS, Order, WaitQueue
from seawall.runtime.layers import Host, Inline, Outcome, Wait
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.policy import GateBound, GatePolicy, Mode

_BEYOND = object()
"""The ticket of a call let in beyond the limit, where the bulkhead is not enforced."""


live_bulkheads: Final[WeakSet[Bulkhead]] = WeakSet()
"""All there are, for those who look for slots that nobody gave back."""


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
        mode: Mode = "enforce",
    ) -> None:
        """Let `limit` in; others wait up to `max_wait` seconds, at most `max_waiting` of them.

        `max_waiting` is `limit` unless given: a longer queue only adds latency. `order` says who
        is served first: "fifo", "lifo", or "criticality" (see `Criticality`).
        """
        super().__init__(mode)
        self.limit = check.count("limit", limit)
        self.max_wait = check.seconds("max_wait", max_wait, zero=True, infinite=True)
        self._room = None if max_waiting is None else check.count("max_waiting", max_waiting)
        room = self.limit if self._room is None else self._room
        self._queue: WaitQueue[_SlotWaiter] = WaitQueue(check.choice("order", order, ORDERS), room)
        self._mutex = Mutex()
        survives_fork(self)
        live_bulkheads.add(self)
        # Free slots are the items of a deque: its pop and append are atomic, with or without a
        # global interpreter lock, so the success path needs no lock of its own.
        self._free: deque[None] = deque([None] * self.limit)
        self._excess = 0
        # True while someone waits or slots are to be withdrawn: then leaving takes the slow way.
        self._attention = False
        # True in a child process: a call that came along by the fork may give back a slot too many.
        self._forked = False

    def __repr__(self) -> str:
        return f"Bulkhead({self.limit}, max_wait={self.max_wait:g}, order={self._queue.order!r})"

    @property
    def in_flight(self) -> int:
        """How many calls hold a slot now."""
        return max(0, self.limit + self._excess - len(self._free))

    @property
    def waiting(self) -> int:
        """How many calls wait for a slot now."""
        return len(self._queue)

    def queue_wait(self, now: float) -> float:
        """Return for how long the longest waiting has waited by now."""
        with self._mutex:
            oldest = min((waiter.since for waiter in self._queue.oldest()), default=now)
            return max(0.0, now - oldest)

    def _bind(self, host: Host) -> _BulkheadGate:
        return _BulkheadGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self._reject_unknown(changes, ("limit", "max_wait", "max_waiting", "mode"))
        fresh = Bulkhead(
            changes.get("limit", self.limit),
            max_wait=changes.get("max_wait", self.max_wait),
            max_waiting=changes.get("max_waiting", self._room),
            mode=changes.get("mode", self.mode),
        )
        with self._mutex:
            self.mode, self.max_wait = fresh.mode, fresh.max_wait
            self._room, self._queue.limit = fresh._room, fresh._queue.limit
            self._excess += self.limit - fresh.limit
            self.limit = fresh.limit
            while self._excess < 0:
                self._excess += 1
                self._free.append(None)
            self._serve()

    def _after_fork(self) -> None:
        """Be usable in a child process: slots of threads that are gone are free again."""
        self._mutex = Mutex()
        self._queue = WaitQueue(self._queue.order, self._queue.limit)
        self._excess = 0
        self._forked = self._attention = True
        self._free.extend([None] * (self.limit - len(self._free)))

    def _take(self) -> bool:
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def _give_back(self) -> None:
        self._free.append(None)
        # In this order: who joins the queue sets the flag first and looks at the slots after.
        if self._attention:
            self._attend()

    def _attend(self) -> None:
        self._mutex.do(self._serve)

    def _serve(self) -> None:
        """Withdraw slots that are too many, then hand free ones to who waits. Under the lock."""
        while self._excess > 0 and self._take():
            self._excess -= 1
        while len(self._free) > self.limit:  # a call that a fork took along gave its slot back
            self._take()
        while self._queue and self._take():
            if not self._queue.pop().grant():
                self._free.append(None)
        self._attention = bool(self._queue) or self._excess > 0 or self._forked

    def _join(self, waiter: _SlotWaiter, rank: int) -> None:
        with self._mutex:
            self._attention = True
            turned_away = self._queue.push(waiter, rank)
            if turned_away is not None:
                turned_away.turn_away()
            self._serve()


class _BulkheadGate(GateBound):
    """The bulkhead inside one guard."""

    policy: Bulkhead
    until_stopped = True

    def __init__(self, policy: Bulkhead, host: Host) -> None:
        super().__init__(policy, host)
        self._free = policy._free
        self.inline = Inline(
            names={"free": policy._free, "policy": policy},
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
                "    if {policy}._attention:",
                "        {policy}._attend()",
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
            self.policy._give_back()

    def _enter_busy(self, now: float) -> object:
        policy = self.policy
        if policy.mode != "enforce" or not policy.max_wait:
            if policy._take():
                return None
            self.refuse(self.full("all are in use"))
            return _BEYOND
        raise Wait(_SlotWaiter(self, now))

    def full(self, why: str) -> BulkheadFull:
        """Return the refusal."""
        typical = self.host.stats.quantile(0.5, self.host.clock.now())
        return BulkheadFull(
            f"guard {self.host.name!r}: no free slot of {self.policy.limit}: {why}",
            retry_after=typical,
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


class _SlotWaiter:
    """One call waiting for a slot. Its state changes under the bulkhead's lock only."""

    __slots__ = ("_gate", "_late", "_state", "_wake", "since", "until")

    def __init__(self, gate: _BulkheadGate, now: float) -> None:
        self._gate = gate
        self._state = "waiting"
        self._late = False
        self.since = now
        self.until: float | None = now + gate.policy.max_wait
        held = deadline_var.get()
        if held is not None:
            limit = now + held[0] - held[1].now()
            if limit < self.until:
                self.until = limit
                self._late = True
        if self.until == float("inf"):
            self.until = None

    def publish(self, wake: Callable[[], bool]) -> None:
        self._wake = wake
        rank = current_criticality()
        self._gate.policy._join(self, rank)

    def grant(self) -> bool:
        """Receive a slot; False if nobody is there to use it."""
        self._state = "granted"
        return self._wake()

    def turn_away(self) -> None:
        """Learn that there is no room (any more)."""
        self._state = "turned away"
        self._wake()

    def claim(self) -> object:
        policy = self._gate.policy
        with policy._mutex:
            state = self._leave_queue()
        if state == "granted":
            return None
        if state == "turned away":
            error: BulkheadFull | DeadlineExceeded = self._gate.full("and no room to wait")
        elif self._late:
            error = DeadlineExceeded(
                f"guard {self._gate.host.name!r}: the deadline passed while waiting for a slot"
            )
        else:
            error = self._gate.full(f"waited {policy.max_wait:g} s")
        self._gate.refuse(error)
        return _BEYOND

    def abandon(self) -> None:
        self._gate.policy._mutex.do(self._give_up)

    def _give_up(self) -> None:
        if self._leave_queue() == "granted":
            self._gate.policy._free.append(None)
            self._gate.policy._serve()

    def _leave_queue(self) -> str:
        if self._state == "waiting":
            self._gate.policy._queue.remove(self)
            self._gate.policy._serve()
        return self._state
