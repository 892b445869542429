"""Smoothing of noisy signals: a time-weighted average, a growth rate, and hysteresis.

`now` is any growing number, in the unit of the settings. Callers must serialise access.
"""

from __future__ import annotations

from seawall import _checks as check


class Ewma:
    """An average in which the weight of a sample halves every `half_life`.

    A sample represents all the time since the previous one. So the average of a steady signal does
    not depend on how often it is sampled, and a sample after a long silence has full weight.
    """

    def __init__(self, half_life: float) -> None:
        self.half_life = check.seconds("half_life", half_life)
        self.value: float | None = None
        self._at = 0.0

    def update(self, sample: float, now: float) -> float:
        """Add the sample measured at `now` and return the average."""
        self.value = self.preview(sample, now)
        self._at = now
        return self.value

    def preview(self, sample: float, now: float) -> float:
        """Return what the average would be with `sample`, without adding it."""
        if self.value is None:
            return sample
        # A clock that was set back must not change the weight.
        kept: float = 0.5 ** (max(0.0, now - self._at) / self.half_life)
        return sample + (self.value - sample) * kept


class Growth:
    """Growth rate of a counter. Readings within `least` of each other would be noise: ignored."""

    def __init__(self, count: float, now: float, least: float = 0.0) -> None:
        self.least = check.seconds("least", least, zero=True)
        self.rate = 0.0
        self._count = count
        self._at = now

    def update(self, count: float, now: float) -> float:
        """Process the counter value at `now` and return the rate."""
        passed = now - self._at
        if 0 <= passed < self.least:
            return self.rate
        if passed > 0:
            # A counter that restarts, as in a forked process, has not shrunk.
            self.rate = max(0.0, count - self._count) / passed
        self._count, self._at = count, now
        return self.rate


class Hysteresis:
    """High once a value has reached `rise`, low again once it is below `fall`.

    In between it stays as it is. It rises immediately, since an overload must not be noticed late,
    and then stays high for at least `hold`: in any time T it rises at most 1 + T / hold times.
    """

    def __init__(self, rise: float, fall: float, hold: float = 0.0) -> None:
        self.rise = check.at_least("rise", rise, 0.0)
        self.fall = check.at_least("fall", fall, 0.0)
        if self.fall > self.rise:
            raise ValueError(f"fall={fall!r}: write rise={rise!r} or less, such as fall={rise!r}")
        self.hold = check.seconds("hold", hold, zero=True)
        self.high = False
        self._since = 0.0

    def update(self, value: float, now: float) -> bool:
        """Process the value at `now` and return whether it counts as high."""
        if not self.high:
            if value >= self.rise:
                self.high = True
                self._since = now
        elif value < self.fall and now - self._since >= self.hold:
            self.high = False
        return self.high
