"""Which of several hosts to ask: of two drawn by chance, the one that costs less.

The cost of a host is what a newcomer has to expect there: (in flight + 1) x latency. Of two drawn
hosts the dearer one is never taken, so a host in trouble loses its traffic with the first slow
answer; and nobody looks at all hosts, so a herd of clients does not run to the same cheapest one.

Latency is a peak average: it rises at once with a slower answer, and falls with time. In silence it
halves each `half_life`, so that a host that was slow is asked again some day. What failed, or was
given up, took at least that long, and can only raise it: who fails fast must not look fast. Nor
must who refuses fast: until its next good answer, a host that refused is not cheaper than any
other. One failure is bad luck; each more in a row makes a host dearer by its latency once
more, until that too has faded.

`now` is any number that grows, in the unit of the settings. One caller at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LEAST: Final = 0.001
"""Seconds below which latencies do not differ: that is the scheduler's noise, not the host's."""

SMOOTHING: Final = 0.125
"""How much of the difference one answer makes to what is usual."""

MOST_FAILURES: Final = 64
"""Failures in a row that make a host dearer; more of them say nothing new."""


class Load:
    """What one host is busy with, and how long its answers take."""

    __slots__ = (
        "_at",
        "failures",
        "half_life",
        "in_flight",
        "latency",
        "measured",
        "refusing",
        "usual",
    )

    def __init__(self, half_life: float) -> None:
        """Know nothing yet; see `cost` for what that means."""
        self.half_life = half_life
        self.in_flight = 0
        self.usual: float | None = None
        """A plain average of good answers, failures and peaks aside; None before the first."""
        self.forget()

    def forget(self) -> None:
        """Be as a new host again, but for what is in flight and what is usual."""
        self.latency = 0.0
        """The peak average, as of the last answer."""
        self.measured = False
        """Whether there was a good answer; if not, `latency` is only a lower bound."""
        self.refusing = False
        """Whether it has refused since its last good answer."""
        self.failures = 0
        """Failures in a row."""
        self._at = 0.0

    def answered(self, seconds: float, now: float) -> None:
        """Take in a good answer that took `seconds`."""
        self.failures = 0
        self.measured = True
        self.refusing = False
        usual = self.usual
        self.usual = seconds if usual is None else usual + (seconds - usual) * SMOOTHING
        if seconds < self.latency:
            kept = self._kept(now)
            seconds += (self.latency - seconds) * kept
        self.latency = seconds
        self._at = now

    def failed(self, seconds: float, now: float) -> None:
        """Take in a failure after `seconds`."""
        self.failures = min(self.failures + 1, MOST_FAILURES)
        self.latency = max(seconds, self.expected(now))
        self._at = now

    def given_up(self, seconds: float, now: float) -> None:
        """Take in that after `seconds` nobody wanted the answer any more: no verdict."""
        if seconds > self.expected(now):
            self.latency = seconds
            self._at = now

    def refused(self, seconds: float, now: float) -> None:
        """Take in that the host said no after `seconds`: a good answer takes longer."""
        self.refusing = True
        self.given_up(seconds, now)

    def expected(self, now: float) -> float:
        """Return the latency to expect now."""
        return max(LEAST, self.latency * self._kept(now))

    def wariness(self, now: float) -> float:
        """Return how many times dearer the latest failures make it, 1 or more."""
        if self.failures < 2:  # noqa: PLR2004 - see above
            return 1.0
        # Whole numbers, so that it ends: a little dearer than the others would be never asked.
        return 1.0 + round((self.failures - 1) * self._kept(now))

    def _kept(self, now: float) -> float:
        """Return how much of what was known at the last answer is left."""
        passed = now - self._at
        # A clock set back has not made the past any longer.
        return float(0.5 ** (passed / self.half_life)) if passed > 0 else 1.0

    def __repr__(self) -> str:
        return f"<Load: {self.in_flight} in flight, {self.latency:g} s>"


def cost(load: Load, other: Load, now: float) -> float:
    """Return what a newcomer has to expect at `load`, beside `other`.

    One that never answered is taken to be as fast as the other: a new host then gets as much in
    flight as the others have, and not all at once what it might not bear. One that refuses is not
    cheaper than the other: it is never busy, since it does no work.
    """
    latency = load.expected(now)
    if not load.measured and other.measured:
        latency = max(latency, other.expected(now))
    own = (load.in_flight + 1) * latency * load.wariness(now)
    return max(own, cost(other, load, now)) if load.refusing and not other.refusing else own


def choose(loads: Sequence[Load], now: float, chance: float) -> int:
    """Return the index of the cheaper of two; `chance` is uniform in [0, 1) and draws them both.

    Of two that cost the same, either may come out.
    """
    count = len(loads)
    if count == 1:
        return 0
    first, second = divmod(int(chance * (count * (count - 1))), count - 1)
    second += second >= first
    one, other = loads[first], loads[second]
    return second if cost(other, one, now) < cost(one, other, now) else first
