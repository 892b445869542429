"""A rate limit inside one guard: take, refuse, or let the call wait until there is room.

Of the calls that wait for the same key only the first has a timer, for the time at which its turn
comes; when it leaves, it wakes the next one, which then sets its own timer. The success path
without a lock is in `fast_path`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from seawall.context import seconds_left
from seawall.errors import DeadlineExceeded, RateLimited, Rejected
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.rate_limit.fast_path import keyed_bucket, unkeyed_buckets
from seawall.policies.rate_limit.meters import Blocked, Meter
from seawall.policies.rate_limit.reservation import Charge, Reservation
from seawall.runtime.call import STREAMED, patience
from seawall.runtime.functions import takes_arguments
from seawall.runtime.layers import OK, UNUSED, Host, Inline, Outcome, Wait
from seawall.runtime.mutex import LOCK_FREE
from seawall.runtime.policy import GateBound

if TYPE_CHECKING:
    from seawall.policies.rate_limit.meters import KeyQueue, Meters
    from seawall.policies.rate_limit.policy import RateLimit


class RateGate(GateBound):
    """The rate limit inside one guard."""

    policy: RateLimit

    def __init__(self, policy: RateLimit, host: Host) -> None:
        super().__init__(policy, host)
        functions = [f for limit in policy.limits for f in (limit.key, limit.cost) if callable(f)]
        self.takes_arguments = any(map(takes_arguments, functions))
        self.settles = any(limit.settle is not None for limit in policy.limits)
        self.inline = self._success_path()

    def _success_path(self) -> Inline | None:
        """Return the lines for buckets without keys, or for a single one with keys."""
        meters = self.policy._meters.all
        if not LOCK_FREE or not all(meter.plain for meter in meters):
            return None
        if all(meter.limit.key is None for meter in meters):
            return unkeyed_buckets(meters)
        if len(meters) > 1:
            return None
        return keyed_bucket(meters[0], self._enter_key, takes_arguments=self.takes_arguments)

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take what the call costs, refuse it, or let it wait."""
        return self.ask(self.policy._charges(args, kwargs), now)

    def _enter_key(self, key: Hashable, now: float) -> object:
        """Enter with a key that is known already."""
        meter = self.policy._meters.all[0]
        limit = meter.limit
        cost = limit._cost_of((), {})
        return self.ask([Charge(meter, limit._check_key(key), cost, estimated=False)], now)

    def ask(self, charges: Sequence[Charge], now: float) -> object:
        """Take given charges under the lock, refuse the call, or let it wait."""
        policy = self.policy
        meters = policy._meters
        us = whole_microseconds(now)
        with meters.mutex, meters:
            blocked = meters.look(charges, us)
            if blocked is None:
                meters.take(charges, us)
        if blocked is None:
            return self.ticket(charges)
        if policy.mode != "enforce" or not policy.max_wait:
            self.refuse(self.over(blocked, now))
            return None
        waiter = RateWaiter(self, charges, now)
        waiter.refuse_if_late(blocked, now)
        raise Wait(waiter)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Give back what was not used and settle what is known now. A call that was sent keeps it.

        A bucket whose state is one number gives back only what it cannot have refilled meanwhile:
        nothing for a call that waited in inner layers for longer than its cost takes to refill.
        """
        if outcome is UNUSED:
            meters = self.policy._meters.all
            if isinstance(ticket, float):
                ticket = self._quick(((meter, None) for meter in meters), ticket)
            elif isinstance(ticket, tuple):
                key, mark = ticket
                ticket = self._quick([(meters[0], key)], mark)
            if ticket is not None:
                ticket.cancel()
        elif self.settles and ticket is not None:
            if outcome is OK and detail is not STREAMED:
                ticket._settle_by(detail, self.host.name)
            else:
                ticket._keep()

    def ticket(self, charges: Sequence[Charge]) -> Reservation:
        """Return the ticket of a call that has taken `charges`."""
        return Reservation(self.policy, charges)

    def _quick(self, places: Iterable[tuple[Meter, Hashable]], mark: float) -> Reservation:
        """Return a reservation of what the success path took at `mark`."""
        charges = []
        for meter, place in places:
            charge = Charge(meter, place, meter.limit._cost_of((), {}), estimated=False)
            charge.mark = charge.at = mark
            # Read the rule first: `update` changes `since` before the rule, so a new rule is never
            # combined with the old `since`.
            rule = meter.rule
            charge.rule = rule if mark > meter.since else None
            charges.append(charge)
        return self.ticket(charges)

    def over(self, blocked: Blocked, now: float, why: str = "") -> RateLimited:
        """Return the refusal."""
        return self.policy._over(blocked, now, why, f"guard {self.host.name!r}: ")

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the limits, what is left of them, and the number of waiting calls."""
        meters = self.policy._meters
        us = whole_microseconds(now)
        limits = {}
        with meters.mutex, meters:
            for meter in meters.all:
                shown: dict[str, Any] = {"limit": meter.limit.text}
                limits[meter.limit.name] = shown
                if meter.limit.key is None:
                    shown["left"] = meter.standing(None, us)[0]
                else:
                    shown["keys"] = meter.keys
        return {
            **super().snapshot(now),
            "reserve_rejected": self.policy._reserve_rejected,
            "waiting": meters.waiting,
            "limits": limits,
        }


class RateWaiter:
    """A call on its way into a guard. Its state changes only under the lock of its meters."""

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
        self.cost = 0
        self.until: float | None = None
        self._late = False
        self._patience = now + patience(gate.host)
        """The time at which the guard's `max_wait` is used up."""
        self._give_up = min(now + gate.policy.max_wait, self._patience)
        left = seconds_left()
        if left is not None and now + left < self._give_up:
            self._give_up = now + left
            self._late = True

    def refuse_if_late(self, blocked: Blocked, now: float) -> None:
        """Refuse a call whose turn cannot come in time."""
        if not self._in_time(blocked, whole_microseconds(now)):
            self._gate.refuse(self._refusal(blocked, now, self.too_long()))

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
        if not self._late or blocked.wait is None:
            return self._gate.over(blocked, now, why)
        what = (
            f"the deadline leaves no time to wait for the limit {blocked.first.meter.limit.name!r}"
        )
        return DeadlineExceeded(f"guard {self._gate.host.name!r}: {what}")

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
            self._wait_for_longest(blocked, now)

    def _grant(self, now: float) -> None:
        self._meters.take(self._charges, now)
        self._state = "granted"

    def _wait_for_longest(self, blocked: Blocked, now: float) -> None:
        """Wait for the charge that takes longest. Only the first in a queue sets a timer."""
        if self.charge is not blocked.longest:
            self._meters.leave_queue(self)
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
            self._meters.leave_queue(self)
        elif (
            self._state == "waiting"
            and self._in_time(blocked, now)
            and self._gate.policy.mode == "enforce"
        ):
            self._wait_for_longest(blocked, now)
        elif self._state == "waiting":
            self._state = "given up"
            self._meters.leave_queue(self)
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
        self._meters.leave_queue(self)
