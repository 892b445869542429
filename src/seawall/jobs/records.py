"""Records of a queue: calls of its rules, claims, job statuses and dead letters."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from seawall.models.queue.jobs import JobGranted
from seawall.runtime.layers import Waiter

T = TypeVar("T")


class QueueCall(NamedTuple):
    """A question: one operation of the queue's rules, with its arguments."""

    operation: str
    args: tuple[Any, ...]


class QueueNotice(NamedTuple):
    """An operation whose answer is not awaited."""

    ask: QueueCall


QueueSteps: TypeAlias = Generator[QueueCall | QueueNotice | Waiter, Any, T]
"""An operation of a queue that returns a T."""


class Claim:
    """A job claimed by a worker until its lease expires."""

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

    def __init__(self, granted: JobGranted, payload: Any, lease: float, until: float) -> None:
        """Copy the fields of the grant."""
        self.id = granted.id
        self.payload = payload
        self.priority = granted.priority
        self.attempt = granted.attempt
        """Number of this attempt; 1 is the first."""
        self.fence = granted.fence
        """Fencing number, higher for each claim of the same job."""
        self.age = granted.age / 1e6
        """Seconds from the push to the claim."""
        self.waited = granted.waited / 1e6
        """Seconds from when the job first became claimable to the claim."""
        self.time_left = granted.left / 1e6
        """Seconds from the claim to the job's deadline."""
        self.lease = lease
        self.until = until
        """When the lease expires by the queue's local clock, or a little earlier."""

    def __repr__(self) -> str:
        return f"<Claim {self.id}: attempt {self.attempt}, priority {self.priority}>"


class JobStatus(NamedTuple):
    """The status of a job."""

    id: str
    state: str
    """One of waiting, delayed, claimed, done, dead, cancelled and expired."""
    priority: int
    attempts: int
    age: float
    """Seconds since it was pushed."""
    reason: str
    """Why it ended, or why its last attempt failed."""
    result: Any
    """None if there is no result, or if the stored one cannot be read."""


class DeadLetter(NamedTuple):
    """A job that was given up."""

    id: str
    payload: Any
    """None if the stored payload cannot be read."""
    priority: int
    attempts: int
    age: float
    """Seconds since it died."""
    reason: str
    """Why the last attempt failed: exception type and message, on one line."""
    traceback: str = ""
    """Traceback of the last attempt, redacted and shortened; empty if there is none."""
