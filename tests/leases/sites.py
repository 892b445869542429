"""The stores that keep leases, seen alike: a real Valkey, a real PostgreSQL, and SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from seawall.durable import Database, Sqlite, amigrate
from seawall.durable.database.connections import TextQuery
from seawall.redis.store import RedisStore
from tests.durable.postgres import Postgres
from tests.redis.support import FrozenClock, Server

AWAITED: Final = ("asyncpg", "psycopg async", "sqlalchemy async")
BLOCKING: Final = ("redis", "psycopg", "sqlalchemy", "sqlite")
KINDS: Final = ("redis", "asyncpg", "psycopg async", "psycopg", "sqlalchemy async", "sqlalchemy",
                "sqlite")  # fmt: skip
BEGINNING: Final = 1_000_000_000_000


class Site:
    """One store for one test; each `pod()` is a process's own way to it."""

    def __init__(self, kind: str, valkey: Server, postgres: Postgres, folder: Path) -> None:
        self.kind = kind
        self.valkey = valkey
        self._postgres = postgres
        self._path = folder / "leases.db"
        self._own = f"lease {token_hex(4)}"
        self._pods: list[Any] = []
        self._frozen: FrozenClock | None = None
        self._stack = AsyncExitStack()

    @property
    def is_redis(self) -> bool:
        return self.kind == "redis"

    async def pod(self, **options: Any) -> Any:
        """Return a store as another process would have it."""
        if self.is_redis:
            options = {"timeout": 2.0, **options}
            store = RedisStore(self.valkey.url, prefix=self._own.replace(" ", "-"), **options)
            self._stack.push_async_callback(store.aclose)
        else:
            source = await self._source()
            own = {} if self.kind == "sqlite" else {"schema": self._own}
            store = Database(source, name=f"{self._own} {len(self._pods)}", **own)
            self._stack.callback(store.close)
            if not self._pods:
                await amigrate(store)
        self._pods.append(store)
        return store

    async def _source(self) -> Any:
        stack, url = self._stack, self._postgres.url
        if self.kind == "asyncpg":
            import asyncpg

            return await stack.enter_async_context(asyncpg.create_pool(url, min_size=1, max_size=9))
        if self.kind.startswith("psycopg"):
            from psycopg_pool import AsyncConnectionPool, ConnectionPool

            if self.kind == "psycopg":
                return stack.enter_context(ConnectionPool(url, min_size=1, max_size=9, open=False))
            pool = AsyncConnectionPool(url, min_size=1, max_size=9, open=False)
            return await stack.enter_async_context(pool)
        if self.kind == "sqlalchemy":
            from sqlalchemy import NullPool, create_engine

            # A statement that outlives the test brings its connection back to no pool.
            engine = create_engine(url.replace("://", "+psycopg://"), poolclass=NullPool)
            stack.callback(engine.dispose)
            return engine
        if self.kind == "sqlalchemy async":
            from sqlalchemy.ext.asyncio import create_async_engine

            aengine = create_async_engine(url.replace("://", "+asyncpg://"))
            stack.push_async_callback(aengine.dispose)
            return aengine
        source = Sqlite(self._path)
        stack.callback(source.close)
        return source

    async def close(self) -> None:
        if self._frozen is not None:
            self.valkey.client().delete(self._frozen._key)
        for pod in [] if self.is_redis else self._pods:
            # What is under way ends before its pool does.
            await asyncio.to_thread(pod.close)
            desks = pod._lease_desks.values() if pod.is_async else ()
            if tasks := [task for desk in desks for task in desk._tasks]:
                await asyncio.wait(tasks, timeout=30)
        await self._stack.aclose()

    # The store's clock

    async def freeze_time(self) -> None:
        """Let the store's clock stand still for all pods there are."""
        if self.is_redis:
            self._frozen = FrozenClock(self._pods[0], self.valkey.client(), BEGINNING)
            for pod in self._pods[1:]:
                pod._core._clock = self._pods[0]._core._clock
            return
        await self._sql("CREATE TABLE {test_clock} (us bigint NOT NULL)")
        await self._sql("INSERT INTO {test_clock} VALUES (:us)", us=BEGINNING)
        for pod in self._pods:
            pod._now = f"(SELECT us FROM {pod.names.table('test_clock')})"  # noqa: S608 - our own

    async def pass_by(self, seconds: float) -> None:
        """Move the store's clock: forward, or back."""
        if self._frozen is not None:
            self._frozen.set(self._frozen.now_us + round(seconds * 1e6))
            return
        await self._sql("UPDATE {test_clock} SET us = us + :us", us=round(seconds * 1e6))

    async def _sql(self, text: str, **arguments: Any) -> None:
        def steps() -> Any:
            yield TextQuery(text, arguments)

        await self._pods[0].arun(steps)

    async def forget_all(self) -> None:
        """Lose all that was stored."""
        if self.is_redis:
            for key in self.valkey.client().scan_iter(match=f"{self._pods[0]._core.prefix}:*"):
                self.valkey.client().delete(key)
        else:
            await self._sql("DELETE FROM {leases}")

    # A store that does not answer

    @asynccontextmanager
    async def silence(self) -> AsyncIterator[None]:
        """Let nothing be answered inside; what was asked meanwhile is done afterwards."""
        if self.is_redis:
            self.valkey.freeze()
            try:
                yield
            finally:
                self.valkey.thaw()
        elif self.kind == "sqlite":
            blocker = sqlite3.connect(self._path, isolation_level=None)
            blocker.execute("BEGIN EXCLUSIVE")
            try:
                yield
            finally:
                blocker.rollback()
                blocker.close()
        else:
            import asyncpg

            blocker = await asyncpg.connect(self._postgres.url)
            table = self._pods[0].names.table("leases")
            try:
                async with blocker.transaction():
                    await blocker.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
                    yield
            finally:
                await blocker.close()


def run(site: Site, scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scenario in a loop of its own; close what it opened."""

    async def whole() -> Any:
        try:
            return await scenario()
        finally:
            await site.close()

    return asyncio.run(whole())
