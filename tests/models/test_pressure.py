from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.pressure import Pressure


def allowed_retries(maximum, **pressure):
    return Pressure(**pressure).allowed_retries(maximum)


PRESSURES = st.fixed_dictionaries(
    {
        "breaker_open": st.booleans(),
        "queue_wait": st.floats(0, 10),
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
    text = "Pressure(breaker_open=False, queue_wait=0.25, saturation=0, error_rate=0.5)"
    assert repr(pressure) == text


@pytest.mark.parametrize(
    "wrong",
    [{"queue_wait": nan}, {"saturation": nan}, {"saturation": -1}, {"error_rate": 50}],
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
