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

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall._failures import described
from seawall.durable._jobs_claims import CANCELLED
from seawall.durable._jobs_run import OUTAGE, JobDoing, JobFunction, Running, log
from seawall.durable._outbox_listening import Listening
from seawall.durable._trouble import Trouble
from seawall.durable.jobs import Jobs
from seawall.jobs._bells import READY, Bell, Bells
from seawall.models.backoff import Backoff
from seawall.models.durable_jobs import poll_of
from seawall.runtime.runners import sleep_async
from seawall.runtime.stop_signals import run_until_signal

if TYPE_CHECKING:
    import asyncio

__all__ = ["JobWorker"]

LOOK: Final = 1.0
"""Seconds between two checks of running jobs: whether they were cancelled, and their progress."""
TELLING: Final = 2.0
"""Seconds after the grace period for reporting outcomes; then the worker ends in any case."""
INSTANT: Final = 1e-6
TIDY_EVERY: Final = 60.0
"""Approximate seconds between two cleanups."""


class JobWorker(JobDoing):
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
        super().__init__(
            jobs,
            functions,
            concurrency=concurrency,
            backoff=backoff,
            give_up_on=give_up_on,
            rng=rng,
        )
        self._poll = poll_of(poll)
        if listen is not None and jobs.database.dialect != "postgres":
            raise ValueError("listen=...: only PostgreSQL notifies; leave it out")
        self._listening = None if listen is None else Listening(jobs.channel, listen, self._ring)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._looks: asyncio.Event | None = None
        self._halt: asyncio.Event | None = None
        self._stopped = False
        self._end_at = inf
        self._outage = Trouble(f"jobs {jobs.name!r}", self._clock)

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
            log.error("jobs %r: job %s: %s", self.jobs.name, run.claim.id, described(error))
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


class _Ear(Bell):
    """A bell that calls a function of the worker."""

    def __init__(self, bells: Bells, topic: str, tell: Callable[[], bool]) -> None:
        super().__init__(bells, topic)
        self._tell = tell

    def hear(self) -> Callable[[], bool]:
        """Return the function to call after the lock is released."""
        return self._tell
