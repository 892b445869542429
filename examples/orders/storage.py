"""Where the processes of this example keep things: tables of theirs and, beside them, Seawall's.

DATABASE_URL decides which database it is; nothing else in this folder knows:

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

# --- What is opened ---


class Storage:
    """An engine for the transactions of this service, and a `Database` for Seawall's."""

    def __init__(self, name: str) -> None:
        """Open what DATABASE_URL says, when it is first used."""
        url = os.environ["DATABASE_URL"]
        self.engine: AsyncEngine
        self._file: Sqlite | None = None
        if url.startswith("sqlite"):
            # Who writes waits for the file: longer than the default of 5 s, before it is an error.
            self.engine = create_async_engine(url, connect_args={"timeout": 30.0})
            self._file = Sqlite(self.engine.url.database or "", busy_timeout=30.0)
        else:
            self.engine = create_async_engine(url, pool_size=20, pool_pre_ping=True)
        self.database = Database(self._file or self.engine, name=name)

    async def prepare(self, own: MetaData | None = None) -> None:
        """Make the tables that are missing: Seawall's, and `own`.

        Seawall's may be made by all processes at once. Yours are your migrations' business; here,
        the one process that passes them makes them.
        """
        await amigrate(self.database)
        if own is not None:
            async with self.engine.begin() as connection:
                await connection.run_sync(own.create_all)

    @property
    def listen(self) -> Callable[[], Awaitable[Any]] | None:
        """What opens a connection to hear of commits at once; None: only PostgreSQL notifies."""
        return self._connect if self.database.dialect == "postgres" else None

    async def _connect(self) -> Any:
        import asyncpg  # type: ignore[import-untyped]

        url = self.engine.url.set(drivername="postgresql")
        return await asyncpg.connect(url.render_as_string(hide_password=False))

    async def close(self) -> None:
        """Close it."""
        await self.engine.dispose()
        if self._file is not None:
            self._file.close()
        self.database.close()


class OrderStorage(Storage):
    """The order service's storage: its API, its worker and its dispatcher open the same."""

    def __init__(self) -> None:
        """Open it; LEASE is after how many seconds a process that died is given up."""
        super().__init__("orders")
        self.lease = float(os.environ.get("LEASE", "30"))
        self.idempotency = Idempotency(self.database, lease=self.lease)
        self.outbox = Outbox(self.database)
        self.jobs = Jobs(self.database, lease=self.lease, notify=True)
