"""Batches: tokens that a pod takes from a shared limit in advance and spends locally.

    (purse, now, cost) -> the lots that it was spent from, or None: ask the shared limit for more

Only tokens taken from the shared limit before are spent, so the total never exceeds what the limit
grants. Only the timing differs: a token may be spent up to a lease later than it was granted. So in
any time span, at most what the limit grants in it is spent, plus what all pods held at its
beginning: the `excess`. Three rules keep it small. A pod never holds more than one batch of a key,
except for callers that wait for another limit's reply at that moment. A lot as old as the lease is
not spent any more; the rest of it is given back. And a request gets a fair part of a batch or has
to wait: otherwise all pods would ask for one token at a time when the limit is under most pressure.

Times are instants of the pod's own clock, in any unit. The age of a lot counts from the request,
which is no later than the grant, so clocks do not have to agree.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from seawall.models.rate.buckets import TokenBucket
from seawall.models.rate.rates import MICROSECONDS
from seawall.models.rate.rule import RateRule

LEASE: Final = MICROSECONDS
"""Maximum number of microseconds for which granted tokens may be spent.

The limit's period applies if it is shorter. This is long enough to save most round trips where
calls are frequent, and tokens of an idle pod are free again for others a second later.
"""
_PART: Final = 5  # by default the batches of all pods together are a fifth of the limit
_LEAST: Final = 4  # A request gets at least a quarter of a batch, or waits


class Lot:
    """Tokens that were granted together."""

    __slots__ = ("floor", "left", "mark", "owner", "taken", "until")

    def __init__(self, taken: int, until: float, mark: Any = None) -> None:
        """Hold `taken` tokens until `until`. `mark` identifies the lot to the grantor."""
        self.taken = taken
        self.left = taken
        self.until = until
        self.mark = mark
        self.owner: Any = None  # owner of the lot, for use by the owner of the purse
        self.floor = 0  # down to this callers may spend directly; then ask for more

    def __repr__(self) -> str:
        return f"Lot({self.left} of {self.taken} until {self.until:g})"


NOTHING: Final = Lot(0, float("-inf"))  # the lot of an empty or closed purse

Spent = list[tuple[Lot, int]]


class Purse:
    """Tokens that a pod holds of one key of one limit, oldest first.

    `lot` is the oldest. A fast path may spend from it directly:

        left = lot.left - cost
        if left >= lot.floor and now < lot.until: lot.left = left
    """

    __slots__ = ("_later", "asked", "batch", "lot", "size")

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.lot = NOTHING
        self._later: deque[Lot] = deque()
        self.asked = 0  # number of tokens in the current request. There is one request at a time
        self.size = self.least  # tokens for the next request: what is used within a lease

    def __repr__(self) -> str:
        return f"Purse({self.held} of {self.batch}, {self.asked} asked for)"

    @property
    def held(self) -> int:
        """Number of tokens left in all lots."""
        later = sum(lot.left for lot in self._later) if self._later else 0
        return self.lot.left + later

    def usable(self, now: float) -> int:
        """Return the number of tokens that have not expired."""
        return sum(lot.left for lot in (self.lot, *self._later) if now < lot.until)

    @property
    def idle(self) -> bool:
        """Whether no tokens are left or requested."""
        return not self.asked and not self.held

    @property
    def least(self) -> int:
        """Minimum number of tokens that is worth a request."""
        return max(1, self.batch // _LEAST)

    def spend(self, now: float, cost: int) -> Spent | None:
        """Spend `cost` tokens, oldest first, or none if there are too few. Call `drop` first."""
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
        """Go on to the next lot. Request more next time if this one was used up, else less."""
        self.lot = self._later.popleft() if self._later else NOTHING
        used = lot.taken - lot.left
        self.size = min(self.batch, max(1, 2 * used if lot.left else 2 * max(used, self.size)))

    def drop(self, now: float) -> list[Lot]:
        """Remove expired lots and return them, to be given back."""
        over = []
        while self.lot is not NOTHING and (now >= self.lot.until or not self.lot.left):
            lot = self.lot
            self._end(lot)
            if lot.left:
                over.append(lot)
        return over

    def clear(self) -> list[Lot]:
        """Remove all lots and return those with tokens left, to be given back."""
        lots = [lot for lot in (self.lot, *self._later) if lot.left]
        self.lot = NOTHING
        self._later.clear()
        return lots

    def put_back(self, spent: Spent, now: float) -> Spent:
        """Put unused tokens back. Return those that cannot be kept, to be given back to the limit.

        They only go into the lot that they came from, since in another one they would outlive their
        lease, and never beyond a batch.
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

    # Requests for more

    def low(self) -> bool:
        """Return whether it is time to ask for more, so that it arrives before it is needed."""
        return not self.asked and self.held <= self._low_water

    @property
    def _low_water(self) -> int:
        return min(self.size, self.batch) // 2

    def ask(self, cost: int = 0, demand: int = 0, *, any_: bool = False) -> tuple[int, int]:
        """Return how many tokens to request, and the minimum: for a call of `cost`, or in advance.

        `demand` is the total of all waiting calls, including that one: they are served when the
        tokens arrive, and at most a batch is left then. With `any_`, the minimum is what the call
        needs.
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
        """Add `count` granted tokens, valid until `until`."""
        self.asked = 0
        lot = Lot(count, until, mark)
        if self.lot is NOTHING:
            self.lot = lot
        else:
            self._later.append(lot)
        self.watch()
        return lot

    def trim(self, demand: int = 0) -> Spent:
        """Remove tokens beyond a batch, newest first, and return them, to be given back.

        The calls they were meant for may be gone; `demand` is the total of those still waiting.
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
        """Record that the request was refused."""
        self.asked = 0
        self.watch()

    def watch(self) -> None:
        """Set how far the lot may be spent directly: to the level at which more is requested."""
        lot = self.lot
        if lot is not NOTHING:
            later = self.held - lot.left
            lot.floor = 0 if self.asked else max(0, self._low_water + 1 - later)


def batch_for(rule: RateRule[Any], pods: int) -> int:
    """Return the batch of each pod, at least 1: together at most a fifth of the limit."""
    most = rule.rate.limit if rule.capacity is None else min(rule.rate.limit, rule.capacity)
    return max(1, min(most, rule.rate.limit // (_PART * pods)))


def lease_of(rule: RateRule[Any]) -> float:
    """Return for how many microseconds granted tokens may be spent."""
    return float(min(LEASE, rule.rate.period))


def excess_of(rule: RateRule[Any], batch: int, pods: int) -> int:
    """Return how many calls beyond the rule's own bound `pods` with up to `batch` each may admit.

    In any time span, it is at most what was held at its beginning: `pods * batch`. These tokens
    were granted within the lease before it, and over a span that is longer by a lease, a bucket
    grants only what it refills in that lease more. The smaller of the two is the bound.
    """
    excess = pods * batch
    if isinstance(rule, TokenBucket):
        limit, period = rule.rate
        excess = min(excess, int(-(-limit * lease_of(rule) // period)) + 1)
    return excess
