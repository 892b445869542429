"""Events as records of the standard logging.

Promises: one record for each event, its values as fields of their own; of a flood, some records and
the number of those that were left out. Neither the message nor a field has a line break or another
control character in it, and both are bounded. A success makes no event, and costs nothing here.
"""

from __future__ import annotations

import logging
from threading import Lock, local
from typing import Final
from weakref import WeakKeyDictionary

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.runtime.events import Event, subscribe
from seawall.runtime.mutex import survives_fork
from seawall.telemetry._fields import Value, fields_of, values_of
from seawall.telemetry._switch import Switch

__all__ = ["log_events"]

MOST_SORTS: Final = 1000
"""Sorts of events (by name and guard) that are bounded each by itself; the rest is together."""

LEVELS: Final = {
    **dict.fromkeys(("call_retried", "call_hedged", "settings_changed"), logging.INFO),
    **dict.fromkeys(("lease_changed", "lifecycle_changed", "host_restored"), logging.INFO),
    **dict.fromkeys(("job_died", "event_died", "outbox_blocked"), logging.ERROR),
}
"""How much an event matters; those that are not here are warnings."""

GOOD_NEWS: Final[dict[str, tuple[str, tuple[object, ...]]]] = {
    "breaker_changed": ("after", ("closed", "half_open")),
    "health_changed": ("after", ("healthy",)),
    "level_changed": ("after", ("full",)),
    "store_mode_changed": ("after", ("shared",)),
    "loop_blocked": ("over", (True,)),
}
"""Events of which some tell that a trouble is over, or is being got over: by a field's values."""

LONGEST_WORD: Final = 120
"""Characters of one value in a message; the record's field has more of it."""

LONGEST_MESSAGE: Final = 500
"""Characters of all values in a message."""

_PARTING: Final = frozenset(" '\"=")
"""What would make it unclear where a value ends."""

_on: Final[WeakKeyDictionary[logging.Logger, Switch]] = WeakKeyDictionary()


def log_events(
    logger: logging.Logger | str = "seawall.events",
    *,
    level: int | None = None,
    per_second: float = 1.0,
    burst: int = 10,
    clock: Clock | None = None,
) -> Switch:
    """Write a record for each event to `logger`, at `level` (by the sort of event, unless given).

    Good news (a breaker closed again, the store is back) is at INFO. The message tells the values
    in one short line; `extra` has them as fields: `seawall_event`, `seawall_guard` and so on. Of
    one sort, in one guard, there are at most `per_second` after the first `burst`; the next record
    tells how many were left out, as `seawall_left_out`. Returns what switches it off: `close()`, or
    a `with` block.
    """
    if isinstance(logger, str):
        logger = logging.getLogger(logger)
    if not isinstance(logger, logging.Logger):
        raise TypeError(f"logger={logger!r}: pass a logger of the standard logging, or its name")
    if level is not None:
        check.count("level", level, minimum=0)
    if logger in _on:
        raise ValueError(
            f"{_on[logger]!r} for this logger already: use that one, close() it first, or name"
            " another logger"
        )
    rate = check.seconds("per_second", per_second)
    time = current_clock() if clock is None else check_clock(clock)
    writer = _Writer(logger, level, _Bound(rate, check.count("burst", burst)), time)
    unsubscribe = subscribe(writer.write)

    def off() -> None:
        _on.pop(logger, None)
        unsubscribe()

    _on[logger] = switch = Switch("log_events()", off)
    return switch


class _Bound:
    """A token bucket for each sort of event."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._buckets: dict[tuple[str, str], tuple[float, float, int]] = {}

    def left_out(self, sort: tuple[str, str], now: float) -> int | None:
        """Return how many were left out before this one; None if it is left out itself."""
        if sort not in self._buckets and len(self._buckets) >= MOST_SORTS:
            sort = ("", "")
        tokens, since, left_out = self._buckets.get(sort, (self._burst, now, 0))
        tokens = min(self._burst, tokens + max(0.0, now - since) * self._rate)
        if tokens < 1:
            self._buckets[sort] = tokens, now, left_out + 1
            return None
        self._buckets[sort] = tokens - 1, now, 0
        return left_out


class _Writer:
    """Writes events to one logger."""

    def __init__(
        self, logger: logging.Logger, level: int | None, bound: _Bound, clock: Clock
    ) -> None:
        self._logger = logger
        self._level = level
        self._bound = bound
        self._clock = clock
        self._lock = Lock()
        self._busy = local()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._lock = Lock()  # another thread may have held it

    def write(self, event: Event) -> None:
        level = _level_of(event) if self._level is None else self._level
        # A handler may itself be guarded: what that tells would be told for ever.
        if getattr(self._busy, "writing", False) or not self._logger.isEnabledFor(level):
            return
        self._busy.writing = True
        try:
            with self._lock:
                left_out = self._bound.left_out((event.name, event.guard), self._clock.now())
            if left_out is not None:
                told = values_of(event)
                if left_out:
                    told["left_out"] = left_out
                extra = {"seawall_event": event.name, **fields_of(told, "seawall_")}
                guard = _cut(event.guard, LONGEST_WORD)
                self._logger.log(
                    level, "%s in %r: %s", event.name, guard, _sentence(told), extra=extra
                )
        finally:
            self._busy.writing = False


def _level_of(event: Event) -> int:
    field, good = GOOD_NEWS.get(event.name, ("", ()))
    if good and getattr(event, field) in good:
        return logging.INFO
    return LEVELS.get(event.name, logging.WARNING)


def _sentence(told: dict[str, Value]) -> str:
    """Return values for readers, in one line: "closed -> open (tripped) reason=KeyError".

    What the line says before is left out, and what is empty.
    """
    moved = bool(told.get("before") and told.get("after"))
    words = []
    for name, value in told.items():
        if moved and name == "before":
            words.append(f"{_word(value)} -> {_word(told['after'])}")
        elif moved and name == "cause":
            words.append(f"({_word(value, quoted=frozenset())})")
        elif name != "guard" and value != "" and not (moved and name == "after"):
            words.append(f"{name}={_word(value)}")
    return _cut(" ".join(words), LONGEST_MESSAGE)


def _word(value: str | float, *, quoted: frozenset[str] = _PARTING) -> str:
    """Return a value in printable characters; in quotes, if it has one of those."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _cut(str(value), LONGEST_WORD)
    return text if text.isprintable() and quoted.isdisjoint(text) else repr(text)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
