"""Connections of a database on which each statement is a transaction of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from seawall.durable.database import Database


@asynccontextmanager
async def aautocommit(database: Database) -> AsyncIterator[Any]:
    """Lend a connection on which each statement is a transaction, awaited."""
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
def autocommit(database: Database) -> Iterator[Any]:
    """Do the same, blocking."""
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
