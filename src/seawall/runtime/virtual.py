"""An event loop in virtual time: an hour of timers runs in the time its callbacks take.

    result = run(main())                    # like asyncio.run, but nothing sleeps
    result = run(main(), seed=7)            # and another, replayable order of what is ready

**Time** does not move while any callback is ready. When none is, it jumps exactly to the next
timer's instant. Timers of one instant run in the order they were made. A coroutine may move
`loop.clock` itself, to simulate a callback that blocked the loop for that time.

**Threads and sockets** live in real time. What they have delivered is served before time jumps.
Work given to `loop.run_in_executor` (and so to `asyncio.to_thread`) takes no virtual time: until
its future is done, the loop really waits. `loop.hold_time()` does the same for other threads,
processes and network peers. Each such wait lasts at most `patience` real seconds without a wake-up;
then the thread counts as blocked, and time continues (this is how a test lets a timeout abandon a
thread). A cancelled future no longer holds time, though its thread may continue.

**Order.** Without a seed, callbacks run first in, first out, as asyncio promises. With one, what is
ready in one iteration is permuted where asyncio promises no order:

- steps of tasks, callbacks of sockets, and timers of one instant swap freely among each other;
- functions given to `call_soon` or `add_done_callback` keep their order, and none of the former
  overtakes one given before it: asyncio relies on it (a transport calls `connection_made` first and
  only then wakes the task that waits for the connection);
- overdue timers keep the order of their instants;
- the reader of the loop's own wake-up pipe runs first and draws no random number: its timing
  depends on the real speed of threads, and must not change what a seed means.

The same seed and program give the same order, if no thread, process or network takes part.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextvars import Context
from pathlib import PurePath
from typing import Any, TypeVar, TypeVarTuple, Unpack

from seawall import _checks as check
from seawall.clock import VirtualClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Events = list[tuple[selectors.SelectorKey, int]]

_TASKS_LISTED = 10
_JOIN_PATIENCE = 30.0


class StuckError(RuntimeError):
    """Nothing is scheduled and nothing woke the loop: its tasks would wait for ever."""


def run(
    main: Coroutine[Any, Any, T],
    *,
    clock: VirtualClock | None = None,
    seed: int | None = None,
    patience: float = 5.0,
) -> T:
    """Run `main` on a new `VirtualLoop`, as `asyncio.run` does, and return its result."""
    # Check before making a runner: a runner made inside a running loop cannot be closed again.
    if asyncio._get_running_loop() is not None:  # noqa: SLF001
        raise RuntimeError("run() cannot be called from a running event loop; await the coroutine")
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock, seed=seed, patience=patience)) as r:
        return r.run(main)


class _IdleSelector(selectors.DefaultSelector):
    """A selector that never sleeps on its own: with nothing to report, it asks the loop."""

    def __init__(self, holds: set[object], on_idle: Callable[[bool], Events]) -> None:
        super().__init__()
        self._holds = holds
        self._on_idle = on_idle

    def select(self, timeout: float | None = None) -> Events:
        # Read before the poll: a thread first delivers and then releases time, so if time is not
        # held here, the poll below sees everything that was delivered.
        held = bool(self._holds)
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return self._on_idle(held)

    def wait(self, seconds: float) -> Events:
        return super().select(None if seconds == math.inf else seconds)


class _Timer(asyncio.TimerHandle):
    """A timer that runs after older ones of the same instant; a bare heap has no such order."""

    def __init__(self, serial: int, *args: Any) -> None:
        super().__init__(*args)
        self._serial = serial

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        if isinstance(other, _Timer) and self.when() == other.when():
            return self._serial < other._serial
        return self.when() < other.when()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose time is a `VirtualClock`, as the module's docstring describes.

    `seed` permutes what is ready, replayably; None keeps asyncio's order. `patience` is how many
    real seconds the loop waits for a thread or a socket that shows no activity.

    The hooks use asyncio's private parts, which are the same from 3.11 to 3.15: an iteration
    selects, passes the events to `_process_events`, moves due timers from the heap `_scheduled` to
    the deque `_ready`, and runs what `_ready` then holds.
    """

    _closed = True  # for loops that failed to be made, until asyncio's own __init__ sets it
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(
        self, clock: VirtualClock | None = None, *, seed: int | None = None, patience: float = 5.0
    ) -> None:
        self.clock = VirtualClock() if clock is None else clock
        self.seed = None if seed is None else check.count("seed", seed, minimum=0)
        self.patience = check.seconds("patience", patience, zero=True, infinite=True)
        self._holds: set[object] = set()
        self._chance = None if seed is None else random.Random(seed)  # noqa: S311
        self._idle_selector = _IdleSelector(self._holds, self._on_idle)
        super().__init__(self._idle_selector)
        self._serials = itertools.count()
        # asyncio runs timers up to this much early; here all due timers are moved below.
        self._clock_resolution = 0.0

    def time(self) -> float:
        """Return the clock's instant."""
        return self.clock.now()

    @contextlib.contextmanager
    def hold_time(self) -> Iterator[None]:
        """Keep time from jumping inside the `with` block, in any thread; holds add up.

        The loop really waits meanwhile, at most `patience` seconds without a wake-up; then it drops
        the current holds, and time continues.
        """
        hold = object()
        self._holds.add(hold)
        try:
            yield
        finally:
            self._holds.discard(hold)
            self._write_to_self()  # type: ignore[attr-defined] # ends the loop's real wait

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` in a thread, holding time until the future is done."""
        future = super().run_in_executor(executor, func, *args)
        self._holds.add(future)
        future.add_done_callback(self._holds.discard)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the default executor's threads to end, in real time and with more patience.

        A `patience` of milliseconds is meant for threads that block, not for those that are
        exiting; and asyncio's own limit for this, from 3.12, is a timer to which time would jump.
        """
        patience, self.patience = self.patience, max(self.patience, _JOIN_PATIENCE)
        try:
            with self.hold_time():
                await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self.patience = patience

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule `callback` for the instant `when`, after those already scheduled for it."""
        if math.isnan(when):
            raise ValueError("when=nan: write an instant of loop.time()")
        self._check_closed()  # type: ignore[attr-defined]
        if self.get_debug():
            self._check_thread()  # type: ignore[attr-defined]
            self._check_callback(callback, "call_at")  # type: ignore[attr-defined]
        timer = _Timer(next(self._serials), when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined] # noqa: SLF001
        return timer

    def _process_events(self, event_list: Events) -> None:
        super()._process_events(event_list)  # type: ignore[misc]
        now = self.time()
        while self._scheduled and self._scheduled[0].when() <= now:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False  # type: ignore[attr-defined] # noqa: SLF001
            self._ready.append(timer)
        if self._chance is not None:
            self._permute(self._chance, {id(h) for key, _ in event_list for h in key.data})

    def _permute(self, chance: random.Random, io: set[int]) -> None:
        """Permute what is ready; the module's docstring says what may swap with what.

        From the last to the first, each free callback is put anywhere among those behind it, each
        bound one in front of them all.
        """
        now = self.time()
        bell: Callable[[], None] = self._read_from_self  # type: ignore[attr-defined]
        bells: list[asyncio.Handle] = []
        order: list[asyncio.Handle] = []
        # Threads may append meanwhile: only what is here now is taken out and put back in front.
        batch = [self._ready.popleft() for _ in range(len(self._ready))]
        for handle in reversed(batch):
            callback = getattr(handle, "_callback", None)
            if bell == callback:
                bells.append(handle)
                continue
            free = (
                id(handle) in io
                or isinstance(getattr(callback, "__self__", None), asyncio.Task)
                or (isinstance(handle, asyncio.TimerHandle) and handle.when() == now)
            )
            order.insert(chance.randrange(len(order) + 1) if free else 0, handle)
        self._ready.extendleft(reversed(bells + order))

    def _on_idle(self, held: bool) -> Events:  # noqa: FBT001
        timer = self._scheduled[0].when() if self._scheduled else math.inf
        instant = timer if timer < math.inf else None
        holds = self._holds.copy()
        if held or instant is None:
            events = self._idle_selector.wait(self.patience)
            if events or self._ready:
                return events
            if instant is None:
                raise StuckError(self._describe_stuck())
            self._holds.difference_update(holds)
            return []
        # If another thread has moved the clock past that instant meanwhile, the timer is due.
        with contextlib.suppress(ValueError):
            self.clock.advance_to(instant)
        return []

    def _describe_stuck(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=asyncio.Task.get_name)
        listed = [f"{task.get_name()!r} at {_place(task)}" for task in tasks[:_TASKS_LISTED]]
        if len(tasks) > _TASKS_LISTED:
            listed.append(f"and {len(tasks) - _TASKS_LISTED} more")
        held = f" ({len(self._holds)} threads or holds at work)" if self._holds else ""
        return (
            f"nothing is scheduled and nothing can wake this loop: after {self.patience:g} real"
            f" seconds{held} {len(tasks)} tasks wait: {'; '.join(listed) or 'none'}"
        )


def _place(task: asyncio.Task[Any]) -> str:
    """Return where a task waits, from its own coroutine to the innermost one."""
    places: list[str] = []
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        file = PurePath(frame.f_code.co_filename).name
        places.append(f"{file}:{frame.f_lineno} in {awaited.__qualname__}")
        awaited = awaited.cr_await
    return " > ".join(places) or repr(awaited)
