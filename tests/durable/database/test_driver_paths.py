"""Every kind of connection with every operation; every source of them, awaited and blocking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import pytest

from seawall.durable import (
    Database,
    DeferredCalls,
    DeferredCallWorker,
    Dispatcher,
    FifoReceiver,
    FifoSender,
    Fresh,
    FromRow,
    Idempotency,
    Inbox,
    Jobs,
    JobWorker,
    NewEvent,
    Outbox,
    OutboxEvent,
    Replay,
    Single,
    Sqlite,
    amigrate,
    migrate,
)
from tests.durable.deferred.support import Vendor
from tests.durable.fifo.support import ask, entered
from tests.durable.postgres import Postgres

# Connections: what a user has in hand, with a transaction begun


class Held(NamedTuple):
    """A connection, and how its transaction is ended."""

    raw: Any
    commit: Any
    rollback: Any


async def asyncpg_alone(url: str, stack: AsyncExitStack) -> Any:
    import asyncpg

    raw = await asyncpg.connect(url)
    stack.push_async_callback(raw.close)
    return await _asyncpg(raw)


async def asyncpg_of_a_pool(url: str, stack: AsyncExitStack) -> Any:
    import asyncpg

    pool = await stack.enter_async_context(asyncpg.create_pool(url, min_size=1, max_size=1))
    return await _asyncpg(await stack.enter_async_context(pool.acquire()))


async def _asyncpg(raw: Any) -> Held:
    transaction = raw.transaction()
    await transaction.start()
    return Held(raw, transaction.commit, transaction.rollback)


async def psycopg_async(url: str, stack: AsyncExitStack) -> Held:
    import psycopg

    raw = await psycopg.AsyncConnection.connect(url)
    stack.push_async_callback(raw.close)
    return Held(raw, raw.commit, raw.rollback)


async def psycopg_sync(url: str, stack: AsyncExitStack) -> Held:
    import psycopg

    raw = psycopg.connect(url)
    stack.callback(raw.close)
    return Held(raw, raw.commit, raw.rollback)


async def psycopg_with_dicts(url: str, stack: AsyncExitStack) -> Held:
    import psycopg
    from psycopg.rows import dict_row

    raw: Any = psycopg.connect(url, row_factory=dict_row)  # type: ignore[arg-type]
    stack.callback(raw.close)
    return Held(raw, raw.commit, raw.rollback)


async def psycopg_async_with_dicts(url: str, stack: AsyncExitStack) -> Held:
    import psycopg
    from psycopg.rows import dict_row

    connect: Any = psycopg.AsyncConnection.connect
    raw = await connect(url, row_factory=dict_row, cursor_factory=psycopg.AsyncRawCursor)
    stack.push_async_callback(raw.close)
    return Held(raw, raw.commit, raw.rollback)


async def session_async(url: str, stack: AsyncExitStack) -> Held:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(_dialect(url, "asyncpg", "aiosqlite"))
    stack.push_async_callback(engine.dispose)
    raw = await stack.enter_async_context(AsyncSession(engine))
    return Held(raw, raw.commit, raw.rollback)


async def connection_async(url: str, stack: AsyncExitStack) -> Held:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(_dialect(url, "psycopg", "aiosqlite"))
    stack.push_async_callback(engine.dispose)
    raw = await stack.enter_async_context(engine.connect())
    return Held(raw, raw.commit, raw.rollback)


async def session_sync(url: str, stack: AsyncExitStack) -> Held:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(_dialect(url, "psycopg", "pysqlite"))
    stack.callback(engine.dispose)
    raw = stack.enter_context(Session(engine))
    return Held(raw, raw.commit, raw.rollback)


async def connection_sync(url: str, stack: AsyncExitStack) -> Held:
    from sqlalchemy import create_engine

    engine = create_engine(_dialect(url, "psycopg", "pysqlite"))
    stack.callback(engine.dispose)
    raw = stack.enter_context(engine.connect())
    return Held(raw, raw.commit, raw.rollback)


async def sqlite_sync(url: str, stack: AsyncExitStack) -> Held:
    import sqlite3

    raw = sqlite3.connect(url)
    stack.callback(raw.close)
    return Held(raw, raw.commit, raw.rollback)


async def sqlite_with_rows(url: str, stack: AsyncExitStack) -> Held:
    import sqlite3

    raw = sqlite3.connect(url, isolation_level=None)
    raw.row_factory = sqlite3.Row
    raw.execute("BEGIN IMMEDIATE")
    stack.callback(raw.close)
    return Held(raw, raw.commit, raw.rollback)


async def sqlite_async(url: str, stack: AsyncExitStack) -> Held:
    import aiosqlite

    raw = await stack.enter_async_context(aiosqlite.connect(url))
    return Held(raw, raw.commit, raw.rollback)


async def sqlite_with_dicts(url: str, stack: AsyncExitStack) -> Held:
    held = await sqlite_sync(url, stack)
    held.raw.row_factory = _as_dict
    return held


async def sqlite_async_with_dicts(url: str, stack: AsyncExitStack) -> Held:
    held = await sqlite_async(url, stack)
    held.raw.row_factory = _as_dict
    return held


def _as_dict(cursor: Any, row: Any) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def _dialect(url: str, postgres: str, sqlite: str) -> str:
    if url.startswith("postgresql"):
        return url.replace("://", f"+{postgres}://")
    return f"sqlite+{sqlite}:///{url}"


ON_POSTGRES = (
    asyncpg_alone,
    asyncpg_of_a_pool,
    psycopg_async,
    psycopg_sync,
    psycopg_with_dicts,
    psycopg_async_with_dicts,
    session_async,
    connection_async,
    session_sync,
    connection_sync,
)
ON_SQLITE = (
    sqlite_sync,
    sqlite_with_rows,
    sqlite_async,
    sqlite_with_dicts,
    sqlite_async_with_dicts,
    session_async,
    connection_async,
    session_sync,
    connection_sync,
)


class Place(NamedTuple):
    """A database where all is looked up afterwards, and where it is."""

    database: Database
    url: str


@asynccontextmanager
async def place_of(dialect: str, postgres: Postgres, folder: Path) -> AsyncIterator[Place]:
    """Give migrated tables of this test's own."""
    async with AsyncExitStack() as stack:
        if dialect == "postgres":
            from psycopg_pool import ConnectionPool

            pool: Any = ConnectionPool(postgres.url, min_size=1, max_size=4, open=False)
            source, url = stack.enter_context(pool), postgres.url
        else:
            source, url = Sqlite(folder / "test.db"), str(folder / "test.db")
            stack.callback(source.close)
        own = {"schema": f"paths {token_hex(4)}"} if dialect == "postgres" else {}
        database = Database(source, name=f"paths {token_hex(4)}", **own)
        stack.callback(database.close)
        migrate(database)
        yield Place(database, url)


async def done(told: Any) -> Any:
    """Return what was told, awaited where it is to be."""
    return await told if hasattr(told, "__await__") else told


class _Asking(NamedTuple):
    """A database as one kind of connection sees it: awaited or not."""

    database: Database
    is_async: bool


async def everything(database: Database, raw: Any) -> tuple[bool, Any]:
    """Do in one transaction all that can be done in one; tell whether it was first, and more."""
    idempotency, outbox, inbox = Idempotency(database), Outbox(database), Inbox(database)
    sender = FifoSender(database, "shop", to="billing")
    receiver, jobs = FifoReceiver(database, "billing"), Jobs(database)
    is_async = database.connection(raw).kind.is_async
    asking: Any = _Asking(database, is_async)
    once = idempotency.once(raw, scope="t", operation="order", key="k", fingerprint="f")
    async with entered(asking, once):
        if not once.first:
            return False, once.value
        made = NewEvent("order", "1", "made", {"ü": 1})
        once.answer({"order": 1}, outbox=outbox, events=[made])
    added = await outbox.aadd(raw, "order", "1", "paid", b"\x00\xff")
    async with entered(asking, inbox.once(raw, "billing", "m1")) as first:
        assert first
    message = await sender.asend(raw, "first") if is_async else sender.send(raw, "first")
    async with entered(asking, receiver.receive(raw, *message)) as ready:
        assert [one.payload for one in ready] == [b"first"]
    if is_async:
        job = await jobs.asubmit(raw, "mail", {"to": "ä"}, scope="t", key="j")
    else:
        job = jobs.submit(raw, "mail", {"to": "ä"}, scope="t", key="j")
    return True, (added, job.id)


async def counts(database: Database) -> list[int]:
    """Count what is committed."""
    with database.transaction() as raw:
        found = []
        for table in ("idempotency", "outbox", "inbox", "jobs"):
            rows = await ask(database, raw, f"SELECT count(*) FROM {{{table}}}")  # noqa: S608 - our own
            found.append(rows[0][0])
        return found


@pytest.mark.parametrize(
    ("dialect", "held"),
    [("postgres", one) for one in ON_POSTGRES] + [("sqlite", one) for one in ON_SQLITE],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_all_in_one_transaction(dialect: str, held: Any, postgres: Postgres, tmp_path: Path):
    """Rolled back, nothing was; committed, all is; and who comes again has the first's answer."""

    async def main() -> None:
        async with place_of(dialect, postgres, tmp_path) as (database, url):
            for how, wanted in (("rollback", [0, 0, 0, 0]), ("commit", [1, 2, 1, 1])):
                async with AsyncExitStack() as stack:
                    mine = await held(url, stack)
                    first, _ = await everything(database, mine.raw)
                    assert first
                    await done(getattr(mine, how)())
                    assert await counts(database) == wanted
            async with AsyncExitStack() as stack:
                mine = await held(url, stack)
                assert await everything(database, mine.raw) == (False, {"order": 1})
                await done(mine.commit())
            assert await counts(database) == [1, 2, 1, 1]
            events: list[OutboxEvent] = []

            async def sink(event: OutboxEvent) -> None:
                events.append(event)

            assert await Dispatcher(Outbox(database), sink).drain() == 2
            assert [(e.sequence, e.type, e.payload) for e in events] == [
                (1, "made", b'{"\\u00fc":1}'),
                (2, "paid", b"\x00\xff"),
            ]
            assert await FifoSender(database, "shop", to="billing").aunacknowledged() != []

    asyncio.run(main())


# Sources: what gives connections for what we do ourselves


async def pool_asyncpg(url: str, stack: AsyncExitStack) -> Any:
    import asyncpg

    return await stack.enter_async_context(asyncpg.create_pool(url, min_size=1, max_size=5))


async def pool_psycopg_async(url: str, stack: AsyncExitStack) -> Any:
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(url, min_size=1, max_size=5, open=False)
    return await stack.enter_async_context(pool)


async def pool_psycopg_sync(url: str, stack: AsyncExitStack) -> Any:
    from psycopg_pool import ConnectionPool

    return stack.enter_context(ConnectionPool(url, min_size=1, max_size=5, open=False))


async def pool_psycopg_null(url: str, stack: AsyncExitStack) -> Any:
    from psycopg_pool import NullConnectionPool

    return stack.enter_context(NullConnectionPool(url, max_size=5, open=False))


async def engine_asyncpg(url: str, stack: AsyncExitStack) -> Any:
    return _async_engine(_dialect(url, "asyncpg", ""), stack)


async def engine_psycopg_async(url: str, stack: AsyncExitStack) -> Any:
    return _async_engine(_dialect(url, "psycopg", ""), stack)


async def engine_psycopg_sync(url: str, stack: AsyncExitStack) -> Any:
    return _engine(_dialect(url, "psycopg", ""), stack)


async def engine_aiosqlite(url: str, stack: AsyncExitStack) -> Any:
    return _async_engine(_dialect(url, "", "aiosqlite"), stack)


async def engine_sqlite(url: str, stack: AsyncExitStack) -> Any:
    return _engine(_dialect(url, "", "pysqlite"), stack)


async def file_sqlite(url: str, stack: AsyncExitStack) -> Any:
    source = Sqlite(url)
    stack.callback(source.close)
    return source


def _async_engine(url: str, stack: AsyncExitStack) -> Any:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url)
    stack.push_async_callback(engine.dispose)
    return engine


def _engine(url: str, stack: AsyncExitStack) -> Any:
    from sqlalchemy import create_engine

    engine = create_engine(url)
    stack.callback(engine.dispose)
    return engine


OF_POSTGRES = (
    pool_asyncpg,
    pool_psycopg_async,
    pool_psycopg_sync,
    pool_psycopg_null,
    engine_asyncpg,
    engine_psycopg_async,
    engine_psycopg_sync,
)
OF_SQLITE = (engine_aiosqlite, engine_sqlite, file_sqlite)


@asynccontextmanager
async def database_by(source: Any, postgres: Postgres, folder: Path) -> AsyncIterator[Database]:
    """Give a migrated database by one source of connections."""
    async with AsyncExitStack() as stack:
        url = postgres.url if source in OF_POSTGRES else str(folder / "test.db")
        own = {"schema": f"paths {token_hex(4)}"} if source in OF_POSTGRES else {}
        made = await source(url, stack)
        database = Database(made, name=f"{source.__name__} {token_hex(4)}", **own)
        stack.callback(database.close)
        assert await amigrate(database) != []
        yield database


def named(source: Any) -> str:
    return str(source.__name__)


@pytest.mark.parametrize("source", [*OF_POSTGRES, *OF_SQLITE], ids=named)
def test_every_source_awaited(source: Any, postgres: Postgres, tmp_path: Path):
    """Keys, events, jobs and calls for later, by whatever gives connections, in an event loop."""

    async def main() -> None:
        async with database_by(source, postgres, tmp_path) as database:
            idempotency, outbox = Idempotency(database), Outbox(database)
            found = await asyncio.gather(
                *(idempotency.areserve("t", "order", "k", "f") for _ in range(4))
            )
            (claim,) = (one.claim for one in found if isinstance(one, Fresh))
            assert await idempotency.arenew(claim)
            assert await idempotency.acomplete(claim, b"\x00\xff")
            again = await idempotency.areserve("t", "order", "k", "f")
            assert isinstance(again, Replay)
            assert again.answer.body == b"\x00\xff"
            async with begun(database) as raw:
                await outbox.aadd(raw, "order", "1", "made", {})
            assert await Dispatcher(outbox, lambda _event: None).drain() == 1
            jobs, later, vendor = Jobs(database), DeferredCalls(database, "mail", delay=0), Vendor()
            job = await jobs.asubmit(None, "double", 2, scope="t")
            assert await JobWorker(jobs, {"double": lambda job: job.payload * 2}).run_once() == 1
            assert (await jobs.aget(job.id, scope="t")).result == 4
            await later.astore(7)
            assert await DeferredCallWorker(later, vendor.send).run_once() == 1
            assert vendor.done[0][0] == 7
            assert (await amigrate(database), await idempotency.acleanup()) == ([], 0)

    asyncio.run(main())


@asynccontextmanager
async def begun(database: Database) -> AsyncIterator[Any]:
    """Begin a transaction of the user's own as the source has it."""
    if database.is_async:
        async with database.atransaction() as raw:
            yield raw
    else:
        with database.transaction() as raw:
            yield raw


@pytest.mark.parametrize("source", [*OF_POSTGRES, *OF_SQLITE], ids=named)
def test_every_source_blocking(source: Any, postgres: Postgres, tmp_path: Path):
    """The same without an event loop; a source that is awaited says what to write."""

    async def main() -> None:
        async with database_by(source, postgres, tmp_path) as database:
            idempotency, inbox = Idempotency(database), Inbox(database)
            if database.is_async:
                for call in (
                    lambda: idempotency.reserve("t", "order", "k", "f"),
                    lambda: migrate(database),
                    lambda: inbox.seen("billing", "m"),
                ):
                    with pytest.raises(TypeError, match="await"):
                        call()
                return
            claim = idempotency.reserve("t", "order", "k", "f")
            assert isinstance(claim, Fresh)
            assert idempotency.complete(claim.claim, {"a": 1})
            assert isinstance(idempotency.reserve("t", "order", "k", "f"), Replay)
            with database.transaction() as raw, inbox.once(raw, "billing", "m") as first:
                assert first
            assert inbox.seen("billing", "m")
            assert (migrate(database), idempotency.cleanup(), inbox.cleanup()) == ([], 0, 0)

    asyncio.run(main())


# The single statement, by every way in


NAMED: dict[str, Any] = {"scope": "t", "operation": "order", "fingerprint": None}


async def table_of(database: Database) -> str:
    """Make a table of the user's, and return the statement that writes into it."""
    async with begun(database) as raw:
        await ask(
            database,
            raw,
            "CREATE TABLE {orders} (id bigint GENERATED ALWAYS AS IDENTITY, who text UNIQUE)",
        )
    table = database.names.table("orders")
    return f"INSERT INTO {table} (who) VALUES (:who) RETURNING id, who"  # noqa: S608 - our own


async def check_single(single: Any, database: Database, **options: Any) -> None:
    """See what a single statement does, the first time, again, and where the user is wrong."""
    outbox = Outbox(database, "single")
    insert = await table_of(database)
    options = {**NAMED, "outbox": outbox, **options}
    events = [NewEvent("order", FromRow("id"), "made", {"100 %": ":who"})]
    first = await single(insert, {"who": "a"}, key="k", events=events, **options)
    again = await single(insert, {"who": "a"}, key="k", events=events, **options)
    assert first == Single(first=True, value=[{"id": first.value[0]["id"], "who": "a"}])
    assert again == Single(first=False, value=first.value)
    with pytest.raises(Exception, match="duplicate key"):  # the user's own
        await single(insert, {"who": "a"}, key="other", events=events, **options)
    assert (await single(insert, {"who": "b"}, key="k2", events=events, **options)).first
    assert (await outbox.asurvey())["pending"] == 2


def threaded(single: Any) -> Any:
    """Call a blocking one beside the event loop."""

    async def call(*args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(single, *args, **options)

    return call


@pytest.mark.parametrize("source", OF_POSTGRES, ids=named)
def test_a_single_statement_by_every_source(source: Any, postgres: Postgres, tmp_path: Path):
    """It does the same by each."""

    async def main() -> None:
        async with database_by(source, postgres, tmp_path) as database:
            idempotency = Idempotency(database)
            await check_single(idempotency.asingle, database)
            if database.is_async:
                with pytest.raises(TypeError, match="asingle"):
                    idempotency.single("DELETE", {}, key="k", **NAMED)

    asyncio.run(main())


@pytest.mark.parametrize("source", [pool_psycopg_sync, engine_psycopg_sync], ids=named)
def test_a_single_statement_blocking(source: Any, postgres: Postgres, tmp_path: Path):
    """The same without an event loop."""

    async def main() -> None:
        async with database_by(source, postgres, tmp_path) as database:
            await check_single(threaded(Idempotency(database).single), database)

    asyncio.run(main())


@pytest.mark.parametrize("source", [pool_psycopg_async, pool_psycopg_sync], ids=named)
def test_a_single_statement_leaves_a_pools_connections_alone(
    source: Any, postgres: Postgres, tmp_path: Path
):
    """Those of psycopg commit by themselves for it, and no longer: it is one round trip."""
    import psycopg

    async def main() -> None:
        async with database_by(source, postgres, tmp_path) as database:
            insert = await table_of(database)
            for who in ("a", "a"):
                with suppress(psycopg.errors.UniqueViolation):
                    await Idempotency(database).asingle(
                        insert, {"who": who}, key=token_hex(4), **NAMED
                    )
            async with entered(database, database.source.connection()) as raw:
                assert not raw.autocommit
                await ask(database, raw, "DELETE FROM {orders}")
                await done(raw.rollback())
                assert await ask(database, raw, "SELECT who FROM {orders}") == [("a",)]

    asyncio.run(main())


def test_who_is_cancelled_leaves_a_pools_connection_as_it_was(postgres: Postgres, tmp_path: Path):
    """Cancelled while the statement waits for another transaction: nothing is done, or changed."""

    async def main() -> None:
        async with (
            database_by(pool_psycopg_async, postgres, tmp_path) as database,
            AsyncExitStack() as stack,
        ):
            insert = await table_of(database)
            other = await psycopg_async(postgres.url, stack)
            await ask(database, other.raw, "INSERT INTO {orders} (who) VALUES ('a')")
            calling = Idempotency(database).asingle(insert, {"who": "a"}, key="k", **NAMED)
            task = asyncio.create_task(calling)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            while await ask(database, other.raw, waiting) == [(0,)]:
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await other.rollback()
            async with entered(database, database.source.connection()) as raw:
                assert not raw.autocommit
                for table in ("orders", "idempotency"):
                    count = f"SELECT count(*) FROM {{{table}}}"  # noqa: S608 - our own
                    assert await ask(database, raw, count) == [(0,)]

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg async", "psycopg sync"])
def test_a_single_statement_on_a_connection_of_ones_own(
    kind: str, postgres: Postgres, tmp_path: Path
):
    """Where that commits each statement by itself; else it is refused, and nothing was done."""
    import asyncpg
    import psycopg

    async def main() -> None:
        async with (
            database_by(pool_psycopg_sync, postgres, tmp_path) as database,
            AsyncExitStack() as stack,
        ):
            idempotency = Idempotency(database)
            way = threaded(idempotency.single) if kind == "psycopg sync" else idempotency.asingle
            conn: Any
            if kind == "asyncpg":
                conn = await asyncpg.connect(postgres.url)
                stack.push_async_callback(conn.close)
            elif kind == "psycopg async":
                conn = await psycopg.AsyncConnection.connect(postgres.url, autocommit=True)
                stack.push_async_callback(conn.close)
            else:
                conn = psycopg.connect(postgres.url, autocommit=True)
                stack.callback(conn.close)
            await check_single(way, database, conn=conn)
            other = (
                threaded(idempotency.single) if way == idempotency.asingle else idempotency.asingle
            )
            with pytest.raises(TypeError, match="write"):
                await other("DELETE", {}, key="k3", conn=conn, **NAMED)
            if kind != "asyncpg":
                await done(conn.set_autocommit(False))
                with pytest.raises(RuntimeError, match="autocommit"):
                    await way("DELETE", {}, key="k3", conn=conn, **NAMED)

    asyncio.run(main())
