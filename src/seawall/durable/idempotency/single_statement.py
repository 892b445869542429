"""The user's statement, its key and its events in one statement: one round trip, one commit.

The key's row is inserted as completed, with the rows that the user's statement returned. If the key
already exists, its unique index undoes the whole statement, and a second query reads the first
answer. The same happens if the user's statement fails, which runs before the key's insert: the
effect of the first request may be the reason. PostgreSQL only: SQLite has no data changes inside a
WITH clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from seawall.durable.database.connections import ConnectionKind, Rows, in_transaction, kind_of
from seawall.durable.database.database import (
    Database,
    Operation,
    aautocommit,
    autocommit,
    in_thread,
)
from seawall.durable.database.driver_errors import sqlstates
from seawall.durable.database.statements import (
    LONGEST_REMEMBERED,
    Arguments,
    StatementText,
    Style,
    TableNames,
    rendered,
    statements,
)
from seawall.durable.database.twins import OnConnection
from seawall.durable.idempotency import records
from seawall.durable.idempotency.once import checked_events, refuse
from seawall.durable.idempotency.records import MOST_READS, KeyRequest, KeyTerms
from seawall.durable.outbox.events import new_id
from seawall.durable.outbox.outbox import Outbox
from seawall.durable.outbox.with_clause import FROM_ROW, write
from seawall.errors import AnswerNotKept, Contended, RecordGarbled
from seawall.models.idempotency import Garbled, Replay, json_of
from seawall.runtime.driver import Steps

if TYPE_CHECKING:
    from seawall.durable.idempotency.idempotency import Idempotency

UNIQUE_VIOLATION: Final = "23505"
SEVERAL_ROWS: Final = "21000"
"""SQLSTATE of a subquery that returned several rows where one was expected."""
NO_ANSWER: Final = ("08", "57")
"""SQLSTATE classes that say nothing about the statement: connection lost, or cancelled."""
BUSINESS: Final = "business"
"""The name of the member with the user's statement."""
ROWS: Final = (
    "convert_to(CAST(array_to_json(ARRAY("
    "SELECT row_to_json(seawall_row.*) FROM business AS seawall_row"
    ")) AS text), 'UTF8')"
)
"""The returned rows, as stored for repeats; an array is cheaper than an aggregate."""


class Single(NamedTuple):
    """The result: the rows that were returned, now or the first time."""

    first: bool
    value: list[dict[str, Any]]


class _Statement(NamedTuple):
    """The user's statement with its key and events: a request of `twins`."""

    sql: str
    events: str
    terms: KeyTerms
    arguments: Arguments
    done: Callable[[], None]
    """Called when it was executed: in the thread that does it, if its caller was cancelled."""
    conn: Any = None
    """The user's connection; None for one of the database's in autocommit mode."""

    def run(self, database: Database) -> Rows:
        """Execute it."""
        if self.conn is not None:
            kind = _kind_outside_transaction(self.conn, awaited=False)
            return self._ended(self._send(database, self.conn, kind))
        if database.is_async:
            raise TypeError(f"{database!r} is awaited: write `await idempotency.asingle(...)`")
        return self._ended(database.guard.call(_execute, database, self))

    async def arun(self, database: Database) -> Rows:
        """Async twin of `run`."""
        if self.conn is not None:
            kind = _kind_outside_transaction(self.conn, awaited=True)
            return self._ended(await self._send(database, self.conn, kind))
        if not database.is_async:
            return await in_thread(self.run, database)
        return self._ended(await database.guard.acall(_aexecute, database, self))

    def _ended(self, rows: Rows) -> Rows:
        if rows:
            self.done()
        return rows

    def beside(self, operation: Operation[Any]) -> Any:
        """Return the request for an operation where the statement is executed."""
        return operation if self.conn is None else OnConnection(self.conn, operation)

    def _send(self, database: Database, raw: Any, kind: ConnectionKind) -> Any:
        """Send it; for an async connection, return an awaitable."""
        sql, events, terms = self[:3]
        made = text_of if len(sql) + len(events) <= LONGEST_REMEMBERED else text_of.__wrapped__
        text = made(kind.style, database.names, database._now, sql, events, terms)
        return kind.ask(raw, text, self.arguments)


async def _aexecute(database: Database, asked: _Statement) -> Rows:
    async with aautocommit(database) as raw:
        return cast("Rows", await asked._send(database, raw, kind_of(raw)))


def _execute(database: Database, asked: _Statement) -> Rows:
    with autocommit(database) as raw:
        return cast("Rows", asked._send(database, raw, kind_of(raw)))


def _kind_outside_transaction(conn: Any, *, awaited: bool) -> ConnectionKind:
    """Return the kind of `conn` if each of its statements is its own transaction; or raise."""
    kind = kind_of(conn)
    if kind.is_async != awaited:
        advice = "not awaited: write `single(...)`" if awaited else "awaited: write `asingle(...)`"
        raise TypeError(f"a connection of {kind.name} is {advice}")
    if kind.name in {"asyncpg", "psycopg"} and not in_transaction(kind, conn):
        return kind
    raise RuntimeError(
        f"a connection of {kind.name}: a key that is taken would break its transaction; pass one of"
        " asyncpg, or of psycopg with autocommit, that is in none; or leave conn= out"
    )


def single(
    idempotency: Idempotency,
    sql: str,
    arguments: Arguments,
    request: KeyRequest,
    outbox: Outbox | None,
    events: Iterable[Any],
    conn: Any,
) -> Steps[Single]:
    """Yield the statement and, if it failed or returned no row, look for the first answer."""
    statement = _statement_of(idempotency, sql, arguments, request, outbox, events)._replace(
        conn=conn
    )
    names = idempotency.database.names
    for _ in range(MOST_READS):
        rows, failure = [], None
        try:
            rows = yield statement
        except Exception as error:  # noqa: BLE001 - handled below
            failure = error
        if rows:
            return _fresh_result(rows)
        if failure is not None and not _is_refusal(failure):
            raise _explain(failure, statement, names)
        # Either the key exists, or the user's statement met the row that the first request left,
        # and did nothing or failed.
        found = yield statement.beside(lambda: records.read(request))
        if isinstance(found, Replay):
            return _replayed_result(idempotency, found, request)
        if found != "free":
            refuse(found, request.operation, idempotency._count)
        if failure is None:
            return Single(first=True, value=[])
        if not _has_state(failure, UNIQUE_VIOLATION):
            raise _explain(failure, statement, names)
        cleared = yield statement.beside(lambda: records.clear(request))
        if not cleared and not _is_ours(failure, names):
            raise failure
    raise Contended(
        f"the record of {request.operation!r} changed {MOST_READS} times while looked at"
    )


def _fresh_result(rows: Rows) -> Single:
    try:
        return Single(first=True, value=json_of(rows[0][0]))
    except Garbled:
        raise RecordGarbled("it was done, but the rows are no JSON that can be read") from None


def _replayed_result(idempotency: Idempotency, found: Replay, request: KeyRequest) -> Single:
    idempotency._count("replays")
    if not found.answer.kept:
        raise AnswerNotKept(f"the rows of {request.operation!r} were too large to be kept")
    return Single(first=False, value=records.value_of(found))


def _statement_of(
    idempotency: Idempotency,
    sql: str,
    arguments: Arguments,
    request: KeyRequest,
    outbox: Outbox | None,
    events: Iterable[Any],
) -> _Statement:
    if idempotency.database.dialect != "postgres":
        raise TypeError("a single statement needs PostgreSQL: on SQLite write once(conn, ...)")
    if not isinstance(sql, str) or not sql.strip():
        raise TypeError(f"sql={sql!r}: write an INSERT, UPDATE or DELETE ... RETURNING")
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments={arguments!r}: write a dict, such as {{'total': 500}}")
    added = checked_events(outbox, events, idempotency.database.names)
    own = {
        "seawall_scope": request.scope,
        "seawall_operation": request.operation,
        "seawall_key_hash": request.key_hash,
        "seawall_fingerprint": request.fingerprint,
    }
    # Without a business row there is no event: they are added only if there is one.
    text = ""
    if outbox is not None and added:
        by_id = {new_id(): event for event in added}
        text = write(own, outbox.name, by_id, BUSINESS, outbox.max_payload)
    if not own.keys().isdisjoint(arguments):
        twice = sorted(own.keys() & arguments.keys())
        raise ValueError(f"arguments: {twice} are names of our own; choose others")
    own.update(arguments)

    def done() -> None:
        idempotency._count("fresh", "completed")
        if outbox is not None:
            outbox.wake()

    return _Statement(sql, text, idempotency.terms, own, done)


@lru_cache(maxsize=256)
def text_of(
    style: Style, names: TableNames, now: str | None, sql: str, events: str, terms: KeyTerms
) -> StatementText:
    """Return the whole statement for a driver's style."""
    # The user's SQL is taken literally: braces have no meaning in it.
    users = sql.strip().rstrip(";").replace("{", "{{").replace("}", "}}")
    key = statements("postgres", "idempotency")["single"]
    # Our own rarely changing numbers are cheaper as text than as arguments.
    key = key.replace(":seawall_max_body", str(terms.max_body))
    key = key.replace(":seawall_ttl", str(terms.ttl)).replace(":seawall_rows", ROWS)
    members = f",\n{events.strip().strip(',')}" if events else ""
    return rendered(
        f"WITH {BUSINESS} AS (\n{users}\n){members},\n"
        f"seawall_key AS (\n{key}\n)\n"
        f"SELECT coalesce(body, {ROWS}) FROM seawall_key",
        "postgres",
        style,
        names,
        now,
    )


def _states(error: BaseException) -> list[str]:
    return [state for _, state in sqlstates(error) if isinstance(state, str)]


def _has_state(error: BaseException, state: str) -> bool:
    return state in _states(error)


def _is_refusal(error: BaseException) -> bool:
    """Return whether the server refused the statement, and can be asked again."""
    states = _states(error)
    return bool(states) and not any(state.startswith(NO_ANSWER) for state in states)


def _explain(error: Exception, asked: _Statement, names: TableNames) -> Exception:
    """Return a more helpful exception than `error`, if the call was wrong."""
    advice = ""
    order = text_of.__wrapped__("dollar", names, None, *asked[:3]).order
    if missing := sorted(set(order) - asked.arguments.keys()):
        advice = (
            f"arguments: {missing} are not given, and the statement has them; where a colon begins"
            " no argument, put it into quotes"
        )
    elif _has_state(error, SEVERAL_ROWS) and FROM_ROW in asked.events:
        advice = (
            "the statement returned several rows, and an event has a column of one (FromRow):"
            " write a statement for each row; nothing was done"
        )
    if not advice:
        return error
    explained = ValueError(advice)
    explained.__cause__ = error
    return explained


def _is_ours(error: BaseException, names: TableNames) -> bool:
    """Return whether the index of our key caused the conflict."""
    own = names.prefix + "idempotency_key"
    places = [
        place for seen, _ in sqlstates(error) for place in (seen, getattr(seen, "diag", None))
    ]
    return any(getattr(place, "constraint_name", None) == own for place in places)
