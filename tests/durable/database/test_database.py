"""The same operations on every database, by every driver."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import create_engine

from seawall import get_guard, guards
from seawall.durable import Database, Sqlite, amigrate
from seawall.durable.database import leases
from seawall.durable.database.connections import TextQuery
from seawall.durable.database.database import in_thread
from seawall.web.fastapi import protect
from tests.durable.conftest import Opening


def test_the_first_leases_of_two_threads_are_closed_with_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both belong to the one desk that `close` knows."""
    together = Barrier(2)

    class Slow(leases.LeaseDesk):
        def __init__(self, database: Database) -> None:
            super().__init__(database)
            together.wait(10)

    monkeypatch.setattr(leases, "LeaseDesk", Slow)
    source = Sqlite(tmp_path / "leases.db")
    database = Database(source, name="first leases")
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(database._lease, ["one", "other"])
    assert one._desk is other._desk
    database.close()
    source.close()


def count() -> Any:
    """Count the steps that were done."""
    rows = yield TextQuery("SELECT count(*) FROM {versions}", {})
    return rows[0][0]


def test_migrating_is_done_once_by_many(opening: Opening):
    """However many begin at once, each step is done by one of them."""

    async def main() -> None:
        async with opening() as database:
            before = await database.arun(count)
            assert before > 0
            done = await asyncio.gather(*(amigrate(database) for _ in range(8)))
            assert done == [[]] * 8
            assert await database.arun(count) == before

    asyncio.run(main())


def test_what_fails_leaves_nothing(opening: Opening):
    """An operation that raises is rolled back."""

    def failing() -> Any:
        yield TextQuery("DELETE FROM {versions}", {})
        raise RuntimeError("no")

    async def main() -> None:
        async with opening() as database:
            before = await database.arun(count)
            try:
                await database.arun(failing)
            except RuntimeError:
                pass
            assert await database.arun(count) == before

    asyncio.run(main())


def test_the_wrong_kind_of_transaction_says_what_to_write(opening: Opening, tmp_path: Path):
    """What is awaited has `atransaction`, a file `arun`, and what blocks a thread."""

    async def main() -> None:
        async with opening() as database:
            if database.is_async:
                with pytest.raises(TypeError, match=r"async with database\.atransaction"):
                    database.transaction()
            else:
                with pytest.raises(TypeError, match=r"await file\.arun.*aiosqlite"):
                    database.atransaction()

    asyncio.run(main())
    engine = create_engine(f"sqlite:///{tmp_path / 'blocking.db'}")
    blocking = Database(engine, name="blocking")
    with pytest.raises(TypeError, match=r"with database\.transaction.*to_thread"):
        blocking.atransaction()
    blocking.close()
    engine.dispose()


def test_who_is_cancelled_waits_for_what_blocks():
    """Else it would commit behind the back of who undoes it."""
    blocks, begun, did = Event(), Event(), []

    def work() -> None:
        begun.set()
        assert blocks.wait(30)
        did.append("committed")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(in_thread(work))
        await loop.run_in_executor(None, begun.wait, 30)
        task.cancel()
        loop.call_later(0.01, blocks.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert did == ["committed"]

    asyncio.run(main())


def test_what_fails_in_a_thread_is_told():
    """To who waits for it; to nobody, if that one has gone."""
    begun, blocks = Event(), Event()

    def fail() -> None:
        begun.set()
        blocks.wait(30)
        raise OSError("no")

    async def main() -> None:
        task = asyncio.create_task(in_thread(fail))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30)
        task.cancel()
        blocks.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(OSError, match="no"):
            await in_thread(fail)

    asyncio.run(main())


def test_a_database_and_an_edge_may_have_the_same_name(tmp_path: Path):
    """The service's name is what both are called by; each has a guard of its own."""
    source, app = Sqlite(tmp_path / "test.db"), FastAPI()
    database = Database(source, name="orders")
    try:
        protect(app, name="orders")
        assert database.name == "orders"
        assert {guard.name for guard in guards()} >= {"orders", "orders database"}
        assert repr(database).startswith("<Database 'orders'")
        with pytest.raises(ValueError, match="alive already"):
            Database(source, name="orders")
    finally:
        database.close()
        get_guard("orders").close()
        source.close()


def test_databases_without_a_name_have_one_each(tmp_path: Path):
    """As edges have; and a name that is free again is used again."""
    source = Sqlite(tmp_path / "test.db")
    made = [Database(source) for _ in range(3)]
    assert [one.guard.name for one in made] == ["database", "database 2", "database 3"]
    made[1].close()
    again = Database(source)
    assert again.name == "database 2"
    for one in (*made, again):
        one.close()
    source.close()
