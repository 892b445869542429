"""Shared limits while the store is away: what they were told to do, and back by themselves."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from seawall import RateLimit, RateLimited, subscribe
from seawall.clock import VirtualClock
from seawall.errors import StoreUnavailable
from seawall.events import StoreModeChanged
from seawall.limits import Limit
from seawall.redis.store import RedisStore
from tests.redis.limits.test_limits import ok, until
from tests.redis.support import Server, eventually
from tests.support import new_guard

Stores = Callable[..., RedisStore]


@contextmanager
def away(store: RedisStore) -> Iterator[None]:
    """Let the store be down, as its own breaker says."""
    store._core.health.up = False
    try:
        yield
    finally:
        store._core.health.up = True


def reasons(guard: Any, times: int, *args: Any) -> list[str | None]:
    """Return what came of so many calls, in a thread's way and in a loop's, by turns."""

    async def one() -> str | None:
        result = await guard.aattempt(ok, *args)
        return result.reason  # type: ignore[no-any-return]

    said = []
    for number in range(times):
        if number % 2:
            said.append(asyncio.run(one()))
        else:
            said.append(guard.attempt(lambda *_: "ok", *args).reason)
    return said


def pods(store: RedisStore, count: int) -> None:
    """Let the store be shared by so many pods, as far as is known."""
    store._core.pods.members.count = count


def test_local_has_the_pods_part_of_the_limit(store: RedisStore) -> None:
    """One of three pods admits a third, by what it counts itself."""
    guard = new_guard(RateLimit("9/min", shared=store, name="third"))
    pods(store, 3)
    with away(store):
        assert reasons(guard, 4) == [None, None, None, "rate_limited"]
    shown = guard.snapshot()["policies"][0]["shared"]
    assert (shown["mode"], shown["decided_alone"]) == ("shared", 4)


def test_local_always_has_room_for_one(store: RedisStore) -> None:
    """With more pods than the limit has, each still admits one; with large costs, too."""
    limit = RateLimit(
        Limit("10/min", cost=lambda cost: cost, name="tokens"), shared=store, name="large"
    )
    guard = new_guard(limit)
    pods(store, 100)
    with away(store):
        assert reasons(guard, 2, 8) == [None, "rate_limited"]
        with pytest.raises(RateLimited, match="a cost of 11 never fits, 10 is the most"):
            guard.call(lambda _: "ok", 11)


def test_local_reservations_are_settled_by_the_same_part(store: RedisStore) -> None:
    """What is reserved, settled and given back while the store is away counts as one part."""
    limit = RateLimit("10/min", algorithm="fixed_window", shared=store, name="parts")
    pods(store, 2)
    with away(store):
        taken = limit.reserve(cost=4)
        assert repr(taken) == "<Reservation of 4 of '10/min'>"
        assert limit.peek().left == 1
        taken.settle(1)
        assert limit.peek().left == 4
        limit.reserve(cost=3).cancel()
        more = limit.reserve(cost=1)
        more.settle(2)
        assert limit.peek().left == 2
        with pytest.raises(RateLimited):
            limit.reserve(cost=3)


def test_open_admits_all(store: RedisStore) -> None:
    """Nothing is counted, nothing refused."""
    limit = RateLimit("1/min", shared=store, name="open", on_store_failure="open")
    guard = new_guard(limit)
    with away(store):
        assert reasons(guard, 4) == [None] * 4
        assert limit.reserve() is not None
        assert guard.snapshot()["policies"][0]["shared"]["mode"] == "open"
    assert limit.peek().left == 1


def test_closed_refuses_all(store: RedisStore) -> None:
    """Everything is refused, with a reason that tells it from being over the limit."""
    limit = RateLimit("9/min", shared=store, name="closed", on_store_failure="closed")
    guard = new_guard(limit)
    with away(store):
        assert reasons(guard, 2) == ["store_unavailable"] * 2
        with pytest.raises(RateLimited, match="the store 'redis' is away") as refusal:
            guard.call(lambda: "ok")
        assert (refusal.value.retry_after, refusal.value.limit) == (1.0, "9/min")
        with pytest.raises(RateLimited, match="the store 'redis' is away"):
            limit.reserve()
    assert reasons(guard, 2) == [None, None]


def test_a_vendors_word_is_kept_without_the_store(store: RedisStore) -> None:
    """A process knows what it was told, and its part of that is what it admits."""
    limit = RateLimit("90/min", shared=store, name="word")
    guard = new_guard(limit)
    pods(store, 2)
    with away(store):
        limit.lower(4, 30.0)
        assert reasons(guard, 3) == [None, None, "rate_limited"]

        async def main() -> None:
            with pytest.raises(StoreUnavailable):
                await limit.alower(4, 30.0)

        asyncio.run(main())


def test_a_reset_without_the_store_is_one_of_this_process(store: RedisStore) -> None:
    """It raises, and what was counted here meanwhile is forgotten all the same."""
    limit = RateLimit("2/min", shared=store, name="reset")
    guard = new_guard(limit)
    pods(store, 1)
    with away(store):
        assert reasons(guard, 3) == [None, None, "rate_limited"]
        with pytest.raises(StoreUnavailable):
            limit.reset()
        assert reasons(guard, 3) == [None, None, "rate_limited"]


@pytest.mark.parametrize(("failing", "taken"), [("local", 3), ("open", 9), ("closed", 0)])
def test_what_is_left_without_the_store_is_what_the_mode_says(
    store: RedisStore, failing: Any, taken: int
) -> None:
    """A part of the limit, all, or nothing."""
    limit = RateLimit("6/min", shared=store, name="up to", on_store_failure=failing)
    new_guard(limit)
    limit.peek()
    pods(store, 2)
    with away(store):
        assert limit.take_up_to(9) == taken
        assert asyncio.run(limit.atake_up_to(9)) == (0 if failing == "local" else taken)


def test_an_answer_that_makes_no_sense_is_none(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that says it took more than was asked for has not answered."""
    limit = RateLimit("6/min", shared=store, name="nonsense", on_store_failure="closed")
    monkeypatch.setattr(store._core, "call", lambda *_: b"1 10")
    assert limit.take_up_to(9) == 0


def test_a_killed_server_changes_the_mode_and_back(new_store: Stores, server: Server) -> None:
    """Every call has the configured behaviour; each change is an event of each guard; it heals."""
    store = new_store(url=server.url, timeout=0.2)
    limit = RateLimit("1000/min", shared=store, name="killed", on_store_failure="open")
    guards = [new_guard(limit), new_guard(limit)]
    heard: list[StoreModeChanged] = []
    back = threading.Event()

    def hear(event: StoreModeChanged) -> None:
        heard.append(event)
        if event.after == "shared" and event.guard == guards[1].name:
            back.set()

    stop = subscribe(hear, StoreModeChanged)
    assert reasons(guards[0], 2) == [None, None]
    server.kill()
    assert reasons(guards[0], 10) == [None] * 10
    assert not store.up
    server.start()
    assert back.wait(10)
    stop()
    assert reasons(guards[0], 2) == [None, None]
    told = [(event.guard, event.before, event.after) for event in heard]
    names = [guard.name for guard in guards]
    assert told == [
        *((name, "shared", "open") for name in names),
        *((name, "open", "shared") for name in names),
    ]
    assert {(event.policy, event.store) for event in heard} == {("rate_limit", "redis")}
    assert limit.peek().left == 1000 - 2  # what was admitted meanwhile was not counted


def test_who_waits_goes_on_without_the_store(new_store: Stores, server: Server) -> None:
    """A line that forms while the store is there is served when it is gone."""
    store = new_store(url=server.url, timeout=0.2)
    limit = RateLimit("10/s", burst=1, shared=store, name="line", max_wait=5.0)
    guard = new_guard(limit)

    async def main() -> None:
        await guard.acall(ok)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(guard.acall(ok)) for _ in range(3)]
        await until(lambda: limit.waiting >= 3)
        server.kill()
        assert await asyncio.gather(*tasks) == ["ok"] * 3
        assert limit.waiting == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_closed_store_is_away(store: RedisStore) -> None:
    """After its store was closed, a limit goes on alone; each guard says so, once."""
    guard = new_guard(RateLimit("2/min", shared=store, name="shut"))
    assert reasons(guard, 1) == [None]
    heard: list[StoreModeChanged] = []
    stop = subscribe(heard.append, StoreModeChanged)
    store.close()
    stop()
    assert [(event.guard, event.before, event.after) for event in heard] == [
        (guard.name, "shared", "local")
    ]
    assert reasons(guard, 3) == [None, None, "rate_limited"]
    assert guard.snapshot()["policies"][0]["shared"]["mode"] == "local"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_counts_with_its_parent(store: RedisStore) -> None:
    """After a fork both ask the same limit, in threads and in loops."""
    limit = RateLimit("10/min", shared=store, name="family")
    guard = new_guard(limit)
    assert reasons(guard, 2) == [None, None]
    child = os.fork()
    if child == 0:
        said: list[str | None] = ["it failed"]
        try:
            said = reasons(guard, 4)
        finally:
            os._exit(said.count(None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert reasons(guard, 6) == [None] * 4 + ["rate_limited"] * 2


# --- How many pods there are, without a store that tells ---


def apart(count: int, sharing: str, **options: Any) -> tuple[list[RedisStore], list[Any], Any]:
    """Return so many pods that have never reached their store: stores, guards and their clock."""
    clock = VirtualClock()
    stores = [RedisStore("redis://127.0.0.1:1", **options) for _ in range(count)]
    guards = []
    for store in stores:
        store._core.health.failed("out of reach", certain=True)
        policy = RateLimit("60/s", shared=store, name="vendor", sharing=sharing)  # type: ignore[arg-type]
        guards.append(new_guard(policy, clock=clock))
    return stores, guards, clock


def admitted(guards: list[Any], each: int) -> int:
    """Return how many of so many calls of each pod are admitted."""
    return sum(guard.attempt(lambda: "ok").error is None for guard in guards for _ in range(each))


@pytest.mark.parametrize("sharing", ["exact", "leased", "split"])
def test_pods_that_have_never_reached_the_store_stay_at_the_limit_together(sharing: str) -> None:
    """With the number of pods that is expected, three admit 60 a second, and not 180."""
    stores, guards, clock = apart(3, sharing, expected_pods=3)
    assert admitted(guards, 100) == 60  # the burst
    for _ in range(3):
        clock.advance(1.0)
        assert admitted(guards, 100) == 60
    for store in stores:
        store.close()


def test_fewer_pods_than_expected_use_their_parts_only() -> None:
    """The price: nobody knows that the others are not there."""
    stores, guards, _clock = apart(2, "exact", expected_pods=3)
    assert admitted(guards, 100) == 40
    for store in stores:
        store.close()


@pytest.mark.parametrize(("known", "times"), [(1, 3), (5, 5)])
def test_the_larger_of_the_expected_and_the_last_known_number_counts(
    new_store: Stores, known: int, times: int
) -> None:
    """Pods that have started since the store went away are not known, but expected."""
    store = new_store(expected_pods=3)
    guard = new_guard(RateLimit("60/min", shared=store, name="known"))
    pods(store, known)
    with away(store):
        assert admitted([guard], 61) == 60 // times


def guard_part(guard: Any) -> int:
    """Return among how many pods a split limit is divided; 0 while this pod has no part."""
    return int(guard.snapshot()["policies"][0]["shared"]["pods"])


def test_a_split_limit_keeps_its_part_while_the_store_is_away(new_store: Stores) -> None:
    """Who had a part goes on with it, though fewer pods are expected, and counts each call once."""
    store = new_store()
    guard = new_guard(RateLimit("60/min", shared=store, name="part", sharing="split"))
    share = guard.policies[0]._sharing.share
    eventually(lambda: admitted([guard], 1) and guard_part(guard) == 1)
    assert not share._whole
    with away(store):
        assert share.times == 1


def test_a_child_process_expects_as_many_pods_as_its_parent_knew(store: RedisStore) -> None:
    """After a fork nothing is known, and the store may be away."""
    pods(store, 4)
    store._core.pods._after_fork()
    assert (store._core.pods.count, store._core.pods.known, store._core.pods.without_store) == (
        1,
        False,
        4,
    )
