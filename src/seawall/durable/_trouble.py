"""What is said in the log of something that fails again and again: when it begins, and its end.

Promises: one line at WARNING at the first failure, and none for those that follow, of whatever is
tried; one at INFO when something went well and nothing is left that fails. That our tables were
never made is said at ERROR, once, also after other failures: it does not pass by itself. No stack
and no payload: what an error says on its first line, and nothing else of it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Final

from seawall._failures import described
from seawall._redaction import safe_line
from seawall.clock import Clock
from seawall.durable._missing_tables import TablesMissing

MOST: Final = 1_000
"""Things that are remembered as failing."""
PATIENCE: Final = 60.0
"""Seconds after the next try is due, for which it is waited; then somebody else has done that."""


class Trouble:
    """What of one worker fails at present. Of one event loop."""

    __slots__ = ("_clock", "_failing", "_failures", "_look_at", "_told", "_who")

    def __init__(self, who: str, clock: Clock) -> None:
        """Speak as `who`, such as "outbox 'orders'"."""
        self._who = who
        self._clock = clock
        self._failing: dict[Hashable, float] = {}
        self._failures = 0
        self._look_at = 0.0
        self._told = logging.NOTSET
        """The level of what was said of it so far."""

    def failed(
        self, key: Hashable, what: str, error: object, *, delay: float = 0.0, final: bool = False
    ) -> None:
        """Note a failure of `key`, which is tried again after `delay`, or not (`final`)."""
        self._failures += 1
        level = logging.ERROR if isinstance(error, TablesMissing) else logging.WARNING
        if level > self._told:
            self._told = level
            told = described(error) if isinstance(error, BaseException) else safe_line(str(error))
            logging.getLogger("seawall").log(level, "%s: %s: %s", self._who, what, told)
        if final:
            self._failing.pop(key, None)
        elif key in self._failing or len(self._failing) < MOST:
            self._failing[key] = self._clock.now() + delay + PATIENCE

    def well(self, key: Hashable) -> None:
        """Note that it went well for `key`."""
        if not self._failures:
            return
        self._failing.pop(key, None)
        now = self._clock.now()
        if now >= self._look_at:
            self._look_at = now + 1.0
            self._failing = {key: until for key, until in self._failing.items() if now < until}
        if not self._failing:
            log = logging.getLogger("seawall")
            log.info("%s: it goes well again, after %d failures", self._who, self._failures)
            self._failures, self._told = 0, logging.NOTSET
