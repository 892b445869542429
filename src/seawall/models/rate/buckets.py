"""Buckets: takings add to a debt, which is paid off at the rate.

The state of a bucket is one number, the theoretical arrival time (GCRA): the time at which nothing
will be owed any more. A state in the past is equivalent to no state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import gcd
from typing import Final

from seawall.models.rate.rates import EXACT, Rate
from seawall.models.rate.rule import RateRule, check_exact

_ESTIMATES_AT_MOST: Final = 128  # open estimates settled exactly; beyond, some get less back


class Bucket(RateRule[float]):
    """Common base of the buckets: converts costs to time."""

    tolerance: float = 0.0  # maximum debt in microseconds with which calls are still admitted

    def __init__(self, rate: Rate, most: int, debt: float | None = None) -> None:
        """Pay off at `rate`. Amounts up to `most` must be exact. `debt` is one period if None."""
        super().__init__(rate)
        self.debt = float(rate.period if debt is None else debt)
        common = gcd(rate.limit, rate.period)
        self._time, self._units = rate.period // common, rate.limit // common
        if most * self._time >= EXACT:
            # Round the microseconds per unit up: too strict by at most the rounding.
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

    def fresh(self, now: float) -> float:
        """Return a state without debt."""
        return now

    def owe(self, state: float, now: float, cost: int) -> float:
        """Add `cost` to the debt, which never grows beyond `tolerance + debt`."""
        owed = max(state, now)
        return min(owed + self.amount(cost), max(owed, now + self.tolerance + self.debt))

    def rest(self, state: float, now: float) -> float:
        """Return the time until nothing is owed."""
        return max(0.0, state - now)

    def unused(self, taken: int, used: int) -> float:
        """Return how many microseconds less it takes to pay for `used` than for `taken`."""
        return self.amount(taken) - self.amount(used)

    def adopt(self, state: float, old: RateRule[float], now: float) -> float:
        """Convert a debt under other settings: the same number of units, at this rate."""
        assert isinstance(old, Bucket)  # noqa: S101 - for the type checker
        owed = int(max(0.0, state - now))
        units, each = owed * old._units * self._time, old._time * self._units  # noqa: SLF001
        return now + float(-(-units // each))


class TokenBucket(Bucket):
    """Up to `burst` at once, then at the rate.

    In any time span d at most `burst + rate * d` is admitted, and one more for rounding; at rates
    above one per microsecond, what one microsecond pays for.
    """

    def __init__(self, rate: Rate, burst: int, debt: float | None = None) -> None:
        super().__init__(rate, burst + 1, debt)
        self.capacity: int = burst
        one, all_ = self.amount(1), self.amount(burst)
        # Each cost is rounded up to a microsecond. Still admit the whole burst in single units,
        # unless that would admit more than one too many at larger costs.
        most = float((burst + 1) * self._time // self._units)
        self.tolerance = max(all_, min(burst * one, most))

    def wait(self, state: float, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the time until the debt including this cost fits."""
        if cost > self.capacity:
            return None
        return max(0.0, max(state, now) + self.amount(ahead + cost) - now - self.tolerance)

    def take(self, state: float, now: float, cost: int) -> tuple[float, float]:
        """Add `cost` to the debt."""
        return max(state, now) + self.amount(cost), now

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


class LeakyBucket(Bucket):
    """One call after another: each is followed by a pause of `cost / rate`, for smooth output."""

    capacity = None

    def __init__(self, rate: Rate, debt: float | None = None) -> None:
        super().__init__(rate, 1, debt)

    def wait(self, state: float, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the time until the pause ends."""
        return max(0.0, state - now) + (self.amount(ahead) if ahead else 0.0)

    def take(self, state: float, now: float, cost: int) -> tuple[float, float]:
        """Start the pause."""
        began = max(state, now)
        return began + self.amount(cost), began

    def give_back(self, state: float, now: float, taken: int, used: int, mark: float) -> float:
        """Shorten the pause, unless another call has started one since."""
        last = state == mark + self.amount(taken)
        return state - self.unused(taken, used) if last else state

    def left(self, state: float, now: float) -> int:
        """Return 1 outside of a pause, else 0."""
        return int(state <= now)


# Takings whose actual cost is not known yet


@dataclass(eq=False, slots=True)
class Account:
    """State of a bucket with open estimates: the debt, and its minimum since each estimate.

    When no estimate is open, only the debt matters: the owner can store that one number instead.
    """

    owed_until: float
    open: int = 0  # number of estimates still to be settled
    taken: int = 0  # number of recorded takings: the mark of an estimate at its time
    estimates: list[int] = field(default_factory=list)  # marks of the open ones, or of every other
    # Debts just before takings, as a stack that grows from old and low to new and high, since only
    # minima since a mark are needed; and only one between two estimates, since no query falls in
    # between. Its mark is that of the latest taking it represents, so it is never lenient.
    marks: list[int] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)

    def note(self, owed: float) -> None:
        """Record the debt before another taking, if an estimate is open."""
        if not self.open:
            return
        self.taken += 1
        marks, lows = self.marks, self.lows
        while lows and lows[-1] >= owed:
            lows.pop()
            marks.pop()
        if marks and (not self.estimates or marks[-1] > self.estimates[-1]):
            marks[-1] = self.taken
        else:
            marks.append(self.taken)
            lows.append(owed)

    def begin(self) -> int:
        """Mark the latest taking as an estimate and return its mark."""
        self.open += 1
        self.estimates.append(self.taken)
        if len(self.estimates) > _ESTIMATES_AT_MOST:
            del self.estimates[::2]
            self._merge()
        return self.taken

    def end(self, mark: float) -> None:
        """Close an estimate."""
        self.open -= 1
        place = bisect_left(self.estimates, mark)
        if place < len(self.estimates) and self.estimates[place] == mark:
            del self.estimates[place]
            self._merge()

    def _merge(self) -> None:
        marks: list[int] = []
        lows: list[float] = []
        between = -1
        for mark, low in zip(self.marks, self.lows, strict=True):
            before, between = between, bisect_left(self.estimates, mark)
            if between == before:
                marks[-1] = mark
            else:
                marks.append(mark)
                lows.append(low)
        self.marks, self.lows = marks, lows

    def since(self, mark: float) -> int:
        """Return the index of the first low after `mark`."""
        return bisect_right(self.marks, mark)

    def owe_less(self, by: float, first: int) -> None:
        """Reduce the debt, and the recorded debts from index `first` on."""
        self.owed_until -= by
        marks, lows, least = [], [], float("inf")
        for place in reversed(range(len(self.lows))):
            low = self.lows[place]
            if place >= first:
                low = max(0.0, low - by)
            if low < least:  # otherwise a later entry is already as low
                least = low
                marks.append(self.marks[place])
                lows.append(low)
        self.marks, self.lows = marks[::-1], lows[::-1]


class SettledBucket(RateRule[Account]):
    """A token bucket in which the actual cost of a taking may later turn out to be lower.

    Treat the unused part as the last to be paid off: it is paid only while nothing else is owed. So
    the unpaid part of it is at most the lowest debt since the taking, and exactly that is given
    back: the bucket is then in the state it would have if the unused part had never been taken.
    """

    def __init__(self, bucket: TokenBucket) -> None:
        super().__init__(bucket.rate)
        self.bucket = bucket
        self.capacity: int = bucket.capacity
        self.debt, self.most = bucket.debt, bucket.most

    def fresh(self, now: float) -> Account:
        """Return an account without debt."""
        return Account(now)

    def wait(self, state: Account, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the wait, as in a token bucket."""
        return self.bucket.wait(state.owed_until, now, cost, ahead)

    def take(self, state: Account, now: float, cost: int) -> tuple[Account, float]:
        """Add `cost` to the debt, without an estimate."""
        state.note(max(0.0, state.owed_until - now))
        state.owed_until, mark = self.bucket.take(state.owed_until, now, cost)
        return state, mark

    def owe(self, state: Account, now: float, cost: int) -> Account:
        """Add `cost` to the debt, which stays bounded."""
        state.note(max(0.0, state.owed_until - now))
        state.owed_until = self.bucket.owe(state.owed_until, now, cost)
        return state

    def give_back(self, state: Account, now: float, taken: int, used: int, mark: float) -> Account:
        """Reduce the debt by the part that was certainly not paid off since; not for estimates.

        The lows stay as they are. No part of it was paid, so all debts since were higher by all of
        it: without it, those that an earlier estimate needs are no lower than the one just before
        it, and those that a later one needs are no lower than that estimate.
        """
        rest = self.bucket.give_back(state.owed_until, now, taken, used, mark)
        state.owed_until = max(rest, min(state.owed_until, now))
        return state

    def estimate(self, state: Account, now: float, cost: int) -> tuple[Account, float]:
        """Add `cost` to the debt until it is settled, by this mark."""
        state, _mark = self.take(state, now, cost)
        return state, state.begin()

    def settle(self, state: Account, now: float, taken: int, used: int, mark: float) -> Account:
        """Reduce the debt by the unpaid part of the estimate, as if only `used` had been taken."""
        owed = max(0.0, state.owed_until - now)
        first = state.since(mark)
        lowest = state.lows[first] if first < len(state.lows) else owed
        unpaid = min(self.bucket.unused(taken, used), owed, lowest)
        if unpaid > 0:
            state.owe_less(unpaid, first)
        return state

    def left(self, state: Account, now: float) -> int:
        """Return how much fits now."""
        return self.bucket.left(state.owed_until, now)

    def rest(self, state: Account, now: float) -> float:
        """Return the time until nothing is owed."""
        return self.bucket.rest(state.owed_until, now)
