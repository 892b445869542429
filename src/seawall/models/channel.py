"""State of a channel: its items, its free room, and the callers waiting for either.

Room and readiness are tokens in two deques, whose pop and append are atomic. A put takes a token of
room, adds the item, and adds a token of readiness; a get does the reverse. So two threads can do it
at once without a lock. A waiter is handed a token, never an item: the item is added or removed when
the waiter resumes, and a cancelled waiter only has a token to give back.

    capacity == room + items + withheld + tokens of room held by callers
    items    == ready + tokens of readiness held by callers
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import repeat
from math import inf
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from seawall import _checks as check

T = TypeVar("T")
End: TypeAlias = Literal["granted", "closed"]

MOST: Final = 1_000_000  # maximum capacity: a token is kept for each place


class Waiting(Protocol):
    """A caller that waits in a queue."""

    def end(self, state: End, since: float = 0.0) -> bool:
        """Notify the waiter of the result. Return False if it is no longer waiting."""

    def revoke(self) -> None:
        """Take back a grant that is not claimed yet, as if the channel had ended first."""


Line: TypeAlias = "OrderedDict[Waiting, None]"  # in FIFO order; any can leave in constant time


def check_capacity(capacity: int) -> int:
    """Return `capacity` if a channel can have it, or raise."""
    if check.count("capacity", capacity) > MOST:
        raise ValueError(
            f"capacity={capacity!r}: write {MOST} or less; what waits behind so many is old when"
            " its turn comes, and belongs in a store"
        )
    return capacity


class Buffer(Generic[T]):
    """Items, tokens and waiters. Everything except pop and append of the deques needs the lock."""

    def __init__(self, capacity: int, *, demanding: bool, lock_free: bool = True) -> None:
        """Start empty, with room for `capacity`; if `demanding`, only for requested items."""
        self.capacity = capacity
        self.demanding = demanding
        self.lock_free = lock_free
        self.closed = False
        self.put = self.got = 0
        self.items: deque[T] = deque()
        self.ready: ChannelTokens[float] = ChannelTokens()  # arrival times of items not promised
        self.room: ChannelTokens[None] = ChannelTokens()
        self.withheld = capacity
        """Tokens of room that are out of use: not requested yet, or the channel is closed.

        A negative value is the number of tokens still to be collected, because the capacity was
        lowered or items were put back.
        """
        self.requested: float = 0 if demanding else inf
        self.putters: Line = OrderedDict()
        self.getters: Line = OrderedDict()
        self.drainers: Line = OrderedDict()
        self.promised: Line = OrderedDict()  # granted an item that they have not fetched yet
        self.attention = True  # whether callers must take the lock, to wait or to move tokens
        self.serve()

    @property
    def over(self) -> bool:
        """Whether it is closed and empty with no put in progress: all room is withheld."""
        return self.closed and self.withheld >= self.capacity

    def resize(self, capacity: int) -> None:
        """Change the capacity. The items inside stay."""
        self.withheld += capacity - self.capacity
        self.capacity = capacity
        self.serve()

    def admit(self, item: T, now: float) -> bool:
        """Put `item` in if there is room. A signal cannot interrupt it halfway."""
        items, ready = self.items, self.ready
        try:
            for _ in self.room.takes:
                items += (item,)
                ready += (now,)
                self.put += 1
                return True
        except IndexError:
            pass
        return False

    def add(self, item: T, now: float) -> None:
        """Put `item` in. The caller has already taken a token of room."""
        self.items.append(item)
        self.ready.append(now)
        self.put += 1
        self.serve()

    def take_out(self) -> T:
        """Remove the oldest item that is not promised to a waiter. Raise `IndexError` if none."""
        for _ in self.ready.takes:
            self.got += 1
            # Before popleft: if a signal interrupts that, the place is free again.
            self.withheld += 1
            break
        item = self.items.popleft()
        self.serve()
        return item

    def remove(self) -> T:
        """Remove the oldest item. The caller has already taken a token of readiness."""
        self.got += 1
        self.withheld += 1
        item = self.items.popleft()
        self.serve()
        return item

    def put_back(self, items: list[T], now: float) -> None:
        """Put items that were taken out back in front of all others, even if there is no room."""
        self.attention = True
        self.withheld -= len(items)  # while below 0, that many places are not given to others
        self.items.extendleft(reversed(items))
        self.ready.extendleft(repeat(now, len(items)))
        self.got -= len(items)
        self.serve()

    def exchange(self, item: T, now: float) -> T:
        """Remove the oldest item and add `item`, without tokens. The channel must not be empty."""
        # If False, every item is promised to a waiter, which will find the next one.
        free = take(self.ready)
        self.items.append(item)  # first, so that a waiter that was promised an item finds one
        oldest = self.items.popleft()
        if free:
            self.ready.append(now)
        self.put += 1
        self.serve()
        return oldest

    def clear(self) -> list[T]:
        """Remove all items, including those promised to waiters."""
        left: list[T] = []
        while True:
            while self.promised:
                _first(self.promised).revoke()
            if not take(self.ready):
                return left
            left.append(self.remove())

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the contents, the totals and the numbers of waiters."""
        asked = len(self.room) + self.requested
        return {
            "capacity": self.capacity,
            "depth": len(self.items),
            "oldest_age": max(0.0, now - self.ready[0]) if self.ready else 0.0,
            "put": self.put,
            "got": self.got,
            "waiting_putters": len(self.putters),
            "waiting_getters": len(self.getters),
            "requested": int(asked) if self.demanding else None,
            "closed": self.closed,
        }

    def serve(self) -> None:
        """Move tokens to where they belong, then hand them to waiters in order."""
        room, ready = self.room, self.ready
        while (self.closed or self.withheld < 0) and take(room):
            self.withheld += 1
        if self.withheld > 0 and self.requested > 0 and not self.closed:
            moved = int(min(self.withheld, self.requested))
            tokens = repeat(None, moved)
            self.requested -= moved  # nothing is called from here on, so no signal can interrupt
            self.withheld -= moved
            room += tokens
        # A finalizer may run at any allocation and call put or get here: after taking a token,
        # check again that there is still a waiter.
        while self.putters and take(room):
            if not (self.putters and _first(self.putters).end("granted")):
                room.append(None)
        while self.getters and ready:
            try:
                since = ready.popleft()
            except IndexError:  # a thread that started before there were waiters was faster
                break
            if not (self.getters and _first(self.getters).end("granted", since)):
                ready.appendleft(since)
        while self.closed and self.putters:
            _first(self.putters).end("closed")
        while self.over and (self.getters or self.drainers):
            _first(self.getters or self.drainers).end("closed")
        self.attention = (
            bool(self.putters or self.getters or self.drainers)
            or self.withheld != 0
            or self.closed
            or self.demanding
            or not self.lock_free
        )


class ChannelTokens(deque[T]):
    """Tokens, with a way to take one that no signal can interrupt.

    CPython runs signal handlers after a call of a C function, but not where a `for` loop takes the
    next item of an iterator. `for _ in tokens.takes:` takes the oldest token, and raises
    `IndexError` if there is none.
    """

    __slots__ = ("takes",)

    def __init__(self) -> None:
        super().__init__()
        self.takes: Iterator[T] = iter(self.popleft, _NEVER)


_NEVER: Any = object()  # sentinel that is equal to no token


def take(tokens: ChannelTokens[Any]) -> bool:
    """Take the oldest token, if any. Checking first would be a race between threads."""
    try:
        for _ in tokens.takes:
            return True
    except IndexError:
        pass
    return False


def _first(line: Line) -> Waiting:
    return line.popitem(last=False)[0]
