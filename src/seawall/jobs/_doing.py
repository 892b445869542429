"""How a worker executes one job and reports its outcome to the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall._failures import described, reason_of
from seawall.clock import Clock
from seawall.context import deadline
from seawall.errors import JobLost, Rejected, StoreUnavailable
from seawall.events.log import FailureLog
from seawall.jobs._arguments import MOST_TEXT
from seawall.jobs._queue import JobQueue
from seawall.jobs._records import Claim
from seawall.jobs._runs import Run
from seawall.models.backoff import Backoff, above_floor, full_jitter
from seawall.resources.executors.executors import IoPool
from seawall.runtime.runners import sleep_async

if TYPE_CHECKING:
    from seawall.guard import Guard

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


class Doing:
    """The part of a worker that executes one job."""

    queue: JobQueue
    _handler: Callable[[Claim], Any]
    _guard: Guard | None
    _backoff: Backoff
    _rng: Random
    _clock: Clock
    _pool: IoPool | None
    _resume_at: float
    _refusals: int = 0
    """Number of consecutive refusals."""
    concurrency: int
    _failures: FailureLog
    _tell_until: float = inf
    """The instant after which nothing is reported any more, because the worker has to end."""

    async def _news_within(self, seconds: float) -> None:
        raise NotImplementedError

    async def _outcome(self, run: Run) -> str:
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

    async def _call(self, run: Run) -> Any:
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

    async def _give_back(self, run: Run) -> str:
        if self._pool is not None and run.begun:
            return "lost"  # its thread is still running: free only when the lease expires
        return await self._tell(run, "returned", self.queue.anack, counted=False)

    async def _succeeded(self, run: Run, result: Any) -> str:
        try:
            return await self._tell(run, "done", self.queue.aack, result)
        except Exception as error:  # noqa: BLE001 - an unstorable result fails the job
            how = {"reason": f"the result cannot be kept: {described(error, MOST_TEXT)}"}
            outcome = await self._tell(run, "failed", self.queue.anack, **how, retry=False)
            self._log_failure(run, error, 0.0)
            return outcome

    async def _failed(self, run: Run, error: BaseException) -> str:
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

    def _log_failure(self, run: Run, error: BaseException, delay: float) -> None:
        job, dead = run.claim.id, run.state == "dead"
        self._failures.failed(f"job {job}", job, run.claim.attempt, error, delay=delay, dead=dead)

    def _refused(self, run: Run, error: BaseException) -> bool:
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
        self, run: Run, outcome: str, verb: Callable[..., Any], *args: Any, **how: Any
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
