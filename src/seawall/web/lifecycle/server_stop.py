"""Signals that stop the server: listeners of the stop, and a SIGTERM handler that drains first.

Promises:

- `ServerStop` calls its listeners when SIGINT or SIGTERM arrives, under uvicorn, hypercorn and
  granian, and when a hypercorn worker is stopped by its parent process. It is for streams without
  an end: a server waits for open responses before it notifies the app of the stop (ASGI lifespan).
- `Signals` starts draining at SIGTERM, and passes the signal to the server after the delay. A
  server that gets it first closes its port immediately, while load balancers still send requests
  there. The handler is installed in front of the server's own, for as long as the app runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from math import inf
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from seawall.runtime.stop_signals import (
    STOP_SIGNALS,
    SignalTap,
    behind_taps,
    is_loop_handler,
    put_back,
)

STOP_MEMORY: Final = 10.0
"""Seconds for which a signal means that the server is stopping. If it still serves after that, it
ignored the signal."""


class ServerStop:
    """Notifier of listeners when the server of one event loop begins to stop."""

    def __init__(self) -> None:
        self._listeners: set[Callable[[], object]] = set()
        self._tap = SignalTap(self._on_signal)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._signalled_at = -inf

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

    def is_stopping(self) -> bool:
        """Return whether the server was asked to stop, as far as is known without listening."""
        if asyncio.get_running_loop().time() - self._signalled_at < STOP_MEMORY:
            return True
        return any(_uvicorn_stops(number) for number in STOP_SIGNALS)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._begin)

    def _on_end(self, _task: asyncio.Task[Any]) -> None:
        self._begin()

    def _begin(self) -> None:
        self._signalled_at = asyncio.get_running_loop().time()
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


Stop: TypeAlias = Callable[[float], None]
"""Function that stops the server, and gives it this number of seconds."""

SHORTEST: Final = 0.05
"""Minimum number of seconds for a server to close idle connections."""


class Signals:
    """SIGTERM handler in front of that of the server."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._previous: Any = None
        self._begin: Callable[[Stop], object] = lambda _stop: None
        self._has_come = False

    def install(
        self, begin: Callable[[Stop], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> str | None:
        """Call `begin(stop)` in `loop` (this one) on SIGTERM; return why if that is impossible.

        Leave the signal alone outside of the main thread, if the signal has no handler, or if the
        event loop handles it.
        """
        if current_thread() is not main_thread():
            return "its server does not run in the main thread, where signals arrive"
        previous = signal.getsignal(signal.SIGTERM)
        if not callable(previous):  # the default: the process ends without draining
            return "its server has no handler of SIGTERM in this process"
        if is_loop_handler(behind_taps(previous)):
            return "its server handles SIGTERM by loop.add_signal_handler"
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._previous = previous
        self._begin = begin
        self._has_come = False
        signal.signal(signal.SIGTERM, self._handle)
        return None

    def is_first(self) -> bool:
        """Return whether this handler is still the first for the signal."""
        return bool(behind_taps(signal.getsignal(signal.SIGTERM)) == self._handle)

    @property
    def installed(self) -> bool:
        """Whether this handler was installed, and not removed."""
        return self._loop is not None

    def is_before_uvicorn(self) -> bool:
        """Return whether the next handler belongs to a uvicorn server."""
        return _uvicorn_of(self._previous) is not None

    def restore(self) -> None:
        """Restore the previous handler, unless another one was installed meanwhile."""
        if self._loop is None:
            return
        self._loop = None
        put_back(signal.SIGTERM, self._handle, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Start draining on the first signal; on a second one, skip the delay."""
        loop = self._loop
        if self._has_come or loop is None:
            self._previous(number, frame)
            return
        self._has_come = True
        try:
            # Do nothing else here: the handler interrupts whatever is running.
            loop.call_soon_threadsafe(self._begin, self._stop_of(number))
        except RuntimeError:  # the loop is closed
            self._previous(number, frame)

    def _stop_of(self, number: int) -> Stop:
        previous = self._previous

        def stop(seconds: float) -> None:
            server = _uvicorn_of(previous)
            if server is not None:
                # As uvicorn's manual says. Its handler would do the same, and raise the signal
                # again at the very end, which would kill the process although all went well.
                # Uvicorn waits forever unless a timeout is set.
                if server.config.timeout_graceful_shutdown is None:
                    server.config.timeout_graceful_shutdown = max(SHORTEST, seconds)
                server.should_exit = True
            elif current_thread() is main_thread():
                previous(number, None)
            else:  # a loop in the background: let the main thread handle the signal again
                os.kill(os.getpid(), number)

        return stop


def _uvicorn_of(handler: Any) -> Any:
    """Return the uvicorn server to which this handler belongs, or None."""
    server: Any = getattr(behind_taps(handler), "__self__", None)
    config: Any = getattr(server, "config", None)
    fits = hasattr(server, "should_exit") and hasattr(config, "timeout_graceful_shutdown")
    return server if fits else None
