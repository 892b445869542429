"""SIGINT and SIGTERM: for workers that stop on them, and streams that end with their server.

Promises:
- A handler that the program or its server installed still gets every signal, and so does an event
  loop that handles signals itself.
- Handlers are restored when they are no longer needed.
- Outside of the main thread, where Python handles no signals, nothing is installed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final, TypeAlias

from seawall import _checks as check

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class _Link:
    """A handler in front of the previous one."""

    def __init__(self, listener: Handler, previous: Handler) -> None:
        self.listener: Handler | None = listener
        self.previous = previous
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A forked child inherits the handler, but not the event loop that listens.
        if self.listener is not None and self._pid == os.getpid():
            self.listener(number, frame)
        self.previous(number, frame)


class SignalTap:
    """Calls `listener(number, frame)` before the handler that is installed.

    A signal whose default action applies, or that is ignored, is left alone. What
    `loop.add_signal_handler` installed still works: a loop gets signals by a file descriptor.
    """

    def __init__(self, listener: Handler) -> None:
        self._listener = listener
        self._links: dict[signal.Signals, _Link] = {}

    def install(self) -> None:
        """Listen to both signals from now on; do nothing outside of the main thread."""
        if self._links or current_thread() is not main_thread():
            return
        for number in STOP_SIGNALS:
            previous = signal.getsignal(number)
            if callable(previous):
                self._links[number] = link = _Link(self._listener, previous)
                _set_handler(number, link)

    def remove(self) -> None:
        """Stop listening; a handler that was installed in front of this one since then stays."""
        links, self._links = self._links, {}
        for number, link in links.items():
            link.listener = None  # a handler in front of it may still call it
            put_back(number, link, link.previous)


def _set_handler(number: signal.Signals, handler: Any) -> None:
    signal.signal(number, handler)
    if is_loop_handler(behind_taps(handler)) and hasattr(signal, "siginterrupt"):
        signal.siginterrupt(number, False)  # noqa: FBT003 - as event loops do for their handlers


def put_back(number: signal.Signals, handler: Handler, previous: Any) -> None:
    """Restore `previous` in the place of `handler`; a handler in front of it stays."""
    if current_thread() is not main_thread():
        return
    front: Any = signal.getsignal(number)
    if front == handler:
        _set_handler(number, previous)
        return
    while isinstance(front, _Link):
        if front.previous == handler:
            front.previous = previous
            return
        front = front.previous


def behind_taps(handler: Any) -> Any:
    """Return the handler behind all taps, which is `handler` itself if there are none."""
    while isinstance(handler, _Link):
        handler = handler.previous
    return handler


def is_loop_handler(handler: Any) -> bool:
    """Return whether `handler` is the empty function that `loop.add_signal_handler` installs."""
    module = getattr(handler, "__module__", None) or ""
    return module.partition(".")[0] in {"asyncio", "uvloop"}


@contextmanager
def stop_signals_handled(handler: Handler) -> Iterator[None]:
    """Call `handler` for both signals in the block, unless the program handles or ignores them."""
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    taken: dict[signal.Signals, Any] = {}
    if current_thread() is main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in defaults:
                taken[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in taken.items():
            put_back(number, handler, before)


def run_until_signal(
    run: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[float], object], drain: float
) -> None:
    """Run `run()` in a new event loop until it returns, or a signal has stopped it.

    The first signal calls `stop(drain)`, the second one `stop(0)`; both may come before `run` has
    begun. A third one ends the process, as it would without a handler.
    """
    import asyncio

    count, seconds = 0, check.seconds("drain", drain, zero=True)

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count <= 2:  # noqa: PLR2004 - see above
            stop(seconds if count == 1 else 0.0)
        else:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
            signal.raise_signal(number)

    with stop_signals_handled(handle):
        asyncio.run(run())
