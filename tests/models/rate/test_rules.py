"""The bound of each rate-limit algorithm, over random histories; and that its safeguards matter."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.rate.buckets import Bucket, LeakyBucket, SettledBucket, TokenBucket
from seawall.models.rate.rates import Rate
from seawall.models.rate.rule import RateRule
from seawall.models.rate.windows import FixedWindow, SlidingCounter, SlidingLog
from tests.support import examples, falsified

RULES: dict[str, Callable[[Rate, int], RateRule[Any]]] = {
    "token_bucket": TokenBucket,
    "settled_bucket": lambda rate, burst: SettledBucket(TokenBucket(rate, burst)),
    "leaky_bucket": lambda rate, _burst: LeakyBucket(rate),
    "fixed_window": lambda rate, _burst: FixedWindow(rate),
    "sliding_counter": lambda rate, _burst: SlidingCounter(rate),
    "sliding_log": lambda rate, _burst: SlidingLog(rate),
}


class Step(NamedTuple):
    """Time passes (or steps back), then a call asks."""

    gap: int
    cost: int


class History(NamedTuple):
    """A limit, and all that is asked of it."""

    rate: Rate
    burst: int
    start: int
    steps: list[Step]


RATES = st.builds(Rate, st.integers(1, 6), st.sampled_from([3, 6, 7, 60, 700, 60_000]))
COSTS = st.sampled_from([1, 1, 1, 2, 3, 7])
GAPS = st.one_of(
    st.integers(0, 3),
    st.sampled_from([5, 9, 10, 60, 350, 20_000, 60_000]),
    st.integers(-150, 150),
    st.integers(-90_000, 90_000),
)
STEPS = st.builds(Step, gap=GAPS, cost=COSTS)
CLOSE = st.builds(Step, gap=st.integers(0, 3), cost=COSTS)
HISTORIES = st.builds(
    History,
    rate=RATES,
    burst=st.integers(1, 6),
    start=st.sampled_from([0, 10**6 + 17, 2**50]),
    steps=st.lists(STEPS, max_size=40) | st.lists(CLOSE, min_size=10, max_size=40),
)


class Admitted(NamedTuple):
    """When, on a clock that stands still while the real one catches up with the last, and what."""

    at: int
    cost: int


class Verdict(NamedTuple):
    """The state after one request, and how long it has to wait: 0 if it was admitted."""

    state: Any
    wait: float | None


def decide(rule: RateRule[Any], state: Any, now: float, cost: int) -> Verdict:
    """Check, and take if admitted: the whole rule in one step."""
    wait = rule.wait(state, now, cost)
    return Verdict(rule.take(state, now, cost)[0] if wait == 0 else state, wait)


def play(rule: RateRule[Any], history: History) -> list[Admitted]:
    """Ask by the history; return what was admitted."""
    now = latest = history.start
    state = rule.fresh(float(now))
    admitted = []
    for step in history.steps:
        now += step.gap
        state, wait = decide(rule, state, float(now), step.cost)
        if wait == 0:
            latest = max(latest, now)
            admitted.append(Admitted(latest, step.cost))
    return admitted


def in_stretch(admitted: list[Admitted], end: int, length: int) -> int:
    """Return what was admitted in (end - length, end]."""
    return sum(one.cost for one in admitted if end - length < one.at <= end)


# The bounds


def bound_token_bucket(history: History, name: str = "token_bucket") -> None:
    rate, burst = history.rate, history.burst
    admitted = play(RULES[name](rate, burst), history)
    # Where each takes a whole number of microseconds the bound is exact; else one more may fit,
    # or what a microsecond brings, if that is more.
    extra = max(Fraction(1), Fraction(rate.limit, rate.period)) if rate.period % rate.limit else 0
    for first in range(len(admitted)):
        total = 0
        for one in admitted[first:]:
            total += one.cost
            refill = Fraction(rate.limit * (one.at - admitted[first].at), rate.period)
            assert total <= burst + refill + extra


def bound_leaky_bucket(history: History) -> None:
    rate = history.rate
    admitted = play(RULES["leaky_bucket"](rate, 1), history)
    for one, following in pairwise(admitted):
        assert (following.at - one.at) * rate.limit >= one.cost * rate.period


def bound_fixed_window(history: History) -> None:
    limit, period = history.rate
    admitted = play(RULES["fixed_window"](history.rate, 1), history)
    for one in admitted:
        assert in_stretch(admitted, one.at, period) <= 2 * limit
        begin = one.at - one.at % period
        assert in_stretch(admitted, begin + period - 1, period) <= limit


def bound_sliding_log(history: History) -> None:
    limit, period = history.rate
    admitted = play(RULES["sliding_log"](history.rate, 1), history)
    for one in admitted:
        assert in_stretch(admitted, one.at, period) <= limit


def bound_sliding_counter(history: History) -> None:
    limit, period = history.rate
    admitted = play(RULES["sliding_counter"](history.rate, 1), history)
    for number, one in enumerate(admitted):
        so_far = admitted[: number + 1]
        elapsed = one.at % period
        begin = one.at - elapsed
        before = in_stretch(so_far, begin - 1, period)
        # The error of the estimate, and of all estimates.
        total = in_stretch(so_far, one.at, period)
        assert total <= limit + Fraction(before * elapsed, period)
        assert total < 2 * limit or limit == total


BOUNDS: dict[str, Callable[[History], None]] = {
    "token_bucket": bound_token_bucket,
    "settled_bucket": lambda history: bound_token_bucket(history, "settled_bucket"),
    "leaky_bucket": bound_leaky_bucket,
    "fixed_window": bound_fixed_window,
    "sliding_counter": bound_sliding_counter,
    "sliding_log": bound_sliding_log,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_holds_in_every_stretch_of_time(name: str) -> None:
    """Whatever bursts, costs and steps of the clock there are."""

    @examples(200)
    @given(HISTORIES)
    def check(history: History) -> None:
        BOUNDS[name](history)

    check()


# Without its safeguards


def _forgets_debt(self: Any, _state: float, now: float, cost: int) -> tuple[float, float]:
    return now + self.amount(cost), now


def _rounds_down(self: Any, cost: int) -> float:
    return float(cost * self._time // self._units)


def _window_of_the_raw_clock(self: Any, state: Any, now: float) -> Any:
    begin = now - now % self.rate.period
    return state if begin == state[0] else (begin, *(0 for _ in state[1:]))


def _counter_of_the_raw_clock(self: Any, state: Any, now: float) -> Any:
    begin = now - now % self.rate.period
    if begin == state[0]:
        return state
    return begin, 0, state[1] if begin == state[0] + self.rate.period else 0


def _forgets_the_window_before(self: Any, state: Any, now: float) -> Any:
    begin, used, _before = state
    if now < begin + self.rate.period:
        return begin, used, 0
    return now - now % self.rate.period, 0, 0


def _log_of_the_raw_clock(self: Any, log: Any, now: float) -> None:
    log.latest = now
    while log.takings and log.takings[0][0] <= now - self.rate.period:
        log.used -= log.takings.popleft()[1]


def _forgets_a_microsecond_early(self: Any, log: Any, now: float) -> None:
    log.latest = max(log.latest, now)
    while log.takings and log.takings[0][0] <= log.latest - self.rate.period + 1:
        log.used -= log.takings.popleft()[1]


ABLATIONS: dict[str, tuple[str, type, str, Any]] = {
    "debt is forgotten": ("token_bucket", TokenBucket, "take", _forgets_debt),
    "amounts round down": ("token_bucket", Bucket, "amount", _rounds_down),
    "any debt fits": ("token_bucket", TokenBucket, "wait", lambda *_: 0.0),
    "the pause is forgotten": ("leaky_bucket", LeakyBucket, "wait", lambda *_: 0.0),
    "pauses round down": ("leaky_bucket", Bucket, "amount", _rounds_down),
    "the window steps back": ("fixed_window", FixedWindow, "_current", _window_of_the_raw_clock),
    "the counter steps back": (
        "sliding_counter",
        SlidingCounter,
        "_current",
        _counter_of_the_raw_clock,
    ),
    "the window before is forgotten": (
        "sliding_counter",
        SlidingCounter,
        "_current",
        _forgets_the_window_before,
    ),
    "the log steps back": ("sliding_log", SlidingLog, "_forget", _log_of_the_raw_clock),
    "the log forgets early": ("sliding_log", SlidingLog, "_forget", _forgets_a_microsecond_early),
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_its_safeguards_the_bound_is_broken(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    name, owner, attribute, broken = ABLATIONS[missing]
    monkeypatch.setattr(owner, attribute, broken)
    assert falsified(BOUNDS[name], HISTORIES)


# Refusals


def _forwards(history: History) -> History:
    """Return the same steps without steps back, during which no wait can be predicted."""
    return history._replace(steps=[step._replace(gap=abs(step.gap)) for step in history.steps])


def honest(history: History, name: str) -> None:
    """At each refusal, come back after the given wait, and a microsecond before."""
    rule = RULES[name](history.rate, history.burst)
    now = history.start
    state = rule.fresh(float(now))
    for step in history.steps:
        now += step.gap
        wait = rule.wait(state, float(now), step.cost)
        if wait is None:
            assert rule.capacity is not None
            assert step.cost > rule.capacity
            continue
        assert wait >= 0
        assert wait == int(wait)
        if wait:
            twin = rule.copy(state)
            assert rule.wait(twin, now + wait - 1, step.cost) == 1
            assert rule.wait(twin, now + wait, step.cost) == 0
            assert rule.wait(state, float(now), step.cost) == wait
        else:
            state, _mark = rule.take(state, float(now), step.cost)


@pytest.mark.parametrize("name", RULES)
def test_who_comes_back_when_told_is_admitted_and_not_before(name: str) -> None:
    """The wait is exact to the microsecond, for one who is alone."""

    @given(HISTORIES.map(_forwards))
    def check(history: History) -> None:
        honest(history, name)

    check()


def burns_nothing(history: History, name: str) -> None:
    """Ask for too much before each step, and compare with an undisturbed limit."""
    rule = RULES[name](history.rate, history.burst)
    now = history.start
    peaceful, pestered = rule.fresh(float(now)), rule.fresh(float(now))
    for step in history.steps:
        now += step.gap
        for _ in range(3):
            pestered, wait = decide(rule, pestered, float(now), rule.left(pestered, now) + 1)
            if wait == 0:  # a leaky bucket, between two pauses
                peaceful, wait = decide(rule, peaceful, float(now), 2)
        pestered, wait = decide(rule, pestered, float(now), step.cost)
        peaceful, same = decide(rule, peaceful, float(now), step.cost)
        assert wait == same


@pytest.mark.parametrize("name", RULES)
def test_a_refusal_burns_nothing(name: str) -> None:
    """Who asks in vain again and again has as much as one who does not."""

    @given(HISTORIES.map(_forwards))
    def check(history: History) -> None:
        burns_nothing(history, name)

    check()


def _burns(rule: Any, state: Any, now: float, cost: int) -> Any:
    wait = rule.wait(state, now, cost)
    return rule.take(state, now, cost)[0], wait


def test_a_rule_that_counts_refusals_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what was refused too, and who asked in vain has less."""
    monkeypatch.setitem(globals(), "decide", _burns)
    assert falsified(lambda history: burns_nothing(history, "sliding_log"), HISTORIES)


@pytest.mark.parametrize("name", RULES)
def test_what_is_left_can_be_taken_at_once_and_no_more(name: str) -> None:
    """`left` is the largest cost that is admitted; a leaky bucket admits one of any cost."""

    @given(HISTORIES.map(_forwards))
    def check(history: History) -> None:
        rule = RULES[name](history.rate, history.burst)
        now = history.start
        state = rule.fresh(float(now))
        for step in history.steps:
            now += step.gap
            left = rule.left(state, float(now))
            if left:
                assert rule.wait(state, float(now), left) == 0
            if rule.capacity is not None:
                assert rule.wait(state, float(now), left + 1) != 0
            state = decide(rule, state, float(now), step.cost).state

    check()


@pytest.mark.parametrize("name", RULES)
def test_a_state_that_has_rested_is_as_good_as_none(name: str) -> None:
    """After `rest`, forgetting the state changes no verdict."""

    @given(HISTORIES.map(_forwards))
    def check(history: History) -> None:
        rule = RULES[name](history.rate, history.burst)
        now = history.start
        kept, forgetful = rule.fresh(float(now)), rule.fresh(float(now))
        for step in history.steps:
            now += step.gap
            if not rule.rest(forgetful, float(now)):
                forgetful = rule.fresh(float(now))
            kept, wait = decide(rule, kept, float(now), step.cost)
            forgetful, same = decide(rule, forgetful, float(now), step.cost)
            assert same == wait

    check()


@pytest.mark.parametrize("name", RULES)
def test_whole_numbers_of_either_kind_give_the_same_verdicts(name: str) -> None:
    """Integers and floats agree, so a twin in a language that has only one of them does too."""

    @given(HISTORIES)
    def check(history: History) -> None:
        rule = RULES[name](history.rate, history.burst)
        now = history.start
        one, other = rule.fresh(float(now)), rule.fresh(now)
        for step in history.steps:
            now += step.gap
            one, wait = decide(rule, one, float(now), step.cost)
            other, same = decide(rule, other, now, step.cost)
            assert same == wait

    check()


def test_as_many_as_the_burst_fit_though_each_is_rounded_up() -> None:
    """Sixty in a second take 16 667 microseconds each, and still ten fit into a burst of ten."""
    for limit in range(1, 200):
        rule = TokenBucket(Rate(limit, 1_000_000), 10)
        assert play(rule, History(rule.rate, 10, 5, [Step(0, 1)] * 30)) == [Admitted(5, 1)] * 10


def test_large_numbers_stay_exact_or_are_refused() -> None:
    """Where a product would not fit into 2**53, the step is rounded up, or the limit refused."""
    prime = TokenBucket(Rate(999_983, 86_400_000_000), 999_983)
    assert prime.amount(1) == 86_402
    with pytest.raises(ValueError, match="too large to count exactly"):
        SlidingCounter(Rate(10**6, 86_400_000_000))
    with pytest.raises(ValueError, match="too large to count exactly"):
        TokenBucket(Rate(1, 86_400_000_000), 10**6)


@pytest.mark.parametrize("name", ["token_bucket", "leaky_bucket"])
def test_a_debt_means_as_many_units_under_another_rate(name: str) -> None:
    """Ten times the rate, a tenth of the wait."""
    slow, fast = RULES[name](Rate(1, 1000), 4), RULES[name](Rate(10, 1000), 4)
    state = slow.fresh(0.0)
    for _ in range(4):
        state, _mark = slow.take(state, 0.0, 1)
    assert slow.rest(state, 0.0) == 4000
    assert fast.rest(fast.adopt(state, slow, 0.0), 0.0) == 400


# Behind others


class Line(NamedTuple):
    """A history in which some took more than there was, and then those who wait in line."""

    history: History
    over: int
    costs: list[int]


LINES = st.builds(
    Line,
    history=HISTORIES.map(_forwards),
    over=st.sampled_from([0, 0, 1, 5, 30]),
    costs=st.lists(st.integers(1, 3), min_size=1, max_size=20),
)


def turn(line: Line, name: str) -> tuple[float, float]:
    """Return the predicted minimal wait of the last in line, and its real wait."""
    rule = RULES[name](line.history.rate, line.history.burst)
    most = rule.capacity or max(line.costs)
    costs = [min(cost, most) for cost in line.costs]
    now = line.history.start
    state = rule.fresh(float(now))
    for step in line.history.steps:
        now += step.gap
        state = decide(rule, state, float(now), step.cost).state
    if line.over:  # an estimate was too low
        state, _mark = rule.take(state, float(now), line.over)
    told = rule.wait(state, float(now), costs[-1], sum(costs[:-1]))
    at = float(now)
    for cost in costs:
        wait = rule.wait(state, at, cost)
        assert wait is not None
        at += wait
        state, _mark = rule.take(state, at, cost)
    assert told is not None
    return told, at - now


@pytest.mark.parametrize("name", RULES)
def test_the_last_in_line_waits_at_least_as_long_as_it_is_told(name: str) -> None:
    """So no call is refused that would have been admitted in time."""

    @given(LINES)
    @examples(200)
    def check(line: Line) -> None:
        told, real = turn(line, name)
        assert told <= real

    check()


def told_exactly(line: Line, name: str) -> None:
    """Compare for calls that cost one each."""
    told, real = turn(line._replace(costs=[1] * len(line.costs)), name)
    assert told == real


@pytest.mark.parametrize("name", ["fixed_window", "sliding_log"])
def test_among_calls_that_cost_one_it_is_told_exactly(name: str) -> None:
    """The prediction is exact for unit costs, however long the line, also after an overshoot."""

    @given(LINES)
    @examples(200)
    def check(line: Line) -> None:
        told_exactly(line, name)

    check()


def _as_if_for_one_window(self: Any, state: Any, now: float, cost: int, ahead: int = 0) -> Any:
    if not ahead:
        return WAIT(self, state, now, cost)
    return WAIT(self, state, now, min(self.rate.limit, ahead + cost))


WAIT = SlidingLog.wait


def test_a_log_that_looks_ahead_by_one_window_only_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the last of a long line waits in vain."""
    monkeypatch.setattr(SlidingLog, "wait", _as_if_for_one_window)
    assert falsified(lambda line: told_exactly(line, "sliding_log"), LINES)


def test_what_was_too_much_in_a_window_is_no_matter_of_the_next() -> None:
    """A call at the next boundary is admitted, as predicted."""
    rule = FixedWindow(Rate(10, 100))
    state, _mark = rule.take(rule.fresh(0.0), 0.0, 45)
    assert rule.wait(state, 0.0, 1) == 100
    assert rule.wait(state, 100.0, 1) == 0


def test_what_is_given_back_is_looked_for_from_the_newest() -> None:
    """In a log of a thousand takings the latest is found at once, and the oldest too."""
    rule = SlidingLog(Rate(10_000, 10_000))
    state = rule.fresh(0.0)
    for now in range(1000):
        state, mark = rule.take(state, float(now), 2)
    state = rule.give_back(state, 999.0, 2, 0, mark)
    state = rule.give_back(state, 999.0, 2, 1, 0.0)
    assert state.used == 1997
    assert (state.takings[0], state.takings[-1]) == ((0.0, 1), (998.0, 2))


@pytest.mark.parametrize("name", RULES)
def test_the_largest_amount_is_counted_exactly(name: str) -> None:
    """One more of a bucket would not be."""
    rule = RULES[name](Rate(7, 1_000_000), 3)
    state, _mark = rule.take(rule.fresh(0.0), 0.0, rule.most)
    assert 0 < rule.rest(state, 0.0) < 2**53
    if name in ("token_bucket", "settled_bucket", "leaky_bucket"):
        assert -(-(rule.most + 1) * 1_000_000 // 7) >= 2**53


@pytest.mark.parametrize("kind", [FixedWindow, SlidingCounter])
@given(
    origin=st.integers(-(2**51), 0),
    steps=st.lists(st.tuples(st.integers(0, 2_500), st.integers(0, 6)), max_size=20),
)
def test_windows_are_the_same_wherever_their_clock_begins(
    kind: Any, origin: int, steps: list[tuple[int, int]]
) -> None:
    """A clock that began later comes to the same verdicts, if it knows when."""
    plain, shifted = kind(Rate(5, 1000)), kind(Rate(5, 1000))
    shifted.origin = float(origin)
    now = float(-origin)
    states = [plain.fresh(now), shifted.fresh(0.0)]
    for step, cost in steps:
        now += step
        said = []
        for rule, at, number in ((plain, now, 0), (shifted, now + origin, 1)):
            verdict = decide(rule, states[number], at, cost)
            states[number] = verdict.state
            said.append((verdict.wait, rule.left(verdict.state, at), rule.rest(verdict.state, at)))
        assert said[0] == said[1]
