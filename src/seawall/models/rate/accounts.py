"""Accounts: a token bucket with takings whose actual cost is not known yet."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

from seawall.models.rate.buckets import Bucket, TokenBucket

_ESTIMATES_AT_MOST: Final = 128
"""Maximum number of open estimates that are settled exactly.

Beyond it, some are settled for less than possible.
"""


class Account:
    """State of a bucket with open estimates: the debt, and its minimum since each estimate.

    When no estimate is open, only the debt matters: the owner can store that one number instead.
    """

    __slots__ = ("estimates", "lows", "marks", "open", "owed_until", "taken")

    def __init__(self, owed_until: float) -> None:
        """Start with a debt until `owed_until`."""
        self.owed_until = owed_until
        self.open = 0
        """Number of estimates still to be settled."""
        self.taken = 0
        """Number of recorded takings. The mark of an estimate is this number at its time."""
        self.estimates: list[int] = []
        """Marks of the open estimates, or of every other one if there are too many."""
        # Debts just before takings, as a stack that grows from old and low to new and high, since
        # only minima since a mark are needed; and only one between two estimates, since no query
        # falls in between. Its mark is that of the latest taking it represents, so it is never
        # lenient.
        self.marks: list[int] = []
        self.lows: list[float] = []

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


class SettledBucket(Bucket[Account]):
    """A token bucket in which the actual cost of a taking may later turn out to be lower.

    Treat the unused part as the last to be paid off: it is paid only while nothing else is owed. So
    the unpaid part of it is at most the lowest debt since the taking, and exactly that is given
    back: the bucket is then in the state it would have if the unused part had never been taken.
    """

    def __init__(self, bucket: TokenBucket) -> None:
        """Follow the rule of `bucket`."""
        super().__init__(bucket.rate, bucket.capacity + 1, bucket.debt)
        self.bucket = bucket
        self.capacity: int = bucket.capacity

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
        """Add `cost` to the debt until it is settled.

        The mark is for `settle` and `Account.end`.
        """
        state, _mark = self.take(state, now, cost)
        return state, state.begin()

    def settle(self, state: Account, now: float, taken: int, used: int, mark: float) -> Account:
        """Reduce the debt by the unpaid part of the estimate, as if only `used` had been taken."""
        owed = max(0.0, state.owed_until - now)
        first = state.since(mark)
        lowest = state.lows[first] if first < len(state.lows) else owed
        unpaid = min(self.unused(taken, used), owed, lowest)
        if unpaid > 0:
            state.owe_less(unpaid, first)
        return state

    def left(self, state: Account, now: float) -> int:
        """Return how much fits now."""
        return self.bucket.left(state.owed_until, now)

    def rest(self, state: Account, now: float) -> float:
        """Return the time until nothing is owed."""
        return self.bucket.rest(state.owed_until, now)
