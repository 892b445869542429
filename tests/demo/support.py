"""The demo as a program, and a look at whether its processes live."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

from seawall.clock import SYSTEM

SOURCE: Final = Path(__file__).resolve().parents[2] / "src"
PID: Final = re.compile(r"^([\w-]+): pid (\d+)", re.MULTILINE)
FOLDER: Final = re.compile(r"^folder: (.+)$", re.MULTILINE)


class Program:
    """`python -m seawall_demo`, started with --verbose; what it says is kept in a file."""

    def __init__(self, said: Path, *arguments: str) -> None:
        self._said = said
        with said.open("wb") as file:
            self.process = subprocess.Popen(  # noqa: S603 - the project's own program
                [sys.executable, "-m", "seawall_demo", "--verbose", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    @property
    def said(self) -> str:
        return self._said.read_text("utf-8")

    def says(self, words: str, seconds: float = 30.0) -> str:
        """Wait until it has said that; return all that it said."""
        until = SYSTEM.now() + seconds
        while words not in self.said:
            assert self.process.poll() is None, self.said
            assert SYSTEM.now() < until, self.said
            SYSTEM.sleep(0.02)
        return self.said

    def ends(self, seconds: float) -> int:
        """Wait for its end; return its status."""
        return self.process.wait(seconds)

    @property
    def pids(self) -> dict[str, int]:
        """The processes that it told of."""
        return {name: int(pid) for name, pid in PID.findall(self.said)}

    @property
    def folder(self) -> Path:
        (told,) = FOLDER.findall(self.said)
        return Path(told)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has buried yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def gone(pids: dict[str, int], seconds: float) -> list[str]:
    """Wait until none of them lives; return the names of those that still do after that."""
    until = SYSTEM.now() + seconds
    while (left := [name for name, pid in pids.items() if alive(pid)]) and SYSTEM.now() < until:
        SYSTEM.sleep(0.02)
    return left
