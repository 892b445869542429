"""Job queues: the interface of every queue, wherever its jobs are kept, and its operations.

Each operation is a generator of steps. It yields a call of the queue's rules (`QueueCall`) or a
waiter, and is sent the answer. A subclass decides who answers: the rules in memory, or a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from secrets import token_hex
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock
from seawall.context import current_criticality, give_up_at
from seawall.errors import JobFailed, JobLost, QueueFull, StoreUnavailable, TimedOut, UnknownJob
from seawall.jobs.encoding import (
    MOST_BYTES,
    MOST_SECONDS,
    bounded_seconds,
    claim_of,
    decode,
    encode,
    legible,
    microseconds,
    read_reason,
    short_text,
    stored_reason,
)
from seawall.jobs.records import Claim, DeadJob, JobStatus, QueueCall, QueueSteps
from seawall.jobs.wakeups import READY, Wakeup, Wakeups
from seawall.jobs.work_list import (
    OPENED,
    WorkItem,
    WorkPage,
    job_item,
    page_request,
    place_after,
)
from seawall.models.queue.jobs import (
    NOBODY,
    PRIORITIES,
    TOTALS,
    Browsed,
    How,
    JobGranted,
    NewJob,
    QueueCounts,
    QueueRules,
    Seen,
)
from seawall.runtime.driver import adrive, drive, wait_async, wait_sync
from seawall.runtime.layers import Kind, Waiter
from seawall.runtime.twins import Twins, make_twins

MOST_AT_ONCE: Final = 500
"""Maximum number of jobs pushed, claimed or listed by one call."""
MOST_BYTES_AT_ONCE: Final = 4_194_304
"""Maximum bytes of payloads in one push of several jobs: more would delay the store."""
POLL: Final = 0.5
"""Maximum seconds between two looks of a waiter, even without news."""
LEAST_ENDED: Final = 1000
"""Minimum number of ended jobs to remember, for queues with a smaller `max_size`."""
_ENDS: Final = frozenset({"done", "dead", "cancelled", "expired"})
P = ParamSpec("P")
T = TypeVar("T")


def _twins(method: Callable[Concatenate[JobQueue, P], QueueSteps[T]]) -> Twins[JobQueue, P, T]:
    """Return a method of `JobQueue` that blocks, and its async twin."""
    return make_twins(
        method,
        lambda queue, begin: queue._sync(begin()),  # noqa: SLF001 - of this module
        lambda queue, begin: queue._async(begin()),  # noqa: SLF001
    )


class JobQueue:
    """A queue of jobs with priorities, leases and dead letters."""

    WORK_STATES = ("dead", "waiting", "delayed", "claimed")
    """The job states that `browse` can list."""

    def __init__(
        self,
        name: str,
        *,
        head_start: float,
        max_attempts: int,
        max_size: int,
        max_dead: int,
        keep: float,
        result_ttl: float,
        dedupe_window: float,
        max_payload: int,
        clock: Clock,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{type(self).__name__}(name={name!r}): write a name, such as 'mails'")
        self.name = name
        self.clock = clock
        self.keep = bounded_seconds("keep", keep, MOST_SECONDS)
        self.max_payload = check.count("max_payload", max_payload, maximum=MOST_BYTES)
        ttl = bounded_seconds("result_ttl", result_ttl, MOST_SECONDS)
        window = bounded_seconds("dedupe_window", dedupe_window, MOST_SECONDS, zero=True)
        if window > ttl:
            raise ValueError(
                f"dedupe_window={window!r} is above result_ttl={ttl!r}: a job that is forgotten"
                f" answers for nothing; write result_ttl={window!r} or more"
            )
        self.rules = QueueRules(
            microseconds(bounded_seconds("head_start", head_start, MOST_SECONDS, zero=True)),
            check.count("max_attempts", max_attempts, maximum=1_000_000),
            check.count("max_size", max_size),
            check.count("max_dead", max_dead),
            most_ended(max_size),
            microseconds(self.keep),
            microseconds(ttl),
            microseconds(window),
        )
        self._wakeups = Wakeups()

    # For producers

    def _push(
        self,
        payload: Any,
        *,
        priority: int | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
        dedupe: str | None = None,
    ) -> QueueSteps[str]:
        """Add a job and return its id.

        `priority` is 0 to 9; the default is the criticality of the context (2 for CRITICAL). The
        job can be claimed after `delay` seconds, and is not started later than `ttl` seconds from
        now. While a job with the same `dedupe` has not ended, its id is returned and nothing is
        added. Raises `QueueFull` if there is no room.
        """
        ids = yield from self._add([self._new_job(payload, priority, delay, ttl, dedupe)])
        return ids[0]

    push, apush = _twins(_push)

    def _push_many(
        self,
        payloads: Iterable[Any],
        *,
        priority: int | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
    ) -> QueueSteps[list[str]]:
        """Add up to 500 jobs in one call, or none if there is no room for all; return their ids.

        Together they may have up to 4 MiB, the most that a store accepts in one call.
        """
        jobs = [self._new_job(payload, priority, delay, ttl, None) for payload in payloads]
        if len(jobs) > MOST_AT_ONCE:
            raise ValueError(f"{len(jobs)} jobs at once: push at most {MOST_AT_ONCE} in one call")
        size = sum(len(job.payload) for job in jobs)
        if len(jobs) > 1 and size > MOST_BYTES_AT_ONCE:
            raise ValueError(
                f"{len(jobs)} jobs of {size} bytes together: push them in parts, of at most"
                f" {MOST_BYTES_AT_ONCE} bytes in one call, or keep what is large elsewhere"
            )
        return (yield from self._add(jobs)) if jobs else []

    push_many, apush_many = _twins(_push_many)

    def _new_job(
        self,
        payload: Any,
        priority: int | None,
        delay: float,
        ttl: float | None,
        dedupe: str | None,
    ) -> NewJob:
        level = int(current_criticality()) if priority is None else priority
        check.count("priority", level, minimum=0, maximum=PRIORITIES - 1)
        wait = bounded_seconds("delay", delay, self.keep, zero=True)
        life = 0.0 if ttl is None else bounded_seconds("ttl", ttl, self.keep)
        if ttl is not None and life <= wait:
            raise ValueError(f"ttl={ttl!r} is over before delay={delay!r}: the job could not start")
        name = "" if dedupe is None else short_text("dedupe", dedupe)
        data = encode("the payload", payload, self.max_payload)
        return NewJob(token_hex(8), data, int(level), microseconds(wait), microseconds(life), name)

    def _add(self, jobs: list[NewJob]) -> QueueSteps[list[str]]:
        ids: list[str] | None = yield QueueCall("push", (jobs,))
        if ids is None:
            raise QueueFull(
                f"queue {self.name!r} has no room: {self.rules.max_size} jobs are allowed",
                guard=self.name,
                policy="queue",
            )
        return ids

    def _join(self, id: str, timeout: float | None = None) -> QueueSteps[Any]:  # noqa: A002 - it is an id
        """Wait until a job has ended, and return its result.

        Raises `JobFailed` if it ended without a result, `UnknownJob` if there is no such job, and
        `TimedOut` after `timeout` seconds; the job itself continues.
        """
        patience = check.seconds(
            "timeout", inf if timeout is None else timeout, zero=True, infinite=True
        )
        began = self.clock.now()
        until, _late = give_up_at(began, patience)
        with Wakeup(self._wakeups, short_text("id", id)) as bell:
            self._listen(id)
            while True:
                bell.reset()
                try:
                    seen = yield from self._look_up(id)
                    if seen.state in _ENDS:
                        return self._result(id, seen)
                    state = seen.state
                except StoreUnavailable:
                    # The store may come back, unless it was closed or the time is up.
                    if self._closed or (until is not None and until <= self.clock.now()):
                        raise
                    state = "unknown"
                now = self.clock.now()
                if until is not None and until <= now:
                    break
                bell.until = now + POLL if until is None else min(until, now + POLL)
                yield bell
        waited = until - began
        message = f"queue {self.name!r}: job {id} is {state} after {waited:.3g} s"
        raise TimedOut(message, guard=self.name, seconds=waited)

    join, ajoin = _twins(_join)

    def _status(self, id: str) -> QueueSteps[JobStatus]:  # noqa: A002
        """Return the status of a job; raise `UnknownJob` if it is not known."""
        seen = yield from self._look_up(id)
        result = None if seen.result is None else _read(seen.result)
        reason, _ = read_reason(seen.reason)
        return JobStatus(
            id, seen.state, seen.priority, seen.attempts, seen.age / 1e6, reason, result
        )

    status, astatus = _twins(_status)

    def _look_up(self, id_: str) -> QueueSteps[Seen]:
        seen: Seen | None = yield QueueCall("status", (short_text("id", id_),))
        if seen is None:
            raise self._unknown(id_)
        return seen

    def _result(self, id_: str, seen: Seen) -> Any:
        """Return the result of an ended job, or raise `JobFailed` if there is none."""
        cause, _ = read_reason(seen.reason)
        if seen.state == "done":
            try:
                return decode(b"null" if seen.result is None else seen.result)
            except (ValueError, RecursionError):
                cause = "its result cannot be read"
        raise JobFailed(
            f"queue {self.name!r}: job {id_} is {seen.state}: {cause}",
            job=id_,
            state=seen.state,
            cause=cause,
        )

    def _cancel(self, id: str) -> QueueSteps[bool]:  # noqa: A002
        """End a job now; return False if it had already ended.

        Its worker is informed at the next heartbeat, and cannot ack the job any more.
        """
        return self._change("cancel", id)

    cancel, acancel = _twins(_cancel)

    def _change(self, operation: str, id_: str) -> QueueSteps[bool]:
        """Cancel, requeue or drop a job; return False if its state does not allow that."""
        done, state = yield QueueCall(operation, (short_text("id", id_),))
        if state == "unknown":
            raise self._unknown(id_)
        if state == "full" and not done:
            raise QueueFull(f"queue {self.name!r} has no room", guard=self.name, policy="queue")
        return bool(done)

    def _unknown(self, id_: str) -> UnknownJob:
        return UnknownJob(f"queue {self.name!r} knows no job {legible(id_)!r}")

    # For workers

    def _claim(
        self, count: int = 1, *, lease: float = 30.0, wait: float = 0.0
    ) -> QueueSteps[list[Claim]]:
        """Claim the next jobs, up to `count`; the claims are valid for `lease` seconds.

        If there is no job, wait up to `wait` seconds for one; return [] if none came. If cancelled
        in the middle, it has claimed no job.
        """
        return self._claim_until(lambda: False, count, lease, wait)

    claim, aclaim = _twins(_claim)

    def _claim_until(
        self, stopped: Callable[[], bool], count: int, lease: float, wait: float
    ) -> QueueSteps[list[Claim]]:
        """Claim jobs; stop waiting once `stopped()`, which is checked whenever `READY` rings."""
        check.count("count", count, maximum=MOST_AT_ONCE)
        length = microseconds(bounded_seconds("lease", lease, self.keep))
        patience = check.seconds("wait", wait, zero=True, infinite=True)
        until, _late = give_up_at(self.clock.now(), patience)
        with Wakeup(self._wakeups, READY) as bell:
            if patience:
                self._listen(READY)
            while True:
                bell.reset()
                now = self.clock.now()
                granted, ahead = yield from self._take(count, length)
                claims: list[Claim] = []
                for one in granted:
                    try:
                        payload = decode(one.payload)
                    except (ValueError, RecursionError):
                        args = (one.id, one.fence, 0, "the payload cannot be read", "fatal")
                        self._undo(QueueCall("nack", args), length)
                        continue
                    claims.append(
                        Claim(
                            one.id,
                            payload,
                            one.attempt,
                            one.fence,
                            now + lease,  # counted from before the question: it expires here first
                            lease,
                            one.priority,
                            one.age / 1e6,
                            one.waited / 1e6,
                            one.left / 1e6,
                        )
                    )
                now = self.clock.now()
                if claims or stopped() or (until is not None and until <= now):
                    return claims
                nap = POLL if ahead < 0 else min(POLL, ahead / 1e6)
                bell.until = now + nap if until is None else min(until, now + nap)
                yield bell
                if stopped():
                    return []

    def _take(self, count: int, lease: int) -> QueueSteps[tuple[list[JobGranted], int]]:
        """Claim jobs and confirm the claim; otherwise undo it, so that no job waits a whole lease.

        Only a confirmed claim counts as an attempt, and is returned: a handler that kills its
        process at once must not be started more often than allowed.
        """
        token, up = token_hex(8), self._up
        try:
            granted, ahead = yield QueueCall("claim", (count, lease, token))
        except BaseException:
            if up:  # otherwise it was not even sent
                self._undo(QueueCall("release", (token, lease)), lease)
            raise
        if granted:
            try:
                yield QueueCall("heard", (token,))
            except BaseException:
                for one in granted:
                    back = (one.id, one.fence, 0, NOBODY, "returned")
                    self._undo(QueueCall("nack", back), lease)
                raise
        return granted, ahead

    def _heartbeat(self, claim: Claim, *, lease: float | None = None) -> QueueSteps[None]:
        """Extend a claim to `lease` seconds from now (default: its previous lease).

        As in `ack` and `nack`, `JobLost` means that the claim is no longer valid: its lease
        expired, or the job was cancelled. Stop working on the job then.
        """
        seconds = claim_of(claim).lease
        if lease is not None:
            seconds = bounded_seconds("lease", lease, self.keep)
        now = self.clock.now()
        answer = yield QueueCall("extend", (claim.id, claim.fence, microseconds(seconds)))
        self._check_held(claim, answer)
        claim.lease, claim.until = seconds, now + seconds

    heartbeat, aheartbeat = _twins(_heartbeat)

    def _ack(self, claim: Claim, result: Any = None) -> QueueSteps[None]:
        """Report that the job is done, with its result."""
        data = encode("the result", result, self.max_payload)
        answer = yield QueueCall("ack", (claim_of(claim).id, claim.fence, data))
        self._check_held(claim, answer)

    ack, aack = _twins(_ack)

    def _nack(
        self,
        claim: Claim,
        *,
        delay: float = 0.0,
        reason: str | BaseException = "",
        counted: bool = True,
        retry: bool = True,
    ) -> QueueSteps[str]:
        """Give a job back: it can be claimed again after `delay` seconds, in its old place.

        After its last attempt, or with `retry=False`, it becomes a dead letter instead.
        `counted=False` means that the job was never started, so this was no attempt. If `reason` is
        an exception, its type, message and traceback are stored, redacted. Returns the job's new
        state.
        """
        wait = microseconds(bounded_seconds("delay", delay, self.keep, zero=True))
        said = stored_reason(reason)
        check.flag("counted", counted)
        how: How = "failed" if counted else "returned"
        if not check.flag("retry", retry):
            how = "fatal"
        answer = yield QueueCall("nack", (claim_of(claim).id, claim.fence, wait, said, how))
        return self._check_held(claim, answer)

    nack, anack = _twins(_nack)

    def _check_held(self, claim: Claim, answer: tuple[bool, str]) -> str:
        done, state = answer
        if done:
            return state
        raise JobLost(
            f"queue {self.name!r}: this claim of job {claim.id} (attempt {claim.attempt}) is not"
            f" good any more; the job is {state}",
            job=claim.id,
            state=state,
        )

    # For operators

    @property
    def waiting(self) -> int:
        """Number of waiting jobs, read without a query, as the rules of `Shed` need it."""
        raise NotImplementedError

    def _dead(self, limit: int = 100) -> QueueSteps[list[DeadJob]]:
        """Return the dead letters, the oldest first, at most `limit`.

        In a store there may be fewer if they are large: a reply holds about 1 MiB.
        """
        check.count("limit", limit, maximum=MOST_AT_ONCE)
        letters = yield QueueCall("dead", (limit,))
        found = []
        for one in letters:
            fields = (one.id, _read(one.payload), one.attempts, *read_reason(one.reason))
            found.append(DeadJob(*fields, one.priority, one.age / 1e6))
        return found

    dead, adead = _twins(_dead)

    def _browse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> QueueSteps[WorkPage]:
        """Return a page of up to 100 jobs that are dead, waiting, delayed or claimed.

        Jobs are listed in the order in which they are due; dead ones start with the latest.
        `search` matches id, reason and payload; case is ignored for ASCII letters. `after` is
        `next` of the previous page. One call examines a bounded number of jobs: a page may have
        fewer than `limit` jobs and still a `next`. Without `payloads`, payloads are neither read
        nor searched.
        """
        asked = page_request(self.WORK_STATES, state, search, after, limit, payloads)
        pattern = asked.search.encode().lower()
        args = (state, asked.number, asked.id, pattern, limit, asked.cut)
        found, place = yield QueueCall("browse", args)
        following = None if place is None else place_after(*place)
        return WorkPage([job_item(one) for one in found], following)

    browse, abrowse = _twins(_browse)

    def _inspect(self, id: str, *, payload: bool = True) -> QueueSteps[WorkItem | None]:  # noqa: A002
        """Return a job with up to 64 KiB of its payload; None if it does not exist."""
        cut = OPENED if check.flag("payload", payload) else 0
        found: Browsed | None = yield QueueCall("inspect", (short_text("id", id), cut))
        return None if found is None else job_item(found)

    inspect, ainspect = _twins(_inspect)

    def _retry(self, id: str) -> QueueSteps[bool]:  # noqa: A002
        """Queue a dead job again, with all its attempts, as if it were pushed now.

        Returns False if it is not dead, or if another job has its dedupe id by now.
        """
        return self._change("requeue", id)

    retry, aretry = _twins(_retry)

    def _drop(self, id: str) -> QueueSteps[bool]:  # noqa: A002
        """Delete a dead job, or cancel one that has not ended; False if it ended otherwise."""
        done = yield from self._change("drop", id)
        return done or (yield from self._change("cancel", id))

    drop, adrop = _twins(_drop)

    def _snapshot(self) -> QueueSteps[dict[str, Any]]:
        """Return the numbers of waiting, delayed, claimed and dead jobs, and the totals so far."""
        counts: QueueCounts = yield QueueCall("counts", ())
        totals = dict(zip(TOTALS, counts.totals, strict=True))
        counted = {
            "name": self.name,
            "waiting": sum(counts.waiting),
            "by_priority": dict(enumerate(counts.waiting)),
            "oldest": max(0.0, counts.oldest / 1e6),
            "delayed": counts.delayed,
            "claimed": counts.claimed,
            "dead": counts.dead,
            "max_size": self.rules.max_size,
            **{("failed" if name == "died" else name): count for name, count in totals.items()},
        }
        registry.answered(self, counted)
        return counted

    snapshot, asnapshot = _twins(_snapshot)

    # Hooks that answer, in memory or in a store

    def _answering(self, kind: Kind, ask: QueueCall) -> Waiter | Callable[[], Any]:
        """Return a waiter for the answer, or a function that returns it at once."""
        raise NotImplementedError

    def _undo(self, ask: QueueCall, lease: int) -> None:
        """End a claim by `ask`. Callable from anywhere; never blocks or raises."""
        raise NotImplementedError

    def _listen(self, topic: str) -> None:
        """Subscribe to changes elsewhere that concern `topic`."""

    @property
    def _up(self) -> bool:
        """Whether asking makes sense now."""
        return True

    @property
    def _closed(self) -> bool:
        """Whether there will never be an answer again."""
        return False

    def _sync(self, steps: QueueSteps[T]) -> T:
        def answer(request: QueueCall | Waiter) -> Any:
            waiter = self._begin("sync", request)
            return waiter() if callable(waiter) else wait_sync(waiter, self.clock)

        return drive(steps, answer)

    async def _async(self, steps: QueueSteps[T]) -> T:
        async def answer(request: QueueCall | Waiter) -> Any:
            waiter = self._begin("async", request)
            return waiter() if callable(waiter) else await wait_async(waiter, self.clock)

        return await adrive(steps, answer)

    def _begin(self, kind: Kind, request: QueueCall | Waiter) -> Waiter | Callable[[], Any]:
        return self._answering(kind, request) if isinstance(request, QueueCall) else request


def most_ended(max_size: int) -> int:
    """Return how many ended jobs (other than dead ones) are remembered."""
    return max(max_size, LEAST_ENDED)


def _read(data: bytes) -> Any:
    """Return a stored value for display; None if it cannot be read."""
    try:
        return decode(data)
    except (ValueError, RecursionError):
        return None
