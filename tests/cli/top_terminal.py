"""A process in a terminal of its own, for the tests of `seawall top`."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from seawall.clock import SystemClock

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMAND = "import sys; from seawall.cli import main; sys.exit(main())"
HOME = "\x1b[H"
"""Each frame begins with it."""


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 100, lines: int = 30) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, lines)
        self._before = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(  # noqa: S603 - this project's own command
            [sys.executable, "-c", COMMAND, "top", *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color"},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            preexec_fn=self._take_terminal,  # noqa: PLW1509 - no threads between fork and exec
            start_new_session=True,
        )
        self._text = codecs.getincrementaldecoder("utf-8")()
        self.seen = ""

    @staticmethod
    def _take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, pattern: str) -> None:
        """Read on until `pattern` has come."""
        self._read(lambda came: bool(re.search(pattern, came)), pattern)

    def frame(self, has: str, *, without: str) -> list[str]:
        """Read on until a whole frame has one text and not the other; return its lines."""
        found: list[str] = []

        def look(came: str) -> bool:
            drawn = [one for one in came.split(HOME)[1:-1] if has in one and without not in one]
            found[:] = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn[0]).splitlines() if drawn else []
            return bool(drawn)

        self._read(look, f"{has!r} without {without!r}")
        return found

    def _read(self, enough: Callable[[str], bool], wanted: str) -> None:
        came, clock = "", SystemClock()
        late = clock.now() + 20
        while not enough(came):
            ready, _, _ = select.select([self._ours], (), (), 20)
            assert ready, f"{wanted} did not come, but {came[-2000:]!r}"
            assert clock.now() < late, f"{wanted} did not come, but {came[-2000:]!r}"
            came += self._text.decode(os.read(self._ours, 65536))
        self.seen += came

    def ended(self) -> int:
        """Read to the end, and return the exit status."""
        clock, running = SystemClock(), True
        late = clock.now() + 20
        while running:
            assert clock.now() < late, f"it did not end, but {self.seen[-2000:]!r}"
            running = self.process.poll() is None
            # The kernel delivers the last output a moment after the end.
            while select.select([self._ours], (), (), 0.05 if running else 0.5)[0]:
                self.seen += self._text.decode(os.read(self._ours, 65536))
        return self.process.wait()

    def is_as_before(self) -> bool:
        """Tell whether settings, screen and cursor are what they were."""
        screen = self.seen.rfind("\x1b[?1049l") > self.seen.rfind("\x1b[?1049h")
        cursor = self.seen.rfind("\x1b[?25h") > self.seen.rfind("\x1b[?25l")
        return screen and cursor and termios.tcgetattr(self._theirs) == self._before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def terminal(*arguments: str, **size: int) -> Iterator[Terminal]:
    shown = Terminal(*arguments, **size)
    try:
        yield shown
    finally:
        shown.close()
