"""Ready-made health checks: databases, Redis, upstreams, queues, the event loop, disks, guards.

Pass each of them to `health.add(name, ...)`. `Health` runs a blocking check in a thread. A check
whose client is async returns a coroutine, which is awaited in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from seawall import _checks as check
from seawall.guard import Guard
from seawall.load.signals import loop_lag
from seawall.runtime.driver import sleep_async
from seawall.web.health.database import Connect, reading, writing
from seawall.web.health.watch import CheckFinding, Degraded, Healthy, Unhealthy

__all__ = [
    "DatabaseRead",
    "DatabaseWrite",
    "Disk",
    "EventLoop",
    "GuardState",
    "HttpUpstream",
    "QueueAge",
    "RedisPing",
]

SOCKET_TIMEOUT: Final = 30.0
"""Seconds after which the thread of an HTTP check ends, even if no caller waits any more."""

BROKEN: Final = frozenset({"open", "half_open", "isolated"})
"""States of a breaker in which it refuses at least some calls."""

LOOP_SAMPLE: Final = 0.02
"""Seconds of the sleep that measures the lag of the event loop."""


class DatabaseRead:
    """Check that reads one row from a database."""

    component_type: ClassVar[str] = "datastore"

    def __init__(self, connect: Connect, *, statement: str = "SELECT 1") -> None:
        """Run `statement` on a connection from `connect()`, and return or close the connection.

        `connect` opens or borrows a connection: `lambda: sqlite3.connect(path)`, the `connection`
        of a psycopg pool, the `acquire` of an asyncpg pool, the `connect` of an SQLAlchemy engine.
        """
        self._connect = check.function("connect", connect)
        self._statement = _text("statement", statement)

    def __repr__(self) -> str:
        return f"DatabaseRead({_name(self._connect)}, statement={self._statement!r})"

    def __call__(self) -> Any:
        """Read, or return a coroutine that reads."""
        return reading(self._connect, self._statement)


class DatabaseWrite:
    """Check that writes to a database and rolls back."""

    component_type: ClassVar[str] = "datastore"

    def __init__(
        self,
        connect: Connect,
        *,
        table: str = "seawall_health",
        statement: str | None = None,
    ) -> None:
        """Insert a row into `table` and roll back; if that fails, create the table and try again.

        If `statement` is given, it is run instead, and rolled back too. `connect` is as for
        `DatabaseRead`.
        """
        self._connect = check.function("connect", connect)
        if not isinstance(table, str) or not table.isascii() or not table.isidentifier():
            raise ValueError(f"table={table!r}: write a plain name, such as 'seawall_health'")
        own = statement is None
        self._create = f"CREATE TABLE IF NOT EXISTS {table} (probe INTEGER)" if own else None
        # The second statement is for connections in autocommit mode: the table stays empty.
        self._statements = (
            [f"INSERT INTO {table} (probe) VALUES (1)", f"DELETE FROM {table} WHERE probe = 1"]  # noqa: S608 - a plain name
            if own
            else [_text("statement", statement)]
        )

    def __repr__(self) -> str:
        return f"DatabaseWrite({_name(self._connect)}, statement={self._statements[0]!r})"

    def __call__(self) -> Any:
        """Write, or return a coroutine that writes."""
        return writing(self._connect, self._create, self._statements)


class RedisPing:
    """Check that pings a Redis or Valkey server."""

    component_type: ClassVar[str] = "datastore"

    def __init__(self, target: Any) -> None:
        """Ping with `target`: a `RedisStore`, or a client of redis-py, blocking or async.

        With a store the check writes, as the store's policies do; with a client it pings.
        """
        from seawall.redis.store import RedisStore, core_of

        self._store = core_of(target) if isinstance(target, RedisStore) else None
        if self._store is None and not callable(getattr(target, "ping", None)):
            raise TypeError(f"RedisPing({target!r}): pass a RedisStore, or a client with ping()")
        self._target = target

    def __repr__(self) -> str:
        return f"RedisPing({type(self._target).__name__})"

    def __call__(self) -> Any:
        """Ping, or return a coroutine that pings."""
        return self._target.ping() if self._store is None else self._store.probe()


class HttpUpstream:
    """Check that sends a request to an HTTP service."""

    measurement: ClassVar[str] = "status"

    def __init__(
        self,
        url: str,
        *,
        client: Any = None,
        method: Literal["GET", "HEAD"] = "GET",
        statuses: Collection[int] = range(200, 400),
    ) -> None:
        """Expect one of `statuses` from `url`, using `client` (httpx, requests or similar).

        Without a client, use the standard library, in a thread, and follow no redirect.
        """
        parts = urlsplit(_text("url", url))
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"url={url!r}: write an address, such as 'http://users/health/live'")
        if client is not None and not callable(getattr(client, "request", None)):
            raise TypeError(f"client={client!r}: pass an httpx client or a requests session")
        self._url = url
        self._parts = parts
        self._client = client
        self._method = check.choice("method", method, ("GET", "HEAD"))
        if isinstance(statuses, (str, bytes)) or not isinstance(statuses, Collection):
            raise TypeError(f"statuses={statuses!r}: write a set of them, such as {{200, 204}}")
        self._statuses = frozenset(
            check.count("statuses", status, minimum=100, maximum=599) for status in statuses
        )

    def __repr__(self) -> str:
        # Without user, password and query, which may be secrets.
        where = f"{self._parts.scheme}://{self._parts.hostname}"
        port = "" if self._parts.port is None else f":{self._parts.port}"
        return f"HttpUpstream('{where}{port}{self._parts.path}')"

    def __call__(self) -> Any:
        """Send the request, or return a coroutine that sends it."""
        if self._client is None:
            return self._verdict(self._ask_directly())
        response = self._client.request(self._method, self._url)
        if hasattr(response, "__await__"):
            return self._await(response)
        return self._verdict(response.status_code)

    async def _await(self, response: Any) -> CheckFinding:
        return self._verdict((await response).status_code)

    def _ask_directly(self) -> int:
        from http.client import HTTPConnection, HTTPSConnection

        parts = self._parts
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=SOCKET_TIMEOUT)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request(self._method, path, headers={"Connection": "close"})
            return connection.getresponse().status
        finally:
            connection.close()

    def _verdict(self, status: int) -> CheckFinding:
        kind = Healthy if status in self._statuses else Unhealthy
        return kind(f"status {status}", value=status)


class QueueAge:
    """Check of how long the oldest job of a queue has waited."""

    measurement: ClassVar[str] = "age"

    def __init__(
        self, queue: Any, *, degraded: float = 60.0, unhealthy: float | None = None
    ) -> None:
        """Check `queue`, a `PriorityQueue`, `LocalQueue` or any object whose snapshot has "oldest".

        The queue is degraded from `degraded` seconds on, and unhealthy from `unhealthy` on (never,
        if None).
        """
        if not callable(getattr(queue, "asnapshot", getattr(queue, "snapshot", None))):
            raise TypeError(f"QueueAge({queue!r}): pass a queue that has a snapshot()")
        self._queue = queue
        self._degraded, self._unhealthy = _bounds(degraded, unhealthy)

    def __repr__(self) -> str:
        return f"QueueAge({self._queue!r}, degraded={self._degraded}, unhealthy={self._unhealthy})"

    def __call__(self) -> Any:
        """Read the snapshot, or return a coroutine that reads it."""
        if hasattr(self._queue, "asnapshot"):
            return self._ask()
        return self._verdict(self._queue.snapshot())

    async def _ask(self) -> CheckFinding:
        return self._verdict(await self._queue.asnapshot())

    def _verdict(self, seen: dict[str, Any]) -> CheckFinding:
        if "oldest" not in seen:
            return Unhealthy('its snapshot has no "oldest": nobody knows how long jobs wait')
        age = float(seen["oldest"] or 0.0)
        kind = _kind(age, self._degraded, self._unhealthy)
        text = "" if kind is Healthy else f"the oldest has waited for {age:.1f} s"
        return kind(text, value=round(age, 3), unit="s")


class EventLoop:
    """Check of the lag of the event loop."""

    component_type: ClassVar[str] = "system"
    measurement: ClassVar[str] = "lag"

    def __init__(self, *, degraded: float = 0.1, unhealthy: float | None = 1.0) -> None:
        """Report degraded from a lag of `degraded` seconds, unhealthy from `unhealthy` (or None).

        The lag is the maximum of the signal `loop_lag()` and of a measurement taken now.
        """
        self._degraded, self._unhealthy = _bounds(degraded, unhealthy)
        self._signal = loop_lag(self._degraded)

    def __repr__(self) -> str:
        return f"EventLoop(degraded={self._degraded}, unhealthy={self._unhealthy})"

    async def __call__(self) -> CheckFinding:
        """Measure the lag."""
        from asyncio import get_running_loop

        loop = get_running_loop()
        known = self._signal() * self._signal.limit
        due = loop.time() + LOOP_SAMPLE
        await sleep_async(LOOP_SAMPLE)
        lag = max(known, loop.time() - due, 0.0)
        kind = _kind(lag, self._degraded, self._unhealthy)
        text = "" if kind is Healthy else f"it is late by {lag:.3f} s"
        return kind(text, value=round(lag, 6), unit="s")


class Disk:
    """Check of the free space of a disk, and whether it can be written to."""

    component_type: ClassVar[str] = "system"
    measurement: ClassVar[str] = "free"

    def __init__(
        self,
        path: str,
        *,
        degraded: float = 0.1,
        unhealthy: float = 0.02,
        write: bool = True,
    ) -> None:
        """Report degraded below this ratio of free space on the disk of the folder `path`.

        Report unhealthy below the ratio `unhealthy`, or, with `write`, if a small file cannot be
        written there.
        """
        self._path = _text("path", path)
        self._degraded = check.ratio("degraded", degraded, zero=True)
        self._unhealthy = check.ratio("unhealthy", unhealthy, zero=True)
        if self._unhealthy > self._degraded:
            raise ValueError(f"unhealthy={unhealthy!r}: write at most degraded={degraded!r}")
        self._write = check.flag("write", write)

    def __repr__(self) -> str:
        return f"Disk({self._path!r}, degraded={self._degraded}, unhealthy={self._unhealthy})"

    def __call__(self) -> CheckFinding:
        """Measure the free space; blocks."""
        from shutil import disk_usage
        from tempfile import TemporaryFile

        usage = disk_usage(self._path)
        if self._write:
            with TemporaryFile(dir=self._path, prefix="seawall-health-") as file:
                file.write(b"probe")
                file.flush()
        free = usage.free / max(1, usage.total)
        kind = _kind(-free, -self._degraded, -self._unhealthy, inclusive=False)
        text = "" if kind is Healthy else f"only {free:.1%} is free"
        return kind(text, value=round(free * 100, 2), unit="%")


class GuardState:
    """Check of a guard's breaker: degraded if it refuses calls, as other functions still work."""

    measurement: ClassVar[str] = "state"

    def __init__(self, guard: Guard) -> None:
        if not isinstance(guard, Guard):
            raise TypeError(f"GuardState({guard!r}): pass a Guard")
        self._guard = guard

    def __repr__(self) -> str:
        return f"GuardState({self._guard.name!r})"

    async def __call__(self) -> CheckFinding:
        """Read the state; async, to run in the loop, as it takes no time."""
        for seen in self._guard.snapshot()["policies"]:
            if seen["policy"] == "breaker" and seen["state"] in BROKEN:
                return Degraded(f"the circuit is {str(seen['state']).replace('_', '-')}")
        return Healthy()


def _bounds(degraded: float, unhealthy: float | None) -> tuple[float, float]:
    least = check.seconds("degraded", degraded)
    if unhealthy is None:
        return least, float("inf")
    return least, check.at_least("unhealthy", unhealthy, degraded)


def _kind(
    value: float, degraded: float, unhealthy: float, *, inclusive: bool = True
) -> type[CheckFinding]:
    """Return the kind of finding for a value that is worse the higher it is."""
    if value > unhealthy or (inclusive and value == unhealthy):
        return Unhealthy
    return Degraded if value > degraded or (inclusive and value == degraded) else Healthy


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}={value!r}: write text")
    return value


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
