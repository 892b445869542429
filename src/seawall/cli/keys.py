"""`seawall keys`: show the state of an idempotency key and its outcome, or free it.

Promises:
- No stored answer and no payload is shown.
- A key that is in flight is never forgotten.
- The password of a database's address appears in no message.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from seawall._failures import described
from seawall.durable import Database, Idempotency, Inbox, KeyInFlight, KeyRecord, Sqlite
from seawall.durable.http.middleware import read_scope, scope_text

ADDRESS: Final = "SEAWALL_DATABASE"
"""The environment variable that names the database."""
ABOUT: Final = """\
Look up an idempotency key, or forget it.

  seawall keys show --scope acme --scope ann 'POST /orders' 8e03978e-40d5
  seawall keys forget --scope acme 'POST /orders' 8e03978e-40d5

`show` tells the state of the key, its status and times, and the events that were committed
with it; with --consumer, whether that consumer has handled them. `forget` removes the record,
so that the next request with the key is carried out: do it only if you know that the effect
did not happen, or may happen twice. A key that is in flight is left alone.
"""

_FOUND: Final = 0
_NOT_FOUND: Final = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    parser.description, parser.formatter_class = ABOUT, RawDescriptionHelpFormatter
    add = parser.add_argument
    add("act", choices=("show", "forget"), help="what to do")
    add("operation", help="what the key is for, such as 'POST /orders'")
    add("key", help="the key as the client sent it, without quotes; - reads it")
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument(
        "--scope",
        action="append",
        metavar="TEXT",
        help="whose key it is; once for each part, such as tenant and user, or as a JSON list such"
        ' as ["acme", 7]',
    )
    whose.add_argument("--unscoped", action="store_true", help="the keys belong to nobody")
    add_database_arguments(parser)
    about = "with show: tell which events this consumer of the inbox has handled"
    add("--consumer", action="append", default=[], metavar="NAME", help=about)
    add(
        "--inbox",
        metavar="ADDRESS",
        help="with --consumer: the database of the inbox, if it is another one",
    )
    add("--json", action="store_true", help="with show: as JSON")
    add("--yes", action="store_true", help="with forget: do not ask")


def add_database_arguments(parser: ArgumentParser) -> None:
    """Add the arguments for the location of the tables to `parser`."""
    parser.add_argument(
        "--database",
        metavar="ADDRESS",
        default=os.environ.get(ADDRESS),
        help=f"postgresql://... or the path of a SQLite file (default: {ADDRESS} of the"
        " environment, where no other process sees the password)",
    )
    parser.add_argument("--schema", help="the schema of the tables (PostgreSQL)")
    parser.add_argument("--prefix", default="seawall_", help="the tables' prefix (%(default)s)")


def main(args: Namespace) -> int:
    """Run the command; return the exit status: 1 if there is no such record."""
    scope = None if args.unscoped else _stored_scope(args.scope)
    key = sys.stdin.readline().strip() if args.key == "-" else args.key
    named = (scope, args.operation, key)
    with opened_database(args, args.database, "keys") as database:
        idempotency = Idempotency(database, unscoped=args.unscoped)
        if args.act == "forget":
            return _forget(idempotency, named, asks=not args.yes)
        record = idempotency.lookup(*named)
        if record is None:
            sys.stdout.write("There is no record of this key.\n")
            return _NOT_FOUND
        handled = _handled(args, database, record)
    if args.json:
        document = record._asdict()
        document["events"] = [
            {**event._asdict(), "handled_by": handled[event.id]} for event in record.events
        ]
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(record, handled)) + "\n")
    return _FOUND


def _stored_scope(parts: list[str]) -> str:
    text = read_scope(parts[0]) if len(parts) == 1 else scope_text(tuple(parts))
    if text is None:
        raise ValueError("--scope: write whose key it is")
    return text


@contextmanager
def opened_database(args: Namespace, address: str | None, name: str) -> Iterator[Database]:
    """Open the database at `address`; an error does not contain the address."""
    source: Any
    if not address:
        raise ValueError(f"write --database, or set {ADDRESS}")
    postgres = address.startswith(("postgresql://", "postgres://"))
    if not postgres and ("://" in address or not Path(address).is_file()):
        raise ValueError("--database: write postgresql://... or the path of a SQLite file")
    schema = args.schema if postgres else None
    try:
        if postgres:
            from psycopg_pool import ConnectionPool

            source = ConnectionPool(address, min_size=1, max_size=1, timeout=10.0, open=True)
        else:
            source = Sqlite(address)
        with closing(source):
            opened = Database(source, schema=schema, prefix=args.prefix, name=f"seawall {name}")
            with closing(opened) as database:
                yield database
    except (ModuleNotFoundError, ValueError, TypeError, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 - a driver's message may contain the address
        raise ValueError(described(error)) from None


def confirmed(question: str) -> bool:
    """Ask the user, and return whether the answer is yes."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _handled(args: Namespace, database: Database, record: KeyRecord) -> dict[str, list[str]]:
    elsewhere = args.consumer and args.inbox
    with opened_database(args, args.inbox, "inbox") if elsewhere else nullcontext(database) as at:
        inbox = Inbox(at)
        return {
            event.id: [name for name in args.consumer if inbox.seen(name, event.id)]
            for event in record.events
        }


def _forget(idempotency: Idempotency, named: tuple[str | None, str, str], *, asks: bool) -> int:
    if asks and not confirmed("The next request with this key will be carried out. Forget it?"):
        sys.stdout.write("Nothing was done.\n")
        return _NOT_FOUND
    try:
        found = idempotency.forget(*named)
    except KeyInFlight as error:
        sys.stdout.write(f"It is in flight, for up to {error.retry_after:.0f} s: left alone.\n")
        return _NOT_FOUND
    sys.stdout.write("Forgotten.\n" if found else "There is no record of this key.\n")
    return _FOUND if found else _NOT_FOUND


def _lines(record: KeyRecord, handled: dict[str, list[str]]) -> Iterator[str]:
    yield f"state      {record.state}"
    if record.status is not None:
        yield f"status     {record.status}"
    if record.body_bytes is not None or not record.kept:
        size = f"{record.body_bytes or 0} bytes"
        yield f"answer     {size if record.kept else 'too large, not kept'}"
    yield f"created    {_moment(record.created_at)}"
    if record.lease_until is not None:
        yield f"lease      until {_moment(record.lease_until)}"
    yield f"expires    {_moment(record.expires_at)}"
    yield f"takeovers  {record.takeovers}"
    yield f"events     {len(record.events) or 'none is stored'}"
    for event in record.events:
        by = handled[event.id]
        handlers = f", handled by {', '.join(by)}" if by else ""
        named = f"{event.type} of {event.aggregate} {event.aggregate_id}"
        yield f"  {named!r}: {event.state} in outbox {event.outbox!r}{handlers}; id {event.id}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
