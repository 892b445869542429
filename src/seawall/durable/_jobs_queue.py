"""Jobs of a database, done by the workers of a queue: `PriorityQueue` or `LocalQueue`.

Promises: the record in the database is the truth, and the queue carries ids only. A job that the
queue delivers twice, or after its end, is done once. An id that comes too early (the job waits for
its next attempt, or is at work elsewhere) is brought again when the job can be taken: that costs
the queue no attempt. An id that the queue never got (the process died between commit and push) or
lost is pushed again by `asweep`, which one calls now and then.
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
        """Do each kind by its function, as `JobWorker` does; take the same options.

        How many are at work at once is up to the queue's worker; `concurrency` is how many plain
        functions have threads.
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
        """Let the queue know of a job, after your commit; again does no harm."""
        _check_job(job)
        delay = self._delay(job.due_at - job.created_at - job.age)
        return self.queue.push({"job": job.id}, priority=job.priority, delay=delay, dedupe=job.id)

    async def apush(self, job: Job) -> str:
        """Let the queue know of a job, as `push` does."""
        _check_job(job)
        delay = self._delay(job.due_at - job.created_at - job.age)
        return await self.queue.apush(
            {"job": job.id}, priority=job.priority, delay=delay, dedupe=job.id
        )

    def sweep(self, limit: int = 500) -> int:
        """Push what could be done now, and may have been lost; return how many that were.

        Of those that the queue has already, nothing is added. A queue that is full gets the rest
        by a later sweep.
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
        """Push what may have been lost, as `sweep` does."""
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
        """Do the job that a claim of the queue's names; return the word for how it went.

        Raises `JobNotReady` if there is no such job, or not yet: then the queue tries again.
        Cancelled, it gives back what it has begun.
        """
        import asyncio

        from seawall.runtime.abandon import abandon

        said = queued.payload
        id_ = said.get("job") if isinstance(said, dict) else None
        if not is_id(id_) or not isinstance(id_, str):
            return "unknown"
        # A task of its own: a claim is not cut off in the middle, it would be nobody's for a lease;
        # and a job that was cancelled is cut off, while the queue's worker is not.
        cut = Cut()
        doing = asyncio.create_task(self._do(queued, id_, cut))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            cut.off()
            try:
                await asyncio.wait([doing], timeout=LOOK * 2)
            finally:
                abandon(doing)  # nobody is there to be told
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
        """Have the id brought again when the job can be taken; of one that ended, tell how."""
        seen = await self.jobs._astanding(id_)
        if seen is None:
            raise JobNotReady(f"job {id_} is not there, or not yet")
        if seen.state not in ("queued", "running"):
            return seen.state
        # The next of its kind: as long as this one is not acknowledged, its own name is taken.
        name = f"{id_}:{seen.epoch}:{seen.due_at}"
        again = await self.queue.apush(
            queued.payload, priority=queued.priority, delay=self._delay(seen.due_in), dedupe=name
        )
        if again == queued.id:  # the clocks of queue and database differ: let it wait a little
            raise JobNotReady(f"job {id_} is {seen.state}, and due at once")
        return "later"

    def _delay(self, seconds: float) -> float:
        return min(max(seconds, 0.0), self.queue.keep)

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


def _known(priority: object) -> int:
    return priority if isinstance(priority, int) and 0 <= priority <= LOWEST else LOWEST


def _check_job(job: object) -> None:
    if not isinstance(job, Job):
        raise TypeError(f"{job!r}: pass the job, as `submit` has returned it")


class Cut:
    """What stops a job whose claim on the queue is not good any more, also while it is claimed."""

    def __init__(self) -> None:
        """Have not stopped anything."""
        self.is_off = False
        self.run: Running | None = None

    def off(self) -> None:
        """Give the job back."""
        self.is_off = True
        if self.run is not None:
            self.run.give_back()
