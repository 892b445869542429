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

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall.durable.database.notifications import NotificationListener
from seawall.durable.database.outage_log import OutageLog
from seawall.durable.jobs.jobs import CANCELLED, Jobs
from seawall.durable.jobs.operations import JobHeartbeat
from seawall.durable.jobs.records import JobClaim, name_of, result_of, shown
from seawall.errors import JobCancelled, RecordGarbled, Rejected, matches
from seawall.events.log import FailureLog
from seawall.jobs.wakeups import READY, Wakeup, Wakeups
from seawall.models.backoff import Backoff, above_floor, as_backoff, full_jitter
from seawall.models.durable_jobs import poll_of
from seawall.resources.executors.executors import IoPool
from seawall.runtime.driver import sleep_async
from seawall.runtime.functions import kind_of
from seawall.runtime.stop_signals import run_until_signal

if TYPE_CHECKING:
    import asyncio

OUTAGE: Final = full_jitter(0.05, cap=2.0)
"""Backoff while the database does not answer."""
PAUSE: Final = 1.0
"""Pause in seconds if no thread is free for a job, or if the user's backoff fails."""
LONGEST_PAUSE: Final = 86_400.0
RUNS_AGAIN: Final = frozenset({"retry", "hedge"})
"""Policies that may have run the function although the guard refuses in the end."""

log: Final = logging.getLogger("seawall")

LOOK: Final = 1.0
"""Seconds between two checks of running jobs: whether they were cancelled, and their progress."""
TELLING: Final = 2.0
"""Seconds after the grace period for reporting outcomes; then the worker ends in any case."""
INSTANT: Final = 1e-6
TIDY_EVERY: Final = 60.0
"""Approximate seconds between two cleanups."""


class JobHandle:
    """The argument of a job's function. Usable from any thread."""

    __slots__ = (
        "_told",
        "attempt",
        "cancelled",
        "id",
        "kind",
        "max_attempts",
        "payload",
        "scope",
    )

    def __init__(self, claim: JobClaim) -> None:
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
        self._told = (claim.progress, claim.message)
        """The last reported progress and message."""

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}: {self.kind}, attempt {self.attempt}>"

    def progress(self, share: float, message: str = "") -> None:
        """Report progress from 0 to 1. Cheap: the last value is stored about once per second."""
        self._told = (check.ratio("share", share, zero=True), shown(message))

    def raise_if_cancelled(self) -> None:
        """Raise if the job was cancelled: for plain functions, which cannot be interrupted."""
        if self.cancelled:
            raise JobCancelled(f"job {self.id} was cancelled")


JobFunction = Callable[[JobHandle], Any]


class Running:
    """A claim that is being executed."""

    def __init__(self, claim: JobClaim, *, in_thread: bool, renewed: float) -> None:
        """Start; `renewed` is when the lease began, by the local clock."""
        self.claim = claim
        self.handle = JobHandle(claim)
        self.in_thread = in_thread
        self.task: asyncio.Task[Any] | None = None
        self.wanted: Literal["nothing", "to cancel", "to return", "to stop"] = "nothing"
        self.begun = False
        self.settling = False
        """Whether the work has ended, and only the report to the database remains."""
        self.error: BaseException | None = None
        self.renewed = renewed
        self.until = claim.until
        self.said = self.handle._told

    def __repr__(self) -> str:
        return f"<Running {self.claim!r}>"

    def beat(self) -> JobHeartbeat:
        """Return the heartbeat of this job."""
        self.said = self.handle._told
        return JobHeartbeat(self.claim.id, self.claim.epoch, *self.said)

    @property
    def has_news(self) -> bool:
        """Whether there is progress that is not stored yet."""
        return self.handle._told != self.said

    def cancel(self) -> None:
        """Stop the job, because it was cancelled."""
        if self.wanted == "nothing":
            self.wanted = "to cancel"
            self.handle.cancelled = True
            if not self.in_thread:
                self._interrupt()

    def give_back(self) -> None:
        """Stop and give the job back. A thread runs on: its job is free after the lease."""
        if self.wanted in ("nothing", "to cancel"):
            self.wanted = "to return"
            self.handle.cancelled = True
            self._interrupt()

    def lose(self) -> None:
        """Stop the job, because another worker owns it now."""
        already, self.wanted = self.wanted, "to stop"
        self.handle.cancelled = True
        if already != "to stop":
            self._interrupt()

    def _interrupt(self) -> None:
        # Do not cancel the report of finished work: it has its own time limit.
        if self.task is not None and not self.settling:
            self.task.cancel()


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


class JobWorker:
    """Executes jobs, each kind by its function: an async one, or a plain one in threads."""

    def __init__(
        self,
        jobs: Jobs,
        functions: Mapping[str, JobFunction],
        *,
        concurrency: int = 10,
        backoff: Backoff | float | Iterable[float] | Callable[[int], float] | None = None,
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
        self.jobs = jobs
        self.functions = dict(functions)
        self._guards = {kind: _guards_of(function) for kind, function in functions.items()}
        self.concurrency = check.count("concurrency", concurrency, maximum=500)
        self.owner = uuid4().hex
        self._backoff = full_jitter(1.0, cap=300.0) if backoff is None else as_backoff(backoff)
        self._give_up_on = check.error_types("give_up_on", give_up_on)
        self._rng = Random() if rng is None else check.chance("rng", rng)  # noqa: S311 - jitter is no secret
        self._clock = jobs.clock
        self._pool: IoPool | None = None
        self._runs: set[Running] = set()
        self._trouble = OutageLog(f"jobs {jobs.name!r}", self._clock)
        self._failures = FailureLog("jobs", jobs.name, self._clock)
        words = ("succeeded", "retried", "failed", "cancelled", "returned", "lost")
        self._counts = dict.fromkeys(words, 0)
        self._poll = poll_of(poll)
        if listen is not None and jobs.database.dialect != "postgres":
            raise ValueError("listen=...: only PostgreSQL notifies; leave it out")
        self._listening = (
            None if listen is None else NotificationListener(jobs.channel, listen, self._ring)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._looks: asyncio.Event | None = None
        self._halt: asyncio.Event | None = None
        self._stopped = False
        self._end_at = inf
        self._outage = OutageLog(f"jobs {jobs.name!r}", self._clock)
        registry.enter(self, "job_worker", jobs.name)

    def __repr__(self) -> str:
        return f"<JobWorker of {self.jobs!r}: {len(self._runs)} of {self.concurrency} at work>"

    async def run(self) -> None:
        """Execute jobs until `stop` is called. If cancelled, give running jobs back."""
        if self._stopped:
            return
        async with self._session() as fetch:
            await self._fetched(fetch)

    async def run_once(self) -> int:
        """Execute the jobs that are due, up to `concurrency`; return how many were started."""
        async with self._session(once=True) as fetch:
            begun = await self._fetched(fetch)
            while self._runs and not self._stopped:
                await self._news_within(self._news, LOOK)
        return begun

    def run_sync(self, drain: float = 10.0) -> None:
        """Execute jobs in this thread until `stop` is called; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop the worker too: the first signal by
        `stop(drain)`, a second one by `stop(0)`. A signal for which the program has its own handler
        is left alone.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Claim no more jobs; give running ones `grace` seconds, then give the rest back.

        Callable from any thread or signal handler. `run` returns when all is done, at most three
        seconds after the grace period, whatever functions and the database do. A job that was given
        back can be claimed at once, and has lost no attempt. A function that does not end (a thread
        cannot be stopped, and a coroutine may ignore its cancellation) keeps its job until the
        lease expires.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._end_at = min(self._end_at, self._clock.now() + seconds)
        self._stopped = True
        self._ring()
        self._wake(self._halt)

    def snapshot(self) -> dict[str, Any]:
        """Return the worker's state and the counts of its outcomes."""
        return {
            "running": self._loop is not None,
            "concurrency": self.concurrency,
            "at_work": len(self._runs),
            "listening": self._listening is not None and self._listening.is_listening,
            **self._counts,
        }

    async def _fetched(self, fetch: asyncio.Task[int]) -> int:
        """Wait until `fetch` has ended or the worker is stopped; being cancelled cuts no claim."""
        import asyncio

        assert self._halt is not None  # noqa: S101 - set before any task starts
        halting = asyncio.create_task(self._halt.wait())
        try:
            await asyncio.wait([fetch, halting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            halting.cancel()
        return fetch.result() if fetch.done() else 0

    # Waking

    def _ring(self) -> None:
        """Wake the fetching task. Callable from any thread."""
        self._wake(self._news)

    def _wake(self, event: asyncio.Event | None) -> bool:
        loop = self._loop
        if loop is None or event is None:
            return False
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            return False  # the loop is closed, so the worker has stopped
        return True

    async def _news_within(self, event: asyncio.Event | None, seconds: float) -> bool:
        """Wait for `event`, at most `seconds`; return whether it was set."""
        import asyncio

        assert event is not None  # noqa: S101 - set before any task starts
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await event.wait()
        except TimeoutError:
            pass
        told = event.is_set()
        event.clear()
        return told

    # A session: the heartbeats run from the first claim to the last report

    @asynccontextmanager
    async def _session(self, *, once: bool = False) -> AsyncIterator[asyncio.Task[int]]:
        import asyncio

        if self._loop is not None:
            raise RuntimeError(f"{self!r} runs already: make another JobWorker")
        self._loop = asyncio.get_running_loop()
        self._news, self._looks, self._halt = (asyncio.Event() for _ in range(3))
        bells = self.jobs.bells
        ready = _Ear(bells, READY, lambda: self._wake(self._news))
        cancelled = _Ear(bells, CANCELLED, lambda: self._wake(self._looks))
        with ready, cancelled:
            fetching = asyncio.create_task(self._fetch(once=once))
            aside = [asyncio.create_task(self._beat())]
            if not once:
                aside.append(asyncio.create_task(self._tidy()))
                if self._listening is not None:
                    self._listening.start(self._rng)
            try:
                yield fetching
            finally:
                try:
                    await self._wind_up(fetching, aside)
                finally:
                    self._loop = self._news = self._looks = self._halt = None
                    if self._pool is not None:
                        self._pool.close(0.0)
                        self._pool = None

    async def _fetch(self, *, once: bool) -> int:
        """Claim jobs as slots become free, until stopped; with `once`, a single time."""
        least, most = self._poll
        nap, kinds, begun = least, list(self.functions), 0
        outages = OUTAGE.delays(self._rng.random)
        while not self._stopped:
            room = self.concurrency - len(self._runs)
            if room <= 0:
                await self._news_within(self._news, most)
                continue
            try:
                claims = await self.jobs.aclaim(kinds, room, owner=self.owner)
            except Exception as error:
                if once:
                    raise
                self._outage.failed(None, "nothing can be claimed", error)
                await self._news_within(self._news, next(outages))
                continue
            self._outage.well(None)
            outages = OUTAGE.delays(self._rng.random)
            for claim in claims:
                self._begin(claim)
            begun += len(claims)
            if once:
                return begun
            nap = least if claims else min(nap * 2, most)
            if len(claims) < room:
                # Jitter: workers that started together should not poll together.
                pause = nap * (0.75 + 0.25 * self._rng.random())
                if await self._news_within(self._news, pause):
                    nap = least / 2  # the announced job may not be committed yet: poll often
        return begun

    def _begin(self, claim: Any) -> None:
        import asyncio

        run = self._running(claim)
        if self._stopped:
            run.wanted = "to return"
        self._runs.add(run)
        run.task = asyncio.create_task(self._work(run))

    async def _work(self, run: Running) -> None:
        outcome = "lost"
        try:
            outcome = await self._outcome(run)
        except Exception as error:  # noqa: BLE001 - one job's failure must not affect others
            log.error("jobs %r: job %s: %s", self.jobs.name, run.claim.id, described(error))  # noqa: TRY400 - see there
        finally:
            self._counts[outcome] += 1
            self._runs.discard(run)
            run.error = None
            self._ring()

    async def _beat(self) -> None:
        """Renew and check running jobs forever; more often while the database is unreachable."""
        nap = min(LOOK, self.jobs.lease / 4)
        while True:
            await self._news_within(self._looks, nap)
            answered = await self._beat_once(list(self._runs))
            nap = min(LOOK, self.jobs.lease / (4 if answered else 12))

    async def _tidy(self) -> None:
        """Remove expired records, forever."""
        while True:
            await sleep_async(TIDY_EVERY * (0.5 + 0.5 * self._rng.random()))
            try:
                await self.jobs.acleanup()
            except Exception as error:  # noqa: BLE001 - retried next time
                log.warning("jobs %r cannot be cleaned up: %s", self.jobs.name, described(error))

    async def _wind_up(self, fetching: asyncio.Task[int], aside: list[asyncio.Task[None]]) -> None:
        """Wait out the grace period, then give running jobs back, then end in any case."""
        import asyncio

        from seawall.runtime.abandon import end

        try:
            if not fetching.done() or self._runs:
                if not self._stopped:  # cancelled or failed: no grace period
                    self.stop(0.0)
                # A claim must not be cut off: the jobs it took would be blocked for a whole lease.
                await asyncio.wait([fetching], timeout=TELLING)
            while self._runs and (left := self._end_at - self._clock.now()) > INSTANT:
                await self._news_within(self._news, left)
            for run in list(self._runs):
                run.give_back()
            tell_until = self._clock.now() + TELLING
            while self._runs and (left := tell_until - self._clock.now()) > INSTANT:
                await self._news_within(self._news, left)
        finally:
            # Even if cancelled again: no job may run on without a renewed lease.
            runs = [run.task for run in self._runs if run.task is not None]
            listening = [] if self._listening is None else self._listening.tasks()
            await end([fetching, *aside, *runs, *listening])

    def _running(self, claim: JobClaim) -> Running:
        in_thread = kind_of(self.functions[claim.kind]) == "sync"
        return Running(claim, in_thread=in_thread, renewed=claim.until - self.jobs.lease)

    async def _outcome(self, run: Running) -> str:
        """Execute a job and report it; return the name of its outcome."""
        import asyncio

        if run.wanted == "to return":
            return await self._give_back(run)
        if isinstance(run.claim.payload, RecordGarbled):
            return await self._failed(run, run.claim.payload, retry=False)
        try:
            result = await self._call(run)
        except asyncio.CancelledError as error:
            run.settling = True
            return await self._interrupted(run, error)
        except Exception as error:  # noqa: BLE001 - an error of the job: stored
            run.settling = True
            return await self._raised(run, error)
        run.settling = True
        return await self._succeeded(run, result)

    async def _interrupted(self, run: Running, error: BaseException) -> str:
        ours = run.wanted != "nothing"
        if run.task is not None and run.task.cancelling():
            if not ours:
                raise error  # cancelled from outside, as when the loop ends: no time is left
            while run.task.cancelling():
                run.task.uncancel()
        if run.wanted == "to return":
            return await self._give_back(run)
        return await self._failed(run, error)

    async def _call(self, run: Running) -> Any:
        function = self.functions[run.claim.kind]
        if not run.in_thread:
            run.begun = True
            return await function(run.handle)
        if self._pool is None:
            name = f"{self.jobs.name}-worker"
            self._pool = IoPool(name, workers=self.concurrency, clock=self._clock)

        def begin(handle: JobHandle) -> Any:
            run.begun = True
            return function(handle)

        return await self._pool.arun(begin, run.handle)

    async def _succeeded(self, run: Running, result: Any) -> str:
        try:
            stored = result_of(result, self.jobs.max_result)
        except Exception as error:  # noqa: BLE001 - a repeated call would return the same result
            return await self._failed(run, error, retry=False)
        share, said = run.handle._told
        message = said if share >= 1.0 else ""  # drop an intermediate message such as "a quarter"
        told = await self._tell(run, lambda: self.jobs.asucceed(run.claim, stored, message))
        if told not in (True, "succeeded"):
            return "lost"
        self._trouble.well(run.claim.id)
        return "succeeded"

    async def _failed(self, run: Running, error: BaseException, *, retry: bool = True) -> str:
        run.error = error
        share, message = run.handle._told
        claim, delay = run.claim, self._pause_after(run.claim.attempt, error)
        how: dict[str, Any] = {"delay": delay}
        how |= {"retry": retry, "progress": share, "message": message}
        state = await self._tell(run, lambda: self.jobs.afail(claim, error, **how))
        if state != "cancelled" and run.wanted != "to stop":
            what, dead = f"job {claim.id} ({claim.kind!r})", state == "failed"
            self._failures.failed(what, claim.id, claim.attempt, error, delay=delay, dead=dead)
        return "retried" if state == "queued" else state or "lost"

    async def _raised(self, run: Running, error: Exception) -> str:
        gives_up = matches(error, self._give_up_on)
        if isinstance(error, Rejected):
            if not run.begun:  # no free thread: not an attempt
                return await self._give_back(run, PAUSE)
            if not gives_up and error.guard in self._guards[run.claim.kind]:
                return await self._refused(run, error)
        return await self._failed(run, error, retry=not gives_up)

    async def _refused(self, run: Running, error: Exception) -> str:
        """Give back a job that its own guard refused to start: it loses no attempt."""
        run.begun = False
        claim, delay = run.claim, self._pause_after(run.claim.attempt, error)
        what = f"job {claim.id} ({claim.kind!r}), not begun"
        self._trouble.failed(claim.id, what, error, delay=delay, final=False)
        return await self._give_back(run, delay)

    async def _give_back(self, run: Running, delay: float = 0.0) -> str:
        if run.in_thread and run.begun:
            return "lost"  # its thread is still running: free only when the lease expires
        told = await self._tell(run, lambda: self.jobs.agive_back(run.claim, delay=delay))
        return "lost" if told is None else "returned"

    def _pause_after(self, attempt: int, error: BaseException) -> float:
        least = getattr(error, "retry_after", None) if isinstance(error, Rejected) else None
        try:
            schedule = self._backoff.delays(self._rng.random)
            # In a schedule that grows without end, the hundredth pause is as good as the last.
            delay = next(islice(schedule, min(attempt, 100) - 1, None))
            floor = above_floor(least or 0.0, self._rng.random)
            delay = check.seconds("backoff", max(delay, floor), zero=True)
        except Exception as trouble:  # noqa: BLE001 - a broken backoff must not lose the job
            log.warning("jobs %r: backoff failed: %s", self.jobs.name, described(trouble))
            delay = PAUSE
        return min(delay, LONGEST_PAUSE)

    async def _tell(self, run: Running, verb: Callable[[], Any]) -> Any:
        """Report a job's outcome, with retries until the lease expires; None if not accepted."""
        delays = OUTAGE.delays(self._rng.random)
        unsure = False
        while run.wanted != "to stop":
            try:
                told = await verb()
                if not told and unsure:
                    told = await self._heard_before(run.claim)
            except Exception as error:  # noqa: BLE001 - from any driver; retried
                unsure = True
                left = run.until - self._clock.now()
                if left <= 0:
                    name, told = self.jobs.name, described(error)
                    log.warning("jobs %r: job %s: untold how it went: %s", name, run.claim.id, told)
                    return None
                await sleep_async(min(next(delays), left))
            else:
                return told
        return None

    async def _heard_before(self, claim: JobClaim) -> str | None:
        """Return the state set by our earlier report, if only its answer was lost; else None."""
        seen = await self.jobs._astanding(claim.id)
        if seen is None or seen.epoch != claim.epoch or seen.state == "running":
            return None
        self.jobs.bells.ring(claim.id)
        return seen.state

    # Heartbeats

    async def _beat_once(self, runs: Iterable[Running]) -> bool:
        """Renew claims that are due and check the others; return False if there was no answer."""
        import asyncio

        now, third = self._clock.now(), self.jobs.lease / 3
        looked = [run for run in runs if not run.settling and run.wanted != "to stop"]
        due = [run for run in looked if run.has_news or now >= run.renewed + third]
        beats = [run.beat() for run in due]
        looks = [run.claim.id for run in looked if run not in due]
        if not looked:
            return True
        try:
            async with asyncio.timeout(third):  # the database may hang
                held = await self.jobs._abeat(self.owner, beats, looks)
        except Exception:  # noqa: BLE001 - any failure is retried while there is time
            for run in due:
                run.said = (-1.0, "")  # it was not stored: mark it as news again
            for run in looked:
                if self._clock.now() >= run.until:
                    run.lose()
            return False
        for run in due:
            run.renewed, run.until = now, now + self.jobs.lease
        for run in looked:
            self._heed(run, held.get((run.claim.id, run.claim.epoch)))
        return True

    def _heed(self, run: Running, to_cancel: bool | None) -> None:  # noqa: FBT001 - None: not held
        if run.settling:
            return  # it ended meanwhile, and reports that itself
        if to_cancel is None:
            run.lose()
        elif to_cancel:
            run.cancel()


class _Ear(Wakeup):
    """A bell that calls a function of the worker."""

    def __init__(self, bells: Wakeups, topic: str, tell: Callable[[], bool]) -> None:
        super().__init__(bells, topic)
        self._tell = tell

    def hear(self) -> Callable[[], bool]:
        """Return the function to call after the lock is released."""
        return self._tell
