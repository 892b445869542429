"""The user's database, for operations in transactions of our own.

Promises:

- An operation is one transaction: committed before its result is returned, or without any effect.
- If the database reports that transactions conflicted (a deadlock, a failed serialization), the
  whole operation is repeated, a bounded number of times. A `Sqlite` locked by others is waited for.
- No session state is used: connections may come from a pooler in transaction mode.

Operations *inside* a transaction of the user need no `Database`: they take the connection.
"""

from __future__ import annotations

from asyncio import CancelledError, ensure_future, shield, to_thread, wait
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock
from seawall.context import deadline_var, reset
from seawall.durable.database.connections import Connection, connection_of, dialect_of, known_class
from seawall.durable.database.django import DjangoAlias, autocommitting, in_own_thread
from seawall.durable.database.django import begin as begin_django
from seawall.durable.database.driver_errors import is_conflict
from seawall.durable.database.sqlite import Sqlite
from seawall.durable.database.statements import Dialect, TableNames
from seawall.guard import Guard
from seawall.models.backoff import full_jitter
from seawall.policies.retry import Retry
from seawall.runtime.driver import Steps

if TYPE_CHECKING:
    from seawall.durable.database.leases import DatabaseLease, LeaseDesk

T = TypeVar("T")
Operation = Callable[[], Steps[T]]
"""Creates new steps for each attempt."""


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Await a blocking function. If cancelled, wait for its end before raising.

    Otherwise it would commit later: what the caller does next, such as giving a key back, must come
    after it.
    """
    working = ensure_future(to_thread(function, *args))
    try:
        return await shield(working)
    except CancelledError:
        await wait([working])
        if not working.cancelled():
            working.exception()  # mark its exception as retrieved
        raise


@contextmanager
def without_deadline() -> Iterator[None]:
    """Ignore the deadline inside the block: it limits the work, not the storing of its outcome."""
    token = deadline_var.set(None)
    try:
        yield
    finally:
        reset(deadline_var, token)


class ConnectionSource(NamedTuple):
    """A kind of connection source."""

    name: str
    begin: Callable[[Any], Any]
    """Function `begin(raw)`: a context manager that yields a connection in a transaction."""
    is_async: bool = True


class Database:
    """The location of our tables, and how to connect to them."""

    def __init__(
        self,
        source: Any,
        *,
        schema: str | None = None,
        prefix: str = "seawall_",
        attempts: int = 5,
        name: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Use `source`: an asyncpg or psycopg pool, a SQLAlchemy engine, `DjangoAlias`, `Sqlite`.

        The tables are in `schema` (default: the database's default schema), and their names start
        with `prefix`. A transaction that lost a conflict is attempted at most `attempts` times. A
        guard does that: with `name="orders"` it is called "orders database"; by default "database",
        or "database 2" and so on if that name is taken.
        """
        self.source = source
        self._kind, self.dialect = _source_of(source)
        self.names = TableNames(schema, prefix)
        conflicts = Retry(
            on=lambda error, _value: error is not None and is_conflict(error),
            attempts=check.count("attempts", attempts),
            backoff=full_jitter(0.005, 0.25),
        )
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name={name!r}: write a name, such as name='orders'")
        # Not just the name: other parts of the service, such as its edge, have a guard of that
        # name.
        own = registry.free_name("database") if name is None else f"{name} database"
        self.name = own if name is None else name
        self.guard = registry.release(Guard(own, conflicts, clock=clock))
        self.closed = False
        """Whether `close()` was called."""
        self._now: str | None = None
        self._lease_desks: dict[str, LeaseDesk] = {}
        """The desk of the leases, once there are some; a dict, so that it is made by one thread."""

    def __repr__(self) -> str:
        return f"<Database {self.name!r}: {self._kind.name}, {self.names!r}>"

    @property
    def is_async(self) -> bool:
        """Whether it is async: then only `arun` works, else both."""
        return self._kind.is_async

    def connection(self, raw: Any) -> Connection:
        """Return the user's own connection, wrapped for the tables of this database."""
        return connection_of(raw, self.names, self._now)

    def close(self) -> None:
        """Release the name and all leases; `source` stays open.

        Metrics and pages stop querying it. An async database releases its leases soon, in its event
        loop: do not close its pool immediately afterwards, or release the leases before.
        """
        self.closed = True
        for desk in self._lease_desks.values():
            desk.close()
        self.guard.close()

    # Leases

    def _lease(self, name: str) -> DatabaseLease:
        """Return the lease called `name`; see `seawall.leases.store.LeaseStore`."""
        from seawall.durable.database.leases import DatabaseLease, LeaseDesk

        if not self._lease_desks:
            self._lease_desks.setdefault("", LeaseDesk(self))  # atomic
        return DatabaseLease(self, name, self._lease_desks[""])

    # Transactions

    def run(self, operation: Operation[T]) -> T:
        """Run an operation in its own transaction."""
        if isinstance(self.source, Sqlite):
            return self.source.run(lambda raw: self.connection(raw).run(operation()))
        if self._kind.is_async:
            raise TypeError(
                f"{self!r} is awaited: write `await ...`, with the name that begins with a"
            )
        return self.guard.call(self._once, operation)

    async def arun(self, operation: Operation[T]) -> T:
        """Async twin of `run`."""
        if isinstance(self.source, Sqlite):
            return await self.source.arun(lambda raw: self.connection(raw).run(operation()))
        if self._kind.is_async:
            return await self.guard.acall(self._aonce, operation)
        if isinstance(self.source, DjangoAlias):
            return await in_thread(in_own_thread, self.source, lambda: self.run(operation))
        return await in_thread(self.run, operation)

    def _once(self, operation: Operation[T]) -> T:
        with self._kind.begin(self.source) as raw:
            return self.connection(raw).run(operation())

    async def _aonce(self, operation: Operation[T]) -> T:
        async with self._kind.begin(self.source) as raw:
            return await self.connection(raw).arun(operation())

    def transaction(self) -> AbstractContextManager[Any]:
        """Lend a connection of the source with an open transaction, for the user's own rows."""
        if self._kind.is_async:
            raise TypeError(f"{self!r} is awaited: write `async with database.atransaction()`")
        begun: AbstractContextManager[Any] = self._kind.begin(self.source)
        return begun

    def atransaction(self) -> AbstractAsyncContextManager[Any]:
        """Async twin of `transaction`; for async sources, so not for a `Sqlite`."""
        if isinstance(self.source, Sqlite):
            raise TypeError(
                f"{self!r} is not awaited: write `await file.arun(lambda connection: ...)` on its"
                " Sqlite, which does all of it in one transaction; or begin one by aiosqlite, and"
                " pass that connection"
            )
        if not self._kind.is_async:
            raise TypeError(
                f"{self!r} is not awaited: write `with database.transaction()` in a thread, such as"
                " by asyncio.to_thread"
            )
        begun: AbstractAsyncContextManager[Any] = self._kind.begin(self.source)
        return begun


def checked_database(where: str, database: Any) -> Database:
    """Return `database` if it is a `Database`, or raise."""
    if not isinstance(database, Database):
        raise TypeError(f"{where}({database!r}, ...): pass a Database, such as Database(pool)")
    return database


# The kinds of sources


@asynccontextmanager
async def _begin_asyncpg(pool: Any) -> AsyncIterator[Any]:
    async with pool.acquire() as connection, connection.transaction():
        yield connection


@asynccontextmanager
async def _begin_psycopg_async(pool: Any) -> AsyncIterator[Any]:
    async with pool.connection() as connection, connection.transaction():
        yield connection


@contextmanager
def _begin_psycopg(pool: Any) -> Iterator[Any]:
    with pool.connection() as connection, connection.transaction():
        yield connection


_SOURCES: Final[dict[str, ConnectionSource]] = {
    "asyncpg.Pool": ConnectionSource("asyncpg", _begin_asyncpg),
    "psycopg_pool.AsyncConnectionPool": ConnectionSource("psycopg", _begin_psycopg_async),
    "psycopg_pool.ConnectionPool": ConnectionSource("psycopg", _begin_psycopg, is_async=False),
    "sqlalchemy.AsyncEngine": ConnectionSource("SQLAlchemy", methodcaller("begin")),
    "sqlalchemy.Engine": ConnectionSource("SQLAlchemy", methodcaller("begin"), is_async=False),
    "seawall.DjangoAlias": ConnectionSource("Django", begin_django, is_async=False),
    "seawall.Sqlite": ConnectionSource("sqlite3", Sqlite.transaction, is_async=False),
}


def _source_of(raw: Any) -> tuple[ConnectionSource, Dialect]:
    kind = known_class(_SOURCES, type(raw))
    if kind is None:
        raise TypeError(
            f"{raw!r} gives no connections that are known: pass an asyncpg pool, a psycopg_pool"
            " pool, a SQLAlchemy engine, DjangoAlias('default'), or Sqlite('orders.db')"
        )
    return kind, dialect_of(kind.name, raw.connection if kind.name == "Django" else raw)


@asynccontextmanager
async def aautocommit(database: Database) -> AsyncIterator[Any]:
    """Lend a connection in autocommit mode."""
    source: Any = database.source
    if hasattr(source, "acquire"):  # asyncpg: outside a transaction, each statement is one
        async with source.acquire() as raw:
            yield raw
    elif hasattr(source, "execution_options"):
        async with source.execution_options(isolation_level="AUTOCOMMIT").connect() as raw:
            yield raw
    else:
        async with source.connection() as raw:
            before = raw.autocommit
            await raw.set_autocommit(True)  # psycopg: the same; this sends nothing to the server
            try:
                yield raw
            finally:
                try:
                    await raw.set_autocommit(before)
                except Exception:  # noqa: BLE001 - broken or busy: it must not return to the pool
                    await raw.close()


@contextmanager
def autocommit(database: Database) -> Iterator[Any]:
    """Sync twin of `aautocommit`."""
    source: Any = database.source
    if isinstance(source, DjangoAlias):
        with autocommitting(source) as raw:
            yield raw
    elif hasattr(source, "execution_options"):
        with source.execution_options(isolation_level="AUTOCOMMIT").connect() as raw:
            yield raw
    else:
        with source.connection() as raw:
            before = raw.autocommit
            raw.set_autocommit(True)
            try:
                yield raw
            finally:
                try:
                    raw.set_autocommit(before)
                except Exception:  # noqa: BLE001 - broken or busy: it must not return to the pool
                    raw.close()
