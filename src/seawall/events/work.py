"""Events of work that is kept or flows: jobs, outboxes, what is in a database, pipelines."""

from __future__ import annotations

from dataclasses import dataclass

from seawall.events.bus import Event


@dataclass(slots=True, kw_only=True, eq=False)
class JobDied(Event):
    """A job was given up after its last attempt; `guard` is the name of its queue or its `Jobs`.

    Also a call that was stored to be done later; `guard` is then the name of its `DeferredCalls`.
    """

    name = "job_died"
    is_change = True

    job: str
    attempts: int
    cause: str
    """Why the last attempt failed."""
    traceback: str = ""
    """Traceback of the handler's error, redacted and shortened; empty if none was raised."""


@dataclass(slots=True, kw_only=True, eq=False)
class DeadLetterDropped(Event):
    """A dead letter was dropped because there were too many; `guard` is the queue's name."""

    name = "dead_letter_dropped"
    is_change = True

    job: str


@dataclass(slots=True, kw_only=True, eq=False)
class OutboxBlocked(Event):
    """An event used up its attempts and blocks its aggregate; `guard` is the outbox's name."""

    name = "outbox_blocked"
    is_change = True

    aggregate: str
    aggregate_id: str
    event_id: str
    attempts: int
    cause: str
    traceback: str = ""
    """Traceback of the sink's error, redacted and shortened; empty if none was raised."""


@dataclass(slots=True, kw_only=True, eq=False)
class EventDied(Event):
    """An event used up its attempts and was set aside; `guard` is the outbox's name."""

    name = "event_died"
    is_change = True

    aggregate: str
    aggregate_id: str
    event_id: str
    attempts: int
    cause: str
    traceback: str = ""
    """Traceback of the sink's error, redacted and shortened; empty if none was raised."""


@dataclass(slots=True, kw_only=True, eq=False)
class FifoGap(Event):
    """A message has been missing for too long; `guard` is the receiver's name."""

    name = "fifo_gap"
    is_change = True

    sender: str
    epoch: int
    expected: int
    """Number of the missing message."""
    age: float
    """How long it has been missing, in seconds."""
    skipped_to: int | None
    """Number with which delivery resumes; None while it waits."""


@dataclass(slots=True, kw_only=True, eq=False)
class ItemDied(Event):
    """An item was set aside as a dead letter; `guard` is the pipeline's name."""

    name = "item_died"
    is_change = True

    item: str
    stage: str
    """Where it failed."""
    attempts: int
    """Number of attempts there."""
    cause: str


@dataclass(slots=True, kw_only=True, eq=False)
class SourceChanged(Event):
    """A source failed, or is back; `guard` is the name of its pipeline, or of its `Collect`.

    The states are ok and failing; for a source of a `Collect`, ok and missing.
    """

    name = "source_changed"
    is_change = True

    source: str
    before: str
    after: str
    cause: str
    duration: float
    """How many seconds the trouble has lasted."""


@dataclass(slots=True, kw_only=True, eq=False)
class StageChanged(Event):
    """A stage is blocked, or flows again; `guard` is the pipeline's name.

    It is blocked while an item that failed cannot be stored as a dead letter.
    """

    name = "stage_changed"
    is_change = True

    stage: str
    before: str
    after: str
    item: str
    cause: str
    duration: float
    """How many seconds it was blocked."""


@dataclass(slots=True, kw_only=True, eq=False)
class CollectionChanged(Event):
    """A `Collect` has too few values, or enough again; `guard` is its name."""

    name = "collection_changed"
    is_change = True

    before: str
    """Either "enough" or "too_few"; so is `after`."""
    after: str
    values: int
    minimum: int
    missing: str
    """Names of the missing sources."""


@dataclass(slots=True, kw_only=True, eq=False)
class PipelineEnded(Event):
    """A run of a pipeline ended; `guard` is its name.

    The result is over (its sources were), stopped or failed.
    """

    name = "pipeline_ended"
    is_change = True

    result: str
    read: int
    stored: int
    dead_letters: int
    dropped: int
    returned: int
    cause: str
    """Why it failed, if it did."""
