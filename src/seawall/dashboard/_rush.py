"""What is rare and matters is seen at once: a breaker that opened does not wait for the next look.

Promises: what happens together is told together, `TOGETHER` seconds after the first of it. Nothing
is done in the thread where it happens but to wake the event loop. One that is forgotten leaves no
subscription behind, and a child process leaves the loop of its parent alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from seawall.dashboard._happenings import listen
from seawall.runtime.durable_events import OutboxBlocked
from seawall.runtime.edge_events import HealthChanged, HostEjected, HostRestored, LifecycleChanged
from seawall.runtime.events import (
    BreakerChanged,
    Event,
    LeaseChanged,
    LevelChanged,
    SettingsChanged,
    StoreModeChanged,
)
from seawall.runtime.member_events import MemberChanged
from seawall.runtime.mutex import survives_fork
from seawall.runtime.pipeline_events import CollectionChanged, SourceChanged, StageChanged

RARE: Final = (
    BreakerChanged,
    CollectionChanged,
    HealthChanged,
    HostEjected,
    HostRestored,
    LeaseChanged,
    LevelChanged,
    LifecycleChanged,
    MemberChanged,
    OutboxBlocked,
    SettingsChanged,
    SourceChanged,
    StageChanged,
    StoreModeChanged,
)
"""What is told at once."""

TOGETHER: Final = 0.05
"""Seconds between what happens and telling of it: what happens meanwhile is told with it."""

APART: Final = 0.25
"""Seconds between two looks at least, however much happens."""

EXACT: Final = 0.001
"""Seconds by which a timer may be early."""


class Rush:
    """Calls back, in the event loop where it was made, when something rare has happened."""

    def __init__(self, soonest: Callable[[], float | None], then: Callable[[], object]) -> None:
        """Call `then()`; `soonest()` seconds from now at the earliest, or not at all if None."""
        self._soonest = soonest
        self._then = then
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False
        """Whether it is to call back already: more that happens changes nothing."""
        self._over = False
        self._end = listen(self, *RARE)
        survives_fork(self)

    def __repr__(self) -> str:
        state = "over" if self._over else "about to call" if self._heard else "nothing happened"
        return f"<Rush: {state}>"

    def close(self) -> None:
        """Call back no more; in the event loop."""
        self._over = True
        self._end()
        if self._timer is not None:
            self._timer.cancel()

    def hear(self, _event: Event | None = None, /) -> None:
        """Note that something happened, in any thread: it may hold any lock."""
        if self._heard or self._over:
            return
        self._heard = True
        try:
            self._loop.call_soon_threadsafe(self._later, TOGETHER)
        except RuntimeError:
            self._over = True  # the loop is closed

    def _later(self, least: float) -> None:
        """Call back, or wait for as long as it is too soon for that."""
        wait = None if self._over else self._soonest()
        if wait is not None and max(wait, least) > EXACT:
            self._timer = self._loop.call_later(max(wait, least), self._later, 0.0)
            return
        self._heard = False  # what happens from now on is for the next time
        if wait is not None:
            self._then()

    def _after_fork(self) -> None:
        self._over = True
