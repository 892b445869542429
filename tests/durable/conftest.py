"""One real PostgreSQL server for all of these tests; each test has a schema of its own.

None of them measures real time: they wait for as long as it takes, or their time is virtual. So
they run beside others; each process that runs some has a server of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from seawall.durable import Database, Sqlite, amigrate
from tests.durable.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Return the server of this run."""
    server = Postgres()
    yield server
    server.close()


Opening = Callable[..., Any]
"""`async with opening() as database`: a migrated database of this test's own.

With `migrated=False` it has no tables.
"""


@pytest.fixture(params=["asyncpg", "psycopg", "sqlalchemy", "sqlite"])
def opening(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a fresh database by each driver in turn: the conformance suite."""
    return opening_by(request.param, postgres, tmp_path)


def opening_by(driver: str, postgres: Postgres, folder: Path) -> Opening:
    """Return what opens a database with tables of a fresh schema, by one driver."""
    schema, number = f"test {token_hex(4)}", iter(range(100))

    @asynccontextmanager
    async def opened(*, migrated: bool = True, **options: Any) -> AsyncIterator[Database]:
        async with AsyncExitStack() as stack:
            source = await _source(driver, postgres, folder, stack)
            own = {} if driver == "sqlite" else {"schema": schema}
            database = Database(source, name=f"{driver} {schema} {next(number)}", **own, **options)
            stack.callback(database.close)
            if migrated:
                await amigrate(database)
            yield database

    return opened


async def _source(driver: str, postgres: Postgres, folder: Path, stack: AsyncExitStack) -> Any:
    if driver == "asyncpg":
        import asyncpg

        return await stack.enter_async_context(
            asyncpg.create_pool(postgres.url, min_size=1, max_size=20)
        )
    if driver == "psycopg":
        from psycopg_pool import AsyncConnectionPool

        pool = AsyncConnectionPool(postgres.url, min_size=1, max_size=20, open=False)
        return await stack.enter_async_context(pool)
    if driver == "sqlalchemy":
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(postgres.url.replace("://", "+asyncpg://"), pool_size=20)
        stack.push_async_callback(engine.dispose)
        return engine
    source = Sqlite(folder / "test.db")
    stack.callback(source.close)
    return source
