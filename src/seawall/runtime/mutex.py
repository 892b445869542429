"""A lock that the garbage collector cannot turn against its own holder, and what a fork leaves.

The collector may run while a thread is inside a locked section, and close a coroutine or generator
that wants to give a slot back: to the very lock which that thread holds. A plain lock would block
for ever; a reentrant one would let it into a half-done change. Here such work waits until the
section is over.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol
from weakref import WeakSet


class Mutex:
    """`with mutex:` for a section; `mutex.do(work)` for what may come from the collector."""

    __slots__ = ("_depth", "_later", "_lock")

    def __init__(self) -> None:
        """Begin unlocked."""
        self._lock = RLock()
        self._depth = 0
        self._later: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_exc: object) -> None:
        try:
            # While it counts as inside, what comes from the collector joins the queue.
            while self._depth == 1 and self._later:
                self._later.popleft()()
        finally:
            self._depth -= 1
            if self._later and not self._depth:  # it came after the last look
                with self:
                    pass
            self._lock.release()

    def do(self, work: Callable[[], Any]) -> None:
        """Do `work` in a section of its own, or at the end of the one that this thread is in."""
        with self._lock:
            if self._depth:
                self._later.append(work)
            else:
                with self:
                    work()


class Forkable(Protocol):
    """Something that has to be put right in a child process."""

    def _after_fork(self) -> None:
        """Forget the threads that did not come along, and the locks they held."""


_forkable: WeakSet[Forkable] = WeakSet()


def survives_fork(thing: Forkable) -> None:
    """Call `thing._after_fork()` in child processes, for as long as it lives."""
    _forkable.add(thing)


def _after_fork() -> None:
    for thing in list(_forkable):
        thing._after_fork()  # noqa: SLF001 - nothing for users


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
