"""What a run writes down: counts for each step of time, by clients, service and guard.

Promises:
- A call counts in the step in which it came, whenever it ends: the share of good answers of a step
  is that of the callers who came in it.
- The load on a service counts in the step in which a call reached it.
- States and queues are sampled at the end of each step.
- A record is plain data: it is pickled, compared and written as JSON.
"""

from __future__ import annotations

from array import array
from typing import Final

OUTCOMES: Final = ("ok", "degraded", "refused", "failed", "gave_up")
"""How a call can end: real answer, lesser answer, `Rejected`, any other error, caller left."""


class Steps:
    """The current step of a run, and how many there are; one more is for what comes after the end.

    The world moves `now`; a record reads it for each count, which is cheaper than a division.
    """

    __slots__ = ("count", "now", "seconds")

    def __init__(self, seconds: float, count: int) -> None:
        """Divide a run into `count` steps of `seconds`."""
        self.seconds = seconds
        self.count = count
        self.now = 0


class ClientRecord:
    """The calls of one group of clients."""

    __slots__ = ("came", "ended", "errors", "latencies", "name")

    def __init__(self, name: str, steps: Steps) -> None:
        """Start without calls."""
        self.name = name
        self.came = [0] * (steps.count + 1)
        self.ended: dict[str, list[int]] = {
            outcome: [0] * (steps.count + 1) for outcome in OUTCOMES
        }
        self.latencies = [array("d") for _ in range(steps.count + 1)]
        """Seconds of the good answers, by step."""
        self.errors: dict[str, int] = {}
        """Number of failed and refused calls by the type of their error."""

    def end(self, step: int, outcome: str, seconds: float) -> None:
        """Count the end of a call that came in `step`."""
        self.ended[outcome][step] += 1
        if outcome == "ok":
            self.latencies[step].append(seconds)

    def fail(self, error: BaseException) -> None:
        """Count the type of an error."""
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1


class ServiceRecord:
    """The load on one service."""

    __slots__ = ("calls", "capacity", "failed", "in_flight", "name", "queue_age", "queued")

    def __init__(self, name: str, capacity: float | None, steps: Steps) -> None:
        """Start without calls."""
        self.name = name
        self.capacity = capacity
        """Calls a second that it can serve at the beginning; None if nothing bounds it."""
        self.calls = [0] * (steps.count + 1)
        self.failed = [0] * (steps.count + 1)
        self.in_flight: list[int] = []
        self.queued: list[int] = []
        self.queue_age: list[float] = []
        """Seconds for which the first of the queue has waited."""


class GuardRecord:
    """The state of one guard's policies."""

    __slots__ = ("breaker", "in_flight", "name", "queue_age", "waiting")

    def __init__(self, name: str) -> None:
        """Start without samples."""
        self.name = name
        self.breaker: list[str] = []
        """State of its breaker; empty without one."""
        self.in_flight: list[int] = []
        self.waiting: list[int] = []
        """Callers in the queues of its limits; empty without one."""
        self.queue_age: list[float] = []
