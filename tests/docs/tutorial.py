r"""Follow the tutorial to the letter: write its files, type its commands, compare what is shown.

    python tests/docs/tutorial.py              # from nothing: environment, built wheel, all parts
    python tests/docs/tutorial.py --here       # with this environment: nothing is installed
    python tests/docs/tutorial.py --here 3 4   # some parts

Each part is timed. A page of docs/tutorial/ is followed from top to bottom:

- A ```py block with a `title="name.py"` is a file to write.
- A ```sh block is typed into the first terminal, and its end is waited for.
- A ```sh block with a `title="Terminal 2"` is typed into that terminal, for commands that go on.
- A ```text block below commands is what they print, all of it. Below those of another terminal, and
  with a `title="Terminal 2"`, its lines appear there in that order, maybe with others between.
- `Press Ctrl-C in terminal 2.` at the beginning of a line is done.
- What differs from run to run is named in front of the block that shows it, as a regular
  expression: `<!-- varies: \d+ ms -->`. Any match equals any other.

Commands whose output is not shown must succeed. With `--here`, ports are replaced by free ones.
"""

# ruff: noqa: T201 - it prints what it finds

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic  # noqa: TID251 - real programs are timed

ROOT = Path(__file__).resolve().parents[2]
PARTS = sorted((ROOT / "docs" / "tutorial").glob("[1-9]-*.md"))

STEP = re.compile(
    r"^<!-- varies: (?P<varies>[^\n]+) -->$"
    r"|^Press Ctrl-C in (?P<interrupt>terminal \d)\b"
    r'|^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
INSTALLATION = re.compile(r"python3 -m venv |\. \.venv/bin/activate\n|pip install ")
PORT = re.compile(r"(?:--port |127\.0\.0\.1:)(\d{4,5})\b")
PATIENCE = 30.0
FIRST = "terminal 1"
COLOUR = re.compile(rb"\x1b\[[\d;]*m")
ENDED = re.compile(r"<ended (\d+)>\n")


class Differs(Exception):
    """The page says something else than what happens."""


class Terminal:
    """A shell at a terminal, as a reader has it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._control, device = pty.openpty()
        modes = termios.tcgetattr(device)
        modes[3] &= ~termios.ECHO  # the output is compared, not what is typed
        modes[3] |= termios.NOFLSH  # Ctrl-C must not discard the line that prints the status
        termios.tcsetattr(device, termios.TCSANOW, modes)
        # The leader of a session that opens a terminal is controlled by it: Ctrl-C works.
        shell = 'exec bash --norc --noprofile --noediting -i <>"$0" >&0 2>&1'
        self._shell = subprocess.Popen(  # noqa: S603 - a shell, for the project's own pages
            ["/bin/sh", "-c", shell, os.ttyname(device)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._printed = b""
        self._changed = threading.Condition()
        self._typed_at = self._shown_until = 0
        self._running = False
        self._reader = threading.Thread(target=self._read, args=[device], daemon=True)
        self._reader.start()

    def _read(self, device: int) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            while piece := os.read(self._control, 65536):
                with self._changed:
                    self._printed += piece
                    self._changed.notify_all()
                if device >= 0:  # the shell has opened it
                    os.close(device)
                    device = -1

    def _text(self, since: int) -> str:
        """Return what was printed since a place."""
        printed = COLOUR.sub(b"", self._printed).decode("utf-8", "replace")
        return printed.replace("\r\n", "\n")[since:]

    def type(self, commands: str) -> None:
        """Type commands. The last may go on."""
        if self._running:
            self.finish()
        self._typed_at += len(self._text(self._typed_at))
        self._shown_until = self._typed_at
        self._running = True
        os.write(self._control, f"{commands}printf '<ended %d>\\n' $?\n".encode())

    def finish(self) -> tuple[int, str]:
        """Wait until the commands end; return the status of the last, and what they printed."""
        with self._changed:
            since = self._typed_at
            self._changed.wait_for(lambda: ENDED.search(self._text(since)), PATIENCE)
            ended = ENDED.search(self._text(since))
            if ended is None:
                raise Differs(f"the commands did not end; they printed\n{self._text(since)}")
            self._running = False
            return int(ended[1]), self._text(since)[: ended.start()]

    def expect(self, shown: Shown) -> None:
        """Wait until the lines are printed, in their order."""
        lines = [f"^{re.escape(line)}$" for line in shown.lines]
        wanted = re.compile(".*?".join(lines), re.MULTILINE | re.DOTALL)
        with self._changed:
            since = self._shown_until
            self._changed.wait_for(lambda: wanted.search(shown.plain(self._text(since))), PATIENCE)
            printed = self._text(since)
            if not wanted.search(shown.plain(printed)):
                raise Differs(shown.difference(printed))
            self._shown_until += len(printed)

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait until the command has ended."""
        os.write(self._control, b"\x03")
        self.finish()

    def close(self) -> None:
        """Stop what runs, and end the shell."""
        if self._running:
            with contextlib.suppress(Differs):
                self.interrupt()
        self._shell.send_signal(signal.SIGHUP)
        try:
            self._shell.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()
        self._reader.join()
        os.close(self._control)


@dataclass
class Shown:
    """What a page shows of the output, and what may differ from it."""

    text: str
    varies: list[str]

    def plain(self, text: str) -> str:
        """Return `text` with a mark in place of all that varies."""
        for pattern in self.varies:
            text = re.sub(pattern, "<varies>", text)
        return text

    @property
    def lines(self) -> list[str]:
        """Return the lines, marked."""
        return self.plain(self.text).splitlines()

    def compare(self, printed: str) -> None:
        """Raise unless `printed` is what the page shows."""
        if self.plain(printed).splitlines() != self.lines:
            raise Differs(self.difference(printed))

    def difference(self, printed: str) -> str:
        """Return both texts."""
        return f"the page shows\n{self.text}but the terminal has\n{printed}"


@dataclass
class Reader:
    """Somebody who follows a page, in a folder, with as many terminals as it takes."""

    folder: Path
    environment: dict[str, str]
    here: bool = False
    terminals: dict[str, Terminal] = field(default_factory=dict)

    def follow(self, page: Path) -> None:
        """Do what the page says, from top to bottom."""
        text = page.read_text("utf-8")
        if self.here:
            text = with_free_ports(text)
        try:
            for step in steps(text):
                try:
                    self._do(step)
                except Differs as error:
                    raise Differs(f"{page.name}:{step.line}: {error}") from None
        finally:
            for terminal in reversed(self.terminals.values()):
                terminal.close()
            self.terminals.clear()

    def _do(self, step: Step) -> None:
        match step.language:
            case "py":
                self.folder.joinpath(step.title).write_text(step.text, "utf-8")
            case "sh" if step.title:
                self._terminal(step.title).type(self._commands(step.text))
            case "sh":
                terminal = self._terminal(FIRST)
                terminal.type(self._commands(step.text))
                status, printed = terminal.finish()
                if step.shown:
                    step.shown.compare(printed)
                elif status:
                    raise Differs(f"the last command ended with {status}:\n{printed}")
            case "interrupt":
                self._terminal(step.title).interrupt()
        if step.shown and step.title:
            self._terminal(step.title).expect(step.shown)

    def _commands(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if not (self.here and INSTALLATION.match(line)))

    def _terminal(self, name: str) -> Terminal:
        if name.lower() not in self.terminals:
            self.terminals[name.lower()] = Terminal(self.folder, self.environment)
        return self.terminals[name.lower()]


@dataclass
class Step:
    """One thing that a page asks for; `shown` is what it prints."""

    language: str
    title: str
    text: str
    line: int
    shown: Shown | None = None


def steps(text: str) -> Iterator[Step]:
    """Yield the steps of a page, in order."""
    last: Step | None = None
    varies: list[str] = []
    for match in STEP.finditer(text):
        if match["varies"]:
            varies.append(match["varies"])
            continue
        line = text.count("\n", 0, match.start()) + 1
        title = match["title"] or match["interrupt"] or ""
        step = Step(match["language"] or "interrupt", title, match["text"] or "", line)
        if step.language == "text":
            shown, varies = Shown(step.text, varies), []
            if last and not title:  # it belongs to the commands above it
                last.shown = shown
                continue
            step.shown = shown
        if last:
            yield last
        last = step
    if last:
        yield last


def with_free_ports(text: str) -> str:
    """Return the page with ports that nobody uses in place of its own."""
    with contextlib.ExitStack() as taken:
        for port in sorted(set(PORT.findall(text))):
            free = taken.enter_context(socket.create_server(("127.0.0.1", 0)))
            text = re.sub(rf"\b{port}\b", str(free.getsockname()[1]), text)
    return text


def environment(*, here: bool, wheels: Path | None = None) -> dict[str, str]:
    """Return the environment of a reader: nothing of this checkout or of its tools."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in {"HOME", "TMPDIR"} or name.startswith(("PIP_", "SSL_"))
    }
    path = os.environ["PATH"]
    if here:
        path = f"{Path(sys.executable).parent}:{path}"
    if wheels:
        kept["PIP_FIND_LINKS"] = f"{wheels} {kept.get('PIP_FIND_LINKS', '')}".strip()
    return kept | {
        "PATH": path,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PS1": "",
        "PS2": "",
        "VIRTUAL_ENV_DISABLE_PROMPT": "1",
    }


def build_wheel(folder: Path) -> None:
    """Build the wheel of this checkout into `folder`."""
    pip = [sys.executable, "-m", "pip", "-qq", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", folder, ROOT], check=True)  # noqa: S603 - the project itself


def main() -> int:
    """Follow the parts that are asked for, and print how long each took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="numbers of parts; all unless given")
    parser.add_argument("--here", action="store_true", help="install nothing: use this environment")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tutorial-"))
    try:
        wheels = None if options.here else folder / "wheels"
        if wheels:
            build_wheel(wheels)
        reader = Reader(folder, environment(here=options.here, wheels=wheels), here=options.here)
        for page in PARTS:
            if options.parts and page.name[0] not in options.parts:
                continue
            began = monotonic()
            reader.follow(page)
            words = len(re.findall(r"\w+", STEP.sub("", page.read_text("utf-8"))))
            print(f"{page.stem:28} {monotonic() - began:5.1f} s, {words} words to read")
    except Differs as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
