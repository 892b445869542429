"""Connections of every library, in transactions of the user's own."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seawall.durable import Database, Inbox, NewEvent, Outbox, Sqlite, amigrate, migrate
from seawall.durable.database.connections import (
    TextQuery,
    ain_transaction,
    connection_of,
    in_transaction,
    kind_of,
)
from seawall.durable.database.driver_errors import is_conflict
from seawall.durable.database.statements import TableNames
from tests.durable.postgres import Postgres

WRITE = TextQuery(
    "INSERT INTO {versions} (version, name, applied_at) VALUES (:version, :name, {now})"
    " RETURNING version, name",
    {"version": 1000, "name": "a: 100 % \u00e4"},
)
COUNT = TextQuery("SELECT count(*) FROM {versions} WHERE version = 1000", {})


def writing() -> Any:
    """Write a row, and read it back."""
    return (yield WRITE)


def counting() -> Any:
    """Count the rows that `writing` wrote."""
    rows = yield COUNT
    return rows[0][0]


@pytest.fixture
def names(postgres: Postgres) -> TableNames:
    """Return the names of migrated tables in the server, for this test alone."""
    import psycopg_pool

    with psycopg_pool.ConnectionPool(postgres.url, min_size=1, open=True) as pool:
        database = Database(pool, schema="of connections", name="names")
        migrate(database)
        with pool.connection() as connection:
            connection.execute(
                'DELETE FROM "of connections"."seawall_versions" WHERE version = 1000'
            )
        database.close()
    return TableNames("of connections")


async def asyncpg_connection(url: str) -> tuple[Any, Any, Any]:
    """Return a connection, and what ends its transaction by rolling back, and what closes it."""
    import asyncpg

    raw = await asyncpg.connect(url)
    transaction = raw.transaction()
    await transaction.start()
    return raw, transaction.rollback, raw.close


async def psycopg_connection(url: str) -> tuple[Any, Any, Any]:
    """Do the same for psycopg."""
    import psycopg

    raw = await psycopg.AsyncConnection.connect(url)
    return raw, raw.rollback, raw.close


async def session(url: str) -> tuple[Any, Any, Any]:
    """Do the same for a session of SQLAlchemy's."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(url.replace("://", "+asyncpg://"))
    raw = AsyncSession(engine)

    async def close() -> None:
        await raw.close()
        await engine.dispose()

    return raw, raw.rollback, close


@pytest.mark.parametrize("opened", [asyncpg_connection, psycopg_connection, session])
def test_what_is_written_belongs_to_the_users_transaction(
    opened: Any, names: TableNames, postgres: Postgres
):
    """It is seen inside, and gone when the user rolls back: we commit nothing."""

    async def main() -> None:
        raw, rollback, close = await opened(postgres.url)
        connection = connection_of(raw, names)
        assert connection.kind.is_async
        assert await connection.arun(writing()) == [(1000, "a: 100 % \u00e4")]
        assert await connection.arun(counting()) == 1
        await rollback()
        assert await connection.arun(counting()) == 0
        await close()

    asyncio.run(main())


def test_blocking_connections(names: TableNames, postgres: Postgres):
    """The same for psycopg without an event loop, and for a plain session of SQLAlchemy's."""
    import psycopg
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(postgres.url.replace("://", "+psycopg://"))
    with psycopg.connect(postgres.url) as one, Session(engine) as two:
        for raw in (one, two):
            connection = connection_of(raw, names)
            assert not connection.kind.is_async
            assert connection.run(writing()) == [(1000, "a: 100 % \u00e4")]
            raw.rollback()
            assert connection.run(counting()) == 0
            raw.rollback()
    engine.dispose()


def test_sqlite_connections(tmp_path: Path):
    """The same for sqlite3, aiosqlite, and a session on a file."""
    file = Sqlite(tmp_path / "a.db")
    database = Database(file, name="file")
    migrate(database)
    raw = sqlite3.connect(tmp_path / "a.db")
    assert connection_of(raw, database.names).run(writing()) == [(1000, "a: 100 % \u00e4")]
    raw.rollback()
    assert connection_of(raw, database.names).run(counting()) == 0
    raw.close()

    async def main() -> None:
        import aiosqlite
        from sqlalchemy.ext.asyncio import create_async_engine

        async with aiosqlite.connect(tmp_path / "a.db") as one:
            connection = connection_of(one, database.names)
            assert await connection.arun(writing()) == [(1000, "a: 100 % \u00e4")]
            await one.rollback()
            assert await connection.arun(counting()) == 0
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}")
        async with engine.connect() as two:
            connection = connection_of(two, database.names)
            assert connection.dialect == "sqlite"
            assert await connection.arun(counting()) == 0
        own = Database(engine, name="engine")
        assert await amigrate(own) == []
        own.close()
        await engine.dispose()

    asyncio.run(main())
    database.close()
    file.close()


@pytest.mark.parametrize(
    "strange", [None, "postgresql://", object()], ids=["None", "url", "object"]
)
def test_what_is_no_connection_is_said(strange: object):
    """With what to pass instead; the same for a source of connections."""
    with pytest.raises(TypeError, match="asyncpg"):
        connection_of(strange, TableNames())
    with pytest.raises(TypeError, match="Sqlite"):
        Database(strange, name="strange")


def test_conflicts_are_found_in_what_others_raise():
    """By SQLSTATE, also inside of SQLAlchemy's error, and by SQLite's words."""

    class Lost(Exception):
        sqlstate = "40P01"

    class Wrapped(Exception):
        orig = Lost()

    assert is_conflict(Lost())
    assert is_conflict(Wrapped())
    assert is_conflict(sqlite3.OperationalError("database is locked"))
    assert not is_conflict(sqlite3.OperationalError("no such table: a"))
    assert not is_conflict(ValueError("database is locked"))


def test_deadlocks_are_done_again(postgres: Postgres):
    """Two transactions that take two rows in opposite order both end well, one of them twice."""
    import asyncpg

    async def main() -> None:
        async with asyncpg.create_pool(postgres.url, min_size=2, max_size=4) as pool:
            database = Database(pool, schema="deadlocks", name="deadlocks")
            await amigrate(database)
            await pool.execute('CREATE TABLE "deadlocks".things (id int PRIMARY KEY, n int)')
            await pool.execute('INSERT INTO "deadlocks".things VALUES (1, 0), (2, 0)')
            tries: list[int] = []
            both = asyncio.Barrier(2)

            def taking(first: int, second: int) -> Any:
                tries.append(first)
                text = 'UPDATE "deadlocks".things SET n = n + 1 WHERE id = :id'
                yield TextQuery(text, {"id": first})
                if len(tries) <= 2:
                    yield TextQuery("SELECT pg_sleep(0.05)", {})  # by then the other has its first
                yield TextQuery(text, {"id": second})

            async def run(first: int, second: int) -> None:
                await both.wait()
                await database.arun(lambda: taking(first, second))

            await asyncio.gather(run(1, 2), run(2, 1))
            assert await pool.fetchval('SELECT sum(n) FROM "deadlocks".things') == 4
            assert len(tries) >= 3
            database.close()

    asyncio.run(main())


AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}
URLS = ["postgresql+psycopg", "sqlite"]
ASYNC_URLS = ["postgresql+asyncpg", "postgresql+psycopg", "sqlite+aiosqlite"]


def url_of(kind: str, postgres: Postgres, folder: Path) -> str:
    """Return where SQLAlchemy finds a database by that driver."""
    if kind.startswith("sqlite"):
        return f"{kind}:///{folder / 'autocommit.db'}"
    return postgres.url.replace("postgresql://", f"{kind}://")


def joins(raw: Any) -> bool:
    """Tell whether `raw` is taken for one whose statements are committed later."""
    return in_transaction(kind_of(raw), raw)


@pytest.mark.parametrize("kind", URLS)
def test_sqlalchemy_with_autocommit_is_in_no_transaction(
    kind: str, postgres: Postgres, tmp_path: Path
):
    """However it was told to commit each statement for itself; without that, it is in one."""
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    url = url_of(kind, postgres, tmp_path)
    usual, each = create_engine(url), create_engine(url, **AUTOCOMMIT)
    with usual.connect() as own, each.connect() as other:
        assert joins(own)
        with own.begin(), other.begin():
            assert joins(own)
            assert not joins(other)
            assert not joins(Session(other))
        assert joins(other.execution_options(isolation_level="SERIALIZABLE"))
        assert not joins(own.execution_options(**AUTOCOMMIT))
    with Session(usual) as own, Session(each) as other:
        assert joins(own)
        assert not joins(other)
    with Session(usual.execution_options(**AUTOCOMMIT)) as told:
        assert not joins(told)
    usual.dispose()
    each.dispose()


@pytest.mark.parametrize("kind", ASYNC_URLS)
def test_sqlalchemy_with_autocommit_is_in_no_transaction_when_awaited(
    kind: str, postgres: Postgres, tmp_path: Path
):
    """The same for connections and sessions of an event loop."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def main() -> None:
        url = url_of(kind, postgres, tmp_path)
        usual, each = create_async_engine(url), create_async_engine(url, **AUTOCOMMIT)
        async with usual.connect() as own, each.connect() as other:
            assert joins(own)
            async with own.begin(), other.begin():
                assert joins(own)
                assert not joins(other)
            assert not joins(await own.execution_options(**AUTOCOMMIT))
        for session, joined in ((AsyncSession(usual), True), (AsyncSession(each), False)):
            async with session:
                assert await ain_transaction(kind_of(session), session) is joined
        async with AsyncSession(usual.execution_options(**AUTOCOMMIT)) as told:
            assert not joins(told)
        await usual.dispose()
        await each.dispose()

    asyncio.run(main())


def test_a_begin_of_the_users_own_is_a_transaction(tmp_path: Path):
    """SQLAlchemy's advice for SQLite, to leave BEGIN to a listener, is not taken for AUTOCOMMIT."""
    from sqlalchemy import create_engine, event

    engine = create_engine(f"sqlite:///{tmp_path / 'a.db'}")

    @event.listens_for(engine, "connect")
    def connected(raw: Any, _record: object) -> None:
        raw.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    with engine.connect() as connection:
        assert joins(connection)
        with connection.begin():
            assert joins(connection)
    engine.dispose()


def test_a_block_with_autocommit_says_what_to_change(tmp_path: Path):
    """The message names the setting: to begin a transaction would not help."""
    from sqlalchemy import create_engine

    engine = create_engine(f"sqlite:///{tmp_path / 'a.db'}", **AUTOCOMMIT)
    database = Database(engine, name="autocommit")
    with engine.connect() as connection, connection.begin():
        block = Inbox(database).once(connection, "billing", "1")
        with pytest.raises(RuntimeError, match="another isolation_level than AUTOCOMMIT"), block:
            pytest.fail("it was entered")
    database.close()
    engine.dispose()


def test_an_outbox_takes_no_event_of_a_session_that_commits_each_statement(postgres: Postgres):
    """Also where the session says so only when it is awaited; and nothing is left behind."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def main() -> None:
        url = postgres.url.replace("://", "+asyncpg://")
        engine = create_async_engine(url, **AUTOCOMMIT)
        database = Database(engine, schema="each statement", name="each statement")
        await amigrate(database)
        outbox = Outbox(database)
        async with AsyncSession(engine) as session:
            for adding in (
                outbox.aadd(session, "order", "1", "placed", {}),
                outbox.aadd_all(session, [NewEvent("order", "1", "placed", {})]),
            ):
                with pytest.raises(RuntimeError, match="another isolation_level than AUTOCOMMIT"):
                    await adding
        assert (await outbox.asurvey())["pending"] == 0
        database.close()
        await engine.dispose()

    asyncio.run(main())
