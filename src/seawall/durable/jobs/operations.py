"""The database operations on jobs, written once for all drivers.

Each function is one operation: it yields the statements of `sql/*/jobs.sql` and is sent the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from typing import Any, Final, NamedTuple

from seawall._failures import split_report
from seawall._forks import survives_fork
from seawall.clock import Clock
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.statements import containing
from seawall.durable.jobs.records import Job, is_id, job_of, name_of
from seawall.errors import Contended, JobExpired, KeyReused, QueueFull, RecordGarbled, UnknownJob
from seawall.jobs.encoding import decode
from seawall.jobs.work_list import BEYOND, OPENED, PageRequest, WorkItem, WorkPage, page_of
from seawall.models.durable_jobs import ENDED, HEAD_START, LOST, REACH
from seawall.models.queue.jobs import BROWSED
from seawall.runtime.driver import Steps
from seawall.runtime.mutex import Mutex

MICRO: Final = 1_000_000
TRIES: Final = 8
"""Number of attempts to add a job whose key appears and disappears meanwhile."""

EVERY: Final = 1.0
"""Seconds between two counts."""
SHARE: Final = 16
"""Count again after using 1/16 of the free places found: other processes use them too."""


def submitting(
    arguments: dict[str, Any], room: OpenJobsLimit, to_notify: Callable[[], str | None]
) -> Steps[Job]:
    """Add a job if there is room, unless its key already has one; notify listening workers."""
    if room.wants_a_look():
        rows = yield NamedQuery("jobs.depth", {"most": room.most})
        room.found(rows[0][0])
    has_room = room.take()
    for _ in range(TRIES):
        if has_room:
            rows = yield NamedQuery("jobs.submit", arguments)
            if rows:
                channel = to_notify()
                if channel is not None:
                    yield NamedQuery("jobs.notify", {"channel": channel})
                return job_of(rows[0], is_new=True)
            # The key exists; its transaction has committed by now, as our insert waited for it.
        same = yield from _of_key(arguments)
        if same is not None:
            return same
        if not has_room:
            raise room.refusal()
    raise Contended("others came and went with this key, each time")


def _of_key(arguments: dict[str, Any]) -> Steps[Job | None]:
    """Return the job of the key, if there is one that has not expired."""
    same = {name: arguments[name] for name in ("scope", "kind", "key_hash")}
    rows = [] if same["key_hash"] is None else (yield NamedQuery("jobs.by_key", same))
    if not rows:
        return None  # it does not exist, or was removed meanwhile
    job = job_of(rows[0])
    if job.state == "expired":
        yield NamedQuery("jobs.free_key", same)
        return None
    if bytes(rows[0][-2]) != arguments["fingerprint"]:
        raise KeyReused(
            f"job {job.id} was submitted with this key and another payload: use a new key"
        )
    return job


def viewing(id_: str, scope: str) -> Steps[Job]:
    """Read a job of that scope; a job of another scope is reported as unknown."""
    name_of("scope", scope)
    rows = []
    if is_id(id_):
        rows = yield NamedQuery("jobs.view", {"id": id_, "scope": scope})
    if not rows:
        raise UnknownJob("there is no such job")
    job = job_of(rows[0])
    if job.state == "expired":
        raise JobExpired("what came out of this job is not kept any more")
    return job


def cancelling(id_: str, scope: str, ttl: int) -> Steps[tuple[Job, bool]]:
    """Cancel a job; return it, and whether the cancellation had an effect."""
    rows = []
    if is_id(id_):
        asked = {"id": id_, "scope": name_of("scope", scope), "ttl": ttl}
        rows = yield NamedQuery("jobs.cancel", asked)
    job = yield from viewing(id_, scope)
    return job, bool(rows)


def claiming(
    kinds: list[str], most: int, owner: str, lease: int, ttl: int
) -> Steps[list[tuple[Any, ...]]]:
    """Claim the next due jobs, and end those that have no attempts left; return all their rows."""
    due = yield NamedQuery("jobs.due", {"kinds": dumps(kinds), "most": most, "reach": REACH})
    over = [id_ for id_, is_over in due if is_over]
    fresh = [id_ for id_, is_over in due if not is_over]
    rows: list[tuple[Any, ...]] = []
    if over:
        rows += yield NamedQuery("jobs.give_up", {"ids": dumps(over), "lost": LOST, "ttl": ttl})
    if fresh:
        rows += yield NamedQuery("jobs.take", {"ids": dumps(fresh), "owner": owner, "lease": lease})
    return sorted(rows, key=lambda row: (row[8], row[0]))


class JobHeartbeat(NamedTuple):
    """The heartbeat of one running job."""

    id: str
    epoch: int
    progress: float
    message: str


def beating(
    owner: str, lease: int, beats: list[JobHeartbeat], looks: list[str]
) -> Steps[dict[Any, bool]]:
    """Renew the lease of jobs, and check others.

    Return the ones that are still held, by id and epoch, and whether each is to be cancelled.
    """
    held: dict[Any, bool] = {}
    # In the order of their ids, as all workers do it, so that two cannot deadlock.
    for beat in sorted(beats):
        rows = yield NamedQuery("jobs.renew", {**beat._asdict(), "owner": owner, "lease": lease})
        if rows:
            held[beat.id, beat.epoch] = bool(rows[0][0])
    if looks:
        rows = yield NamedQuery("jobs.look", {"ids": dumps(looks), "owner": owner})
        held.update({(id_, epoch): bool(wanted) for id_, epoch, wanted in rows})
    return held


def telling(which: str, arguments: dict[str, Any]) -> Steps[str | None]:
    """Report a job's outcome; return its new state, or None if it is no longer ours."""
    rows = yield NamedQuery(f"jobs.{which}", arguments)
    return str(rows[0][0]) if rows else None


# For operators


def browsing(asked: PageRequest) -> Steps[WorkPage]:
    """Return a page of the jobs of a state, of any scope."""
    ended = asked.state in ENDED
    first = BEYOND if ended else -BEYOND
    arguments = {
        "state": asked.state,
        "number": asked.number if asked.id else first,
        "id": asked.id,
        "pattern": containing(asked.search),
        "cut": asked.cut,
        "most": BROWSED,
    }
    rows = yield NamedQuery("jobs.browse_ended" if ended else "jobs.browse_open", arguments)
    return page_of(rows, asked.limit, _item)


def inspecting(id_: str, *, payload: bool) -> Steps[WorkItem | None]:
    """Return one job, of any scope."""
    rows = yield NamedQuery("jobs.inspect", {"id": id_, "cut": OPENED if payload else 0})
    return _item(rows[0]) if rows else None


def retrying(id_: str, to_notify: Callable[[], str | None]) -> Steps[bool]:
    """Queue a failed job again; notify listening workers."""
    rows = yield NamedQuery("jobs.retry", {"id": id_, "head_start": HEAD_START})
    channel = to_notify() if rows else None
    if channel is not None:
        yield NamedQuery("jobs.notify", {"channel": channel})
    return bool(rows)


def dropping(id_: str, gone_for: int, ttl: int) -> Steps[bool]:
    """Expire a failed job, or cancel one that has not ended."""
    if (yield NamedQuery("jobs.drop_failed", {"id": id_, "gone_for": gone_for})):
        return True
    seen = yield from inspecting(id_, payload=False)
    if seen is None or seen.state in ENDED:
        return False
    asked = {"id": id_, "scope": seen.owner, "ttl": ttl}
    return bool((yield NamedQuery("jobs.cancel", asked)))


def _item(row: tuple[Any, ...]) -> WorkItem:
    (_, id_, state, kind, scope, priority, attempts, error, created, ended, due, size, payload) = (
        row[:13]
    )
    now = row[-1]
    error, trace = split_report(error)
    moment = ended if ended is not None else due
    acts = {"failed": ("retry", "drop"), "queued": ("drop",), "running": ("drop",)}
    return WorkItem(
        id_,
        state,
        kind,
        scope,
        priority,
        attempts,
        max(0, now - created) / MICRO,
        (now - moment) / MICRO,
        error,
        size,
        payload.encode("utf-8", "replace") if isinstance(payload, str) else bytes(payload or b""),
        acts.get(state, ()),
        trace,
    )


def claimed_payload(id_: str, payload: Any) -> Any:
    """Return the decoded payload of a claimed job; a `RecordGarbled` if it cannot be read."""
    try:
        return decode(payload.encode())
    except (ValueError, AttributeError):
        return RecordGarbled(f"job {id_}: its payload cannot be read")


class OpenJobsLimit:
    """A limit on the jobs that have not ended. Several processes may exceed it slightly."""

    def __init__(self, name: str, most: int | None, clock: Clock) -> None:
        """Allow `most` jobs; None means no limit."""
        self._name = name
        self.most = most
        self._clock = clock
        self._after_fork()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._mutex = Mutex()
        self._left = 0
        self._counted_at = float("-inf")

    def wants_a_look(self) -> bool:
        """Return whether the jobs should be counted now."""
        if self.most is None:
            return False
        with self._mutex:
            # While there is no room, count once per second.
            age = self._clock.now() - self._counted_at
            return age >= EVERY or self._left == 0

    def found(self, there: int) -> None:
        """Note how many jobs there are."""
        with self._mutex:
            free = self.most - there if self.most is not None else 0
            self._left = max(1, free // SHARE) if free > 0 else -1
            self._counted_at = self._clock.now()

    def take(self) -> bool:
        """Take a place; return False if there is none."""
        if self.most is None:
            return True
        with self._mutex:
            if self._left <= 0:
                return False
            self._left -= 1
            return True

    def refusal(self) -> QueueFull:
        """Return the exception for a full table."""
        return QueueFull(
            f"jobs {self._name!r}: {self.most} have not ended, and no more are allowed",
            retry_after=EVERY,
            guard=self._name,
            policy="jobs",
        )
