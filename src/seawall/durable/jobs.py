"""Jobs that are kept in a database: submitted with the user's own rows, done later, asked after.

Promises: a job that was committed is done, or ends as failed or cancelled, also if workers die;
one that was rolled back never was. The same key of the same scope and kind is the same job. At each
instant one worker's word counts: who was taken for dead and comes back is refused. Who may not see
a job cannot tell it from one that never was. What came out of it is kept for `result_ttl`.

A worker that died in the middle has done something already: jobs are done at least once, and so
their functions are written to be repeated (`Idempotency.once` with the job's id, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable import _jobs_steps as steps
from seawall.durable._cleaning import Cleaning
from seawall.durable._connections import arequire_transaction, require_transaction
from seawall.durable._jobs_claims import CANCELLED, ClaimedJobs
from seawall.durable._jobs_records import (
    Job,
    JobClaim,
    is_id,
    key_digest,
    name_of,
    payload_of,
)
from seawall.durable._jobs_room import Room
from seawall.durable._jobs_steps import MICRO
from seawall.durable.database import Database, Operation
from seawall.errors import JobExpired, TimedOut, UnknownJob
from seawall.jobs import WorkItem, WorkPage
from seawall.jobs._bells import READY, Bell, Bells
from seawall.jobs._work_list import asked_page
from seawall.models.durable_jobs import HEAD_START, LOWEST
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.runners import wait_async, wait_sync
from seawall.runtime.stepping import Steps, adrive, drive

__all__ = ["Job", "JobClaim", "JobExpired", "Jobs"]

BATCH: Final = 500
"""Jobs that are cleaned up in one transaction, unless told otherwise."""
FIRST_LOOK: Final = 0.05
LAST_LOOK: Final = 1.0
"""Seconds between two looks at a job that is waited for: at first, and in the end."""
DEBOUNCE: Final = 0.05
"""Seconds between two notifications."""
TOGETHER: Final = (
    "the job is committed with its rows; or write None instead of the connection, and it is"
    " committed by itself"
)


class Jobs(ClaimedJobs):
    """The jobs of a database."""

    WORK_STATES = ("failed", "queued", "running", "cancelled", "succeeded")
    """The states by which `browse` lists jobs."""

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

        A worker holds a job for `lease` seconds and prolongs that; if it dies, another takes the
        job after that. A job is tried `attempts` times. What came out of it is kept for
        `result_ttl`, and that it was for `gone_for` after that. While `max_size` jobs have not
        ended no more are taken; that is counted each second or so, and not for each job. Payload
        and result have at most so many bytes as JSON. With `notify`, workers of other processes
        that listen hear of new jobs by PostgreSQL's NOTIFY, from here every 50 ms at most.
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
        self.bells = Bells()
        self._room = Room(self.name, self.max_size, self.clock)
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

    # For those who have work to be done

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
        """Add a job, and return it; the one of the same `key`, scope and kind, if there is one.

        With a connection it is part of the transaction that is begun there: nobody sees it before
        that is committed, and if it is rolled back there is no job; one without a transaction is
        refused. With None it is committed here.
        `scope` is whose it is: the tenant, or the user. `priority` is 0 (first) to 9. It is not
        begun before `delay` seconds. Raises `KeyReused` if the key came with another payload, and
        `QueueFull` if there is no room for another job.
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
        """Add a job, as `submit` does."""
        adding = self._adding(kind, payload, scope, key, priority, delay, attempts)
        if conn is None:
            return self._submitted(await self.database.arun(adding))
        own = self.database.connection(conn)
        if not own.kind.is_async:  # such a connection belongs to the thread that calls
            require_transaction(own, TOGETHER)
            return self._submitted(own.run(adding()))
        await arequire_transaction(own, TOGETHER)
        return self._submitted(await own.arun(adding()))

    def get(self, id: str, *, scope: str) -> Job:  # noqa: A002 - it is one
        """Return what is known of a job.

        `UnknownJob` if there is none, or one of another scope; `JobExpired` if it was forgotten.
        """
        return self.database.run(self._viewing(id, scope))

    async def aget(self, id: str, *, scope: str) -> Job:  # noqa: A002
        """Return what is known of a job, as `get` does."""
        return await self.database.arun(self._viewing(id, scope))

    def cancel(self, id: str, *, scope: str) -> Job:  # noqa: A002
        """Cancel a job, and return what is known of it then.

        One that waits is over at once. One at work is `cancelling`: its worker hears of it within
        a second or so, and what it does then decides: a function that ends well all the same makes
        it succeed. One that has ended stays as it is.
        """
        return self._cancelled(self.database.run(self._cancelling(id, scope)))

    async def acancel(self, id: str, *, scope: str) -> Job:  # noqa: A002
        """Cancel a job, as `cancel` does."""
        return self._cancelled(await self.database.arun(self._cancelling(id, scope)))

    def wait(self, id: str, *, scope: str, timeout: float | None = None) -> Job:  # noqa: A002
        """Wait until a job has ended, and return it; `TimedOut` after `timeout` seconds.

        It is asked for again and again, without holding a connection meanwhile.
        """

        def answer(asked: Any) -> Any:
            return wait_sync(asked, self.clock) if isinstance(asked, Bell) else self._run(asked)

        return drive(self._waiting(id, scope, timeout), answer)

    async def await_(
        self,
        id: str,  # noqa: A002
        *,
        scope: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the job goes on
    ) -> Job:
        """Wait until a job has ended, as `wait` does."""

        async def answer(asked: Any) -> Any:
            if isinstance(asked, Bell):
                return await wait_async(asked, self.clock)
            return await self.database.arun(asked)

        return await adrive(self._waiting(id, scope, timeout), answer)

    @property
    def channel(self) -> str:
        """What PostgreSQL's NOTIFY is sent on."""
        return self.database.names.channel("jobs")

    def nudge(self) -> None:
        """Let the workers of this process look at once: call it after your own commit, or not."""
        self.bells.ring(READY)

    # For those who look after it

    def browse(
        self,
        state: str = "failed",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return a page of the jobs of a state, of whatever scope, up to 100.

        Of those that have ended the latest are first, of others the next to be done. `search` is
        looked for in id, kind, scope, error and payload, whatever the case of letters. `after` is
        `next` of the page before. One call looks at a bounded number of jobs: a page may have fewer
        than `limit`, and still a `next`. Without `payloads`, these are neither read nor searched.
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
        """Return a page of jobs, as `browse` does."""
        asked = self._browsing(state, search, after, limit, payloads=payloads)
        return await self.database.arun(asked)

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a job of whatever scope, with up to 64 Ki characters of its payload, or None."""
        wanted = check.flag("payload", payload)
        if not _can_be(id):
            return None
        return self.database.run(lambda: steps.inspecting(id, payload=wanted))

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a job, as `inspect` does."""
        wanted = check.flag("payload", payload)
        if not _can_be(id):
            return None
        return await self.database.arun(lambda: steps.inspecting(id, payload=wanted))

    def retry(self, id: str) -> bool:  # noqa: A002
        """Run a failed job again, with all its attempts; False if it has not failed."""
        if not _can_be(id):
            return False
        return self._retried(self.database.run(lambda: steps.retrying(id, self._to_notify)))

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Run a failed job again, as `retry` does."""
        if not _can_be(id):
            return False
        return self._retried(await self.database.arun(lambda: steps.retrying(id, self._to_notify)))

    def drop(self, id: str) -> bool:  # noqa: A002
        """Forget a job that failed, or cancel one that has not ended; False if it is neither.

        Whoever asks after one that was forgotten learns that it is expired.
        """
        if not _can_be(id):
            return False
        return self._dropped(id, self.database.run(self._dropping(id)))

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Forget or cancel a job, as `drop` does."""
        if not _can_be(id):
            return False
        return self._dropped(id, await self.database.arun(self._dropping(id)))

    def cleanup(self, *, batch: int = BATCH, within: float = 10.0) -> int:
        """Drop what came out of jobs whose time is over, `batch` by batch; return how many.

        It ends after about `within` seconds, done or not.
        """
        return Cleaning(batch, within, *self._sweeps()).run(self.database)

    async def acleanup(self, *, batch: int = BATCH, within: float = 10.0) -> int:
        """Clean up, as `cleanup` does."""
        return await Cleaning(batch, within, *self._sweeps()).arun(self.database)

    def snapshot(self) -> dict[str, int]:
        """Return what happened here so far, by this object: plain counters."""
        with self._mutex:
            return dict(self._counts)

    def counts(self) -> dict[str, tuple[int, float]]:
        """Return how many jobs are in each state, and how old the oldest is; reads the table."""
        return self._counted(self.database.run(steps.counting))

    async def acounts(self) -> dict[str, tuple[int, float]]:
        """Count the jobs, as `counts` does."""
        return self._counted(await self.database.arun(steps.counting))

    def _counted(self, counts: dict[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
        registry.answered(self, counts)
        return counts

    # How it is done

    def _browsing(
        self, state: str, search: str, after: str | None, limit: int, *, payloads: bool
    ) -> Operation[WorkPage]:
        asked = asked_page(self.WORK_STATES, state, search, after, limit, payloads)
        return lambda: steps.browsing(asked)

    def _retried(self, done: bool) -> bool:  # noqa: FBT001 - what the database said
        if done:
            self.bells.ring(READY)
        return done

    def _dropping(self, id_: str) -> Operation[bool]:
        return lambda: steps.dropping(id_, round(self.gone_for * MICRO), self._ttl)

    def _dropped(self, id_: str, done: bool) -> bool:  # noqa: FBT001 - what the database said
        if done:
            self.bells.ring(CANCELLED)  # its worker may be here
            self.bells.ring(id_)
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
            "id": str(uuid4()),  # of the system's randomness: nobody guesses it
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
        """Return where to notify of a new job now; None: not at all, or not again so soon.

        Notifications make commits wait for each other. What comes too soon after one is seen by
        whom that one has woken: they look often then.
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
        self.bells.ring(READY)
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

    def _cancelled(self, told: tuple[Job, bool]) -> Job:
        job, effect = told
        if effect:
            self._count("cancelled")
            self.bells.ring(CANCELLED)  # its worker may be here
            self.bells.ring(job.id)
        return job

    def _waiting(self, id_: str, scope: str, timeout: float | None) -> Steps[Job]:
        """Yield operations and, between them, the bell to wait for."""
        left = None if timeout is None else check.seconds("timeout", timeout, zero=True)
        end = None if left is None else self.clock.now() + left
        look = FIRST_LOOK
        with Bell(self.bells, id_) as bell:
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


def _can_be(id_: object) -> bool:
    """Tell whether there can be a job of that id; raise if it is no text at all."""
    if not isinstance(id_, str):
        raise TypeError(f"id={id_!r}: write a job's id, such as `job.id`")
    return is_id(id_)
