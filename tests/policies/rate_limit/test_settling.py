"""RateLimit: estimates and what becomes of them, by keys that come and go, updates and threads."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from seawall import Bulkhead, BulkheadFull, RateLimit, RateLimited, subscribe
from seawall.clock import VirtualClock
from seawall.events import ImplausibleReport
from seawall.limits import Limit
from seawall.policies.rate_limit.meters import Meter
from seawall.runtime.layers import CANCELLED, FAILED, OK, UNUSED
from seawall.testing import virtual_time
from tests.support import new_guard

ALGORITHMS = ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]


def meter_of(limit: RateLimit) -> Meter:
    """Return the only meter of `limit`."""
    (meter,) = limit._meters.all
    return meter


# Keys that come and go


def after_a_sweep() -> int:
    """Return what one key gets at one instant, while it settles what it has long paid."""
    clock = VirtualClock(100.0)
    limit = RateLimit("10/s", key=lambda key: key, cost=lambda _: 10, settle=len)
    guard = new_guard(limit, clock=clock)
    old = []
    for _ in range(20):
        old.append(limit.reserve("one", cost=10))
        clock.advance(1.0)
    clock.advance(5.0)
    for number in range(3000):  # of which the key is forgotten, since it owes nothing
        limit.reserve(f"other {number}", cost=1)
    got = 0
    for taken in old:
        try:
            limit.reserve("one", cost=10)
            got += 10
        except RateLimited:
            pass
        taken.settle(0)
    guard.close()
    return got


def test_what_was_paid_before_the_key_was_forgotten_is_not_given_back() -> None:
    """A reservation that is settled after a sweep has nothing to get from the key's new state."""
    assert after_a_sweep() == 10


def test_without_knowing_its_account_what_was_paid_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let it settle by whatever account is there, and one key gets many times its burst."""
    settle = Meter.settle

    def by_any(self: Meter, charge: Any, used: int, now: float) -> bool:
        account = self.accounts.get(charge.place)
        if account is not None:
            charge.account, charge.mark = account, account.taken
            account.open += 1
        return settle(self, charge, used, now)

    monkeypatch.setattr(Meter, "settle", by_any)
    assert after_a_sweep() > 10


def test_what_costs_more_in_the_end_is_taken_though_the_key_was_forgotten() -> None:
    """Also for a key that is no text: the debt is that of whoever comes next with it."""
    for key in ("ann", 7, ("ann", "/")):
        with virtual_time() as clock:
            limit = RateLimit("10/s", key=lambda key: key, max_keys=1)
            taken = limit.reserve(key, cost=1)
            clock.advance(5.0)
            limit.reserve("another")
            assert meter_of(limit).keys == 1
            clock.advance(5.0)
            taken.settle(21)
            assert limit.peek(key).retry_after == pytest.approx(1.1)


def test_overlapping_estimates_that_end_in_any_order_are_all_given_back() -> None:
    """Three of thirty, told to be nothing: a hundred of a hundred are left."""
    with virtual_time():
        limit = RateLimit("100/min", cost=lambda: 30)
        one, two, three = (limit.reserve() for _ in range(3))
        for taken in (two, one, three):
            taken.settle(0)
        assert limit.peek().left == 100


@pytest.mark.parametrize("key", [None, lambda: "a", lambda: 7])
def test_calls_refused_further_in_beside_an_estimate_cost_it_nothing(key: Any) -> None:
    """However many come and go while it is open, all that was not needed is given back."""
    with virtual_time():
        limit = RateLimit("100/min", key=key)
        full = Bulkhead(1)
        guarded = new_guard(limit, full)(lambda: None)
        taken = limit.reserve(cost=50)
        with new_guard(full).hold():
            for _ in range(200):
                with pytest.raises(BulkheadFull):
                    guarded()
        assert limit.peek().left == 50
        taken.settle(10)
        assert limit.peek().left == 90


@pytest.mark.parametrize("key", [None, lambda: "a", lambda: 7])
def test_calls_that_overlap_and_are_refused_beside_an_estimate_cost_it_nothing(key: Any) -> None:
    """Also when they overlap, and end in the order in which they came."""
    with virtual_time() as clock:
        limit = RateLimit("100/day", key=key)
        gate: Any = new_guard(limit).bounds[0]
        taken = limit.reserve(cost=4)
        for ticket in [gate.enter(clock.now()) for _ in range(6)]:
            gate.leave(ticket, UNUSED, None, clock.now())
        assert limit.peek().left == 96
        taken.settle(0)
        assert limit.peek().left == 100


# Memory


def bytes_of_settled_keys(keys: int, calls: int) -> float:
    """Return what a key takes, each, when all its calls are settled; the key itself included."""
    clock = VirtualClock(100.0)
    limit = RateLimit("10k/day", key=lambda key: key, cost=lambda _: 2, settle=int, max_keys=keys)
    gate: Any = new_guard(limit, clock=clock).bounds[0]
    gc.collect()
    tracemalloc.start()
    try:
        before, _peak = tracemalloc.get_traced_memory()
        for number in range(calls):
            for key in range(keys):
                name = f"key-{key:012d}"
                tickets = [gate.enter(100.0 + number, name) for _ in range(3)]
                for ticket, outcome in zip(tickets, (OK, FAILED, CANCELLED), strict=True):
                    gate.leave(ticket, outcome, 1, 100.0 + number)
        del tickets, ticket
        gc.collect()
        after, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert meter_of(limit).keys == keys
    return (after - before) / keys


def test_a_settled_key_takes_no_more_than_any_other() -> None:
    """However many calls there were, overlapping, settled, failed and cancelled: one number."""
    assert bytes_of_settled_keys(1000, 1) <= 200
    assert bytes_of_settled_keys(100, 20) <= 220


def test_accounts_that_are_kept_would_take_several_times_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Do not close them, and each key drags its history along."""
    monkeypatch.setattr(Meter, "_close", lambda *_: None)
    assert bytes_of_settled_keys(100, 20) > 1000


@pytest.mark.parametrize("outcome", [OK, FAILED, CANCELLED, UNUSED])
def test_however_a_call_ends_its_account_is_closed(outcome: Any) -> None:
    """Also if `settle` fails."""
    with virtual_time():
        limit = RateLimit("10/s", cost=lambda: 2, settle=lambda _: 1 / 0)
        gate: Any = new_guard(limit).bounds[0]
        ticket = gate.enter(0.0)
        assert meter_of(limit).accounts
        gate.leave(ticket, outcome, "value", 0.0)
        assert not meter_of(limit).accounts
        assert limit.peek().left == (10 if outcome is UNUSED else 8)


@pytest.mark.parametrize("key", [None, lambda: "a", lambda: 7])
def test_a_reservation_that_is_forgotten_is_no_burden_once_it_is_paid(key: Any) -> None:
    """Its account goes when the key is looked at again, and the success path is open as before."""
    with virtual_time() as clock:
        limit = RateLimit("10/s", key=key)
        limit.reserve(cost=5)
        assert meter_of(limit).accounts
        clock.advance(1.0)
        assert limit.peek().left == 10
        assert not meter_of(limit).accounts
        assert meter_of(limit).slack > 0


def test_accounts_that_owe_nothing_are_swept_too() -> None:
    """Or reservations that nobody ends would fill the map for good."""
    with virtual_time() as clock:
        limit = RateLimit("10/s", key=lambda key: key, max_keys=100)
        for number in range(100):
            limit.reserve(f"key {number}", cost=5)
        clock.advance(10.0)
        for number in range(100):
            limit.reserve(f"new {number}", cost=5)
        assert meter_of(limit).keys == 100
        assert not meter_of(limit)._shared


def test_the_first_reservation_touches_one_key_only() -> None:
    """Not all that are kept: it would hold the lock for long."""
    with virtual_time():
        limit = RateLimit("10/day", key=lambda key: key)
        guard = new_guard(limit)
        for number in range(100):
            guard.call(len, f"key {number}")
        limit.reserve("key 1", cost=3)
        assert len(meter_of(limit).accounts) == 1
        assert len(meter_of(limit).states) == 99
        with pytest.raises(RateLimited):
            limit.reserve("key 2", cost=10)
        assert len(meter_of(limit).accounts) == 1, "what is refused has no account"


# Settings that change meanwhile


def test_settings_that_are_no_numbers_void_no_estimate() -> None:
    """Another `max_wait`, mode or name is no reason to keep what was not used."""
    with virtual_time():
        limit = RateLimit(Limit("100/min", cost=lambda: 90))
        taken = limit.reserve()
        limit.update(max_wait=1.0, max_keys=5)
        limit.update(limits=Limit("100/min", cost=limit.limits[0].cost, name="renamed"))
        taken.settle(0)
        assert limit.peek() == ("renamed", 100, 0.0, 0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_was_taken_at_another_rate_is_not_given_back(algorithm: str) -> None:
    """Nobody can tell by the new rate what was paid at the old one."""
    with virtual_time() as clock:
        limit = RateLimit("100/s", algorithm=algorithm)
        count = 1 if algorithm == "leaky_bucket" else 100
        held = [limit.reserve() for _ in range(count)]
        clock.advance(2.0)
        for _ in range(count):
            limit.reserve()
        limit.update(limits="100/h")
        before = limit.peek()
        for taken in held:
            taken.cancel()
        assert limit.peek() == before


def refused_across_an_update(key: Any) -> int:
    """Return what is left after calls of cost 1 are refused further in, once the cost is 20."""
    clock = VirtualClock(100.0)
    limit = RateLimit(Limit("100/min", key=key, name="x"))

    def meanwhile() -> str:
        limit.update(limits=Limit("100/min", key=key, cost=20, name="x"))
        return "key"

    empty = RateLimit("1/min", key=meanwhile)
    guarded = new_guard(limit, empty, clock=clock)(lambda: None)
    plain = new_guard(limit, clock=clock)(lambda: None)
    empty.reserve()
    for _ in range(4):
        limit.update(limits=Limit("100/min", key=key, cost=1, name="x"))
        for _ in range(10):
            plain()
        with pytest.raises(RateLimited):
            guarded()
    return limit.peek().left


@pytest.mark.parametrize("key", [None, lambda: "a"])
def test_the_success_path_does_not_give_back_by_a_cost_that_came_later(
    key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What took one does not give twenty back; without the instant of the update it would."""
    assert refused_across_an_update(key) == 56
    update = Meter.update

    def timeless(self: Meter, fresh: Meter, now: float) -> None:
        update(self, fresh, now)
        self.since = float("-inf")

    monkeypatch.setattr(Meter, "update", timeless)
    assert refused_across_an_update(key) > 60


@pytest.mark.parametrize("key", [None, lambda: "a"])
def test_the_success_path_gives_back_what_was_taken_since_the_update(key: Any) -> None:
    """By the new numbers."""
    clock = VirtualClock(100.0)
    limit = RateLimit(Limit("100/min", key=key, name="x"))
    full = Bulkhead(1)
    guarded = new_guard(limit, full, clock=clock)(lambda: None)
    with new_guard(full, clock=clock).hold():
        with pytest.raises(BulkheadFull):
            guarded()
        limit.update(limits=Limit("100/min", key=key, cost=20, name="x"))
        clock.advance(0.001)
        with pytest.raises(BulkheadFull):
            guarded()
    assert limit.peek().left == 100


def test_two_updates_at_once_both_count() -> None:
    """One after the other: neither undoes what the other has changed."""
    limit = RateLimit("10/s")
    start = threading.Barrier(2)

    def change(name: str) -> None:
        start.wait(30)
        for value in range(1, 200):
            limit.update(**{name: value})

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=change, args=(name,)) for name in ("burst", "max_keys")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert (limit.limits[0].burst, limit.max_keys) == (199, 199)


@pytest.mark.parametrize("limits", [5, None, Limit])
def test_an_update_to_what_is_no_limit_says_what_to_write(limits: Any) -> None:
    """The same as the constructor says."""
    with pytest.raises(TypeError, match="write text, such as '60/s'"):
        RateLimit("10/s").update(limits=limits)


# By hand


def test_a_constant_estimate_is_settled_by_hand_too() -> None:
    """`settle=` says that the cost is an estimate, whether it is a number or a function."""
    with virtual_time():
        limit = RateLimit("100/min", cost=80, settle=len)
        limit.reserve().settle(30)
        assert limit.peek().left == 70


def test_a_cost_by_hand_stands_in_where_the_cost_is_an_estimate() -> None:
    """Not for a limit beside it that counts calls."""
    with virtual_time():
        limit = RateLimit(
            Limit("10/min", name="requests"),
            Limit("1000/min", cost=500, settle=len, name="tokens"),
        )
        guard = new_guard(limit)
        limit.reserve(cost=300).settle(100)
        shown = guard.snapshot()["policies"][0]["limits"]
        assert (shown["requests"]["left"], shown["tokens"]["left"]) == (9, 900)


def test_to_settle_what_was_no_estimate_raises_and_changes_nothing() -> None:
    """Silence would hide that nothing was given back; it can still be cancelled."""
    with virtual_time():
        limit = RateLimit("10/s")
        taken = limit.reserve()
        with pytest.raises(RuntimeError, match=r"nothing was estimated here: write reserve\(cost"):
            taken.settle(0)
        taken.cancel()
        assert limit.peek().left == 10


def test_refusals_by_hand_are_counted() -> None:
    """No guard refuses there, so the policy counts them itself; in shadow nobody is refused."""
    with virtual_time():
        limit = RateLimit("2/s")
        guard = new_guard(limit)
        limit.reserve(cost=2)
        for _ in range(3):
            with pytest.raises(RateLimited):
                limit.reserve()
        limit.update(mode="shadow")
        limit.reserve()
        shown = guard.snapshot()["policies"][0]
        assert (shown["reserve_rejected"], shown["rejected"]) == (3, 0)


# Numbers beyond counting


def test_a_cost_beyond_counting_never_fits() -> None:
    """Refused as any cost that is too large, and nothing is taken of another limit."""
    with virtual_time():
        limit = RateLimit(Limit("10/min", name="a"), Limit("10/s", cost=int, name="b"))
        guard = new_guard(limit)
        with pytest.raises(RateLimited, match="never fits, 10 is the most"):
            guard.call(int, 10**400)
        assert guard.snapshot()["policies"][0]["limits"]["a"]["left"] == 10


def test_a_pause_beyond_counting_is_an_error_and_takes_nothing() -> None:
    """A leaky bucket has no largest cost, but what it cannot count it does not begin with."""
    with virtual_time():
        limit = RateLimit(
            Limit("10/min", name="a"),
            Limit("10/s", algorithm="leaky_bucket", cost=int, name="b"),
        )
        guard = new_guard(limit)
        with pytest.raises(ValueError, match="cost of limit 'b' is too large: write"):
            guard.call(int, 10**400)
        assert guard.snapshot()["policies"][0]["limits"]["a"]["left"] == 10
        with pytest.raises(ValueError, match="cost is too large: write"):
            RateLimit("10/s", algorithm="leaky_bucket", cost=2**52)


ABSURD = (10**12, 10**400)


@contextmanager
def reports() -> Iterator[list[ImplausibleReport]]:
    """Collect what was reported and cannot be true."""
    heard: list[ImplausibleReport] = []
    stop = subscribe(heard.append, ImplausibleReport)
    try:
        yield heard
    finally:
        stop()


@pytest.mark.parametrize("absurd", ABSURD)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_absurd_actual_cost_closes_the_limit_for_one_period(algorithm: str, absurd: int) -> None:
    """Not for years: the debt is bounded, however often it is said; and each time is told."""
    with virtual_time() as clock, reports() as heard:
        limit = RateLimit("100/s", algorithm=algorithm, cost=lambda: 20, settle=int)
        guard = new_guard(limit)
        under_way = [limit.reserve(cost=0) for _ in range(5)]
        assert guard.call(lambda: absurd) == absurd
        assert not guard.attempt(lambda: 20).ok
        told = heard[0].fields()
        assert (told["guard"], told["policy"], told["limit"]) == (guard.name, "rate_limit", "100/s")
        assert told["what"] == "cost"
        assert told["reported"] >= 10**12 > told["counted"]
        for taken in under_way:  # the vendor goes on like this, of calls that were sent before
            taken.settle(absurd)
        assert len(heard) == 6
        clock.advance(1.2)  # one period, and what one call of this cost takes
        assert guard.attempt(lambda: 20).ok
        clock.advance(1.2)
        assert limit.peek().left >= 1


@pytest.mark.parametrize("seconds", [0.0, 0.5, 30.0])
def test_how_long_a_debt_may_last_is_a_setting(seconds: float) -> None:
    """It is what keeps the bucket closed beyond what it holds."""
    with virtual_time():
        limit = RateLimit("100/s", cost=lambda: 1, settle=int, max_debt=seconds)
        new_guard(limit).call(lambda: 10**12)
        assert limit.peek().retry_after == pytest.approx(seconds + 0.01)
        assert "max_debt" in repr(limit)


def test_what_can_be_true_is_counted_in_full_and_no_event() -> None:
    """Up to the burst and what a period pays off, beyond the estimate."""
    with virtual_time(), reports() as heard:
        limit = RateLimit("100/s", cost=lambda: 20, settle=int)
        new_guard(limit).call(lambda: 200)
        assert limit.peek().reset_after == pytest.approx(2.0)
        assert not heard


def test_a_limit_outside_of_guards_tells_of_it_too() -> None:
    """By its name."""
    with virtual_time(), reports() as heard:
        RateLimit(Limit("100/s", name="tokens")).reserve(cost=50).settle(10**12)
        assert [one.guard for one in heard] == ["tokens"]


def test_the_bound_of_a_debt_can_be_changed_at_run_time() -> None:
    """As all numbers can."""
    with virtual_time():
        limit = RateLimit(Limit("100/s", cost=int, settle=int, name="tokens"))
        new = Limit("100/s", cost=int, settle=int, max_debt=7.0, name="tokens")
        limit.update(limits=[new])
        new_guard(limit).call(lambda _: 10**12, 1)
        assert limit.peek(1).retry_after == pytest.approx(7.01)


@pytest.mark.parametrize(("said", "closed"), [(0.4, 0.4), (30.0, 30.0), (1e9, 60.0)])
def test_a_vendors_word_is_cut_and_told_if_it_cannot_be_true(said: float, closed: float) -> None:
    """After a minute the vendor is asked again; what is more than a day is an event."""
    with virtual_time(), reports() as heard:
        limit = RateLimit("100/s")
        limit.lower(0, said)
        assert limit.peek().retry_after == pytest.approx(closed)
        assert [(one.what, one.reported) for one in heard] == [("reset_after", 1e9)] * (said == 1e9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_costs_nothing_leaves_no_trace(algorithm: str) -> None:
    """A log of ten a day does not grow by calls that cost nothing."""
    with virtual_time() as clock:
        limit = RateLimit("10/day", algorithm=algorithm, cost=lambda: 0, settle=lambda _: 0)
        guard = new_guard(limit)
        for _ in range(100):
            guard.call(int)
            clock.advance(0.001)
        assert not meter_of(limit).keys


def test_what_was_paid_is_not_given_back_because_the_clock_steps_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the time of the latest taking it was paid, whatever the clock says afterwards."""
    limit = RateLimit("10/s", cost=lambda: 10)
    monkeypatch.setattr(limit, "_now", lambda: 100.0)
    gate: Any = new_guard(limit).bounds[0]
    first = gate.enter(100.0)
    gate.enter(101.0)
    gate.leave(first, UNUSED, None, 100.0)
    with pytest.raises(RateLimited):
        gate.enter(101.0)


# Threads


@pytest.mark.parametrize("key", [None, lambda: "key", lambda: 7])
def test_threads_that_call_reserve_and_settle_get_what_there_is(key: Any) -> None:
    """While accounts come and go beside the success path, no taking is lost and none invented."""
    with virtual_time():
        limit = RateLimit("3000/day", key=key)
        guarded = new_guard(limit)(lambda: 1)
        refused = new_guard(limit, RateLimit("1/day", mode="enforce"))
        refused.policies[1].reserve()  # type: ignore[attr-defined]
        given_back = refused(lambda: 1)
    start = threading.Barrier(6)
    used = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        own = 0
        start.wait(30)
        try:
            for turn in range(600):
                try:
                    if (turn + number) % 3 == 0:
                        limit.reserve(cost=4).settle(2)
                        own += 2
                    elif (turn + number) % 3 == 1:
                        own += guarded()
                    else:
                        given_back()
                except RateLimited:
                    pass
        except BaseException as error:  # noqa: BLE001 - told to the test
            failed.append(error)
        used.append(own)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not failed
    with virtual_time():
        while limit.peek().left:
            used.append(guarded())
    assert sum(used) == 3000
    assert not meter_of(limit).accounts
