"""Sinks that never end, or never begin: what a dispatcher makes of them, and of the others."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from seawall import Breaker, Guard
from seawall.durable.outbox import delivery as _outbox_delivery
from seawall.durable.outbox.delivery import SinkCall
from seawall.durable.outbox.events import FromRow, NewEvent, OutboxEvent
from seawall.durable.outbox.outbox import Outbox
from seawall.testing import run_virtual
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox.support import (
    Seen,
    a_moment,
    begun,
    dispatcher,
    numbered,
    stubborn,
    timed,
)
from tests.durable.postgres import Postgres
from tests.redis.faults import Proxy


@pytest.fixture
def file(postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a file: where it is the dispatcher alone that is tested."""
    return opening_by("sqlite", postgres, tmp_path)


# Generators, whose body does not run when they are called


def plain_generator(event: Any) -> Iterator[None]:
    yield event


async def async_generator(event: Any) -> AsyncIterator[None]:
    yield event


class Sending:
    """A sink that is an object."""

    def __call__(self, event: Any) -> Iterator[None]:
        yield event

    async def send(self, event: Any) -> AsyncIterator[None]:
        yield event


@pytest.mark.parametrize(
    "sink",
    [plain_generator, async_generator, Sending(), Sending().send, partial(async_generator)],
)
def test_a_sink_with_a_yield_in_it_is_refused(file: Opening, sink: Any):
    """A generator function would deliver nothing, so it is refused at construction."""

    async def main() -> None:
        async with file() as database:
            for batched in (False, True):
                with pytest.raises(TypeError, match="yield"):
                    dispatcher(Outbox(database), sink, batched=batched)

    asyncio.run(main())


def gives_generator(event: OutboxEvent) -> Any:
    return plain_generator(event)


def gives_async_generator(event: OutboxEvent) -> Any:
    return async_generator(event)


async def gives_generator_awaited(event: OutboxEvent) -> Any:
    return plain_generator(event)


@pytest.mark.parametrize("sink", [gives_generator, gives_async_generator, gives_generator_awaited])
def test_a_sink_that_returns_a_generator_has_delivered_nothing(
    file: Opening, sink: Callable[[OutboxEvent], Any]
):
    """What looks like a function until it is called has failed, and the event stays."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            await numbered(outbox, "1", 1)
            assert await dispatcher(outbox, sink, attempts=1).drain() == 0
            (blocked,) = await outbox.ablocked()
            assert "returned" in blocked.error
            assert (await outbox.asurvey())["pending"] == 1

    asyncio.run(main())


def test_an_async_function_that_returns_something_to_await_is_done_after_that(file: Opening):
    """What it hands out may still fail, and then the event is not delivered."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            seen = Seen()
            seen.poison = {"bad"}
            await numbered(outbox, "bad", 1)
            await numbered(outbox, "good", 1)

            async def sink(event: OutboxEvent) -> Any:
                return seen.each(event)

            assert await dispatcher(outbox, sink, attempts=1).drain() == 1
            assert seen.order == [("good", 1)]
            assert [blocked.aggregate_id for blocked in await outbox.ablocked()] == ["bad"]

    asyncio.run(main())


# Calls that do not end


def hanging_on(seen: Seen, *hung: str) -> Callable[[OutboxEvent], Any]:
    """Return a sink that never ends with these aggregates."""

    async def sink(event: OutboxEvent) -> None:
        if event.aggregate_id in hung:
            await asyncio.Event().wait()
        await seen.each(event)

    return sink


def test_an_event_that_hangs_fails_at_the_timeout(file: Opening):
    """Others of its round are delivered beside it; it has used up an attempt."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            seen, loop = Seen(), asyncio.get_running_loop()
            for whose in ("1", "2", "3"):
                await numbered(outbox, whose, 2)
            worker = dispatcher(outbox, hanging_on(seen, "1"), attempts=1, timeout=7.0)
            began = loop.time()
            assert await worker.run_once() == 4
            assert loop.time() - began == pytest.approx(7.0)
            (blocked,) = await outbox.ablocked()
            assert blocked[:3] == ("order", "1", 1)
            assert "timeout=7 " in blocked.error

    run_virtual(main())


def test_what_is_added_while_an_event_hangs_comes_after_the_timeout(file: Opening):
    """A running dispatcher goes on with all others then, without anybody's help."""

    async def main() -> None:
        async with file() as database:
            outbox, seen, came = Outbox(database), Seen(), asyncio.Event()
            hangs, cut_at, loop = asyncio.Event(), [], asyncio.get_running_loop()
            await numbered(outbox, "1", 1)

            async def sink(event: OutboxEvent) -> None:
                if event.aggregate_id == "1":
                    hangs.set()
                    try:
                        await asyncio.Event().wait()
                    finally:
                        cut_at.append(loop.time())
                await seen.each(event)
                came.set()

            worker = dispatcher(outbox, sink, backoff=[1e6])
            running = asyncio.create_task(worker.run())
            await hangs.wait()
            await numbered(outbox, "2", 1)
            await came.wait()
            worker.stop()
            await running
            assert seen.order == [("2", 1)]
            assert cut_at == [pytest.approx(30.0)]
            assert worker.snapshot()["failed"] == 1

    run_virtual(main())


def test_without_a_timeout_it_is_waited_for(file: Opening):
    """With None a sink has all the time it needs, and the lease is prolonged meanwhile."""

    async def main() -> None:
        async with file() as database:
            outbox = Outbox(database)
            await numbered(outbox, "1", 1)

            async def slow(_event: OutboxEvent) -> None:
                await asyncio.sleep(1000.0)  # noqa: TID251 - in virtual time

            assert await dispatcher(outbox, slow, timeout=None).run_once() == 1

    run_virtual(main())


def test_a_breaker_in_the_sink_learns_of_the_timeout(file: Opening):
    """What was cut off there counts as a failure of the receiver, and opens its circuit."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            guard = Guard("hangs", Breaker(consecutive=1))
            for whose in ("1", "2"):
                await numbered(outbox, whose, 1)
            sink = guard(hanging_on(Seen(), "1", "2"))
            worker = dispatcher(outbox, sink, concurrency=1, timeout=5.0)
            await worker.run_once()
            told = worker.snapshot()
            assert (told["failed"], told["refused"]) == (1, 1)
            guard.close()

    run_virtual(main())


def test_a_list_that_hangs_is_given_one_by_one_until_one_hangs(
    file: Opening, caplog: pytest.LogCaptureFixture
):
    """The others have another round together: a silent receiver costs two timeouts, not each's."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            seen, loop, sizes = Seen(), asyncio.get_running_loop(), []
            for whose in ("1", "2", "3", "4"):
                await numbered(outbox, whose, 1)

            async def sink(events: list[OutboxEvent]) -> None:
                sizes.append(len(events))
                if any(event.aggregate_id == "2" for event in events):
                    await asyncio.Event().wait()
                await seen.batch(events)

            worker = dispatcher(outbox, sink, batched=True, attempts=1, timeout=4.0)
            began = loop.time()
            assert await worker.drain() == 3
            assert loop.time() - began == pytest.approx(8.0)
            assert sizes == [4, 1, 1, 2]
            assert [blocked.aggregate_id for blocked in await outbox.ablocked()] == ["2"]

    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    assert caplog.text.count("given again one by one") == 1


class ByHand(SinkCall):
    """A call whose timeout a test lets pass, since threads live in no virtual time."""

    begun: list[ByHand]

    def __init__(self, sink: Any, given: Any, timeout: float | None, threads: Any) -> None:
        super().__init__(sink, given, None if timeout is None else 1e6, threads)
        self.begun.append(self)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ByHand]:
    """Return a dispatcher's calls of its sink, which expire by hand."""
    begun: list[ByHand] = []
    monkeypatch.setattr(ByHand, "begun", begun, raising=False)
    monkeypatch.setattr(_outbox_delivery, "SinkCall", ByHand)
    return begun


def test_a_plain_sink_that_hangs_is_abandoned_and_its_aggregate_rests(
    file: Opening, calls: list[ByHand]
):
    """Others are delivered; its own aggregate is given nothing until that thread has ended."""

    async def main() -> None:
        async with timed(file) as (outbox, time):
            loop, goes_on = asyncio.get_running_loop(), threading.Event()
            hangs, seen, at_once, most = asyncio.Event(), [], 0, 0
            await numbered(outbox, "hung", 2)
            await numbered(outbox, "good", 1)

            def sink(event: OutboxEvent) -> None:
                nonlocal at_once, most
                if event.aggregate_id == "hung":
                    at_once += 1
                    most = max(most, at_once)
                    loop.call_soon_threadsafe(hangs.set)
                    goes_on.wait(20)
                    at_once -= 1
                seen.append((event.aggregate_id, event.sequence))

            worker = dispatcher(outbox, sink, concurrency=1, timeout=5.0, lease=30.0, attempts=9)
            try:
                round_ = asyncio.create_task(worker.run_once())
                await hangs.wait()
                calls[0].expire()
                assert await round_ == 1
                assert seen == [("good", 1)]
                assert (worker.snapshot()["failed"], worker.snapshot()["abandoned"]) == (1, 1)
                await time.pass_by(29.0)  # longer than its backoff, but not than a lease
                assert await worker.run_once() == 0
                assert worker.snapshot()["failed"] == 1
                await time.pass_by(2.0)  # due again, and the thread is still at it
                await numbered(outbox, "good", 1)
                assert await worker.run_once() == 1
                assert worker.snapshot()["failed"] == 2
                assert len(calls) == 3
            finally:
                goes_on.set()
            await calls[0].task
            assert worker.snapshot()["abandoned"] == 0
            await time.pass_by(31.0)
            assert await worker.run_once() == 2
            assert [n for whose, n in seen if whose == "hung"] == [1, 1, 2]
            assert most == 1

    asyncio.run(main())


def test_an_event_that_never_ends_uses_up_its_attempts(file: Opening):
    """It is blocked, though it could not be tried more than once; nothing waits for ever."""

    async def main() -> None:
        async with timed(file) as (outbox, time):
            begun, goes_on = [], asyncio.Event()
            await numbered(outbox, "1", 1)

            async def sink(event: OutboxEvent) -> None:
                begun.append(event.id)
                await stubborn(goes_on)

            worker = dispatcher(outbox, sink, attempts=3, timeout=5.0, lease=10.0)
            for _ in range(5):
                await worker.run_once()
                await time.pass_by(11.0)
            (blocked,) = await outbox.ablocked()
            assert blocked.attempts == 3
            assert len(begun) == 1
            goes_on.set()

    run_virtual(main())


def test_what_follows_an_event_that_was_put_aside_waits_for_its_call(file: Opening):
    """Under poison="skip" the next event is given when the abandoned call has ended."""

    async def main() -> None:
        async with timed(file) as (outbox, time):
            seen, goes_on = Seen(), asyncio.Event()
            await numbered(outbox, "1", 2)

            async def sink(event: OutboxEvent) -> None:
                if event.sequence == 1:
                    await stubborn(goes_on)
                await seen.each(event)

            worker = dispatcher(outbox, sink, attempts=1, poison="skip", timeout=5.0, lease=10.0)
            for _ in range(3):
                await worker.run_once()
                await time.pass_by(11.0)
            assert [dead.event.sequence for dead in await outbox.adead()] == [1]
            assert seen.events == []
            goes_on.set()
            await a_moment()
            await time.pass_by(11.0)
            assert await worker.drain() == 1
            assert seen.of("1") == [1, 2]  # the one that was put aside has arrived, late

    run_virtual(main())


# Calls that ignore that they are cancelled


@pytest.mark.parametrize("batched", [False, True])
def test_a_sink_that_ignores_its_cancellation_holds_up_no_other_aggregate(
    file: Opening, *, batched: bool
):
    """They are delivered after the timeout and half a second, not when it ends."""

    async def main() -> None:
        async with file() as database:
            outbox, seen, goes_on = Outbox(database), Seen(), asyncio.Event()
            loop, came, hangs = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
            await numbered(outbox, "1", 1)

            async def sink(given: Any) -> None:
                for event in given if batched else [given]:
                    if event.aggregate_id == "1":
                        hangs.set()
                        await stubborn(goes_on)
                    await seen.each(event)
                    came.set()

            worker = dispatcher(outbox, sink, batched=batched, timeout=5.0)
            running = asyncio.create_task(worker.run())
            await hangs.wait()
            began = loop.time()
            await numbered(outbox, "2", 1)
            await came.wait()
            assert seen.order == [("2", 1)]
            assert loop.time() - began < 5.0 + 2.0
            assert worker.snapshot()["abandoned"] == 1
            worker.stop(grace=0.0)
            await running
            goes_on.set()

    run_virtual(main())


@pytest.mark.parametrize("by", ["stop", "cancel"])
@pytest.mark.parametrize("timeout", [None, 1000.0])
def test_a_sink_that_ignores_its_cancellation_does_not_keep_a_dispatcher(
    file: Opening, by: str, timeout: float | None
):
    """`run` returns at the end of the grace; the aggregate rests for a lease, and is not lost."""

    async def main() -> None:
        async with timed(file) as (outbox, time):
            hangs, goes_on, seen = asyncio.Event(), asyncio.Event(), Seen()
            loop = asyncio.get_running_loop()
            await numbered(outbox, "1", 1)

            async def sink(_event: OutboxEvent) -> None:
                hangs.set()
                await stubborn(goes_on)

            worker = dispatcher(outbox, sink, timeout=timeout, lease=30.0)
            running = asyncio.create_task(worker.run())
            await hangs.wait()
            began = loop.time()
            if by == "stop":
                worker.stop(grace=4.0)
                await running
                assert 4.0 <= loop.time() - began <= 5.0
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                assert loop.time() - began <= 1.0
            assert worker.snapshot()["abandoned"] == 1
            another = dispatcher(outbox, seen.each)
            assert await another.run_once() == 0
            await time.pass_by(31.0)
            assert await another.run_once() == 1
            goes_on.set()

    run_virtual(main())


def test_a_program_ends_though_its_sink_never_does(file: Opening):
    """`asyncio.run` waits for all tasks that it knows, so it is not to know of this one."""
    hangs, tasks = threading.Event(), []

    async def main() -> None:
        async with file() as database:
            outbox = Outbox(database)
            await numbered(outbox, "1", 1)

            async def sink(_event: OutboxEvent) -> None:
                tasks.append(asyncio.current_task())
                hangs.set()
                await stubborn(asyncio.Event())

            worker = dispatcher(outbox, sink)
            running = asyncio.create_task(worker.run())
            await asyncio.to_thread(hangs.wait, 20)
            worker.stop(grace=0.0)
            await running

    asyncio.run(main())
    (task,) = tasks
    assert not task.done()


def test_a_sink_in_a_network_that_drops_everything_holds_up_no_other_aggregate(
    file: Opening, postgres: Postgres
):
    """There a transaction takes a minute or more to be cancelled; others come after `timeout`."""

    async def main() -> None:
        import asyncpg

        proxy = Proxy(postgres.port)
        through = postgres.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        try:
            async with file() as database:
                receiver = await asyncpg.create_pool(through, min_size=1, max_size=1)
                outbox, seen, asked = Outbox(database), Seen(), asyncio.Event()
                came = asyncio.Event()
                await numbered(outbox, "1", 1)

                async def sink(event: OutboxEvent) -> None:
                    if event.aggregate_id == "1":
                        async with receiver.acquire() as connection, connection.transaction():
                            proxy.hole = True
                            asked.set()
                            await connection.execute("SELECT 1")
                    await seen.each(event)
                    came.set()

                worker = dispatcher(outbox, sink, timeout=0.2)
                running = asyncio.create_task(worker.run())
                await asked.wait()
                await numbered(outbox, "2", 1)
                async with asyncio.timeout(20):
                    await came.wait()
                    assert worker.snapshot()["abandoned"] == 1
                    worker.stop(grace=0.0)
                    await running
                assert seen.order == [("2", 1)]
                receiver.terminate()
        finally:
            proxy.close()

    asyncio.run(main())


def test_a_database_that_does_not_answer_does_not_keep_a_dispatcher(
    file: Opening, monkeypatch: pytest.MonkeyPatch
):
    """Two seconds after the grace it returns, and leaves its claims to their leases."""

    async def main() -> None:
        async with file() as database:
            outbox, goes_on, asked = Outbox(database), asyncio.Event(), asyncio.Event()
            loop = asyncio.get_running_loop()

            async def black_hole(_operation: Any) -> None:
                asked.set()
                await stubborn(goes_on)

            worker = dispatcher(outbox, Seen().each)
            monkeypatch.setattr(database, "arun", black_hole)
            running = asyncio.create_task(worker.run())
            await asked.wait()
            began = loop.time()
            worker.stop(grace=3.0)
            await running
            assert loop.time() - began == pytest.approx(5.5)
            goes_on.set()

    run_virtual(main())


def test_with_too_many_abandoned_calls_the_sink_is_given_nothing_more(
    file: Opening, caplog: pytest.LogCaptureFixture
):
    """Nothing counts as failed meanwhile; it goes on when one of them has ended."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            seen, goes_on = Seen(), asyncio.Event()
            for whose in range(20):
                await numbered(outbox, str(whose), 1)

            async def sink(event: OutboxEvent) -> None:
                if int(event.aggregate_id) < 16:
                    await stubborn(goes_on)
                await seen.each(event)

            worker = dispatcher(outbox, sink, concurrency=1, timeout=5.0)
            await worker.run_once()
            told = worker.snapshot()
            assert (told["abandoned"], told["failed"]) == (16, 16)
            assert told["refused"] == 1
            assert told["paused"]
            assert seen.events == []
            goes_on.set()
            while worker.snapshot()["abandoned"]:
                await a_moment()
            assert await worker.drain() == 4

    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    assert caplog.text.count("is given nothing more") == 1


@pytest.mark.parametrize("when", ["at once", "late"])
def test_a_sink_that_ends_well_though_it_was_cancelled_has_delivered(file: Opening, when: str):
    """What it says counts, within the half second that it has for it."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            await numbered(outbox, "1", 1)

            async def sink(_event: OutboxEvent) -> None:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if when == "late":
                        await asyncio.sleep(0.4)  # noqa: TID251 - in virtual time

            worker = dispatcher(outbox, sink, timeout=5.0)
            assert await worker.run_once() == 1
            assert worker.snapshot()["abandoned"] == 0

    run_virtual(main())


def test_a_child_process_knows_of_no_abandoned_calls(file: Opening, calls: list[ByHand]):
    """It has none of its parent's threads and tasks, so nothing rests because of them."""

    async def main() -> None:
        async with timed(file) as (outbox, time):
            goes_on, seen = asyncio.Event(), Seen()
            await numbered(outbox, "1", 1)

            async def sink(event: OutboxEvent) -> None:
                if len(calls) == 1:
                    await stubborn(goes_on)
                await seen.each(event)

            worker = dispatcher(outbox, sink)
            round_ = asyncio.create_task(worker.run_once())
            while not calls:
                await a_moment()
            await a_moment()
            calls[0].expire()
            assert await round_ == 0
            worker._after_fork()
            await time.pass_by(31.0)
            assert await worker.run_once() == 1
            goes_on.set()

    asyncio.run(main())


# A column of a row that is not there


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
@pytest.mark.parametrize(
    "event",
    [
        NewEvent("order", "1", "made", FromRow("id")),
        NewEvent("order", "1", "made", {"order": [FromRow("id")]}),
        NewEvent("order", FromRow("id"), "made", {}),
    ],
)
def test_a_column_outside_of_a_single_statement_is_refused(
    postgres: Postgres, tmp_path: Path, driver: str, event: NewEvent
):
    """A column needs a row to be read from; the error says where there is one."""

    async def main() -> None:
        async with opening_by(driver, postgres, tmp_path)() as database:
            outbox = Outbox(database)
            async with begun(database) as connection:
                for add in (
                    lambda: outbox.aadd(connection, *event[:4]),
                    lambda: outbox.aadd_all(connection, [event]),
                ):
                    with pytest.raises(TypeError, match="rows_cte"):
                        await add()
            assert (await outbox.asurvey())["pending"] == 0

    asyncio.run(main())
