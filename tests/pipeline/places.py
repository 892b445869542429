"""Places from which sources read, for the conformance suite in `test_conformance.py`.

A new kind of source adds a `Place` to `PLACES`: how to put something in, and how to open a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from seawall.durable.database.connections import TextQuery
from seawall.errors import StoreUnavailable
from seawall.jobs import LocalQueue
from seawall.pipeline import (
    ChannelSource,
    IterableSource,
    JetStreamSource,
    Page,
    QueueSource,
    RedisStreamSink,
    RedisStreamSource,
    Source,
    lines,
    pages,
    table,
)
from seawall.redis.queue import PriorityQueue
from seawall.redis.streams import StreamConsumer
from seawall.resources import Channel
from seawall.testing import run_virtual
from tests.durable.conftest import opening_by
from tests.support_nats import NatsServer


class Place:
    """Where the items of one test are; a reader that is opened later is another process."""

    resumes = True
    """Whether a later reader knows what earlier ones have acknowledged."""
    grows = True
    """Whether more can be put in while it is read."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        """Have nothing inside."""
        self.request = request
        self.folder: Path = request.getfixturevalue("tmp_path")

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a test, on virtual time."""
        run_virtual(main)

    async def begin(self) -> None:
        """Prepare what needs an event loop."""

    async def put(self, values: list[int]) -> None:
        """Add values, in their order."""
        raise NotImplementedError

    def open(self) -> Source[Any]:
        """Return a new reader, which goes on where the ones before it ended."""
        raise NotImplementedError

    async def end(self) -> None:
        """Let go of what `begin` has made."""

    def kill(self, source: Any) -> None:
        """End what `source` does in the background, as the death of its process does."""

    def cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make whatever keeps the items and their ends fail, until `monkeypatch.undo()`."""
        raise NotImplementedError


class RealPlace(Place):
    """A place that a server keeps, in real time."""

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(main)


class InChannel(Place):
    resumes = False

    async def begin(self) -> None:
        self.channel: Channel[int] = Channel(1000)

    async def put(self, values: list[int]) -> None:
        for value in values:
            await self.channel.aput(value)

    def open(self) -> Source[Any]:
        return ChannelSource(self.channel)


class InRequestedChannel(InChannel):
    async def begin(self) -> None:
        self.channel = Channel(1000, demand=True)
        self.putting: list[asyncio.Task[None]] = []

    async def put(self, values: list[int]) -> None:
        self.putting.append(asyncio.create_task(super().put(values)))

    async def end(self) -> None:
        await asyncio.gather(*self.putting)


class InLocalQueue(Place):
    async def begin(self) -> None:
        self.queue: Any = LocalQueue("orders")

    async def put(self, values: list[int]) -> None:
        await self.queue.apush_many(values)

    def open(self) -> Source[Any]:
        return QueueSource(self.queue)

    def kill(self, source: Any) -> None:
        source._renewing.cancel()
        for job in source._held:  # as if it had been claimed a lease ago
            self.queue.heartbeat(job.claim, lease=0.01)

    def cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(*_args: Any, **_options: Any) -> None:
            raise ConnectionError("the store does not answer")

        for name in ("aclaim", "aack", "anack", "aheartbeat"):
            monkeypatch.setattr(self.queue, name, fail)


class InSharedQueue(RealPlace, InLocalQueue):
    async def begin(self) -> None:
        new_store = self.request.getfixturevalue("new_store")
        self.store = new_store()
        self.queue = PriorityQueue(self.store, "orders")


class InRedisStream(RealPlace):
    partitions: int | None = None

    async def begin(self) -> None:
        self.url: str = self.request.getfixturevalue("redis_url")
        self.stream = f"orders-{token_hex(6)}"
        self.killed: list[Any] = []

    async def end(self) -> None:
        for source in self.killed:
            await source._place.close()  # the connections, which a real death would have closed

    async def put(self, values: list[int]) -> None:
        keyed: dict[str, Any] = {"key": str, "partitions": self.partitions}
        settings = {} if self.partitions is None else keyed
        sink = RedisStreamSink[int](self.url, self.stream, **settings)
        await sink(values)
        await sink.close()

    def open(self) -> Source[Any]:
        return RedisStreamSource(
            self.url, self.stream, group="g", partitions=self.partitions, lost_after=1.5
        )

    def kill(self, source: Any) -> None:
        self.killed.append(source)
        source._keeper.cancel()
        for holding in source._holdings.values():
            if holding.lease is not None:
                holding.lease._holding._renewal.stop()

    def cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(*_args: Any) -> None:
            raise StoreUnavailable("the store does not answer")

        monkeypatch.setattr(StreamConsumer, "_call", fail)


class InPartition(InRedisStream):
    partitions = 1


class InIterable(Place):
    grows = False

    async def begin(self) -> None:
        self.values: list[int] = []

    async def put(self, values: list[int]) -> None:
        self.values += values

    def open(self) -> Source[Any]:
        return IterableSource(self.values, checkpoint=self.folder / "place", every=0.0)

    def cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from seawall.pipeline.checkpoint import FileCheckpoint

        async def fail(*_args: Any) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(FileCheckpoint, "save", fail)


class InAsyncIterable(InIterable):
    def open(self) -> Source[Any]:
        async def items() -> Any:
            for value in self.values:
                yield value

        return IterableSource(items(), checkpoint=self.folder / "place", every=0.0)


class FromOffset(InIterable):
    def open(self) -> Source[Any]:
        return IterableSource(
            lambda offset: iter(self.values[offset:]), checkpoint=self.folder / "place", every=0.0
        )


class InFile(InIterable):
    grows = True

    async def begin(self) -> None:
        self.path = self.folder / "orders.txt"
        self.path.touch()

    async def put(self, values: list[int]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{value}\n" for value in values)

    def open(self) -> Source[Any]:
        place = self.folder / "place"
        return lines(self.path, checkpoint=place, every=0.0, follow=True)

    def kill(self, source: Any) -> None:
        source._reading.file.close()


class InRotatedFile(InFile):
    """Each put is a file of its own, and only the last one has its first name."""

    files = 0

    async def put(self, values: list[int]) -> None:
        if self.path.stat().st_size:
            self.files += 1
            self.path.rename(self.path.with_name(f"orders.txt-{self.files:04}"))
        await super().put(values)


class InPages(InIterable):
    """One value a page: a page that has not ended as a whole comes again as a whole."""

    grows = True

    def open(self) -> Source[Any]:
        async def page(cursor: int) -> Page[int]:
            await asyncio.sleep(0)  # noqa: TID251 - it is asked over a network
            found = self.values[cursor : cursor + 1]
            return Page(found, cursor + len(found), more=bool(found))

        return pages(page, start=0, checkpoint=self.folder / "place", save_every=0.0)


class InTable(RealPlace):
    driver = "asyncpg"

    async def begin(self) -> None:
        server = self.request.getfixturevalue("postgres")
        self.stack = AsyncExitStack()
        opened = opening_by(self.driver, server, self.folder)
        self.database = await self.stack.enter_async_context(opened())
        schema = self.database.names.schema
        self.table = "orders" if schema is None else f"{schema}.orders"
        await self.do(f"CREATE TABLE {self.quoted} (id {self.key}, value integer)")

    key = "bigserial PRIMARY KEY"

    @property
    def quoted(self) -> str:
        return ".".join(f'"{part}"' for part in self.table.split("."))

    async def do(self, text: str) -> None:
        def steps() -> Any:
            yield TextQuery(text, {})

        await self.database.arun(steps)

    async def put(self, values: list[int]) -> None:
        rows = ", ".join(f"({value})" for value in values)
        await self.do(f"INSERT INTO {self.quoted} (value) VALUES {rows}")  # noqa: S608 - our own

    def open(self) -> Source[Any]:
        made = table(
            self.database, self.table, checkpoint="orders", every=0.0, follow=True, poll=0.02
        )
        pull = made.pull

        async def values(most: int) -> Any:
            return [(row["value"], handle) for row, handle in await pull(most)]

        made.pull = values  # type: ignore[method-assign]
        return made

    def cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(_operation: Any) -> None:
            raise ConnectionError("the database does not answer")

        monkeypatch.setattr(self.database, "arun", fail)

    async def end(self) -> None:
        await self.stack.aclose()


class InSqliteTable(InTable):
    driver = "sqlite"
    key = "INTEGER PRIMARY KEY AUTOINCREMENT"


class InJetStream(RealPlace):
    """A stream of one server that all tests of a file share."""

    async def begin(self) -> None:
        import nats

        server: NatsServer = self.request.getfixturevalue("nats_server")
        self.url = server.url
        self.stream = f"stream-{token_hex(4)}"
        self.client = await nats.connect(server.url)
        self.context = self.client.jetstream()
        await self.context.add_stream(name=self.stream, subjects=[f"{self.stream}.>"])
        self.killed: list[asyncio.Task[None]] = []

    async def put(self, values: list[int]) -> None:
        for value in values:
            await self.context.publish(f"{self.stream}.all", str(value).encode())

    def open(self) -> Source[Any]:
        return JetStreamSource(
            self.url,
            self.stream,
            consumer="workers",
            decode=lambda message: int(message.data),
            lost_after=5.0,
        )

    def kill(self, source: Any) -> None:
        source._keeper.cancel()
        self.killed.append(asyncio.create_task(source._client.close()))

    async def end(self) -> None:
        await asyncio.gather(*self.killed)
        await self.client.close()


PLACES: list[type[Place]] = [
    InChannel,
    InRequestedChannel,
    InLocalQueue,
    InSharedQueue,
    InRedisStream,
    InPartition,
    InJetStream,
    InIterable,
    InAsyncIterable,
    FromOffset,
    InFile,
    InRotatedFile,
    InPages,
    InTable,
    InSqliteTable,
]

RESUMING = [place for place in PLACES if place.resumes]
FAILING = [place for place in PLACES if place.cut is not Place.cut]
