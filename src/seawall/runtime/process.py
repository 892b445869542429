"""Facts about this process: CPU time, memory, limits, garbage collector, and event loops.

Nothing here raises if the system does not provide a value: the result is None, or a weaker one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, finalize, ref

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

cpu_seconds: Final = time.process_time  # CPU time that all threads together have used so far
LAG_PERIOD: Final = 0.05  # seconds between two checks of an event loop
LAG_IDLE: Final = 5.0  # seconds after which a loop whose lag is not read is no longer checked
_NO_LIMIT: Final = 1 << 60  # version 1 control groups write a number near 2**63 for no limit


def usable_cores(root: str = "/") -> float:
    """Return how many cores this process may use: by affinity, and by its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    for folder in _groups(root, "cpu"):
        quota = _read(folder, "cpu.max").split()
        if not quota:
            quota = [_read(folder, "cpu.cfs_quota_us"), _read(folder, "cpu.cfs_period_us")]
        allowed, period = (_number(part) for part in [*quota, "", ""][:2])
        if allowed and period:
            cores = min(cores, allowed / period)
    return cores


def memory_bytes() -> int:
    """Return the resident memory of this process; if unknown, its peak."""
    resident = _read("/proc/self", "statm").split()[1:2]
    if resident:
        return int(resident[0]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_limit(root: str = "/") -> int | None:
    """Return the memory that this process may use: its control group's limit, or the machine's."""
    limits = []
    for folder in _groups(root, "memory"):
        text = _read(folder, "memory.max") or _read(folder, "memory.limit_in_bytes")
        limit = _number(text)
        if limit and limit < _NO_LIMIT:
            limits.append(int(limit))
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        pass
    return min((limit for limit in limits if limit > 0), default=None)


def _groups(root: str, controller: str) -> Iterator[str]:
    """Yield the folders of this process's control group and of those around it, up to the root."""
    for line in _read(root, "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = os.path.join(root, "sys/fs/cgroup", controller if controllers else "")  # noqa: PTH118
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield os.path.join(mount, *parts[:depth])  # noqa: PTH118


def _read(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="ascii") as file:  # noqa: PTH118, PTH123
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def _number(text: str) -> float | None:
    """Return a positive number; None for "max", -1 and anything else that means no limit."""
    return float(text) if text.isdecimal() else None


class CollectorMeter:
    """Measures the pauses of the garbage collector, for as long as the meter lives."""

    def __init__(self, now: Callable[[], float]) -> None:
        import gc

        self.now = now
        self.pauses = 0
        self.longest = 0.0
        self.total = 0.0  # seconds spent in the collector so far
        self._began: float | None = None
        known = ref(self)

        def watch(phase: str, _info: dict[str, int]) -> None:
            meter = known()
            if meter is not None:
                meter.note(phase)

        gc.callbacks.append(watch)
        finalize(self, _forget, watch).atexit = False

    def note(self, phase: str) -> None:
        """Record that a collection begins ("start") or ends."""
        if phase == "start":
            self._began = self.now()
        elif self._began is not None:
            pause = max(0.0, self.now() - self._began)
            self._began = None
            self.pauses += 1
            self.total += pause
            self.longest = max(self.longest, pause)


def _forget(watch: Callable[[str, dict[str, int]], None]) -> None:
    import gc

    try:
        gc.callbacks.remove(watch)
    except ValueError:
        pass  # other code emptied the list


class LagMonitor:
    """Measures how late a timer runs on a loop, which holds it as long as it is read."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._expected: float | None = None
        self._late = 0.0
        self._read_at = 0.0
        self._asked = False

    @classmethod
    def of(cls, loop: AbstractEventLoop) -> LagMonitor:
        """Return the monitor of `loop`; make it if it is new. Called inside the loop."""
        monitor = _lag_monitors.get(loop)
        if monitor is None:
            monitor = _lag_monitors[loop] = cls(loop)
        return monitor

    @property
    def alive(self) -> bool:
        """Whether the loop still exists and is open."""
        loop = self._loop()
        return loop is not None and not loop.is_closed()

    def start(self) -> None:
        """Start, if it is not running. Called inside the loop."""
        self._asked = False
        loop = self._loop()
        if loop is not None and self._expected is None:
            self._read_at = loop.time()
            self._late = 0.0
            self._wait(loop)

    def lag(self) -> float:
        """Return how late the loop is; a monitor that was not read for long starts again."""
        loop = self._loop()
        if loop is None or not loop.is_running():
            return 0.0
        if self._expected is None:
            if not self._asked:
                self._asked = True
                try:
                    loop.call_soon_threadsafe(self.start, context=Context())
                except RuntimeError:
                    pass  # the loop was closed a moment ago
            return 0.0
        now = self._read_at = loop.time()
        return max(self._late, now - self._expected)

    def _wait(self, loop: AbstractEventLoop) -> None:
        self._expected = loop.time() + LAG_PERIOD
        # In an empty context, so that it does not keep the first reader's context for ever.
        loop.call_at(self._expected, self._look, context=Context())

    def _look(self) -> None:
        loop = self._loop()
        if loop is None or self._expected is None:
            return
        now = loop.time()
        self._late = max(0.0, now - self._expected)
        self._expected = None
        if now - self._read_at < LAG_IDLE:
            self._wait(loop)


_lag_monitors: Final[WeakKeyDictionary[AbstractEventLoop, LagMonitor]] = WeakKeyDictionary()
"""One monitor for each loop, shared by all readers."""


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None; load no asyncio to find out."""
    asyncio = sys.modules.get("asyncio")  # not loaded: then no loop runs
    if asyncio is None:
        return None
    try:
        loop: AbstractEventLoop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop
