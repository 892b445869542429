"""The degradation ladder's rules: how much service is left, and when that changes.

`now` is any number that grows, in the unit of the settings. One caller at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from itertools import pairwise
from typing import NamedTuple

from seawall import _checks as check


class ServiceLevel(IntEnum):
    """How much of the service is given; the higher the number, the less."""

    FULL = 0
    """The real answer."""
    CACHED = 1
    """An answer from memory, old if need be."""
    PARTIAL = 2
    """A part of the answer, or what is popular: nothing that is made for this caller alone."""
    STATIC = 3
    """An answer that costs nothing to make."""
    MAINTENANCE = 4
    """No answer, only word of it."""

    @classmethod
    def of(cls, level: ServiceLevel | str) -> ServiceLevel:
        """Return the level of that name, such as "cached"; or raise and list them."""
        if isinstance(level, cls):
            return level
        names = {known.label: known for known in cls}
        return names[str(check.choice("level", level, names))]

    @property
    def label(self) -> str:
        """The level's name in events and snapshots, such as "cached"."""
        return self.name.lower()


class Cause(Enum):
    """What moved the ladder."""

    LOAD = "load"
    DEPENDENCY = "dependency"
    RECOVERED = "recovered"
    PINNED = "pin()"
    UNPINNED = "unpin()"


Thresholds = Mapping[ServiceLevel, float]

THRESHOLDS: Thresholds = {
    ServiceLevel.CACHED: 0.7,
    ServiceLevel.PARTIAL: 0.8,
    ServiceLevel.STATIC: 0.9,
    ServiceLevel.MAINTENANCE: 1.0,
}
"""The load from which on each level is taken, unless others are given."""


class LadderSettings(NamedTuple):
    """When to move. Levels without a threshold are never taken because of load."""

    thresholds: Thresholds = THRESHOLDS
    gap: float = 0.1
    hold: float = 5.0
    recover_after: float = 30.0

    def checked(self) -> LadderSettings:
        """Return these settings with levels for names, or raise."""
        if not isinstance(self.thresholds, Mapping):
            raise TypeError(
                f"thresholds={self.thresholds!r}: write the load for each level, such as"
                " {'cached': 0.7, 'static': 0.9}"
            )
        given = {
            ServiceLevel.of(level): check.at_least(f"thresholds[{level!r}]", load, 0.0)
            for level, load in self.thresholds.items()
        }
        if ServiceLevel.FULL in given:
            raise ValueError("thresholds: 'full' needs no load; begin with 'cached'")
        ordered = {level: given[level] for level in sorted(given)}
        loads = list(ordered.values())
        if any(lower >= higher for lower, higher in pairwise(loads)):
            raise ValueError(
                f"thresholds={self.thresholds!r}: write a higher load for less service"
            )
        gap = check.at_least("gap", self.gap, 0.0)
        if loads and gap >= loads[0]:
            raise ValueError(
                f"gap={self.gap!r}: write less than the lowest threshold, {loads[0]:g}"
            )
        return LadderSettings(
            ordered,
            gap,
            check.seconds("hold", self.hold, zero=True),
            check.seconds("recover_after", self.recover_after, zero=True),
        )


class Move(NamedTuple):
    """One change of level."""

    before: ServiceLevel
    after: ServiceLevel
    cause: Cause


class LadderModel:
    """Where the ladder stands: tell `update` the load and what dependencies demand, now and then.

    Load takes one level more each time, while it is at or above that level's threshold, and `hold`
    after the last one was taken: first its effect must show. A dependency's demand is met at once
    and in full: what is gone cannot be served. Better again by one level each time that load has
    been `gap` below the present level's threshold, and no dependency has demanded the level, for
    `recover_after` without interruption.
    """

    __slots__ = ("_calm_since", "_worse_at", "level", "settings")

    def __init__(self, settings: LadderSettings) -> None:
        """Begin with full service."""
        self.settings = settings
        self.level = ServiceLevel.FULL
        self._worse_at = float("-inf")
        self._calm_since: float | None = None

    def update(self, load: float, demanded: ServiceLevel, now: float) -> Move | None:
        """Take in the state of things at `now`; return the move that it leads to, if any."""
        s = self.settings
        if demanded > self.level:
            return self._move(demanded, Cause.DEPENDENCY, now)
        worse = next((level for level in s.thresholds if level > self.level), None)
        if worse is not None and load >= s.thresholds[worse]:
            self._calm_since = None
            if now - self._worse_at >= s.hold:
                return self._move(worse, Cause.LOAD, now)
            return None
        if self.level is ServiceLevel.FULL or demanded == self.level or not self._eased(load):
            self._calm_since = None
            return None
        if self._calm_since is None or now < self._calm_since:
            self._calm_since = now
        if now - self._calm_since >= s.recover_after:
            return self._move(max(demanded, self._better()), Cause.RECOVERED, now)
        return None

    def _eased(self, load: float) -> bool:
        """Tell whether load no longer asks for this level; where it never did, it does not."""
        threshold = self.settings.thresholds.get(self.level)
        return threshold is None or load < threshold - self.settings.gap

    def _better(self) -> ServiceLevel:
        rungs = (ServiceLevel.FULL, *self.settings.thresholds)
        return max(level for level in rungs if level < self.level)

    def _move(self, to: ServiceLevel, cause: Cause, now: float) -> Move:
        move = Move(self.level, to, cause)
        if to > self.level:
            self._worse_at = now
            self._calm_since = None
        else:
            self._calm_since = now  # the next level better is as far away again
        self.level = to
        return move

    def __repr__(self) -> str:
        return f"<LadderModel {self.level.label}>"
