"""Calls gathered into windows, each told to a limit as one sample.

Why windows, and not each call: the calls in flight all tell of the same moment. If each of them
moved the limit, one slow moment would be answered as often as there are calls.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FEWEST: Final = 10
"""A window has at least so many calls."""

SPAN: Final = 4
"""A window lasts at least so many times what its calls take: most of them began in it."""

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

    __slots__ = ("drops", "due", "samples", "shortest", "typical")

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

    def end(self, now: float) -> Window | None:
        """Return the window if it is over by now, and begin the next one."""
        if now < self.due or len(self.samples) + len(self.drops) < FEWEST:
            return None
        served, dropped = _take(self.samples), _take(self.drops)
        number = len(served) + len(dropped)
        rtt = _mean(served)
        self.typical = (len(served) * rtt + sum(dropped)) / number
        self.due = now + max(self.shortest, SPAN * self.typical)
        return Window(rtt, len(dropped) > DROPPED * number)


def _mean(times: list[float]) -> float:
    some = times[:: len(times) // MOST + 1]
    return sum(some) / len(some) if some else 0.0


def _take(items: list[float]) -> list[float]:
    """Empty a list that other threads append to at the same time."""
    taken = items[:]
    del items[: len(taken)]
    return taken
