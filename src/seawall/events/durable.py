"""Events of jobs, and of what is kept in a database."""

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
