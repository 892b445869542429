"""Events of this process and its resources: pools, workers, event loops, levels of service."""

from __future__ import annotations

from dataclasses import dataclass

from seawall.events.bus import Event


@dataclass(slots=True, kw_only=True, eq=False)
class LevelChanged(Event):
    """A service went from one level of service to another."""

    name = "level_changed"
    is_change = True

    before: str
    after: str
    cause: str


@dataclass(slots=True, kw_only=True, eq=False)
class ResourceLeaked(Event):
    """A resource has been out of its pool for longer than borrowers are expected to need."""

    name = "resource_leaked"
    is_change = True

    borrowed_at: str
    """The line of code that borrowed it."""
    seconds: float
    """How long it has been out."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerReplaced(Event):
    """A worker process died and another took its place."""

    name = "worker_replaced"
    is_change = True

    item: str
    """What it was working on."""
    exit_code: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class LoopBlocked(Event):
    """An event loop has not completed an iteration for `seconds`; `stack` is what it is doing.

    It comes when the block is noticed, and once more when it is `over`.
    """

    name = "loop_blocked"

    seconds: float
    stack: str
    over: bool
