"""What a queue of jobs is told, what it holds, and what it answers; times in microseconds."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

PRIORITIES: Final = 10
"""0 is the lowest, 9 the highest."""
SWEEP: Final = 100
"""So much of each sort is settled by one call."""
BATCH_BYTES: Final = 1_048_576
"""Of payloads in one claim, except for the first: an answer must arrive while somebody waits."""
BROWSED: Final = 200
"""Jobs that one call looks at, for a list of those that match a search."""
UNHEARD: Final = 10
"""So many claims of a job of which nobody has heard are no attempts; more are."""
LEASE_OVER: Final = "the lease was over"
NOBODY: Final = "nobody heard of the claim"
CALLED_OFF: Final = "cancelled"
LATE: Final = "the deadline passed"

State = Literal["waiting", "delayed", "claimed", "done", "dead", "cancelled", "expired"]
How = Literal["failed", "returned", "fatal"]
"""Of a nack: counted as an attempt, not counted, or not to be tried again."""
Answer: TypeAlias = tuple[bool, str]
"""Whether it was done, and the job's state now: "unknown" if there is none, "full" if there is no
room, "taken" if another job has its dedupe id."""
TOTALS: Final = ("pushed", "done", "died", "cancelled", "expired", "lost", "dropped")
"""What is counted for as long as the queue lives; `lost` are leases that were over, `dropped` dead
letters for which there was no room."""


class QueueRules(NamedTuple):
    """The settings; times in microseconds."""

    head_start: int
    """Of each level of priority."""
    max_attempts: int
    max_size: int
    """The most jobs that have not ended."""
    max_dead: int
    max_ended: int
    """So many jobs are remembered that have ended otherwise."""
    keep: int
    """The longest that a job waits before it is expired, and that a dead one is kept."""
    result_ttl: int
    dedupe: int
    """How long after its end a job still answers for its dedupe id."""


class NewJob(NamedTuple):
    """A job to be pushed."""

    nonce: str
    """Makes the id one that never was, also after the store has forgotten everything."""
    payload: bytes
    priority: int
    delay: int
    ttl: int
    """How long from now it may be started; 0 for as long as jobs are kept."""
    dedupe: str
    """"" for none."""


class Granted(NamedTuple):
    """A claim."""

    id: str
    fence: int
    attempt: int
    priority: int
    age: int
    """Since it was pushed."""
    waited: int
    """Since it could be claimed first."""
    left: int
    """Until its deadline."""
    payload: bytes


class Seen(NamedTuple):
    """What is known of a job."""

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
    age: int
    """Since it died."""
    reason: str
    payload: bytes


class Browsed(NamedTuple):
    """A job as a list of jobs shows it."""

    number: int
    """Its place in its line: what the line is sorted by."""
    id: str
    state: str
    priority: int
    attempts: int
    age: int
    """Since it was pushed."""
    since: int
    """Since it waits or is dead; below 0 until it is ready, or until its lease is over."""
    reason: str
    size: int
    """Of the whole payload, in bytes."""
    payload: bytes
    """The beginning of it."""


class Counts(NamedTuple):
    """How many there are."""

    waiting: tuple[int, ...]
    """By priority."""
    delayed: int
    claimed: int
    dead: int
    oldest: int
    """How long the longest waiting could have been claimed already; -1 if none waits."""
    totals: tuple[int, ...]


class Job:
    """All that is known of a job while the queue knows it."""

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
        self.heard = True  # whether the claimer has said that it knows of its claim
        self.unheard = 0  # leases that were over before
        self.deadline = now + new.ttl if new.ttl else ready + rules.keep
        self.pushed = now
        self.at = ready  # since then waiting, until then delayed or claimed, ended then
        self.dedupe = new.dedupe
        self.reason = ""
        self.payload = new.payload
        self.result: bytes | None = None
