"""What a sink, a database or an operator may do to a dispatcher, and what holds then."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from seawall.clock import VirtualClock
from seawall.durable.database.connections import NamedQuery, TextQuery
from seawall.durable.database.statements import statement
from seawall.durable.outbox import outbox as _outbox_care
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import Overloaded
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox.support import (
    Seen,
    a_moment,
    committed,
    dispatcher,
    numbered,
    timed,
)
from tests.durable.postgres import Postgres


@pytest.fixture(params=["asyncpg", "sqlite"])
def opening(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens each database by one driver."""
    return opening_by(request.param, postgres, tmp_path)


@pytest.fixture
def server(postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a database of the server."""
    return opening_by("asyncpg", postgres, tmp_path)


@pytest.fixture
def file(postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a file: where it is the dispatcher alone that is tested."""
    return opening_by("sqlite", postgres, tmp_path)


# What a sink may do


def test_a_plain_function_may_return_what_is_awaited(file: Opening):
    """Where a function gives back what an async one returned, that is done before it counts."""

    async def main() -> None:
        async with file() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 2)

            def give(event: OutboxEvent) -> Any:
                return seen.each(event)

            assert await dispatcher(outbox, give).drain() == 2
            assert seen.of("1") == [1, 2]

    asyncio.run(main())


class Untold(Exception):
    """An error that fails when it is asked what it says."""

    def __str__(self) -> str:
        raise AttributeError("detail")


@pytest.mark.parametrize("error", [Untold, asyncio.CancelledError, StopIteration])
@pytest.mark.parametrize("way", ["async", "plain", "batched"])
def test_whatever_a_sink_raises_is_its_own_aggregates_trouble(
    file: Opening, way: str, error: type[BaseException]
):
    """Also what cannot be written down, or looks as if it were the dispatcher that is cancelled."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            await numbered(outbox, "bad", 1)
            await numbered(outbox, "good", 2)
            asked: list[str] = []

            def plain(event: OutboxEvent) -> None:
                asked.append(event.aggregate_id)
                if event.aggregate_id == "bad":
                    raise error

            async def each(event: OutboxEvent) -> None:
                plain(event)

            async def batch(events: list[OutboxEvent]) -> None:
                for event in events:
                    plain(event)

            sink = {"async": each, "plain": plain, "batched": batch}[way]
            worker = dispatcher(outbox, sink, attempts=1, batched=way == "batched")
            async with asyncio.timeout(20):
                assert await worker.drain() == 2
            (blocked,) = await outbox.ablocked()
            assert blocked.aggregate_id == "bad"
            assert blocked.error
            assert (await outbox.asurvey())["pending"] == 1
            assert asked.count("bad") <= 2

    asyncio.run(main())


def test_what_is_no_id_is_no_answer(file: Opening):
    """A batched sink that returns something else than ids of its events has not taken them."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            await numbered(outbox, "1", 2)

            async def sink(_events: list[OutboxEvent]) -> list[Any]:
                return [7]

            assert await dispatcher(outbox, sink, batched=True, attempts=1).drain() == 0
            (blocked,) = await outbox.ablocked()
            assert "no id" in blocked.error

    asyncio.run(main())


def test_news_do_not_end_a_pause_that_the_receiver_asked_for(file: Opening):
    """However often it is woken, it is not asked again before its time; stop ends it at once."""

    async def main() -> None:
        async with file() as database:
            outbox, asked = Outbox(database), []
            await numbered(outbox, "1", 1)

            async def busy(event: OutboxEvent) -> None:
                asked.append(event.id)
                raise Overloaded("busy", retry_after=1000.0)

            worker = dispatcher(outbox, busy)
            running = asyncio.create_task(worker.run())
            while not worker.snapshot()["paused"]:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.005)  # noqa: TID251 - a real file
            for _ in range(20):
                outbox.wake()
                await asyncio.sleep(0.005)  # noqa: TID251 - a real file
            worker.stop()
            async with asyncio.timeout(10):
                await running
            assert len(asked) == 1

    asyncio.run(main())


def test_what_is_refused_for_ever_starves_nobody(opening: Opening):
    """Also one at a time, those behind an aggregate that is always refused have their turn."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            for whose in "1234":
                await numbered(outbox, whose, 1)

            async def sink(event: OutboxEvent) -> None:
                if event.aggregate_id in "12":
                    raise Overloaded("busy", retry_after=0.0)
                await seen.each(event)

            worker = dispatcher(outbox, sink, concurrency=1)
            for _ in range(4):
                await worker.run_once()
            assert sorted(seen.order) == [("3", 1), ("4", 1)]

    asyncio.run(main())


def test_a_plain_sink_has_threads_of_its_own(server: Opening):
    """Where all threads that everybody uses are busy, it is called all the same."""

    async def main() -> None:
        async with server() as database:
            outbox, ends, got = Outbox(database), threading.Event(), []
            await numbered(outbox, "1", 1)
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            blocking = asyncio.create_task(asyncio.to_thread(ends.wait))
            try:
                async with asyncio.timeout(20):
                    assert await dispatcher(outbox, got.append).drain() == 1
            finally:
                ends.set()
                await blocking

    asyncio.run(main())


def test_after_letting_go_a_plain_sink_is_given_nothing_more(file: Opening):
    """Cancelled while an event is in a thread, that one ends, and those behind it do not begin.

    Their aggregate rests for a lease meanwhile, as one does whose dispatcher was killed.
    """

    async def main() -> None:
        async with timed(file) as (outbox, time):
            goes_on = threading.Event()
            begun, ended, got = asyncio.Event(), asyncio.Event(), []
            loop = asyncio.get_running_loop()
            await numbered(outbox, "1", 3)

            def slow(event: OutboxEvent) -> None:
                loop.call_soon_threadsafe(begun.set)
                goes_on.wait(20)
                got.append(event.sequence)
                loop.call_soon_threadsafe(ended.set)

            running = asyncio.create_task(dispatcher(outbox, slow).run())
            await begun.wait()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            seen = Seen()
            assert await dispatcher(outbox, seen.each).drain() == 0
            goes_on.set()
            await ended.wait()
            await time.pass_by(31.0)
            assert await dispatcher(outbox, seen.each).drain() == 3  # the first one comes again
            assert got == [1]

    asyncio.run(main())


# Leases


async def paused_past_its_lease(opening: Opening) -> list[int]:
    """Have a dispatcher be away for longer than its lease while the first of two is at the sink."""
    async with opening() as database:
        clock = VirtualClock()
        outbox, seen = Outbox(database, clock=clock), Seen()
        await numbered(outbox, "1", 2)

        async def away(event: OutboxEvent) -> None:
            clock.advance(31.0)
            await seen.each(event)

        assert await dispatcher(outbox, away, lease=30.0).run_once() == len(seen.events)
        return seen.of("1")


def test_who_was_away_past_its_lease_begins_nothing_more(file: Opening):
    """After its lease it finishes the current delivery, and starts no other."""
    assert asyncio.run(paused_past_its_lease(file)) == [1]


def test_unless_it_looks_at_the_time(file: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: a dispatcher that ignores its lease's end works beside its successor."""
    from seawall.durable.outbox import dispatcher as module

    held = module.HeldAggregates

    def for_ever(lanes: Any, _until: float) -> Any:
        return held(lanes, float("inf"))

    monkeypatch.setattr(module, "HeldAggregates", for_ever)
    assert asyncio.run(paused_past_its_lease(file)) == [1, 2]


def test_a_lease_is_long_enough_to_begin(file: Opening):
    """One that would be over before the first event is at the sink is refused."""

    async def main() -> None:
        async with file() as database:
            with pytest.raises(ValueError, match="lease"):
                dispatcher(Outbox(database), print, lease=0.01)

    asyncio.run(main())


def test_a_child_process_is_another_dispatcher(file: Opening):
    """After a fork it has a name of its own, and is not at work."""

    async def main() -> None:
        async with file() as database:
            outbox, seen = Outbox(database), Seen()
            worker = dispatcher(outbox, seen.each)
            token, chance = worker._token, worker._rng
            worker._loop = asyncio.get_running_loop()  # as if it were at work in the parent
            for thing in (outbox, worker):
                thing._after_fork()
            assert worker._token != token
            assert worker._rng is not chance
            await numbered(outbox, "1", 1)
            assert await worker.drain() == 1
            worker._woken = False
            outbox.wake()
            assert worker._woken

    asyncio.run(main())


# Operators


def test_a_dead_event_can_be_dropped(opening: Opening):
    """By its id, once; then it is neither listed nor tried again."""

    async def main() -> None:
        async with timed(opening) as (outbox, _time):
            seen = Seen()
            seen.poison = {"1"}
            ids = await numbered(outbox, "1", 2)
            await dispatcher(outbox, seen.each, attempts=1, poison="skip").drain()
            assert {dead.event.id for dead in await outbox.adead()} == set(ids)
            assert await outbox.adrop(ids[0])
            assert not await outbox.adrop(ids[0])
            assert not await outbox.aretry(ids[0])
            assert [dead.event.id for dead in await outbox.adead()] == ids[1:]

    asyncio.run(main())


def test_cleaning_lets_others_have_their_turn(file: Opening, monkeypatch: pytest.MonkeyPatch):
    """A dispatcher deletes a batch at a time, and goes on with it between its rounds."""
    monkeypatch.setattr(_outbox_care, "CLEAN_AT_ONCE", 2)

    async def main() -> None:
        async with timed(file) as (outbox, time):
            await numbered(outbox, "1", 5)
            await dispatcher(outbox, Seen().each, keep=1.0).drain()
            await time.pass_by(2.0)
            assert [await outbox._aclean_some(keep=1.0) for _ in range(4)] == [
                True,
                True,
                False,
                False,
            ]

    asyncio.run(main())


def test_an_event_needs_a_transaction(opening: Opening):
    """On a connection that commits each statement for itself, adding is refused."""

    async def main() -> None:
        async with opening() as database:
            outbox = Outbox(database)
            if database.dialect == "sqlite":
                connection = database.source.connect()
                with pytest.raises(RuntimeError, match="transaction"):
                    outbox.add(connection, "order", "1", "made", 1)
                with pytest.raises(RuntimeError, match="transaction"):
                    await outbox.aadd(connection, "order", "1", "made", 1)
                connection.close()
            else:
                async with database.source.acquire() as connection:
                    with pytest.raises(RuntimeError, match="transaction"):
                        await outbox.aadd(connection, "order", "1", "made", 1)
                    with pytest.raises(RuntimeError, match="transaction"):
                        await outbox.aadd_all(connection, [])
                    with pytest.raises(TypeError, match="begins with a"):
                        outbox.add(connection, "order", "1", "made", 1)
            assert (await outbox.asurvey())["pending"] == 0

    asyncio.run(main())


# The database


def test_no_more_is_read_than_may_be_delivered(opening: Opening):
    """The bound in bytes is the statement's: what is behind it does not come into memory."""

    async def main() -> None:
        async with opening() as database:
            outbox = Outbox(database)
            await committed(outbox, *[("order", "1", "made", b"x" * 100)] * 10)
            given: dict[str, Any] = {"outbox": outbox.name, "bytes": 250}
            if database.dialect == "sqlite":
                given["marks"] = "[1,10]"
            else:
                given |= {"lanes": "1", "each": 10, "batch": 10}

            def fetch() -> Any:
                return (yield NamedQuery("outbox.fetch", given))

            assert len(await database.arun(fetch)) == 3

    asyncio.run(main())


def test_a_short_outage_makes_nothing_come_again(file: Opening):
    """If the database is away when a result is due, the result is written later."""

    async def main() -> None:
        async with file() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 2)
            original, failures = database.arun, iter([True, True])

            async def failing(operation: Any) -> Any:
                if seen.events and next(failures, False):
                    raise OSError("gone")
                return await original(operation)

            database.arun = failing  # type: ignore[method-assign]
            worker = dispatcher(outbox, seen.each)
            assert await worker.drain() == 2
            assert worker.snapshot()["errors"] == 2
            assert seen.of("1") == [1, 2]
            assert (await outbox.asurvey())["pending"] == 0

    asyncio.run(main())


FEW = 300
"""Rows that a batch of 100 may look at: of two tables, and as they were before."""
MANY = """
INSERT INTO {outbox} (outbox, lane, sequence, id, aggregate, aggregate_id, type, payload,
    headers, created_at)
SELECT 'outbox', n, 1, CAST(n AS text), 'order', CAST(n AS text), 'made', '', NULL, 0
FROM generate_series(1, 3000) AS n
"""


def test_a_batch_costs_the_same_however_much_is_pending(server: Opening):
    """Claiming, fetching and deleting read what is of the batch, by each table's index."""

    async def main() -> None:
        async with server() as database:

            def fill() -> Any:
                yield TextQuery(MANY, {})
                yield TextQuery("ANALYZE {outbox}", {})

            await database.arun(fill)
            lanes = ",".join(map(str, range(1, 101)))
            ours = {"outbox": "outbox", "owner": "me"}
            near = {"after": 0, "near": 100, "far": 0, "lease": 10**9}
            async with database.atransaction() as connection:

                async def read(which: str, **arguments: Any) -> int:
                    text = statement("postgres", "dollar", database.names, f"outbox.{which}")
                    told = await connection.fetchval(
                        f"EXPLAIN (ANALYZE, FORMAT JSON) {text.sql}",
                        *text.positional({**ours, **arguments}),
                    )
                    return most_rows(json.loads(told)[0]["Plan"])

                by_index = statement("postgres", "dollar", database.names, "outbox.by_index")
                await connection.fetch(by_index.sql)
                assert await read("claim", **near) <= FEW
                held = await connection.fetchval(
                    f"SELECT string_agg(DISTINCT CAST(epoch AS text), ',')"  # noqa: S608 - ours
                    f" FROM {database.names.table('outbox_claims')}"
                )
                of_each = {"lanes": lanes, "epochs": held}
                assert await read("fetch", lanes=lanes, each=100, batch=100, bytes=10**6) <= FEW
                assert await read("renew", **of_each, lease=10**9) <= FEW
                uptos = ",".join(["1"] * 100)
                assert await read("keep", **of_each, uptos=uptos) <= FEW
                assert await read("done", **of_each, uptos=uptos) <= FEW

    asyncio.run(main())


def most_rows(plan: dict[str, Any]) -> int:
    """Return how many rows the most thorough reader of a table or of a list has looked at."""
    rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    rows += plan.get("Rows Removed by Join Filter", 0)
    own = round(rows * plan["Actual Loops"])
    return max([own, *(most_rows(part) for part in plan.get("Plans", []))])


def test_notifications_are_few(server: Opening):
    """However often something is announced, a process notifies once in 50 ms, and then again."""

    async def main() -> None:
        async with server() as database:
            clock = VirtualClock()
            outbox, heard, over = Outbox(database, clock=clock), [], asyncio.Event()
            async with database.source.acquire() as listening:

                def hear(_connection: Any, _pid: int, channel: str, _payload: str) -> None:
                    heard.append(channel)
                    if channel == "over":
                        over.set()

                for channel in (outbox.channel, "over"):
                    await listening.add_listener(channel, hear)
                for _ in range(30):
                    await outbox.aannounce()
                async with database.atransaction() as connection:
                    await outbox.aadd(connection, "order", "1", "made", 1, notify=True)
                clock.advance(0.06)
                async with database.atransaction() as connection:
                    for n in range(5):
                        await outbox.aadd(connection, "order", "1", "made", n, notify=True)
                await database.source.execute("NOTIFY over")
                async with asyncio.timeout(20):
                    await over.wait()
                for channel in (outbox.channel, "over"):
                    await listening.remove_listener(channel, hear)
            assert heard == [outbox.channel, outbox.channel, "over"]
            await a_moment()

    asyncio.run(main())
