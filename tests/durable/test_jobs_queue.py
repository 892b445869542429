"""Jobs of a database on the queue that pods share: a real Valkey; and on the one of a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from seawall import Rejected
from seawall.durable._jobs_queue import QueuedJobs
from seawall.durable._jobs_run import JobHandle
from seawall.durable.jobs import Job, Jobs
from seawall.errors import JobNotReady
from seawall.executors import IoPool
from seawall.jobs import JobQueue, LocalQueue, Worker
from seawall.redis._store import RedisStore
from seawall.redis.queue import PriorityQueue
from tests.durable.conftest import Opening, opening_by
from tests.durable.postgres import Postgres
from tests.durable.test_jobs import world_of
from tests.redis.support import Server


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    """Return a server of this file's own."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(params=["valkey", "local"])
def queue(request: pytest.FixtureRequest) -> Iterator[JobQueue]:
    """Return each kind of queue in turn."""
    if request.param == "local":
        yield LocalQueue(f"jobs {token_hex(4)}")
        return
    server: Server = request.getfixturevalue("valkey")
    store = RedisStore(server.url, prefix=f"test-{token_hex(4)}", timeout=5.0)
    yield PriorityQueue(store, "jobs")
    store.close()


@pytest.fixture(params=["asyncpg", "sqlite"])
def opening(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens each kind of database: the drivers are compared elsewhere."""
    return opening_by(request.param, postgres, tmp_path)


@asynccontextmanager
async def carried(queued: QueuedJobs, **options: Any) -> AsyncIterator[Worker]:
    """Have a worker of the queue's do the jobs."""
    worker = Worker(queued.queue, queued.handle, **options)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop(5.0)
        await task
        queued.close()


async def ended(jobs: Jobs, job: Job) -> Job:
    return await jobs.await_(job.id, scope="acme", timeout=20)


def test_jobs_go_by_a_queue(opening: Opening, queue: JobQueue):
    """A queue's worker does jobs by their ids; the record in the database is what counts."""
    runs: list[str] = []

    async def report(job: JobHandle) -> Any:
        runs.append(job.id)
        job.progress(1.0, "all of it")
        if job.payload == "once more" and job.attempt == 1:
            raise OSError("down")
        return job.attempt

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            queued = QueuedJobs(jobs, queue, {"report": report}, backoff=[0.0])
            async with carried(queued) as worker:
                first = await jobs.asubmit(None, "report", "a", scope="acme")
                await queued.apush(first)
                seen = await ended(jobs, first)
                assert (seen.result, seen.message) == (1, "all of it")
                again = await jobs.asubmit(None, "report", "once more", scope="acme")
                await queued.apush(again)
                assert (await ended(jobs, again)).result == 2
                # A push that was lost, a push of what was done, and one of what never was.
                lost = await jobs.asubmit(None, "report", "b", scope="acme")
                assert await queued.asweep() == 1
                assert (await ended(jobs, lost)).result == 1
                assert await queued.asweep() == 0
                await queue.await_(await queue.apush({"job": first.id}), timeout=10)
                await queue.await_(await queue.apush("nonsense"), timeout=10)
            assert len(runs) == 4
            assert queued.snapshot()["succeeded"] == 3
            assert worker.snapshot()["failed"] == 0

    asyncio.run(main())


def test_what_comes_too_early_is_brought_again(opening: Opening, queue: JobQueue):
    """A job that waits, for its delay or its next attempt, costs the queue no attempt."""

    async def refused(_job: JobHandle) -> None:
        raise Rejected("later", retry_after=70.0)

    async def claimed() -> Any:
        (claim,) = await queue.aclaim(wait=10.0)
        return claim

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database)
            queued = QueuedJobs(jobs, queue, {"report": refused})
            job = await jobs.asubmit(None, "report", scope="acme", delay=50.0)
            await queued.apush(job)
            assert (await queue.asnapshot())["delayed"] == 1
            early = await queue.apush({"job": job.id})
            claim = await claimed()
            assert claim.id == early
            assert await queued.handle(claim) == "later"
            await queue.aack(claim)
            assert (await queue.asnapshot())["delayed"] == 2
            await world.pass_(50)
            await queue.apush({"job": job.id})
            claim = await claimed()
            assert await queued.handle(claim) == "later"
            await queue.aack(claim)
            seen = await queue.asnapshot()
            assert (seen["delayed"], seen["dead"]) == (3, 0)
            due = (await jobs.aget(job.id, scope="acme")).due_at - job.created_at
            assert 119 < due < 50 + 1.25 * 70 + 1

    asyncio.run(main())


def test_what_was_not_done_stays_in_the_queue(
    opening: Opening, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
):
    """A job that no thread was free for, or that was lost to another, is brought again."""

    async def refusing(_pool: Any, *_args: Any) -> None:
        raise Rejected("no thread")

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database, lease=10.0)
            queued = QueuedJobs(jobs, queue, {"plain": lambda _job: 7, "taken": taken})
            world_pass, others = world.pass_, jobs
            monkeypatch.setattr(IoPool, "arun", refusing)
            job = await jobs.asubmit(None, "plain", scope="acme")
            await queued.apush(job)
            (claim,) = await queue.aclaim(wait=10.0)
            assert await queued.handle(claim) == "later"
            await queue.aack(claim)
            assert (await queue.asnapshot())["delayed"] == 1
            assert (await jobs.aget(job.id, scope="acme")).attempts == 0
            job = await jobs.asubmit(None, "taken", scope="acme")
            await queued.apush(job)
            (claim,) = await queue.aclaim(wait=10.0)
            steal.extend([world_pass, others])
            assert await queued.handle(claim) == "later"
            assert queued.snapshot()["lost"] == 1
            assert (await queue.asnapshot())["delayed"] == 2
            queued.close()

    steal: list[Any] = []

    async def taken(job: JobHandle) -> str:
        passing, others = steal
        await passing(10)
        assert await others._aclaim_one(job.id, owner="other")
        return "late"

    asyncio.run(main())


@pytest.mark.parametrize("when", ["while it is claimed", "while it runs"])
def test_who_is_cancelled_gives_back(when: str, opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """A queue's worker that stops leaves no job that is nobody's until the lease is over."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def endless(_job: JobHandle) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        async with opening() as database:
            jobs, queue = Jobs(database), LocalQueue(f"jobs {token_hex(4)}")
            queued = QueuedJobs(jobs, queue, {"report": endless})
            claim_one = jobs._aclaim_one

            async def slow(id_: str, *, owner: str) -> Any:
                claimed = await claim_one(id_, owner=owner)
                begun.set()
                await go.wait()
                return claimed

            if when == "while it is claimed":
                monkeypatch.setattr(jobs, "_aclaim_one", slow)
            job = await jobs.asubmit(None, "report", scope="acme")
            await queued.apush(job)
            (claim,) = await queue.aclaim(wait=10.0)
            task = asyncio.create_task(queued.handle(claim))
            await begun.wait()
            task.cancel()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            seen = await jobs.aget(job.id, scope="acme")
            assert (seen.state, seen.attempts) == ("queued", 0)

    asyncio.run(main())


def test_an_id_without_a_job(opening: Opening, queue: JobQueue):
    """What is not committed yet, or is another's kind, is the queue's to try again."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            queued = QueuedJobs(jobs, queue, {"report": lambda _job: 1})
            other = await jobs.asubmit(None, "other", scope="acme")
            for id_ in ("12345678-1234-1234-1234-123456789012", other.id):
                await queue.apush({"job": id_})
                (claim,) = await queue.aclaim(wait=10.0)
                with pytest.raises(JobNotReady):
                    await queued.handle(claim)
                await queue.aack(claim)
            assert (await jobs.aget(other.id, scope="acme")).attempts == 0

    asyncio.run(main())


def test_a_queue_that_lost_everything(valkey: Server, postgres: Postgres, tmp_path: Path):
    """The store is emptied while jobs wait: the sweep brings all of them back."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            jobs = Jobs(database)
            async with RedisStore(valkey.url, prefix=f"test-{token_hex(4)}", timeout=5.0) as store:
                queued = QueuedJobs(jobs, PriorityQueue(store, "jobs"), {"report": count})
                made = [await jobs.asubmit(None, "report", n, scope="acme") for n in range(20)]
                for job in made:
                    await queued.apush(job)
                with valkey.client() as client:
                    client.flushall()
                async with carried(queued):
                    assert await queued.asweep() == 20
                    assert [(await ended(jobs, job)).result for job in made] == list(range(20))

    async def count(job: JobHandle) -> Any:
        return job.payload

    asyncio.run(main())


VICTIM = """
import asyncio, sys, asyncpg
from seawall import Worker
from seawall.durable import Database
from seawall.durable._jobs_queue import QueuedJobs
from seawall.durable.jobs import Jobs
from seawall.redis._store import RedisStore
from seawall.redis.queue import PriorityQueue

place, schema, url, prefix = sys.argv[1:]

async def endless(job):
    print("begun", flush=True)
    await asyncio.Event().wait()

async def main():
    source = await asyncpg.create_pool(place, min_size=1)
    jobs = Jobs(Database(source, schema=schema), lease=0.5)
    queue = PriorityQueue(RedisStore(url, prefix=prefix, timeout=5.0), "jobs")
    queued = QueuedJobs(jobs, queue, {"report": endless})
    await Worker(queue, queued.handle, lease=0.5).run()

asyncio.run(main())
"""


def test_a_killed_worker_of_the_queue_is_succeeded(
    valkey: Server, postgres: Postgres, tmp_path: Path
):
    """The kernel ends a queue's worker in the middle of a job: another does it, a lease later."""
    prefix = f"test-{token_hex(4)}"

    async def report(job: JobHandle) -> int:
        return job.attempt

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            jobs = Jobs(database, lease=0.5)
            async with RedisStore(valkey.url, prefix=prefix, timeout=5.0) as store:
                queued = QueuedJobs(jobs, PriorityQueue(store, "jobs"), {"report": report})
                job = await jobs.asubmit(None, "report", scope="acme")
                await queued.apush(job)
                schema = database.names.schema or ""
                victim = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    VICTIM,
                    postgres.url,
                    schema,
                    valkey.url,
                    prefix,
                    stdout=asyncio.subprocess.PIPE,
                )
                assert victim.stdout is not None
                assert await victim.stdout.readline() == b"begun\n"
                victim.kill()
                await victim.communicate()
                assert (await jobs.aget(job.id, scope="acme")).state == "running"
                async with carried(queued, lease=0.5):
                    assert (await ended(jobs, job)).result == 2

    asyncio.run(main())
