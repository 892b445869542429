"""What a pod tells of its calls: all of it, once, in order; lock-free counting loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.breaker.report import (
    MOST,
    MOST_PLACES,
    ORDER,
    BreakerReport,
    CountReport,
    ReportEntry,
    ReportPlace,
    TimeReport,
    at_once,
    reported,
)
from seawall.models.windows import (
    FAILED,
    SLOW,
    CountWindow,
    NoWindow,
    TimeWindow,
    Totals,
    Window,
)

BOTH = FAILED | SLOW
WINDOWS = {"time": lambda: TimeWindow(10.0), "count": lambda: CountWindow(7)}
LARGE = {"time": lambda: TimeWindow(10.0), "count": lambda: CountWindow(10_000)}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["success", "success", "plain", "failure", "slow", "change", "tell", "lose"]
        ),
        st.integers(0, 3),
        st.integers(0, 9),
        st.sampled_from([0, FAILED, SLOW, BOTH]),
    ),
    max_size=60,
)


MARKS = {"plain": 0, "failure": FAILED, "slow": SLOW}


class Others:
    """The window of the others, which hears only what it is told."""

    def __init__(self, kind: str, windows: dict[str, Callable[[], Window]] = WINDOWS) -> None:
        self.window = windows[kind]()

    def totals(self, now: float) -> Totals:
        """Sum up the calls: those of a count window one by one, as the store does."""
        window = self.window
        return window.since(0) if isinstance(window, CountWindow) else window.totals(now)

    def hear(self, report: BreakerReport, now: float) -> None:
        """Take in all that there is to tell, and answer where it was counted."""
        for entry, place in self.process_replies(report, now):
            entry.counted(place)

    def process_replies(self, report: BreakerReport, now: float) -> list[tuple[ReportEntry, int]]:
        """Take in all that there is to tell; return the reply, which has not arrived yet."""
        reply = []
        for entry in report.take():
            *calls, place, before, after = entry.as_row()
            last = None
            if place >= 0:
                last = self.window.change(place, before, after, now)
            for marks, many in zip(ORDER, calls, strict=True):
                for _ in range(many):
                    last = self.window.add(marks, now)
            if last is not None:
                reply.append((entry, int(last)))
        return reply


class Marked:
    """Calls that a report has counted and that may be marked otherwise."""

    def __init__(self, report: BreakerReport) -> None:
        self.report = report
        self.calls: list[tuple[ReportPlace, int]] = []

    def add(self, marks: int, now: float) -> None:
        """Count a call."""
        self.calls.append((self.report.add(marks, now), marks))

    def change(self, which: int, after: int, now: float) -> None:
        """Mark one of them otherwise."""
        if self.calls:
            number = which % len(self.calls)
            place, before = self.calls[number]
            self.report.change(place, before, after, now)
            self.calls[number] = place, after


@pytest.mark.parametrize("kind", WINDOWS)
@given(steps=STEPS)
def test_told_at_every_step_the_others_count_the_same(kind, steps):
    """Whoever is told at each step has counted what this pod has, calls that change included."""
    report, others = reported(WINDOWS[kind]()), Others(kind)
    marked = Marked(report)
    now = 1000.0
    for action, wait, which, marks in steps:
        now += wait
        if action == "success":
            report.success(now)
        elif action in MARKS:
            marked.add(MARKS[action], now)
        elif action == "change":
            marked.change(which, marks, now)
        others.hear(report, now)
        assert not report.fresh
        assert others.window.totals(now) == report.totals(now)


@pytest.mark.parametrize("kind", LARGE)
@given(steps=STEPS)
def test_calls_that_change_before_the_reply_arrives_are_found_again(kind, steps):
    """The reply says where calls were counted by the marks that were sent, not by those of now."""
    report, others = reported(LARGE[kind]()), Others(kind, LARGE)
    marked = Marked(report)
    reply: list[tuple[ReportEntry, int]] = []
    for action, _wait, which, marks in [*steps, ("tell", 0, 0, 0), ("tell", 0, 0, 0)]:
        if action == "success":
            report.success(1000.0)
        elif action in MARKS:
            marked.add(MARKS[action], 1000.0)
        elif action == "change":
            marked.change(which, marks, 1000.0)
        else:
            for entry, place in reply:
                entry.counted(place)
            reply = others.process_replies(report, 1000.0)
    assert not report.fresh
    assert others.totals(1000.0) == report.totals(1000.0)


def test_a_failure_withdrawn_before_the_reply_arrives_is_withdrawn_there_too():
    """One call of two that failed succeeds at last, while the message is on its way."""
    report, others = reported(CountWindow(100)), Others("count", LARGE)
    for _ in range(50):
        marked = Marked(report)
        report.success(1.0)
        marked.add(FAILED, 1.0)
        reply = others.process_replies(report, 1.0)
        marked.change(0, 0, 1.0)
        for entry, place in reply:
            entry.counted(place)
        others.hear(report, 1.0)
    assert others.totals(1.0) == report.totals(1.0) == (100, 0, 0)


@pytest.mark.parametrize("kind", WINDOWS)
@given(steps=STEPS)
def test_told_now_and_then_nothing_is_told_twice(kind, steps):
    """Each call is told once, however seldom; what is lost on the way is not told again."""
    report = reported(WINDOWS[kind]())
    marked = Marked(report)
    calls = told = 0
    for action, _wait, which, marks in steps:
        if action == "success":
            report.success(1000.0)
            calls += 1
        elif action in MARKS:
            marked.add(MARKS[action], 1000.0)
            calls += 1
        elif action == "change":
            marked.change(which, marks, 1000.0)
        elif action in ("tell", "lose"):
            before = calls
            for entry in report.take():
                told += sum(entry.as_row()[:4])
                if entry.late is not None and entry.late.shared is None:
                    told -= 1  # the others never heard of that call, so it is told as a new one
                if action == "tell":
                    entry.counted(5)
            assert told == before


def test_many_entries_become_one():
    """A flood of failures is summed up, not told one by one."""
    report = reported(TimeWindow(10.0))
    places = []
    for number in range(10 * MOST):
        report.success(1.0)
        report.add(FAILED, 1.0)
        if number % 2:
            places.append(report.add(SLOW, 1.0))
    entries = report.take()
    assert len(entries) <= MOST
    sums = [sum(column) for column in zip(*(entry.as_row()[:4] for entry in entries), strict=True)]
    assert sums == [10 * MOST, 10 * MOST, 0, 5 * MOST]
    for place in places:
        report.change(place, SLOW, BOTH, 1.0)
    late = report.take()
    assert len(late) <= MOST + 1
    assert sum(sum(entry.as_row()[:3]) for entry in late) == 5 * MOST


@pytest.mark.parametrize("kind", LARGE)
def test_withdrawn_failures_beyond_one_message_come_with_the_next(kind):
    """A burst of calls that succeed at their second attempt leaves no failure with the others."""
    report, others = reported(LARGE[kind]()), Others(kind, LARGE)
    marked = Marked(report)
    for _ in range(5 * MOST):
        marked.add(FAILED, 1.0)
    others.hear(report, 1.0)
    for number in range(5 * MOST):
        marked.change(number, 0, 1.0)
    marked.change(-1, FAILED, 1.0)  # fails after all, while its change still waits
    report.success(1.0)
    messages = 0
    while report.fresh:
        assert len(report._journal) <= MOST + 1
        others.hear(report, 1.0)
        messages += 1
    assert messages == 5
    assert others.totals(1.0) == report.totals(1.0) == (5 * MOST + 1, 1, 0)


def test_changes_that_wait_are_bounded_and_can_be_dropped():
    """While nobody takes the journal, memory does not grow."""
    report = reported(TimeWindow(10.0))
    marked = Marked(report)
    for _ in range(MOST + 2 * MOST_PLACES):
        marked.add(FAILED, 1.0)
    report.take()
    for number in range(MOST + 2 * MOST_PLACES):
        marked.change(number, 0, 1.0)
    assert len(report._postponed) == MOST_PLACES
    report.drop()
    assert not report.fresh


def test_successes_counted_without_a_lock_are_all_told():
    """Threads that add to the running bucket meanwhile lose nothing, and nothing is told twice."""
    window = TimeWindow(10.0)
    report = reported(window)
    window.success(1.0)

    def add() -> None:
        for _ in range(20_000):
            window.bucket.calls += 1

    threads = [Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    told = failures = 0
    while any(thread.is_alive() for thread in threads):
        report.add(FAILED, 1.0)
        failures += 1
        told += sum(entry.calls[0] for entry in report.take())
    for thread in threads:
        thread.join()
    told += sum(entry.calls[0] for entry in report.take())
    assert told == 80_001
    assert window.totals(1.0) == (80_001 + failures, failures, 0)


def test_a_slow_call_that_left_the_own_window_is_told_as_late():
    """Where it was counted long ago it fails anew here; the others decide for themselves."""
    report = reported(TimeWindow(10.0))
    place = report.add(SLOW, 1.0)
    (entry,) = report.take()
    entry.counted(77)
    report.change(place, SLOW, BOTH, 50.0)
    (late,) = report.take()
    assert late.as_row() == (0, 0, 0, 0, 77, SLOW, BOTH)
    assert report.totals(50.0) == (1, 1, 1)


@pytest.mark.parametrize("totals", [(0, 0, 0), (9, 2, 3), (4, 3, 3), (2, 2, 2)])
def test_a_whole_window_can_be_told_at_once(totals):
    """No call is made up and none is lost, whichever of them were both failed and slow."""
    plain, failed, both, slow, *rest = at_once(Totals(*totals))
    assert min(plain, failed, both, slow) >= 0
    assert (plain + failed + both + slow, failed + both, slow + both) == totals
    assert rest == [-1, 0, 0]


def test_slow_calls_of_one_bucket_are_told_apart():
    """Two slow calls have the same number in a bucket; the one that fails is the one that did."""
    report = reported(TimeWindow(10.0))
    for _ in range(MOST):
        report.add(FAILED, 1.0)
    first, second = report.add(SLOW, 1.0), report.add(SLOW, 1.0)
    report.change(second, SLOW, BOTH, 1.0)
    *_others, entry = report.take()
    assert entry.as_row() == (0, 1, 1, 1, -1, 0, 0)
    entry.counted(7)
    report.change(first, SLOW, BOTH, 1.0)
    assert [late.as_row() for late in report.take()] == [(0, 0, 0, 0, 7, SLOW, BOTH)]


def test_a_journal_that_nobody_takes_stays_small():
    """While the store is away, no more than so many slow calls are remembered one by one."""
    report = reported(TimeWindow(10.0))
    places = [report.add(SLOW, 1.0) for _ in range(MOST + 3 * MOST_PLACES)]
    assert sum(len(entry._places) for entry in report._journal) < MOST + MOST_PLACES
    report.change(places[MOST], SLOW, BOTH, 1.0)  # one of those that are not remembered
    entries = report.take()
    sums = [sum(column) for column in zip(*(entry.as_row()[:4] for entry in entries), strict=True)]
    assert sums == [0, 0, 1, MOST + 3 * MOST_PLACES - 1]
    entries[-1].counted(9)
    report.change(places[MOST + 1], SLOW, BOTH, 1.0)
    report.change(places[-1], SLOW, BOTH, 1.0)
    assert [late.as_row() for late in report.take()] == [
        (0, 0, 1, 0, -1, 0, 0),
        (0, 0, 0, 0, 9, SLOW, BOTH),
    ]


@pytest.mark.parametrize("kind", WINDOWS)
@given(steps=STEPS, mark=st.integers(0, 30))
def test_since_a_mark_is_what_a_new_window_counts(kind, steps, mark):
    """What is summed up since a mark is what a window that began then would have."""
    report, later = reported(WINDOWS[kind]()), WINDOWS[kind]()
    now = 1000.0
    for number, (action, wait, _which, _marks) in enumerate(steps):
        now += wait
        if number == mark:
            report.mark(now)
            later = WINDOWS[kind]()
        if action == "success":
            report.success(now)
            later.success(now)
        elif action in MARKS:
            report.add(MARKS[action], now)
            later.add(MARKS[action], now)
        assert report.since_mark(now) == later.totals(now)


def test_a_late_failure_since_a_mark_is_a_call_of_its_own():
    """A slow call that was told and then fails can be told as one entry."""
    report = reported(TimeWindow(10.0))
    place = report.add(SLOW, 1.0)
    report.take()
    report.mark(1.0)
    report.change(place, SLOW, BOTH, 1.0)
    assert report.since_mark(1.0) == (0, 1, 0)
    assert at_once(report.since_mark(1.0)) == (0, 1, 0, 0, -1, 0, 0)


def test_only_windows_are_reported():
    """Without a window there is nothing to tell."""
    assert reported(NoWindow()) is None
    assert isinstance(reported(TimeWindow(1.0)), TimeReport)
    assert isinstance(reported(CountWindow(3)), CountReport)
