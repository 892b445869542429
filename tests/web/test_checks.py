from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import pytest
import redis
import redis.asyncio
import requests

from seawall import Breaker, CircuitOpen, RedisStore
from seawall.clock import current_clock
from seawall.jobs import LocalQueue
from seawall.testing import run_virtual
from seawall.web.checks import (
    DatabaseRead,
    DatabaseWrite,
    Disk,
    EventLoop,
    GuardState,
    HttpUpstream,
    QueueAge,
    RedisPing,
)
from seawall.web.health import Health
from tests.redis.support import Server, free_port
from tests.support import let_pass, new_guard


async def found(check: Any) -> tuple[str, str]:
    """Return the state and the output that a check has in a health's answer."""
    health = Health()
    health.add("it", check, ttl=0.0)
    await health.state_of("ready")
    seen = health.snapshot()["checks"]["it"]
    return seen["state"], seen["output"]


# --- Databases ---


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "data.sqlite"


def rows(database: Path) -> list[Any]:
    with sqlite3.connect(database) as connection:
        seen = connection.execute("SELECT * FROM seawall_health").fetchall()
    connection.close()
    return seen


def test_a_database_is_read_and_written_by_its_plain_connections(database: Path):
    """Any DB-API connection does: opened in a thread, closed at the end; nothing is left behind."""
    opened: list[sqlite3.Connection] = []

    def connect() -> sqlite3.Connection:
        opened.append(sqlite3.connect(database, check_same_thread=False))
        return opened[-1]

    async def main() -> None:
        write = DatabaseWrite(connect)
        assert await found(DatabaseRead(connect)) == ("healthy", "")
        assert await found(write) == ("healthy", "")
        assert await found(write) == ("healthy", "")

    run_virtual(main())
    assert rows(database) == []
    assert len(opened) == 3
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def test_a_connection_that_commits_by_itself_leaves_nothing_either(database: Path):
    """Where a rollback does nothing, the row is deleted."""

    async def main() -> None:
        write = DatabaseWrite(lambda: sqlite3.connect(database, isolation_level=None))
        assert await found(write) == ("healthy", "")

    run_virtual(main())
    assert rows(database) == []


def test_a_database_that_cannot_be_written_is_told_by_a_write(database: Path):
    """A read passes on a read-only database; a write tells."""
    sqlite3.connect(database).close()
    address = f"{database.as_uri()}?mode=ro"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(address, uri=True)

    async def main() -> None:
        assert await found(DatabaseRead(connect)) == ("healthy", "")
        assert await found(DatabaseWrite(connect)) == (
            "unhealthy",
            "OperationalError: attempt to write a readonly database",
        )

    run_virtual(main())


def test_a_context_manager_may_give_the_connection(database: Path):
    """A pool's `connection()` is entered and left, also when the statement fails."""
    left: list[bool] = []

    @contextmanager
    def borrowed() -> Iterator[Any]:
        connection = sqlite3.connect(database)
        try:
            yield connection
        finally:
            connection.close()
            left.append(True)

    async def main() -> None:
        assert await found(DatabaseRead(borrowed)) == ("healthy", "")
        state, output = await found(DatabaseRead(borrowed, statement="SELECT * FROM nowhere"))
        assert (state, output) == ("unhealthy", "OperationalError: no such table: nowhere")
        own = DatabaseWrite(borrowed, statement="CREATE TABLE taken_back (a INTEGER)")
        assert await found(own) == ("healthy", "")

    run_virtual(main())
    assert left == [True] * 3


class AsyncConnection:
    """Connections as asyncpg's (`transaction`), or as psycopg's and aiosqlite's (`rollback`)."""

    def __init__(self, log: list[str], *, like_asyncpg: bool) -> None:
        self._log = log
        if not like_asyncpg:
            self.rollback = self._rollback
            self.commit = self._commit

    async def execute(self, statement: str) -> None:
        self._log.append(statement.split(maxsplit=1)[0])
        if "nowhere" in statement and "CREATE" not in statement:
            raise LookupError("no such table")

    def transaction(self) -> Any:
        return SimpleNamespace(start=self._start, rollback=self._rollback)

    async def _start(self) -> None:
        self._log.append("begin")

    async def _rollback(self) -> None:
        self._log.append("rollback")

    async def _commit(self) -> None:
        self._log.append("commit")

    async def close(self) -> None:
        self._log.append("close")


@pytest.mark.parametrize("like_asyncpg", [True, False], ids=["asyncpg", "psycopg"])
@pytest.mark.parametrize("managed", [True, False], ids=["context manager", "coroutine"])
def test_async_connections_are_awaited_in_the_loop(like_asyncpg: bool, managed: bool):  # noqa: FBT001
    """What `connect()` gives may be awaited or entered; the write is rolled back and given back."""
    log: list[str] = []

    async def opened() -> AsyncConnection:
        return AsyncConnection(log, like_asyncpg=like_asyncpg)

    @asynccontextmanager
    async def acquired() -> Any:
        try:
            yield await opened()
        finally:
            log.append("close")

    connect = acquired if managed else opened

    async def main() -> None:
        assert await found(DatabaseRead(connect)) == ("healthy", "")
        assert log == ["SELECT", "close"]
        log.clear()
        begin, made = (["begin"], []) if like_asyncpg else ([], ["commit"])
        await found(DatabaseWrite(connect))
        assert log == [*begin, "INSERT", "DELETE", "rollback", "close"]
        log.clear()
        await found(DatabaseWrite(connect, table="nowhere"))  # of its own, it makes the table
        assert log == [*begin, "INSERT", "rollback", "CREATE", *made, *begin, "INSERT", "rollback",
                       "close"]  # fmt: skip
        log.clear()
        state, _ = await found(DatabaseWrite(connect, statement="UPDATE nowhere"))
        assert state == "unhealthy"
        assert log[-2:] == ["rollback", "close"]

    run_virtual(main())


def test_a_write_needs_no_right_to_make_its_table_and_makes_it_again(database: Path):
    """It inserts first: a role without DDL will do, and a table that was dropped comes back."""
    allowed = [True]

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(database)
        if not allowed[0]:
            denied = {sqlite3.SQLITE_CREATE_TABLE: sqlite3.SQLITE_DENY}
            connection.set_authorizer(lambda action, *_: denied.get(action, sqlite3.SQLITE_OK))
        return connection

    async def main() -> None:
        write = DatabaseWrite(connect)
        assert await found(write) == ("healthy", "")
        allowed[0] = False
        assert await found(DatabaseWrite(connect)) == ("healthy", "")
        allowed[0] = True
        connection = sqlite3.connect(database)
        connection.execute("DROP TABLE seawall_health")
        connection.close()
        assert await found(write) == ("healthy", "")

    run_virtual(main())


@pytest.mark.parametrize("table", ["a; DROP TABLE users", "", "a.b", "tä", 3])
def test_a_table_has_a_plain_name(table: Any):
    """What is no plain name cannot become part of a statement."""
    with pytest.raises(ValueError, match="write a plain name"):
        DatabaseWrite(sqlite3.connect, table=table)


# --- Redis ---


def test_redis_is_asked_by_a_store_or_a_client():
    """A store, a blocking client and an async one tell whether the server is there."""
    server = Server()
    nowhere = f"redis://127.0.0.1:{free_port()}"

    async def main() -> None:
        async with (
            RedisStore(server.url, timeout=2.0) as store,
            RedisStore(nowhere) as lost,
            redis.asyncio.Redis.from_url(server.url) as client,
        ):
            with redis.Redis.from_url(server.url) as blocking:
                for target in (store, blocking, client):
                    assert await found(RedisPing(target)) == ("healthy", ""), target
            state, output = await found(RedisPing(lost))
            assert (state, output.split(":")[0]) == ("unhealthy", "StoreUnavailable")

    try:
        asyncio.run(main())
    finally:
        server.close()
    with pytest.raises(TypeError, match="pass a RedisStore"):
        RedisPing("redis://localhost")


# --- HTTP ---


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_upstream_is_asked_by_any_client(upstream: str):
    """The standard library, httpx and requests, blocking or not, tell the same."""

    async def main() -> None:
        async with httpx.AsyncClient() as first, httpx2.AsyncClient() as second:
            with requests.Session() as session, httpx.Client() as blocking:
                for client in (None, first, second, session, blocking):
                    fine = HttpUpstream(f"{upstream}/200", client=client)
                    broken = HttpUpstream(f"{upstream}/500", client=client)
                    assert await found(fine) == ("healthy", "status 200"), client
                    assert await found(broken) == ("unhealthy", "status 500"), client
        wanted = HttpUpstream(f"{upstream}/404", statuses={404})
        assert (await found(wanted))[0] == "healthy"
        gone = HttpUpstream(f"http://127.0.0.1:{free_port()}/")
        assert (await found(gone))[1].startswith("ConnectionRefusedError")

    asyncio.run(main())


def test_an_upstreams_repr_holds_no_secret():
    """User, password and query of an address are not shown."""
    shown = HttpUpstream("https://me:secret@users.internal:8443/health?key=secret")
    assert repr(shown) == "HttpUpstream('https://users.internal:8443/health')"
    for url in ("ftp://users/", "users/health", "http://"):
        with pytest.raises(ValueError, match="write an address"):
            HttpUpstream(url)


# --- What is in the process ---


def test_a_queue_is_judged_by_its_oldest_job():
    """How long the oldest has waited degrades, and then takes, the health."""

    async def main() -> None:
        queue = LocalQueue("mail")
        check = QueueAge(queue, degraded=10.0, unhealthy=60.0)
        assert (await found(check))[0] == "healthy"
        await queue.apush("letter")
        await let_pass(11.0)
        assert await found(check) == ("degraded", "the oldest has waited for 11.0 s")
        await let_pass(60.0)
        assert (await found(check))[0] == "unhealthy"

        class Plain:
            def snapshot(self) -> dict[str, Any]:
                return dict(seen)

        seen: dict[str, Any] = {"oldest": None}
        assert (await found(QueueAge(Plain())))[0] == "healthy"
        seen = {"waiting": 10**6}
        state, output = await found(QueueAge(Plain()))
        assert (state, output[:29]) == ("unhealthy", 'its snapshot has no "oldest":')

    run_virtual(main())


def test_a_late_event_loop_is_told():
    """A loop that came round late since the last look, or does so now, is degraded or worse."""

    async def main() -> None:
        check = EventLoop(degraded=0.1, unhealthy=1.0)
        assert (await found(check))[0] == "healthy"
        for seconds, state in ((0.3, "degraded"), (2.0, "unhealthy")):
            asking = asyncio.create_task(found(check))
            await let_pass(0)
            await let_pass(0)
            current_clock().sleep(seconds)  # without await: the loop stands still
            assert (await asking)[0] == state

    run_virtual(main())


def test_a_disk_is_judged_by_what_is_free_and_by_writing(tmp_path: Path):
    """The share that is free decides; a folder that cannot be written to is unhealthy."""
    total, free = 1000, [500]

    class Usage:
        def __init__(self) -> None:
            self.total, self.free = total, free[0]

    async def main() -> None:
        check = Disk(str(tmp_path), degraded=0.1, unhealthy=0.02)
        seen = []
        for left in (500, 100, 99, 20, 19):
            free[0] = left
            seen.append((await found(check))[0])
        assert seen == ["healthy", "healthy", "degraded", "degraded", "unhealthy"]
        state, output = await found(Disk(str(tmp_path / "nowhere")))
        assert (state, output.split(":")[0]) == ("unhealthy", "FileNotFoundError")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _path: Usage())
        run_virtual(main())
    assert run_virtual(found(Disk(str(tmp_path), degraded=0.0, unhealthy=0.0)))[0] == "healthy"
    assert list(tmp_path.iterdir()) == []


def test_an_open_circuit_degrades():
    """A guard whose breaker is open says so, and the service goes on."""

    async def main() -> None:
        guard = new_guard(Breaker(failure_ratio=0.5, min_calls=1, break_for=15.0))
        check = GuardState(guard)
        assert await found(check) == ("healthy", "")
        for error in (ConnectionError, CircuitOpen):
            with pytest.raises(error):
                await guard.acall(_fails)
        assert await found(check) == ("degraded", "the circuit is open")

    run_virtual(main())


async def _fails() -> None:
    raise ConnectionError


def test_each_check_shows_itself():
    """Every ready-made check has a repr that says what it looks at."""
    guard = new_guard(Breaker())
    shown = [
        DatabaseRead(sqlite3.connect),
        DatabaseWrite(sqlite3.connect),
        RedisPing(redis.Redis()),
        QueueAge(LocalQueue("mail")),
        EventLoop(),
        Disk("data"),
        GuardState(guard),
    ]
    assert [repr(check).split("(")[0] for check in shown] == [
        type(check).__name__ for check in shown
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DatabaseRead("sqlite://"),
        lambda: DatabaseRead(sqlite3.connect, statement=""),
        lambda: HttpUpstream("http://users/", client="httpx"),
        lambda: HttpUpstream("http://users/", method="POST"),
        lambda: QueueAge([]),
        lambda: QueueAge(LocalQueue("mail"), degraded=5.0, unhealthy=1.0),
        lambda: EventLoop(degraded=0),
        lambda: Disk("data", degraded=0.1, unhealthy=0.5),
        lambda: GuardState("vendor"),
    ],
)
def test_arguments_are_checked(make: Any):
    """What cannot be checked is refused when the check is made."""
    with pytest.raises((TypeError, ValueError)):
        make()
