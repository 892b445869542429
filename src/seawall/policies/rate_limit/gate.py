"""A rate limit inside one guard. The success path without a lock is in `fast_path`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from seawall.errors import DeadlineExceeded, RateLimited
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.rate_limit.fast_path import keyed_bucket, unkeyed_buckets
from seawall.policies.rate_limit.limit import Key
from seawall.policies.rate_limit.meter import Meter
from seawall.policies.rate_limit.meters import Blocked
from seawall.policies.rate_limit.reservation import Charge, Reservation
from seawall.policies.rate_limit.waiting import RateWaiter
from seawall.runtime.call import STREAMED
from seawall.runtime.gil import LOCK_FREE
from seawall.runtime.layers import OK, UNUSED, Host, Outcome, Wait
from seawall.runtime.policy import GateBound

if TYPE_CHECKING:
    from seawall.policies.rate_limit.policy import RateLimit


class RateGate(GateBound):
    """The rate limit inside one guard."""

    policy: RateLimit

    def __init__(self, policy: RateLimit, host: Host) -> None:
        super().__init__(policy, host)
        self.takes_arguments = any(limit._wants_arguments for limit in policy.limits)
        self.settles = any(limit.settle is not None for limit in policy.limits)
        meters = policy._meters.all
        if LOCK_FREE and all(meter.plain and meter.limit.key is None for meter in meters):
            self.inline = unkeyed_buckets(meters)

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take what the call costs, refuse it, or let it wait."""
        return self.ask(self.policy._charges(args, kwargs), now)

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
        if policy.mode == "enforce" and policy.max_wait:
            waiter = RateWaiter(self, charges, now)
            error = waiter.refusal_if_late(blocked, now)
            if error is None:
                raise Wait(waiter)
            try:
                self.refuse(error)
            finally:
                del error  # Break the reference cycle between the exception and this frame.
        else:
            self.refuse(self.over(blocked, now))
        return None

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Give back what was not used and settle what is known now. A call that was sent keeps it.

        A bucket whose state is one number gives back only what it cannot have refilled meanwhile:
        nothing for a call that waited in inner layers for longer than its cost takes to refill.
        """
        if outcome is UNUSED:
            if isinstance(ticket, float):
                ticket = self._quick(((meter, None) for meter in self.policy._meters.all), ticket)
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

    def late(self, blocked: Blocked) -> DeadlineExceeded:
        """Return the refusal of a call whose deadline leaves no time to wait."""
        name = blocked.first.meter.limit.name
        return DeadlineExceeded(
            f"guard {self.host.name!r}: the deadline leaves no time to wait for the limit {name!r}"
        )

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


class KeyedRateGate(RateGate):
    """One token or leaky bucket for each key, with the same cost for all calls."""

    def __init__(self, policy: RateLimit, host: Host, meter: Meter) -> None:
        super().__init__(policy, host)
        self._meter = meter
        self._states = meter.states
        self._key: Key = meter.limit._ask_key or (lambda: None)
        self.inline = keyed_bucket(
            meter, self._key, self._slowly, takes_arguments=self.takes_arguments
        )

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take what the call costs, refuse it, or let it wait."""
        meter, states = self._meter, self._states
        key = self._key(*args, **kwargs)
        if type(key) is str:
            us = whole_microseconds(now)
            try:
                # Nothing can interrupt from here on: no call, no loop, and text is compared without
                # running Python code. So the value read is still current when it is written.
                tat = states[key]
                if tat < us:  # noqa: PLR1730 - max() would be a call
                    tat = us
                tat += meter.step
                if tat - us <= meter.slack:
                    states[key] = tat
                    return key, us
            except KeyError:
                pass
        return self._slowly(key, now)

    def _slowly(self, key: Hashable, now: float) -> object:
        """Enter under the lock."""
        limit = self._meter.limit
        key = limit._check_key(key)
        return self.ask([Charge(self._meter, key, limit._cost_of((), {}), estimated=False)], now)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Give back what was not used."""
        if outcome is UNUSED and isinstance(ticket, tuple):
            key, mark = ticket
            ticket = self._quick([(self._meter, key)], mark)
        super().leave(ticket, outcome, detail, now)
