"""The steps of a queue's operations, wherever its jobs are kept; see `seawall.jobs._driven`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from secrets import token_hex
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock
from seawall.context import current_criticality, give_up_at
from seawall.errors import JobFailed, JobLost, QueueFull, StoreUnavailable, TimedOut, UnknownJob
from seawall.jobs._arguments import (
    MOST_SECONDS,
    bounded_seconds,
    claim_of,
    legible,
    microseconds,
    read_reason,
    short_text,
    stored_reason,
)
from seawall.jobs._bells import READY, Bell, Bells
from seawall.jobs._codec import MOST_BYTES, decode, encode
from seawall.jobs._driven import Ask, Driven, Steps, Tell
from seawall.jobs._records import Claim, DeadLetter, JobStatus
from seawall.jobs._work_list import OPENED, Asked, WorkItem, WorkPage, asked_page, place_after
from seawall.models.queue.jobs import (
    NOBODY,
    PRIORITIES,
    TOTALS,
    Browsed,
    Counts,
    Granted,
    How,
    NewJob,
    QueueRules,
    Seen,
)

MOST_AT_ONCE: Final = 500
"""Maximum number of jobs pushed, claimed or listed by one call."""
MOST_BYTES_AT_ONCE: Final = 4_194_304
"""Maximum bytes of payloads in one push of several jobs: more would delay the store."""
POLL: Final = 0.5
"""Maximum seconds between two looks of a waiter, even without news."""
LEAST_ENDED: Final = 1000
"""Minimum number of ended jobs to remember, for queues with a smaller `max_size`."""

_ACTS: Final = {
    "dead": ("retry", "drop"),
    "waiting": ("drop",),
    "delayed": ("drop",),
    "claimed": ("drop",),
}
"""The actions that an operator has for a job, by its state."""
_ENDS: Final = frozenset({"done", "dead", "cancelled", "expired"})


def most_ended(max_size: int) -> int:
    """Return how many ended jobs (other than dead ones) are remembered."""
    return max(max_size, LEAST_ENDED)


class QueueSteps(Driven):
    """The settings of a queue and the steps of its operations."""

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
        """Check and store the settings."""
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
        self._bells = Bells()

    # Pushing

    def _new(
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

    def _batch(
        self, payloads: Iterable[Any], priority: int | None, delay: float, ttl: float | None
    ) -> list[NewJob]:
        jobs = [self._new(payload, priority, delay, ttl, None) for payload in payloads]
        if len(jobs) > MOST_AT_ONCE:
            raise ValueError(f"{len(jobs)} jobs at once: push at most {MOST_AT_ONCE} in one call")
        size = sum(len(job.payload) for job in jobs)
        if len(jobs) > 1 and size > MOST_BYTES_AT_ONCE:
            raise ValueError(
                f"{len(jobs)} jobs of {size} bytes together: push them in parts, of at most"
                f" {MOST_BYTES_AT_ONCE} bytes in one call, or keep what is large elsewhere"
            )
        return jobs

    def _pushing(self, jobs: list[NewJob]) -> Steps[list[str]]:
        if not jobs:
            return []
        ids: list[str] | None = yield Ask("push", (jobs,))
        if ids is None:
            raise QueueFull(
                f"queue {self.name!r} has no room: {self.rules.max_size} jobs are allowed",
                guard=self.name,
                policy="queue",
            )
        return ids

    # Claiming, and operations on a claim

    def _claiming(
        self, count: int, lease: float, wait: float, ended: Callable[[], bool] = bool
    ) -> Steps[list[Claim]]:
        """Claim jobs; stop waiting once `ended()`, which is checked whenever `READY` rings."""
        check.count("count", count, maximum=MOST_AT_ONCE)
        length = microseconds(bounded_seconds("lease", lease, self.keep))
        patience = check.seconds("wait", wait, zero=True, infinite=True)
        until, _late = give_up_at(self.clock.now(), patience)
        with Bell(self._bells, READY) as bell:
            if patience:
                self._listen(READY)
            while True:
                bell.reset()
                now = self.clock.now()
                granted, ahead = yield from self._asking_for(count, length)
                claims: list[Claim] = []
                for one in granted:
                    try:
                        payload = decode(one.payload)
                    except (ValueError, RecursionError):
                        reason = "the payload cannot be read"
                        yield Tell(Ask("nack", (one.id, one.fence, 0, reason, "fatal")))
                        continue
                    # Counted from before the question, so that the lease expires here first.
                    claims.append(Claim(one, payload, lease, now + lease))
                now = self.clock.now()
                if claims or ended() or (until is not None and until <= now):
                    return claims
                nap = POLL if ahead < 0 else min(POLL, ahead / 1e6)
                bell.until = now + nap if until is None else min(until, now + nap)
                yield bell
                if ended():
                    return []

    def _asking_for(self, count: int, lease: int) -> Steps[tuple[list[Granted], int]]:
        """Claim jobs and confirm the claim; otherwise undo it, so that no job waits a whole lease.

        A claim is returned only after the queue has confirmed that it arrived, which counts as an
        attempt: a handler that kills its process at once must not be started more often than
        allowed.
        """
        token, up = token_hex(8), self._up
        try:
            granted, ahead = yield Ask("claim", (count, lease, token))
        except BaseException:
            if up:  # otherwise it was not even sent
                self._undo(Ask("release", (token, lease)), lease)
            raise
        if granted:
            try:
                yield Ask("heard", (token,))
            except BaseException:
                for one in granted:
                    back = (one.id, one.fence, 0, NOBODY, "returned")
                    self._undo(Ask("nack", back), lease)
                raise
        return granted, ahead

    def _extending(self, claim: Claim, lease: float | None) -> Steps[None]:
        seconds = (
            claim_of(claim).lease if lease is None else bounded_seconds("lease", lease, self.keep)
        )
        now = self.clock.now()
        answer = yield Ask("extend", (claim.id, claim.fence, microseconds(seconds)))
        self._check_held(claim, answer)
        claim.lease, claim.until = seconds, now + seconds

    def _acking(self, claim: Claim, result: Any) -> Steps[None]:
        data = encode("the result", result, self.max_payload)
        answer = yield Ask("ack", (claim_of(claim).id, claim.fence, data))
        self._check_held(claim, answer)

    def _nacking(
        self,
        claim: Claim,
        delay: float,
        reason: str | BaseException,
        *,
        counted: bool,
        retry: bool,
    ) -> Steps[str]:
        wait = microseconds(bounded_seconds("delay", delay, self.keep, zero=True))
        said = stored_reason(reason)
        check.flag("counted", counted)
        how: How = "failed" if counted else "returned"
        if not check.flag("retry", retry):
            how = "fatal"
        args = (claim_of(claim).id, claim.fence, wait, said, how)
        answer = yield Ask("nack", args)
        return self._check_held(claim, answer)

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

    # Operators' actions, status and waiting

    def _browsing(self, asked: Asked) -> Steps[WorkPage]:
        search = asked.search.encode().lower()
        args = (asked.state, asked.number, asked.id, search, asked.limit, asked.cut)
        found, place = yield Ask("browse", args)
        after = None if place is None else place_after(*place)
        return WorkPage([_item(one) for one in found], after)

    def _asked(
        self, state: str, search: str, after: str | None, limit: int, *, payloads: bool
    ) -> Asked:
        return asked_page(self.WORK_STATES, state, search, after, limit, payloads)

    def _inspecting(self, id_: str, *, payload: bool) -> Steps[WorkItem | None]:
        cut = OPENED if check.flag("payload", payload) else 0
        found: Browsed | None = yield Ask("inspect", (short_text("id", id_), cut))
        return None if found is None else _item(found)

    def _dropping(self, id_: str) -> Steps[bool]:
        done = yield from self._changing("drop", id_)
        return done or (yield from self._changing("cancel", id_))

    def _changing(self, operation: str, id_: str) -> Steps[bool]:
        """Cancel, requeue or drop a job; return False if its state does not allow that."""
        done, state = yield Ask(operation, (short_text("id", id_),))
        if state == "unknown":
            raise self._unknown(id_)
        if state == "full" and not done:
            raise QueueFull(f"queue {self.name!r} has no room", guard=self.name, policy="queue")
        return bool(done)

    def _seeing(self, id_: str) -> Steps[JobStatus]:
        seen = yield from self._looking(id_)
        result = None if seen.result is None else _read(seen.result)
        reason, _ = read_reason(seen.reason)
        return JobStatus(
            id_, seen.state, seen.priority, seen.attempts, seen.age / 1e6, reason, result
        )

    def _looking(self, id_: str) -> Steps[Seen]:
        seen: Seen | None = yield Ask("status", (short_text("id", id_),))
        if seen is None:
            raise self._unknown(id_)
        return seen

    def _waiting(self, id_: str, timeout: float | None) -> Steps[Any]:
        patience = check.seconds(
            "timeout", inf if timeout is None else timeout, zero=True, infinite=True
        )
        began = self.clock.now()
        until, _late = give_up_at(began, patience)
        with Bell(self._bells, short_text("id", id_)) as bell:
            self._listen(id_)
            while True:
                bell.reset()
                try:
                    seen = yield from self._looking(id_)
                    if seen.state in _ENDS:
                        return self._result(id_, seen)
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
        message = f"queue {self.name!r}: job {id_} is {state} after {waited:.3g} s"
        raise TimedOut(message, guard=self.name, seconds=waited)

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

    def _listing(self, limit: int) -> Steps[list[DeadLetter]]:
        check.count("limit", limit, maximum=MOST_AT_ONCE)
        letters = yield Ask("dead", (limit,))
        return [
            DeadLetter(
                one.id,
                _read(one.payload),
                one.priority,
                one.attempts,
                one.age / 1e6,
                *read_reason(one.reason),
            )
            for one in letters
        ]

    def _counting(self) -> Steps[dict[str, Any]]:
        counts: Counts = yield Ask("counts", ())
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

    def _unknown(self, id_: str) -> UnknownJob:
        return UnknownJob(f"queue {self.name!r} knows no job {legible(id_)!r}")


def _item(found: Browsed) -> WorkItem:
    reason, trace = read_reason(found.reason)
    return WorkItem(
        found.id,
        found.state,
        "",
        "",
        found.priority,
        found.attempts,
        found.age / 1e6,
        found.since / 1e6,
        reason,
        found.size,
        found.payload,
        _ACTS.get(found.state, ()),
        trace,
    )


def _read(data: bytes) -> Any:
    """Return a stored value for display; None if it cannot be read."""
    try:
        return decode(data)
    except (ValueError, RecursionError):
        return None
