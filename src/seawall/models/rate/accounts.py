"""Accounts: a token bucket while it is not known yet what some takings really cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

from seawall.models.rate.buckets import Bucket, TokenBucket

_ESTIMATES_AT_MOST: Final = 128
"""So many that are open at once are settled exactly; of more, some less than they could be."""


class Account:
    """The state of a bucket with open estimates: the debt, and how low it has been since each.

    When none is open any more, it is no more than its debt: whoever keeps it can keep that one
    number instead.
    """

    __slots__ = ("estimates", "lows", "marks", "open", "owed_until", "taken")

    def __init__(self, owed_until: float) -> None:
        """Owe until that instant."""
        self.owed_until = owed_until
        self.open = 0
        """How many estimates are still to be settled."""
        self.taken = 0
        """How many takings were noted: the mark of an estimate is how many there were by then."""
        self.estimates: list[int] = []
        """The marks of those that are open, or of every other one, if there are too many."""
        # What was owed just before takings; as a stack that grows from old and low to new and high,
        # since only minima since a mark are asked for; and one between two estimates, since nobody
        # asks in between. Its mark is that of the latest it speaks for: so it is never lenient.
        self.marks: list[int] = []
        self.lows: list[float] = []

    def note(self, owed: float) -> None:
        """Remember what was owed before another taking, if anybody will ask."""
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
        """Let the latest taking be an estimate; return its mark."""
        self.open += 1
        self.estimates.append(self.taken)
        if len(self.estimates) > _ESTIMATES_AT_MOST:
            del self.estimates[::2]
            self._merge()
        return self.taken

    def end(self, mark: float) -> None:
        """Let an estimate be open no more."""
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
        """Return which of the lows is the first after `mark`."""
        return bisect_right(self.marks, mark)

    def owe_less(self, by: float, first: int) -> None:
        """Lower the debt, and what was owed before takings from the `first` of the lows on."""
        self.owed_until -= by
        marks, lows, least = [], [], float("inf")
        for place in reversed(range(len(self.lows))):
            low = self.lows[place]
            if place >= first:
                low = max(0.0, low - by)
            if low < least:  # else a later one says more
                least = low
                marks.append(self.marks[place])
                lows.append(low)
        self.marks, self.lows = marks[::-1], lows[::-1]


class SettledBucket(Bucket[Account]):
    """A token bucket in which a taking may later turn out to have been less.

    Think of the unused part as the last to be paid off: it is paid only while nothing else is
    owed. So what is still unpaid of it is the lowest debt since, and just that is given back: the
    bucket then stands as if the unused part had never been taken.
    """

    def __init__(self, bucket: TokenBucket) -> None:
        """Follow the rule of `bucket`."""
        super().__init__(bucket.rate, bucket.capacity + 1, bucket.debt)
        self.bucket = bucket
        self.capacity: int = bucket.capacity

    def fresh(self, now: float) -> Account:
        """Owe nothing."""
        return Account(now)

    def wait(self, state: Account, now: float, cost: int, ahead: int = 0) -> float | None:
        """Wait as in a token bucket."""
        return self.bucket.wait(state.owed_until, now, cost, ahead)

    def take(self, state: Account, now: float, cost: int) -> tuple[Account, float]:
        """Owe so much more, which is no estimate."""
        state.note(max(0.0, state.owed_until - now))
        state.owed_until, mark = self.bucket.take(state.owed_until, now, cost)
        return state, mark

    def owe(self, state: Account, now: float, cost: int) -> Account:
        """Owe so much more, as long as the debt is bounded."""
        state.note(max(0.0, state.owed_until - now))
        state.owed_until = self.bucket.owe(state.owed_until, now, cost)
        return state

    def give_back(self, state: Account, now: float, taken: int, used: int, mark: float) -> Account:
        """Owe less by what was surely not paid off since, of what was no estimate.

        The lows stand. No part of it was paid, so all debts since were higher by all of it: those
        that an earlier estimate asks for are no lower without it than the one just before it, and
        those that a later one asks for no lower than that estimate.
        """
        rest = self.bucket.give_back(state.owed_until, now, taken, used, mark)
        state.owed_until = max(rest, min(state.owed_until, now))
        return state

    def estimate(self, state: Account, now: float, cost: int) -> tuple[Account, float]:
        """Owe so much more until it is settled; the mark is for `settle`, and for `Account.end`."""
        state, _mark = self.take(state, now, cost)
        return state, state.begin()

    def settle(self, state: Account, now: float, taken: int, used: int, mark: float) -> Account:
        """Owe less by what is still unpaid of the estimate; as if only `used` had been taken."""
        owed = max(0.0, state.owed_until - now)
        first = state.since(mark)
        lowest = state.lows[first] if first < len(state.lows) else owed
        unpaid = min(self.unused(taken, used), owed, lowest)
        if unpaid > 0:
            state.owe_less(unpaid, first)
        return state

    def left(self, state: Account, now: float) -> int:
        """Return what fits."""
        return self.bucket.left(state.owed_until, now)

    def rest(self, state: Account, now: float) -> float:
        """Wait until nothing is owed."""
        return self.bucket.rest(state.owed_until, now)
