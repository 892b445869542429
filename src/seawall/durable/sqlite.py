"""A SQLite file with one writer: operations that come together are committed together.

Promises: who gets a result has it on disk (WAL, synchronous=FULL). An operation that fails leaves
nothing, and harms none of those that are committed with it: each has a savepoint, and if one undid
the whole transaction, the others are done again without it. A file has one writer in this process;
other processes may write too, and are waited for. What would wait for a transaction that only this
very thread's event loop can end is refused at once. A child process that is forked opens the file
anew, whatever the parent was doing with it: a fork waits for open transactions, for a few seconds.

Why: to bring a commit to disk takes as long for a hundred operations as for one.
"""

from __future__ import annotations

import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Event, Lock, Thread, get_ident
from typing import Any, Final, TypeVar
from weakref import WeakSet

from seawall import _checks as check
from seawall.clock import SYSTEM
from seawall.runtime.mutex import survives_fork
from seawall.runtime.runners import held_time

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
Batch = list[tuple[Work[Any], Future[Any]]]

MOST_TOGETHER: Final = 256
"""Operations of one commit."""
BEFORE_FORK: Final = 5.0
"""Seconds that a fork waits for open transactions; then the child may not be able to write."""


class Sqlite:
    """A database file, for `Database`."""

    def __init__(self, path: str | Path, *, busy_timeout: float = 10.0) -> None:
        """Use the file at `path`; wait for other processes' writing for up to `busy_timeout`."""
        if not isinstance(path, (str, Path)) or not str(path):
            raise TypeError(f"path={path!r}: write where the file is, such as 'orders.db'")
        if str(path) == ":memory:":
            raise ValueError("path=':memory:': what is kept there is gone with the process")
        self.path = Path(path)
        self._busy = check.seconds("busy_timeout", busy_timeout)
        self._begin_afresh()
        survives_fork(self)
        _files.add(self)

    def __repr__(self) -> str:
        return f"Sqlite({str(self.path)!r})"

    def _begin_afresh(self) -> None:
        self._todo: deque[tuple[Work[Any], Future[Any]]] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False
        self._at_work = False
        """Whether the writer is in somebody's operation, and not between two of them."""
        self.commits = 0
        """How often was brought to disk."""
        self.operations = 0
        """How many operations that were."""
        self._open: list[int] = []
        """The threads in which a transaction was begun that has not ended yet."""
        self._using = Lock()
        """Held while the writer's connection is in use; and during a fork, while there is none."""
        self._connection: sqlite3.Connection | None = None
        self._may_begin = Event()
        self._may_begin.set()
        self._quiet = False

    # Around a fork. SQLite notes in this process's memory which locks it has, by file and not by
    # connection. A child inherits the notes without the locks: in the middle of a transaction it
    # would wait for ever for a lock that nobody holds there, and at any other time believe to be
    # protected while it is not. So there must be no connection at that moment.

    def _before_fork(self) -> None:
        me, until = get_ident(), SYSTEM.now() + BEFORE_FORK
        self._may_begin.clear()
        while SYSTEM.now() < until and any(thread != me for thread in self._open):
            SYSTEM.sleep(0.001)
        if self._thread is not None and self._thread.ident == me:
            return  # an operation that forks: it would wait for itself
        self._quiet = self._using.acquire(timeout=max(0.0, until - SYSTEM.now()))
        if self._quiet:
            self._disconnect()

    def _after_fork_here(self) -> None:
        """Go on in the parent; the writer opens the file again when there is something to do."""
        if self._quiet:
            self._quiet = False
            self._using.release()
        self._may_begin.set()

    def _after_fork(self) -> None:
        """Have no thread and no connection of the parent's."""
        self._begin_afresh()

    def connect(self) -> sqlite3.Connection:
        """Return a connection of one's own, set up as the writer's is; without a transaction."""
        connection = sqlite3.connect(
            self.path, timeout=self._busy, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Give a connection of one's own with a writing transaction begun; commit at the end.

        Do not `await` inside: a second one that is begun meanwhile in the same event loop would
        stop the loop, and with it the first. That raises a `RuntimeError`; see `arun`.
        """
        if self._open:
            self._refuse_to_wait_for_this_loop()
        # Kept here: after a fork there is another list, and it may end in another thread.
        begun_in, thread = self._open, get_ident()
        begun_in.append(thread)
        while not self._may_begin.is_set():  # a fork waits for those there are, and for no more
            begun_in.remove(thread)
            self._may_begin.wait()
            begun_in.append(thread)
        try:
            connection = self.connect()
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            finally:
                connection.close()
        finally:
            begun_in.remove(thread)

    def _refuse_to_wait_for_this_loop(self) -> None:
        """Raise, if what this thread is about to wait for can end in this thread's loop only.

        Without a loop it may end elsewhere: a web framework may begin in one thread of a pool what
        it ends in another one.
        """
        from asyncio import get_running_loop

        if get_ident() not in self._open:
            return
        try:
            get_running_loop()
        except RuntimeError:
            return
        raise RuntimeError(
            f"{self!r} has a transaction open in this event loop, which cannot end while the loop"
            " waits for it: do not await inside `with ... .transaction()`; write"
            " `await file.arun(lambda connection: ...)`, or use connections of aiosqlite"
        )

    # Operations, each in a savepoint of a common transaction

    def run(self, work: Work[T]) -> T:
        """Have `work(connection)` done and committed, and return its result.

        The transaction is not the operation's own: one that commits or rolls back, as
        `connection.commit()`, `with connection:` and `executescript` do, fails with a
        `RuntimeError`. So does one that raises `StopIteration`. It may be done more than once,
        where another one undid what they did together; what it did before is then undone.
        """
        if self._open:
            self._refuse_to_wait_for_this_loop()
        return self._submit(work).result()

    async def arun(self, work: Work[T]) -> T:
        """Do the same, awaiting. Who gives up does not undo what is under way."""
        from asyncio import wrap_future

        with held_time():
            return await wrap_future(self._submit(work))

    def _submit(self, work: Work[T]) -> Future[T]:
        done: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self!r} is closed")
            self._todo.append((work, done))
            if self._thread is None:
                name = f"sqlite {self.path.name}"
                self._thread = Thread(target=self._write, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return done

    def close(self) -> None:
        """Do what is still to be done, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _write(self) -> None:
        try:
            while batch := self._next():
                with self._using:
                    self._write_batch(batch)
        finally:
            with self._using:
                self._disconnect()

    def _write_batch(self, batch: Batch) -> None:
        try:
            if self._connection is None:
                self._connection = self.connect()
                self._connection.set_authorizer(self._may)
            self._commit(self._connection, batch)
        except BaseException as error:  # noqa: BLE001 - told to who waits for it
            _fail(batch, error)
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _may(self, action: int, *_: object) -> int:
        """Tell SQLite whether a statement may be prepared: all but the end of a transaction.

        Once an operation has ended it, nobody knows which way, and so what has to be done again.
        """
        ends = action == sqlite3.SQLITE_TRANSACTION and self._at_work
        return sqlite3.SQLITE_DENY if ends else sqlite3.SQLITE_OK

    def _next(self) -> Batch:
        with self._changed:
            while not self._todo and not self._closed:
                self._changed.wait()
            together = min(len(self._todo), MOST_TOGETHER)
            return [self._todo.popleft() for _ in range(together)]

    def _commit(self, connection: sqlite3.Connection, batch: Batch) -> None:
        while batch:
            batch = self._together(connection, batch)

    def _together(self, connection: sqlite3.Connection, batch: Batch) -> Batch:
        """Do all in one transaction; or return what is to be done again, without who undid it."""
        results: list[tuple[Future[Any], Any, BaseException | None]] = []
        connection.execute("BEGIN IMMEDIATE")
        try:
            for number, (work, done) in enumerate(batch):
                if not (done.running() or done.set_running_or_notify_cancel()):
                    continue
                connection.execute("SAVEPOINT one")
                value: Any = None
                failure: BaseException | None = None
                self._at_work = True
                try:
                    value = work(connection)
                except BaseException as error:  # noqa: BLE001 - its own alone
                    failure = _as_told(error)
                finally:
                    self._at_work = False
                if not connection.in_transaction:  # as INSERT OR ROLLBACK does, or a full disk
                    done.set_exception(failure or _swallowed())
                    begun = [each for each in batch[:number] if each[1].running()]
                    return begun + batch[number + 1 :]
                if failure is not None:
                    connection.execute("ROLLBACK TO one")
                connection.execute("RELEASE one")
                results.append((done, value, failure))
            # Not as a statement: that would be kept, and an operation's own COMMIT not be prepared.
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        self.commits += 1
        self.operations += len(results)
        for done, value, failure in results:
            if failure is None:
                done.set_result(value)
            else:
                done.set_exception(failure)
        return []


_files: Final[WeakSet[Sqlite]] = WeakSet()


def _before_fork() -> None:
    for file in list(_files):
        file._before_fork()


def _after_fork_here() -> None:
    for file in list(_files):
        file._after_fork_here()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_here)


def _fail(batch: Batch, error: BaseException) -> None:
    for _, done in batch:
        # Not asked first whether it is done: who waits may give up in that very moment.
        with suppress(InvalidStateError):
            done.set_exception(error)


def _as_told(error: BaseException) -> BaseException:
    """Return the error of an operation as who waits for it gets it."""
    if isinstance(error, StopIteration):  # a future of asyncio cannot hold it: never done
        told = RuntimeError("the operation raised StopIteration: write `next(rows, None)`")
    elif getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH:
        told = RuntimeError(
            "the operation ends a transaction that is not its own: leave out commit(), rollback(),"
            " `with connection:` and executescript(); it is committed when it returns, and undone"
            " when it raises"
        )
    else:
        return error
    told.__cause__ = error
    return told


def _swallowed() -> RuntimeError:
    return RuntimeError(
        "SQLite rolled the transaction back in the operation, which went on: let the error of the"
        " statement (such as INSERT OR ROLLBACK) out, or write OR ABORT"
    )
