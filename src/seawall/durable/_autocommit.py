"""Connections of a database in autocommit mode: each statement is its own transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from seawall.durable.database import Database


@asynccontextmanager
async def aautocommit(database: Database) -> AsyncIterator[Any]:
    """Lend a connection in autocommit mode."""
    source: Any = database.source
    if hasattr(source, "acquire"):  # asyncpg: outside a transaction, each statement is one
        async with source.acquire() as raw:
            yield raw
    elif hasattr(source, "execution_options"):
        async with source.execution_options(isolation_level="AUTOCOMMIT").connect() as raw:
            yield raw
    else:
        async with source.connection() as raw:
            before = raw.autocommit
            await raw.set_autocommit(True)  # psycopg: the same; this sends nothing to the server
            try:
                yield raw
            finally:
                try:
                    await raw.set_autocommit(before)
                except Exception:  # noqa: BLE001 - broken or busy: it must not return to the pool
                    await raw.close()


@contextmanager
def autocommit(database: Database) -> Iterator[Any]:
    """Sync twin of `aautocommit`."""
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
                except Exception:  # noqa: BLE001 - broken or busy: it must not return to the pool
                    raw.close()
