"""What is stopped or cancelled is back in time, whatever its functions and its database do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
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
from tests.durable.outbox.support import a_moment, numbered, stubborn

KINDS = ["jobs", "later", "queue", "outbox"]


class World:
    """A worker of some kind, with one thing to do that it never ends."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def work(self, *_given: Any) -> None:
        """Start, and ignore any cancellation until released."""
        self.begun.set()
        await stubborn(self.goes_on)

    async def hang(self, *_given: Any) -> None:
        """Start, and wait until released or cancelled."""
        self.begun.set()
        await self.goes_on.wait()

    async def worker(self, kind: str, work: Any = None) -> Any:
        work = self.work if work is None else work
        if kind == "jobs":
            jobs = Jobs(self.database)
            await jobs.asubmit(None, "any", None, scope="acme")
            return JobWorker(jobs, {"any": work})
        if kind == "later":
            later = DeferredCalls(self.database, "later", delay=0)
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
    """Repeated cancellation, also during the shutdown, ends all work and its leases."""

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


@pytest.mark.parametrize("kind", ["jobs", "later", "queue"])
def test_stopped_and_then_cancelled_it_gives_its_work_back(kind: str, tmp_path: Path):
    """A cancellation within the grace period ends it: what is at work is free at once."""

    async def main() -> None:
        async with world_in(tmp_path) as world:
            worker = await world.worker(kind, world.hang)
            running = asyncio.create_task(worker.run())
            await world.begun.wait()
            worker.stop(grace=10.0)
            await asyncio.sleep(1.0)  # noqa: TID251 - in virtual time
            running.cancel()
            await asyncio.wait([running])
            assert worker.snapshot()["returned"] == 1

    run_virtual(main())


@pytest.mark.parametrize("kind", ["jobs", "later"])
def test_a_single_claim_that_was_cancelled_can_be_made_again(kind: str, tmp_path: Path):
    """Its work was given back, and the next `run_once` of the same worker takes it."""

    async def main() -> None:
        async with world_in(tmp_path) as world:
            worker = await world.worker(kind, world.hang)
            running = asyncio.create_task(worker.run_once())
            await world.begun.wait()
            running.cancel()
            await asyncio.wait([running])
            world.goes_on.set()
            assert await worker.run_once() == 1
            worker.stop()
            assert await worker.run_once() == 0

    run_virtual(main())


def test_a_call_that_turns_its_cancellation_into_an_error_loses_no_attempt(tmp_path: Path):
    """At a stop it is given back, also in its last attempt."""

    async def main() -> None:
        async with world_in(tmp_path) as world:

            async def aborted() -> None:
                try:
                    await world.hang()
                except asyncio.CancelledError:
                    raise RuntimeError("aborted") from None

            calls = DeferredCalls(world.database, "later", delay=0)
            await calls.astore()
            worker = DeferredCallWorker(calls, aborted, attempts=1)
            running = asyncio.create_task(worker.run())
            await world.begun.wait()
            worker.stop(grace=0.0)
            await running
            counts = await calls.acounts()
            assert (counts["waiting"], counts["dead"]) == (1, 0)

    run_virtual(main())


def test_a_claim_that_hangs_takes_no_time_from_giving_back(tmp_path: Path):
    """Jobs are given back at the end of the grace period, whatever the next claim does."""

    async def main() -> None:
        async with world_in(tmp_path) as world:
            worker = await world.worker("jobs", world.hang)
            jobs, never = worker.jobs, asyncio.Event()
            claim, give_back, loop = jobs.aclaim, jobs.agive_back, asyncio.get_running_loop()
            begun_at: list[float] = []

            async def only_first(*given: Any, **more: Any) -> Any:
                if world.begun.is_set():
                    await never.wait()
                return await claim(*given, **more)

            async def noted(*given: Any, **more: Any) -> Any:
                begun_at.append(loop.time())
                return await give_back(*given, **more)

            jobs.aclaim, jobs.agive_back = only_first, noted
            running = asyncio.create_task(worker.run())
            await world.begun.wait()
            await asyncio.sleep(5.0)  # noqa: TID251 - in virtual time: it claims again
            end = loop.time() + 1.0
            worker.stop(grace=1.0)
            await running
            assert begun_at == [pytest.approx(end)]
            assert worker.snapshot()["returned"] == 1

    run_virtual(main())


def test_a_renewal_that_hangs_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The claims of other calls are renewed long before they end."""

    async def main() -> None:
        async with world_in(tmp_path) as world:
            calls = DeferredCalls(world.database, "later", delay=0)
            for number in range(2):
                await calls.astore(number)
            worker = DeferredCallWorker(calls, world.hang, lease=30.0)
            change, loop = worker._change, asyncio.get_running_loop()
            renewed: list[float] = []
            stuck: list[str] = []

            async def one_hangs(claim: Any, what: str, **more: Any) -> bool:
                if what == "renew":
                    stuck.append(claim.id)
                    if claim.id == stuck[0]:
                        await asyncio.Event().wait()
                    renewed.append(loop.time())
                return await change(claim, what, **more)

            monkeypatch.setattr(worker, "_change", one_hangs)
            running = asyncio.create_task(worker.run())
            await world.begun.wait()
            began = loop.time()
            await asyncio.sleep(60.0)  # noqa: TID251 - in virtual time
            worker.stop(grace=0.0)
            await running
            gaps = [b - a for a, b in pairwise([began, *renewed])]
            assert max(gaps) < 15.0

    run_virtual(main())
