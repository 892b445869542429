"""Every error Seawall raises.

    SeawallError
    ├── Rejected            never attempted; has retry_after, guard and policy
    │   ├── CircuitOpen         the breaker is open, isolated, or busy probing
    │   ├── BulkheadFull        no slot, and no place (or no time) to wait for one
    │   ├── RateLimited         over a limit; `limit` names the first that was exceeded
    │   ├── Overloaded          shed: more is asked for than can be done well
    │   ├── PoolExhausted       no resource of the pool is free, and no place or time to wait
    │   ├── ChannelFull         the channel has no room, and its policy is to refuse
    │   ├── QueueFull           the queue holds as many jobs as it may
    │   ├── LaterFull           as many calls as may are stored for later
    │   ├── FifoFull            as many messages as may wait to be acknowledged
    │   ├── KeyInFlight         the first with the same idempotency key is still at work
    │   ├── JobNotReady         the job is not to be done here and now
    │   └── DeadlineExceeded    the deadline had passed before the work began; also a TimeoutError
    ├── TimedOut            began, and ran out of time; also a TimeoutError
    ├── ReportedFailure     a block said that it failed, in words; never raised
    ├── CacheMiss           nothing stored for that key; also a LookupError
    ├── ChannelClosed       nothing can be put in (or taken out) any more
    ├── Contended           others were faster, each time, as often as it was tried
    ├── WorkerDied          the process that did the work crashed; what it did is unknown
    ├── StoreUnavailable    the shared store did not answer, or not in time
    ├── LeaseLost           somebody else holds the lease, or may hold it by now
    ├── JobLost             the claim is not good any more: the job is somebody else's, or over
    ├── JobFailed           the job ended without a result
    ├── JobCancelled        somebody cancelled the job, and its function stops
    ├── UnknownJob          there is no such job; also a LookupError
    │   └── JobExpired          there was, and what came out of it is not kept any more
    ├── AmbiguousHeader     a header is given more than once, with different values
    ├── KeyMissing          an idempotency key is needed, and there is none
    ├── KeyReused           the idempotency key was used before, with another payload
    ├── RecordedFailure     the first with the same idempotency key failed, and that was kept
    ├── AnswerNotKept       it was done before, and its answer was too large to be kept
    ├── RecordGarbled       what the database holds makes no sense
    ├── FifoStateLost       a receiver has more of a sender than the sender knows of
    ├── NotDelivered        the receiver answered, and did not take the event
    └── BadSignature        not signed by who knows the secret, or too long ago; also a ValueError

A refusal is a new instance each time, so that tracebacks do not grow. What the guarded function
itself raises passes through as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from seawall import _checks as check

F = TypeVar("F", bound=Callable[..., Any])

ErrorKinds = type[Exception] | tuple[type[Exception], ...]
"""One type of errors, or several."""


class SeawallError(Exception):
    """The root of all errors that Seawall raises."""

    reason = "failed"
    """A stable word for metrics, logs and `Result.reason`."""


class Rejected(SeawallError):
    """The call was refused before the work began, so it is safe to do again elsewhere or later."""

    reason = "rejected"
    key: object = None
    """Which key was refused, by a policy that has keys."""

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float | None = None,
        guard: str = "",
        policy: str = "",
    ) -> None:
        """Say why, which policy of which guard refused, and when asking again may help."""
        super().__init__(message)
        self.retry_after = retry_after
        self.guard = guard
        self.policy = policy


class CircuitOpen(Rejected):
    """The breaker does not let calls through at the moment; `retry_after` is when it may probe."""

    reason = "circuit_open"

    def __init__(
        self,
        message: str = "",
        *,
        failure: str = "",
        open_for: float | None = None,
        retry_after: float | None = None,
        guard: str = "",
        policy: str = "",
    ) -> None:
        """Say what the last failure was, and for how many seconds it has not been closed.

        `failure` is the type and message of the error of the call that opened it, as text without
        secrets; empty where that is not known, or where no call did.
        """
        super().__init__(message, retry_after=retry_after, guard=guard, policy=policy)
        self.failure = failure
        self.open_for = open_for


class BulkheadFull(Rejected):
    """All slots are taken, and there is no place or no time left to wait for one."""

    reason = "bulkhead_full"


class RateLimited(Rejected):
    """The call is over a rate limit; `limit` is the name of the first that it exceeds."""

    reason = "rate_limited"
    own_limit = False
    """Whether it is a limit of the caller's own: a server's answer is then 429, else 503."""
    violated: tuple[str, ...] = ()
    """The names of the limits that a request is over, where a server's edge has refused it."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """What the answer tells of these limits, then."""

    def __init__(
        self,
        message: str = "",
        *,
        limit: str = "",
        retry_after: float | None = None,
        guard: str = "",
        policy: str = "",
    ) -> None:
        """Say which limit, and after how many seconds the same call will be admitted."""
        super().__init__(message, retry_after=retry_after, guard=guard, policy=policy)
        self.limit = limit


class Overloaded(Rejected):
    """The call was shed: more is asked for than can be done well."""

    reason = "overloaded"


class PoolExhausted(Rejected):
    """All of the pool's resources are in use, and there is no place or time left to wait."""

    reason = "pool_exhausted"


class ChannelFull(Rejected):
    """The channel has no room for another item, and is told to refuse."""

    reason = "channel_full"


class QueueFull(Rejected):
    """The queue holds as many jobs as it may; nothing was pushed."""

    reason = "queue_full"


class LaterFull(Rejected):
    """As many calls as may are waiting to be done later; this one was not stored."""

    reason = "later_full"


class FifoFull(Rejected):
    """As many messages as may are not acknowledged; nothing was sent."""

    reason = "fifo_full"


class KeyInFlight(Rejected):
    """The first with this idempotency key is still at work: ask again after `retry_after`."""

    reason = "key_in_flight"


class JobNotReady(Rejected):
    """The job is at work elsewhere, not due yet, or not committed yet: it is looked at later."""

    reason = "job_not_ready"


class DeadlineExceeded(Rejected, TimeoutError):
    """The deadline had passed, or leaves too little time, before the work began."""

    reason = "deadline_exceeded"


class TimedOut(SeawallError, TimeoutError):
    """The work began and did not end in time."""

    reason = "timed_out"

    def __init__(self, message: str = "", *, guard: str = "", seconds: float | None = None) -> None:
        """Say which guard's time ran out (`guard`), and after how many seconds, where known."""
        super().__init__(message)
        self.guard = guard
        self.seconds = seconds


class ReportedFailure(SeawallError):
    """A block under `hold()` said that it failed, by `call.failed("...")`; it is never raised."""

    reason = "reported_failure"


class CacheMiss(SeawallError, LookupError):
    """The cache holds nothing usable for these arguments."""

    reason = "cache_miss"


class ChannelClosed(SeawallError):
    """Nothing can be put into the channel any more, or nothing is left in it."""

    reason = "channel_closed"


class Contended(SeawallError):
    """Others changed the same thing first, as often as it was tried; nothing was changed."""

    reason = "contended"


class WorkerDied(SeawallError):
    """The process that did the work crashed: whether it had an effect is unknown."""

    reason = "worker_died"

    def __init__(self, message: str = "", *, item: str = "", exit_code: int | None = None) -> None:
        """Say what it was working on, and how the process ended, where known."""
        super().__init__(message)
        self.item = item
        self.exit_code = exit_code


class StoreUnavailable(SeawallError):
    """The shared store did not answer in time, or refused: what was asked may have been done."""

    reason = "store_unavailable"


class LeaseLost(SeawallError):
    """The lease is not held, or not for sure: whatever it protects must not be done."""

    reason = "lease_lost"


class JobLost(SeawallError):
    """The claim is not good any more: its lease was over, or the job was cancelled or has ended."""

    reason = "job_lost"

    def __init__(self, message: str = "", *, job: str = "", state: str = "") -> None:
        """Say which job, and the state it is in now ("claimed": by somebody else)."""
        super().__init__(message)
        self.job = job
        self.state = state


class JobFailed(SeawallError):
    """The job has no result: `state` is "dead", "cancelled", "expired", or "done" if unreadable."""

    reason = "job_failed"

    def __init__(
        self, message: str = "", *, job: str = "", state: str = "", cause: str = ""
    ) -> None:
        """Say which job, how it ended, and why."""
        super().__init__(message)
        self.job = job
        self.state = state
        self.cause = cause


class JobCancelled(SeawallError):
    """Somebody cancelled the job, and its function stops here."""

    reason = "job_cancelled"


class UnknownJob(SeawallError, LookupError):
    """There is no such job; or not any more, since how a job ended is not kept for ever."""

    reason = "unknown_job"


class JobExpired(UnknownJob):
    """The job ended long ago, and what came out of it is not kept any more."""

    reason = "job_expired"


class AmbiguousHeader(SeawallError, ValueError):
    """A request gives a header more than once, with different values: nobody knows which counts."""

    reason = "ambiguous_header"


class KeyMissing(SeawallError):
    """An idempotency key is needed here, and there is none."""

    reason = "key_missing"


class KeyReused(SeawallError):
    """The idempotency key was used before, with another payload: take a fresh one."""

    reason = "key_reused"


class RecordedFailure(SeawallError):
    """The first with this key failed, and that was kept: `kind` and `message` are of its error."""

    reason = "recorded_failure"

    def __init__(self, kind: str, message: str = "") -> None:
        """Say what the first one raised."""
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message


class AnswerNotKept(SeawallError):
    """It was done before, and its answer was too large to be kept: it is not done again."""

    reason = "answer_not_kept"


class RecordGarbled(SeawallError):
    """The stored record makes no sense: nothing is done by it, and somebody has to look."""

    reason = "record_garbled"


class FifoStateLost(SeawallError):
    """The receiver has more of this sender than the sender knows of: `restart` the sender."""

    reason = "fifo_state_lost"


class NotDelivered(SeawallError):
    """The receiver answered, and did not take the event."""

    reason = "not_delivered"


class BadSignature(SeawallError, ValueError):
    """What was received is not signed by who knows the secret, or was signed too long ago."""

    reason = "bad_signature"


def matches(error: BaseException, types: tuple[type[Exception], ...]) -> bool:
    """Tell whether `error` is one of `types`; a group is, if it is named or all its leaves are."""
    if isinstance(error, types):
        return True
    return isinstance(error, BaseExceptionGroup) and all(
        matches(leaf, types) for leaf in error.exceptions
    )


class ErrorTypes:
    """A predicate `(error, value)` that is true for errors of certain types."""

    __slots__ = ("types",)

    def __init__(self, types: tuple[type[Exception], ...]) -> None:
        """Match `types`, and groups of nothing else."""
        self.types = types

    def __call__(self, error: BaseException | None, value: object = None) -> bool:
        """Tell whether a call that ended so raised one of the types."""
        return error is not None and matches(error, self.types)

    def __repr__(self) -> str:
        names = [kind.__name__ for kind in self.types]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"


def error_predicate(name: str, rule: ErrorKinds | F) -> F | ErrorTypes:
    """Return the argument `name`, a plain function or types of errors, as a predicate; or raise."""
    if isinstance(rule, (type, tuple)):
        types = check.error_types(name, rule)
        if not types:
            raise ValueError(f"{name}={rule!r}: write at least one type, such as {name}=OSError")
        return ErrorTypes(types)
    return check.plain_function(name, rule)


def add_note(error: BaseException, note: str, mark: str, *more: str) -> None:
    """Add `note` and `more`, each after "seawall: ", in place of older ones that hold `mark`.

    An error object that is raised again and again must not collect notes without end; and one that
    takes no notes (a frozen one, say) is left as it is.
    """
    try:
        kept = [
            old
            for old in getattr(error, "__notes__", ())
            if not (old.startswith("seawall: ") and mark in old)
        ]
        error.__notes__ = [*kept, *(f"seawall: {text}" for text in (note, *more))]
    except Exception:  # noqa: BLE001, S110 - a note is not worth an error
        pass
