"""Jobs of a database, executed by the workers of a `PriorityQueue` or `LocalQueue`.

Promises:

- The record in the database is the truth; the queue carries only ids.
- A job that the queue delivers twice, or after its end, is executed once.
- An id that arrives too early (the job waits for its next attempt, or runs elsewhere) is pushed
  again for when the job can be claimed. That costs the queue no attempt.
- An id that the queue never received (the process died between commit and push) or lost is pushed
  again by `asweep`, which should be called periodically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

from seawall.durable._jobs_records import Job, is_id
from seawall.durable._jobs_run import JobDoing, JobFunction, Running
from seawall.durable._jobs_worker import LOOK
from seawall.durable.jobs import Jobs
from seawall.errors import JobNotReady, QueueFull
from seawall.jobs import Claim, JobQueue
from seawall.models.backoff import Backoff
from seawall.models.durable_jobs import LOWEST
from seawall.runtime.runners import sleep_async

__all__ = ["QueuedJobs"]


class QueuedJobs(JobDoing):
    """Transports jobs by `queue`; `Worker(queue, queued.handle)` executes them."""

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
        """Execute each kind of job by its function, as `JobWorker` does; take the same options.

        The queue's worker decides how many jobs run at once; `concurrency` is the number of threads
        for plain functions.
        """
        if not isinstance(queue, JobQueue):
            raise TypeError(f"QueuedJobs(jobs, {queue!r}, ...): pass a PriorityQueue or LocalQueue")
        super().__init__(
            jobs,
            functions,
            concurrency=concurrency,
            backoff=backoff,
            give_up_on=give_up_on,
            rng=rng,
        )
        self.queue = queue

    def __repr__(self) -> str:
        return f"<QueuedJobs of {self.jobs!r} by {self.queue!r}>"

    def push(self, job: Job) -> str:
        """Push a job's id to the queue, after your commit. Repeating it does no harm."""
        _check_job(job)
        delay = self._delay(job.due_at - job.created_at - job.age)
        return self.queue.push({"job": job.id}, priority=job.priority, delay=delay, dedupe=job.id)

    async def apush(self, job: Job) -> str:
        """Async twin of `push`."""
        _check_job(job)
        delay = self._delay(job.due_at - job.created_at - job.age)
        return await self.queue.apush(
            {"job": job.id}, priority=job.priority, delay=delay, dedupe=job.id
        )

    def sweep(self, limit: int = 500) -> int:
        """Push jobs that are claimable now and may have been lost; return how many were pushed.

        Jobs that the queue already has are not added again. If the queue is full, a later sweep
        pushes the rest.
        """
        pushed = 0
        for id_, priority in self.jobs.database.run(self.jobs._to_list(self.functions, limit)):
            try:
                self.queue.push({"job": id_}, priority=_known(priority), dedupe=id_)
            except QueueFull:
                break
            pushed += 1
        return pushed

    async def asweep(self, limit: int = 500) -> int:
        """Async twin of `sweep`."""
        pushed = 0
        found = await self.jobs.database.arun(self.jobs._to_list(self.functions, limit))
        for id_, priority in found:
            try:
                await self.queue.apush({"job": id_}, priority=_known(priority), dedupe=id_)
            except QueueFull:
                break
            pushed += 1
        return pushed

    async def handle(self, queued: Claim) -> str:
        """Execute the job named by a claim of the queue; return the name of its outcome.

        Raises `JobNotReady` if the job does not exist (yet): the queue then tries again. If
        cancelled, it gives the job back.
        """
        import asyncio

        from seawall.runtime.abandon import abandon

        said = queued.payload
        id_ = said.get("job") if isinstance(said, dict) else None
        if not is_id(id_) or not isinstance(id_, str):
            return "unknown"
        # Run in a separate task, for two reasons: a claim must not be cut off in the middle,
        # because its job would be blocked for a whole lease; and cancelling a job must not cancel
        # the queue's worker.
        cut = Cut()
        doing = asyncio.create_task(self._do(queued, id_, cut))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            cut.off()
            try:
                await asyncio.wait([doing], timeout=LOOK * 2)
            finally:
                abandon(doing)  # its result has no receiver
            raise

    async def _do(self, queued: Claim, id_: str, cut: Cut) -> str:
        import asyncio

        from seawall.runtime.abandon import end

        claim = await self.jobs._aclaim_one(id_, owner=self.owner)
        if claim is None:
            return await self._come_again(queued, id_)
        if claim.kind not in self.functions:
            await self.jobs.agive_back(claim)
            raise JobNotReady(f"job {id_} is a {claim.kind!r}, which is done elsewhere")
        run = self._running(claim)
        if cut.is_off:
            run.wanted = "to return"
        run.task, cut.run = asyncio.current_task(), run
        beating = asyncio.create_task(self._beat(run))
        try:
            outcome = await self._outcome(run)
        finally:
            await end([beating])
        self._counts[outcome] += 1
        run.error = None
        if outcome in ("retried", "returned", "lost"):
            return await self._come_again(queued, id_)
        return outcome

    async def _come_again(self, queued: Claim, id_: str) -> str:
        """Push the id again for when the job can be claimed; return the state of one that ended."""
        seen = await self.jobs._astanding(id_)
        if seen is None:
            raise JobNotReady(f"job {id_} is not there, or not yet")
        if seen.state not in ("queued", "running"):
            return seen.state
        # A new dedupe id: the id's own one is taken until this delivery is acknowledged.
        name = f"{id_}:{seen.epoch}:{seen.due_at}"
        again = await self.queue.apush(
            queued.payload, priority=queued.priority, delay=self._delay(seen.due_in), dedupe=name
        )
        if again == queued.id:  # the clocks of queue and database differ: wait a little
            raise JobNotReady(f"job {id_} is {seen.state}, and due at once")
        return "later"

    def _delay(self, seconds: float) -> float:
        return min(max(seconds, 0.0), self.queue.keep)

    async def _beat(self, run: Running) -> None:
        while True:
            await sleep_async(min(LOOK, self.jobs.lease / 4))
            await self._beat_once([run])

    def snapshot(self) -> dict[str, int]:
        """Return the counts of outcomes."""
        return dict(self._counts)

    def close(self) -> None:
        """Stop the threads of plain functions."""
        if self._pool is not None:
            self._pool.close(0.0)
            self._pool = None


def _known(priority: object) -> int:
    return priority if isinstance(priority, int) and 0 <= priority <= LOWEST else LOWEST


def _check_job(job: object) -> None:
    if not isinstance(job, Job):
        raise TypeError(f"{job!r}: pass the job, as `submit` has returned it")


class Cut:
    """Stops a job whose claim on the queue was lost, even while the job is being claimed."""

    def __init__(self) -> None:
        """Start without a job."""
        self.is_off = False
        self.run: Running | None = None

    def off(self) -> None:
        """Give the job back."""
        self.is_off = True
        if self.run is not None:
            self.run.give_back()
