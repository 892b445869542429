"""Buckets: what was taken is owed, and the debt is paid off at the rate.

The state of a bucket is one number, the theoretical arrival time (GCRA): the instant at which
nothing will be owed any more. A state that has passed is as good as none.
"""

from __future__ import annotations

from math import gcd

from seawall.models.rate.rates import EXACT, Rate
from seawall.models.rate.rule import Rule, S, check_exact


class Bucket(Rule[S]):
    """The part that all buckets share: what a cost is worth in time."""

    tolerance: float = 0.0
    """How many microseconds may be owed while more is admitted."""

    def __init__(self, rate: Rate, most: int, debt: float | None = None) -> None:
        """Pay off at `rate`; amounts up to `most` must be exact. `debt` is one period if None."""
        super().__init__(rate)
        self.debt = float(rate.period if debt is None else debt)
        common = gcd(rate.limit, rate.period)
        self._time, self._units = rate.period // common, rate.limit // common
        if most * self._time >= EXACT:
            # A whole number of microseconds for each, rounded up: at most so much too strict.
            self._time, self._units = -(-rate.period // rate.limit), 1
        check_exact(rate, most * self._time)
        self.most = (EXACT - 1) * self._units // self._time

    def amount(self, cost: int) -> float:
        """Return how many microseconds it takes to pay for `cost`, rounded up."""
        return float(-(-cost * self._time // self._units))

    @property
    def overdraft(self) -> int:
        """Return what can be paid off in the time that may be owed."""
        return min(self.most, int(self.tolerance + self.debt) * self._units // self._time)

    def _bounded(self, owed: float, now: float, cost: int) -> float:
        """Return until when is owed what is owed until `owed`, and `cost`, but no longer debt."""
        owed = max(owed, now)
        return min(owed + self.amount(cost), max(owed, now + self.tolerance + self.debt))

    def unused(self, taken: int, used: int) -> float:
        """Return how many microseconds less it takes to pay for `used` than for `taken`."""
        return self.amount(taken) - self.amount(used)

    def _converted(self, owed: float, old: Rule[S]) -> float:
        """Return what time `owed` under other settings is here: as many units, at this rate."""
        assert isinstance(old, Bucket)  # noqa: S101 - for the type checker
        units, each = int(owed) * old._units * self._time, old._time * self._units  # noqa: SLF001
        return float(-(-units // each))


class TokenBucket(Bucket[float]):
    """Up to `burst` at once, then at the rate.

    In any length of time d at most `burst + rate * d` is admitted, and one more for rounding; at
    more than one in a microsecond, what a microsecond pays for.
    """

    def __init__(self, rate: Rate, burst: int, debt: float | None = None) -> None:
        """Hold `burst`."""
        super().__init__(rate, burst + 1, debt)
        self.capacity: int = burst
        one, all_ = self.amount(1), self.amount(burst)
        # Each is rounded up to a microsecond, and still as many fit as the burst is large, unless
        # that would be more than one too many for larger costs.
        most = float((burst + 1) * self._time // self._units)
        self.tolerance = max(all_, min(burst * one, most))

    def fresh(self, now: float) -> float:
        """Owe nothing."""
        return now

    def wait(self, state: float, now: float, cost: int, ahead: int = 0) -> float | None:
        """Wait until the debt with this cost fits."""
        if cost > self.capacity:
            return None
        return max(0.0, max(state, now) + self.amount(ahead + cost) - now - self.tolerance)

    def take(self, state: float, now: float, cost: int) -> tuple[float, float]:
        """Owe so much more."""
        return max(state, now) + self.amount(cost), now

    def owe(self, state: float, now: float, cost: int) -> float:
        """Owe so much more, as long as the debt is bounded."""
        return self._bounded(state, now, cost)

    def give_back(self, state: float, now: float, taken: int, used: int, mark: float) -> float:
        """Owe less by what was surely not paid off since.

        Had it not been taken, the bucket could have been full meanwhile; so what may have been
        paid for it is gone. One number cannot tell more: see `SettledBucket`.
        """
        return state - max(0.0, self.unused(taken, used) - max(0.0, now - mark))

    def left(self, state: float, now: float) -> int:
        """Return what fits."""
        free = now + self.tolerance - max(state, now)
        return min(self.capacity, max(0, int(free * self._units // self._time)))

    @property
    def terms(self) -> tuple[float, int, int]:
        """What `left` is worked out by: the most that may be owed, and so many units in a time."""
        return self.tolerance, self._units, self._time

    def rest(self, state: float, now: float) -> float:
        """Wait until nothing is owed."""
        return max(0.0, state - now)

    def adopt(self, state: float, old: Rule[float], now: float) -> float:
        """Owe as many units."""
        return now + self._converted(max(0.0, state - now), old)


class LeakyBucket(Bucket[float]):
    """One after another: each is followed by a pause of `cost / rate`, so output is smooth."""

    capacity = None

    def __init__(self, rate: Rate, debt: float | None = None) -> None:
        """Space admissions by `rate.period / rate.limit`, rounded up."""
        super().__init__(rate, 1, debt)

    def fresh(self, now: float) -> float:
        """Be free."""
        return now

    def wait(self, state: float, now: float, cost: int, ahead: int = 0) -> float | None:
        """Wait for the end of the pause."""
        return max(0.0, state - now) + (self.amount(ahead) if ahead else 0.0)

    def take(self, state: float, now: float, cost: int) -> tuple[float, float]:
        """Begin the pause."""
        began = max(state, now)
        return began + self.amount(cost), began

    def owe(self, state: float, now: float, cost: int) -> float:
        """Pause for longer, as long as the debt is bounded."""
        return self._bounded(state, now, cost)

    def give_back(self, state: float, now: float, taken: int, used: int, mark: float) -> float:
        """Shorten the pause, if nobody else has begun another since."""
        last = state == mark + self.amount(taken)
        return state - self.unused(taken, used) if last else state

    def left(self, state: float, now: float) -> int:
        """Return 1 outside of a pause."""
        return int(state <= now)

    def rest(self, state: float, now: float) -> float:
        """Wait for the end of the pause."""
        return max(0.0, state - now)

    def adopt(self, state: float, old: Rule[float], now: float) -> float:
        """Pause for as many units."""
        return now + self._converted(max(0.0, state - now), old)
