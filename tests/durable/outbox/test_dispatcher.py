from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from seawall.durable.outbox import delivery as _outbox_delivery
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import CircuitOpen
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox.support import (
    Seen,
    a_moment,
    committed,
    dispatcher,
    numbered,
    timed,
    without,
)
from tests.durable.postgres import Postgres


@pytest.fixture(params=["asyncpg", "sqlite"])
def opening(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens each database by one driver; what the drivers do is tested next door."""
    return opening_by(request.param, postgres, tmp_path)


# Failures


@pytest.mark.parametrize("way", ["each", "batch"])
def test_poison_blocks_its_own_aggregate_alone(opening: Opening, way: str):
    """Other aggregates are delivered; after its last attempt the event waits for a person."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            seen = Seen()
            seen.poison = {"2"}
            for whose in "123":
                await numbered(outbox, whose, 2)
            worker = dispatcher(outbox, getattr(seen, way), batched=way == "batch", attempts=3)
            assert await worker.drain() == 4
            for _ in range(2):
                assert await worker.drain() == 0  # not due yet
                await time.pass_by(1.5)
                await worker.drain()
            assert seen.of("1") == seen.of("3") == [1, 2]
            assert worker.snapshot()["failed"] == 3
            (blocked,) = await outbox.ablocked()
            assert blocked[:3] == ("order", "2", 3)
            assert "poison" in blocked.error
            assert (await outbox.asurvey())["blocked"] == 1
            seen.poison.clear()
            await time.pass_by(1e6)
            assert await worker.drain() == 0
            assert not await outbox.aunblock("order", "1")
            assert await outbox.aunblock("order", "2")
            assert await worker.drain() == 2
            assert seen.of("2") == [1, 2]

    asyncio.run(main())


def test_poison_is_put_aside_where_that_is_the_policy(opening: Opening):
    """The event is dead with its error, its aggregate goes on, and it can be tried again."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            seen = Seen()
            ids = await numbered(outbox, "1", 3)

            async def sink(event: OutboxEvent) -> None:
                if event.id in bad:
                    raise ValueError("no")
                await seen.each(event)

            bad = {ids[1]}
            worker = dispatcher(outbox, sink, attempts=2, poison="skip")
            await worker.drain()
            assert seen.of("1") == [1]
            await time.pass_by(2.0)
            await worker.drain()
            assert seen.of("1") == [1, 3]
            (dead,) = await outbox.adead()
            assert (dead.event.id, dead.attempts) == (ids[1], 2)
            assert dead.error == "ValueError: no"
            assert (await outbox.asurvey())["dead"] == worker.snapshot()["dead"] == 1
            bad.clear()
            assert await outbox.aretry(ids[1])
            assert not await outbox.aretry(ids[1])
            await worker.drain()
            assert [event.id for event in seen.events] == [ids[0], ids[2], ids[1]]
            assert seen.of("1") == [1, 3, 4]

    asyncio.run(main())


def test_a_blocked_aggregate_can_go_on_without_its_poison(opening: Opening):
    """The event that blocks it is dead then, and the others come."""

    async def main() -> None:
        async with timed(opening) as (outbox, _time):
            seen = Seen()
            ids = await numbered(outbox, "1", 2)

            async def sink(event: OutboxEvent) -> None:
                if event.id == ids[0]:
                    raise ValueError("no")
                await seen.each(event)

            worker = dispatcher(outbox, sink, attempts=1)
            await worker.drain()
            assert await outbox.aunblock("order", "1", skip=True)
            await worker.drain()
            assert seen.of("1") == [2]
            assert [dead.event.id for dead in await outbox.adead()] == [ids[0]]
            assert await outbox.acleanup(keep_dead=1.0) == 0

    asyncio.run(main())


def test_a_failure_counts_for_the_event_that_failed(opening: Opening):
    """Delivered events are removed; the backoff grows for the failed event only."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            seen = Seen()
            ids = await numbered(outbox, "1", 3)

            async def sink(events: list[OutboxEvent]) -> list[str]:
                seen.events += [event for event in events if event.id not in bad]
                return [event.id for event in events if event.id in bad]

            bad = {ids[1]}
            worker = dispatcher(outbox, sink, batched=True, backoff=[1.0, 10.0])
            assert await worker.drain() == 1
            await time.pass_by(1.1)
            assert await worker.drain() == 0
            await time.pass_by(1.1)
            rounds = worker.snapshot()["failed"]
            assert await worker.drain() == 0
            assert worker.snapshot()["failed"] == rounds == 2
            bad.clear()
            await time.pass_by(10.0)
            assert await worker.drain() == 2
            # What came after the failed one in its batch came again: at least once.
            assert seen.of("1") == [1, 3, 3, 2, 3]

    asyncio.run(main())


def test_a_refusal_by_a_guard_costs_no_attempt(opening: Opening):
    """While the way is closed nothing counts as failed, and the dispatcher pauses."""

    async def main() -> None:
        async with timed(opening) as (outbox, _time):
            await numbered(outbox, "1", 1)
            await numbered(outbox, "2", 1)

            async def closed(_event: OutboxEvent) -> None:
                raise CircuitOpen("closed", retry_after=3.0)

            worker = dispatcher(outbox, closed, attempts=1, concurrency=1)
            for _ in range(3):
                assert await worker.run_once() == 0
            told = worker.snapshot()
            assert (told["failed"], told["blocked"], told["refused"]) == (0, 0, 3)
            assert told["paused"]
            seen = Seen()
            assert await dispatcher(outbox, seen.each).drain() == 2

    asyncio.run(main())


def test_poison_in_a_batch_would_block_all_of_it(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: unless a failed batch is given again one by one, others fail with it."""

    async def main() -> None:
        async with timed(opening) as (outbox, _time):
            seen = Seen()
            seen.poison = {"2"}
            for whose in "123":
                await numbered(outbox, whose, 1)

            async def blamed(_self: Any, progress: Any, *_given: Any) -> None:
                progress.fail("the batch failed")

            monkeypatch.setattr(_outbox_delivery.SinkDelivery, "_deliver_aggregate", blamed)
            worker = dispatcher(outbox, seen.batch, batched=True, attempts=1)
            assert await worker.drain() == 0
            assert len(await outbox.ablocked()) == 3

    asyncio.run(main())


# Who holds what


async def take_over(opening: Opening) -> tuple[int, list[int], dict[str, Any]]:
    """Have a dispatcher pause past its lease while another one takes over; return what it did."""
    async with timed(opening) as (outbox, time):
        begun, goes_on, seen = asyncio.Event(), asyncio.Event(), Seen()
        await numbered(outbox, "1", 1)

        async def paused(_event: OutboxEvent) -> None:
            begun.set()
            await goes_on.wait()

        late = dispatcher(outbox, paused, lease=1000.0)
        zombie = asyncio.create_task(late.run_once())
        await begun.wait()
        other = dispatcher(outbox, seen.each, lease=1000.0)
        assert await other.run_once() == 0  # it is held
        await time.pass_by(1001.0)
        # The other one has it now; and it is still at work when the first comes back.
        at_work, ends = asyncio.Event(), asyncio.Event()

        async def working(event: OutboxEvent) -> None:
            at_work.set()
            await ends.wait()
            await seen.each(event)

        second = dispatcher(outbox, working, lease=1000.0)
        taken = asyncio.create_task(second.run_once())
        await at_work.wait()
        goes_on.set()
        await zombie
        pending = (await outbox.asurvey())["pending"]
        ends.set()
        await taken
        return pending, seen.of("1"), late.snapshot() | {"second": second.snapshot()}


def test_who_was_taken_over_writes_nothing_any_more(opening: Opening):
    """A killed dispatcher's aggregate is free after its lease; if it comes back it is refused."""
    pending, delivered, told = asyncio.run(take_over(opening))
    assert pending == 1
    assert delivered == [1]
    assert told["refused_late"] == 1
    assert told["second"]["refused_late"] == 0


def test_without_the_fence_a_late_one_writes(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """Ablation: without owner and epoch a zombie's acknowledgement takes the event away."""
    fence = (
        "AND c.owner = :owner\n"
        "        AND c.epoch = ANY(CAST(string_to_array(:epochs, ',') AS bigint[]))"
    )
    pair = "json_extract(m.value, '$[0]'), json_extract(m.value, '$[1]')"
    epochs = f"(lane, epoch) IN (\n        SELECT {pair}"
    with (
        without(monkeypatch, "done", fence, "AND CAST(:owner AS text) || :epochs IS NOT NULL"),
        without(monkeypatch, "held", "WHERE owner = :owner", "WHERE :owner IS NOT NULL"),
        without(monkeypatch, "held", epochs, "lane IN (SELECT json_extract(m.value, '$[0]')"),
        without(monkeypatch, "free", "owner = :owner", ":owner IS NOT NULL"),
    ):
        pending, _, told = asyncio.run(take_over(opening))
    assert pending == 0
    assert told["refused_late"] == 0


def test_a_long_delivery_keeps_its_lease(opening: Opening):
    """The lease is renewed during a delivery, so no other dispatcher takes over."""

    async def main() -> None:
        async with opening() as database:
            outbox, renewed = Outbox(database), asyncio.Event()
            await numbered(outbox, "1", 1)
            original = database.arun

            async def watched(operation: Any) -> Any:
                made = await original(operation)
                if isinstance(made, set):
                    renewed.set()
                return made

            database.arun = watched  # type: ignore[method-assign]

            async def slow(_event: OutboxEvent) -> None:
                await renewed.wait()

            worker = dispatcher(outbox, slow, lease=1.0)
            assert await worker.run_once() == 1
            assert worker.snapshot()["lost"] == 0

    asyncio.run(main())


def test_several_dispatchers_share_the_work(opening: Opening):
    """Each event is delivered by one of them, in order within its aggregate."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            for whose in range(20):
                await numbered(outbox, str(whose), 5)

            async def sink(event: OutboxEvent) -> None:
                await a_moment()
                await seen.each(event)

            workers = [dispatcher(outbox, sink, batch=7, concurrency=3) for _ in range(4)]
            while (await outbox.asurvey())["pending"]:
                await asyncio.gather(*(worker.drain() for worker in workers))
            assert len(seen.events) == 100
            assert all(seen.of(str(whose)) == [1, 2, 3, 4, 5] for whose in range(20))

    asyncio.run(main())


def test_a_long_blocked_aggregate_hides_nobody(opening: Opening):
    """However many events wait behind a poison, those of other aggregates are found at once."""

    async def main() -> None:
        async with timed(opening) as (outbox, _time):
            seen = Seen()
            seen.poison = {"a", "b", "c"}
            for whose in "abc":
                await numbered(outbox, whose, 30)
            worker = dispatcher(outbox, seen.each, attempts=1, batch=10)
            assert await worker.drain() == 0
            await numbered(outbox, "d", 2)
            assert await worker.run_once() == 2
            await numbered(outbox, "e", 25)
            assert await worker.drain() == 25
            assert seen.of("e") == list(range(1, 26))

    asyncio.run(main())


def test_a_batch_is_bounded_in_bytes_too(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """Large payloads come a few at a time, and all of them come."""
    monkeypatch.setattr("seawall.durable.outbox.dispatcher.LARGEST_BATCH", 250)

    async def main() -> None:
        async with opening() as database:
            outbox, sizes = Outbox(database), []
            for whose in "abcd":
                await committed(outbox, *[("order", whose, "made", b"x" * 100)] * 3)

            async def sink(events: list[OutboxEvent]) -> None:
                sizes.append(len(events))

            assert await dispatcher(outbox, sink, batched=True).drain() == 12
            assert max(sizes) == 3

    asyncio.run(main())


# Running


def test_cancelling_lets_go_of_everything(opening: Opening):
    """Cancelled during a delivery, it records delivered events and releases the others."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen, stuck = Outbox(database), Seen(), asyncio.Event()
            await numbered(outbox, "1", 3)
            await numbered(outbox, "2", 1)

            async def sink(event: OutboxEvent) -> None:
                if event.sequence == 2:
                    stuck.set()
                    await asyncio.Event().wait()
                await seen.each(event)

            worker = dispatcher(outbox, sink)
            running = asyncio.create_task(worker.run())
            await stuck.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert sorted(seen.order) == [("1", 1), ("2", 1)]
            assert not worker.snapshot()["running"]
            assert await dispatcher(outbox, seen.each).drain() == 2
            assert seen.of("1") == [1, 2, 3]

    asyncio.run(main())


@pytest.mark.parametrize("awaits", range(1, 40, 7))
def test_cancelled_at_any_moment_nothing_stays_claimed(
    awaits: int, postgres: Postgres, tmp_path: Path
):
    """However far it has come, the next dispatcher finds all that was not delivered."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 2)
            running = asyncio.create_task(dispatcher(outbox, seen.each).run_once())
            for _ in range(awaits):
                await a_moment()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await dispatcher(outbox, seen.each).drain()
            assert seen.of("1") == [1, 2]

    asyncio.run(main())


def test_stopping_finishes_what_is_begun(opening: Opening):
    """The event at the sink is finished and written down, and nothing new is begun."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 3)

            async def sink(event: OutboxEvent) -> None:
                worker.stop()
                await a_moment()
                await seen.each(event)

            worker = dispatcher(outbox, sink)
            await worker.run()
            assert seen.of("1") == [1]
            assert (await outbox.asurvey())["pending"] == 2
            assert await dispatcher(outbox, seen.each).drain() == 2

    asyncio.run(main())


def test_it_wakes_when_it_is_told(opening: Opening):
    """A dispatcher in a long pause looks as soon as an addition is announced."""

    async def main() -> None:
        async with opening() as database:
            outbox, came = Outbox(database), asyncio.Event()

            def plain(_event: OutboxEvent) -> None:
                assert threading.current_thread() is not threading.main_thread()
                loop.call_soon_threadsafe(came.set)

            loop = asyncio.get_running_loop()
            worker = dispatcher(outbox, plain, poll=1000.0)
            running = asyncio.create_task(worker.run())
            while worker.snapshot()["rounds"] < 1:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)  # noqa: TID251 - a real server
            await numbered(outbox, "1", 1)
            await outbox.aannounce()
            async with asyncio.timeout(10):
                await came.wait()
            worker.stop()
            await running
            told = worker.snapshot()
            assert told["delivered"] == 1
            assert told["survey"]["pending"] in {0, 1}

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_dispatcher_elsewhere_hears_of_it(driver: str, postgres: Postgres, tmp_path: Path):
    """NOTIFY wakes one that listens on a connection of its own; so does add(notify=True)."""

    async def connect() -> Any:
        if driver == "asyncpg":
            import asyncpg

            return await asyncpg.connect(postgres.url)
        import psycopg

        return await psycopg.AsyncConnection.connect(postgres.url)

    async def main() -> None:
        async with opening_by(driver, postgres, tmp_path)() as database:
            outbox, came = Outbox(database), asyncio.Queue[OutboxEvent]()
            elsewhere = Outbox(database)  # another process: it knows nothing of the dispatcher
            worker = dispatcher(outbox, came.put, poll=1000.0, listen=connect)
            running = asyncio.create_task(worker.run())
            told = worker.snapshot()
            while told["rounds"] < 5 or not told["listening"]:
                await asyncio.sleep(0.01)  # noqa: TID251 - a real server
                told = worker.snapshot()
            await numbered(elsewhere, "1", 1)
            await elsewhere.aannounce()
            async with asyncio.timeout(10):
                await came.get()
            elsewhere._notified_at = float("-inf")
            async with database.atransaction() as connection:
                await elsewhere.aadd(connection, "order", "1", "made", 1, notify=True)
            async with asyncio.timeout(10):
                await came.get()
            assert elsewhere._notified_at > float("-inf")
            worker.stop()
            await running

    asyncio.run(main())


def test_a_database_that_fails_is_asked_again(opening: Opening):
    """Whatever goes wrong is counted and tried again; nothing is lost."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 1)
            original, failures = database.arun, iter([True, True])

            async def failing(operation: Any) -> Any:
                if next(failures, False):
                    raise OSError("gone")
                return await original(operation)

            database.arun = failing  # type: ignore[method-assign]

            async def sink(event: OutboxEvent) -> None:
                await seen.each(event)
                worker.stop()

            worker = dispatcher(outbox, sink)
            await worker.run()
            assert worker.snapshot()["errors"] == 2
            assert seen.of("1") == [1]

    asyncio.run(main())
