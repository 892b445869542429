"""Detects blocked event loops, and reports the cause and the duration.

Promises:
- A loop is reported only if it is late by `threshold` or more, and always if it was blocked for a
  quarter more than that: once while it lasts, with the stack that blocks it, and once when it is
  over, with the total time.
- A watchdog that was paused itself blames no stack.
- A loop pays for four timers per `threshold`; the watching thread never touches it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import Context
from threading import Event, RLock, Thread, get_ident
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Self
from weakref import ref

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import Clock, VirtualClock, check_clock, current_clock
from seawall.events import LoopBlocked
from seawall.events.bus import emit

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

CHECKS: Final = 4  # number of heartbeats of a loop, and of checks, per `threshold`
FRAMES: Final = 30  # maximum number of reported frames of a stack: the innermost
NOT_SEEN: Final = "(it was over before anybody looked)\n"
PAUSED: Final = (
    "(the watchdog could not run either: a call kept the interpreter's lock, or the process was"
    " paused)\n"
)


class LoopWatchdog:
    """Watches event loops from its own thread: `async with LoopWatchdog(): ...`."""

    def __init__(
        self, threshold: float = 0.1, *, name: str = "loop", clock: Clock | None = None
    ) -> None:
        """Report a loop that has not completed an iteration for `threshold` seconds, under `name`.

        On a virtual clock there is no thread: a block is reported when it is over, and by `check()`
        if that is called meanwhile.
        """
        self.threshold = check.seconds("threshold", threshold)
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write a name, such as 'api'")
        self.name = name
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._period = self.threshold / CHECKS
        self._blocks = 0
        self._seconds = 0.0
        self._longest = 0.0
        self._begin()
        survives_fork(self)
        registry.enter(self, "watchdog", name)

    def _begin(self) -> None:
        self._lock = RLock()
        self._pulses: dict[int, _Pulse] = {}
        self._quit: Event | None = None
        self._checked_at = float("inf")  # last check of the thread; infinite without one

    def __repr__(self) -> str:
        return f"<LoopWatchdog {self.name!r}: {len(self._pulses)} loops, {self._blocks} blocks>"

    def start(self) -> None:
        """Watch the running loop, until `stop()` is called in it or it is closed."""
        from asyncio import get_running_loop

        loop = get_running_loop()
        with self._lock:
            known = self._pulses.get(id(loop))
            if known is not None and known.loop() is loop:
                raise RuntimeError(f"watchdog {self.name!r} watches this loop already")
            pulse = self._pulses[id(loop)] = _Pulse(loop, self._clock.now() + self._period)
            self._start_thread()
        # In an empty context: the starter's context, perhaps of a request, would live as long.
        loop.call_later(self._period, self._beat, pulse, context=Context())

    def stop(self) -> None:
        """Stop watching the running loop."""
        from asyncio import get_running_loop

        with self._lock:
            self._pulses.pop(id(get_running_loop()), None)
            self._stop_thread_if_idle()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def check(self, frame_of: Callable[[int], FrameType | None] | None = None) -> list[float]:
        """Check all loops now; report newly blocked ones, and return for how long each is blocked.

        The watchdog's thread does this automatically. `frame_of(thread_id)` returns where a thread
        is.
        """
        reader = _frame_of if frame_of is None else check.plain_function("frame_of", frame_of)
        return self._check(reader, paused=False)

    def snapshot(self) -> dict[str, float]:
        """Return how many loops are watched, how late they are, and the totals so far."""
        now = self._clock.now()
        with self._lock:
            lags = [max(0.0, now - pulse.due) for pulse in self._pulses.values()]
            return {
                "threshold": self.threshold,
                "loops": len(lags),
                "blocked": sum(lag >= self.threshold for lag in lags),
                "lag": max(lags, default=0.0),
                "blocks": self._blocks,
                "blocked_seconds": self._seconds,
                "longest": self._longest,
            }

    # --- In the loop ---

    def _beat(self, pulse: _Pulse) -> None:
        """Record a heartbeat; if it comes too late, report for how long there was none."""
        loop = pulse.loop()
        now = self._clock.now()
        with self._lock:
            if loop is None or self._pulses.get(id(loop)) is not pulse:
                return  # stopped, or in a child process
            late = now - pulse.due
            stack = pulse.stack
            blocked = stack is not None or late >= self.threshold
            if stack is None:
                self._blocks += blocked
                stack = PAUSED if pulse.excused or self._was_paused(now) else NOT_SEEN
            if blocked:
                self._seconds += late
                self._longest = max(self._longest, late)
            pulse.alive(now + self._period)
        if blocked:
            self._tell(late, stack, over=True)
        loop.call_later(self._period, self._beat, pulse)

    # --- In the thread ---

    def _run(self, quit_signal: Event) -> None:
        while not quit_signal.wait(self._period):
            self._check_all()

    def _check_all(self) -> None:
        now = self._clock.now()
        paused = self._was_paused(now)
        self._checked_at = now
        self._check(_frame_of, paused=paused)

    def _was_paused(self, now: float) -> bool:
        """Return whether the thread itself missed its check."""
        return now - self._checked_at >= self._period + self.threshold

    def _check(self, frame_of: Callable[[int], FrameType | None], *, paused: bool) -> list[float]:
        found = []
        for pulse in self._suspects(paused=paused):
            due = pulse.due
            stack = _stack_text(frame_of(pulse.thread))  # outside of the lock: it is slow
            with self._lock:
                if pulse.due != due:
                    continue  # it recovered meanwhile: that is not the stack which blocked it
                pulse.stack = stack
                self._blocks += 1
            found.append(self._clock.now() - due)
            self._tell(found[-1], stack, over=False)
        return found

    def _suspects(self, *, paused: bool) -> list[_Pulse]:
        """Return loops that are late and not reported yet; forget loops that are gone."""
        suspects = []
        now = self._clock.now()
        with self._lock:
            for key, pulse in list(self._pulses.items()):
                loop = pulse.loop()
                if loop is None or loop.is_closed():
                    del self._pulses[key]
                elif not loop.is_running():
                    pulse.alive(now + self._period)  # it is not running, so it blocks nothing
                elif pulse.stack is None and now - pulse.due >= self.threshold:
                    if paused:
                        pulse.excused = True  # give it one more turn
                    else:
                        suspects.append(pulse)
            self._stop_thread_if_idle()
        return suspects

    def _tell(self, late: float, stack: str, *, over: bool) -> None:
        import logging

        emit(LoopBlocked, self.name, seconds=late, stack=stack, over=over)
        what = "event loop %r was blocked for %.3f s, by\n%s"
        if not over:
            what = "event loop %r has been blocked for %.3f s, at\n%s"
        logging.getLogger("seawall").warning(what, self.name, late, stack)

    def _start_thread(self) -> None:
        if self._quit is None and not isinstance(self._clock, VirtualClock):
            self._checked_at = self._clock.now()
            self._quit = Event()
            name = f"seawall-watchdog-{self.name}"
            Thread(target=self._run, args=(self._quit,), name=name, daemon=True).start()

    def _stop_thread_if_idle(self) -> None:
        if not self._pulses and self._quit is not None:
            self._quit.set()
            self._quit = None
            self._checked_at = float("inf")

    def _after_fork(self) -> None:
        """Watch nothing in a child process: the thread is gone, the loops belong to the parent."""
        self._begin()


class _Pulse:
    """The state of one watched loop, held weakly."""

    def __init__(self, loop: AbstractEventLoop, due: float) -> None:
        self.loop = ref(loop)
        self.thread = get_ident()
        self.alive(due)

    def alive(self, due: float) -> None:
        """Record a heartbeat; the next is expected at the instant `due`."""
        self.due = due
        self.excused = False  # whether the watchdog could not check it in time
        self.stack: str | None = None  # the stack that blocks it, until that is over


def _frame_of(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)  # noqa: SLF001 - there is no other way


def _stack_text(frame: FrameType | None) -> str:
    """Return the lines of a stack from where the loop called into the program, innermost last."""
    from traceback import StackSummary, walk_stack

    if frame is None:
        return NOT_SEEN
    stack = StackSummary.extract(reversed(list(walk_stack(frame))), lookup_lines=False)
    loops = [number for number, entry in enumerate(stack) if _is_loop(entry.filename)]
    begin = loops[-1] + 1 if loops else 0
    # A loop at rest has nothing inside: then report where it rests.
    return "".join(StackSummary.from_list((stack[begin:] or stack)[-FRAMES:]).format())


def _is_loop(filename: str) -> bool:
    *_, folder, name = ("", *filename.replace("\\", "/").split("/"))
    return folder == "asyncio" and name in {"base_events.py", "events.py", "runners.py"}
