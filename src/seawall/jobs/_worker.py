"""Does the jobs of a queue: so many at once, each under a guard, with heartbeats meanwhile.

Promises: at most `concurrency` jobs at once; a job whose lease is lost is stopped; an error gives
the job back, to be tried again after a pause; a refusal by the guard costs the job no attempt, and
pauses claiming; stopping finishes what it can, returns the rest, and takes no longer than it may;
while the store is away it goes on trying, and no job is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall import registry
from seawall.errors import JobLost, StoreUnavailable
from seawall.executors import IoPool
from seawall.jobs._bells import READY
from seawall.jobs._doing import OUTAGE, Doing
from seawall.jobs._queue import JobQueue
from seawall.jobs._records import Claim
from seawall.jobs._runs import Run
from seawall.models.backoff import Backoff, as_backoff, full_jitter
from seawall.models.shedding.codel import REREAD, QueueShed, check_queue_shed
from seawall.runtime.functions import kind_of
from seawall.runtime.log import FailureLog
from seawall.runtime.recent import ResponseTimes
from seawall.runtime.runners import sleep_async
from seawall.runtime.stop_signals import run_until_signal

if TYPE_CHECKING:
    import asyncio

    from seawall.guard import Guard

TIMES_WINDOW: Final = 60.0
"""Seconds of jobs by which a queue is measured, at least."""
CLAIM_WAIT: Final = 5.0
"""Seconds that one claim waits for a job; then it is asked again."""
TELLING: Final = 2.0
"""Seconds after the grace for telling the queue how it went; then the worker ends, told or not."""
LEAVING: Final = 0.1
"""Seconds for what is then cancelled; what goes on all the same is abandoned."""
INSTANT: Final = 1e-6
"""Less than this is no time to wait for."""


class Worker(Doing):
    """Do the jobs of `queue` by `handler(claim)`: an async function, or a plain one in threads."""

    def __init__(
        self,
        queue: JobQueue,
        handler: Callable[[Claim], Any],
        *,
        guard: Guard | None = None,
        concurrency: int = 10,
        lease: float = 30.0,
        shed: QueueShed | None = None,
        backoff: Backoff | float | Iterable[float] | Callable[[int], float] | None = None,
        rng: Random | None = None,
    ) -> None:
        """Do up to `concurrency` jobs at once, each under `guard`.

        What the handler returns is the job's result. If it raises, that is logged with its
        traceback, and the job is tried again after a pause of `backoff`: full jitter from 1 s up to
        5 minutes, unless given. A job is claimed for
        `lease` seconds, and the claim prolonged while it runs.

        `shed` says when the queue has stood for too long, by the age of its longest waiting job:
        `codel()` or `adaptive_lifo()`. Then jobs that have waited for too long are not begun: they
        become dead letters. The order stays that of the queue, and a job that was tried before is
        not shed.
        """
        if not isinstance(queue, JobQueue):
            raise TypeError(f"Worker({queue!r}, ...): pass a PriorityQueue or a LocalQueue")
        check.function("handler", handler)
        if guard is not None and not hasattr(guard, "acall"):
            raise TypeError(f"guard={guard!r}: pass a Guard")
        if rng is not None and (isinstance(rng, type) or not hasattr(rng, "random")):
            raise TypeError(f"rng={rng!r}: pass a random.Random, such as random.Random(7)")
        self.queue = queue
        self.shed = check_queue_shed(shed)
        self._times = ResponseTimes(TIMES_WINDOW)
        self._discipline = None if shed is None else shed.start(self._times.quantile(0.5))
        self._look_at = -inf
        self._oldest_age = 0.0
        self.concurrency = check.count("concurrency", concurrency, maximum=500)
        self.lease = check.seconds("lease", lease)
        if self.lease > queue.keep:
            raise ValueError(f"lease={lease!r} is above the queue's keep={queue.keep!r}")
        # What this very guard has decorated is guarded once.
        self._handler = handler if guard is None else guard._plan_for(handler)[1]  # noqa: SLF001
        self._guard = guard
        self._backoff = full_jitter(1.0, cap=300.0) if backoff is None else as_backoff(backoff)
        self._rng = Random() if rng is None else rng  # noqa: S311 - jitter is no secret
        self._clock = queue.clock
        self._failures = FailureLog("queue", queue.name, self._clock)
        self._pool: IoPool | None = None
        if kind_of(handler) == "sync":
            name = f"{queue.name}-worker"
            self._pool = IoPool(name, workers=self.concurrency, clock=self._clock)
        elif kind_of(handler) != "async":
            raise TypeError(f"handler={handler!r}: pass a function that returns its result whole")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._halt: asyncio.Event | None = None
        self._news: asyncio.Event | None = None
        self._runs: set[Run] = set()
        self._stopped = False
        self._end_at = inf
        self._resume_at = -inf
        self._counts = dict.fromkeys(("done", "failed", "refused", "lost", "returned", "shed"), 0)
        registry.enter(self, "worker", queue.name)

    def __repr__(self) -> str:
        return f"<Worker of {self.queue!r}: {len(self._runs)} of {self.concurrency} at work>"

    async def run(self) -> None:
        """Do jobs until `stop` is called; what is stopped stays so.

        Cancelled, it returns to the queue what it has begun, and ends. A store that was closed ends
        it too, with `StoreUnavailable`.
        """
        import asyncio

        if self._loop is not None:
            raise RuntimeError(f"{self!r} runs already: make another Worker")
        if self._stopped:
            return
        self._halt, self._news = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        fetching = asyncio.create_task(self._fetch())
        beating = asyncio.create_task(self._beat())
        halting = asyncio.create_task(self._halt.wait())
        try:
            await asyncio.wait([fetching, beating, halting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self._stopped:  # cancelled, or broken: without grace
                self.stop(0.0)
            try:
                await self._wind_up(fetching, beating, halting)
            finally:
                self._loop = self._halt = self._news = None
                if self._pool is not None:
                    self._pool.close(0.0)
        for task in (fetching, beating):
            if task.done() and not task.cancelled():
                task.result()  # if it broke, that was no stop

    def run_sync(self, drain: float = 10.0) -> None:
        """Do jobs until `stop` is called, in this thread; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop it too: the first by `stop(drain)`, a second one
        by `stop(0)`. A signal that the program handles itself is left to it.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Claim no more jobs, and give those at work `grace` seconds; the rest is returned.

        From any thread or signal handler; `run` returns when it is done, two seconds after the
        grace at the latest. A returned job is free at once, and has lost no attempt. A thread
        cannot be stopped: what a plain handler is still at is free when its lease is over. Stopped
        again, it takes the shorter grace.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._end_at = min(self._end_at, self._clock.now() + seconds)
        self._stopped = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._ring)
            except RuntimeError:
                pass  # the loop is closed: it has stopped

    def snapshot(self) -> dict[str, Any]:
        """Return what it is doing, and how many jobs it has done and not done."""
        return {
            "queue": self.queue.name,
            "running": self._loop is not None,
            "concurrency": self.concurrency,
            "at_work": len(self._runs),
            "paused": self._clock.now() < self._resume_at,
            "abandoned": 0 if self._pool is None else self._pool.pool.abandoned,
            **self._counts,
        }

    # Claiming

    async def _fetch(self) -> None:
        """Claim jobs as there is room for them, until stopped.

        A claim that is being asked for is not cancelled: what it brings is given back.
        """
        delays = OUTAGE.delays(self._rng.random)
        while free := await self._room():
            try:
                oldest = 0.0 if self._discipline is None else await self._oldest()
                claims = await self._claim(free)
            except StoreUnavailable:
                if self.queue._closed:  # noqa: SLF001 - of this package
                    raise
                await self._nap(next(delays))
                continue
            delays = OUTAGE.delays(self._rng.random)
            for claim in self._judged(claims, oldest):
                self._begin(claim)

    async def _oldest(self) -> float:
        """Return how long the longest waiting job has waited; looked at every 0.1 s at most."""
        now = self._clock.now()
        if now >= self._look_at:
            self._look_at = now + REREAD
            self._oldest_age = (await self.queue.asnapshot())["oldest"]
        return self._oldest_age

    def _judged(self, claims: list[Claim], oldest: float) -> Iterator[Run]:
        """Mark the jobs that have waited for too long, by the rule of `shed`.

        The queue is judged by its longest waiting job: jobs that matter more pass it, and do not
        wait.
        """
        discipline, now = self._discipline, self._clock.now()
        if discipline is not None and not claims:
            discipline.emptied(now)
        for claim in claims:
            run = Run(claim, wanted=not self._stopped)
            if discipline is not None:
                run.shed = claim.attempt == 1 and discipline.sheds(claim.waited, now, oldest)
                if not run.shed:
                    discipline.serves(now)
            yield run

    async def _claim(self, free: int) -> list[Claim]:
        queue = self.queue
        steps = queue._claiming(free, self.lease, CLAIM_WAIT, lambda: self._stopped)  # noqa: SLF001
        return await queue._async(steps)  # noqa: SLF001 - of this package

    async def _room(self) -> int:
        """Wait until another job may be claimed; return how many may, 0 if none ever will."""
        while not self._stopped:
            pause = self._resume_at - self._clock.now()
            if pause > INSTANT:
                await self._nap(pause)
                continue
            abandoned = 0 if self._pool is None else self._pool.pool.abandoned
            free = self.concurrency - len(self._runs) - abandoned
            if free > 0:
                return free
            await self._news_within(1.0)  # a thread that comes back rings no bell
        return 0

    async def _nap(self, seconds: float) -> None:
        """Let time pass, or less if stopped."""
        until = self._clock.now() + seconds
        while not self._stopped and (left := until - self._clock.now()) > INSTANT:
            await self._news_within(left)

    async def _news_within(self, seconds: float) -> None:
        """Wait until a job has ended or the worker is stopped, at most so long."""
        import asyncio

        assert self._news is not None  # noqa: S101 - made before any task
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    def _ring(self) -> None:
        """Have news; in the loop."""
        if self._news is not None and self._halt is not None:
            self._news.set()
            if self._stopped and not self._halt.is_set():
                self._halt.set()
                self.queue._bells.ring(READY)  # noqa: SLF001 - who waits for a job here looks up

    async def _beat(self) -> None:
        """Prolong what is at work, for ever; more often while the store is away."""
        import asyncio

        nap = self.lease / 3
        while True:
            now = self._clock.now()
            ends = [run.claim.until - now for run in self._runs if not run.lost]
            await sleep_async(max(0.0, min([nap, *ends])))
            answered = await asyncio.gather(*(self._extend(run) for run in list(self._runs)))
            nap = self.lease / (3 if all(answered) else 12)

    async def _extend(self, run: Run) -> bool:
        """Prolong one claim; False if the store did not answer."""
        if run.lost:
            return True
        try:
            await self.queue.aheartbeat(run.claim)
        except JobLost:
            run.lose()
        except StoreUnavailable:
            if self._clock.now() >= run.claim.until:
                run.lose()
            return False
        return True

    # Working

    def _begin(self, run: Run) -> None:
        import asyncio

        self._runs.add(run)
        run.task = asyncio.create_task(self._work(run))

    async def _work(self, run: Run) -> None:
        outcome, began = "lost", self._clock.now()
        try:
            outcome = await self._outcome(run)
            if outcome == "done":
                self._times.add(self._clock.now() - began)
        except Exception:
            logging.getLogger("seawall").exception("queue %r: %r", self.queue.name, run.claim)
        finally:
            self._counts[outcome] += 1
            self._runs.discard(run)
            self._ring()

    # The end

    async def _wind_up(self, fetching: asyncio.Task[None], *aside: asyncio.Task[Any]) -> None:
        """Give what is at work its time; then return it to the queue; then end, whatever goes on.

        `aside` are tasks that go on until then.
        """
        import asyncio

        from seawall.runtime.abandon import end

        try:
            # It ends by itself: what is asked of a store is soon answered, or given up.
            await asyncio.wait([fetching], timeout=self._end_at - self._clock.now() + TELLING)
            while self._runs and (left := self._end_at - self._clock.now()) > INSTANT:
                await self._news_within(left)
            self._tell_until = self._end_at + TELLING
            for run in list(self._runs):
                run.give_back()
            while self._runs and (left := self._tell_until - self._clock.now()) > INSTANT:
                await self._news_within(left)
        finally:
            # Also if cancelled once more: nothing goes on here that nobody prolongs the lease of.
            runs = [run.task for run in self._runs if run.task is not None]
            await end([fetching, *aside, *runs], LEAVING)
