"""`sharing="leased"`: what is spent without asking, and what goes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
import redis

from seawall import Bulkhead, RateLimit, RateLimited
from seawall.clock import SYSTEM, VirtualClock
from seawall.errors import BulkheadFull
from seawall.limits import Limit
from seawall.redis.limits.leased import share as leased_share
from seawall.redis.limits.leased.purses import BatchRequest, GrantedBatch, RefusedBatch
from seawall.redis.limits.leased.share import LeasedLimits
from seawall.redis.limits.shared import SharedLimits
from seawall.redis.store import RedisStore
from seawall.runtime.driver import adrive
from tests.redis.support import FrozenClock, Server, keys_without_expiry
from tests.support import let_pass, new_guard


class Pod:
    """One process with a leased limit: its store, its guard and its clock."""

    def __init__(self, store: RedisStore, *limits: Any, clock: Any = None, **options: Any) -> None:
        self.clock = clock or VirtualClock(100.0)
        self.store = store
        options = {"sharing": "leased", "shared": store, "name": "vendor", **options}
        self.limit = RateLimit(*limits, **options)
        self.guard = new_guard(self.limit, clock=self.clock)

    @property
    def share(self) -> LeasedLimits:
        """Return what is leased."""
        assert self.limit._sharing is not None
        share = self.limit._sharing.share
        assert isinstance(share, LeasedLimits)
        return share

    @property
    def held(self) -> list[int]:
        """Return what the purses of each limit hold."""
        return [sum(h.purse.held for h in holders.values()) for holders in self.share.holders]

    @property
    def spent(self) -> int:
        """Return how much was spent, by what was granted and is left."""
        return self.share.granted - self.share.returned - sum(self.held)

    async def call(self, *args: Any, times: int = 1) -> int:
        """Make calls, one after another; return how many were admitted."""
        admitted = 0
        for _ in range(times):
            result = await self.guard.aattempt(_nothing, *args)
            admitted += result.ok
        return admitted

    def seen(self) -> dict[str, Any]:
        """Return what the snapshot says of the sharing."""
        shown: dict[str, Any] = self.guard.snapshot()["policies"][0]["shared"]
        return shown


async def _nothing(*_args: Any) -> None:
    pass


async def settled(store: RedisStore) -> None:
    """Let what was posted be done."""
    posts = store._core._send_queue
    for _ in range(500):
        if not (len(posts) or posts._asked or posts._sender):
            return
        await let_pass(0.002)
    raise AssertionError("the posts were not sent")


async def quiet(pod: Pod) -> None:
    """Let all questions be answered, and what was posted be done."""
    for _ in range(500):
        if not any(h.grant for holders in pod.share.holders for h in holders.values()):
            break
        await let_pass(0.002)
    await settled(pod.store)


async def left(pod: Pod, *args: Any) -> int:
    """Return what the store says is left, without what pods hold."""
    charges = pod.limit._charges(args, {})
    steps = SharedLimits.peek(pod.share, charges)
    _verdict, standings = await adrive(steps, lambda request: request.arun())
    return standings[0].left


@pytest.mark.usefixtures("frozen")
def test_most_calls_cost_no_round_trip(store: RedisStore) -> None:
    """A batch is taken ahead and spent here; another is asked for before it is used up."""

    async def main() -> None:
        pod = Pod(store, "1000/s", batch=100)
        assert await pod.call(times=500) == 500
        asks = pod.share.asks
        assert asks <= 15
        assert pod.spent == 500
        assert pod.held[0] <= 100
        assert pod.seen()["sharing"] == "leased"

    asyncio.run(main())


def test_the_total_is_never_above_the_limit(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """Three pods that want more than there is get what there is, and no more."""

    async def main() -> None:
        stores = [store, new_store(), new_store()]
        for other in stores[1:]:
            frozen.rule(other)
        pods = [Pod(one, "60/s", algorithm="sliding_log", batch=8) for one in stores]
        counts = await asyncio.gather(*(pod.call(times=50) for pod in pods))
        assert 60 - 3 * 8 <= sum(counts) <= 60
        assert sum(counts) + sum(pod.held[0] for pod in pods) <= 60
        for one in stores[1:]:
            await one.aclose()

    asyncio.run(main())


def test_what_is_left_at_the_end_of_a_lease_goes_back(
    store: RedisStore, frozen: FrozenClock
) -> None:
    """An idle pod keeps nothing from others for longer than a lease."""

    async def main() -> None:
        pod = Pod(store, "100/min", algorithm="sliding_log", batch=20)
        assert await pod.call() == 1
        assert await left(pod) == 100 - 1 - pod.held[0]
        pod.clock.advance(0.999)
        frozen.advance(999_000)
        pod.share.return_expired()
        assert pod.held[0] > 0
        pod.clock.advance(0.001)
        frozen.advance(1_000)
        pod.share.return_expired()
        await settled(store)
        assert pod.held == [0]
        assert await left(pod) == 99

    asyncio.run(main())


def test_nothing_is_spent_after_its_lease(store: RedisStore, frozen: FrozenClock) -> None:
    """Also in a hurry: an old lot is not spent, another is asked for."""

    async def main() -> None:
        pod = Pod(store, "100/min", algorithm="sliding_log", batch=40)
        await pod.call()
        asks = pod.share.asks
        pod.clock.advance(5.0)
        frozen.advance(5_000_000)
        assert await pod.call() == 1
        assert pod.share.asks > asks
        await settled(store)
        assert await left(pod) == 98 - pod.held[0]

    asyncio.run(main())


def test_closing_the_store_gives_all_back(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """A pod that ends keeps nothing."""

    async def main() -> None:
        other = new_store()
        frozen.rule(other)
        pod, watcher = (
            Pod(one, "100/min", algorithm="sliding_log", batch=20) for one in (other, store)
        )
        await pod.call()
        assert pod.held[0] > 0
        await other.aclose()
        assert pod.held == [0]
        assert await left(watcher) == 99

    asyncio.run(main())


def test_a_killed_pod_loses_a_batch_at_most(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """What it held is nobody's until it is forgotten; the rest goes on."""

    async def main() -> None:
        killed = new_store()
        frozen.rule(killed)
        gone = Pod(killed, "60/s", algorithm="fixed_window", batch=10)
        await gone.call()
        pod = Pod(store, "60/s", algorithm="fixed_window", batch=10)
        assert 60 - 10 - 1 <= await pod.call(times=70) <= 59
        pod.clock.advance(1.0)
        frozen.advance(1_000_000)
        assert await pod.call(times=70) == 60
        gone.share._forget()  # as a kill does: it gives nothing back
        await killed.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_a_call_that_was_refused_further_in_burns_nothing(store: RedisStore) -> None:
    """What it spent goes back into the purse that it came from, without a round trip."""

    async def main() -> None:
        limit = RateLimit("100/s", shared=store, name="vendor", sharing="leased", batch=20)
        guard = new_guard(limit, Bulkhead(1), clock=VirtualClock(1.0))
        assert limit._sharing is not None
        share = limit._sharing.share
        assert isinstance(share, LeasedLimits)
        await guard.acall(_nothing)
        await let_pass(0)
        async with guard.hold():
            (holder,) = share.holders[0].values()
            held, asks = holder.purse.held, share.asks
            for _ in range(3):
                with pytest.raises(BulkheadFull):
                    await guard.acall(_nothing)
            assert holder.purse.held == held
            assert share.asks == asks

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_what_a_call_really_cost_is_settled_in_the_purse(store: RedisStore) -> None:
    """Less goes back into it; more is taken from the shared limit."""

    async def main() -> None:
        pod = Pod(store, "1000/min", batch=100, cost=lambda: 20, settle=lambda value: value)

        async def costs(actual: int) -> int:
            return actual

        for actual in (20, 5, 50):
            await quiet(pod)
            before = pod.held[0] + await left(pod)
            asks = pod.share.asks
            await pod.guard.acall(costs, actual)
            if actual == 5 and pod.share.asks == asks:
                assert pod.held[0] + await left(pod) == before - 5
            await quiet(pod)
            assert pod.held[0] + await left(pod) == before - actual

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_several_limits_are_spent_together_or_not_at_all(store: RedisStore) -> None:
    """A call that one limit refuses takes nothing of the others."""

    async def main() -> None:
        limits = (
            Limit("1000/s", name="all"),
            Limit("10/s", algorithm="fixed_window", key=lambda user: user, name="user"),
        )
        pod = Pod(store, *limits, batch=5)
        assert await pod.call("ann", times=15) == 10
        assert await pod.call("bob", times=15) == 10
        assert pod.spent == 20 + 20
        with pytest.raises(RateLimited) as refused:
            await pod.guard.acall(_nothing, "ann")
        assert refused.value.limit == "user"
        assert refused.value.retry_after is not None
        assert 0 < refused.value.retry_after <= 1

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_what_is_larger_than_a_batch_is_asked_for_by_itself(store: RedisStore) -> None:
    """A cost above the batch is decided by the store, exactly."""

    async def main() -> None:
        pod = Pod(store, "100/s", algorithm="sliding_log", cost=lambda cost: cost, batch=10)
        assert await pod.call(60) == 1
        assert pod.seen()["granted"] == 0
        assert await pod.call(60) == 0
        assert await pod.call(40) == 1

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_the_last_of_a_long_period_are_not_lost(store: RedisStore) -> None:
    """Where a quarter of a batch will not be there for long, less will do."""

    async def main() -> None:
        pod = Pod(store, "21/day", algorithm="fixed_window", batch=20)
        other = Pod(store, "21/day", algorithm="fixed_window", sharing="exact")
        await other.call(times=18)
        assert await pod.call(times=5) == 3

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("frozen")
def test_a_child_process_has_nothing_of_its_parents(store: RedisStore) -> None:
    """What was granted to the parent is spent by the parent only."""
    pod = Pod(store, "100/s", algorithm="sliding_log", batch=20, clock=SYSTEM)
    assert pod.guard.attempt(lambda: None).ok
    assert pod.held[0] > 0
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        held = sum(pod.held)
        admitted = sum(pod.guard.attempt(lambda: None).ok for _ in range(200))
        os.write(writing, f"{held} {admitted}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        held, admitted = map(int, pipe.read().split())
    assert held == 0
    assert 100 - 1 - 20 <= admitted <= 100 - 1 - pod.held[0]


def test_without_the_store_the_purse_is_spent_and_then_it_is_as_told(server: Server) -> None:
    """A store that is gone costs its timeout, and never an admission beyond what was told."""

    async def main() -> None:
        store = RedisStore(server.url, timeout=0.05)
        pod = Pod(store, "1000/s", batch=20, on_store_failure="closed", clock=SYSTEM)
        assert await pod.call() == 1
        held = pod.held[0]
        server.kill()
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await pod.call(times=held + 10) <= held
        assert loop.time() - began < 2.0
        server.start()
        for _ in range(400):
            if store.up and await pod.call() == 1:
                break
            await let_pass(0.01)
        else:
            raise AssertionError("it did not heal")
        await store.aclose()

    asyncio.run(main())


def test_a_vendors_word_empties_the_purse(store: RedisStore, frozen: FrozenClock) -> None:
    """What the vendor says is gone is not spent because it was granted before."""

    async def main() -> None:
        pod = Pod(store, "100/min", algorithm="sliding_log", batch=20)
        await pod.call()
        assert pod.held[0] > 0
        await pod.limit.alower(0, 10.0)
        assert pod.held == [0]
        await settled(store)
        assert await pod.call() == 0
        pod.clock.advance(10.0)
        frozen.advance(10_000_000)
        assert await pod.call() == 1

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_what_is_left_is_taken_from_the_store_alone(store: RedisStore) -> None:
    """What pods hold is not touched, so the total is never above the limit."""

    async def main() -> None:
        pod = Pod(store, "100/min", algorithm="sliding_log", batch=20)
        await pod.call()
        await quiet(pod)
        there, held = await left(pod), pod.held[0]
        assert held > 0
        assert await pod.limit.atake_up_to(1000) == there == 100 - held - 1
        assert pod.held == [held]

    asyncio.run(main())


def test_a_reset_empties_the_purse(store: RedisStore, frozen: FrozenClock) -> None:
    """What was granted before is not spent on top of the whole limit, nor given back to it."""

    async def main() -> None:
        pod = Pod(store, "100/min", algorithm="sliding_log", batch=20)
        await pod.call()
        await quiet(pod)
        assert pod.held[0] > 0
        frozen.advance(1)
        await pod.limit.areset()
        assert pod.held == [0]
        await settled(store)
        assert await left(pod) == 100
        assert await pod.call(times=150) == 100

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_peeking_counts_what_the_pod_holds(store: RedisStore) -> None:
    """What is left is what the store has and what this pod may spend."""

    async def main() -> None:
        pod = Pod(store, "100/min", algorithm="sliding_log", batch=20)
        await pod.call()
        await quiet(pod)
        assert (await pod.limit.apeek()).left == 99

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_what_was_granted_by_other_numbers_goes_back(store: RedisStore) -> None:
    """After `update` it is not spent; where nothing changes, it is."""

    async def main() -> None:
        pod = Pod(store, "100/min", algorithm="sliding_log", batch=20)
        await pod.call()
        held = pod.held
        pod.limit.update(max_waiting=5)
        assert pod.held == held
        pod.limit.update(limits="200/min")
        assert pod.held == [0]
        await settled(store)
        assert await left(pod) == 199
        assert await pod.call() == 1
        with pytest.raises(ValueError, match="batch=20: more than 10"):
            pod.limit.update(limits="10/min")

    asyncio.run(main())


def test_keys_beyond_the_map_are_decided_by_the_store(
    store: RedisStore, frozen: FrozenClock, monkeypatch: pytest.MonkeyPatch, client: redis.Redis
) -> None:
    """The map of purses is bounded; those without one are decided exactly, none is forgotten."""
    monkeypatch.setattr(leased_share, "MAX_KEYS", 5)

    async def main() -> None:
        pod = Pod(store, "8/s", algorithm="fixed_window", key=lambda user: user, batch=2)
        for user in range(12):
            assert await pod.call(user, times=10) == 8
        assert len(pod.share.holders[0]) <= 5
        assert pod.seen()["keys"] <= 5
        pod.clock.advance(2.0)
        frozen.advance(2_000_000)
        pod.share.return_expired()
        assert await pod.call("new") == 1
        assert not keys_without_expiry(client, store._core.prefix)
        with pytest.raises(TypeError, match="cannot be shared"):
            await pod.guard.acall(_nothing, object())

    asyncio.run(main())


def test_the_usual_batch_follows_the_pods(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """A fifth of the limit over all pods; one at a time until the others have heard of a pod."""

    async def main() -> None:
        pod = Pod(store, "100/s", algorithm="sliding_log")
        assert pod.seen()["batch"] == (1,)
        await store._core.pods.beat()
        assert pod.seen()["batch"] == (20,)
        while pod.held[0] <= 10:
            await pod.call()
            await quiet(pod)
        other = new_store()
        frozen.rule(other)
        late = Pod(other, "100/s", algorithm="sliding_log")
        await other._core.pods.beat()
        assert late.seen()["batch"] == (1,)
        for _ in range(3):
            frozen.advance(500_000)
            await store._core.pods.beat()
            await other._core.pods.beat()
        assert pod.seen()["batch"] == late.seen()["batch"] == (10,)
        assert pod.held[0] <= 10
        assert pod.seen()["excess"] == (20,)
        assert pod.seen()["pods"] == 2
        await other.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("sharing", ["leased", "split"])
def test_a_leaky_bucket_cannot_be_shared_in_parts(store: RedisStore, sharing: Any) -> None:
    """It keeps calls apart, over all pods: only the store can do that."""
    with pytest.raises(ValueError, match="leaky bucket"):
        RateLimit("10/s", algorithm="leaky_bucket", shared=store, name="x", sharing=sharing)


def test_a_batch_larger_than_the_limit_is_refused(store: RedisStore) -> None:
    """It could never be granted."""
    with pytest.raises(ValueError, match="write batch=10 or less"):
        RateLimit("10/s", shared=store, name="x", sharing="leased", batch=11)


def test_answers_are_checked(store: RedisStore) -> None:
    """More than was asked for, or no number, is no answer."""
    pod = Pod(store, "100/s", batch=10)
    holder = pod.share.holder(0, None)
    assert holder is not None
    grant = BatchRequest(pod.share, holder, 0.0, enough=False)
    grant.want, grant.least = 10, 2
    assert grant.read("5,17", 1) == GrantedBatch(5, 17)
    assert grant.read("0,250", 1) == RefusedBatch(250.0)
    for wrong in ("11,17", "1,17", "5", "x", "0", "", "-3,1", "5,1,1"):
        with pytest.raises(ValueError, match=r".*"):
            grant.read(wrong, 1)
