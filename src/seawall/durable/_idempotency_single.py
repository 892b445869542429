"""The user's own statement, its key and its events as one statement: one round trip, one commit.

The key's row is inserted last and as done, from what the user's statement returned. If the key is
there already, its unique index undoes the whole statement, and a second look tells what the first
was answered. PostgreSQL only: it alone has changes inside a WITH.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from seawall.durable import _idempotency_records as records
from seawall.durable._connections import Connection, in_transaction
from seawall.durable._idempotency_errors import AnswerNotKept
from seawall.durable._idempotency_once import Outbox, refuse
from seawall.durable._idempotency_records import LOOKS, Wanted
from seawall.durable._sql import Arguments, Names, Style, Text, rendered, statements
from seawall.durable.database import Database
from seawall.errors import Contended
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
    statement = _checked(idempotency, sql, arguments, wanted, outbox, events)
    own = None if conn is None else _alone(database.connection(conn))

    def answer(asked: Any) -> Any:
        if own is not None:
            if isinstance(asked, _Statement):
                return own.kind.ask(conn, _text(own, asked), asked.arguments)
            return own.run(asked())
        if isinstance(asked, _Statement):
            return database.guard.call(_execute, database, asked)
        return database.run(asked)

    return _woken(drive(_steps(idempotency, statement, wanted), answer), outbox)


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
    statement = _checked(idempotency, sql, arguments, wanted, outbox, events)
    own = None if conn is None else _alone(database.connection(conn))

    async def answer(asked: Any) -> Any:
        if own is not None:
            if isinstance(asked, _Statement):
                return await own.kind.ask(conn, _text(own, asked), asked.arguments)
            return await own.arun(asked())
        if isinstance(asked, _Statement):
            return await database.guard.acall(_aexecute, database, asked)
        return await database.arun(asked)

    return _woken(await adrive(_steps(idempotency, statement, wanted), answer), outbox)


def _alone(connection: Connection) -> Connection:
    """Return `connection` if each of its statements is a transaction, or raise."""
    known = connection.kind.name in {"asyncpg", "psycopg"}
    if known and not in_transaction(connection):
        return connection
    raise RuntimeError(
        f"{connection!r}: a key that is taken would break its transaction; pass a connection of"
        " asyncpg, or of psycopg with autocommit, that is in none; or leave conn= out"
    )


def _woken(done: Single, outbox: Outbox | None) -> Single:
    if outbox is not None and done.first:
        outbox.wake()
    return done


def _steps(idempotency: Idempotency, statement: _Statement, wanted: Wanted) -> Steps[Single]:
    for _ in range(LOOKS):
        done, failure = yield from _tried(statement)
        if done is not None:
            idempotency.count("fresh")
            idempotency.count("completed")
            return Single(first=True, value=done)
        # The key is there; or the user's statement finds its row as the first has left it.
        found = yield lambda: records.read(wanted)
        if isinstance(found, Replay):
            return _repeated(idempotency, found, wanted)
        if found != "free":
            refuse(found, wanted.operation, idempotency.count)
        if failure is None:
            return Single(first=True, value=[])
        cleared = yield lambda: records.clear(wanted)
        if not cleared and not _is_ours(failure, idempotency.database.names):
            raise failure
    raise Contended(f"the record of {wanted.operation!r} changed {LOOKS} times while looked at")


def _tried(statement: _Statement) -> Steps[tuple[list[dict[str, Any]] | None, Exception | None]]:
    """Return the rows, None where there were none; and what unique index was in the way."""
    try:
        rows = yield statement
    except Exception as error:
        if not _is_unique(error):
            raise
        return None, error
    return (None if rows[0][0] is None else json_of(rows[0][0])), None


def _repeated(idempotency: Idempotency, found: Replay, wanted: Wanted) -> Single:
    idempotency.count("replays")
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
    given_events = list(events)
    if given_events and outbox is None:
        raise TypeError("events: say which outbox they are for, too: outbox=...")
    # Without a business row there is nothing to tell of: they are added for each that there is.
    text, more, *_ = (
        outbox.rows_cte(given_events, source=BUSINESS) if outbox and given_events else ("", {})
    )
    own = {
        **more,
        "seawall_scope": wanted.scope,
        "seawall_operation": wanted.operation,
        "seawall_key_hash": wanted.key_hash,
        "seawall_fingerprint": wanted.fingerprint,
        "seawall_owner": wanted.owner,
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
    now = connection._now  # noqa: SLF001 - a test's time
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
        async with database.atransaction() as raw:
            yield raw


@contextmanager
def _connection(database: Database) -> Iterator[Any]:
    source: Any = database.source
    if hasattr(source, "execution_options"):
        with source.execution_options(isolation_level="AUTOCOMMIT").connect() as raw:
            yield raw
    else:
        with database.transaction() as raw:
            yield raw


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
