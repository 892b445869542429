"""All events as records of the standard logging; `events/log.py` writes them.

Promises:
- There is one record for each event, with its values as separate fields.
- Of a flood, some records are written, with the number of those omitted.
"""

from __future__ import annotations

import logging
from typing import Final
from weakref import WeakKeyDictionary

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.events import subscribe
from seawall.events.log import EventLog, LineBound, changes
from seawall.telemetry import TelemetrySwitch

__all__ = ["log_events"]

_on: Final[WeakKeyDictionary[logging.Logger, TelemetrySwitch]] = WeakKeyDictionary()


def log_events(
    logger: logging.Logger | str = "seawall.events",
    *,
    level: int | None = None,
    per_second: float = 1.0,
    burst: int = 10,
    clock: Clock | None = None,
) -> TelemetrySwitch:
    """Write a record for each event to `logger`, at `level` (by default that of the event's type).

    Without it, changes of state and a few degraded answers are written to `seawall.events`; while
    it is on, only this function writes records. The end of a problem (the store is back) has the
    level of its start; the probes of an open breaker are at DEBUG. The message has the values in
    one short line; `extra` has them as fields: `seawall_event`, `seawall_guard` and so on.

    In one guard, each type and usual level is limited to `per_second` records after the first
    `burst`, and the ends of problems separately. The next record has the number of omitted ones, as
    `seawall_left_out`.

    Returns a switch: `close()`, or the end of a `with` block, ends it. A second call for the same
    logger replaces the first.
    """
    if isinstance(logger, str):
        logger = logging.getLogger(logger)
    if not isinstance(logger, logging.Logger):
        raise TypeError(f"logger={logger!r}: pass a logger of the standard logging, or its name")
    if level is not None:
        check.count("level", level, minimum=0)
    rate = check.seconds("per_second", per_second)
    time = current_clock() if clock is None else check_clock(clock)
    writer = EventLog(logger, level, LineBound(rate, check.count("burst", burst), time))
    if logger in _on:
        _on[logger].close()
    unsubscribe = subscribe(writer.write)
    changes.paused += 1

    def off() -> None:
        _on.pop(logger, None)
        changes.paused -= 1
        unsubscribe()

    _on[logger] = switch = TelemetrySwitch("log_events()", off)
    return switch
