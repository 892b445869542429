"""RateLimit(shared=store): what pods count together, against a real server."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import redis

from seawall import Breaker, CircuitOpen, RateLimit, RateLimited, subscribe
from seawall.errors import StoreUnavailable
from seawall.events import ImplausibleReport, SettingsDiffer
from seawall.limits import Limit
from seawall.redis.connections import LoopConnection
from seawall.redis.limits.exact import QuestionRound
from seawall.redis.store import RedisStore
from seawall.runtime.driver import drive
from tests.redis.limits.test_agreement import ALGORITHMS, START, PatientClock, flush
from tests.redis.support import FrozenClock, keys_without_expiry, mutate
from tests.support import let_pass, new_guard

Stores = Callable[..., RedisStore]


def reasons(guard: Any, times: int, *args: Any) -> list[str | None]:
    """Return what came of so many calls, one after another."""
    return [guard.attempt(lambda *_: "ok", *args).reason for _ in range(times)]


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    while not condition():
        await let_pass(0.001)


async def ok(*_args: Any) -> str:
    """Be what is guarded."""
    return "ok"


@pytest.fixture
def clock(frozen: FrozenClock) -> PatientClock:
    """Return a clock of this host that shows what the server's shows."""
    frozen.set(int(START * 1e6))
    return PatientClock(START)


def pass_by(frozen: FrozenClock, clock: PatientClock, us: int) -> None:
    """Let time pass, for the server and for this host."""
    frozen.advance(us)
    clock.advance_to(frozen.now_us / 1e6)


# Together


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pods_count_together(new_store: Stores, client: redis.Redis, algorithm: Any) -> None:
    """Two pods have one limit between them, whatever the algorithm."""
    first, second = new_store(), new_store()
    clock = FrozenClock(first, client, int(START * 1e6))
    clock.rule(second)
    limits = [
        RateLimit("4/min", algorithm=algorithm, shared=store, name="vendor")
        for store in (first, second)
    ]
    guards = [new_guard(limit) for limit in limits]
    said = [guards[n % 2].attempt(lambda: "ok").reason for n in range(8)]
    most = 1 if algorithm == "leaky_bucket" else 4
    assert said == [None] * most + ["rate_limited"] * (8 - most)
    client.delete(clock._key)


def test_names_and_algorithms_are_apart(store: RedisStore) -> None:
    """Another name, another algorithm or another place among the limits is another limit."""
    for name, algorithm in [("a", "token_bucket"), ("b", "token_bucket"), ("a", "fixed_window")]:
        limit = RateLimit("1/min", algorithm=algorithm, shared=store, name=name)  # type: ignore[arg-type]
        assert reasons(new_guard(limit), 2) == [None, "rate_limited"]


def test_threads_and_tasks_of_one_process_count_together(store: RedisStore) -> None:
    """Sync calls in threads and async calls in a loop share the same limit."""
    limit = RateLimit("20/min", shared=store, name="both")
    guard = new_guard(limit)
    went: list[str | None] = []

    def work() -> None:
        went.extend(reasons(guard, 8))

    async def tasks() -> None:
        results = await asyncio.gather(*(guard.aattempt(ok) for _ in range(16)))
        went.extend(result.reason for result in results)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    asyncio.run(tasks())
    for thread in threads:
        thread.join(20)
    assert went.count(None) == 20
    assert len(went) == 48


def test_who_asks_at_once_is_answered_at_once(store: RedisStore, client: redis.Redis) -> None:
    """Fifty concurrent callers take far fewer script calls than fifty."""
    limit = RateLimit("1000/day", shared=store, name="many")
    guard = new_guard(limit)

    async def main() -> list[Any]:
        await guard.acall(ok)
        before = calls(client)
        results = await asyncio.gather(*(guard.aattempt(ok) for _ in range(50)))
        assert calls(client) - before <= 5
        return results

    assert all(result.ok for result in asyncio.run(main()))
    assert limit.peek().left == 1000 - 51


def test_a_look_and_a_reservation_tell_of_all_pods(new_store: Stores) -> None:
    """What another pod took is gone here too, and a cost is asked for as it is."""
    here, there = (
        RateLimit("10/day", algorithm="fixed_window", shared=new_store(), name="told")
        for _ in range(2)
    )
    taken = here.reserve(cost=2)
    there.reserve(cost=5)
    assert (taken.quota().left, asyncio.run(taken.aquota()).left) == (3, 3)
    assert here.peek(cost=3).retry_after == 0.0
    assert (here.peek(cost=4).retry_after or 0.0) > 0.0
    assert taken.quota().reset_after > 0.0


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_counter"])
def test_windows_of_one_process_end_when_those_of_the_store_do(
    store: RedisStore, algorithm: Any
) -> None:
    """Both begin at multiples of the period in UTC."""
    shared = RateLimit("9/week", algorithm=algorithm, shared=store, name="weekly")
    local = RateLimit("9/week", algorithm=algorithm)
    shared.reserve()
    local.reserve()
    apart = (shared.peek().reset_after - local.peek().reset_after) % (7 * 86_400)
    assert min(apart, 7 * 86_400 - apart) < 3600.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reset_is_for_all_pods(new_store: Stores, algorithm: Any) -> None:
    """Who was refused here before is admitted at once; other keys are as they were."""
    here, there = (
        RateLimit("2/day", algorithm=algorithm, key=lambda k: k, shared=new_store(), name="reset")
        for _ in range(2)
    )
    most = here.peek("ann").left
    guard, other = new_guard(here), new_guard(there)
    for user in ("ann", "bob"):
        assert reasons(guard, 3, user) == [None] * most + ["rate_limited"] * (3 - most)
    here.reset("ann")
    assert (there.peek("ann").left, there.peek("bob").left) == (most, 0)
    assert reasons(guard, most, "ann") == [None] * most
    asyncio.run(there.areset("ann"))
    assert reasons(other, 3, "ann") == [None] * most + ["rate_limited"] * (3 - most)


def left_after_reset(store: RedisStore, frozen: FrozenClock, name: str, cost: int | None) -> int:
    """Return what is left when all was taken after a reset, and something of before comes back."""
    limit = RateLimit("4/day", shared=store, name=name, cost=3)
    before = limit.reserve(cost=cost)
    frozen.advance(1000)
    limit.reset()
    limit.reserve(cost=4)
    before.cancel()
    flush(store)
    return limit.peek().left


@pytest.mark.parametrize("cost", [None, 3])
def test_what_was_taken_before_a_reset_is_not_given_back_to_the_store(
    store: RedisStore, frozen: FrozenClock, cost: int | None
) -> None:
    """Neither an estimate nor a cost that was known."""
    assert left_after_reset(store, frozen, "before", cost) == 0


def test_without_the_time_of_the_reset_too_much_is_given_back(
    store: RedisStore, frozen: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then more than the limit can be taken."""
    mutate(monkeypatch, "rates", "used < cost and when >= (state.since or 0)", "used < cost")
    assert left_after_reset(store, frozen, "ablation", None) > 0


def test_a_reset_needs_a_loop_that_goes_on(store: RedisStore) -> None:
    """Where it would block, it says what to write, and changes nothing."""
    limit = RateLimit("2/day", shared=store, name="loop")

    async def main() -> None:
        await limit.areserve()
        with pytest.raises(RuntimeError, match="areset"):
            limit.reset()
        assert (await limit.apeek()).left == 1

    asyncio.run(main())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pods_take_together_no_more_than_is_left(
    new_store: Stores, client: redis.Redis, algorithm: Any
) -> None:
    """One script call each, also where threads ask at once."""
    pods = [
        RateLimit("50/day", algorithm=algorithm, shared=new_store(), name="up to") for _ in range(2)
    ]
    full = pods[0].peek().left
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda pod=pod: taken.append(pod.take_up_to(9))) for pod in pods * 4
    ]
    before = calls(client)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == full
    assert calls(client) - before <= len(threads) + 4  # and the pods say that they live
    assert asyncio.run(pods[1].atake_up_to(9)) == 0


def calls(client: redis.Redis) -> int:
    """Return how many scripts the server has run."""
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_asks_as_one_is_told_what_each_would_be_told(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock, algorithm: Any
) -> None:
    """Concurrent calls, some beside an open estimate, some refused further in: as in memory."""
    memory = RateLimit("9/s", algorithm=algorithm)
    shared = RateLimit("9/s", algorithm=algorithm, shared=store, name="as-one")
    shut = Breaker(consecutive=1)
    shut.isolate()
    guards = [
        [new_guard(p, *more, clock=clock) for more in ((), (shut,))] for p in (memory, shared)
    ]

    async def many(limit: RateLimit, plain: Any, refusing: Any) -> Any:
        taken = await limit.areserve(cost=2) if (await limit.apeek()).left > 1 else None
        results = [await refusing.aattempt(ok)]
        await asyncio.to_thread(flush, store)
        results += await asyncio.gather(*(plain.aattempt(ok) for _ in range(5)))
        said = [(result.reason, getattr(result.error, "retry_after", None)) for result in results]
        if taken is not None:
            taken.settle(1)
        await asyncio.to_thread(flush, store)
        return said, await limit.apeek()

    for step in (0, 250_000, 1_000_000, 3_000_000):
        pass_by(frozen, clock, step)
        expected = asyncio.run(many(memory, *guards[0]))
        assert asyncio.run(many(shared, *guards[1])) == expected


def test_a_refusal_from_before_something_was_given_back_is_not_remembered(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock
) -> None:
    """Of two who ask as one, the first gives back; so what the second was told is over."""
    limit = RateLimit("1/s", shared=store, name="stale")
    shut = Breaker(consecutive=1)
    shut.isolate()
    guard, plain = new_guard(limit, shut, clock=clock), new_guard(limit, clock=clock)

    async def main() -> None:
        said = await asyncio.gather(*(guard.aattempt(ok) for _ in range(2)))
        assert [result.reason for result in said] == ["circuit_open", "rate_limited"]
        await asyncio.to_thread(flush, store)
        assert (await plain.aattempt(ok)).ok

    asyncio.run(main())
    del frozen


def test_a_script_that_was_flushed_heals_in_the_same_call(
    store: RedisStore, client: redis.Redis
) -> None:
    """After SCRIPT FLUSH nobody notices anything."""
    guard = new_guard(RateLimit("3/min", shared=store, name="flushed"))
    assert reasons(guard, 1) == [None]
    client.script_flush()
    assert reasons(guard, 3) == [None, None, "rate_limited"]


# Keys


def test_every_key_expires(store: RedisStore, client: redis.Redis, frozen: FrozenClock) -> None:
    """Whatever was done, no key stays for ever."""
    for algorithm in ALGORITHMS:
        limit = RateLimit(
            Limit("5/min", algorithm=algorithm, cost=lambda _: 1, settle=lambda _: 1, name="x"),  # type: ignore[arg-type]
            Limit("5/min", algorithm=algorithm, key=lambda user: user, name="y"),  # type: ignore[arg-type]
            shared=store,
            name=algorithm,
        )
        guard = new_guard(limit)
        guard.call(lambda _: 1, "ann")
        frozen.advance(60_000_000)
        limit.reserve("bob")
        frozen.advance(60_000_000)
        limit.reserve("bob").cancel()
        limit.lower(1, 30.0, "cid", limit="y")
        limit.peek("dan")
    flush(store)
    assert keys_without_expiry(client, store._core.prefix) == []
    assert len(list(client.scan_iter(match=f"{store._core.prefix}:*", count=1000))) > 20


ODD: list[Any] = [
    *(
        "{a}:b",
        "{b",
        "}",
        ":",
        "",
        " ",
        "é",
        "x" * 5000,
        "a:b",
        ("a", "b"),
        ("a:b",),
        ("a", ("b",)),
    ),
    *(0, 1, -1, 10**30, 1.5, b"\x00\xff", None, (1, "1"), ("1", 1)),
]


def test_odd_keys_are_apart(store: RedisStore, client: redis.Redis) -> None:
    """Braces, colons, long texts, numbers and tuples: each has a limit of its own, in one slot."""
    limit = RateLimit("1/min", key=lambda key: key, shared=store, name="odd{x}")
    guard = new_guard(limit)
    for key in ODD:
        assert guard.attempt(lambda _: "ok", key).ok, key
    for key in ODD:
        assert not guard.attempt(lambda _: "ok", key).ok, key
    assert not guard.attempt(lambda _: "ok", 1.0).ok  # the same as 1, as in memory
    names = [key.decode() for key in client.scan_iter(match=f"{store._core.prefix}:*", count=1000)]
    ours = [name for name in names if "{rate:" in name]
    states = [name for name in ours if not name.endswith((":settings", ":clock"))]
    assert len(states) == len(ODD)
    assert len({name.partition("}")[0] for name in states}) == 1
    assert all(len(name) < 200 for name in states)


def test_a_key_that_only_this_process_knows_is_refused(store: RedisStore) -> None:
    """An object of the user's has no text that other pods would agree on."""
    limit = RateLimit("1/min", key=lambda key: key, shared=store, name="objects")
    with pytest.raises(TypeError, match="cannot be shared between processes: return text"):
        new_guard(limit).call(lambda _: "ok", object())
    with pytest.raises(TypeError, match="cannot be shared"):
        limit.reserve(frozenset("a"))


# What is given back


def test_a_call_refused_further_in_gives_back(store: RedisStore) -> None:
    """What a breaker refuses takes nothing, in a thread or in a loop."""
    limit = RateLimit("3/min", shared=store, name="back")
    shut = Breaker(consecutive=1)
    shut.isolate()
    guard = new_guard(limit, shut)
    for _ in range(5):
        with pytest.raises(CircuitOpen):
            guard.call(lambda: "ok")
        flush(store)

    async def main() -> None:
        for _ in range(5):
            with pytest.raises(CircuitOpen):
                await guard.acall(ok)
            await asyncio.to_thread(flush, store)

    asyncio.run(main())
    assert limit.peek().left == 3


async def missing_after_cancellations(store: RedisStore, rng: Random, name: str) -> int:
    """Return how much is gone that no call has, after some of many at once were cancelled."""
    limit = RateLimit("1000/min", algorithm="fixed_window", shared=store, name=name)
    guard = new_guard(limit)
    loop = asyncio.get_running_loop()
    done = 0
    for _ in range(12):
        tasks = [loop.create_task(guard.acall(ok)) for _ in range(10)]
        chosen = {task: rng.randrange(20) for task in rng.sample(tasks, 5)}
        for turn in range(20):
            for task, when in chosen.items():
                if when == turn:
                    task.cancel()
            await let_pass(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        done += results.count("ok")
    left, before = 0, -1
    while left != before:  # what was granted to the cancelled may still be on its way back
        await let_pass(0.05)
        await asyncio.to_thread(flush, store)
        before, left = left, (await limit.apeek()).left
    guard.close()
    return 1000 - done - left


@pytest.mark.usefixtures("frozen")
def test_cancelled_at_any_point_nobody_takes_anything_along(store: RedisStore, rng: Random) -> None:
    """Of many who ask as one, whoever is cancelled gives back what it was granted."""
    assert asyncio.run(missing_after_cancellations(store, rng, "cut")) == 0


@pytest.mark.usefixtures("frozen")
def test_without_giving_back_the_cancelled_would_use_up_the_limit(
    store: RedisStore, rng: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If who is cancelled did not part from the others, its grant would be lost."""
    monkeypatch.setattr(QuestionRound, "leave", lambda *_: None)
    assert asyncio.run(missing_after_cancellations(store, rng, "cut")) > 0


def test_a_reservation_is_settled_once_even_if_told_twice(
    store: RedisStore, frozen: FrozenClock
) -> None:
    """The second time the script finds no reservation, and changes nothing."""
    assert settled_twice(store) == 8
    del frozen


def test_without_forgetting_the_reservation_it_would_count_twice(
    store: RedisStore, frozen: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the script kept the reservation, a settlement sent twice would give back twice."""
    mutate(monkeypatch, "rates", "redis.call('DEL', KEYS[reservation])", "")
    assert settled_twice(store) != 8
    del frozen


def settled_twice(store: RedisStore) -> int:
    """Return what is left of 10 after two calls, of which one used 1 of 3, told twice."""
    limit = RateLimit("10/min", algorithm="fixed_window", shared=store, name="twice")
    one = limit.reserve(cost=3)
    limit.reserve(cost=1)
    assert limit._sharing is not None
    receipt = one._held[0][0].receipt
    one.settle(1)
    limit._sharing.share.settle(receipt, [1])
    flush(store)
    return limit.peek().left


# What is known


def test_what_was_refused_is_refused_here_until_its_time(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock
) -> None:
    """A key that is known to be exhausted costs no question; then it is asked, and admitted."""
    limit = RateLimit("2/s", key=lambda user: user, shared=store, name="known")
    guard = new_guard(limit, clock=clock)
    assert reasons(guard, 3, "ann") == [None, None, "rate_limited"]
    asked = guard.snapshot()["policies"][0]["shared"]["asks"]
    with pytest.raises(RateLimited) as refusal:
        guard.call(lambda _: "ok", "ann")
    assert refusal.value.retry_after == 0.5
    assert refusal.value.limit == "2/s"
    assert reasons(guard, 1, "bob") == [None]
    shown = guard.snapshot()["policies"][0]["shared"]
    assert shown["asks"] == asked + 1
    assert shown["known_exhausted"] == 1
    pass_by(frozen, clock, 499_999)
    assert reasons(guard, 1, "ann") == ["rate_limited"]
    pass_by(frozen, clock, 1)
    assert reasons(guard, 1, "ann") == [None]


def test_what_is_given_back_is_known_at_once(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock
) -> None:
    """After a cancelled reservation the store is asked again."""
    limit = RateLimit("2/s", shared=store, name="again")
    guard = new_guard(limit, clock=clock)
    taken = limit.reserve()
    assert reasons(guard, 3) == [None, "rate_limited", "rate_limited"]
    taken.cancel()
    flush(store)
    assert reasons(guard, 2) == [None, "rate_limited"]
    del frozen


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_larger_cost_is_told_its_own_time(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock, algorithm: Any
) -> None:
    """Who is refused by what is known comes back at the time that it was told, and is admitted."""
    limit = RateLimit(
        Limit("4/s", algorithm=algorithm, cost=lambda n: n, name="n"), shared=store, name="larger"
    )
    guard = new_guard(limit, clock=clock)
    guard.call(lambda _: "ok", 4)
    for cost in (1, 3, 2, 4):
        with pytest.raises(RateLimited) as refusal:
            guard.call(lambda _: "ok", cost)
        assert refusal.value.retry_after is not None
    pass_by(frozen, clock, round(refusal.value.retry_after * 1e6))
    assert guard.call(lambda _: "ok", 4) == "ok"


# Waiting


def test_who_waits_is_served_in_order(store: RedisStore) -> None:
    """In one process those who wait go one after another, and only the first asks."""
    limit = RateLimit("50/s", burst=1, shared=store, name="line", max_wait=5.0)
    guard = new_guard(limit)
    went: list[int] = []

    async def one(number: int) -> None:
        await guard.acall(ok)
        went.append(number)

    async def main() -> None:
        await guard.acall(ok)
        for number in range(8):
            asyncio.get_running_loop().create_task(one(number))
            # The next one comes when this one waits: nothing orders two that ask at the same time.
            await until(lambda number=number: limit.waiting + len(went) > number)
        await until(lambda: len(went) >= 8)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert went == list(range(8))
    assert guard.snapshot()["policies"][0]["shared"]["asks"] <= 1 + 8 * 3
    assert limit.waiting == 0


def test_who_would_wait_too_long_is_told_at_once(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock
) -> None:
    """A turn that cannot come in time is refused, by the store's word or by those ahead."""
    limit = RateLimit("1/s", shared=store, name="late", max_wait=0.5)
    guard = new_guard(limit, clock=clock)
    assert guard.call(lambda: "ok") == "ok"
    with pytest.raises(RateLimited, match="it would have to wait too long") as refusal:
        guard.call(lambda: "ok")
    assert refusal.value.retry_after == 1.0
    assert limit.waiting == 0
    del frozen


def test_a_cancelled_waiter_makes_room(store: RedisStore) -> None:
    """Who leaves the line takes nothing with it, and the next moves up."""
    limit = RateLimit("10/s", burst=1, shared=store, name="leaver", max_wait=5.0)
    guard = new_guard(limit)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await guard.acall(ok)
        first = loop.create_task(guard.acall(ok))
        await until(lambda: limit.waiting)
        second = loop.create_task(guard.acall(ok))
        await until(lambda: limit.waiting >= 2)
        first.cancel()
        assert await second == "ok"
        assert limit.waiting == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_no_more_wait_than_are_allowed(store: RedisStore) -> None:
    """One too many is refused, and says why."""
    limit = RateLimit("5/s", burst=1, shared=store, name="full", max_wait=5.0, max_waiting=1)
    guard = new_guard(limit)

    async def main() -> None:
        await guard.acall(ok)
        waits = asyncio.get_running_loop().create_task(guard.acall(ok))
        await until(lambda: limit.waiting)
        with pytest.raises(RateLimited, match="no room to wait"):
            await guard.acall(ok)
        assert await waits == "ok"

    asyncio.run(asyncio.wait_for(main(), 20))


def test_all_who_wait_go_when_it_is_switched_off(store: RedisStore) -> None:
    """A limit that is off holds nobody, and asks nobody."""
    limit = RateLimit("1/min", shared=store, name="off", max_wait=500.0)
    guard = new_guard(limit)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await guard.acall(ok)
        tasks = [loop.create_task(guard.acall(ok)) for _ in range(3)]
        await until(lambda: limit.waiting >= 3)
        limit.update(mode="off")
        assert await asyncio.gather(*tasks) == ["ok"] * 3

    asyncio.run(asyncio.wait_for(main(), 20))
    asked = guard.snapshot()["policies"][0]["shared"]["asks"]
    assert reasons(guard, 3) == [None] * 3
    assert guard.snapshot()["policies"][0]["shared"]["asks"] == asked


def test_shadow_admits_and_counts(store: RedisStore) -> None:
    """In shadow mode the store is asked, and what it refuses is only counted."""
    guard = new_guard(RateLimit("1/min", shared=store, name="shadow", mode="shadow"))
    assert reasons(guard, 3) == [None] * 3
    assert guard.snapshot()["policies"][0]["would_reject"] == 2


# Vendors' words


def test_a_vendors_word_holds_on_all_pods(new_store: Stores) -> None:
    """What one pod is told lowers what another may take, and never raises it."""
    first, second = new_store(), new_store()
    teller = RateLimit("10/min", shared=first, name="word")
    other = RateLimit("10/min", shared=second, name="word")

    async def main() -> None:
        await teller.alower(2, 30.0)
        assert (await other.apeek()).left == 2
        await other.areserve()
        await teller.alower(500, 30.0)
        assert (await other.apeek()).left == 1
        await other.areserve()
        with pytest.raises(RateLimited) as refusal:
            await other.areserve()
        assert refusal.value.retry_after is not None
        assert 25.0 < refusal.value.retry_after <= 30.0
        for store in (first, second):
            await store.aclose()

    asyncio.run(main())


# Settings


def test_pods_that_disagree_are_an_event(new_store: Stores, client: redis.Redis) -> None:
    """A pod with other numbers hears of it, and says so for each guard."""
    heard: list[SettingsDiffer] = []
    told = threading.Event()

    def hear(event: SettingsDiffer) -> None:
        heard.append(event)
        told.set()

    limits = [RateLimit(rate, shared=new_store(), name="disputed") for rate in ("10/s", "20/s")]
    guards = [new_guard(limit) for limit in limits]
    stop = subscribe(hear, SettingsDiffer)
    guards[0].call(lambda: "ok")
    wait_for_settings(limits[0], client)
    guards[1].call(lambda: "ok")
    assert told.wait(10)
    stop()
    assert heard[0].guard == guards[1].name
    assert heard[0].shared_name == "disputed"
    assert (heard[0].own, heard[0].other) == (
        "TokenBucket 20 in 1 s, burst 20",
        "TokenBucket 10 in 1 s, burst 10",
    )


def wait_for_settings(limit: RateLimit, client: redis.Redis) -> None:
    """Wait until a pod has announced its settings."""
    assert limit._sharing is not None
    share: Any = limit._sharing.share
    key = share.store.key("rate", share.name, "settings")
    bell = threading.Event()
    while not client.exists(key):
        bell.wait(0.005)


def test_a_store_keeps_no_policy_alive(store: RedisStore) -> None:
    """A policy that nobody uses any more is gone, though its store lives on."""
    limit = RateLimit("10/s", shared=store, name="gone")
    limit.reserve()
    assert "shared='redis', name='gone'" in repr(limit)
    gone = weakref.ref(limit)
    del limit
    gc.collect()
    assert gone() is None


# Mistakes


def test_bad_arguments_are_refused_at_once(store: RedisStore) -> None:
    """Each message says what to write instead."""
    with pytest.raises(TypeError, match="shared limits need one, the same on all pods"):
        RateLimit("1/s", shared=store)
    with pytest.raises(TypeError, match="pass a store, such as RedisStore"):
        RateLimit("1/s", shared="redis://localhost", name="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="are for shared limits"):
        RateLimit("1/s", name="x")
    with pytest.raises(TypeError, match="are for shared limits"):
        RateLimit("1/s", on_store_failure="open")
    with pytest.raises(ValueError, match="write one of 'exact', 'leased', 'split'"):
        RateLimit("1/s", shared=store, name="x", sharing="loose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write one of 'local', 'open', 'closed'"):
        RateLimit("1/s", shared=store, name="x", on_store_failure="shut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is for sharing='leased'"):
        RateLimit("1/s", shared=store, name="x", batch=3)
    limit = RateLimit(Limit("1/s", name="a"), Limit("2/s", name="b"))
    with pytest.raises(TypeError, match="say which limit is meant, by limit='a'"):
        limit.lower(1, 1.0)
    with pytest.raises(ValueError, match="write one of 'a', 'b'"):
        limit.lower(1, 1.0, limit="c")
    with pytest.raises(ValueError, match="remaining=-1"):
        limit.lower(-1, 1.0, limit="a")
    with pytest.raises(ValueError, match="reset_after="):
        limit.lower(1, float("nan"), limit="a")


def test_blocking_in_an_event_loop_is_refused(store: RedisStore) -> None:
    """What would let the loop stand still names its async twin."""
    limit = RateLimit("1/s", shared=store, name="loop")

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"write `await limit.areserve\(\)`"):
            limit.reserve()
        with pytest.raises(RuntimeError, match=r"write `await limit.apeek\(\)`"):
            limit.peek()
        assert (await limit.apeek()).left == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "reply",
    [None, 1, b"", b"x", b"1 2 3", b"1 0,0,0", b"1 9,9,5", b"1 1,1,-7", b"1 0;1,2", b"1 \xff"],
)
def test_an_answer_that_makes_no_sense_is_none(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, reply: Any
) -> None:
    """Whatever the store says, a caller gets a verdict or hears that the store has failed."""
    limit = RateLimit("1/s", shared=store, name="nonsense")
    assert limit._sharing is not None
    share: Any = limit._sharing.share

    async def exchange(*_args: Any) -> Any:
        return reply

    monkeypatch.setattr(LoopConnection, "exchange", exchange)
    with pytest.raises(StoreUnavailable, match="makes no sense"):
        drive(share.decide(limit._charges((), {})), lambda request: request.run())


# --- What cannot be true ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_absurd_cost_closes_a_shared_limit_for_one_period(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock, algorithm: str
) -> None:
    """For all pods, however many such numbers come; and each is an event of the pod that told."""
    heard: list[ImplausibleReport] = []
    stop = subscribe(heard.append, ImplausibleReport)
    limit = RateLimit("100/s", algorithm=algorithm, shared=store, name=f"absurd-{algorithm}")  # type: ignore[arg-type]
    guard = new_guard(limit, clock=clock)
    under_way = [limit.reserve(cost=0) for _ in range(4)]
    for taken in under_way:
        taken.settle(10**12)
    flush(store)
    assert guard.attempt(lambda: "ok").reason == "rate_limited"
    pass_by(frozen, clock, 1_010_000)  # one period, and what one call takes
    assert guard.attempt(lambda: "ok").ok
    stop()
    assert [(one.guard, one.reported) for one in heard] == [(guard.name, 10**12)] * 4


def test_a_debt_without_bound_would_close_it_for_years(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both safeguards away, in the policy and in the script."""
    bound = "state.owed = min(state.owed, max(owed, now + limit.tolerance + limit.debt))"
    mutate(monkeypatch, "rates", bound, "")
    monkeypatch.setattr(RateLimit, "_plausible", lambda _policy, _charge, actual: actual)
    limit = RateLimit("100/s", shared=store, name="years")
    guard = new_guard(limit, clock=clock)
    limit.reserve(cost=1).settle(10**12)
    flush(store)
    pass_by(frozen, clock, 30_000_000)
    result = guard.attempt(lambda: "ok")
    assert result.error.retry_after > 300 * 365 * 86_400  # type: ignore[union-attr]


def test_leased_tokens_do_not_hide_an_absurd_cost(
    store: RedisStore, frozen: FrozenClock, clock: PatientClock
) -> None:
    """What was used beyond the batch is taken from the shared limit, and bounded there."""
    limit = RateLimit(
        Limit("100/s", cost=lambda: 1, settle=lambda used: used, name="tokens"),
        shared=store,
        name="leased-absurd",
        sharing="leased",
        batch=2,
    )
    guard = new_guard(limit, clock=clock)
    guard.call(lambda: 10**12)
    flush(store)
    pass_by(frozen, clock, 1_100_000)
    assert guard.attempt(lambda: 1).ok
