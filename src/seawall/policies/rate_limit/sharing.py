"""The limits of one policy in a store.

The store decides. A request that it has just refused is refused here without asking again
(`RefusalCache`). While the store is unreachable, the policy follows `on_store_failure` and emits
an event.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from seawall import _checks as check
from seawall.errors import RateLimited, StoreUnavailable
from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.rates import whole_microseconds
from seawall.models.rate.rule import RateRule
from seawall.models.rate.windows import FixedWindow
from seawall.policies.rate_limit.meters import Blocked
from seawall.policies.rate_limit.reservation import Charge, Quota, Reservation
from seawall.runtime.driver import Steps, adrive, drive
from seawall.runtime.policy import PolicyShareOwner
from seawall.runtime.store import LimitShare, LimitVerdict, Receipt

if TYPE_CHECKING:
    from seawall.policies.rate_limit.policy import RateLimit

T = TypeVar("T")
SharingKind = Literal["exact", "leased", "split"]
OnStoreFailure = Literal["local", "open", "closed"]

AGAIN: Final = 1.0  # `retry_after` of calls that are refused because the store is unreachable


class Sharing:
    """How a policy's limits are shared."""

    def __init__(self, policy: RateLimit, share: LimitShare, store_name: str) -> None:
        self._policy = policy
        self._store_name = store_name
        self.share = share
        self.exhausted = RefusalCache()
        self.spends = share.sharing != "exact"
        """Whether calls may spend tokens that this pod already holds."""
        self.alone = 0  # number of calls that were decided without the store
        self.usual: tuple[Charge, ...] = ()
        """The charges of every call, if all are the same; else empty. Never changed."""
        self._find_usual()

    @classmethod
    def of(cls, policy: RateLimit) -> Sharing | None:
        """Return how the limits of `policy` are shared; None if not. Invalid settings raise."""
        store, name, sharing = policy.shared, policy.name, policy.sharing
        batch, failing = policy.batch, policy.on_store_failure
        check.choice("sharing", sharing, ("exact", "leased", "split"))
        check.choice("on_store_failure", failing, ("local", "open", "closed"))
        if batch is not None:
            check.count("batch", batch)
            if sharing != "leased":
                raise ValueError(f"batch={batch!r}: it is for sharing='leased'")
        if store is None:
            if name is not None or sharing != "exact" or failing != "local":
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
        share = store._limits(
            name,
            [meter.rule for meter in policy._meters.all],
            sharing=sharing,
            batch=batch,
            on_store_failure=failing,
            owner=_LimitShareOwner(policy),
        )
        return cls(policy, share, store.name)

    def __repr__(self) -> str:
        return f"shared={self._store_name!r}, name={self._policy.name!r}"

    def snapshot(self) -> dict[str, Any]:
        """Return how it is shared, what decides now, and how many store requests were avoided."""
        return {
            **self.share.snapshot(),
            "known_exhausted": self.exhausted.used,
            "decided_alone": self.alone,
        }

    def check(self, rules: Sequence[RateRule[Any]]) -> None:
        """Raise if these rules are not possible with the settings."""
        batch = self._policy.batch
        for rule in rules:
            if batch is not None and rule.capacity and batch > rule.capacity:
                raise ValueError(
                    f"batch={batch}: more than {rule.capacity} is never granted at once;"
                    f" a limit that has batch={batch} cannot be lowered to that"
                )

    def configure(self, rules: Sequence[RateRule[Any]]) -> None:
        """Apply changed rules."""
        self.share.configure(rules)
        self.exhausted.clear()
        self._find_usual()

    def _find_usual(self) -> None:
        """Let gates spend directly, if every call takes the same and counts."""
        policy = self._policy
        varies = any(one.key or callable(one.cost) or one.settle for one in policy.limits)
        self.usual = () if varies else tuple(policy._charges((), {}))
        if self.share.spend_path is not None:
            cost = self.usual[0].cost if self.usual and policy.mode != "off" else 0
            self.share.spend_path.cost = cost or float("inf")

    @property
    def failing(self) -> OnStoreFailure:
        """What to do without the store. A split limit always continues with its own part."""
        divided = self.share.away and self.share.mode == "shared"
        return "local" if divided else self._policy.on_store_failure

    def own(self, charges: Sequence[Charge]) -> Sequence[Charge]:
        """Return a private copy of the charges for one call, which may change them."""
        return self._policy._charges((), {}) if charges is self.usual else charges

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

    def own_part(self, charges: Sequence[Charge]) -> list[Charge]:
        """Return the same charges as taken by one of several pods from its part of the limits."""
        self.alone += 1
        return [charge.again(self.share.times) for charge in charges]

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
            f"{who}the store {self._store_name!r} is away, so it is not known what is left of"
            f" the limit {name!r}",
            limit=name,
            retry_after=AGAIN,
        )
        error.reason = StoreUnavailable.reason
        return error

    # Outside of guards

    def run(self, name: str, steps: Steps[T]) -> T:
        """Run the operation `name`, which blocks this thread until the store replies."""
        if not self.share.away:
            _refuse_in_loop(name)
        return drive(steps, lambda request: request.run())

    async def arun(self, steps: Steps[T]) -> T:
        """Async twin of `run`."""
        return await adrive(steps, lambda request: request.arun())

    def _ask(self, steps: Steps[T]) -> Steps[T | None]:
        """Return the reply of the store; None without the store."""
        if not self.share.away:
            try:
                return (yield from steps)
            except StoreUnavailable:
                pass
        return None

    def reserving(self, charges: Sequence[Charge]) -> Steps[Reservation]:
        """Take the charges, or raise."""
        policy = self._policy
        verdict = yield from self._ask(self.share.decide(charges))
        if verdict is not None:
            return policy._reserved(charges, self.blocked(charges, verdict), policy._now())
        taken = Reservation(policy, [], charges)
        if self.failing == "local":
            taken = policy._reserve(self.own_part(charges))
        elif self.failing == "closed" and policy.mode == "enforce":
            policy._refuse_reserve(self.closed())
        else:
            self.alone += 1
        self.tell(charges)
        return taken

    def taking(self, most: int, charges: Sequence[Charge]) -> Steps[int]:
        """Take what is left, up to `most`."""
        policy = self._policy
        taken = yield from self._ask(self.share.take_up_to(most, charges))
        if taken is not None:
            return policy._enforced(taken, most)
        if self.failing == "local":
            taken = policy._take_up_to(most, self.own_part(charges))
        else:
            self.alone += 1
            taken = most if self.failing == "open" else policy._enforced(0, most)
        if taken:
            self.tell([charge.known(taken) for charge in charges])
        return taken

    def peeking(self, charges: Sequence[Charge]) -> Steps[Quota]:
        """Return the quota without taking anything."""
        policy = self._policy
        reply = yield from self._ask(self.share.peek(charges))
        if reply is None:
            return policy._peek(self.own_part(charges))
        verdict, standings = reply
        blocked = self.blocked(charges, verdict)
        return policy._quota(charges, standings, blocked, policy._now())

    def resetting(self, charges: Sequence[Charge]) -> Steps[None]:
        """Forget what was counted, here and then in all pods; raise if the store fails."""
        self._policy._reset(charges)
        meters = self._policy._meters.all
        places = [(meters.index(charge.meter), charge.key) for charge in charges]
        yield from self.share.reset(places)
        self._freed(charges)


class _LimitShareOwner(PolicyShareOwner):
    """What a store's share knows of its rate limit."""

    _policy: Callable[[], RateLimit | None]

    def mode_changed(self, before: str, after: str, cause: str) -> None:
        """Forget cached refusals, and emit an event for each guard of the policy."""
        policy = self._policy()
        if policy is not None and policy._sharing is not None:
            policy._sharing.exhausted.clear()
            super().mode_changed(before, after, cause)

    def follow(self, rules: Iterable[RateRule[Any]]) -> None:
        policy = self._policy()
        if policy is not None:
            policy._follow(rules)


def _refuse_in_loop(name: str) -> None:
    """Raise in an event loop, which would block until the store replies."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"{name}() of a shared limit would block the event loop: write `await limit.a{name}()`"
        )


BELIEVED: Final = 1_000_000.0
"""Microseconds for which a refusal is valid: another pod may give something back."""

ON_ITS_WAY: Final = 100_000.0  # microseconds that a returned cost may take to reach the store

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
        self.known: dict[tuple[int, Hashable], tuple[int, float, float]] = {}
        """By limit and key: the refused cost, until when, and how long the entry is valid."""
        self._freed: dict[tuple[int, Hashable], float] = {}
        """When something was given back. Earlier refusals are no longer valid."""
        self.used = 0  # number of calls that were refused, or had to wait, without asking the store

    def note(self, limit: int, key: Hashable, cost: int, asked: float, until: float) -> None:
        """Record a cost that was refused until `until`. Times are in microseconds."""
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
        now = whole_microseconds(now)
        waits: list[tuple[Charge, float | None]] = []
        for limit, charge in enumerate(charges):
            known = self.known.get((limit, charge.key)) if charge.cost else None
            if known is None:
                continue
            cost, until, believed = known
            if believed <= now:
                self.known.pop((limit, charge.key), None)
            elif (later := _later(charge, cost)) is not None:
                waits.append((charge, until + later - now))
        self.used += bool(waits)
        return Blocked.by(waits)


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
