"""Helpful errors for a statement of ours that failed because one of our tables is missing.

Promises:

- Only a missing table of ours is reported in this way. A missing table of the user, which a
  statement may use together with ours, is raised as the driver raised it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Final

from seawall.durable.database.statements import TableNames

UNDEFINED_TABLE: Final = "42P01"
"""PostgreSQL's SQLSTATE for a missing table, also if its schema is missing."""

_SQLITE: Final = "no such table: "
_CREATED: Final = re.compile(r"CREATE TABLE \{(\w+)\}")


class TablesMissing(RuntimeError):
    """Our tables were never created. Only the operator can fix that; waiting does not help."""


def tables_missing(error: Exception, names: TableNames) -> TablesMissing | None:
    """Return the exception to raise from `error` if a table of ours is missing; else None."""
    table = _missing(error, names)
    if table is None:
        return None
    return TablesMissing(
        f"there is no table {table}: run migrate(database), or `await amigrate(database)`, first"
    )


def _missing(error: Exception, names: TableNames) -> str | None:
    """Return the table of ours that a driver reports as missing."""
    seen: BaseException | None = error
    for _ in range(4):  # SQLAlchemy wraps the driver's exception
        if seen is None:
            return None
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if state == UNDEFINED_TABLE:
            return _named(str(seen), names)
        if type(seen).__name__ == "OperationalError" and str(seen).startswith(_SQLITE):
            return _named(str(seen).removeprefix(_SQLITE), names)
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None


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
