"""Buckets: takings add to a debt, which is paid off at the rate.

The state of a bucket is one number, the theoretical arrival time (GCRA): the time at which nothing
will be owed any more. A state in the past is equivalent to no state.
"""

from __future__ import annotations

from math import gcd

from seawall.models.rate.rates import EXACT, Rate
from seawall.models.rate.rule import RateRule, S, check_exact


class Bucket(RateRule[S]):
    """Common base of all buckets: converts costs to time."""

    tolerance: float = 0.0
    """Maximum debt in microseconds with which calls are still admitted."""

    def __init__(self, rate: Rate, most: int, debt: float | None = None) -> None:
        """Pay off at `rate`. Amounts up to `most` must be exact. `debt` is one period if None."""
        super().__init__(rate)
        self.debt = float(rate.period if debt is None else debt)
        common = gcd(rate.limit, rate.period)
        self._time, self._units = rate.period // common, rate.limit // common
        if most * self._time >= EXACT:
            # Round the microseconds per unit up to a whole number: too strict by at most the
            # rounding.
            self._time, self._units = -(-rate.period // rate.limit), 1
        check_exact(rate, most * self._time)
        self.most = (EXACT - 1) * self._units // self._time

    def amount(self, cost: int) -> float:
        """Return how many microseconds it takes to pay for `cost`, rounded up."""
        return float(-(-cost * self._time // self._units))

    @property
    def overdraft(self) -> int:
        """Return the amount that can be paid off in the maximum time that may be owed."""
        return min(self.most, int(self.tolerance + self.debt) * self._units // self._time)

    def _bounded(self, owed: float, now: float, cost: int) -> float:
        """Return the end of the debt after adding `cost`, limited by `tolerance + debt`."""
        owed = max(owed, now)
        return min(owed + self.amount(cost), max(owed, now + self.tolerance + self.debt))

    def unused(self, taken: int, used: int) -> float:
        """Return how many microseconds less it takes to pay for `used` than for `taken`."""
        return self.amount(taken) - self.amount(used)

    def _converted(self, owed: float, old: RateRule[S]) -> float:
        """Convert a debt under other settings: the same number of units, at this rate."""
        assert isinstance(old, Bucket)  # noqa: S101 - for the type checker
        units, each = int(owed) * old._units * self._time, old._time * self._units  # noqa: SLF001
        return float(-(-units // each))


class TokenBucket(Bucket[float]):
    """Up to `burst` at once, then at the rate.

    In any time span d at most `burst + rate * d` is admitted, and one more for rounding; at rates
    above one per microsecond, what one microsecond pays for.
    """

    def __init__(self, rate: Rate, burst: int, debt: float | None = None) -> None:
        """Hold `burst` tokens."""
        super().__init__(rate, burst + 1, debt)
        self.capacity: int = burst
        one, all_ = self.amount(1), self.amount(burst)
        # Each cost is rounded up to a microsecond. Still admit the whole burst in single units,
        # unless that would admit more than one too many at larger costs.
        most = float((burst + 1) * self._time // self._units)
        self.tolerance = max(all_, min(burst * one, most))

    def fresh(self, now: float) -> float:
        """Return a state without debt."""
        return now

    def wait(self, state: float, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the time until the debt including this cost fits."""
        if cost > self.capacity:
            return None
        return max(0.0, max(state, now) + self.amount(ahead + cost) - now - self.tolerance)

    def take(self, state: float, now: float, cost: int) -> tuple[float, float]:
        """Add `cost` to the debt."""
        return max(state, now) + self.amount(cost), now

    def owe(self, state: float, now: float, cost: int) -> float:
        """Add `cost` to the debt, which stays bounded."""
        return self._bounded(state, now, cost)

    def give_back(self, state: float, now: float, taken: int, used: int, mark: float) -> float:
        """Reduce the debt by the part that was certainly not paid off since.

        Without the taking, the bucket could have been full meanwhile; so the part that may have
        been paid for it is lost. One number cannot express more: see `SettledBucket`.
        """
        return state - max(0.0, self.unused(taken, used) - max(0.0, now - mark))

    def left(self, state: float, now: float) -> int:
        """Return how much fits now."""
        free = now + self.tolerance - max(state, now)
        return min(self.capacity, max(0, int(free * self._units // self._time)))

    @property
    def terms(self) -> tuple[float, int, int]:
        """The numbers from which `left` is computed: the maximum debt, and units per time."""
        return self.tolerance, self._units, self._time

    def rest(self, state: float, now: float) -> float:
        """Return the time until nothing is owed."""
        return max(0.0, state - now)

    def adopt(self, state: float, old: RateRule[float], now: float) -> float:
        """Convert to a debt of the same number of units."""
        return now + self._converted(max(0.0, state - now), old)


class LeakyBucket(Bucket[float]):
    """One call after another: each is followed by a pause of `cost / rate`, for smooth output."""

    capacity = None

    def __init__(self, rate: Rate, debt: float | None = None) -> None:
        """Space admissions by `rate.period / rate.limit`, rounded up."""
        super().__init__(rate, 1, debt)

    def fresh(self, now: float) -> float:
        """Return a state without a pause."""
        return now

    def wait(self, state: float, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the time until the pause ends."""
        return max(0.0, state - now) + (self.amount(ahead) if ahead else 0.0)

    def take(self, state: float, now: float, cost: int) -> tuple[float, float]:
        """Start the pause."""
        began = max(state, now)
        return began + self.amount(cost), began

    def owe(self, state: float, now: float, cost: int) -> float:
        """Extend the pause; the debt stays bounded."""
        return self._bounded(state, now, cost)

    def give_back(self, state: float, now: float, taken: int, used: int, mark: float) -> float:
        """Shorten the pause, unless another call has started one since."""
        last = state == mark + self.amount(taken)
        return state - self.unused(taken, used) if last else state

    def left(self, state: float, now: float) -> int:
        """Return 1 outside of a pause, else 0."""
        return int(state <= now)

    def rest(self, state: float, now: float) -> float:
        """Return the time until the pause ends."""
        return max(0.0, state - now)

    def adopt(self, state: float, old: RateRule[float], now: float) -> float:
        """Convert to a pause of the same number of units."""
        return now + self._converted(max(0.0, state - now), old)
