"""One writer for a file: what comes together is committed together, each on its own feet."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from seawall.durable import Sqlite


@pytest.fixture
def file(tmp_path: Path):
    """Return a file with a table."""
    made = Sqlite(tmp_path / "a.db")
    made.run(lambda connection: connection.execute("CREATE TABLE things (n integer UNIQUE)"))
    yield made
    made.close()


def add(connection: sqlite3.Connection, n: int) -> int:
    """Add a row."""
    connection.execute("INSERT INTO things VALUES (?)", (n,))
    return n


def numbers(file: Sqlite) -> list[int]:
    """Return what others see."""
    connection = sqlite3.connect(file.path)
    try:
        return [n for (n,) in connection.execute("SELECT n FROM things ORDER BY n")]
    finally:
        connection.close()


def test_what_comes_together_is_committed_together(file: Sqlite):
    """While one is under way others gather, and need one commit."""
    begun, go = Event(), Event()

    def first(connection: sqlite3.Connection) -> None:
        begun.set()
        assert go.wait(30)
        add(connection, 0)

    before = file.commits
    with ThreadPoolExecutor(21) as threads:
        held = threads.submit(file.run, first)
        assert begun.wait(30)
        rest = [threads.submit(file.run, lambda c, n=n: add(c, n)) for n in range(1, 21)]
        while len(file._todo) < 20:
            pass
        go.set()
        held.result()
        assert [each.result() for each in rest] == list(range(1, 21))
    assert numbers(file) == list(range(21))
    assert file.commits - before == 2


def test_one_that_fails_harms_no_other(file: Sqlite):
    """It alone is undone, though they share a transaction."""

    async def main() -> list[object]:
        calls = [file.arun(lambda c, n=n: add(c, n % 7)) for n in range(10)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(main())
    assert [r for r in results if isinstance(r, int)] == list(range(7))
    assert len([r for r in results if isinstance(r, sqlite3.IntegrityError)]) == 3
    assert numbers(file) == list(range(7))


def test_a_result_is_on_disk(file: Sqlite):
    """Who has a result sees the row from another connection; the file is flushed at each commit."""
    assert file.run(lambda c: add(c, 5)) == 5
    assert numbers(file) == [5]
    assert file.run(lambda c: c.execute("PRAGMA synchronous").fetchone()) == (2,)
    assert file.run(lambda c: c.execute("PRAGMA journal_mode").fetchone()) == ("wal",)


def test_another_process_that_writes_is_waited_for(file: Sqlite):
    """A lock held elsewhere delays, and fails nothing."""
    other = sqlite3.connect(file.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(file.run, lambda c: add(c, 1))
        other.execute("INSERT INTO things VALUES (2)")
        other.execute("COMMIT")
        assert waiting.result() == 1
    other.close()
    assert numbers(file) == [1, 2]


def test_after_a_broken_commit_it_goes_on(file: Sqlite):
    """Who was in it is told; the next one has a connection that works."""

    def break_it(connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")

    with pytest.raises(sqlite3.OperationalError):
        file.run(break_it)
    assert file.run(lambda c: add(c, 3)) == 3


def test_a_closed_one_is_done_first(file: Sqlite):
    """What was asked for before is on disk; after that nothing is taken."""
    file.run(lambda c: add(c, 1))
    file.close()
    with pytest.raises(RuntimeError, match="closed"):
        file.run(lambda c: add(c, 2))
    assert numbers(file) == [1]


def test_a_child_process_has_a_writer_of_its_own(file: Sqlite):
    """After a fork neither thread nor connection of the parent is used."""
    file.run(lambda c: add(c, 1))
    pid = os.fork()
    if not pid:
        os._exit(0 if file.run(lambda c: add(c, 2)) == 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert numbers(file) == [1, 2]


def test_what_would_stop_its_own_loop_is_refused(file: Sqlite):
    """Who awaits in a transaction goes on; others in that loop are told, and do not block it."""

    async def hold(held: asyncio.Event, go: asyncio.Event) -> None:
        with file.transaction() as connection:
            add(connection, 1)
            held.set()
            await go.wait()

    async def main() -> None:
        held, go = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(hold(held, go))
        await held.wait()
        with pytest.raises(RuntimeError, match=r"await file\.arun"), file.transaction():
            raise AssertionError("it was begun")
        with pytest.raises(RuntimeError, match=r"await file\.arun"):
            file.run(lambda c: add(c, 2))
        # Who is awaited waits in the writer's thread, and the first can end.
        awaited = asyncio.create_task(file.arun(lambda c: add(c, 3)))
        go.set()
        await first
        assert await awaited == 3
        with file.transaction() as connection:
            add(connection, 4)

    asyncio.run(main())
    assert numbers(file) == [1, 3, 4]


def test_one_that_failed_is_open_no_more(file: Sqlite):
    """After an error in it the next one of the same loop begins."""

    async def main() -> None:
        with pytest.raises(sqlite3.IntegrityError), file.transaction() as connection:
            connection.executemany("INSERT INTO things VALUES (?)", [(1,), (1,)])
        with file.transaction() as connection:
            add(connection, 2)

    asyncio.run(main())
    assert numbers(file) == [2]


def test_what_ends_in_another_thread_is_waited_for(tmp_path: Path):
    """Without a loop nobody knows who will end it: frameworks begin and end in any thread."""
    file = Sqlite(tmp_path / "a.db", busy_timeout=0.001)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        held = file.transaction()
        connection = one.submit(held.__enter__).result()
        connection.execute("CREATE TABLE things (n integer UNIQUE)")
        # The same thread: it has waited, and not been refused.
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            one.submit(file.transaction().__enter__).result()
        other.submit(held.__exit__, None, None, None).result()
        second = file.transaction()
        add(one.submit(second.__enter__).result(), 1)
        one.submit(second.__exit__, None, None, None).result()
    assert numbers(file) == [1]


@pytest.mark.parametrize("path", ["", ":memory:", 7], ids=["empty", "memory", "number"])
def test_what_is_no_file_is_said(path: object):
    """A file that is gone with the process keeps nothing."""
    with pytest.raises((TypeError, ValueError), match="path="):
        Sqlite(path)  # type: ignore[arg-type]
