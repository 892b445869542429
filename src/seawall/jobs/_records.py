"""What a queue hands out: claims, what is known of a job, dead letters; and what it tells."""

from __future__ import annotations

from typing import Any, NamedTuple

from seawall.models.queue.jobs import Granted


class Claim:
    """A job that is the claimer's until its lease is over."""

    __slots__ = (
        "age",
        "attempt",
        "fence",
        "id",
        "lease",
        "payload",
        "priority",
        "time_left",
        "until",
        "waited",
    )

    def __init__(self, granted: Granted, payload: Any, lease: float, until: float) -> None:
        """Hold what the queue granted."""
        self.id = granted.id
        self.payload = payload
        self.priority = granted.priority
        self.attempt = granted.attempt
        """1 for the first."""
        self.fence = granted.fence
        """Higher for each claim of the same job."""
        self.age = granted.age / 1e6
        """Seconds since it was pushed, when it was claimed."""
        self.waited = granted.waited / 1e6
        """Seconds since it could be claimed first, when it was claimed."""
        self.time_left = granted.left / 1e6
        """Seconds until its deadline, when it was claimed."""
        self.lease = lease
        self.until = until
        """The instant of the queue's clock here at which the lease is over, or a little before."""

    def __repr__(self) -> str:
        return f"<Claim {self.id}: attempt {self.attempt}, priority {self.priority}>"


class JobStatus(NamedTuple):
    """What is known of a job."""

    id: str
    state: str
    """waiting, delayed, claimed, done, dead, cancelled or expired."""
    priority: int
    attempts: int
    age: float
    """Seconds since it was pushed."""
    reason: str
    """Why it ended, or why its last attempt failed."""
    result: Any
    """None if there is none, or if what is stored cannot be read."""


class DeadLetter(NamedTuple):
    """A job that was given up."""

    id: str
    payload: Any
    """None if what is stored cannot be read."""
    priority: int
    attempts: int
    age: float
    """Seconds since it died."""
    reason: str
    """Why the last attempt failed: the error's name and message, on one line."""
    traceback: str = ""
    """That of the last attempt's error, redacted and cut; empty if there is none."""
