"""Calls gathered into windows, each told to a limit as one sample.

Why windows, and not each call: the calls in flight all tell of the same moment. If each of them
moved the limit, one slow moment would be answered as often as there are calls.

The calls that end first tell too little: of those that began together they are the fastest. So the
first few are only looked at, to know how long a window has to be.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FEWEST: Final = 10
"""A window has at least so many calls."""

SPAN: Final = 4
"""A window lasts at least so many times what its calls take: most of them began in it."""

PRECISE: Final = 0.12
"""The mean of a window is to be known as well as this: its standard error, as a share of it."""

ENOUGH: Final = 100
"""So many calls make a window, however much they vary."""

MOST: Final = 2_000
"""So many calls of a window are enough for a mean: at high rates they are sampled."""

DROPPED: Final = 0.05
"""A window counts as dropped when more than this share of its calls was: there is always one."""


class Window(NamedTuple):
    """What a limit is told of the calls of one window."""

    rtt: float
    """The mean time of those that were served; 0.0 if none was."""
    dropped: bool


class Windows:
    """Gathers calls into windows.

    `samples` and `drops` may be appended to by any thread; the rest is under the caller's lock.
    """

    __slots__ = ("_began", "drops", "due", "samples", "shortest", "typical")

    def __init__(self, shortest: float) -> None:
        """Begin a first window; none is shorter than `shortest` seconds."""
        self.shortest = shortest
        self.samples: list[float] = []
        """What each call that was served took."""
        self.drops: list[float] = []
        """After which time each call that was dropped came back."""
        self.due = float("-inf")
        """The instant before which the window cannot end."""
        self.typical: float | None = None
        """What calls took in the last window, on average."""
        self._began = 0.0

    def end(self, now: float) -> Window | None:
        """Return the window if it is over by now, and begin the next one."""
        number = len(self.samples) + len(self.drops)
        if now < self.due or number < FEWEST:
            return None
        if self.typical is None:
            longest = max(self.samples + self.drops)
            self._take(now)
            self.due = now + max(self.shortest, SPAN * longest)
            return None
        dropped = len(self.drops) > DROPPED * number
        if not dropped and number < ENOUGH:
            missing = _enough(self.samples) - number
            if missing > 0:
                # Looked at again when they should be there, not at each call till then.
                rest = (now - self._began) * missing / number
                self.due = now + min(rest, max(self.shortest, SPAN * self.typical))
                return None
        rtt = _mean(self._take(now))
        self.due = now + max(self.shortest, SPAN * self.typical)
        return Window(rtt, dropped)

    def _take(self, now: float) -> list[float]:
        """Begin anew; return what the calls took that were served."""
        served, dropped = _take(self.samples), _take(self.drops)
        self.typical = (len(served) * _mean(served) + sum(dropped)) / (len(served) + len(dropped))
        self._began = now
        return served


def _mean(times: list[float]) -> float:
    some = times[:: len(times) // MOST + 1]
    return sum(some) / len(some) if some else 0.0


def _enough(times: list[float]) -> int:
    """Return how many calls that vary as these do make a mean that is known well enough."""
    mean = _mean(times)
    if mean <= 0:
        return 0
    variance = sum((time - mean) ** 2 for time in times) / len(times)
    return min(ENOUGH, round(variance / (PRECISE * mean) ** 2))


def _take(items: list[float]) -> list[float]:
    """Empty a list that other threads append to at the same time."""
    taken = items[:]
    del items[: len(taken)]
    return taken
