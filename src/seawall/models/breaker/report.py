"""Reports of one pod on a shared breaker: what it has counted and not yet sent to the others.

A report is a window of this pod's own calls that also keeps a journal. Its counters are never
reset: it remembers how much of them was reported. So successes can be counted without a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from seawall.models.windows import (
    FAILED,
    SLOW,
    CountWindow,
    TimeWindow,
    Totals,
    Window,
    WindowBucket,
)

ORDER: Final = (0, FAILED, FAILED | SLOW, SLOW)
"""The marks of the calls of an entry, in the order in which they are reported."""
MOST: Final = 64
"""Maximum number of separate entries of a journal. Further calls are summed up in one more."""
MOST_PLACES: Final = 1000
"""Maximum number of calls of an entry whose places are remembered: the latest ones.

Also the maximum number of changes that wait for a later message. Beyond it they are dropped.
"""


@dataclass(eq=False, slots=True)
class ReportPlace:
    """The place where a call was counted, in case its marks change later."""

    own: float  # the place in this pod's window
    marks: int
    entry: ReportEntry | None = None  # the entry that contains the call, until it is reported
    shared: int | None = None  # the place where the other pods counted the call, once they did


class ReportEntry:
    """Some calls, reported in this order: succeeded, failed, failed and slow, slow.

    If `late` is set, the entry has no calls: it reports new marks of a call that was already
    reported.
    """

    __slots__ = ("_before", "_places", "_sent", "_step", "calls", "late", "over")

    def __init__(
        self, step: int, *, plain: int = 0, late: ReportPlace | None = None, before: int = 0
    ) -> None:
        """Start with `plain` successes, or report that the call `late` had the marks `before`.

        `step` is the distance between the places of two calls, 0 if all are in one bucket.
        """
        self._step = step
        self.calls = [plain, 0, 0, 0]  # number of calls by their marks
        self.over = False  # whether the entry was sent. After that it does not change
        self._places: dict[int, ReportPlace] = {}  # by identity: two places may be equal as numbers
        self._sent: list[tuple[ReportPlace, int]] = []  # with their marks, which may change
        self.late = late
        self._before = before

    def add(self, place: ReportPlace) -> None:
        """Count a call."""
        self.calls[place.marks] += 1
        self._places[id(place)] = place
        place.entry = self
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]

    def change(self, place: ReportPlace, marks: int) -> None:
        """Give a call of this entry other marks."""
        if self.late is None:
            self.calls[place.marks] -= 1
            self.calls[marks] += 1
        place.marks = marks

    def as_row(self) -> tuple[int, int, int, int, int, int, int]:
        """Return the plain, failed, failed-and-slow and slow calls, then the change of a late call.

        The last three numbers are -1, 0, 0, or the shared place with the old and new marks. A
        change of a call that the others never counted is reported as a call.
        """
        late = self.late
        if late is None:
            plain, failed, both, slow = (self.calls[marks] for marks in ORDER)
            return plain, failed, both, slow, -1, 0, 0
        if late.shared is None:
            plain, failed, both, slow = (int(marks == late.marks) for marks in ORDER)
            return plain, failed, both, slow, -1, 0, 0
        return 0, 0, 0, 0, late.shared, self._before, late.marks

    def counted(self, place: int) -> None:
        """Record where the others counted these calls: the last of them at `place`."""
        if self.late is not None:
            self.late.shared = place
            return
        for marks in reversed(ORDER):
            same = [own for own, sent in self._sent if sent == marks]
            for back, own in enumerate(reversed(same)):
                own.shared = place - back * self._step
            place -= self.calls[marks] * self._step

    def end(self) -> None:
        """Close the entry for sending. A call that changes from now on needs another entry."""
        self.over = True
        self._sent = [(place, place.marks) for place in self._places.values()]
        for place in self._places.values():
            place.entry = None
        if self.late is not None:
            self.late.entry = None


class BreakerReport:
    """A window of this pod's own calls, and the journal of what it counted."""

    step: ClassVar[int] = 1

    def __init__(self, window: Window) -> None:
        self.window = window
        self._journal: list[ReportEntry] = []
        self._postponed: dict[ReportPlace, int] = {}
        """Changes for a later message, with the marks that the others know."""
        self.bad = 0  # number of failed or slow calls that were not reported yet

    def success(self, now: float, /) -> None:
        """Count a call that succeeded in time."""
        self.window.success(now)

    def add(self, marks: int, now: float, /) -> ReportPlace:
        """Count a call; return its place."""
        entry = self._open()
        place = ReportPlace(self.window.add(marks, now), marks)
        self._saw_own()
        entry.add(place)
        self.bad += bool(marks)
        return place

    def change(
        self, place: ReportPlace, before: int, after: int, now: float, /
    ) -> ReportPlace | None:
        """Give the call at `place` other marks; see `Window.change` for the result."""
        own = self.window.change(place.own, before, after, now)
        if own is not None:
            place.own = own
            self._saw_own()  # the window counts a new call, but the report contains a change
        elif after == before:
            return None
        self.bad += bool(after & ~before)
        if place.entry is not None and not place.entry.over:
            place.entry.change(place, after)
        else:
            self._change_late(place, after)
        return place if own is not None else None

    def _change_late(self, place: ReportPlace, after: int) -> None:
        """Report changed marks of a call that was already sent.

        If the journal is full, a removed mark waits for a later message. A new mark must not wait:
        it is reported as another call.
        """
        plain = self._plain()
        if plain:
            self._open(plain)
        before, place.marks = place.marks, after
        if place in self._postponed:
            return  # will be reported with the marks that it has by then
        if len(self._journal) < MOST:
            self._append_change(place, before)
        elif after & ~before:
            self._open().calls[after] += 1
        elif len(self._postponed) < MOST_PLACES:
            self._postponed[place] = before

    def _append_change(self, place: ReportPlace, before: int) -> None:
        place.entry = ReportEntry(self.step, late=place, before=before)
        self._journal.append(place.entry)

    def totals(self, now: float, /) -> Totals:
        """Sum up this pod's own window."""
        return self.window.totals(now)

    @property
    def fresh(self) -> bool:
        """Whether there is something to report."""
        return bool(self._journal) or self._unseen() > 0

    def take(self) -> list[ReportEntry]:
        """Return the entries to send, each once. Postponed changes come with the next call."""
        plain = self._plain()
        if plain:
            self._open(plain)
        taken, self._journal = self._journal, []
        self.bad = 0
        for entry in taken:
            entry.end()
        for place in list(self._postponed)[:MOST]:
            self._append_change(place, self._postponed.pop(place))
        return taken

    def drop(self) -> None:
        """Discard everything that is to be sent."""
        self._postponed.clear()
        self.take()

    def mark(self, now: float) -> None:
        """Treat everything counted so far as reported. `since_mark` covers what comes after."""

    def since_mark(self, now: float) -> Totals:
        """Return the totals of the calls in the window since `mark`, or since it was created."""
        raise NotImplementedError

    def _open(self, plain: int | None = None) -> ReportEntry:
        """Return the entry for the next call. It starts with the successes before that call."""
        plain = self._plain() if plain is None else plain
        journal = self._journal
        if len(journal) >= MOST and journal[-1].late is None:
            journal[-1].calls[0] += plain
        else:
            journal.append(ReportEntry(self.step, plain=plain))
        return journal[-1]

    def _plain(self) -> int:
        """Return the number of successes since the previous call of this method."""
        raise NotImplementedError

    def _unseen(self) -> int:
        raise NotImplementedError

    def _saw_own(self) -> None:
        """Exclude from the successes the call that was just counted in an entry."""


class TimeReport(BreakerReport):
    """The report of a time window. Any thread may add a success to its running bucket."""

    step = 0
    window: TimeWindow

    def __init__(self, window: TimeWindow) -> None:
        super().__init__(window)
        self.success = window.success  # type: ignore[method-assign]
        self._seen: dict[WindowBucket, int] = {}
        self._marked: dict[WindowBucket, Totals] = {}

    def mark(self, now: float) -> None:
        """Treat everything counted so far as reported."""
        live = self.window.live(now)
        self._marked = {one: Totals(one.calls, one.failures, one.slow) for one in live}

    def since_mark(self, now: float) -> Totals:
        """Return the totals of the calls in the window since `mark`."""
        live = self.window.live(now)
        marks = [self._marked[one] for one in live if one in self._marked]
        sums = zip(self.window.totals(now), *marks, strict=True)
        return Totals(*(max(0, total - sum(before)) for total, *before in sums))

    def _plain(self) -> int:
        plain, seen = 0, {}
        for bucket in self.window.buckets:
            calls = bucket.calls
            plain += calls - self._seen.get(bucket, 0)
            seen[bucket] = calls
        self._seen = seen
        return plain

    def _unseen(self) -> int:
        return sum(bucket.calls - self._seen.get(bucket, 0) for bucket in self.window.buckets)

    def _saw_own(self) -> None:
        bucket = self.window.bucket
        self._seen[bucket] = self._seen.get(bucket, 0) + 1


class CountReport(BreakerReport):
    """The report of a count window."""

    window: CountWindow

    def __init__(self, window: CountWindow) -> None:
        super().__init__(window)
        self._successes = 0
        self._seen = 0
        self._marked = 0

    def mark(self, now: float) -> None:
        """Treat everything counted so far as reported."""
        self._marked = self.window.counted

    def since_mark(self, now: float) -> Totals:
        """Return the totals of the calls in the window since `mark`."""
        return self.window.since(self._marked)

    def success(self, now: float, /) -> None:
        """Count a call that succeeded in time."""
        self._successes += 1
        self.window.success(now)

    def _plain(self) -> int:
        successes = self._successes
        plain, self._seen = successes - self._seen, successes
        return plain

    def _unseen(self) -> int:
        return self._successes - self._seen


def at_once(totals: Totals) -> tuple[int, int, int, int, int, int, int]:
    """Return all calls of a window in the form of one reported entry.

    A failure of a call that was reported before is reported as another call.
    """
    calls, failures, slow = totals
    calls = max(calls, failures, slow)
    both = max(0, failures + slow - calls)
    failed, only_slow = failures - both, slow - both
    return calls - failed - both - only_slow, failed, both, only_slow, -1, 0, 0


def reported(window: Window) -> BreakerReport | None:
    """Return a report on a new window, or None if that kind of window counts nothing."""
    if isinstance(window, TimeWindow):
        return TimeReport(window)
    return CountReport(window) if isinstance(window, CountWindow) else None
