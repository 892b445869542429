"""One writer for a file: what comes together is committed together, each on its own feet."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from seawall.clock import SYSTEM
from seawall.durable import Sqlite
from seawall.durable.database import sqlite as module


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


def together(file: Sqlite, *works: Callable[[sqlite3.Connection], Any]) -> list[Any]:
    """Have all done in one batch, after one that was given up; return results and errors."""
    begun, go = Event(), Event()

    def first(_connection: sqlite3.Connection) -> None:
        begun.set()
        assert go.wait(30)

    held = file._submit(first)
    assert begun.wait(30)
    assert file._submit(lambda c: add(c, 99)).cancel()
    futures = [file._submit(work) for work in works]
    go.set()
    held.result(30)
    return [each.exception(30) or each.result() for each in futures]


def undo_all(connection: sqlite3.Connection) -> None:
    """Add what is there: SQLite rolls the whole transaction back."""
    connection.execute("INSERT OR ROLLBACK INTO things VALUES (1)")


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


def test_one_that_undoes_the_transaction_harms_no_other(file: Sqlite):
    """It alone gets its error; those before and after it are on disk, each done once."""
    add_1, add_2, add_3 = (lambda c, n=n: add(c, n) for n in (1, 2, 3))
    results = together(file, add_1, undo_all, add_2, undo_all, add_3)
    assert [results[0], results[2], results[4]] == [1, 2, 3]
    for error in (results[1], results[3]):
        assert isinstance(error, sqlite3.IntegrityError)
        assert "UNIQUE" in str(error)
    assert numbers(file) == [1, 2, 3]


def test_one_that_goes_on_after_the_transaction_is_told(file: Sqlite):
    """Who hides that SQLite has undone all gets no result as if it were on disk."""

    def hide(connection: sqlite3.Connection) -> str:
        with pytest.raises(sqlite3.IntegrityError):
            undo_all(connection)
        return "well"

    before, hidden, after = together(file, lambda c: add(c, 1), hide, lambda c: add(c, 2))
    assert (before, after) == (1, 2)
    assert isinstance(hidden, RuntimeError)
    assert "OR ABORT" in str(hidden)
    assert numbers(file) == [1, 2]


def end_as_block(connection: sqlite3.Connection) -> None:
    """End the transaction as sqlite3's own context manager does."""
    with connection:
        add(connection, 7)


@pytest.mark.parametrize(
    "end",
    [
        lambda c: c.commit(),
        lambda c: c.rollback(),
        lambda c: c.execute("COMMIT"),
        lambda c: c.execute("ROLLBACK"),
        lambda c: c.executescript("CREATE TABLE more (n integer)"),
        end_as_block,
    ],
    ids=["commit", "rollback", "COMMIT", "ROLLBACK", "executescript", "with"],
)
def test_an_operation_cannot_end_what_is_not_its_own(file: Sqlite, end: Callable[..., Any]):
    """It is told and undone; the others are neither undone nor done twice."""

    def work(connection: sqlite3.Connection) -> None:
        add(connection, 8)
        end(connection)

    before, told, after = together(file, lambda c: add(c, 1), work, lambda c: add(c, 2))
    assert (before, after) == (1, 2)
    assert isinstance(told, RuntimeError)
    assert "executescript()" in str(told)
    assert numbers(file) == [1, 2]


def test_an_operation_that_raises_stop_iteration_ends(file: Sqlite):
    """Neither who blocks nor who awaits waits for ever for what no future of asyncio can hold."""

    def nothing(connection: sqlite3.Connection) -> Any:
        add(connection, 1)
        return next(connection.execute("SELECT 1 WHERE 0"))

    async def main() -> None:
        async with asyncio.timeout(10):
            await file.arun(nothing)

    with pytest.raises(RuntimeError, match="StopIteration"):
        file.run(nothing)
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main())
    assert numbers(file) == []


class GivenUp(Future[Any]):
    """One whose owner gives up in the last moment before it gets its error."""

    def set_exception(self, exception: BaseException | None) -> None:
        self.cancel()
        super().set_exception(exception)


def test_who_gives_up_while_being_told_does_not_stop_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The batch has failed and one of it is cancelled just then: the next one is done."""
    file = Sqlite(tmp_path / "a.db", busy_timeout=0.001)
    file.run(lambda c: c.execute("CREATE TABLE things (n integer UNIQUE)"))
    other = sqlite3.connect(file.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with monkeypatch.context() as patch:
        patch.setattr(module, "Future", GivenUp)
        given_up = file._submit(lambda c: add(c, 1))
        while not given_up.cancelled():
            pass
    other.execute("ROLLBACK")
    other.close()
    assert file._submit(lambda c: add(c, 2)).result(10) == 2
    file.close()
    assert numbers(file) == [2]


def test_after_a_broken_connection_it_goes_on(file: Sqlite):
    """Who was in it is told; the next one has a connection that works."""
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        file.run(lambda c: c.close())
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


def in_child(work: Callable[[], object]) -> int:
    """Fork, though other threads run, and return how the child ended: 0 if `work` did not raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("whose", ["the writer's", "a thread's own"])
def test_a_child_that_is_forked_in_a_transaction_can_write(tmp_path: Path, whose: str):
    """It inherits none of the parent's locks: the fork waits until there are none."""
    file = Sqlite(tmp_path / "test.db", busy_timeout=2.0)
    file.run(lambda c: c.execute("CREATE TABLE things (n integer UNIQUE)"))
    begun = threading.Event()

    def slowly(connection: sqlite3.Connection) -> None:
        add(connection, 1)
        begun.set()
        SYSTEM.sleep(0.3)

    def in_own_transaction() -> None:
        with file.transaction() as connection:
            slowly(connection)

    writing = in_own_transaction if whose == "a thread's own" else lambda: file.run(slowly)
    thread = threading.Thread(target=writing)
    thread.start()
    assert begun.wait(20)
    assert in_child(lambda: file.run(lambda c: add(c, 2))) == 0
    assert in_child(lambda: add_in_transaction(file, 3)) == 0
    thread.join()
    assert file.run(lambda c: add(c, 4)) == 4
    file.close()
    assert sorted(numbers(file)) == [1, 2, 3, 4]


def add_in_transaction(file: Sqlite, number: int) -> None:
    with file.transaction() as connection:
        add(connection, number)


def test_children_of_a_busy_writer_can_all_write(tmp_path: Path):
    """Whatever the parent's threads are at; nothing that any process has committed is lost."""
    file = Sqlite(tmp_path / "test.db", busy_timeout=20.0)
    file.run(lambda c: c.execute("CREATE TABLE things (n integer UNIQUE)"))
    goes_on, written = True, []
    of_children = [-1 - n for n in range(20)]

    def write() -> None:
        while goes_on:
            written.append(file.run(lambda c: add(c, len(written))))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        ends = [in_child(lambda n=n: file.run(lambda c: add(c, n))) for n in of_children]
    finally:
        goes_on = False
        thread.join()
    file.close()
    assert ends == [0] * 20
    assert sorted(numbers(file)) == sorted(written + of_children)


def test_what_a_child_commits_survives_the_end_of_its_parent(tmp_path: Path):
    """A parent that closes the file as the last one it knows of takes no log from the child."""
    file = Sqlite(tmp_path / "test.db")
    file.run(lambda c: c.execute("CREATE TABLE things (n integer UNIQUE)"))
    ready, go = os.pipe(), os.pipe()

    def child() -> None:
        file.run(lambda c: add(c, 1))
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        file.run(lambda c: add(c, 2))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            child()
        finally:
            os._exit(0)
    assert os.read(ready[0], 1) == b"x"
    file.run(lambda c: add(c, 3))
    file.close()
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    for end in (*ready, *go):
        os.close(end)
    assert sorted(numbers(file)) == [1, 2, 3]


def test_an_operation_that_forks_does_not_wait_for_itself(
    file: Sqlite, monkeypatch: pytest.MonkeyPatch
):
    """The parent goes on, at once."""
    monkeypatch.setattr(module, "BEFORE_FORK", 3600.0)

    def forking(connection: sqlite3.Connection) -> int:
        assert in_child(lambda: None) == 0
        return add(connection, 1)

    assert file.run(forking) == 1
    assert numbers(file) == [1]


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


def test_an_operation_that_waits_for_another_one_is_refused(file: Sqlite):
    """The other one would begin only after it."""
    done: Future[int] = Future()

    def nested(_connection: sqlite3.Connection) -> int:
        return file.run(lambda connection: add(connection, 1))

    def call() -> None:
        try:
            done.set_result(file.run(nested))
        except RuntimeError as error:
            done.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    with pytest.raises(RuntimeError, match="the connection that it was given"):
        done.result(timeout=10)
    assert file.run(lambda connection: add(connection, 2)) == 2


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
