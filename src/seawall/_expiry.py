"""A timer that cancels an asyncio task, with the semantics of `asyncio.timeout`.

Imported only where asyncio is already in use.
"""

from __future__ import annotations

import asyncio
import os
import sys
from threading import get_ident
from typing import Any, Final

EXPIRED: Final = "seawall: out of time"
"""The message of every cancellation that one of our timeouts causes.

It travels with the CancelledError, so that an inner guard can distinguish "out of time" (a failure
of its dependency) from "no longer wanted" (no verdict).
"""


def is_expiry(error: BaseException) -> bool:
    """Return whether `error` is the cancellation by which one of our timeouts stops a task."""
    return (
        isinstance(error, asyncio.CancelledError) and bool(error.args) and error.args[0] is EXPIRED
    )


class Expiry:
    """A timer that cancels one task and can distinguish its cancellation from others."""

    __slots__ = ("_cancelling", "_handle", "fired", "task")

    def __init__(self, task: asyncio.Task[Any], delay: float) -> None:
        self.task = task
        self._cancelling = task.cancelling()
        self.fired = False  # whether it has cancelled its task
        self._handle = task.get_loop().call_later(max(delay, 0.0), self._fire)

    def _fire(self) -> None:
        self.fired = True
        self.task.cancel(EXPIRED)

    def has_fired(self, _holder: object) -> bool:
        """Return whether it has cancelled its task; other watches of a scope may have several."""
        return self.fired

    def fire_now(self) -> bool:
        """Cancel the task now; return False if that has already happened."""
        if self.fired:
            return False
        self._handle.cancel()
        self._fire()
        return True

    def stop(self) -> None:
        """Stop the timer; `disarm` must still be called."""
        self._handle.cancel()

    def disarm(self, error: BaseException | None) -> bool:
        """Stop the timer; return whether `error` is its own cancellation, and so a timeout."""
        self._handle.cancel()
        return self.fired and take_back(self.task, self._cancelling, error)


def take_back(task: asyncio.Task[Any], cancelling: int, error: BaseException | None) -> bool:
    """Withdraw our cancellation; return whether it alone caused `error`.

    `cancelling` is the task's count at entry: a higher count now means that other code cancelled
    the task too, and then that cancellation must win.
    """
    return task.uncancel() <= cancelling and isinstance(error, asyncio.CancelledError)


def running_task() -> asyncio.Task[Any]:
    """Return the current task; if there is none, raise and say what to do."""
    task = current_task()
    if task is None:
        raise RuntimeError("a timeout needs a task to cancel: run this inside one (asyncio.run)")
    return task


if sys.version_info >= (3, 12):
    current_tasks: dict[Any, asyncio.Task[Any]] = {}

    def current_task() -> asyncio.Task[Any] | None:
        """Return the task that runs now in this thread; None outside of any task."""
        try:
            return asyncio.current_task()
        except RuntimeError:
            return None

else:
    # On 3.11 current_task() asks the kernel for the process id, which costs more than the rest of a
    # timeout. So each thread's loop is remembered, and used while it runs in that very thread.
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    current_tasks: dict[Any, asyncio.Task[Any]] = _current_tasks

    _loops: dict[int, Any] = {}
    _without_thread: set[type] = set()  # loops that do not say their thread, such as uvloop
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_loops.clear)

    def current_task() -> asyncio.Task[Any] | None:
        """Return the task that runs now in this thread; None outside of any task."""
        ident = get_ident()
        loop = _loops.get(ident)
        if loop is not None and loop._thread_id == ident:  # noqa: SLF001
            running: asyncio.Task[Any] | None = current_tasks.get(loop)
            return running
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        if type(loop) not in _without_thread:
            if not hasattr(loop, "_thread_id"):
                _without_thread.add(type(loop))
                return asyncio.current_task(loop)
            for thread in [t for t, known in list(_loops.items()) if known.is_closed()]:
                _loops.pop(thread, None)
            _loops[ident] = loop
        return asyncio.current_task(loop)
