"""Immediate samples after rare, important events, such as a breaker that opens (debounced).

Promises:
- Events that happen together cause one sample, `TOGETHER` seconds after the first of them.
- The thread of an event only wakes the event loop.
- An object that is dropped without `close` leaves no subscription behind, and a child process does
  not touch the loop of its parent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from seawall import events
from seawall._forks import survives_fork
from seawall.dashboard.events import subscribe_weakly

RARE: Final = (
    events.BreakerChanged,
    events.CollectionChanged,
    events.HealthChanged,
    events.HostEjected,
    events.HostRestored,
    events.LeaseChanged,
    events.LevelChanged,
    events.LifecycleChanged,
    events.MemberChanged,
    events.OutboxBlocked,
    events.SettingsChanged,
    events.SourceChanged,
    events.StageChanged,
    events.StoreModeChanged,
)
"""The events that cause an immediate sample."""
TOGETHER: Final = 0.05
"""Seconds between an event and its sample: further events are included in it."""
APART: Final = 0.25
"""Minimum number of seconds between two samples, however many events there are."""
EXACT: Final = 0.001
"""Seconds by which a timer may be early."""


class EventDebounce:
    """Calls back, in the event loop where it was created, after a rare event."""

    def __init__(
        self, seconds_to_next: Callable[[], float | None], then: Callable[[], object]
    ) -> None:
        """Call `then()`, not before `seconds_to_next()` seconds; not at all if that is None."""
        self._seconds_to_next = seconds_to_next
        self._then = then
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        """Whether a callback is already due: further events change nothing."""
        self._over = False
        self._end = subscribe_weakly(self, self._note, *RARE)
        survives_fork(self)

    def close(self) -> None:
        """Stop calling back. Call this in the event loop."""
        self._over = True
        self._end()
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, _event: events.Event) -> None:
        """Record an event, from any thread: it may hold any lock."""
        if self._is_due or self._over:
            return
        self._is_due = True
        try:
            self._loop.call_soon_threadsafe(self._later, TOGETHER)
        except RuntimeError:
            self._over = True  # the loop is closed

    def _later(self, least: float) -> None:
        """Call back, or wait while it is too soon."""
        wait = None if self._over else self._seconds_to_next()
        if wait is not None and max(wait, least) > EXACT:
            self._timer = self._loop.call_later(max(wait, least), self._later, 0.0)
            return
        self._is_due = False  # later events cause the next call
        if wait is not None:
            self._then()

    def _after_fork(self) -> None:
        self._over = True
