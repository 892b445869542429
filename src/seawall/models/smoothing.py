"""What makes a jumpy number fit to act on: an average that knows time, and a switch that sticks.

`now` is any number that grows, in the unit of the settings. One caller at a time.
"""

from __future__ import annotations

from seawall import _checks as check


class Ewma:
    """An average in which a sample counts half as much for each `half_life` that has passed.

    A sample stands for all the time since the one before it. So the average of a steady signal is
    the same however often it is looked at, and one look after a long silence is believed.
    """

    __slots__ = ("_at", "half_life", "value")

    def __init__(self, half_life: float) -> None:
        """Know nothing yet: the first sample is the average."""
        self.half_life = check.seconds("half_life", half_life)
        self.value: float | None = None
        self._at = 0.0

    def update(self, sample: float, now: float) -> float:
        """Take in what is measured at `now`, and return the average."""
        self.value = self.preview(sample, now)
        self._at = now
        return self.value

    def preview(self, sample: float, now: float) -> float:
        """Return what the average would be with `sample`, and take in nothing."""
        if self.value is None:
            return sample
        # A clock set back has not made the past any longer.
        kept: float = 0.5 ** (max(0.0, now - self._at) / self.half_life)
        return sample + (self.value - sample) * kept

    def __repr__(self) -> str:
        return f"Ewma(half_life={self.half_life:g})"


class Growth:
    """How fast a counter grows, for each unit of time since it was last looked at.

    A look less than `least` after the one before tells nothing new: over so short a time it would
    be noise.
    """

    __slots__ = ("_at", "_count", "least", "rate")

    def __init__(self, count: float, now: float, least: float = 0.0) -> None:
        """Begin with a counter that stands at `count`."""
        self.least = check.seconds("least", least, zero=True)
        self.rate = 0.0
        self._count = count
        self._at = now

    def update(self, count: float, now: float) -> float:
        """Take in the counter at `now`, and return the rate."""
        passed = now - self._at
        if 0 <= passed < self.least:
            return self.rate
        if passed > 0:
            # A counter that starts anew, as in a forked process, has not shrunk.
            self.rate = max(0.0, count - self._count) / passed
        self._count, self._at = count, now
        return self.rate


class Hysteresis:
    """High once a value has reached `rise`, low again once it is below `fall`.

    In between it stays as it is. It rises at once, since an overload must not be seen late, and
    then stays high for `hold` at least: in any time T it rises at most 1 + T / hold times.
    """

    __slots__ = ("_since", "fall", "high", "hold", "rise")

    def __init__(self, rise: float, fall: float, hold: float = 0.0) -> None:
        """Begin low."""
        self.rise = check.at_least("rise", rise, 0.0)
        self.fall = check.at_least("fall", fall, 0.0)
        if self.fall > self.rise:
            raise ValueError(f"fall={fall!r}: write rise={rise!r} or less, such as fall={rise!r}")
        self.hold = check.seconds("hold", hold, zero=True)
        self.high = False
        self._since = 0.0

    def update(self, value: float, now: float) -> bool:
        """Take in the value at `now`, and tell whether it counts as high."""
        if not self.high:
            if value >= self.rise:
                self.high = True
                self._since = now
        elif value < self.fall and now - self._since >= self.hold:
            self.high = False
        return self.high

    def __repr__(self) -> str:
        return f"Hysteresis(rise={self.rise:g}, fall={self.fall:g}, hold={self.hold:g})"
