"""Many clients on one key, and transactions that lose against others: done again whole, bounded."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from threading import Thread
from typing import Any

import pytest

from seawall.durable import Database, Sqlite, amigrate, migrate
from seawall.durable.database import database as databases
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.models.idempotency import Fresh, Replay
from tests.durable.idempotency.test_idempotency import told
from tests.durable.postgres import Postgres
from tests.support import let_pass

NAMED: dict[str, Any] = {"scope": "t", "operation": "order"}
CLIENTS = 64


class Shop:
    """Orders that are placed once for each key, in each of the three ways."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.idempotency = Idempotency(database)
        self.conflicts = 0
        """How often a transaction was told that it lost."""
        self.begun = 0
        """How often a function or a block was begun as the first."""

    async def set_up(self) -> None:
        """Make the user's own table."""
        await self.database.arun(told("CREATE TABLE {orders} (client integer)"))

    async def placed(self) -> int:
        """Return how many orders there are."""
        rows = await self.database.arun(told("SELECT count(*) FROM {orders}"))
        return int(rows[0][0])

    async def _insert(self, client: int) -> None:
        text = "INSERT INTO {orders} VALUES (CAST(:client AS integer))"
        await self.database.arun(told(text, client=client))

    async def reserve(self, client: int, key: str = "k") -> int:
        """Place it step by step; return whose order it is."""
        found = await self.idempotency.areserve(*NAMED.values(), key, "p", wait=30.0)
        if isinstance(found, Fresh):
            self.begun += 1
            await self._insert(client)
            assert await self.idempotency.acomplete(found.claim, client)
            return client
        assert isinstance(found, Replay)
        return int(found.value)

    async def decorator(self, client: int, key: str = "k") -> int:
        """Place it by a function."""

        @self.idempotency.idempotent(
            **{**NAMED, "scope": lambda: "t"}, key=lambda: key, fingerprint=None, wait=30.0
        )
        async def place() -> int:
            self.begun += 1
            await self._insert(client)
            return client

        return int(await place())

    async def once(self, client: int, key: str = "k") -> int:
        """Place it in a transaction of the user's own, which is done again as a whole."""

        @self.database.guard
        async def place() -> int:
            async with (
                self.database.atransaction() as conn,
                self.idempotency.once(conn, **NAMED, key=key, fingerprint="p") as once,
            ):
                if once.first:
                    self.begun += 1
                    text = "INSERT INTO {orders} VALUES (CAST(:client AS integer))"
                    await self.database.connection(conn).arun(told(text, client=client)())
                    once.answer(client)
            return int(once.value)

        return int(await place())


Way = Callable[..., Awaitable[int]]
WAYS: list[Any] = [Shop.reserve, Shop.decorator, Shop.once]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@asynccontextmanager
async def shop(
    postgres: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    isolation: str = "read committed",
    connections: int = 2,
) -> AsyncIterator[Shop]:
    """Open a shop on PostgreSQL; all of its transactions have that isolation."""
    import asyncpg

    settings = {"default_transaction_isolation": isolation}
    async with asyncpg.create_pool(
        postgres.url, min_size=connections, max_size=connections, server_settings=settings
    ) as pool:
        name = f"shop {token_hex(4)}"
        database = Database(pool, schema=name, name=name, attempts=5)
        await amigrate(database)
        opened, plain = Shop(database), databases.is_conflict

        def counted(error: BaseException) -> bool:
            found = plain(error)
            opened.conflicts += found
            return found

        monkeypatch.setattr(databases, "is_conflict", counted)
        await opened.set_up()
        try:
            yield opened
        finally:
            database.close()


@ways
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_64_clients_on_one_key_are_one_execution(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, way: Way, isolation: str
):
    """Whatever the isolation: one order, and all have its answer; who lost tries again."""

    async def main() -> None:
        async with shop(postgres, monkeypatch, isolation, connections=16) as s:
            answers = await asyncio.gather(*(way(s, client) for client in range(CLIENTS)))
            assert len(set(answers)) == 1
            assert await s.placed() == 1
            assert s.begun == 1
            if isolation == "read committed":
                assert s.conflicts == 0
            else:
                assert s.conflicts < CLIENTS * 5

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_who_waited_in_vain_begins_anew(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, isolation: str
):
    """A real serialization failure: what the first committed is younger than the second's view."""

    async def main() -> None:
        async with shop(postgres, monkeypatch, isolation, connections=3) as s:
            async with (
                s.database.atransaction() as conn,
                s.idempotency.once(conn, **NAMED, key="k", fingerprint="p") as once,
            ):
                second = asyncio.create_task(s.once(2))
                waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
                while not await s.database.arun(told(waiting)):
                    await let_pass(0.005)
                once.answer(1)
            assert await second == 1
            assert s.conflicts == 1

    asyncio.run(main())


@pytest.mark.parametrize("way", ["reserve", "decorator", "once"])
def test_64_threads_on_one_key_of_a_file_are_one_execution(tmp_path: Path, way: str):
    """On SQLite, blocking: they wait for each other's writing, and one places the order."""
    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name=f"threads {way}")
    migrate(database)
    database.run(told("CREATE TABLE {orders} (client integer)"))
    idempotency = Idempotency(database)
    insert = "INSERT INTO seawall_orders VALUES (?)"
    begun, answers = [], []

    def write(client: int) -> None:
        begun.append(client)
        source.run(lambda raw: raw.execute(insert, [client]))

    def reserve(client: int) -> int:
        found = idempotency.reserve(*NAMED.values(), "k", "p", wait=30.0)
        if not isinstance(found, Fresh):
            assert isinstance(found, Replay)
            return int(found.value)
        write(client)
        idempotency.complete(found.claim, client)
        return client

    @idempotency.idempotent(
        **{**NAMED, "scope": lambda _: "t"}, key=lambda _: "k", fingerprint=None, wait=30.0
    )
    def decorator(client: int) -> int:
        write(client)
        return client

    @database.guard
    def once(client: int) -> int:
        with (
            database.transaction() as conn,
            idempotency.once(conn, **NAMED, key="k", fingerprint="p") as block,
        ):
            if block.first:
                begun.append(client)
                conn.execute(insert, [client])
                block.answer(client)
        return int(block.value)

    place = {"reserve": reserve, "decorator": decorator, "once": once}[way]
    threads = [Thread(target=lambda n=n: answers.append(place(n))) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.run(told("SELECT client FROM {orders}")) == [(begun[0],)]
    assert answers == [begun[0]] * CLIENTS
    assert len(begun) == 1
    database.close()
    source.close()


LOSING = """
CREATE FUNCTION {{schema}}.losing() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('{{schema}}.tries') <= {times} THEN
        RAISE EXCEPTION 'lost' USING ERRCODE = '{state}';
    END IF;
    RETURN NEW;
END $$
"""


async def lose(s: Shop, when: str, state: str, times: int) -> None:
    """Let so many statements on the records lose; a sequence counts also what is rolled back."""
    await s.database.arun(told("CREATE SEQUENCE {schema}.tries"))
    await s.database.arun(told(LOSING.format(times=times, state=state)))
    trigger = f"CREATE TRIGGER losing BEFORE {when} ON {{idempotency}} FOR EACH ROW"
    await s.database.arun(told(trigger + " EXECUTE FUNCTION {schema}.losing()"))


async def tries(s: Shop) -> int:
    """Return how many statements there were."""
    rows = await s.database.arun(told("SELECT last_value FROM {schema}.tries"))
    return int(rows[0][0])


@ways
@pytest.mark.parametrize(("when", "state"), [("INSERT", "40001"), ("UPDATE", "40P01")])
def test_who_loses_does_the_whole_transaction_again(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, way: Way, when: str, state: str
):
    """Where the key is taken, and where its answer is stored: three times lost, one order."""

    async def main() -> None:
        async with shop(postgres, monkeypatch) as s:
            await lose(s, when, state, times=3)
            assert await way(s, 7) == 7
            assert await way(s, 8) == 7
            assert await s.placed() == 1
            assert s.conflicts == 3

    asyncio.run(main())


@ways
def test_who_always_loses_gives_up(postgres: Postgres, monkeypatch: pytest.MonkeyPatch, way: Way):
    """After as many attempts as were allowed the error is raised, and nothing was done."""

    async def main() -> None:
        async with shop(postgres, monkeypatch) as s:
            await lose(s, "INSERT", "40001", times=10**9)
            with pytest.raises(Exception, match="lost"):
                await way(s, 7)
            assert await tries(s) == 5
            assert (await s.placed(), s.begun) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("safe", [True, False], ids=["as it is", "without doing it again"])
def test_two_that_wait_for_each_other_both_end(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """A real deadlock: two keys in one transaction, in opposite order; one has to begin anew."""

    async def main() -> None:
        async with shop(postgres, monkeypatch) as s:
            arrived, met = [], asyncio.Event()

            async def both(*keys: str) -> list[bool]:
                firsts = []
                async with s.database.atransaction() as conn:
                    for key in keys:
                        block = s.idempotency.once(conn, **NAMED, key=key, fingerprint=None)
                        async with block as once:
                            firsts.append(once.first)
                            if once.first:
                                text = "INSERT INTO {orders} VALUES (1)"
                                await s.database.connection(conn).arun(told(text)())
                        arrived.append(key)
                        if len(arrived) == 2:
                            met.set()
                        await met.wait()
                return firsts

            done = s.database.guard(both) if safe else both
            ends = await asyncio.gather(done("a", "b"), done("b", "a"), return_exceptions=True)
            lost = [end for end in ends if isinstance(end, BaseException)]
            if safe:
                assert sorted(ends) == [[False, False], [True, True]]
                assert s.conflicts == 1
            else:
                assert [getattr(error, "sqlstate", None) for error in lost] == ["40P01"]
            assert await s.placed() == 2

    asyncio.run(main())


def test_a_transaction_of_a_file_that_lost_is_done_again(tmp_path: Path):
    """SQLite: who has read before another one wrote cannot write any more, and begins anew."""
    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name="snapshot lost")
    migrate(database)
    database.run(told("CREATE TABLE {orders} (client integer)"))
    idempotency, tried = Idempotency(database), []

    @database.guard
    def place() -> bool:
        conn = source.connect()
        try:
            conn.execute("BEGIN")
            conn.execute("SELECT * FROM seawall_orders").fetchall()
            tried.append(1)
            if len(tried) < 3:
                assert isinstance(idempotency.reserve("t", "other", f"k{len(tried)}", None), Fresh)
            with idempotency.once(conn, **NAMED, key="k", fingerprint=None) as once:
                conn.execute("INSERT INTO seawall_orders VALUES (1)")
            conn.execute("COMMIT")
            return once.first
        finally:
            conn.close()

    assert place()
    assert len(tried) == 3
    assert database.run(told("SELECT count(*) FROM {orders}")) == [(1,)]
    database.close()
    source.close()


def test_a_file_that_stays_locked_is_not_waited_for_for_ever(tmp_path: Path):
    """Each way in tells so within the file's own limit, and nothing was done."""
    source = Sqlite(tmp_path / "test.db", busy_timeout=0.01)
    database = Database(source, name="locked", attempts=2)
    migrate(database)
    idempotency, done = Idempotency(database), []
    other = source.connect()
    other.execute("BEGIN IMMEDIATE")

    @idempotency.idempotent(key=lambda: "k", scope=lambda: "t")
    def function() -> None:
        done.append(1)

    @database.guard
    def once() -> None:
        with (
            database.transaction() as conn,
            idempotency.once(conn, **NAMED, key="k", fingerprint=None),
        ):
            done.append(1)

    for way in (function, once, lambda: idempotency.reserve("t", "o", "k", None)):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            way()
    assert not done
    other.execute("ROLLBACK")
    other.close()
    function()
    assert done
    database.close()
    source.close()
