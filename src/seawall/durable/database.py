"""A database of the user's, for what is done in transactions of our own.

Promises: an operation is one transaction, committed before its result is returned, or it left
nothing. Where the database says that transactions were in each other's way (a deadlock, a failed
serialization) the whole of it is done again, a bounded number of times; a `Sqlite` that others have
locked is waited for. No state of a session is used: connections may come from a pooler in
transaction mode.

What is done *inside* a transaction of the user's own needs no `Database`: those operations take the
connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock
from seawall.durable._connections import Connection, connection_of
from seawall.durable._sql import Dialect, Names
from seawall.durable.sqlite import Sqlite
from seawall.guard import Guard
from seawall.models.backoff import full_jitter
from seawall.policies.retry import Retry
from seawall.runtime.stepping import Steps

if TYPE_CHECKING:
    from seawall.durable.leases import DatabaseLease, LeaseDesk

T = TypeVar("T")
Operation = Callable[[], Steps[T]]
"""Makes the steps anew for each try."""

CONFLICTS: Final = frozenset({"40001", "40P01", "55P03"})
"""What PostgreSQL says of transactions in each other's way."""

_BUSY: Final = ("database is locked", "database table is locked", "database schema is locked")


def is_conflict(error: BaseException) -> bool:
    """Tell whether the whole transaction is to be done again: it lost against another one."""
    seen: BaseException | None = error
    for _ in range(4):  # SQLAlchemy puts what a driver raised into its own error
        if seen is None:
            return False
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if state in CONFLICTS or (
            type(seen).__name__ == "OperationalError" and str(seen).startswith(_BUSY)
        ):
            return True
        seen = getattr(seen, "orig", None) or seen.__cause__
    return False


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Await what blocks. Who is cancelled waits for its end, or it would commit behind their back.

    Whatever they do next, such as giving a key back, comes after it.
    """
    from asyncio import CancelledError, ensure_future, shield, to_thread, wait

    working = ensure_future(to_thread(function, *args))
    try:
        return await shield(working)
    except CancelledError:
        await wait([working])
        if not working.cancelled():
            working.exception()  # nobody else looks at it
        raise


class Source(NamedTuple):
    """A kind of thing that gives connections."""

    name: str
    dialect: Callable[[Any], str]
    begin: Callable[[Any], Any]
    """`begin(raw)`: a context manager that gives a connection with a transaction begun."""
    is_async: bool = True


class Database:
    """Where our tables are, and how to get there."""

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
        """Use `source`: an asyncpg or psycopg pool, a SQLAlchemy engine, or a `Sqlite`.

        The tables are in `schema` (the database's usual one, unless given), and their names begin
        with `prefix`. A transaction that lost against others is done `attempts` times at most.
        That is done by a guard: with `name="orders"` it is called "orders database"; unless given,
        "database", or "database 2" and so on where that is taken.
        """
        self.source = source
        self._kind, self.dialect = _source_of(source)
        self.names = Names(schema, prefix)
        conflicts = Retry(
            on=lambda error, _value: error is not None and is_conflict(error),
            attempts=check.count("attempts", attempts),
            backoff=full_jitter(0.005, 0.25),
        )
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name={name!r}: write a name, such as name='orders'")
        # What else is named after the service, such as its edge, has a guard of that very name.
        own = registry.free_name("database") if name is None else f"{name} database"
        self.name = own if name is None else name
        self.guard = registry.release(Guard(own, conflicts, clock=clock))
        self.closed = False
        """Whether `close()` was called."""
        self._now: str | None = None
        self._lease_desk: LeaseDesk | None = None

    def __repr__(self) -> str:
        return f"<Database {self.name!r}: {self._kind.name}, {self.names!r}>"

    @property
    def is_async(self) -> bool:
        """Whether it is awaited: then `arun`, else both."""
        return self._kind.is_async

    def connection(self, raw: Any) -> Connection:
        """Return a connection of the user's own, for the tables of this database."""
        return connection_of(raw, self.names, self._now)

    def close(self) -> None:
        """Free the name and give back what is leased; `source` stays open.

        Metrics and pages ask it no more. A database that is awaited gives leases back soon, in its
        event loop: do not close its pool in the same breath, or release them before.
        """
        self.closed = True
        if self._lease_desk is not None:
            self._lease_desk.close()
        self.guard.close()

    # Leases

    def lease(self, name: str) -> DatabaseLease:
        """Return the lease called `name`; see `seawall.leases.store.LeaseStore`."""
        from seawall.durable.leases import DatabaseLease, LeaseDesk

        if self._lease_desk is None:
            self._lease_desk = LeaseDesk(self)
        return DatabaseLease(self, name, self._lease_desk)

    # Transactions

    def run(self, operation: Operation[T]) -> T:
        """Do an operation in a transaction of its own, blocking."""
        if isinstance(self.source, Sqlite):
            return self.source.run(lambda raw: self.connection(raw).run(operation()))
        if self._kind.is_async:
            raise TypeError(
                f"{self!r} is awaited: write `await ...`, with the name that begins with a"
            )
        return self.guard.call(self._once, operation)

    async def arun(self, operation: Operation[T]) -> T:
        """Do an operation in a transaction of its own, awaiting."""
        if isinstance(self.source, Sqlite):
            return await self.source.arun(lambda raw: self.connection(raw).run(operation()))
        if self._kind.is_async:
            return await self.guard.acall(self._aonce, operation)
        return await in_thread(self.run, operation)

    def _once(self, operation: Operation[T]) -> T:
        with self._kind.begin(self.source) as raw:
            return self.connection(raw).run(operation())

    async def _aonce(self, operation: Operation[T]) -> T:
        async with self._kind.begin(self.source) as raw:
            return await self.connection(raw).arun(operation())

    def transaction(self) -> AbstractContextManager[Any]:
        """Give a connection of the source with a transaction begun, for the user's own rows."""
        if self._kind.is_async:
            raise TypeError(f"{self!r} is awaited: write `async with database.atransaction()`")
        begun: AbstractContextManager[Any] = self._kind.begin(self.source)
        return begun

    def atransaction(self) -> AbstractAsyncContextManager[Any]:
        """Do the same, awaiting; for sources that are awaited, so not for a `Sqlite`."""
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


def _begin_engine(engine: Any) -> Any:
    return engine.begin()


def _begin_sqlite(source: Sqlite) -> Any:
    return source.transaction()


def _of_engine(engine: Any) -> str:
    name: str = engine.dialect.name
    return name


def _postgres(_raw: Any) -> str:
    return "postgresql"


def _sqlite(_raw: Any) -> str:
    return "sqlite"


_SOURCES: Final[dict[str, Source]] = {
    "asyncpg.Pool": Source("asyncpg", _postgres, _begin_asyncpg),
    "psycopg_pool.AsyncConnectionPool": Source("psycopg", _postgres, _begin_psycopg_async),
    "psycopg_pool.ConnectionPool": Source("psycopg", _postgres, _begin_psycopg, is_async=False),
    "sqlalchemy.AsyncEngine": Source("SQLAlchemy", _of_engine, _begin_engine),
    "sqlalchemy.Engine": Source("SQLAlchemy", _of_engine, _begin_engine, is_async=False),
    "seawall.Sqlite": Source("sqlite3", _sqlite, _begin_sqlite, is_async=False),
}


def _source_of(raw: Any) -> tuple[Source, Dialect]:
    for owner in type(raw).__mro__:
        kind = _SOURCES.get(f"{owner.__module__.partition('.')[0]}.{owner.__name__}")
        if kind is not None:
            dialects: dict[str, Dialect] = {"postgresql": "postgres", "sqlite": "sqlite"}
            name = kind.dialect(raw)
            if name not in dialects:
                raise TypeError(f"{raw!r} is for {name}: known are PostgreSQL and SQLite")
            return kind, dialects[name]
    raise TypeError(
        f"{raw!r} gives no connections that are known: pass an asyncpg pool, a psycopg_pool pool, a"
        " SQLAlchemy engine, or Sqlite('orders.db')"
    )
