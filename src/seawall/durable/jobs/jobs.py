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

from collections.abc import Callable, Iterable
from typing import Any, Final
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall._failures import split_report
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable.database.cleanup import Cleanup
from seawall.durable.database.connections import arequire_transaction, require_transaction
from seawall.durable.database.database import Database, Operation
from seawall.durable.jobs import operations as steps
from seawall.durable.jobs.operations import (
    MICRO,
    ClaimedRow,
    JobHeartbeat,
    JobSchedule,
    OpenJobsLimit,
)
from seawall.durable.jobs.records import (
    Job,
    is_id,
    key_digest,
    name_of,
    payload_of,
    result_of,
    shown,
    stored_error,
)
from seawall.errors import TimedOut, UnknownJob
from seawall.events import JobDied
from seawall.events.bus import emit
from seawall.jobs import Claim, WorkItem, WorkPage
from seawall.jobs.wakeups import READY, Wakeup, Wakeups
from seawall.jobs.work_list import page_request
from seawall.models.durable_jobs import HEAD_START, LOST, LOWEST
from seawall.runtime.driver import Steps, adrive, drive, wait_async, wait_sync
from seawall.runtime.mutex import Mutex

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
        if not isinstance(database, Database):
            raise TypeError(f"Jobs({database!r}): pass a Database")
        self.database = database
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
        self.wakeups = Wakeups()
        self._room = OpenJobsLimit(self.name, self.max_size, self.clock)
        self._notified = float("-inf")
        self._mutex = Mutex()
        survives_fork(self)
        words = ("submitted", "repeated", "cancelled", "claimed", "given_up", "refused_late")
        self._counts = dict.fromkeys(words, 0)
        registry.enter(self, "jobs", self.name, ask="acounts")

    def __repr__(self) -> str:
        return f"<Jobs {self.name!r} of {self.database!r}>"

    def _after_fork(self) -> None:
        self._mutex = Mutex()  # another thread may have held it

    # For producers

    def submit(
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
    ) -> Job:
        """Add a job and return it; if `key` exists for the scope and kind, return that job instead.

        With a connection, the job is part of the open transaction: it is invisible until the
        commit, and a rollback removes it. A connection without a transaction is refused. With None,
        the job is committed here.

        `scope` is the owner of the job: the tenant or the user. `priority` is 0 (first) to 9. The
        job is not started before `delay` seconds have passed. Raises `KeyReused` if the key came
        with another payload, and `QueueFull` if there is no room for another job.
        """
        adding = self._adding(kind, payload, scope, key, priority, delay, attempts)
        if conn is None:
            return self._submitted(self.database.run(adding))
        own = self.database.connection(conn)
        if own.kind.is_async:
            raise TypeError(f"{own!r} is awaited: write `await jobs.asubmit(...)`")
        require_transaction(own, TOGETHER)
        return self._submitted(own.run(adding()))

    async def asubmit(
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
    ) -> Job:
        """Async twin of `submit`."""
        adding = self._adding(kind, payload, scope, key, priority, delay, attempts)
        if conn is None:
            return self._submitted(await self.database.arun(adding))
        own = self.database.connection(conn)
        if not own.kind.is_async:  # such a connection belongs to the calling thread
            require_transaction(own, TOGETHER)
            return self._submitted(own.run(adding()))
        await arequire_transaction(own, TOGETHER)
        return self._submitted(await own.arun(adding()))

    def get(self, id: str, *, scope: str) -> Job:  # noqa: A002 - it is an id
        """Return the current state of a job.

        Raises `UnknownJob` if it does not exist or belongs to another scope; `JobExpired` if its
        result is no longer kept.
        """
        return self.database.run(self._viewing(id, scope))

    async def aget(self, id: str, *, scope: str) -> Job:  # noqa: A002
        """Async twin of `get`."""
        return await self.database.arun(self._viewing(id, scope))

    def cancel(self, id: str, *, scope: str) -> Job:  # noqa: A002
        """Cancel a job and return its state after that.

        A waiting job ends at once. A running job becomes `cancelling`: its worker learns of it
        within about a second, and its function decides: if it still returns, the job succeeds. A
        job that has ended does not change.
        """
        return self._cancelled(self.database.run(self._cancelling(id, scope)))

    async def acancel(self, id: str, *, scope: str) -> Job:  # noqa: A002
        """Async twin of `cancel`."""
        return self._cancelled(await self.database.arun(self._cancelling(id, scope)))

    def join(self, id: str, *, scope: str, timeout: float | None = None) -> Job:  # noqa: A002
        """Wait until a job has ended, and return it; raise `TimedOut` after `timeout` seconds.

        The database is polled; no connection is held between the queries.
        """

        def answer(asked: Any) -> Any:
            return wait_sync(asked, self.clock) if isinstance(asked, Wakeup) else self._run(asked)

        return drive(self._waiting(id, scope, timeout), answer)

    async def ajoin(
        self,
        id: str,  # noqa: A002
        *,
        scope: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the job goes on
    ) -> Job:
        """Async twin of `join`."""

        async def answer(asked: Any) -> Any:
            if isinstance(asked, Wakeup):
                return await wait_async(asked, self.clock)
            return await self.database.arun(asked)

        return await adrive(self._waiting(id, scope, timeout), answer)

    @property
    def channel(self) -> str:
        """The PostgreSQL NOTIFY channel."""
        return self.database.names.channel("jobs")

    def nudge(self) -> None:
        """Wake the workers of this process; optional, after your own commit."""
        self.wakeups.ring(READY)

    # For operators

    def browse(
        self,
        state: str = "failed",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return a page of up to 100 jobs of a state, of any scope.

        Ended jobs start with the latest; others are listed in the order in which they are due.
        `search` matches id, kind, scope, error and payload, ignoring case. `after` is `next` of the
        previous page. One call examines a bounded number of jobs: a page may have fewer than
        `limit` jobs and still a `next`. Without `payloads`, payloads are neither read nor searched.
        """
        return self.database.run(self._browsing(state, search, after, limit, payloads=payloads))

    async def abrowse(
        self,
        state: str = "failed",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Async twin of `browse`."""
        asked = self._browsing(state, search, after, limit, payloads=payloads)
        return await self.database.arun(asked)

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a job of any scope, with up to 64 Ki characters of its payload, or None."""
        wanted = check.flag("payload", payload)
        if not _can_be(id):
            return None
        return self.database.run(lambda: steps.inspecting(id, payload=wanted))

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Async twin of `inspect`."""
        wanted = check.flag("payload", payload)
        if not _can_be(id):
            return None
        return await self.database.arun(lambda: steps.inspecting(id, payload=wanted))

    def retry(self, id: str) -> bool:  # noqa: A002
        """Queue a failed job again, with all its attempts; return False if it has not failed."""
        if not _can_be(id):
            return False
        return self._retried(self.database.run(lambda: steps.retrying(id, self._to_notify)))

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Async twin of `retry`."""
        if not _can_be(id):
            return False
        return self._retried(await self.database.arun(lambda: steps.retrying(id, self._to_notify)))

    def drop(self, id: str) -> bool:  # noqa: A002
        """Expire a failed job, or cancel one that has not ended; return False in other cases.

        Later queries for an expired job raise `JobExpired`.
        """
        if not _can_be(id):
            return False
        return self._dropped(id, self.database.run(self._dropping(id)))

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Async twin of `drop`."""
        if not _can_be(id):
            return False
        return self._dropped(id, await self.database.arun(self._dropping(id)))

    def cleanup(self, *, batch: int = BATCH, within: float = 10.0) -> int:
        """Remove results past their retention, in batches; return how many rows changed.

        It ends after about `within` seconds, finished or not.
        """
        return Cleanup(batch, within, *self._sweeps()).run(self.database)

    async def acleanup(self, *, batch: int = BATCH, within: float = 10.0) -> int:
        """Async twin of `cleanup`."""
        return await Cleanup(batch, within, *self._sweeps()).arun(self.database)

    def snapshot(self) -> dict[str, int]:
        """Return the counters of this object."""
        with self._mutex:
            return dict(self._counts)

    def counts(self) -> dict[str, tuple[int, float]]:
        """Return the number of jobs and the age of the oldest by state; reads the table."""
        return self._counted(self.database.run(steps.counting))

    async def acounts(self) -> dict[str, tuple[int, float]]:
        """Async twin of `counts`."""
        return self._counted(await self.database.arun(steps.counting))

    def _counted(self, counts: dict[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
        registry.answered(self, counts)
        return counts

    # Implementation

    def _browsing(
        self, state: str, search: str, after: str | None, limit: int, *, payloads: bool
    ) -> Operation[WorkPage]:
        asked = page_request(self.WORK_STATES, state, search, after, limit, payloads)
        return lambda: steps.browsing(asked)

    def _retried(self, done: bool) -> bool:  # noqa: FBT001 - the database's answer
        if done:
            self.wakeups.ring(READY)
        return done

    def _dropping(self, id_: str) -> Operation[bool]:
        return lambda: steps.dropping(id_, round(self.gone_for * MICRO), self._ttl)

    def _dropped(self, id_: str, done: bool) -> bool:  # noqa: FBT001 - the database's answer
        if done:
            self.wakeups.ring(CANCELLED)  # its worker may be here
            self.wakeups.ring(id_)
        return done

    def _adding(
        self,
        kind: str,
        payload: Any,
        scope: str,
        key: str | None,
        priority: int,
        delay: float,
        attempts: int | None,
    ) -> Operation[Job]:
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
        return lambda: steps.submitting(made, self._room, self._to_notify)

    def _to_notify(self) -> str | None:
        """Return the channel to notify of a new job; None if disabled, or too soon after the last.

        Notifications serialise commits. A job that follows a notification closely is found by the
        workers that it has woken, because they poll often then.
        """
        if not self.notify or self.database.dialect != "postgres":
            return None
        now = self.clock.now()
        with self._mutex:
            if now - self._notified < DEBOUNCE:
                return None
            self._notified = now
        return self.channel

    def _submitted(self, job: Job) -> Job:
        self._count("submitted" if job.is_new else "repeated")
        self.wakeups.ring(READY)
        return job

    def _viewing(self, id_: str, scope: str) -> Operation[Job]:
        name_of("scope", scope)
        if not is_id(id_):
            raise UnknownJob("there is no such job")
        return lambda: steps.viewing(id_, scope)

    def _cancelling(self, id_: str, scope: str) -> Operation[tuple[Job, bool]]:
        name_of("scope", scope)
        if not is_id(id_):
            raise UnknownJob("there is no such job")
        return lambda: steps.cancelling(id_, scope, self._ttl)

    def _cancelled(self, outcome: tuple[Job, bool]) -> Job:
        job, effect = outcome
        if effect:
            self._count("cancelled")
            self.wakeups.ring(CANCELLED)  # its worker may be here
            self.wakeups.ring(job.id)
        return job

    def _waiting(self, id_: str, scope: str, timeout: float | None) -> Steps[Job]:
        """Yield database operations and, between them, the bell to wait for."""
        left = None if timeout is None else check.seconds("timeout", timeout, zero=True)
        end = None if left is None else self.clock.now() + left
        look = FIRST_LOOK
        with Wakeup(self.wakeups, id_) as bell:
            while True:
                bell.reset()
                job: Job = yield self._viewing(id_, scope)
                now = self.clock.now()
                if job.ended:
                    return job
                if end is not None and now >= end:
                    raise TimedOut(f"job {id_} is {job.state}: it goes on", seconds=timeout)
                bell.until = now + look if end is None else min(now + look, end)
                look = min(look * 1.5, LAST_LOOK)
                yield bell

    def _sweeps(self) -> tuple[Callable[[int], Steps[int]], ...]:
        gone_for = round(self.gone_for * MICRO)
        return (
            lambda batch: steps.sweeping("expire", {"gone_for": gone_for, "most": batch}),
            lambda batch: steps.sweeping("forget", {"most": batch}),
        )

    def claim(self, kinds: Iterable[str], count: int = 1, *, owner: str) -> list[Claim]:
        """Claim the next jobs of these kinds for `owner`, up to `count`, for the lease."""
        begun = self.clock.now()
        return self._claimed(self.database.run(self._claiming(kinds, count, owner)), owner, begun)

    async def aclaim(self, kinds: Iterable[str], count: int = 1, *, owner: str) -> list[Claim]:
        """Async twin of `claim`."""
        begun = self.clock.now()
        taken = await self.database.arun(self._claiming(kinds, count, owner))
        return self._claimed(taken, owner, begun)

    def succeed(self, claim: Claim, result: Any = None, message: str = "") -> bool:
        """End a job with its result; return False if refused: another worker holds the job now."""
        return (
            self._checked_state(claim, self._run(self._succeeding(claim, result, message)))
            is not None
        )

    async def asucceed(self, claim: Claim, result: Any = None, message: str = "") -> bool:
        """Async twin of `succeed`."""
        state = await self.database.arun(self._succeeding(claim, result, message))
        return self._checked_state(claim, state) is not None

    def fail(
        self,
        claim: Claim,
        error: str | BaseException,
        *,
        delay: float = 0.0,
        retry: bool = True,
        progress: float = 0.0,
        message: str = "",
    ) -> str | None:
        """Report a failed attempt; return the new state, or None if the report was refused.

        The job is retried after `delay` seconds if it has attempts left, else it has failed. A job
        that is being cancelled becomes cancelled. If `error` is an exception, its type, message and
        traceback are stored, redacted.
        """
        arguments = self._failing(
            claim, error, delay, retry=retry, progress=progress, message=message
        )
        return self._failed(claim, arguments, self._run(lambda: steps.telling("fail", arguments)))

    async def afail(
        self,
        claim: Claim,
        error: str | BaseException,
        *,
        delay: float = 0.0,
        retry: bool = True,
        progress: float = 0.0,
        message: str = "",
    ) -> str | None:
        """Async twin of `fail`."""
        arguments = self._failing(
            claim, error, delay, retry=retry, progress=progress, message=message
        )
        state = await self.database.arun(lambda: steps.telling("fail", arguments))
        return self._failed(claim, arguments, state)

    def give_back(self, claim: Claim, *, delay: float = 0.0) -> str | None:
        """Give a job back as if it had not been started; return its state, or None if refused."""
        arguments = self._returning(claim, delay)
        return self._checked_state(claim, self._run(lambda: steps.telling("give_back", arguments)))

    async def agive_back(self, claim: Claim, *, delay: float = 0.0) -> str | None:
        """Async twin of `give_back`."""
        arguments = self._returning(claim, delay)
        return self._checked_state(
            claim, await self.database.arun(lambda: steps.telling("give_back", arguments))
        )

    async def _abeat(
        self, owner: str, beats: list[JobHeartbeat], looks: list[str]
    ) -> dict[tuple[str, int], bool]:
        """Renew claims and check others; return the valid ones, and which are to be cancelled."""
        lease = self._lease
        return await self.database.arun(lambda: steps.beating(owner, lease, beats, looks))

    async def _astanding(self, id: str) -> JobSchedule | None:  # noqa: A002
        """Return the state of a job of any scope; None if it does not exist."""
        return await self.database.arun(lambda: steps.standing(id))

    # Implementation

    @property
    def _lease(self) -> int:
        return round(self.lease * MICRO)

    @property
    def _ttl(self) -> int:
        return round(self.result_ttl * MICRO)

    def _run(self, operation: Operation[Any]) -> Any:
        return self.database.run(operation)

    def _count(self, word: str, more: int = 1) -> None:
        with self._mutex:
            self._counts[word] += more

    def _claiming(
        self, kinds: Iterable[str], count: int, owner: str
    ) -> Operation[list[ClaimedRow]]:
        named = _kinds(kinds)
        most = check.count("count", count, maximum=1_000)
        name_of("owner", owner)
        return lambda: steps.claiming(named, most, owner, self._lease, self._ttl)

    def _claimed(self, taken: list[ClaimedRow], owner: str, begun: float) -> list[Claim]:
        """Return the claims that are ours; the other jobs have ended without attempts left."""
        claims = []
        for one in taken:
            if one.state != "running":
                self._count("given_up")
                if one.state == "failed":
                    self._died(one.id, one.attempt, LOST)
                self.wakeups.ring(one.id)
                continue
            claims.append(
                Claim(
                    one.id,
                    one.payload,
                    one.attempt,
                    one.epoch,
                    begun + self.lease,
                    self.lease,
                    kind=one.kind,
                    scope=one.scope,
                    max_attempts=one.max_attempts,
                    owner=owner,
                    progress=one.progress,
                    message=one.message,
                )
            )
        self._count("claimed", len(claims))
        return claims

    def _died(self, id_: str, attempts: int, cause: str, trace: str = "") -> None:
        fields = {"job": id_, "attempts": attempts, "cause": cause, "traceback": trace}
        emit(JobDied, self.name, **fields)

    def _holding(self, claim: Claim) -> dict[str, Any]:
        if not isinstance(claim, Claim):
            raise TypeError(f"claim={claim!r}: pass the claim that `claim` returned")
        return {"id": claim.id, "owner": claim.owner, "epoch": claim.fence}

    def _succeeding(self, claim: Claim, result: Any, message: str) -> Operation[str | None]:
        stored = result_of(result, self.max_result)
        arguments = {
            **self._holding(claim),
            "result": stored.body,
            "result_type": stored.content_type,
        }
        arguments |= {"ttl": self._ttl, "message": shown(message)}
        return lambda: steps.telling("succeed", arguments)

    def _failing(
        self,
        claim: Claim,
        error: str | BaseException,
        delay: float,
        *,
        retry: bool,
        progress: float,
        message: str,
    ) -> dict[str, Any]:
        return {
            **self._holding(claim),
            "error": stored_error(error),
            "delay": round(check.seconds("delay", delay, zero=True) * MICRO),
            "retry": int(check.flag("retry", retry)),
            "ttl": self._ttl,
            "progress": check.ratio("progress", progress, zero=True),
            "message": shown(message),
        }

    def _failed(self, claim: Claim, arguments: dict[str, Any], state: str | None) -> str | None:
        if self._checked_state(claim, state) == "failed":
            self._died(claim.id, claim.attempt, *split_report(arguments["error"]))
        return state

    def _returning(self, claim: Claim, delay: float) -> dict[str, Any]:
        arguments = {**self._holding(claim), "ttl": self._ttl}
        return {**arguments, "delay": round(check.seconds("delay", delay, zero=True) * MICRO)}

    def _checked_state(self, claim: Claim, state: str | None) -> str | None:
        if state is None:
            self._count("refused_late")
        else:
            self.wakeups.ring(READY if state == "queued" else claim.id)
        return state


def _can_be(id_: object) -> bool:
    """Return whether the id has the form of a job id; raise if it is not text."""
    if not isinstance(id_, str):
        raise TypeError(f"id={id_!r}: write a job's id, such as `job.id`")
    return is_id(id_)


def _kinds(kinds: Iterable[str]) -> list[str]:
    named = [kinds] if isinstance(kinds, str) else list(check.listed("kinds", kinds, "'report'"))
    if not named:
        raise ValueError("kinds=[]: name the kinds of jobs, such as ['report']")
    return [name_of("kind", kind) for kind in named]
