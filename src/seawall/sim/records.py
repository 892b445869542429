"""What happens to a world during a run, and what the run writes down for each step of time.

Promises:
- A call counts in the step in which it came, whenever it ends: the share of good answers of a step
  is that of the callers who came in it.
- The load on a service counts in the step in which a call reached it.
- States and queues are sampled at the end of each step.
- A record is plain data: it is pickled, compared and written as JSON.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

OUTCOMES: Final = ("ok", "degraded", "refused", "failed", "gave_up")
"""How a call can end: real answer, lesser answer, `Rejected`, any other error, caller left."""


@dataclass
class Steps:
    """The `count` steps of a run, of so many `seconds`; one more is for what comes after the end.

    The world moves `now`; a record reads it for each count, which is cheaper than a division.
    """

    seconds: float
    count: int
    now: int = 0


class ClientRecord:
    """The calls of one group of clients."""

    def __init__(self, name: str, steps: Steps) -> None:
        self.name = name
        self.came = [0] * (steps.count + 1)
        self.ended = {outcome: [0] * (steps.count + 1) for outcome in OUTCOMES}
        self.latencies = [array("d") for _ in range(steps.count + 1)]  # of good answers, by step
        self.errors: dict[str, int] = {}  # failed and refused calls by the type of their error

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

    def __init__(self, name: str, capacity: float | None, steps: Steps) -> None:
        self.name = name
        self.capacity = capacity  # calls a second that it can serve at first; None for any number
        self.calls = [0] * (steps.count + 1)
        self.failed = [0] * (steps.count + 1)
        self.in_flight: list[int] = []
        self.queued: list[int] = []
        self.queue_age: list[float] = []  # seconds for which the first of the queue has waited


@dataclass
class GuardRecord:
    """The state of one guard's policies, by step."""

    name: str
    breaker: list[str] = field(default_factory=list)  # state of its breaker; empty without one
    in_flight: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # callers in the queues of its limits
    queue_age: list[float] = field(default_factory=list)


class Change(NamedTuple):
    """One change: `begin` makes it, `end` undoes it (None: it cannot be undone).

    Services, networks, stores and clients make them; `World.at` says when and for how long.
    """

    text: str
    begin: Callable[[], Any]
    end: Callable[[], Any] | None = None
    is_load: bool = False
    """Whether clients come more often, and nothing is broken."""


class Disturbance(NamedTuple):
    """A change in the history of a run; `until` is infinite if it was never undone."""

    at: float
    until: float
    text: str
    is_load: bool = False
