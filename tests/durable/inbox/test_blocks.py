"""A delivery is noted inside a transaction, and taken back where its block does not end well."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database import statements as _sql
from seawall.durable.inbox import Inbox, _Once
from tests.durable.conftest import opening_by
from tests.durable.postgres import Postgres


def test_a_transaction_has_to_outlive_its_block(tmp_path: Path, postgres: Postgres):
    """Where it ends inside, there would be a note without its effect, or the effect without it."""
    import psycopg
    from psycopg_pool import ConnectionPool
    from sqlalchemy import create_engine

    source, engine = Sqlite(tmp_path / "a.db"), create_engine(f"sqlite:///{tmp_path / 'a.db'}")
    migrate(database := Database(source, name="ended"))
    with ConnectionPool(postgres.url, min_size=1, open=True) as pool:
        migrate(other := Database(pool, schema="test inbox ended", name="ended too"))
    connections = [
        (database, sqlite3.connect(tmp_path / "a.db")),
        (database, engine.connect()),
        (other, psycopg.connect(postgres.url)),
    ]
    for inside, connection in connections:
        block = Inbox(inside).once(connection, "billing", "a")
        assert block.__enter__()
        connection.rollback()
        with pytest.raises(RuntimeError, match="ended inside the block"):
            block.__exit__(None, None, None)
        connection.close()
    engine.dispose()
    source.close()


def test_without_a_transaction_it_is_refused(tmp_path: Path):
    """A connection with autocommit is refused."""
    source = Sqlite(tmp_path / "a.db")
    database = Database(source, name="refusing")
    migrate(database)
    raw = source.connect()
    block = Inbox(database).once(raw, "billing", "a")
    with pytest.raises(RuntimeError, match="has no transaction"):
        block.__enter__()
    raw.execute("BEGIN")
    with block as first:
        assert first
    with pytest.raises(RuntimeError, match="entered once"):
        block.__enter__()
    raw.close()
    source.close()


@pytest.mark.parametrize("safe", [True, False], ids=["as it is", "without the token"])
def test_undoing_leaves_earlier_notes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """Who is cancelled while it is not known whether it is the first forgets its own note alone."""
    if not safe:
        texts = _sql.statements("sqlite", "inbox")
        assert "AND token = :token" in texts["forget"]
        without = texts["forget"].replace("AND token = :token", "")
        monkeypatch.setitem(texts, "forget", without)
    _sql.statement.cache_clear()
    source = Sqlite(tmp_path / "a.db")
    database = Database(source, name="undoing")
    migrate(database)
    inbox = Inbox(database)
    with database.transaction() as raw, inbox.once(raw, "billing", "a") as first:
        assert first
    with database.transaction() as raw:
        for message in ("a", "b"):
            block = inbox.once(raw, "billing", message)
            assert isinstance(block, _Once)
            block.__enter__()
            block._first = None
            block.__exit__(None, KeyboardInterrupt(), None)
    assert inbox.seen("billing", "a") is safe
    assert not inbox.seen("billing", "b")
    source.close()
    monkeypatch.undo()
    _sql.statement.cache_clear()


def test_repeats_are_in_nobodys_way(tmp_path: Path, postgres: Postgres):
    """Two batches of repeats in opposite order: neither waits, and no deadlock comes of it."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            inbox = Inbox(database)

            async def repeat(connection: Any, message: str) -> bool:
                async with inbox.once(connection, "billing", message) as first:
                    return first

            async with database.atransaction() as connection:
                assert [await repeat(connection, m) for m in "ab"] == [True, True]
            async with (
                asyncio.timeout(20),
                database.atransaction() as one,
                database.atransaction() as other,
            ):
                assert not await repeat(one, "a")
                assert not await repeat(other, "b")
                assert not await repeat(one, "b")
                assert not await repeat(other, "a")

    asyncio.run(main())


def test_a_failure_on_a_connection_that_is_gone_is_counted(tmp_path: Path):
    """The error goes on as it is, and nothing is asked of what is closed."""
    source = Sqlite(tmp_path / "a.db")
    database = Database(source, name="gone")
    migrate(database)
    inbox, raw = Inbox(database), source.connect()
    raw.execute("BEGIN IMMEDIATE")
    block = inbox.once(raw, "billing", "a")
    assert block.__enter__()
    raw.close()
    block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert inbox.snapshot()["failed"] == 1
    assert not inbox.seen("billing", "a")
    database.close()
    source.close()


def test_who_is_cancelled_while_asking_leaves_no_note(tmp_path: Path):
    """A driver's thread goes on after a cancellation; what it noted is taken back."""
    import aiosqlite

    source = Sqlite(tmp_path / "a.db")
    migrate(database := Database(source, name="cancelled"))
    inbox = Inbox(database)

    async def main() -> None:
        async with aiosqlite.connect(tmp_path / "a.db") as connection:
            await connection.execute("BEGIN")
            entering = asyncio.ensure_future(inbox.once(connection, "billing", "a").__aenter__())
            await asyncio.wait([entering], timeout=0)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            await connection.commit()

    asyncio.run(main())
    assert not inbox.seen("billing", "a")
    source.close()
