"""What the exceptions of drivers mean: a lost conflict, or a table of ours that is missing.

Promises:

- Only a missing table of ours is reported as `TablesMissing`. A missing table of the user, which a
  statement may use together with ours, is raised as the driver raised it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Final

from seawall.durable.database.statements import TableNames

CONFLICTS: Final = frozenset({"40001", "40P01", "55P03"})
"""PostgreSQL's SQLSTATEs for conflicting transactions."""
UNDEFINED_TABLE: Final = "42P01"
"""PostgreSQL's SQLSTATE for a missing table, also if its schema is missing."""

_BUSY: Final = ("database is locked", "database table is locked", "database schema is locked")
_SQLITE: Final = "no such table: "
_CREATED: Final = re.compile(r"CREATE TABLE \{(\w+)\}")


class TablesMissing(RuntimeError):
    """Our tables were never created. Only the operator can fix that; waiting does not help."""


def sqlstates(error: BaseException) -> Iterator[tuple[BaseException, str | None]]:
    """Yield an exception and its causes (SQLAlchemy wraps the driver's), each with its SQLSTATE."""
    seen: BaseException | None = error
    for _ in range(4):
        if seen is None:
            return
        yield seen, getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        seen = getattr(seen, "orig", None) or seen.__cause__


def is_conflict(error: BaseException) -> bool:
    """Return whether the transaction lost a conflict and must be repeated as a whole."""
    return any(
        state in CONFLICTS
        or (type(seen).__name__ == "OperationalError" and str(seen).startswith(_BUSY))
        for seen, state in sqlstates(error)
    )


def raise_if_missing(error: Exception, names: TableNames) -> None:
    """Raise `TablesMissing` from `error` if a table of ours is missing."""
    for seen, state in sqlstates(error):
        text = str(seen)
        if state == UNDEFINED_TABLE or (
            type(seen).__name__ == "OperationalError" and text.startswith(_SQLITE)
        ):
            table = _named(text.removeprefix(_SQLITE), names)
            if table is None:
                return
            raise TablesMissing(
                f"there is no table {table}: run migrate(database), or `await amigrate(database)`,"
                " first"
            ) from error


def _named(text: str, names: TableNames) -> str | None:
    # The message and its quotation marks are localised: only the name counts.
    line = text.partition("\n")[0]
    for table in _tables():
        own = names.prefix + table
        name = own if names.schema is None else f"{names.schema}.{own}"
        # A table in another schema, or with a longer name, is not ours.
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", line):
            return name
    return None


@cache
def _tables() -> frozenset[str]:
    """Return the names of our tables, without their prefix."""
    folder = files("seawall.durable").joinpath("sql", "sqlite", "migrations")
    texts = [entry.read_text("utf-8") for entry in folder.iterdir()]
    return frozenset(name for text in texts for name in _CREATED.findall(text))
