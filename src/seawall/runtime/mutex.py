"""A lock that is safe against the garbage collector and signals.

The collector may run while a thread is inside a locked section, and close a coroutine or generator
that gives a slot back and so needs the very lock which that thread holds. A plain lock would block
for ever; a reentrant one would let it into a half-done change. Here such work is put off.

A signal handler may raise wherever CPython checks for signals: at the start of a Python function,
at a backward jump, after a call of a C function. It does not check between the call of a C function
by `with` and the block (CPython 3.11 to 3.13 and 3.15; 3.14 does, gh-148874). So a section is
entered and left by C code only, and is always left.
"""

from __future__ import annotations

import sys
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import log_failure

if TYPE_CHECKING:
    from types import FrameType

    class CLock:
        """Methods of the interpreter's own reentrant lock, whose type cannot be named."""

        def __enter__(self) -> bool: ...
        def __exit__(self, *exc: object) -> None: ...
        def _is_owned(self) -> bool: ...

else:
    CLock = type(RLock())


LOCK_FREE: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether plain counters are safe without a lock.

With a global interpreter lock, a read, a change and a write of one attribute with no call and no
loop in between are not interrupted (CPython 3.11 to 3.15). A free-threaded build gives no such
guarantee: there the same work is done under the lock.
"""


class Mutex(CLock):
    """`with mutex:` for a section; `mutex.do(work)` for work that the collector may trigger."""

    def __init__(self) -> None:
        super().__init__()
        self._later: deque[Callable[[], Any]] = deque()
        self._working = False

    def do(self, work: Callable[[], Any]) -> None:
        """Do `work` in its own section, or after the section that this thread is in."""
        if self._is_owned():
            self._later.append(work)
            if not self._working:
                try:
                    # Another thread waits for the end of the section, where no code of ours runs.
                    start_new_thread(self.do, (_nothing,))
                except RuntimeError:
                    pass  # no more threads, or the interpreter exits: the next caller does it
            return
        with self:
            try:
                self._working = True
                work()
            finally:
                try:
                    self._work_off()
                finally:
                    self._working = False
        if self._later:  # it was added after the last check
            self.do(_nothing)

    def _work_off(self) -> None:
        """Do the deferred work. No caller is left to handle its errors, so they are logged."""
        while self._later:
            work = self._later.popleft()
            try:
                work()
            except Exception:  # noqa: BLE001 - logged
                log_failure("work that had to wait for a lock failed")


def _nothing() -> None:
    pass


class Nesting:
    """The open sections of one mutex, under it. Detects sections that a signal cut short."""

    def __init__(self) -> None:
        self._frames: list[FrameType] = []

    def enter(self) -> None:
        """Record a section of the caller's caller."""
        here = sys._getframe(2)  # noqa: SLF001 - inspect would load half the library
        if self._frames:
            running = set()
            outer: FrameType | None = here
            while outer is not None:
                running.add(outer)
                outer = outer.f_back
            self._frames = [frame for frame in self._frames if frame in running]
        self._frames.append(here)

    def leave(self) -> bool:
        """End the section; return whether it was the outermost."""
        if self._frames:
            self._frames.pop()
        return not self._frames
