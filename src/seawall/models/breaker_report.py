"""What one pod has counted for a breaker that pods share, and has not told the others yet.

A report is a window of this pod's own calls that also keeps a journal. Nothing is ever reset: what
was told is remembered as seen, so successes can be counted without a lock meanwhile.
"""

from __future__ import annotations

from typing import Final

from seawall.models.windows import Bucket, CountWindow, TimeWindow, Totals, Window

MOST: Final = 64
"""So many entries of a journal are told apart; more are summed up in the last."""

MOST_PLACES: Final = 1000
"""Of so many slow calls of an entry it is remembered where they were counted: of the latest."""


class Place(float):
    """Where a slow call was counted, should it fail later.

    As a number: in this pod's own window. `shared` is where the others counted it, once they did.
    """

    entry: Entry | None = None
    shared: int | None = None


class Entry:
    """Some calls: first the plain successes, then the failed, both failed and slow, then the slow.

    Or, where `late` is set, none: a slow call that was told before has failed.
    """

    __slots__ = ("_places", "both", "failed", "late", "over", "plain", "slow")

    def __init__(self, *, plain: int = 0, late: Place | None = None) -> None:
        """Begin with so many successes."""
        self.plain = plain
        self.failed = 0
        self.both = 0
        self.slow = 0
        self.over = False
        """Whether it was told: then it changes no more."""
        self._places: dict[int, Place] = {}  # by identity: as numbers, two may be equal
        self.late = late

    def add_slow(self, place: Place) -> None:
        """Count a slow call."""
        self.slow += 1
        self._places[id(place)] = place
        place.entry = self
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]

    def fail(self, place: Place) -> None:
        """Count a slow call of this entry as failed too."""
        self.slow -= 1
        self.both += 1
        self._places.pop(id(place), None)
        place.entry = None

    def told(self) -> tuple[int, int, int, int, int]:
        """Return plain, failed, both and slow calls, and the place of a late failure or -1.

        A late failure of a call of which the others never heard is a call that is both.
        """
        if self.late is None:
            return self.plain, self.failed, self.both, self.slow, -1
        if self.late.shared is None:
            return 0, 0, 1, 0, -1
        return 0, 0, 0, 0, self.late.shared

    def counted(self, place: int) -> None:
        """Note where the others counted the slow calls: the last of them at `place`."""
        for back, own in enumerate(reversed(self._places.values())):
            own.shared = self.spread(place, back)

    def end(self) -> None:
        """Be told: what fails from now on is told as late."""
        self.over = True
        for place in self._places.values():
            place.entry = None

    @staticmethod
    def spread(place: int, back: int) -> int:
        """Return the place of the call that came `back` calls earlier."""
        return place - back


class _InBucket(Entry):
    """Calls of a time window: all of an entry are in one bucket."""

    __slots__ = ()

    @staticmethod
    def spread(place: int, back: int) -> int:  # noqa: ARG004 - a bucket has one number
        return place


class Report:
    """A window of this pod's own, and the journal of what it counted."""

    entries: type[Entry] = Entry

    def __init__(self, window: Window) -> None:
        """Have nothing to tell."""
        self.window = window
        self._journal: list[Entry] = []
        self.bad = 0
        """How many failed or slow calls the others do not know of."""

    def success(self, now: float, /) -> None:
        """Count a call that succeeded in time."""
        self.window.success(now)

    def failure(self, now: float, /) -> None:
        """Count a call that failed."""
        entry = self._open()
        self.window.failure(now)
        self._saw_own()
        entry.failed += 1
        self.bad += 1

    def slow(self, now: float, /) -> float:
        """Count a slow call; the answer is its place, for `fail` should it fail later."""
        entry = self._open()
        place = Place(self.window.slow(now))
        self._saw_own()
        entry.add_slow(place)
        self.bad += 1
        return place

    def fail(self, place: float, now: float, /) -> None:
        """Mark the slow call at `place` as failed too; if it has left the window, count it anew."""
        plain = self._plain()
        if plain:
            self._open(plain)
        self._fail_own(place, now)
        self.bad += 1
        assert isinstance(place, Place)  # noqa: S101 - `slow` gave it
        if place.entry is not None and not place.entry.over:
            place.entry.fail(place)
        elif len(self._journal) < MOST:
            self._journal.append(Entry(late=place))
        else:
            self._open().failed += 1

    def totals(self, now: float, /) -> Totals:
        """Sum up this pod's own window."""
        return self.window.totals(now)

    @property
    def fresh(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._journal) or self._unseen() > 0

    def take(self) -> list[Entry]:
        """Return what there is to tell, once; what comes meanwhile is told next time."""
        plain = self._plain()
        if plain:
            self._open(plain)
        taken, self._journal = self._journal, []
        self.bad = 0
        for entry in taken:
            entry.end()
        return taken

    def mark(self, now: float) -> None:
        """Take all that was counted so far as told; `since_mark` is about what comes after it."""
        raise NotImplementedError

    def since_mark(self, now: float) -> Totals:
        """Sum up what the window has of the calls since `mark`, or since it began."""
        raise NotImplementedError

    def _open(self, plain: int | None = None) -> Entry:
        """Return the entry for the next call: one that begins with the successes before it."""
        plain = self._plain() if plain is None else plain
        journal = self._journal
        if len(journal) >= MOST and journal[-1].late is None:
            journal[-1].plain += plain
        else:
            journal.append(self.entries(plain=plain))
        return journal[-1]

    def _plain(self) -> int:
        """Return how many successes there were since the last look."""
        return 0

    def _unseen(self) -> int:
        return 0

    def _saw_own(self) -> None:
        """Leave out of the successes the call that was just counted otherwise."""

    def _fail_own(self, place: float, now: float) -> None:
        self.window.fail(place, now)


class TimeReport(Report):
    """The report of a time window, to whose running bucket anybody may add a success."""

    entries = _InBucket
    window: TimeWindow

    def __init__(self, window: TimeWindow) -> None:
        """Have nothing to tell."""
        super().__init__(window)
        self.success = window.success  # type: ignore[method-assign]
        self._seen: dict[Bucket, int] = {}
        self._marked: dict[Bucket, Totals] = {}

    def mark(self, now: float) -> None:
        """Take all that was counted so far as told."""
        self._marked = {one: _totals(one) for one in self.window.live(now)}

    def since_mark(self, now: float) -> Totals:
        """Sum up what the window has of the calls since then."""
        live = self.window.live(now)
        told = [self._marked[one] for one in live if one in self._marked]
        sums = zip(self.window.totals(now), *told, strict=True)
        return Totals(*(total - sum(before) for total, *before in sums))

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

    def _fail_own(self, place: float, now: float) -> None:
        self.window.totals(now)
        running = self.window.bucket
        failures = running.failures
        self.window.fail(place, now)
        if running.index != place and running.failures > failures:  # counted anew
            self._saw_own()


class CountReport(Report):
    """The report of a count window."""

    window: CountWindow

    def __init__(self, window: CountWindow) -> None:
        """Have nothing to tell."""
        super().__init__(window)
        self._successes = 0
        self._seen = 0
        self._marked = 0

    def mark(self, now: float) -> None:
        """Take all that was counted so far as told."""
        self._marked = self.window.counted

    def since_mark(self, now: float) -> Totals:
        """Sum up what the window has of the calls since then."""
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


def _totals(bucket: Bucket) -> Totals:
    return Totals(bucket.calls, bucket.failures, bucket.slow)


def at_once(totals: Totals) -> tuple[int, int, int, int, int]:
    """Return all calls of a window as one entry tells them.

    A failure of a slow call that was told before is told as a call of its own.
    """
    calls, failures, slow = totals
    calls = max(calls, failures, slow)
    both = max(0, failures + slow - calls)
    failed, only_slow = failures - both, slow - both
    return calls - failed - both - only_slow, failed, both, only_slow, -1


def reported(window: Window) -> Report | None:
    """Return a report on that window, which must be new; None where there is nothing to count."""
    if isinstance(window, TimeWindow):
        return TimeReport(window)
    return CountReport(window) if isinstance(window, CountWindow) else None
