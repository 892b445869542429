"""Worker that executes the jobs of a database concurrently, with heartbeats.

Promises:

- At most `concurrency` jobs run at once.
- A job whose lease is lost is stopped.
- A failed job is retried after a pause.
- A cancelled job is stopped within about a second.
- Stopping finishes the jobs it can and gives the rest back.
- While the database is unreachable the worker keeps trying, and loses no job.
- Expired results are removed in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any, Final
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall.durable.database.cleanup import clean_forever
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.notifications import NotificationListener
from seawall.durable.database.outage_log import OutageLog
from seawall.durable.jobs.jobs import CANCELLED, JobHeartbeat, Jobs
from seawall.durable.jobs.records import name_of, result_of, shown
from seawall.errors import JobCancelled, RecordGarbled, Rejected, matches
from seawall.events.log import FailureLog
from seawall.jobs import Claim
from seawall.jobs.wakeups import READY, Wakeup
from seawall.jobs.worker_loop import LOOK, PAUSE, Backoffs, WorkerLoop, WorkRun
from seawall.models.backoff import above_floor
from seawall.models.durable_jobs import poll_of
from seawall.runtime.functions import kind_of

LONGEST_PAUSE: Final = 86_400.0
RUNS_AGAIN: Final = frozenset({"retry", "hedge"})
"""Policies that may have run the function although the guard refuses in the end."""

CLEAN_EVERY: Final = 60.0
"""Seconds between two cleanups."""


class JobHandle:
    """The argument of a job's function. Usable from any thread."""

    __slots__ = (
        "_progress",
        "attempt",
        "cancelled",
        "id",
        "kind",
        "max_attempts",
        "payload",
        "scope",
    )

    def __init__(self, claim: Claim) -> None:
        """Copy the fields of the claim."""
        self.id = claim.id
        self.scope = claim.scope
        self.kind = claim.kind
        self.payload = claim.payload
        self.attempt = claim.attempt
        """Number of this attempt; 1 is the first."""
        self.max_attempts = claim.max_attempts
        self.cancelled = False
        """Whether to stop: cancelled, or taken over by another worker. A coroutine is cancelled."""
        self._progress = (claim.progress, claim.message)
        """The last reported progress and message."""

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}: {self.kind}, attempt {self.attempt}>"

    def progress(self, share: float, message: str = "") -> None:
        """Report progress from 0 to 1. Cheap: the last value is stored about once per second."""
        self._progress = (check.ratio("share", share, zero=True), shown(message))

    def raise_if_cancelled(self) -> None:
        """Raise if the job was cancelled: for plain functions, which cannot be interrupted."""
        if self.cancelled:
            raise JobCancelled(f"job {self.id} was cancelled")


JobFunction = Callable[[JobHandle], Any]
"""What a job worker calls for a job: it returns the result, or raises."""


class DurableJobRun(WorkRun):
    """A job of a database that a worker is executing."""

    def __init__(self, claim: Claim, *, in_thread: bool) -> None:
        """Start; the lease of the claim began when it was claimed."""
        super().__init__(claim, in_thread=in_thread)
        self.handle = JobHandle(claim)
        self.renewed = claim.until - claim.lease
        self.stored_progress = self.handle._progress

    def heartbeat(self) -> JobHeartbeat:
        """Return the heartbeat of this job."""
        return JobHeartbeat(self.claim.id, self.claim.fence, *self.handle._progress)

    @property
    def has_progressed(self) -> bool:
        """Whether there is progress that is not stored yet."""
        return self.handle._progress != self.stored_progress

    def cancel(self) -> None:
        """Stop the job, because it was cancelled."""
        if self.stop_reason is None:
            self.stop_reason = "cancelled"
            self.handle.cancelled = True
            if not self.in_thread:
                self._interrupt()

    def _interrupt(self) -> None:
        self.handle.cancelled = True
        super()._interrupt()


def _guards_of(function: Any) -> frozenset[str]:
    """Return the names of a function's guards whose refusal means that it was not started.

    Only the guards directly around the function count: another decorator may call them repeatedly.
    """
    names: set[str] = set()
    while (mark := getattr(function, "__seawall__", None)) is not None:
        guard, guarded = mark
        if guarded() is not getattr(function, "__func__", function):
            return frozenset()
        if any(policy.kind in RUNS_AGAIN for policy in guard.policies):
            return frozenset()
        names.add(guard.name)
        function = function.__wrapped__
    return frozenset(names)


class JobWorker(WorkerLoop[DurableJobRun]):
    """Executes jobs, each kind by its function: an async one, or a plain one in threads."""

    def __init__(
        self,
        jobs: Jobs,
        functions: Mapping[str, JobFunction],
        *,
        concurrency: int = 10,
        backoff: Backoffs = None,
        give_up_on: tuple[type[Exception], ...] = (),
        poll: tuple[float, float] = (0.05, 1.0),
        listen: Callable[[], Awaitable[Any]] | None = None,
        rng: Random | None = None,
    ) -> None:
        """Execute up to `concurrency` jobs at once.

        A function receives a `JobHandle`; its return value, JSON or bytes, is the result. If it
        raises, the job is retried after a pause of `backoff` (default: full jitter from 1 s up to 5
        minutes); an exception of `give_up_on` is final. When there is nothing to do, the table is
        polled after the first time of `poll`, then after twice that, up to the second time.
        `listen` opens a dedicated connection of asyncpg or psycopg (async) for the notifications of
        `Jobs(..., notify=True)` in other processes.
        """
        if not isinstance(jobs, Jobs):
            raise TypeError(f"JobWorker({jobs!r}, ...): pass Jobs(database)")
        if not isinstance(functions, Mapping) or not functions:
            raise TypeError(
                f"functions={functions!r}: write a function for each kind, such as"
                " {'report': make_report}"
            )
        for kind, function in functions.items():
            name_of("kind", kind)
            if kind_of(function) not in ("sync", "async"):
                raise TypeError(f"{kind!r}: {function!r}: pass a function that returns its result")
        super().__init__(jobs.clock, concurrency=concurrency, backoff=backoff, rng=rng)
        self.jobs = jobs
        self.functions = dict(functions)
        self._guards = {kind: _guards_of(function) for kind, function in functions.items()}
        self.owner = uuid4().hex
        self._give_up_on = check.error_types("give_up_on", give_up_on)
        self._poll = poll_of(poll)
        self._next_poll = self._poll[0]
        if listen is not None and jobs.database.dialect != "postgres":
            raise ValueError("listen=...: only PostgreSQL notifies; leave it out")
        self._listening = (
            None if listen is None else NotificationListener(jobs.channel, listen, self._wake)
        )
        self._outage = OutageLog(f"jobs {jobs.name!r}", self._clock)
        self._refusals = OutageLog(f"jobs {jobs.name!r}", self._clock)
        self._failures = FailureLog("jobs", jobs.name, self._clock)
        words = ("succeeded", "retried", "failed", "cancelled", "returned", "lost")
        self._counts = dict.fromkeys(words, 0)
        registry.enter(self, "job_worker", jobs.name)

    def __repr__(self) -> str:
        return f"<JobWorker of {self.jobs!r}: {len(self._runs)} of {self.concurrency} at work>"

    async def run_once(self) -> int:
        """Execute the jobs that are due, up to `concurrency`; return how many were started."""
        return await self._session(once=True)

    def snapshot(self) -> dict[str, Any]:
        """Return the worker's state and the counts of its outcomes."""
        return {
            "running": self._loop is not None,
            "concurrency": self.concurrency,
            "at_work": len(self._runs),
            "listening": self._listening is not None and self._listening.is_listening,
            **self._counts,
        }

    # Claiming

    async def _claim(self, free: int) -> list[DurableJobRun]:
        claims = await self.jobs.aclaim(list(self.functions), free, owner=self.owner)
        if claims:
            self._next_poll = self._poll[0]
        return [
            DurableJobRun(claim, in_thread=kind_of(self.functions[claim.kind]) == "sync")
            for claim in claims
        ]

    async def _pause(self, claimed: int) -> None:
        least, most = self._poll
        if not claimed:
            self._next_poll = min(self._next_poll * 2, most)
        # Jitter: workers that started together should not poll together.
        if await self._wait_for_news(self._next_poll * (0.75 + 0.25 * self._rng.random())):
            self._next_poll = least / 2  # the announced job may not be committed yet: poll often

    def _unreachable(self, error: Exception) -> None:
        self._outage.failed(None, "nothing can be claimed", error)

    def _reached(self) -> None:
        self._outage.succeeded(None)

    @contextmanager
    def _notified(self) -> Iterator[None]:
        wakeups = self.jobs.wakeups
        with (
            Wakeup(wakeups, READY, self._wake),
            Wakeup(wakeups, CANCELLED, lambda: self._set(self._beats)),
        ):
            yield

    def _background(self) -> list[asyncio.Task[Any]]:
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(clean_forever([self.jobs], CLEAN_EVERY))
        ]
        if self._listening is not None:
            tasks.append(self._listening.start(self._rng))
        return tasks

    async def _reject(self, run: DurableJobRun) -> str | None:
        if isinstance(run.claim.payload, RecordGarbled):
            return await self._report_failure(run, run.claim.payload, retry=False)
        return None

    async def _call(self, run: DurableJobRun) -> Any:
        function = self.functions[run.claim.kind]
        if not run.in_thread:
            run.begun = True
            return await function(run.handle)

        def begin() -> Any:
            run.begun = True
            return function(run.handle)

        return await self._in_thread(f"{self.jobs.name}-worker", self.concurrency, begin)

    async def _succeeded(self, run: DurableJobRun, result: Any) -> str:
        try:
            stored = result_of(result, self.jobs.max_result)
        except Exception as error:  # noqa: BLE001 - a repeated call would return the same result
            return await self._report_failure(run, error, retry=False)
        share, text = run.handle._progress
        message = text if share >= 1.0 else ""  # drop an intermediate message such as "a quarter"
        state = await self._report(run, lambda: self.jobs.asucceed(run.claim, stored, message))
        if state not in (True, "succeeded"):
            return "lost"
        self._refusals.succeeded(run.claim.id)
        return "succeeded"

    async def _failed(self, run: DurableJobRun, error: BaseException) -> str:
        gives_up = matches(error, self._give_up_on)
        if isinstance(error, Rejected):
            if not run.begun:  # no free thread: not an attempt
                return await self._give_back(run, PAUSE)
            if not gives_up and error.guard in self._guards[run.claim.kind]:
                return await self._refused(run, error)
        return await self._report_failure(run, error, retry=not gives_up)

    async def _report_failure(
        self, run: DurableJobRun, error: BaseException, *, retry: bool
    ) -> str:
        share, message = run.handle._progress
        claim, delay = run.claim, self._delay_after(run.claim.attempt, error)
        how: dict[str, Any] = {"delay": delay}
        how |= {"retry": retry, "progress": share, "message": message}
        state = await self._report(run, lambda: self.jobs.afail(claim, error, **how))
        if state != "cancelled" and not run.lost:
            what, dead = f"job {claim.id} ({claim.kind!r})", state == "failed"
            self._failures.failed(what, claim.id, claim.attempt, error, delay=delay, dead=dead)
        return "retried" if state == "queued" else state or "lost"

    async def _refused(self, run: DurableJobRun, error: Exception) -> str:
        """Give back a job that its own guard refused to start: it loses no attempt."""
        run.begun = False
        claim, delay = run.claim, self._delay_after(run.claim.attempt, error)
        what = f"job {claim.id} ({claim.kind!r}), not begun"
        self._refusals.failed(claim.id, what, error, delay=delay)
        return await self._give_back(run, delay)

    async def _return_claim(self, run: DurableJobRun, delay: float) -> str:
        state = await self._report(run, lambda: self.jobs.agive_back(run.claim, delay=delay))
        return "lost" if state is None else "returned"

    def _delay_after(self, attempt: int, error: BaseException) -> float:
        least = getattr(error, "retry_after", None) if isinstance(error, Rejected) else None
        floor = above_floor(least or 0.0, self._rng.random)
        return self._pause_after(attempt, floor=floor, longest=LONGEST_PAUSE)

    async def _report(self, run: DurableJobRun, verb: Callable[[], Awaitable[Any]]) -> Any:
        """Report a job's outcome until the lease expires; None if it is not accepted."""

        async def report(unsure: bool) -> Any:  # noqa: FBT001 - as it is called
            state = await verb()
            return await self._stored_state(run.claim) if unsure and not state else state

        return await self._until_answered(run, report)

    async def _stored_state(self, claim: Claim) -> str | None:
        """Return the state set by our earlier report, if only its answer was lost; else None."""
        standing = NamedQuery("jobs.standing", {"id": claim.id})
        rows = await self.jobs.database.arun(standing.alone)
        if not rows or rows[0][1] != claim.fence or rows[0][0] == "running":
            return None
        self.jobs.wakeups.ring(claim.id)
        return str(rows[0][0])

    # Heartbeats

    def _beat_after(self, *, answered: bool) -> float:
        return min(LOOK, self.jobs.lease / (4 if answered else 12))

    async def _renew(self, runs: list[DurableJobRun]) -> bool:
        """Renew claims that are due and check the others; return False if there was no answer."""
        now, third = self._clock.now(), self.jobs.lease / 3
        held = [run for run in runs if not run.settling]
        due = [run for run in held if run.has_progressed or now >= run.renewed + third]
        beats = [run.heartbeat() for run in due]
        looks = [run.claim.id for run in held if run not in due]
        if not held:
            return True
        try:
            cancelled = await self.jobs._abeat(self.owner, beats, looks)
        except Exception:  # noqa: BLE001 - any failure is retried while there is time
            return False
        for run, beat in zip(due, beats, strict=True):
            run.stored_progress = (beat.progress, beat.message)
            run.renewed, run.claim.until = now, now + self.jobs.lease
        for run in held:
            self._follow(run, cancelled.get((run.claim.id, run.claim.fence)))
        return True

    def _follow(self, run: DurableJobRun, to_cancel: bool | None) -> None:  # noqa: FBT001 - None: not held
        if run.settling:
            return  # it ended meanwhile, and reports that itself
        if to_cancel is None:
            run.lose()
        elif to_cancel:
            run.cancel()
