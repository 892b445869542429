"""`sharing="split"`: who has which part, from when on, and what happens without the store."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from seawall import Guard, RateLimit, RateLimited
from seawall.clock import SYSTEM, VirtualClock
from seawall.models.rate.split import BEAT
from seawall.redis.limits.split import SplitLimits
from seawall.redis.pods import LivePods
from seawall.redis.store import RedisStore
from tests.redis.support import FrozenClock, Server
from tests.support import let_pass, new_guard


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pods beat when they are told to, and no more often."""

    def start(self: Any) -> None:
        if not hasattr(self, "started"):
            self.started = True
            self._store.at_close(self.leave)
        self._store.start()

    monkeypatch.setattr(LivePods, "start", start)


class Pod:
    """One process with its part of a limit."""

    def __init__(self, store: RedisStore, text: str = "12/s", **options: Any) -> None:
        self.clock = options.pop("clock", None) or VirtualClock(100.0)
        self.store = store
        options = {"algorithm": "sliding_log", "shared": store, "name": "vendor", **options}
        self.limit = RateLimit(text, sharing="split", **options)
        self.guard: Guard = new_guard(self.limit, clock=self.clock)

    async def call(self, *args: Any, times: int = 1) -> int:
        """Make calls; return how many were admitted."""
        return sum([(await self.guard.aattempt(_nothing, *args)).ok for _ in range(times)])

    def seen(self) -> dict[str, Any]:
        """Return what the snapshot says of the sharing."""
        shown: dict[str, Any] = self.guard.snapshot()["policies"][0]["shared"]
        return shown


async def _nothing(*_args: Any) -> None:
    pass


async def go_on(frozen: FrozenClock, pods: list[Pod], beats: int) -> None:
    """Let so many beats pass."""
    for _ in range(beats):
        frozen.advance(BEAT)
        for pod in pods:
            pod.clock.advance(BEAT / 1e6)
            await pod.store._core.pods.beat()


@pytest.mark.usefixtures("frozen")
def test_the_only_pod_has_all_of_it_at_once(store: RedisStore) -> None:
    """Where nobody else was, nobody else can have spent anything."""

    async def main() -> None:
        pod = Pod(store)
        await store._core.pods.beat()
        assert await pod.call(times=20) == 12
        assert pod.seen()["pods"] == 1
        assert pod.seen()["mode"] == "shared"

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_the_first_call_waits_to_hear_how_many_there_are(store: RedisStore) -> None:
    """Nothing is decided before it is known whether there are other pods."""

    async def main() -> None:
        pod = Pod(store)
        call = asyncio.create_task(pod.call(times=1))
        await let_pass(0.01)
        assert not call.done()
        await store._core.pods.beat()
        assert await call == 1

    asyncio.run(main())


def test_a_second_pod_has_nothing_until_the_first_has_heard_of_it(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """It is refused, and told when to come; then both have half, the newcomer a period later."""

    async def main() -> None:
        first = Pod(store)
        await store._core.pods.beat()
        await first.call()
        other = new_store()
        frozen.rule(other)
        second = Pod(other)
        second.clock.advance_to(first.clock.now())
        await other._core.pods.beat()
        with pytest.raises(RateLimited) as refused:
            await second.guard.acall(_nothing)
        assert refused.value.retry_after == 1.0
        assert second.seen()["pods"] == 0
        await go_on(frozen, [first, second], 2)
        assert first.seen()["pods"] == second.seen()["pods"] == 2
        assert (await first.call(times=20), await second.call(times=20)) == (6, 0)
        await go_on(frozen, [first, second], 2)
        assert (await first.call(times=20), await second.call(times=20)) == (6, 6)
        await other.aclose()

    asyncio.run(main())


def test_who_is_left_grows_later_and_what_it_gains_counts_as_taken(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """A pod that leaves may have spent all of its part a moment before."""

    async def main() -> None:
        other = new_store()
        frozen.rule(other)
        pods = [Pod(store), Pod(other)]
        await go_on(frozen, pods, 4)
        for pod in pods:
            await pod.call()
        await go_on(frozen, pods, 4)
        await other.aclose()
        counts = []
        for _ in range(8):
            await go_on(frozen, pods[:1], 1)
            counts.append((pods[0].seen()["pods"], await pods[0].call(times=20)))
        assert [pods for pods, _count in counts] == [2, 2, 1, 1, 1, 1, 1, 1]
        assert max(sum(n for _, n in counts[i : i + 2]) for i in range(7)) <= 12
        assert counts[-1][1] + counts[-2][1] == 12

    asyncio.run(main())


def test_keys_have_their_part_too(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """Each key's limit is divided; a key that comes later finds what was gained taken as well."""

    async def main() -> None:
        other = new_store()
        frozen.rule(other)
        pods = [Pod(one, key=lambda user: user) for one in (store, other)]
        await go_on(frozen, pods, 6)
        assert [await pod.call("ann", times=20) for pod in pods] == [6, 6]
        await other.aclose()
        await go_on(frozen, pods[:1], 3)
        assert pods[0].seen()["pods"] == 1
        assert await pods[0].call("bob", times=20) == 6
        await go_on(frozen, pods[:1], 2)
        assert await pods[0].call("cid", times=20) == 12

    asyncio.run(main())


def test_more_pods_than_the_limit_has(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """Each has one in as many periods as it takes; the excess says what may come at once."""

    async def main() -> None:
        stores = [store, new_store(), new_store()]
        for one in stores[1:]:
            frozen.rule(one)
        pods = [Pod(one, "2/s") for one in stores]
        await go_on(frozen, pods, 10)
        assert pods[0].seen()["excess"] == (1,)
        counts = [0, 0, 0]
        for _ in range(8):
            await go_on(frozen, pods, 2)
            counts = [count + await pod.call() for count, pod in zip(counts, pods, strict=True)]
        assert counts == [4, 4, 4]
        for one in stores[1:]:
            await one.aclose()

    asyncio.run(main())


def test_new_numbers_are_divided_too(
    new_store: Callable[..., RedisStore], store: RedisStore, frozen: FrozenClock
) -> None:
    """`update` keeps the parts, and gives nobody a second helping."""

    async def main() -> None:
        other = new_store()
        frozen.rule(other)
        pods = [Pod(one) for one in (store, other)]
        await go_on(frozen, pods, 4)
        assert await pods[0].call(times=20) == 6
        pods[0].limit.update(max_wait=0.0)
        assert await pods[0].call(times=20) == 0
        pods[0].limit.update(limits="24/s")
        assert await pods[0].call(times=20) == 0
        await go_on(frozen, pods, 2)
        assert await pods[0].call(times=20) == 12
        await other.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_parts_reach_the_meters_in_order(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads that hear of changes, the one that is held up hands over nothing old."""
    pod = Pod(store)
    asyncio.run(store._core.pods.beat())
    sharing = pod.limit._sharing
    assert sharing is not None
    share = sharing.share
    assert isinstance(share, SplitLimits)
    follow, held_up, go_on = share.owner.follow, threading.Event(), threading.Event()

    def slowly(parts: Any) -> None:
        if not held_up.is_set():
            held_up.set()
            assert go_on.wait(10)
        follow(parts)

    monkeypatch.setattr(share.owner, "follow", slowly)
    thread = threading.Thread(target=lambda: asyncio.run(pod.call()))
    thread.start()
    assert held_up.wait(10)
    store._core.pods.members.count = 2
    share.divide()
    assert pod.limit._meters.all[0].rule.capacity == 6
    go_on.set()
    thread.join()
    assert share.snapshot()["pods"] == 2
    assert pod.limit._meters.all[0].rule.capacity == 6


def test_without_the_store_the_last_known_part_stays(server: Server) -> None:
    """A pod that has its part goes on; one that comes then has nobody to share with."""

    async def main() -> None:
        stores = [RedisStore(server.url, timeout=2.0) for _ in range(2)]
        with server.client() as client:
            frozen = FrozenClock(stores[0], client)
            frozen.rule(stores[1])
            pods = [Pod(one) for one in stores]
            await go_on(frozen, pods, 6)
            for pod in pods:
                await pod.call()
            await go_on(frozen, pods, 2)
        server.kill()
        assert await pods[0].call(times=20) == 6
        for one in stores:
            await one.aclose()
        assert await pods[1].call(times=20) == 6
        assert pods[1].seen()["mode"] == "local"

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
def test_reserving_peeking_and_a_vendors_word_go_by_the_part(store: RedisStore) -> None:
    """All of it is decided in this pod, and needs no event loop."""
    pod = Pod(store)
    asyncio.run(store._core.pods.beat())
    asyncio.run(pod.call())
    pod.limit.reserve()
    assert pod.limit.peek().left == 10
    pod.limit.lower(3, 5.0)
    asyncio.run(pod.limit.alower(2, 5.0))
    assert pod.limit.peek().left == 2
    assert asyncio.run(pod.call(times=5)) == 2
    pod.limit.reset()
    asyncio.run(pod.limit.areset())
    assert pod.limit.peek().left == 12
    assert (pod.limit.take_up_to(9), asyncio.run(pod.limit.atake_up_to(9))) == (9, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("frozen")
def test_a_child_process_has_no_part_yet(store: RedisStore) -> None:
    """Nobody has heard of it: it must not spend its parent's part."""
    pod = Pod(store, clock=SYSTEM, on_store_failure="local")
    asyncio.run(store._core.pods.beat())
    assert asyncio.run(pod.call()) == 1
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        asyncio.run(store._core.pods.beat())
        admitted = asyncio.run(pod.call(times=20))
        os.write(writing, f"{admitted} {store._core.pods.count}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "0 2"


@pytest.mark.usefixtures("frozen")
def test_a_cancelled_call_listens_no_more(store: RedisStore) -> None:
    """While it is not known how many there are, callers come and go."""

    async def main() -> None:
        pod = Pod(store)
        call = asyncio.create_task(pod.call())
        await let_pass(0.01)
        assert pod.limit._sharing is not None
        share = pod.limit._sharing.share
        assert isinstance(share, SplitLimits)
        assert len(share._waiting) == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not share._waiting

    asyncio.run(main())


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("failing", ["local", "open", "closed"])
def test_a_part_is_kept_to_while_the_store_is_there(store: RedisStore, failing: str) -> None:
    """Deciding by its part is how it is shared, not a failure: the limit holds whatever is told."""

    async def main() -> None:
        pod = Pod(store, on_store_failure=failing)
        await store._core.pods.beat()
        assert await pod.call(times=20) == 12
        assert pod.limit.excess == (0,)

    asyncio.run(main())
