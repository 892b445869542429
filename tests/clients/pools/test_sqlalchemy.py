"""Guarded pools of SQLAlchemy and asyncpg, with a real PostgreSQL."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import asyncpg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import AsyncAdaptedQueuePool, QueuePool

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    CircuitOpen,
    Guard,
    Rejected,
    TimedOut,
    deadline,
)
from seawall.clients.sqlalchemy import guarded_pool
from seawall.clock import SystemClock
from seawall.resources import CONNECTION_SETTINGS, pool_advice
from tests.durable.postgres import Postgres
from tests.support import new_guard

pytestmark = pytest.mark.alone

CLOCK = SystemClock()
SMALL: Any = {"pool_size": 2, "max_overflow": 0}


def engine_of(postgres: Postgres, guard: Guard, **options: Any) -> Any:
    """Return an engine whose checkouts pass `guard`."""
    url = postgres.url.replace("postgresql://", "postgresql+psycopg://")
    return create_engine(url, **{"poolclass": guarded_pool(guard), **SMALL, **options})


def async_engine_of(postgres: Postgres, guard: Guard) -> Any:
    """Return an async engine whose checkouts pass `guard`."""
    url = postgres.url.replace("postgresql://", "postgresql+asyncpg://")
    return create_async_engine(url, poolclass=guarded_pool(guard, AsyncAdaptedQueuePool), **SMALL)


def in_flight(guard: Guard) -> int:
    """Return how many connections are checked out, as the guard's bulkhead counts."""
    used: int = guard.snapshot()["policies"][-1]["in_flight"]
    return used


@pytest.mark.parametrize(
    ("max_wait", "seconds"), [(0.05, 60.0), (20.0, 0.1)], ids=["max_wait", "deadline"]
)
def test_who_waits_too_long_for_a_connection_is_refused(
    postgres: Postgres, max_wait: float, seconds: float
):
    """By the guard's max_wait or the caller's deadline; the pool's own 30 s are not reached."""
    guard = new_guard(Bulkhead(2, max_wait=max_wait))
    engine = engine_of(postgres, guard)
    with engine.connect(), Session(engine) as session:
        assert session.scalar(text("SELECT 1")) == 1
        assert in_flight(guard) == 2
        began = CLOCK.now()
        with deadline(seconds), pytest.raises(Rejected):
            engine.connect()
        assert CLOCK.now() - began < 15.0
    assert in_flight(guard) == 0
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    engine.dispose()


def test_async_engines_do_the_same(postgres: Postgres):
    """A task that waits does not block the loop, and is served when a connection comes back."""
    guard = new_guard(Bulkhead(2, max_wait=20.0, max_waiting=20))

    async def one(engine: Any, seconds: float) -> int:
        async with engine.connect() as connection:
            await connection.execute(text(f"SELECT pg_sleep({seconds})"))
            return int(await connection.scalar(text("SELECT 1")))

    async def main() -> None:
        engine = async_engine_of(postgres, guard)
        assert await asyncio.gather(*(one(engine, 0.02) for _ in range(10))) == [1] * 10
        async with engine.connect(), engine.connect():
            assert in_flight(guard) == 2
            with pytest.raises(TimedOut):
                async with deadline(0.1), engine.connect():
                    pass
            assert in_flight(guard) == 2
        await engine.dispose()

    asyncio.run(main())
    assert in_flight(guard) == 0


@pytest.mark.parametrize("way", ["error", "invalidate", "detach", "forget", "dispose"])
def test_a_slot_is_given_back_however_a_connection_ends(postgres: Postgres, way: str):
    """After an error, an invalidation, a detached or forgotten connection, and a new pool."""
    guard = new_guard(Bulkhead(2))
    engine = engine_of(postgres, guard)
    for _ in range(5):
        connection = engine.connect()
        assert in_flight(guard) == 1
        if way == "error":
            with pytest.raises(DBAPIError):
                connection.execute(text("SELECT 1 / 0"))
        elif way == "invalidate":
            connection.invalidate()
        elif way == "detach":
            connection.detach()
        if way == "forget":
            del connection
            gc.collect()
        else:
            connection.close()
        if way == "dispose":
            engine.dispose()
        assert in_flight(guard) == 0
    engine.dispose()


def test_a_server_that_is_down_opens_the_circuit():
    """Connection failures count as failed calls; then no connection is attempted."""
    guard = new_guard(Breaker(consecutive=2), Bulkhead(2))
    engine = create_engine(
        "postgresql+psycopg://nobody@127.0.0.1:1/none", poolclass=guarded_pool(guard), **SMALL
    )
    for _ in range(2):
        with pytest.raises(OperationalError):
            engine.connect()
    with pytest.raises(CircuitOpen):
        engine.connect()
    assert in_flight(guard) == 0


def test_a_guard_that_lets_more_in_than_the_pool_has_is_refused(postgres: Postgres):
    """Else callers would wait in the pool, for 30 s and without a deadline."""
    with pytest.raises(ValueError, match=r"Bulkhead\(2\)"):
        engine_of(postgres, new_guard(Bulkhead(3)))
    with pytest.raises(ValueError, match="bounds nothing"):
        guarded_pool(new_guard(Breaker()))


def test_an_asyncpg_pool_under_a_hold(postgres: Postgres):
    """The recipe: the guard's slot around the pool's connection."""
    guard = new_guard(Bulkhead(2, max_wait=0.05))

    async def main() -> None:
        async with asyncpg.create_pool(postgres.url, min_size=0, max_size=2) as pool:
            async with (
                guard.hold(),
                pool.acquire() as first,
                guard.hold(),
                pool.acquire(),
            ):
                assert await first.fetchval("SELECT 1") == 1
                with pytest.raises(BulkheadFull):
                    async with guard.hold(), pool.acquire():
                        pass
            assert in_flight(guard) == 0

    asyncio.run(main())


def test_pools_are_held_against_what_the_server_accepts(postgres: Postgres):
    """The settings of a real server, read by SQLAlchemy and by asyncpg, and the advice."""
    engine = engine_of(postgres, new_guard(Bulkhead(2)))
    with engine.connect() as connection:
        rows = connection.execute(text(CONNECTION_SETTINGS)).all()
    engine.dispose()

    async def read() -> Any:
        connection = await asyncpg.connect(postgres.url)
        try:
            return await connection.fetch(CONNECTION_SETTINGS)
        finally:
            await connection.close()

    settings: dict[str, str] = dict(map(tuple, rows))
    assert settings == {row["name"]: row["setting"] for row in asyncio.run(read())}
    usable = int(settings["max_connections"]) - int(settings["superuser_reserved_connections"])
    assert pool_advice(settings, pods=usable, size=1) is None
    advice = pool_advice(settings, pods=usable, size=2)
    assert advice is not None
    assert f"open up to {2 * usable} connections, and the server accepts {usable}" in advice


def test_a_connection_that_is_taken_while_it_is_returned_keeps_its_slot(postgres: Postgres):
    """Another thread checks it out between its return to the pool and the end of that slot."""
    taken: list[Any] = []

    class Busy(QueuePool):
        def _do_return_conn(self, record: Any) -> None:
            super()._do_return_conn(record)
            if not taken:
                taken.append(record)
                taken.append(engine.connect())

    guard = new_guard(Bulkhead(2))
    engine = engine_of(postgres, guard, poolclass=guarded_pool(guard, Busy))
    engine.connect().close()
    assert in_flight(guard) == 1
    taken[1].close()
    assert in_flight(guard) == 0
    engine.dispose()
