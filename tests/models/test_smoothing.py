"""The average that knows time, the rate of a counter, and the switch that sticks."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.smoothing import Ewma, Growth, Hysteresis
from tests.support import falsified, quarters

VALUES = st.floats(0, 4, allow_nan=False)
STEPS = st.lists(st.tuples(quarters(8, 1), VALUES), min_size=1, max_size=20)


# The average


def test_the_first_sample_is_the_average():
    """Nothing is made up where nothing is known."""
    average = Ewma(1.0)
    assert average.value is None
    assert average.update(0.75, 100.0) == 0.75


def test_half_is_forgotten_in_a_half_life():
    """After one half-life of another value the average is in the middle."""
    average = Ewma(2.0)
    average.update(0.0, 0.0)
    assert average.update(1.0, 2.0) == pytest.approx(0.5)
    assert average.update(1.0, 4.0) == pytest.approx(0.75)


@given(st.floats(0, 4), VALUES, quarters(40, 1), st.integers(2, 20))
def test_it_does_not_matter_how_often_one_looks(before, value, seconds, looks):
    """A steady signal leads to the same average by one look or by many."""
    once, often = Ewma(1.5), Ewma(1.5)
    once.update(before, 0.0)
    often.update(before, 0.0)
    for look in range(1, looks + 1):
        often.update(value, seconds * look / looks)
    assert often.value == pytest.approx(once.update(value, seconds))


@given(STEPS)
def test_the_average_stays_within_what_was_measured(steps):
    """It is never above the highest sample nor below the lowest."""
    average = Ewma(1.0)
    now = 0.0
    seen = []
    for passed, value in steps:
        now += passed
        seen.append(value)
        slack = 1e-9
        assert min(seen) - slack <= average.update(value, now) <= max(seen) + slack


def test_a_clock_set_back_and_a_long_silence_do_no_harm():
    """Time that went backwards counts as none; after a very long time the sample is all."""
    average = Ewma(1.0)
    average.update(1.0, 100.0)
    assert average.update(3.0, 50.0) == 1.0
    assert average.update(3.0, 1e12) == 3.0


def _rate_blind_update(self, sample, _now):
    self.value = sample if self.value is None else (self.value + sample) / 2
    return self.value


def test_without_time_the_average_depends_on_how_often_one_looks(monkeypatch):
    """Ablation: an average by count of samples breaks the property above."""
    monkeypatch.setattr(Ewma, "update", _rate_blind_update)

    def check(case):
        once, often = Ewma(1.5), Ewma(1.5)
        once.update(0.0, 0.0)
        often.update(0.0, 0.0)
        for look in range(1, case + 1):
            often.update(1.0, look / case)
        assert often.value == pytest.approx(once.update(1.0, 1.0))

    assert falsified(check, st.integers(2, 5))


# The rate


def test_growth_is_told_for_each_unit_of_time():
    """Five in two seconds are 2.5 a second."""
    growth = Growth(10.0, 0.0)
    assert growth.update(15.0, 2.0) == 2.5
    assert growth.update(15.0, 4.0) == 0.0


def test_looks_that_are_too_close_tell_nothing_new():
    """Before `least` has passed the last rate stands, and nothing is lost of what grew."""
    growth = Growth(0.0, 0.0, least=1.0)
    assert growth.update(9.0, 0.5) == 0.0
    assert growth.update(9.0, 1.0) == 9.0
    assert growth.update(50.0, 1.5) == 9.0
    assert growth.update(50.0, 3.0) == pytest.approx(20.5)


def test_a_counter_that_starts_anew_has_not_shrunk():
    """Neither a smaller count nor a clock set back gives a negative rate."""
    growth = Growth(100.0, 10.0)
    assert growth.update(1.0, 11.0) == 0.0
    assert growth.update(3.0, 5.0) == 0.0
    assert growth.update(5.0, 6.0) == 2.0


# The switch


def test_between_fall_and_rise_nothing_changes():
    """High from `rise` on, low below `fall`, and in between as it was."""
    switch = Hysteresis(rise=0.8, fall=0.6)
    shown = [switch.update(value, 0.0) for value in (0.7, 0.8, 0.7, 0.6, 0.59, 0.7, 0.79, 0.9)]
    assert shown == [False, True, True, True, False, False, False, True]


def test_it_rises_at_once_and_then_holds():
    """`hold` delays only the way down."""
    switch = Hysteresis(rise=0.8, fall=0.6, hold=5.0)
    assert switch.update(0.9, 0.0)
    assert switch.update(0.0, 4.75)
    assert not switch.update(0.0, 5.0)
    assert switch.update(0.9, 5.0)


def _rises(switch, steps):
    now, before, rises = 0.0, False, []
    for passed, value in steps:
        now += passed
        high = switch.update(value, now)
        if high and not before:
            rises.append(now)
        before = high
    return rises


def check_rises(steps):
    """Check that two rises are at least the hold apart."""
    rises = _rises(Hysteresis(rise=2.0, fall=1.0, hold=3.0), steps)
    assert all(second - first >= 3.0 for first, second in pairwise(rises))


def check_band(steps):
    """Check that the state changes only by values outside of the band."""
    switch = Hysteresis(rise=2.0, fall=1.0)
    for number, (_, value) in enumerate(steps):
        before = switch.high
        after = switch.update(value, number)
        assert before == after or not 1.0 <= value < 2.0


@given(STEPS)
def test_it_does_not_flicker(steps):
    """However wild the signal, it rises at most once in `hold`."""
    check_rises(steps)


@given(STEPS)
def test_it_changes_only_outside_of_its_band(steps):
    """Values from `fall` up to `rise` leave it as it is."""
    check_band(steps)


def test_without_the_hold_it_flickers(monkeypatch):
    """Ablation: with the hold taken away the bound on rises is broken."""
    monkeypatch.setattr(
        Hysteresis, "__init__", lambda self, **given: _set_up(self, given | {"hold": 0.0})
    )
    assert falsified(check_rises, STEPS)


def test_without_two_thresholds_it_changes_inside_the_band(monkeypatch):
    """Ablation: with `fall` at `rise` a value in the band ends it."""
    monkeypatch.setattr(
        Hysteresis, "__init__", lambda self, **given: _set_up(self, given | {"fall": given["rise"]})
    )
    assert falsified(check_band, STEPS)


def _set_up(switch, given):
    switch.rise, switch.fall, switch.hold = given["rise"], given["fall"], given.get("hold", 0.0)
    switch.high, switch._since = False, 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ewma(0.0), "half_life"),
        (lambda: Ewma(nan), "half_life"),
        (lambda: Hysteresis(0.5, 0.8), "write rise=0.5 or less"),
        (lambda: Hysteresis(inf, 0.8), "rise"),
        (lambda: Hysteresis(0.8, -1.0), "fall"),
        (lambda: Hysteresis(0.8, 0.6, -1.0), "hold"),
        (lambda: Growth(0.0, 0.0, least=-1.0), "least"),
    ],
)
def test_bad_settings_are_told(make, message):
    """Each message names the argument."""
    with pytest.raises(ValueError, match=message):
        make()
