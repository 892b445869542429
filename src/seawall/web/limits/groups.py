"""Limits that are taken all or none, in this process or in a store, and their response headers.

A `LimitGroup` is one `RateLimit` with a limit for each tier of each of its `RequestLimit`s. Which
of them a request has to pass depends on its tier: `TierLimits` are computed once for each tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall.clock import Clock
from seawall.errors import RateLimited
from seawall.guard import Guard
from seawall.models.rate.buckets import TokenBucket
from seawall.models.rate.rates import MICROSECONDS, whole_microseconds
from seawall.policies.rate_limit import Limit, RateLimit, Reservation
from seawall.policies.rate_limit.fast_path import Quick, quick_taking
from seawall.policies.rate_limit.meters import Meter
from seawall.policies.rate_limit.reservation import Charge
from seawall.runtime.driver import Steps
from seawall.web.principals import key_reader
from seawall.wire.rate_fields import (
    POLICY_HEADER,
    STATE_HEADER,
    RatePolicy,
    write_policies,
    write_state,
)

if TYPE_CHECKING:
    from seawall.web.limits.limits import RequestLimit
    from seawall.web.request import Incoming


Header = tuple[bytes, bytes]

POLICY: Final = POLICY_HEADER.lower().encode("ascii")
STATE: Final = STATE_HEADER.lower().encode("ascii")

ROUNDING: Final = 1e-6
"""Seconds that an instant may be off by the rounding of floats."""

LimitState = tuple[bytes, float, float]
"""A limit's name for a field, what remains, and the microseconds until there is more."""


class TierLimit(NamedTuple):
    """One limit that a request of some tier has to pass."""

    limit: RequestLimit
    rate: Limit
    meter: Meter
    number: int
    """Index of the limit in its group."""


class TierLimits:
    """The limits of one group that the requests of one tier have to pass."""

    def __init__(self, group: LimitGroup, entries: Sequence[TierLimit]) -> None:
        self.group = group
        self.entries = tuple(entries)
        self.key_readers = tuple(
            key_reader(entry.limit.by, entry.limit.otherwise)
            for entry in entries
            if entry.limit.by is not None
        )
        """Functions that return the key of a request, for each limit that has keys."""
        self.reported = tuple(
            (entry.number, entry.limit.state_start, entry.rate.rate.limit)
            for entry in entries
            if entry.limit.is_reported
        )
        """Limits reported to callers: index, name for a field, and the maximum that is reported as
        remaining, though a burst may be larger."""
        self.quick: Quick | None = None
        rules = [entry.meter.rule for entry in entries]
        if not group.shared and all(isinstance(rule, TokenBucket) for rule in rules):
            self.quick = quick_taking([entry.meter for entry in entries], self.key_readers)
        self.bucket_terms = tuple(
            (place, entry.limit.state_start, entry.rate.rate.limit, *rule.terms)
            for place, (entry, rule) in enumerate(zip(entries, rules, strict=True))
            if entry.limit.is_reported and isinstance(rule, TokenBucket)
        )
        """The same for limits taken on the fast path: index among these, and the terms of its
        bucket."""


class LimitGrant:
    """What an admitted request took from one group of limits, and from `others`."""

    __slots__ = ("_limits", "_states", "_ticket", "has_accounts", "others", "policy_header")

    def __init__(self, tier_limits: TierLimits | None, ticket: Any, seen: Any) -> None:
        """Hold a ticket of the group's gate; or keys, if it was taken on the fast path.

        `seen` determines the state of the limits: the time and the bucket states, or the standings
        by limit, or None.
        """
        self._limits = tier_limits
        self._ticket = ticket
        self._states = seen
        self.has_accounts = False
        """Whether accounts are kept, until `close_accounts` is called."""
        self.others: tuple[LimitGrant, ...] = ()
        self.policy_header: Header | None = None
        """The header with the limits; None if limits are not reported to callers."""

    def __repr__(self) -> str:
        return f"<LimitGrant {dict(self.headers())!r}>"

    def headers(self) -> list[Header]:
        """Return the limit headers of the response: the limits, and what remains."""
        policy = self.policy_header
        if policy is None:
            return []
        binding = self._most_restrictive(None)
        for other in self.others:
            binding = other._most_restrictive(binding)
        if binding is None:
            return [policy]
        name, left, more = binding
        return [policy, state_header(name, left, -(-more // MICROSECONDS))]

    def open_accounts(self) -> None:
        """Prepare for a wait further in.

        What the request took can then be given back exactly, however long the wait takes.
        """
        if not self.has_accounts:
            self.has_accounts = True
            for granted in (self, *self.others):
                granted._open_account()

    def close_accounts(self) -> None:
        """Close the accounts when a waiting request is admitted: nothing is given back any more."""
        for granted in (self, *self.others):
            ticket, granted._ticket = granted._ticket, None
            if isinstance(ticket, Reservation):
                ticket._keep()

    def cancel(self) -> None:
        """Give everything back when the request is refused further in; later calls do nothing."""
        for granted in (self, *self.others):
            ticket, granted._ticket = granted._slow_ticket(), None
            if ticket is not None:
                ticket.cancel()

    def _open_account(self) -> None:
        """Open accounts of what was just taken, so that all of it can be given back later.

        A bucket that is one number can only give back what it has not refilled meanwhile.
        """
        ticket = self._ticket = self._slow_ticket()
        if isinstance(ticket, Reservation):
            self._limits.group.open_account(ticket)  # type: ignore[union-attr]

    def _slow_ticket(self) -> Any:
        """Return the ticket; create it for what was taken on the fast path."""
        ticket = self._ticket
        if type(ticket) is not tuple:
            return ticket
        tier_limits: Any = self._limits
        keys = iter(ticket)
        places = [
            (entry.meter, None if entry.limit.by is None else next(keys))
            for entry in tier_limits.entries
        ]
        return tier_limits.group.gate._quick(places, self._states[0])

    def _most_restrictive(self, before: LimitState | None) -> LimitState | None:
        """Return the state of the most restrictive limit among the reported ones and `before`."""
        tier_limits: Any = self._limits
        seen = self._states
        if type(seen) is tuple:
            # For most requests: computed from the bucket states, without a call.
            us, states = seen
            for place, field, most, tolerance, units, time in tier_limits.bucket_terms:
                free = tolerance - states[place] + us
                left = free * units // time
                more = -(-(left + 1) * time // units) - free  # as in `TokenBucket.wait`
                if left > most:  # noqa: PLR1730 - min() costs a call
                    left = most
                if before is None or left < before[1] or (left == before[1] and more > before[2]):
                    before = field, left, more
            return before
        for number, field, most in () if seen is None else tier_limits.reported:
            if number in seen:  # otherwise it cost nothing there
                left, more = seen[number]
                left = min(left, most)
                if before is None or (left, -more) < (before[1], -before[2]):
                    before = field, left, more
        return before


class LimitGroup:
    """Limits that are taken all or none."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        limits: Sequence[RequestLimit],
        *,
        max_keys: int,
        shared: dict[str, Any] | None = None,
    ) -> None:
        """Count in this process; in a store if the options `shared` are given."""
        self.limits = tuple(limits)
        self.shared = shared is not None
        rates: list[Limit] = []
        self._numbers: dict[tuple[int, str | None], int] = {}
        self.owners: dict[str, RequestLimit] = {}
        """The limit to which each of the policy's limits belongs, by its name there."""
        for place, limit in enumerate(limits):
            for tier, rate in limit.rates.items():
                self._numbers[place, tier] = len(rates)
                self.owners[rate.name] = limit
                rates.append(rate)
        self.refused = {limit.name: 0 for limit in limits}
        """Number of requests that exceeded each limit."""
        self.policy = RateLimit(*rates, max_keys=max_keys, **(shared or {}))
        self._guard = Guard._unregistered(name, (self.policy,), clock=clock, idempotent=False)
        self.gate: Any = self._guard.bounds[0]
        """The gate of this group; of a shared one, a `SharedRateGate`."""
        self._now = clock.now
        if self.policy._sharing is not None:
            self.policy._sharing.share.see()

    def for_tier(self, tier: str | None) -> TierLimits:
        """Return the limits that requests of `tier` have to pass."""
        entries = []
        for place, limit in enumerate(self.limits):
            number = self._numbers[place, tier if tier in limit.rates else None]
            meter = self.policy._meters.all[number]
            entries.append(TierLimit(limit, self.policy.limits[number], meter, number))
        return TierLimits(self, entries)

    def take(self, tier_limits: TierLimits, incoming: Incoming) -> LimitGrant:
        """Take the cost of a request from a local group, or raise `RateLimited`."""
        now = self._now()
        charges = self._charges(tier_limits, incoming)
        if not charges:
            return LimitGrant(tier_limits, None, None)
        try:
            ticket = self.gate.ask(charges, now)
        except RateLimited as error:
            # The list is empty if another thread gave something back meanwhile.
            exceeded = self._exceeded(tier_limits, charges, now)
            self._describe(error, exceeded or self._named_in_refusal(error))
            raise
        return LimitGrant(tier_limits, ticket, self._limit_states(charges, now))

    def take_soft(self, tier_limits: TierLimits, incoming: Incoming) -> LimitGrant | None:
        """Take the cost of a request from a soft group, or count that it exceeds the limit."""
        now = self._now()
        charges = self._charges(tier_limits, incoming)
        if not charges:
            return LimitGrant(tier_limits, None, None)
        meters, us = self.policy._meters, whole_microseconds(now)
        with meters.mutex, meters:
            if meters.look(charges, us) is None:
                meters.take(charges, us)
                return LimitGrant(tier_limits, self.gate.ticket(charges), None)
            for limit in self.limits:
                self.refused[limit.name] += 1
        return None

    def take_shared(self, tier_limits: TierLimits, incoming: Incoming) -> Steps[LimitGrant]:
        """Take the cost of a request from a shared group, or raise `RateLimited`.

        Yields what to ask the gate of the group, and is sent the ticket.
        """
        now, charges = self._now(), self._charges(tier_limits, incoming)
        if not charges:
            return LimitGrant(tier_limits, None, None)
        charges = self._all_charges(charges)
        try:
            ticket = yield charges, now
        except RateLimited as error:
            known = error.reason == RateLimited.reason  # otherwise unknown: no store
            self._describe(error, self._named_in_refusal(error) if known else ())
            raise
        seen = None
        if isinstance(ticket, Reservation):
            receipt = charges[0].receipt
            if receipt is not None:
                seen = getattr(receipt, "standings", None) or None
            else:
                seen = self._limit_states(charges, now)
        return LimitGrant(tier_limits, ticket, seen)

    def open_account(self, ticket: Reservation) -> None:
        """Take the charges of `ticket` again, as estimates: these are given back exactly."""
        meters, us = self.policy._meters, whole_microseconds(self._now())
        charges = [
            charge
            for held in ticket._held
            for charge in held
            if charge.cost and charge.receipt is None and charge.rule is charge.meter.rule
        ]
        with meters.mutex, meters:
            for charge in charges:
                if charge.meter.settled is not None and not charge.estimated:
                    meters.settle(charge, 0, us)
                    charge.estimated = True
                    charge.meter.take(charge, us)

    def _charges(self, tier_limits: TierLimits, incoming: Incoming) -> list[Charge]:
        """Compute the charges of a request, from the user's key and cost functions.

        Must not be called under the lock.
        """
        charges = []
        readers = iter(tier_limits.key_readers)
        for entry in tier_limits.entries:
            key = None if entry.limit.by is None else next(readers)(incoming)
            if key is not None or entry.limit.by is None:
                cost = entry.rate._cost_of((incoming,), {})
                charges.append(Charge(entry.meter, key, cost, estimated=False))
        return charges

    def _all_charges(self, charges: Sequence[Charge]) -> list[Charge]:
        """Return a charge for each limit, as a store requires: 0 where a limit does not apply."""
        meters = self.policy._meters.all
        if len(charges) == len(meters):
            return list(charges)
        own = {charge.meter: charge for charge in charges}
        return [own.get(meter) or Charge(meter, "", 0, estimated=False) for meter in meters]

    def _limit_states(self, charges: Sequence[Charge], now: float) -> dict[int, tuple[int, float]]:
        """Return what remains of the limits in this process, and when there is more, by index."""
        meters, us = self.policy._meters, whole_microseconds(now)
        times = self.policy._sharing.share.times if self.policy._sharing else 1
        seen = {}
        with meters.mutex, meters:
            for charge in charges:
                left, more = charge.meter.refill(charge.place, us)
                seen[meters.all.index(charge.meter)] = left // times, more
        return seen

    def _exceeded(
        self, tier_limits: TierLimits, charges: Sequence[Charge], now: float
    ) -> list[RequestLimit]:
        """Return, and count, all limits that `charges` exceed."""
        us = whole_microseconds(now)
        limits = {entry.meter: entry.limit for entry in tier_limits.entries}
        over = []
        with self.policy._meters.mutex, self.policy._meters:
            for charge in charges:
                if charge.cost and charge.meter.wait(charge, us, None) != 0:
                    limit = limits[charge.meter]
                    over.append(limit)
                    self.refused[limit.name] += 1
        return over

    def _named_in_refusal(self, error: RateLimited) -> list[RequestLimit]:
        """Return, and count, the limit that the refusal names: the first one that is exceeded."""
        owner = self.owners[error.limit]
        with self.policy._meters.mutex, self.policy._meters:
            self.refused[owner.name] += 1
        return [owner]

    def _describe(self, error: RateLimited, over: Sequence[RequestLimit]) -> None:
        """Set the exceeded limits of a refusal, by the names that callers know."""
        error.own_limit = any(limit.by is not None for limit in over)
        # A caller that exceeds its own limit gets only its own limits: not that the service is busy
        # too.
        reported = [limit for limit in over if limit.is_reported] or over
        error.limit = reported[0].name if reported else ""
        error.violated = tuple(limit.name for limit in reported)

    def snapshot(self) -> dict[str, Any]:
        """Return how many requests exceeded each limit, and how many keys have a state here."""
        shown: dict[str, Any] = {}
        with self.policy._meters.mutex, self.policy._meters:
            for place, limit in enumerate(self.limits):
                meters = [
                    self.policy._meters.all[n] for (p, _), n in self._numbers.items() if p == place
                ]
                shown[limit.name] = {
                    "rate": limit.text,
                    "over": self.refused[limit.name],
                    "keys": sum(meter.keys for meter in meters),
                }
        if self.policy._sharing is not None:
            return {"limits": shown, "shared": self.policy._sharing.snapshot()}
        return {"limits": shown}


# Response headers: `RateLimit-Policy`, `RateLimit` and `Retry-After`. Only limits of the individual
# caller are reported: not the load of the service as a whole, nor its soft limits.


def policy_header(rates: Iterable[tuple[RequestLimit, Limit]]) -> Header | None:
    """Return the header with the limits, the same for all requests of a tier, or None."""
    policies = []
    for limit, rate in rates:
        if limit.is_reported:
            whole, fraction = divmod(rate.rate.period, MICROSECONDS)
            policies.append(RatePolicy(limit.name, rate.rate.limit, None if fraction else whole))
    return (POLICY, write_policies(policies).encode("ascii")) if policies else None


@lru_cache(maxsize=1000)
def state_header(field: bytes, left: float, seconds: float) -> Header:
    """Return the state of a limit: what remains, and the seconds until there is more.

    It is cached: callers well within their limits get the same values repeatedly.
    """
    return STATE, write_state(field, left, seconds)


def refused_header(error: RateLimited, limits: Iterable[RequestLimit]) -> Header | None:
    """Return the state for a refused request: nothing remains of the limits that it exceeds."""
    after = error.retry_after
    # A rounding error of the clock is no reason to write 11 for 10 seconds.
    reset = None if after is None else ceil(after - ROUNDING)
    states = [
        write_state(limit.state_start, 0, reset)
        for limit in limits
        if limit.is_reported and limit.name in error.violated
    ]
    return (STATE, b", ".join(states)) if states else None
