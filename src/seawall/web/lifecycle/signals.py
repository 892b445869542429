"""SIGTERM handler that starts draining first, and passes the signal to the server after the delay.

A server that gets the signal first closes its port immediately, while load balancers still send
requests there. So this handler is installed in front of the server's own, for as long as the app
runs: when the server is up, over the handler that the server has installed.
"""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final, TypeAlias

from seawall.runtime.stop_signals import behind_taps, is_loop_handler, put_back

Stop: TypeAlias = Callable[[float], None]
"""Function that stops the server, and gives it this number of seconds."""

SHORTEST: Final = 0.05
"""Minimum number of seconds for a server to close idle connections."""


class Signals:
    """SIGTERM handler in front of that of the server."""

    def __init__(self) -> None:
        """Start without installing a handler."""
        self._loop: AbstractEventLoop | None = None
        self._previous: Any = None
        self._begin: Callable[[Stop], None] = lambda _stop: None
        self._came = False

    def install(
        self, begin: Callable[[Stop], None], loop: AbstractEventLoop | None = None
    ) -> str | None:
        """Call `begin(stop)` in `loop` (this one) on SIGTERM; return why if that is impossible.

        Leave the signal alone outside of the main thread, if the signal has no handler, or if the
        event loop handles it.
        """
        import signal

        if current_thread() is not main_thread():
            return "its server does not run in the main thread, where signals arrive"
        previous = signal.getsignal(signal.SIGTERM)
        if not callable(previous):  # the default: the process ends without draining
            return "its server has no handler of SIGTERM in this process"
        if is_loop_handler(behind_taps(previous)):
            return "its server handles SIGTERM by loop.add_signal_handler"
        self._loop = get_running_loop() if loop is None else loop
        self._previous = previous
        self._begin = begin
        self._came = False
        signal.signal(signal.SIGTERM, self._handle)
        return None

    def holds(self) -> bool:
        """Return whether this handler is still the first for the signal."""
        import signal

        return bool(behind_taps(signal.getsignal(signal.SIGTERM)) == self._handle)

    @property
    def previous(self) -> Any:
        """The handler behind this one, while it is installed."""
        return self._previous if self._loop is not None else None

    def stands_before_uvicorn(self) -> bool:
        """Return whether the next handler belongs to a uvicorn server."""
        return _uvicorn_of(self._previous) is not None

    def restore(self) -> None:
        """Restore the previous handler, unless another one was installed meanwhile."""
        import signal

        if self._loop is None:
            return
        self._loop = None
        put_back(signal.SIGTERM, self._handle, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Start draining on the first signal; on a second one, skip the delay."""
        loop = self._loop
        if self._came or loop is None:
            self._previous(number, frame)
            return
        self._came = True
        try:
            # Do nothing else here: the handler interrupts whatever is running.
            loop.call_soon_threadsafe(self._begin, self._stop_of(number))
        except RuntimeError:  # the loop is closed
            self._previous(number, frame)

    def _stop_of(self, number: int) -> Stop:
        previous = self._previous

        def stop(seconds: float) -> None:
            if _stop_uvicorn(previous, seconds):
                return
            if current_thread() is main_thread():
                previous(number, None)
            else:  # a loop in the background: let the main thread handle the signal again
                os.kill(os.getpid(), number)

        return stop


def _stop_uvicorn(handler: Any, seconds: float) -> bool:
    """Stop uvicorn's server as its manual says, if `handler` belongs to one.

    Its handler would do the same, and raise the signal again at the very end, which would kill the
    process although all went well. Uvicorn waits forever unless a timeout is set.
    """
    server = _uvicorn_of(handler)
    if server is None:
        return False
    if server.config.timeout_graceful_shutdown is None:
        server.config.timeout_graceful_shutdown = max(SHORTEST, seconds)
    server.should_exit = True
    return True


def _uvicorn_of(handler: Any) -> Any:
    """Return the uvicorn server to which this handler belongs, or None."""
    server: Any = getattr(behind_taps(handler), "__self__", None)
    config: Any = getattr(server, "config", None)
    fits = hasattr(server, "should_exit") and hasattr(config, "timeout_graceful_shutdown")
    return server if fits else None
