"""How many more jobs there is room for: counted now and then, and not for each job."""

from __future__ import annotations

from typing import Final

from seawall.clock import Clock
from seawall.errors import QueueFull
from seawall.runtime.mutex import Mutex, survives_fork

EVERY: Final = 1.0
"""Seconds after which it is counted again."""
SHARE: Final = 16
"""It is counted again, too, when this part of the room that was found is used up: others use it."""


class Room:
    """A bound on the jobs that have not ended; several processes may be over it by a little."""

    def __init__(self, name: str, most: int | None, clock: Clock) -> None:
        """Have room for `most` jobs; None is without a bound."""
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
        """How far to count."""
        return self._most or 0

    def wants_a_look(self) -> bool:
        """Tell whether to count now."""
        if self._most is None:
            return False
        with self._mutex:
            # While there is none, each second is often enough.
            age = self._clock.now() - self._counted_at
            return age >= EVERY or self._left == 0

    def found(self, there: int) -> None:
        """Learn how many there are."""
        with self._mutex:
            free = self.most - there
            self._left = max(1, free // SHARE) if free > 0 else -1
            self._counted_at = self._clock.now()

    def take(self) -> bool:
        """Take a place, if there is one."""
        if self._most is None:
            return True
        with self._mutex:
            if self._left <= 0:
                return False
            self._left -= 1
            return True

    def refusal(self) -> QueueFull:
        """Return what to raise where there is none."""
        return QueueFull(
            f"jobs {self._name!r}: {self._most} have not ended, and no more are allowed",
            retry_after=EVERY,
            guard=self._name,
            policy="jobs",
        )
