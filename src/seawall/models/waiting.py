"""Wait queue: the order of waiters, and which one is displaced when it is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Order = Literal["fifo", "lifo", "criticality"]
ORDERS: tuple[Order, ...] = ("fifo", "lifo", "criticality")


class WaitQueue(Generic[T]):
    """A bounded queue of hashable waiters, each in it once.

    - fifo: the oldest is served first; a full queue refuses new waiters.
    - lifo: the newest is served first, and displaces the oldest in a full queue, whose caller has
      most likely given up.
    - criticality: the highest rank is served first, fifo among equals; in a full queue a new waiter
      displaces the newest of the lowest rank, if it outranks it.

    Waiters may be of several kinds. They wait in one order, but each kind of each rank has a list
    of its own, so that skipping a kind costs the same however many of it wait.

    A signal handler may raise wherever a function is called. Each change is one assignment or
    deletion, after which nothing is called until the caller has received the item.
    """

    def __init__(self, order: Order, limit: int) -> None:
        self.order = order
        self.limit = limit
        # Items with their arrival numbers, in this order, by rank and kind. Leaving from the middle
        # costs no more than being served.
        self._lanes: dict[tuple[int, Hashable], OrderedDict[T, int]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        # Copy: others may read the length without the lock while the queue changes.
        return sum(map(len, list(self._lanes.values())))

    def push(
        self,
        item: T,
        rank: int = 0,
        kind: Hashable = None,
        *,
        always: bool = False,
        full: bool = False,
    ) -> T | None:
        """Add `item` and return the displaced waiter: None, another, or `item` itself.

        With `always` it is added even if the queue is full, and no waiter is displaced. With `full`
        the queue is treated as full.
        """
        rank = rank if self.order == "criticality" else 0
        displaced: T | None = None
        size = len(self)
        if (full or size >= self.limit) and not always:
            if self._displaces_nobody(rank):
                return item
            lowest = self._ranks()[-1]
            displaced = self._take(self._lanes_of(lowest), newest=self.order != "lifo")
        self._arrivals += 1
        for empty in [key for key, lane in self._lanes.items() if not lane]:
            del self._lanes[empty]
        self._lanes.setdefault((rank, kind), OrderedDict())[item] = self._arrivals
        return displaced

    def refuses(self, rank: int = 0) -> bool:
        """Return whether the queue is full, and `push` would return a new waiter of this rank."""
        return len(self) >= self.limit and self._displaces_nobody(rank)

    def _displaces_nobody(self, rank: int) -> bool:
        if self.order == "criticality":
            return not self or self._ranks()[-1] >= rank
        return not self or self.order == "fifo"

    def pop(self, *, newest: bool = False, fits: Callable[[T], bool] | None = None) -> T | None:
        """Remove and return the next to serve, or None if there is none that `fits` accepts.

        `fits` is called once for each kind of each rank. With `newest`, the newest of the highest
        rank is served first, as always in lifo order.
        """
        for rank in self._ranks():
            lanes = self._lanes_of(rank)
            if fits is not None:
                lanes = [lane for lane in lanes if fits(next(iter(self._lanes[lane])))]
            if lanes:
                return self._take(lanes, newest=newest or self.order == "lifo")
        return None

    def pop_lowest(self) -> T | None:
        """Remove and return the oldest of the lowest rank, or None if the queue is empty."""
        if not self:
            return None
        return self._take(self._lanes_of(self._ranks()[-1]), newest=False)

    def remove(self, item: T) -> bool:
        """Remove `item`, wherever it is, and return whether it was there."""
        for key, lane in self._lanes.items():
            if item in lane:
                del lane[item]
                if not lane:
                    del self._lanes[key]
                return True
        return False

    def oldest(self) -> list[T]:
        """Return the oldest waiter of each rank."""
        firsts = [self._first(self._lanes_of(rank), newest=False) for rank in self._ranks()]
        return [next(iter(self._lanes[lane])) for lane in firsts]

    def _ranks(self) -> list[int]:
        """Return the ranks of the waiters, highest first."""
        return sorted({rank for (rank, _), lane in self._lanes.items() if lane}, reverse=True)

    def _lanes_of(self, rank: int) -> list[tuple[int, Hashable]]:
        return [key for key, lane in self._lanes.items() if lane and key[0] == rank]

    def _first(self, lanes: list[tuple[int, Hashable]], *, newest: bool) -> tuple[int, Hashable]:
        """Return which of these lists has the first to arrive, or the last."""
        if len(lanes) == 1:
            return lanes[0]
        if newest:
            return max(lanes, key=lambda lane: next(reversed(self._lanes[lane].values())))
        return min(lanes, key=lambda lane: next(iter(self._lanes[lane].values())))

    def _take(self, lanes: list[tuple[int, Hashable]], *, newest: bool) -> T:
        """Remove and return the first to arrive in these lists, or the last."""
        key = self._first(lanes, newest=newest)
        lane = self._lanes[key]
        item = next(reversed(lane)) if newest else next(iter(lane))
        del lane[item]
        if not lane:
            del self._lanes[key]
        return item
