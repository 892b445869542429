"""SIGTERM begins the draining, and only after its delay does the server hear of it.

A server that hears the signal first closes its port at once, while load balancers still send
requests there. So the handler stands in front of the server's own, for as long as the app runs: it
is installed when the server is up, over a handler that somebody else (the server) has installed.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeAlias

from seawall.runtime.stop_signals import behind_taps, is_loop_handler, put_back

Stop: TypeAlias = Callable[[float], None]
"""Tells the server to stop, and how many seconds it has for that."""

SHORTEST: Final = 0.05
"""Seconds that a server has at least for closing what is idle."""


class Signals:
    """Stands between the system and the server's handler of SIGTERM."""

    def __init__(self) -> None:
        """Install nothing yet."""
        self._loop: AbstractEventLoop | None = None
        self._previous: Any = None
        self._begin: Callable[[Stop], None] = lambda _stop: None
        self._came = False

    def install(self, begin: Callable[[Stop], None]) -> str | None:
        """Call `begin(stop)` in this loop when the signal comes; else return why that cannot be.

        Outside of the main thread, or if nobody handles the signal, or the event loop does, it is
        left alone.
        """
        import signal
        from threading import current_thread, main_thread

        if current_thread() is not main_thread():
            return "its server does not run in the main thread, where signals arrive"
        previous = signal.getsignal(signal.SIGTERM)
        if not callable(previous):  # the default: the process ends, and nobody drains
            return "its server has no handler of SIGTERM in this process"
        if is_loop_handler(behind_taps(previous)):
            return "its server handles SIGTERM by loop.add_signal_handler"
        self._loop = get_running_loop()
        self._previous = previous
        self._begin = begin
        self._came = False
        signal.signal(signal.SIGTERM, self._handle)
        return None

    def holds(self) -> bool:
        """Tell whether the signal still comes here first."""
        import signal

        return bool(behind_taps(signal.getsignal(signal.SIGTERM)) == self._handle)

    def stands_before_uvicorn(self) -> bool:
        """Tell whether the handler behind this one is that of a uvicorn server."""
        return _uvicorn_of(self._previous) is not None

    def restore(self) -> None:
        """Give the signal back to whoever had it, unless somebody else took it meanwhile."""
        import signal

        if self._loop is None:
            return
        self._loop = None
        put_back(signal.SIGTERM, self._handle, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Begin; whoever sends it again does not want to wait for the delay."""
        loop = self._loop
        if self._came or loop is None:
            self._previous(number, frame)
            return
        self._came = True
        try:
            # Nothing else is done here: the handler interrupts whatever runs.
            loop.call_soon_threadsafe(self._begin, self._stop_of(number))
        except RuntimeError:  # the loop is closed
            self._previous(number, frame)

    def _stop_of(self, number: int) -> Stop:
        previous = self._previous

        def stop(seconds: float) -> None:
            if not _stop_uvicorn(previous, seconds):
                previous(number, None)

        return stop


def _stop_uvicorn(handler: Any, seconds: float) -> bool:
    """Ask uvicorn's server to stop as its manual says, if `handler` is of one.

    Its handler would do the same, and raise the signal again at the very end: then the process
    would be killed by it where all went well. Uvicorn waits for ever, unless told how long.
    """
    server = _uvicorn_of(handler)
    if server is None:
        return False
    if server.config.timeout_graceful_shutdown is None:
        server.config.timeout_graceful_shutdown = max(SHORTEST, seconds)
    server.should_exit = True
    return True


def _uvicorn_of(handler: Any) -> Any:
    """Return the uvicorn server whose handler this is; None if it is another's."""
    server: Any = getattr(behind_taps(handler), "__self__", None)
    config: Any = getattr(server, "config", None)
    fits = hasattr(server, "should_exit") and hasattr(config, "timeout_graceful_shutdown")
    return server if fits else None
