"""The limits: their rules by example, what always holds, and that each safeguard matters."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log10
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.limits import aimd, gradient2, vegas
from seawall.models.concurrency.algorithms import Gradient2, Vegas
from seawall.models.concurrency.limit import PATIENCE, ConcurrencyLimit, Learner
from tests.support import falsified

MAKERS: dict[str, Callable[..., ConcurrencyLimit]] = {
    "aimd": lambda **bounds: aimd(slow_after=1.0, **bounds),
    "vegas": vegas,
    "gradient2": gradient2,
}


def _half() -> float:
    return 0.5


def _tell(
    limit: ConcurrencyLimit, rtt: float, *, in_flight: int | None = None, dropped: bool = False
) -> None:
    """Tell of a window in which all of the limit was used, unless said otherwise."""
    limit.on_sample(0.0, rtt, limit.limit if in_flight is None else in_flight, dropped, _half)


def _begun(limit: ConcurrencyLimit) -> ConcurrencyLimit:
    """Return it after its start: it has seen a queue before."""
    limit._starting = False
    return limit


def _knowing(make: Callable[..., ConcurrencyLimit], base: float, **settings: Any) -> Learner:
    """Return a limit that knows its baseline and will not look again soon."""
    limit = make(**settings)
    assert isinstance(limit, Learner)
    limit._base, limit._windows_left = base, inf
    _begun(limit)
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
    limit = _begun(aimd(slow_after=1.0))
    _tell(limit, rtt, in_flight=in_flight, dropped=dropped)
    assert limit.estimate == after


def test_aimd_by_drops_alone() -> None:
    """With `slow_after=inf` no call is slow."""
    limit = _begun(aimd(slow_after=inf))
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


@pytest.mark.parametrize(
    ("initial", "rtt", "change"),
    [
        (1, 1.0, 6 * 0.5),
        (1, 1e9, 1.0),
        (2, 1e9, 0.0),
        (8, 2.0, -1.0),
        (20, 1.0, 6 * 20 / 32),
        (20, 1 / 0.96, log10(20)),  # a queue of 1, below alpha, 3 * 20 / 32
        (20, 1 / 0.775, -log10(20)),  # of 5, above beta
    ],
)
def test_vegas_keeps_a_shorter_queue_at_a_small_limit(
    initial: int, rtt: float, change: float
) -> None:
    """Six times log10 of 20 would be 40 % of it; and by the logarithm of 1 it would never move."""
    limit = _knowing(vegas, 1.0, initial=initial)
    _tell(limit, rtt)
    assert limit.estimate == initial + change


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
def test_calls_that_take_no_time_tell_nothing(make: Callable[..., ConcurrencyLimit]) -> None:
    """A window of 0 s (in virtual time, say) neither moves the limit nor trains it."""
    limit = make()
    _tell(limit, 0.0)
    assert (limit.estimate, limit.baseline) == (20.0, None)


# The start


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_at_the_start_a_limit_in_full_use_doubles(make: Callable[..., ConcurrencyLimit]) -> None:
    """By the rules alone it would take minutes to come up; what is not used stays as it is."""
    limit = make(initial=20, maximum=200)
    _tell(limit, 0.5)
    _tell(limit, 0.5)
    assert limit.limit == 80
    _tell(limit, 0.5, in_flight=39)
    assert limit.limit == 80


@pytest.mark.parametrize(("rtt", "after"), [(1.2, 20 / 1.2), (1.05, 18), (9.0, 10)])
def test_the_start_of_aimd_ends_with_slow_calls(rtt: float, after: float) -> None:
    """By as much as they are too slow, half at most; then the rule holds."""
    limit = aimd(slow_after=1.0)
    _tell(limit, rtt)
    assert limit.estimate == pytest.approx(after)
    _tell(limit, 0.5)
    assert limit.estimate == pytest.approx(after + 1)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_drops_end_the_start(make: Callable[..., ConcurrencyLimit]) -> None:
    """A limit that is too high already does not double once more."""
    limit = make(initial=100, maximum=1000)
    _tell(limit, 0.5, dropped=True)
    assert limit.estimate < 100
    before = limit.estimate
    for _ in range(2):
        _tell(limit, 0.5)
    assert before < limit.estimate < 1.3 * before


def _overshot() -> Learner:
    """Return a limit that has doubled to 160 of a dependency that serves 100 at once."""
    limit = vegas(initial=80)
    _tell(limit, 1.0)
    _tell(limit, 1.6)
    assert limit.limit == 80  # 0.8 of the 100 that are served at a time
    _tell(limit, 1.2, in_flight=80)
    return limit


def test_the_start_of_vegas_ends_where_the_queue_was_seen() -> None:
    """What calls took at the doubled limit tells how many were served: there it goes at once."""
    limit = _overshot()
    for _ in range(2):
        _tell(limit, 1.0)
    assert limit.limit == 106
    _tell(limit, 1.06)
    _tell(limit, 1.06)
    assert limit.limit == 106


def test_a_limit_that_doubled_beyond_all_there_are_comes_back() -> None:
    """Slow calls that do not fill the limit stand in a queue all the same: it falls to them."""
    limit = vegas(initial=80)
    _tell(limit, 1.0)
    _tell(limit, 1.5, in_flight=120)
    assert limit.limit == 120
    _tell(limit, 1.5)
    assert limit.limit == 64


def test_a_false_alarm_does_not_end_the_start() -> None:
    """The first calls were faster than most, and there was no queue: the limit doubles again."""
    limit = vegas(initial=20)
    _tell(limit, 0.6)
    _tell(limit, 1.0)
    assert limit.limit < 40
    for _ in range(3):
        _tell(limit, 1.0)
    assert (limit.baseline, limit.limit) == (1.0, 43)
    for _ in range(2):
        _tell(limit, 1.0)
    assert limit.limit == 87


# The baseline, taken anew


@pytest.mark.parametrize("make", [vegas, gradient2])
def test_in_full_use_the_limit_is_lowered_until_the_queue_has_drained(
    make: Callable[..., ConcurrencyLimit],
) -> None:
    """One window to drain, one or two to measure, one to fill again."""
    limit = _knowing(make, 1.0, initial=100)
    limit._windows_left, limit._seen = 1.0, 1000
    _tell(limit, 1.25)
    assert (limit.limit, limit.estimate) == (64, 100)
    _tell(limit, 1.2, in_flight=90)  # still draining
    _tell(limit, 1.1, in_flight=64)  # drained, but not all of the time
    assert limit.limit == 64
    for _ in range(1 + limit.MEASURED_TWICE):
        _tell(limit, 0.95, in_flight=64)
    assert limit.baseline == pytest.approx(0.98, abs=0.001)
    found = 0.98 * 100 / 1.25
    assert limit.estimate == pytest.approx(limit._with_queue(found), abs=0.5)
    before = limit.limit
    _tell(limit, 0.9)
    assert limit.limit == before


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
    """Capacity fell to 30 in that very moment: at a lower limit calls take less."""
    limit = _lowered()
    for lowered in (44, 30):
        _tell(limit, limit.limit / 30)
        assert limit.limit == lowered
        _tell(limit, limit.limit / 30)
    for _ in range(2):
        _tell(limit, 1.0)
    assert limit.baseline == 1.0


def test_a_baseline_that_was_taken_in_a_queue_is_found_out() -> None:
    """Calls take less at a lower limit, and still less at a lower one: so there was a queue."""
    limit = _knowing(vegas, 4.0, initial=80)  # of 20
    limit._windows_left = 1.0
    _tell(limit, 4.0)
    for _ in range(20):
        _tell(limit, max(1.0, limit.limit / 20))
        if not limit._lowered_to:
            break
    assert (limit.baseline, limit.limit) == (pytest.approx(1.0), 25)


def test_a_slower_dependency_is_believed() -> None:
    """What calls take stays the same at a lower limit: that is no queue."""
    limit = _lowered()
    _tell(limit, 2.0)
    assert limit.limit == 44
    for _ in range(3):
        _tell(limit, 2.0)
    assert (limit.limit, limit.baseline) == (106, 2.0)


def test_one_odd_window_does_not_lower_the_limit_further() -> None:
    """Calls took what was expected of them: it is by chance that they now take less."""
    limit = _lowered()
    _tell(limit, 1.05)
    _tell(limit, 0.76)
    assert limit._lowered_to == 0
    assert limit.baseline == pytest.approx(1 + 0.4 * (0.905 - 1))


def test_a_limit_that_falls_far_looks_again() -> None:
    """Calls take as long as ever while it falls: then it was no queue, but a wrong baseline."""
    limit = _knowing(vegas, 0.8, initial=100)
    limit._found = 100.0
    for _ in range(20):
        _tell(limit, 1.0)
        if limit._lowered_to:
            break
    assert limit._lowered_to
    for _ in range(8):
        _tell(limit, 1.0)
    assert limit.baseline == pytest.approx(1.0, abs=0.13)
    assert limit.estimate > 65


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


def test_the_baseline_is_no_minimum_of_noisy_windows() -> None:
    """Windows that differ by chance do not lower it, and a faster dependency does."""
    limit = _knowing(vegas, 1.0, initial=100)
    for rtt in (0.8, 1.2, 0.85, 1.15) * 10:
        _tell(limit, rtt)
    assert limit.baseline == 1.0
    for _ in range(10):
        _tell(limit, 0.5)
    assert limit.baseline < 0.7


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


def _play(
    case: History, look: Callable[[ConcurrencyLimit, Told, tuple[float, float | None]], None]
) -> None:
    """Tell a limit of window after window, and look at what each did."""
    maximum = case.minimum + case.room
    limit = MAKERS[case.algorithm](initial=maximum, minimum=case.minimum, maximum=maximum)
    for told in case.windows:
        before = limit.estimate, limit.baseline
        in_flight = int(told.used * limit.limit)
        limit.on_sample(0.0, told.rtt, in_flight, told.dropped, lambda told=told: told.chance)
        look(limit, told, before)


def _check_bounds(case: History) -> None:
    def look(limit: ConcurrencyLimit, _told: Told, _before: object) -> None:
        assert limit.minimum <= limit.limit <= limit.maximum
        assert limit.minimum <= limit.estimate <= limit.maximum

    _play(case, look)


def _check_no_growth_unused(case: History) -> None:
    def look(limit: ConcurrencyLimit, told: Told, before: tuple[float, float | None]) -> None:
        if told.used < 0.5:
            assert limit.estimate <= before[0]

    _play(case, look)


def _check_drops_train_nothing(case: History) -> None:
    def look(limit: ConcurrencyLimit, told: Told, before: tuple[float, float | None]) -> None:
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


def _move_anywhere(limit: ConcurrencyLimit, estimate: float) -> None:
    limit.estimate = estimate


def _train_by_drops(limit: Vegas, *told: Any) -> None:
    now, rtt, in_flight, dropped, rng = told
    if dropped and rtt > 0:
        limit._base = limit._learn(rtt)
    learner_on_sample(limit, now, rtt, in_flight, dropped, rng)


learner_on_sample = Learner.on_sample

ABLATIONS: dict[str, tuple[Callable[[History], None], type, str, Any]] = {
    "no bounds": (_check_bounds, ConcurrencyLimit, "_move_to", _move_anywhere),
    "no freeze": (_check_no_growth_unused, ConcurrencyLimit, "_unused", lambda *_: False),
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
def test_a_fresh_one_has_the_settings_and_nothing_else(
    make: Callable[..., ConcurrencyLimit],
) -> None:
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
    shown = "aimd(slow_after=0.5, shrink=0.9, initial=20, minimum=1, maximum=200)"
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
        (lambda: aimd(slow_after=1.0, shrink=1.5), "shrink=1.5"),
        (lambda: gradient2(minimum=True), "minimum=True"),
        (lambda: gradient2(maximum=10.0), "maximum=10.0"),
    ],
)
def test_bad_settings_raise_at_once(make: Callable[[], ConcurrencyLimit], message: str) -> None:
    """And the message tells what to write."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()
