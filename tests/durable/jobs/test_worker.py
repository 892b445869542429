"""Workers on the database alone: they do jobs, stop, die, and are succeeded by others."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall import Breaker, Guard, Rejected, Retry, subscribe
from seawall.clock import VirtualClock
from seawall.durable.database import statements as _sql
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import Database, in_thread
from seawall.durable.jobs import jobs as _jobs_steps
from seawall.durable.jobs import worker as _jobs_worker
from seawall.durable.jobs.jobs import Jobs
from seawall.durable.jobs.records import Job
from seawall.durable.jobs.worker import DurableJobRun, JobHandle, JobWorker
from seawall.errors import UnknownJob
from seawall.events import JobDied
from seawall.resources.executors.executors import IoPool
from tests.durable.conftest import Opening, opening_by
from tests.durable.jobs.test_jobs import ask, world_of
from tests.durable.postgres import Postgres


@asynccontextmanager
async def at_work(worker: JobWorker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop(0.0)
        await task


async def ended(jobs: Jobs, job: Job) -> Job:
    return await jobs.ajoin(job.id, scope="acme", timeout=20)


def test_jobs_are_done(opening: Opening):
    """Async and plain functions do their kinds; results, progress and errors are kept."""

    async def double(job: JobHandle) -> Any:
        job.progress(0.5, "half")
        return {"double": job.payload * 2}

    def plain(_job: JobHandle) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        return b"plain"

    async def broken(_job: JobHandle) -> None:
        raise LookupError("no such thing")

    async def unwritable(_job: JobHandle) -> Any:
        return object()

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database, attempts=2)
            functions = {"double": double, "plain": plain, "broken": broken, "odd": unwritable}
            worker = JobWorker(jobs, functions, backoff=[0.0], rng=Random(1))
            async with at_work(worker):
                made = [await jobs.asubmit(None, "double", n, scope="acme") for n in range(5)]
                assert [(await ended(jobs, job)).result for job in made] == [
                    {"double": n * 2} for n in range(5)
                ]
                job = await ended(jobs, await jobs.asubmit(None, "plain", scope="acme"))
                assert job.result == b"plain"
                job = await ended(jobs, await jobs.asubmit(None, "broken", scope="acme"))
                assert (job.state, job.attempts) == ("failed", 2)
                assert job.error == "LookupError: no such thing"
                job = await ended(jobs, await jobs.asubmit(None, "odd", scope="acme"))
                assert (job.state, job.attempts) == ("failed", 1)
                assert worker.snapshot()["running"]
            told = worker.snapshot()
            assert (told["succeeded"], told["retried"], told["failed"]) == (6, 1, 2)
            assert not told["running"]
            assert repr(worker).endswith("0 of 10 at work>")

    asyncio.run(main())


def test_a_running_job_is_cancelled(opening: Opening):
    """A coroutine is cancelled, a plain function sees the flag; a waiting job never begins."""
    begun = asyncio.Event()
    stopped: list[str] = []

    async def endless(_job: JobHandle) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("async")

    def plain(job: JobHandle) -> None:
        loop.call_soon_threadsafe(begun.set)
        for _ in range(10_000):
            if job.cancelled:
                break
            threading.Event().wait(0.005)
        stopped.append("plain")
        job.raise_if_cancelled()

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with opening() as database:
            jobs = Jobs(database)
            worker = JobWorker(jobs, {"endless": endless, "plain": plain}, concurrency=1)
            async with at_work(worker):
                for kind in ("endless", "plain"):
                    job = await jobs.asubmit(None, kind, scope="acme")
                    waiting = await jobs.asubmit(None, kind, scope="acme", priority=9)
                    await begun.wait()
                    begun.clear()
                    assert (await jobs.acancel(waiting.id, scope="acme")).state == "cancelled"
                    seen = await jobs.acancel(job.id, scope="acme")
                    assert (seen.state, seen.cancelling) == ("running", True)
                    assert (await ended(jobs, job)).state == "cancelled"
            assert stopped == ["async", "plain"]
            assert worker.snapshot()["cancelled"] == 2

    loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]
    asyncio.run(main())


def test_a_killed_workers_job_is_taken_over_once(opening: Opening):
    """One that vanishes in the middle is succeeded after its lease; its late word is refused."""
    runs: list[int] = []

    async def count(job: JobHandle) -> int:
        runs.append(job.attempt)
        return job.attempt

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database, lease=10.0)
            job = await jobs.asubmit(None, "count", scope="acme")
            (claim,) = await jobs.aclaim(["count"], owner="killed")
            workers = [JobWorker(jobs, {"count": count}) for _ in range(4)]
            assert sum(await asyncio.gather(*(w.run_once() for w in workers))) == 0
            await world.pass_(10)
            assert sum(await asyncio.gather(*(w.run_once() for w in workers))) == 1
            assert runs == [2]
            assert not await jobs.asucceed(claim, "zombie")
            assert (await ended(jobs, job)).result == 2

    asyncio.run(main())


VICTIM = """
import asyncio, sys
from seawall.durable import Database, Sqlite
from seawall.durable.jobs.worker import JobWorker
from seawall.durable.jobs.jobs import Jobs

place, schema, now = sys.argv[1:]

async def report(job):
    print("begun", flush=True)
    return (await asyncio.to_thread(sys.stdin.readline)).strip()

async def main():
    if schema:
        import asyncpg
        source = await asyncpg.create_pool(place, min_size=1)
    else:
        source = Sqlite(place)
    database = Database(source, schema=schema or None)
    database._now = now
    worker = JobWorker(Jobs(database, lease=10.0), {"report": report})
    working = asyncio.create_task(worker.run())
    while not (worker.snapshot()["succeeded"] or worker.snapshot()["lost"]):
        await asyncio.wait([working], timeout=0.05)
    worker.stop(0.0)
    await working
    print("lost" if worker.snapshot()["lost"] else "told", flush=True)

asyncio.run(main())
"""


async def victim_of(world: Any, postgres: Postgres, folder: Path) -> asyncio.subprocess.Process:
    """Start a worker in a process of its own, and wait until it has begun with a job."""
    postgresql = world.database.dialect == "postgres"
    victim = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        VICTIM,
        postgres.url if postgresql else str(folder / "test.db"),
        world.database.names.schema or "",
        world.database._now or "",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert victim.stdout is not None
    assert await victim.stdout.readline() == b"begun\n"
    return victim


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_a_process_that_is_killed_is_succeeded(driver: str, postgres: Postgres, tmp_path: Path):
    """The kernel ends a worker in the middle of a job: another does it, after the lease."""

    async def report(job: JobHandle) -> int:
        return job.attempt

    async def main() -> None:
        async with world_of(opening_by(driver, postgres, tmp_path)) as world:
            jobs = Jobs(world.database, lease=10.0)
            job = await jobs.asubmit(None, "report", scope="acme")
            victim = await victim_of(world, postgres, tmp_path)
            victim.kill()
            await victim.communicate()
            assert (await jobs.aget(job.id, scope="acme")).state == "running"
            worker = JobWorker(jobs, {"report": report})
            assert await worker.run_once() == 0
            await world.pass_(10)
            assert await worker.run_once() == 1
            assert (await ended(jobs, job)).result == 2

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_a_process_that_is_paused_has_no_say(driver: str, postgres: Postgres, tmp_path: Path):
    """A worker stands still beyond its lease: another does the job, and the late result is lost."""

    async def report(job: JobHandle) -> int:
        return job.attempt

    async def main() -> None:
        async with world_of(opening_by(driver, postgres, tmp_path)) as world:
            jobs = Jobs(world.database, lease=10.0)
            job = await jobs.asubmit(None, "report", scope="acme")
            victim = await victim_of(world, postgres, tmp_path)
            victim.send_signal(signal.SIGSTOP)
            try:
                await world.pass_(10)
                assert await JobWorker(jobs, {"report": report}).run_once() == 1
                assert (await ended(jobs, job)).result == 2
            finally:
                victim.send_signal(signal.SIGCONT)
            said, _ = await victim.communicate(b"late\n")
            assert said == b"lost\n"
            seen = await jobs.aget(job.id, scope="acme")
            assert (seen.result, seen.attempts) == (2, 2)

    asyncio.run(main())


def test_a_worker_that_lost_its_lease_is_stopped(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """Who was paused for too long, and whose job is another's, is stopped and has no say."""
    monkeypatch.setattr(_jobs_worker, "LOOK", 0.1)
    begun, cut = asyncio.Event(), asyncio.Event()

    async def endless(_job: JobHandle) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    async def main() -> None:
        async with world_of(opening) as world:
            jobs, other = Jobs(world.database, lease=10.0), Jobs(world.database, lease=10.0)
            worker = JobWorker(jobs, {"endless": endless}, concurrency=1)
            async with at_work(worker):
                job = await jobs.asubmit(None, "endless", scope="acme")
                await begun.wait()
                await world.pass_(10)
                (claim,) = await other.aclaim(["endless"], owner="other")
                await cut.wait()
                assert await other.asucceed(claim, "other")
            assert (await ended(jobs, job)).result == "other"
            assert worker.snapshot()["lost"] == 1

    asyncio.run(main())


def test_stopping_gives_back(opening: Opening):
    """What is not done within the grace is free at once, has lost no attempt, and keeps its key."""
    begun = asyncio.Event()

    async def endless(_job: JobHandle) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            job = await jobs.asubmit(None, "endless", scope="acme", key="k")
            for stop in ("stop", "cancel"):
                begun.clear()
                worker = JobWorker(jobs, {"endless": endless})
                task = asyncio.create_task(worker.run())
                await begun.wait()
                if stop == "stop":
                    worker.stop(0.0)
                    await task
                else:
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                seen = await jobs.aget(job.id, scope="acme")
                assert (seen.state, seen.attempts) == ("queued", 0)
                assert worker.snapshot()["returned"] == 1
            await worker.run()  # what is stopped stays so

    asyncio.run(main())


def test_finishing_within_the_grace(opening: Opening):
    """A stopped worker lets what is at work end, and claims nothing more."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def patient(_job: JobHandle) -> str:
        begun.set()
        await go.wait()
        return "done"

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            first = await jobs.asubmit(None, "patient", scope="acme")
            worker = JobWorker(jobs, {"patient": patient}, concurrency=1)
            task = asyncio.create_task(worker.run())
            await begun.wait()
            second = await jobs.asubmit(None, "patient", scope="acme")
            worker.stop(30.0)
            go.set()
            await task
            assert (await jobs.aget(first.id, scope="acme")).result == "done"
            assert (await jobs.aget(second.id, scope="acme")).state == "queued"

    asyncio.run(main())


def test_failures_back_off_and_are_bounded(opening: Opening):
    """A failed job is due after its pause, not before; errors of `give_up_on` end it at once."""

    async def fail(job: JobHandle) -> None:
        if job.payload == "refused":
            raise Rejected("later", retry_after=50.0)
        raise ValueError(job.payload) if job.payload == "bad" else OSError("down")

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database, attempts=3)
            died: list[tuple[str, int, str]] = []
            end = subscribe(lambda e: died.append((e.job, e.attempts, e.cause)), JobDied)
            worker = JobWorker(jobs, {"fail": fail}, backoff=[5.0, 20.0], give_up_on=(ValueError,))
            job = await jobs.asubmit(None, "fail", "down", scope="acme")
            bad = await jobs.asubmit(None, "fail", "bad", scope="acme")
            assert await worker.run_once() == 2
            assert (await ended(jobs, bad)).error == "ValueError: bad"
            for pause in (5, 20):
                await world.pass_(pause - 0.001)
                assert await worker.run_once() == 0
                seen = await jobs.aget(job.id, scope="acme")
                assert (seen.state, seen.error) == ("queued", "OSError: down")
                await world.pass_(0.001)
                assert await worker.run_once() == 1
            assert (await ended(jobs, job)).attempts == 3
            assert died == [(bad.id, 1, "ValueError: bad"), (job.id, 3, "OSError: down")]
            end()
            await jobs.asubmit(None, "fail", "refused", scope="acme")
            assert await worker.run_once() == 1
            await world.pass_(49)
            assert await worker.run_once() == 0

    asyncio.run(main())


def test_a_database_that_is_away_loses_nothing(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """During an outage the worker keeps trying, and records its results at the end."""
    asked = {"claim": 0, "succeed": 0}
    claiming, telling = _jobs_steps.claim_due, _jobs_steps.store_outcome

    def claiming_badly(*args: Any) -> Any:
        asked["claim"] += 1
        if asked["claim"] < 3:
            raise OSError("away")
        return claiming(*args)

    def telling_badly(*args: Any) -> Any:
        asked["succeed"] += 1
        if asked["succeed"] < 3:
            raise OSError("away")
        return telling(*args)

    async def once(job: JobHandle) -> int:
        return job.attempt

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            job = await jobs.asubmit(None, "once", scope="acme")
            monkeypatch.setattr(_jobs_steps, "claim_due", claiming_badly)
            monkeypatch.setattr(_jobs_steps, "store_outcome", telling_badly)
            async with at_work(JobWorker(jobs, {"once": once}, rng=Random(3))):
                assert (await ended(jobs, job)).result == 1
            assert asked["succeed"] == 3

    asyncio.run(main())


def test_an_answer_that_is_lost(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """If the answer to a commit is lost, the end is written again and counts once."""
    runs: list[str] = []

    async def once(job: JobHandle) -> str:
        runs.append(job.payload)
        if job.payload == "fails":
            raise ValueError("no")
        return "done"

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            arun, telling = database.arun, _jobs_steps.store_outcome
            lost: list[str] = []

            def noticed(which: str, told: Any) -> Any:
                lost.append(which)
                return telling(which, told)

            async def deaf(operation: Any) -> Any:
                before = len(lost)
                answer = await arun(operation)
                if len(lost) > before and lost.count(lost[-1]) == 1:
                    raise OSError("the connection was closed")
                return answer

            monkeypatch.setattr(_jobs_steps, "store_outcome", noticed)
            monkeypatch.setattr(database, "arun", deaf)
            made = [
                await jobs.asubmit(None, "once", what, scope="acme") for what in ("is", "fails")
            ]
            worker = JobWorker(jobs, {"once": once}, give_up_on=(ValueError,))
            assert await worker.run_once() == 2
            assert [(await ended(jobs, job)).state for job in made] == ["succeeded", "failed"]
            told = worker.snapshot()
            assert (told["succeeded"], told["failed"], told["lost"]) == (1, 1, 0)
            assert sorted(runs) == ["fails", "is"]

    asyncio.run(main())


def test_who_cannot_prolong_a_lease_stops_when_it_is_over(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
):
    """While the database is away a job goes on as long as it is surely its worker's, no longer."""

    async def away(*_args: Any) -> None:
        raise OSError("away")

    async def main() -> None:
        async with opening() as database:
            clock = VirtualClock()
            jobs = Jobs(database, lease=30.0, clock=clock)
            worker = JobWorker(jobs, {"report": lambda _job: 1})
            await jobs.asubmit(None, "report", scope="acme")
            (claim,) = await jobs.aclaim(["report"], owner=worker.owner)
            run = DurableJobRun(claim, in_thread=True)
            clock.advance(20.0)
            assert await worker._renew([run])
            monkeypatch.setattr(jobs, "_abeat", away)
            for seconds, reason in [(29.9, None), (0.1, "lost")]:
                clock.advance(seconds)
                assert not await worker._renew_in_time([run])
                assert run.stop_reason == reason
            assert run.handle.cancelled

    asyncio.run(main())


def test_a_job_is_stopped_on_time_while_a_blocking_driver_hangs(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """A hanging renewal cannot be cancelled in its thread; the job ends with its lease even so."""
    released, stopped = threading.Event(), asyncio.Event()

    async def patient(_job: JobHandle) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def hangs(*_args: Any) -> Any:
        return await in_thread(released.wait)

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            jobs = Jobs(database, lease=0.3)
            monkeypatch.setattr(jobs, "_abeat", hangs)
            await jobs.asubmit(None, "patient", scope="acme")
            worker = JobWorker(jobs, {"patient": patient})
            task = asyncio.create_task(worker.run_once())
            try:
                async with asyncio.timeout(10):
                    await stopped.wait()
            finally:
                released.set()
                await task
            assert worker.snapshot()["lost"] == 1

    asyncio.run(main())


def test_a_worker_ends_while_a_renewal_hangs(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """Nor does its event loop wait for it; a later session renews anew."""
    hanging: list[asyncio.Task[Any]] = []
    released = False

    async def hangs(*_args: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        hanging.append(task)
        while not released:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def patient(_job: JobHandle) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        nonlocal released
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            jobs = Jobs(database, lease=0.3)
            monkeypatch.setattr(jobs, "_abeat", hangs)
            worker = JobWorker(jobs, {"patient": patient}, concurrency=1)
            try:
                for number in (1, 2):
                    await jobs.asubmit(None, "patient", scope="acme")
                    assert await worker.run_once() == 1
                    assert len(hanging) == number
                assert asyncio.all_tasks() == {asyncio.current_task()}
            finally:
                released = True
                for task in hanging:
                    task.cancel()

    asyncio.run(main())


def test_a_job_that_is_dropped_before_its_report_is_confirmed_frees_its_slot(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
):
    """A report arrives, its answer is lost, and an operator drops the failed job meanwhile."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database, attempts=1)
            afail, asked = jobs.afail, []

            async def lost_answer(claim: Any, *args: Any, **how: Any) -> str | None:
                asked.append(claim)
                state = await afail(claim, *args, **how)
                if len(asked) == 1:
                    assert await jobs.adrop(claim.id)
                    raise OSError("the connection was closed")
                return state

            monkeypatch.setattr(jobs, "afail", lost_answer)
            await jobs.asubmit(None, "fails", scope="acme")
            worker = JobWorker(jobs, {"fails": lambda _job: 1 // 0})
            async with asyncio.timeout(10):
                assert await worker.run_once() == 1
            assert worker.snapshot()["at_work"] == 0

    asyncio.run(main())


def test_a_server_that_crashes_loses_nothing(postgres: Postgres, tmp_path: Path):
    """If the server crashes during a job, the result is written when it is back."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def patient(job: JobHandle) -> int:
        begun.set()
        await go.wait()
        return job.attempt

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            jobs = Jobs(database)
            worker = JobWorker(jobs, {"patient": patient})
            async with at_work(worker) as task:
                job = await jobs.asubmit(None, "patient", scope="acme")
                await begun.wait()
                await asyncio.to_thread(postgres.stop, "immediate")
                go.set()
                await asyncio.wait([task], timeout=0.1)  # it cannot tell anybody
                await asyncio.to_thread(postgres.start)
                while not worker.snapshot()["succeeded"]:
                    await asyncio.wait([task], timeout=0.05)
            assert (await ended(jobs, job)).result == 1

    asyncio.run(main())


def test_without_a_thread_a_job_is_given_back(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """A plain function that no thread is free for was not tried: it is due again after a pause."""

    async def refusing(_pool: Any, *_args: Any) -> None:
        raise Rejected("no thread")

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database)
            job = await jobs.asubmit(None, "plain", scope="acme")
            worker = JobWorker(jobs, {"plain": lambda _job: 7})
            with monkeypatch.context() as patch:
                patch.setattr(IoPool, "arun", refusing)
                assert await worker.run_once() == 1
            assert await worker.run_once() == 0
            seen = await jobs.aget(job.id, scope="acme")
            assert (seen.state, seen.attempts) == ("queued", 0)
            await world.pass_(1)
            assert await worker.run_once() == 1
            assert (await ended(jobs, job)).result == 7

    asyncio.run(main())


def test_progress_is_stored_while_it_runs(opening: Opening):
    """What the function says is seen by who asks, before the end."""
    go = asyncio.Event()

    async def slow(job: JobHandle) -> None:
        job.progress(0.25, "a quarter")
        await go.wait()

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database, lease=0.4)  # so often are heartbeats, too
            job = await jobs.asubmit(None, "slow", scope="acme")
            async with at_work(JobWorker(jobs, {"slow": slow})):
                while (await jobs.aget(job.id, scope="acme")).progress != 0.25:
                    pass
                seen = await jobs.aget(job.id, scope="acme")
                assert (seen.state, seen.message) == ("running", "a quarter")
                go.set()
                seen = await ended(jobs, job)
                assert (seen.progress, seen.message) == (1.0, "")  # nor a quarter any more

    asyncio.run(main())


@pytest.mark.parametrize("library", ["asyncpg", "psycopg"])
def test_workers_elsewhere_hear_of_jobs(library: str, postgres: Postgres, tmp_path: Path):
    """With `notify` and `listen` a job is begun at once in another process, long before a poll."""

    async def listen() -> Any:
        if library == "asyncpg":
            import asyncpg

            return await asyncpg.connect(postgres.url)
        import psycopg

        return await psycopg.AsyncConnection.connect(postgres.url, autocommit=True)

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            here, elsewhere = Jobs(database, notify=True), Jobs(database)
            slow = (120.0, 120.0)
            worker = JobWorker(elsewhere, {"report": lambda _job: 1}, poll=slow, listen=listen)
            async with at_work(worker) as task:
                while not worker.snapshot()["listening"]:
                    await asyncio.wait([task], timeout=0.01)
                assert (await ended(here, await here.asubmit(None, "report", scope="acme"))).result
                async with database.atransaction() as raw:
                    here._notified = float("-inf")
                    job = await here.asubmit(raw, "report", scope="acme")
                assert (await ended(here, job)).result == 1
            assert not worker.snapshot()["listening"]

    asyncio.run(main())


def test_notifications_are_few(postgres: Postgres, tmp_path: Path):
    """Notifications make commits wait for each other: one in 50 ms, on a name that is not long."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            clock = VirtualClock()
            jobs = Jobs(database, notify=True, clock=clock)
            notifying = NamedQuery("jobs.notify", {"channel": jobs.channel})
            assert [[*jobs._notify()] for _ in range(3)] == [[notifying], [], []]
            clock.advance(0.05)
            assert [*jobs._notify()] == [notifying]
            assert [*Jobs(database)._notify()] == []
            long = Database(database.source, schema="s" * 39, prefix="p" * 39, name="long")
            assert len(Jobs(long).channel.encode()) < 63
            long.close()

    asyncio.run(main())


def test_after_news_it_looks_often(postgres: Postgres, tmp_path: Path):
    """A job announced before its commit is found soon after the commit."""
    told = iter([False] * 6 + [True] + [False] * 2)
    naps: list[float] = []

    class Recording(JobWorker):
        async def _wait_for_news(self, seconds: float, event: Any = None) -> bool:
            if event is not None or self._stopped:
                return await super()._wait_for_news(seconds, event)
            naps.append(seconds)
            if (heard := next(told, None)) is None:
                self.stop(0.0)
            return bool(heard)

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            await Recording(Jobs(database), {"report": lambda _job: 1}).run()

    asyncio.run(main())
    assert naps[6] > 0.7
    assert naps[7] <= 0.05


def test_what_is_not_kept_is_dropped_by_workers(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A working worker calls `cleanup` now and then."""
    monkeypatch.setattr(_jobs_worker, "CLEAN_EVERY", 0.02)

    async def main() -> None:
        async with world_of(opening_by("sqlite", postgres, tmp_path)) as world:
            jobs = Jobs(world.database, result_ttl=10.0, gone_for=10.0)
            worker = JobWorker(jobs, {"report": lambda _job: "x" * 100})
            await jobs.asubmit(None, "report", scope="acme")
            async with at_work(worker) as task:
                while (await jobs.acounts()).keys() != {"succeeded"}:
                    await asyncio.wait([task], timeout=0.01)
                await world.pass_(10)
                while (await jobs.acounts()).keys() != {"expired"}:
                    await asyncio.wait([task], timeout=0.01)
                await world.pass_(10)
                while await jobs.acounts():
                    await asyncio.wait([task], timeout=0.01)

    asyncio.run(main())


def test_handles_check_what_they_are_told():
    """A share outside of 0 to 1 is refused where it is said."""
    handle = JobHandle.__new__(JobHandle)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share"):
            handle.progress(share)


# Without the safeguards


def zombies_are_refused(opening: Opening) -> bool:
    async def main() -> bool:
        async with world_of(opening) as world:
            jobs = Jobs(world.database, lease=10.0)
            job = await jobs.asubmit(None, "report", scope="acme")
            (zombie,) = await jobs.aclaim(["report"], owner="w")
            await world.pass_(10)
            (claim,) = await jobs.aclaim(["report"], owner="w")
            await jobs.asucceed(zombie, "zombie")
            await jobs.asucceed(claim, "right")
            return (await jobs.aget(job.id, scope="acme")).result == "right"

    return asyncio.run(main())


def is_claimed_twice(opening: Opening) -> bool:
    async def main() -> bool:
        async with opening() as database:
            jobs = Jobs(database)
            await jobs.asubmit(None, "report", scope="acme")
            async with database.atransaction() as raw:
                taking = _jobs_steps.claim_due(["report"], 1, "a", 30_000_000, 1)
                assert len(await database.connection(raw).arun(taking)) == 1
                second = asyncio.create_task(jobs.aclaim(["report"], owner="b"))
                await asyncio.wait([second], timeout=0.5)  # it waits for the first, or passes by
            return bool(await second)

    return asyncio.run(main())


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what changes the text of a statement, for this test alone."""
    real = _sql.statements
    changes: dict[str, tuple[str, str]] = {}

    def read(dialect: Any, file: str) -> dict[str, str]:
        texts = dict(real(dialect, file))
        if file == "jobs":
            for name, (old, new) in changes.items():
                assert old in texts[name]
                texts[name] = texts[name].replace(old, new)
        return texts

    def change(name: str, old: str, new: str) -> None:
        changes[name] = (old, new)
        _sql.statement.cache_clear()

    monkeypatch.setattr(_sql, "statements", read)
    yield change
    monkeypatch.undo()
    _sql.statement.cache_clear()


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_without_the_epoch_a_zombie_is_heard(
    driver: str, postgres: Postgres, tmp_path: Path, changed: Any
):
    """The epoch is what refuses a late worker; without it its result would stand."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert zombies_are_refused(opening_by(driver, postgres, tmp_path / "a"))
    changed("succeed", "AND epoch = :epoch", "AND epoch >= :epoch")
    assert not zombies_are_refused(opening_by(driver, postgres, tmp_path / "b"))


def test_without_the_lock_a_job_is_claimed_twice(postgres: Postgres, tmp_path: Path, changed: Any):
    """Rows are locked as they are chosen, and looked at again; else two would take the same."""
    assert not is_claimed_twice(opening_by("asyncpg", postgres, tmp_path))
    changed("due", "FOR UPDATE SKIP LOCKED", "")
    assert not is_claimed_twice(opening_by("asyncpg", postgres, tmp_path))
    changed("take", "AND due_at <= ", "AND 0 < ")
    assert is_claimed_twice(opening_by("asyncpg", postgres, tmp_path))


def jobs_of_one_key(opening: Opening, *, index: bool = True) -> int:
    async def main() -> int:
        async with opening() as database:
            if not index:
                name = f'"{database.names.prefix}jobs_key"'
                schema = database.names.schema
                dropped = name if schema is None else f'"{schema}".{name}'
                await database.arun(ask(f"DROP INDEX {dropped}"))
            jobs = Jobs(database)
            made = await asyncio.gather(
                *(jobs.asubmit(None, "report", scope="acme", key="k") for _ in range(16))
            )
            return len({job.id for job in made})

    return asyncio.run(main())


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_without_the_unique_key_there_are_several_jobs(
    driver: str, postgres: Postgres, tmp_path: Path, changed: Any
):
    """The index is what makes one key one job, however many submit at once."""
    opening = opening_by(driver, postgres, tmp_path)
    assert jobs_of_one_key(opening) == 1
    (tmp_path / "b").mkdir()
    opening = opening_by(driver, postgres, tmp_path / "b")
    taken = "ON CONFLICT (scope, kind, key_hash) WHERE key_hash IS NOT NULL DO NOTHING"
    changed("submit", taken, "")
    assert jobs_of_one_key(opening, index=False) > 1


def seen_by_strangers(opening: Opening) -> bool:
    async def main() -> bool:
        async with opening() as database:
            jobs = Jobs(database)
            job = await jobs.asubmit(None, "report", scope="acme")
            try:
                await jobs.aget(job.id, scope="evil")
            except UnknownJob:
                return False
            return True

    return asyncio.run(main())


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_without_the_scope_strangers_see_jobs(
    driver: str, postgres: Postgres, tmp_path: Path, changed: Any
):
    """That the scope is asked for in the statement is what keeps others out."""
    opening = opening_by(driver, postgres, tmp_path)
    assert not seen_by_strangers(opening)
    changed("view", "AND scope = :scope", "AND :scope <> ''")
    assert seen_by_strangers(opening)


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_without_the_lease_a_job_is_taken_from_the_living(
    driver: str, postgres: Postgres, tmp_path: Path, changed: Any
):
    """A claim is good until its lease is over; else the next one would take the job at once."""
    opening = opening_by(driver, postgres, tmp_path)

    async def main() -> bool:
        async with opening() as database:
            jobs = Jobs(database)
            await jobs.asubmit(None, "report", scope="acme")
            assert await jobs.aclaim(["report"], owner="a")
            return bool(await jobs.aclaim(["report"], owner="b"))

    assert not asyncio.run(main())
    changed("due", "due_at <= clock.now", "due_at > 0")
    changed("take", "AND due_at <= ", "AND 0 < ")
    assert asyncio.run(main())


def guarded_by(guard: Guard, *, plain: bool) -> tuple[Any, list[int]]:
    """Return a function of that guard's, and what notes that it ran."""
    ran: list[int] = []
    if plain:
        return guard(lambda job: ran.append(job.attempt)), ran

    @guard
    async def function(job: JobHandle) -> None:
        ran.append(job.attempt)

    return function, ran


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
def test_a_refusal_by_its_own_guard_costs_no_attempt(opening: Opening, *, plain: bool):
    """While the circuit is open the job waits, however long, and then has all its attempts."""

    async def main() -> None:
        async with world_of(opening) as world:
            breaker = Breaker(consecutive=1)
            guard = Guard(f"receiver {plain}", breaker)
            function, ran = guarded_by(guard, plain=plain)
            jobs = Jobs(world.database, attempts=2)
            job = await jobs.asubmit(None, "mail", scope="acme")
            worker = JobWorker(jobs, {"mail": function}, backoff=[5.0])
            breaker.isolate()
            for _ in range(4):
                assert await worker.run_once() == 1
                assert await worker.run_once() == 0
                seen = await jobs.aget(job.id, scope="acme")
                assert (seen.state, seen.attempts) == ("queued", 0)
                await world.pass_(5)
            assert worker.snapshot()["returned"] == 4
            breaker.close()
            assert await worker.run_once() == 1
            assert (await ended(jobs, job)).state == "succeeded"
            assert ran == [1]
            guard.close()

    asyncio.run(main())


async def inner(_job: JobHandle) -> None:
    """Raise the refusal of an inner guard."""
    raise Rejected("elsewhere", guard="elsewhere")


@pytest.mark.parametrize("why", ["another's guard", "retried", "given up on"])
def test_other_refusals_cost_their_attempt(why: str, postgres: Postgres, tmp_path: Path):
    """What may have run is bounded by its attempts, and `give_up_on` is obeyed."""

    async def main() -> None:
        async with world_of(opening_by("sqlite", postgres, tmp_path)) as world:
            breaker = Breaker(consecutive=1)
            retrying = [Retry(attempts=2, on=[ConnectionError])] if why == "retried" else []
            guard = Guard(f"other {why}", *retrying, breaker)
            function = guard(inner)
            if why != "another's guard":
                breaker.isolate()
            jobs = Jobs(world.database, attempts=1)
            job = await jobs.asubmit(None, "mail", scope="acme")
            given_up = (Rejected,) if why == "given up on" else ()
            worker = JobWorker(jobs, {"mail": function}, give_up_on=given_up)
            assert await worker.run_once() == 1
            seen = await ended(jobs, job)
            assert (seen.state, seen.attempts) == ("failed", 1)
            guard.close()

    asyncio.run(main())
