"""What a stage counts and shows: numbers, rates, times. Counting is cheap until the first look."""

from __future__ import annotations

from typing import Any, Final

from seawall.models.histogram import Histogram
from seawall.pipeline.item import Item
from seawall.pipeline.stage import Stage

MOST_CAUSES: Final = 50
"""Types of errors that a stage counts apart."""
MOST_SAMPLES: Final = 1000
"""Times that are added to the histogram together, and from which quantiles are taken."""
UNWATCHED: Final = 8
"""Before the first snapshot, one of this many items that are done together is timed."""
RATE_WINDOW: Final = 10.0
"""Seconds over which a rate is measured."""


class Throughput:
    """Counts per second, over the last ten seconds or since the last look; free between looks."""

    def __init__(self, now: float) -> None:
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
        self.done = self.failed = self.degraded = self.deaths = self.refused = 0
        self.retries = self.dropped = self.dead_letters = 0
        self.failures: dict[str, int] = {}
        """By the type of the error; at most `MOST_CAUSES`."""
        self.times: list[float] = []
        """Seconds that the last items were in the stage, waiting included; see `fold_times`."""
        self._histogram = Histogram()
        """The times before these, from the first snapshot on."""
        self._is_watched = False
        self._recent: list[float] = []
        self._folds = 0
        """Odd while times are moved to the histogram, which another thread may look at."""
        self.waits_for = ""
        """Why the stage cannot set items aside, if it cannot; and since when."""
        self.blocked_at = 0.0
        self._rate = Throughput(now)

    def add_failure(self, error: Exception) -> None:
        """Count a failure, by its type."""
        self.failed += 1
        name = type(error).__name__
        if name in self.failures or len(self.failures) < MOST_CAUSES:
            self.failures[name] = self.failures.get(name, 0) + 1

    def add_done(self, items: list[Item], now: float) -> None:
        """Count items that are done now, and take their times."""
        self.done += len(items)
        timed = items if self._is_watched else items[::UNWATCHED]
        self.times.extend([now - item.entered_at for item in timed])
        if len(self.times) >= MOST_SAMPLES:
            self.fold_times()

    def fold_times(self) -> None:
        """Move the times to the histogram."""
        self._folds += 1
        if self._is_watched:
            self._histogram.add_all(self.times)
        self._recent = self.times[-MOST_SAMPLES:]
        self.times.clear()
        self._folds += 1

    def _all_times(self) -> tuple[Histogram, list[float]]:
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
        whole, times = self._all_times()
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


def idle_snapshot(step: Stage | str, counts: StageCounts, now: float = 0.0) -> dict[str, Any]:
    """Return what a stage, or the branch of that name, has done, with no item in it."""
    if isinstance(step, str):
        facts = {"name": step, "kind": "branch", "workers": 0, "capacity": 0, "guard": ""}
    else:
        facts = {
            "name": step.name,
            "kind": "sink" if step.is_sink else "stage",
            "workers": step.workers,
            "capacity": 0 if step.is_inline else step.capacity,
            "guard": str(getattr(step.guard, "name", "")),
        }
    return {**facts, "busy": 0, "waiting": 0, "oldest": 0.0, "at_work": [], **counts.snapshot(now)}
