"""Quantiles of latencies from a fixed number of counters.

A bucket holds all doubles with the same first sixteen bits: the sign, the exponent and four bits of
the fraction, so there are sixteen buckets between a number and its double. Reading those bits of
many samples at once needs no logarithm, and any float, even NaN, has a bucket.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add, mul
from struct import pack, unpack
from sys import byteorder
from typing import Final

from seawall import _checks as check

SHORTEST = 1e-6
LONGEST = 3600.0

USUAL = (0.5, 0.95, 0.99)  # the quantiles in snapshots
BOUNDS: Final = (*(step * 2.0**power for power in range(-11, 6) for step in (1.0, 1.5)), 64.0)
"""Upper bounds of the exported buckets in seconds, from 0.5 ms to 64 s.

All processes use the same ones, so their counts can be added. Each is also a bound between two of
the fine buckets, so a count is exact.
"""
SECONDS: Final = tuple(0.01 * 2**power for power in range(14))
"""Bounds for durations of language model calls, as in the OpenTelemetry conventions."""
TOKENS: Final = tuple(float(4**power) for power in range(14))
"""Bounds for token counts of language model calls, as in the OpenTelemetry conventions."""


def _bucket(value: float) -> int:
    bits: int = unpack("Q", pack("d", value))[0]
    return bits >> 48


def _middle(bucket: int) -> float:
    value: float = unpack("d", pack("Q", bucket << 48 | 1 << 47))[0]
    return value


_FIRST = _bucket(SHORTEST)
_LAST = _bucket(LONGEST)
_NEGATIVE = _bucket(-0.0)
_TOP_SIXTEEN_BITS = slice(3 if byteorder == "little" else 0, None, 4)
_MIDDLES = [_middle(bucket) for bucket in range(_FIRST, _LAST + 1)]
_EDGES = [0, *(_bucket(bound) - _FIRST for bound in BOUNDS), len(_MIDDLES)]


class Tally:
    """Counts of values by `bounds`, the last above all of them, and their sum. Both only grow."""

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.bounds = bounds
        self.counts: list[float] = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: Tally) -> None:
        """Add the values of another tally with the same bounds."""
        self.counts = list(map(add, self.counts, other.counts))
        self.sum += other.sum

    def snapshot(self) -> dict[str, object]:
        """Return the counts of the buckets, and the sum."""
        return {"counts": list(self.counts), "sum": self.sum}


class Histogram:
    """Counts of samples in seconds. Every quantile is within 4 % between 1 us and 1 h.

    Samples outside that range count as the nearer end of it; NaN counts as the upper one.
    """

    def __init__(self) -> None:
        self._counts: list[float] = [0] * (_LAST - _FIRST + 1)

    @property
    def count(self) -> float:
        """Total weight of the samples."""
        return sum(self._counts)

    @property
    def mean(self) -> float | None:
        """The mean, as precise as a quantile. None without samples."""
        return self.tally().sum / self.count if self.count else None

    def add(self, value: float, weight: float = 1) -> None:
        """Count one sample."""
        self.add_all((value,), weight)

    def add_all(self, values: Iterable[float], weight: float = 1) -> None:
        """Count many samples at once, several times cheaper than one by one."""
        counts = self._counts
        for bucket in array("H", array("d", values).tobytes())[_TOP_SIXTEEN_BITS]:
            if _FIRST <= bucket <= _LAST:
                counts[bucket - _FIRST] += weight
            elif _LAST < bucket < _NEGATIVE:
                counts[-1] += weight
            else:
                counts[0] += weight

    def quantile(self, p: float) -> float | None:
        """Return the value that a fraction `p` of the samples does not exceed, or None."""
        return self.quantiles((p,))[0]

    def quantiles(self, shares: Sequence[float]) -> list[float | None]:
        """Return the quantile of each of `shares`, for little more than the cost of one."""
        for p in shares:
            check.ratio("p", p, zero=True)
        cumulative = list(accumulate(self._counts))
        count = cumulative[-1]
        if not count:
            return [None] * len(shares)
        lowest = bisect_right(cumulative, 0)
        return [_middle(_FIRST + max(lowest, bisect_left(cumulative, p * count))) for p in shares]

    def merge(self, other: Histogram) -> None:
        """Add the samples of another histogram."""
        self._counts = list(map(add, self._counts, other._counts))

    def tally(self) -> Tally:
        """Return the samples in the exported buckets. Their sum is as precise as a quantile."""
        tally, counts = Tally(), self._counts
        if any(counts):
            tally.counts = [sum(counts[first:last]) for first, last in pairwise(_EDGES)]
            tally.sum = sum(map(mul, counts, _MIDDLES))
        return tally

    def snapshot(self) -> dict[str, float | None]:
        """Return the count and the usual quantiles."""
        p50, p95, p99 = self.quantiles(USUAL)
        return {"count": self.count, "p50": p50, "p95": p95, "p99": p99}


class LatencyWindow:
    """Latencies of the last `span` to twice `span` seconds, and a tally of all samples.

    There are two histograms: one fills while the previous one is still read. Samples that leave the
    window are added to the tally, so that a sample costs the same with and without one. `now` does
    not go back. A quantile costs tens of microseconds: on a hot path, cache it.
    """

    def __init__(self, span: float = 30.0) -> None:
        self.span = check.seconds("span", span)
        self._period = -inf
        self._current = Histogram()
        self._previous = Histogram()
        self._before = Tally()  # tally of everything counted before the current histogram
        self._tally: Tally | None = None

    @property
    def count(self) -> float:
        """Number of samples in the window at the last `now`."""
        return self._current.count + self._previous.count

    def add_all(self, values: Sequence[float], now: float, weight: float = 1) -> None:
        """Count samples that ended about `now`, each with `weight`."""
        self._rotate(now)
        if values:
            self._current.add_all(values, weight)
            self._tally = None

    def quantile(self, p: float, now: float) -> float | None:
        """Return the value that a fraction `p` of the window does not exceed, or None."""
        return self._both(now).quantile(p)

    def quantiles(self, shares: Sequence[float], now: float) -> list[float | None]:
        """Return the quantile of each of `shares`, for little more than the cost of one."""
        return self._both(now).quantiles(shares)

    def tally(self, now: float) -> Tally:
        """Return all samples since the start in the exported buckets. Do not modify the result."""
        self._rotate(now)
        if self._tally is None:
            self._tally = self._current.tally()
            self._tally.merge(self._before)
        return self._tally

    def snapshot(self, now: float) -> dict[str, object]:
        """Return the count and the usual quantiles of the window, and the tally of all samples."""
        return {**self._both(now).snapshot(), "histogram": self.tally(now).snapshot()}

    def _both(self, now: float) -> Histogram:
        self._rotate(now)
        both = Histogram()
        both._counts = list(map(add, self._previous._counts, self._current._counts))  # noqa: SLF001 - its own kind
        return both

    def _rotate(self, now: float) -> None:
        period = now // self.span
        if period <= self._period:
            return
        self._before.merge(self._current.tally())
        self._previous = self._current if period == self._period + 1 else Histogram()
        self._current = Histogram()
        self._period = period
