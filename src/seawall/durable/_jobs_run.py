"""One running job: the handle of its function, how it is stopped, and how its end is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall.durable._jobs_records import (
    JobClaim,
    name_of,
    result_of,
    shown,
)
from seawall.durable._jobs_steps import Beat
from seawall.durable._trouble import Trouble
from seawall.durable.jobs import Jobs
from seawall.errors import JobCancelled, RecordGarbled, Rejected, matches
from seawall.events.log import FailureLog
from seawall.models.backoff import Backoff, above_floor, as_backoff, full_jitter
from seawall.resources.executors.executors import IoPool
from seawall.runtime.functions import kind_of
from seawall.runtime.runners import sleep_async

if TYPE_CHECKING:
    import asyncio

__all__ = ["JobCancelled", "JobFunction", "JobHandle"]

OUTAGE: Final = full_jitter(0.05, cap=2.0)
"""Backoff while the database does not answer."""
PAUSE: Final = 1.0
"""Pause in seconds if no thread is free for a job, or if the user's backoff fails."""
LONGEST_PAUSE: Final = 86_400.0
RUNS_AGAIN: Final = frozenset({"retry", "hedge"})
"""Policies that may have run the function although the guard refuses in the end."""

log: Final = logging.getLogger("seawall")


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

    def beat(self) -> Beat:
        """Return the heartbeat of this job."""
        self.said = self.handle._told
        return Beat(self.claim.id, self.claim.epoch, *self.said)

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


class JobDoing:
    """Executes claimed jobs by their functions."""

    def __init__(
        self,
        jobs: Jobs,
        functions: Mapping[str, JobFunction],
        *,
        concurrency: int,
        backoff: Backoff | float | Iterable[float] | Callable[[int], float] | None,
        give_up_on: tuple[type[Exception], ...],
        rng: Random | None,
    ) -> None:
        """Execute the jobs of each kind by its function."""
        if not isinstance(jobs, Jobs):
            raise TypeError(f"{type(self).__name__}({jobs!r}, ...): pass Jobs(database)")
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
        self._trouble = Trouble(f"jobs {jobs.name!r}", self._clock)
        self._failures = FailureLog("jobs", jobs.name, self._clock)
        words = ("succeeded", "retried", "failed", "cancelled", "returned", "lost")
        self._counts = dict.fromkeys(words, 0)
        registry.enter(self, "job_worker", jobs.name)

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
