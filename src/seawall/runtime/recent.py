"""A cached quantile of recent latency, re-read now and then: a read costs microseconds."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final

from seawall._forks import survives_fork
from seawall.models.histogram import LatencyWindow
from seawall.runtime.layers import Host

MOST: Final = 4096
"""Maximum number of samples that are not folded in; beyond it, some of the oldest are lost."""

REREAD: Final = 0.25
"""Seconds for which a cached number is good enough."""


class RecentStats:
    """The cached result of `read(now)`. Two threads may read at once; that does no harm."""

    __slots__ = ("_due", "_every", "_read", "_value")

    def __init__(self, read: Callable[[float], float | None], every: float = REREAD) -> None:
        self._read = read
        self._every = every
        self._due = float("-inf")
        self._value: float | None = None

    def __call__(self, now: float) -> float | None:
        """Return the number; read it again if it is old."""
        if now >= self._due:
            self._due = now + self._every
            self._value = self._read(now)
        return self._value


def service_time(host: Host, quantile: float = 0.5) -> RecentStats:
    """Return a cached `quantile` of the guard's latency; it is None if unknown."""
    return RecentStats(lambda now: host.stats.quantile(quantile, now))


class ResponseTimes:
    """How long calls took from this gate on, including waits further in.

    A call costs one append; the list is folded into a histogram when it is read.
    """

    def __init__(self, window: float) -> None:
        """Remember the last `window` to twice `window` seconds."""
        self.samples: list[float] = []
        self._latency = LatencyWindow(window)
        self._lock = Lock()
        survives_fork(self)

    def add(self, seconds: float) -> None:
        """Record the duration of a call."""
        samples = self.samples
        samples.append(seconds)
        if len(samples) > MOST:  # not read for a long time, and need not be
            del samples[: MOST // 2]

    def quantile(self, p: float) -> RecentStats:
        """Return a cached quantile `p` of the durations; None without samples."""
        known: list[float | None] = [None]

        def read(now: float) -> float | None:
            # If another thread is folding already, the last known value is good enough.
            if self._lock.acquire(blocking=False):
                try:
                    taken = self.samples[:]
                    del self.samples[: len(taken)]
                    self._latency.add_all(taken, now)
                    known[0] = self._latency.quantile(p, now)
                finally:
                    self._lock.release()
            return known[0]

        return RecentStats(read)

    def _after_fork(self) -> None:
        self._lock = Lock()
