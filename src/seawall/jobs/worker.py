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

from collections.abc import Callable
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Final

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
from seawall.jobs.worker_loop import PAUSE, Backoffs, WorkerLoop, WorkRun
from seawall.models.backoff import above_floor
from seawall.models.shedding.codel import REREAD, QueueShed, check_queue_shed
from seawall.resources.executors.executors import IoPool
from seawall.runtime.functions import kind_of
from seawall.runtime.stats import ResponseTimes

if TYPE_CHECKING:
    from seawall.guard import Guard

TIMES_WINDOW: Final = 60.0
"""Minimum window in seconds of the job durations from which the queue is measured."""
CLAIM_WAIT: Final = 5.0
"""Seconds that one claim waits for a job before it is repeated."""
SHORTEST_PAUSE: Final = 0.001
"""Minimum pause in seconds: a `retry_after` of 0 must not become a busy loop."""
LONGEST_PAUSE: Final = 60.0
"""Maximum pause in seconds, even if a guard asks for an hour."""
THREAD_LOOK: Final = 0.2
"""Seconds between two checks of an abandoned thread, which does not signal its end."""


class JobRun(WorkRun):
    """A job of a queue that a worker is executing."""

    shed = False
    """Whether the job waited too long and must not be started."""
    returned = False
    """Whether the handler has ended, by return or exception."""
    began = 0.0
    """When its execution began."""
    state = ""
    """The job's state after its outcome was reported to the queue."""


class Worker(WorkerLoop[JobRun]):
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
        backoff: Backoffs = None,
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
        super().__init__(queue.clock, concurrency=concurrency, backoff=backoff, rng=rng)
        self.queue = queue
        self.shed = check_queue_shed(shed)
        self._times = ResponseTimes(TIMES_WINDOW)
        self._discipline = None if shed is None else shed.start(self._times.quantile(0.5))
        self._read_age_at = -inf
        self._oldest_age = 0.0
        self.lease = check.seconds("lease", lease)
        if self.lease > queue.keep:
            raise ValueError(f"lease={lease!r} is above the queue's keep={queue.keep!r}")
        # Do not apply the guard twice to a handler that it has decorated.
        self._handler = handler if guard is None else guard._plan_for(handler)[1]  # noqa: SLF001
        self._guard = guard
        self._failures = FailureLog("queue", queue.name, self._clock)
        self._threads: IoPool | None = None
        if kind_of(handler) == "sync":
            name = f"{queue.name}-worker"
            self._threads = IoPool(name, workers=self.concurrency, clock=self._clock)
            self._pool = self._threads
        elif kind_of(handler) != "async":
            raise TypeError(f"handler={handler!r}: pass a function that returns its result whole")
        self._refusals = 0
        """Number of consecutive refusals."""
        self._counts = dict.fromkeys(("done", "failed", "refused", "lost", "returned", "shed"), 0)
        registry.enter(self, "worker", queue.name)

    def __repr__(self) -> str:
        return f"<Worker of {self.queue!r}: {len(self._runs)} of {self.concurrency} at work>"

    def snapshot(self) -> dict[str, Any]:
        """Return the worker's state and the counts of its outcomes."""
        return {
            "queue": self.queue.name,
            "running": self._loop is not None,
            "concurrency": self.concurrency,
            "at_work": len(self._runs),
            "paused": self._clock.now() < self._resume_at,
            "abandoned": self._lost_threads(),
            **self._counts,
        }

    # Claiming

    async def _claim(self, free: int) -> list[JobRun]:
        oldest = 0.0 if self._discipline is None else await self._oldest()
        queue = self.queue
        steps = queue._claim_until(lambda: self._stopped, free, self.lease, CLAIM_WAIT)  # noqa: SLF001
        return self._mark_shed(await queue._async(steps), oldest)  # noqa: SLF001 - same package

    def _interrupt_claim(self) -> None:
        self.queue._wakeups.ring(READY)  # noqa: SLF001 - same package

    def _unreachable(self, error: Exception) -> None:
        if not isinstance(error, StoreUnavailable) or self.queue._closed:  # noqa: SLF001
            raise error

    def _lost_threads(self) -> int:
        return 0 if self._threads is None else self._threads.pool.abandoned

    async def _oldest(self) -> float:
        """Return how long the longest waiting job has waited; read at most every 0.1 s."""
        now = self._clock.now()
        if now >= self._read_age_at:
            self._read_age_at = now + REREAD
            self._oldest_age = (await self.queue.asnapshot())["oldest"]
        return self._oldest_age

    def _mark_shed(self, claims: list[Claim], oldest: float) -> list[JobRun]:
        """Mark the jobs that have waited too long, by the rule of `shed`.

        The rule also looks at the queue's longest waiting job: urgent ones overtake it.
        """
        runs = [JobRun(claim, in_thread=self._threads is not None) for claim in claims]
        discipline, now = self._discipline, self._clock.now()
        if discipline is None:
            return runs
        if not runs:
            discipline.emptied(now)
        for run in runs:
            claim = run.claim
            run.shed = claim.attempt == 1 and discipline.sheds(claim.waited, now, oldest)
            if not run.shed:
                discipline.serves(now)
        return runs

    # Renewing

    def _beat_after(self, *, answered: bool) -> float:
        return self.lease / (3 if answered else 12)

    async def _renew(self, runs: list[JobRun]) -> bool:
        import asyncio

        return all(await asyncio.gather(*(self._extend(run) for run in runs)))

    async def _extend(self, run: JobRun) -> bool:
        """Renew one claim; return False if the store did not answer."""
        try:
            await self.queue.aheartbeat(run.claim)
        except JobLost:
            run.lose()
        except StoreUnavailable:
            return False
        return True

    # Executing

    async def _reject(self, run: JobRun) -> str | None:
        run.began = self._clock.now()
        if not run.shed:
            return None
        run.settling = True
        reason = f"shed: it waited for {run.claim.waited:.3g} s in a queue that does not drain"
        return await self._report(run, "shed", self.queue.anack, reason=reason, retry=False)

    async def _call(self, run: JobRun) -> Any:
        handler, pool = self._handler, self._threads

        def begin(claim: Claim) -> Any:
            run.begun = True
            self._refusals = 0
            try:
                return handler(claim)
            finally:
                run.returned = True

        async def work(claim: Claim) -> Any:
            return await (begin(claim) if pool is None else pool.arun(begin, claim))

        with deadline(run.claim.time_left, clock=self._clock):
            if self._guard is None:
                return await work(run.claim)
            return await self._guard.acall(work, run.claim)

    async def _return_claim(self, run: JobRun, delay: float) -> str:
        anack = self.queue.anack
        return await self._report(run, "returned", anack, delay=delay, counted=False)

    async def _succeeded(self, run: JobRun, result: Any) -> str:
        try:
            outcome = await self._report(run, "done", self.queue.aack, result)
        except Exception as error:  # noqa: BLE001 - an unstorable result fails the job
            how = {"reason": f"the result cannot be kept: {described(error, MOST_TEXT)}"}
            outcome = await self._report(run, "failed", self.queue.anack, **how, retry=False)
            self._log_failure(run, error, 0.0)
        if outcome == "done":
            self._times.add(self._clock.now() - run.began)
        return outcome

    async def _failed(self, run: JobRun, error: BaseException) -> str:
        # A guard gave up on a thread that still runs: no other worker may start the job until it
        # ends.
        while run.in_thread and run.begun and not run.returned:
            if run.stop_reason is not None:
                return "lost"
            await self._wait_for_news(THREAD_LOOK)
        if self._refused(run, error):
            asked = getattr(error, "retry_after", None)
            pause = min(max(PAUSE if asked is None else asked, SHORTEST_PAUSE), LONGEST_PAUSE)
            pause = min(above_floor(pause, self._rng.random), self.queue.keep)
            self._refusals += 1
            # the guard refuses all, not just one key of many
            if self._refusals >= self.concurrency:
                self._resume_at = max(self._resume_at, self._clock.now() + pause)
            how = {"delay": pause, "reason": f"refused: {reason_of(error)}", "counted": False}
            return await self._report(run, "refused", self.queue.anack, **how)
        delay = self._pause_after(run.claim.attempt, longest=self.queue.keep)
        outcome = await self._report(run, "failed", self.queue.anack, delay=delay, reason=error)
        self._log_failure(run, error, delay)
        return outcome

    def _refused(self, run: JobRun, error: BaseException) -> bool:
        """Return whether the guard or the thread pool refused before the handler was started."""
        return isinstance(error, Rejected) and not run.begun

    def _log_failure(self, run: JobRun, error: BaseException, delay: float) -> None:
        job, dead = run.claim.id, run.state == "dead"
        self._failures.failed(f"job {job}", job, run.claim.attempt, error, delay=delay, dead=dead)

    async def _report(
        self, run: JobRun, outcome: str, verb: Callable[..., Any], *args: Any, **how: Any
    ) -> str:
        """Report an outcome until the lease expires; return it, or "lost" if it is refused."""

        async def report(unsure: bool) -> str:  # noqa: FBT001 - as it is called
            try:
                run.state = await verb(run.claim, *args, **how) or ""
            except JobLost as error:
                run.state = error.state
                # An earlier report may have succeeded although its answer was lost: the job is in
                # our state.
                stored = unsure and error.state in ("waiting", "delayed", "dead")
                return outcome if stored and outcome != "done" else "lost"
            except StoreUnavailable:
                if self.queue._closed:  # noqa: SLF001 - same package
                    return "lost"
                raise
            return outcome

        return await self._until_answered(run, report, StoreUnavailable) or "lost"
