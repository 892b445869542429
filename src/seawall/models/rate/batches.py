"""Batches: what a pod takes ahead of time from a limit that all pods share, and spends by itself.

    (purse, now, cost) -> the lots that it was spent from, or None: ask the shared limit for more

Nothing is spent that was not taken from the shared limit before, so in total no more is spent than
the limit grants. What differs is when: a token may be spent up to a lease later than it was
granted. So in a stretch of time, what is spent is at most what the limit grants in it, and what
all pods held at its beginning: that is the `excess`. Three rules keep it small. A pod never holds
more than one batch of a key, but for those who wait for another limit's answer at that moment. A
lot that is as old as the lease is not spent any more; what is left of it goes back. And who asks is
given a fair part of a batch or told to wait: else all would come for one token at a time, when the
limit is under most pressure.

Times are instants of the pod's own clock, in any unit. A lot's age counts from when it was asked
for, which is no later than when it was granted: so no clocks have to agree.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from seawall.models.rate.buckets import TokenBucket
from seawall.models.rate.rates import MICROSECONDS
from seawall.models.rate.rule import Rule

LEASE: Final = MICROSECONDS
"""For so many microseconds what was granted may be spent, or for the limit's period, if shorter.

Long enough to save most round trips where calls are frequent; and what an idle pod holds is free
again for others a second later.
"""

_PART: Final = 5
"""The batches of all pods together are a fifth of the limit, unless told otherwise."""

_LEAST: Final = 4
"""Who asks gets a quarter of a batch, or waits."""


class Lot:
    """Tokens that were granted together."""

    __slots__ = ("floor", "left", "mark", "owner", "taken", "until")

    def __init__(self, taken: int, until: float, mark: Any = None) -> None:
        """Hold `taken`, to be spent before `until`; `mark` is what the grantor calls it."""
        self.taken = taken
        self.left = taken
        self.until = until
        self.mark = mark
        self.owner: Any = None
        """Whose it is: a note for whoever keeps the purse."""
        self.floor = 0
        """Down to here it is spent without looking further: below, it is time to ask for more."""

    def __repr__(self) -> str:
        return f"Lot({self.left} of {self.taken} until {self.until:g})"


NOTHING: Final = Lot(0, float("-inf"))
"""The lot of a purse that is empty, or shut."""

Spent = list[tuple[Lot, int]]


class Purse:
    """What a pod holds of one key of one limit, the oldest first.

    `lot` is the oldest, which a caller that is in a hurry may spend by itself:

        left = lot.left - cost
        if left >= lot.floor and now < lot.until: lot.left = left
    """

    __slots__ = ("_later", "asked", "batch", "lot", "size")

    def __init__(self, batch: int) -> None:
        """Hold at most `batch`, and nothing yet."""
        self.batch = batch
        self.lot = NOTHING
        self._later: deque[Lot] = deque()
        self.asked = 0
        """How much is asked for at the moment: one asks at a time."""
        self.size = self.least
        """How much is asked for the next time: about as much as is used within a lease."""

    def __repr__(self) -> str:
        return f"Purse({self.held} of {self.batch}, {self.asked} asked for)"

    @property
    def held(self) -> int:
        """How many tokens are left in all lots."""
        later = sum(lot.left for lot in self._later) if self._later else 0
        return self.lot.left + later

    def usable(self, now: float) -> int:
        """Return how many of them are not too old."""
        return sum(lot.left for lot in (self.lot, *self._later) if now < lot.until)

    @property
    def idle(self) -> bool:
        """Whether nothing is left, nor on its way."""
        return not self.asked and not self.held

    @property
    def least(self) -> int:
        """The least that is worth a request."""
        return max(1, self.batch // _LEAST)

    def spend(self, now: float, cost: int) -> Spent | None:
        """Take `cost`, the oldest first; None if there is too little, and then all stays.

        What `drop` would drop must be dropped before.
        """
        if self.held < cost:
            return None
        spent: Spent = []
        while cost:
            lot = self.lot
            part = min(cost, lot.left)
            lot.left -= part
            cost -= part
            spent.append((lot, part))
            if not lot.left:
                self._end(lot)
        self.watch()
        return spent

    def _end(self, lot: Lot) -> None:
        """Go on to the next lot; ask for more the next time if this one was used up, else less."""
        self.lot = self._later.popleft() if self._later else NOTHING
        used = lot.taken - lot.left
        self.size = min(self.batch, max(1, 2 * used if lot.left else 2 * max(used, self.size)))

    def drop(self, now: float) -> list[Lot]:
        """Spend no more from what is too old; return those lots, to be given back."""
        over = []
        while self.lot is not NOTHING and (now >= self.lot.until or not self.lot.left):
            lot = self.lot
            self._end(lot)
            if lot.left:
                over.append(lot)
        return over

    def clear(self) -> list[Lot]:
        """Spend no more of anything; return what is left, to be given back."""
        lots = [lot for lot in (self.lot, *self._later) if lot.left]
        self.lot = NOTHING
        self._later.clear()
        return lots

    def put_back(self, spent: Spent, now: float) -> Spent:
        """Take back what was spent and not used; return what cannot be: it is to be given back.

        Only into the lot that it came from, since in another it would outlive its lease; and
        never more than a batch.
        """
        rest: Spent = []
        room = self.batch - self.held - self.asked
        for lot, part in spent:
            kept = min(part, room) if lot is self.lot or lot in self._later else 0
            if now >= lot.until or kept < 0:
                kept = 0
            lot.left += kept
            room -= kept
            if part > kept:
                rest.append((lot, part - kept))
        self.watch()
        return rest

    # Asking for more

    def low(self) -> bool:
        """Tell whether it is time to ask for more, so that it comes before it is needed."""
        return not self.asked and self.held <= self._low_water

    @property
    def _low_water(self) -> int:
        return min(self.size, self.batch) // 2

    def ask(self, cost: int = 0, demand: int = 0, *, any_: bool = False) -> tuple[int, int]:
        """Return how much to ask for, and the least to take: for a call of `cost`, or for later.

        `demand` is what all who wait want, that call included: they are served when it comes, and
        what is left then is a batch at most. `any_`: so much as the call needs will do.
        """
        held, demand = self.held, max(cost, demand)
        missing = max(0, cost - held)
        room = self.batch - max(0, held - demand)
        least = max(missing, 1) if any_ else max(missing, min(self.least, room))
        want = max(least, max(0, demand - held) + min(room, self.size))
        self.asked = want
        self.watch()
        return want, least

    def granted(self, count: int, until: float, mark: Any = None) -> Lot:
        """Hold `count` more, until then."""
        self.asked = 0
        lot = Lot(count, until, mark)
        if self.lot is NOTHING:
            self.lot = lot
        else:
            self._later.append(lot)
        self.watch()
        return lot

    def trim(self, demand: int = 0) -> Spent:
        """Hold no more than a batch: return what is too much, of the newest, to be given back.

        Those it was meant for may have gone meanwhile; `demand` is what those want who have not.
        """
        rest: Spent = []
        over = self.held - self.batch - demand
        for lot in (*reversed(self._later), self.lot):
            if over <= 0:
                break
            part = min(over, lot.left)
            if part:
                lot.left -= part
                lot.taken -= part
                over -= part
                rest.append((lot, part))
        self.watch()
        return rest

    def refused(self) -> None:
        """Have been given nothing."""
        self.asked = 0
        self.watch()

    def watch(self) -> None:
        """Set how far the lot may be spent without looking further: to where more is asked for."""
        lot = self.lot
        if lot is not NOTHING:
            later = self.held - lot.left
            lot.floor = 0 if self.asked else max(0, self._low_water + 1 - later)


def batch_for(rule: Rule[Any], pods: int) -> int:
    """Return the batch of each pod, such that all together hold a fifth of the limit at most.

    At least 1, so with more pods than a fifth of the limit it is more.
    """
    most = rule.rate.limit if rule.capacity is None else min(rule.rate.limit, rule.capacity)
    return max(1, min(most, rule.rate.limit // (_PART * pods)))


class Bound(NamedTuple):
    """What a batch means for the limit."""

    batch: int
    pods: int
    lease: float
    excess: int
    """So many more than the algorithm's own bound may be admitted in any stretch of time."""


def lease_of(rule: Rule[Any]) -> float:
    """Return for how many microseconds what was granted may be spent."""
    return float(min(LEASE, rule.rate.period))


def bound_of(rule: Rule[Any], batch: int, pods: int) -> Bound:
    """Return the excess of `pods` that hold up to `batch` each.

    In any stretch of time, at most what was held at its beginning: `pods * batch`. What was held
    was granted within the lease before, and a bucket grants, over a stretch that is longer by
    a lease, only what it refills in that lease more: the smaller of the two is the bound.
    """
    lease = lease_of(rule)
    excess = pods * batch
    if isinstance(rule, TokenBucket):
        limit, period = rule.rate
        excess = min(excess, int(-(-limit * lease // period)) + 1)
    return Bound(batch, pods, lease, excess)
