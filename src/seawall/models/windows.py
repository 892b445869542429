"""Outcome windows: how many of the latest calls failed, and how many were slow.

`success` is the hot path and may run without a lock, beside one locked writer. So each place that
writes is one straight run of plain reads and writes, without a call or a loop in between: under the
GIL nothing is lost. (Free-threaded builds need the caller's lock here too.)
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from seawall import _checks as check

_BUCKETS = 10

# How a call is marked in the ring of a count window; a plain success is 0.
_FAILED = 1
_SLOW = 2


class Totals(NamedTuple):
    """What a window holds: each call is in `calls` once, and in `failures` and `slow` if it was."""

    calls: int
    failures: int
    slow: int


class Window(Protocol):
    """What the breaker asks of a window."""

    def success(self, now: float, /) -> None:
        """Count a call that succeeded in time."""

    def failure(self, now: float, /) -> None:
        """Count a call that failed."""

    def slow(self, now: float, /) -> float:
        """Count a slow call; the answer is its place, for `fail` should it fail later."""

    def fail(self, place: float, now: float, /) -> None:
        """Mark the slow call at `place` as failed too; if it has left the window, count it anew."""

    def totals(self, now: float, /) -> Totals:
        """Sum up the window as it stands at `now`."""


class Tracked:
    """The ticket of a call that is slow from `slow_at` on: counted in a window, or not yet."""

    __slots__ = ("counted_in", "generation", "place", "slow_at")

    def __init__(self, generation: int, slow_at: float) -> None:
        self.generation = generation
        self.slow_at = slow_at
        self.counted_in: Window | None = None
        self.place: float = 0

    def __repr__(self) -> str:
        return f"Tracked(generation={self.generation}, slow_at={self.slow_at!r})"


class NoWindow:
    """No window at all: for a breaker without a ratio."""

    __slots__ = ()

    def success(self, _now: float, /) -> None:
        """Count nothing."""

    def failure(self, _now: float, /) -> None:
        """Count nothing."""

    def slow(self, _now: float, /) -> float:
        """Count nothing."""
        return 0

    def fail(self, _place: float, _now: float, /) -> None:
        """Count nothing."""

    def totals(self, _now: float, /) -> Totals:
        """Answer zeros."""
        return Totals(0, 0, 0)


class CountWindow:
    """The latest `size` calls.

    While the ring holds neither a failure nor a slow call it is all zeros, and then it does not
    matter where in the ring the next call goes: a success only needs the counter.
    """

    __slots__ = ("_counted", "_failures", "_next", "_ring", "_size", "_slow")

    def __init__(self, size: int) -> None:
        self._size = size
        self._ring = bytearray(size)
        self._next = 0
        self._counted = 0
        self._failures = 0
        self._slow = 0

    def success(self, _now: float, /) -> None:
        """Count a call that succeeded in time."""
        if self._failures or self._slow:
            self._push(0)
        else:
            self._counted += 1

    def failure(self, _now: float, /) -> None:
        """Count a call that failed."""
        self._push(_FAILED)

    def slow(self, _now: float, /) -> float:
        """Count a slow call; the answer is its place: its number among all calls ever counted."""
        self._push(_SLOW)
        return self._counted

    def fail(self, place: float, now: float, /) -> None:
        """Mark the slow call at `place` as failed too; if it has left the window, count it anew."""
        number = int(place)
        age = self._counted - number
        if age >= self._size:
            self.failure(now)
        else:
            # Since that call the window was never clean, so every later one moved the ring on.
            self._ring[(self._next - 1 - age) % self._size] |= _FAILED
            self._failures += 1

    def totals(self, _now: float, /) -> Totals:
        """Sum up the latest `size` calls."""
        return Totals(min(self._counted, self._size), self._failures, self._slow)

    @property
    def counted(self) -> int:
        """How many calls were ever counted."""
        return self._counted

    def since(self, counted: int) -> Totals:
        """Sum up the calls of the window that came after so many."""
        calls = min(self._counted - counted, self._size)
        marks = [self._ring[(self._next - 1 - age) % self._size] for age in range(calls)]
        return Totals(calls, sum(mark & _FAILED for mark in marks), sum(m >> 1 for m in marks))

    def _push(self, mark: int) -> None:
        slot = self._next
        old = self._ring[slot]
        self._ring[slot] = mark
        self._next = slot + 1 if slot + 1 < self._size else 0
        self._counted += 1
        self._failures += (mark & _FAILED) - (old & _FAILED)
        self._slow += (mark >> 1) - (old >> 1)


class Bucket:
    """The calls of one tenth of a time window, up to the instant `end`."""

    __slots__ = ("calls", "end", "failures", "index", "slow")

    def __init__(self, index: float, end: float) -> None:
        """Have counted nothing."""
        self.index = index
        self.end = end
        self.calls = 0
        self.failures = 0
        self.slow = 0


class TimeWindow:
    """The calls of the last `span`, in ten buckets: the running one and the nine before it.

    Nothing is ever subtracted: a bucket too old is left out of the sum, so no error can stay.
    A clock set back counts into the running bucket; set back by more than the span, it starts anew.
    """

    __slots__ = ("_kept", "_width", "bucket")

    def __init__(self, span: float) -> None:
        self._width = span / _BUCKETS
        self.bucket = Bucket(float("-inf"), float("-inf"))
        """The running one. Until its `end` a success may be added to its `calls` directly."""
        self._kept: tuple[Bucket, ...] = ()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The latest ones, oldest first; some may have left the window."""
        return self._kept

    def success(self, now: float, /) -> None:
        """Count a call that succeeded in time."""
        if now >= self.bucket.end:
            self._turn(now)
        self.bucket.calls += 1

    def failure(self, now: float, /) -> None:
        """Count a call that failed."""
        self._turn(now)
        bucket = self.bucket
        bucket.calls += 1
        bucket.failures += 1

    def slow(self, now: float, /) -> float:
        """Count a slow call; the answer is its place: the number of its bucket."""
        self._turn(now)
        bucket = self.bucket
        bucket.calls += 1
        bucket.slow += 1
        return bucket.index

    def fail(self, place: float, now: float, /) -> None:
        """Mark the slow call at `place` as failed too; if it has left the window, count it anew."""
        self._turn(now)
        for bucket in self._live():
            if bucket.index == place:
                bucket.failures += 1
                return
        self.failure(now)

    def totals(self, now: float, /) -> Totals:
        """Sum up the buckets that are still in the window."""
        calls = failures = slow = 0
        for bucket in self.live(now):
            calls += bucket.calls
            failures += bucket.failures
            slow += bucket.slow
        return Totals(calls, failures, slow)

    def live(self, now: float) -> list[Bucket]:
        """Return the buckets that are still in the window."""
        self._turn(now)
        return self._live()

    def _live(self) -> list[Bucket]:
        newest = self.bucket.index
        return [kept for kept in self._kept if newest - _BUCKETS < kept.index <= newest]

    def _turn(self, now: float) -> None:
        index = now // self._width
        if index == self.bucket.index:
            return
        fresh = Bucket(index, (index + 1) * self._width)
        # From here no call and no loop: of two threads at a boundary one turns, the other sees it.
        ahead = index - self.bucket.index
        if ahead > 0 or ahead <= -_BUCKETS:
            self.bucket = fresh
            self._kept = (*self._kept[1 - _BUCKETS :], fresh)


def sample(
    window: float | None, window_calls: int | None, min_calls: int | None
) -> tuple[float | None, int | None, int]:
    """Check over which calls a ratio is taken: 30 seconds and 20 calls, if nothing is said."""
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


ENDED: Final = TimeWindow(1.0)
"""A window whose running bucket is over: nothing can be added to it directly."""
