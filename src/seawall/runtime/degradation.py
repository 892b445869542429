"""Degraded answers: how they are reported, and the collectors of them.

Promises:
- A degraded answer reports its source, level and cause to subscribers and collectors, and the first
  of each guard to the log. Without any of them, nothing is built.
- Neither an event nor a collector keeps the error itself alive, since its traceback refers to the
  caller's frames. They keep only its kind, and its message in one redacted line.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Final, Self, overload

from seawall._failures import reason_of, said_by
from seawall._forks import survives_fork
from seawall.context import reset
from seawall.events import CallDegraded
from seawall.events.bus import deliver, is_muted, listening
from seawall.runtime.mutex import Mutex

MOST_COLLECTED: Final = 100  # degraded answers in one collector; further ones are only counted
STALE: Final = "cache: stale"  # the source of an old answer from a cache


@dataclass(slots=True, eq=False)
class Degradation:
    """The lesser answer of a call, and why it was used."""

    source: str
    level: int
    error: Exception
    age: float | None = None  # age in seconds, if it is stale

    def report(self, guard: str) -> None:
        """Report to subscribers and collectors, and at a low rate to the log."""
        event = self.collect(guard)
        if is_muted():
            return
        if event is not None or listening():
            event = event or self._event(guard)
            deliver(event)
        from seawall.events.log import changes

        changes.write_degraded(guard, lambda: event or self._event(guard))

    def collect(self, guard: str) -> CallDegraded | None:
        """Report to collectors only; return the event, if there are any."""
        collector = _collector_var.get()
        if collector is None:
            return None
        event = self._event(guard)
        collector.add(event)
        return event

    def _event(self, guard: str) -> CallDegraded:
        return CallDegraded(
            guard,
            source=self.source,
            level=self.level,
            reason=reason_of(self.error),
            message=said_by(self.error),
            age=self.age,
        )


def source_name(function: Any) -> str:
    """Return a name for the answers of `function`, without any value that it contains."""
    function = getattr(unwrapped(function), "func", function)  # of a partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name).rpartition("<locals>.")[2]


def unwrapped(function: Any) -> Any:
    """Return the function inside of all decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


class Degradations(Sequence[CallDegraded]):
    """The degraded answers of a block, in the order in which they were given."""

    def __init__(self) -> None:
        self._events: list[CallDegraded] = []
        self.left_out = 0  # number of degraded answers beyond those that are kept
        self._mutex = Mutex()
        self._open = False
        self._outer: Degradations | None = None
        self._token: Token[Degradations | None] | None = None

    def __enter__(self) -> Self:
        if self._token is not None:
            raise RuntimeError("these were collected already: write degradations() for each block")
        survives_fork(self)
        self._outer = _collector_var.get()
        self._token = _collector_var.set(self)
        self._open = True
        return self

    def __exit__(self, *_exc: object) -> None:
        # A task that continues with a copy of this context must not fill it for ever.
        self._open = False
        if self._token is not None:
            reset(_collector_var, self._token)

    def add(self, event: CallDegraded) -> None:
        """Add one degraded answer, here and in the blocks around this one."""
        self._mutex.do(lambda: self._take(event))
        if self._outer is not None:
            self._outer.add(event)

    def _take(self, event: CallDegraded) -> None:
        if not self._open:
            return
        if len(self._events) < MOST_COLLECTED:
            self._events.append(event)
        else:
            self.left_out += 1

    def _after_fork(self) -> None:
        self._mutex = Mutex()  # another thread may have held it

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> CallDegraded: ...
    @overload
    def __getitem__(self, index: slice) -> list[CallDegraded]: ...
    def __getitem__(self, index: int | slice) -> CallDegraded | list[CallDegraded]:
        return self._events[index]

    def __repr__(self) -> str:
        more = f", {self.left_out} left out" if self.left_out else ""
        return f"<Degradations {self._events!r}{more}>"


_collector_var: Final[ContextVar[Degradations | None]] = ContextVar(
    "seawall_degradations", default=None
)


def degradations() -> Degradations:
    """Collect every degraded answer that is given inside a `with` block, until it ends.

    Write `with degradations() as seen:`. Answers of nested guards, child tasks and Seawall's worker
    threads are included. At most 100 are kept; `seen.left_out` counts the others.
    """
    return Degradations()
