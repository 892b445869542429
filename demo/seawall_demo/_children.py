"""The processes of the demo, as their parent controls them: start, send messages, watch, end.

A process receives messages on its standard input and ends when that is closed; see `_lifeline`. Its
standard output carries messages; its standard error goes to a log, the end of which is shown if the
process does not start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import seawall
from seawall_demo._settings import GRACE, READY_WITHIN

TAIL: Final = 2000
"""Number of characters shown from the end of a log."""
_LONGEST_LINE: Final = 2**22

Message = dict[str, Any]


class NotStarted(Exception):
    """A process of the demo did not start; the message names it and shows its log."""


class Child:
    """One process: a module of the demo, run with some arguments."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: tuple[str, ...],
        log: Path,
        *,
        on_message: Callable[[Message], None] = lambda _message: None,
        on_death: Callable[[Child], None] = lambda _child: None,
    ) -> None:
        """Pass its messages to `on_message`; call `on_death` when it ends unexpectedly."""
        self.name = name
        self.port = 0
        self._command = [sys.executable, "-P", "-m", f"seawall_demo.{module}", *arguments]
        self._log = log
        self._on_message = on_message
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._up: asyncio.Future[Message] | None = None
        self._ending = False

    @property
    def pid(self) -> int | None:
        """The id of the process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> Message:
        """Start it, and return its first message, sent when it is ready; or raise NotStarted."""
        self._up = asyncio.get_running_loop().create_future()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment(),
                limit=_LONGEST_LINE,
                # Ctrl-C reaches only this process, which ends the others in order
                start_new_session=True,
            )
        self._reading = asyncio.create_task(self._read_messages(self._process))
        try:
            async with asyncio.timeout(READY_WITHIN):
                first = await self._up
        except TimeoutError:
            raise NotStarted(
                f"{self.name} was not ready within {READY_WITHIN:g} s.{self.tail()}"
            ) from None
        self.port = first["port"]
        return first

    async def _read_messages(self, process: asyncio.subprocess.Process) -> None:
        """Read its messages until it ends."""
        output, up = process.stdout, self._up
        while output is not None and (line := await output.readline()):
            message = json.loads(line)
            if up is not None and not up.done():
                up.set_result(message)
            else:
                self._on_message(message)
        status = await process.wait()
        if up is not None and not up.done():
            up.set_exception(NotStarted(f"{self.name} ended with {status}.{self.tail()}"))
        elif not self._ending:
            self._on_death(self)

    def send(self, **message: Any) -> None:
        """Send it a message; a dead process ignores it."""
        if self.alive and self._process is not None and self._process.stdin is not None:
            line = json.dumps(message, separators=(",", ":")) + "\n"
            self._process.stdin.write(line.encode())

    def kill(self) -> None:
        """Kill it without a graceful shutdown."""
        if self.alive and self._process is not None:
            self._process.kill()

    def suspend(self) -> None:
        """Suspend it, as a long garbage collection or a starved machine does."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `suspend`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.alive and self._process is not None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass  # it has just ended

    async def end(self) -> None:
        """Let it end, and kill it if it does not; return when it has ended."""
        self._ending = True
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.alive:
            try:
                async with asyncio.timeout(GRACE + 0.5):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    @property
    def has_written(self) -> bool:
        """Whether its log has any content."""
        return self._log.is_file() and self._log.stat().st_size > 0

    def tail(self) -> str:
        """Return the end of its log, to be shown after a message."""
        try:
            text = self._log.read_text("utf-8", "replace").strip()
        except OSError:
            return ""
        return f" The end of what it wrote:\n{text[-TAIL:]}" if text else " It wrote nothing."


def _environment() -> dict[str, str]:
    """Make a child import this very package, and nothing from its working directory."""
    place = str(Path(seawall.__file__).resolve().parent.parent)
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([place, given] if given else [place])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
