"""All of it through a real pgbouncer in transaction mode: two server connections, more clients."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

import pytest

from seawall.durable import (
    Database,
    DeferredCalls,
    DeferredCallWorker,
    Dispatcher,
    FifoMessage,
    Fresh,
    FromRow,
    Idempotency,
    Inbox,
    Jobs,
    JobWorker,
    KeyInFlight,
    NewEvent,
    Outbox,
    OutboxEvent,
    Replay,
    amigrate,
)
from seawall.durable.database import migrations
from tests.durable.conftest import opening_by
from tests.durable.deferred.support import Vendor
from tests.durable.fifo.support import World, ask, begun, entered
from tests.durable.pooler import Pooler, program
from tests.durable.postgres import Postgres

CLIENTS = 10


@pytest.fixture(scope="module")
def pooler(postgres: Postgres) -> Iterator[Pooler]:
    """Return the pooler of this file, before the server of this run."""
    made = Pooler(postgres)
    yield made
    made.close()


def test_without_a_pooler_these_tests_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where no pgbouncer can be had, the tests that need it say how to get it."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr("tests.durable.pooler.UNPACKED", tmp_path)
    with pytest.raises(pytest.skip.Exception, match=r"run \./dev servers"):
        program()


# What users have to set, each as docs/durable/databases.md has it


async def by_asyncpg(url: str, stack: AsyncExitStack) -> Any:
    import asyncpg

    pool = asyncpg.create_pool(url, min_size=1, max_size=CLIENTS, statement_cache_size=0)
    return await stack.enter_async_context(pool)


async def by_psycopg(url: str, stack: AsyncExitStack) -> Any:
    from psycopg_pool import AsyncConnectionPool

    own = {"prepare_threshold": None}
    pool = AsyncConnectionPool(url, min_size=1, max_size=CLIENTS, open=False, kwargs=own)
    return await stack.enter_async_context(pool)


async def by_psycopg_blocking(url: str, stack: AsyncExitStack) -> Any:
    from psycopg_pool import ConnectionPool

    own = {"prepare_threshold": None}
    pool = ConnectionPool(url, min_size=1, max_size=CLIENTS, open=False, kwargs=own)
    return stack.enter_context(pool)


async def by_sqlalchemy(url: str, stack: AsyncExitStack) -> Any:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(
        url.replace("://", "+asyncpg://"),
        pool_size=CLIENTS,
        connect_args={
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": str,  # the statement without a name
        },
    )
    stack.push_async_callback(engine.dispose)
    return engine


async def by_sqlalchemy_psycopg(url: str, stack: AsyncExitStack) -> Any:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(
        url.replace("://", "+psycopg://"),
        pool_size=CLIENTS,
        connect_args={"prepare_threshold": None},
    )
    stack.push_async_callback(engine.dispose)
    return engine


async def by_sqlalchemy_blocking(url: str, stack: AsyncExitStack) -> Any:
    from sqlalchemy import create_engine

    engine = create_engine(
        url.replace("://", "+psycopg://"),
        pool_size=CLIENTS,
        connect_args={"prepare_threshold": None},
    )
    stack.callback(engine.dispose)
    return engine


SOURCES = (
    by_asyncpg,
    by_psycopg,
    by_psycopg_blocking,
    by_sqlalchemy,
    by_sqlalchemy_psycopg,
    by_sqlalchemy_blocking,
)

Pooled = Callable[[], Any]


@asynccontextmanager
async def pooled_by(source: Any, url: str) -> AsyncIterator[Database]:
    """Open a database by one library, with tables of a fresh schema."""
    async with AsyncExitStack() as stack:
        made = await source(url, stack)
        schema = f"pooled {token_hex(4)}"
        database = Database(made, schema=schema, name=f"{source.__name__} {schema}")
        stack.callback(database.close)
        # As several processes that begin at once.
        done = await asyncio.gather(*(amigrate(database) for _ in range(3)))
        assert sum(bool(steps) for steps in done) == 1
        yield database
        await nothing_is_left(url)


async def nothing_is_left(url: str) -> None:
    """See that both server connections are as they were: each session without any state."""
    import psycopg

    text = (
        "SELECT (SELECT count(*) FROM pg_prepared_statements),"
        " (SELECT count(*) FROM pg_listening_channels()),"
        " (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'),"
        " (SELECT count(*) FROM pg_class WHERE relpersistence = 't'),"
        " (SELECT count(*) FROM pg_settings WHERE source = 'session' AND name NOT IN"
        " ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'IntervalStyle',"
        " 'standard_conforming_strings')),"
        " pg_backend_pid()"
    )
    connect = psycopg.AsyncConnection.connect
    async with (
        await connect(url, prepare_threshold=None) as one,
        await connect(url, prepare_threshold=None) as other,
    ):
        # Each in a transaction: so it is one of the two, and then the other.
        rows = [await (await conn.execute(text)).fetchone() for conn in (one, other)]
        assert [row and row[:5] for row in rows] == [(0, 0, 0, 0, 0)] * 2
        assert len({row and row[5] for row in rows}) == 2


@pytest.fixture(params=SOURCES, ids=lambda source: source.__name__.removeprefix("by_"))
def pooled(request: pytest.FixtureRequest, pooler: Pooler) -> Pooled:
    """Return what opens a database through the pooler, by each library in turn."""
    return lambda: pooled_by(request.param, pooler.url)


# Everything, by every library


async def keys(database: Database) -> None:
    """Keys that are reserved, completed, replayed, taken by a function, and cleaned up."""
    idempotency = Idempotency(database, lease=60, ttl=600)
    found = await asyncio.gather(
        *(idempotency.areserve("t", "order", f"k{n % 4}", "f") for n in range(16))
    )
    claims = [one.claim for one in found if isinstance(one, Fresh)]
    assert len(claims) == 4
    assert all(await asyncio.gather(*(idempotency.arenew(claim) for claim in claims)))
    done = [idempotency.acomplete(claim, {"it": claim.epoch}) for claim in claims]
    assert all(await asyncio.gather(*done))
    found = await asyncio.gather(
        *(idempotency.areserve("t", "order", f"k{n % 4}", "f") for n in range(16))
    )
    assert all(isinstance(one, Replay) for one in found)

    runs: list[str] = []

    @idempotency.idempotent(key="key", scope="scope", wait=20)
    async def order(key: str, scope: str) -> str:
        runs.append(key)
        return f"{scope} {key}"

    said = await asyncio.gather(*(order(f"k{n % 2}", "t") for n in range(8)))
    assert sorted(runs) == ["k0", "k1"]
    assert set(said) == {"t k0", "t k1"}
    assert await idempotency.acleanup() == 0


async def orders(database: Database) -> None:
    """Orders with a key and an event, in transactions; delivered in order, and received once."""
    await made_orders(database)
    idempotency, outbox, inbox = Idempotency(database), Outbox(database), Inbox(database)

    async def place(number: int) -> bool:
        key = f"k{number % 5}"
        async with begun(database) as connection:
            once = idempotency.once(
                connection, scope="t", operation="order", key=key, fingerprint=None
            )
            async with entered(database, once):
                if once.first:
                    insert = "INSERT INTO {orders} (customer) VALUES (:who)"
                    await ask(database, connection, insert, who=key)
                    made = NewEvent("order", key, "made", {"number": number})
                    once.answer(key, outbox=outbox, events=[made])
                assert once.value == key
            await outbox.aadd(connection, "customer", key, "asked", {})
            return once.first

    assert sum(await asyncio.gather(*(place(n) for n in range(20)))) == 5
    async with begun(database) as first, begun(database) as second:
        key: dict[str, Any] = {
            "scope": "t",
            "operation": "order",
            "key": "now",
            "fingerprint": None,
        }
        async with entered(database, idempotency.once(first, **key)):
            with pytest.raises(KeyInFlight):
                async with entered(database, idempotency.once(second, **key, wait=False)):
                    raise AssertionError("it was begun")
    events: list[OutboxEvent] = []

    async def deliver(event: OutboxEvent) -> None:
        async with begun(database) as connection:
            async with entered(database, inbox.once(connection, "billing", event.id)) as first:
                assert first
            events.append(event)

    assert await Dispatcher(outbox, deliver, batch=7).drain() == 25
    for aggregate, each in (("order", [1]), ("customer", [1, 2, 3, 4])):
        for key in range(5):
            whose = (aggregate, f"k{key}")
            assert [e.sequence for e in events if (e.aggregate, e.aggregate_id) == whose] == each
    async with begun(database) as connection:
        rows = await ask(database, connection, "SELECT count(*) FROM {orders}")
        assert rows == [(5,)]
        block = inbox.once(connection, "billing", events[0].id)
        async with entered(database, block) as first:
            assert not first


async def single(database: Database) -> None:
    """Orders of a single statement, without a transaction around it."""
    await made_orders(database)
    idempotency, outbox = Idempotency(database), Outbox(database)
    table = database.names.table("orders")
    insert = f"INSERT INTO {table} (customer) VALUES (:who) RETURNING id, customer"  # noqa: S608 - our own

    async def place(number: int) -> Any:
        key = f"k{number % 4}"
        asked: dict[str, Any] = {
            "scope": "t",
            "operation": "order",
            "key": key,
            "fingerprint": None,
            "outbox": outbox,
            "events": [NewEvent("order", FromRow("id"), "made", {"by": key})],
        }
        if database.is_async:
            return await idempotency.asingle(insert, {"who": key}, **asked)
        return await asyncio.to_thread(idempotency.single, insert, {"who": key}, **asked)

    done = await asyncio.gather(*(place(n) for n in range(20)))
    assert sum(one.first for one in done) == 4
    assert {one.value[0]["customer"] for one in done} == {"k0", "k1", "k2", "k3"}
    assert (await outbox.asurvey())["pending"] == 4


async def fifo(database: Database) -> None:
    """Messages that come twice and in any order, to more receivers than there are servers."""
    world = World(database, window=20)
    await world.set_up()
    messages = [FifoMessage("shop", n, b"x", 1) for n in range(1, 9)] * 2
    Random(3).shuffle(messages)
    await asyncio.gather(*(world.take(message) for message in messages))
    assert await world.effects() == list(range(1, 9))


async def work(database: Database) -> None:
    """Jobs that workers claim, renew and end; and calls that are done later."""
    jobs = Jobs(database)

    async def double(job: Any) -> int:
        job.progress(0.5, "half")
        return int(job.payload) * 2

    made = [await jobs.asubmit(None, "double", n % 4, scope="t", key=f"k{n % 4}") for n in range(8)]
    assert len({job.id for job in made}) == 4
    workers = [JobWorker(jobs, {"double": double}, concurrency=4) for _ in range(2)]
    while any(await asyncio.gather(*(worker.run_once() for worker in workers))):
        pass
    assert [(await jobs.aget(job.id, scope="t")).result for job in made[:4]] == [0, 2, 4, 6]

    later, vendor = DeferredCalls(database, "receipts", delay=0), Vendor()
    await asyncio.gather(*(later.astore(n) for n in range(6)))
    while await DeferredCallWorker(later, vendor.send).run_once():
        pass
    assert sorted(order for order, *_ in vendor.done) == list(range(6))


async def made_orders(database: Database) -> None:
    """Make the table of what the user has."""
    async with begun(database) as connection:
        text = "CREATE TABLE {orders} (id bigint GENERATED ALWAYS AS IDENTITY, customer text)"
        await ask(database, connection, text)


@pytest.mark.parametrize("part", [keys, orders, single, fifo, work])
def test_through_a_pooler(pooled: Pooled, part: Any):
    """It works with connections that are another's after each transaction, and leaves no state."""

    async def main() -> None:
        async with pooled() as database, asyncio.timeout(40):
            await part(database)

    asyncio.run(main())


def test_listening_is_beside_the_pooler(pooler: Pooler, postgres: Postgres):
    """A NOTIFY that came through the pooler is heard on a connection of its own beside it."""
    import asyncpg

    async def main() -> None:
        async with pooled_by(by_asyncpg, pooler.url) as database:
            outbox, elsewhere = Outbox(database), Outbox(database)
            came = asyncio.Queue[OutboxEvent]()
            worker = Dispatcher(
                outbox, came.put, poll=1000.0, listen=lambda: asyncpg.connect(postgres.url)
            )
            running = asyncio.create_task(worker.run())
            while worker.snapshot()["rounds"] < 5 or not worker.snapshot()["listening"]:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)  # noqa: TID251 - a real server
            async with database.atransaction() as connection:
                await elsewhere.aadd(connection, "order", "1", "made", 1)
            await elsewhere.aannounce()
            async with asyncio.timeout(10):
                assert (await came.get()).aggregate_id == "1"
            worker.stop()
            await running

    asyncio.run(main())


# Ablations: the pooler is what it is taken for, and the settings are needed


def test_state_of_a_session_is_lost_here(pooler: Pooler):
    """What a client sets and locks stays in a server that somebody else has next."""
    import psycopg

    def connect() -> Any:
        return psycopg.connect(pooler.url, prepare_threshold=None, autocommit=True)

    with connect() as one, connect() as other:
        one.execute("SET work_mem = '12345kB'")
        with one.transaction(), other.transaction():  # each has one of the two servers
            sizes = [c.execute("SHOW work_mem").fetchone()[0] for c in (one, other)]
            assert sizes.count("12345kB") == 1
        with one.transaction(), other.transaction():  # in turn: each has the other's now
            assert [c.execute("SHOW work_mem").fetchone()[0] for c in (other, one)] == sizes
        for _ in range(2):
            with one.transaction(), other.transaction():
                one.execute("RESET work_mem")
                other.execute("RESET work_mem")


def test_a_lock_of_a_session_would_stay(pooler: Pooler, monkeypatch: pytest.MonkeyPatch):
    """With a session's lock instead of a transaction's, the next who migrates is stuck."""
    monkeypatch.setattr(migrations, "_LOCK", "SELECT pg_advisory_lock(:lock)")

    async def main() -> None:
        import psycopg

        connect = psycopg.AsyncConnection.connect
        try:
            with pytest.raises(AssertionError):
                await nothing_left_by_migrating()
        finally:
            async with (
                await connect(pooler.url, prepare_threshold=None) as one,
                await connect(pooler.url, prepare_threshold=None) as other,
            ):
                await one.execute("SELECT pg_advisory_unlock_all()")
                await other.execute("SELECT pg_advisory_unlock_all()")

    async def nothing_left_by_migrating() -> None:
        async with AsyncExitStack() as stack:
            source = await by_psycopg(pooler.url, stack)
            database = Database(source, schema=f"pooled {token_hex(4)}", name="locking")
            stack.callback(database.close)
            await amigrate(database)
            await nothing_is_left(pooler.url)

    asyncio.run(main())


def test_prepared_statements_fail_here(pooler: Pooler, tmp_path: Path):
    """With the settings that drivers have by themselves it does not work: hence the docs."""

    async def main() -> None:
        import psycopg

        connect = psycopg.AsyncConnection.connect
        async with (
            opening_by("asyncpg", pooler, tmp_path)() as database,  # type: ignore[arg-type]
            await connect(pooler.url, prepare_threshold=None) as other,
        ):
            idempotency = Idempotency(database)
            for n in range(20):
                async with other.transaction():  # has one server: what is prepared is in the other
                    await other.execute("SELECT 1")
                    await idempotency.areserve("t", "o", f"{n}.0", None)
                await idempotency.areserve("t", "o", f"{n}.1", None)  # on the one just given back

    with pytest.raises(Exception, match="prepared statement"):
        asyncio.run(main())
    asyncio.run(deallocated(pooler.url))


async def deallocated(url: str) -> None:
    """Let both servers forget what was prepared in them."""
    import psycopg

    connect = psycopg.AsyncConnection.connect
    async with (
        await connect(url, prepare_threshold=None) as one,
        await connect(url, prepare_threshold=None) as other,
    ):
        await one.execute("DEALLOCATE ALL")
        await other.execute("DEALLOCATE ALL")
