"""Detectors: how strongly the silence of one peer suggests that it has failed.

A detector gives a level of suspicion, never a verdict: a slow peer and a dead one look the same.
`phi_accrual()`, `exponential()`, `quantile_timeout()` and `fixed_timeout()` are settings;
`start()` makes the state for one peer. `now` is any clock in seconds; one caller at a time.

Promises:
- Any sequence of instants is safe, also ones that go back, are infinite or not a number: the level
  is finite and not negative, and an instant that is not finite changes nothing.
- The level never falls while a peer is silent, and it falls to its least at each heartbeat.
- Memory is bounded by `window`.
- The silence that ended a suspicion is not learned: a failure must not make the next one normal.
  Nor are two heartbeats at one instant, which a backlog brings after a pause of this process.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import ceil, exp, isfinite, log, log1p, sqrt
from typing import Final, Protocol

from seawall import _checks as check

LONGEST: Final = 1e9  # seconds. Longer silences count as this one, so that no sum overflows

_LN10: Final = log(10.0)

_FAR: Final = 1e100  # maximum deviations from the mean that count, so that their cube is finite


class Detector:
    """Detector for one peer: it measures how long the peer has been silent."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold  # the level from which the peer is suspected
        self._heard_at: float | None = None

    def sent(self, now: float) -> None:
        """Record that the peer was asked for a sign of life, where that counts."""

    def heartbeat(self, now: float) -> None:
        """Record a sign of life. Learn from the silence before it unless it was suspicious."""
        if not isfinite(now):
            return
        if self._heard_at is not None:
            silence = self._silence(now)
            if silence > 0.0 and self._level(silence) < self.threshold:
                self._learn(silence)
        self._heard_at = now

    def level(self, now: float) -> float:
        """Return the level of suspicion, 0 if the peer was never heard or asked."""
        return 0.0 if self._heard_at is None else self._level(self._silence(now))

    def suspected(self, now: float) -> bool:
        """Return whether the level has reached the threshold."""
        return self.level(now) >= self.threshold

    def _silence(self, now: float) -> float:
        return _elapsed(self._heard_at, now)

    def _learn(self, silence: float) -> None:
        """Record the length of a normal silence."""

    def _level(self, silence: float) -> float:
        raise NotImplementedError


class DetectorSettings(Protocol):
    """Settings that create a detector for each peer."""

    def start(self) -> Detector:
        """Return a new detector."""


def _elapsed(since: float | None, now: float) -> float:
    """Return the seconds since then: never negative, infinite or NaN."""
    return 0.0 if since is None else min(max(0.0, now - since), LONGEST)


class _Intervals:
    """Mean and deviation of the last intervals, as exact sums of whole microseconds."""

    def __init__(self, window: int, first: float) -> None:
        """Start from an estimate, with a quarter of it as the deviation."""
        self._values: deque[int] = deque(maxlen=window)
        self._total = self._squares = 0
        self.add(first * 0.75)
        self.add(first * 1.25)

    def add(self, interval: float) -> None:
        """Add an interval. If the window is full, drop the oldest one."""
        values = self._values
        if len(values) == values.maxlen:
            oldest = values[0]
            self._total -= oldest
            self._squares -= oldest * oldest
        value = round(interval * 1e6)
        values.append(value)
        self._total += value
        self._squares += value * value
        count = len(values)
        self.mean = self._total / count / 1e6
        variance = (self._squares * count - self._total * self._total) / (count * count)
        self.deviation = sqrt(variance) / 1e6


class PhiAccrual(Detector):
    """Phi accrual detector; see `phi_accrual`."""

    def __init__(self, settings: PhiSettings) -> None:
        super().__init__(settings.threshold)
        self._settings = settings
        self._intervals = _Intervals(settings.window, settings.first_interval)

    def _learn(self, silence: float) -> None:
        self._intervals.add(silence)

    def _level(self, silence: float) -> float:
        """Return -log10 of the probability that a live peer is silent for this long.

        This uses the logistic approximation of the normal distribution: with x = y (1.5976 +
        0.070566 y^2) that probability is 1 / (1 + e^x), and its logarithm needs no e^x that could
        overflow.
        """
        settings, intervals = self._settings, self._intervals
        mean = intervals.mean + settings.acceptable_pause
        if settings.is_exponential:
            return silence / (max(mean, settings.min_deviation) * _LN10)
        y = min((silence - mean) / max(intervals.deviation, settings.min_deviation), _FAR)
        x = y * (1.5976 + 0.070566 * y * y)
        return (max(x, 0.0) + log1p(exp(-abs(x)))) / _LN10


@dataclass(frozen=True, repr=False, slots=True)
class PhiSettings:
    """Settings of `phi_accrual` and `exponential`."""

    threshold: float
    window: int
    min_deviation: float
    acceptable_pause: float
    first_interval: float
    is_exponential: bool

    def __post_init__(self) -> None:
        check.at_least("threshold", self.threshold, 0.1)
        check.count("window", self.window, minimum=2)
        check.seconds("min_deviation", self.min_deviation)
        check.seconds("acceptable_pause", self.acceptable_pause, zero=True)
        check.seconds("first_interval", self.first_interval)

    def __repr__(self) -> str:
        name = "exponential" if self.is_exponential else "phi_accrual"
        return f"{name}({self.threshold:g}, window={self.window})"

    def start(self) -> PhiAccrual:
        """Return a new detector."""
        return PhiAccrual(self)


def phi_accrual(
    threshold: float = 8.0,
    *,
    window: int = 100,
    min_deviation: float = 0.1,
    acceptable_pause: float = 0.0,
    first_interval: float = 1.0,
) -> PhiSettings:
    """Suspect a peer when its silence is improbable: at most once in 10**threshold heartbeats.

    The intervals between heartbeats are assumed to be normally distributed, with the mean and the
    deviation of the last `window` ones. The deviation is never below `min_deviation` seconds, so
    that a very regular peer is not suspected for a short delay. `acceptable_pause` is added to the
    mean, for example for garbage collection. Until intervals are known the estimate is
    `first_interval`, plus or minus a quarter.
    """
    return PhiSettings(
        threshold, window, min_deviation, acceptable_pause, first_interval, is_exponential=False
    )


def exponential(
    threshold: float = 8.0,
    *,
    window: int = 100,
    acceptable_pause: float = 0.0,
    first_interval: float = 1.0,
) -> PhiSettings:
    """Suspect a peer by the mean of its intervals alone: 8 is a silence of 18.4 of them.

    For heartbeats at random intervals, such as gossip messages. The settings are those of
    `phi_accrual`.
    """
    return PhiSettings(
        threshold, window, 1e-3, acceptable_pause, first_interval, is_exponential=True
    )


class QuantileTimeout(Detector):
    """Detector by a quantile of past times; see `quantile_timeout`."""

    def __init__(self, settings: QuantileSettings) -> None:
        super().__init__(1.0)
        self._settings = settings
        self._times: deque[float] = deque(maxlen=settings.window)
        self._ordered: list[float] = []
        self._asked_at: float | None = None
        self._is_asked = False

    @property
    def limit(self) -> float:
        """Seconds of silence after which the peer is suspected."""
        settings, ordered = self._settings, self._ordered
        if not ordered:
            return max(settings.floor, settings.first)
        place = min(len(ordered) - 1, max(0, ceil(settings.quantile * len(ordered)) - 1))
        return max(settings.floor, ordered[place] * settings.factor)

    def sent(self, now: float) -> None:
        """Record a probe. After the first one, round trips count instead of intervals."""
        if not isfinite(now):
            return
        self._is_asked = True
        if self._asked_at is None:
            self._asked_at = now
        if self._heard_at is None:
            self._heard_at = now

    def heartbeat(self, now: float) -> None:
        """Record a sign of life, which answers the oldest probe."""
        if self._is_asked and self._asked_at is None:
            return  # no probe is open, so there is no round trip to learn from
        super().heartbeat(now)
        self._asked_at = None

    def _silence(self, now: float) -> float:
        return _elapsed(self._asked_at if self._is_asked else self._heard_at, now)

    def _learn(self, silence: float) -> None:
        times, ordered = self._times, self._ordered
        if len(times) == times.maxlen:
            del ordered[bisect_left(ordered, times[0])]
        times.append(silence)
        insort(ordered, silence)

    def _level(self, silence: float) -> float:
        return silence / self.limit


@dataclass(frozen=True, repr=False, slots=True)
class QuantileSettings:
    """Settings of `quantile_timeout`."""

    quantile: float
    factor: float
    floor: float
    first: float
    window: int

    def __post_init__(self) -> None:
        check.ratio("quantile", self.quantile)
        check.at_least("factor", self.factor, 1.0)
        check.seconds("floor", self.floor)
        check.seconds("first", self.first)
        check.count("window", self.window)

    def __repr__(self) -> str:
        return f"quantile_timeout({self.quantile:g}, factor={self.factor:g}, floor={self.floor:g})"

    def start(self) -> QuantileTimeout:
        """Return a new detector."""
        return QuantileTimeout(self)


def quantile_timeout(
    quantile: float = 0.99,
    *,
    factor: float = 4.0,
    floor: float = 0.1,
    first: float = 3.0,
    window: int = 100,
) -> QuantileSettings:
    """Suspect a peer that takes `factor` times as long as it usually does, and at least `floor`.

    "Usually" is the `quantile` of its own last `window` round trips, or of its intervals if it
    sends heartbeats without being asked. So a peer at 10 ms and a peer at 300 ms each have a
    suitable limit. `first` seconds is the limit until there is a round trip to learn from.
    """
    return QuantileSettings(quantile, factor, floor, first, window)


class FixedTimeout(Detector):
    """Detector with a fixed timeout; see `fixed_timeout`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1.0)
        self._seconds = seconds

    def _level(self, silence: float) -> float:
        return silence / self._seconds


class FixedSettings:
    """Settings of `fixed_timeout`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = check.seconds("seconds", seconds)

    def __repr__(self) -> str:
        return f"fixed_timeout({self.seconds:g})"

    def start(self) -> FixedTimeout:
        """Return a new detector."""
        return FixedTimeout(self.seconds)


def fixed_timeout(seconds: float) -> FixedSettings:
    """Suspect a peer that has been silent for `seconds`, regardless of what is usual for it."""
    return FixedSettings(seconds)
