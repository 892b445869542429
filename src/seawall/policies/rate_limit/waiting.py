"""Calls that wait until a rate limit has room for them.

Calls that wait for the same key form a FIFO queue. Only the first has a timer, for the time at
which its turn comes; when it leaves, it wakes the next one, which then sets its own timer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from seawall.context import seconds_left
from seawall.errors import Rejected
from seawall.models.rate.rates import whole_microseconds
from seawall.runtime.call import patience
from seawall.runtime.layers import Wait

if TYPE_CHECKING:
    from seawall.policies.rate_limit.gate import RateGate
    from seawall.policies.rate_limit.meters import Blocked, Meters
    from seawall.policies.rate_limit.reservation import Charge


class KeyQueue:
    """The calls that wait for one key of one limit, first come, first served."""

    __slots__ = ("total", "waiters")

    def __init__(self) -> None:
        # Leaving from the middle is as cheap as leaving from the front.
        self.waiters: OrderedDict[RateWaiter, None] = OrderedDict()
        self.total = 0
        """The cost of all waiters together."""

    @property
    def first(self) -> RateWaiter:
        """The waiter whose turn is next."""
        return next(iter(self.waiters))

    def ahead(self, waiter: RateWaiter | None) -> int:
        """Return the total cost of the waiters before `waiter`; of all, if None."""
        if waiter is None or waiter.number > next(reversed(self.waiters)).number:
            return self.total
        ahead = 0
        for other in self.waiters:
            if other.number >= waiter.number:
                break
            ahead += other.wants
        return ahead

    def join(self, waiter: RateWaiter) -> None:
        """Insert `waiter` behind all that began to wait before it."""
        newer = []
        for other in reversed(self.waiters):
            if other.number < waiter.number:
                break
            newer.append(other)
        self.waiters[waiter] = None
        self.total += waiter.wants
        if newer:
            for other in reversed(newer):
                self.waiters.move_to_end(other)


class RateWaiter:
    """A call on its way into a guard. Its state changes only under the lock of its meters."""

    __slots__ = (
        "_charges",
        "_gate",
        "_give_up",
        "_late",
        "_meters",
        "_patience",
        "_state",
        "_wake",
        "_woken",
        "charge",
        "number",
        "queue",
        "until",
        "wants",
    )

    def __init__(self, gate: RateGate, charges: Sequence[Charge], now: float) -> None:
        """Request `charges` within the policy's `max_wait`, and before the deadline."""
        self._gate = gate
        self._meters: Meters = gate.policy._meters
        self._charges = charges
        self._state = "new"
        self._woken = False
        self._wake: Callable[[], bool] | None = None
        self.queue: KeyQueue | None = None
        self.charge: Charge | None = None
        self.number = 0
        self.wants = 0
        self.until: float | None = None
        self._late = False
        self._patience = now + patience(gate.host)
        """The time at which the guard's `max_wait` is used up."""
        self._give_up = min(now + gate.policy.max_wait, self._patience)
        left = seconds_left()
        if left is not None:
            limit = now + left
            if limit < self._give_up:
                self._give_up = limit
                self._late = True

    def refusal_if_late(self, blocked: Blocked, now: float) -> Rejected | None:
        """Return the refusal of a call whose turn cannot come in time; None if it can."""
        if not self._in_time(blocked, whole_microseconds(now)):
            return self._refusal(blocked, now, self.too_long())
        return None

    def too_long(self) -> str:
        """Return the reason for refusing a call whose turn would come too late."""
        bound = self._guards_bound()
        return f"it would have to wait too long{bound and ', '}{bound}"

    def _guards_bound(self) -> str:
        """Return text that the guard's limit ends the wait, or an empty string."""
        most = self._gate.host.max_wait
        if most is None or self._give_up < self._patience:
            return ""
        return f"the guard's max_wait is {most:g} s in all"

    def _in_time(self, blocked: Blocked, now: float) -> bool:
        give_up = whole_microseconds(self._give_up)
        return blocked.wait is not None and now < give_up and now + blocked.wait <= give_up

    def is_late(self, now: float) -> bool:
        """Return whether its time is over."""
        return now > whole_microseconds(self._give_up)

    def _refusal(self, blocked: Blocked, now: float, why: str) -> Rejected:
        if self._late and blocked.wait is not None:
            return self._gate.late(blocked)
        return self._gate.over(blocked, now, why)

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queue, or wake immediately if granted or refused."""
        now = whole_microseconds(self._gate.host.clock.now())
        with self._meters.mutex, self._meters:
            if self._state == "new":
                self._begin(now)
            if self._woken or self._state != "waiting":
                self._woken = False
                wake()
            else:
                self._wake = wake

    def _begin(self, now: float) -> None:
        """Check again, since other calls came and went meanwhile, and wait if necessary."""
        self.number = next(self._meters.numbers)
        blocked = self._meters.look(self._charges, now, self)
        if blocked is None:
            self._grant(now)
        elif not self._in_time(blocked, now) or self._gate.policy.mode != "enforce":
            self._state = "hopeless"
        elif self._meters.waiting >= self._meters.max_waiting:
            self._state = "turned away"
        else:
            self._state = "waiting"
            self._stand(blocked, now)

    def _grant(self, now: float) -> None:
        self._meters.take(self._charges, now)
        self._state = "granted"

    def _stand(self, blocked: Blocked, now: float) -> None:
        """Wait for the charge that takes longest. Only the first in a queue sets a timer."""
        if self.charge is not blocked.longest:
            self._meters.part(self)
            self._meters.join(self, blocked.longest)
        # A waiter that is not first gives up a microsecond later: if several turns come at the very
        # end, those before it go first, and wake it.
        self.until = self._give_up + 1e-6
        if self.queue is not None and self.queue.first is self and blocked.wait is not None:
            self.until = min(self._give_up, (now + blocked.wait) / 1e6)
        if self.until == float("inf"):
            self.until = None

    def wake(self) -> bool:
        """Wake the caller, so that it looks again; return False if it is gone."""
        wake, self._wake = self._wake, None
        if wake is None:
            self._woken = True
            return True
        return wake()

    def claim(self) -> Any:
        """Return the ticket, raise the refusal, or wait for another turn."""
        now = self._gate.host.clock.now()
        with self._meters.mutex, self._meters:
            self._wake, self._woken = None, False
            blocked = self._look_again(whole_microseconds(now))
        if blocked is None:
            return self._gate.ticket(self._charges)
        if self._state == "waiting":
            raise Wait(self)
        self._gate.refuse(self._over(blocked, now))  # does not raise unless it is enforced
        return None

    def _over(self, blocked: Blocked, now: float) -> Rejected:
        if self._state == "turned away":
            return self._gate.over(blocked, now, "and no room to wait")
        if self._state == "hopeless":
            return self._refusal(blocked, now, self.too_long())
        waited = f"waited {self._gate.policy.max_wait:g} s"
        return self._refusal(blocked, now, self._guards_bound() or waited)

    def _look_again(self, now: float) -> Blocked | None:
        """Take the charges (None), or return the obstacle. Continue to wait only if it helps."""
        if self._state == "granted":
            return None
        blocked = self._meters.look(self._charges, now, self)
        if blocked is None:
            self._grant(now)
            self._meters.part(self)
        elif (
            self._state == "waiting"
            and self._in_time(blocked, now)
            and self._gate.policy.mode == "enforce"
        ):
            self._stand(blocked, now)
        elif self._state == "waiting":
            self._state = "given up"
            self._meters.part(self)
        return blocked

    def abandon(self) -> None:
        """Leave the queue, and give back what was already granted."""
        self._meters.do(self._abandoned)

    def _abandoned(self) -> None:
        if self._state == "granted":
            now = whole_microseconds(self._gate.host.clock.now())
            for charge in self._charges:
                self._meters.settle(charge, 0, now)
        self._state = "given up"
        self._meters.part(self)
