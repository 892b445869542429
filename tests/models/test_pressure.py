from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.pressure import Pressure, RetryThresholds, crowding


def allowed_retries(maximum, **pressure):
    return RetryThresholds().allowed_retries(Pressure(**pressure), maximum)


PRESSURES = st.fixed_dictionaries(
    {
        "breaker_open": st.booleans(),
        "queue_wait": st.floats(0, 10),
        "average_queue_wait": st.floats(0, 10),
        "load": st.floats(0, 2),
        "saturation": st.floats(0, 2),
        "error_rate": st.floats(0, 1),
    }
)


@pytest.mark.parametrize(
    ("pressure", "retries"),
    [
        ({}, 3),
        ({"breaker_open": True}, 0),
        ({"queue_wait": 2.0}, 3),
        ({"queue_wait": 2.1}, 0),
        ({"queue_wait": inf}, 0),
        ({"average_queue_wait": 1.0}, 3),
        ({"average_queue_wait": 1.1}, 0),
        ({"load": 0.9}, 3),
        ({"load": 0.91}, 0),
        ({"saturation": 0.9}, 3),
        ({"saturation": 0.91}, 0),
        ({"saturation": 1.5}, 0),
        ({"error_rate": 0.2}, 3),
        ({"error_rate": 0.21}, 2),
        ({"error_rate": 0.5}, 2),
        ({"error_rate": 0.51}, 1),
        ({"error_rate": 1.0}, 1),
        ({"error_rate": 0.3, "breaker_open": True}, 0),
    ],
)
def test_thresholds(pressure, retries):
    """Each signal takes retries away above its threshold, and not at it."""
    assert allowed_retries(3, **pressure) == retries


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("maximum", [0, 1])
def test_errors_never_add_a_retry(maximum, error_rate):
    """One and two retries are limits, not a right to so many."""
    assert allowed_retries(maximum, error_rate=error_rate) == maximum


@given(st.integers(0, 10), PRESSURES)
def test_never_more_than_the_maximum(maximum, pressure):
    """Pressure only ever takes away."""
    assert 0 <= allowed_retries(maximum, **pressure) <= maximum


@given(st.integers(0, 10), PRESSURES, PRESSURES)
def test_more_pressure_never_allows_more(maximum, pressure, other):
    """Retries fall as any signal rises."""
    worse = {name: max(value, other[name]) for name, value in pressure.items()}
    assert allowed_retries(maximum, **worse) <= allowed_retries(maximum, **pressure)


def test_a_pressure_reads_well():
    """The repr shows every signal."""
    pressure = Pressure(queue_wait=0.25, error_rate=0.5)
    text = (
        "Pressure(breaker_open=False, queue_wait=0.25, average_queue_wait=0, saturation=0, "
        "error_rate=0.5, load=0)"
    )
    assert repr(pressure) == text


def test_thresholds_read_well():
    """The repr is the call that makes them."""
    text = (
        "RetryThresholds(queue_wait=2, average_queue_wait=1, saturation=0.9, load=0.9, "
        "error_rates={0.2: 2, 0.5: 1})"
    )
    assert repr(RetryThresholds()) == text


def test_thresholds_are_settings():
    """Each can be moved; error rates say how many retries are left above them."""
    strict = RetryThresholds(
        queue_wait=0.5, average_queue_wait=inf, saturation=0.5, load=2.0, error_rates={0.1: 1}
    )
    for pressure, retries in [
        ({"queue_wait": 0.6}, 0),
        ({"average_queue_wait": 60.0}, 5),
        ({"saturation": 0.6}, 0),
        ({"load": 1.5}, 5),
        ({"error_rate": 0.2}, 1),
        ({"error_rate": 0.1}, 5),
    ]:
        assert strict.allowed_retries(Pressure(**pressure), 5) == retries


@given(PRESSURES, PRESSURES)
def test_the_worst_of_two_is_as_bad_as_each(one, other):
    """In every respect, so that neither hides the other."""
    worst = Pressure(**one).worst(Pressure(**other))
    assert all(getattr(worst, name) == max(one[name], other[name]) for name in one)


@pytest.mark.parametrize("limit", range(1, 30))
@pytest.mark.parametrize("own", [0, 1])
def test_full_slots_are_seen_to_be_full_however_few_there_are(limit, own):
    """Slots that are in use, or were until a moment ago, count; free ones do not."""
    full = crowding(max(1, limit - 1 + own), 0, limit, own=own)
    assert full > RetryThresholds().saturation or limit == own == 1
    assert crowding(own, 0, limit, own=own) == 0.0
    assert crowding(own, 1, limit, own=own) > 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"average_queue_wait": nan},
        {"load": -1},
        {"queue_wait": nan},
        {"saturation": nan},
        {"saturation": -1},
        {"error_rate": 50},
    ],
)
def test_a_signal_that_is_no_number_is_refused(wrong):
    """A signal that no comparison can judge is not taken for calm."""
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}="):
        Pressure(**wrong)


def test_the_maximum_is_checked():
    """A negative number of retries is a mistake."""
    with pytest.raises(ValueError, match=r"^maximum=-1: write 0 or more"):
        allowed_retries(-1)
