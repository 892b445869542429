"""Removing what is over: batch by batch, each a short transaction, for as long as there is time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from seawall import _checks as check
from seawall.clock import current_clock
from seawall.durable.database import Database
from seawall.runtime.stepping import Steps

LARGEST: Final = 100_000
"""Rows of a batch."""


class Cleaning:
    """One time of removing."""

    def __init__(self, remove: Callable[[int], Steps[int]], batch: int, within: float) -> None:
        """Call `remove(batch)`, which tells how many there were, for about `within` seconds."""
        self._remove = remove
        self._batch = check.count("batch", batch, maximum=LARGEST)
        self._clock = current_clock()
        self._until = self._clock.now() + check.seconds("within", within)
        self._removed = 0

    def run(self, database: Database) -> int:
        """Do it, blocking; return how many were removed."""
        while self._another(database.run(self._steps)):
            pass
        return self._removed

    async def arun(self, database: Database) -> int:
        """Do the same, awaiting."""
        while self._another(await database.arun(self._steps)):
            pass
        return self._removed

    def _steps(self) -> Steps[int]:
        return self._remove(self._batch)

    def _another(self, removed: int) -> bool:
        self._removed += removed
        return removed >= self._batch and self._clock.now() < self._until
