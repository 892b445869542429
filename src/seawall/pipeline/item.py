"""An item on its way through a pipeline, and how it ended.

Promises: an item ends exactly once, as one of four `Ending`s; what degraded it stays with it to
the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from seawall.pipeline.source import Source


class Ending(StrEnum):
    """How an item ended."""

    SINK = "sink"
    """A sink has it, or the fallback of a sink."""
    DEAD_LETTER = "dead_letter"
    """It failed and was set aside, with its cause."""
    DROPPED = "dropped"
    """It failed, or was filtered out, and is only counted."""
    RETURNED = "returned"
    """It was not finished when the pipeline stopped; the source has it again."""


class ItemDegradation(NamedTuple):
    """What an item lacks since a stage failed, and went on with `degrade`."""

    stage: str
    """Where that happened."""
    cause: str
    """The error in one line."""


class _Drop:
    """The type of `DROP`; a worker process returns the same object."""

    def __reduce__(self) -> str:
        return "DROP"

    def __repr__(self) -> str:
        return "DROP"


DROP: Final = _Drop()
"""Returned by a stage for an item that is not wanted: it is dropped, and counted."""


class Item:
    """A value on its way, with everything that the pipeline knows about it."""

    __slots__ = (
        "attempts",
        "deaths",
        "degradations",
        "entered_at",
        "handle",
        "key",
        "read_at",
        "source",
        "stage",
        "value",
    )

    def __init__(self, value: Any, source: Source[Any], handle: Any, read_at: float) -> None:
        self.value = value
        self.source = source
        self.handle = handle
        self.read_at = self.entered_at = read_at
        """`entered_at` is when it came to the stage where it is now."""
        self.stage = ""
        """The name of that stage."""
        self.attempts = 0
        """Number of calls of that stage's function with it."""
        self.deaths = 0
        """Number of worker processes that have died of it, in any stage."""
        self.key: Hashable = None
        """By which it is ordered in that stage."""
        self.degradations: tuple[ItemDegradation, ...] = ()
        """Why it is less than it should be; empty for a complete item."""

    def __repr__(self) -> str:
        return f"<Item {self.id} in {self.stage!r}>"

    @property
    def id(self) -> str:
        """Its name in logs and on pages, unique in its source."""
        return f"{self.source.name}:{self.handle}"


class DeadLetter(NamedTuple):
    """An item that was set aside, with why and where."""

    id: str
    value: Any
    """As it came to the stage where it failed."""
    stage: str
    cause: str
    """The error in one line, without secrets."""
    attempts: int
    at: float
    """When, in seconds since the epoch."""
    degradations: tuple[ItemDegradation, ...] = ()
    traceback: str = ""
    """Where the error was raised, without secrets and bounded; empty if it was not."""


class ItemResult(NamedTuple):
    """How one item ended, as `Pipeline.test` returns it."""

    value: Any
    """As the sink got it, or as it was when it failed."""
    ending: Ending
    stage: str
    """Where it ended."""
    cause: str = ""
    attempts: int = 0
    degradations: tuple[ItemDegradation, ...] = ()


CURRENT: Final[ContextVar[Item]] = ContextVar("seawall_item")
CURRENT_BATCH: Final[ContextVar[Sequence[Item] | None]] = ContextVar("seawall_batch", default=None)
"""The items of the batch that a function is called with; None where it is called with one."""


def current_item() -> Item:
    """Return the item that this stage works at; raise `LookupError` outside of a stage."""
    return CURRENT.get()
