"""Who waits, in which order, and who has to go when the room is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Order = Literal["fifo", "lifo", "criticality"]
ORDERS: tuple[Order, ...] = ("fifo", "lifo", "criticality")


class WaitQueue(Generic[T]):
    """A bounded waiting room for hashable items, each in it once.

    fifo: the longest wait is served first; a full room turns newcomers away.
    lifo: the newest is served first, and takes the place of the oldest in a full room, whose
    caller has most likely given up.
    criticality: the highest rank is served first, fifo among equals; in a full room a newcomer
    takes the place of the newest of the lowest rank, if it outranks it.

    Items may be of several kinds. They wait in one order, but each kind of each rank in a lane of
    its own, so that passing over a kind costs the same however many of it wait.

    A signal handler may raise where a function is called. Each change is one assignment or
    deletion, after which nothing is called until the item is in the hands of the caller.
    """

    def __init__(self, order: Order, limit: int) -> None:
        """Have room for `limit`."""
        self.order = order
        self.limit = limit
        # Items with the number of their arrival, in this order, by rank and kind. Whoever leaves
        # from the middle costs no more than who is served.
        self._lanes: dict[tuple[int, Hashable], OrderedDict[T, int]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        # A copy: others may read the length without the lock while the queue changes.
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
        """Let `item` wait; return who has to go for it: None, another, or `item` itself.

        With `always` it waits even if the room is full, and nobody goes. With `full` somebody goes
        as if the room were full.
        """
        rank = rank if self.order == "criticality" else 0
        displaced: T | None = None
        size = len(self)
        if (full or size >= self.limit) and not always:
            if not size or self.order == "fifo":
                return item
            lowest = self._ranks()[-1]
            if self.order == "criticality" and lowest >= rank:
                return item
            displaced = self._take(self._lanes_of(lowest), newest=self.order != "lifo")
        self._arrivals += 1
        for empty in [key for key, lane in self._lanes.items() if not lane]:
            del self._lanes[empty]
        self._lanes.setdefault((rank, kind), OrderedDict())[item] = self._arrivals
        return displaced

    def pop(self, *, newest: bool = False, fits: Callable[[T], bool] | None = None) -> T | None:
        """Take whom to serve next: None when nobody waits, or nobody whom `fits` accepts.

        It is asked once for each kind of each rank. With `newest`, the newest of the highest rank
        goes first, as it always does in lifo order.
        """
        for rank in self._ranks():
            lanes = self._lanes_of(rank)
            if fits is not None:
                lanes = [lane for lane in lanes if fits(next(iter(self._lanes[lane])))]
            if lanes:
                return self._take(lanes, newest=newest or self.order == "lifo")
        return None

    def pop_lowest(self) -> T | None:
        """Take out the longest waiting of the lowest rank; None when nobody waits."""
        if not self:
            return None
        return self._take(self._lanes_of(self._ranks()[-1]), newest=False)

    def remove(self, item: T) -> bool:
        """Take `item` out, wherever it is; tell whether it was there."""
        for key, lane in self._lanes.items():
            if item in lane:
                del lane[item]
                if not lane:
                    del self._lanes[key]
                return True
        return False

    def oldest(self) -> list[T]:
        """Return the longest waiting of each rank."""
        firsts = [self._first(self._lanes_of(rank), newest=False) for rank in self._ranks()]
        return [next(iter(self._lanes[lane])) for lane in firsts]

    def _ranks(self) -> list[int]:
        """Return the ranks of those who wait, the highest first."""
        return sorted({rank for (rank, _), lane in self._lanes.items() if lane}, reverse=True)

    def _lanes_of(self, rank: int) -> list[tuple[int, Hashable]]:
        return [key for key, lane in self._lanes.items() if lane and key[0] == rank]

    def _first(self, lanes: list[tuple[int, Hashable]], *, newest: bool) -> tuple[int, Hashable]:
        """Return in which of these lanes the first to arrive is, or the last."""
        if len(lanes) == 1:
            return lanes[0]
        if newest:
            return max(lanes, key=lambda lane: next(reversed(self._lanes[lane].values())))
        return min(lanes, key=lambda lane: next(iter(self._lanes[lane].values())))

    def _take(self, lanes: list[tuple[int, Hashable]], *, newest: bool) -> T:
        """Take the first to arrive in these lanes, or the last."""
        key = self._first(lanes, newest=newest)
        lane = self._lanes[key]
        item = next(reversed(lane)) if newest else next(iter(lane))
        del lane[item]
        if not lane:
            del self._lanes[key]
        return item
