"""Records of a queue: calls of its rules, claims, job statuses and dead letters."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeAlias, TypeVar

from seawall.runtime.layers import Waiter

T = TypeVar("T")


class QueueCall(NamedTuple):
    """A question: one operation of the queue's rules, with its arguments."""

    operation: str
    args: tuple[Any, ...]


QueueSteps: TypeAlias = Generator[QueueCall | Waiter, Any, T]
"""An operation of a queue that returns a T."""


@dataclass(slots=True, eq=False)
class Claim:
    """Work claimed by a worker until its lease expires: a job, or a deferred call."""

    id: str
    payload: Any
    attempt: int
    """Number of this attempt; 1 is the first."""
    fence: int
    """Fencing number, higher for each claim of the same job."""
    until: float
    """When the lease expires by the local clock, or a little earlier."""
    lease: float = 0.0
    priority: int = 0
    age: float = 0.0
    """Seconds from the push to the claim."""
    waited: float = 0.0
    """Seconds from when the job first became claimable to the claim."""
    time_left: float = inf
    """Seconds from the claim to the job's deadline."""
    kind: str = ""
    """The kind of a job in a database."""
    scope: str = ""
    """The owner of a job in a database."""
    key: str | None = None
    """The idempotency key of a deferred call, and the tenant that made it."""
    tenant: str | None = None
    max_attempts: int = 0
    owner: str = ""
    """The worker that claimed a job in a database."""
    progress: float = 0.0
    message: str = ""

    def __repr__(self) -> str:
        kind = f"{self.kind}, " if self.kind else ""
        return f"<Claim {self.id}: {kind}attempt {self.attempt}, priority {self.priority}>"


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


class DeadJob(NamedTuple):
    """A job or a deferred call that was given up."""

    id: str
    payload: Any
    """None if the stored payload cannot be read; of a deferred call `[args, kwargs]`."""
    attempts: int
    reason: str
    """Why the last attempt failed: exception type and message, on one line."""
    traceback: str = ""
    """Traceback of the last attempt, redacted and shortened; empty if there is none."""
    priority: int | None = None
    age: float | None = None
    """Seconds since it died, where that is known."""
