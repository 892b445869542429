"""Log messages for repeated failures: one at the start, and one at the end.

Promises:

- The first failure is logged at WARNING, and further ones not at all, whatever fails.
- When something succeeded and nothing is failing any more, that is logged at INFO.
- Missing tables are logged at ERROR, once, even after other failures: that does not pass without an
  operator.
- Only the first line of an error is logged: no stack and no payload.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Final

from seawall._failures import described
from seawall._redaction import safe_line
from seawall.clock import Clock
from seawall.durable.database.driver_errors import TablesMissing

MOST: Final = 1_000
"""Maximum number of failing things that are remembered."""
RETRY_SLACK: Final = 60.0
"""Seconds to wait after a retry is due; after that, another worker must have done it."""


class OutageLog:
    """The current failures of one worker. For use in one event loop."""

    __slots__ = ("_clock", "_failing", "_failures", "_logged_level", "_name", "_prune_at")

    def __init__(self, name: str, clock: Clock) -> None:
        """Log as `name`, such as "outbox 'orders'"."""
        self._name = name
        self._clock = clock
        self._failing: dict[Hashable, float] = {}
        self._failures = 0
        self._prune_at = 0.0
        self._logged_level = logging.NOTSET
        """The highest level that was logged for the current failures."""

    def failed(self, key: Hashable, what: str, error: object, *, delay: float = 0.0) -> None:
        """Note a failure of `key`, which is retried after `delay`."""
        self._failures += 1
        level = logging.ERROR if isinstance(error, TablesMissing) else logging.WARNING
        if level > self._logged_level:
            self._logged_level = level
            text = described(error) if isinstance(error, BaseException) else safe_line(str(error))
            logging.getLogger("seawall").log(level, "%s: %s: %s", self._name, what, text)
        if key in self._failing or len(self._failing) < MOST:
            self._failing[key] = self._clock.now() + delay + RETRY_SLACK

    def succeeded(self, key: Hashable) -> None:
        """Note a success of `key`."""
        if not self._failures:
            return
        self._failing.pop(key, None)
        now = self._clock.now()
        if now >= self._prune_at:
            self._prune_at = now + 1.0
            self._failing = {key: until for key, until in self._failing.items() if now < until}
        if not self._failing:
            log = logging.getLogger("seawall")
            log.info("%s: it goes well again, after %d failures", self._name, self._failures)
            self._failures, self._logged_level = 0, logging.NOTSET
