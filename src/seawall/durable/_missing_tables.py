"""A statement of ours that failed since one of our tables is missing: say what was forgotten.

Promises: only a missing table of ours is told of in this way; one of the user's, which a statement
may name beside ours, is the user's error, and is raised as the driver raised it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Final

from seawall.durable._sql import Names

UNDEFINED_TABLE: Final = "42P01"
"""What PostgreSQL says of a table that is not there; the same where its schema is not."""

_SQLITE: Final = "no such table: "
_CREATED: Final = re.compile(r"CREATE TABLE \{(\w+)\}")


class TablesMissing(RuntimeError):
    """Our tables were never made: nobody but who runs the service can help, and no waiting does."""


def tables_missing(error: Exception, names: Names) -> TablesMissing | None:
    """Return what to raise from `error` where it tells of a missing table of ours; else None."""
    table = _missing(error, names)
    if table is None:
        return None
    return TablesMissing(
        f"there is no table {table}: run migrate(database), or `await amigrate(database)`, first"
    )


def _missing(error: Exception, names: Names) -> str | None:
    """Return which table of ours a driver says is not there."""
    seen: BaseException | None = error
    for _ in range(4):  # SQLAlchemy puts what a driver raised into its own error
        if seen is None:
            return None
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if state == UNDEFINED_TABLE:
            return _named(str(seen), names)
        if type(seen).__name__ == "OperationalError" and str(seen).startswith(_SQLITE):
            return _named(str(seen).removeprefix(_SQLITE), names)
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None


def _named(text: str, names: Names) -> str | None:
    # The sentence and its quotation marks are of the server's language: only the name counts.
    line = text.partition("\n")[0]
    for table in _tables():
        own = names.prefix + table
        name = own if names.schema is None else f"{names.schema}.{own}"
        # What stands in another schema, or has a longer name, is somebody else's.
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", line):
            return name
    return None


@cache
def _tables() -> frozenset[str]:
    """Return the names of our tables, without their prefix."""
    folder = files("seawall.durable").joinpath("sql", "sqlite", "migrations")
    texts = [entry.read_text("utf-8") for entry in folder.iterdir()]
    return frozenset(name for text in texts for name in _CREATED.findall(text))
