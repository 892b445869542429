"""Suspicion of a member until it is confirmed, and the health of the accuser itself.

Both follow Lifeguard: a member that accuses others may be the slow one. A suspicion that no other
member shares lasts long; each further accuser shortens it. A member whose own probes fail, or that
is accused itself, gives the others more time.
"""

from __future__ import annotations

from math import log, log10
from typing import Final

LONGEST_FACTOR: Final = 6
"""Factor by which a suspicion lasts longer if no other member shares it."""

WORST_HEALTH: Final = 8
"""Maximum score of local health."""


class Suspicion:
    """One suspicion of one member. It ends when it is cleared or confirmed, whichever is first."""

    __slots__ = ("_accusers", "_least", "_most", "_needed", "began_at")

    def __init__(
        self,
        accuser: str,
        now: float,
        *,
        multiplier: int,
        interval: float,
        members: int,
        is_shared: bool = True,
    ) -> None:
        """Start with one accuser, in a group of `members` that probe every `interval` seconds.

        Unless `is_shared`, it lasts the minimum time, whatever other members report.
        """
        self.began_at = now
        self._least = multiplier * max(1.0, log10(max(1, members))) * interval
        enough = is_shared and members >= multiplier
        self._needed = multiplier - 2 if enough else 0
        self._most = self._least * (LONGEST_FACTOR if self._needed else 1)
        self._accusers = {accuser}

    def __repr__(self) -> str:
        return f"<Suspicion by {sorted(self._accusers)}>"

    @property
    def ends_at(self) -> float:
        """The time at which the member is confirmed unless it has been cleared."""
        if not self._needed:
            return self.began_at + self._least
        share = log(len(self._accusers)) / log(self._needed + 1)
        return self.began_at + max(self._least, self._most - (self._most - self._least) * share)

    def confirm(self, accuser: str) -> bool:
        """Add an accuser. Return False if it is already known, or if there are already enough."""
        if accuser in self._accusers or len(self._accusers) > self._needed:
            return False
        self._accusers.add(accuser)
        return True


class LocalHealth:
    """How far this member can trust its own view: 0 is healthy, 8 is the worst."""

    __slots__ = ("score",)

    def __init__(self) -> None:
        """Start healthy."""
        self.score = 0

    def change(self, by: int) -> None:
        """Raise the score after a local failure, or lower it after a success."""
        self.score = min(max(self.score + by, 0), WORST_HEALTH)

    def scale(self, seconds: float) -> float:
        """Return an interval or a timeout, scaled up by the score."""
        return seconds * (self.score + 1)
