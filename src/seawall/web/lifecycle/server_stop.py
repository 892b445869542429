"""Detection that the server of an event loop is stopping, for responses that end only then.

A server waits for open responses before it notifies the app of the stop (ASGI lifespan). An endless
stream would wait for the server, and the server for the stream.

Promises:

- Listeners are called when SIGINT or SIGTERM arrives, under uvicorn, hypercorn and granian, and
  when a hypercorn worker is stopped by its parent process.
- The server gets its signal as if there were no listeners.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from math import inf
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary

from seawall.runtime.stop_signals import STOP_SIGNALS, SignalTap, behind_taps

REMEMBERED: Final = 10.0
"""Seconds for which a signal means that the server is stopping. If it still serves after that, it
ignored the signal."""


class ServerStop:
    """Notifier of listeners when the server of one event loop begins to stop."""

    def __init__(self) -> None:
        """Start with no listeners and no signal handlers."""
        self._listeners: set[Callable[[], object]] = set()
        self._tap = SignalTap(self._on_signal)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._asked_at = -inf

    @staticmethod
    def of_this_loop() -> ServerStop:
        """Return the instance of the running event loop."""
        return _of_loops.setdefault(asyncio.get_running_loop(), ServerStop())

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` in this loop when the server begins to stop."""
        self._listeners.add(listener)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._tap.install()
        if not self._tasks:
            self._tasks = _hypercorn_tasks(self._loop)
            for task in self._tasks:
                task.add_done_callback(self._on_end)

    def ignore(self, listener: Callable[[], object]) -> None:
        """Stop calling `listener`; without listeners, restore the signal handlers."""
        self._listeners.discard(listener)
        if not self._listeners and self._loop is not None:
            self._loop = None
            self._tap.remove()
            for task in self._tasks:
                task.remove_done_callback(self._on_end)
            self._tasks = []

    def asked(self) -> bool:
        """Return whether the server was asked to stop, as far as is known without listening."""
        if asyncio.get_running_loop().time() - self._asked_at < REMEMBERED:
            return True
        return any(_uvicorn_stops(number) for number in STOP_SIGNALS)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._begin)

    def _on_end(self, _task: asyncio.Task[Any]) -> None:
        self._begin()

    def _begin(self) -> None:
        self._asked_at = asyncio.get_running_loop().time()
        for listener in list(self._listeners):
            listener()


_of_loops: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, ServerStop]] = WeakKeyDictionary()


def _hypercorn_tasks(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """Return the tasks that end when hypercorn begins to stop.

    A hypercorn worker gets no signal: it polls a flag of its parent process, in a task.
    """
    wait: Any = getattr(sys.modules.get("hypercorn.utils"), "raise_shutdown", None)
    code = getattr(wait, "__code__", object())
    tasks = asyncio.all_tasks(loop)
    return [task for task in tasks if getattr(task.get_coro(), "cr_code", None) is code]


def _uvicorn_stops(number: signal.Signals) -> bool:
    """Return whether the handler of this signal belongs to a uvicorn server that is stopping."""
    server = getattr(behind_taps(signal.getsignal(number)), "__self__", None)
    return getattr(server, "should_exit", False) is True
