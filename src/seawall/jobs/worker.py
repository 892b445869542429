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
from itertools import islice
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal

from seawall import _checks as check
from seawall import registry
from seawall._failures import described, reason_of
from seawall.context import deadline
from seawall.errors import JobLost, Rejected, StoreUnavailable
from seawall.events.log import FailureLog
from seawall.jobs.encoding import MOST_TEXT
from seawall.jobs.queue import JobQueue
from seawall.jobs.records import Claim
from seawall.jobs.wakeups import READY
from seawall.models.backoff import Backoff, above_floor, as_backoff, full_jitter
from seawall.models.shedding.codel import REREAD, QueueShed, check_queue_shed
from seawall.resources.executors.executors import IoPool
from seawall.runtime.driver import sleep_async
from seawall.runtime.functions import kind_of
from seawall.runtime.recent import ResponseTimes
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

OUTAGE: Final = full_jitter(0.05, cap=2.0)
"""Backoff while the store does not answer."""
PAUSE: Final = 1.0
"""Seconds for which claiming pauses after a refusal without `retry_after`."""
SHORTEST_PAUSE: Final = 0.001
"""Minimum pause in seconds: a `retry_after` of 0 must not become a busy loop."""
LONGEST_PAUSE: Final = 60.0
"""Maximum pause in seconds, even if a guard asks for an hour."""
LOOK: Final = 0.2
"""Seconds between two checks of an abandoned thread, which does not signal its end."""


class Worker:
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
        self._runs: set[JobRun] = set()
        self._stopped = False
        self._end_at = inf
        self._resume_at = -inf
        self._refusals = 0
        """Number of consecutive refusals."""
        self._tell_until = inf
        """The instant after which nothing is reported any more: the worker has to end."""
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

    def _judged(self, claims: list[Claim], oldest: float) -> Iterator[JobRun]:
        """Mark the jobs that have waited too long, by the rule of `shed`.

        The rule looks at the longest waiting job of the queue, because jobs of higher priority
        overtake it and do not wait.
        """
        discipline, now = self._discipline, self._clock.now()
        if discipline is not None and not claims:
            discipline.emptied(now)
        for claim in claims:
            run = JobRun(claim, wanted=not self._stopped)
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

    async def _extend(self, run: JobRun) -> bool:
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

    def _begin(self, run: JobRun) -> None:
        import asyncio

        self._runs.add(run)
        run.task = asyncio.create_task(self._work(run))

    async def _work(self, run: JobRun) -> None:
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

    async def _outcome(self, run: JobRun) -> str:
        """Execute a job and report it to the queue; return the name of its outcome."""
        import asyncio

        if run.settling:
            return await self._give_back(run)
        if run.shed:
            run.settling = True
            reason = f"shed: it waited for {run.claim.waited:.3g} s in a queue that does not drain"
            return await self._tell(run, "shed", self.queue.anack, reason=reason, retry=False)
        try:
            with deadline(run.claim.time_left, clock=self._clock):
                result = await self._call(run)
        except asyncio.CancelledError as error:
            run.settling = True
            if run.wanted == "to return":
                return await self._give_back(run)
            if run.task is not None and run.task.cancelling() and not run.lost:
                raise  # cancelled from outside, as when the loop ends: no time is left
            return await self._failed(run, error)
        except Exception as error:  # noqa: BLE001 - an error of the job: reported to the queue
            run.settling = True
            return await self._failed(run, error)
        run.settling = True
        return await self._succeeded(run, result)

    async def _call(self, run: JobRun) -> Any:
        handler, pool = self._handler, self._pool

        def begin(claim: Claim) -> Any:
            run.begun = True
            self._refusals = 0
            try:
                return handler(claim)
            finally:
                run.returned = True

        async def work(claim: Claim) -> Any:
            return await (begin(claim) if pool is None else pool.arun(begin, claim))

        if self._guard is None:
            return await work(run.claim)
        return await self._guard.acall(work, run.claim)

    async def _give_back(self, run: JobRun) -> str:
        if self._pool is not None and run.begun:
            return "lost"  # its thread is still running: free only when the lease expires
        return await self._tell(run, "returned", self.queue.anack, counted=False)

    async def _succeeded(self, run: JobRun, result: Any) -> str:
        try:
            return await self._tell(run, "done", self.queue.aack, result)
        except Exception as error:  # noqa: BLE001 - an unstorable result fails the job
            how = {"reason": f"the result cannot be kept: {described(error, MOST_TEXT)}"}
            outcome = await self._tell(run, "failed", self.queue.anack, **how, retry=False)
            self._log_failure(run, error, 0.0)
            return outcome

    async def _failed(self, run: JobRun, error: BaseException) -> str:
        # A guard gave up on a thread that still runs: no other worker may start the job until it
        # ends.
        while self._pool is not None and run.begun and not run.returned:
            if run.wanted != "nothing":
                return "lost"
            await self._news_within(LOOK)
        if self._refused(run, error):
            pause = getattr(error, "retry_after", None)
            pause = PAUSE if pause is None else pause
            pause = min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            pause = min(above_floor(pause, self._rng.random), self.queue.keep)
            self._refusals += 1
            # the guard refuses all, not just one key of many
            if self._refusals >= self.concurrency:
                self._resume_at = max(self._resume_at, self._clock.now() + pause)
            how = {"delay": pause, "reason": f"refused: {reason_of(error)}", "counted": False}
            return await self._tell(run, "refused", self.queue.anack, **how)
        delay = self._pause_after(run.claim.attempt)
        outcome = await self._tell(run, "failed", self.queue.anack, delay=delay, reason=error)
        self._log_failure(run, error, delay)
        return outcome

    def _log_failure(self, run: JobRun, error: BaseException, delay: float) -> None:
        job, dead = run.claim.id, run.state == "dead"
        self._failures.failed(f"job {job}", job, run.claim.attempt, error, delay=delay, dead=dead)

    def _refused(self, run: JobRun, error: BaseException) -> bool:
        """Return whether the guard or the thread pool refused before the handler was started."""
        return isinstance(error, Rejected) and not run.begun

    def _pause_after(self, attempt: int) -> float:
        try:
            schedule = self._backoff.delays(self._rng.random)
            # In a schedule that grows without end, the hundredth pause is as good as the last.
            delay = next(islice(schedule, min(attempt, 100) - 1, None))
            return min(check.seconds("backoff", delay, zero=True), self.queue.keep)
        except Exception:  # a broken backoff must not lose the job
            logging.getLogger("seawall").exception("queue %r: backoff failed", self.queue.name)
            return min(PAUSE, self.queue.keep)

    async def _tell(
        self, run: JobRun, outcome: str, verb: Callable[..., Any], *args: Any, **how: Any
    ) -> str:
        """Report a job's outcome to the queue; retry until the lease expires.

        Return `outcome`, or "lost" if the queue does not accept the report.
        """
        delays = OUTAGE.delays(self._rng.random)
        tried = False
        while not run.lost:
            try:
                run.state = await verb(run.claim, *args, **how) or ""
            except JobLost as error:
                run.state = error.state
                # An earlier report may have succeeded although its answer was lost: the job is in
                # our state.
                ours = tried and outcome != "done" and error.state in ("waiting", "delayed", "dead")
                return outcome if ours else "lost"
            except StoreUnavailable:
                left = min(run.claim.until, self._tell_until) - self._clock.now()
                if left <= 0 or self.queue._closed:  # noqa: SLF001 - same package
                    break
                await sleep_async(min(next(delays), left))
                tried = True
            else:
                return outcome
        return "lost"


class JobRun:
    """A job that a worker is executing."""

    def __init__(self, claim: Claim, *, wanted: bool = True) -> None:
        """Start; a job that is not wanted is only given back."""
        self.claim = claim
        self.task: asyncio.Task[None] | None = None
        self.wanted: Literal["nothing", "to stop", "to return"] = (
            "nothing" if wanted else "to return"
        )
        self.shed = False
        """Whether the job waited too long and must not be started."""
        self.begun = False
        """Whether the handler was called, which makes this an attempt."""
        self.returned = False
        """Whether the handler has ended, by return or exception."""
        self.state = ""
        """The job's state after its outcome was reported to the queue."""
        self.settling = not wanted
        """Whether the work has ended, and only the report to the queue remains."""

    @property
    def lost(self) -> bool:
        """Whether the claim is no longer this worker's."""
        return self.wanted == "to stop"

    def lose(self) -> None:
        """Stop the job, because another worker owns it now."""
        already, self.wanted = self.wanted, "to stop"
        if already == "nothing":
            self._cancel()

    def give_back(self) -> None:
        """Stop the job and give it back."""
        if self.wanted == "nothing":
            self.wanted = "to return"
            self._cancel()

    def _cancel(self) -> None:
        # Do not cancel the report of finished work: it has its own time limit.
        if self.task is not None and not self.settling:
            self.task.cancel()
