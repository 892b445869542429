"""Jobs in every database, by every driver: submitted once, claimed by one, ended by the rules."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seawall.clock import VirtualClock
from seawall.durable import Sqlite, amigrate
from seawall.durable.database.connections import NamedQuery, TextQuery
from seawall.durable.database.database import Database
from seawall.durable.database.statements import statements
from seawall.durable.jobs import jobs as steps
from seawall.durable.jobs.jobs import Jobs, OpenJobsLimit
from seawall.errors import JobExpired, KeyReused, QueueFull, RecordGarbled, UnknownJob
from seawall.models.durable_jobs import DurableJob
from tests.durable.conftest import Opening, opening_by
from tests.durable.postgres import Postgres

S = 1_000_000


def ask(text: str, **arguments: Any) -> Any:
    """Return an operation of one statement."""

    def operation() -> Any:
        return (yield TextQuery(text, arguments))

    return operation


class World:
    """A database whose time a test moves."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def begin(self) -> None:
        await self.database.arun(ask("CREATE TABLE {test_clock} (us bigint)"))
        await self.database.arun(ask("INSERT INTO {test_clock} VALUES (1000000000)"))
        table = self.database.names.table("test_clock")
        self.database._now = f"(SELECT us FROM {table})"  # noqa: S608 - a name of our own

    async def pass_(self, seconds: float) -> None:
        moved = ask("UPDATE {test_clock} SET us = us + CAST(:by AS bigint)", by=round(seconds * S))
        await self.database.arun(moved)


@contextlib.asynccontextmanager
async def world_of(opening: Opening) -> AsyncIterator[World]:
    async with opening() as database:
        world = World(database)
        await world.begin()
        yield world


def test_one_key_is_one_job(opening: Opening):
    """64 who submit with one key at once get the same job, and one of them made it."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            submitted = await asyncio.gather(
                *(
                    jobs.asubmit(None, "report", {"a": 1, "b": 2}, scope="acme", key="k")
                    for _ in range(64)
                )
            )
            assert len({job.id for job in submitted}) == 1
            assert [job.is_new for job in submitted].count(True) == 1
            assert jobs.snapshot()["submitted"] == 1
            assert jobs.snapshot()["repeated"] == 63
            same = await jobs.asubmit(None, "report", {"b": 2, "a": 1}, scope="acme", key="k")
            assert same.id == submitted[0].id
            others = [
                await jobs.asubmit(None, "report", {"a": 1, "b": 2}, scope="other", key="k"),
                await jobs.asubmit(None, "mail", {"a": 1, "b": 2}, scope="acme", key="k"),
                await jobs.asubmit(None, "report", {"a": 1, "b": 2}, scope="acme"),
            ]
            assert len({job.id for job in [*others, same]}) == 4
            with pytest.raises(KeyReused, match="another payload"):
                await jobs.asubmit(None, "report", {"a": 2}, scope="acme", key="k")

    asyncio.run(main())


def test_it_is_part_of_the_users_transaction(opening: Opening):
    """A job exists after the commit and not before; a rollback removes it."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            async with _transaction(database) as raw:
                first = await jobs.asubmit(raw, "report", 1, scope="acme", key="k")
                if database.dialect == "postgres":
                    with pytest.raises(UnknownJob):
                        await jobs.aget(first.id, scope="acme")
            assert (await jobs.aget(first.id, scope="acme")).state == "queued"
            with contextlib.suppress(ZeroDivisionError):
                async with _transaction(database) as raw:
                    second = await jobs.asubmit(raw, "report", 1, scope="acme")
                    raise ZeroDivisionError
            with pytest.raises(UnknownJob):
                await jobs.aget(second.id, scope="acme")
            async with _transaction(database) as raw:
                again = await jobs.asubmit(raw, "report", 1, scope="acme", key="k")
            assert again.id == first.id
            assert not again.is_new

    asyncio.run(main())


@contextlib.asynccontextmanager
async def _transaction(database: Database) -> AsyncIterator[Any]:
    if database.is_async:
        async with database.atransaction() as raw:
            yield raw
    else:
        with database.transaction() as raw:
            yield raw


def test_the_life_of_a_job(opening: Opening):
    """It is claimed by one, prolonged, ended with its result, kept for a time, and then gone."""

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database, result_ttl=100.0, gone_for=50.0, lease=10.0)
            made = await jobs.asubmit(None, "report", {"n": 7}, scope="acme", key="k")
            assert await jobs.aclaim(["mail"], 5, owner="w") == []
            (claim,) = await jobs.aclaim(["report", "mail"], 5, owner="w")
            assert (claim.id, claim.payload, claim.attempt) == (made.id, {"n": 7}, 1)
            assert await jobs.aclaim(["report"], owner="v") == []
            held = await jobs._abeat(
                "w", [steps.JobHeartbeat(claim.id, claim.fence, 0.5, "half")], []
            )
            assert held == {(claim.id, claim.fence): False}
            seen = await jobs.aget(made.id, scope="acme")
            assert (seen.state, seen.progress, seen.message) == ("running", 0.5, "half")
            assert await jobs.asucceed(claim, {"total": "häuser"})
            seen = await jobs.aget(made.id, scope="acme")
            assert (seen.state, seen.result, seen.progress) == ("succeeded", {"total": "häuser"}, 1)
            assert not await jobs.asucceed(claim, 2)
            assert (await jobs.acancel(made.id, scope="acme")).state == "succeeded"
            await world.pass_(100)
            with pytest.raises(JobExpired):
                await jobs.aget(made.id, scope="acme")
            fresh = await jobs.asubmit(None, "report", {"n": 8}, scope="acme", key="k")
            assert fresh.is_new
            assert await jobs.acleanup() == 1
            with pytest.raises(JobExpired):
                await jobs.aget(made.id, scope="acme")
            assert (await jobs.acounts())["expired"][0] == 1
            await world.pass_(50)
            assert await jobs.acleanup() == 1
            with pytest.raises(UnknownJob) as gone:
                await jobs.aget(made.id, scope="acme")
            assert not isinstance(gone.value, JobExpired)
            assert (await jobs.aget(fresh.id, scope="acme")).state == "queued"

    asyncio.run(main())


def test_a_dead_workers_job_is_taken_over_and_the_zombie_refused(opening: Opening):
    """After the lease one other gets the job; what the first says later does not count."""

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database, lease=10.0, attempts=2)
            made = await jobs.asubmit(None, "report", scope="acme")
            (zombie,) = await jobs.aclaim(["report"], owner="zombie")
            await world.pass_(9.9)
            assert await jobs.aclaim(["report"], owner="other") == []
            await world.pass_(0.1)
            taken = await asyncio.gather(
                *(jobs.aclaim(["report"], 3, owner=f"w{n}") for n in range(8))
            )
            (claim,) = [claim for claims in taken for claim in claims]
            assert claim.fence == zombie.fence + 1
            assert not await jobs.asucceed(zombie, "late")
            assert await jobs.afail(zombie, "late") is None
            assert await jobs.agive_back(zombie) is None
            assert (
                await jobs._abeat(
                    "zombie", [steps.JobHeartbeat(zombie.id, zombie.fence, 0, "")], []
                )
                == {}
            )
            assert jobs.snapshot()["refused_late"] == 3
            await world.pass_(10)
            assert await jobs.aclaim(["report"], owner="third") == []
            seen = await jobs.aget(made.id, scope="acme")
            assert (seen.state, seen.error) == ("failed", "the worker was lost")
            assert jobs.snapshot()["given_up"] == 1

    asyncio.run(main())


def test_many_workers_share_the_jobs(opening: Opening):
    """Those who claim at once get different jobs, and all of them are got; first things first."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            made = [
                await jobs.asubmit(None, "report", n, scope="acme", priority=9 - n % 10)
                for n in range(30)
            ]
            (urgent,) = await jobs.aclaim(["report"], owner="w")
            assert urgent.payload % 10 == 9
            taken = await asyncio.gather(
                *(jobs.aclaim(["report"], 5, owner=f"w{n}") for n in range(8))
            )
            got = [urgent.id, *(claim.id for claims in taken for claim in claims)]
            # Who skips what others hold may find less than there was room for.
            while more := await jobs.aclaim(["report"], 5, owner="last"):
                got += [claim.id for claim in more]
            assert sorted(got) == sorted(job.id for job in made)

    asyncio.run(main())


def test_several_kinds_are_one_line(opening: Opening):
    """Who does several kinds gets what is next in line of all of them, and of no others."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            for priority, kind in [
                (3, "mail"),
                (0, "other"),
                (2, "report"),
                (1, "mail"),
                (4, "mail"),
            ]:
                await jobs.asubmit(None, kind, priority, scope="acme", priority=priority)
            for want in ([1, 2], [3, 4], []):
                got = await jobs.aclaim(["report", "mail"], 2, owner="w")
                assert [claim.payload for claim in got] == want

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_what_was_taken_meanwhile_is_not_taken_again(
    driver: str, postgres: Postgres, tmp_path: Path
):
    """Where finding and taking are not one transaction, by a driver's fault, one still gets it."""

    async def main() -> None:
        async with opening_by(driver, postgres, tmp_path)() as database:
            jobs = Jobs(database)
            await jobs.asubmit(None, "report", scope="acme")
            slow = steps.claim_due(["report"], 1, "slow", LEASE, TTL)
            found = await database.arun(asking(next(slow)))
            assert len(await jobs.aclaim(["report"], owner="quick")) == 1
            assert await database.arun(asking(slow.send(found))) == []

    def asking(asked: Any) -> Any:
        def operation() -> Any:
            return (yield asked)

        return operation

    asyncio.run(main())


@pytest.mark.parametrize(
    ("driver", "statement", "found_by"),
    [
        ("asyncpg", "due", "Index Cond: ((kind = "),
        ("sqlite", "due", "(kind=? AND rank<?)"),
        ("asyncpg", "expire", "Index Cond: (expires_at <= "),
        ("asyncpg", "forget", "Index Cond: (expires_at <= "),
    ],
)
def test_what_is_looked_for_has_an_index(
    driver: str, statement: str, found_by: str, postgres: Postgres, tmp_path: Path
):
    """A long line of other kinds, and results that are kept, are not looked through each time."""

    async def main() -> str:
        async with opening_by(driver, postgres, tmp_path)() as database:
            sqlite = database.dialect == "sqlite"
            explain = "EXPLAIN QUERY PLAN " if sqlite else "EXPLAIN "
            text = explain + statements(database.dialect, "jobs")[statement]
            asked = {"kinds": '["report", "mail"]', "most": 5, "reach": 1, "gone_for": 1}
            asked["batch"] = 5

            def explaining() -> Any:
                if not sqlite:  # a table without rows is read whole
                    yield TextQuery("SET LOCAL enable_seqscan = off", {})
                    yield TextQuery("SET LOCAL enable_bitmapscan = off", {})
                return (yield TextQuery(text, asked))

            return str(await database.arun(explaining))

    assert found_by in asyncio.run(main())


def test_there_is_room_for_so_many(opening: Opening):
    """Beyond `max_size` jobs that have not ended no more are taken; a known key still is."""

    async def main() -> None:
        async with opening() as database:
            clock = VirtualClock()
            jobs = Jobs(database, max_size=3, clock=clock)
            made = [await jobs.asubmit(None, "a", scope="acme", key=f"{n}") for n in range(3)]
            with pytest.raises(QueueFull) as refused:
                await jobs.asubmit(None, "b", scope="acme")
            async with _transaction(database) as raw:
                with pytest.raises(QueueFull):
                    await jobs.asubmit(raw, "b", scope="acme", key="new")
            assert refused.value.retry_after == 1.0
            again = await jobs.asubmit(None, "a", scope="acme", key="1")
            assert again.id == made[1].id
            with pytest.raises(KeyReused):
                await jobs.asubmit(None, "a", "another", scope="acme", key="1")
            await jobs.acancel(again.id, scope="acme")
            clock.advance(1.0)
            assert (await jobs.asubmit(None, "b", scope="acme")).is_new
            with pytest.raises(QueueFull):
                await jobs.asubmit(None, "b", scope="acme")
            unbound = Jobs(database, max_size=None)
            assert (await unbound.asubmit(None, "b", scope="acme")).is_new

    asyncio.run(main())


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 0.5)), min_size=1, max_size=300),
)
def test_processes_together_are_over_the_bound_by_little(most: int, submits: Any):
    """Three processes count now and then: together they are over by what they may not know of."""
    clock = VirtualClock()
    rooms = [OpenJobsLimit("jobs", most, clock) for _ in range(3)]
    there = 0
    for who, passed in submits:
        clock.advance(passed)
        room = rooms[who]
        if room.is_count_due():
            room.set_count(min(there, most))
        there += room.take()
    assert there <= most + 2 * max(1, most // 16)


def test_scopes_do_not_see_each_other(opening: Opening):
    """A job of another scope is as unknown as one that never was, also for cancelling."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            job = await jobs.asubmit(None, "report", scope="acme")
            said = set()
            for id_, scope in [(job.id, "evil"), ("0" * 36, "acme"), ("x", "acme"), ("", "acme")]:
                for asked in (jobs.aget, jobs.acancel):
                    with pytest.raises(UnknownJob) as refused:
                        await asked(id_, scope=scope)
                    said.add((type(refused.value), str(refused.value)))
            assert len(said) == 1
            assert (await jobs.aget(job.id, scope="acme")).state == "queued"

    asyncio.run(main())


def test_a_job_is_waited_for(opening: Opening):
    """Waiting returns the job when it ends, or says that it is still running."""

    async def main() -> None:
        async with opening() as database:
            jobs, elsewhere = Jobs(database), Jobs(database)
            job = await jobs.asubmit(None, "report", scope="acme")
            with pytest.raises(TimeoutError):
                await jobs.ajoin(job.id, scope="acme", timeout=0.0)
            waiting = asyncio.create_task(jobs.ajoin(job.id, scope="acme", timeout=20))
            (claim,) = await elsewhere.aclaim(["report"], owner="w")
            assert await elsewhere.asucceed(claim, b"\0\xff")
            ended = await waiting
            assert (ended.state, ended.result) == ("succeeded", b"\0\xff")

    asyncio.run(main())


def test_a_key_waits_for_the_first_to_be_committed(postgres: Postgres, tmp_path: Path):
    """Who comes second with a key gets the first one's job, or its own if that is rolled back."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            jobs = Jobs(database)
            for key, kept in (("a", True), ("b", False)):
                with contextlib.suppress(ZeroDivisionError):
                    async with database.atransaction() as raw:
                        first = await jobs.asubmit(raw, "report", scope="acme", key=key)
                        second = asyncio.create_task(
                            jobs.asubmit(None, "report", scope="acme", key=key)
                        )
                        await asyncio.wait([second], timeout=0.1)
                        assert not second.done()
                        if not kept:
                            raise ZeroDivisionError
                assert ((await second).id == first.id) is kept
                assert (await second).is_new is not kept

    asyncio.run(main())


def test_cancelling_races_with_workers(opening: Opening):
    """A job that is asked to cancel ends cancelled, unless it succeeded before."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            for _ in range(8):
                job = await jobs.asubmit(None, "report", scope="acme")
                claims, seen = await asyncio.gather(
                    jobs.aclaim(["report"], owner="w"), jobs.acancel(job.id, scope="acme")
                )
                if not claims:
                    assert seen.state == "cancelled"
                    continue
                assert (seen.state, seen.cancelling) == ("running", True)
                assert await jobs.afail(claims[0], "no") == "cancelled"
            for round_ in range(8):
                job = await jobs.asubmit(None, "report", scope="acme")
                (claim,) = await jobs.aclaim(["report"], owner="w")
                told = (
                    jobs.asucceed(claim, 1) if round_ % 2 else jobs.afail(claim, "no", retry=False)
                )
                said, seen = await asyncio.gather(told, jobs.acancel(job.id, scope="acme"))
                assert said
                end = (await jobs.aget(job.id, scope="acme")).state
                if round_ % 2:
                    assert end == "succeeded"
                else:
                    assert end == ("cancelled" if seen.cancelling else "failed")

    asyncio.run(main())


@pytest.mark.parametrize("library", ["session", "async session", "psycopg", "aiosqlite"])
def test_with_connections_of_every_kind(library: str, postgres: Postgres, tmp_path: Path):
    """A job is submitted with sessions and connections of other libraries than the workers'."""

    async def main() -> None:
        driver = "sqlite" if library == "aiosqlite" else "asyncpg"
        async with opening_by(driver, postgres, tmp_path)() as database:
            jobs = Jobs(database)
            async with connected(library, postgres, tmp_path) as (raw, commit):
                if library in {"session", "psycopg"}:
                    job = jobs.submit(raw, "report", [1], scope="acme", key="k")
                else:
                    job = await jobs.asubmit(raw, "report", [1], scope="acme", key="k")
                await commit()
            assert (await jobs.aget(job.id, scope="acme")).state == "queued"
            (claim,) = await jobs.aclaim(["report"], owner="w")
            assert claim.payload == [1]

    asyncio.run(main())


@contextlib.asynccontextmanager
async def connected(library: str, postgres: Postgres, folder: Path) -> AsyncIterator[Any]:
    """Give a connection with a transaction begun, and what commits it."""
    if library == "aiosqlite":
        import aiosqlite

        async with aiosqlite.connect(folder / "test.db") as raw:
            yield raw, raw.commit
    elif library == "async session":
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        engine = create_async_engine(postgres.url.replace("://", "+asyncpg://"))
        async with AsyncSession(engine) as raw:
            yield raw, raw.commit
        await engine.dispose()
    elif library == "session":
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        blocking = create_engine(postgres.url.replace("://", "+psycopg://"))
        with Session(blocking) as raw:
            yield raw, partial(asyncio.to_thread, raw.commit)
        blocking.dispose()
    else:
        import psycopg

        with psycopg.connect(postgres.url) as raw:
            yield raw, partial(asyncio.to_thread, raw.commit)


def test_sync_twins(postgres: Postgres, tmp_path: Any):
    """What blocks does the same as what is awaited."""

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            await asyncio.to_thread(blocking, database)

    def blocking(database: Database) -> None:
        jobs = Jobs(database)
        job = jobs.submit(None, "report", scope="acme")
        with database.transaction() as raw:
            inner = jobs.submit(raw, "report", scope="acme")
        assert jobs.cancel(inner.id, scope="acme").state == "cancelled"
        (claim,) = jobs.claim(["report"], owner="w")
        assert jobs.succeed(claim, 3)
        assert jobs.join(job.id, scope="acme", timeout=5).result == 3
        assert jobs.get(job.id, scope="acme").ended
        assert jobs.cleanup() == 0

    asyncio.run(main())


# The rules of models/durable_jobs.py and the statements agree

OPERATIONS = st.one_of(
    st.tuples(st.just("pass"), st.sampled_from([0, 1, 5, 10, 25])),
    st.tuples(st.just("claim"), st.sampled_from(["a", "b"])),
    st.tuples(
        st.sampled_from(["renew", "succeed", "fail", "give_back", "fail for good"]),
        st.integers(0, 5),
    ),
    st.tuples(st.sampled_from(["cancel", "expire", "retry"]), st.just(0)),
)
LEASE, TTL, GONE = 10 * S, 20 * S, 15 * S


COLUMNS = "state, due_at, attempts, owner, epoch, cancelling, error, expires_at"


class Both:
    """One job, in the table and in the model."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.jobs = Jobs(world.database, lease=10.0, result_ttl=20.0, gone_for=15.0, attempts=3)
        self.claims: list[Any] = []

    async def begin(self) -> None:
        await self.world.database.arun(ask("DELETE FROM {jobs}"))
        ((self.now,),) = await self.world.database.arun(ask("SELECT us FROM {test_clock}"))
        self.made = await self.jobs.asubmit(None, "report", scope="acme")
        self.model = DurableJob(self.now, 3)

    async def do(self, operation: str, value: Any) -> None:
        if operation == "pass":
            await self.world.pass_(value)
            self.now += value * S
        elif operation == "claim":
            got = await self.jobs.aclaim(["report"], owner=value)
            assert bool(got) == self.model.claim(self.now, value, LEASE, TTL)
            self.claims += got
        elif operation == "cancel":
            try:
                _, effect = await self.world.database.arun(
                    lambda: steps.cancel_job(self.made.id, "acme", self.jobs._ttl)
                )
            except JobExpired:
                effect = False
            assert effect == self.model.cancel(self.now, TTL)
        elif operation == "retry":
            assert await self.jobs.aretry(self.made.id) == self.model.retry(self.now)
        elif operation == "expire":
            expiring = NamedQuery("jobs.expire", {"gone_for": GONE, "batch": 5})
            done = await self.world.database.arun(expiring.alone)
            assert bool(done) == self.model.expire(self.now, GONE)
        elif self.claims:
            await self.tell(operation, self.claims[value % len(self.claims)])

    async def tell(self, operation: str, claim: Any) -> None:
        model, who = self.model, (self.now, claim.owner, claim.fence)
        if operation == "renew":
            beat = steps.JobHeartbeat(claim.id, claim.fence, 0.0, "")
            assert bool(await self.jobs._abeat(claim.owner, [beat], [])) == model.renew(*who, LEASE)
        elif operation == "succeed":
            assert await self.jobs.asucceed(claim, 1) == model.succeed(*who, TTL)
        elif operation == "give_back":
            told = await self.jobs.agive_back(claim, delay=2.0)
            assert (told is not None) == model.give_back(*who, TTL, 2 * S)
        else:
            retry = operation == "fail"
            told = await self.jobs.afail(claim, "no", delay=5.0, retry=retry)
            failed = model.fail(*who, TTL, 5 * S, "no", retry=retry)
            assert (told is not None) == failed

    async def compare(self) -> None:
        model = self.model
        ((state, due, *rest),) = await self.world.database.arun(
            ask(f"SELECT {COLUMNS} FROM {{jobs}}")  # noqa: S608 - of our own columns
        )
        attempts, owner, epoch, cancelling, error, expires = rest
        assert state == model.state
        assert (attempts, owner, epoch) == (model.attempts, model.owner, model.epoch)
        assert (bool(cancelling), error, expires) == (model.cancelling, model.error, model.expires)
        if state in {"queued", "running"}:
            assert due == model.due


async def agree(world: World, history: list[tuple[str, Any]]) -> None:
    both = Both(world)
    await both.begin()
    for operation, value in history:
        await both.do(operation, value)
        await both.compare()


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_the_statements_follow_the_model(driver: str, postgres: Postgres, tmp_path: Any):
    """Whatever workers, users and time do: the table and the pure rules come to the same."""
    opening = opening_by(driver, postgres, tmp_path)

    async def main() -> None:
        async with world_of(opening) as world:
            loop = asyncio.get_running_loop()

            @settings(
                max_examples=40,
                suppress_health_check=[HealthCheck.function_scoped_fixture],
            )
            @given(st.lists(OPERATIONS, max_size=14))
            def run(history: list[tuple[str, Any]]) -> None:
                asyncio.run_coroutine_threadsafe(agree(world, history), loop).result()

            await asyncio.to_thread(run)

    asyncio.run(main())


def test_what_is_stored_is_not_believed(opening: Opening):
    """A garbled record is an error of its own: no crash, and nothing that was made up."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            job = await jobs.asubmit(None, "report", {"n": 1}, scope="acme")
            await database.arun(ask("UPDATE {jobs} SET payload = '[[[', state = 'queued'"))
            (claim,) = await jobs.aclaim(["report"], owner="w")
            assert isinstance(claim.payload, RecordGarbled)
            assert await jobs.asucceed(claim, {"n": 1})
            await database.arun(ask("UPDATE {jobs} SET result_type = 'text/html'"))
            with pytest.raises(RecordGarbled):
                await jobs.aget(job.id, scope="acme")
            await database.arun(ask("UPDATE {jobs} SET result_type = 'application/json'"))
            await database.arun(ask("UPDATE {jobs} SET state = 'odd'"))
            with pytest.raises(RecordGarbled):
                await jobs.aget(job.id, scope="acme")

    asyncio.run(main())


def test_arguments_are_checked_at_once(opening: Opening):
    """What cannot be a job is refused where it is written, and the message says what can."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database, max_payload=100, max_result=100)
            for wrong in (
                {"scope": ""},
                {"scope": "a", "key": ""},
                {"scope": "a", "key": "with blank"},
                {"scope": "a", "key": "k" * 256},
                {"scope": "a", "priority": 10},
                {"scope": "a", "delay": -1},
                {"scope": "a", "payload": "x" * 101},
                {"scope": "a", "payload": float("nan")},
                {"scope": "a\0"},
            ):
                with pytest.raises(ValueError, match=r"write|allowed|have|cannot"):
                    await jobs.asubmit(None, "report", **wrong)
            with pytest.raises(TypeError):
                await jobs.asubmit(None, "report", {1, 2}, scope="a")
            with pytest.raises(TypeError):
                await jobs.asubmit(None, "report", scope=None)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="name the kinds"):
                await jobs.aclaim([], owner="w")
            await jobs.asubmit(None, "report", "it's \0 ; DROP", scope="a\"b'", key="'")
            (claim,) = await jobs.aclaim("report", owner="w")
            assert (claim.payload, claim.scope) == ("it's \0 ; DROP", "a\"b'")
            with pytest.raises(ValueError, match="allowed"):
                await jobs.asucceed(claim, b"x" * 101)
            assert repr(jobs).startswith("<Jobs 'jobs'")

    asyncio.run(main())


def test_a_table_that_is_there_already_is_migrated(opening: Opening):
    """Migrating again changes nothing."""

    async def main() -> None:
        async with opening() as database:
            await Jobs(database).asubmit(None, "report", scope="acme")
            assert await amigrate(database) == []

    asyncio.run(main())


def test_a_connection_without_a_transaction_is_refused(postgres: Postgres, tmp_path: Path):
    """A job that is committed before its rows may be done without them; None says that it may."""

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            jobs = Jobs(database)
            with contextlib.closing(database.source.connect()) as raw:
                with pytest.raises(RuntimeError, match="write None instead"):
                    jobs.submit(raw, "report", scope="acme")
                with pytest.raises(RuntimeError, match="write None instead"):
                    await jobs.asubmit(raw, "report", scope="acme")
            assert await jobs.acounts() == {}
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            jobs = Jobs(database)
            async with database.source.acquire() as raw:
                with pytest.raises(RuntimeError, match="write None instead"):
                    await jobs.asubmit(raw, "report", scope="acme")
            assert await jobs.acounts() == {}

    asyncio.run(main())


def test_what_is_no_id_costs_no_connection(tmp_path: Path):
    """Ids come from strangers: the database is not asked about what cannot be one."""
    jobs = Jobs(Database(Sqlite(tmp_path / "missing" / "jobs.db"), name="unreachable"))
    for ask_for in (jobs.get, jobs.cancel, jobs.join):
        with pytest.raises(UnknownJob):
            ask_for("../etc/passwd", scope="acme")
    assert jobs.inspect("../etc/passwd") is None
    with pytest.raises(sqlite3.OperationalError):
        jobs.get(str(uuid4()), scope="acme")
