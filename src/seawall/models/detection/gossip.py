"""Gossip of a group: statements about members, and how often each one is passed on.

A `GossipUpdate` is one statement about one member. Only the member itself raises its incarnation,
so of two statements about a member the one with the higher incarnation is newer; with equal
incarnations the worse state wins. Each member passes an update on a number of times that grows with
the logarithm of the group size, so that all members receive it with high probability.

Suspicions follow Lifeguard: a member that accuses others may be the slow one. A suspicion that no
other member shares lasts long; each further accuser shortens it. A member whose own probes fail, or
that is accused itself, gives the others more time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from math import ceil, inf, log, log10
from typing import Final, NamedTuple

from seawall.models.detection.settings import SwimSettings

LONGEST_FACTOR: Final = 6  # factor by which a suspicion lasts longer if no other member shares it
WORST_HEALTH: Final = 8  # maximum score of local health


class MemberState(StrEnum):
    """State of a member as known to the others."""

    UNKNOWN = "unknown"  # expected, but not heard yet
    ALIVE = "alive"
    SUSPECTED = "suspected"
    CONFIRMED = "confirmed"
    LEFT = "left"


class GossipUpdate(NamedTuple):
    """One statement about a member: its state, its incarnation, and the member that says so."""

    state: MemberState
    name: str
    incarnation: int
    address: str = ""  # where the member is reached. Only in statements that it is alive
    metadata: bytes = b""  # metadata that the member publishes. Only in statements that it is alive
    by: str = ""  # the member that suspects or confirmed it; the member itself when it left

    @property
    def size(self) -> int:
        """Size in a packet, in bytes."""
        texts = len(self.name.encode()) + len(self.address.encode()) + len(self.by.encode())
        return OVERHEAD + texts + len(self.metadata)


class Suspicion:
    """One suspicion of one member. It ends when it is cleared or confirmed, whichever is first."""

    def __init__(self, accuser: str, now: float, members: int, settings: SwimSettings) -> None:
        """Start with one accuser, in a group of `members`.

        Without `lifeguard`, it lasts the minimum time, whatever other members report.
        """
        multiplier = settings.suspicion_multiplier
        self.began_at = now
        self._least = multiplier * max(1.0, log10(max(1, members))) * settings.interval
        enough = settings.lifeguard and members >= multiplier
        self._needed = multiplier - 2 if enough else 0
        self._most = self._least * (LONGEST_FACTOR if self._needed else 1)
        self._accusers = {accuser}

    @property
    def ends_at(self) -> float:
        """The time at which the member is confirmed unless it has been cleared."""
        if not self._needed:
            return self.began_at + self._least
        share = log(len(self._accusers)) / log(self._needed + 1)
        return self.began_at + max(self._least, self._most - (self._most - self._least) * share)

    def add_accuser(self, accuser: str) -> bool:
        """Add an accuser. Return False if it is already known, or if there are already enough."""
        if accuser in self._accusers or len(self._accusers) > self._needed:
            return False
        self._accusers.add(accuser)
        return True


class LocalHealth:
    """How far this member can trust its own view: 0 is healthy, 8 is the worst."""

    score = 0

    def change(self, by: int) -> None:
        """Raise the score after a local failure, or lower it after a success."""
        self.score = min(max(self.score + by, 0), WORST_HEALTH)

    def scale(self, seconds: float) -> float:
        """Return an interval or a timeout, scaled up by the score."""
        return seconds * (self.score + 1)


@dataclass(slots=True)
class Member:
    """Local knowledge of one member."""

    name: str
    address: str
    incarnation: int
    state: MemberState
    since: float
    metadata: bytes = b""
    reason: str = ""  # reason for the state
    by: str = ""  # the member that reported the state
    suspicion: Suspicion | None = None
    reminded_at: float = -inf  # when the member was last contacted although it is considered dead
    round_trip: float | None = None  # duration of its last direct answer, in seconds

    @property
    def is_present(self) -> bool:
        """Whether it counts as a member. A suspected one does."""
        return self.state in (MemberState.ALIVE, MemberState.SUSPECTED)

    @property
    def introduction(self) -> GossipUpdate:
        """The statement that it is alive, with its address."""
        return GossipUpdate(
            MemberState.ALIVE, self.name, self.incarnation, self.address, self.metadata
        )

    @property
    def update(self) -> GossipUpdate:
        """The statement of its state, attributed to the member that first reported it."""
        if self.state is MemberState.ALIVE:
            return self.introduction
        return GossipUpdate(self.state, self.name, self.incarnation, by=self.by)


OVERHEAD: Final = 14  # bytes of an update besides its texts and metadata (`members/wire.py`)
ENVELOPE: Final = 51  # bytes of a message besides texts and updates, signed or encrypted
MOST_NAME: Final = 128  # maximum length of a member's name in bytes
MOST_ADDRESS: Final = 255  # maximum length of a member's address in bytes
MOST_METADATA: Final = 512  # maximum size of a member's metadata in bytes


class GossipQueue:
    """The updates that a member still has to pass on: the newest one about each member.

    They are kept in sending order: those passed on least often first, and among these the largest.
    """

    def __init__(self, multiplier: int) -> None:
        """Pass each update on `multiplier` times the decimal logarithm of the group, rounded up."""
        self._multiplier = multiplier
        self._queue: list[tuple[int, int, int, GossipUpdate]] = []  # transmissions, -size, serial
        self._by_name: dict[str, tuple[int, int, int, GossipUpdate]] = {}
        self._serial = count()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, update: GossipUpdate) -> None:
        """Add `update`, replacing an older one about the same member."""
        self.discard(update.name)
        self._insert(0, -update.size, update)

    def discard(self, name: str) -> None:
        """Remove the update about a member."""
        entry = self._by_name.pop(name, None)
        if entry is not None:
            del self._queue[bisect_left(self._queue, entry)]

    def take(
        self, room: int, members: int, first: Iterable[GossipUpdate] = ()
    ) -> list[GossipUpdate]:
        """Return updates for one packet with `room` bytes, in a group of `members`.

        `first` goes in before all others. Then those passed on least often, and among these the
        largest that fit.
        """
        taken = list(first)
        if not self._queue:
            return taken
        room -= sum(update.size for update in taken)
        names = {update.name for update in taken}
        entries = []
        for entry in self._queue:
            if room <= OVERHEAD:
                break
            if -entry[1] <= room and entry[3].name not in names:
                room += entry[1]
                entries.append(entry)
        limit = self._multiplier * ceil(log10(members + 1))
        for sent, negative_size, _serial, update in entries:
            taken.append(update)
            self.discard(update.name)
            if sent + 1 < limit:
                self._insert(sent + 1, negative_size, update)
        return taken

    def _insert(self, sent: int, negative_size: int, update: GossipUpdate) -> None:
        entry = self._by_name[update.name] = (sent, negative_size, next(self._serial), update)
        insort(self._queue, entry)
