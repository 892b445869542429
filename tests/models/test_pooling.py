"""The figures by which a pool is judged."""

from __future__ import annotations

from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.pooling import AT_MOST, LIFETIME_SPREAD, PoolUsage, advise, lifetime
from tests.support import quarters

CHANCES = st.floats(0.0, 1.0, exclude_max=True)
BATCHES = st.lists(
    st.tuples(quarters(80), st.lists(quarters(8), max_size=5), st.integers(0, 3)), max_size=20
)


@given(st.floats(0.001, 1e6), CHANCES, CHANCES)
def test_a_lifetime_is_never_longer_than_asked(longest: float, one: float, other: float):
    """Chance takes up to a tenth away, and the more the larger it is."""
    assert longest * (1 - LIFETIME_SPREAD) <= lifetime(longest, one) <= longest
    assert (one <= other) or lifetime(longest, one) <= lifetime(longest, other)


def test_without_a_limit_a_lifetime_is_endless():
    """None is no limit, whatever chance says."""
    assert lifetime(None, 0.5) == inf


@given(BATCHES)
def test_usage_is_that_of_the_last_one_to_two_spans(batches: list[tuple[float, list[float], int]]):
    """What is younger than one span counts, what is older than two does not."""
    usage = PoolUsage(0.0, span=10.0)
    history: list[tuple[float, list[float], int]] = []
    now = 0.0
    for step, uses, refused in batches:
        now += step
        usage.add_all(uses, now, refused)
        history.append((now, uses, refused))
        window = usage.seconds(now)
        assert min(now, 10.0) <= window <= 20.0
        assert usage.total == sum(len(uses) for _, uses, _ in history)

        def wanted(since: float) -> int:
            return sum(len(uses) + refused for at, uses, refused in history if at > since)

        assert wanted(now - 10.0) <= usage.count(now)
        # An instant on the border may count or not.
        assert usage.count(now) <= wanted(now - 20.0 - 1e-9)
        assert usage.rate(now) == pytest.approx(usage.count(now) / window if window else 0.0)
        mean = usage.mean(now)
        assert mean is None or 0.0 <= mean <= 2.0


def test_an_idle_window_forgets():
    """After two spans without a use nothing is known any more."""
    usage = PoolUsage(0.0, span=10.0)
    usage.add_all([1.0] * 50, 5.0)
    assert (usage.mean(9.0), usage.count(19.0)) == (1.0, 50)
    assert (usage.mean(40.0), usage.count(40.0), usage.rate(40.0)) == (None, 0, 0.0)
    assert usage.total == 50


def test_many_uses_are_sampled_and_totals_exact():
    """A large batch costs the histogram no more than a small one."""
    usage = PoolUsage(0.0)
    usage.add_all([0.5] * (3 * AT_MOST), 1.0)
    assert usage.total == usage.count(1.0) == usage.latency.count == 3 * AT_MOST


@given(st.integers(20, 2000), quarters(40, least=1), st.integers(1, 50), st.integers(0, 100))
def test_advice_is_littles_law_with_headroom(uses: int, seconds: float, size: int, refused: int):
    """Throughput times time of use, half as much again; what was refused is throughput too."""
    usage = PoolUsage(0.0)
    usage.add_all([seconds] * uses, 10.0, refused)
    advice = advise(usage, 10.0, size)
    busy = (uses + refused) / 10.0 * seconds
    assert advice.size == max(1, ceil(round(busy * 1.5, 6)))
    assert advice.throughput == (uses + refused) / 10.0
    assert advice.use_time == pytest.approx(seconds)
    expected = {
        advice.size > size: f"raise max_size from {size}",
        advice.size < size: "could be lowered",
        advice.size == size: f"max_size={size} is right",
    }
    assert expected[True] in str(advice)


@pytest.mark.parametrize(
    ("uses", "now"), [(0, 10.0), (19, 10.0), (100, 0.5)], ids=["none", "few", "too soon"]
)
def test_too_little_is_no_ground_for_advice(uses: int, now: float):
    """It says so, and leaves the size as it is."""
    usage = PoolUsage(0.0)
    usage.add_all([1.0] * uses, now)
    advice = advise(usage, now, 7)
    assert advice.size == 7
    assert str(advice).startswith("too little is known")
