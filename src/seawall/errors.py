"""Every error Seawall raises.

    SeawallError
    ├── Rejected            never attempted; has retry_after, guard and policy
    │   ├── CircuitOpen         the breaker is open, isolated, or busy probing
    │   ├── BulkheadFull        no slot, and no place (or no time) to wait for one
    │   └── DeadlineExceeded    the deadline had passed before the work began
    ├── TimedOut            began, and ran out of time; also a TimeoutError
    └── CacheMiss           nothing stored for that key; also a LookupError

A refusal is a new instance each time, so that tracebacks do not grow. What the guarded function
itself raises passes through as it is.
"""

from __future__ import annotations


class SeawallError(Exception):
    """The root of all errors that Seawall raises."""

    reason = "failed"
    """A stable word for metrics, logs and `Result.reason`."""


class Rejected(SeawallError):
    """The call was refused before the work began, so it is safe to do again elsewhere or later."""

    reason = "rejected"

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
    """The breaker does not let calls through at the moment."""

    reason = "circuit_open"


class BulkheadFull(Rejected):
    """All slots are taken, and there is no place or no time left to wait for one."""

    reason = "bulkhead_full"


class DeadlineExceeded(Rejected):
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


class CacheMiss(SeawallError, LookupError):
    """The cache holds nothing usable for these arguments."""

    reason = "cache_miss"


def reason_of(error: BaseException) -> str:
    """Return the stable word for `error`: its `reason` if it is ours, else the name of its type."""
    return error.reason if isinstance(error, SeawallError) else type(error).__name__


def matches(error: BaseException, types: tuple[type[Exception], ...]) -> bool:
    """Tell whether `error` is one of `types`; a group is, if it is named or all its leaves are."""
    if isinstance(error, types):
        return True
    return isinstance(error, BaseExceptionGroup) and all(
        matches(leaf, types) for leaf in error.exceptions
    )


def add_note(error: BaseException, note: str, mark: str) -> None:
    """Add "seawall: " and `note`, in place of an older note of ours that holds `mark`.

    An error object that is raised again and again must not collect notes without end; and one that
    takes no notes (a frozen one, say) is left as it is.
    """
    try:
        kept = [
            old
            for old in getattr(error, "__notes__", ())
            if not (old.startswith("seawall: ") and mark in old)
        ]
        error.__notes__ = [*kept, f"seawall: {note}"]
    except Exception:  # noqa: BLE001, S110 - a note is not worth an error
        pass
