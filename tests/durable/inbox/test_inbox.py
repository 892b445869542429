"""Each message is handled once, in the transaction of its effect."""

from __future__ import annotations

import asyncio
import sqlite3
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database.connections import TextQuery
from seawall.durable.inbox import Inbox, _Once
from tests.durable.conftest import Opening, opening_by
from tests.durable.fifo.support import begun
from tests.durable.postgres import Postgres
from tests.support import falsified


class Effects:
    """Counts what was done, in a table: in the same transaction as it is noted."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def set_up(self) -> None:
        def steps() -> Any:
            yield TextQuery("CREATE TABLE IF NOT EXISTS {effects} (message text)", {})

        await self.database.arun(steps)

    async def add(self, connection: Any, message: str) -> None:
        def steps() -> Any:
            yield TextQuery(
                "INSERT INTO {effects} (message) VALUES (:message)", {"message": message}
            )

        own = self.database.connection(connection)
        await own.arun(steps()) if own.kind.is_async else own.run(steps())

    async def all(self) -> list[str]:
        def steps() -> Any:
            rows = yield TextQuery("SELECT message FROM {effects} ORDER BY message", {})
            return [message for (message,) in rows]

        return await self.database.arun(steps)


async def deliver(inbox: Inbox, effects: Effects, message: str, *, fail: bool = False) -> None:
    """Deliver a message once; with `fail`, the handler raises after its effect."""
    async with begun(inbox.database) as connection:
        block = inbox.once(connection, "billing", message)
        if inbox.database.is_async:
            async with block as first:
                if first:
                    await effects.add(connection, message)
                if fail:
                    raise ValueError(message)
        else:
            with block as first:
                if first:
                    await effects.add(connection, message)
                if fail:
                    raise ValueError(message)


def test_a_message_is_handled_once(opening: Opening):
    """Repeats are dropped and counted; another message, and another consumer, are not."""

    async def main() -> None:
        async with opening() as database:
            inbox, effects = Inbox(database), Effects(database)
            await effects.set_up()
            for message in ("a", "a", "b", "a\0\ud800", "a\0\ud800"):
                await deliver(inbox, effects, message.replace("\0", "").replace("\ud800", "é"))
            assert await effects.all() == ["a", "aé", "b"]
            assert inbox.snapshot()["consumers"] == {
                "billing": {"handled": 3, "duplicates": 2, "failed": 0}
            }
            assert await inbox.aseen("billing", "a")
            assert not await inbox.aseen("shipping", "a")
            assert not await inbox.aseen("billing", "\0\ud800")

    asyncio.run(main())


def test_a_failed_message_is_handled_when_it_comes_again(opening: Opening):
    """A rolled back transaction leaves no note."""

    async def main() -> None:
        async with opening() as database:
            inbox, effects = Inbox(database), Effects(database)
            await effects.set_up()
            with pytest.raises(ValueError, match="a"):
                await deliver(inbox, effects, "a", fail=True)
            assert not await inbox.aseen("billing", "a")
            await deliver(inbox, effects, "a")
            assert await effects.all() == ["a"]
            assert inbox.snapshot()["failed"] == 1

    asyncio.run(main())


async def caught_and_committed(database: Database) -> bool:
    """Fail in a block, catch it, commit; tell whether the message counts as handled."""
    inbox = Inbox(database)
    async with begun(database) as connection:
        try:
            if database.is_async:
                async with inbox.once(connection, "billing", "a") as first:
                    assert not first
            with inbox.once(connection, "billing", "a") as first:
                assert not first
        except AssertionError:
            pass
    return await inbox.aseen("billing", "a")


@pytest.mark.parametrize("safe", [True, False], ids=["as it is", "without the undoing"])
def test_a_failure_that_is_caught_and_committed_is_no_handling(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """Left by an error, a block takes its note back; without that, the message would be lost."""
    if not safe:
        monkeypatch.delattr(_Once, "_undo")

    async def main() -> None:
        async with opening() as database:
            assert await caught_and_committed(database) is not safe

    asyncio.run(main())


def test_of_many_deliveries_at_once_one_is_handled(opening: Opening):
    """However many come together, and some of them fail, there is one effect."""

    async def main() -> None:
        async with opening() as database:
            inbox, effects = Inbox(database), Effects(database)
            await effects.set_up()

            async def one(number: int) -> None:
                try:
                    await deliver(inbox, effects, "a", fail=number % 3 == 0)
                except ValueError:
                    pass

            await asyncio.gather(*(one(number) for number in range(16)))
            assert await effects.all() == ["a"]
            counts = inbox.snapshot()
            assert (counts["handled"], sum(counts["consumers"]["billing"].values())) == (1, 16)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [True, False])
def test_the_second_waits_for_the_first(postgres: Postgres, tmp_path: Path, *, fails: bool):
    """While the first is not over, the second is undecided; if the first fails, it is the one."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            inbox = Inbox(database)
            inside, go = asyncio.Event(), asyncio.Event()

            async def first() -> None:
                async with (
                    begun(database) as connection,
                    inbox.once(connection, "billing", "a") as mine,
                ):
                    assert mine
                    inside.set()
                    await go.wait()
                    assert not fails

            async def second() -> bool:
                async with (
                    begun(database) as connection,
                    inbox.once(connection, "billing", "a") as mine,
                ):
                    return mine

            one = asyncio.create_task(first())
            await inside.wait()
            other = asyncio.create_task(second())
            done, _ = await asyncio.wait([other], timeout=0.1)
            assert not done
            go.set()
            assert await other is fails
            await asyncio.gather(one, return_exceptions=True)

    asyncio.run(main())


def test_what_is_old_is_forgotten_in_batches(opening: Opening):
    """After the ttl a message counts as new; the cleanup removes what is old, and only that."""

    async def main() -> None:
        async with opening() as database:
            inbox, effects = Inbox(database, ttl=10), Effects(database)
            await effects.set_up()
            database._now = "1000000"
            for number in range(25):
                await deliver(inbox, effects, f"old {number}")
            database._now = "12000000"
            await deliver(inbox, effects, "old 1")
            await deliver(inbox, effects, "new")
            assert len(await effects.all()) == 27
            assert await inbox.acleanup(batch=10) == 24
            assert await inbox.acleanup() == 0
            assert await inbox.aseen("billing", "new")

    asyncio.run(main())


def handled_once(folder: Path, deliveries: list[tuple[int, str]], *, noted: bool = True) -> None:
    """Deliver messages that are committed, rolled back or crash; count the effects."""
    source = Sqlite(folder / f"{next(SERIAL)}.db")
    database = Database(source, name=f"property {id(source)}")
    try:
        migrate(database)
        inbox = Inbox(database)
        done: list[int] = []
        for message, fate in deliveries:
            raw = source.connect()
            raw.execute("BEGIN IMMEDIATE")
            with inbox.once(raw, "billing", str(message)) as first:
                pass
            if not noted:
                raw.execute("DELETE FROM seawall_inbox")
            if fate == "commit":
                raw.execute("COMMIT")
                done += [message] if first else []
            elif fate == "roll back":
                raw.execute("ROLLBACK")
            raw.close()
        assert sorted(done) == sorted({m for m, fate in deliveries if fate == "commit"})
    finally:
        database.close()
        source.close()


SERIAL = count()
DELIVERIES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["commit", "roll back", "crash"])), max_size=12
)


def test_once_whatever_is_repeated_and_lost(tmp_path: Path):
    """Each message that was ever committed had one effect, whatever crashed around it."""

    @settings(max_examples=25)
    @given(DELIVERIES)
    def check(deliveries: list[tuple[int, str]]) -> None:
        handled_once(tmp_path, deliveries)

    check()
    assert falsified(lambda case: handled_once(tmp_path, case, noted=False), DELIVERIES)


def test_other_kinds_of_connections(tmp_path: Path, postgres: Postgres):
    """Sessions of SQLAlchemy, psycopg's blocking connections, sqlite3 and aiosqlite do as well."""
    import aiosqlite
    import psycopg
    from psycopg_pool import ConnectionPool
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    url = f"sqlite:///{tmp_path / 'sessions.db'}"
    engine = create_engine(url)
    database = Database(engine, name="sessions")
    migrate(database)
    inbox = Inbox(database)
    for expected in (True, False):
        with (
            Session(engine) as session,
            session.begin(),
            inbox.once(session, "billing", "a") as first,
        ):
            assert first is expected
    raw = sqlite3.connect(tmp_path / "sessions.db")
    with raw, inbox.once(raw, "billing", "a") as first:
        assert not first
    raw.close()

    async def by_aiosqlite() -> bool:
        async with aiosqlite.connect(tmp_path / "sessions.db") as connection:
            async with inbox.once(connection, "billing", "b") as first:
                pass
            await connection.commit()
            with pytest.raises(TypeError, match="write `async with"):
                inbox.once(connection, "billing", "b").__enter__()
            return first

    assert asyncio.run(by_aiosqlite())
    assert inbox.seen("billing", "b")
    assert inbox.cleanup() == 0
    engine.dispose()
    with ConnectionPool(postgres.url, min_size=1, open=True) as pool:
        blocking = Database(pool, schema="test inbox", name="blocking")
        migrate(blocking)
        with (
            psycopg.connect(postgres.url) as connection,
            Inbox(blocking).once(connection, "billing", "a") as first,
        ):
            assert first
        assert Inbox(blocking).seen("billing", "a")


def test_what_is_no_message_is_told_so(tmp_path: Path):
    """Arguments that cannot be right are refused at once."""
    with pytest.raises(TypeError, match="pass a Database"):
        Inbox("orders.db")  # type: ignore[arg-type]
    source = Sqlite(tmp_path / "a.db")
    database = Database(source, name="refusing")
    inbox = Inbox(database)
    assert "Inbox of" in repr(inbox)
    raw = source.connect()
    for consumer, message, error in (
        ("", "a", ValueError),
        ("billing", "", ValueError),
        ("billing", "a" * 5000, ValueError),
        ("billing", 7, TypeError),
        (b"billing", "a", TypeError),
    ):
        with pytest.raises(error):
            inbox.once(raw, consumer, message)  # type: ignore[arg-type]
    raw.close()
    source.close()
