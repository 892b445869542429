"""Buckets: what was taken is owed, and the debt is paid off at the rate.

The state of a bucket is one number, the theoretical arrival time (GCRA): the instant at which
nothing will be owed any more. A state that has passed is as good as none.
"""

from __future__ import annotations

from bisect import bisect_left
from math import gcd
from typing import Final

from seawall.models.rate_rule import Rule, S, check_exact
from seawall.models.rates import EXACT, Rate

_MARKS_AT_MOST: Final = 128


class _Bucket(Rule[S]):
    """The part that all buckets share: what a cost is worth in time."""

    def __init__(self, rate: Rate, most: int) -> None:
        """Pay off at `rate`; amounts up to `most` must be exact."""
        super().__init__(rate)
        common = gcd(rate.limit, rate.period)
        self._time, self._units = rate.period // common, rate.limit // common
        if most * self._time >= EXACT:
            # A whole number of microseconds for each, rounded up: at most so much too strict.
            self._time, self._units = -(-rate.period // rate.limit), 1
        check_exact(rate, most * self._time)

    def amount(self, cost: int) -> float:
        """Return how many microseconds it takes to pay for `cost`, rounded up."""
        return float(-(-cost * self._time // self._units))

    def unused(self, taken: int, used: int) -> float:
        """Return how many microseconds less it takes to pay for `used` than for `taken`."""
        return self.amount(taken) - self.amount(used)

    def _converted(self, owed: float, old: Rule[S]) -> float:
        """Return what time `owed` under other settings is here: as many units, at this rate."""
        assert isinstance(old, _Bucket)  # noqa: S101 - for the type checker
        units, each = int(owed) * old._units * self._time, old._time * self._units  # noqa: SLF001
        return float(-(-units // each))


class TokenBucket(_Bucket[float]):
    """Up to `burst` at once, then at the rate.

    In any length of time d at most `burst + rate * d` is admitted, and one more for rounding.
    """

    def __init__(self, rate: Rate, burst: int) -> None:
        """Hold `burst`."""
        super().__init__(rate, burst + 1)
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

    def give_back(self, state: float, now: float, taken: int, used: int, mark: float) -> float:
        """Owe less by what was surely not paid off since.

        Had it not been taken, the bucket could have been full meanwhile; so what may have been
        paid for it is gone.
        """
        return state - max(0.0, self.unused(taken, used) - max(0.0, now - mark))

    def left(self, state: float, now: float) -> int:
        """Return what fits."""
        free = now + self.tolerance - max(state, now)
        return min(self.capacity, max(0, int(free * self._units // self._time)))

    def rest(self, state: float, now: float) -> float:
        """Wait until nothing is owed."""
        return max(0.0, state - now)

    def adopt(self, state: float, old: Rule[float], now: float) -> float:
        """Owe as many units."""
        return now + self._converted(max(0.0, state - now), old)


class Account:
    """The state of a bucket whose takings are settled later: the debt, and how low it has been."""

    __slots__ = ("given", "lows", "marks", "owed_until", "taken")

    def __init__(self, owed_until: float) -> None:
        """Owe until that instant."""
        self.owed_until = owed_until
        self.taken = 0
        """How many takings there were: the number of the latest is its mark."""
        self.given = 0.0
        """How much has been given back, ever."""
        # What was owed just before each taking, plus what had been given back by then; as a stack
        # that grows from old and low to new and high, since only minima since a mark are asked for.
        self.marks: list[int] = []
        self.lows: list[float] = []

    def note(self, owed: float) -> None:
        """Remember what was owed before another taking."""
        low = owed + self.given
        while self.lows and self.lows[-1] >= low:
            self.lows.pop()
            self.marks.pop()
        self.taken += 1
        self.marks.append(self.taken)
        self.lows.append(low)
        if len(self.marks) > _MARKS_AT_MOST:
            # Two become one that is as low as the lower and as late as the later: never lenient.
            odd = len(self.marks) % 2
            self.marks = self.marks[:odd] + self.marks[odd + 1 :: 2]
            self.lows = self.lows[:odd] + self.lows[odd::2]

    def lowest_since(self, mark: float) -> float:
        """Return the least that was owed just before any taking after `mark`."""
        after = bisect_left(self.marks, mark + 1)
        return self.lows[after] - self.given if after < len(self.lows) else float("inf")


class SettledBucket(_Bucket[Account]):
    """A token bucket in which a taking may later turn out to have been less.

    Think of the unused part as the last to be paid off: it is paid only while nothing else is
    owed. So what is still unpaid of it is the lowest debt since, and just that is given back: the
    bucket then stands as if the unused part had never been taken.
    """

    def __init__(self, bucket: TokenBucket) -> None:
        """Follow the rule of `bucket`."""
        super().__init__(bucket.rate, bucket.capacity + 1)
        self.bucket = bucket
        self.capacity: int = bucket.capacity

    def fresh(self, now: float) -> Account:
        """Owe nothing."""
        return Account(now)

    def wait(self, state: Account, now: float, cost: int, ahead: int = 0) -> float | None:
        """Wait as in a token bucket."""
        return self.bucket.wait(state.owed_until, now, cost, ahead)

    def take(self, state: Account, now: float, cost: int) -> tuple[Account, float]:
        """Owe so much more."""
        state.note(max(0.0, state.owed_until - now))
        state.owed_until = self.bucket.take(state.owed_until, now, cost)[0]
        return state, state.taken

    def give_back(self, state: Account, now: float, taken: int, used: int, mark: float) -> Account:
        """Owe less by what is still unpaid of it."""
        owed = max(0.0, state.owed_until - now)
        unpaid = min(self.unused(taken, used), state.lowest_since(mark), owed)
        if unpaid > 0:
            state.owed_until -= unpaid
            state.given += unpaid
        return state

    def left(self, state: Account, now: float) -> int:
        """Return what fits."""
        return self.bucket.left(state.owed_until, now)

    def rest(self, state: Account, now: float) -> float:
        """Wait until nothing is owed."""
        return self.bucket.rest(state.owed_until, now)

    def copy(self, state: Account) -> Account:
        """Return an account with the same debt, and no takings to settle."""
        return Account(state.owed_until)

    def adopt(self, state: Account, old: Rule[Account], now: float) -> Account:
        """Owe as many units; what is still to be settled is not given back."""
        assert isinstance(old, SettledBucket)  # noqa: S101 - for the type checker
        state.owed_until = self.bucket.adopt(state.owed_until, old.bucket, now)
        state.note(0.0)
        return state


class LeakyBucket(_Bucket[float]):
    """One after another: each is followed by a pause of `cost / rate`, so output is smooth."""

    capacity = None

    def __init__(self, rate: Rate) -> None:
        """Space admissions by `rate.period / rate.limit`, rounded up."""
        super().__init__(rate, 1)

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
