"""Rate limits: a number of calls, or a cost, in a period of time.

Promises:
- The bound of the algorithm holds in every interval of time, for each key and any callers.
- Several limits are taken together or not at all.
- A refusal takes nothing, and says when to try again. Waiting calls are served in order.
- What a call takes is given back if an inner layer refused it, and settled once if the actual cost
  is known at its end; a call that was sent keeps it.
- A vendor's report of what is left can lower the budget.
- With a store, all pods share the limits (`sharing`).

The rules are in `seawall.models.rate`, the gates in `gate` and `shared_gate`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar, Final, NoReturn

from seawall import _checks as check
from seawall.clock import Clock, current_clock, epoch_of
from seawall.errors import RateLimited
from seawall.events import ImplausibleReport
from seawall.events.bus import emit
from seawall.models.rate.buckets import LeakyBucket
from seawall.models.rate.rates import whole_microseconds
from seawall.models.rate.rule import RateRule
from seawall.policies.rate_limit.gate import RateGate
from seawall.policies.rate_limit.limit import USUAL, Algorithm, Cost, Key, Limit, Settle
from seawall.policies.rate_limit.meters import Blocked, Meter, Meters
from seawall.policies.rate_limit.reservation import Charge, Quota, Reservation
from seawall.policies.rate_limit.shared_gate import SharedRateGate
from seawall.policies.rate_limit.sharing import OnStoreFailure, Sharing, SharingKind
from seawall.runtime.layers import Host
from seawall.runtime.policy import GatePolicy, Mode, bindings_of, now_of
from seawall.runtime.store import LimitStore

__all__ = ["Limit", "Quota", "RateLimit", "Reservation"]

LONGEST: Final = 86_400.0  # maximum plausible `reset_after` of a vendor, in seconds


class RateLimit(GatePolicy):
    """Admit calls at a limited rate."""

    kind: ClassVar[str] = "rate_limit"
    _needs_statistics = False

    def __init__(
        self,
        *limits: str | Limit,
        burst: int | None = None,
        algorithm: Algorithm = "token_bucket",
        key: Key | None = None,
        cost: Cost = 1,
        settle: Settle | None = None,
        max_debt: float | None = None,
        max_wait: float = 0.0,
        max_waiting: int = 1024,
        max_keys: int = 100_000,
        mode: Mode = "enforce",
        shared: LimitStore | None = None,
        name: str | None = None,
        sharing: SharingKind = "exact",
        batch: int | None = None,
        on_store_failure: OnStoreFailure = "local",
    ) -> None:
        """Admit what all `limits` admit, each a rate such as "60/s" or a `Limit`.

        `burst`, `algorithm`, `key`, `cost`, `settle` and `max_debt` apply to the limits given as
        text; see `Limit`. Calls wait up to `max_wait` seconds for their turn, at most `max_waiting`
        of them. Up to `max_keys` keys have a state of their own for each limit; any further keys
        share.

        With a `shared` store, all policies of that `name` on all pods count together: `sharing` is
        "exact", "leased" in lots of `batch`, or "split". While the store is unreachable a pod
        continues with its part of the limits ("local"), admits all calls ("open") or none
        ("closed").
        """
        super().__init__(mode)
        self._options = {
            "burst": burst,
            "algorithm": algorithm,
            "key": key,
            "cost": cost,
            "settle": settle,
            "max_debt": max_debt,
        }
        self._given = limits
        self.limits = self._checked(limits)
        self.max_wait = check.seconds("max_wait", max_wait, zero=True, infinite=True)
        self.max_keys = check.count("max_keys", max_keys)
        meters = [Meter(limit, self.max_keys) for limit in self.limits]
        self._meters = Meters(meters, check.count("max_waiting", max_waiting))
        self._align(current_clock())
        self._reserve_rejected = 0
        self.pods = 1
        """Number of pods among which `divide` has divided the limits."""
        self.name = name
        self.shared = shared
        self.sharing = sharing
        self.batch = batch
        self.on_store_failure = on_store_failure
        self._sharing = Sharing.of(self)

    def _checked(self, limits: tuple[str | Limit, ...]) -> tuple[Limit, ...]:
        if not limits:
            raise TypeError("RateLimit(): give it a rate, such as RateLimit('60/s')")
        texts = [limit for limit in limits if not isinstance(limit, Limit)]
        options = self._options
        if not texts and options != USUAL:
            raise TypeError("RateLimit(Limit(...), ...): say it inside Limit(...), for each limit")
        made = tuple(
            limit if isinstance(limit, Limit) else Limit(limit, **options)  # type: ignore[arg-type]
            for limit in limits
        )
        names = [limit.name for limit in made]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two limits are called {name!r}: give them names, by Limit(name=)"
                )
        return made

    def __repr__(self) -> str:
        limits = ", ".join(map(repr, self.limits))
        shared = "" if self._sharing is None else f", {self._sharing!r}"
        return f"RateLimit({limits}, max_wait={self.max_wait:g}{shared})"

    @property
    def waiting(self) -> int:
        """Number of calls that wait for their turn now."""
        return self._meters.waiting

    @property
    def max_waiting(self) -> int:
        """Maximum number of waiting calls."""
        return self._meters.max_waiting

    @property
    def excess(self) -> tuple[int, ...]:
        """Maximum that pods may take beyond each limit, by the way it is shared; 0 if exact."""
        none = (0,) * len(self.limits)
        return none if self._sharing is None else self._sharing.share.excess or none

    def _at_rest(self, now: float) -> bool:
        with self._meters.mutex, self._meters:
            us = whole_microseconds(now)
            return all(meter.at_rest(us) for meter in self._meters.all)

    def reserve(self, *args: Any, cost: int | None = None, **kwargs: Any) -> Reservation:
        """Take the cost of a call with these arguments, or raise `RateLimited`; never waits.

        For code outside of a guard, and where the actual cost is known only later. `cost` replaces
        the cost of those limits that estimate it (by a `cost=` function, or with `settle=`), or of
        all limits if none does. Shared limits block until the store replies: in an event loop, use
        `await areserve(...)`.
        """
        charges, sharing = self._charges(args, kwargs, cost, by_hand=True), self._sharing
        if sharing is None:
            return self._reserve(charges)
        return sharing.run("reserve", sharing.reserving(charges))

    async def areserve(self, *args: Any, cost: int | None = None, **kwargs: Any) -> Reservation:
        """Async twin of `reserve`."""
        charges, sharing = self._charges(args, kwargs, cost, by_hand=True), self._sharing
        if sharing is None:
            return self._reserve(charges)
        return await sharing.arun(sharing.reserving(charges))

    def _reserve(self, charges: Sequence[Charge]) -> Reservation:
        """Reserve from the limits counted in this process."""
        now = self._now()
        with self._meters.mutex, self._meters:
            blocked = self._meters.look(charges, whole_microseconds(now))
            if blocked is None:
                self._meters.take(charges, whole_microseconds(now))
        return self._reserved(charges, blocked, now)

    def _reserved(
        self, charges: Sequence[Charge], blocked: Blocked | None, now: float
    ) -> Reservation:
        """Return the reservation, or raise if nothing was taken and the limit is enforced."""
        if blocked is None:
            return Reservation(self, charges)
        if self.mode == "enforce":
            self._refuse_reserve(self._over(blocked, now))
        return Reservation(self, [], charges)

    def _refuse_reserve(self, error: RateLimited) -> NoReturn:
        with self._meters.mutex, self._meters:
            self._reserve_rejected += 1
        error.policy = self.kind
        try:
            raise error
        finally:
            del error  # Break the reference cycle between the exception and this frame.

    def take_up_to(self, most: int, *args: Any, **kwargs: Any) -> int:
        """Take as much as is left now, up to `most`, and return that amount, possibly 0.

        It takes from the limits whose cost `reserve(cost=most)` would replace; if another limit has
        no room for the call, nothing is taken. The amount cannot be given back. Never waits, and
        never overtakes a waiting call. Shared limits block until the store replies: in an event
        loop, use `await atake_up_to(...)`.
        """
        check.count("most", most, minimum=0)
        charges, sharing = self._charges(args, kwargs, 1, by_hand=True), self._sharing
        if sharing is None:
            return self._take_up_to(most, charges)
        return sharing.run("take_up_to", sharing.taking(most, charges))

    async def atake_up_to(self, most: int, *args: Any, **kwargs: Any) -> int:
        """Async twin of `take_up_to`."""
        check.count("most", most, minimum=0)
        charges, sharing = self._charges(args, kwargs, 1, by_hand=True), self._sharing
        if sharing is None:
            return self._take_up_to(most, charges)
        return await sharing.arun(sharing.taking(most, charges))

    def _take_up_to(self, most: int, charges: Sequence[Charge]) -> int:
        """Take up to `most` from the estimated limits counted in this process."""
        us = whole_microseconds(self._now())
        with self._meters.mutex, self._meters:
            self._meters.look(charges, us)  # sets the places of the charges
            lefts = [
                charge.meter.standing(charge.place, us)[0] // charge.times
                for charge in charges
                if charge.estimated
            ]
            taken = min(most, max(1, min(lefts)))  # at least one, where each pod counts alone
            charges = [charge.known(taken) for charge in charges]
            if not taken or self._meters.look(charges, us) is not None:
                taken = 0
            else:
                self._meters.take(charges, us)
        return self._enforced(taken, most)

    def _enforced(self, taken: int, most: int) -> int:
        """Return how much may be used: what was taken, or all if the limit is not enforced."""
        return taken if self.mode == "enforce" else most

    def peek(self, *args: Any, cost: int | None = None, **kwargs: Any) -> Quota:
        """Return what is left for a call with these arguments, and take nothing.

        Of several limits, the result is for the first that is exceeded, else for the one with least
        left. `cost` is that of `reserve`: `retry_after` says when that much could be taken. Shared
        limits block until the store replies: in an event loop, use `await apeek(...)`.
        """
        return self._quota_for(self._charges(args, kwargs, cost, by_hand=cost is not None))

    async def apeek(self, *args: Any, cost: int | None = None, **kwargs: Any) -> Quota:
        """Async twin of `peek`."""
        charges = self._charges(args, kwargs, cost, by_hand=cost is not None)
        return await self._aquota_for(charges)

    def _quota_for(self, charges: Sequence[Charge]) -> Quota:
        sharing = self._sharing
        if sharing is None:
            return self._peek(charges)
        return sharing.run("peek", sharing.peeking(charges))

    async def _aquota_for(self, charges: Sequence[Charge]) -> Quota:
        sharing = self._sharing
        if sharing is None:
            return self._peek(charges)
        return await sharing.arun(sharing.peeking(charges))

    def _peek(self, charges: Sequence[Charge]) -> Quota:
        now = self._now()
        us = whole_microseconds(now)
        with self._meters.mutex, self._meters:
            blocked = self._meters.look(charges, us)
            standings = [charge.meter.standing(charge.place, us) for charge in charges]
        return self._quota(charges, standings, blocked, now)

    def _quota(
        self,
        charges: Sequence[Charge],
        standings: Sequence[tuple[int, float]],
        blocked: Blocked | None,
        now: float,
    ) -> Quota:
        retry_after = 0.0 if blocked is None else _seconds(blocked.wait, now)
        quotas = [
            Quota(charge.meter.limit.name, left // charge.times, retry_after, rest / 1e6)
            for charge, (left, rest) in zip(charges, standings, strict=True)
            if blocked is None or charge is blocked.first
        ]
        return min(quotas, key=lambda quota: quota.left)

    def divide(self, pods: int) -> None:
        """Use one of `pods` equal parts of each limit from now on; 1 is all of it.

        For pods without a store to share a limit in. What the policy gains by a smaller number
        counts as taken at that moment, since another pod may just have spent it. See `split_limit`
        in `seawall.members`, which follows the number of live pods.
        """
        check.count("pods", pods)
        if self._sharing is not None:
            raise TypeError(
                f"divide({pods}): the store of this limit knows how many pods there are; write"
                " RateLimit(..., sharing='split') without divide, or divide without shared="
            )
        with self._meters.mutex, self._meters:
            if any(isinstance(meter.rule, LeakyBucket) for meter in self._meters.all):
                raise ValueError(
                    f"divide({pods}): a leaky bucket keeps all calls apart, and pods that decide"
                    " by themselves cannot; write algorithm='token_bucket'"
                )
            now = whole_microseconds(self._now())
            if pods != self.pods:
                for meter in self._meters.all:
                    meter.divide(pods, now)
                self.pods = pods
                self._meters.attend_all()

    def lower(
        self,
        remaining: int,
        reset_after: float,
        *args: Any,
        limit: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Apply a vendor's report: only `remaining` are left for the next `reset_after` seconds.

        It can lower the budget of a call with these arguments, never raise it. `limit` names the
        limit, where there are several. Returns immediately; a shared limit is lowered for all pods
        a moment later.
        """
        number, key, us = self._lower(remaining, reset_after, args, kwargs, limit)
        if self._sharing is not None:
            self._sharing.share.lower(number, key, remaining, us)

    async def alower(
        self,
        remaining: int,
        reset_after: float,
        *args: Any,
        limit: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Async twin of `lower` that waits until a shared limit is lowered for all pods.

        Raises `StoreUnavailable` if the store fails: then the limit is lowered in this process
        only.
        """
        number, key, us = self._lower(remaining, reset_after, args, kwargs, limit)
        if self._sharing is not None:
            steps = self._sharing.share.confirmed_lower(number, key, remaining, us)
            await self._sharing.arun(steps)

    def reset(self, *args: Any, limit: str | None = None, **kwargs: Any) -> None:
        """Reset the counts for calls with these arguments, and vendors' reports about them.

        This applies to all limits, or to the one named `limit`; a limit without a key is the same
        for all calls. Running calls that took something before give nothing back later. Shared
        limits block until the store has reset it for all pods, or raise `StoreUnavailable`: then it
        is reset in this process only. In an event loop, use `await areset(...)`.
        """
        charges, sharing = self._reset_charges(args, kwargs, limit), self._sharing
        if sharing is None:
            self._reset(charges)
        else:
            sharing.run("reset", sharing.resetting(charges))

    async def areset(self, *args: Any, limit: str | None = None, **kwargs: Any) -> None:
        """Async twin of `reset`."""
        charges, sharing = self._reset_charges(args, kwargs, limit), self._sharing
        if sharing is None:
            self._reset(charges)
        else:
            await sharing.arun(sharing.resetting(charges))

    def _reset_charges(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
    ) -> list[Charge]:
        """Return an empty charge for each limit that is to be reset."""
        if name is not None:
            check.choice("limit", name, [limit.name for limit in self.limits])
        return [
            Charge(meter, meter.limit._key_of(args, kwargs), 0, estimated=False)
            for meter in self._meters.all
            if name in {None, meter.limit.name}
        ]

    def _reset(self, charges: Sequence[Charge]) -> None:
        now = whole_microseconds(self._now())
        with self._meters.mutex, self._meters:
            for charge in charges:
                self._meters.attend(charge.meter, charge.meter.reset(charge.key, now))

    def _lower(
        self,
        remaining: int,
        reset_after: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None,
    ) -> tuple[int, Hashable, float]:
        """Lower the limit in this process. Return its number, the key and the microseconds."""
        check.count("remaining", remaining, minimum=0)
        check.seconds("reset_after", reset_after, zero=True)
        names = [limit.name for limit in self.limits]
        if name is None and len(names) > 1:
            raise TypeError(f"lower(): say which limit is meant, by limit={names[0]!r}")
        number = names.index(check.choice("limit", name or names[0], names))
        limit = self.limits[number]
        key = limit._key_of(args, kwargs)
        if reset_after > max(LONGEST, limit._longest):
            self._report_implausible(limit, "reset_after", reset_after, limit._longest)
        us = whole_microseconds(min(reset_after, limit._longest))
        now = whole_microseconds(self._now())
        with self._meters.mutex, self._meters:
            self._meters.all[number].lower(key, now, remaining, now + us)
        return number, key, us

    def _charges(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cost: int | None = None,
        *,
        by_hand: bool = False,
    ) -> list[Charge]:
        """Return the charges of a call by the user's functions. Must not hold the lock.

        In a guard, only charges that `settle=` will settle are tracked as estimates.
        """
        if cost is not None:
            check.count("cost", cost, minimum=0)
        every = cost is not None and not any(limit._estimates for limit in self.limits)
        charges = []
        for meter in self._meters.all:
            limit = meter.limit
            estimated = every or (limit._estimates if by_hand else limit.settle is not None)
            own = cost if estimated else None
            own = limit._cost_of(args, kwargs) if own is None else limit._checked_cost(own)
            charges.append(Charge(meter, limit._key_of(args, kwargs), own, estimated=estimated))
        return charges

    def _settle(self, settled: Sequence[tuple[Charge, int]]) -> None:
        settled = [(charge, self._plausible(charge, actual)) for charge, actual in settled]
        if settled and settled[0][0].receipt is not None and self._sharing is not None:
            self._sharing.settle(settled)
        elif settled:
            now = whole_microseconds(self._now())

            def settle() -> None:
                for charge, actual in settled:
                    self._meters.settle(charge, charge.counted(actual), now)

            self._meters.do(settle)

    def _plausible(self, charge: Charge, actual: int) -> int:
        """Return the part of an actual cost that is counted.

        More than the limit admits in a whole period, on top of its burst and of the estimate, is an
        error of the reporter. It would close the limit for as long as that takes to pay off.
        """
        most = charge.asked + charge.meter.rule.overdraft
        if actual <= most:
            return actual
        self._report_implausible(charge.meter.limit, "cost", actual, most)
        return most

    def _report_implausible(self, limit: Limit, what: str, reported: float, counted: float) -> None:
        fields = {"policy": self.kind, "limit": limit.name, "what": what}
        for guard in [one.host.name for one in bindings_of(self)] or [self.name or limit.name]:
            emit(ImplausibleReport, guard, **fields, reported=reported, counted=counted)

    def _over(self, blocked: Blocked, now: float, why: str = "", who: str = "") -> RateLimited:
        limit = blocked.first.meter.limit
        named = limit.text if limit.name == limit.text else f"{limit.name!r} ({limit.text})"
        if blocked.wait is None:
            most = blocked.first.meter.rule.capacity
            why = f"a cost of {blocked.first.asked} never fits, {most} is the most"
        error = RateLimited(
            f"{who}over the limit {named}{f': {why}' if why else ''}",
            limit=limit.name,
            retry_after=_seconds(blocked.wait, now),
        )
        error.key = blocked.first.place
        return error

    def _now(self) -> float:
        return now_of(self)

    def _align(self, clock: Clock) -> None:
        """Align windows with those in a store. Only this method reads the time of day."""
        self._aligned_by = clock
        for meter in self._meters.all:
            meter.align(whole_microseconds(epoch_of(clock)))

    def _bind(self, host: Host) -> RateGate:
        if host.clock is not self._aligned_by:
            self._align(host.clock)
        if self._sharing is not None:
            return SharedRateGate(self, host, self._sharing)
        return RateGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        known = ("limits", "burst", "max_wait", "max_waiting", "max_keys", "mode")
        self._reject_unknown(changes, known)
        with self._meters.mutex, self._meters:  # concurrent updates both take effect
            self._change(changes)

    def _change(self, changes: dict[str, Any]) -> None:
        limits = changes.get("limits", self._given)
        several = isinstance(limits, Sequence) and not isinstance(limits, str)
        options = {
            **self._options,
            "max_wait": self.max_wait,
            "max_waiting": self.max_waiting,
            "max_keys": self.max_keys,
            "mode": self.mode,
            **{name: value for name, value in changes.items() if name != "limits"},
        }
        fresh = RateLimit(*(limits if several else (limits,)), **options)
        if len(fresh.limits) != len(self.limits) or not all(
            old._same_but_for_numbers(new)
            for old, new in zip(self.limits, fresh.limits, strict=True)
        ):
            raise ValueError(
                "update(limits=...): only rates, bursts, costs and names can change, not how many"
                " limits there are, their algorithms and functions; make a new RateLimit for that"
            )
        if self._sharing is not None:
            self._sharing.check([meter.rule for meter in fresh._meters.all])
        # Read the time only now: anything taken without the lock was taken before it.
        now = whole_microseconds(self._now())
        self.mode, self.max_wait, self.max_keys = fresh.mode, fresh.max_wait, fresh.max_keys
        self._given, self._options, self.limits = fresh._given, fresh._options, fresh.limits
        self._meters.max_waiting = fresh.max_waiting
        for meter, new in zip(self._meters.all, fresh._meters.all, strict=True):
            if self.pods > 1:
                new.divide(self.pods, now)
            meter.update(new, now)
        if self._sharing is not None:
            self._sharing.configure([meter.rule for meter in self._meters.all])
        self._meters.attend_all()

    def _follow(self, rules: Iterable[RateRule[Any]]) -> None:
        """Let the meters follow other rules, which convert the states."""
        with self._meters.mutex, self._meters:
            now = whole_microseconds(self._now())
            for meter, rule in zip(self._meters.all, rules, strict=True):
                meter.follow(rule, now)
            self._meters.attend_all()


def _seconds(wait: float | None, now: float) -> float | None:
    """Return in how many seconds from `now` a wait of whole microseconds is over.

    It is computed from the end time, so that a caller that waits this long is not a microsecond
    early.
    """
    return None if wait is None else max(0.0, (whole_microseconds(now) + wait) / 1e6 - now)
