"""The limits of one policy in a store.

The store decides. A request that it has just refused is refused here without asking again
(`RefusalCache`). While the store is unreachable, the policy follows `on_store_failure` and emits
an event.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from seawall import _checks as check
from seawall.errors import RateLimited, StoreUnavailable
from seawall.events import SettingsDiffer, StoreModeChanged
from seawall.events.bus import emit
from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.rates import whole_microseconds
from seawall.models.rate.rule import RateRule
from seawall.models.rate.windows import FixedWindow
from seawall.policies.rate_limit.meters import Blocked
from seawall.policies.rate_limit.reservation import Charge, Quota, Reservation
from seawall.runtime.policy import bindings_of
from seawall.runtime.store import LimitShare, LimitStore, LimitVerdict, Receipt

if TYPE_CHECKING:
    from seawall.policies.rate_limit.policy import RateLimit

SharingKind = Literal["exact", "leased", "split"]
OnStoreFailure = Literal["local", "open", "closed"]

AGAIN: Final = 1.0
"""`retry_after` of calls that are refused because the store is unreachable."""


class Sharing:
    """How a policy's limits are shared."""

    def __init__(
        self, policy: RateLimit, share: LimitShare, failing: OnStoreFailure, batch: int | None
    ) -> None:
        """Let `share` decide. While its store is unreachable, follow `failing`."""
        self._policy = policy
        self.share = share
        self._failing = failing
        self._batch = batch
        self.exhausted = RefusalCache()
        self.spends = share.sharing != "exact"
        """Whether calls may spend tokens that this pod already holds."""
        self.alone = 0
        """Number of calls that were decided without the store."""
        self.usual: tuple[Charge, ...] = self._usual()
        """The charges of every call, if all are the same; else empty.

        Shared by all calls, so immutable.
        """
        self._set_door()

    @classmethod
    def of(
        cls,
        policy: RateLimit,
        store: LimitStore | None,
        name: str | None,
        sharing: SharingKind,
        batch: int | None,
        on_store_failure: OnStoreFailure,
    ) -> Sharing | None:
        """Return how limits are shared; None if they are not. Invalid settings raise."""
        check.choice("sharing", sharing, ("exact", "leased", "split"))
        check.choice("on_store_failure", on_store_failure, ("local", "open", "closed"))
        if batch is not None:
            check.count("batch", batch)
            if sharing != "leased":
                raise ValueError(f"batch={batch!r}: it is for sharing='leased'")
        if store is None:
            if name is not None or sharing != "exact" or on_store_failure != "local":
                raise TypeError(
                    "name=, sharing= and on_store_failure= are for shared limits: write"
                    " RateLimit(..., shared=store, name='vendor')"
                )
            return None
        if isinstance(store, type) or not callable(getattr(store, "_limits", None)):
            raise TypeError(f"shared={store!r}: pass a store, such as RedisStore('redis://...')")
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"name={name!r}: shared limits need one, the same on all pods: write name='vendor'"
            )
        listener = _ShareListener(policy)
        share = store._limits(
            name,
            [meter.rule for meter in policy._meters.all],
            sharing=sharing,
            batch=batch,
            on_store_failure=on_store_failure,
            changed=listener.changed,
            differs=listener.differs,
            rerule=listener.rerule,
        )
        return cls(policy, share, on_store_failure, batch)

    def __repr__(self) -> str:
        return f"shared={self.share.store_name!r}, name={self._policy.name!r}"

    def snapshot(self) -> dict[str, Any]:
        """Return how it is shared, what decides now, and how many store requests were avoided."""
        return {
            **self.share.snapshot(),
            "known_exhausted": self.exhausted.used,
            "decided_alone": self.alone,
        }

    def check(self, rules: Sequence[RateRule[Any]]) -> None:
        """Raise if these rules are not possible with the settings."""
        for rule in rules:
            if self._batch is not None and rule.capacity and self._batch > rule.capacity:
                raise ValueError(
                    f"batch={self._batch}: more than {rule.capacity} is never granted at once;"
                    f" a limit that has batch={self._batch} cannot be lowered to that"
                )

    def configure(self, rules: Sequence[RateRule[Any]]) -> None:
        """Apply changed rules."""
        self.share.configure(rules)
        self.exhausted.clear()
        self.usual = self._usual()
        self._set_door()

    def _set_door(self) -> None:
        """Let gates spend directly, if every call takes the same and counts."""
        if self.share.door is not None:
            costs = [charge.cost for charge in self.usual if self._policy.mode != "off"]
            self.share.door.cost = costs[0] if costs and costs[0] else float("inf")

    def _usual(self) -> tuple[Charge, ...]:
        limits = self._policy.limits
        if any(limit.key or callable(limit.cost) or limit.settle for limit in limits):
            return ()
        return tuple(self._policy._charges((), {}))

    @property
    def failing(self) -> OnStoreFailure:
        """What to do without the store. A split limit always continues with its own part."""
        divided = self.share.away and self.share.mode == "shared"
        return "local" if divided else self._failing

    def own(self, charges: Sequence[Charge]) -> Sequence[Charge]:
        """Return a private copy of the charges for one call, which may change them."""
        return self._policy._charges((), {}) if charges is self.usual else charges

    def look(self, charges: Sequence[Charge], now: float) -> Blocked | None:
        """Return why the store would certainly refuse `charges`; None if it has to be asked."""
        known = self.exhausted.look(charges, whole_microseconds(now))
        if known is not None:
            self.exhausted.used += 1
        return known

    # Replies of the store

    def blocked(self, charges: Sequence[Charge], verdict: LimitVerdict) -> Blocked | None:
        """Return why the store refused `charges`; None if it has taken them."""
        if verdict.wait == 0:
            for charge in charges:
                charge.receipt = verdict.receipt
            return None
        return Blocked(charges[verdict.first], charges[verdict.longest], verdict.wait)

    def note(self, verdict: LimitVerdict, charges: Sequence[Charge], asked_at: float) -> None:
        """Cache a refusal. Its time counts from the request, which is no later than the reply."""
        if verdict.wait is not None:
            charge = charges[verdict.longest]
            asked = whole_microseconds(asked_at)
            until = asked + verdict.wait
            self.exhausted.note(verdict.longest, charge.key, charge.cost, asked, until)

    def settle(self, settled: Sequence[tuple[Charge, int]]) -> None:
        """Report the actual use to the store, and wake waiters."""
        meters = self._policy._meters
        used: list[int | None] = [None] * len(meters.all)
        for charge, actual in settled:
            used[meters.all.index(charge.meter)] = actual
        self.share.settle(settled[0][0].receipt, used)
        self._freed([charge for charge, actual in settled if actual < charge.cost])

    def give_back(self, receipt: Receipt, charges: Sequence[Charge]) -> None:
        """Report to the store that a call used nothing of what it took."""
        self.share.settle(receipt, [0] * len(charges))
        self._freed(charges)

    def _freed(self, freed: Sequence[Charge]) -> None:
        meters = self._policy._meters
        now = whole_microseconds(self._policy._now())
        for charge in freed:
            self.exhausted.free(meters.all.index(charge.meter), charge.key, now)

        def attend() -> None:
            for charge in freed:
                meters.attend(charge.meter, charge.place)

        if meters.waiting:
            meters.do(attend)

    # Without the store

    def part(self, charges: Sequence[Charge]) -> list[Charge]:
        """Return the same charges as taken by one of several pods from its part of the limits."""
        self.alone += 1
        times = self.share.times
        return [
            Charge(charge.meter, charge.key, charge.asked, estimated=charge.estimated, times=times)
            for charge in charges
        ]

    def tell(self, charges: Sequence[Charge]) -> None:
        """Let the store count calls admitted without it, if it is reachable but was late.

        Otherwise its budget and the pods' own would be spent at the same time.
        """
        share = self.share
        if not share.away and share.sharing != "split":
            share.count([(charge.key, charge.asked) for charge in charges])

    def closed(self, who: str = "") -> RateLimited:
        """Return the refusal of calls that cannot be decided now."""
        self.alone += 1
        name = self._policy._meters.all[0].limit.name
        error = RateLimited(
            f"{who}the store {self.share.store_name!r} is away, so it is not known what is left of"
            f" the limit {name!r}",
            limit=name,
            retry_after=AGAIN,
        )
        error.reason = StoreUnavailable.reason
        return error

    # Outside of guards

    def reserve(self, charges: Sequence[Charge]) -> Reservation:
        """Take the charges, or raise. Blocks this thread until the store replies."""
        if self.share.away:
            return self._reserve_alone(charges)
        _refuse_in_loop("reserve", "areserve")
        try:
            verdict = self.share.decide(charges)
        except StoreUnavailable:
            return self._reserve_alone(charges)
        return self._reserved(charges, verdict)

    async def areserve(self, charges: Sequence[Charge]) -> Reservation:
        """Async twin of `reserve`."""
        if self.share.away:
            return self._reserve_alone(charges)
        try:
            verdict = await self.share.adecide(charges)
        except StoreUnavailable:
            return self._reserve_alone(charges)
        return self._reserved(charges, verdict)

    def _reserved(self, charges: Sequence[Charge], verdict: LimitVerdict) -> Reservation:
        policy = self._policy
        return policy._reserved(charges, self.blocked(charges, verdict), policy._now())

    def _reserve_alone(self, charges: Sequence[Charge]) -> Reservation:
        policy = self._policy
        taken = Reservation(policy, [], charges)
        if self.failing == "local":
            taken = policy._reserve(self.part(charges))
        elif self.failing == "closed" and policy.mode == "enforce":
            policy._refuse_reserve(self.closed())
        else:
            self.alone += 1
        self.tell(charges)
        return taken

    def take_up_to(self, most: int, charges: Sequence[Charge]) -> int:
        """Take what is left, up to `most`. Blocks this thread until the store replies."""
        if self.share.away:
            return self._take_alone(most, charges)
        _refuse_in_loop("take_up_to", "atake_up_to")
        try:
            taken = self.share.take_up_to(most, charges)
        except StoreUnavailable:
            return self._take_alone(most, charges)
        return self._policy._enforced(taken, most)

    async def atake_up_to(self, most: int, charges: Sequence[Charge]) -> int:
        """Async twin of `take_up_to`."""
        if self.share.away:
            return self._take_alone(most, charges)
        try:
            taken = await self.share.atake_up_to(most, charges)
        except StoreUnavailable:
            return self._take_alone(most, charges)
        return self._policy._enforced(taken, most)

    def _take_alone(self, most: int, charges: Sequence[Charge]) -> int:
        policy = self._policy
        if self.failing == "local":
            taken = policy._take_up_to(most, self.part(charges))
        else:
            self.alone += 1
            taken = most if self.failing == "open" else policy._enforced(0, most)
        if taken:
            self.tell([charge.known(taken) for charge in charges])
        return taken

    def peek(self, charges: Sequence[Charge]) -> Quota:
        """Return the quota without taking anything. Blocks this thread until the store replies."""
        if self.share.away:
            return self._policy._peek(self.part(charges))
        _refuse_in_loop("peek", "apeek")
        try:
            verdict, standings = self.share.peek(charges)
        except StoreUnavailable:
            return self._policy._peek(self.part(charges))
        return self._seen(charges, verdict, standings)

    async def apeek(self, charges: Sequence[Charge]) -> Quota:
        """Async twin of `peek`."""
        if self.share.away:
            return self._policy._peek(self.part(charges))
        try:
            verdict, standings = await self.share.apeek(charges)
        except StoreUnavailable:
            return self._policy._peek(self.part(charges))
        return self._seen(charges, verdict, standings)

    def refuse_reset(self) -> None:
        """Raise where waiting for the store would block an event loop."""
        if not self.share.away:
            _refuse_in_loop("reset", "areset")

    def reset(self, charges: Sequence[Charge]) -> None:
        """Forget what was counted, in all pods. Blocks this thread until that is done."""
        self.share.reset(self._places(charges))
        self._freed(charges)

    async def areset(self, charges: Sequence[Charge]) -> None:
        """Async twin of `reset`."""
        await self.share.areset(self._places(charges))
        self._freed(charges)

    def _places(self, charges: Sequence[Charge]) -> list[tuple[int, Hashable]]:
        return [(self._policy._meters.all.index(charge.meter), charge.key) for charge in charges]

    def _seen(
        self,
        charges: Sequence[Charge],
        verdict: LimitVerdict,
        standings: Sequence[tuple[int, float]],
    ) -> Quota:
        policy = self._policy
        return policy._quota(charges, standings, self.blocked(charges, verdict), policy._now())


class _ShareListener:
    """Receives changes from the share, for a policy that may no longer exist."""

    def __init__(self, policy: RateLimit) -> None:
        from weakref import ref

        self._policy = ref(policy)

    def changed(self, before: str, after: str, cause: str) -> None:
        """Emit an event for each guard: the deciding party has changed."""
        policy = self._policy()
        if policy is None or policy._sharing is None:
            return
        policy._sharing.exhausted.clear()
        fields = {"policy": policy.kind, "store": policy._sharing.share.store_name}
        for bound in bindings_of(policy):
            emit(
                StoreModeChanged,
                bound.host.name,
                **fields,
                before=before,
                after=after,
                cause=cause,
            )

    def differs(self, own: str, other: str) -> None:
        """Report to all guards that another pod has different rules."""
        policy = self._policy()
        if policy is not None:
            fields = {"policy": policy.kind, "shared_name": policy.name, "own": own, "other": other}
            for bound in bindings_of(policy):
                emit(SettingsDiffer, bound.host.name, **fields)

    def rerule(self, rules: Iterable[RateRule[Any]]) -> None:
        """Let the meters follow other rules."""
        policy = self._policy()
        if policy is not None:
            policy._rerule(rules)


def _refuse_in_loop(name: str, twin: str) -> None:
    """Raise in an event loop, which would block until the store replies."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"{name}() of a shared limit would block the event loop: write `await limit.{twin}()`"
        )


BELIEVED: Final = 1_000_000.0
"""Microseconds for which a refusal is valid: another pod may give something back."""

ON_ITS_WAY: Final = 100_000.0
"""Microseconds that a returned cost may take to reach the store."""

KNOWN: Final = 10_000
"""Maximum number of cached refusals. Beyond it, ask the store."""


class RefusalCache:
    """Refusals that the store would repeat if it were asked again.

    Giving something back in this pod clears the entry of its key. Since other pods may give
    something back too, entries are valid only briefly. The store is asked where it is not certain
    when a larger cost would be admitted: a caller that comes back at the time it was given must not
    be refused again.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.known: dict[tuple[int, Hashable], tuple[int, float, float]] = {}
        """By limit and key: the refused cost, until when, and how long the entry is valid."""
        self._freed: dict[tuple[int, Hashable], float] = {}
        """When something was given back. Earlier refusals are no longer valid."""
        self.used = 0
        """Number of calls that were refused, or had to wait, without asking the store."""

    def note(self, limit: int, key: Hashable, cost: int, asked: float, until: float) -> None:
        """Record a cost that was refused until `until`. Times are in microseconds."""
        if self._freed:
            freed = self._freed.get((limit, key))
            if freed is not None and asked < freed + ON_ITS_WAY:
                return
            self._freed.pop((limit, key), None)
        if len(self.known) >= KNOWN and (limit, key) not in self.known:
            try:
                del self.known[next(iter(self.known))]  # the oldest
            except (StopIteration, KeyError, RuntimeError):
                pass  # another thread was faster
        self.known[limit, key] = cost, until, min(until, asked + BELIEVED)

    def free(self, limit: int, key: Hashable, now: float) -> None:
        """Remove the entry, because something is given back."""
        self.known.pop((limit, key), None)
        if len(self._freed) >= KNOWN:
            self._freed.clear()
        self._freed[limit, key] = now

    def clear(self) -> None:
        """Remove all entries."""
        self.known.clear()

    def look(self, charges: Sequence[Charge], now: float) -> Blocked | None:
        """Return why the charges would certainly be refused; None if the store must be asked."""
        if not self.known:
            return None
        first = longest = None
        most = 0.0
        for limit, charge in enumerate(charges):
            known = self.known.get((limit, charge.key)) if charge.cost else None
            if known is None:
                continue
            cost, until, believed = known
            if believed <= now:
                self.known.pop((limit, charge.key), None)
                continue
            later = _later(charge, cost)
            if later is None:
                continue
            first = first or charge
            if longest is None or until + later - now > most:
                longest, most = charge, until + later - now
        return None if first is None or longest is None else Blocked(first, longest, most)


def _later(charge: Charge, cost: int) -> float | None:
    """Return how much later the cost of `charge` is admitted than `cost`; None means ask."""
    if charge.cost == cost:
        return 0.0
    meter = charge.meter
    rule, most = meter.rule, meter.rule.capacity
    if charge.cost < cost or meter.caps or (most is not None and charge.cost > most):
        return None
    if isinstance(rule, TokenBucket):
        return rule.amount(charge.cost) - rule.amount(cost)
    return 0.0 if isinstance(rule, (LeakyBucket, FixedWindow)) else None
