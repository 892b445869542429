"""Outcome windows: how many of the latest calls failed, and how many were slow.

`success` is the hot path and may run without a lock, concurrently with one locked writer. So each
place that writes is a straight sequence of plain reads and writes, without a call or a loop in
between: under the GIL no update is lost. (Free-threaded builds need the caller's lock here too.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from seawall import _checks as check

_BUCKETS = 10

FAILED: Final = 1
SLOW: Final = 2  # the marks of a call, as bits. A call that succeeded in time has none


class Totals(NamedTuple):
    """Totals of a window: all calls, and how many of them failed and were slow."""

    calls: int
    failures: int
    slow: int


class Window(Protocol):
    """Interface of a window, as the breaker uses it."""

    def success(self, now: float, /) -> None:
        """Count a call that succeeded in time."""

    def add(self, marks: int, now: float, /) -> Any:
        """Count a call with these marks; return its place, for `change`."""

    def change(self, place: Any, before: int, after: int, now: float, /) -> Any:
        """Give the call at `place` other marks.

        If it has left the window, count it again and return its new place; else return None.
        """

    def totals(self, now: float, /) -> Totals:
        """Return the totals of the window at `now`."""


class CallCount:
    """One call in a window, once for all attempts: where it was counted, with which marks."""

    __slots__ = ("marks", "over", "place", "window")

    def __init__(self) -> None:
        self.window: Window | None = None
        self.place: Any = None
        self.marks = 0
        self.over = False  # whether the call has ended. Attempts that were abandoned may still run

    def marks_in(self, window: Window) -> int:
        """Return the marks that the call has in `window`; none if it is not there."""
        return self.marks if self.window is window else 0

    def is_final_in(self, window: Window) -> bool:
        """Return whether later attempts no longer change how the call counts in `window`."""
        return self.over and self.window is window

    def mark(self, window: Window, marks: int, now: float) -> bool:
        """Put the call into `window` once, with these marks. Return whether that changes it."""
        if self.window is window:
            before, self.marks = self.marks, marks
            place = window.change(self.place, before, marks, now)
            if place is None:
                return marks != before
        else:
            place = window.add(marks, now)
        self.window, self.place, self.marks = window, place, marks
        return True


class Tracked:
    """The ticket of a call that counts as slow from `slow_at` on."""

    __slots__ = ("count", "generation", "slow_at")

    def __init__(self, generation: int, slow_at: float) -> None:
        self.generation = generation
        self.slow_at = slow_at
        self.count = CallCount()

    def __repr__(self) -> str:
        return f"Tracked(generation={self.generation}, slow_at={self.slow_at!r})"


class NoWindow:
    """A window that counts nothing, for a breaker without a ratio."""

    def success(self, _now: float, /) -> None:
        """Do nothing."""

    def add(self, _marks: int, _now: float, /) -> None:
        """Do nothing."""

    def change(self, _place: None, _before: int, _after: int, _now: float, /) -> None:
        """Do nothing."""

    def totals(self, _now: float, /) -> Totals:
        """Return zeros."""
        return Totals(0, 0, 0)


class CountWindow:
    """The latest `size` calls.

    While the ring holds neither a failure nor a slow call it is all zeros, and then it does not
    matter where in the ring the next call goes: a success only increments the counter.
    """

    __slots__ = ("_failures", "_next", "_ring", "_size", "_slow", "counted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._ring = bytearray(size)
        self._next = 0
        self.counted = 0  # number of calls ever counted
        self._failures = 0
        self._slow = 0

    def success(self, _now: float, /) -> None:
        """Count a call that succeeded in time."""
        if self._failures or self._slow:
            self._push(0)
        else:
            self.counted += 1

    def add(self, marks: int, _now: float, /) -> int:
        """Count a call; its place is its number among all calls ever counted."""
        self._push(marks)
        return self.counted

    def change(self, place: int, before: int, after: int, now: float, /) -> int | None:
        """Give the call at `place` other marks; if it has left the window, count it again."""
        age = self.counted - place
        if age >= self._size:
            return self.add(after, now)
        # A success that did not advance the ring found it all zeros, so any slot is equivalent.
        self._ring[(self._next - 1 - age) % self._size] = after
        self._failures += (after & FAILED) - (before & FAILED)
        self._slow += (after >> 1) - (before >> 1)
        return None

    def totals(self, _now: float, /) -> Totals:
        """Return the totals of the latest `size` calls."""
        return Totals(min(self.counted, self._size), self._failures, self._slow)

    def since(self, counted: int) -> Totals:
        """Return the totals of the calls in the window after the first `counted`."""
        calls = min(self.counted - counted, self._size)
        marks = [self._ring[(self._next - 1 - age) % self._size] for age in range(calls)]
        return Totals(calls, sum(mark & FAILED for mark in marks), sum(m >> 1 for m in marks))

    def _push(self, mark: int) -> None:
        slot = self._next
        old = self._ring[slot]
        self._ring[slot] = mark
        self._next = slot + 1 if slot + 1 < self._size else 0
        self.counted += 1
        self._failures += (mark & FAILED) - (old & FAILED)
        self._slow += (mark >> 1) - (old >> 1)


@dataclass(eq=False, slots=True)
class WindowBucket:
    """The calls of one tenth of a time window, up to the time `end`."""

    index: float
    end: float
    calls: int = 0
    failures: int = 0
    slow: int = 0


class TimeWindow:
    """The calls of the last `span`, in ten buckets: the current one and the nine before it.

    Nothing is ever subtracted: an old bucket is left out of the sum, so errors cannot accumulate.
    If the clock is set back, calls count in the current bucket; if by more than the span, the
    window starts again.
    """

    __slots__ = ("_width", "bucket", "buckets")

    def __init__(self, span: float) -> None:
        self._width = span / _BUCKETS
        self.bucket = WindowBucket(float("-inf"), float("-inf"))
        """The current bucket. Until its `end` a success may be added to its `calls` directly."""
        self.buckets: tuple[WindowBucket, ...] = ()  # oldest first; some may have left the window

    def success(self, now: float, /) -> None:
        """Count a call that succeeded in time."""
        if now >= self.bucket.end:
            self._turn(now)
        self.bucket.calls += 1

    def add(self, marks: int, now: float, /) -> float:
        """Count a call; its place is the number of its bucket."""
        self._turn(now)
        bucket = self.bucket
        bucket.calls += 1
        bucket.failures += marks & FAILED
        bucket.slow += marks >> 1
        return bucket.index

    def change(self, place: float, before: int, after: int, now: float, /) -> float | None:
        """Give a call of the bucket `place` other marks; if it has left, count it again."""
        for bucket in self.live(now):
            if bucket.index == place:
                bucket.failures += (after & FAILED) - (before & FAILED)
                bucket.slow += (after >> 1) - (before >> 1)
                return None
        return self.add(after, now)

    def totals(self, now: float, /) -> Totals:
        """Return the totals of the buckets that are still in the window."""
        calls = failures = slow = 0
        for bucket in self.live(now):
            calls += bucket.calls
            failures += bucket.failures
            slow += bucket.slow
        return Totals(calls, failures, slow)

    def live(self, now: float) -> list[WindowBucket]:
        """Return the buckets that are still in the window."""
        self._turn(now)
        newest = self.bucket.index
        return [kept for kept in self.buckets if newest - _BUCKETS < kept.index <= newest]

    def _turn(self, now: float) -> None:
        index = now // self._width
        if index == self.bucket.index:
            return
        fresh = WindowBucket(index, (index + 1) * self._width)
        # No call and no loop from here on: of two threads at a boundary, only one turns.
        ahead = index - self.bucket.index
        if ahead > 0 or ahead <= -_BUCKETS:
            self.bucket = fresh
            self.buckets = (*self.buckets[1 - _BUCKETS :], fresh)


def sample(
    window: float | None, window_calls: int | None, min_calls: int | None
) -> tuple[float | None, int | None, int]:
    """Validate the sample of a ratio. The default is 30 seconds and at least 20 calls."""
    if window_calls is None:
        seconds = check.seconds("window", 30.0 if window is None else window)
        return seconds, None, check.count("min_calls", 20 if min_calls is None else min_calls)
    if window is not None:
        raise ValueError("write either window (seconds) or window_calls (calls), not both")
    size = check.count("window_calls", window_calls)
    least = check.count("min_calls", min(20, size) if min_calls is None else min_calls)
    if least > size:
        raise ValueError(f"min_calls={least}: the window has {size} calls; write {size} or less")
    return None, size, least


def new_window(window: float | None, window_calls: int | None) -> Window:
    """Return an empty window of that size."""
    if window is not None:
        return TimeWindow(window)
    return NoWindow() if window_calls is None else CountWindow(window_calls)


ENDED: Final = TimeWindow(1.0)  # its bucket has ended: nothing is added to it directly
