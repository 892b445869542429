"""The limits: their rules by example, what always holds, and that each safeguard matters."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log10
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import aimd, gradient2, vegas
from seawall.models.adaptive import PATIENCE, Gradient2, Learner, Limit, Vegas
from seawall.models.samples import FEWEST, MOST, SPAN, Window, Windows
from tests.support import falsified

MAKERS: dict[str, Callable[..., Limit]] = {
    "aimd": lambda **bounds: aimd(slow_after=1.0, **bounds),
    "vegas": vegas,
    "gradient2": gradient2,
}


def _half() -> float:
    return 0.5


def _tell(limit: Limit, rtt: float, *, in_flight: int | None = None, dropped: bool = False) -> None:
    """Tell of a window in which all of the limit was used, unless said otherwise."""
    limit.on_sample(0.0, rtt, limit.limit if in_flight is None else in_flight, dropped, _half)


def _knowing(make: Callable[..., Limit], base: float, **settings: Any) -> Learner:
    """Return a limit that knows its baseline and will not look again soon."""
    limit = make(**settings)
    assert isinstance(limit, Learner)
    limit._base, limit._windows_left = base, inf
    return limit


# The rules, by example


@pytest.mark.parametrize(
    ("rtt", "in_flight", "dropped", "after"),
    [
        (0.5, 20, False, 21.0),
        (1.0, 20, False, 21.0),
        (1.1, 20, False, 18.0),
        (0.5, 20, True, 18.0),
        (0.5, 10, False, 21.0),
        (0.5, 9, False, 20.0),
        (1.1, 1, False, 18.0),
    ],
)
def test_aimd(rtt: float, in_flight: int, *, dropped: bool, after: float) -> None:
    """One more while all is well and half is used; a tenth less when calls are slow or dropped."""
    limit = aimd(slow_after=1.0)
    _tell(limit, rtt, in_flight=in_flight, dropped=dropped)
    assert limit.estimate == after


def test_aimd_by_drops_alone() -> None:
    """With `slow_after=inf` no call is slow."""
    limit = aimd(slow_after=inf)
    _tell(limit, 1e9)
    assert limit.limit == 21


@pytest.mark.parametrize(
    ("rtt", "change"),
    [
        (1.0, 6 * 2.0),  # no queue
        (1 / 0.985, 6 * 2.0),  # a queue of 2, which is log10 of 100
        (1 / 0.975, 2.0),  # of 3: below alpha, 6
        (1 / 0.945, 0.0),  # of 6: between alpha and beta
        (1 / 0.885, 0.0),  # of 12
        (1 / 0.875, -2.0),  # of 13: above beta
    ],
)
def test_vegas(rtt: float, change: float) -> None:
    """What is added or taken depends on the queue that the limit seems to make."""
    limit = _knowing(vegas, 1.0, initial=100)
    _tell(limit, rtt)
    assert limit.estimate == 100 + change


def test_vegas_counts_at_least_one_below_ten() -> None:
    """From a limit of one it would never come up again by the logarithm, which is 0 there."""
    limit = _knowing(vegas, 1.0, initial=1)
    _tell(limit, 1.0)
    assert limit.estimate == 7.0


def test_vegas_goes_down_when_calls_are_dropped() -> None:
    """By log10 of the limit, whatever the others took."""
    limit = _knowing(vegas, 1.0, initial=100)
    _tell(limit, 1.0, dropped=True, in_flight=1)
    assert limit.estimate == 100 - log10(100)


@pytest.mark.parametrize(
    ("rtt", "gradient"), [(1.0, 1.0), (1.5, 1.0), (2.0, 0.75), (3.0, 0.5), (30.0, 0.5)]
)
def test_gradient2(rtt: float, gradient: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the way to what the ratio of usual to present times says, and a little more."""
    monkeypatch.setattr(Gradient2, "_learn", lambda limit, _rtt: limit._base)
    limit = _knowing(gradient2, 1.0, initial=100)
    _tell(limit, rtt)
    assert limit.estimate == pytest.approx(0.8 * 100 + 0.2 * (gradient * 100 + 4))


def test_gradient2_goes_down_when_calls_are_dropped() -> None:
    """As if they had taken three times as long as usual."""
    limit = _knowing(gradient2, 1.0, initial=100)
    _tell(limit, 1.0, dropped=True)
    assert limit.estimate == pytest.approx(0.8 * 100 + 0.2 * (50 + 4))


def test_gradient2_learns_slowly_and_forgets_a_slow_time_sooner() -> None:
    """The average is one of 600 windows; it falls by 5 % a window while it is twice too high."""
    limit = _knowing(gradient2, 1.0)
    assert isinstance(limit, Gradient2)
    limit._seen = 100
    assert limit._learn(2.0) == pytest.approx(1 + 2 / 601)
    limit._base = 10.0
    assert limit._learn(1.0) == pytest.approx((10 - 9 * 2 / 601) * 0.95)


@pytest.mark.parametrize("make", [vegas, gradient2])
def test_calls_that_take_no_time_tell_nothing(make: Callable[..., Limit]) -> None:
    """A window of 0 s (in virtual time, say) neither moves the limit nor trains it."""
    limit = make()
    _tell(limit, 0.0)
    assert (limit.estimate, limit.baseline) == (20.0, None)


# The baseline, taken anew


@pytest.mark.parametrize("make", [vegas, gradient2])
def test_in_full_use_the_limit_is_lowered_until_the_queue_has_drained(
    make: Callable[..., Limit],
) -> None:
    """One window to drain, one to measure, one to fill again; then the limit is what it was."""
    limit = _knowing(make, 1.0, initial=100)
    limit._windows_left, limit._seen = 1.0, 1000
    _tell(limit, 1.25)
    assert (limit.limit, limit.estimate) == (64, 100)
    _tell(limit, 1.2, in_flight=90)  # still draining
    _tell(limit, 1.1, in_flight=64)  # drained, but not all of the time
    assert limit.limit == 64
    _tell(limit, 0.9, in_flight=64)
    assert (limit.limit, limit.baseline) == (100, pytest.approx(0.95, abs=0.001))
    _tell(limit, 0.9)
    assert limit.estimate == 100


def test_where_calls_are_few_nothing_is_lowered() -> None:
    """The baseline is taken anew from calls that surely found no queue."""
    limit = _knowing(vegas, 1.0, initial=100)
    limit._windows_left = 1.0
    _tell(limit, 3.0, in_flight=20)
    assert (limit.limit, limit.baseline) == (100, 3.0)


def test_a_limit_that_is_not_in_full_use_is_not_lowered() -> None:
    """Calls that fit would be refused for nothing: the limit does no harm where it is."""
    limit = _knowing(vegas, 1.0, initial=100)
    limit._windows_left = 1.0
    for _ in range(50):
        _tell(limit, 1.06, in_flight=limit.limit - 1)
        assert limit.limit >= 100


def _lowered() -> Learner:
    limit = _knowing(vegas, 1.0, initial=100)
    limit._windows_left = 1.0
    _tell(limit, 1.25)
    assert limit.limit == 64
    _tell(limit, 1.25, in_flight=64)
    return limit


def test_a_queue_that_has_not_drained_is_drained_further() -> None:
    """Capacity fell in that very moment: at a lower limit calls take less, so it was a queue."""
    limit = _lowered()
    _tell(limit, 2.0)
    assert limit.limit == 25  # 0.8 of the 32 that are served at a time
    _tell(limit, 2.0)
    _tell(limit, 1.0)
    assert (limit.limit, limit.baseline) == (100, 1.0)


def test_a_slower_dependency_is_believed() -> None:
    """What calls take stays the same at a lower limit: that is no queue."""
    limit = _lowered()
    for _ in range(3):
        _tell(limit, 2.0)
    assert (limit.limit, limit.baseline) == (100, 2.0)


def test_a_limit_that_was_lowered_goes_up_again_in_any_case() -> None:
    """Calls that hang in flight do not keep it down."""
    limit = _lowered()
    limit._drained = False
    for _ in range(PATIENCE):
        _tell(limit, 1.25, in_flight=99)
    assert (limit.limit, limit.baseline) == (100, 1.0)


def test_drops_end_it_too() -> None:
    """Then there is something else to do."""
    limit = _lowered()
    _tell(limit, 1.25, dropped=True)
    assert (limit.limit, limit.baseline) == (98, 1.0)


# What always holds


class Told(NamedTuple):
    rtt: float
    used: float
    dropped: bool
    chance: float


class History(NamedTuple):
    algorithm: str
    minimum: int
    room: int
    windows: list[Told]


HISTORIES = st.builds(
    History,
    algorithm=st.sampled_from(sorted(MAKERS)),
    minimum=st.integers(1, 40),
    room=st.integers(0, 60),
    windows=st.lists(
        st.builds(
            Told,
            rtt=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 10.0]),
            used=st.sampled_from([0.0, 0.3, 0.49, 0.6, 1.0, 1.5]),
            dropped=st.booleans(),
            chance=st.floats(0, 1, exclude_max=True),
        ),
        max_size=60,
    ),
)


def _play(case: History, look: Callable[[Limit, Told, tuple[float, float | None]], None]) -> None:
    """Tell a limit of window after window, and look at what each did."""
    maximum = case.minimum + case.room
    limit = MAKERS[case.algorithm](initial=maximum, minimum=case.minimum, maximum=maximum)
    for told in case.windows:
        before = limit.estimate, limit.baseline
        in_flight = int(told.used * limit.limit)
        limit.on_sample(0.0, told.rtt, in_flight, told.dropped, lambda told=told: told.chance)
        look(limit, told, before)


def _check_bounds(case: History) -> None:
    def look(limit: Limit, _told: Told, _before: object) -> None:
        assert limit.minimum <= limit.limit <= limit.maximum
        assert limit.minimum <= limit.estimate <= limit.maximum

    _play(case, look)


def _check_no_growth_unused(case: History) -> None:
    def look(limit: Limit, told: Told, before: tuple[float, float | None]) -> None:
        if told.used < 0.5:
            assert limit.estimate <= before[0]

    _play(case, look)


def _check_drops_train_nothing(case: History) -> None:
    def look(limit: Limit, told: Told, before: tuple[float, float | None]) -> None:
        if told.dropped:
            assert limit.baseline == before[1]
            assert limit.estimate <= max(before[0], 40 if case.algorithm == "gradient2" else 0)

    _play(case, look)


@given(HISTORIES)
def test_the_limit_stays_within_its_bounds(case: History) -> None:
    """Whatever it is told, also while it is lowered to drain a queue."""
    _check_bounds(case)


@given(HISTORIES)
def test_an_unused_limit_does_not_grow(case: History) -> None:
    """Below half of it in flight, a higher limit could not be told from this one."""
    _check_no_growth_unused(case)


@given(HISTORIES)
def test_dropped_calls_never_train_the_baseline(case: History) -> None:
    """Nor do they raise the limit, but where the rule of Gradient2 leaves room for four calls."""
    _check_drops_train_nothing(case)


def _move_anywhere(limit: Limit, estimate: float) -> None:
    limit.estimate = estimate


def _train_by_drops(limit: Vegas, *told: Any) -> None:
    now, rtt, in_flight, dropped, rng = told
    if dropped and rtt > 0:
        limit._base = limit._learn(rtt)
    learner_on_sample(limit, now, rtt, in_flight, dropped, rng)


learner_on_sample = Learner.on_sample

ABLATIONS: dict[str, tuple[Callable[[History], None], type, str, Any]] = {
    "no bounds": (_check_bounds, Limit, "_move_to", _move_anywhere),
    "no freeze": (_check_no_growth_unused, Limit, "_unused", lambda *_: False),
    "drops train": (_check_drops_train_nothing, Learner, "on_sample", _train_by_drops),
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_each_safeguard_matters(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one away, and its property is falsified."""
    check, *patch = ABLATIONS[missing]
    monkeypatch.setattr(*patch)
    assert falsified(check, HISTORIES)


@given(HISTORIES, st.integers(1, 50), st.integers(0, 50))
def test_new_bounds_hold_at_once(case: History, minimum: int, room: int) -> None:
    """Bounds can be changed at any time, also below where the limit began."""
    limit = MAKERS[case.algorithm](initial=60, minimum=1, maximum=200)
    for told in case.windows:
        limit.on_sample(0.0, told.rtt, limit.limit, told.dropped, _half)
    limit.bound(minimum, minimum + room)
    assert minimum <= limit.limit <= minimum + room
    assert minimum <= limit.fresh().limit <= minimum + room


# Settings


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_fresh_one_has_the_settings_and_nothing_else(make: Callable[..., Limit]) -> None:
    """Each policy begins to learn for itself."""
    limit = make(initial=30, minimum=25, maximum=90)
    for _ in range(5):
        _tell(limit, 0.5)
    fresh = limit.fresh()
    assert repr(fresh) == repr(limit)
    assert (fresh.limit, fresh.baseline) == (30, None)


def test_reprs_are_calls() -> None:
    """What is printed can be written."""
    assert repr(vegas()) == "vegas(alpha=3.0, beta=6.0, initial=20, minimum=1, maximum=1000)"
    assert repr(gradient2()) == "gradient2(initial=20, minimum=20, maximum=200)"
    shown = "aimd(slow_after=0.5, backoff=0.9, initial=20, minimum=1, maximum=200)"
    assert repr(aimd(slow_after=0.5)) == shown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vegas(initial=0), "initial=0"),
        (lambda: vegas(initial=5, minimum=10), "from 10 to 1000"),
        (lambda: vegas(minimum=10, maximum=5), "at most the maximum, which is 5"),
        (lambda: vegas(alpha=7), "at most beta"),
        (lambda: vegas(beta=float("nan")), "beta=nan"),
        (lambda: aimd(slow_after=0), "slow_after=0"),
        (lambda: aimd(slow_after=1.0, backoff=1.5), "backoff=1.5"),
        (lambda: gradient2(minimum=True), "minimum=True"),
        (lambda: gradient2(maximum=10.0), "maximum=10.0"),
    ],
)
def test_bad_settings_raise_at_once(make: Callable[[], Limit], message: str) -> None:
    """And the message tells what to write."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# Windows


def test_a_window_needs_calls_and_time() -> None:
    """At least ten calls, and four times what they took in the window before."""
    windows = Windows(0.1)
    windows.samples += [0.5] * (FEWEST - 1)
    assert windows.end(100.0) is None
    windows.samples.append(1.5)
    assert windows.end(100.0) == Window(0.6, dropped=False)
    assert windows.due == 100.0 + SPAN * 0.6
    windows.samples += [0.01] * 20
    assert windows.end(102.3) is None
    assert windows.end(102.4) == Window(pytest.approx(0.01), dropped=False)
    assert windows.due == 102.5
    assert windows.samples == []


def test_one_dropped_call_among_many_is_no_sign() -> None:
    """A window counts as dropped when more than one call in twenty was."""
    windows = Windows(0.1)
    windows.samples += [1.0] * 19
    windows.drops.append(5.0)
    assert windows.end(0.0) == Window(1.0, dropped=False)
    assert windows.typical == 1.2
    windows.samples += [1.0] * 18
    windows.drops.append(5.0)
    assert windows.end(1e3) == Window(1.0, dropped=True)


def test_a_window_of_nothing_but_drops_ends_too() -> None:
    """An outage has no other calls; their time decides when the next window ends."""
    windows = Windows(0.1)
    windows.drops += [2.0] * FEWEST
    assert windows.end(10.0) == Window(0.0, dropped=True)
    assert (windows.due, windows.typical) == (18.0, 2.0)


def test_at_high_rates_a_sample_makes_the_mean() -> None:
    """The mean of 100 000 calls is that of at most two thousand of them."""
    windows = Windows(0.1)
    windows.samples += [1.0, 3.0] * 50_000
    stride = 100_000 // MOST + 1
    assert stride % 2
    assert windows.end(0.0) == Window(pytest.approx(2.0, abs=0.01), dropped=False)
