"""The lifecycle of a service whose requests run in the threads of a server, as under WSGI.

A WSGI server notifies the app neither of its start nor of its stop. So the lifecycle starts with
the first request or probe, in a background event loop, and draining starts when the gunicorn worker
of this process gets the signal to stop:

- In front of gunicorn's handler of SIGTERM, if this object is made in the main thread of a worker
  (the usual way), or its first request runs there (a sync worker). Then the lifecycle's `delay`
  works.
- Otherwise (`preload_app` with threads) with the first request or probe after the signal.

Every request that the server has accepted is served: gunicorn itself closes its port and waits for
them, within its `graceful_timeout`. Other servers are left alone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from threading import Lock, current_thread, main_thread
from typing import Any, Final

from seawall._forks import survives_fork
from seawall.runtime.background import Background, run_in
from seawall.runtime.stop_signals import behind_taps
from seawall.web.lifecycle.lifecycle import Lifecycle, set_done

RUN_TIMEOUT: Final = 60.0
"""Maximum seconds for work in the background loop: more than any health check may take."""


class ServerThreads:
    """Drives a lifecycle from the threads that serve; and runs coroutines for them."""

    def __init__(self, name: str, lifecycle: Lifecycle | None) -> None:
        """Serve under `name`; listen to the signal if this is a gunicorn worker's main thread."""
        self._lifecycle = lifecycle
        self._background = Background(lambda: None, _do_nothing, owner=name)
        self._reset()
        survives_fork(self)
        if lifecycle is not None:
            lifecycle._count_in_flight = lambda: self.busy
        if lifecycle is not None and current_thread() is main_thread():
            self._install_signals(lifecycle)

    def _reset(self) -> None:
        self._mutex = Lock()
        self.busy = 0
        """Number of threads that serve a request now."""
        self.max_busy = 0
        """Most of them at once, so far: under load that is all the threads of the server."""
        self._started = self._lifecycle is None
        self._worker: Any = None

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run `work()` in the background loop; block this thread until it is done."""
        return run_in(self._background, work, RUN_TIMEOUT)

    def begin(self) -> None:
        """Count a request in."""
        worker = self._worker
        if not self._started or (worker is not None and not worker.alive):
            self.follow_server()
        with self._mutex:
            self.busy = busy = self.busy + 1
            self.max_busy = max(self.max_busy, busy)

    def end(self) -> None:
        """Count a request out that was counted in."""
        with self._mutex:
            self.busy -= 1
        lifecycle = self._lifecycle
        if lifecycle is not None and lifecycle._requests_ended is not None and not self.busy:
            self._background.submit_if_running(set_done, lifecycle._requests_ended)

    def follow_server(self) -> None:
        """Start the lifecycle with the first request or probe; drain if the server stops."""
        lifecycle = self._lifecycle
        if lifecycle is None:
            return
        if not self._started:
            self._start(lifecycle)
        worker = self._worker
        if worker is not None and not worker.alive and lifecycle._drain is None:
            self.run(lambda: _called(lifecycle._draining, None))

    def _start(self, lifecycle: Lifecycle) -> None:
        with self._mutex:
            if self._started:
                return
            if self._worker is None:
                if current_thread() is main_thread():
                    self._install_signals(lifecycle)
                else:
                    self._worker = _gunicorn_worker()
                    lifecycle._warn_of_delay("its server's threads cannot handle SIGTERM")
            self.run(lambda: _called(lifecycle.start_serving))
            self._started = True

    def _install_signals(self, lifecycle: Lifecycle) -> None:
        """Stand in front of gunicorn's handler of SIGTERM, in the main thread of a worker."""
        signals, worker = lifecycle._signals, _gunicorn_worker()
        if worker is None:
            return
        self._worker = worker
        if signals is not None and not signals.installed:
            signals.install(lifecycle._draining, self._background.start())

    def _after_fork(self) -> None:
        """Start again in a child process: threads and loop are those of the parent."""
        self._background.after_fork()
        self._reset()
        if self._lifecycle is not None:
            self._lifecycle._reset()


def _gunicorn_worker() -> Any:
    """Return the gunicorn worker whose handler of SIGTERM is installed, or None."""
    handler: Any = behind_taps(signal.getsignal(signal.SIGTERM))
    worker: Any = getattr(handler, "__self__", None)
    fits = hasattr(worker, "alive") and hasattr(worker, "cfg") and hasattr(worker, "handle_exit")
    return worker if fits else None


async def _called(function: Callable[..., object], *args: Any) -> None:
    """Call `function` in the loop that runs this."""
    function(*args)


async def _do_nothing() -> None:
    pass
