from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.pooling import in_flight, pool_size, timeout_for

RATES = st.floats(0, 1e6)
TIMES = st.floats(0, 1e4)


def test_littles_law():
    """A hundred calls a second of 50 ms are five in flight."""
    assert in_flight(100, 0.05) == pytest.approx(5)
    assert in_flight(0, 1) == 0


def test_a_pool_has_headroom():
    """Half as much again, rounded up."""
    assert pool_size(100, 0.05) == 8
    assert pool_size(100, 0.05, headroom=1) == 5
    assert pool_size(100, 0.05, headroom=2) == 10


def test_rounding_adds_no_slot():
    """1.1 * 10 is 11.000000000000002 in floats, and still eleven."""
    assert pool_size(1.1, 10, headroom=1) == 11
    assert pool_size(0.1 * 3, 10, headroom=1) == 3


def test_a_pool_has_at_least_one():
    """No traffic at all still needs a place to arrive at."""
    assert pool_size(0, 1) == 1


@given(RATES, TIMES, st.floats(1, 10))
def test_a_pool_holds_what_is_in_flight(rate, time, headroom):
    """The pool is at least the calls in flight, and less than one slot above what was asked."""
    size = pool_size(rate, time, headroom)
    wanted = in_flight(rate, time) * headroom
    assert size >= wanted * (1 - 1e-9)
    assert size <= max(1, wanted + 1)


def test_a_timeout_leaves_room_above_p99():
    """Two and a half times the p99, unless the caller has less."""
    assert timeout_for(0.4) == pytest.approx(1.0)
    assert timeout_for(0.4, factor=2) == pytest.approx(0.8)
    assert timeout_for(0.4, caller_budget=5) == pytest.approx(1.0)
    assert timeout_for(0.4, caller_budget=0.7) == 0.7


@given(st.floats(1e-6, 1e300), st.floats(1, 100), st.floats(1e-6, 1e300))
def test_a_timeout_never_exceeds_the_budget(p99, factor, budget):
    """The caller's budget bounds any timeout."""
    assert 0 < timeout_for(p99, factor, budget) <= budget


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: in_flight(-1, 1), "throughput"),
        (lambda: in_flight(inf, 1), "throughput"),
        (lambda: in_flight(1, nan), "service_time"),
        (lambda: in_flight(1e300, 1e300), r"throughput \* service_time"),
        (lambda: pool_size(1, 1, headroom=0.5), "headroom"),
        (lambda: pool_size(1e300, 1, headroom=1e300), "pool size"),
        (lambda: timeout_for(0), "p99"),
        (lambda: timeout_for(1, factor=0.5), "factor"),
        (lambda: timeout_for(1e300, factor=1e300), r"p99 \* factor"),
        (lambda: timeout_for(1, caller_budget=0), "caller_budget"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    """Every argument is checked, and so is a product too large to be a number."""
    with pytest.raises(ValueError, match=f"^{name}="):
        call()
