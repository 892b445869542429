from __future__ import annotations

from collections import deque
from math import ceil, inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.histogram import BOUNDS, LONGEST, SHORTEST, Histogram, LatencyWindow, Tally

PRECISION = 0.04
IN_RANGE = st.floats(SHORTEST, LONGEST) | st.floats(-6, 3.5).map(lambda power: 10**power)
ANY = IN_RANGE | st.floats()
SHARES = st.floats(0, 1) | st.sampled_from([0, 0.5, 0.95, 0.99, 1])


def filled(values, weight=1):
    """Return a histogram of these samples."""
    histogram = Histogram()
    histogram.add_all(values, weight)
    return histogram


def exact(values, p):
    """Return the quantile by nearest rank, from the sorted samples."""
    return sorted(values)[max(0, ceil(p * len(values)) - 1)]


# --- The histogram ---


@given(st.lists(IN_RANGE, min_size=1), SHARES)
def test_a_quantile_is_nearly_that_of_the_sorted_samples(values, p):
    """Every quantile of any samples is within the promised precision."""
    assert filled(values).quantile(p) == pytest.approx(exact(values, p), rel=PRECISION)


@given(st.lists(IN_RANGE, min_size=1))
def test_the_mean_is_nearly_that_of_the_samples(values):
    """The mean has the same precision."""
    assert filled(values).mean == pytest.approx(sum(values) / len(values), rel=PRECISION)


@given(st.lists(IN_RANGE, min_size=1), st.integers(1, 5))
def test_a_weight_is_so_many_samples(values, weight):
    """A sample that stands for several counts as several."""
    assert filled(values, weight)._counts == filled(values * weight)._counts
    assert filled(values, weight).count == len(values) * weight


@given(st.lists(ANY))
def test_one_by_one_is_the_same_as_all_at_once(values):
    """The bulk way is only quicker."""
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram._counts == filled(values)._counts


@given(st.lists(ANY))
def test_any_float_counts_once_and_the_size_is_fixed(values):
    """No sample raises, is lost or makes the histogram grow."""
    histogram = filled(values)
    assert histogram.count == len(values)
    assert len(histogram._counts) == len(Histogram()._counts) < 520


@pytest.mark.parametrize(
    ("value", "end"),
    [
        (0.0, SHORTEST),
        (-0.0, SHORTEST),
        (-5.0, SHORTEST),
        (-inf, SHORTEST),
        (1e-300, SHORTEST),
        (5e-324, SHORTEST),
        (1e5, LONGEST),
        (inf, LONGEST),
        (nan, LONGEST),
    ],
)
def test_samples_out_of_range_count_as_the_nearer_end(value, end):
    """A clock that jumped spoils no more than its own sample."""
    histogram = filled([value, value, 1.0])
    assert histogram.quantile(0.0 if end == SHORTEST else 1.0) == pytest.approx(end, rel=PRECISION)
    assert histogram.quantile(0.5) == pytest.approx(end, rel=PRECISION)
    assert histogram.count == 3


@given(st.lists(ANY, min_size=1), SHARES, SHARES)
def test_quantiles_do_not_fall(values, p, q):
    """A greater share never has a smaller quantile."""
    histogram = filled(values)
    assert histogram.quantile(min(p, q)) <= histogram.quantile(max(p, q))


@given(st.lists(ANY), st.lists(SHARES))
def test_several_quantiles_at_once_are_those_of_each(values, shares):
    """To ask for several together gives the same, for the price of one."""
    histogram = filled(values)
    assert histogram.quantiles(shares) == [histogram.quantile(p) for p in shares]


@given(st.lists(IN_RANGE), st.lists(IN_RANGE))
def test_merging_is_counting_both(some, others):
    """A merged histogram is that of all samples."""
    histogram, other = filled(some), filled(others)
    histogram.merge(other)
    assert histogram._counts == filled(some + others)._counts
    assert other._counts == filled(others)._counts


def test_an_empty_histogram_knows_nothing():
    """Without samples there is no quantile, rather than a zero."""
    histogram = Histogram()
    assert histogram.quantile(0.5) is None
    assert histogram.mean is None
    assert histogram.snapshot() == {"count": 0, "p50": None, "p95": None, "p99": None}


def test_the_snapshot_has_the_usual_quantiles():
    """One to a hundred milliseconds have the quantiles one expects."""
    histogram = filled([n / 1000 for n in range(1, 101)])
    expected = {"count": 100, "p50": 0.050, "p95": 0.095, "p99": 0.099}
    assert histogram.snapshot() == pytest.approx(expected, rel=PRECISION)


def test_any_iterable_of_samples_will_do():
    """A list, a deque, a generator, or whole numbers."""
    for values in ([1, 2], deque([1, 2]), (n for n in (1, 2)), (1.0, 2.0)):
        assert filled(values)._counts == filled([1.0, 2.0])._counts


@pytest.mark.parametrize("p", [-0.1, 1.1, 95, nan])
def test_the_share_is_checked(p):
    """A percentage where a share is wanted raises."""
    with pytest.raises(ValueError, match=r"^p=.*a share"):
        Histogram().quantile(p)


# --- The window ---


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 29.0, 30.0, 31.0, 90.0]), IN_RANGE), min_size=1),
    SHARES,
)
def test_a_window_holds_this_span_and_the_one_before(steps, p):
    """Its quantiles are those of the samples since the last span began, and of no others."""
    window, now, samples = LatencyWindow(span=30.0), 1000.0, []
    for step, value in steps:
        now += step
        window.add_all([value], now)
        samples.append((now, value))
        recent = [sample for at, sample in samples if now // 30 - at // 30 <= 1]
        assert window.quantile(p, now) == pytest.approx(exact(recent, p), rel=PRECISION)
        assert window.count == len(recent)
        assert all(at >= now - 60 for at, _ in samples[-len(recent) :])


def test_a_window_forgets():
    """A sample is seen for one span at least and for two at most."""
    window = LatencyWindow(span=30.0)
    window.add_all([0.5], now=59.0)
    assert window.quantile(0.5, now=60.0) == pytest.approx(0.5, rel=PRECISION)
    assert window.quantile(0.5, now=89.0) == pytest.approx(0.5, rel=PRECISION)
    assert window.quantile(0.5, now=90.0) is None
    assert window.count == 0


def test_a_quiet_hour_leaves_nothing():
    """After a long silence both halves are dropped, not the older one alone."""
    window = LatencyWindow()
    window.add_all([0.5] * 10, now=10.0)
    window_left = window.snapshot(now=3600.0)
    assert {key: window_left[key] for key in Histogram().snapshot()} == Histogram().snapshot()


def test_a_clock_read_late_counts_now():
    """A moment that is a little old turns nothing back."""
    window = LatencyWindow(span=30.0)
    window.add_all([1.0], now=61.0)
    window.add_all([1.0], now=59.0)
    assert window.snapshot(now=61.0)["count"] == 2


def test_reading_a_window_does_not_change_it():
    """Quantiles come from a copy."""
    window = LatencyWindow()
    window.add_all([1.0], now=1.0)
    window.add_all([2.0], now=31.0)
    assert window.snapshot(now=31.0) == window.snapshot(now=31.0)
    assert window.count == 2


def test_the_span_of_a_window_is_a_time():
    """A window without a length is refused."""
    with pytest.raises(ValueError, match=r"^span=0"):
        LatencyWindow(span=0)


# --- What is exported ---


@given(st.lists(IN_RANGE.filter(lambda value: value not in BOUNDS)))
def test_exported_buckets_hold_what_is_below_their_bounds(values):
    """Each bound is one of the fine buckets too, so no sample is counted on the wrong side."""
    tally = Tally()
    for value in values:
        tally.add(value)
    assert filled(values).tally().counts == tally.counts
    assert filled(values).tally().sum == pytest.approx(sum(values), rel=PRECISION)


@given(st.lists(st.tuples(IN_RANGE, st.floats(0, 200)), max_size=30), st.integers(1, 5))
def test_a_window_forgets_and_its_tally_does_not(samples, weight):
    """Whenever samples come and whenever somebody looks, all of them are counted once."""
    window, now, everything = LatencyWindow(span=30.0), 0.0, []
    before = window.tally(now)
    for value, pause in samples:
        now += pause
        window.add_all([value], now, weight)
        everything.append(value)
        after = window.tally(now)
        assert after.counts == filled(everything, weight).tally().counts
        assert all(new >= old for new, old in zip(after.counts, before.counts, strict=True))
        assert after.sum >= before.sum
        before = after


def test_tallies_of_processes_can_be_added():
    """The bounds are the same everywhere, so counts and sums are."""
    one, two = Tally(), Tally()
    one.add(0.1)
    two.add(0.1)
    two.add(100.0)
    one.merge(two)
    assert sum(one.counts) == 3
    assert one.counts[-1] == 1
    assert one.snapshot() == {"counts": one.counts, "sum": pytest.approx(100.2)}
