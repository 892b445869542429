"""A SQLite file with one writer: concurrent operations are committed together.

Promises:

- When a caller gets its result, it is on disk (WAL, synchronous=FULL).
- A failed operation leaves nothing, and does not affect those committed with it: each has a
  savepoint. If one undoes the whole transaction, the others are repeated without it.
- A file has one writer in this process; other processes may write too, and are waited for.
- A wait for a transaction that only the event loop of this same thread can end is refused at once,
  as is an operation that waits for another one.
- A forked child process reopens the file, whatever the parent was doing with it: a fork waits for
  open transactions, for a few seconds.

Reason for the group commit: a flush to disk takes as long for a hundred operations as for one.
"""

from __future__ import annotations

import os
import sqlite3
from asyncio import get_running_loop, wrap_future
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Event, Lock, Thread, current_thread, get_ident
from typing import Any, Final, TypeVar
from weakref import WeakSet

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.clock import SYSTEM
from seawall.runtime.driver import held_time

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
Batch = list[tuple[Work[Any], Future[Any]]]

MOST_TOGETHER: Final = 256
"""Maximum number of operations in one commit."""
BEFORE_FORK: Final = 5.0
"""Seconds that a fork waits for open transactions; after that, the child may fail to write."""


class Sqlite:
    """A database file, for `Database`."""

    def __init__(self, path: str | Path, *, busy_timeout: float = 10.0) -> None:
        """Use the file at `path`; wait up to `busy_timeout` seconds for other writers."""
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
        """Whether the writer is inside an operation, and not between two of them."""
        self.commits = 0
        """Number of commits."""
        self.operations = 0
        """Number of committed operations."""
        self._open: list[int] = []
        """The threads that began a transaction which is still open."""
        self._using = Lock()
        """Held while the writer's connection is in use, and during a fork, when there is none."""
        self._connection: sqlite3.Connection | None = None
        self._may_begin = Event()
        self._may_begin.set()
        self._quiet = False

    # Fork handling. SQLite records in the process's memory which locks it holds, by file and not by
    # connection. A child inherits these records without the locks: in the middle of a transaction
    # it would wait forever for a lock that no one holds there, and at any other time it would
    # believe to be protected while it is not. So there must be no connection at the moment of a
    # fork.

    def _before_fork(self) -> None:
        me, until = get_ident(), SYSTEM.now() + BEFORE_FORK
        self._may_begin.clear()
        while SYSTEM.now() < until and any(thread != me for thread in self._open):
            SYSTEM.sleep(0.001)
        if self._thread is not None and self._thread.ident == me:
            return  # the operation itself forks: it would wait for itself
        self._quiet = self._using.acquire(timeout=max(0.0, until - SYSTEM.now()))
        if self._quiet:
            self._disconnect()

    def _after_fork_here(self) -> None:
        """Continue in the parent; the writer reopens the file when there is something to do."""
        if self._quiet:
            self._quiet = False
            self._using.release()
        self._may_begin.set()

    def _after_fork(self) -> None:
        """Drop the parent's thread and connection."""
        self._begin_afresh()

    def connect(self) -> sqlite3.Connection:
        """Return a new connection with the settings of the writer's, without a transaction."""
        connection = sqlite3.connect(
            self.path, timeout=self._busy, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Lend a new connection with an open write transaction; commit it at the end.

        Do not `await` inside: a second transaction, begun meanwhile in the same event loop, would
        block the loop, and with it the first. That raises a `RuntimeError`; see `arun`.
        """
        if self._open:
            self._refuse_to_wait_for_this_loop()
        # Keep the list: a fork replaces it, and the block may end in another thread.
        begun_in, thread = self._open, get_ident()
        begun_in.append(thread)
        # a fork waits for the open transactions: begin no others
        while not self._may_begin.is_set():
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
        """Raise if this thread would wait for a transaction that only its own loop can end.

        Without a loop, the transaction may end in another thread: a web framework may begin it in
        one thread of a pool and end it in another.
        """
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

    # Operations, each in a savepoint of a shared transaction

    def run(self, work: Work[T]) -> T:
        """Execute and commit `work(connection)`, and return its result.

        The transaction is shared: an operation that commits or rolls back, as
        `connection.commit()`, `with connection:` and `executescript` do, fails with a
        `RuntimeError`. So does one that raises `StopIteration`. An operation may run more than
        once, if another one undid their common transaction; its earlier effects are undone then.
        """
        if self._open:
            self._refuse_to_wait_for_this_loop()
        if self._thread is current_thread():
            raise RuntimeError(
                f"{self!r}: an operation cannot wait for another one, which begins after it: use"
                " the connection that it was given"
            )
        return self._submit(work).result()

    async def arun(self, work: Work[T]) -> T:
        """Async twin of `run`. Cancelling it does not undo an operation that is running."""
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
        """Finish all queued operations, and stop the writer."""
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
            while batch:
                batch = self._together(self._connection, batch)
        except BaseException as error:  # noqa: BLE001 - passed on to the waiters
            for _, done in batch:
                # Without checking first whether it is done: a waiter may give up at that moment.
                with suppress(InvalidStateError):
                    done.set_exception(error)
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _may(self, action: int, *_: object) -> int:
        """Return to SQLite whether a statement is allowed: all but the end of a transaction.

        If an operation ended it, it would be unknown how, and so which operations must be repeated.
        """
        ends = action == sqlite3.SQLITE_TRANSACTION and self._at_work
        return sqlite3.SQLITE_DENY if ends else sqlite3.SQLITE_OK

    def _next(self) -> Batch:
        with self._changed:
            while not self._todo and not self._closed:
                self._changed.wait()
            together = min(len(self._todo), MOST_TOGETHER)
            return [self._todo.popleft() for _ in range(together)]

    def _together(self, connection: sqlite3.Connection, batch: Batch) -> Batch:
        """Run all in one transaction; or return those to repeat, without the one that undid it."""
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
                except BaseException as error:  # noqa: BLE001 - affects this operation alone
                    failure = _for_waiter(error)
                finally:
                    self._at_work = False
                if not connection.in_transaction:  # as by INSERT OR ROLLBACK, or a full disk
                    done.set_exception(failure or _swallowed())
                    begun = [each for each in batch[:number] if each[1].running()]
                    return begun + batch[number + 1 :]
                if failure is not None:
                    connection.execute("ROLLBACK TO one")
                connection.execute("RELEASE one")
                results.append((done, value, failure))
            # Not as a statement: it would be cached, and then an operation's own COMMIT would not
            # be prepared and so not refused.
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


def _for_waiter(error: BaseException) -> BaseException:
    """Return the exception of an operation as its waiter gets it."""
    # an asyncio future cannot hold it, and would never be done
    if isinstance(error, StopIteration):
        wrapped = RuntimeError("the operation raised StopIteration: write `next(rows, None)`")
    elif getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH:
        wrapped = RuntimeError(
            "the operation ends a transaction that is not its own: leave out commit(), rollback(),"
            " `with connection:` and executescript(); it is committed when it returns, and undone"
            " when it raises"
        )
    else:
        return error
    wrapped.__cause__ = error
    return wrapped


def _swallowed() -> RuntimeError:
    return RuntimeError(
        "SQLite rolled the transaction back in the operation, which went on: let the error of the"
        " statement (such as INSERT OR ROLLBACK) out, or write OR ABORT"
    )
