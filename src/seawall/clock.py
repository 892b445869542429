"""Time and chance: the machine's own in production, virtual and seeded ones in simulations.

A clock counts monotonic seconds from an arbitrary start. `sleep` blocks the calling thread, so only
the synchronous runner uses it; coroutines sleep on their event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

from seawall import _checks as check

if TYPE_CHECKING:
    from random import Random

GRACE: Final = 0.02  # real seconds that a virtual wait gives to other threads before time moves on


__all__ = ["Clock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """What a guard needs from a clock."""

    def now(self) -> float:
        """Return monotonic seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread until `seconds` have passed."""
        ...

    def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
        """Block the calling thread until it gets `lock`, or `seconds` have passed (False)."""
        ...


class SystemClock:
    """The machine's monotonic clock, by the interpreter's own functions: they cost no frame."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
        """Block the calling thread until it gets `lock`, or `seconds` have passed (False)."""
        if seconds is None:
            return lock.acquire()
        return lock.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))

    def epoch(self) -> float:
        """Return the instant at which 1970 began in UTC, by the current time of day."""
        return time.monotonic() - time.time()

    def __repr__(self) -> str:
        return "SystemClock()"


class VirtualClock:
    """A clock that moves only on request, and never backwards. Thread-safe.

    `sleep` advances it and returns immediately: for the caller, the time has passed.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = check.at_least("start", start, 0.0)
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the current instant of the clock."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds` without waiting; a negative number raises ValueError."""
        self.advance(seconds)

    def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
        """Acquire `lock`, or advance by `seconds` without waiting (False).

        Other threads take no virtual time: they get a moment of real time first.
        """
        if seconds is None:
            return lock.acquire()
        if lock.acquire(timeout=GRACE):
            return True
        self.advance(max(seconds, 0.0))
        return lock.acquire(blocking=False)

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`, 0 or more."""
        step = check.seconds("seconds", seconds, zero=True)
        with self._lock:
            self._now += step

    def advance_to(self, instant: float) -> None:
        """Move forward to exactly `instant`, without the rounding of a sum of steps.

        An instant that the clock has passed raises ValueError.
        """
        target = check.at_least("instant", instant, 0.0)
        with self._lock:
            if target < self._now:
                raise ValueError(
                    f"instant={instant!r}: the clock stands at {self._now!r} and never goes back;"
                    " write that instant or a later one"
                )
            self._now = target

    def __repr__(self) -> str:
        return f"VirtualClock({self._now!r})"


SYSTEM: Final[SystemClock] = SystemClock()  # the default clock


def epoch_of(clock: Clock) -> float:
    """Return the instant of `clock` at which 1970 began in UTC; 0 if it has no time of day."""
    epoch = getattr(clock, "epoch", None)
    return 0.0 if epoch is None else float(epoch())


def check_clock(clock: Clock) -> Clock:
    """Return `clock` if it is one, or raise."""
    if isinstance(clock, type) or not all(hasattr(clock, n) for n in ("now", "sleep", "wait")):
        raise TypeError(f"clock={clock!r}: pass a clock, such as VirtualClock() or SystemClock()")
    return clock


clock_var: Final[ContextVar[Clock]] = ContextVar("seawall_clock", default=SYSTEM)
chance_var: Final[ContextVar[Callable[[str], Random] | None]] = ContextVar(
    "seawall_chance", default=None
)
"""Makes the generators of `new_random`, by name, in a simulation."""


def current_clock() -> Clock:
    """Return the default clock here: the system's, except in tests."""
    return clock_var.get()


def new_random(name: str) -> Random:
    """Return a random number generator for what is called `name`; seeded only in a simulation."""
    from random import Random

    seeded = chance_var.get()
    return Random() if seeded is None else seeded(name)  # noqa: S311 - jitter is no secret
