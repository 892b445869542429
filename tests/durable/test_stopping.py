"""What is stopped or cancelled is back in time, whatever its functions and its database do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from seawall.durable import (
    Database,
    DeferredCalls,
    DeferredCallWorker,
    Dispatcher,
    Jobs,
    JobWorker,
    Outbox,
    Sqlite,
    amigrate,
)
from seawall.jobs import LocalQueue, Worker
from seawall.testing import run_virtual
from tests.durable.outbox_support import a_moment, numbered, stubborn

KINDS = ["jobs", "later", "queue", "outbox"]


class World:
    """A worker of some kind, with one thing to do that it never ends."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def work(self, *_given: Any) -> None:
        """Begin, and ignore any cancellation until told to go on."""
        self.begun.set()
        await stubborn(self.goes_on)

    async def worker(self, kind: str, work: Any = None) -> Any:
        work = self.work if work is None else work
        if kind == "jobs":
            jobs = Jobs(self.database)
            await jobs.asubmit(None, "any", None, scope="acme")
            return JobWorker(jobs, {"any": work})
        if kind == "later":
            later = DeferredCalls(self.database, "later")
            await later.astore()
            return DeferredCallWorker(later, work)
        if kind == "queue":
            queue = LocalQueue("queue")
            await queue.apush(None)
            return Worker(queue, work)
        outbox = Outbox(self.database)
        await numbered(outbox, "1", 1)
        return Dispatcher(outbox, work, timeout=None)


@asynccontextmanager
async def world_in(folder: Path) -> AsyncIterator[World]:
    source = Sqlite(folder / "test.db")
    database = Database(source, name="stopping")
    try:
        await amigrate(database)
        yield World(database)
    finally:
        database.close()
        source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_ignores_its_cancellation_is_left_at_the_end_of_the_grace(kind: str, tmp_path: Path):
    """`run` returns within the grace and a few seconds; nothing is left that is waited for."""

    async def main() -> None:
        async with world_in(tmp_path) as world:
            worker, loop = await world.worker(kind), asyncio.get_running_loop()
            running = asyncio.create_task(worker.run())
            await world.begun.wait()
            began = loop.time()
            worker.stop(grace=4.0)
            await running
            assert 4.0 <= loop.time() - began <= 4.0 + 6.0
            assert asyncio.all_tasks() == {asyncio.current_task()}
            world.goes_on.set()

    run_virtual(main())


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_cancelled_again_and_again_leaves_nothing_at_work(kind: str, tmp_path: Path):
    """Also in the middle of winding up: what nobody prolongs a lease for is cancelled, and left."""

    async def main() -> None:
        async with world_in(tmp_path) as world:
            worker = await world.worker(kind)
            running = asyncio.create_task(worker.run())
            await world.begun.wait()
            while not running.done():
                running.cancel()
                await a_moment()
            assert running.cancelled()
            await asyncio.sleep(10.0)  # noqa: TID251 - in virtual time
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not worker.snapshot()["running"]
            world.goes_on.set()

    run_virtual(main())


@pytest.mark.parametrize("kind", ["jobs", "later", "outbox"])
def test_a_database_that_does_not_answer_is_left_at_the_end_of_the_grace(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where its driver takes for ever to be cancelled, as in a network that drops packets."""

    async def main() -> None:
        async with world_in(tmp_path) as world:
            worker, loop = await world.worker(kind), asyncio.get_running_loop()
            monkeypatch.setattr(world.database, "arun", world.work)
            running = asyncio.create_task(worker.run())
            await world.begun.wait()
            began = loop.time()
            worker.stop(grace=4.0)
            await running
            assert loop.time() - began <= 4.0 + 6.0
            world.goes_on.set()

    run_virtual(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_function_that_never_ends_does_not_keep_run_sync(kind: str, tmp_path: Path):
    """Its thread is a daemon's, and is left behind."""
    goes_on, begun = Event(), Event()

    def work(*_given: Any) -> None:
        begun.set()
        goes_on.wait(60)

    async def made() -> Any:
        return await World(database).worker(kind, work)

    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name="stopping")
    try:
        asyncio.run(amigrate(database))
        worker = asyncio.run(made())

        async def main() -> None:
            running = asyncio.create_task(worker.run())
            await asyncio.to_thread(begun.wait, 60)
            worker.stop(grace=0.0)
            await running

        asyncio.run(main())
        assert not goes_on.is_set()
    finally:
        goes_on.set()
        database.close()
        source.close()
