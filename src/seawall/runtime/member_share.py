"""Protocols between heartbeats and a shared store, where members write and read them.

`members` uses these protocols; `shared` implements them on Redis and Valkey, and in memory.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

MEMORY: Final = 3600.0
"""Seconds for which a store remembers a member that is silent or has left."""


class Beat(NamedTuple):
    """The last heartbeat of a member, as stored."""

    member: str
    stamp: float
    """When it was written, by the store's clock; a different stamp means a new heartbeat."""
    age: float
    """Seconds since then, by the same clock."""


class Sighting(NamedTuple):
    """What the store knew of a group at one instant."""

    beats: list[Beat]
    left: list[str]
    """Members that have left."""


class BeatShare(Protocol):
    """The heartbeats of one group in a store."""

    async def beat(self, member: str, most: int, patience: float) -> Sighting:
        """Write a heartbeat of `member`, and return those of at most `most` members.

        Raise `StoreUnavailable` if there is no answer within `patience` seconds.
        """

    async def leave(self, member: str, patience: float) -> None:
        """Record that `member` leaves."""


class BeatStore(Protocol):
    """A store that keeps heartbeats."""

    def heartbeats(self, group: str) -> BeatShare:
        """Return the heartbeats of the group with that name."""
