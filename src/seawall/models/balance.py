"""Load balancing between hosts: draw two at random and choose the cheaper one.

The cost of a host is what a new request has to expect there: (in flight + 1) x latency. The more
expensive of the two is never chosen, so a host in trouble loses its traffic with the first slow
answer. No client compares all hosts, so a herd of clients does not run to the same cheapest one.

Latency is a peak average: it rises immediately with a slower answer and falls with time. Without
answers it halves every `half_life`, so that a slow host is eventually tried again. A failed or
abandoned request took at least its measured time, and can only raise the average: a host that fails
fast must not look fast. Neither must a host that refuses fast: until its next good answer it is
never cheaper than any other. A single failure is treated as bad luck; each further consecutive
failure adds the host's latency to its cost once more, until that too has decayed.

`now` is any growing number, in the unit of the settings. Callers must serialise access.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LEAST: Final = 0.001  # seconds below which latencies count as equal: differences are noise
SMOOTHING: Final = 0.125  # weight of one answer in the moving average `usual`
MOST_FAILURES: Final = 64  # consecutive failures that raise the cost: more carry no new information


class Load:
    """Requests in flight and latency of one host."""

    def __init__(self, half_life: float) -> None:
        """Start without measurements; see `cost` for how such a host is rated."""
        self.half_life = half_life
        self.in_flight = 0
        self.usual: float | None = None  # plain average of good answers, without failures
        self.forget()

    def forget(self) -> None:
        """Reset to the state of a new host, but keep `in_flight` and `usual`."""
        self.latency = 0.0  # peak average as of the last answer
        self.measured = False  # whether there was a good answer; `latency` is a lower bound before
        self.refusing = False  # whether the host has refused a request since its last good answer
        self.failures = 0  # number of consecutive failures
        self._at = 0.0

    def answered(self, seconds: float, now: float) -> None:
        """Record a good answer that took `seconds`."""
        self.failures = 0
        self.measured = True
        self.refusing = False
        usual = self.usual
        self.usual = seconds if usual is None else usual + (seconds - usual) * SMOOTHING
        if seconds < self.latency:
            seconds += (self.latency - seconds) * self._kept(now)
        self.latency = seconds
        self._at = now

    def failed(self, seconds: float, now: float) -> None:
        """Record a failure after `seconds`."""
        self.failures = min(self.failures + 1, MOST_FAILURES)
        self.latency = max(seconds, self.expected(now))
        self._at = now

    def given_up(self, seconds: float, now: float) -> None:
        """Record that the caller gave up after `seconds`: neither a success nor a failure."""
        if seconds > self.expected(now):
            self.latency = seconds
            self._at = now

    def refused(self, seconds: float, now: float) -> None:
        """Record that the host refused after `seconds`. A good answer takes longer than that."""
        self.refusing = True
        self.given_up(seconds, now)

    def expected(self, now: float) -> float:
        """Return the latency to expect now."""
        return max(LEAST, self.latency * self._kept(now))

    def wariness(self, now: float) -> float:
        """Return the factor, at least 1, by which recent failures raise the cost."""
        if self.failures < 2:  # noqa: PLR2004 - a single failure is bad luck
            return 1.0
        # Round to whole numbers so that the factor returns to 1: a host that stays slightly more
        # expensive than the others would never be chosen.
        return 1.0 + round((self.failures - 1) * self._kept(now))

    def _kept(self, now: float) -> float:
        """Return the fraction of the last latency that has not decayed yet."""
        passed = now - self._at
        # A clock that was set back must not raise the latency.
        return float(0.5 ** (passed / self.half_life)) if passed > 0 else 1.0


def cost(load: Load, other: Load, now: float) -> float:
    """Return the cost that a new request has to expect at `load`, compared with `other`.

    A host that never answered is assumed to be as fast as the other. So a new host gets as many
    requests in flight as the others have, and not at once more than it may be able to handle. A
    host that refuses is never cheaper than the other: it is never busy, since it does no work.
    """
    latency = load.expected(now)
    if not load.measured and other.measured:
        latency = max(latency, other.expected(now))
    own = (load.in_flight + 1) * latency * load.wariness(now)
    return max(own, cost(other, load, now)) if load.refusing and not other.refusing else own


def choose(loads: Sequence[Load], now: float, chance: float) -> int:
    """Return the index of the cheaper of two hosts, which `chance` (uniform in [0, 1)) draws."""
    count = len(loads)
    if count == 1:
        return 0
    first, second = divmod(int(chance * (count * (count - 1))), count - 1)
    second += second >= first
    one, other = loads[first], loads[second]
    return second if cost(other, one, now) < cost(one, other, now) else first
