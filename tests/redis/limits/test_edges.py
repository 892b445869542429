"""Shared limits where things happen at once: failures within a call, late answers, other clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from seawall import RateLimit, RateLimited
from seawall.errors import StoreUnavailable
from seawall.limits import Limit
from seawall.redis import connections
from seawall.redis.limits import shared
from seawall.redis.limits.exact import ExactLimits, QuestionRound
from seawall.redis.limits.wire import ScriptKeys
from seawall.redis.store import RedisStore
from tests.redis.limits.test_agreement import START, PatientClock, flush
from tests.redis.limits.test_limits import ok, reasons
from tests.redis.support import FrozenClock, mutate
from tests.support import let_pass, new_guard

Stores = Callable[..., RedisStore]


def share_of(limit: RateLimit) -> Any:
    """Return how a policy is shared."""
    assert limit._sharing is not None
    return limit._sharing.share


def windows(store: RedisStore, name: str, rate: str = "100/h", **options: Any) -> RateLimit:
    """Return a limit of which nothing comes back by itself."""
    return RateLimit(rate, algorithm="fixed_window", shared=store, name=name, **options)


# Failures within a call


@pytest.mark.parametrize("how", ["down", "closed"])
def test_a_store_that_goes_while_it_is_asked_holds_up_nobody(store: RedisStore, how: str) -> None:
    """A question that fails at once is heard by who asks it."""
    limit = RateLimit("100/s", shared=store, name="within")
    guard, share = new_guard(limit), share_of(limit)
    wanted = share.wanted

    def gone(charges: Any) -> Any:
        if how == "down":
            store._core.health.up = False
        else:
            store._core.closed = True
        return wanted(charges)

    async def main() -> None:
        await guard.acall(ok)
        share.wanted = gone
        assert await asyncio.wait_for(guard.acall(ok), 5) == "ok"
        assert share._rounds == {}

    asyncio.run(main())
    store._core.health.up, store._closed = True, False


def test_a_round_that_another_loop_has_replaced_closes_without_harm(store: RedisStore) -> None:
    """Two loops that ask for the same in two threads do not fail each other's calls."""
    share, takings = share_of(RateLimit("1/s", shared=store, name="loops")), ((1, None, 1),)

    class Racing(dict):  # type: ignore[type-arg]
        def get(self, key: Any) -> Any:
            return self.pop(key, None)  # as if the other thread were faster

    rounds: Any = Racing()
    rounds[takings] = QuestionRound(share.terms, takings, None, rounds)  # type: ignore[arg-type]
    rounds[takings].ask(ScriptKeys(share.terms))
    assert not rounds


def test_an_answer_that_comes_too_late_is_given_back_once(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up by the timer, answered and cancelled in one turn of the loop: one give-back."""
    limit = windows(store, "once")
    guard = new_guard(limit)

    async def main() -> None:
        for _ in range(50):
            await guard.acall(ok)
        task = asyncio.get_running_loop().create_task(guard.acall(ok))
        deliver = connections.StoreQuestion.deliver

        def late(asking: Any, answer: Any) -> None:
            asking.fail(StoreUnavailable("late"))
            deliver(asking, answer)
            task.cancel()

        with monkeypatch.context() as patch:
            patch.setattr(connections.StoreQuestion, "deliver", late)
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(flush, store)
        assert (await limit.apeek()).left == 50

    asyncio.run(main())


async def lost_by_cancelling(store: RedisStore) -> int:
    """Return what is gone after reservations that were cancelled while they waited."""
    limit = windows(store, "undo", "1000/h")
    await limit.areserve(cost=1)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(limit.areserve(cost=10)) for _ in range(20)]
    while not store._core._connections.here()._tasks:
        await let_pass(0)
    for task in tasks:
        task.cancel()
    taken = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in taken)
    while store._core._connections.here()._tasks:
        await let_pass(0.001)
    await asyncio.to_thread(flush, store)
    return 999 - (await limit.apeek()).left


def test_a_cancelled_reservation_is_given_back_after_it_was_taken(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one call under way at a time, no undoing overtakes what it undoes; ablated, it does."""
    monkeypatch.setattr(connections, "MOST_CONCURRENT", 1)
    assert asyncio.run(lost_by_cancelling(store)) == 0
    monkeypatch.setattr(shared.LimitTerms, "unwanted", lambda *_: None)
    assert asyncio.run(lost_by_cancelling(store)) > 0


def test_two_policies_of_one_name_have_reservations_of_their_own(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process each is settled for itself; with numbers of their own, they would not be."""

    def left() -> int:
        limits = [windows(store, "twins") for _ in range(2)]
        taken = [limit.reserve(cost=cost) for limit, cost in zip(limits, (40, 1), strict=True)]
        for one in reversed(taken):
            one.cancel()
        flush(store)
        return limits[0].peek().left

    assert left() == 100
    monkeypatch.setattr(shared, "_serial", iter([7] * 9))
    assert left() < 100


# Late answers


def test_what_is_admitted_alone_while_the_store_is_up_counts_there(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every second answer is late, both budgets are not spent; unless nobody tells the store."""
    deliver, calls = connections.StoreQuestion.deliver, iter(range(10_000))

    def sometimes(asking: Any, answer: Any) -> None:
        if next(calls) % 2:
            asking.fail(StoreUnavailable("late"))
        deliver(asking, answer)

    def admitted(name: str, failing: Any) -> int:
        limit = windows(store, name, "40/h", on_store_failure=failing)
        guard = new_guard(limit)
        count = 0
        for _ in range(60):
            count += guard.attempt(lambda: "ok").ok
            flush(store)
            assert limit._sharing is not None
            limit._sharing.exhausted.clear()
        return count

    monkeypatch.setattr(connections.StoreQuestion, "deliver", sometimes)
    assert admitted("told", "local") == 40 + 10  # 10: what the pod may have alone
    assert admitted("open", "open") == 40 + 10
    assert admitted("closed", "closed") == 30
    monkeypatch.setattr(ExactLimits, "count", lambda *_: None)
    assert admitted("untold", "local") == 60


# What is known, and what is not


def test_what_another_pod_gives_back_is_noticed(new_store: Stores, client: redis.Redis) -> None:
    """A refusal for an hour is believed for a second; what it says of the hour stays true."""
    stores = [new_store(), new_store()]
    frozen = FrozenClock(stores[0], client, int(START * 1e6))
    frozen.rule(stores[1])
    clock = PatientClock(START)
    there, here = (windows(store, "far") for store in stores)
    guard = new_guard(here, clock=clock)
    taken = there.reserve(cost=100)
    assert reasons(guard, 2) == ["rate_limited"] * 2
    taken.cancel()
    flush(stores[0])
    for us, said in ((999_999, "rate_limited"), (1, None)):
        frozen.advance(us)
        clock.advance_to(frozen.now_us / 1e6)
        result = guard.attempt(lambda: "ok")
        assert result.reason == said
        if result.error is not None:
            assert result.error.retry_after > 600  # type: ignore[attr-defined]
    client.delete(frozen._key)


# Settings


def test_pods_with_other_periods_do_not_wipe_each_others_windows(
    new_store: Stores, client: redis.Redis
) -> None:
    """While pods are changed one after another, each keeps to the windows that it knows."""
    for algorithm, most in (("fixed_window", 10), ("sliding_counter", 10), ("sliding_log", 10)):
        stores = [new_store(), new_store()]
        frozen = FrozenClock(stores[0], client, 60_000_000_000_000)
        frozen.rule(stores[1])
        limits = [
            RateLimit(rate, algorithm=algorithm, shared=store, name=algorithm)  # type: ignore[arg-type]
            for rate, store in zip(("10/min", "1/s"), stores, strict=True)
        ]
        went = 0
        for _ in range(50):
            for number in (1, 0, 0):
                try:
                    limits[number].reserve()
                    went += number == 0
                except RateLimited:
                    pass
            frozen.advance(1_000_000)
        assert went == most
        client.delete(frozen._key)


def test_an_update_of_other_things_loses_nothing(store: RedisStore) -> None:
    """What was taken before it is given back after it, and other numbers forget it as ever."""
    limit = windows(store, "same")
    for change, left in (({"max_wait": 1.0}, 100), ({"limits": "90/h"}, 30)):
        taken = limit.reserve(cost=60)
        limit.update(**change)
        taken.cancel()
        flush(store)
        assert limit.peek().left == left


def test_an_update_that_is_refused_changes_nothing(store: RedisStore) -> None:
    """A batch that does not fit is found before anything is changed."""
    limit = RateLimit("100/s", shared=store, name="half", sharing="leased", batch=50)
    with pytest.raises(ValueError, match="cannot be lowered to that"):
        limit.update(limits="10/s", max_wait=1.0)
    assert (limit.limits[0].text, limit.max_wait) == ("100/s", 0.0)
    assert limit._meters.all[0].rule.rate == share_of(limit).terms.rules[0].rate


# Time and size


def test_a_clock_that_is_set_back_outlives_what_it_is_for(
    store: RedisStore, client: redis.Redis, frozen: FrozenClock
) -> None:
    """The policy's clock is kept for longer than any state or reservation that has its times."""
    limit = RateLimit(Limit("1/h", burst=5, key=lambda key: key), shared=store, name="steady")
    for key in "ab":
        limit.reserve(key, cost=5)
    frozen.advance(-7_200_000_000)
    limit.peek("c")  # which keeps nothing but the clock
    keys = list(client.scan_iter(match=f"{store._core.prefix}:*steady*", count=1000))
    (clock,) = [key for key in keys if key.endswith(b":clock")]
    others = [key for key in keys if key != clock and not key.endswith(b":settings")]
    assert len(others) == 4
    assert client.pttl(clock) > max(client.pttl(key) for key in others)


def test_a_long_log_is_cleaned_bit_by_bit(
    store: RedisStore, client: redis.Redis, frozen: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call forgets so much at most; what is over but not forgotten counts, for a few calls."""
    mutate(monkeypatch, "rates", "local CHUNKS_AT_MOST = 16", "local CHUNKS_AT_MOST = 1")
    limit = RateLimit("200/min", algorithm="sliding_log", shared=store, name="log")
    kept = share_of(limit).terms.homes[0][1]
    taken = []
    for _ in range(200):
        taken.append(limit.reserve())
        frozen.advance(1000)
    with pytest.raises(RateLimited) as refusal:
        limit.reserve(cost=150)  # too far to see: told when to ask again
    assert refusal.value.retry_after == pytest.approx(60 - 0.2 + 0.063, abs=1e-4)
    taken[30].cancel()  # found by halving
    flush(store)
    assert client.llen(kept) == 199
    frozen.advance(60_000_000 - 10_000)  # 190 are over, of which one was given back
    with pytest.raises(RateLimited) as refusal:
        limit.reserve(cost=66)  # it would fit, if all that is over were forgotten
    assert refusal.value.retry_after == pytest.approx(1e-6, abs=1e-6)
    assert [limit.peek().left for _ in range(3)] == [129, 191, 191]
    frozen.advance(60_000_000)
    assert limit.peek().left == 200  # all is over: at once
    assert client.llen(kept) == 0
