"""Data types of the job queue: settings, jobs and results. Times are in microseconds."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

PRIORITIES: Final = 10
"""Number of priorities: 0 is the lowest, 9 the highest."""
SWEEP: Final = 100
"""Maximum number of due entries of each kind that one call processes."""
BATCH_BYTES: Final = 1_048_576
"""Payloads after the first of a claim: its claimer waits for the reply."""
BROWSED: Final = 200
"""Maximum number of jobs that one call examines for a search."""
UNHEARD: Final = 10
"""Unacknowledged claims of a job that do not count as attempts."""
LEASE_OVER: Final = "the lease was over"
NOBODY: Final = "nobody heard of the claim"
CALLED_OFF: Final = "cancelled"
LATE: Final = "the deadline passed"

State = Literal["waiting", "delayed", "claimed", "done", "dead", "cancelled", "expired"]
How = Literal["failed", "returned", "fatal"]
"""Kind of nack: counted as an attempt, not counted, or not to be retried."""
Answer: TypeAlias = tuple[bool, str]
"""Whether the operation succeeded, and the state of the job.

The state is "unknown" if there is no such job, "full" if there is no room, and "taken" if another
job has its dedupe id.
"""
TOTALS: Final = ("pushed", "done", "died", "cancelled", "expired", "lost", "dropped")
"""Counters for ever. `lost`: expired leases; `dropped`: dead letters without room."""


class QueueRules(NamedTuple):
    """Settings of a queue. Times are in microseconds."""

    head_start: int  # head start of each level of priority
    max_attempts: int
    max_size: int  # maximum number of jobs that have not ended
    max_dead: int
    max_ended: int  # maximum number of remembered jobs that ended in another way than dead
    keep: int  # maximum time that a job waits before it expires, and that a dead one is kept
    result_ttl: int
    dedupe: int  # how long after its end a job still blocks its dedupe id


class NewJob(NamedTuple):
    """A job to be pushed."""

    nonce: str  # makes the id unique, even after the store has lost all data
    payload: bytes
    priority: int
    delay: int
    ttl: int  # time within which it must be started; 0 for as long as jobs are kept
    dedupe: str  # dedupe id, or an empty string for none


class JobGranted(NamedTuple):
    """A claimed job."""

    id: str
    fence: int
    attempt: int
    priority: int
    age: int  # time since it was pushed
    waited: int  # time since it could first be claimed
    left: int  # time until its deadline
    payload: bytes


class Seen(NamedTuple):
    """Status of a job."""

    state: str
    priority: int
    attempts: int
    age: int
    reason: str
    result: bytes | None


class Letter(NamedTuple):
    """A dead letter."""

    id: str
    priority: int
    attempts: int
    age: int  # time since it died
    reason: str
    payload: bytes


class Browsed(NamedTuple):
    """A job as shown in a list of jobs."""

    number: int  # the number by which its list is sorted
    id: str
    state: str
    priority: int
    attempts: int
    age: int  # time since it was pushed
    since: int  # time since it became ready or died; negative until then, or until its lease ends
    reason: str
    size: int  # size of the whole payload in bytes
    payload: bytes  # the first bytes of the payload


class QueueCounts(NamedTuple):
    """Numbers of jobs by state."""

    waiting: tuple[int, ...]  # by priority
    delayed: int
    claimed: int
    dead: int
    oldest: int  # how long the oldest waiting job has been ready; -1 if none is waiting
    totals: tuple[int, ...]


class QueuedJob:
    """The complete state of a job."""

    __slots__ = (
        "at", "attempts", "deadline", "dedupe", "fence", "heard", "id", "payload", "priority",
        "pushed", "reason", "result", "score", "state", "unheard",
    )  # fmt: skip

    def __init__(self, id_: str, new: NewJob, now: int, latest: int, rules: QueueRules) -> None:
        ready = now + new.delay
        self.id = id_
        self.state: State = "waiting"
        self.priority = new.priority
        self.score = latest + new.delay - new.priority * rules.head_start
        self.fence = 0
        self.attempts = 0
        self.heard = True  # whether the claimer has acknowledged its claim
        self.unheard = 0  # leases that expired without acknowledgement
        self.deadline = now + new.ttl if new.ttl else ready + rules.keep
        self.pushed = now
        self.at = ready  # waiting since, delayed or claimed until, or ended at this time
        self.dedupe = new.dedupe
        self.reason = ""
        self.payload = new.payload
        self.result: bytes | None = None
