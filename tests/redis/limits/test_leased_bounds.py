"""The bound of leased and split limits, over random histories of pods on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seawall import RateLimit
from seawall.clock import VirtualClock
from seawall.models.rate.rule import RateRule
from seawall.models.rate.split import BEAT
from seawall.redis import pods as pods_module
from seawall.redis.limits.leased import purses
from seawall.redis.limits.leased.share import LeasedLimits
from seawall.redis.store import RedisStore
from tests.models.rate.test_batches import Taken, most_over
from tests.redis.support import FrozenClock
from tests.support import falsified, new_guard

LIMITS: list[dict[str, Any]] = [
    {"limit": "20/s"},
    {"limit": "20/s", "burst": 4},
    {"limit": "20/s", "algorithm": "fixed_window"},
    {"limit": "20/s", "algorithm": "sliding_counter"},
    {"limit": "20/s", "algorithm": "sliding_log"},
    {"limit": "30/5s", "algorithm": "sliding_log"},
]
PODS = 3

Step = tuple[int, str, int]
STEPS = st.lists(
    st.tuples(
        st.integers(0, PODS - 1),
        st.sampled_from(["call", "call", "call", "pass", "pass", "kill", "close"]),
        st.integers(1, 12),
    ),
    max_size=14,
)
Case = tuple[int, int, list[Step]]
LEASED = st.tuples(st.integers(0, len(LIMITS) - 1), st.integers(1, 4), STEPS)


class World:
    """Pods on one server whose clock stands still between steps; each pod's goes with it."""

    def __init__(self, make: Callable[..., RedisStore], client: redis.Redis) -> None:
        self._make = make
        self.frozen = FrozenClock(make(), client)
        self._name = self.admitted = 0

    def run(self, sharing: str, options: dict[str, Any], steps: list[Step]) -> tuple[Any, Taken]:
        """Play a history with policies of a fresh name; return the rule and what was admitted."""
        self._name += 1
        return asyncio.run(self._play(sharing, dict(options), steps))

    async def _play(
        self, sharing: str, options: dict[str, Any], steps: list[Step]
    ) -> tuple[RateRule[Any], Taken]:
        self.clock = VirtualClock(1000.0)
        prefix = f"world-{self._name}"
        text = options.pop("limit")
        # On a whole second, so that the windows of the store and of the pods begin together.
        self.frozen.set((self.frozen.now_us // 1_000_000 + 100) * 1_000_000)

        async def start() -> Any:
            store = self._make(prefix=prefix)
            self.frozen.rule(store)
            limit = RateLimit(
                text,
                **options,
                shared=store,
                name="vendor",
                sharing=sharing,  # type: ignore[arg-type]
                on_store_failure="local" if sharing == "split" else "closed",
            )
            await store._core.pods.beat()
            return store, limit, new_guard(limit, clock=self.clock)

        pods = [await start() for _ in range(PODS)]
        spent: Taken = []
        for who, what, much in steps:
            store, limit, guard = pods[who]
            if what == "call":
                for _ in range(much):
                    if (await guard.aattempt(_nothing)).ok:
                        spent.append((float(self.frozen.now_us), 1))
            elif what == "pass":
                await self._pass(much, pods)
            else:
                if what == "kill" and isinstance(limit._sharing.share, LeasedLimits):
                    limit._sharing.share._forget()
                if what == "kill":
                    store._core.pods.members.known = False  # so it does not say goodbye
                await store.aclose()
                pods[who] = await start()
        for store, _limit, guard in pods:
            await store.aclose()
            guard.close()
        self.admitted += len(spent)
        return pods[0][1].limits[0]._rule(), spent

    async def _pass(self, much: int, pods: list[Any]) -> None:
        for _ in range(much):
            self.clock.advance(0.1)
            self.frozen.advance(BEAT // 5)
            for number, (store, limit, _guard) in enumerate(pods):
                if self.frozen.now_us // (BEAT // 5) % 5 == number:
                    await store._core.pods.beat()
                share = limit._sharing.share
                if isinstance(share, LeasedLimits):
                    share.return_expired()


async def _nothing() -> None:
    pass


@pytest.fixture
def world(
    new_store: Callable[..., RedisStore], client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """Return a world in which pods beat when they are told to."""
    monkeypatch.setattr(pods_module.LivePods, "start", lambda self: self._store._core.start())
    monkeypatch.setattr(pods_module, "BEAT_TIMEOUT", 30.0)  # a busy machine is no failure
    made = World(new_store, client)
    yield made
    client.delete(made.frozen._key)
    for key in client.scan_iter(match="world-*", count=1000):
        client.delete(key)


def leased_within(world: World, case: Case) -> None:
    """Demand that what pods admit is within the algorithm's own bound and the stated excess."""
    which, batch, steps = case
    rule, spent = world.run("leased", {**LIMITS[which], "batch": batch}, steps)
    assert most_over(rule, spent) <= PODS * batch


@pytest.mark.parametrize("which", range(len(LIMITS)))
def test_leased_pods_stay_within_the_stated_bound(world: World, which: int) -> None:
    """Calls, time that passes, pods that are killed or closed: the total is never above."""

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(st.integers(1, 4), STEPS)
    def check(batch: int, steps: list[Step]) -> None:
        leased_within(world, (which, batch, steps))

    check()
    assert world.admitted


def test_lots_that_are_given_back_and_still_spent_break_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ablation: who gives back what it goes on spending admits more than the bound."""

    def keep(self: Any, holder: Any, lot: Any) -> None:
        self.changes.append(purses.LotChange(holder, lot, lot.taken, lot.taken - lot.left))
        lot.until = float("inf")
        holder.purse._later.append(lot)

    monkeypatch.setattr(purses.PurseSection, "_give_back", keep)
    step = st.sampled_from([(0, "call", 3), (1, "call", 3), (0, "pass", 10), (0, "call", 12)])
    cases = st.tuples(st.just(5), st.just(2), st.lists(step, min_size=14, max_size=14))
    assert falsified(lambda case: leased_within(world, case), cases)


@pytest.mark.parametrize("which", range(len(LIMITS)))
def test_split_pods_stay_within_the_limit(world: World, which: int) -> None:
    """The parts of all pods together keep to the limit, while pods are killed and started."""

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(STEPS)
    def check(steps: list[Step]) -> None:
        options = dict(LIMITS[which])
        rule, spent = world.run("split", options, [(0, "pass", 65), *steps])
        rounding = PODS if options.get("algorithm") is None else 0
        assert most_over(rule, spent) <= rounding

    check()
    assert world.admitted
