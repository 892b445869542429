"""Signals from the process and its event loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from seawall import _checks as check
from seawall.clock import Clock, SystemClock, check_clock, current_clock
from seawall.models.smoothing import Growth
from seawall.runtime import process
from seawall.signals._signal import QUICK_EVERY, RATE_EVERY, Signal

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


def process_cpu(
    limit: float = 0.8,
    *,
    cores: float | None = None,
    read: Callable[[], float] | None = None,
    clock: Clock | None = None,
) -> Signal:
    """Return the share of its cores that this process uses; the signal is 1.0 at `limit` of them.

    `cores` defaults to those that it may use, by affinity and by the quota of its control group.
    `read()` returns the CPU seconds used so far, by default those of the process. On virtual time
    they are meaningless and count as 0.
    """
    clock = current_clock() if clock is None else check_clock(clock)
    if read is None:
        read = process.cpu_seconds if isinstance(clock, SystemClock) else float
    usable = process.usable_cores() if cores is None else check.at_least("cores", cores, 0.01)
    rate = _rate(check.plain_function("read", read), clock, usable)
    limit = check.ratio("limit", limit)
    return Signal("process_cpu", rate, limit=limit, every=RATE_EVERY, clock=clock)


def process_memory(
    limit: float = 0.9,
    *,
    total: int | None = None,
    read: Callable[[], float] | None = None,
    clock: Clock | None = None,
) -> Signal:
    """Return the share of memory that this process uses; the signal is 1.0 at `limit` of it.

    `total` is the number of bytes that it may use, by default the limit of its control group or the
    machine's memory. `read()` returns the bytes in use, by default those resident in RAM.
    """
    most = process.memory_limit() if total is None else check.count("total", total)
    if most is None:
        raise ValueError(
            "process_memory(): this system does not tell how much there is: write total="
        )
    used = check.plain_function("read", process.memory_bytes if read is None else read)
    share = check.ratio("limit", limit)
    return Signal("process_memory", lambda: used() / most, limit=share, clock=clock)


class _CollectorSignal(Signal):
    def __init__(self, meter: process.CollectorMeter, limit: float, clock: Clock) -> None:
        self._meter = meter
        rate = _rate(lambda: meter.total, clock)
        super().__init__("gc_pauses", rate, limit=limit, every=RATE_EVERY, clock=clock)

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot of a signal, with the number of pauses and the longest one."""
        meter = self._meter
        return {**super().snapshot(), "pauses": meter.pauses, "longest": meter.longest}


def gc_pauses(limit: float = 0.1, *, clock: Clock | None = None) -> Signal:
    """Return the share of time that the garbage collector takes; the signal is 1.0 at `limit`."""
    clock = current_clock() if clock is None else check_clock(clock)
    limit = check.ratio("limit", limit)
    return _CollectorSignal(process.CollectorMeter(clock.now), limit, clock)


def _rate(count: Callable[[], float], clock: Clock, units: float = 1.0) -> Callable[[], float]:
    """Return a function that reads how fast a counter grows, per second and unit."""
    growth = Growth(count(), clock.now(), least=RATE_EVERY / 10)
    return lambda: growth.update(count(), clock.now()) / units


# Event loop


class LoopLag(Signal):
    """Lag of event loops: those in which it was started or read."""

    def __init__(self, limit: float = 0.1) -> None:
        """Set the lag in seconds at which the signal is 1.0."""
        self._monitors: tuple[process.LagMonitor, ...] = ()
        limit = check.seconds("limit", limit)
        super().__init__("loop_lag", self._worst, limit=limit, every=QUICK_EVERY)

    def start(self) -> None:
        """Monitor the running loop from now on; otherwise that starts with the first reading in it.

        It ends when the loop is closed, or when the signal is not read for some seconds.
        """
        loop = process.running_loop()
        if loop is None:
            raise RuntimeError("loop_lag().start(): call it inside a running event loop")
        self._watch(loop)

    def _watch(self, loop: AbstractEventLoop) -> None:
        monitor = process.LagMonitor.of(loop)
        monitor.start()
        if monitor not in self._monitors:
            self._monitors = (*(known for known in self._monitors if known.alive), monitor)

    def _worst(self) -> float:
        loop = process.running_loop()
        if loop is not None:
            self._watch(loop)
        return max((monitor.lag() for monitor in self._monitors), default=0.0)


def loop_lag(limit: float = 0.1) -> LoopLag:
    """Return the lag of the event loop; the signal is 1.0 at `limit` seconds."""
    return LoopLag(limit)
