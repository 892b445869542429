from __future__ import annotations

import sys
from random import Random
from threading import Thread

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from seawall.models.windows import (
    FAILED,
    SLOW,
    CallCount,
    CountWindow,
    NoWindow,
    TimeWindow,
    Totals,
    new_window,
    sample,
)

BOTH = FAILED | SLOW

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
        window.add(FAILED, now)
    else:
        place = window.add(SLOW, now)
        if outcome == "slow then failed":
            window.change(place, SLOW, BOTH, now)


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
        def live(self, now):
            self._turn(now)
            return list(self.buckets)

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
            places.append(window.add(SLOW, now))
        elif places:
            window.change(places.pop(0), SLOW, BOTH, now)
        totals = window.totals(now)
        assert 0 <= totals.failures <= totals.calls
        assert 0 <= totals.slow <= totals.calls


# --- Late failures of slow calls ---


@pytest.mark.parametrize("kind", [CountWindow, TimeWindow])
def test_a_slow_call_that_fails_is_one_call(kind):
    """The failure of a call that was counted as slow adds no call."""
    window = kind(50)
    place = window.add(SLOW, 0)
    window.success(1)
    window.change(place, SLOW, BOTH, 2)
    assert window.totals(2) == Totals(calls=2, failures=1, slow=1)


def test_a_late_failure_leaves_the_count_window_with_its_call():
    """In a count window the failure is marked where the call was counted, and leaves with it."""
    window = CountWindow(3)
    place = window.add(SLOW, 0)
    window.success(0)
    window.change(place, SLOW, BOTH, 0)
    window.success(0)
    assert window.totals(0) == Totals(3, 1, 1)
    window.success(0)
    assert window.totals(0) == Totals(3, 0, 0)


def test_a_failure_after_its_call_left_is_a_new_call():
    """Where the slow call has left the window, it is counted anew: as slow, and as failed."""
    by_count, by_time = CountWindow(2), TimeWindow(10)
    place = by_count.add(SLOW, 0)
    by_count.add(FAILED, 0)
    by_count.add(FAILED, 0)
    by_count.change(place, SLOW, BOTH, 0)
    assert by_count.totals(0) == Totals(2, 2, 1)
    place = by_time.add(SLOW, 0)
    by_time.change(place, SLOW, BOTH, 50)
    assert by_time.totals(50) == Totals(1, 1, 1)


# --- Verdicts that are replaced ---

CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["success", "mark", "mark"]),
        st.integers(0, 30),
        st.integers(0, 4),
        st.sampled_from([0, FAILED, SLOW, BOTH]),
    ),
    max_size=60,
)


def marked_calls_are_counted_once(window, steps):
    """Tell whether a window has each of five calls at most once, with its latest marks.

    What the window holds is compared with a list of calls: `[place, marks]`, in the order of their
    counting. The place is the bucket, or the number of the call.
    """
    by_time, now, counts = isinstance(window, TimeWindow), 1000, {}
    history, latest = [], {}

    def holds(record):
        if by_time:
            return record[0] > now // 5 - 10
        return any(record is kept for kept in history[-4:])

    for action, pause, call, marks in steps:
        now += pause
        if action == "success":
            window.success(now)
            history.append([now // 5, 0])
        else:
            counts.setdefault(call, CallCount()).mark(window, marks, now)
            record = latest.get(call)
            if record is None or not holds(record):
                record = latest[call] = [now // 5, 0]
                history.append(record)
            record[1] = marks
        kept = [record for record in history if holds(record)]
        failed = sum(record[1] & FAILED for record in kept)
        slow = sum(record[1] >> 1 for record in kept)
        if window.totals(now) != Totals(len(kept), failed, slow):
            return False
    return True


@pytest.mark.parametrize("make", [lambda: TimeWindow(50), lambda: CountWindow(4)])
@given(steps=CHANGES)
def test_a_call_whose_marks_change_is_in_the_window_once(make, steps):
    """However often a call is marked anew, the window holds it once, as it was marked last."""
    assert marked_calls_are_counted_once(make(), steps)


@pytest.mark.parametrize("kind", [TimeWindow, CountWindow])
def test_a_window_that_counts_each_mark_is_caught(kind):
    """Where a change adds another call, the history disagrees."""

    class Adding(kind):
        def change(self, _place, _before, after, now):
            return self.add(after, now)

    size = 50 if kind is TimeWindow else 4
    find(
        CHANGES,
        lambda steps: not marked_calls_are_counted_once(Adding(size), steps),
        settings=QUICK,
        random=Random(1),
    )


# --- Clocks ---


def test_a_clock_set_back_a_little_counts_into_the_running_bucket():
    """A reading from before the running bucket neither loses the call nor what was there."""
    window = TimeWindow(10)
    window.add(FAILED, 100)
    window.add(FAILED, 95)
    window.success(95)
    assert window.totals(95) == Totals(3, 2, 0)


def test_a_clock_set_back_by_more_than_the_window_starts_anew():
    """The window does not fill for an hour because the clock was set back by one."""
    window = TimeWindow(10)
    window.add(FAILED, 5000)
    window.add(FAILED, 1400)
    assert window.totals(1400) == Totals(1, 1, 0)
    window.success(1420)
    assert window.totals(1420) == Totals(1, 0, 0)


def test_a_clock_that_jumps_ahead_empties_the_window():
    """After a jump ahead only the new call is there."""
    window = TimeWindow(10)
    window.add(FAILED, 0)
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
