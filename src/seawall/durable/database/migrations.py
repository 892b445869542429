"""Migrations: our tables are created and changed step by step.

Promises:

- Any number of processes may call `migrate` at once, at every start: each step is done once, in
  order, by one of them, and the others wait.
- A step is committed with its entry in the version table, or not at all.
- A database that is newer than this library is not changed, and an error is raised.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple
from zlib import crc32

from seawall.durable.database.connections import TextQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.statements import Dialect
from seawall.runtime.driver import Steps

_LOCK: Final = "SELECT pg_advisory_xact_lock(:lock)"
_VERSIONS: Final = (
    "CREATE TABLE IF NOT EXISTS {versions}"
    " (version bigint PRIMARY KEY, name text NOT NULL, applied_at bigint NOT NULL)"
)
_SCHEMA: Final = "CREATE SCHEMA IF NOT EXISTS {schema}"
_APPLIED: Final = "SELECT version FROM {versions} ORDER BY version"
_APPLY: Final = "INSERT INTO {versions} (version, name, applied_at) VALUES (:version, :name, {now})"


class Migration(NamedTuple):
    """One step: its number, its name and its statements."""

    version: int
    name: str
    statements: tuple[str, ...]


@cache
def migrations(dialect: Dialect) -> tuple[Migration, ...]:
    """Return all steps, in order."""
    folder = files("seawall.durable").joinpath("sql", dialect, "migrations")
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        number, _, name = entry.name.removesuffix(".sql").partition("_")
        parts = entry.read_text("utf-8").split(";\n")
        found.append(Migration(int(number), name, tuple(p.strip() for p in parts if p.strip())))
    return tuple(found)


def migrate(database: Database) -> list[int]:
    """Bring the tables up to date; return the steps that were done now."""
    return checked_database("migrate", database).run(lambda: _steps(database))


async def amigrate(database: Database) -> list[int]:
    """Async twin of `migrate`."""
    return await checked_database("amigrate", database).arun(lambda: _steps(database))


def _steps(database: Database) -> Steps[list[int]]:
    names, known = database.names, migrations(database.dialect)
    if database.dialect == "postgres":
        # The end of the transaction releases it: no session has to be kept.
        lock = crc32(f"seawall {names.schema} {names.prefix}".encode())
        yield TextQuery(_LOCK, {"lock": lock})
        if names.schema is not None:
            yield TextQuery(_SCHEMA, {})
    yield TextQuery(_VERSIONS, {})
    rows = yield TextQuery(_APPLIED, {})
    applied = {version for (version,) in rows}
    newest = known[-1].version if known else 0
    if applied and max(applied) > newest:
        raise RuntimeError(
            f"the tables {names!r} are of version {max(applied)}, and this library knows up to"
            f" {newest}: upgrade it, or use another schema or prefix"
        )
    done = []
    for step in known:
        if step.version in applied:
            continue
        for text in step.statements:
            yield TextQuery(text, {})
        yield TextQuery(_APPLY, {"version": step.version, "name": step.name})
        done.append(step.version)
    return done
