from __future__ import annotations

import sys
from random import Random
from threading import Thread

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from seawall.models.windows import CountWindow, NoWindow, TimeWindow, Totals, new_window, sample

QUICK = settings(max_examples=3000, database=None, phases=[Phase.generate])

OUTCOMES = st.sampled_from(["success", "failure", "slow", "slow then failed"])
STEP = st.tuples(st.integers(0, 40), OUTCOMES)
STEPS = st.lists(STEP, max_size=80) | st.lists(STEP, min_size=40, max_size=80)


class FullHistory:
    """Every call there ever was, as `[moment, failed, slow]`: too simple to be wrong."""

    def __init__(self):
        self.calls = []

    def add(self, moment, outcome):
        """Remember a call."""
        self.calls.append([moment, "fail" in outcome, "slow" in outcome])

    def totals(self, kept):
        """Sum up the calls that are kept."""
        return Totals(len(kept), sum(call[1] for call in kept), sum(call[2] for call in kept))


def record(window, outcome, now):
    """Tell a window of a call."""
    if outcome == "success":
        window.success(now)
    elif outcome == "failure":
        window.failure(now)
    else:
        place = window.slow(now)
        if outcome == "slow then failed":
            window.fail(place, now)


def count_window_is_exact(window, size, steps):
    """Tell whether a count window always agrees with the last `size` calls of the history."""
    history = FullHistory()
    for _, outcome in steps:
        record(window, outcome, 0)
        history.add(0, outcome)
        if window.totals(0) != history.totals(history.calls[-size:]):
            return False
    return True


def time_window_is_exact(window, width, steps):
    """Tell whether a time window always agrees with the running tenth and the nine before it."""
    history, now = FullHistory(), 1000
    for pause, outcome in steps:
        now += pause
        record(window, outcome, now)
        history.add(now // width, outcome)
        kept = [call for call in history.calls if call[0] > now // width - 10]
        if window.totals(now) != history.totals(kept):
            return False
    return True


# --- Exact ---


@given(st.integers(1, 12), STEPS)
def test_count_window_holds_the_latest_calls(size, steps):
    """A count window says what the last `size` calls of the full history say."""
    assert count_window_is_exact(CountWindow(size), size, steps)


@given(st.integers(1, 12), STEPS)
def test_time_window_holds_ten_buckets(width, steps):
    """A time window says what the full history says of the running bucket and the nine before."""
    assert time_window_is_exact(TimeWindow(10 * width), width, steps)


def test_a_ring_that_forgets_to_subtract_is_caught():
    """Without subtracting what leaves the ring, the history disagrees."""

    class Hoarding(CountWindow):
        def _push(self, mark):
            self._ring[self._next] = 0
            super()._push(mark)

    find(
        st.tuples(st.integers(1, 12), STEPS),
        lambda example: not count_window_is_exact(Hoarding(example[0]), *example),
        settings=QUICK,
        random=Random(1),
    )


def test_a_window_that_keeps_old_buckets_is_caught():
    """Without leaving old buckets out, the history disagrees."""

    class Hoarding(TimeWindow):
        def _live(self):
            return list(self._kept)

    find(
        st.tuples(st.integers(1, 12), STEPS),
        lambda example: not time_window_is_exact(Hoarding(10 * example[0]), *example),
        settings=QUICK,
        random=Random(1),
    )


@given(
    st.sampled_from([CountWindow, TimeWindow]),
    st.lists(st.tuples(st.sampled_from(["begin", "fail"]), st.integers(0, 3)), max_size=60),
)
def test_failures_are_never_more_than_calls(kind, steps):
    """A slow call that fails late, even after it left the window, is one call and one failure."""
    window, now, places = kind(5), 0, []
    for step, pause in steps:
        now += pause
        if step == "begin":
            places.append(window.slow(now))
        elif places:
            window.fail(places.pop(0), now)
        totals = window.totals(now)
        assert 0 <= totals.failures <= totals.calls
        assert 0 <= totals.slow <= totals.calls


# --- Late failures of slow calls ---


@pytest.mark.parametrize("kind", [CountWindow, TimeWindow])
def test_a_slow_call_that_fails_is_one_call(kind):
    """The failure of a call that was counted as slow adds no call."""
    window = kind(50)
    place = window.slow(0)
    window.success(1)
    window.fail(place, 2)
    assert window.totals(2) == Totals(calls=2, failures=1, slow=1)


def test_a_late_failure_leaves_the_count_window_with_its_call():
    """In a count window the failure is marked where the call was counted, and leaves with it."""
    window = CountWindow(3)
    place = window.slow(0)
    window.success(0)
    window.fail(place, 0)
    window.success(0)
    assert window.totals(0) == Totals(3, 1, 1)
    window.success(0)
    assert window.totals(0) == Totals(3, 0, 0)


def test_a_failure_after_its_call_left_is_a_new_call():
    """Where the slow call has left the window, its failure counts as a call of its own."""
    by_count, by_time = CountWindow(2), TimeWindow(10)
    place = by_count.slow(0)
    by_count.failure(0)
    by_count.failure(0)
    by_count.fail(place, 0)
    assert by_count.totals(0) == Totals(2, 2, 0)
    place = by_time.slow(0)
    by_time.fail(place, 50)
    assert by_time.totals(50) == Totals(1, 1, 0)


# --- Clocks ---


def test_a_clock_set_back_a_little_counts_into_the_running_bucket():
    """A reading from before the running bucket neither loses the call nor what was there."""
    window = TimeWindow(10)
    window.failure(100)
    window.failure(95)
    window.success(95)
    assert window.totals(95) == Totals(3, 2, 0)


def test_a_clock_set_back_by_more_than_the_window_starts_anew():
    """The window does not fill for an hour because the clock was set back by one."""
    window = TimeWindow(10)
    window.failure(5000)
    window.failure(1400)
    assert window.totals(1400) == Totals(1, 1, 0)
    window.success(1420)
    assert window.totals(1420) == Totals(1, 0, 0)


def test_a_clock_that_jumps_ahead_empties_the_window():
    """After a jump ahead only the new call is there."""
    window = TimeWindow(10)
    window.failure(0)
    window.success(10**9)
    assert window.totals(10**9) == Totals(1, 0, 0)


@given(st.floats(0.001, 1e4), st.lists(st.floats(0, 1e9), max_size=30))
def test_float_rounding_loses_no_call(span, moments):
    """Whatever the last bit of a float does at a boundary, the call just told is there."""
    window = TimeWindow(span)
    for moment in sorted(moments):
        before = window.totals(moment).calls
        window.success(moment)
        assert window.totals(moment).calls == before + 1


# --- Threads ---


@pytest.mark.parametrize("kind", [CountWindow, TimeWindow])
def test_unlocked_successes_are_not_lost(kind):
    """Threads that count successes at once, across bucket boundaries, lose none (with a GIL)."""
    window, each, threads = kind(10**6), 10_000, 4

    def work():
        for number in range(each):
            window.success(number // 500 * 40_000)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    lost = each * threads - window.totals(800_000).calls
    assert lost == 0 or not getattr(sys, "_is_gil_enabled", lambda: True)()


# --- Sizes ---


def test_windows_are_made_from_settings():
    """Seconds make a time window, calls a count window, neither none."""
    assert isinstance(new_window(30.0, None), TimeWindow)
    assert isinstance(new_window(None, 10), CountWindow)
    assert isinstance(new_window(None, None), NoWindow)


def test_no_window_counts_nothing():
    """Without a window every total is zero."""
    window = NoWindow()
    for outcome in ("success", "failure", "slow", "slow then failed"):
        record(window, outcome, 0)
    assert window.totals(0) == Totals(0, 0, 0)


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ((None, None, None), (30.0, None, 20)),
        ((10, None, 5), (10.0, None, 5)),
        ((None, 100, None), (None, 100, 20)),
        ((None, 8, None), (None, 8, 8)),
    ],
)
def test_what_is_not_said_about_the_sample_is_filled_in(given, filled):
    """A ratio is taken over 30 seconds and at least 20 calls, or as many as the window has."""
    assert sample(*given) == filled


@pytest.mark.parametrize(
    ("window", "calls", "least", "says"),
    [
        (30, 10, None, "either window"),
        (None, 10, 11, "write 10 or less"),
        (0, None, None, "window=0"),
        (None, 0, None, "write 1 or more"),
        (None, None, 0, "write 1 or more"),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused(window, calls, least, says):
    """The message says what to write instead."""
    with pytest.raises(ValueError, match=says):
        sample(window, calls, least)
