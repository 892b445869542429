"""RateLimit: who gets in, who is refused and when to come again, what is given back and settled."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    BulkheadFull,
    DeadlineExceeded,
    RateLimit,
    RateLimited,
    RedisStore,
    Retry,
    deadline,
    subscribe,
)
from seawall.clock import VirtualClock
from seawall.context import current_tenant, tenant
from seawall.events import CallRejected, SettingsChanged
from seawall.limits import Limit, Quota
from seawall.policies.rate_limit.meters import RESETS
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow, virtual_time
from tests.support import let_pass, new_guard

ALGORITHMS = ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]


def admitted(guard: Any, calls: int, *args: Any) -> int:
    """Return how many of so many calls are let in at this instant."""
    return sum(guard.attempt(lambda *_: None, *args).ok for _ in range(calls))


# Who gets in


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_over_the_limit_is_refused_and_told_when_to_come_again(algorithm: str) -> None:
    """Who comes back after `retry_after` is admitted, and a moment before is not."""
    with virtual_time() as clock:
        clock.advance(1000.1)
        guard = new_guard(RateLimit("3/s", algorithm=algorithm))
        most = 1 if algorithm == "leaky_bucket" else 3
        assert admitted(guard, 10) == most
        with pytest.raises(RateLimited, match="over the limit 3/s") as caught:
            guard.call(lambda: None)
        error = caught.value
        assert (error.guard, error.policy, error.limit) == (guard.name, "rate_limit", "3/s")
        assert error.reason == "rate_limited"
        assert error.retry_after is not None
        clock.advance(error.retry_after - 0.001)
        assert admitted(guard, 1) == 0
        clock.advance(0.001)
        assert admitted(guard, 1) == 1
        shown = guard.snapshot()["policies"][0]
        assert shown["rejected"] == 10 - most + 2
        assert shown["limits"]["3/s"]["limit"] == "3/s"


def test_a_token_bucket_lets_a_burst_in_and_then_the_rate() -> None:
    """As many at once as `burst` says; without it, as the rate says."""
    with virtual_time() as clock:
        guard = new_guard(RateLimit("60/s", burst=10))
        assert admitted(guard, 30) == 10
        clock.advance(0.5)
        assert admitted(guard, 60) == 10
        clock.advance(1 / 60)
        assert admitted(guard, 5) == 1
        assert admitted(new_guard(RateLimit("60/s")), 100) == 60


@pytest.mark.parametrize("kind", ["sync", "async", "hold", "generator"])
def test_every_way_into_a_guard_takes_a_token(kind: str) -> None:
    """Calls, blocks and generators are counted alike."""

    async def main() -> None:
        limit = RateLimit("2/s")
        guard = new_guard(limit)

        @guard
        def plain() -> None: ...

        @guard
        async def later() -> None: ...

        @guard
        def items() -> Any:
            yield 1

        async def once() -> None:
            if kind == "sync":
                plain()
            elif kind == "async":
                await later()
            elif kind == "generator":
                assert list(items()) == [1]
            else:
                with guard.hold():
                    pass

        await once()
        await once()
        assert limit.peek().left == 0
        with pytest.raises(RateLimited):
            await once()

    run_virtual(main())


def test_several_limits_are_taken_together_or_not_at_all() -> None:
    """What one refuses takes nothing from the other; the first exceeded is named."""
    with virtual_time() as clock:
        limit = RateLimit(Limit("2/s", name="short"), Limit("3/min", name="long"))
        guard = new_guard(limit)
        assert admitted(guard, 2) == 2
        with pytest.raises(RateLimited, match=r"'short' \(2/s\)") as caught:
            guard.call(lambda: None)
        assert caught.value.limit == "short"
        assert limit.peek() == Quota("short", 0, 0.5, 1.0)
        clock.advance(1.0)
        assert admitted(guard, 2) == 1
        result = guard.attempt(lambda: None)
        assert isinstance(result.error, RateLimited)
        assert result.error.limit == "long"
        # Of the short one nothing was taken by the refusals.
        shown = guard.snapshot()["policies"][0]["limits"]
        assert (shown["short"]["left"], shown["long"]["left"]) == (1, 0)
        # Both are exceeded after another one, and the longer wait is told.
        assert result.error.retry_after == pytest.approx(19.0)


def test_the_hint_is_right_for_all_limits_together() -> None:
    """The first exceeded is named, and the longest wait of all is told."""
    with virtual_time() as clock:
        guard = new_guard(RateLimit(Limit("1/s", name="a"), Limit("1/min", name="b")))
        assert admitted(guard, 1) == 1
        with pytest.raises(RateLimited) as caught:
            guard.call(lambda: None)
        assert (caught.value.limit, caught.value.retry_after) == ("a", 60.0)
        clock.advance(60.0)
        assert admitted(guard, 1) == 1


# Keys


def test_each_key_has_a_limit_of_its_own() -> None:
    """A key is made of the call's arguments: a user, or an address and a route."""
    with virtual_time():
        guard = new_guard(RateLimit("2/s", key=lambda address, route: (address, route)))
        assert admitted(guard, 5, "1.2.3.4", "/a") == 2
        assert admitted(guard, 5, "1.2.3.4", "/b") == 2
        assert admitted(guard, 5, "5.6.7.8", "/a") == 2
        assert guard.snapshot()["policies"][0]["limits"]["2/s"]["keys"] == 3
        text = new_guard(RateLimit("2/s", key=lambda user: user))
        assert [admitted(text, 5, user) for user in ("ann", "bob", "ann")] == [2, 2, 0]


def test_a_key_can_come_from_the_context() -> None:
    """A function without parameters is asked without arguments."""
    with virtual_time():
        guard = new_guard(RateLimit("2/s", key=current_tenant))
        for name in ("ann", "bob"):
            with tenant(name):
                assert admitted(guard, 5, "some", "arguments") == 2
        assert admitted(guard, 5) == 2
        with tenant("ann"):
            assert admitted(guard, 5) == 0


def test_a_limit_for_each_user_and_one_for_all() -> None:
    """A user who has used up his own takes nothing from the others."""
    with virtual_time():
        limit = RateLimit(
            Limit("2/s", key=lambda user: user, name="user"), Limit("5/s", name="all")
        )
        guard = new_guard(limit)
        assert [admitted(guard, 9, user) for user in ("ann", "bob", "cy")] == [2, 2, 1]
        result = guard.attempt(lambda _: None, "cy")
        assert isinstance(result.error, RateLimited)
        assert result.error.limit == "all"


def test_an_unhashable_key_says_so() -> None:
    """The message names the limit and what to return."""
    for limit in (RateLimit("2/s", key=list), RateLimit("2/s", "3/s", key=list)):
        guard = new_guard(limit)
        with pytest.raises(TypeError, match=r"the key of limit '2/s': .*return text"):
            guard.call(lambda _: None, "ab")


class Odd:
    """A key that is equal to others of its kind."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


def test_any_hashable_thing_is_a_key() -> None:
    """Also one whose comparison is code of the user."""
    with virtual_time():
        guard = new_guard(RateLimit("2/s", key=lambda thing: thing))
        assert admitted(guard, 3, Odd()) == 2
        assert admitted(guard, 3, Odd()) == 0


# Costs


def test_a_call_takes_what_it_costs() -> None:
    """Tokens, bytes or rows: `cost` is a number, or a function of the call's arguments."""
    with virtual_time() as clock:
        guard = new_guard(RateLimit("100/s", cost=len))
        assert guard.attempt(len, "x" * 70).ok
        assert not guard.attempt(len, "x" * 40).ok
        assert guard.attempt(len, "x" * 30).ok
        clock.advance(0.4)
        assert guard.attempt(len, "x" * 40).ok
        assert guard.attempt(len, "").ok, "what costs nothing is never refused"
        fixed = new_guard(RateLimit("10/s", cost=4))
        assert admitted(fixed, 5) == 2


def test_what_can_never_fit_is_refused_for_good() -> None:
    """Without `retry_after`: waiting does not help."""
    with virtual_time():
        guard = new_guard(RateLimit("100/s", burst=50, cost=len, max_wait=9.0))
        with pytest.raises(RateLimited, match="cost of 51 never fits, 50 is the most") as caught:
            guard.call(len, "x" * 51)
        assert caught.value.retry_after is None


@pytest.mark.parametrize("cost", [-1, 1.5, "1", None, True])
def test_a_cost_that_is_no_whole_number_is_an_error_of_the_user(cost: Any) -> None:
    """It is raised, and takes nothing."""
    limit = RateLimit("100/s", cost=lambda: cost)
    guard = new_guard(limit)
    with pytest.raises((TypeError, ValueError), match="cost of limit '100/s'"):
        guard.call(lambda: None)


# Given back, kept, settled


def test_a_call_refused_further_in_takes_nothing() -> None:
    """All is given back, by every algorithm, with and without keys and costs."""
    with virtual_time():
        full = Bulkhead(1)
        holder = new_guard(full)
        for algorithm in ALGORITHMS:
            for options in ({}, {"key": lambda: "a"}, {"cost": lambda: 1}, {"key": lambda: 7}):
                limit = RateLimit("5/s", algorithm=algorithm, **options)
                guard = new_guard(limit, full)
                before = limit.peek()
                with holder.hold():
                    for _ in range(9):
                        with pytest.raises(BulkheadFull):
                            guard.call(lambda: None)
                assert limit.peek() == before


@pytest.mark.parametrize("step", [answer(1), fail(ValueError)])
def test_a_call_that_was_sent_keeps_what_it_took(step: Any) -> None:
    """Whether it succeeds or fails."""
    with virtual_time():
        limit = RateLimit("5/s")
        guard = new_guard(limit)
        guard.attempt(ScriptedService(step).call)
        assert limit.peek().left == 4


def test_a_cancelled_call_keeps_what_it_took() -> None:
    """It was sent: the vendor has counted it."""

    async def main() -> None:
        limit = RateLimit("5/s")
        guard = new_guard(limit)
        task = asyncio.ensure_future(guard.acall(ScriptedService(hang()).acall))
        await asyncio.wait([task], timeout=0.01)
        task.cancel()
        await asyncio.wait([task])
        assert limit.peek().left == 4

    run_virtual(main())


def test_each_attempt_takes_its_own_token() -> None:
    """Inside Retry: the vendor counts attempts, not calls."""
    with virtual_time():
        limit = RateLimit("100/min")
        guard = new_guard(Retry(on=ValueError, attempts=3, backoff=0), limit)
        guard.attempt(ScriptedService(fail(ValueError)).call)
        assert limit.peek().left == 97


def test_an_estimate_is_settled_by_what_the_call_returned() -> None:
    """What was not needed is there again, also when it took longer than the refill."""
    with virtual_time() as clock:
        limit = RateLimit("100/s", cost=lambda *_: 80, settle=len)
        guard = new_guard(limit)
        guard.call(lambda text: text, "x" * 30)
        assert limit.peek().left == 70
        clock.advance(1.0)
        service = ScriptedService(slow(5.0, "x" * 10), clock=clock)
        guard.call(service.call)
        assert limit.peek().left == 100


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_settles(algorithm: str) -> None:
    """What was taken too much is given back, also with a constant as the estimate."""
    with virtual_time() as clock:
        clock.advance(1000.0)
        limit = RateLimit("100/s", algorithm=algorithm, cost=80, settle=len)
        guarded = new_guard(limit)(lambda: "x" * 30)
        assert guarded() == "x" * 30
        if algorithm == "leaky_bucket":
            assert limit.peek().reset_after == 0.3
        else:
            assert limit.peek().left == 70


def test_a_limit_alone_is_a_decorator() -> None:
    """As any policy; two functions share what it has."""
    with virtual_time():
        limit = RateLimit("3/s")
        one, two = limit(lambda: 1), limit(lambda: 2)
        assert (one(), two(), one()) == (1, 2, 1)
        with pytest.raises(RateLimited):
            two()


def test_more_than_the_estimate_is_taken_afterwards() -> None:
    """The debt delays who comes next."""
    with virtual_time() as clock:
        limit = RateLimit("100/s", cost=lambda: 10, settle=lambda value: value)
        guard = new_guard(limit)
        guard.call(lambda: 150)
        assert limit.peek() == Quota("100/s", 0, 0.6, 1.5)
        clock.advance(0.6)
        assert guard.attempt(lambda: 10).ok


def test_requests_and_tokens_together() -> None:
    """One limit counts calls, another what they cost; only the latter is settled."""
    with virtual_time():
        limit = RateLimit(
            Limit("10/min", name="requests"),
            Limit("1000/min", cost=len, settle=int, name="tokens"),
        )
        guard = new_guard(limit)
        guard.call(lambda _: "300", "x" * 600)
        shown = guard.snapshot()["policies"][0]["limits"]
        assert (shown["requests"]["left"], shown["tokens"]["left"]) == (9, 700)
        with pytest.raises(RateLimited) as caught:
            guard.call(lambda _: "300", "x" * 701)
        assert caught.value.limit == "tokens"


@pytest.mark.parametrize("settle", [lambda _: 1 / 0, lambda _: -1, lambda _: "many"])
def test_a_settle_that_fails_leaves_the_estimate(settle: Any, caplog: Any) -> None:
    """It is logged, and does no harm to the call."""
    with virtual_time(), caplog.at_level(logging.ERROR, "seawall"):
        limit = RateLimit("100/s", cost=lambda: 80, settle=settle)
        assert new_guard(limit).call(lambda: "answer") == "answer"
        assert limit.peek().left == 20
        assert "the estimate of 80 stays" in caplog.text


def test_a_failed_call_keeps_its_estimate() -> None:
    """What it really cost nobody knows."""
    with virtual_time():
        limit = RateLimit("100/s", cost=lambda: 80, settle=len)
        new_guard(limit).attempt(ScriptedService(fail(ValueError)).call)
        assert limit.peek().left == 20


def test_a_stream_keeps_its_estimate() -> None:
    """A generator returns no value to settle by."""
    with virtual_time():
        limit = RateLimit("100/s", cost=lambda: 80, settle=len)

        @new_guard(limit)
        def items() -> Any:
            yield "x"

        assert list(items()) == ["x"]
        assert limit.peek().left == 20


# By hand


def test_a_reservation_is_settled_once() -> None:
    """The second time raises; cancelling afterwards does nothing."""
    with virtual_time():
        limit = RateLimit("100/s")
        taken = limit.reserve(cost=80)
        assert repr(taken) == "<Reservation of 80 of '100/s'>"
        assert limit.peek().left == 20
        taken.settle(30)
        assert limit.peek().left == 70
        with pytest.raises(RuntimeError, match="settled or cancelled already"):
            taken.settle(10)
        taken.cancel()
        assert limit.peek().left == 70
        assert repr(taken) == "<Reservation of nothing>"


def test_a_reservation_can_be_cancelled() -> None:
    """All is given back, of every limit; a second time does nothing."""
    with virtual_time():
        limit = RateLimit("100/s", "1000/min")
        taken = limit.reserve()
        taken.cancel()
        taken.cancel()
        assert limit.peek() == Quota("100/s", 100, 0.0, 0.0)
        with pytest.raises(RuntimeError):
            taken.settle(1)


def test_a_reservation_beyond_the_limit_is_refused_at_once() -> None:
    """Outside of a guard there is nobody to wait; `retry_after` says when."""
    with virtual_time() as clock:
        limit = RateLimit("10/s", max_wait=9.0)
        for _ in range(10):
            limit.reserve()
        with pytest.raises(RateLimited, match=r"^over the limit 10/s$") as caught:
            limit.reserve()
        assert (caught.value.policy, caught.value.limit) == ("rate_limit", "10/s")
        clock.advance(caught.value.retry_after or 0.0)
        limit.reserve()


def test_a_reservation_stands_in_for_the_cost_that_is_estimated() -> None:
    """Where some limits have a cost function, the others take what they always take."""
    with virtual_time():
        limit = RateLimit(Limit("10/s", name="calls"), Limit("100/s", cost=len, name="tokens"))
        guard = new_guard(limit)
        limit.reserve("", cost=50).settle(20)
        shown = guard.snapshot()["policies"][0]["limits"]
        assert (shown["calls"]["left"], shown["tokens"]["left"]) == (9, 80)
        limit.reserve("x" * 30)
        shown = guard.snapshot()["policies"][0]["limits"]
        assert (shown["calls"]["left"], shown["tokens"]["left"]) == (8, 50)


@pytest.mark.parametrize("key", [None, lambda: "a"])
def test_reservations_and_guarded_calls_share_the_limit(key: Any) -> None:
    """Also after the first reservation, when takings are kept account of."""
    with virtual_time() as clock:
        limit = RateLimit("10/s", key=key)
        guard = new_guard(limit)
        guarded = guard(lambda: 1)
        assert guarded() == 1
        taken = limit.reserve(cost=5)
        assert limit.peek().left == 4
        assert guarded() == 1
        clock.advance(0.1)
        taken.settle(0)
        assert limit.peek().left == 9
        assert admitted(guard, 20) == 9


def test_looking_takes_nothing() -> None:
    """`peek` tells what is left, when to come again, and when all will be forgotten."""
    with virtual_time() as clock:
        limit = RateLimit("10/s", burst=4)
        guard = new_guard(limit)
        for _ in range(50):
            assert limit.peek() == Quota("10/s", 4, 0.0, 0.0)
        admitted(guard, 9)
        assert limit.peek() == Quota("10/s", 0, 0.1, 0.4)
        clock.advance(0.3)
        assert limit.peek() == Quota("10/s", 3, 0.0, pytest.approx(0.1))


# Modes and settings


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_in_shadow_and_off_everybody_gets_in(mode: Any) -> None:
    """Shadow counts and tells what it would have refused; off does not."""
    told: list[Any] = []
    unsubscribe = subscribe(told.append, CallRejected)
    try:
        with virtual_time():
            limit = RateLimit("2/s", mode=mode, max_wait=5.0)
            guard = new_guard(limit)
            assert admitted(guard, 9) == 9
            limit.reserve(cost=100).settle(1)
            shown = guard.snapshot()["policies"][0]
            assert shown["mode"] == mode
            assert (shown["rejected"], shown["would_reject"]) == (0, 7 if mode == "shadow" else 0)
            assert [event.enforced for event in told] == [False] * shown["would_reject"]
            limit.update(mode="enforce", max_wait=0)
            assert admitted(guard, 9) == 0
    finally:
        unsubscribe()


def test_settings_change_at_run_time_and_what_was_taken_stays_taken() -> None:
    """Ten times the rate pays the debt off ten times as fast."""
    told: list[Any] = []
    unsubscribe = subscribe(told.append, SettingsChanged)
    try:
        with virtual_time() as clock:
            limit = RateLimit("10/min", key=lambda *_: "a")
            guard = new_guard(limit)
            assert admitted(guard, 20) == 10
            limit.update(limits="100/min", burst=10)
            assert admitted(guard, 20) == 0
            clock.advance(0.6)
            assert admitted(guard, 20) == 1
            limit.update(burst=13, max_wait=0.5, max_waiting=3, max_keys=7)
            assert admitted(guard, 3) == 3
            assert (limit.max_wait, limit.max_waiting, limit.max_keys) == (0.5, 3, 7)
            assert repr(limit).startswith("RateLimit(Limit('100/min', burst=13, key=")
    finally:
        unsubscribe()
    assert told[0].changes == {"limits": "100/min", "burst": 10}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_changed_at_run_time(algorithm: str) -> None:
    """What was taken counts under the new limit too."""
    with virtual_time():
        limit = RateLimit("4/min", algorithm=algorithm)
        guard = new_guard(limit)
        before = admitted(guard, 9)
        limit.update(limits="6/min")
        assert before + admitted(guard, 9) == (1 if algorithm == "leaky_bucket" else 6)


def test_what_an_update_cannot_change_is_refused_and_changes_nothing() -> None:
    """Algorithms, keys and the number of limits belong to the object."""
    limit = RateLimit("10/s", key=lambda: 1)
    for limits in (("10/s", "5/s"), Limit("10/s"), Limit("10/s", algorithm="fixed_window")):
        with pytest.raises((ValueError, TypeError)):
            limit.update(limits=limits)
    with pytest.raises(ValueError, match="rate 'x'"):
        limit.update(limits="x")
    with pytest.raises(TypeError, match="it takes limits, burst"):
        limit.update(key=None)
    assert limit.limits[0].text == "10/s"


def test_good_reprs() -> None:
    """They say what was written."""
    assert repr(RateLimit("60/s", burst=10)) == "RateLimit(Limit('60/s', burst=10), max_wait=0)"
    limit = Limit("9/min", algorithm="fixed_window", cost=3, name="x")
    assert repr(limit) == "Limit('9/min', algorithm='fixed_window', cost=3, name='x')"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (RateLimit, "give it a rate"),
        (lambda: RateLimit(60), "write text, such as '60/s'"),  # type: ignore[arg-type]
        (lambda: RateLimit("60"), "such as '60/s'"),
        (lambda: RateLimit("60/s", burst=0), "burst=0"),
        (lambda: RateLimit("60/s", burst=5, algorithm="fixed_window"), "only a token bucket"),
        (lambda: RateLimit("60/s", algorithm="bucket"), "write one of"),  # type: ignore[arg-type]
        (lambda: RateLimit("60/s", key="user"), "pass a function"),  # type: ignore[arg-type]
        (lambda: RateLimit("60/s", cost=0), "cost=0"),
        (lambda: RateLimit("60/s", cost=61), "never admits more than 60"),
        (lambda: RateLimit("60/s", settle=3), "pass a function"),  # type: ignore[arg-type]
        (lambda: RateLimit("60/s", max_wait=-1), "max_wait=-1"),
        (lambda: RateLimit("60/s", max_waiting=0), "max_waiting=0"),
        (lambda: RateLimit("60/s", max_keys=0), "max_keys=0"),
        (lambda: RateLimit("60/s", mode="on"), "mode='on'"),  # type: ignore[arg-type]
        (lambda: RateLimit("60/s", "60/s"), "two limits are called '60/s'"),
        (lambda: RateLimit(Limit("60/s"), burst=3), r"say it inside Limit\(...\)"),
        (lambda: Limit("60/s", name=""), "name=''"),
        (lambda: Limit("1M/day", algorithm="sliding_counter"), "too large to count exactly"),
    ],
)
def test_bad_arguments_say_what_to_write_instead(make: Any, message: str) -> None:
    """At once, when the policy is made."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_refusal_is_new_each_time_and_keeps_nothing_alive() -> None:
    """No traceback grows, and nothing waits for the garbage collector."""
    guard = new_guard(RateLimit("1/min"))
    guard.call(lambda: None)
    gone = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            try:
                guard.call(lambda: None)
            except RateLimited as error:
                gone.append(weakref.ref(error))
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()
    errors = [guard.attempt(lambda: None).error for _ in range(3)]
    assert len({id(error) for error in errors}) == 3


# Waiting


async def _all(*calls: Any) -> list[Any]:
    """Run the calls at once, begun in this order; errors are results."""
    return await asyncio.gather(*calls, return_exceptions=True)


def test_who_may_wait_goes_when_its_turn_comes() -> None:
    """In order, at the very instants of the rate."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit("2/s", burst=1, max_wait=9.0)
        guard = new_guard(limit)
        went: list[tuple[int, float]] = []

        async def note(number: int) -> None:
            went.append((number, loop.time()))

        tasks = [asyncio.ensure_future(guard.acall(note, number)) for number in range(4)]
        await let_pass(0.1)
        assert limit.waiting == guard.snapshot()["policies"][0]["waiting"] == 3
        await _all(*tasks)
        assert went == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
        assert limit.waiting == 0

    run_virtual(main())


def test_a_plain_call_waits_too() -> None:
    """The sync runner blocks its thread for as long, on its clock."""
    with virtual_time() as clock:
        guard = new_guard(RateLimit("2/s", burst=1, max_wait=9.0))
        for _ in range(5):
            guard.call(lambda: None)
        assert clock.now() == pytest.approx(2.0)


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    """The wait is known beforehand: nobody waits in vain."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        guard = new_guard(RateLimit("2/s", burst=1, max_wait=1.0))
        calls = [guard.aattempt(let_pass, 0.0) for _ in range(5)]
        results = await _all(*calls)
        assert [result.ok for result in results] == [True, True, True, False, False]
        assert [result.elapsed for result in results] == [0.0, 0.5, 1.0, 0.0, 0.0]
        assert [result.error.retry_after for result in results[3:]] == [1.5, 1.5]
        assert "it would have to wait too long" in str(results[3].error)
        assert loop.time() == 1.0

    run_virtual(main())


def test_the_deadline_counts_beforehand_too() -> None:
    """DeadlineExceeded, at once: the turn would come too late."""

    async def main() -> None:
        guard = new_guard(RateLimit("1/s", max_wait=9.0))
        await guard.acall(let_pass, 0.0)
        with deadline(0.5), pytest.raises(DeadlineExceeded, match="no time to wait for the limit"):
            await guard.acall(let_pass, 0.0)
        assert asyncio.get_running_loop().time() == 0.0
        with deadline(1.5):
            await guard.acall(let_pass, 0.0)
        assert asyncio.get_running_loop().time() == 1.0

    run_virtual(main())


def test_the_room_to_wait_is_bounded() -> None:
    """Who finds no room is refused at once."""

    async def main() -> None:
        guard = new_guard(RateLimit("1/s", max_wait=99.0, max_waiting=2))
        results = await _all(*[guard.aattempt(let_pass, 0.0) for _ in range(5)])
        assert [result.ok for result in results] == [True, True, True, False, False]
        assert "and no room to wait" in str(results[3].error)
        assert results[3].elapsed == 0.0

    run_virtual(main())


def test_a_cancelled_waiter_takes_nothing_and_the_next_moves_up() -> None:
    """Who stood behind it goes at the earlier instant."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit("1/s", max_wait=99.0)
        guard = new_guard(limit)
        went: list[tuple[str, float]] = []

        async def note(name: str) -> None:
            went.append((name, loop.time()))

        tasks = [asyncio.ensure_future(guard.acall(note, name)) for name in "abcd"]
        await let_pass(0.25)
        tasks[1].cancel()
        await let_pass(0.25)
        tasks[2].cancel()
        await _all(*tasks)
        assert went == [("a", 0.0), ("d", 1.0)]
        assert limit.waiting == 0

    run_virtual(main())


def test_a_newcomer_does_not_overtake() -> None:
    """Also if what it wants would fit and what the first in line wants does not yet."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        guard = new_guard(RateLimit("10/s", cost=len, max_wait=99.0))
        went: list[tuple[int, float]] = []

        async def note(text: str) -> None:
            went.append((len(text), loop.time()))

        await guard.acall(note, "x" * 8)
        large = asyncio.ensure_future(guard.acall(note, "x" * 7))
        await let_pass(0.1)
        small = asyncio.ensure_future(guard.acall(note, "x"))
        await _all(large, small)
        assert went == [(8, 0.0), (7, 0.5), (1, 0.6)]

    run_virtual(main())


def test_waiting_for_one_key_is_no_matter_of_another() -> None:
    """Others go at once, also through a limit that all share."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit(
            Limit("1/s", key=lambda user: user, name="user"),
            Limit("100/s", name="all"),
            max_wait=99.0,
        )
        guard = new_guard(limit)
        went: list[tuple[str, float]] = []

        async def note(user: str) -> None:
            went.append((user, loop.time()))

        await _all(*[guard.acall(note, user) for user in ("ann", "ann", "ann", "bob")])
        assert went == [("ann", 0.0), ("bob", 0.0), ("ann", 1.0), ("ann", 2.0)]

    run_virtual(main())


def test_a_call_that_needs_two_limits_waits_for_one_after_the_other() -> None:
    """It goes when both have room, and others are not kept by it longer than needed."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit(
            Limit("1/s", key=lambda user: user, name="user"),
            Limit("2/s", burst=1, name="all"),
            max_wait=99.0,
        )
        guard = new_guard(limit)
        went: list[tuple[str, float]] = []

        async def note(user: str) -> None:
            went.append((user, loop.time()))

        await _all(*[guard.acall(note, user) for user in ("ann", "ann", "bob", "cy")])
        assert went == [("ann", 0.0), ("bob", 0.5), ("ann", 1.0), ("cy", 1.5)]
        assert limit.waiting == 0
        assert not any(meter.queues for meter in limit._meters.all)

    run_virtual(main())


def test_what_is_given_back_lets_the_first_in_line_go_sooner() -> None:
    """A reservation that is cancelled wakes who waits for it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit("10/min", max_wait=99.0)
        guard = new_guard(limit)
        taken = limit.reserve(cost=10)
        waiting = asyncio.ensure_future(guard.acall(let_pass, 0.0))
        await let_pass(1.0)
        assert limit.waiting == 1
        taken.settle(4)
        await waiting
        assert loop.time() == 1.0

    run_virtual(main())


def test_a_higher_limit_lets_the_first_in_line_go_sooner() -> None:
    """`update` wakes who waits."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit("1/min", max_wait=999.0)
        guard = new_guard(limit)
        calls = [asyncio.ensure_future(guard.acall(let_pass, 0.0)) for _ in range(3)]
        await let_pass(1.0)
        limit.update(limits="1/s")
        await _all(*calls)
        assert loop.time() == pytest.approx(1.0 + 59 / 60 + 1.0)

    run_virtual(main())


def test_waiting_without_end() -> None:
    """`max_wait=inf` waits as long as it takes."""

    async def main() -> None:
        guard = new_guard(RateLimit("1/week", max_wait=float("inf")))
        await _all(*[guard.acall(let_pass, 0.0) for _ in range(3)])
        assert asyncio.get_running_loop().time() == 2 * 604_800

    run_virtual(main())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_lets_wait(algorithm: str) -> None:
    """All get their turn, in order."""

    async def main() -> None:
        guard = new_guard(RateLimit("2/s", algorithm=algorithm, max_wait=99.0))
        went: list[int] = []

        async def note(number: int) -> None:
            went.append(number)

        await _all(*[guard.acall(note, number) for number in range(9)])
        assert went == list(range(9))
        assert asyncio.get_running_loop().time() <= 8.0

    run_virtual(main())


def test_a_leaky_bucket_makes_a_burst_into_an_even_flow() -> None:
    """One each half second, however many come at once; the queue is bounded."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit("2/s", algorithm="leaky_bucket", max_wait=99.0, max_waiting=4)
        guard = new_guard(limit)
        went: list[float] = []

        async def note() -> None:
            went.append(loop.time())

        results = await _all(*[guard.acall(note) for _ in range(9)])
        assert went == [0.0, 0.5, 1.0, 1.5, 2.0]
        assert sum(isinstance(result, RateLimited) for result in results) == 4

    run_virtual(main())


def test_a_look_says_when_so_much_could_be_taken() -> None:
    """`peek(cost=)` gives the answer that `reserve(cost=)` would get, and takes nothing."""
    with virtual_time() as clock:
        limit = RateLimit("1/s", burst=10)
        limit.reserve(cost=8)
        assert (limit.peek(cost=2).retry_after, limit.peek(cost=5).retry_after) == (0.0, 3.0)
        assert asyncio.run(limit.apeek(cost=5)).retry_after == 3.0
        assert limit.peek(cost=11).retry_after is None
        assert limit.peek().left == 2
        with pytest.raises(RateLimited):
            limit.reserve(cost=5)
        clock.advance(3.0)
        limit.reserve(cost=5)


def test_a_reservation_tells_what_is_left_and_when_it_resets() -> None:
    """As a look for the same call does; also after it was settled."""
    with virtual_time() as clock:
        limit = RateLimit("1/s", burst=10)
        taken = limit.reserve(cost=6)
        assert taken.quota() == limit.peek(cost=6)
        assert (taken.quota().left, taken.quota().reset_after) == (4, 6.0)
        assert (taken.quota().retry_after, asyncio.run(taken.aquota()).left) == (2.0, 4)
        taken.settle(1)
        clock.advance(0.5)
        assert (taken.quota().left, taken.quota().reset_after) == (9, 0.5)


def test_a_reservation_of_one_key_tells_of_that_key() -> None:
    """What others took is theirs."""
    with virtual_time():
        limit = RateLimit("5/min", key=lambda user: user)
        taken = limit.reserve("ann")
        limit.reserve("bob", cost=3)
        assert taken.quota().left == 4


def test_a_reservation_that_was_not_enforced_tells_what_is_left() -> None:
    """Nothing was taken for it; the limit is full all the same."""
    with virtual_time():
        limit = RateLimit("1/min", mode="shadow")
        limit.reserve()
        assert limit.reserve().quota().left == 0


class DatedClock(VirtualClock):
    """A virtual clock that knows the time of day, as the system's does."""

    utc = 1_000.25
    """What time it was in UTC when this clock stood at 0."""

    def epoch(self) -> float:
        """Return when 1970 began."""
        return -self.utc


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_counter"])
def test_windows_begin_at_multiples_of_the_period_in_utc(algorithm: Any) -> None:
    """At 1020 s in UTC a new minute begins, wherever the monotonic clock began."""
    clock = DatedClock()
    limit = RateLimit("2/min", algorithm=algorithm)
    new_guard(limit, clock=clock)
    limit.reserve(cost=2)
    more = 60.0 if algorithm == "sliding_counter" else 0.0
    assert limit.peek().reset_after == 19.75 + more
    limit.update(limits="3/min")
    assert limit.peek().reset_after == 19.75 + more
    clock.advance(19.75 + more)
    assert limit.peek().left == 3


def test_windows_stay_where_they_are_when_the_time_of_day_is_changed() -> None:
    """The time of day is asked for once, so no window is cut short or begins twice."""
    clock = DatedClock()
    limit = RateLimit("2/min", algorithm="fixed_window")
    new_guard(limit, clock=clock)
    clock.utc += 30.0
    new_guard(limit, clock=clock)
    limit.update(limits="3/min")
    limit.reserve()
    assert limit.peek().reset_after == 19.75


def test_windows_of_the_system_clock_begin_by_the_time_of_day() -> None:
    """Whether a policy is in a guard or not."""
    limit = RateLimit("2/week", algorithm="fixed_window")
    limit.reserve()
    week = 7 * 86_400
    end = limit.peek().reset_after + time.time()  # noqa: TID251 - it is about the time of day
    assert min(end % week, week - end % week) < 3600.0


def test_windows_of_a_virtual_clock_begin_by_that_clock_alone() -> None:
    """Also where the policy was made before the guard that has the clock: tests repeat."""
    limit = RateLimit("2/min", algorithm="fixed_window")
    new_guard(limit, clock=VirtualClock(90.0))
    limit.reserve()
    assert limit.peek().reset_after == 30.0


# Forgotten by hand


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reset_forgets_what_one_key_took(algorithm: Any) -> None:
    """And nothing of what others took."""
    with virtual_time():
        limit = RateLimit("3/day", algorithm=algorithm, key=lambda user: user)
        full = limit.peek("ann")
        guard = new_guard(limit)
        assert admitted(guard, 5, "ann") == admitted(guard, 5, "bob") == full.left
        limit.reset("ann")
        assert limit.peek("ann") == full
        assert limit.peek("bob").left == 0
        assert (admitted(guard, 5, "ann"), admitted(guard, 5, "bob")) == (full.left, 0)


def test_a_reset_forgets_all_limits_or_the_one_that_is_named() -> None:
    """A limit without a key is one for all, so it can be left alone."""
    with virtual_time():
        limit = RateLimit(Limit("3/day", key=lambda user: user, name="user"), Limit("9/day"))
        limit.reserve("ann", cost=3)
        limit.reset("ann", limit="user")
        assert (limit.peek("ann").left, limit.peek("bob").left) == (3, 3)
        limit.reserve("ann", cost=3)
        assert limit.peek("ann", cost=3) == Quota("user", 0, 86_400.0, 86_400.0)
        asyncio.run(limit.areset("ann"))
        limit.reserve("ann", cost=3)
        limit.reserve("bob", cost=3)
        assert limit.reserve("cid", cost=3).quota().limit == "user"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("estimated", [False, True])
def test_what_was_taken_before_a_reset_is_not_given_back(
    algorithm: Any, *, estimated: bool
) -> None:
    """It is forgotten already: else more than the limit could be taken."""
    with virtual_time() as clock:
        limit = RateLimit("4/day", algorithm=algorithm)
        cost = 1 if algorithm == "leaky_bucket" else 3
        before = limit.reserve(cost=cost) if estimated else None
        if before is None:
            limit = RateLimit("4/day", algorithm=algorithm, cost=cost)
            before = limit.reserve()
        clock.advance(0.001)
        limit.reset()
        taken = limit.reserve(cost=cost)
        left = limit.peek(cost=1)
        before.cancel()
        assert limit.peek(cost=1) == left
        taken.cancel()
        assert limit.peek(cost=1).reset_after == 0.0


def test_many_resets_are_remembered_as_one() -> None:
    """Of more keys than are remembered apart, nothing of before the last reset comes back."""
    with virtual_time() as clock:
        limit = RateLimit("4/day", algorithm="fixed_window", key=lambda user: user)
        before = limit.reserve("ann", cost=3)
        clock.advance(0.001)
        for user in ("ann", *map(str, range(RESETS + 1))):
            limit.reset(user)
        assert len(limit._meters.all[0]._resets) < RESETS
        limit.reserve("ann", cost=4)
        before.cancel()
        assert limit.peek("ann").left == 0


def test_a_reset_forgets_what_a_vendor_said() -> None:
    """The budget is the limit's own again."""
    with virtual_time():
        limit = RateLimit("4/day")
        limit.lower(0, 60.0)
        limit.reset()
        assert limit.peek() == Quota("4/day", 4, 0.0, 0.0)


def test_a_reset_lets_those_in_who_wait() -> None:
    """At once, in order."""

    async def main() -> None:
        limit = RateLimit("2/day", max_wait=1e6)
        guard = new_guard(limit)
        for _ in range(2):
            await guard.acall(_none)
        waiting = [asyncio.create_task(guard.acall(_none)) for _ in range(2)]
        await let_pass(1.0)
        assert limit.waiting == 2
        await limit.areset()
        await asyncio.gather(*waiting)
        assert limit.peek().left == 0

    run_virtual(main())


async def _none() -> None:
    pass


def test_a_key_without_room_of_its_own_is_not_reset() -> None:
    """What others took is counted with it."""
    with virtual_time():
        limit = RateLimit("2/day", key=lambda user: user, max_keys=1)
        for user in ("ann", "bob"):
            limit.reserve(user, cost=2)
        for user in ("ann", "bob"):
            limit.reset(user)
        assert (limit.peek("ann").left, limit.peek("bob").left) == (2, 0)


# As much as is left


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_as_much_is_taken_as_is_left(algorithm: Any) -> None:
    """Up to what is wanted, then the rest, then nothing; each key has its own."""
    with virtual_time():
        limit = RateLimit("5/day", algorithm=algorithm, key=lambda user: user)
        full = _most_at_once(algorithm)
        assert limit.take_up_to(0, "ann") == 0
        first = limit.take_up_to(3, "ann")
        assert first == min(3, full)
        assert limit.take_up_to(3, "ann") == full - first
        assert asyncio.run(limit.atake_up_to(3, "ann")) == 0
        assert asyncio.run(limit.atake_up_to(10**9, "bob")) == full


def _most_at_once(algorithm: str) -> int:
    return 1 if algorithm == "leaky_bucket" else 5


@given(
    algorithm=st.sampled_from(ALGORITHMS),
    steps=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 9)), max_size=20),
)
def test_what_is_taken_is_what_a_look_says_is_left(
    algorithm: Any, steps: list[tuple[int, int]]
) -> None:
    """Never more than that, and never less."""
    with virtual_time() as clock:
        limit = RateLimit("5/s", "7/2s", algorithm=algorithm)
        for ms, most in steps:
            clock.advance(ms / 1000)
            left = limit.peek().left
            assert limit.take_up_to(most) == min(most, left)
            assert limit.peek().left == left - min(most, left)


def test_of_several_limits_the_one_with_least_left_decides() -> None:
    """What is taken is taken from all of them."""
    with virtual_time():
        limit = RateLimit(Limit("9/day", key=lambda user: user, name="user"), Limit("12/day"))
        assert (limit.take_up_to(20, "ann"), limit.take_up_to(20, "bob")) == (9, 3)
        assert limit.take_up_to(20, "cid") == 0


def test_a_limit_of_calls_counts_one_call() -> None:
    """As for `reserve(cost=)`: only what is estimated is taken in part."""
    with virtual_time():
        tokens = Limit("100/day", cost=lambda: 30, name="tokens")
        limit = RateLimit(Limit("2/day", name="calls"), tokens)
        assert [limit.take_up_to(40) for _ in range(3)] == [40, 40, 0]
        limit.reset(limit="calls")
        assert limit.take_up_to(40) == 20


def test_nothing_is_taken_before_those_who_wait() -> None:
    """What comes next is theirs."""

    async def main() -> None:
        limit = RateLimit("1/s", burst=4, cost=4, max_wait=10.0)
        guard = new_guard(limit)
        await guard.acall(_none)
        waiting = asyncio.create_task(guard.acall(_none))
        await let_pass(2.5)
        assert (limit.take_up_to(2), limit.peek().left) == (0, 2)
        await waiting
        assert limit.peek().left == 0

    run_virtual(main())


def test_all_may_be_used_where_the_limit_is_not_enforced() -> None:
    """What there was is counted."""
    with virtual_time():
        limit = RateLimit("5/day", mode="shadow")
        assert (limit.take_up_to(8), limit.peek().left) == (8, 0)


# A part of the limit


PARTED = [name for name in ALGORITHMS if name != "leaky_bucket"]


@pytest.mark.parametrize("algorithm", PARTED)
def test_a_divided_limit_admits_its_part(algorithm: str) -> None:
    """One of three pods has a third, in each period; one of one has it all again."""
    with virtual_time() as clock:
        clock.advance(1000.0)
        limit = RateLimit("12/s", algorithm=algorithm)
        guard = new_guard(limit)
        limit.divide(3)
        for _ in range(3):
            assert admitted(guard, 20) <= 4
            clock.advance(1.0)
        clock.advance(3.0)
        assert admitted(guard, 20) == 4
        limit.divide(1)
        assert admitted(guard, 20) == 0  # what is gained counts as taken
        clock.advance(3.0)
        assert (admitted(guard, 20), limit.pods) == (12, 1)


@pytest.mark.parametrize("algorithm", PARTED)
def test_a_new_key_does_not_get_what_was_just_gained(algorithm: str) -> None:
    """Another pod may have spent it for that key a moment before."""
    with virtual_time() as clock:
        clock.advance(1000.0)
        limit = RateLimit("12/s", algorithm=algorithm, key=lambda user: user)
        guard = new_guard(limit)
        limit.divide(3)
        clock.advance(3.0)
        limit.divide(2)
        assert admitted(guard, 20, "ann") == 4
        clock.advance(6.0)
        assert admitted(guard, 20, "bob") == 6


def test_a_divided_limit_stays_divided_by_an_update() -> None:
    """Other numbers are divided too, and the same ones keep what was taken."""
    with virtual_time() as clock:
        limit = RateLimit("12/s")
        guard = new_guard(limit)
        limit.divide(3)
        assert admitted(guard, 20) == 4
        limit.update(max_waiting=7)
        assert admitted(guard, 20) == 0
        limit.update(limits="24/s")
        clock.advance(5.0)
        assert admitted(guard, 20) == 8


def test_who_waits_for_a_divided_limit_is_served_when_the_part_grows() -> None:
    """A part that grows lets the first look again, at its new rate."""

    async def main() -> float:
        limit = RateLimit("10/s", burst=1, max_wait=100.0)
        guard = new_guard(limit)
        limit.divide(100)
        await guard.acall(let_pass, 0.0)
        began = asyncio.get_running_loop().time()
        waiting = asyncio.ensure_future(guard.acall(let_pass, 0.0))
        await let_pass(1.0)
        limit.divide(1)
        await waiting
        return asyncio.get_running_loop().time() - began

    assert run_virtual(main()) == pytest.approx(1.1, abs=0.11)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 8)), max_size=25),
    st.sampled_from(PARTED),
)
def test_pods_that_inherit_parts_of_a_limit_keep_to_it_together(steps, algorithm) -> None:
    """While pods end and the others take over, all admit no more than the whole in a second.

    What one had and another gains is not spent twice. A fixed window admits up to twice its number
    in a second that spans two windows, so it is looked at window by window. A sliding counter takes
    the calls of the last window for evenly spread, so it is looked at by that estimate.
    """
    with virtual_time() as clock:
        clock.advance(1000.0)
        limits = [RateLimit("24/s", algorithm=algorithm) for _ in range(5)]
        guards = [new_guard(limit) for limit in limits]
        for limit in limits:
            limit.divide(5)
        log: list[float] = []
        left = 5
        for quarters, pods, calls in steps:
            clock.advance(quarters / 4)
            left = min(left, pods)
            for limit, guard in zip(limits[:left], guards[:left], strict=True):
                limit.divide(left)
                log += [clock.now()] * admitted(guard, calls)
        for start in log:
            if algorithm == "fixed_window":
                spent = sum(int(at) == int(start) for at in log)
            elif algorithm == "sliding_counter":
                window = int(start)
                before = sum(int(at) == window - 1 for at in log)
                spent = before * (window + 1 - start) + sum(window <= at <= start for at in log)
            else:
                spent = sum(start <= at < start + 1.0 for at in log)
            # A bucket grants its burst and what it refills in the same second.
            most = 48 if algorithm == "token_bucket" else 24
            assert spent <= most


@pytest.mark.parametrize("key", [None, lambda: "ann"])
@pytest.mark.parametrize(
    "change", [lambda limit: limit.divide(3), lambda limit: limit.update(limits="4/s")]
)
def test_a_limit_that_changed_before_it_was_used_is_whole_on_the_clock_of_its_guard(
    change: Any, key: Any
) -> None:
    """Until then nothing was taken, and the clock may be another one."""
    limit = RateLimit("12/s", key=key)
    change(limit)
    guard = new_guard(limit, clock=VirtualClock())
    assert admitted(guard, 20) == 4


def test_only_limits_of_their_own_are_divided() -> None:
    """A leaky bucket cannot be, and what a store shares is divided by it."""
    with pytest.raises(ValueError, match="token_bucket"):
        RateLimit("10/s", algorithm="leaky_bucket").divide(2)
    shared = RateLimit("10/s", shared=RedisStore("redis://127.0.0.1:1"), name="x")
    with pytest.raises(TypeError, match="sharing='split'"):
        shared.divide(2)
