"""Worker that executes the jobs of a queue concurrently, each under a guard, with heartbeats.

Promises:

- At most `concurrency` jobs run at once.
- A job whose lease is lost is stopped.
- A failed job is given back and retried after a pause.
- A refusal by the guard costs the job no attempt, and pauses claiming.
- Stopping finishes the jobs it can, returns the rest, and keeps its time limit.
- While the store is unreachable the worker keeps trying, and no job is lost.
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
from seawall.events.log import FailureLog
from seawall.jobs._bells import READY
from seawall.jobs._doing import OUTAGE, Doing
from seawall.jobs._queue import JobQueue
from seawall.jobs._records import Claim
from seawall.jobs._runs import Run
from seawall.models.backoff import Backoff, as_backoff, full_jitter
from seawall.models.shedding.codel import REREAD, QueueShed, check_queue_shed
from seawall.resources.executors.executors import IoPool
from seawall.runtime.functions import kind_of
from seawall.runtime.recent import ResponseTimes
from seawall.runtime.runners import sleep_async
from seawall.runtime.stop_signals import run_until_signal

if TYPE_CHECKING:
    import asyncio

    from seawall.guard import Guard

TIMES_WINDOW: Final = 60.0
"""Minimum window in seconds of the job durations from which the queue is measured."""
CLAIM_WAIT: Final = 5.0
"""Seconds that one claim waits for a job before it is repeated."""
TELLING: Final = 2.0
"""Seconds after the grace period for reporting outcomes; then the worker ends in any case."""
LEAVING: Final = 0.1
"""Seconds for cancelled tasks to end; tasks that still run then are abandoned."""
INSTANT: Final = 1e-6
"""Waits shorter than this are skipped."""


class Worker(Doing):
    """Executes the jobs of `queue` by `handler(claim)`, async, or plain in threads."""

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
        """Execute up to `concurrency` jobs at once, each under `guard`.

        The handler's return value is the job's result. If the handler raises, the exception is
        logged with its traceback, and the job is retried after a pause of `backoff` (default: full
        jitter from 1 s up to 5 minutes). A job is claimed for `lease` seconds, and the claim is
        renewed while it runs.

        `shed` decides when the queue is overloaded, by the age of its longest waiting job:
        `codel()` or `adaptive_lifo()`. Jobs that have then waited too long are not started: they
        become dead letters. The order of the queue does not change, and a job that was attempted
        before is not shed.
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
        # Do not apply the guard twice to a handler that it has decorated.
        self._handler = handler if guard is None else guard._plan_for(handler)[1]  # noqa: SLF001
        self._guard = guard
        self._backoff = full_jitter(1.0, cap=300.0) if backoff is None else as_backoff(backoff)
        self._rng = Random() if rng is None else rng  # noqa: S311 - jitter is not a secret
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
        """Execute jobs until `stop` is called. A stopped worker cannot be restarted.

        If cancelled, it returns its running jobs to the queue and ends. If the store is closed, it
        ends with `StoreUnavailable`.
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
            if not self._stopped:  # cancelled or failed: no grace period
                self.stop(0.0)
            try:
                await self._wind_up(fetching, beating, halting)
            finally:
                self._loop = self._halt = self._news = None
                if self._pool is not None:
                    self._pool.close(0.0)
        for task in (fetching, beating):
            if task.done() and not task.cancelled():
                task.result()  # raise if it failed rather than stopped

    def run_sync(self, drain: float = 10.0) -> None:
        """Execute jobs in this thread until `stop` is called; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop the worker too: the first signal by
        `stop(drain)`, a second one by `stop(0)`. A signal for which the program has its own handler
        is left alone.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Claim no more jobs; give running ones `grace` seconds, then return the rest.

        Callable from any thread or signal handler. `run` returns when all is done, at most two
        seconds after the grace period. A returned job can be claimed at once, and has lost no
        attempt. A thread cannot be stopped: a job that a plain handler is still executing becomes
        free when its lease expires. If `stop` is called again, the earlier end counts.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._end_at = min(self._end_at, self._clock.now() + seconds)
        self._stopped = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._ring)
            except RuntimeError:
                pass  # the loop is closed, so the worker has stopped

    def snapshot(self) -> dict[str, Any]:
        """Return the worker's state and the counts of its outcomes."""
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
        """Claim jobs as slots become free, until stopped.

        A claim that is under way is not cancelled: the jobs it brings are given back.
        """
        delays = OUTAGE.delays(self._rng.random)
        while free := await self._room():
            try:
                oldest = 0.0 if self._discipline is None else await self._oldest()
                claims = await self._claim(free)
            except StoreUnavailable:
                if self.queue._closed:  # noqa: SLF001 - same package
                    raise
                await self._nap(next(delays))
                continue
            delays = OUTAGE.delays(self._rng.random)
            for claim in self._judged(claims, oldest):
                self._begin(claim)

    async def _oldest(self) -> float:
        """Return how long the longest waiting job has waited; read at most every 0.1 s."""
        now = self._clock.now()
        if now >= self._look_at:
            self._look_at = now + REREAD
            self._oldest_age = (await self.queue.asnapshot())["oldest"]
        return self._oldest_age

    def _judged(self, claims: list[Claim], oldest: float) -> Iterator[Run]:
        """Mark the jobs that have waited too long, by the rule of `shed`.

        The rule looks at the longest waiting job of the queue, because jobs of higher priority
        overtake it and do not wait.
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
        return await queue._async(steps)  # noqa: SLF001 - same package

    async def _room(self) -> int:
        """Wait until jobs may be claimed; return how many, or 0 once stopped."""
        while not self._stopped:
            pause = self._resume_at - self._clock.now()
            if pause > INSTANT:
                await self._nap(pause)
                continue
            abandoned = 0 if self._pool is None else self._pool.pool.abandoned
            free = self.concurrency - len(self._runs) - abandoned
            if free > 0:
                return free
            await self._news_within(1.0)  # a thread that ends does not signal it
        return 0

    async def _nap(self, seconds: float) -> None:
        """Sleep for `seconds`, or until stopped."""
        until = self._clock.now() + seconds
        while not self._stopped and (left := until - self._clock.now()) > INSTANT:
            await self._news_within(left)

    async def _news_within(self, seconds: float) -> None:
        """Wait until a job ends or the worker is stopped, but at most `seconds`."""
        import asyncio

        assert self._news is not None  # noqa: S101 - set before any task starts
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    def _ring(self) -> None:
        """Wake the tasks that wait for news. Call it in the event loop."""
        if self._news is not None and self._halt is not None:
            self._news.set()
            if self._stopped and not self._halt.is_set():
                self._halt.set()
                self.queue._bells.ring(READY)  # noqa: SLF001 - wakes the waiting claim

    async def _beat(self) -> None:
        """Renew the claims of running jobs forever; more often while the store is unreachable."""
        import asyncio

        nap = self.lease / 3
        while True:
            now = self._clock.now()
            ends = [run.claim.until - now for run in self._runs if not run.lost]
            await sleep_async(max(0.0, min([nap, *ends])))
            answered = await asyncio.gather(*(self._extend(run) for run in list(self._runs)))
            nap = self.lease / (3 if all(answered) else 12)

    async def _extend(self, run: Run) -> bool:
        """Renew one claim; return False if the store did not answer."""
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

    # Executing

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

    # Stopping

    async def _wind_up(self, fetching: asyncio.Task[None], *aside: asyncio.Task[Any]) -> None:
        """Wait out the grace period, then return running jobs to the queue, then end in any case.

        `aside` are tasks that keep running until then.
        """
        import asyncio

        from seawall.runtime.abandon import end

        try:
            # `fetching` ends on its own: a request to the store is soon answered or times out.
            await asyncio.wait([fetching], timeout=self._end_at - self._clock.now() + TELLING)
            while self._runs and (left := self._end_at - self._clock.now()) > INSTANT:
                await self._news_within(left)
            self._tell_until = self._end_at + TELLING
            for run in list(self._runs):
                run.give_back()
            while self._runs and (left := self._tell_until - self._clock.now()) > INSTANT:
                await self._news_within(left)
        finally:
            # Even if cancelled again: no job may run on without a renewed lease.
            runs = [run.task for run in self._runs if run.task is not None]
            await end([fetching, *aside, *runs], LEAVING)
