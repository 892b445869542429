"""Windows of calls, each reported to a limit as one sample.

Why windows instead of single calls: all calls in flight describe the same moment. If each of them
moved the limit, one slow moment would have as many effects as there are calls.

The first calls to end are not representative: of those that began together they are the fastest. So
the first few only serve to find out how long a window has to be.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FEWEST: Final = 10  # minimum number of calls in a window
SPAN: Final = 4  # minimum length in mean latencies: most of its calls began in it
PRECISE: Final = 0.12  # required standard error of a window's mean, as a fraction of the mean
ENOUGH: Final = 100  # number of calls that always suffices for a window, however much they vary
MOST: Final = 2_000  # maximum number of calls used for a mean. At high rates the calls are sampled
DROPPED: Final = 0.05  # share of drops above which a window counts as dropped: one is normal


class SampleWindow(NamedTuple):
    """The sample that a limit receives for one window."""

    rtt: float  # mean latency of the calls that were served; 0.0 if there were none
    dropped: bool


class Windows:
    """Collects calls into windows. Without a lock, only append to `samples` and `drops`."""

    def __init__(self, shortest: float) -> None:
        """Start the first window. No window is shorter than `shortest` seconds."""
        self.shortest = shortest
        self.samples: list[float] = []  # latencies of the calls that were served
        self.drops: list[float] = []  # durations of the calls that were dropped
        self.due = float("-inf")  # the time before which the window cannot end
        self.typical: float | None = None  # mean duration of the calls in the last window
        self._began = 0.0

    def end(self, now: float) -> SampleWindow | None:
        """Return the window if it has ended by `now`, and start the next one."""
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
                # Check again when they should be there, instead of at each call until then.
                rest = (now - self._began) * missing / number
                self.due = now + min(rest, max(self.shortest, SPAN * self.typical))
                return None
        rtt = _mean(self._take(now))
        self.due = now + max(self.shortest, SPAN * self.typical)
        return SampleWindow(rtt, dropped)

    def _take(self, now: float) -> list[float]:
        """Reset the lists and return the latencies of the calls that were served."""
        served, dropped = _take(self.samples), _take(self.drops)
        self.typical = (len(served) * _mean(served) + sum(dropped)) / (len(served) + len(dropped))
        self._began = now
        return served


def _mean(times: list[float]) -> float:
    some = times[:: len(times) // MOST + 1]
    return sum(some) / len(some) if some else 0.0


def _enough(times: list[float]) -> int:
    """Return how many calls with this variance give a mean that is precise enough."""
    mean = _mean(times)
    if mean <= 0:
        return 0
    variance = sum((time - mean) ** 2 for time in times) / len(times)
    return min(ENOUGH, round(variance / (PRECISE * mean) ** 2))


def _take(items: list[float]) -> list[float]:
    """Empty a list that other threads append to at the same time, and return its items."""
    taken = items[:]
    del items[: len(taken)]
    return taken
