"""A real pgbouncer in transaction mode before a server: few server connections, many clients."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from seawall.clock import SYSTEM
from tests.durable.postgres import Postgres
from tests.redis.support import free_port

CHECKOUT = Path(__file__).parents[2]
UNPACKED = CHECKOUT / ".servers"
"""Where ./dev unpacks servers that no wheel has."""

SETTINGS = {
    "listen_addr": "127.0.0.1",
    "unix_socket_dir": "",
    "auth_type": "any",
    "pool_mode": "transaction",
    "default_pool_size": "2",
    "max_client_conn": "200",
    "server_reset_query": "",
    "query_wait_timeout": "150",
    "server_round_robin": "1",
    "logfile": "log",
    "pidfile": "pid",
}
# In turn, the two servers are given to whoever begins a transaction: what was left in one of them
# is not found again, and what others left there is.


def program() -> Path:
    """Return the system's pgbouncer, or the one in the checkout; skip the test without either."""
    paths = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
    found = shutil.which("pgbouncer", path=paths)
    if found is not None:
        return Path(found)
    unpacked = UNPACKED / "usr" / "sbin" / "pgbouncer"
    if not unpacked.exists():
        pytest.skip("no pgbouncer: run ./dev servers, or install the system's package pgbouncer")
    return unpacked


def version(binary: Path, environment: dict[str, str]) -> tuple[int, ...]:
    """Return the version of this pgbouncer, major and minor."""
    ran = subprocess.run(  # noqa: S603 - our own server
        [binary, "--version"], env=environment, capture_output=True, text=True, check=True
    )
    found = re.match(r"PgBouncer (\d+)\.(\d+)", ran.stdout)
    assert found, ran.stdout
    return tuple(map(int, found.groups()))


class Pooler:
    """A pooler of its own in a temporary folder, before `postgres`."""

    def __init__(self, postgres: Postgres, **settings: str) -> None:
        """Start it, and wait until a query passes through it."""
        binary, arguments = program(), []
        self.folder = Path(tempfile.mkdtemp(prefix="seawall-pooler-"))
        self.port = free_port()
        libraries = [str(path) for path in (UNPACKED / "usr" / "lib").glob("*-linux-*")]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
        own = {**SETTINGS, "listen_port": str(self.port), **settings}
        if version(binary, environment) >= (1, 21):
            own["max_prepared_statements"] = "0"  # as all versions before
        behind = f"host=127.0.0.1 port={postgres.port} dbname=postgres user=seawall"
        (self.folder / "ini").write_text(
            f"[databases]\npostgres = {behind}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in own.items())
        )
        if os.geteuid() == 0:  # it refuses to be root, and becomes somebody without rights
            shutil.chown(self.folder, "nobody")
            arguments = ["-u", "nobody"]
        self._process = subprocess.Popen(  # noqa: S603 - our own server
            [binary, "-q", *arguments, "ini"],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Return where it is, as drivers want it."""
        return f"postgresql://seawall@127.0.0.1:{self.port}/postgres"

    def _wait(self) -> None:
        import psycopg

        until = SYSTEM.now() + 15
        while True:
            try:
                with psycopg.connect(self.url, prepare_threshold=None) as connection:
                    connection.execute("SELECT 1")
            except psycopg.OperationalError as error:
                if self._process.poll() is None and SYSTEM.now() < until:
                    SYSTEM.sleep(0.02)
                    continue
                log = self.folder / "log"
                said = log.read_text() if log.exists() else self._process.returncode
                raise RuntimeError(f"pgbouncer does not answer: {said}") from error
            return

    def close(self) -> None:
        """Stop it at once and remove its folder."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
