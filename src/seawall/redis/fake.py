"""A store in memory, for tests: policies that pods share, without a server.

Promises:
- Rate limits follow the same rules as in a real store, breakers those of a service with one pod,
  and heartbeats are those of one process.
- Time is that of a clock, nothing waits, and no thread is started.
- `fail()` and `recover()` take effect immediately; policies then follow their `on_store_failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, Self
from weakref import WeakKeyDictionary, WeakSet

from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.errors import StoreUnavailable
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerState, Ticket
from seawall.models.rate.buckets import Account, SettledBucket, TokenBucket
from seawall.models.rate.caps import Caps
from seawall.models.rate.rates import whole_microseconds
from seawall.models.rate.rule import RateRule
from seawall.models.rate.split import check_divisible
from seawall.redis.keys import key_part
from seawall.runtime.store import (
    MEMORY,
    LimitStanding,
    LimitVerdict,
    MemberBeat,
    Receipt,
    Sighting,
    WantedCharge,
)

if TYPE_CHECKING:
    from seawall.runtime.layers import Kind
    from seawall.runtime.store import BeatShare, BreakerOwner, BreakerShare, LimitShare, SpendPath

UNCOUNTED: Final = 0
"""Ticket of a call that passed while nothing was counted; no generation has this number."""


class FakeStore:
    """Stands in for a `RedisStore` in tests, in the memory of this process.

    Limits of one name count together, across policies. A breaker counts the calls of its own
    policy, as if there were one pod. Leases and queues need a real server.
    """

    def __init__(self, *, name: str = "fake", clock: Clock | None = None) -> None:
        """Keep limits by `clock`; by default the clock that guards made here would have."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write text, such as name='orders'")
        self.name = name
        self.clock = current_clock() if clock is None else check_clock(clock)
        self.closed = False
        """Whether it was closed: then it never comes back."""
        self.up = True
        """Whether it answers."""
        self._lock = RLock()
        self._places: dict[tuple[str, int, str], _Place] = {}
        self._shares: WeakKeyDictionary[_Limits | _Breakers, None] = WeakKeyDictionary()
        self._groups: dict[str, _Heartbeats] = {}
        registry.enter(self, "store", name)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.up else "down"
        return f"<FakeStore {self.name!r}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store is not for pickling: make one in each process")

    def fail(self) -> None:
        """Be unreachable from now on: policies follow their `on_store_failure`."""
        self._switch(up=False, cause="fail() was called")

    def recover(self) -> None:
        """Answer again. Counts from before `fail()` are still known."""
        if self.closed:
            raise RuntimeError(f"{self!r} does not come back: make another FakeStore")
        self._switch(up=True, cause="recover() was called")

    def close(self) -> None:
        """Be unreachable for good."""
        self.closed = True
        self._switch(up=False, cause="the store was closed")

    async def aclose(self) -> None:
        """Async twin of `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the store."""
        return {"name": self.name, "at": "memory", "up": self.up}

    def _limits(self, name: str, rules: Sequence[RateRule[Any]], **how: Any) -> LimitShare:
        """Return the rate limits that are shared under `name`; see `LimitStore`."""
        share = _Limits(self, name, rules, **how)
        self._shares[share] = None
        return share

    def _heartbeats(self, group: str) -> BeatShare:
        """Return the heartbeats that the members of `group` write; see `BeatStore`."""
        return self._groups.setdefault(group, _Heartbeats(self))

    def _breaker(
        self, name: str, settings: BreakerSettings, owner: BreakerOwner, **how: Any
    ) -> BreakerShare:
        """Return the breakers of one policy; see `BreakerStore`."""
        share = _Breakers(self, name, settings, owner, **how)
        self._shares[share] = None
        return share

    def _switch(self, *, up: bool, cause: str) -> None:
        if up != self.up:
            self.up = up
            for share in list(self._shares):
                share.switched(cause)


def _modes(store: FakeStore, failing: str) -> tuple[str, str]:
    """Return what decided before the store changed, and what decides now."""
    return (failing, "shared") if store.up else ("shared", failing)


# Rate limits


class _Place:
    """The counts of one key of one limit."""

    __slots__ = ("_bucket", "caps", "rule", "state")

    def __init__(self, rule: RateRule[Any], now: float) -> None:
        self.caps = Caps()
        self._set(rule, rule.fresh(now))

    def _set(self, rule: RateRule[Any], state: Any) -> None:
        """Count by `rule`; a token bucket tracks estimates, as in a server."""
        self.rule = rule
        self._bucket = SettledBucket(rule) if isinstance(rule, TokenBucket) else None
        self.state = state if self._bucket is None else Account(state)

    @property
    def _counting(self) -> RateRule[Any]:
        return self.rule if self._bucket is None else self._bucket

    def follow(self, rule: RateRule[Any], now: float) -> None:
        """Continue with `rule`; one of another algorithm starts over."""
        state = self.state.owed_until if isinstance(self.state, Account) else self.state
        same = type(rule) is type(self.rule)
        self._set(rule, rule.adopt(state, self.rule, now) if same else rule.fresh(now))

    def wait(self, now: float, cost: int) -> float | None:
        """Return how long `cost` has to wait: 0 if it may go now, None if it never may."""
        wait = self._counting.wait(self.state, now, cost)
        return None if wait is None else max(wait, self.caps.wait(now, cost))

    def take(self, now: float, cost: int, *, estimated: bool = False) -> _Taken:
        """Take `cost` unconditionally."""
        self.caps.take(cost)
        if estimated and self._bucket is not None:
            self.state, mark = self._bucket.estimate(self.state, now, cost)
            return _Taken(self, self.state, cost, mark, now, estimated=True)
        self.state, mark = self._counting.take(self.state, now, cost)
        return _Taken(self, self.rule, cost, mark, now, estimated=False)

    def owe(self, cost: int, now: float) -> None:
        """Count `cost` that was used beyond an estimate."""
        self.state = self._counting.owe(self.state, now, cost)
        self.caps.take(cost)

    def settle(self, taken: _Taken, used: int, now: float) -> None:
        """Count `used` instead of what was taken.

        What was taken under other settings, or before a reset, is not given back.
        """
        cost = taken.cost
        if used > cost:
            self.owe(used - cost, now)
        elif used < cost and taken.place is self and taken.by is self._taker(taken.estimated):
            if taken.estimated and self._bucket is not None:
                self._bucket.settle(self.state, now, cost, used, taken.mark)
            else:
                self.state = self._counting.give_back(self.state, now, cost, used, taken.mark)
            self.caps.give_back(cost - used, taken.at)
        if taken.estimated:
            taken.by.end(taken.mark)

    def _taker(self, estimated: bool) -> Any:  # noqa: FBT001 - as it was taken
        return self.state if estimated else self.rule

    def standing(self, now: float) -> LimitStanding:
        """Return what is left, and the time until all usage is forgotten."""
        rule = self._counting
        left, rest = rule.left(self.state, now), rule.rest(self.state, now)
        return LimitStanding(self.caps.left(now, left), max(rest, self.caps.rest(now)))

    def refill(self, now: float) -> LimitStanding:
        """Return what is left, and the time until there is more, or else until all is forgotten."""
        left, rest = self.standing(now)
        wait = self.wait(now, left + 1)
        return LimitStanding(left, rest if wait is None else wait)


class _Taken(NamedTuple):
    """What was taken from one limit."""

    place: _Place
    by: Any
    """The rule by which it was taken; for an estimate, the account in which it is open."""
    cost: int
    mark: float
    at: float
    estimated: bool


class _FakeReceipt:
    """What one call took, by the number of each limit; settled once."""

    def __init__(
        self, keys: list[Hashable], taken: dict[int, _Taken], standings: dict[int, LimitStanding]
    ) -> None:
        self.keys = keys
        self.taken = taken
        self.standings = standings


class _Limits:
    """The limits of one policy in a fake store: `LimitShare`. Each decision is exact."""

    door: SpendPath | None = None
    excess: tuple[int, ...] = ()
    times = 1

    def __init__(
        self,
        store: FakeStore,
        name: str,
        rules: Sequence[RateRule[Any]],
        *,
        sharing: str,
        on_store_failure: str,
        changed: Callable[[str, str, str], None],
        **_how: Any,
    ) -> None:
        self.sharing = sharing
        self._store = store
        self._name = name
        self.configure(rules)
        self._failing = on_store_failure
        self._changed = changed
        self._asks = 0

    @property
    def mode(self) -> str:
        return "shared" if self._store.up else self._failing

    @property
    def away(self) -> bool:
        return not self._store.up

    @property
    def store_name(self) -> str:
        return self._store.name

    def switched(self, cause: str) -> None:
        """Report that the store failed, or recovered."""
        before, after = _modes(self._store, self._failing)
        self._changed(before, after, cause)

    def configure(self, rules: Sequence[RateRule[Any]]) -> None:
        if self.sharing != "exact":
            check_divisible(self.sharing, rules)
        self._rules = tuple(rules)

    def see(self) -> None:
        """Do nothing: receipts always have their standings."""

    def snapshot(self) -> dict[str, Any]:
        return {
            "store": self._store.name,
            "sharing": self.sharing,
            "mode": self.mode,
            "asks": self._asks,
        }

    # Decisions

    def spend(self, charges: Sequence[WantedCharge], now: float) -> None:
        """Hold nothing in advance."""

    def ask(self, kind: Kind, charges: Sequence[WantedCharge], clock: Clock) -> _Question:
        return _Question(self, charges)

    async def answer(self, charges: Sequence[WantedCharge], clock: Clock) -> LimitVerdict:
        return self.decide(charges)

    def decide(self, charges: Sequence[WantedCharge]) -> LimitVerdict:
        with self._store._lock:
            now, places = self._asked(charges)
            refusal = _refusal(charges, places, now)
            if refusal is not None:
                return refusal
            return LimitVerdict(0.0, receipt=self._take(charges, now))

    async def adecide(self, charges: Sequence[WantedCharge]) -> LimitVerdict:
        return self.decide(charges)

    def take_up_to(self, most: int, charges: Sequence[WantedCharge]) -> int:
        with self._store._lock:
            now, places = self._asked(charges)
            both = list(zip(charges, places, strict=True))
            taken = min([most, *(p.standing(now).left for c, p in both if c.estimated)])
            fixed = [c for c in charges if not c.estimated]
            others = [p for c, p in both if not c.estimated]
            if taken <= 0 or _refusal(fixed, others, now) is not None:
                return 0
            self.count([(c.key, taken if c.estimated else c.cost) for c in charges])
            return taken

    async def atake_up_to(self, most: int, charges: Sequence[WantedCharge]) -> int:
        return self.take_up_to(most, charges)

    def peek(self, charges: Sequence[WantedCharge]) -> tuple[LimitVerdict, Sequence[LimitStanding]]:
        with self._store._lock:
            now, places = self._asked(charges)
            verdict = _refusal(charges, places, now) or LimitVerdict(0.0)
            return verdict, [place.standing(now) for place in places]

    async def apeek(
        self, charges: Sequence[WantedCharge]
    ) -> tuple[LimitVerdict, Sequence[LimitStanding]]:
        return self.peek(charges)

    # Reports

    def count(self, costs: Sequence[tuple[Hashable, int]]) -> None:
        if self._store.up:
            with self._store._lock:
                now = self._now()
                for limit, (key, cost) in enumerate(costs):
                    if cost:
                        self._kept(limit, key, now).take(now, cost)

    def settle(self, receipt: Receipt, used: Sequence[int | None]) -> None:
        assert isinstance(receipt, _FakeReceipt)  # noqa: S101 - it came from here
        with self._store._lock:
            now = self._now()
            keys, receipt.keys = receipt.keys, []
            for limit, key in enumerate(keys if self._store.up else ()):
                actual, taken = used[limit], receipt.taken.get(limit)
                if taken is not None:
                    used_up = taken.cost if actual is None else actual
                    self._kept(limit, key, now).settle(taken, used_up, now)
                elif actual:
                    self._kept(limit, key, now).owe(actual, now)

    def lower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        if self._store.up:
            with self._store._lock:
                now = self._now()
                self._kept(limit, key, now).caps.lower(now, remaining, now + reset_after)

    async def alower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        self._refuse_if_down()
        self.lower(limit, key, remaining, reset_after)

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> None:
        self._refuse_if_down()
        with self._store._lock:
            for limit, key in places:
                fresh = _Place(self._rules[limit], self._now())
                self._store._places[self._where(limit, key)] = fresh

    async def areset(self, places: Sequence[tuple[int, Hashable]]) -> None:
        self.reset(places)

    # Inside

    def _now(self) -> float:
        return whole_microseconds(self._store.clock.now())

    def _refuse_if_down(self) -> None:
        if not self._store.up:
            raise StoreUnavailable(f"the store {self._store.name!r} is down")

    def _asked(self, charges: Sequence[WantedCharge]) -> tuple[float, list[_Place]]:
        self._refuse_if_down()
        self._asks += 1
        now = self._now()
        return now, [self._place(limit, one.key, now) for limit, one in enumerate(charges)]

    def _where(self, limit: int, key: Hashable) -> tuple[str, int, str]:
        """Return the key of a place; a key that cannot be shared raises, as in a real store."""
        return self._name, limit, key_part(key)

    def _place(self, limit: int, key: Hashable, now: float) -> _Place:
        """Return the place of `key`; a new place is not kept yet."""
        rule = self._rules[limit]
        place = self._store._places.get(self._where(limit, key))
        if place is None:
            return _Place(rule, now)
        if place.rule is not rule:
            place.follow(rule, now)
        return place

    def _kept(self, limit: int, key: Hashable, now: float) -> _Place:
        """Return the place of `key` and keep it, because something will be counted there."""
        place = self._store._places[self._where(limit, key)] = self._place(limit, key, now)
        return place

    def _take(self, charges: Sequence[WantedCharge], now: float) -> _FakeReceipt:
        taken = {}
        for limit, charge in enumerate(charges):
            if charge.cost:
                place = self._kept(limit, charge.key, now)
                taken[limit] = place.take(now, charge.cost, estimated=charge.estimated)
        standings = {limit: one.place.refill(now) for limit, one in taken.items()}
        return _FakeReceipt([charge.key for charge in charges], taken, standings)


def _refusal(
    charges: Sequence[WantedCharge], places: Sequence[_Place], now: float
) -> LimitVerdict | None:
    """Return why the charges cannot all be taken now; None if they can."""
    waits = {}
    for limit, (charge, place) in enumerate(zip(charges, places, strict=True)):
        wait = place.wait(now, charge.cost) if charge.cost else 0.0
        if wait is None:
            return LimitVerdict(None, limit, limit)
        if wait:
            waits[limit] = wait
    if not waits:
        return None
    longest = max(waits, key=lambda limit: waits[limit])
    return LimitVerdict(waits[longest], min(waits), longest)


class _Question:
    """A call that asks a fake store: a `Waiter` which has its answer immediately."""

    until: float | None = None

    def __init__(self, share: _Limits, charges: Sequence[WantedCharge]) -> None:
        self._share = share
        self._charges = charges
        self._verdict: LimitVerdict | None = None

    def publish(self, wake: Callable[[], bool]) -> None:
        if self._share._store.up:
            self._verdict = self._share.decide(self._charges)
        wake()

    def claim(self) -> LimitVerdict:
        if self._verdict is None:
            raise StoreUnavailable(f"the store {self._share.store_name!r} is down")
        return self._verdict

    def abandon(self) -> None:
        verdict, self._verdict = self._verdict, None
        if verdict is not None and verdict.receipt is not None:
            self._share.settle(verdict.receipt, [0] * len(self._charges))


# Breakers


class _Breakers:
    """The breakers of one policy in a fake store: `BreakerShare`."""

    def __init__(
        self,
        store: FakeStore,
        name: str,
        settings: BreakerSettings,
        owner: BreakerOwner,
        *,
        on_store_failure: str,
        quorum: int | None,
        keyed: bool,
    ) -> None:
        self._store = store
        self._name = name
        self._settings = settings
        self._owner = owner
        self._failing = on_store_failure
        self.quorum = quorum
        self._keyed = keyed
        self._models: WeakSet[_SharedModel] = WeakSet()

    @property
    def away(self) -> Literal["local", "open", "closed"] | None:
        """What is done without the store; None while it answers."""
        return None if self._store.up else self._failing  # type: ignore[return-value]

    def switched(self, cause: str) -> None:
        """Let the models continue without the store, or with it again."""
        with self._owner.mutex:
            for model in list(self._models):
                model.recount()
        before, after = _modes(self._store, self._failing)
        self._owner.mode_changed(before, after, cause)

    def model(self, key: Hashable) -> BreakerModel:
        if self._keyed:
            key_part(key)  # a key that cannot be shared raises, as in a real store
        model = _SharedModel(self, self._settings)
        self._models.add(model)
        return model

    def forget(self, model: BreakerModel) -> None:
        """Do nothing: models are held weakly."""

    def begin(self) -> None:
        """Do nothing: there are no other pods."""

    def ask(self, kind: Kind, model: BreakerModel, clock: Clock) -> NoReturn:
        """Never called: a model here always knows its state."""
        raise NotImplementedError

    def update(self, settings: BreakerSettings) -> None:
        self._settings = settings

    def snapshot(self) -> dict[str, Any]:
        mode = self.away or "shared"
        return {"name": self._name, "store": self._store.name, "mode": mode, "quorum": self.quorum}


class _SharedModel(BreakerModel):
    """A breaker of the only pod."""

    __slots__ = ("__weakref__", "_share")

    def __init__(self, share: _Breakers, settings: BreakerSettings) -> None:
        self._share = share
        super().__init__(settings)

    def admit(self, now: float) -> Ticket | BreakerRefusal:
        """Admit a call, or return why not."""
        away = self._share.away
        if away in ("open", "closed") and self.state is not BreakerState.ISOLATED:
            return UNCOUNTED if away == "open" else BreakerRefusal("store", None)
        return super().admit(now)

    def recount(self) -> None:
        """Allow the path without `admit` only while the model decides by its own state."""
        self._count_in(self._window)

    def _judge(self, now: float) -> None:
        quorum = self._share.quorum
        # One vote is no quorum of two. Without the store, the pod's own calls decide.
        if self._share.away is not None or quorum is None or quorum == 1:
            super()._judge(now)

    def _is_simple(self) -> bool:
        return self._share.away in (None, "local") and super()._is_simple()


# Heartbeats


class _Heartbeats:
    """The heartbeats of a group of members in this process: `BeatShare`."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self._beats: dict[str, float] = {}
        self._left: dict[str, float] = {}

    async def beat(self, member: str, most: int, patience: float) -> Sighting:
        now = self._now()
        self._left.pop(member, None)
        self._beats.pop(member, None)
        self._beats[member] = now  # the latest is the last
        for kept in (self._beats, self._left):
            for name in [name for name, at in kept.items() if at <= now - MEMORY]:
                del kept[name]
        latest = list(self._beats.items())[: -most - 1 : -1]
        return Sighting([MemberBeat(name, at, now - at) for name, at in latest], list(self._left))

    async def leave(self, member: str, patience: float) -> None:
        now = self._now()
        self._beats.pop(member, None)
        self._left[member] = now

    def _now(self) -> float:
        if not self._store.up:
            raise StoreUnavailable(f"the store {self._store.name!r} is down")
        return self._store.clock.now()
