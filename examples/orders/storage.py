"""The storage of this example's processes: their own tables, and Seawall's.

DATABASE_URL selects the database; nothing else in this folder depends on it:

    postgresql+asyncpg://user@host/orders       for any number of machines
    sqlite+aiosqlite:////var/lib/orders.db      for one
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import Column, Integer, MetaData, Table, Text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from seawall.durable import Database, Idempotency, Jobs, Outbox, Sqlite, amigrate

# --- The service's own tables ---

tables = MetaData()
orders = Table(
    "orders",
    tables,
    Column("id", Integer, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("item", Text, nullable=False),
    Column("quantity", Integer, nullable=False),
)
invoices = Table(
    "invoices",
    tables,
    Column("id", Integer, primary_key=True),
    Column("order_id", Integer, nullable=False),
    Column("cents", Integer, nullable=False),
)

# --- Connections ---


class Storage:
    """An engine for the transactions of this service, and a `Database` for Seawall's."""

    def __init__(self, name: str) -> None:
        """Prepare to connect to DATABASE_URL at the first use."""
        url = os.environ["DATABASE_URL"]
        self.engine: AsyncEngine
        self._file: Sqlite | None = None
        if url.startswith("sqlite"):
            # Writers wait for the file: longer than the default of 5 s, before it is an error.
            self.engine = create_async_engine(url, connect_args={"timeout": 30.0})
            self._file = Sqlite(self.engine.url.database or "", busy_timeout=30.0)
        else:
            self.engine = create_async_engine(url, pool_size=20, pool_pre_ping=True)
        self.database = Database(self._file or self.engine, name=name)

    async def prepare(self, own: MetaData | None = None) -> None:
        """Create missing tables: Seawall's, and `own`.

        All processes may create Seawall's at once. Create yours by your own migrations; here, the
        one process that passes them creates them.
        """
        await amigrate(self.database)
        if own is not None:
            async with self.engine.begin() as connection:
                await connection.run_sync(own.create_all)

    @property
    def listen(self) -> Callable[[], Awaitable[Any]] | None:
        """A function that opens a connection for notifications; None: only PostgreSQL notifies."""
        return self._connect if self.database.dialect == "postgres" else None

    async def _connect(self) -> Any:
        import asyncpg  # type: ignore[import-untyped]

        url = self.engine.url.set(drivername="postgresql")
        return await asyncpg.connect(url.render_as_string(hide_password=False))

    async def close(self) -> None:
        """Close all connections."""
        await self.engine.dispose()
        if self._file is not None:
            self._file.close()
        self.database.close()


class OrderStorage(Storage):
    """The storage that the API, the worker and the dispatcher of the order service share."""

    def __init__(self) -> None:
        """Open it; LEASE is the number of seconds after which a dead process is replaced."""
        super().__init__("orders")
        self.lease = float(os.environ.get("LEASE", "30"))
        self.idempotency = Idempotency(self.database, lease=self.lease)
        self.outbox = Outbox(self.database)
        self.jobs = Jobs(self.database, lease=self.lease, notify=True)
