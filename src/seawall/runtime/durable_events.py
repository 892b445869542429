"""The events of what is kept in a database.

They are published and subscribed to like all others, see `seawall.runtime.events`. A job or a call
that was given up is a `JobDied`, as in any queue.
"""

from __future__ import annotations

from seawall.runtime.events import Event


class OutboxBlocked(Event):
    """An event used up its attempts and blocks its aggregate; `guard` is the outbox's name."""

    __slots__ = ("aggregate", "aggregate_id", "attempts", "cause", "event_id", "traceback")
    name = "outbox_blocked"
    is_change = True

    def __init__(
        self,
        guard: str,
        *,
        aggregate: str,
        aggregate_id: str,
        event_id: str,
        attempts: int,
        cause: str,
        traceback: str = "",
    ) -> None:
        """Hold the blocked aggregate, the event's id, its number of attempts, and why it failed."""
        super().__init__(guard)
        self.aggregate = aggregate
        self.aggregate_id = aggregate_id
        self.event_id = event_id
        self.attempts = attempts
        self.cause = cause
        self.traceback = traceback
        """Traceback of the sink's error, redacted and shortened; empty if none was raised."""


class EventDied(Event):
    """An event used up its attempts and was set aside; `guard` is the outbox's name."""

    __slots__ = ("aggregate", "aggregate_id", "attempts", "cause", "event_id", "traceback")
    name = "event_died"
    is_change = True

    def __init__(
        self,
        guard: str,
        *,
        aggregate: str,
        aggregate_id: str,
        event_id: str,
        attempts: int,
        cause: str,
        traceback: str = "",
    ) -> None:
        """Hold the dead event's id, its aggregate, its number of attempts, and why it failed."""
        super().__init__(guard)
        self.aggregate = aggregate
        self.aggregate_id = aggregate_id
        self.event_id = event_id
        self.attempts = attempts
        self.cause = cause
        self.traceback = traceback
        """Traceback of the sink's error, redacted and shortened; empty if none was raised."""


class FifoGap(Event):
    """A message has been missing for too long; `guard` is the receiver's name."""

    __slots__ = ("age", "epoch", "expected", "sender", "skipped_to")
    name = "fifo_gap"
    is_change = True

    def __init__(
        self,
        guard: str,
        *,
        sender: str,
        epoch: int,
        expected: int,
        age: float,
        skipped_to: int | None,
    ) -> None:
        """Hold which is missing, for how long, and where delivery resumes; None while it waits."""
        super().__init__(guard)
        self.sender = sender
        self.epoch = epoch
        self.expected = expected
        self.age = age
        self.skipped_to = skipped_to
