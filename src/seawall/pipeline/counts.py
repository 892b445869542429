"""What a stage counts and shows: numbers, rates, times. Counting is cheap until somebody looks."""

from __future__ import annotations

from typing import Any, Final

from seawall.models.histogram import Histogram
from seawall.pipeline.item import Item
from seawall.pipeline.stage import Stage

MOST_CAUSES: Final = 50
"""Types of errors that a stage counts apart."""
MOST_SAMPLES: Final = 1000
"""Times of items that are added to the histogram at once, and from which quantiles are taken."""
UNWATCHED: Final = 8
"""Of items that are done together, one of so many is timed while nobody has looked."""
RATE_WINDOW: Final = 10.0
"""Seconds over which a rate is measured, if somebody looks that often."""


class Throughput:
    """How much is counted in a second: over the last ten, or since somebody looked last.

    It costs nothing while nobody looks.
    """

    def __init__(self, now: float) -> None:
        """Begin to count at 0."""
        self._looks = [(now, 0)]

    def look(self, now: float, count: int) -> float:
        """Return the rate until now, at which `count` has been reached."""
        looks = self._looks
        recent = [look for look in looks if look[0] >= now - RATE_WINDOW] or looks[-1:]
        began, before = recent[0]
        if now >= recent[-1][0] + 1.0:
            recent.append((now, count))
        self._looks = recent
        return (count - before) / (now - began) if now > began else 0.0


class StageCounts:
    """What a stage has done."""

    def __init__(self, now: float = 0.0) -> None:
        """Begin with nothing."""
        self.done = self.failed = self.degraded = self.deaths = self.refused = 0
        self.retries = self.dropped = self.dead_letters = 0
        self.failures: dict[str, int] = {}
        """By the type of the error; at most `MOST_CAUSES`."""
        self.times: list[float] = []
        """Seconds that the last items were in the stage, waiting included; see `fold_times`."""
        self._histogram = Histogram()
        """The times before these, since somebody looked first: until then they cost nothing."""
        self._is_watched = False
        self._recent: list[float] = []
        self._folds = 0
        """Odd while times are moved to the histogram, which another thread may look at."""
        self.waits_for = ""
        """Why the stage cannot set items aside, if it cannot."""
        self.blocked_at = 0.0
        """Since when."""
        self._rate = Throughput(now)

    def add_failure(self, error: Exception) -> None:
        """Note a failure, by its type."""
        self.failed += 1
        name = type(error).__name__
        if name in self.failures or len(self.failures) < MOST_CAUSES:
            self.failures[name] = self.failures.get(name, 0) + 1

    def add_done(self, items: list[Item], now: float) -> None:
        """Count items that are done now, and take times: of a sample, until somebody looks."""
        self.done += len(items)
        timed = items if self._is_watched else items[::UNWATCHED]
        self.times.extend([now - item.entered_at for item in timed])
        if len(self.times) >= MOST_SAMPLES:
            self.fold_times()

    def fold_times(self) -> None:
        """Move the times to the histogram; called when there are `MOST_SAMPLES`."""
        self._folds += 1
        if self._is_watched:
            self._histogram.add_all(self.times)
        self._recent = self.times[-MOST_SAMPLES:]
        self.times.clear()
        self._folds += 1

    def _looked_at(self) -> tuple[Histogram, list[float]]:
        """Return all times, and the latest ones; from any thread."""
        self._is_watched = True
        while True:
            folds = self._folds
            times = list(self.times)
            whole = Histogram()
            whole.merge(self._histogram)
            whole.add_all(times)
            recent = [*self._recent, *times][-MOST_SAMPLES:]
            if folds == self._folds and not folds % 2:
                return whole, recent

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the counts."""
        whole, times = self._looked_at()
        recent = Histogram()
        recent.add_all(times)
        p50, p99 = recent.quantiles((0.5, 0.99))
        return {
            "done": self.done,
            "rate": self._rate.look(now, self.done),
            "retries": self.retries,
            "failed": self.failed,
            "degraded": self.degraded,
            "dropped": self.dropped,
            "dead_letters": self.dead_letters,
            "refused": self.refused,
            "deaths": self.deaths,
            "failures": dict(self.failures),
            "p50": p50,
            "p99": p99,
            "histogram": whole.tally().snapshot(),
            "waits_for": self.waits_for,
        }


def stage_snapshot(stage: Stage, counts: StageCounts, now: float) -> dict[str, Any]:
    """Return what a stage has done, without anything at work or waiting."""
    capacity = 0 if stage.is_inline else stage.capacity
    kind = "sink" if stage.is_sink else "stage"
    seen = _idle_snapshot(stage.name, kind, stage.workers, capacity, counts, now)
    seen["guard"] = str(getattr(stage.guard, "name", ""))
    return seen


def branch_snapshot(name: str, counts: StageCounts, now: float) -> dict[str, Any]:
    """Return how many items a branch has judged, in the form of a stage."""
    return _idle_snapshot(name, "branch", 0, 0, counts, now)


def _idle_snapshot(
    name: str, kind: str, workers: int, capacity: int, counts: StageCounts, now: float
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "workers": workers,
        "capacity": capacity,
        "busy": 0,
        "waiting": 0,
        "oldest": 0.0,
        "at_work": [],
        "guard": "",
        **counts.snapshot(now),
    }
