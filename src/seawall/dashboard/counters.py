"""Rates of counters, computed from their values at each reading.

Promises:
- The first reading of a counter gives 0. A counter that fell (its object was replaced) counts from
  0.
- Rates are never divided by a time of 0: two readings at one instant compare with the same earlier
  one. So do two that are less than `apart` seconds apart, as one call in a very short time would
  give a high rate.
- Counters that are no longer read are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import Any, Final

from seawall.dashboard.bounds import number

RECENT: Final = 5.0
"""Seconds that count as recent: a rule over one second would flicker."""
LONG: Final = 20.0
"""Seconds for which counters are remembered: shares of infrequent calls need that long."""
MOST_LOOKS: Final = 64
"""Maximum number of remembered readings, however frequent they are."""


class Counters:
    """The counters of the last readings. Not safe for concurrent use."""

    def __init__(self, apart: float = 0.0) -> None:
        self._apart = apart
        self._now = 0.0
        self._current: dict[Hashable, float] | None = None
        self._past: deque[tuple[float, dict[Hashable, float]]] = deque(maxlen=MOST_LOOKS)
        self._recent = 0
        """Index of the first recent reading."""
        self._before: tuple[float, dict[Hashable, float]] | None = None
        """The reading that this one is compared with."""

    def begin(self, now: float) -> None:
        """Start a reading at `now` of a monotonic clock; time never goes back."""
        now = max(now, self._now)
        if self._current is not None and now > self._now:
            self._past.append((self._now, self._current))
        self._now, self._current = now, {}
        # One older reading is kept, to compare with.
        while len(self._past) > 1 and self._past[1][0] <= now - LONG:
            self._past.popleft()
        self._recent = sum(at <= now - RECENT for at, _ in self._past) - 1
        enough = (one for one in reversed(self._past) if now - one[0] >= self._apart)
        self._before = next(enough, self._past[0] if self._past else None)

    def rate(self, key: Hashable, value: Any) -> float:
        """Record the value of a counter; return its rate per second since the reading before."""
        current = max(number(value), 0.0)
        if self._current is None:
            self._current = {}
        self._current[key] = current
        if self._before is None:
            return 0.0
        at, before = self._before
        return _moved(before.get(key), current) / (self._now - at)

    @property
    def span(self) -> float:
        """Number of seconds that `recent` covers: about `RECENT`, less at the start."""
        return self._now - self._past[max(0, self._recent)][0] if self._past else RECENT

    def recent_rate(self, key: Hashable) -> float:
        """Return the recent growth of a counter per second."""
        return self.recent(key) / self.span

    def recent(self, key: Hashable) -> float:
        """Return the recent growth of a counter that was recorded in this reading."""
        return self._grown(key, max(0, self._recent))

    def long_term(self, key: Hashable) -> float:
        """Return the growth of a counter within the last `LONG` seconds."""
        return self._grown(key, 0)

    def _grown(self, key: Hashable, since: int) -> float:
        current = None if self._current is None else self._current.get(key)
        if current is None:
            return 0.0
        for _, before in islice(self._past, since, None):
            if key in before:
                return _moved(before[key], current)
        return 0.0


def _moved(before: float | None, now: float) -> float:
    if before is None:
        return 0.0
    return now - before if now >= before else now
