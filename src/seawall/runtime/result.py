"""The outcome of a call, as a value instead of an exception."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Result(Generic[T]):
    """The return value of `guard.attempt(...)`: the value or the error, and details."""

    __slots__ = (
        "age",
        "attempts",
        "cause",
        "elapsed",
        "error",
        "level",
        "reason",
        "source",
        "value",
    )

    def __init__(
        self,
        *,
        value: T | None,
        error: Exception | None,
        level: int,
        reason: str | None,
        attempts: int,
        elapsed: float,
        source: str | None = None,
        cause: Exception | None = None,
        age: float | None = None,
    ) -> None:
        self.value = value
        """The answer; None if there is an error."""
        self.error = error
        """The error that the call would have raised; None if it was answered."""
        self.level = level
        """0 for the real answer, 1 for the first fallback, and so on."""
        self.reason = reason
        """Why it is degraded or failed, as a stable word such as "circuit_open"; None if real."""
        self.source = source
        """Where a degraded answer comes from, such as "cache: stale"; None if real or failed."""
        self.cause = cause
        """The error that made a degraded answer necessary; None if real or failed.

        Its traceback keeps the frames it went through alive for as long as this result.
        """
        self.age = age
        """Seconds since a stale answer was fetched; None if it is not stale."""
        self.attempts = attempts
        """Number of times the function was started."""
        self.elapsed = elapsed
        """Seconds from start to end."""

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
