"""Events as records of the standard logging.

Promises: one record for each event, its values as fields of their own; of a flood, some records and
the number of those that were left out. A success makes no event, and costs nothing here.
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
from seawall.telemetry._fields import fields_of
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

    The message is short; the values are in `extra`, as `seawall_event`, `seawall_guard` and so on.
    Of one sort, in one guard, there are at most `per_second` after the first `burst`; the next
    record tells how many were left out, as `seawall_left_out`. Returns what switches it off:
    `close()`, or a `with` block.
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
        level = LEVELS.get(event.name, logging.WARNING) if self._level is None else self._level
        # A handler may itself be guarded: what that tells would be told for ever.
        if getattr(self._busy, "writing", False) or not self._logger.isEnabledFor(level):
            return
        self._busy.writing = True
        try:
            with self._lock:
                left_out = self._bound.left_out((event.name, event.guard), self._clock.now())
            if left_out is not None:
                extra = {"seawall_event": event.name, **fields_of(event, "seawall_")}
                if left_out:
                    extra["seawall_left_out"] = left_out
                self._logger.log(level, "%s in %r", event.name, event.guard, extra=extra)
        finally:
            self._busy.writing = False
