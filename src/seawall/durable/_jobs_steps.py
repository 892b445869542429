"""What is asked of the database about jobs, written once for all drivers.

Each function is one operation: it yields the statements of `sql/*/jobs.sql` and is sent the rows.
"""

from __future__ import annotations

from json import dumps
from typing import Any, Final, NamedTuple

from seawall.durable._connections import Ask
from seawall.durable._idempotency_errors import KeyReused, RecordGarbled
from seawall.durable._jobs_records import Job, JobExpired, job_of
from seawall.errors import Contended, UnknownJob
from seawall.jobs._codec import decode
from seawall.models.durable_jobs import LOST, REACH
from seawall.runtime.stepping import Steps

MICRO: Final = 1_000_000
TRIES: Final = 8
"""How often a key is looked at, whose job comes and goes meanwhile."""


class Taken(NamedTuple):
    """A row of a claim: ours if it is running, else one that has ended instead."""

    id: str
    scope: str
    kind: str
    state: str
    epoch: int
    attempt: int
    max_attempts: int
    payload: Any
    progress: float
    message: str


def submitting(arguments: dict[str, Any]) -> Steps[Job]:
    """Add a job, unless its key has one already."""
    same = {name: arguments[name] for name in ("scope", "kind", "key_hash")}
    for _ in range(TRIES):
        rows = yield Ask("jobs.submit", arguments)
        if rows:
            return job_of(rows[0], is_new=True)
        # Somebody has it; who added it has committed by now, or we had waited.
        rows = yield Ask("jobs.by_key", same)
        if not rows:
            continue  # it is gone again
        job = job_of(rows[0])
        if job.state == "expired":
            yield Ask("jobs.free_key", same)
            continue
        if bytes(rows[0][-2]) != arguments["fingerprint"]:
            raise KeyReused(
                f"job {job.id} was submitted with this key and another payload: use a new key"
            )
        return job
    raise Contended("others came and went with this key, each time")


def viewing(id_: str, scope: str) -> Steps[Job]:
    """Read a job of that scope; one of another scope is as unknown as none."""
    rows = yield Ask("jobs.view", {"id": id_, "scope": scope})
    if not rows:
        raise UnknownJob("there is no such job")
    job = job_of(rows[0])
    if job.state == "expired":
        raise JobExpired("what came out of this job is not kept any more")
    return job


def cancelling(id_: str, scope: str, ttl: int) -> Steps[tuple[Job, bool]]:
    """Cancel a job; tell whether that had an effect."""
    rows = yield Ask("jobs.cancel", {"id": id_, "scope": scope, "ttl": ttl})
    job = yield from viewing(id_, scope)
    return job, bool(rows)


def claiming(kinds: list[str], most: int, owner: str, lease: int, ttl: int) -> Steps[list[Taken]]:
    """Take what is next in line."""
    asked = {"kinds": dumps(kinds), "most": most, "reach": REACH}
    rows = yield Ask("jobs.claim", {**asked, "owner": owner, "lease": lease, "ttl": ttl, **_LOST})
    rows.sort(key=lambda row: (row[8], row[0]))
    return [_taken(row) for row in rows]


def claiming_one(id_: str, owner: str, lease: int, ttl: int) -> Steps[Taken | None]:
    """Take one job, if it may be taken."""
    asked = {"id": id_, "owner": owner, "lease": lease, "ttl": ttl, **_LOST}
    rows = yield Ask("jobs.claim_one", asked)
    return _taken(rows[0]) if rows else None


class Beat(NamedTuple):
    """What a worker has to say of one of its jobs, while it is at it."""

    id: str
    epoch: int
    progress: float
    message: str


def beating(owner: str, lease: int, beats: list[Beat], looks: list[str]) -> Steps[dict[Any, bool]]:
    """Hold jobs for another lease, and look after others.

    Return, by id and epoch, those that are still held, and whether they are to be cancelled.
    """
    held: dict[Any, bool] = {}
    # In the order of their ids, as every other worker does it: no two wait for each other.
    for beat in sorted(beats):
        rows = yield Ask("jobs.renew", {**beat._asdict(), "owner": owner, "lease": lease})
        if rows:
            held[beat.id, beat.epoch] = bool(rows[0][0])
    if looks:
        rows = yield Ask("jobs.look", {"ids": dumps(looks), "owner": owner})
        held.update({(id_, epoch): bool(wanted) for id_, epoch, wanted in rows})
    return held


def telling(which: str, arguments: dict[str, Any]) -> Steps[str | None]:
    """Say how a job went; return its new state, or None: it was not ours any more."""
    rows = yield Ask(f"jobs.{which}", arguments)
    return str(rows[0][0]) if rows else None


def listing(kinds: list[str], most: int) -> Steps[list[tuple[str, int]]]:
    """Return those that could be claimed now, with their priorities."""
    rows = yield Ask("jobs.waiting", {"kinds": dumps(kinds), "most": most})
    return [(id_, priority) for id_, priority in rows]


def sweeping(which: str, arguments: dict[str, Any]) -> Steps[int]:
    """Do one batch of cleaning; return how many that were."""
    rows = yield Ask(f"jobs.{which}", arguments)
    return len(rows)


def counting() -> Steps[dict[str, tuple[int, float]]]:
    """Return how many there are in each state, and the age of the oldest."""
    rows = yield Ask("jobs.counts", {})
    return {state: (count, max(0, now - oldest) / MICRO) for state, count, oldest, now in rows}


_LOST: Final = {"lost": LOST}


def _taken(row: tuple[Any, ...]) -> Taken:
    id_, scope, kind, state, epoch, attempt, most, payload, _rank, progress, message = row
    try:
        said = decode(payload.encode())
    except (ValueError, AttributeError):
        said = RecordGarbled(f"job {id_}: its payload cannot be read")
    return Taken(id_, scope, kind, state, epoch, attempt, most, said, progress, message)
