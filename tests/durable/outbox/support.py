"""What the tests of the outbox have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from seawall.durable import Database
from seawall.durable.database.connections import TextQuery
from seawall.durable.database.statements import statement, statements
from seawall.durable.outbox.dispatcher import Dispatcher
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.outbox.outbox import Outbox


@asynccontextmanager
async def begun(database: Database) -> AsyncIterator[Any]:
    """Give a connection with a transaction of the user's own begun."""
    if database.is_async:
        async with database.atransaction() as connection:
            yield connection
    else:
        with database.transaction() as connection:
            yield connection


async def add(outbox: Outbox, connection: Any, *args: Any, **options: Any) -> str:
    """Add an event, whatever the connection is."""
    return await outbox.aadd(connection, *args, **options)


async def committed(outbox: Outbox, *events: tuple[str, str, str, Any]) -> list[str]:
    """Commit some events in one transaction."""
    async with begun(outbox.database) as connection:
        return [await add(outbox, connection, *event) for event in events]


async def numbered(outbox: Outbox, aggregate_id: str, count: int) -> list[str]:
    """Commit that many events of one order."""
    return await committed(outbox, *(("order", aggregate_id, "moved", n) for n in range(count)))


async def a_moment() -> None:
    """Let others have their turn."""
    await asyncio.sleep(0)  # noqa: TID251 - no time passes


async def stubborn(until: asyncio.Event) -> None:
    """Run until released, and ignore cancellation."""
    while not until.is_set():
        try:
            await until.wait()
        except asyncio.CancelledError:
            pass


class Seen:
    """A sink that remembers events, and fails as scripted."""

    def __init__(self) -> None:
        self.events: list[OutboxEvent] = []
        self.poison: set[str] = set()

    async def each(self, event: OutboxEvent) -> None:
        if event.aggregate_id in self.poison:
            raise ValueError("poison")
        self.events.append(event)

    async def batch(self, events: list[OutboxEvent]) -> None:
        if any(event.aggregate_id in self.poison for event in events):
            raise ValueError("poison")
        self.events.extend(events)

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(event.aggregate_id, event.sequence) for event in self.events]

    def of(self, aggregate_id: str) -> list[int]:
        return [n for whose, n in self.order if whose == aggregate_id]


class Time:
    """The database's time, which a test moves."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self) -> None:
        def make() -> Any:
            yield TextQuery("CREATE TABLE {test_clock} (us bigint NOT NULL)", {})
            yield TextQuery("INSERT INTO {test_clock} VALUES (1000000000)", {})

        await self._database.arun(make)
        table = self._database.names.table("test_clock")
        self._database._now = f"(SELECT us FROM {table})"  # noqa: S608 - of this test

    async def pass_by(self, seconds: float) -> None:
        def move() -> Any:
            yield TextQuery("UPDATE {test_clock} SET us = us + :us", {"us": round(seconds * 1e6)})

        await self._database.arun(move)


@asynccontextmanager
async def timed(opening: Any) -> AsyncIterator[tuple[Outbox, Time]]:
    """Open a database whose time stands still."""
    async with opening() as database:
        time = Time(database)
        await time.begin()
        yield Outbox(database), time


def dispatcher(outbox: Outbox, sink: Any, **options: Any) -> Dispatcher:
    """Make one that waits a second after each failure."""
    return Dispatcher(outbox, sink, **{"backoff": [1.0], **options})


@contextmanager
def without(
    monkeypatch: pytest.MonkeyPatch, name: str, safeguard: str, instead: str
) -> Iterator[None]:
    """Take a part away from a statement, on each database that has it there."""
    found = False
    with monkeypatch.context() as patch:
        for dialect in ("postgres", "sqlite"):
            texts = statements(dialect, "outbox")
            if safeguard in texts.get(name, ""):
                found = True
                patch.setitem(texts, name, texts[name].replace(safeguard, instead))
        assert found, f"{name} has no {safeguard!r}"
        statement.cache_clear()
        yield
    statement.cache_clear()
