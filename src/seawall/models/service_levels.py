"""Degradation levels: which level of service is given, and when it changes.

`now` is any growing number, in the unit of the settings. Callers must serialise access.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from itertools import pairwise
from typing import NamedTuple

from seawall import _checks as check


class ServiceLevel(IntEnum):
    """Level of service. A higher number means less service."""

    FULL = 0  # the real answer
    CACHED = 1  # A cached answer, possibly stale
    PARTIAL = 2  # A part of the answer, or a popular one: nothing computed for this caller alone
    STATIC = 3  # an answer that costs nothing to compute
    MAINTENANCE = 4  # no answer, only a notice

    @classmethod
    def of(cls, level: ServiceLevel | str) -> ServiceLevel:
        """Return the level of that name, such as "cached", or raise an error that lists them."""
        if isinstance(level, cls):
            return level
        names = {known.label: known for known in cls}
        return names[str(check.choice("level", level, names))]

    @property
    def label(self) -> str:
        """The level's name in events and snapshots, such as "cached"."""
        return self.name.lower()


class LevelCause(Enum):
    """Reason for a change of level."""

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
"""Default loads from which each level applies."""


class LevelSettings(NamedTuple):
    """When to change levels. Levels without a threshold are never entered because of load."""

    thresholds: Thresholds = THRESHOLDS
    gap: float = 0.1
    hold: float = 5.0
    recover_after: float = 30.0

    def checked(self) -> LevelSettings:
        """Return validated settings with levels instead of names, or raise."""
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
        return LevelSettings(
            ordered,
            gap,
            check.seconds("hold", self.hold, zero=True),
            check.seconds("recover_after", self.recover_after, zero=True),
        )


class Move(NamedTuple):
    """One change of level."""

    before: ServiceLevel
    after: ServiceLevel
    cause: LevelCause


class LevelModel:
    """State of the levels. Call `update` regularly with the load and the dependencies' demand.

    Load lowers service one level at a time, while it is at or above the next level's threshold and
    at least `hold` after the last step: the effect must show first. A dependency's demand is met
    immediately and in full: a missing dependency cannot be used. Service recovers one level at a
    time, whenever load has been `gap` below the current level's threshold, and no dependency has
    demanded the level, for `recover_after` without interruption.
    """

    def __init__(self, settings: LevelSettings) -> None:
        self.settings = settings
        self.level = ServiceLevel.FULL
        self._worse_at = float("-inf")
        self._calm_since: float | None = None

    def update(self, load: float, demanded: ServiceLevel, now: float) -> Move | None:
        """Process the load and the demand at `now`. Return the resulting move, if any."""
        s = self.settings
        if demanded > self.level:
            return self._move(demanded, LevelCause.DEPENDENCY, now)
        worse = next((level for level in s.thresholds if level > self.level), None)
        if worse is not None and load >= s.thresholds[worse]:
            self._calm_since = None
            if now - self._worse_at >= s.hold:
                return self._move(worse, LevelCause.LOAD, now)
            return None
        if self.level is ServiceLevel.FULL or demanded == self.level or not self._eased(load):
            self._calm_since = None
            return None
        if self._calm_since is None or now < self._calm_since:
            self._calm_since = now
        if now - self._calm_since >= s.recover_after:
            return self._move(max(demanded, self._better()), LevelCause.RECOVERED, now)
        return None

    def _eased(self, load: float) -> bool:
        """Return whether load no longer requires this level, as always without a threshold."""
        threshold = self.settings.thresholds.get(self.level)
        return threshold is None or load < threshold - self.settings.gap

    def _better(self) -> ServiceLevel:
        rungs = (ServiceLevel.FULL, *self.settings.thresholds)
        return max(level for level in rungs if level < self.level)

    def _move(self, to: ServiceLevel, cause: LevelCause, now: float) -> Move:
        move = Move(self.level, to, cause)
        if to > self.level:
            self._worse_at = now
            self._calm_since = None
        else:
            self._calm_since = now  # the next step up needs the full time again
        self.level = to
        return move
