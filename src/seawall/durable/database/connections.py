"""Connections of the user, of any supported library, behind one interface.

Supported are asyncpg, psycopg (3), SQLAlchemy (2: sessions and connections, sync and async),
Django, sqlite3 and aiosqlite. They are recognised by their class, so none of these libraries is
imported here. A given connection is never committed, rolled back or reconfigured: it may be in the
middle of a transaction, and behind a pooler that gives it to another client afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self, TypeVar

from seawall.durable.database.driver_errors import raise_if_missing
from seawall.durable.database.statements import (
    Arguments,
    Dialect,
    StatementText,
    Style,
    TableNames,
    rendered,
    statement,
)
from seawall.runtime.driver import Steps, adrive, drive

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


class NamedQuery(NamedTuple):
    """A query of an operation: a statement by its name, "file.name"."""

    which: str
    arguments: Arguments

    def of_batch(self, batch: int) -> Self:
        """Return the query with the argument `batch`: the maximum number of rows."""
        return self._replace(arguments={**self.arguments, "batch": batch})

    def alone(self) -> Steps[Rows]:
        """Ask only this: an operation of one query, which returns its rows."""
        rows: Rows = yield self
        return rows


class TextQuery(NamedTuple):
    """A query with a composed text, written as in `sql/`."""

    text: str
    arguments: Arguments


class Connection:
    """One connection behind the common interface."""

    def __init__(
        self,
        raw: Any,
        kind: ConnectionKind,
        dialect: Dialect,
        names: TableNames,
        now: str | None = None,
    ) -> None:
        """Wrap `raw`, for the tables of `names`."""
        self.raw = raw
        self.kind = kind
        self.dialect: Dialect = dialect
        self.names = names
        self._now = now

    def __repr__(self) -> str:
        return f"<Connection of {self.kind.name}>"

    def _text(self, query: NamedQuery | TextQuery) -> StatementText:
        style = self.kind.style
        if isinstance(query, NamedQuery):
            return statement(self.dialect, style, self.names, query.which, self._now)
        return rendered(query.text, self.dialect, style, self.names, self._now)

    def run(self, steps: Steps[T]) -> T:
        """Run an operation."""
        ask = self.kind.ask

        def answer(query: NamedQuery | TextQuery) -> Any:
            try:
                return ask(self.raw, self._text(query), query.arguments)
            except Exception as error:
                raise_if_missing(error, self.names)
                raise

        return drive(steps, answer)

    async def arun(self, steps: Steps[T]) -> T:
        """Async twin of `run`."""
        ask = self.kind.ask

        async def answer(query: NamedQuery | TextQuery) -> Any:
            try:
                return await ask(self.raw, self._text(query), query.arguments)
            except Exception as error:
                raise_if_missing(error, self.names)
                raise

        return await adrive(steps, answer)

    def join(self, steps: Steps[T], so_that: str) -> T:
        """Run an operation in the open transaction of the user; raise if there is none."""
        if self.kind.is_async:
            raise TypeError(f"{self!r} is awaited: write `await`, and the name that begins with a")
        require_transaction(self, so_that)
        return self.run(steps)

    async def ajoin(self, steps: Steps[T], so_that: str) -> T:
        """Async twin of `join`."""
        if not self.kind.is_async:
            raise TypeError(f"{self!r} is not awaited: write the name without the a")
        await arequire_transaction(self, so_that)
        return await self.arun(steps)


class ConnectionKind(NamedTuple):
    """A kind of connection: how to query it, and which database is behind it."""

    name: str
    style: Style
    ask: Callable[[Any, StatementText, Arguments], Any]
    is_async: bool = True


def connection_of(raw: Any, names: TableNames, now: str | None = None) -> Connection:
    """Return `raw` wrapped; or raise an error that names the supported libraries."""
    kind = kind_of(raw)
    return Connection(raw, kind, dialect_of(kind.name, raw), names, now)


def kind_of(raw: Any) -> ConnectionKind:
    """Return the kind of a connection; or raise an error that names the supported libraries."""
    kind = _kind_of(type(raw))  # type: ignore[arg-type]  # a class is hashable
    if kind is None:
        raise TypeError(
            f"{raw!r} is no connection that is known: pass one of asyncpg, psycopg, SQLAlchemy (a"
            " session or a connection), Django, sqlite3 or aiosqlite, with a transaction begun"
        )
    return kind


@lru_cache(maxsize=64)
def _kind_of(given: Any) -> ConnectionKind | None:
    return known_class(_KINDS, given)


def known_class(kinds: Mapping[str, T], given: type) -> T | None:
    """Return what `kinds` has for a class or one of its bases, by "package.Name"."""
    names = (f"{owner.__module__.partition('.')[0]}.{owner.__name__}" for owner in given.__mro__)
    return next((kinds[name] for name in names if name in kinds), None)


def dialect_of(library: str, raw: Any) -> Dialect:
    """Return which database is behind a connection or an engine of `library`; or raise."""
    match library:
        case "asyncpg" | "psycopg":
            return "postgres"
        case "sqlite3" | "aiosqlite":
            return "sqlite"
        case "Django":
            name = raw.vendor
        case _:
            name = (raw.get_bind() if hasattr(raw, "get_bind") else raw).dialect.name
    if name == "postgresql":
        return "postgres"
    if name == "sqlite":
        return "sqlite"
    raise TypeError(f"{raw!r} is for {name}: known are PostgreSQL and SQLite")


def in_transaction(kind: ConnectionKind, raw: Any) -> bool:
    """Return whether changes are committed later; True if the library does not say.

    An `AsyncSession` can say so only when awaited: `ain_transaction` handles that.
    """
    match kind.name:
        case "asyncpg":
            return bool(raw.is_in_transaction())
        case "psycopg":
            return not raw.autocommit or raw.info.transaction_status != 0
        case "sqlite3" | "aiosqlite":
            if raw.in_transaction:
                return True
            # Only the legacy mode begins a transaction implicitly, before the first change.
            return getattr(raw, "autocommit", -1) is not True and raw.isolation_level is not None
        case "Django":
            return bool(raw.in_atomic_block or not raw.get_autocommit())
    return not _commits_each(raw)


async def ain_transaction(kind: ConnectionKind, raw: Any) -> bool:
    """Return the same as `in_transaction`, for any async connection."""
    if hasattr(raw, "sync_session"):
        raw = await raw.connection()  # the next statement would check it out of the pool anyway
    return in_transaction(kind, raw)


def require_transaction(connection: Connection, so_that: str) -> None:
    """Raise unless changes are committed later, with the transaction."""
    if not in_transaction(connection.kind, connection.raw):
        raise _no_transaction(connection, so_that)


async def arequire_transaction(connection: Connection, so_that: str) -> None:
    """Async twin of `require_transaction`."""
    if not await ain_transaction(connection.kind, connection.raw):
        raise _no_transaction(connection, so_that)


def _no_transaction(connection: Connection, so_that: str) -> RuntimeError:
    what = "has no transaction: begin one"
    if connection.kind.name == "SQLAlchemy":  # it begins implicitly, unless configured otherwise
        what = "commits each statement for itself: use another isolation_level than AUTOCOMMIT"
    return RuntimeError(f"{connection!r} {what}, so that {so_that}")


def _commits_each(raw: Any) -> bool:
    """Return whether SQLAlchemy is configured to commit each statement (AUTOCOMMIT).

    Its transactions begin implicitly, but with AUTOCOMMIT that is only apparent. This sends nothing
    to the database.
    """
    if hasattr(raw, "sync_session"):
        raw = raw.get_bind()  # usually an engine: its connection is only available by awaiting
    elif hasattr(raw, "sync_connection"):
        raw = raw.sync_connection
    elif hasattr(raw, "get_bind"):
        raw = raw.connection()
    if raw is None or getattr(raw, "closed", False):
        return False  # the statement itself will fail with the reason
    level = raw.get_execution_options().get("isolation_level")
    if level is not None:
        return bool(level == "AUTOCOMMIT")
    if getattr(raw, "invalidated", True):
        return False  # an engine, or a connection that was lost
    if getattr(raw.connection.dbapi_connection, "autocommit", None) is True:
        return True
    driver = raw.connection.driver_connection
    # On SQLite, that setting is also used to leave BEGIN to a listener of the user; in that case
    # there is a transaction as soon as SQLAlchemy has begun.
    return (
        raw.dialect.name == "sqlite"
        and raw.in_transaction()
        and driver.isolation_level is None
        and not driver.in_transaction
    )


def still_open(connection: Connection) -> bool:
    """Return whether the transaction of an earlier query is still open."""
    raw = connection.raw
    match connection.kind.name:
        case "asyncpg":
            return bool(raw.is_in_transaction())
        case "psycopg":
            return bool(raw.info.transaction_status != 0)
        case "sqlite3" | "aiosqlite":
            return bool(raw.in_transaction)
        case "Django":
            return in_transaction(connection.kind, raw)
    return bool(raw.in_transaction())


# The query functions of each kind


async def _ask_asyncpg(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    return [tuple(row) for row in await raw.fetch(text.sql, *text.positional(arguments))]


async def _ask_psycopg_async(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    from psycopg import AsyncCursor
    from psycopg.rows import tuple_row

    # Our own cursor: those of the user's connection may produce rows of another type.
    cursor = await AsyncCursor(raw, row_factory=tuple_row).execute(text.sql, arguments)
    return await cursor.fetchall() if cursor.description else []


def _ask_psycopg(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    cursor = Cursor(raw, row_factory=tuple_row).execute(text.sql, arguments)
    return cursor.fetchall() if cursor.description else []


async def _ask_sqlalchemy_async(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    from sqlalchemy import text as clause

    result = await raw.execute(clause(text.sql), arguments)
    return [tuple(row) for row in result.all()] if result.returns_rows else []


def _ask_sqlalchemy(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    from sqlalchemy import text as clause

    result = raw.execute(clause(text.sql), arguments)
    return [tuple(row) for row in result.all()] if result.returns_rows else []


def _ask_sqlite(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    cursor = raw.cursor()
    cursor.row_factory = None  # the user's factory may turn a row into anything
    return list(cursor.execute(text.sql, arguments).fetchall())


async def _ask_aiosqlite(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    async with raw.cursor() as cursor:
        cursor.row_factory = None
        await cursor.execute(text.sql, arguments)
        return list(await cursor.fetchall())


def _ask_django(raw: Any, text: StatementText, arguments: Arguments) -> Rows:
    with raw.cursor() as cursor:
        cursor.execute(text.sql, arguments)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []


_DJANGO: Final = ConnectionKind("Django", "pyformat", _ask_django, is_async=False)
_ASYNCPG: Final = ConnectionKind("asyncpg", "dollar", _ask_asyncpg)
_SQLALCHEMY: Final = ConnectionKind("SQLAlchemy", "escaped", _ask_sqlalchemy, is_async=False)
_SQLALCHEMY_ASYNC: Final = ConnectionKind("SQLAlchemy", "escaped", _ask_sqlalchemy_async)

_KINDS: Final[dict[str, ConnectionKind]] = {
    "asyncpg.Connection": _ASYNCPG,
    "asyncpg.PoolConnectionProxy": _ASYNCPG,
    "psycopg.AsyncConnection": ConnectionKind("psycopg", "pyformat", _ask_psycopg_async),
    "psycopg.Connection": ConnectionKind("psycopg", "pyformat", _ask_psycopg, is_async=False),
    "sqlalchemy.AsyncSession": _SQLALCHEMY_ASYNC,
    "sqlalchemy.AsyncConnection": _SQLALCHEMY_ASYNC,
    "sqlalchemy.Session": _SQLALCHEMY,
    "sqlalchemy.Connection": _SQLALCHEMY,
    "django.BaseDatabaseWrapper": _DJANGO,
    "django.ConnectionProxy": _DJANGO,  # `django.db.connection`
    "sqlite3.Connection": ConnectionKind("sqlite3", "named", _ask_sqlite, is_async=False),
    "aiosqlite.Connection": ConnectionKind("aiosqlite", "named", _ask_aiosqlite),
}
