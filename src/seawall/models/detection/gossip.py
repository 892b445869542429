"""Gossip of a group: what members say about each other, and how often each piece is passed on.

An `Update` is one statement about one member. Only the accused raises its incarnation, so of two
statements about a member the one with the higher incarnation is newer; of two with the same one,
the worse state wins. Each member passes an update on a number of times that grows with the
logarithm of the group: then all have it with high probability.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from math import ceil, log10
from typing import Final, NamedTuple


class MemberState(StrEnum):
    """How a member is known."""

    UNKNOWN = "unknown"
    """Expected, but not heard yet."""
    ALIVE = "alive"
    SUSPECTED = "suspected"
    CONFIRMED = "confirmed"
    LEFT = "left"


class Update(NamedTuple):
    """One statement about a member: how it is, as of which incarnation, and by whose account."""

    state: MemberState
    name: str
    incarnation: int
    address: str = ""
    """Where it is reached. Only in statements that it is alive."""
    metadata: bytes = b""
    """What it says about itself. Only in statements that it is alive."""
    by: str = ""
    """The member that suspects or confirmed it; the member itself when it left."""

    @property
    def size(self) -> int:
        """The bytes that it takes in a packet."""
        texts = len(self.name.encode()) + len(self.address.encode()) + len(self.by.encode())
        return OVERHEAD + texts + len(self.metadata)


OVERHEAD: Final = 14
"""Bytes of an update beside its texts and its metadata, as `members/wire.py` writes it."""

ENVELOPE: Final = 51
"""Bytes of a message beside its texts and its updates, with its signature or its encryption."""

MOST_NAME: Final = 128
"""Bytes that the name of a member may have."""

MOST_ADDRESS: Final = 255
"""Bytes that the address of a member may have."""

MOST_METADATA: Final = 512
"""Bytes of metadata that a member may have."""


class _Pending:
    __slots__ = ("sent", "size", "update")

    def __init__(self, update: Update) -> None:
        self.update = update
        self.size = update.size
        self.sent = 0


class GossipQueue:
    """The updates that a member still passes on: one for each member, the newest."""

    __slots__ = ("_multiplier", "_pending")

    def __init__(self, multiplier: int) -> None:
        """Pass each update on `multiplier` times the decimal logarithm of the group."""
        self._multiplier = multiplier
        self._pending: dict[str, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, update: Update) -> None:
        """Pass on `update`, in place of an older one about the same member."""
        self._pending[update.name] = _Pending(update)

    def discard(self, name: str) -> None:
        """Pass on nothing more about a member, which is forgotten."""
        self._pending.pop(name, None)

    def take(self, room: int, members: int, first: Iterable[Update] = ()) -> list[Update]:
        """Return updates for one packet with `room` bytes, of a group of `members`.

        `first` goes in before all others. Then those that were passed on least often, and of these
        the largest that fit.
        """
        taken = list(first)
        room -= sum(update.size for update in taken)
        names = {update.name for update in taken}
        limit = self._multiplier * ceil(log10(members + 1))
        for pending in sorted(self._pending.values(), key=lambda one: (one.sent, -one.size)):
            if pending.size > room or pending.update.name in names:
                continue
            room -= pending.size
            taken.append(pending.update)
            pending.sent += 1
            if pending.sent >= limit:
                del self._pending[pending.update.name]
        return taken
