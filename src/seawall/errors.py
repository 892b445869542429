"""Every error Seawall raises.

docs/reference/errors.md, made from this file, has them in a table. A `Rejected` was never
attempted, so it is safe to try again. After any other error, something may have happened at the
other side. Each refusal is a new instance, so that tracebacks do not grow. What the guarded
function itself raises passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from seawall import _checks as check

__all__ = [
    "AmbiguousHeader",
    "AnswerNotKept",
    "BadSignature",
    "BulkheadFull",
    "CacheMiss",
    "ChannelClosed",
    "ChannelFull",
    "CircuitOpen",
    "Contended",
    "DeadlineExceeded",
    "DeferredCallsFull",
    "FifoFull",
    "FifoStateLost",
    "JobCancelled",
    "JobExpired",
    "JobFailed",
    "JobLost",
    "KeyInFlight",
    "KeyMissing",
    "KeyReused",
    "LeaseLost",
    "NotDelivered",
    "Overloaded",
    "PoolExhausted",
    "QueueFull",
    "RateLimited",
    "RecordGarbled",
    "RecordedFailure",
    "Rejected",
    "ReportedFailure",
    "SeawallError",
    "StoreUnavailable",
    "TimedOut",
    "UnknownJob",
    "WorkerDied",
]

F = TypeVar("F", bound=Callable[..., Any])

ErrorKinds = type[Exception] | tuple[type[Exception], ...]
"""One exception type, or several."""


class SeawallError(Exception):
    """Base class of all errors that Seawall raises."""

    reason = "failed"
    """A stable word for metrics, logs and `Result.reason`."""


class Rejected(SeawallError):
    """The call was refused before the work began, so retrying elsewhere or later is safe."""

    reason = "rejected"
    key: object = None
    """The key that was refused, by a policy that has keys."""

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float | None = None,
        guard: str = "",
        policy: str = "",
    ) -> None:
        """Store why, which kind of policy of which guard refused, and when a retry may help."""
        super().__init__(message)
        self.retry_after = retry_after
        self.guard = guard
        self.policy = policy


class CircuitOpen(Rejected):
    """The breaker refuses calls at the moment; `retry_after` is when it may probe."""

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
        """Store the last failure, and for how many seconds the breaker has not been closed.

        `failure` is the type and message of the error that opened it, as text without secrets;
        empty if that is unknown, or if no call opened it.
        """
        super().__init__(message, retry_after=retry_after, guard=guard, policy=policy)
        self.failure = failure
        self.open_for = open_for


class BulkheadFull(Rejected):
    """All slots are taken, and there is no room or no time left to wait for one."""

    reason = "bulkhead_full"


class RateLimited(Rejected):
    """The call exceeds a rate limit; `limit` is the name of the first one exceeded."""

    reason = "rate_limited"
    own_limit = False
    """Whether it is the caller's own limit: a server then answers 429, otherwise 503."""
    violated: tuple[str, ...] = ()
    """Names of the limits that a request exceeds, if a server's edge refused it."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Response headers that describe these limits, if a server's edge refused it."""

    def __init__(
        self,
        message: str = "",
        *,
        limit: str = "",
        retry_after: float | None = None,
        guard: str = "",
        policy: str = "",
    ) -> None:
        """Store the limit's name, and after how many seconds the same call will be admitted."""
        super().__init__(message, retry_after=retry_after, guard=guard, policy=policy)
        self.limit = limit


class Overloaded(Rejected):
    """The call was shed: there is more load than the service can handle well."""

    reason = "overloaded"


class PoolExhausted(Rejected):
    """All of the pool's resources are in use, and there is no room or time left to wait."""

    reason = "pool_exhausted"


class ChannelFull(Rejected):
    """The channel has no room for another item, and is configured to refuse."""

    reason = "channel_full"


class QueueFull(Rejected):
    """The queue holds its maximum number of jobs; nothing was pushed."""

    reason = "queue_full"


class DeferredCallsFull(Rejected):
    """The maximum number of calls is already stored for later; this one was not stored."""

    reason = "deferred_calls_full"


class FifoFull(Rejected):
    """The maximum number of messages is unacknowledged; nothing was sent."""

    reason = "fifo_full"


class KeyInFlight(Rejected):
    """The first call with this idempotency key is still running: retry after `retry_after`."""

    reason = "key_in_flight"


class DeadlineExceeded(Rejected, TimeoutError):
    """The deadline had passed, or left too little time, before the work began."""

    reason = "deadline_exceeded"


class TimedOut(SeawallError, TimeoutError):
    """The work began and did not end in time."""

    reason = "timed_out"

    def __init__(self, message: str = "", *, guard: str = "", seconds: float | None = None) -> None:
        """Store which guard's time ran out (`guard`), and after how many seconds, if known."""
        super().__init__(message)
        self.guard = guard
        self.seconds = seconds


class ReportedFailure(SeawallError):
    """A block under `hold()` reported failure with `call.failed("...")`; this is never raised."""

    reason = "reported_failure"


class CacheMiss(SeawallError, LookupError):
    """The cache holds nothing usable for these arguments."""

    reason = "cache_miss"


class ChannelClosed(SeawallError):
    """Nothing can be put into the channel any more, or nothing is left in it."""

    reason = "channel_closed"


class Contended(SeawallError):
    """Another writer changed the same record first at every try; nothing was changed."""

    reason = "contended"


class WorkerDied(SeawallError):
    """The worker process crashed: whether the work had an effect is unknown."""

    reason = "worker_died"

    def __init__(self, message: str = "", *, item: str = "", exit_code: int | None = None) -> None:
        """Store the item in progress, and how the process ended, if known."""
        super().__init__(message)
        self.item = item
        self.exit_code = exit_code


class StoreUnavailable(SeawallError):
    """The shared store did not answer in time, or refused: the request may have taken effect."""

    reason = "store_unavailable"


class LeaseLost(SeawallError):
    """The lease is not held, or not for sure: work that it protects must not be done."""

    reason = "lease_lost"


class JobLost(SeawallError):
    """The claim is no longer valid: its lease expired, or the job was cancelled or has ended."""

    reason = "job_lost"

    def __init__(self, message: str = "", *, job: str = "", state: str = "") -> None:
        """Store the job's id and its current state ("claimed": by another worker)."""
        super().__init__(message)
        self.job = job
        self.state = state


class JobFailed(SeawallError):
    """The job has no result: `state` is "dead", "cancelled", "expired", or "done" if unreadable."""

    reason = "job_failed"

    def __init__(
        self, message: str = "", *, job: str = "", state: str = "", cause: str = ""
    ) -> None:
        """Store the job's id, how it ended, and why."""
        super().__init__(message)
        self.job = job
        self.state = state
        self.cause = cause


class JobCancelled(SeawallError):
    """The job was cancelled, and its function stops here."""

    reason = "job_cancelled"


class UnknownJob(SeawallError, LookupError):
    """There is no such job; or no longer, since ended jobs are not kept for ever."""

    reason = "unknown_job"


class JobExpired(UnknownJob):
    """The job ended long ago, and its result is no longer kept."""

    reason = "job_expired"


class AmbiguousHeader(SeawallError, ValueError):
    """A request has the same header more than once, with different values."""

    reason = "ambiguous_header"


class KeyMissing(SeawallError):
    """An idempotency key is required here, and there is none."""

    reason = "key_missing"


class KeyReused(SeawallError):
    """The idempotency key was used before with another payload: use a new one."""

    reason = "key_reused"


class RecordedFailure(SeawallError):
    """The first call with this key failed and was recorded: `kind` and `message` of its error."""

    reason = "recorded_failure"

    def __init__(self, kind: str, message: str = "") -> None:
        """Store what the first call raised."""
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message


class AnswerNotKept(SeawallError):
    """The call was done before, but its answer was too large to keep; it is not repeated."""

    reason = "answer_not_kept"


class RecordGarbled(SeawallError):
    """The stored record is invalid: it is not acted on, and an operator must look at it."""

    reason = "record_garbled"


class FifoStateLost(SeawallError):
    """The receiver is ahead of what this sender knows: call `restart` on the sender."""

    reason = "fifo_state_lost"


class NotDelivered(SeawallError):
    """The receiver answered, but did not accept the event."""

    reason = "not_delivered"


class BadSignature(SeawallError, ValueError):
    """The signature was not made with the secret, or is too old."""

    reason = "bad_signature"


def matches(error: BaseException, types: tuple[type[Exception], ...]) -> bool:
    """Return whether `error`, or every leaf of an exception group, is one of `types`."""
    if isinstance(error, types):
        return True
    return isinstance(error, BaseExceptionGroup) and all(
        matches(leaf, types) for leaf in error.exceptions
    )


class ErrorTypes:
    """A predicate `(error, value)` that is true for errors of certain types."""

    def __init__(self, types: tuple[type[Exception], ...]) -> None:
        self.types = types

    def __call__(self, error: BaseException | None, value: object = None) -> bool:
        return error is not None and matches(error, self.types)

    def __repr__(self) -> str:
        names = [kind.__name__ for kind in self.types]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"


def error_predicate(name: str, rule: ErrorKinds | F) -> F | ErrorTypes:
    """Return the argument `name`, a function or exception types, as a predicate; or raise."""
    if isinstance(rule, (type, tuple)):
        types = check.error_types(name, rule)
        if not types:
            raise ValueError(f"{name}={rule!r}: write at least one type, such as {name}=OSError")
        return ErrorTypes(types)
    return check.plain_function(name, rule)


def add_note(error: BaseException, note: str, mark: str, *more: str) -> None:
    """Add `note` and `more`, prefixed with "seawall: ", replacing older notes with `mark`.

    An error object that is raised again and again must not collect notes without end. An error that
    takes no notes (a frozen one, for example) is left unchanged.
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
