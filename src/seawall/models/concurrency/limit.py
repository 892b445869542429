"""What limits on calls at once have in common: bounds, a quick start, a baseline that is learnt.

A quick start: until the first sign of a queue, a limit in full use doubles with each window. By the
rules alone it would take minutes to come from 20 to 200.

Why the baseline is taken anew: if all calls seen had stood in a queue, the limit would take that
for normal and follow its own queue upwards. So every U(0.5, 1) * 30 windows, if the limit is in
full use, it is lowered to where no queue should be. If calls take less in the same proportion, a
queue still stood there, and it is lowered further: that costs nothing, all workers are busy. What
calls take when that ends is the baseline: a mean of means, as the least of several is the least by
chance. By Little's law it tells how many were served at once before; the limit moves to that, and
the queue that its rule keeps.
"""

from __future__ import annotations

from math import floor
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.models.backoff import Rng

REPROBE: Final = 30
"""At most so many windows pass before the baseline is taken anew."""

DRAINED: Final = 0.8
"""The share of the presumed capacity at which no queue is left."""

FURTHER: Final = 0.7
"""The share to which a lowered limit is lowered again, if a queue still stood."""

STANDING: Final = 1.07
"""Calls at a lowered limit stand in a queue if they take less by its proportion, or nearly so."""

NOISE: Final = 0.25
"""Two windows that differ by less than this share may differ by chance."""

FALLEN: Final = 0.7
"""If the limit fell to this share of what was found, the baseline may be wrong: look again."""

WEIGHT: Final = 0.4
"""That of a new measurement of the baseline, if it differs by no more than chance may do."""

SLOWER: Final = 1.4
"""At the start, calls that take so many times what the first ones did stand in a queue."""

PATIENCE: Final = 16
"""After so many windows a limit that was lowered goes up again, drained or not."""


class ConcurrencyLimit:
    """A number of calls at once, moved by one window after another. Locking is the caller's."""

    name: ClassVar[str] = ""

    _starting = True
    """Whether no sign of a queue was seen yet."""

    def __init__(self, initial: int, minimum: int, maximum: int) -> None:
        """Begin with `initial`, and stay from `minimum` to `maximum`."""
        self.initial = check.count("initial", initial)
        self.bound(minimum, maximum)
        if self.initial != initial:
            raise ValueError(f"initial={initial}: write a number from {minimum} to {maximum}")

    def bound(self, minimum: int, maximum: int) -> None:
        """Stay from `minimum` to `maximum` from now on."""
        check.count("minimum", minimum)
        check.count("maximum", maximum)
        if minimum > maximum:
            raise ValueError(f"minimum={minimum}: write at most the maximum, which is {maximum}")
        self.minimum, self.maximum = minimum, maximum
        self.initial = min(max(self.initial, minimum), maximum)
        self._move_to(getattr(self, "estimate", self.initial))

    def fresh(self) -> ConcurrencyLimit:
        """Return one with the same settings that has learnt nothing yet."""
        return type(self)(**self.settings())

    def settings(self) -> dict[str, Any]:
        """Return what it was made with."""
        names = ("initial", "minimum", "maximum")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{self.name}({given})"

    @property
    def limit(self) -> int:
        """How many may run at once now."""
        return floor(self.estimate)

    @property
    def baseline(self) -> float | None:
        """What a call is thought to take without a queue; None if that is not known or needed."""
        return None

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - the field's own signature
        """Take in a window that ended at `now`: its mean time, its use, and whether it dropped.

        `rtt` counts only without drops. `rng` gives uniform numbers.
        """
        raise NotImplementedError

    def _unused(self, in_flight: int) -> bool:
        """Tell whether so little is in flight that nothing can be learnt of a higher limit."""
        return in_flight * 2 < self.limit

    def _full(self, in_flight: int) -> bool:
        """Tell whether all of the limit was in use."""
        return in_flight >= self.limit

    def _move_to(self, estimate: float) -> None:
        self.estimate = float(min(max(estimate, self.minimum), self.maximum))


class Learner(ConcurrencyLimit):
    """What Vegas and Gradient2 share: a baseline that is learnt, and taken anew in time."""

    MEASURED_TWICE: ClassVar[bool] = False
    """Whether the baseline is the mean of two windows: for rules that a wrong one leads astray."""

    _base: float | None = None
    _windows_left = 0.0
    _lowered_to = 0
    """The limit while a queue is to drain; 0 at other times."""
    _before = (0, 0.0)
    """The limit before that, and what calls took."""
    _step_before = (0, 0.0)
    """The limit before it was lowered last, and what calls took."""
    _drained = False
    _took = 0.0
    """What calls took in the first window after that."""
    _patience = 0
    _found = 0.0
    """The limit after that."""
    _refilling = False
    """True in the window after that: it still sees the drained queue, and would call it growth."""

    @property
    def limit(self) -> int:
        """How many may run at once now."""
        return self._lowered_to or floor(self.estimate)

    @property
    def baseline(self) -> float | None:
        """What a call is thought to take without a queue, in seconds."""
        return self._base

    def bound(self, minimum: int, maximum: int) -> None:
        """Stay from `minimum` to `maximum` from now on."""
        super().bound(minimum, maximum)
        self._lowered_to = 0

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - as above
        """Learn the baseline, take it anew if it is time, and move by the rule."""
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
        """Double while all is in use and calls are as fast as they were; else look for a queue."""
        if rtt <= SLOWER * base:
            self._base = (base + rtt) / 2
            if self._full(in_flight):
                self._move_to(2 * self.estimate)
        elif not (self._probe(rtt, in_flight, rng) or self._base == rtt or self._unused(in_flight)):
            # A queue, though the limit is beyond all there are: down to where it is in full use.
            self._move_to(min(self.estimate, in_flight))

    def _probe(self, rtt: float, in_flight: int, rng: Rng) -> bool:
        """Take the baseline anew if no queue can be there; or lower the limit, and tell so."""
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
        """Return how many are served at once, by Little's law, if `limit` of them take `rtt`."""
        base = rtt if self._base is None else min(self._base, rtt)
        return limit * base / rtt

    def _drain(self, rtt: float, in_flight: int, rng: Rng) -> None:
        """Wait until no more than the lowered limit are in flight; believe what follows."""
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
                self._windows_left /= (
                    2  # it had just doubled, the queue just begun: look again soon
                )
                self._starting = served * SLOWER > self._before[0]
            wanted = max(self._lowered_to, self._with_queue(served))
            self._move_to(min(self.estimate, wanted) if self._unused(in_flight) else wanted)
            self._found = self.estimate
        self._lowered_to = 0
        self._refilling = True

    def _may_hold_a_queue(self, rtt: float) -> bool:
        """Tell whether calls may still stand in a queue although the limit is lowered.

        A queue gets shorter if the limit is lowered, and calls take less in the same proportion; if
        calls take long for another reason they do not. At first, if they take what nobody expected,
        capacity may have changed in that very moment, or it is chance: one more step tells.
        """
        if not self._starting and not self._unexpected(rtt, NOISE / 2):
            return False
        limit, took = self._step_before
        if rtt * limit < took * self._lowered_to * STANDING:
            return True
        return self._step_before == self._before and not self._starting and self._unexpected(rtt)

    def _unexpected(self, rtt: float, noise: float = NOISE) -> bool:
        """Tell whether that is too far from the baseline to be chance."""
        return self._base is not None and abs(rtt - self._base) > noise * self._base

    def _lower(self, limit: int, rtt: float) -> None:
        self._step_before = self.limit, rtt
        self._lowered_to, self._drained, self._took = limit, False, 0.0

    def _take_anew(self, rtt: float, rng: Rng) -> None:
        """Take `rtt` into the baseline, or for it: no queue stood in these windows."""
        self._windows_left, self._found = self._interval(rng), self.estimate
        if self._base is None or self._starting or self._unexpected(rtt):
            self._base = rtt
        else:
            self._base += WEIGHT * (rtt - self._base)

    def _interval(self, rng: Rng) -> float:
        return REPROBE * (0.5 + 0.5 * rng())

    def _learn(self, rtt: float) -> float:
        """Return the baseline, now that a window took `rtt`."""
        raise NotImplementedError

    def _with_queue(self, served: float) -> float:
        """Return the limit that the rule wants where so many are served at once."""
        raise NotImplementedError

    def _move(self, base: float, rtt: float) -> None:
        """Move the limit by the rule."""
        raise NotImplementedError

    def _move_dropped(self) -> None:
        """Move the limit down: calls were dropped."""
        raise NotImplementedError
