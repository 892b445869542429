"""What every queue of jobs offers, wherever its jobs are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seawall.jobs._records import Claim, DeadLetter, JobStatus
from seawall.jobs._steps import QueueSteps
from seawall.jobs._work_list import WorkItem, WorkPage


class JobQueue(QueueSteps):
    """A queue of jobs with priorities, leases and dead letters."""

    # For those who have work to be done

    def push(
        self,
        payload: Any,
        *,
        priority: int | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
        dedupe: str | None = None,
    ) -> str:
        """Add a job and return its id.

        `priority` is 0 to 9; unless given, the criticality of the context (2 for CRITICAL). The job
        can be claimed after `delay` seconds, and is not started later than `ttl` seconds from now.
        While a job with the same `dedupe` has not ended, its id is returned and nothing is added.
        Raises `QueueFull` if there is no room.
        """
        job = self._new(payload, priority, delay, ttl, dedupe)
        return self._sync(self._pushing([job]))[0]

    async def apush(
        self,
        payload: Any,
        *,
        priority: int | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
        dedupe: str | None = None,
    ) -> str:
        """Add a job, as `push` does."""
        job = self._new(payload, priority, delay, ttl, dedupe)
        return (await self._async(self._pushing([job])))[0]

    def push_many(
        self,
        payloads: Iterable[Any],
        *,
        priority: int | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
    ) -> list[str]:
        """Add up to 500 jobs in one call, or none if there is no room for all; return their ids.

        Together they may have up to 4 MiB: what a store takes in one call.
        """
        return self._sync(self._pushing(self._batch(payloads, priority, delay, ttl)))

    async def apush_many(
        self,
        payloads: Iterable[Any],
        *,
        priority: int | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
    ) -> list[str]:
        """Add jobs, as `push_many` does."""
        return await self._async(self._pushing(self._batch(payloads, priority, delay, ttl)))

    def wait(self, id: str, timeout: float | None = None) -> Any:  # noqa: A002 - it is one
        """Wait until a job has ended, and return its result.

        Raises `JobFailed` if it ended without one, `UnknownJob` if there is no such job, and
        `TimedOut` after `timeout` seconds; the job itself goes on.
        """
        return self._sync(self._waiting(id, timeout))

    async def await_(self, id: str, timeout: float | None = None) -> Any:  # noqa: A002, ASYNC109
        """Wait until a job has ended, as `wait` does."""
        return await self._async(self._waiting(id, timeout))

    def status(self, id: str) -> JobStatus:  # noqa: A002
        """Return what is known of a job; `UnknownJob` if nothing is."""
        return self._sync(self._seeing(id))

    async def astatus(self, id: str) -> JobStatus:  # noqa: A002
        """Return what is known of a job, as `status` does."""
        return await self._async(self._seeing(id))

    def cancel(self, id: str) -> bool:  # noqa: A002
        """End a job now; False if it had ended already.

        Who works on it learns so at the next heartbeat, and cannot ack it any more.
        """
        return self._sync(self._changing("cancel", id))

    async def acancel(self, id: str) -> bool:  # noqa: A002
        """End a job now, as `cancel` does."""
        return await self._async(self._changing("cancel", id))

    # For those who do it

    def claim(self, count: int = 1, *, lease: float = 30.0, wait: float = 0.0) -> list[Claim]:
        """Take the next jobs, up to `count`; they are yours for `lease` seconds.

        If there is none, wait for one for up to `wait` seconds; [] if none came.
        """
        return self._sync(self._claiming(count, lease, wait))

    async def aclaim(
        self, count: int = 1, *, lease: float = 30.0, wait: float = 0.0
    ) -> list[Claim]:
        """Take the next jobs, as `claim` does. Cancelled in the middle, it has taken none."""
        return await self._async(self._claiming(count, lease, wait))

    def heartbeat(self, claim: Claim, *, lease: float | None = None) -> None:
        """Let a claim be good for another `lease` (as long as before), from now.

        As in `ack` and `nack`, `JobLost` says that it is not good any more: the lease was over, or
        the job was cancelled. Then stop working on it.
        """
        self._sync(self._extending(claim, lease))

    async def aheartbeat(self, claim: Claim, *, lease: float | None = None) -> None:
        """Prolong a claim, as `heartbeat` does."""
        await self._async(self._extending(claim, lease))

    def ack(self, claim: Claim, result: Any = None) -> None:
        """Say that the job is done, and what came out of it."""
        self._sync(self._acking(claim, result))

    async def aack(self, claim: Claim, result: Any = None) -> None:
        """Say that the job is done, as `ack` does."""
        await self._async(self._acking(claim, result))

    def nack(
        self,
        claim: Claim,
        *,
        delay: float = 0.0,
        reason: str | BaseException = "",
        counted: bool = True,
        retry: bool = True,
    ) -> str:
        """Give a job back: it can be claimed again after `delay` seconds, in its old place.

        After its last attempt, or with `retry=False`, it becomes a dead letter instead. With
        `counted=False` this was no attempt: it was never begun. Of an error passed as `reason`,
        type, message and traceback are kept, redacted. Returns the job's new state.
        """
        return self._sync(self._nacking(claim, delay, reason, counted=counted, retry=retry))

    async def anack(
        self,
        claim: Claim,
        *,
        delay: float = 0.0,
        reason: str | BaseException = "",
        counted: bool = True,
        retry: bool = True,
    ) -> str:
        """Give a job back, as `nack` does."""
        return await self._async(self._nacking(claim, delay, reason, counted=counted, retry=retry))

    # For those who look after it

    @property
    def waiting(self) -> int:
        """How many jobs wait; read without asking anybody, as rules of `Shed` do."""
        raise NotImplementedError

    def dead(self, limit: int = 100) -> list[DeadLetter]:
        """Return the jobs that were given up, the oldest first, at most `limit`.

        In a store they are fewer where they are large: a reply has about 1 MiB.
        """
        return self._sync(self._listing(limit))

    async def adead(self, limit: int = 100) -> list[DeadLetter]:
        """Return the jobs that were given up, as `dead` does."""
        return await self._async(self._listing(limit))

    def browse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return a page of the jobs that are dead, waiting, delayed or claimed, up to 100.

        The next to be done are first; of the dead, the latest. `search` is looked for in id,
        reason and payload, whatever the case of ASCII letters. `after` is `next` of the page
        before. One call looks at a bounded number of jobs: a page may have fewer than `limit`, and
        still a `next`. Without `payloads`, these are neither read nor searched.
        """
        asked = self._asked(state, search, after, limit, payloads=payloads)
        return self._sync(self._browsing(asked))

    async def abrowse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return a page of jobs, as `browse` does."""
        asked = self._asked(state, search, after, limit, payloads=payloads)
        return await self._async(self._browsing(asked))

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a job with up to 64 KiB of its payload; None if there is none."""
        return self._sync(self._inspecting(id, payload=payload))

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a job, as `inspect` does."""
        return await self._async(self._inspecting(id, payload=payload))

    def retry(self, id: str) -> bool:  # noqa: A002
        """Run a dead job again, at the end of its line.

        False if it is not dead, or if another job has its dedupe id by now.
        """
        return self._sync(self._changing("requeue", id))

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Retry a dead job, as `retry` does."""
        return await self._async(self._changing("requeue", id))

    def drop(self, id: str) -> bool:  # noqa: A002
        """Forget a dead job, or cancel one that has not ended; False if it has ended otherwise."""
        return self._sync(self._dropping(id))

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Forget or cancel a job, as `drop` does."""
        return await self._async(self._dropping(id))

    def snapshot(self) -> dict[str, Any]:
        """Return how many jobs wait, are delayed, claimed and dead; and what there was so far."""
        return self._sync(self._counting())

    async def asnapshot(self) -> dict[str, Any]:
        """Return how many jobs there are, as `snapshot` does."""
        return await self._async(self._counting())
