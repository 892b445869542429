"""A store in memory, for tests: policies that pods share, without a server.

Promises:
- Rate limits follow the same rules as in a real store, breakers those of a service with one pod,
  and heartbeats are those of one process.
- Time is that of a clock, nothing waits, and no thread is started.
- `fail()` and `recover()` take effect immediately; policies then follow their `on_store_failure`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self
from weakref import WeakKeyDictionary, WeakSet

from seawall import registry
from seawall._checks import MOST
from seawall.clock import Clock, check_clock, current_clock
from seawall.errors import StoreUnavailable
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerState, Ticket
from seawall.models.rate.rates import whole_microseconds
from seawall.models.rate.rule import RateRule
from seawall.models.rate.split import check_divisible
from seawall.policies.rate_limit.meters import Meter, Meters
from seawall.policies.rate_limit.reservation import Charge
from seawall.redis.breaker.mirror import UNCOUNTED
from seawall.redis.keys import key_part
from seawall.runtime.store import (
    MEMORY,
    LimitStanding,
    LimitVerdict,
    MemberBeat,
    Receipt,
    Sighting,
    StoreQuestion,
    WantedCharge,
)

if TYPE_CHECKING:
    from seawall.runtime.driver import Steps
    from seawall.runtime.layers import Kind
    from seawall.runtime.store import (
        BeatShare,
        BreakerOwner,
        BreakerShare,
        LimitOwner,
        LimitShare,
        SpendPath,
    )


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
        self._meters: dict[str, Meters] = {}
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


class _FakeReceipt:
    """What one call took; settled once."""

    def __init__(self, charges: list[Charge], standings: dict[int, LimitStanding]) -> None:
        self.charges = charges
        self.standings = standings


class _Limits:
    """The limits of one policy in a fake store: `LimitShare`. Each decision is exact.

    Operations are steps that yield nothing, since nothing waits here.
    """

    spend_path: SpendPath | None = None
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
        owner: LimitOwner,
        **_how: Any,
    ) -> None:
        self.sharing = sharing
        self._store = store
        self._name = name
        self.configure(rules)
        self._failing = on_store_failure
        self._owner = owner
        self._asks = 0

    @property
    def mode(self) -> str:
        return "shared" if self._store.up else self._failing

    @property
    def away(self) -> bool:
        return not self._store.up

    def switched(self, cause: str) -> None:
        """Report that the store failed, or recovered."""
        before, after = _modes(self._store, self._failing)
        self._owner.mode_changed(before, after, cause)

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

    def ask(self, kind: Kind, charges: Sequence[WantedCharge], clock: Clock) -> StoreQuestion:
        return StoreQuestion(
            self, charges, None, lambda asked: asked.deliver(self._decide(charges))
        )

    def unwanted(self, charges: Sequence[WantedCharge], verdict: LimitVerdict) -> None:
        """Give back what was granted to a caller that has given up."""
        if verdict.receipt is not None:
            self.settle(verdict.receipt, [0] * len(charges))

    async def answer(self, charges: Sequence[WantedCharge], clock: Clock) -> LimitVerdict:
        return self._decide(charges)

    def decide(self, charges: Sequence[WantedCharge]) -> Steps[LimitVerdict]:
        yield from ()
        return self._decide(charges)

    def _decide(self, charges: Sequence[WantedCharge]) -> LimitVerdict:
        with self._store._lock:
            now, meters, asked = self._asked(charges)
            refusal = _refusal(meters, asked, now)
            if refusal is not None:
                return refusal
            meters.take(asked, now)
            standings = {
                number: LimitStanding(*charge.meter.refill(charge.place, now))
                for number, charge in enumerate(asked)
                if charge.cost
            }
            return LimitVerdict(0.0, receipt=_FakeReceipt(asked, standings))

    def take_up_to(self, most: int, charges: Sequence[WantedCharge]) -> Steps[int]:
        yield from ()
        with self._store._lock:
            now, meters, asked = self._asked(charges)
            left = [c.meter.standing(c.place, now)[0] for c in asked if c.estimated]
            taken = min([most, *left])
            fixed = [charge for charge in asked if not charge.estimated]
            if taken <= 0 or _refusal(meters, fixed, now) is not None:
                return 0
            meters.take([charge.known(taken) for charge in asked], now)
            return taken

    def peek(
        self, charges: Sequence[WantedCharge]
    ) -> Steps[tuple[LimitVerdict, Sequence[LimitStanding]]]:
        yield from ()
        with self._store._lock:
            now, meters, asked = self._asked(charges)
            verdict = _refusal(meters, asked, now) or LimitVerdict(0.0)
            standings = [c.meter.standing(c.place, now) for c in asked]
            return verdict, [LimitStanding(*standing) for standing in standings]

    # Reports

    def count(self, costs: Sequence[tuple[Hashable, int]]) -> None:
        if self._store.up:
            with self._store._lock:
                meters = self._meters()
                charges = [
                    Charge(meter, key_part(key), cost, estimated=False)
                    for meter, (key, cost) in zip(meters.all, costs, strict=True)
                ]
                meters.take(charges, self._now())

    def settle(self, receipt: Receipt, used: Sequence[int | None]) -> None:
        assert isinstance(receipt, _FakeReceipt)  # noqa: S101 - it came from here
        with self._store._lock:
            charges, receipt.charges = receipt.charges, []
            meters = self._meters()
            for charge, actual in zip(charges, used, strict=False):
                if self._store.up:
                    meters.settle(charge, charge.cost if actual is None else actual, self._now())

    def lower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        if self._store.up:
            with self._store._lock:
                now = self._now()
                meter = self._meters().all[limit]
                meter.lower(key_part(key), now, remaining, now + reset_after)

    def confirmed_lower(
        self, limit: int, key: Hashable, remaining: int, reset_after: float
    ) -> Steps[None]:
        yield from ()
        self._refuse_if_down()
        self.lower(limit, key, remaining, reset_after)

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> Steps[None]:
        yield from ()
        self._refuse_if_down()
        with self._store._lock:
            meters = self._meters().all
            for limit, key in places:
                meters[limit].reset(key_part(key), self._now())

    # Inside

    def _now(self) -> float:
        return whole_microseconds(self._store.clock.now())

    def _refuse_if_down(self) -> None:
        if not self._store.up:
            raise StoreUnavailable(f"the store {self._store.name!r} is down")

    def _asked(self, charges: Sequence[WantedCharge]) -> tuple[float, Meters, list[Charge]]:
        """Return the charges at the store's own meters; keys that cannot be shared raise."""
        self._refuse_if_down()
        self._asks += 1
        meters = self._meters()
        asked = [
            Charge(meter, key_part(charge.key), charge.cost, estimated=charge.estimated)
            for meter, charge in zip(meters.all, charges, strict=True)
        ]
        return self._now(), meters, asked

    def _meters(self) -> Meters:
        """Return the meters of all policies of this name, which follow the rules of this one."""
        known, now = self._store._meters.get(self._name), self._now()
        old = {} if known is None else dict(enumerate(known.all))
        meters = [_follow(old.get(n), rule, now) for n, rule in enumerate(self._rules)]
        if known is None or known.all != tuple(meters):
            known = self._store._meters[self._name] = Meters(meters, 0)
        return known


def _follow(meter: Meter | None, rule: RateRule[Any], now: float) -> Meter:
    """Return the meter, which follows `rule` from now on; a new one for another algorithm."""
    if meter is None or type(meter.rule) is not type(rule):
        limit: Any = SimpleNamespace(_rule=lambda: rule, key=key_part, cost=None, settle=None)
        return Meter(limit, MOST)
    old = meter.rule
    if (old.rate, old.capacity, old.debt) != (rule.rate, rule.capacity, rule.debt):
        meter.follow(rule, now)
    return meter


def _refusal(meters: Meters, charges: Sequence[Charge], now: float) -> LimitVerdict | None:
    """Return why the charges cannot all be taken now; None if they can."""
    blocked = meters.look(charges, now)
    if blocked is None:
        return None
    first, longest = (meters.all.index(one.meter) for one in (blocked.first, blocked.longest))
    return LimitVerdict(blocked.wait, first, longest)


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

    def ask(self, *_how: object) -> NoReturn:
        """Never called: a model here always knows its state."""
        raise NotImplementedError

    def update(self, settings: BreakerSettings) -> None:
        self._settings = settings

    def snapshot(self) -> dict[str, Any]:
        mode = self.away or "shared"
        return {"name": self._name, "store": self._store.name, "mode": mode, "quorum": self.quorum}


class _SharedModel(BreakerModel):
    """A breaker of the only pod."""

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
