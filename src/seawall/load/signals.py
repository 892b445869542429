"""Load signals: how near something is to its limit, as one number that is cheap to read.

A signal is any function without arguments that returns a number: 1.0 at the limit, more beyond it.
So `lambda: 0.5` is one. The signals of this module cache their value briefly, keep it when it
cannot be read, and have a `snapshot()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.clock import Clock, SystemClock, check_clock, current_clock
from seawall.models.smoothing import Ewma, Growth, Hysteresis
from seawall.runtime import process
from seawall.runtime.policy import Policy, bindings_of

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

__all__ = [
    "Signal",
    "gc_pauses",
    "highest",
    "in_flight",
    "latched",
    "loop_lag",
    "occupancy",
    "process_cpu",
    "process_memory",
    "queue_time",
    "smoothed",
    "thread_queue",
]

Load = Callable[[], float]  # a signal of this module, or any similar function

GAUGE_EVERY: Final = 0.1  # seconds for which a measured value is reused
RATE_EVERY: Final = 0.5  # the same for growth since the last reading: sooner is mostly noise
QUICK_EVERY: Final = 0.01  # reuse time of values that change with each call and are cheap to read


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
        except Exception:  # noqa: BLE001 - logged
            self.failures += 1
            if self.failures == 1:
                log_failure("signal %r cannot be read; its last value stands", self.name)
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
        self,
        name: str,
        read: Load,
        sources: list[Signal],
        every: float,
        settle: Callable[[float, float], float] | None = None,
        **details: float,
    ) -> None:
        super().__init__(name, read, every=every, clock=sources[0].clock)
        self._sources = sources
        self._details = details
        self._transform = settle

    def _settle(self, value: float, now: float) -> float:
        return value if self._transform is None else self._transform(value, now)

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


def smoothed(signal: Load, half_life: float = 1.0) -> Signal:
    """Return the moving average of a signal: the past counts half after `half_life` seconds."""
    source, average = as_signal(signal), Ewma(half_life)
    name, half_life = f"smoothed({source.name})", average.half_life
    return _Derived(name, source, [source], GAUGE_EVERY, average.update, half_life=half_life)


def latched(signal: Load, *, rise: float = 0.8, fall: float = 0.6, hold: float = 5.0) -> Signal:
    """Return a signal that, once it has reached `rise`, stays there until it falls below `fall`.

    It stays for at least `hold` seconds, so that an action at `rise` does not flicker.
    """
    source, switch = as_signal(signal), Hysteresis(rise, fall, hold)

    def settle(value: float, now: float) -> float:
        return max(value, switch.rise) if switch.update(value, now) else value

    details = {"rise": switch.rise, "fall": switch.fall, "hold": switch.hold}
    name = f"latched({source.name})"
    return _Derived(name, source, [source], source.every, settle, **details)


def clock_of(thing: Any) -> Clock:
    """Return the clock of `thing`: its own, or that of a guard it is part of."""
    bounds = bindings_of(thing) if isinstance(thing, Policy) else []
    hosts = (bound.host for bound in bounds)
    clock: Clock = getattr(next(hosts, thing), "clock", None) or current_clock()
    return clock


# --- Policies, pools and executors ---


def in_flight(target: Any) -> Signal:
    """Return the share of slots in use: of a bulkhead, pool or executor, or a guard's fullest."""
    return _signal_of(target, _share_in_use, "in_flight", "a Bulkhead, a pool, an executor")


def occupancy(target: Any) -> Signal:
    """Return the share of places taken: slots, and the room to wait for one.

    The target is a bulkhead, pool or executor, or a guard, whose fullest one counts. Without room
    to wait, it equals `in_flight`.
    """
    return _signal_of(target, _share_of_places, "occupancy", "a Bulkhead, a pool, an executor")


def queue_time(target: Any, limit: float = 0.1) -> Signal:
    """Return how long the longest waiter for a slot has waited; 1.0 is `limit` seconds.

    The target is a bulkhead, a pool, or a guard. The signal lags: its present value was caused when
    the longest waiter arrived. For shedding, `occupancy` reacts sooner.
    """
    limit = check.seconds("limit", limit)
    wanted = "a Bulkhead, a pool"
    return _signal_of(target, _longest_wait, "queue_time", wanted, limit=limit, every=QUICK_EVERY)


def thread_queue(target: Any, limit: int | None = None) -> Signal:
    """Return how much work waits for a thread, as a share of `limit`.

    The target is a ThreadBulkhead (or a guard's fullest) or an executor, where `limit` defaults to
    `max_queue`; or a `concurrent.futures.ThreadPoolExecutor`, where it defaults to the number of
    threads.
    """
    most = None if limit is None else check.count("limit", limit)
    reader = partial(_queued_share, limit=most)
    return _signal_of(target, reader, "thread_queue", "a ThreadBulkhead, an executor")


def _signal_of(
    target: Any,
    reader: Callable[[Any], Load | None],
    made_by: str,
    wanted: str,
    *,
    limit: float = 1.0,
    every: float = 0.0,
) -> Signal:
    """Return a signal that reads `target` itself, or the highest of a guard's policies."""
    parts = () if isinstance(target, type) else getattr(target, "policies", (target,))
    found = [read for part in parts if (read := reader(part)) is not None]
    if not found:
        raise TypeError(f"{made_by}({target!r}): pass {wanted}, or a guard that has one")
    read = found[0] if len(found) == 1 else lambda: max(read() for read in found)
    name = getattr(target, "name", None) or getattr(target, "kind", type(target).__name__)
    return Signal(f"{made_by}({name})", read, limit=limit, every=every)


def _inside(part: Any) -> Any:
    """Return the object that counts the slots of a policy, pool or executor: itself or a part."""
    parts = (getattr(part, name, None) for name in ("pool", "slots"))
    return next((found for found in parts if found is not None), part)


def _share_in_use(part: Any) -> Load | None:
    inside = _inside(part)
    used = "in_flight" if hasattr(inside, "in_flight") else "in_use"
    most = "limit" if hasattr(inside, "limit") else "size"
    if not (hasattr(inside, used) and hasattr(inside, most)):
        return None
    return lambda: float(getattr(inside, used) / getattr(inside, most))


def _share_of_places(part: Any) -> Load | None:
    inside = _inside(part)
    if hasattr(inside, "queued") and hasattr(inside, "queue"):
        return lambda: (inside.in_use + inside.queued) / (inside.size + inside.queue)
    if not (hasattr(inside, "waiting") and hasattr(inside, "queue")):
        return None

    def share() -> float:
        room = inside.queue.limit if getattr(part, "max_wait", True) else 0
        return float((inside.in_use + inside.waiting) / (inside.limit + room))

    return share


def _longest_wait(part: Any) -> Load | None:
    inside = _inside(part)
    if not hasattr(inside, "queue_wait"):
        return None
    return lambda: inside.queue_wait(clock_of(part).now())


def _queued_share(part: Any, limit: int | None) -> Load | None:
    pool = _inside(part)
    if hasattr(pool, "queued") and hasattr(pool, "queue"):
        if limit or pool.queue:
            return lambda: pool.queued / (limit or pool.queue)
        return lambda: pool.in_use / pool.size  # without a queue, the threads are the limit
    waiting: Any = getattr(part, "_work_queue", None)  # an executor of the standard library
    if not hasattr(waiting, "qsize"):
        return None
    return lambda: waiting.qsize() / (limit or part._max_workers)  # noqa: SLF001


# --- The process and its event loops ---


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


class LoopLag(Signal):
    """Lag of event loops: those in which it was started or read."""

    def __init__(self, limit: float = 0.1) -> None:
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
