"""The public interface of every job queue, wherever its jobs are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seawall.jobs._records import Claim, DeadLetter, JobStatus
from seawall.jobs._steps import QueueSteps
from seawall.jobs._work_list import WorkItem, WorkPage


class JobQueue(QueueSteps):
    """A queue of jobs with priorities, leases and dead letters."""

    # For producers

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

        `priority` is 0 to 9; the default is the criticality of the context (2 for CRITICAL). The
        job can be claimed after `delay` seconds, and is not started later than `ttl` seconds from
        now. While a job with the same `dedupe` has not ended, its id is returned and nothing is
        added. Raises `QueueFull` if there is no room.
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
        """Async twin of `push`."""
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

        Together they may have up to 4 MiB, the most that a store accepts in one call.
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
        """Async twin of `push_many`."""
        return await self._async(self._pushing(self._batch(payloads, priority, delay, ttl)))

    def wait(self, id: str, timeout: float | None = None) -> Any:  # noqa: A002 - it is an id
        """Wait until a job has ended, and return its result.

        Raises `JobFailed` if it ended without a result, `UnknownJob` if there is no such job, and
        `TimedOut` after `timeout` seconds; the job itself continues.
        """
        return self._sync(self._waiting(id, timeout))

    async def await_(self, id: str, timeout: float | None = None) -> Any:  # noqa: A002, ASYNC109
        """Async twin of `wait`."""
        return await self._async(self._waiting(id, timeout))

    def status(self, id: str) -> JobStatus:  # noqa: A002
        """Return the status of a job; raise `UnknownJob` if it is not known."""
        return self._sync(self._seeing(id))

    async def astatus(self, id: str) -> JobStatus:  # noqa: A002
        """Async twin of `status`."""
        return await self._async(self._seeing(id))

    def cancel(self, id: str) -> bool:  # noqa: A002
        """End a job now; return False if it had already ended.

        Its worker learns of it at the next heartbeat, and cannot ack the job any more.
        """
        return self._sync(self._changing("cancel", id))

    async def acancel(self, id: str) -> bool:  # noqa: A002
        """Async twin of `cancel`."""
        return await self._async(self._changing("cancel", id))

    # For workers

    def claim(self, count: int = 1, *, lease: float = 30.0, wait: float = 0.0) -> list[Claim]:
        """Claim the next jobs, up to `count`; the claims are valid for `lease` seconds.

        If there is no job, wait up to `wait` seconds for one; return [] if none came.
        """
        return self._sync(self._claiming(count, lease, wait))

    async def aclaim(
        self, count: int = 1, *, lease: float = 30.0, wait: float = 0.0
    ) -> list[Claim]:
        """Async twin of `claim`. If cancelled in the middle, it has claimed no job."""
        return await self._async(self._claiming(count, lease, wait))

    def heartbeat(self, claim: Claim, *, lease: float | None = None) -> None:
        """Extend a claim to `lease` seconds from now (default: its previous lease).

        As in `ack` and `nack`, `JobLost` means that the claim is no longer valid: its lease
        expired, or the job was cancelled. Stop working on the job then.
        """
        self._sync(self._extending(claim, lease))

    async def aheartbeat(self, claim: Claim, *, lease: float | None = None) -> None:
        """Async twin of `heartbeat`."""
        await self._async(self._extending(claim, lease))

    def ack(self, claim: Claim, result: Any = None) -> None:
        """Report that the job is done, with its result."""
        self._sync(self._acking(claim, result))

    async def aack(self, claim: Claim, result: Any = None) -> None:
        """Async twin of `ack`."""
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

        After its last attempt, or with `retry=False`, it becomes a dead letter instead.
        `counted=False` means that the job was never started, so this was no attempt. If `reason` is
        an exception, its type, message and traceback are stored, redacted. Returns the job's new
        state.
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
        """Async twin of `nack`."""
        return await self._async(self._nacking(claim, delay, reason, counted=counted, retry=retry))

    # For operators

    @property
    def waiting(self) -> int:
        """Number of waiting jobs, read without a query, as the rules of `Shed` need it."""
        raise NotImplementedError

    def dead(self, limit: int = 100) -> list[DeadLetter]:
        """Return the dead letters, the oldest first, at most `limit`.

        In a store there may be fewer if they are large: a reply holds about 1 MiB.
        """
        return self._sync(self._listing(limit))

    async def adead(self, limit: int = 100) -> list[DeadLetter]:
        """Async twin of `dead`."""
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
        """Return a page of up to 100 jobs that are dead, waiting, delayed or claimed.

        Jobs are listed in the order in which they are due; dead ones start with the latest.
        `search` matches id, reason and payload; case is ignored for ASCII letters. `after` is
        `next` of the previous page. One call examines a bounded number of jobs: a page may have
        fewer than `limit` jobs and still a `next`. Without `payloads`, payloads are neither read
        nor searched.
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
        """Async twin of `browse`."""
        asked = self._asked(state, search, after, limit, payloads=payloads)
        return await self._async(self._browsing(asked))

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a job with up to 64 KiB of its payload; None if it does not exist."""
        return self._sync(self._inspecting(id, payload=payload))

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Async twin of `inspect`."""
        return await self._async(self._inspecting(id, payload=payload))

    def retry(self, id: str) -> bool:  # noqa: A002
        """Queue a dead job again, with all its attempts, as if it were pushed now.

        Returns False if it is not dead, or if another job has its dedupe id by now.
        """
        return self._sync(self._changing("requeue", id))

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Async twin of `retry`."""
        return await self._async(self._changing("requeue", id))

    def drop(self, id: str) -> bool:  # noqa: A002
        """Delete a dead job, or cancel one that has not ended; False if it ended otherwise."""
        return self._sync(self._dropping(id))

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Async twin of `drop`."""
        return await self._async(self._dropping(id))

    def snapshot(self) -> dict[str, Any]:
        """Return the numbers of waiting, delayed, claimed and dead jobs, and the totals so far."""
        return self._sync(self._counting())

    async def asnapshot(self) -> dict[str, Any]:
        """Async twin of `snapshot`."""
        return await self._async(self._counting())
