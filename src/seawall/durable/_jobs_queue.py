"""Jobs of a database, done by the workers of a queue: `PriorityQueue` or `LocalQueue`.

Promises: the record in the database is the truth, and the queue carries ids only. A job that the
queue delivers twice, or after its end, is done once. An id that the queue never got (the process
died between commit and push) or lost is pushed again by `asweep`, which one calls now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

from seawall import _checks as check
from seawall.durable._jobs_records import Job, is_id
from seawall.durable._jobs_run import JobDoing, JobFunction, Running
from seawall.durable._jobs_worker import LOOK
from seawall.durable.jobs import Jobs
from seawall.errors import Rejected, SeawallError
from seawall.jobs import Claim, JobQueue
from seawall.models.backoff import Backoff
from seawall.models.durable_jobs import LOWEST
from seawall.runtime.runners import sleep_async

__all__ = ["JobNotReady", "JobTriedAgain", "QueuedJobs"]


class JobNotReady(Rejected):
    """The job is at work elsewhere, not due yet, or not committed yet: it is looked at later."""

    reason = "job_not_ready"


class JobTriedAgain(SeawallError):
    """An attempt failed, and the job is to be tried again: for the queue, which does that."""

    reason = "job_tried_again"


class QueuedJobs(JobDoing):
    """Carry jobs by `queue`; `Worker(queue, queued.handle)` does them."""

    def __init__(
        self,
        jobs: Jobs,
        queue: JobQueue,
        functions: Mapping[str, JobFunction],
        *,
        concurrency: int = 10,
        backoff: Backoff | float | Iterable[float] | Callable[[int], float] | None = None,
        give_up_on: tuple[type[Exception], ...] = (),
        rng: Random | None = None,
    ) -> None:
        """Do each kind by its function, as `JobWorker` does.

        `concurrency` is how many plain functions have threads at once. When a failed job is tried
        again is up to the queue's worker, unless `backoff` says more.
        """
        if not isinstance(queue, JobQueue):
            raise TypeError(f"QueuedJobs(jobs, {queue!r}, ...): pass a PriorityQueue or LocalQueue")
        super().__init__(
            jobs,
            functions,
            concurrency=concurrency,
            backoff=[0.0] if backoff is None else backoff,
            give_up_on=give_up_on,
            rng=rng,
        )
        self.queue = queue

    def __repr__(self) -> str:
        return f"<QueuedJobs of {self.jobs!r} by {self.queue!r}>"

    def push(self, job: Job) -> str:
        """Let the queue know of a job, after your commit; again does no harm."""
        return self.queue.push({"job": job.id}, priority=job.priority, dedupe=job.id)

    async def apush(self, job: Job) -> str:
        """Let the queue know of a job, as `push` does."""
        return await self.queue.apush({"job": job.id}, priority=job.priority, dedupe=job.id)

    async def asweep(self, limit: int = 500) -> int:
        """Push what could be done now, and may have been lost; return how many that were.

        Of those that the queue has already, nothing is added.
        """
        check.count("limit", limit, maximum=10_000)
        waiting = await self.jobs.awaiting(self.functions, limit)
        for id_, priority in waiting:
            known = priority if isinstance(priority, int) and 0 <= priority <= LOWEST else LOWEST
            await self.queue.apush({"job": id_}, priority=known, dedupe=id_)
        return len(waiting)

    async def handle(self, queued: Claim) -> str:
        """Do the job that a claim of the queue's names; return the word for how it went."""
        import asyncio

        said = queued.payload
        id_ = said.get("job") if isinstance(said, dict) else None
        if not is_id(id_) or not isinstance(id_, str):
            return "unknown"
        claim = await self.jobs.aclaim_one(id_, owner=self.owner)
        if claim is None:
            return await self._not_claimed(id_)
        if claim.kind not in self.functions:
            await self.jobs.agive_back(claim)
            raise JobNotReady(f"job {id_} is a {claim.kind!r}, which is done elsewhere")
        run = self._running(claim)
        # A task of its own: a job that was cancelled is cut off, and the queue's worker is not.
        run.task = asyncio.create_task(self._outcome(run))
        beating = asyncio.create_task(self._beat(run))
        try:
            outcome: str = await asyncio.shield(run.task)
        except asyncio.CancelledError:
            run.give_back()
            await asyncio.wait([run.task], timeout=LOOK * 2)
            raise
        finally:
            beating.cancel()
            await asyncio.wait([beating])
        self._counts[outcome] += 1
        error, run.error = run.error, None
        if outcome == "retried":
            raise JobTriedAgain(f"job {id_}: attempt {claim.attempt} failed") from error
        return outcome

    async def _not_claimed(self, id_: str) -> str:
        state = await self.jobs.astate(id_)
        if state in ("queued", "running", None):
            raise JobNotReady(f"job {id_} is {state or 'not there'}: it is looked at later")
        return state

    async def _beat(self, run: Running) -> None:
        while True:
            await sleep_async(min(LOOK, self.jobs.lease / 4))
            await self._beat_once([run])

    def snapshot(self) -> dict[str, int]:
        """Return how the jobs it had have ended."""
        return dict(self._counts)

    def close(self) -> None:
        """End the threads of plain functions."""
        if self._pool is not None:
            self._pool.close(0.0)
            self._pool = None
