"""A quantile of recent latency, read now and then and kept: reading it costs microseconds."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final

from seawall.models.histogram import LatencyWindow
from seawall.runtime.layers import Host
from seawall.runtime.mutex import survives_fork

MOST: Final = 4096
"""Samples that may lie about until somebody folds them in; of more, some of the oldest are lost."""

REREAD: Final = 0.25
"""Seconds for which a number that was read is good enough."""


class Recent:
    """What `read(now)` returned lately. Two threads may read at once; that does no harm."""

    __slots__ = ("_due", "_every", "_read", "_value")

    def __init__(self, read: Callable[[float], float | None], every: float = REREAD) -> None:
        """Read again after `every` seconds."""
        self._read = read
        self._every = every
        self._due = float("-inf")
        self._value: float | None = None

    def __call__(self, now: float) -> float | None:
        """Return the number, read again if it is old."""
        if now >= self._due:
            self._due = now + self._every
            self._value = self._read(now)
        return self._value


def service_time(host: Host, quantile: float = 0.5) -> Recent:
    """Return the latency that a share `quantile` of the guard's calls stayed below, if any."""
    return Recent(lambda now: host.stats.quantile(quantile, now))


class ResponseTimes:
    """How long calls took from this gate on, waiting further in included.

    A call costs one append; the list is folded into a histogram when somebody wants to know.
    """

    def __init__(self, window: float) -> None:
        """Remember the last `window` to twice `window` seconds."""
        self.samples: list[float] = []
        self._latency = LatencyWindow(window)
        self._lock = Lock()
        survives_fork(self)

    def add(self, seconds: float) -> None:
        """Note what a call took."""
        samples = self.samples
        samples.append(seconds)
        if len(samples) > MOST:  # nobody has asked for long, and need not at all
            del samples[: MOST // 2]

    def quantile(self, p: float) -> Recent:
        """Return what a share `p` of them stayed below; None without samples."""
        known: list[float | None] = [None]

        def read(now: float) -> float | None:
            # If somebody is at it already, what was known is good enough.
            if self._lock.acquire(blocking=False):
                try:
                    taken = self.samples[:]
                    del self.samples[: len(taken)]
                    self._latency.add_all(taken, now)
                    known[0] = self._latency.quantile(p, now)
                finally:
                    self._lock.release()
            return known[0]

        return Recent(read)

    def _after_fork(self) -> None:
        self._lock = Lock()
