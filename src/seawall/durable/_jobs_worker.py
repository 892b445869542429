"""Does the jobs of a database: so many at once, with heartbeats, until it is stopped.

Promises: at most `concurrency` jobs at once; a job whose lease is lost is stopped; an error has the
job tried again after a pause; a cancelled job is stopped within a second or so; stopping finishes
what it can and gives the rest back; while the database is away it goes on trying, and loses no job.
Results whose time is over are dropped meanwhile.
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
"""Seconds between two looks at what is at work: whether it was cancelled, and what it said."""
TELLING: Final = 2.0
"""Seconds after the grace for telling how it went; then the worker ends, told or not."""
INSTANT: Final = 1e-6
TIDY_EVERY: Final = 60.0
"""Seconds between two times of dropping what is not kept any more."""


class JobWorker(JobDoing):
    """Do the jobs of `jobs`, each kind by its function: async, or a plain one in threads."""

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
        """Do up to `concurrency` jobs at once.

        A function is given a `JobHandle`, and what it returns is the result: JSON, or bytes. If it
        raises, the job is tried again after a pause of `backoff` (full jitter from 1 s up to 5
        minutes, unless given), and not at all after an error of `give_up_on`. Where there is
        nothing to do, the table is looked at after the first of the times of `poll`, then after
        twice that, up to the second. `listen` opens a connection of its own, of asyncpg or of
        psycopg (async), on which it hears of jobs of `Jobs(..., notify=True)` elsewhere.
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
        """Do jobs until `stop` is called; cancelled, it gives back what it has begun."""
        if self._stopped:
            return
        async with self._session() as fetch:
            await self._fetched(fetch)

    async def run_once(self) -> int:
        """Do what is due now, up to `concurrency` jobs; return how many that were."""
        async with self._session(once=True) as fetch:
            begun = await self._fetched(fetch)
            while self._runs and not self._stopped:
                await self._news_within(self._news, LOOK)
        return begun

    def run_sync(self, drain: float = 10.0) -> None:
        """Do jobs until `stop` is called, in this thread; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop it too: the first by `stop(drain)`, a second one
        by `stop(0)`. A signal that the program handles itself is left to it.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Claim no more jobs, and give those at work `grace` seconds; the rest is given back.

        From any thread or signal handler; `run` returns when it is done, three seconds after the
        grace at the latest, whatever functions and the database do. A job that was given back is
        free at once, and has lost no attempt. What does not end (a thread cannot be stopped, and a
        coroutine may ignore it) is free when its lease is over.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._end_at = min(self._end_at, self._clock.now() + seconds)
        self._stopped = True
        self._ring()
        self._wake(self._halt)

    def snapshot(self) -> dict[str, Any]:
        """Return what it is doing, and how the jobs it had have ended."""
        return {
            "running": self._loop is not None,
            "concurrency": self.concurrency,
            "at_work": len(self._runs),
            "listening": self._listening is not None and self._listening.is_listening,
            **self._counts,
        }

    async def _fetched(self, fetch: asyncio.Task[int]) -> int:
        """Wait until it is over, or stopped: who cancels us does not cut off a claim."""
        import asyncio

        assert self._halt is not None  # noqa: S101 - made before any task
        halting = asyncio.create_task(self._halt.wait())
        try:
            await asyncio.wait([fetch, halting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            halting.cancel()
        return fetch.result() if fetch.done() else 0

    # Waking

    def _ring(self) -> None:
        """Look for news now; from any thread."""
        self._wake(self._news)

    def _wake(self, event: asyncio.Event | None) -> bool:
        loop = self._loop
        if loop is None or event is None:
            return False
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            return False  # the loop is closed: it has stopped
        return True

    async def _news_within(self, event: asyncio.Event | None, seconds: float) -> bool:
        """Wait for what is told by `event`, at most so long; return whether something was."""
        import asyncio

        assert event is not None  # noqa: S101 - made before any task
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await event.wait()
        except TimeoutError:
            pass
        told = event.is_set()
        event.clear()
        return told

    # A session: heartbeats, from the first claim to the last word

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
        """Claim jobs as there is room for them, until stopped; or once."""
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
                # Workers that began together need not ask together.
                pause = nap * (0.75 + 0.25 * self._rng.random())
                if await self._news_within(self._news, pause):
                    nap = least / 2  # what was told of may not be committed yet: look often
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
        except Exception as error:  # noqa: BLE001 - one job's trouble is not the others'
            log.error("jobs %r: job %s: %s", self.jobs.name, run.claim.id, described(error))
        finally:
            self._counts[outcome] += 1
            self._runs.discard(run)
            run.error = None
            self._ring()

    async def _beat(self) -> None:
        """Look after what is at work, for ever; more often while the database is away."""
        nap = min(LOOK, self.jobs.lease / 4)
        while True:
            await self._news_within(self._looks, nap)
            answered = await self._beat_once(list(self._runs))
            nap = min(LOOK, self.jobs.lease / (4 if answered else 12))

    async def _tidy(self) -> None:
        """Drop what is not kept any more, for ever."""
        while True:
            await sleep_async(TIDY_EVERY * (0.5 + 0.5 * self._rng.random()))
            try:
                await self.jobs.acleanup()
            except Exception as error:  # noqa: BLE001 - next time, then
                log.warning("jobs %r cannot be cleaned up: %s", self.jobs.name, described(error))

    async def _wind_up(self, fetching: asyncio.Task[int], aside: list[asyncio.Task[None]]) -> None:
        """Give what is at work its time; then give it back; then end, whatever goes on."""
        import asyncio

        from seawall.runtime.abandon import end

        try:
            if not fetching.done() or self._runs:
                if not self._stopped:  # cancelled, or broken: without grace
                    self.stop(0.0)
                # A claim is not cut off in the middle: what it took would be nobody's for a lease.
                await asyncio.wait([fetching], timeout=TELLING)
            while self._runs and (left := self._end_at - self._clock.now()) > INSTANT:
                await self._news_within(self._news, left)
            for run in list(self._runs):
                run.give_back()
            tell_until = self._clock.now() + TELLING
            while self._runs and (left := tell_until - self._clock.now()) > INSTANT:
                await self._news_within(self._news, left)
        finally:
            # Also if cancelled once more: nothing goes on here that nobody prolongs the lease of.
            runs = [run.task for run in self._runs if run.task is not None]
            listening = [] if self._listening is None else self._listening.tasks()
            await end([fetching, *aside, *runs, *listening])


class _Ear(Bell):
    """Tells a worker's loop of what was rung."""

    def __init__(self, bells: Bells, topic: str, tell: Callable[[], bool]) -> None:
        super().__init__(bells, topic)
        self._tell = tell

    def hear(self) -> Callable[[], bool]:
        """Have news, under the lock; return how to tell of them."""
        return self._tell
