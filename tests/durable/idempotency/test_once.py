"""Key and rows committed together, in the user's own transaction, with every library."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database.connections import TextQuery
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.idempotency.once import Once
from seawall.durable.outbox.events import NewEvent
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import KeyInFlight, KeyReused
from seawall.models.idempotency import Answer, Fresh
from tests.durable.conftest import Opening, opening_by
from tests.durable.postgres import Postgres

KINDS = ["asyncpg", "psycopg", "AsyncSession", "AsyncConnection", "aiosqlite"]
SYNC_KINDS = ["psycopg", "Session", "sqlite3", "plain sqlite3"]


def put(text: str = "INSERT INTO {orders} (name) VALUES ('x')") -> Any:
    """Do something of the user's own."""
    rows = yield TextQuery(text, {})
    return rows


def orders() -> Any:
    """Count what was done."""
    rows = yield TextQuery("SELECT count(*) FROM {orders}", {})
    return rows[0][0]


class Bench:
    """One kind of connection, with transactions as a user writes them."""

    def __init__(self, kind: str, database: Database, folder: Path) -> None:
        self.kind = kind
        self.database = database
        self.idempotency = Idempotency(database)
        self._folder = folder

    async def begin(self) -> None:
        """Make the user's table."""
        made = "CREATE TABLE {orders} (name text NOT NULL)"
        await self.database.arun(lambda: put(made))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Give a connection with a transaction begun; commit at the end."""
        if self.kind == "AsyncSession":
            from sqlalchemy.ext.asyncio import AsyncSession

            async with AsyncSession(self.database.source) as session, session.begin():
                yield session
        elif self.kind == "aiosqlite":
            import aiosqlite

            connection = await aiosqlite.connect(self._folder / "test.db", timeout=30)
            try:
                await connection.execute("BEGIN IMMEDIATE")
                yield connection
                await connection.commit()
            finally:
                await connection.rollback()
                await connection.close()
        else:
            async with self.database.atransaction() as connection:
                yield connection

    def once(
        self, conn: Any, key: str = "k", payload: str | None = "p", *, wait: bool = True
    ) -> Once:
        """Do it once."""
        return self.idempotency.once(
            conn, scope="tenant", operation="order", key=key, fingerprint=payload, wait=wait
        )

    async def order(self, answer: Any = None, key: str = "k", payload: str | None = "p") -> Once:
        """Place an order, as the docs say it is done."""
        async with self.transaction() as conn, self.once(conn, key, payload) as once:
            if once.first:
                await self.database.connection(conn).arun(put())
                once.answer(answer)
        return once

    async def placed(self) -> int:
        """Count the orders."""
        count: int = await self.database.arun(orders)
        return count


Benches = Any


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Benches:
    """Return what gives a bench for each library in turn."""
    driver = {"AsyncSession": "sqlalchemy", "AsyncConnection": "sqlalchemy", "aiosqlite": "sqlite"}
    opening = opening_by(driver.get(request.param, request.param), postgres, tmp_path)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Bench]:
        async with opening() as database:
            made = Bench(request.param, database, tmp_path)
            await made.begin()
            yield made

    return opened


def test_a_repeat_has_the_answer_of_the_first(bench: Benches):
    """Order and key are committed together, and the second does nothing."""

    async def main() -> None:
        async with bench() as b:
            for key, answer in (("1", {"id": 7}), ("2", b"\xff\x00"), ("3", None)):
                first = await b.order(answer, key)
                second = await b.order("another", key)
                assert (first.first, first.value) == (True, answer)
                assert (second.first, second.value) == (False, answer)
            http = Answer(201, [(b"a", b"b")], b"body")
            await b.order(http, "4")
            assert (await b.order(None, "4")).value == http
            assert await b.placed() == 4
            with pytest.raises(KeyReused):
                await b.order(None, "4", "another payload")

    asyncio.run(main())


async def failing(b: Bench) -> None:
    """Place an order, and fail then."""
    async with b.transaction() as conn, b.once(conn) as once:
        await b.database.connection(conn).arun(put())
        once.answer(1 / 0)


def test_what_is_rolled_back_was_never_there(bench: Benches):
    """A block that raises leaves neither order nor key: the next one is the first."""

    async def main() -> None:
        async with bench() as b:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    await failing(b)
            assert await b.placed() == 0
            assert (await b.order(1)).first

    asyncio.run(main())


def test_a_block_that_raised_leaves_no_key_even_if_committed(bench: Benches):
    """Who catches the error and commits has rows, but no key that says it was done."""

    async def main() -> None:
        async with bench() as b:
            async with b.transaction() as conn:
                with suppress(ZeroDivisionError):
                    async with b.once(conn):
                        raise ZeroDivisionError
            assert (await b.order(1)).first

    asyncio.run(main())


def test_a_broken_transaction_keeps_its_own_error(bench: Benches):
    """What the database says of the user's statement is what the user sees."""

    async def main() -> None:
        async with bench() as b:
            with pytest.raises(Exception, match="no_such_table"):
                async with b.transaction() as conn, b.once(conn):
                    await b.database.connection(conn).arun(put("DELETE FROM no_such_table"))
            assert (await b.order(1)).first

    asyncio.run(main())


def test_many_transactions_with_one_key_place_one_order(bench: Benches):
    """64 at once: one order, and all have its answer."""

    async def main() -> None:
        async with bench() as b:
            room = asyncio.Semaphore(15)  # as a pool has

            async def one(number: int) -> Any:
                async with room:
                    return (await b.order({"by": number})).value["by"]

            answers = await asyncio.gather(*(one(number) for number in range(64)))
            assert len(set(answers)) == 1
            assert await b.placed() == 1
            assert b.idempotency.snapshot()["replays"] == 63

    asyncio.run(main())


def test_the_second_waits_for_the_first_and_is_first_if_that_fails(bench: Benches):
    """If the first transaction is rolled back, the second, which waits, does the work."""

    async def main() -> None:
        async with bench() as b:
            inside, leave = asyncio.Event(), asyncio.Event()

            async def failing() -> None:
                async with b.transaction() as conn, b.once(conn):
                    inside.set()
                    await leave.wait()
                    raise ZeroDivisionError

            first = asyncio.create_task(failing())
            await inside.wait()
            second = asyncio.create_task(b.order({"by": 2}))
            done, _ = await asyncio.wait([second], timeout=0.05)
            assert not done
            leave.set()
            with pytest.raises(ZeroDivisionError):
                await first
            assert (await second).first
            assert await b.placed() == 1

    asyncio.run(main())


def test_a_key_that_is_reserved_otherwise_is_in_flight(bench: Benches):
    """The same record is never done by two ways at once."""

    async def main() -> None:
        async with bench() as b:
            found = await b.idempotency.areserve("tenant", "order", "k", "p")
            assert isinstance(found, Fresh)
            with pytest.raises(KeyInFlight) as caught:
                await b.order(1)
            assert 0 < caught.value.retry_after <= 30
            await b.idempotency.acomplete(found.claim, {"by": "the other way"})
            assert (await b.order(1)).value == {"by": "the other way"}

    asyncio.run(main())


def test_events_are_committed_with_the_answer(bench: Benches):
    """Once, with key and order; and not by a repeat, nor by who was rolled back."""

    async def main() -> None:
        async with bench() as b:
            outbox = Outbox(b.database, "shop")
            events = [
                NewEvent("order", "7", "placed", {"n": 1}),
                NewEvent("order", "7", "paid", {}),
            ]
            for fails in (True, False, False):
                with suppress(ZeroDivisionError):
                    async with b.transaction() as conn, b.once(conn) as once:
                        if once.first:
                            once.answer({"id": 7}, outbox=outbox, events=events)
                        if fails:
                            raise ZeroDivisionError
                if not fails:
                    assert once.value == {"id": 7}
            told = "SELECT type FROM {outbox} ORDER BY sequence"
            assert await b.database.arun(lambda: put(told)) == [("placed",), ("paid",)]
            async with b.transaction() as conn, b.once(conn, "other") as once:
                with pytest.raises(TypeError, match="outbox="):
                    once.answer(1, events=events)

    asyncio.run(main())


def test_a_block_whose_end_fails_leaves_no_key(bench: Benches):
    """An event that cannot be added is an error as any other: who commits has no key."""

    async def main() -> None:
        async with bench() as b:
            outbox = Outbox(b.database, "shop", max_payload=10)
            async with b.transaction() as conn:
                event = NewEvent("order", "7", "placed", {"long": "x" * 20})
                with suppress(ValueError):
                    async with b.once(conn) as once:
                        once.answer(1, outbox=outbox, events=[event])
                    pytest.fail("it was added")
            seen = b.idempotency.snapshot()
            assert (seen["abandoned"], seen["completed"]) == (1, 0)
            assert (await b.order(1)).first

    asyncio.run(main())


def test_what_was_committed_inside_the_block_keeps_its_key(bench: Benches):
    """The order is there, so its key has to be; whatever is raised after that."""

    async def main() -> None:
        async with bench() as b:
            for failing in (False, True):
                key = f"k{failing}"
                with suppress(ZeroDivisionError, RuntimeError):
                    async with b.transaction() as conn, b.once(conn, key) as once:
                        assert once.first
                        await b.database.connection(conn).arun(put())
                        await _commit(b, conn)
                        if failing:
                            raise ZeroDivisionError
                assert not (await b.order(1, key)).first
            assert await b.placed() == 2

    asyncio.run(main())


async def _commit(b: Bench, conn: Any) -> None:
    if b.kind in {"asyncpg", "psycopg"}:
        await conn.execute("COMMIT")
    else:
        await conn.commit()


def test_a_recorded_failure_is_told_as_one(bench: Benches):
    """A record that says that it failed is no success because it is looked at by `once`."""

    async def main() -> None:
        async with bench() as b:
            found = await b.idempotency.areserve("tenant", "order", "k", "p")
            await b.idempotency.acomplete(found.claim, {"error": "no"}, failed=True)
            once = await b.order(1)
            assert (once.first, once.failed, once.value) == (False, True, {"error": "no"})

    asyncio.run(main())


def test_misuse_is_told(bench: Benches):
    """A repeat has its answer; a block is entered once, by the right kind of `with`."""

    async def main() -> None:
        async with bench() as b:
            await b.order(1)
            async with b.transaction() as conn, b.once(conn) as once:
                assert repr(once) == "<Once of 'order': a repeat>"
                with pytest.raises(RuntimeError, match="repeat"):
                    once.answer(2)
                with pytest.raises(RuntimeError, match="entered once"):
                    await once.__aenter__()
                with pytest.raises(TypeError, match="async with"):
                    b.once(conn).__enter__()
            with pytest.raises(TypeError, match="cannot be stored"):
                await b.order(object(), "other")
            outbox = Outbox(b.database, "shop")
            elsewhere = Database(b.database.source, prefix="other_", name=f"other {b.kind}")
            async with b.transaction() as conn, b.once(conn, "events") as once:
                with pytest.raises(ValueError, match="make both with one Database"):
                    once.answer(1, outbox=Outbox(elsewhere, "shop"))
                once.answer(1, outbox=outbox, events=[NewEvent("order", "7", "placed", {})])
                with pytest.raises(RuntimeError, match="would be lost"):
                    once.answer(2)
            with pytest.raises(RuntimeError, match="would be lost"):
                once.answer(3)

    asyncio.run(main())


def test_without_a_transaction_it_does_not_begin(postgres: Postgres, tmp_path: Path):
    """A key that is committed before its order would lose that order in a crash."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            idempotency = Idempotency(database)
            named = {"scope": "t", "operation": "o", "key": "k", "fingerprint": None}
            async with database.source.acquire() as conn:
                with pytest.raises(RuntimeError, match="no transaction"):
                    async with idempotency.once(conn, **named):
                        pass
                transaction = conn.transaction()
                await transaction.start()
                once = idempotency.once(conn, **named)
                await once.__aenter__()
                await transaction.rollback()
                once.answer(1)
                with pytest.raises(RuntimeError, match="ended inside the block"):
                    await once.__aexit__(None, None, None)

    asyncio.run(main())
    with sqlite3.connect(tmp_path / "own.db", isolation_level=None) as raw:
        source = Sqlite(tmp_path / "own.db")
        database = Database(source, name="own")
        migrate(database)
        once = Idempotency(database).once(raw, scope="t", operation="o", key="k", fingerprint=None)
        with pytest.raises(RuntimeError, match="no transaction"), once:
            pass
        source.close()
        database.close()
    raw.close()


# Libraries that block


@contextmanager
def blocking(kind: str, postgres: Postgres, folder: Path) -> Iterator[tuple[Database, Any]]:
    """Give a database and what begins a transaction."""
    if kind.endswith("sqlite3"):
        source = Sqlite(folder / "test.db")
        database = Database(source, name=f"blocking {kind}")

        @contextmanager
        def plain() -> Iterator[Any]:
            raw = sqlite3.connect(source.path)  # it begins a transaction by itself
            try:
                with raw:
                    yield raw
            finally:
                raw.close()

        try:
            yield database, plain if kind == "plain sqlite3" else database.transaction
        finally:
            source.close()
            database.close()
        return
    schema = f"blocking {kind} {folder.name}"[:38]
    if kind == "psycopg":
        from psycopg_pool import ConnectionPool

        with ConnectionPool(postgres.url, min_size=1, max_size=4, open=True) as pool:
            database = Database(pool, schema=schema, name=schema)
            yield database, database.transaction
            database.close()
        return
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(postgres.url.replace("://", "+psycopg://"))
    database = Database(engine, schema=schema, name=schema)

    @contextmanager
    def begin() -> Iterator[Any]:
        with Session(engine) as session, session.begin():
            yield session

    try:
        yield database, begin
    finally:
        database.close()
        engine.dispose()


@pytest.mark.parametrize("kind", SYNC_KINDS)
def test_blocking_libraries_do_the_same(kind: str, postgres: Postgres, tmp_path: Path):
    """First, repeat, rollback and committed failure, without an event loop."""
    with blocking(kind, postgres, tmp_path) as (database, begin):
        migrate(database)
        database.run(lambda: put("CREATE TABLE {orders} (name text NOT NULL)"))
        idempotency = Idempotency(database)
        named = {"scope": "t", "operation": "o", "fingerprint": "p"}

        def order(key: str) -> Once:
            with begin() as conn, idempotency.once(conn, key=key, **named) as once:
                if once.first:
                    database.connection(conn).run(put())
                    once.answer({"id": 1})
            return once

        assert [order("k").first, order("k").first] == [True, False]
        assert order("k").value == {"id": 1}
        with (
            pytest.raises(ZeroDivisionError),
            begin() as conn,
            idempotency.once(conn, key="x", **named),
        ):
            raise ZeroDivisionError
        with (
            begin() as conn,
            suppress(ZeroDivisionError),
            idempotency.once(conn, key="x", **named),
        ):
            raise ZeroDivisionError
        with begin() as conn, pytest.raises(TypeError, match="write `with`"):
            asyncio.run(_aenter(idempotency.once(conn, key="x", **named)))
        assert order("x").first
        assert database.run(orders) == 2


async def _aenter(once: Once) -> None:
    await once.__aenter__()


def test_without_the_removal_a_caught_failure_keeps_its_key(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
):
    """Ablation: then who catches the error and commits can never do it again."""
    monkeypatch.delattr(Once, "_undo")

    async def main() -> None:
        async with opening() as database:
            idempotency = Idempotency(database)
            named = {"scope": "t", "operation": "o", "key": "k", "fingerprint": None}

            if database.dialect == "sqlite":
                with (
                    database.transaction() as conn,
                    suppress(ZeroDivisionError),
                    idempotency.once(conn, **named),
                ):
                    raise ZeroDivisionError
                with database.transaction() as conn, idempotency.once(conn, **named) as once:
                    assert not once.first
                return
            async with database.atransaction() as conn:
                with suppress(ZeroDivisionError):
                    async with idempotency.once(conn, **named):
                        raise ZeroDivisionError
            async with database.atransaction() as conn, idempotency.once(conn, **named) as once:
                assert not once.first

    asyncio.run(main())


async def losing_its_key(b: Bench, *, answers: bool) -> None:
    """Place an order in a block whose beginning is rolled back."""
    async with b.transaction() as conn:
        own = b.database.connection(conn)
        await own.arun(put("SAVEPOINT before"))
        async with b.once(conn) as once:
            await own.arun(put("ROLLBACK TO SAVEPOINT before"))
            await own.arun(put())
            if answers:
                once.answer(1)


@pytest.mark.parametrize("answers", [False, True], ids=["no answer", "an answer"])
def test_an_effect_without_its_key_is_not_committed(bench: Benches, *, answers: bool):
    """Rolling back an earlier savepoint inside the block removes the key, which raises."""

    async def main() -> None:
        async with bench() as b:
            with pytest.raises(RuntimeError, match="is gone: it was rolled back"):
                await losing_its_key(b, answers=answers)
            assert await b.placed() == 0
            assert b.idempotency.snapshot()["abandoned"] == 1

    asyncio.run(main())


def test_without_an_answer_it_is_done_once_all_the_same(bench: Benches):
    """The key is looked for at the end of the block, found, and committed."""

    async def main() -> None:
        async with bench() as b:
            for first in (True, False):
                async with b.transaction() as conn, b.once(conn) as once:
                    assert (once.first, once.value) == (first, None)
            assert b.idempotency.snapshot()["completed"] == 1

    asyncio.run(main())


async def nested(b: Bench, conn: Any) -> None:
    """Ask for the same key once more."""
    async with b.once(conn):
        pytest.fail("it was entered")


def test_a_key_inside_its_own_block_is_told(bench: Benches):
    """There is no answer yet to be given; after the block there is, in the same transaction too."""

    async def main() -> None:
        async with bench() as b:
            async with b.transaction() as conn:
                async with b.once(conn) as outer:
                    with pytest.raises(RuntimeError, match="inside a block with the same key"):
                        await nested(b, conn)
                    async with b.once(conn, "another") as other:
                        assert other.first
                    outer.answer(7)
                async with b.once(conn) as later:
                    assert (later.first, later.value) == (False, 7)
            assert (await b.order(1)).value == 7

    asyncio.run(main())


# Without waiting


@pytest.fixture(params=[kind for kind in KINDS if kind != "aiosqlite"])
def server_bench(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Benches:
    """Return what gives a bench for each library of PostgreSQL in turn."""
    driver = {"AsyncSession": "sqlalchemy", "AsyncConnection": "sqlalchemy"}
    opening = opening_by(driver.get(request.param, request.param), postgres, tmp_path)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Bench]:
        async with opening() as database:
            made = Bench(request.param, database, tmp_path)
            await made.begin()
            yield made

    return opened


async def asked_now(b: Bench, key: str = "k") -> str:
    """Ask without waiting, in a transaction of its own; return what came of it."""
    async with b.transaction() as conn:
        try:
            async with b.once(conn, key, wait=False) as once:
                return "first" if once.first else f"repeat: {once.value}"
        except KeyInFlight as error:
            return "in flight" if error.retry_after == 1.0 else repr(error)


def test_who_does_not_wait_holds_no_connection_while_another_is_at_work(server_bench: Benches):
    """However many come, each has its answer while the first is still at it."""

    async def main() -> None:
        async with server_bench() as b:
            async with b.transaction() as conn, b.once(conn) as once:
                assert once.first
                said = await asyncio.gather(*(asked_now(b) for _ in range(40)))
                assert said == ["in flight"] * 40
                assert await asked_now(b, "another") == "first"
                once.answer("done")
            assert await asked_now(b) == "repeat: done"

    asyncio.run(main())


def test_who_does_not_wait_can_go_on_with_its_transaction(server_bench: Benches):
    """Nothing has failed in the database: what else it does is committed."""

    async def main() -> None:
        async with server_bench() as b:
            async with b.transaction() as first, b.once(first), b.transaction() as second:
                with pytest.raises(KeyInFlight):
                    async with b.once(second, wait=False):
                        raise AssertionError("it was begun")
                await b.database.connection(second).arun(put())
            assert await b.placed() == 1

    asyncio.run(main())


def test_a_repeat_is_in_nobodys_way(server_bench: Benches):
    """Its transaction may be long: who does not wait has the answer all the same."""

    async def main() -> None:
        async with server_bench() as b:
            await b.order("done")
            async with b.transaction() as conn, b.once(conn) as once:
                assert not once.first
                assert await asked_now(b) == "repeat: done"

    asyncio.run(main())


@pytest.mark.parametrize("wait", [True, False])
def test_who_does_not_wait_sees_whoever_is_first(server_bench: Benches, *, wait: bool):
    """One that has waited for another that rolled back, and one whose key was used long ago."""

    async def main() -> None:
        async with server_bench() as b:
            first = await b.order("old")
            assert first.first
            await b.database.arun(lambda: put("UPDATE {idempotency} SET expires_at = 0"))
            async with b.transaction() as conn, b.once(conn, wait=wait) as once:
                assert once.first
                assert await asked_now(b) == "in flight"
                once.answer("new")
            assert await asked_now(b) == "repeat: new"

            begun, leave = asyncio.Event(), asyncio.Event()

            async def waiting() -> None:
                async with b.transaction() as conn, b.once(conn, "other") as once:
                    assert once.first
                    begun.set()
                    await leave.wait()

            with suppress(ZeroDivisionError):
                async with b.transaction() as conn, b.once(conn, "other"):
                    second = asyncio.create_task(waiting())
                    await lock_waited_for(b.database)
                    raise ZeroDivisionError
            await begun.wait()
            assert await asked_now(b, "other") == "in flight"
            leave.set()
            await second

    asyncio.run(main())


async def lock_waited_for(database: Database) -> None:
    """Wait until a transaction waits for another."""
    text = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    while not (await database.arun(lambda: put(text)))[0][0]:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)  # noqa: TID251 - a real server


def test_on_sqlite_nobody_waits_for_a_key_alone(tmp_path: Path, postgres: Postgres):
    """There is one writer at a time; without `wait` the block is the same."""

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            b = Bench("aiosqlite", database, tmp_path)
            await b.begin()
            assert await asked_now(b) == "first"
            assert await asked_now(b) == "repeat: None"

    asyncio.run(main())
