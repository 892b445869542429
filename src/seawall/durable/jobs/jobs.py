"""Jobs in a database: submitted within the user's transaction, executed later, with a status.

Promises:

- A committed job is executed, or ends as failed or cancelled, even if workers die. A job that was
  rolled back never existed.
- The same key in the same scope and kind is the same job.
- Only one worker at a time can report about a job: a worker that was presumed dead and comes back
  is refused.
- A caller that may not see a job cannot distinguish it from one that does not exist.
- The result is kept for `result_ttl`.

A worker that dies in the middle has already had some effects: jobs are executed at least once. So
their functions must be safe to repeat (by `Idempotency.once` with the job's id, for instance).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from json import dumps
from typing import Any, Final, NamedTuple, cast
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall._failures import split_report
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable.database.cleanup import cleaning_steps
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.statements import containing
from seawall.durable.database.twins import OnConnection, WaitRequest, transaction_twins, twins
from seawall.durable.jobs.records import (
    Job,
    claimed_payload,
    is_id,
    job_of,
    key_digest,
    name_of,
    payload_of,
    result_of,
    shown,
    stored_error,
)
from seawall.errors import Contended, JobExpired, KeyReused, QueueFull, TimedOut, UnknownJob
from seawall.events import JobDied
from seawall.events.bus import emit
from seawall.jobs import Claim, WorkItem, WorkPage
from seawall.jobs.wakeups import READY, Wakeup, Wakeups
from seawall.jobs.work_list import BEYOND, OPENED, page_of, page_request
from seawall.models.durable_jobs import ENDED, HEAD_START, LOST, LOWEST, REACH
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
BATCH: Final = 500
"""Default number of jobs that one transaction cleans up."""
FIRST_LOOK: Final = 0.05
LAST_LOOK: Final = 1.0
"""Seconds between two looks of a waiter at its job: at first, and at most."""
DEBOUNCE: Final = 0.05
"""Minimum seconds between two notifications."""
TOGETHER: Final = (
    "the job is committed with its rows; or write None instead of the connection, and it is"
    " committed by itself"
)
CANCELLED: Final = "cancelled"
"""The topic of workers that wait for cancellations."""


class JobHeartbeat(NamedTuple):
    """The heartbeat of one running job."""

    id: str
    epoch: int
    progress: float
    message: str


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

    def is_count_due(self) -> bool:
        """Return whether the jobs are to be counted now."""
        if self.most is None:
            return False
        with self._mutex:
            # While there is no room, count once per second.
            age = self._clock.now() - self._counted_at
            return age >= EVERY or self._left == 0

    def set_count(self, open_jobs: int) -> None:
        """Note how many jobs there are."""
        with self._mutex:
            free = self.most - open_jobs if self.most is not None else 0
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


class Jobs:
    """The jobs of a database."""

    WORK_STATES = ("failed", "queued", "running", "cancelled", "succeeded")
    """The job states that `browse` can list."""

    def __init__(
        self,
        database: Database,
        *,
        name: str = "jobs",
        lease: float = 30.0,
        attempts: int = 5,
        result_ttl: float = 86_400.0,
        gone_for: float = 7 * 86_400.0,
        max_size: int | None = 100_000,
        max_payload: int = 262_144,
        max_result: int = 1_048_576,
        notify: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Keep jobs in `database`.

        A worker holds a job for `lease` seconds and renews that; if it dies, another worker takes
        the job after the lease. A job has `attempts` attempts. Its result is kept for `result_ttl`
        seconds, and the fact that it existed for `gone_for` seconds more. While `max_size` jobs
        have not ended, more are refused; they are counted about once per second, not for each job.
        Payload and result have at most `max_payload` and `max_result` bytes as JSON. With `notify`,
        PostgreSQL's NOTIFY announces new jobs to listening workers of other processes, at most
        every 50 ms from this one.
        """
        self.database = checked_database("Jobs", database)
        self.name = name_of("name", name)
        self.lease = check.seconds("lease", lease)
        self.attempts = check.count("attempts", attempts, maximum=1_000_000)
        self.result_ttl = check.seconds("result_ttl", result_ttl)
        self.gone_for = check.seconds("gone_for", gone_for, zero=True)
        self.max_payload = check.count("max_payload", max_payload)
        self.max_result = check.count("max_result", max_result)
        self.max_size = None if max_size is None else check.count("max_size", max_size)
        self.notify = check.flag("notify", notify)
        self.clock = current_clock() if clock is None else check_clock(clock)
        # In microseconds, as the statements want them:
        self._lease = round(self.lease * MICRO)
        self._ttl = round(self.result_ttl * MICRO)
        self._gone_for = round(self.gone_for * MICRO)
        self.wakeups = Wakeups()
        self._room = OpenJobsLimit(self.name, self.max_size, self.clock)
        self._notified = float("-inf")
        self._mutex = Mutex()
        survives_fork(self)
        words = ("submitted", "repeated", "cancelled", "claimed", "given_up", "refused_late")
        self._totals = dict.fromkeys(words, 0)
        registry.enter(self, "jobs", self.name, ask="acounts")

    def __repr__(self) -> str:
        return f"<Jobs {self.name!r} of {self.database!r}>"

    def _after_fork(self) -> None:
        self._mutex = Mutex()  # another thread may have held it

    # For producers

    def _submit(
        self,
        conn: Any,
        kind: str,
        payload: Any = None,
        *,
        scope: str,
        key: str | None = None,
        priority: int = 5,
        delay: float = 0.0,
        attempts: int | None = None,
    ) -> Steps[Job]:
        """Add a job and return it; if `key` exists for the scope and kind, return that job instead.

        With a connection, the job is part of the open transaction: it is invisible until the
        commit, and a rollback removes it. A connection without a transaction is refused. With None,
        the job is committed here.

        `scope` is the owner of the job: the tenant or the user. `priority` is 0 (first) to 9. The
        job is not started before `delay` seconds have passed. Raises `KeyReused` if the key came
        with another payload, and `QueueFull` if there is no room for another job.
        """
        text, fingerprint = payload_of(payload, self.max_payload)
        check.count("priority", priority, minimum=0, maximum=LOWEST)
        most = self.attempts if attempts is None else attempts
        made = {
            "id": str(uuid4()),  # from the system's randomness: cannot be guessed
            "scope": name_of("scope", scope),
            "kind": name_of("kind", kind),
            "key_hash": None if key is None else key_digest(key),
            "fingerprint": fingerprint,
            "priority": priority,
            "ahead": priority * HEAD_START,
            "delay": round(check.seconds("delay", delay, zero=True) * MICRO),
            "max_attempts": check.count("attempts", most, maximum=1_000_000),
            "payload": text,
        }
        adding = partial(self._add_steps, made)
        job: Job = yield adding if conn is None else OnConnection(conn, adding, TOGETHER)
        self._count("submitted" if job.is_new else "repeated")
        self.wakeups.ring(READY)
        return job

    submit, asubmit = twins(_submit)

    def _get(self, id: str, *, scope: str) -> Steps[Job]:  # noqa: A002 - it is an id
        """Return the current state of a job.

        Raises `UnknownJob` if it does not exist or belongs to another scope; `JobExpired` if its
        result is no longer kept.
        """
        _check_id(id, scope)
        job: Job = yield lambda: view_job(id, scope)
        return job

    get, aget = twins(_get)

    def _cancel(self, id: str, *, scope: str) -> Steps[Job]:  # noqa: A002
        """Cancel a job and return its state after that.

        A waiting job ends at once. A running job becomes `cancelling`: its worker learns of it
        within about a second, and its function decides: if it still returns, the job succeeds. A
        job that has ended does not change.
        """
        _check_id(id, scope)
        job, effect = yield lambda: cancel_job(id, scope, self._ttl)
        if effect:
            self._count("cancelled")
            self._ring_end(job.id)
        return cast("Job", job)

    cancel, acancel = twins(_cancel)

    def _join(self, id: str, *, scope: str, timeout: float | None = None) -> Steps[Job]:  # noqa: A002
        """Wait until a job has ended, and return it; raise `TimedOut` after `timeout` seconds.

        The database is polled; no connection is held between the queries.
        """
        left = None if timeout is None else check.seconds("timeout", timeout, zero=True)
        _check_id(id, scope)
        end = None if left is None else self.clock.now() + left
        look = FIRST_LOOK
        with Wakeup(self.wakeups, id) as bell:
            while True:
                bell.reset()
                job: Job = yield lambda: view_job(id, scope)
                now = self.clock.now()
                if job.ended:
                    return job
                if end is not None and now >= end:
                    raise TimedOut(f"job {id} is {job.state}: it goes on", seconds=timeout)
                bell.until = now + look if end is None else min(now + look, end)
                look = min(look * 1.5, LAST_LOOK)
                yield WaitRequest(bell, self.clock)

    join, ajoin = twins(_join)

    @property
    def channel(self) -> str:
        """The PostgreSQL NOTIFY channel."""
        return self.database.names.channel("jobs")

    def nudge(self) -> None:
        """Wake the workers of this process; optional, after your own commit."""
        self.wakeups.ring(READY)

    # For operators

    def _browse(
        self,
        state: str = "failed",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> Steps[WorkPage]:
        """Return a page of up to 100 jobs of a state, of any scope.

        Ended jobs start with the latest; others are listed in the order in which they are due.
        `search` matches id, kind, scope, error and payload, ignoring case. `after` is `next` of the
        previous page. One call examines a bounded number of jobs: a page may have fewer than
        `limit` jobs and still a `next`. Without `payloads`, payloads are neither read nor searched.
        """
        request = page_request(self.WORK_STATES, state, search, after, limit, payloads)
        ended = state in ENDED
        first = BEYOND if ended else -BEYOND
        arguments = {
            "state": state,
            "number": request.number if request.id else first,
            "id": request.id,
            "pattern": containing(request.search),
            "cut": request.cut,
            "most": BROWSED,
        }
        which = "jobs.browse_ended" if ended else "jobs.browse_open"
        rows = yield NamedQuery(which, arguments).alone
        return page_of(rows, request.limit, _item)

    browse, abrowse = twins(_browse)

    def _inspect(self, id: str, *, payload: bool = True) -> Steps[WorkItem | None]:  # noqa: A002
        """Return a job of any scope, with up to 64 Ki characters of its payload, or None."""
        wanted = check.flag("payload", payload)
        return (yield lambda: inspect_job(id, payload=wanted)) if _can_be(id) else None

    inspect, ainspect = twins(_inspect)

    def _retry(self, id: str) -> Steps[bool]:  # noqa: A002
        """Queue a failed job again, with all its attempts; return False if it has not failed."""
        done = _can_be(id) and (yield partial(self._retry_steps, id))
        if done:
            self.wakeups.ring(READY)
        return done

    retry, aretry = twins(_retry)

    def _drop(self, id: str) -> Steps[bool]:  # noqa: A002
        """Expire a failed job, or cancel one that has not ended; return False in other cases.

        Later queries for an expired job raise `JobExpired`.
        """
        done = _can_be(id) and (yield lambda: drop_job(id, self._gone_for, self._ttl))
        if done:
            self._ring_end(id)
        return done

    drop, adrop = twins(_drop)

    def _cleanup(self, *, batch: int = BATCH, within: float = 10.0) -> Steps[int]:
        """Remove results past their retention, in batches; return how many rows changed.

        It ends after about `within` seconds, finished or not.
        """
        expiring = NamedQuery("jobs.expire", {"gone_for": self._gone_for})
        return cleaning_steps(batch, within, expiring, NamedQuery("jobs.forget", {}))

    cleanup, acleanup = twins(_cleanup)

    def snapshot(self) -> dict[str, int]:
        """Return the counters of this object."""
        with self._mutex:
            return dict(self._totals)

    def _counts(self) -> Steps[dict[str, tuple[int, float]]]:
        """Return the number of jobs and the age of the oldest by state; reads the table."""
        rows = yield NamedQuery("jobs.counts", {})
        found = {state: (count, max(0, now - oldest) / MICRO) for state, count, oldest, now in rows}
        registry.answered(self, found)
        return found

    counts, acounts = transaction_twins(_counts)

    # Implementation

    def _add_steps(self, arguments: dict[str, Any]) -> Steps[Job]:
        """Add a job if there is room, unless its key already has one; notify listening workers."""
        room = self._room
        if room.is_count_due():
            rows = yield NamedQuery("jobs.depth", {"most": room.most})
            room.set_count(rows[0][0])
        has_room = room.take()
        for _ in range(TRIES):
            if has_room:
                rows = yield NamedQuery("jobs.submit", arguments)
                if rows:
                    yield from self._notify()
                    return job_of(rows[0], is_new=True)
                # The key exists; its transaction has committed by now: our insert waited for it.
            same = yield from _of_key(arguments)
            if same is not None:
                return same
            if not has_room:
                raise room.refusal()
        raise Contended("others came and went with this key, each time")

    def _retry_steps(self, id_: str) -> Steps[bool]:
        rows = yield NamedQuery("jobs.retry", {"id": id_, "head_start": HEAD_START})
        if rows:
            yield from self._notify()
        return bool(rows)

    def _notify(self) -> Steps[None]:
        """Notify listening workers of a new job, unless disabled, or too soon after the last time.

        Notifications serialise commits. A job that follows a notification closely is found by the
        workers that it has woken, because they poll often then.
        """
        if not self.notify or self.database.dialect != "postgres":
            return
        now = self.clock.now()
        with self._mutex:
            if now - self._notified < DEBOUNCE:
                return
            self._notified = now
        yield NamedQuery("jobs.notify", {"channel": self.channel})

    def _ring_end(self, id_: str) -> None:
        self.wakeups.ring(CANCELLED)  # its worker may be here
        self.wakeups.ring(id_)

    # For workers

    def _claim(self, kinds: Iterable[str], count: int = 1, *, owner: str) -> Steps[list[Claim]]:
        """Claim the next jobs of these kinds for `owner`, up to `count`, for the lease."""
        begun, named = self.clock.now(), _kinds(kinds)
        most = check.count("count", count, maximum=1_000)
        name_of("owner", owner)
        rows = yield lambda: claim_due(named, most, owner, self._lease, self._ttl)
        claims = []
        for id_, scope, kind, state, epoch, attempt, attempts, payload, _, share, message in rows:
            if state != "running":  # it had no attempts left, and has ended
                self._count("given_up")
                if state == "failed":
                    self._died(id_, attempt, LOST)
                self.wakeups.ring(id_)
                continue
            claims.append(
                Claim(
                    id_,
                    claimed_payload(id_, payload),
                    attempt,
                    epoch,
                    begun + self.lease,
                    self.lease,
                    kind=kind,
                    scope=scope,
                    max_attempts=attempts,
                    owner=owner,
                    progress=share,
                    message=message,
                )
            )
        self._count("claimed", len(claims))
        return claims

    claim, aclaim = twins(_claim)

    def _succeed(self, claim: Claim, result: Any = None, message: str = "") -> Steps[bool]:
        """End a job with its result; return False if refused: another worker holds the job now."""
        body, kind = result_of(result, self.max_result)
        outcome = {"result": body, "result_type": kind, "message": shown(message)}
        return (yield from self._report("succeed", claim, outcome)) is not None

    succeed, asucceed = twins(_succeed)

    def _fail(
        self,
        claim: Claim,
        error: str | BaseException,
        *,
        delay: float = 0.0,
        retry: bool = True,
        progress: float = 0.0,
        message: str = "",
    ) -> Steps[str | None]:
        """Report a failed attempt; return the new state, or None if the report was refused.

        The job is retried after `delay` seconds if it has attempts left, else it has failed. A job
        that is being cancelled becomes cancelled. If `error` is an exception, its type, message and
        traceback are stored, redacted.
        """
        text = stored_error(error)
        outcome = {
            "error": text,
            "delay": round(check.seconds("delay", delay, zero=True) * MICRO),
            "retry": int(check.flag("retry", retry)),
            "progress": check.ratio("progress", progress, zero=True),
            "message": shown(message),
        }
        state = yield from self._report("fail", claim, outcome)
        if state == "failed":
            self._died(claim.id, claim.attempt, *split_report(text))
        return state

    fail, afail = twins(_fail)

    def _give_back(self, claim: Claim, *, delay: float = 0.0) -> Steps[str | None]:
        """Give a job back as if it had not been started; return its state, or None if refused."""
        outcome = {"delay": round(check.seconds("delay", delay, zero=True) * MICRO)}
        return self._report("give_back", claim, outcome)

    give_back, agive_back = twins(_give_back)

    def _report(self, verb: str, claim: Claim, outcome: dict[str, Any]) -> Steps[str | None]:
        """Store the outcome of a claim; return the job's new state, or None if it is not ours."""
        if not isinstance(claim, Claim):
            raise TypeError(f"claim={claim!r}: pass the claim that `claim` returned")
        claimed = {"id": claim.id, "owner": claim.owner, "epoch": claim.fence, "ttl": self._ttl}
        state: str | None = yield lambda: store_outcome(verb, {**claimed, **outcome})
        if state is None:
            self._count("refused_late")
        else:
            self.wakeups.ring(READY if state == "queued" else claim.id)
        return state

    async def _abeat(
        self, owner: str, beats: list[JobHeartbeat], looks: list[str]
    ) -> dict[tuple[str, int], bool]:
        """Renew claims and check others; return the valid ones, and which are to be cancelled."""
        return await self.database.arun(lambda: renew_claims(owner, self._lease, beats, looks))

    def _count(self, word: str, more: int = 1) -> None:
        with self._mutex:
            self._totals[word] += more

    def _died(self, id_: str, attempts: int, cause: str, trace: str = "") -> None:
        fields = {"job": id_, "attempts": attempts, "cause": cause, "traceback": trace}
        emit(JobDied, self.name, **fields)


def _can_be(id_: object) -> bool:
    """Return whether the id has the form of a job id; raise if it is not text."""
    if not isinstance(id_, str):
        raise TypeError(f"id={id_!r}: write a job's id, such as `job.id`")
    return is_id(id_)


def _check_id(id_: object, scope: str) -> None:
    """Raise if there cannot be such a job: ids come from strangers, and cost no connection."""
    name_of("scope", scope)
    if not is_id(id_):
        raise UnknownJob("there is no such job")


def _kinds(kinds: Iterable[str]) -> list[str]:
    named = [kinds] if isinstance(kinds, str) else list(check.listed("kinds", kinds, "'report'"))
    if not named:
        raise ValueError("kinds=[]: name the kinds of jobs, such as ['report']")
    return [name_of("kind", kind) for kind in named]


# The operations, each one transaction


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


def view_job(id_: str, scope: str) -> Steps[Job]:
    """Read a job of that scope; a job of another scope is reported as unknown."""
    rows = yield NamedQuery("jobs.view", {"id": id_, "scope": scope})
    if not rows:
        raise UnknownJob("there is no such job")
    job = job_of(rows[0])
    if job.state == "expired":
        raise JobExpired("what came out of this job is not kept any more")
    return job


def cancel_job(id_: str, scope: str, ttl: int) -> Steps[tuple[Job, bool]]:
    """Cancel a job; return it, and whether the cancellation had an effect."""
    rows = yield NamedQuery("jobs.cancel", {"id": id_, "scope": scope, "ttl": ttl})
    job = yield from view_job(id_, scope)
    return job, bool(rows)


def claim_due(
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


def renew_claims(
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


def store_outcome(which: str, arguments: dict[str, Any]) -> Steps[str | None]:
    """Report a job's outcome; return its new state, or None if it is no longer ours."""
    rows = yield NamedQuery(f"jobs.{which}", arguments)
    return str(rows[0][0]) if rows else None


def inspect_job(id_: str, *, payload: bool) -> Steps[WorkItem | None]:
    """Return one job, of any scope."""
    rows = yield NamedQuery("jobs.inspect", {"id": id_, "cut": OPENED if payload else 0})
    return _item(rows[0]) if rows else None


def drop_job(id_: str, gone_for: int, ttl: int) -> Steps[bool]:
    """Expire a failed job, or cancel one that has not ended."""
    if (yield NamedQuery("jobs.drop_failed", {"id": id_, "gone_for": gone_for})):
        return True
    seen = yield from inspect_job(id_, payload=False)
    if seen is None or seen.state in ENDED:
        return False
    arguments = {"id": id_, "scope": seen.owner, "ttl": ttl}
    return bool((yield NamedQuery("jobs.cancel", arguments)))


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
