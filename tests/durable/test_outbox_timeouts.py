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
from seawall._expiry import Expiry
from seawall.durable import _outbox_delivery
from seawall.durable.outbox import FromRow, NewEvent, Outbox, OutboxEvent
from seawall.testing import run_virtual
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox_support import Seen, begun, dispatcher, numbered, timed
from tests.durable.postgres import Postgres


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
    """Calling it delivers nothing, so it is told before an event could be lost."""

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


class ByHand(Expiry):
    """A timer that a test lets fire, since threads live in no virtual time."""

    armed: list[ByHand]

    def __init__(self, task: asyncio.Task[Any], _delay: float) -> None:
        super().__init__(task, 1e6)
        self.armed.append(self)


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> list[ByHand]:
    """Return the timers of a dispatcher's calls, which fire by hand."""
    timers: list[ByHand] = []
    monkeypatch.setattr(ByHand, "armed", timers, raising=False)
    monkeypatch.setattr(_outbox_delivery, "Expiry", ByHand)
    return timers


def test_a_plain_sink_that_hangs_is_left_behind(
    file: Opening, armed: list[ByHand], caplog: pytest.LogCaptureFixture
):
    """Others have another thread; so many are left, and then further calls are waited for."""

    async def main() -> None:
        async with timed(file) as (outbox, time):
            loop, goes_on = asyncio.get_running_loop(), threading.Event()
            hangs, seen = asyncio.Event(), []
            await numbered(outbox, "hung", 1)
            await numbered(outbox, "good", 1)

            def sink(event: OutboxEvent) -> None:
                if event.aggregate_id == "hung" and not goes_on.is_set():
                    loop.call_soon_threadsafe(hangs.set)
                    goes_on.wait(20)
                seen.append(event.aggregate_id)

            worker = dispatcher(outbox, sink, concurrency=1, timeout=5.0)
            try:
                round_ = asyncio.create_task(worker.run_once())
                await hangs.wait()
                armed[0]._fire()
                assert await round_ == 1
                assert seen == ["good"]
                assert worker.snapshot()["failed"] == 1
                assert len(armed) == 1  # the second one had no timer: one is left behind already
                for _ in range(2):
                    await numbered(outbox, "good", 1)
                    assert await worker.run_once() == 1
                assert len(armed) == 1
                worker._delivery.after_fork()  # a child has none of these threads
                await numbered(outbox, "good", 1)
                assert await worker.run_once() == 1
                assert len(armed) == 2
            finally:
                goes_on.set()
            await time.pass_by(2.0)
            assert await worker.run_once() == 1

    with caplog.at_level(logging.WARNING, "seawall"):
        asyncio.run(main())
    assert caplog.text.count("not stopped by that") == 1
    assert caplog.text.count("hang in threads") == 1


def test_who_came_back_is_no_longer_left_behind(file: Opening, armed: list[ByHand]):
    """When a thread that was given up has ended, calls have their timeout again."""

    async def main() -> None:
        async with timed(file) as (outbox, _time):
            loop, goes_on = asyncio.get_running_loop(), threading.Event()
            hangs, threads = asyncio.Event(), []
            await numbered(outbox, "1", 1)

            def sink(_event: OutboxEvent) -> None:
                threads.append(threading.current_thread())
                loop.call_soon_threadsafe(hangs.set)
                goes_on.wait(20)

            worker = dispatcher(outbox, sink, concurrency=1, timeout=5.0)
            round_ = asyncio.create_task(worker.run_once())
            await hangs.wait()
            armed[0]._fire()
            assert await round_ == 0
            goes_on.set()
            await asyncio.to_thread(threads[0].join, 20)
            await numbered(outbox, "2", 1)
            assert await worker.run_once() == 1
            assert len(armed) == 2

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
    """Where no row is written there is none to take it from, and it is told where there is."""

    async def main() -> None:
        async with opening_by(driver, postgres, tmp_path)() as database:
            outbox = Outbox(database)
            async with begun(database) as connection:
                for add in (
                    lambda: outbox.add(connection, *event[:4]),
                    lambda: outbox.add_all(connection, [event]),
                ):
                    with pytest.raises(TypeError, match="rows_cte"):  # noqa: PT012 - or awaited
                        told = add()
                        if not isinstance(told, (str, list)):
                            await told
            assert (await outbox.asurvey())["pending"] == 0

    asyncio.run(main())
