"""A primary with two replicas behind three Sentinels: real processes, to be killed and frozen."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Final, Self

import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from seawall.clock import SYSTEM
from tests.redis.support import Server, binary, free_port

SERVICE: Final = "main"
DOWN_AFTER: Final = 0.5
"""Seconds without an answer after which the Sentinels replace a primary."""
PATIENCE: Final = 60.0
"""Seconds for what must happen sooner or later, on a busy machine."""

_QUICK_REPLICATION: Final = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")


class Guarded:
    """The servers, by port, and the Sentinels that choose the primary among them."""

    def __init__(self, sentinels: int = 3, replicas: int = 2) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="seawall-sentinel-")
        self._guards: list[subprocess.Popen[bytes]] = []
        first = Server(*_QUICK_REPLICATION)
        follow = ("--replicaof", "127.0.0.1", str(first.port))
        self.servers = {
            one.port: one
            for one in (first, *(Server(*_QUICK_REPLICATION, *follow) for _ in range(replicas)))
        }
        self.ports = [free_port() for _ in range(sentinels)]
        try:
            for port in self.ports:
                self._start_guard(port, first.port, quorum=sentinels // 2 + 1)
            self._guide = Sentinel([("127.0.0.1", port) for port in self.ports], socket_timeout=0.5)
            until(lambda: self._complete(sentinels, replicas), "the Sentinels know each other")
        except BaseException:
            self.close()
            raise
        where = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.url = f"redis+sentinel://{where}/{SERVICE}/0"

    def _start_guard(self, port: int, primary: int, quorum: int) -> None:
        home = Path(self._home.name) / str(port)
        home.mkdir()
        (home / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary} {quorum}\n"
            f"sentinel down-after-milliseconds {SERVICE} {round(DOWN_AFTER * 1000)}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        program = [str(binary()), str(home / "sentinel.conf"), "--sentinel"]
        with (home / "log").open("wb") as log:
            self._guards.append(
                subprocess.Popen(program, stdout=log, stderr=log, cwd=home)  # noqa: S603
            )

    def _complete(self, sentinels: int, replicas: int) -> bool:
        for port in self.ports:
            try:
                with redis.Redis(port=port, socket_timeout=1) as client:
                    state = client.sentinel_master(SERVICE)
            except redis.RedisError:
                return False
            known = state["num-other-sentinels"] + 1, state["num-slaves"]
            if known != (sentinels, replicas):
                return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def primary(self) -> Server | None:
        """The server that the Sentinels name; None if they do not agree on one."""
        try:
            _host, port = self._guide.discover_master(SERVICE)
        except (MasterNotFoundError, redis.RedisError):
            return None
        return self.servers.get(int(port))

    def settled(self) -> bool:
        """Whether all servers but the primary follow it, as the next failover needs."""
        primary = self.primary
        if primary is None or not self.writable():
            return False
        for port in self.ports:
            try:
                with redis.Redis(port=port, socket_timeout=1) as client:
                    state = client.sentinel_master(SERVICE)
                    replicas = client.sentinel_slaves(SERVICE)
            except redis.RedisError:
                return False
            good = [
                one
                for one in replicas
                if one["flags"] == "slave" and one["master-link-status"] == "ok"
            ]
            if state["flags"] != "master" or len(good) != len(self.servers) - 1:
                return False
        return True

    def writable(self, other_than: Server | None = None) -> bool:
        """Whether a plain client finds a primary by the Sentinels, and can write to it."""
        primary = self.primary
        if primary is None or primary is other_than:
            return False
        try:
            with redis.Redis(port=primary.port, socket_timeout=0.5) as client:
                return bool(client.set("plain-client", "was-here", ex=60))
        except redis.RedisError:
            return False

    def prompt(self, within: float) -> bool:
        """Whether a plain client that has just connected has its answer within so many seconds."""
        primary = self.primary
        if primary is None:
            return False
        try:
            with redis.Redis(port=primary.port, socket_timeout=0.5) as client:
                client.ping()
                began = SYSTEM.now()
                client.set("plain-client", "was-here", ex=60)
                return SYSTEM.now() - began <= within
        except redis.RedisError:
            return False

    def fail_over(self) -> None:
        """Ask the Sentinels for another primary, though nothing is wrong with this one."""
        with redis.Redis(port=self.ports[0], socket_timeout=5) as client:
            client.execute_command("SENTINEL FAILOVER", SERVICE)

    def close(self) -> None:
        """Kill all."""
        for process in self._guards:
            process.kill()
            process.wait(10)
        for server in self.servers.values():
            server.close()
        self._home.cleanup()


def until(true: object, what: str, seconds: float = PATIENCE) -> float:
    """Wait until `true()` holds; return when it did."""
    assert callable(true)
    over = SYSTEM.now() + seconds
    while not true():
        assert SYSTEM.now() < over, f"waited in vain: {what}"
        SYSTEM.sleep(0.02)
    return SYSTEM.now()
