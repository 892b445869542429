"""The worker's side of the jobs in a database: claims and reports. `JobWorker` uses all of it.

Promises:

- Only the holder of a claim can report about its job.
- A report for a claim that was taken over is refused, and the refusal is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from seawall import _checks as check
from seawall._failures import split_report
from seawall.clock import Clock
from seawall.durable import _jobs_steps as steps
from seawall.durable._jobs_records import JobClaim, name_of, result_of, shown, stored_error
from seawall.durable._jobs_steps import MICRO, Beat, Standing, Taken
from seawall.durable.database import Database, Operation
from seawall.events import JobDied
from seawall.events.bus import emit
from seawall.jobs._bells import READY, Bells
from seawall.models.durable_jobs import LOST
from seawall.runtime.mutex import Mutex

CANCELLED: Final = "cancelled"
"""The topic of workers that wait for cancellations."""


class ClaimedJobs:
    """The operations on jobs for workers."""

    name: str
    database: Database
    clock: Clock
    lease: float
    result_ttl: float
    max_result: int
    bells: Bells
    """The waiters of this process: for a job to do, or for the end of one."""
    _mutex: Mutex
    _counts: dict[str, int]

    def claim(self, kinds: Iterable[str], count: int = 1, *, owner: str) -> list[JobClaim]:
        """Claim the next jobs of these kinds for `owner`, up to `count`, for the lease."""
        begun = self.clock.now()
        return self._claimed(self.database.run(self._claiming(kinds, count, owner)), owner, begun)

    async def aclaim(self, kinds: Iterable[str], count: int = 1, *, owner: str) -> list[JobClaim]:
        """Async twin of `claim`."""
        begun = self.clock.now()
        taken = await self.database.arun(self._claiming(kinds, count, owner))
        return self._claimed(taken, owner, begun)

    def succeed(self, claim: JobClaim, result: Any = None, message: str = "") -> bool:
        """End a job with its result; return False if refused: another worker holds the job now."""
        return self._told(claim, self._run(self._succeeding(claim, result, message))) is not None

    async def asucceed(self, claim: JobClaim, result: Any = None, message: str = "") -> bool:
        """Async twin of `succeed`."""
        told = await self.database.arun(self._succeeding(claim, result, message))
        return self._told(claim, told) is not None

    def fail(
        self,
        claim: JobClaim,
        error: str | BaseException,
        *,
        delay: float = 0.0,
        retry: bool = True,
        progress: float = 0.0,
        message: str = "",
    ) -> str | None:
        """Report a failed attempt; return the new state, or None if the report was refused.

        The job is retried after `delay` seconds if it has attempts left, else it has failed. A job
        that is being cancelled becomes cancelled. If `error` is an exception, its type, message and
        traceback are stored, redacted.
        """
        told = self._failing(claim, error, delay, retry=retry, progress=progress, message=message)
        return self._failed(claim, told, self._run(lambda: steps.telling("fail", told)))

    async def afail(
        self,
        claim: JobClaim,
        error: str | BaseException,
        *,
        delay: float = 0.0,
        retry: bool = True,
        progress: float = 0.0,
        message: str = "",
    ) -> str | None:
        """Async twin of `fail`."""
        told = self._failing(claim, error, delay, retry=retry, progress=progress, message=message)
        state = await self.database.arun(lambda: steps.telling("fail", told))
        return self._failed(claim, told, state)

    def give_back(self, claim: JobClaim, *, delay: float = 0.0) -> str | None:
        """Give a job back as if it had not been started; return its state, or None if refused."""
        told = self._returning(claim, delay)
        return self._told(claim, self._run(lambda: steps.telling("give_back", told)))

    async def agive_back(self, claim: JobClaim, *, delay: float = 0.0) -> str | None:
        """Async twin of `give_back`."""
        told = self._returning(claim, delay)
        return self._told(claim, await self.database.arun(lambda: steps.telling("give_back", told)))

    async def _abeat(
        self, owner: str, beats: list[Beat], looks: list[str]
    ) -> dict[tuple[str, int], bool]:
        """Renew claims and check others; return the valid ones, and which are to be cancelled."""
        lease = self._lease
        return await self.database.arun(lambda: steps.beating(owner, lease, beats, looks))

    async def _astanding(self, id: str) -> Standing | None:  # noqa: A002
        """Return the state of a job of any scope; None if it does not exist."""
        return await self.database.arun(lambda: steps.standing(id))

    # Implementation

    @property
    def _lease(self) -> int:
        return round(self.lease * MICRO)

    @property
    def _ttl(self) -> int:
        return round(self.result_ttl * MICRO)

    def _run(self, operation: Operation[Any]) -> Any:
        return self.database.run(operation)

    def _count(self, word: str, more: int = 1) -> None:
        with self._mutex:
            self._counts[word] += more

    def _claiming(self, kinds: Iterable[str], count: int, owner: str) -> Operation[list[Taken]]:
        named = _kinds(kinds)
        most = check.count("count", count, maximum=1_000)
        return lambda: steps.claiming(named, most, owner, self._lease, self._ttl)

    def _claimed(self, taken: list[Taken], owner: str, begun: float) -> list[JobClaim]:
        """Return the claims that are ours; the other jobs have ended without attempts left."""
        claims = []
        for one in taken:
            if one.state != "running":
                self._count("given_up")
                if one.state == "failed":
                    self._died(one.id, one.attempt, LOST)
                self.bells.ring(one.id)
                continue
            ours = (one.id, one.scope, one.kind, one.epoch, one.attempt, one.max_attempts)
            until = begun + self.lease
            claims.append(JobClaim(*ours, one.payload, owner, one.progress, one.message, until))
        self._count("claimed", len(claims))
        return claims

    def _died(self, id_: str, attempts: int, cause: str, trace: str = "") -> None:
        fields = {"job": id_, "attempts": attempts, "cause": cause, "traceback": trace}
        emit(JobDied, self.name, **fields)

    def _holding(self, claim: JobClaim) -> dict[str, Any]:
        return {"id": claim.id, "owner": claim.owner, "epoch": claim.epoch}

    def _succeeding(self, claim: JobClaim, result: Any, message: str) -> Operation[str | None]:
        stored = result_of(result, self.max_result)
        told = {**self._holding(claim), "result": stored.body, "result_type": stored.content_type}
        told |= {"ttl": self._ttl, "message": shown(message)}
        return lambda: steps.telling("succeed", told)

    def _failing(
        self,
        claim: JobClaim,
        error: str | BaseException,
        delay: float,
        *,
        retry: bool,
        progress: float,
        message: str,
    ) -> dict[str, Any]:
        return {
            **self._holding(claim),
            "error": stored_error(error),
            "delay": round(check.seconds("delay", delay, zero=True) * MICRO),
            "retry": int(retry),
            "ttl": self._ttl,
            "progress": progress,
            "message": shown(message),
        }

    def _failed(self, claim: JobClaim, told: dict[str, Any], state: str | None) -> str | None:
        if self._told(claim, state) == "failed":
            self._died(claim.id, claim.attempt, *split_report(told["error"]))
        return state

    def _returning(self, claim: JobClaim, delay: float) -> dict[str, Any]:
        told = {**self._holding(claim), "ttl": self._ttl}
        return {**told, "delay": round(check.seconds("delay", delay, zero=True) * MICRO)}

    def _told(self, claim: JobClaim, state: str | None) -> str | None:
        if state is None:
            self._count("refused_late")
        else:
            self.bells.ring(READY if state == "queued" else claim.id)
        return state


def _kinds(kinds: Iterable[str]) -> list[str]:
    named = [kinds] if isinstance(kinds, str) else list(kinds)
    if not named:
        raise ValueError("kinds=[]: name the kinds of jobs, such as ['report']")
    return [name_of("kind", kind) for kind in named]
