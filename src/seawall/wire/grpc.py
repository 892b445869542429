"""gRPC statuses and retry pushback.

`grpc-retry-pushback-ms` is a server's instruction about retries, in its trailing metadata: a number
of milliseconds to wait, or any other value for "do not retry". So a value that cannot be parsed
means: do not retry.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, isfinite
from typing import Any, Final

from seawall import errors
from seawall.errors import DeadlineExceeded, SeawallError, TimedOut
from seawall.wire.text import text_of, whole_of

PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""Trailing metadata: milliseconds to wait before a retry; any other value means: do not retry."""
NEVER: Final = -1.0
"""Seconds of a pushback that means: do not retry."""
FAILURES: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Statuses that indicate the server's health; the others are normal responses."""

_DIGITS: Final = 10
_MOST: Final = 10**_DIGITS - 1

_ERRORS: Final[dict[str, tuple[type, ...]]] = {
    "DEADLINE_EXCEEDED": (DeadlineExceeded, TimedOut),
    "RESOURCE_EXHAUSTED": (
        *(errors.RateLimited, errors.Overloaded, errors.BulkheadFull, errors.PoolExhausted),
        *(errors.ChannelFull, errors.QueueFull, errors.DeferredCallsFull, errors.FifoFull),
    ),
    "UNAVAILABLE": (
        *(errors.Rejected, errors.StoreUnavailable, errors.LeaseLost, errors.ChannelClosed),
        *(errors.CacheMiss, errors.NotDelivered),
    ),
    "ABORTED": (errors.KeyInFlight, errors.Contended, errors.JobLost),
    "CANCELLED": (errors.JobCancelled,),
    "NOT_FOUND": (errors.UnknownJob,),
    "INVALID_ARGUMENT": (errors.AmbiguousHeader, errors.KeyMissing),
    "FAILED_PRECONDITION": (errors.KeyReused,),
    "PERMISSION_DENIED": (errors.BadSignature,),
}
_NAMES: Final = {kind: name for name, kinds in _ERRORS.items() for kind in kinds}


def status_name(error: SeawallError) -> str:
    """Return the name of the gRPC status for `error`.

    Exhausted resources (rates, slots, queues) are RESOURCE_EXHAUSTED, which clients do not retry
    unless the server says when; other refusals, such as an open circuit, are UNAVAILABLE.
    """
    for kind in type(error).__mro__:
        if kind in _NAMES:
            return _NAMES[kind]
    return "INTERNAL"


def read_pushback(value: object) -> float:
    """Return the seconds to wait before a retry, or `NEVER`."""
    text = text_of(value)
    milliseconds = None if text is None else whole_of(text, _DIGITS)
    return NEVER if milliseconds is None else milliseconds / 1000


def pushback_of(metadata: Iterable[tuple[Any, Any]] | None) -> float | None:
    """Return the pushback in trailing metadata, or None; `NEVER` for several different values."""
    values: list[Any] = [value for key, value in metadata or () if key == PUSHBACK_KEY]
    if not values:
        return None
    return read_pushback(values[0]) if values.count(values[0]) == len(values) else NEVER


def write_pushback(seconds: float) -> str:
    """Return the value that asks to wait `seconds`, rounded up; "-1" for never."""
    if not isfinite(seconds) or seconds < 0 or seconds * 1000 > _MOST:
        return "-1"
    return str(ceil(seconds * 1000))


def pushback_for(error: SeawallError) -> str | None:
    """Return the pushback for a caller that gets `error`, never after its own deadline."""
    if isinstance(error, (DeadlineExceeded, TimedOut)):
        return "-1"
    asked = getattr(error, "retry_after", None)
    return write_pushback(asked) if isinstance(asked, (int, float)) else None
