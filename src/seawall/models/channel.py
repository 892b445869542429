"""What is inside a channel, how much room there is, and who waits for which of the two.

Room and readiness are tokens in two deques, whose pop and append are atomic. To put is to take a
token of room, add the item, and add a token of readiness; to get is the reverse. So two threads
can do it at once without a lock. Who waits is handed a token, never an item: the item comes in, or
goes out, when its waiter really goes on, and who was cancelled has only a token to give back.

    capacity == room + items + withheld + tokens of room in somebody's hands
    items    == ready + tokens of readiness in somebody's hands
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

MOST: Final = 1_000_000
"""The largest capacity: a token is kept for each place."""


class Waiting(Protocol):
    """Somebody in a line."""

    def end(self, state: End, since: float = 0.0) -> bool:
        """Learn what became of it; False if nobody is there to go on."""

    def revoke(self) -> None:
        """Lose what was granted and is not claimed yet, as if the end had come first."""


Line: TypeAlias = "OrderedDict[Waiting, None]"
"""Who waits, first come first; anybody can leave it at once."""


def check_capacity(capacity: int) -> int:
    """Return `capacity` if a channel can have it, or raise."""
    if check.count("capacity", capacity) > MOST:
        raise ValueError(
            f"capacity={capacity!r}: write {MOST} or less; what waits behind so many is old when"
            " its turn comes, and belongs in a store"
        )
    return capacity


class Buffer(Generic[T]):
    """Items, tokens and lines. All but the two deques' own pop and append is done under a lock."""

    __slots__ = (
        "attention",
        "capacity",
        "closed",
        "demanding",
        "drainers",
        "getters",
        "got",
        "items",
        "lock_free",
        "promised",
        "put",
        "putters",
        "ready",
        "requested",
        "room",
        "withheld",
    )

    def __init__(self, capacity: int, *, demanding: bool, lock_free: bool = True) -> None:
        """Be empty, with room for `capacity`; for nothing before `requested`, if `demanding`."""
        self.capacity = capacity
        self.demanding = demanding
        self.lock_free = lock_free
        self.closed = False
        self.put = self.got = 0
        self.items: deque[T] = deque()
        self.ready: Tokens[float] = Tokens()
        """The instants at which items came in: one for each that is promised to nobody."""
        self.room: Tokens[None] = Tokens()
        self.withheld = capacity
        """Tokens of room out of use: nobody asked for them, or it is closed.

        Below 0, so many are to be collected: the capacity was lowered, or items were put back.
        """
        self.requested: float = 0 if demanding else inf
        self.putters: Line = OrderedDict()
        self.getters: Line = OrderedDict()
        self.drainers: Line = OrderedDict()
        self.promised: Line = OrderedDict()
        """Those who were granted an item, and have not come for it yet."""
        self.attention = True
        """Whether somebody waits, or tokens are to be moved: then nobody goes without the lock."""
        self.serve()

    @property
    def over(self) -> bool:
        """Whether it is closed and empty, and nobody is about to put: all room is withheld."""
        return self.closed and self.withheld >= self.capacity

    def resize(self, capacity: int) -> None:
        """Have room for `capacity` from now on; what is inside stays."""
        self.withheld += capacity - self.capacity
        self.capacity = capacity
        self.serve()

    def admit(self, item: T, now: float) -> bool:
        """Put `item` in, if there is room. No signal is let in before it is there as a whole."""
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
        """Put `item` in; a token of room has been taken."""
        self.items.append(item)
        self.ready.append(now)
        self.put += 1
        self.serve()

    def take_out(self) -> T:
        """Take the oldest that is promised to nobody; `IndexError` if there is none."""
        for _ in self.ready.takes:
            self.got += 1
            self.withheld += 1  # first: if a signal comes with the item, its place is free again
            break
        item = self.items.popleft()
        self.serve()
        return item

    def remove(self) -> T:
        """Take the oldest out; a token of readiness has been taken."""
        self.got += 1
        self.withheld += 1
        item = self.items.popleft()
        self.serve()
        return item

    def put_back(self, items: list[T], now: float) -> None:
        """Put in front of all others what was taken out before, whether there is room or not."""
        self.attention = True
        self.withheld -= len(items)  # below 0, so many places are not given to others
        self.items.extendleft(reversed(items))
        self.ready.extendleft(repeat(now, len(items)))
        self.got -= len(items)
        self.serve()

    def exchange(self, item: T, now: float) -> T:
        """Take the oldest out and `item` in, without any token; there is an item inside."""
        free = take(self.ready)  # else each is promised to somebody, who will find the next one
        self.items.append(item)  # first, so that whoever was promised one finds one
        oldest = self.items.popleft()
        if free:
            self.ready.append(now)
        self.put += 1
        self.serve()
        return oldest

    def clear(self) -> list[T]:
        """Take out all that is inside, that which is promised to somebody included."""
        left: list[T] = []
        while True:
            while self.promised:
                _first(self.promised).revoke()
            if not take(self.ready):
                return left
            left.append(self.remove())

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what is inside, what went through, and who waits."""
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
        """Put tokens where they belong, then hand them to those who wait, in order."""
        room, ready = self.room, self.ready
        while (self.closed or self.withheld < 0) and take(room):
            self.withheld += 1
        if self.withheld > 0 and self.requested > 0 and not self.closed:
            moved = int(min(self.withheld, self.requested))
            tokens = repeat(None, moved)
            self.requested -= moved  # from here on nothing is called: no signal is let in
            self.withheld -= moved
            room += tokens
        # A finalizer may run at any allocation, and put or get here: with a token in hand, look
        # again whether somebody still waits.
        while self.putters and take(room):
            if not (self.putters and _first(self.putters).end("granted")):
                room.append(None)
        while self.getters and ready:
            try:
                since = ready.popleft()
            except IndexError:  # a thread that asked before anybody waited was faster
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


class Tokens(deque[T]):
    """Tokens, and a way to take one that lets no signal in between taking it and going on.

    CPython lets signal handlers in after a call of a C function, and not where a `for` takes the
    next of an iterator. `for _ in tokens.takes:` takes the oldest, and raises `IndexError` if there
    is none.
    """

    __slots__ = ("takes",)

    def __init__(self) -> None:
        """Begin without any."""
        super().__init__()
        self.takes: Iterator[T] = iter(self.popleft, _NEVER)


_NEVER: Any = object()
"""No token is equal to it."""


def take(tokens: Tokens[Any]) -> bool:
    """Take the oldest token, if there is one: to look first is too late among threads."""
    try:
        for _ in tokens.takes:
            return True
    except IndexError:
        pass
    return False


def _first(line: Line) -> Waiting:
    return line.popitem(last=False)[0]
