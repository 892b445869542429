"""Common parts of concurrency limits: bounds, a quick start, and a learned baseline.

Quick start: until the first sign of a queue, a fully used limit doubles with each window. By the
rules of the algorithms alone, growing from 20 to 200 would take minutes.

The baseline is measured again from time to time. If all observed calls had waited in a queue, the
limit would take that for normal and follow its own queue upwards. So every U(0.5, 1) * 30 windows,
if the limit is fully used, it is lowered to a value that should leave no queue. If latency falls in
the same proportion, there is still a queue, and the limit is lowered further. That costs nothing,
since all workers are busy. The latency at the end of this is the baseline: a mean of means, because
the minimum of several windows would be low by chance. By Little's law it gives the number of calls
that were served at once before. The limit moves to that number plus the queue that its rule keeps.
"""

from __future__ import annotations

from math import floor
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.models.backoff import Rng

REPROBE: Final = 30  # maximum number of windows before the baseline is measured again
DRAINED: Final = 0.8  # fraction of the estimated capacity at which no queue is left
FURTHER: Final = 0.7  # factor by which a lowered limit is lowered again if there is still a queue
STANDING: Final = 1.07  # tolerance of the test whether latency falls as a lowered limit: a queue
NOISE: Final = 0.25  # two windows that differ by less than this fraction may differ by chance
FALLEN: Final = 0.7  # fraction of the last result below which the baseline may be wrong
WEIGHT: Final = 0.4  # weight of a new baseline measurement that differs by no more than noise
SLOWER: Final = 1.4  # in the quick start, a latency of this many times the first is a queue
PATIENCE: Final = 16  # number of windows after which a lowered limit is raised again anyway


class ConcurrencyLimit:
    """A limit on concurrent calls, moved by each window. The caller is responsible for locking."""

    name: ClassVar[str] = ""
    SETTINGS: ClassVar[tuple[str, ...]] = ("initial", "minimum", "maximum")

    _starting = True  # whether there was no sign of a queue yet

    def __init__(self, initial: int, minimum: int, maximum: int) -> None:
        self.initial = check.count("initial", initial)
        self.bound(minimum, maximum)
        if self.initial != initial:
            raise ValueError(f"initial={initial}: write a number from {minimum} to {maximum}")

    def bound(self, minimum: int, maximum: int) -> None:
        """Set new bounds."""
        check.count("minimum", minimum)
        check.count("maximum", maximum)
        if minimum > maximum:
            raise ValueError(f"minimum={minimum}: write at most the maximum, which is {maximum}")
        self.minimum, self.maximum = minimum, maximum
        self.initial = min(max(self.initial, minimum), maximum)
        self._move_to(getattr(self, "estimate", self.initial))

    def fresh(self) -> ConcurrencyLimit:
        """Return a limit with the same settings that has not learned anything yet."""
        return type(self)(**self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {name: getattr(self, name) for name in self.SETTINGS}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{self.name}({given})"

    @property
    def limit(self) -> int:
        """Number of calls that may run at once now."""
        return floor(self.estimate)

    @property
    def baseline(self) -> float | None:
        """Estimated latency without a queue. None if it is unknown or not needed."""
        return None

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - the field's own signature
        """Process a window that ended at `now`: its mean latency, its concurrency and its drops.

        `rtt` is meaningful only without drops. `rng` returns uniform random numbers.
        """
        raise NotImplementedError

    def _unused(self, in_flight: int) -> bool:
        """Return whether too little is in flight to learn anything about a higher limit."""
        return in_flight * 2 < self.limit

    def _full(self, in_flight: int) -> bool:
        """Return whether all of the limit was in use."""
        return in_flight >= self.limit

    def _move_to(self, estimate: float) -> None:
        self.estimate = float(min(max(estimate, self.minimum), self.maximum))


class Learner(ConcurrencyLimit):
    """Common base of Vegas and Gradient2: a baseline that is learned and measured again in time."""

    MEASURED_TWICE: ClassVar[bool] = False
    """Whether to average two windows for the baseline, for rules that a wrong one leads astray."""

    _base: float | None = None
    _windows_left = 0.0
    _lowered_to = 0  # limit while a queue is to drain; 0 at other times
    _before = (0, 0.0)  # limit before the probe, and the latency at that time
    _step_before = (0, 0.0)  # limit before the last step down, and the latency at that time
    _drained = False
    _took = 0.0  # latency of the first window after the queue has drained
    _patience = 0
    _found = 0.0  # limit after the last baseline measurement
    _refilling = False  # whether this window still sees the queue that a probe has drained

    @property
    def limit(self) -> int:
        """Number of calls that may run at once now."""
        return self._lowered_to or floor(self.estimate)

    @property
    def baseline(self) -> float | None:
        """Estimated latency without a queue, in seconds."""
        return self._base

    def bound(self, minimum: int, maximum: int) -> None:
        """Set new bounds."""
        super().bound(minimum, maximum)
        self._lowered_to = 0

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - as above
        """Learn the baseline, measure it again if it is time, and move by the rule."""
        if dropped:
            self._lowered_to, self._starting = 0, False
            self._move_dropped()
        elif rtt <= 0:
            return
        elif self._lowered_to:
            self._drain(rtt, in_flight, rng)
        elif self._refilling:
            self._refilling = False
        else:
            self._look(rtt, in_flight, rng)

    def _look(self, rtt: float, in_flight: int, rng: Rng) -> None:
        if self._base is None:
            self._base = rtt
            self._take_anew(rtt, rng)
        if self._starting:
            self._start(self._base, rtt, in_flight, rng)
            return
        base = self._base = self._learn(rtt)
        self._windows_left -= 1
        due = self._windows_left <= 0 or self.estimate < FALLEN * self._found
        if not (due and self._probe(rtt, in_flight, rng)) and not self._unused(in_flight):
            self._move(base, rtt)

    def _start(self, base: float, rtt: float, in_flight: int, rng: Rng) -> None:
        """Double while fully used and as fast as at first; otherwise look for a queue."""
        if rtt <= SLOWER * base:
            self._base = (base + rtt) / 2
            if self._full(in_flight):
                self._move_to(2 * self.estimate)
        elif not (self._probe(rtt, in_flight, rng) or self._base == rtt or self._unused(in_flight)):
            # There is a queue although the limit exceeds all calls in flight: go down to them.
            self._move_to(min(self.estimate, in_flight))

    def _probe(self, rtt: float, in_flight: int, rng: Rng) -> bool:
        """Measure the baseline if there can be no queue, or lower the limit and return True."""
        calm = max(self.minimum, floor(DRAINED * self._served(self.limit, rtt)))
        if in_flight <= calm:
            self._take_anew(rtt, rng)
        elif self._full(in_flight) and calm < self.limit:
            self._before = self.limit, rtt
            self._patience = PATIENCE
            self._lower(calm, rtt)
            return True
        return False

    def _served(self, limit: int, rtt: float) -> float:
        """Return how many calls are served at once if `limit` take `rtt` (Little's law)."""
        base = rtt if self._base is None else min(self._base, rtt)
        return limit * base / rtt

    def _drain(self, rtt: float, in_flight: int, rng: Rng) -> None:
        """Wait until no more than the lowered limit are in flight, then measure."""
        self._patience -= 1
        if not self._patience:
            self._windows_left = self._interval(rng)
        elif not self._drained:
            self._drained = in_flight <= self._lowered_to
            return
        else:
            first, self._took = self._took, rtt
            rtt = (first + rtt) / 2 if first else rtt
            if self._lowered_to > self.minimum and self._may_hold_a_queue(rtt):
                self._lower(max(self.minimum, floor(FURTHER * self._lowered_to)), rtt)
                return
            if self.MEASURED_TWICE and not first:
                return
            self._take_anew(rtt, rng)
            served = self._served(*self._before)
            if self._starting:
                # The limit has just doubled and the queue has just begun: probe again soon.
                self._windows_left /= 2
                self._starting = served * SLOWER > self._before[0]
            wanted = max(self._lowered_to, self._with_queue(served))
            self._move_to(min(self.estimate, wanted) if self._unused(in_flight) else wanted)
            self._found = self.estimate
        self._lowered_to = 0
        self._refilling = True

    def _may_hold_a_queue(self, rtt: float) -> bool:
        """Return whether there may still be a queue although the limit is lowered.

        Lowering the limit shortens a queue, and latency falls in the same proportion. If calls are
        slow for another reason, it does not. If the first step shows an unexpected latency, the
        capacity may have changed at that moment, or it is chance: one more step decides.
        """
        if not self._starting and not self._unexpected(rtt, NOISE / 2):
            return False
        limit, took = self._step_before
        if rtt * limit < took * self._lowered_to * STANDING:
            return True
        return self._step_before == self._before and not self._starting and self._unexpected(rtt)

    def _unexpected(self, rtt: float, noise: float = NOISE) -> bool:
        """Return whether the latency is too far from the baseline to be chance."""
        return self._base is not None and abs(rtt - self._base) > noise * self._base

    def _lower(self, limit: int, rtt: float) -> None:
        self._step_before = self.limit, rtt
        self._lowered_to, self._drained, self._took = limit, False, 0.0

    def _take_anew(self, rtt: float, rng: Rng) -> None:
        """Update or replace the baseline with `rtt`. There was no queue in these windows."""
        self._windows_left, self._found = self._interval(rng), self.estimate
        if self._base is None or self._starting or self._unexpected(rtt):
            self._base = rtt
        else:
            self._base += WEIGHT * (rtt - self._base)

    def _interval(self, rng: Rng) -> float:
        return REPROBE * (0.5 + 0.5 * rng())

    def _learn(self, rtt: float) -> float:
        """Return the new baseline after a window with latency `rtt`."""
        raise NotImplementedError

    def _with_queue(self, served: float) -> float:
        """Return the limit that the rule wants if `served` calls are served at once."""
        raise NotImplementedError

    def _move(self, base: float, rtt: float) -> None:
        """Move the limit by the rule."""
        raise NotImplementedError

    def _move_dropped(self) -> None:
        """Lower the limit because calls were dropped."""
        raise NotImplementedError
