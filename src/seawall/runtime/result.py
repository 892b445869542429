"""The outcome of a call, as a value instead of an exception."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Result(Generic[T]):
    """The return value of `guard.attempt(...)`: the value or the error, and details."""

    value: T | None
    """The answer; None if there is an error."""
    error: Exception | None
    """The error that the call would have raised; None if it was answered."""
    level: int
    """0 for the real answer, 1 for the first fallback, and so on."""
    reason: str | None
    """Why it is degraded or failed, as a stable word such as "circuit_open"; None if real."""
    attempts: int
    """Number of times the function was started."""
    elapsed: float
    """Seconds from start to end."""
    source: str | None = None
    """Where a degraded answer comes from, such as "cache: stale"; None if real or failed."""
    cause: Exception | None = None
    """The error that made a degraded answer necessary; None if real or failed.

    Its traceback keeps the frames it went through alive for as long as this result.
    """
    age: float | None = None
    """Seconds since a stale answer was fetched; None if it is not stale."""

    @property
    def ok(self) -> bool:
        """Whether there is an answer, real or degraded."""
        return self.error is None

    @property
    def degraded(self) -> bool:
        """Whether the answer is not the real one."""
        return self.level > 0

    def unwrap(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        value: Any = self.value
        return value  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        what = f"value={self.value!r}" if self.error is None else f"error={self.error!r}"
        source = f", source={self.source!r}" if self.source else ""
        level = f"{source}, level={self.level}, reason={self.reason!r}" if self.reason else ""
        return f"<Result {what}{level}, attempts={self.attempts}, elapsed={self.elapsed:.3f}>"
