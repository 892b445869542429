"""What is given back later: never more than the bound allows, and as if it had not been taken."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.models import rate_buckets
from seawall.models.rate_buckets import Account, LeakyBucket, SettledBucket, TokenBucket
from seawall.models.rate_rule import Rule
from seawall.models.rate_windows import FixedWindow, SlidingCounter, SlidingLog
from seawall.models.rates import Rate
from tests.support import falsified


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
)


class Used(NamedTuple):
    """When a job was admitted, and what it really used."""

    at: int
    cost: int


def work(rule: Rule[Any], shift: Shift) -> list[Used]:
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
            state = rule.give_back(state, float(now), done.estimate, done.actual, mark)
        if rule.wait(state, float(now), job.estimate) == 0:
            state, mark = rule.take(state, float(now), job.estimate)
            used.append(Used(now, job.actual))
            open_.append((number + job.after, job, mark))
    return used


def token_bound(rule: Callable[[Rate, int], Rule[Any]]) -> Callable[[Shift], None]:
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


def stretch(rule: Callable[[Rate], Rule[Any]], times: int) -> Callable[[Shift], None]:
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


def _note_without_what_was_given(self: Account, owed: float) -> None:
    given, self.given = self.given, 0.0
    NOTE(self, owed)
    self.given = given


NOTE = Account.note

ABLATIONS: dict[str, tuple[str, type, str, Any]] = {
    "what was paid is given back too": ("token_bucket", TokenBucket, "give_back", _all_of_it),
    "how low the debt was is forgotten": (
        "settled_bucket",
        Account,
        "lowest_since",
        lambda *_: float("inf"),
    ),
    "the pause of another is shortened": ("leaky_bucket", LeakyBucket, "give_back", _all_of_it),
    "another window gets it": ("fixed_window", FixedWindow, "give_back", _also_of_later_windows),
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


def stands_as_if_less_was_taken(shift: Shift) -> None:
    """Compare with a bucket from which only the actual was ever taken, at the same instants."""
    rule = settled(shift.rate, 10**6)
    now = 0
    state, ideal = rule.fresh(0.0), rule.fresh(0.0)
    for job in shift.jobs:
        now += job.gap
        state, mark = rule.take(state, float(now), job.estimate)
        ideal, _mark = rule.take(ideal, float(now), job.actual)
        now += job.after
        state = rule.give_back(state, float(now), job.estimate, job.actual, mark)
        assert rule.rest(state, float(now)) == rule.rest(ideal, float(now))


@given(SHIFTS)
def test_a_settled_bucket_stands_as_if_only_the_actual_had_been_taken(shift: Shift) -> None:
    """Jobs one after another: to the microsecond, however long each takes."""
    stands_as_if_less_was_taken(shift)


def never_more_lenient(shift: Shift) -> None:
    """Compare in the same way jobs that overlap: it may owe more, but never less."""
    rule = settled(shift.rate, 10**6)
    now = 0
    state, ideal = rule.fresh(0.0), rule.fresh(0.0)
    open_: list[tuple[int, Job, float]] = []
    for number, job in enumerate(shift.jobs):
        now += job.gap
        for due in [one for one in open_ if one[0] <= number]:
            open_.remove(due)
            state = rule.give_back(state, float(now), due[1].estimate, due[1].actual, due[2])
        assert rule.rest(state, float(now)) >= rule.rest(ideal, float(now))
        state, mark = rule.take(state, float(now), job.estimate)
        ideal, _mark = rule.take(ideal, float(now), job.actual)
        open_.append((number + job.after, job, mark))


@settings(max_examples=200)
@given(SHIFTS)
def test_overlapping_jobs_are_never_given_back_too_much(shift: Shift) -> None:
    """Whatever is settled in which order, no debt of another is forgiven."""
    never_more_lenient(shift)


@pytest.mark.parametrize(
    ("attribute", "broken"),
    [("lowest_since", lambda *_: float("inf")), ("note", _note_without_what_was_given)],
)
def test_without_its_account_overlapping_jobs_get_too_much(
    attribute: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forget how low the debt has been, or what was given back since, and it is falsified."""
    if attribute == "note":

        def lowest_since(self: Account, mark: float) -> float:
            after = [low for at, low in zip(self.marks, self.lows, strict=True) if at > mark]
            return min(after, default=float("inf"))

        monkeypatch.setattr(Account, "lowest_since", lowest_since)
    monkeypatch.setattr(Account, attribute, broken)
    assert falsified(never_more_lenient, SHIFTS)


def test_the_account_stays_small_and_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many takings are open, few marks are kept; and merging them is never lenient."""
    monkeypatch.setattr(rate_buckets, "_MARKS_AT_MOST", 3)
    test_overlapping_jobs_are_never_given_back_too_much()
    account = Account(0.0)
    for owed in range(1000):
        account.note(float(owed))
    assert len(account.marks) == len(account.lows) <= 3


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_given_back_at_once_was_never_taken(name: str) -> None:
    """A call that is refused further in leaves no trace."""
    rules: dict[str, Callable[[Rate, int], Rule[Any]]] = {
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
                state, mark = rule.take(state, float(now), job.estimate)
                state = rule.give_back(state, float(now), job.estimate, 0, mark)
            wait = rule.wait(state, float(now), 1)
            assert wait == rule.wait(other, float(now), 1)
            if wait == 0:
                state, other = (rule.take(one, float(now), 1)[0] for one in (state, other))

    check()
