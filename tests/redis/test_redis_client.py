"""The recipe of docs/clients/redis-client.md, as it is there, against servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

from seawall import Breaker, CircuitOpen, Retry, TimedOut, Timeout, deadline, transient
from seawall.clock import SystemClock
from tests.support import new_guard

pytestmark = pytest.mark.alone

PAGE = Path(__file__).parents[2] / "docs" / "clients" / "redis-client.md"
CLOCK = SystemClock()
GET = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"


class Misbehaving:
    """A server that answers the handshake, and counts and ignores (or drops) all GETs."""

    def __init__(self, *, drops: bool) -> None:
        self._drops = drops
        self._over = Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0?protocol=2"
        self.asked = 0

    def serve(self) -> None:
        """Accept connections until the listener is shut down."""
        with suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                Thread(target=self._talk, args=[connection], daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(4096):
                if GET in data:
                    self.asked += 1
                    if not self._drops:
                        self._over.wait(20.0)
                    return
                connection.sendall(b"+OK\r\n" * data.count(b"\r\n$6\r\nCLIENT\r\n"))

    def close(self) -> None:
        """Let all threads end."""
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def misbehaving(*, drops: bool = False) -> Iterator[Misbehaving]:
    """Run such a server for the length of a `with` block."""
    server = Misbehaving(drops=drops)
    thread = Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@pytest.fixture(scope="module")
def recipe(redis_url: str) -> dict[str, Any]:
    """Run the first block of the page, with a real server; return its names."""
    names: dict[str, Any] = {"__name__": "recipe"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDIS_URL", redis_url)
        block = PAGE.read_text("utf-8").split("```python\n")[1].partition("```")[0]
        exec(block, names)  # noqa: S102 - our own page
    names["sessions"].close()
    return names


def client_of(recipe: dict[str, Any], url: str) -> Any:
    """Return a client as the page makes it, with a far longer timeout."""
    pool = redis.ConnectionPool.from_url(
        url,
        connection_class=recipe["DeadlineConnection"],
        retry=RedisRetry(NoBackoff(), 0),
        socket_timeout=30.0,
    )
    return redis.Redis(connection_pool=pool)


@pytest.mark.parametrize(
    "policy", [Timeout(0.2, sync="cooperative"), Breaker()], ids=["timeout", "deadline"]
)
def test_a_reply_is_awaited_until_the_deadline(recipe: dict[str, Any], policy: Any):
    """Of the guard's Timeout, or of the caller."""
    guard = new_guard(policy)
    with misbehaving() as server, client_of(recipe, server.url) as client:
        began = CLOCK.now()
        with deadline(0.4), pytest.raises((TimedOut, redis.TimeoutError)):
            guard.call(client.get, "k")
        assert CLOCK.now() - began < 15.0
        assert server.asked == 1


def test_only_the_guard_retries(recipe: dict[str, Any]):
    """A lost connection is tried as often as the guard says; then the circuit is open."""
    guard = new_guard(Retry(on=transient, attempts=3, backoff=0.001), Breaker(consecutive=2))
    with misbehaving(drops=True) as server, client_of(recipe, server.url) as client:
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                guard.call(client.get, "k")
        assert server.asked == 6
        with pytest.raises(CircuitOpen):
            guard.call(client.get, "k")
        assert server.asked == 6


def test_async_calls_are_cancelled_in_time_and_leave_no_reply_behind(redis_url: str):
    """The guard's Timeout ends a call; the next one gets its own reply."""
    guard = new_guard(Timeout(0.2))

    async def main() -> None:
        client = redis.asyncio.Redis.from_url(
            redis_url,
            retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
            socket_timeout=30.0,
            max_connections=1,
        )
        async with client:
            await client.delete("recipe")
            began = CLOCK.now()
            with pytest.raises(TimedOut):
                await guard.acall(client.blpop, ["recipe"], 20)
            assert CLOCK.now() - began < 15.0
            await client.rpush("recipe", "late")
            assert await client.ping()
            assert await client.lrange("recipe", 0, -1) == [b"late"]
            await client.delete("recipe")

    asyncio.run(main())
