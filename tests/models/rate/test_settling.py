"""What is given back later: never more than the bound allows, and as if it had not been taken."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.rate import buckets
from seawall.models.rate.buckets import Account, LeakyBucket, SettledBucket, TokenBucket
from seawall.models.rate.rates import Rate
from seawall.models.rate.rule import RateRule
from seawall.models.rate.windows import FixedWindow, SlidingCounter, SlidingLog
from tests.support import examples, falsified


class Job(NamedTuple):
    """Time passes; somebody takes an estimate; after some more steps the actual is told."""

    gap: int
    estimate: int
    actual: int
    after: int


class Shift(NamedTuple):
    """A limit, and the jobs that are done under it."""

    rate: Rate
    burst: int
    jobs: list[Job]


JOBS = st.builds(
    lambda gap, estimate, used, after: Job(gap, estimate, min(used, estimate), after),
    gap=st.sampled_from([0, 0, 1, 10, 30, 60]),
    estimate=st.sampled_from([1, 3, 6]),
    used=st.sampled_from([0, 2, 6]),
    after=st.integers(1, 3),
)
SHIFTS = st.builds(
    Shift,
    rate=st.sampled_from([Rate(1, 10), Rate(6, 60), Rate(4, 14)]),
    burst=st.just(6),
    jobs=st.lists(JOBS, min_size=3, max_size=15),
) | st.just(
    # Told in the next window, when that is in use and the one before hardly counts any more.
    Shift(Rate(6, 60), 6, [Job(0, 6, 0, 2), Job(110, 5, 5, 9), Job(0, 5, 5, 9)])
)


class Used(NamedTuple):
    """When a job was admitted, and what it really used."""

    at: int
    cost: int


def estimate(rule: RateRule[Any], state: Any, now: float, cost: int) -> tuple[Any, float]:
    """Take what will be settled."""
    if isinstance(rule, SettledBucket):
        return rule.estimate(state, now, cost)
    return rule.take(state, now, cost)


def settle(rule: RateRule[Any], state: Any, now: float, taken: int, used: int, mark: float) -> Any:
    """Tell the actual cost; an account without open estimates is no more than its debt."""
    if not isinstance(rule, SettledBucket):
        return rule.give_back(state, now, taken, used, mark)
    state = rule.settle(state, now, taken, used, mark)
    state.end(mark)
    return state if state.open else Account(state.owed_until)


def work(rule: RateRule[Any], shift: Shift) -> list[Used]:
    """Do the jobs; return what was used by those that were admitted."""
    now = 0
    state = rule.fresh(0.0)
    open_: list[tuple[int, Job, float]] = []
    used = []
    for number, job in enumerate(shift.jobs):
        now += job.gap
        for due in [one for one in open_ if one[0] <= number]:
            open_.remove(due)
            _, done, mark = due
            state = settle(rule, state, float(now), done.estimate, done.actual, mark)
        if rule.wait(state, float(now), job.estimate) == 0:
            state, mark = estimate(rule, state, float(now), job.estimate)
            used.append(Used(now, job.actual))
            open_.append((number + job.after, job, mark))
    return used


def token_bound(rule: Callable[[Rate, int], RateRule[Any]]) -> Callable[[Shift], None]:
    def check(shift: Shift) -> None:
        rate, burst = shift.rate, shift.burst
        used = work(rule(rate, burst), shift)
        extra = 1 if rate.period % rate.limit else 0
        for first in range(len(used)):
            total = 0
            for one in used[first:]:
                total += one.cost
                refill = Fraction(rate.limit * (one.at - used[first].at), rate.period)
                assert total <= burst + refill + extra

    return check


def settled(rate: Rate, burst: int) -> SettledBucket:
    return SettledBucket(TokenBucket(rate, burst))


def spacing(shift: Shift) -> None:
    """Whoever really used something is followed by a pause of that length."""
    used = [one for one in work(LeakyBucket(shift.rate), shift) if one.cost]
    for one, following in pairwise(used):
        assert (following.at - one.at) * shift.rate.limit >= one.cost * shift.rate.period


def stretch(rule: Callable[[Rate], RateRule[Any]], times: int) -> Callable[[Shift], None]:
    def check(shift: Shift) -> None:
        limit, period = shift.rate
        used = work(rule(shift.rate), shift)
        for one in used:
            total = sum(other.cost for other in used if one.at - period < other.at <= one.at)
            assert total <= times * limit
            same = [other for other in used if other.at // period == one.at // period]
            assert sum(other.cost for other in same) <= limit

    return check


BOUNDS: dict[str, Callable[[Shift], None]] = {
    "token_bucket": token_bound(TokenBucket),
    "settled_bucket": token_bound(settled),
    "leaky_bucket": spacing,
    "fixed_window": stretch(FixedWindow, 2),
    "sliding_counter": stretch(SlidingCounter, 2),
    "sliding_log": stretch(SlidingLog, 1),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_holds_for_what_was_really_used(name: str) -> None:
    """However much is given back, and however late."""

    @given(SHIFTS)
    def check(shift: Shift) -> None:
        BOUNDS[name](shift)

    check()


def _all_of_it(self: Any, state: float, *args: Any) -> float:
    _now, taken, used, _mark = args
    return state - self.unused(taken, used)


def _also_of_later_windows(self: Any, state: Any, *args: Any) -> Any:
    now, taken, used, _mark = args
    begin, total = self._current(state, now)
    return begin, total - taken + used


def _from_the_latest(_self: Any, state: Any, *args: Any) -> Any:
    _now, taken, used, _mark = args
    state.used -= taken - used
    return state


def _of_the_window_of_now(self: Any, state: Any, *args: Any) -> Any:
    now, taken, used, _mark = args
    begin, total, before = self._current(state, now)
    return begin, max(0, total - taken + used), before


def _not_of_the_lows(self: Account, by: float, _first: int) -> None:
    self.owed_until -= by


ABLATIONS: dict[str, tuple[str, type, str, Any]] = {
    "what was paid is given back too": ("token_bucket", TokenBucket, "give_back", _all_of_it),
    "how low the debt was is forgotten": (
        "settled_bucket",
        Account,
        "since",
        lambda *_: 10**9,
    ),
    "the pause of another is shortened": ("leaky_bucket", LeakyBucket, "give_back", _all_of_it),
    "another window gets it": ("fixed_window", FixedWindow, "give_back", _also_of_later_windows),
    "the window of now gets it": (
        "sliding_counter",
        SlidingCounter,
        "give_back",
        _of_the_window_of_now,
    ),
    "another taking gets it": ("sliding_log", SlidingLog, "give_back", _from_the_latest),
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_its_safeguards_settling_breaks_the_bound(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    name, owner, attribute, broken = ABLATIONS[missing]
    monkeypatch.setattr(owner, attribute, broken)
    assert falsified(BOUNDS[name], SHIFTS)


class Told(NamedTuple):
    """A taking, and what is known of its cost by now."""

    at: int
    cost: int


def compare(shift: Shift, *, exactly: bool, plain: bool = False) -> None:
    """Compare with a bucket from which only what is known by now was ever taken, at each instant.

    With `plain`, every other job is no estimate, and gives back only what it surely can.
    """
    rule = settled(shift.rate, 10**6)
    now = 0
    state = rule.fresh(0.0)
    open_: list[tuple[int, Job, float, int]] = []
    told: list[Told] = []
    for number, job in enumerate(shift.jobs):
        now += job.gap
        # Not in the order in which they were taken.
        for due in [one for one in reversed(open_) if one[0] <= number]:
            open_.remove(due)
            _, done, mark, place = due
            costs = done.estimate, done.actual
            if plain and place % 2:
                state = rule.give_back(state, float(now), *costs, mark)
            else:
                state = settle(rule, state, float(now), *costs, mark)
            told[place] = told[place]._replace(cost=done.actual)
        ideal = 0.0
        for one in told:
            ideal = max(ideal, one.at) + rule.bucket.amount(one.cost)
        owed = max(0.0, ideal - now)
        assert rule.rest(state, float(now)) >= owed
        if exactly:
            assert rule.rest(state, float(now)) == owed
        take = rule.take if plain and number % 2 else rule.estimate
        state, mark = take(state, float(now), job.estimate)
        told.append(Told(now, job.estimate))
        open_.append((number + job.after, job, mark, number))


def exact(shift: Shift) -> None:
    compare(shift, exactly=True)


def never_more_lenient(shift: Shift) -> None:
    compare(shift, exactly=False)
    compare(shift, exactly=False, plain=True)


@examples(300)
@given(SHIFTS)
def test_a_settled_bucket_stands_as_if_only_the_actual_had_been_taken(shift: Shift) -> None:
    """To the microsecond, however jobs overlap and in whatever order they end."""
    exact(shift)


@examples(200)
@given(SHIFTS)
def test_overlapping_jobs_are_never_given_back_too_much(shift: Shift) -> None:
    """No debt of another is forgiven, also where some takings are no estimates."""
    never_more_lenient(shift)


@pytest.mark.parametrize(
    ("attribute", "broken"),
    [
        ("since", lambda *_: 10**9),
        ("owe_less", _not_of_the_lows),
        ("note", lambda *_: None),
    ],
    ids=["how low it was is forgotten", "what was given back is forgotten", "nothing is noted"],
)
def test_without_its_account_overlapping_jobs_get_too_much(
    attribute: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forget how low the debt has been, or what was given back since, and it is falsified."""
    monkeypatch.setattr(Account, attribute, broken)
    assert falsified(never_more_lenient, SHIFTS)


def test_if_all_lows_were_lowered_some_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower also what was owed before the taking, and what it gives back is not exact."""
    owe_less = Account.owe_less
    monkeypatch.setattr(Account, "owe_less", lambda self, by, _first: owe_less(self, by, 0))
    assert falsified(exact, SHIFTS)


def test_the_account_stays_small_and_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many estimates are open, few lows are kept; and merging them is never lenient."""
    monkeypatch.setattr(buckets, "_ESTIMATES_AT_MOST", 2)
    test_overlapping_jobs_are_never_given_back_too_much()
    account = Account(0.0)
    for owed in range(1000):
        account.note(float(owed))
        account.begin()
    assert len(account.marks) == len(account.lows) <= 3
    assert len(account.estimates) <= 2


def test_what_is_no_estimate_makes_the_account_no_larger() -> None:
    """A thousand takings beside one estimate leave one low, and it is settled exactly."""
    rule = settled(Rate(1, 10), 10**6)
    account, mark = rule.estimate(rule.fresh(0.0), 0.0, 50)
    for now in range(1000):
        rule.take(account, float(now), 1)
    assert account.lows == [500.0]
    assert rule.rest(rule.settle(account, 1000.0, 50, 0, mark), 1000.0) == 9000.0


AT_ONCE = SHIFTS.map(lambda shift: shift._replace(jobs=[job._replace(gap=0) for job in shift.jobs]))


def exact_beside(shift: Shift) -> None:
    compare(shift, exactly=True, plain=True)


@given(AT_ONCE)
def test_what_is_given_back_beside_estimates_costs_them_nothing(shift: Shift) -> None:
    """However calls overlap that are refused further in, estimates get all that is unpaid."""
    exact_beside(shift)


def test_if_it_lowered_the_lows_the_estimates_would_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower what was owed before, too, and it is falsified."""

    def give_back(self: SettledBucket, state: Account, *args: Any) -> Account:
        now, taken, used, mark = args
        rest = self.bucket.give_back(state.owed_until, now, taken, used, mark)
        state.owe_less(state.owed_until - rest, 0)
        return state

    monkeypatch.setattr(SettledBucket, "give_back", give_back)
    assert falsified(exact_beside, AT_ONCE)


def test_an_account_without_open_estimates_notes_nothing() -> None:
    """Nobody will ask how low it was."""
    rule = settled(Rate(1, 10), 100)
    account = rule.fresh(0.0)
    for _ in range(10):
        rule.take(account, 0.0, 1)
    assert not account.marks
    assert not account.lows


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_given_back_at_once_was_never_taken(name: str) -> None:
    """A call that is refused further in leaves no trace."""
    rules: dict[str, Callable[[Rate, int], RateRule[Any]]] = {
        "token_bucket": TokenBucket,
        "settled_bucket": settled,
        "leaky_bucket": lambda rate, _burst: LeakyBucket(rate),
        "fixed_window": lambda rate, _burst: FixedWindow(rate),
        "sliding_counter": lambda rate, _burst: SlidingCounter(rate),
        "sliding_log": lambda rate, _burst: SlidingLog(rate),
    }

    @given(SHIFTS)
    def check(shift: Shift) -> None:
        rule = rules[name](shift.rate, shift.burst)
        state, other = rule.fresh(0.0), rule.fresh(0.0)
        now = 0
        for job in shift.jobs:
            now += job.gap
            if rule.wait(state, float(now), job.estimate) == 0:
                state, mark = estimate(rule, state, float(now), job.estimate)
                state = settle(rule, state, float(now), job.estimate, 0, mark)
            wait = rule.wait(state, float(now), 1)
            assert wait == rule.wait(other, float(now), 1)
            if wait == 0:
                state, other = (rule.take(one, float(now), 1)[0] for one in (state, other))

    check()
