"""Fewer retries for a service in trouble, and none for one that is drowning."""

from __future__ import annotations

from seawall import _checks as check

LONGEST_QUEUE_WAIT = 2.0
"""Seconds in the queue above which nothing is retried."""

FULLEST = 0.9
"""The share of slots in use above which nothing is retried."""

MANY_ERRORS = 0.5
"""The share of failed calls above which one retry is made."""

SOME_ERRORS = 0.2
"""The share of failed calls above which two retries are made."""


class Pressure:
    """How hard a dependency is pressed at this moment."""

    __slots__ = ("breaker_open", "error_rate", "queue_wait", "saturation")

    def __init__(
        self,
        *,
        breaker_open: bool = False,
        queue_wait: float = 0.0,
        saturation: float = 0.0,
        error_rate: float = 0.0,
    ) -> None:
        """Take what is known; what is not known presses nothing.

        `queue_wait` is seconds, `saturation` the share of slots in use (above 1 when more wait),
        `error_rate` the share of calls that failed lately.
        """
        self.breaker_open = breaker_open
        self.queue_wait = check.seconds("queue_wait", queue_wait, zero=True, infinite=True)
        self.saturation = check.at_least("saturation", saturation, 0)
        self.error_rate = check.ratio("error_rate", error_rate, zero=True)

    def allowed_retries(self, maximum: int) -> int:
        """Return how many retries a call may make under this pressure, at most `maximum`."""
        check.count("maximum", maximum, minimum=0)
        if self.breaker_open or self.queue_wait > LONGEST_QUEUE_WAIT or self.saturation > FULLEST:
            return 0
        if self.error_rate > MANY_ERRORS:
            return min(1, maximum)
        if self.error_rate > SOME_ERRORS:
            return min(2, maximum)
        return maximum

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return (
            f"Pressure(breaker_open={self.breaker_open}, queue_wait={self.queue_wait:g}, "
            f"saturation={self.saturation:g}, error_rate={self.error_rate:g})"
        )
