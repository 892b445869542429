"""Log records: changes of state, events, and failures of handlers.

Promises:
- With no configuration, each change of state (a breaker opened or closed, a host was ejected, a job
  died) is a line on the logger `seawall.events`: trouble at WARNING or ERROR, and the end of a
  trouble at the level at which it began. Probes of a breaker during an outage are at DEBUG.
- The first degraded answer of a guard is a line there too, at WARNING and with its cause. Further
  ones are counted in a line a minute. While `log_events()` is on, it writes these lines instead.
- A failure of a handler is a line with its traceback on the logger `seawall`, at each attempt
  (WARNING) and at its end (ERROR). The text of the traceback is redacted; `exc_info` of the record
  is the error itself, for tools that read it.
- In a flood some lines are left out, and the next one says how many.
- Neither a message nor a field contains a line break or another control character, and both are
  bounded. A success makes no line, and costs nothing here. Nothing is raised into the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from math import isfinite
from threading import Lock, local
from typing import Final, TypeAlias

from seawall._failures import described, reason_of, traceback_of
from seawall._forks import survives_fork
from seawall._redaction import printable, safe_line
from seawall.clock import SYSTEM, Clock
from seawall.events import BreakerChanged, Event

MOST_SORTS: Final = 1000  # sorts of lines with a limit of their own; all others share one

FAILURES_PER_SECOND: Final = 5.0
FAILURES_AT_ONCE: Final = 50
"""Limit of lines about failed attempts of one worker, for each level; further ones are counted."""

LONGEST_WHAT: Final = 200


class LineBound:
    """A token bucket for each sort of line. Thread-safe."""

    def __init__(self, per_second: float, burst: int, clock: Clock) -> None:
        self._rate = per_second
        self._burst = float(burst)
        self._clock = clock
        self._buckets: dict[Hashable, tuple[float, float, int]] = {}
        self._lock = Lock()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._lock = Lock()  # another thread may have held it

    def left_out(self, sort: Hashable) -> int | None:
        """Return how many lines were left out before this one; None if this one is left out too."""
        with self._lock:
            now = self._clock.now()
            if sort not in self._buckets and len(self._buckets) >= MOST_SORTS:
                sort = None
            tokens, since, left_out = self._buckets.get(sort, (self._burst, now, 0))
            tokens = min(self._burst, tokens + max(0.0, now - since) * self._rate)
            if tokens < 1:
                self._buckets[sort] = tokens, now, left_out + 1
                return None
            self._buckets[sort] = tokens - 1, now, 0
            return left_out


class FailureLog:
    """Logs the jobs, calls or events of a worker whose handler failed."""

    def __init__(self, kind: str, name: str, clock: Clock) -> None:
        """Log for the `kind` ("queue", "jobs", "outbox"...) of that name."""
        self._kind = kind
        self._name = printable(name, LONGEST_WHAT)
        self._bound = LineBound(FAILURES_PER_SECOND, FAILURES_AT_ONCE, clock)

    def failed(
        self, what: str, id_: str, attempt: int, error: object, *, delay: float, dead: bool
    ) -> None:
        """Log that `what` failed; `delay` is the pause before the next attempt. Never raises."""
        level = logging.ERROR if dead else logging.WARNING
        logger = logging.getLogger("seawall")
        if not logger.isEnabledFor(level) or (left_out := self._bound.left_out(level)) is None:
            return
        raised = error if isinstance(error, BaseException) else None
        said = safe_line(str(error)) if raised is None else described(raised)
        after = "given up" if dead else f"tried again in {delay:.3g} s"
        more = f" ({left_out} more were left out)" if left_out else ""
        extra = {
            f"seawall_{self._kind}": self._name,
            "seawall_id": printable(id_, LONGEST_WHAT),
            "seawall_attempt": attempt,
            "seawall_reason": said if raised is None else reason_of(raised),
        }
        text = "%s %r: %s failed at attempt %d, %s: %s%s"
        args = (self._kind, self._name, printable(what, LONGEST_WHAT), attempt, after, said, more)
        try:
            file, line, function, _ = logger.findCaller(stacklevel=2)
            info = None if raised is None else (type(raised), raised, raised.__traceback__)
            record = logger.makeRecord(
                logger.name, level, file, line, text, args, info, function, extra
            )
            if raised is not None:
                record.exc_text = traceback_of(raised) or said  # what formatters write
            logger.handle(record)
        except Exception:  # noqa: BLE001, S110 - a user's handler that raises
            pass


# Events

LEVELS: Final = {
    **dict.fromkeys(("call_retried", "call_hedged", "settings_changed"), logging.INFO),
    **dict.fromkeys(("lease_changed", "lifecycle_changed", "pipeline_ended"), logging.INFO),
    **dict.fromkeys(("job_died", "event_died", "item_died", "outbox_blocked"), logging.ERROR),
    **dict.fromkeys(("collection_changed", "stage_changed"), logging.ERROR),
}
"""Log level of each event; events that are not listed are warnings."""

RECOVERIES: Final[dict[str, tuple[str, object]]] = {
    "breaker_changed": ("after", "closed"),
    "health_changed": ("after", "healthy"),
    "level_changed": ("after", "full"),
    "store_mode_changed": ("after", "shared"),
    "loop_blocked": ("over", True),
    "overload_changed": ("overloaded", False),
    "source_changed": ("after", "ok"),
    "stage_changed": ("after", "flows"),
    "collection_changed": ("after", "enough"),
}
"""Events that can report the end of a trouble: the field, and its value then."""

LONGEST_WORD: Final = 120  # characters of one value in a message; the field has more of it
LONGEST_MESSAGE: Final = 500  # maximum characters of all values in a message

_NOT_IN_MESSAGE: Final = frozenset({"guard", "traceback"})
"""Fields left out of the message: the guard is already in the line, a traceback has many lines."""

_PARTING: Final = frozenset(" '\"=")  # characters that would make it unclear where a value ends

PROBING: Final = ("open", "half_open"), ("half_open", "open")
"""Changes of a breaker that stays open to its callers: about one a second in an outage."""

CHANGES_PER_SECOND: Final = 0.2
CHANGES_AT_ONCE: Final = 6
"""Limit of lines about changes of one sort and level in one guard; further ones are counted."""

DEGRADED_PER_SECOND: Final = 1 / 60
DEGRADED_AT_ONCE: Final = 1
"""Limit of lines about degraded answers of one guard; further ones are counted."""

LONGEST_VALUE: Final = 500

Value: TypeAlias = str | bool | int | float


def values_of(event: Event) -> dict[str, Value]:
    """Return the event's values by name, as text or numbers. Fields that are None are left out."""
    values: dict[str, Value] = {}
    for name, value in event.fields().items():
        if isinstance(value, (bool, int)) or (isinstance(value, float) and isfinite(value)):
            values[name] = value
        elif value is not None:
            values[name] = str(value)
    return values


def fields_of(values: dict[str, Value], prefix: str) -> dict[str, Value]:
    """Return `values` by prefixed name, with text shortened and without control characters."""
    return {
        prefix + name: printable(value, LONGEST_VALUE) if isinstance(value, str) else value
        for name, value in values.items()
    }


class EventLog:
    """Writes events to one logger."""

    def __init__(self, logger: logging.Logger, level: int | None, bound: LineBound) -> None:
        """Write at `level`, or at the event's own level if None."""
        self._logger = logger
        self._level = level
        self._bound = bound
        self._busy = local()

    def write(self, event: Event) -> None:
        """Write a line about `event`, unless the limit of such lines is reached."""
        usual = _level_of(event)
        # Many troubles, or probes, must not use up the budget of the line about the recovery.
        sort = event.name, event.guard, usual, _is_recovery(event)
        self.write_built(sort, usual, lambda: event)

    def write_built(self, sort: Hashable, usual: int, build: Callable[[], Event]) -> None:
        """Write a line about the event of `build`, unless the limit of its `sort` is reached."""
        level = usual if self._level is None else self._level
        # A log handler may itself be guarded: its events must not be logged without end.
        if getattr(self._busy, "writing", False) or not self._logger.isEnabledFor(level):
            return
        self._busy.writing = True
        try:
            left_out = self._bound.left_out(sort)
            if left_out is not None:
                event = build()
                values = values_of(event)
                if left_out:
                    values["left_out"] = left_out
                extra = {"seawall_event": event.name, **fields_of(values, "seawall_")}
                guard = _cut(event.guard, LONGEST_WORD)
                self._logger.log(
                    level, "%s in %r: %s", event.name, guard, _sentence(values), extra=extra
                )
        finally:
            self._busy.writing = False


class ChangeLog:
    """Writes changes of state and a few degraded answers while `log_events()` does not."""

    def __init__(self) -> None:
        self.paused = 0  # number of `log_events()` that are on
        self.reset()

    def reset(self) -> None:
        """Forget which lines were written: a new guard of the same name is another guard."""
        logger = logging.getLogger("seawall.events")
        bound = LineBound(CHANGES_PER_SECOND, CHANGES_AT_ONCE, SYSTEM)
        self._log = EventLog(logger, None, bound)
        rare = LineBound(DEGRADED_PER_SECOND, DEGRADED_AT_ONCE, SYSTEM)
        self._degraded = EventLog(logger, None, rare)

    def write(self, event: Event) -> None:
        """Write a line, unless the failure was logged with its traceback. Never raises."""
        if not getattr(event, "traceback", None):
            self._try(lambda: self._log.write(event))

    def write_degraded(self, guard: str, build: Callable[[], Event]) -> None:
        """Write a line about the degraded answer that `build` returns, if due. Never raises."""
        self._try(lambda: self._degraded.write_built(guard, logging.WARNING, build))

    def _try(self, write: Callable[[], None]) -> None:
        if not self.paused:
            try:
                write()
            except Exception:  # noqa: BLE001, S110 - a user's handler that raises
                pass


changes: Final = ChangeLog()


def _level_of(event: Event) -> int:
    if isinstance(event, BreakerChanged) and (event.before, event.after) in PROBING:
        return logging.DEBUG
    if getattr(event, "before", "") == "unknown" and _is_recovery(event):
        return logging.INFO  # there was no trouble: the service has just started
    return LEVELS.get(event.name, logging.WARNING)


def _is_recovery(event: Event) -> bool:
    field, value = RECOVERIES.get(event.name, ("", None))
    return field != "" and getattr(event, field) == value


def _sentence(values: dict[str, Value]) -> str:
    """Return the values that are not empty: "closed -> open (tripped) reason=KeyError"."""
    moved = bool(values.get("before") and values.get("after"))
    words = []
    for name, value in values.items():
        if moved and name == "before":
            words.append(f"{_word(value)} -> {_word(values['after'])}")
        elif moved and name == "cause" and value != "":
            words.append(f"({_word(value, quoted=frozenset())})")
        elif name not in _NOT_IN_MESSAGE and value != "" and not (moved and name == "after"):
            words.append(f"{name}={_word(value)}")
    return _cut(" ".join(words), LONGEST_MESSAGE)


def _word(value: str | float, *, quoted: frozenset[str] = _PARTING) -> str:
    """Return a value in printable characters; in quotes if it contains a `quoted` character."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _cut(str(value), LONGEST_WORD)
    return text if text.isprintable() and quoted.isdisjoint(text) else repr(text)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
