"""Live mode of `seawall top`: a thread reads the messages, and the main thread draws them.

Promises:
- A lost dashboard is contacted again, and the last line reports it.
- Keys work if there is a terminal.
- However it ends (a key, Ctrl-C, SIGTERM, an error), the terminal's settings, screen and cursor are
  restored.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, Self

from rich.console import Console, RenderableType
from rich.live import Live

from seawall.cli.top.client import DashboardClient
from seawall.cli.top.command import KEYS, WELL, Options
from seawall.cli.top.drawing import frame
from seawall.cli.top.history import TopHistory
from seawall.cli.top.layout import STYLES, fit, glyphs_for, line, span
from seawall.cli.top.messages import ParsedMessage, narrowed, validated
from seawall.clock import current_clock
from seawall.dashboard.views import History

REDRAWN_EVERY: Final = 0.5
"""Seconds after which a frame is redrawn even without a message: sizes and ages change."""
PATIENCE: Final = 2.0
"""Seconds, beyond three update intervals, after which missing messages are reported."""
_JOIN: Final = 1.0


def run(options: Options, console: Console) -> int:
    """Show the dashboard until the user quits, and return the exit status."""
    if not console.is_terminal or console.is_dumb_terminal:
        raise ValueError("this is no terminal to draw in: write --once or --json")
    with ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        keys = stack.enter_context(_keys())
        feed = stack.enter_context(_Feed(options.source))
        screen = _Screen(options, console)
        live = Live(screen.draw(feed), console=console, screen=True, auto_refresh=False)
        stack.enter_context(live)
        while True:
            live.update(screen.draw(feed), refresh=True)
            for key in _read_keys(keys, feed.bell):
                if key in "qQ\x04":
                    return WELL
                if key in "sS":
                    screen.stacks = not screen.stacks


class _Feed:
    """The last message from the dashboard, read by a separate thread.

    `bell` becomes readable when there is something new.
    """

    def __init__(self, source: DashboardClient) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._past = TopHistory()
        self._latest: ParsedMessage | None = None
        self._history: dict[str, History] = {}
        self._clock = current_clock()
        self._heard = self._clock.now()
        self._lost = ""
        self.bell, self._ringer = socket.socketpair()
        for end in (self.bell, self._ringer):
            end.settimeout(0)
        self._thread = threading.Thread(target=self._read, name="seawall-top", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._source.close()
        self._thread.join(_JOIN)  # a DNS lookup cannot be interrupted
        if not self._thread.is_alive():
            self.bell.close()
            self._ringer.close()

    def latest(self) -> tuple[ParsedMessage | None, dict[str, History], str, float]:
        """Return the last message, the history, the current problem, and the message's age."""
        with self._lock:
            age = self._clock.now() - self._heard
            return self._latest, self._history, self._lost, age

    def _read(self) -> None:
        try:
            for raw in self._source.messages(self._show_trouble):
                reading = validated(raw)
                # Copied, because the screen draws this while the next message extends the original.
                history = _copy(self._past.take(reading.message))
                with self._lock:
                    self._latest, self._history = reading, history
                    self._lost, self._heard = "", self._clock.now()
                self._ring()
        finally:
            self._show_trouble("nothing is read any more")  # visible only if a bug ended the thread

    def _show_trouble(self, why: str) -> None:
        with self._lock:
            self._lost = why
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # full: it is readable already
            self._ringer.send(b".")


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value


class _Screen:
    """Draws frames at the current size of the terminal."""

    def __init__(self, options: Options, console: Console) -> None:
        self.stacks = options.stacks
        self._options = options
        self._console = console
        self._glyphs = glyphs_for(console.encoding)

    def draw(self, feed: _Feed) -> RenderableType:
        reading, history, lost, age = feed.latest()
        if reading is None:
            waiting = lost or f"waiting for {self._options.source.place}"
            return fit(line(waiting), self._console.width, self._glyphs)
        view_every = max((view["every"] for view in reading.message["views"]), default=1.0)
        if not lost and age > 3 * view_every + PATIENCE:
            lost = "no news"
        parts = [(f"NOT LIVE, last heard {span(age)} ago: {lost}  ", STYLES["bad"])] if lost else []
        return frame(
            narrowed(reading.message, self._options.pods, self._options.guards),
            history,
            self._console.width,
            self._console.height,
            stacks=self.stacks,
            status=line(*parts, ("; ".join([*reading.notes, KEYS]), "dim")),
            glyphs=self._glyphs,
        )


@contextmanager
def _keys() -> Iterator[int | None]:
    """Yield the file descriptor that keys are read from one by one; None if there is none."""
    try:
        import termios
        import tty
    except ImportError:  # not a POSIX system: no keys
        yield None
        return
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):  # no terminal
        yield None
        return
    try:
        tty.setcbreak(fd)
        during = termios.tcgetattr(fd)
        during[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on our screen
        termios.tcsetattr(fd, termios.TCSANOW, during)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def _read_keys(keys: int | None, bell: socket.socket) -> str:
    """Wait for keys, for the bell or for a moment, and return the keys."""
    asked: list[socket.socket | int] = [bell] if keys is None else [bell, keys]
    ready, _, _ = select.select(asked, (), (), REDRAWN_EVERY)
    if bell in ready:
        bell.recv(4096)
    if keys is None or keys not in ready:
        return ""
    return os.read(keys, 64).decode("ascii", "replace") or "q"  # EOF: no user is there


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that the terminal is restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ended(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
