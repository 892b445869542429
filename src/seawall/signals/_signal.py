"""The class of signals, and signals derived from others."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from threading import Lock
from typing import Any, Final

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.models.smoothing import Ewma, Hysteresis
from seawall.runtime.mutex import survives_fork

Load = Callable[[], float]
"""A load as other parts accept it: a signal of this package, or any similar function."""

GAUGE_EVERY: Final = 0.1
"""Seconds for which a measured value is reused."""

RATE_EVERY: Final = 0.5
"""Reuse time of values measured as growth since the last reading: a shorter one is mostly noise."""

QUICK_EVERY: Final = 0.01
"""Reuse time of values that change with each call and are cheap to read."""


class Signal:
    """A number that is read periodically, as a share of its limit. Call it for its value."""

    def __init__(
        self,
        name: str,
        read: Callable[[], float],
        *,
        limit: float = 1.0,
        every: float = GAUGE_EVERY,
        clock: Clock | None = None,
    ) -> None:
        """Call `read()` at most once in `every` seconds; at `limit` the signal is 1.0.

        If it raises, or returns no finite number, the last value is kept, and the first such
        failure is logged: code that checks the load must not fail because of it.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Signal({name!r}): the first argument is a name, such as 'sessions'")
        self.name = name
        self.limit = check.at_least("limit", limit, 0.0)
        if not self.limit:
            raise ValueError("limit=0: write the number at which the signal is to be 1.0")
        self.every = check.seconds("every", every, zero=True)
        self.clock: Clock = current_clock() if clock is None else check_clock(clock)
        self.failures = 0
        self.measured = 0.0
        self._read = check.plain_function("read", read)
        self._now = self.clock.now
        self._value = 0.0
        self._due = float("-inf")
        self._lock = Lock()
        survives_fork(self)

    def __call__(self) -> float:
        """Return the load: 0.0 is none, 1.0 is at the limit."""
        now = self._now()
        # A caller that arrives while another one reads (or from inside `read`) gets the last value.
        if now >= self._due and self._lock.acquire(False):  # noqa: FBT003 - twice as fast as by keyword
            try:
                self._refresh(now)
            finally:
                self._lock.release()
        return self._value

    def __repr__(self) -> str:
        return f"<Signal {self.name!r}: {self._value:.3g}>"

    def snapshot(self) -> dict[str, Any]:
        """Return the name, the value, the measured number, and its limit."""
        return {
            "name": self.name,
            "value": self(),
            "measured": self.measured,
            "limit": self.limit,
            "failures": self.failures,
        }

    def _refresh(self, now: float) -> None:
        self._due = now + self.every
        try:
            measured = float(self._read())
            if not isfinite(measured):
                raise ValueError(f"it returned {measured!r}")  # noqa: TRY301 - handled like other failures
        except Exception:
            self.failures += 1
            if self.failures == 1:
                import logging

                logging.getLogger("seawall").exception(
                    "signal %r cannot be read; its last value stands", self.name
                )
            return
        self.measured = measured
        self._value = self._settle(measured / self.limit if measured > 0 else 0.0, now)

    def _settle(self, value: float, now: float) -> float:
        """Return the signal's value for a share just measured; subclasses override this."""
        return value

    def _after_fork(self) -> None:
        """Replace the lock in a child process, as another thread may have held it."""
        self._lock = Lock()


def as_signal(load: Load) -> Signal:
    """Return `load` if it is a Signal, otherwise one that reads it on each call."""
    if isinstance(load, Signal):
        return load
    read = check.plain_function("load", load)
    return Signal(getattr(read, "__name__", "load"), read, every=0.0)


# Derived signals


class _Derived(Signal):
    """A signal derived from others; `details` are for its snapshot."""

    def __init__(
        self, name: str, read: Load, sources: list[Signal], every: float, **details: float
    ) -> None:
        super().__init__(name, read, every=every, clock=sources[0].clock)
        self._sources = sources
        self._details = details

    def snapshot(self) -> dict[str, Any]:
        """Return name, value and settings, and the snapshots of its sources."""
        of = [source.snapshot() for source in self._sources]
        return {"name": self.name, "value": self(), **self._details, "of": of}


def highest(*signals: Load) -> Signal:
    """Return the signal with the highest load of all."""
    if not signals:
        raise ValueError("highest(): give it at least one signal, such as process_cpu()")
    sources = [as_signal(signal) for signal in signals]
    name = f"highest({', '.join(source.name for source in sources)})"
    every = min(source.every for source in sources)
    return _Derived(name, lambda: max(source() for source in sources), sources, every)


class _Smoothed(_Derived):
    def __init__(self, source: Signal, average: Ewma) -> None:
        self._average = average
        details = {"half_life": average.half_life}
        super().__init__(f"smoothed({source.name})", source, [source], GAUGE_EVERY, **details)

    def _settle(self, value: float, now: float) -> float:
        return self._average.update(value, now)


def smoothed(signal: Load, half_life: float = 1.0) -> Signal:
    """Return the moving average of a signal: the past counts half after `half_life` seconds.

    It does not depend on how often it is read.
    """
    return _Smoothed(as_signal(signal), Ewma(half_life))


class _Latched(_Derived):
    def __init__(self, source: Signal, switch: Hysteresis) -> None:
        self._switch = switch
        details = {"rise": switch.rise, "fall": switch.fall, "hold": switch.hold}
        super().__init__(f"latched({source.name})", source, [source], source.every, **details)

    def _settle(self, value: float, now: float) -> float:
        return max(value, self._switch.rise) if self._switch.update(value, now) else value


def latched(signal: Load, *, rise: float = 0.8, fall: float = 0.6, hold: float = 5.0) -> Signal:
    """Return a signal that, once it has reached `rise`, stays there until it falls below `fall`.

    It stays for at least `hold` seconds, so that an action at `rise` does not flicker.
    """
    return _Latched(as_signal(signal), Hysteresis(rise, fall, hold))


def clock_of(thing: Any) -> Clock:
    """Return the clock of `thing`: its own, or that of a guard it is part of."""
    hosts = (bound.host for bound in getattr(thing, "bindings", ()))
    clock: Clock = getattr(next(hosts, thing), "clock", None) or current_clock()
    return clock
