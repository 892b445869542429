"""Checkpoints: where a source with positions goes on after a restart.

Promises:
- What is saved lies before every item that has not ended: a resumed run repeats items, and leaves
  none out.
- It is saved `every` few seconds, and at the end: a crash repeats at most what has ended since,
  and what had ended behind an item that had not.
- A checkpoint is replaced as a whole: a crash leaves the old one or the new one.
- Memory is bounded: while one item does not end, a bounded number of later ones may.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from seawall import _checks as check
from seawall.clock import current_clock
from seawall.models.fifo import Positions
from seawall.runtime.driver import sleep_async

MOST_AHEAD: Final = 100_000
"""Items that may be read behind one that has not ended: where they are is kept in memory."""
LOOK_AGAIN: Final = 0.1
"""Seconds between two looks whether it has."""


@runtime_checkable
class Checkpoint(Protocol):
    """Where a place is kept: a file, or a row of a database (`DatabaseCheckpoint`)."""

    async def load(self) -> Any:
        """Return the place that was saved last, None if there is none."""

    async def save(self, place: Any) -> None:
        """Keep `place`, whatever JSON can hold, instead of the one before."""


CheckpointTarget: TypeAlias = "str | os.PathLike[str] | Checkpoint | None"
"""The path of a file, or any other `Checkpoint`; None keeps no place."""


class FileCheckpoint:
    """A place in a file of its own."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    async def load(self) -> Any:
        """Return what the file holds, None if there is none."""
        try:
            return json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise not_a_place(self) from None

    async def save(self, place: Any) -> None:
        """Write a file beside it, and put that in its place."""
        beside = self.path.with_name(f"{self.path.name}.new")
        with beside.open("w") as file:
            json.dump(place, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)


def not_a_place(checkpoint: Any) -> ValueError:
    """Return the error for a checkpoint that holds something else."""
    return ValueError(f"{checkpoint} is no checkpoint of this source: remove it to begin anew")


class SavedPlace:
    """Saves the place of a source, at most once in `every` seconds and at its end.

    Without a checkpoint it keeps the place in memory, for another run of the same source.
    """

    def __init__(self, checkpoint: CheckpointTarget, every: float) -> None:
        if checkpoint is None or (
            isinstance(checkpoint, Checkpoint) and not isinstance(checkpoint, type)
        ):
            self.checkpoint = checkpoint
        elif isinstance(checkpoint, str | os.PathLike) and os.fspath(checkpoint):
            self.checkpoint = FileCheckpoint(checkpoint)
        else:
            raise TypeError(f"checkpoint={checkpoint!r}: write the path of a file to keep it in")
        self._every = check.seconds("every", every, zero=True)
        self._clock = current_clock()
        self._saved_at = self._clock.now()
        self._saved: Any = None

    async def load(self, is_place: Callable[[Any], bool]) -> Any:
        """Return the place of the last run, None if there is none; raise if it is no place."""
        if self.checkpoint is not None:
            self._saved = await self.checkpoint.load()
        if self._saved is not None and not is_place(self._saved):
            raise not_a_place(self.checkpoint)
        return self._saved

    async def save_if_due(self, place: Callable[[], Any]) -> None:
        """Save what `place()` returns, if the last time is long enough ago."""
        if self.checkpoint is not None and self._clock.now() - self._saved_at >= self._every:
            await self.save(place())

    async def save(self, place: Any) -> None:
        """Save `place`, unless it is the one that was saved last."""
        if place is None or place == self._saved:
            return
        if self.checkpoint is not None:
            await self.checkpoint.save(place)
        self._saved, self._saved_at = place, self._clock.now()


async def wait_for_oldest(positions: Positions, source: str) -> None:
    """Wait while too many items have been read behind one that has not ended."""
    if len(positions) < MOST_AHEAD:
        return
    logging.getLogger("seawall").warning(
        "source %r waits: %d items were read behind one that has not ended, after place %s",
        source,
        len(positions),
        positions.checkpoint,
    )
    while len(positions) >= MOST_AHEAD:
        await sleep_async(LOOK_AGAIN)
