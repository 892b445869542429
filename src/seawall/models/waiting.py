"""Who waits, in which order, and who has to go when the room is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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
    """

    def __init__(self, order: Order, limit: int) -> None:
        """Have room for `limit`."""
        self.order = order
        self.limit = limit
        # Ordered by arrival; whoever leaves from the middle costs no more than who is served.
        self._lanes: dict[int, OrderedDict[T, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, item: T, rank: int = 0) -> T | None:
        """Let `item` wait; return who has to go for it: None, another, or `item` itself."""
        rank = rank if self.order == "criticality" else 0
        displaced: T | None = None
        if self._size >= self.limit:
            if not self._size or self.order == "fifo":
                return item
            lowest = min(self._lanes)
            if self.order == "criticality" and lowest >= rank:
                return item
            lane = self._lanes[lowest]
            displaced, _ = lane.popitem(last=self.order != "lifo")
            self._shrunk(lowest)
        self._lanes.setdefault(rank, OrderedDict())[item] = None
        self._size += 1
        return displaced

    def pop(self, *, newest: bool = False, fits: Callable[[T], bool] | None = None) -> T | None:
        """Take whom to serve next: None when nobody waits, or nobody whom `fits` accepts.

        With `newest`, the newest of the highest rank goes first, as it always does in lifo order.
        """
        newest = newest or self.order == "lifo"
        for rank in sorted(self._lanes, reverse=True):
            lane = self._lanes[rank]
            if fits is None:
                item, _ = lane.popitem(last=newest)
                self._shrunk(rank)
                return item
            for item in reversed(lane) if newest else lane:
                if fits(item):
                    del lane[item]
                    self._shrunk(rank)
                    return item
        return None

    def pop_lowest(self) -> T | None:
        """Take out the longest waiting of the lowest rank; None when nobody waits."""
        if not self._lanes:
            return None
        lowest = min(self._lanes)
        item, _ = self._lanes[lowest].popitem(last=False)
        self._shrunk(lowest)
        return item

    def remove(self, item: T) -> bool:
        """Take `item` out, wherever it is; tell whether it was there."""
        for rank, lane in self._lanes.items():
            if item in lane:
                del lane[item]
                self._shrunk(rank)
                return True
        return False

    def oldest(self) -> list[T]:
        """Return the longest waiting of each rank."""
        return [next(iter(lane)) for lane in self._lanes.values()]

    def _shrunk(self, rank: int) -> None:
        self._size -= 1
        if not self._lanes[rank]:
            del self._lanes[rank]
