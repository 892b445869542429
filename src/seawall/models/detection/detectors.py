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
from collections.abc import Callable
from functools import partial
from math import ceil, exp, isfinite, log, log1p, sqrt
from typing import Final

from seawall import _checks as check

LONGEST: Final = 1e9  # seconds. Longer silences count as this one, so that no sum overflows

_LN10: Final = log(10.0)

_FAR: Final = 1e100  # maximum deviations from the mean that count, so that their cube is finite


class Detector:
    """Detector for one peer: it measures how long the peer has been silent."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold  # the level from which the peer is suspected
        self._heartbeat_at: float | None = None

    def sent(self, now: float) -> None:
        """Record that the peer was asked for a sign of life, where that counts."""

    def heartbeat(self, now: float) -> None:
        """Record a sign of life. Learn from the silence before it unless it was suspicious."""
        if not isfinite(now):
            return
        if self._heartbeat_at is not None:
            silence = self._silence(now)
            if silence > 0.0 and self._level(silence) < self.threshold:
                self._learn(silence)
        self._heartbeat_at = now

    def level(self, now: float) -> float:
        """Return the level of suspicion, 0 if the peer was never heard or asked."""
        return 0.0 if self._heartbeat_at is None else self._level(self._silence(now))

    def suspected(self, now: float) -> bool:
        """Return whether the level has reached the threshold."""
        return self.level(now) >= self.threshold

    def _silence(self, now: float) -> float:
        return _elapsed(self._heartbeat_at, now)

    def _learn(self, silence: float) -> None:
        """Record the length of a normal silence."""

    def _level(self, silence: float) -> float:
        raise NotImplementedError


class DetectorSettings:
    """Settings that create a detector for each peer."""

    def __init__(self, text: str, start: Callable[[], Detector]) -> None:
        self._text = text
        self.start = start
        """Returns a new detector."""

    def __repr__(self) -> str:
        return self._text


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

    def __init__(
        self, threshold: float, window: int, first: float, pause: float, min_deviation: float
    ) -> None:
        super().__init__(threshold)
        self._intervals = _Intervals(window, first)
        self._acceptable_pause = pause
        self._min_deviation = min_deviation

    def _learn(self, silence: float) -> None:
        self._intervals.add(silence)

    def _level(self, silence: float) -> float:
        """Return -log10 of the probability that a live peer is silent for this long.

        This uses the logistic approximation of the normal distribution: with x = y (1.5976 +
        0.070566 y^2) that probability is 1 / (1 + e^x), and its logarithm needs no e^x that could
        overflow.
        """
        mean = self._intervals.mean + self._acceptable_pause
        y = min((silence - mean) / max(self._intervals.deviation, self._min_deviation), _FAR)
        x = y * (1.5976 + 0.070566 * y * y)
        return (max(x, 0.0) + log1p(exp(-abs(x)))) / _LN10


class Exponential(PhiAccrual):
    """The same for intervals that are exponentially distributed; see `exponential`."""

    def _level(self, silence: float) -> float:
        mean = self._intervals.mean + self._acceptable_pause
        return silence / (max(mean, self._min_deviation) * _LN10)


def phi_accrual(
    threshold: float = 8.0,
    *,
    window: int = 100,
    min_deviation: float = 0.1,
    acceptable_pause: float = 0.0,
    first_interval: float = 1.0,
) -> DetectorSettings:
    """Suspect a peer when its silence is improbable: at most once in 10**threshold heartbeats.

    The intervals between heartbeats are assumed to be normally distributed, with the mean and the
    deviation of the last `window` ones. The deviation is never below `min_deviation` seconds, so
    that a very regular peer is not suspected for a short delay. `acceptable_pause` is added to the
    mean, for example for garbage collection. Until intervals are known the estimate is
    `first_interval`, plus or minus a quarter.
    """
    least = check.seconds("min_deviation", min_deviation)
    return _phi(
        PhiAccrual, "phi_accrual", threshold, window, first_interval, acceptable_pause, least
    )


def exponential(
    threshold: float = 8.0,
    *,
    window: int = 100,
    acceptable_pause: float = 0.0,
    first_interval: float = 1.0,
) -> DetectorSettings:
    """Suspect a peer by the mean of its intervals alone: 8 is a silence of 18.4 of them.

    For heartbeats at random intervals, such as gossip messages. The settings are those of
    `phi_accrual`.
    """
    return _phi(
        Exponential, "exponential", threshold, window, first_interval, acceptable_pause, 1e-3
    )


def _phi(
    kind: type[PhiAccrual],
    name: str,
    threshold: float,
    window: int,
    first: float,
    pause: float,
    min_deviation: float,
) -> DetectorSettings:
    check.at_least("threshold", threshold, 0.1)
    check.count("window", window, minimum=2)
    check.seconds("acceptable_pause", pause, zero=True)
    check.seconds("first_interval", first)
    start = partial(kind, threshold, window, first, pause, min_deviation)
    return DetectorSettings(f"{name}({threshold:g}, window={window})", start)


class QuantileTimeout(Detector):
    """Detector by a quantile of past times; see `quantile_timeout`."""

    def __init__(
        self, quantile: float, factor: float, floor: float, first: float, window: int
    ) -> None:
        super().__init__(1.0)
        self._quantile = quantile
        self._factor = factor
        self._floor = floor
        self._first = first
        self._times: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []
        self._probe_sent_at: float | None = None
        self._is_probed = False

    @property
    def limit(self) -> float:
        """Seconds of silence after which the peer is suspected."""
        ordered = self._ordered
        if not ordered:
            return max(self._floor, self._first)
        place = min(len(ordered) - 1, max(0, ceil(self._quantile * len(ordered)) - 1))
        return max(self._floor, ordered[place] * self._factor)

    def sent(self, now: float) -> None:
        """Record a probe. After the first one, round trips count instead of intervals."""
        if not isfinite(now):
            return
        self._is_probed = True
        if self._probe_sent_at is None:
            self._probe_sent_at = now
        if self._heartbeat_at is None:
            self._heartbeat_at = now

    def heartbeat(self, now: float) -> None:
        """Record a sign of life, which answers the oldest probe."""
        if self._is_probed and self._probe_sent_at is None:
            return  # no probe is open, so there is no round trip to learn from
        super().heartbeat(now)
        self._probe_sent_at = None

    def _silence(self, now: float) -> float:
        return _elapsed(self._probe_sent_at if self._is_probed else self._heartbeat_at, now)

    def _learn(self, silence: float) -> None:
        times, ordered = self._times, self._ordered
        if len(times) == times.maxlen:
            del ordered[bisect_left(ordered, times[0])]
        times.append(silence)
        insort(ordered, silence)

    def _level(self, silence: float) -> float:
        return silence / self.limit


def quantile_timeout(
    quantile: float = 0.99,
    *,
    factor: float = 4.0,
    floor: float = 0.1,
    first: float = 3.0,
    window: int = 100,
) -> DetectorSettings:
    """Suspect a peer that takes `factor` times as long as it usually does, and at least `floor`.

    "Usually" is the `quantile` of its own last `window` round trips, or of its intervals if it
    sends heartbeats without being asked. So a peer at 10 ms and a peer at 300 ms each have a
    suitable limit. `first` seconds is the limit until there is a round trip to learn from.
    """
    check.ratio("quantile", quantile)
    check.at_least("factor", factor, 1.0)
    check.seconds("floor", floor)
    check.seconds("first", first)
    check.count("window", window)
    return DetectorSettings(
        f"quantile_timeout({quantile:g}, factor={factor:g}, floor={floor:g})",
        partial(QuantileTimeout, quantile, factor, floor, first, window),
    )


class FixedTimeout(Detector):
    """Detector with a fixed timeout; see `fixed_timeout`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1.0)
        self._seconds = seconds

    def _level(self, silence: float) -> float:
        return silence / self._seconds


def fixed_timeout(seconds: float) -> DetectorSettings:
    """Suspect a peer that has been silent for `seconds`, regardless of what is usual for it."""
    check.seconds("seconds", seconds)
    return DetectorSettings(f"fixed_timeout({seconds:g})", partial(FixedTimeout, seconds))
