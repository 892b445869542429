"""Limit on the number of open jobs, counted periodically rather than for each job."""

from __future__ import annotations

from typing import Final

from seawall._forks import survives_fork
from seawall.clock import Clock
from seawall.errors import QueueFull
from seawall.runtime.mutex import Mutex

EVERY: Final = 1.0
"""Seconds between two counts."""
SHARE: Final = 16
"""Count again after using 1/16 of the free places found: other processes use them too."""


class Room:
    """A limit on the jobs that have not ended. Several processes may exceed it slightly."""

    def __init__(self, name: str, most: int | None, clock: Clock) -> None:
        """Allow `most` jobs; None means no limit."""
        self._name = name
        self._most = most
        self._clock = clock
        self._after_fork()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._mutex = Mutex()
        self._left = 0
        self._counted_at = float("-inf")

    @property
    def most(self) -> int:
        """The limit, which bounds the count; 0 without a limit."""
        return self._most or 0

    def wants_a_look(self) -> bool:
        """Return whether the jobs should be counted now."""
        if self._most is None:
            return False
        with self._mutex:
            # While there is no room, count once per second.
            age = self._clock.now() - self._counted_at
            return age >= EVERY or self._left == 0

    def found(self, there: int) -> None:
        """Note how many jobs there are."""
        with self._mutex:
            free = self.most - there
            self._left = max(1, free // SHARE) if free > 0 else -1
            self._counted_at = self._clock.now()

    def take(self) -> bool:
        """Take a place; return False if there is none."""
        if self._most is None:
            return True
        with self._mutex:
            if self._left <= 0:
                return False
            self._left -= 1
            return True

    def refusal(self) -> QueueFull:
        """Return the exception for a full table."""
        return QueueFull(
            f"jobs {self._name!r}: {self._most} have not ended, and no more are allowed",
            retry_after=EVERY,
            guard=self._name,
            policy="jobs",
        )
