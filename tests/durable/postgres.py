"""A real PostgreSQL server for tests: the system's, or that of a wheel; as an unprivileged user."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

SETTINGS = {
    "listen_addresses": "",
    # Servers and processes are killed here, the machine is not: what is written is safe without
    # waiting for a disk, which would be most of a restart where others keep it busy.
    "fsync": "off",
    "synchronous_commit": "on",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "logging_collector": "off",
    "autovacuum": "on",
    "deadlock_timeout": "100ms",
}


def binaries() -> Path:
    """Return the folder of the server's programs, or raise and say how to get them."""
    for known in ("/usr/lib/postgresql",):
        found = sorted(Path(known).glob("*/bin/postgres")) if Path(known).exists() else []
        if found:
            return found[-1].parent
    program = shutil.which("postgres")
    if program is not None:
        return Path(program).resolve().parent
    try:
        import pgserver  # type: ignore[import-not-found]
    except ImportError:
        raise RuntimeError(
            "no PostgreSQL server: install the system's (postgresql), or the wheel pgserver"
        ) from None
    return Path(pgserver.__file__).parent / "pginstall" / "bin"


class Postgres:
    """A server of its own in a temporary folder, reached by a unix socket and by loopback."""

    def __init__(self, **settings: str) -> None:
        """Start it, and wait until it answers."""
        self.folder = Path(tempfile.mkdtemp(prefix="seawall-pg-"))
        self.data = self.folder / "data"
        self.port = _free_port()
        self._bin = binaries()
        # The server refuses to run as root: then somebody without rights does it.
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(self.folder, "nobody", "nogroup")
        self._env = {**os.environ, "LC_ALL": "C", "HOME": str(self.folder)}
        self._do(
            "initdb",
            "-D",
            str(self.data),
            "-U",
            "seawall",
            "--auth=trust",
            "-E",
            "UTF8",
            "--no-sync",
        )
        own = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        own["listen_addresses"] = "127.0.0.1"
        own.update(settings)
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in own.items())
        self._runs = False
        self.start()

    @property
    def url(self) -> str:
        """Return where it is, as drivers want it."""
        return f"postgresql://seawall@127.0.0.1:{self.port}/postgres"

    def _do(self, program: str, *args: str) -> None:
        done = subprocess.run(  # noqa: S603 - our own server
            [str(self._bin / program), *args],
            stdout=subprocess.DEVNULL,  # the server keeps what it is given open
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env=self._env,
            check=False,
            timeout=60,
            **self._as_user,
        )
        if done.returncode:
            log = self.folder / "log"
            raise RuntimeError(f"{program} failed: {log.read_text() if log.exists() else done}")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = str(self.folder / "log")
        self._do("pg_ctl", "start", "-w", "-t", "30", "-D", str(self.data), "-l", log)
        self._runs = True

    def stop(self, how: Literal["fast", "immediate"] = "fast") -> None:
        """Stop it in good order, or immediately, which is as a crash."""
        if self._runs:
            self._runs = False
            self._do("pg_ctl", "stop", "-w", "-t", "30", "-D", str(self.data), "-m", how)

    def crash_and_restart(self) -> None:
        """Stop it in immediate mode: what was not committed is lost; then start it again."""
        self.stop("immediate")
        self.start()

    def close(self) -> None:
        """Stop it and remove its folder."""
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
