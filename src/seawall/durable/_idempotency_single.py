"""The user's own statement, its key and its events as one statement: one round trip, one commit.

The key's row is inserted last and as done, from what the user's statement returned. If the key is
there already, its unique index undoes the whole statement, and a second look tells what the first
was answered. PostgreSQL only: it alone has changes inside a WITH.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from seawall.durable import _idempotency_records as records
from seawall.durable._connections import Connection, Rows, in_transaction
from seawall.durable._idempotency_once import Outbox, checked_events, refuse
from seawall.durable._idempotency_records import LOOKS, Wanted
from seawall.durable._outbox_cte import members
from seawall.durable._sql import Arguments, Names, Style, Text, rendered, statements
from seawall.durable.database import Database
from seawall.errors import AnswerNotKept, Contended
from seawall.models.idempotency import Replay, json_of
from seawall.runtime.stepping import Steps, adrive, drive

if TYPE_CHECKING:
    from seawall.durable.idempotency import Idempotency

UNIQUE: Final = "23505"
BUSINESS: Final = "business"
"""The name of what the user's statement returns, within the whole."""


class Single(NamedTuple):
    """What came of it: the rows that were returned, now or the first time."""

    first: bool
    value: list[dict[str, Any]]


class _Statement(NamedTuple):
    sql: str
    events: str
    arguments: Arguments


def single(
    idempotency: Idempotency,
    sql: str,
    arguments: Arguments,
    wanted: Wanted,
    outbox: Outbox | None,
    events: Iterable[Any],
    conn: Any,
) -> Single:
    """Do it, blocking."""
    database = idempotency.database
    if conn is None and database.is_async:
        raise TypeError(f"{database!r} is awaited: write `await idempotency.asingle(...)`")
    statement = _checked(idempotency, sql, arguments, wanted, outbox, events)
    own = None if conn is None else _alone(database.connection(conn), awaited=False)

    def answer(asked: Any) -> Any:
        if own is not None:
            if asked is statement:
                return own.kind.ask(conn, _text(own, statement), statement.arguments)
            return own.run(asked())
        if asked is statement:
            return database.guard.call(_execute, database, statement)
        return database.run(asked)

    try:  # without steps: most are the first
        rows, failure = answer(statement), None
    except Exception as error:  # noqa: BLE001 - the steps look at it
        rows, failure = [(None,)], error
    if rows[0][0] is not None:
        return _made(idempotency, rows, outbox)
    return drive(_steps(idempotency, statement, wanted, outbox, failure), answer)


async def asingle(
    idempotency: Idempotency,
    sql: str,
    arguments: Arguments,
    wanted: Wanted,
    outbox: Outbox | None,
    events: Iterable[Any],
    conn: Any,
) -> Single:
    """Do it, awaiting."""
    database = idempotency.database
    if conn is None and not database.is_async:
        from asyncio import to_thread

        return await to_thread(single, idempotency, sql, arguments, wanted, outbox, events, None)
    statement = _checked(idempotency, sql, arguments, wanted, outbox, events)
    own = None if conn is None else _alone(database.connection(conn), awaited=True)

    def answer(asked: Any) -> Awaitable[Any]:
        if own is not None:
            if asked is statement:
                told: Awaitable[Any] = own.kind.ask(
                    conn, _text(own, statement), statement.arguments
                )
                return told
            return own.arun(asked())
        if asked is statement:
            return database.guard.acall(_aexecute, database, statement)
        return database.arun(asked)

    try:
        rows, failure = await answer(statement), None
    except Exception as error:  # noqa: BLE001 - the steps look at it
        rows, failure = [(None,)], error
    if rows[0][0] is not None:
        return _made(idempotency, rows, outbox)
    return await adrive(_steps(idempotency, statement, wanted, outbox, failure), answer)


def _alone(connection: Connection, *, awaited: bool) -> Connection:
    """Return `connection` if each of its statements is a transaction, or raise."""
    if connection.kind.is_async != awaited:
        said = "not awaited: write `single(...)`" if awaited else "awaited: write `asingle(...)`"
        raise TypeError(f"{connection!r} is {said}")
    known = connection.kind.name in {"asyncpg", "psycopg"}
    if known and not in_transaction(connection):
        return connection
    raise RuntimeError(
        f"{connection!r}: a key that is taken would break its transaction; pass a connection of"
        " asyncpg, or of psycopg with autocommit, that is in none; or leave conn= out"
    )


def _steps(
    idempotency: Idempotency,
    statement: _Statement,
    wanted: Wanted,
    outbox: Outbox | None,
    failure: Exception | None,
) -> Steps[Single]:
    """Tell what the first was told, or try again: the statement failed, or returned no row."""
    for _ in range(LOOKS):
        if failure is not None and not _is_unique(failure):
            raise failure
        # The key is there; or the user's statement finds its row as the first has left it.
        found = yield lambda: records.read(wanted)
        if isinstance(found, Replay):
            return _repeated(idempotency, found, wanted)
        if found != "free":
            refuse(found, wanted.operation, idempotency._count)
        if failure is None:
            return Single(first=True, value=[])
        cleared = yield lambda: records.clear(wanted)
        if not cleared and not _is_ours(failure, idempotency.database.names):
            raise failure
        try:
            rows, failure = (yield statement), None
        except Exception as error:  # noqa: BLE001 - looked at above
            rows, failure = [(None,)], error
        if rows[0][0] is not None:
            return _made(idempotency, rows, outbox)
    raise Contended(f"the record of {wanted.operation!r} changed {LOOKS} times while looked at")


def _made(idempotency: Idempotency, rows: Rows, outbox: Outbox | None) -> Single:
    idempotency._count("fresh", "completed")
    if outbox is not None:
        outbox.wake()
    return Single(first=True, value=json_of(rows[0][0]))


def _repeated(idempotency: Idempotency, found: Replay, wanted: Wanted) -> Single:
    idempotency._count("replays")
    if not found.answer.kept:
        raise AnswerNotKept(f"the rows of {wanted.operation!r} were too large to be kept")
    return Single(first=False, value=records.value_of(found))


def _checked(
    idempotency: Idempotency,
    sql: str,
    arguments: Arguments,
    wanted: Wanted,
    outbox: Outbox | None,
    events: Iterable[Any],
) -> _Statement:
    if idempotency.database.dialect != "postgres":
        raise TypeError("a single statement needs PostgreSQL: on SQLite write once(conn, ...)")
    if not isinstance(sql, str) or not sql.strip():
        raise TypeError(f"sql={sql!r}: write an INSERT, UPDATE or DELETE ... RETURNING")
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments={arguments!r}: write a dict, such as {{'total': 500}}")
    given_events = checked_events(outbox, events, idempotency.database.names)
    # Without a business row there is nothing to tell of: they are added for each that there is.
    text, more = "", dict[str, Any]()
    if outbox is not None and given_events:
        text, more = members(outbox.name, given_events, BUSINESS, outbox.max_payload)
    own = {
        **more,
        "seawall_scope": wanted.scope,
        "seawall_operation": wanted.operation,
        "seawall_key_hash": wanted.key_hash,
        "seawall_fingerprint": wanted.fingerprint,
        "seawall_max_body": idempotency.terms.max_body,
        "seawall_ttl": idempotency.terms.ttl,
    }
    if not own.keys().isdisjoint(arguments):
        twice = sorted(own.keys() & arguments.keys())
        raise ValueError(f"arguments: {twice} are names of our own; choose others")
    return _Statement(sql, text, {**arguments, **own})


@lru_cache(maxsize=256)
def text_of(style: Style, names: Names, now: str | None, sql: str, events: str) -> Text:
    """Return the whole as one driver wants it."""
    # What is the user's is taken as it is: braces have no meaning in it.
    users = sql.strip().rstrip(";").replace("{", "{{").replace("}", "}}")
    key = statements("postgres", "idempotency")["single"]
    members = f",\n{events.strip().strip(',')}" if events else ""
    return rendered(
        f"WITH {BUSINESS} AS (\n{users}\n){members},\n"
        "seawall_made AS (\nSELECT convert_to(CAST(json_agg(seawall_row) AS text), 'UTF8') AS body,"
        " {now} AS at"
        f" FROM {BUSINESS} AS seawall_row\n),\n"
        f"seawall_key AS (\n{key}\n)\nSELECT body FROM seawall_made",
        "postgres",
        style,
        names,
        now,
    )


# On a connection that commits by itself, where there is one


async def _aexecute(database: Database, asked: _Statement) -> list[tuple[Any, ...]]:
    async with _aconnection(database) as raw:
        connection = database.connection(raw)
        rows = await connection.kind.ask(raw, _text(connection, asked), asked.arguments)
        return cast("list[tuple[Any, ...]]", rows)


def _execute(database: Database, asked: _Statement) -> list[tuple[Any, ...]]:
    with _connection(database) as raw:
        connection = database.connection(raw)
        rows = connection.kind.ask(raw, _text(connection, asked), asked.arguments)
        return cast("list[tuple[Any, ...]]", rows)


def _text(connection: Connection, asked: _Statement) -> Text:
    now = connection._now
    return text_of(connection.kind.style, connection.names, now, asked.sql, asked.events)


@asynccontextmanager
async def _aconnection(database: Database) -> AsyncIterator[Any]:
    source: Any = database.source
    if hasattr(source, "acquire"):  # asyncpg: without a transaction each statement is one
        async with source.acquire() as raw:
            yield raw
    elif hasattr(source, "execution_options"):
        async with source.execution_options(isolation_level="AUTOCOMMIT").connect() as raw:
            yield raw
    else:
        async with source.connection() as raw:
            before = raw.autocommit
            await raw.set_autocommit(True)  # psycopg: the same; it asks the server nothing
            try:
                yield raw
            finally:
                try:
                    await raw.set_autocommit(before)
                except Exception:  # noqa: BLE001 - it is gone, or busy: nobody else may have it
                    await raw.close()


@contextmanager
def _connection(database: Database) -> Iterator[Any]:
    source: Any = database.source
    if hasattr(source, "execution_options"):
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
                except Exception:  # noqa: BLE001 - it is gone, or busy: nobody else may have it
                    raw.close()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(4):  # SQLAlchemy puts what a driver raised into its own error
        if seen is None:
            return
        yield seen
        seen = getattr(seen, "orig", None) or seen.__cause__


def _is_unique(error: BaseException) -> bool:
    return any(getattr(seen, "sqlstate", None) == UNIQUE for seen in _chain(error))


def _is_ours(error: BaseException, names: Names) -> bool:
    """Tell whether it was our key's index that was in the way."""
    own = names.prefix + "idempotency_key"
    return any(
        own in {getattr(seen, "constraint_name", None), _diagnosed(seen)} for seen in _chain(error)
    )


def _diagnosed(error: BaseException) -> str | None:
    name: str | None = getattr(getattr(error, "diag", None), "constraint_name", None)
    return name
