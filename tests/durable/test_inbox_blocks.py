"""A delivery is noted inside a transaction, and taken back where its block does not end well."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.inbox import Inbox, _Once
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
    """A connection that commits each statement by itself is told so."""
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


def test_undoing_leaves_earlier_notes_alone(tmp_path: Path):
    """Who is cancelled while it is not known whether it is the first forgets its own note alone."""
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
    assert inbox.seen("billing", "a")
    assert not inbox.seen("billing", "b")
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
