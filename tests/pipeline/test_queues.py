"""Channels and queues as sources and sinks: leases, attempts, and who waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seawall.errors import StoreUnavailable
from seawall.jobs import LocalQueue
from seawall.pipeline import ChannelSource, Pipeline, QueueSource, current_item
from seawall.resources import Channel
from seawall.testing import run_virtual


async def pause(seconds: float) -> None:
    """Let virtual time pass."""
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


def test_a_pipeline_reads_a_channel_until_it_is_closed() -> None:
    """By itself or as a source; its name is the channel's."""

    async def main() -> None:
        channel: Channel[int] = Channel(10, name="orders")
        stored: list[str] = []
        pipeline = Pipeline("p")
        pipeline.read(channel).sink(lambda _value: stored.append(current_item().id), name="store")
        running = asyncio.create_task(pipeline.run())
        for value in range(25):
            await channel.aput(value)
        channel.close()
        assert await running
        assert stored == [f"orders:{number}" for number in range(1, 26)]

    run_virtual(main())


def test_what_a_stopped_pipeline_had_read_is_in_the_channel_again() -> None:
    """In its order and in front of the rest, though the channel is full; a second one takes it."""

    async def main() -> None:
        channel: Channel[int] = Channel(4)
        stored: list[int] = []

        async def stuck(_value: int) -> None:
            await pause(1e6)

        first = Pipeline("first")
        first.read(channel).sink(stuck)
        running = asyncio.create_task(first.run())
        for value in range(8):
            await channel.aput(value)
        await pause(1.0)
        for value in range(8, 12):
            await channel.aput(value)
        first.stop(0.0)
        assert await running is False
        assert first.snapshot()["returned"] > 4
        assert (channel.depth, channel.capacity) == (12, 4)
        channel.close()
        second = Pipeline("second")
        second.read(channel).sink(stored.append, name="store")
        await second.run()
        assert stored == list(range(12))

    run_virtual(main())


def test_a_sink_waits_while_its_channel_is_full() -> None:
    """And so does the source in front of it: memory stays flat."""

    async def main() -> None:
        channel: Channel[int] = Channel(5)
        read = 0

        def numbers() -> Any:
            nonlocal read
            for number in range(10_000):
                read = number
                yield number

        pipeline = Pipeline("p")
        pipeline.read(numbers()).sink(channel.aput, capacity=5)
        running = asyncio.create_task(pipeline.run())
        await pause(100.0)
        assert channel.depth == 5
        assert read < 30
        assert [await channel.aget() for _ in range(1000)] == list(range(1000))
        assert read < 1030
        pipeline.stop(0.0)
        await running

    run_virtual(main())


def test_a_sink_waits_while_its_queue_is_full() -> None:
    """A refusal is no failure: nothing becomes a dead letter."""

    async def main() -> None:
        queue = LocalQueue("orders", max_size=10)
        pipeline = Pipeline("p")
        pipeline.read(range(25)).sink(queue.apush, name="push")
        running = asyncio.create_task(pipeline.run())
        payloads: list[int] = []
        while len(payloads) < 25:
            for claim in await queue.aclaim(10, wait=60.0):
                await queue.aack(claim)
                payloads.append(claim.payload)
        await running
        assert sorted(payloads) == list(range(25))
        assert pipeline.snapshot()["dead_letter"] == 0

    run_virtual(main())


def test_a_job_is_done_when_its_item_has_ended() -> None:
    """Not before: until then it is claimed; its id is that of the item."""

    async def main() -> None:
        queue = LocalQueue("orders")
        id_ = await queue.apush({"n": 1})
        states: list[str] = []

        async def store(_order: Any) -> None:
            assert current_item().id == f"orders:{id_}"
            states.append((await queue.astatus(id_)).state)

        pipeline = Pipeline("p")
        pipeline.read(QueueSource(queue)).sink(store)
        running = asyncio.create_task(pipeline.run())
        await pause(1.0)
        states.append((await queue.astatus(id_)).state)
        pipeline.stop(1.0)
        await running
        assert states == ["claimed", "done"]

    run_virtual(main())


def test_a_lease_is_prolonged_for_as_long_as_the_item_is_at_work() -> None:
    """Ten minutes of work on a lease of ten seconds: nobody else gets the job."""

    async def main() -> None:
        queue = LocalQueue("orders")
        await queue.apush(1)
        stored: list[int] = []

        async def slow(value: int) -> None:
            await pause(600.0)
            stored.append(value)

        pipeline = Pipeline("p")
        pipeline.read(QueueSource(queue, lease=10.0)).sink(slow)
        running = asyncio.create_task(pipeline.run())
        await pause(1.0)
        assert await queue.aclaim(wait=590.0) == []
        await pause(60.0)
        pipeline.stop(1.0)
        await running
        assert stored == [1]
        assert (await queue.asnapshot())["claimed"] == 0

    run_virtual(main())


def test_a_job_that_is_given_back_can_be_claimed_at_once_without_the_cost_of_an_attempt() -> None:
    """However often pipelines stop in the middle, the job is never given up."""

    async def main() -> None:
        queue = LocalQueue("orders", max_attempts=2)
        id_ = await queue.apush(1)

        async def stuck(_value: int) -> None:
            await pause(1e6)

        for number in range(5):
            pipeline = Pipeline(f"p{number}")
            pipeline.read(QueueSource(queue)).sink(stuck)
            running = asyncio.create_task(pipeline.run())
            await pause(1.0)
            assert (await queue.astatus(id_)).state == "claimed"
            pipeline.stop(0.0)
            await running
            assert (await queue.astatus(id_)).state == "waiting"
        (claim,) = await queue.aclaim()
        assert claim.attempt == 1

    run_virtual(main())


def test_a_job_of_which_the_store_cannot_be_told_keeps_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said when the store is back, and the job does not come again."""

    async def main() -> None:
        queue = LocalQueue("orders")
        id_ = await queue.apush(1)
        source = QueueSource(queue, lease=30.0)
        ((_, job),) = await source.pull(1)

        async def fail(_claim: Any) -> None:
            raise StoreUnavailable("away")

        with monkeypatch.context() as broken:
            broken.setattr(queue, "aack", fail)
            with pytest.raises(StoreUnavailable):
                await source.acknowledge([job])
            await pause(100.0)
        assert (await queue.astatus(id_)).state == "claimed"
        await source.acknowledge([job])
        assert (await queue.astatus(id_)).state == "done"
        await source.close()

    run_virtual(main())


def test_a_job_whose_lease_was_lost_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its item goes on; the job may be done twice, which is what an inbox is for."""

    async def main() -> None:
        queue = LocalQueue("orders")
        id_ = await queue.apush(1)
        source = QueueSource(queue, lease=6.0)
        ((_, job),) = await source.pull(1)
        await queue.acancel(id_)
        await pause(10.0)
        await source.acknowledge([job])
        await source.give_back([job])
        await source.close()

    run_virtual(main())
    assert "was over while it was at work: it is cancelled" in caplog.text


def test_a_channel_that_wants_to_be_asked_is_asked_for_what_there_is_room_for() -> None:
    """Not for more, however often a pull is cancelled."""

    async def main() -> None:
        channel: Channel[int] = Channel(100, demand=True)
        source = ChannelSource(channel)
        for _ in range(5):
            waiting = asyncio.create_task(source.pull(3))
            await pause(0.0)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert channel.snapshot()["requested"] == 3
        assert [await channel.aput(n, timeout=0) for n in range(3)] == [True] * 3
        assert [value for value, _ in await source.pull(3)] == [0, 1, 2]
        assert channel.snapshot()["requested"] == 0

    run_virtual(main())


def test_a_job_whose_lease_was_lost_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited behind another one while leases could not be prolonged; others have done it."""

    async def main() -> None:
        queue = LocalQueue("orders")
        begun: list[int] = []

        async def slow(value: int) -> None:
            begun.append(value)
            await pause(60.0)

        async def fail(_claim: Any) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(queue, "aheartbeat", fail)
        await queue.apush_many([1, 2])
        pipeline = Pipeline("p")
        pipeline.read(QueueSource(queue, lease=5.0)).sink(slow)
        running = asyncio.create_task(pipeline.run())
        await pause(1.0)
        elsewhere = await queue.aclaim(2, lease=1000.0, wait=10.0)
        assert sorted(claim.payload for claim in elsewhere) == [1, 2]
        await pause(100.0)
        assert begun == [1]
        assert pipeline.snapshot()["returned"] == 1
        pipeline.stop(0.0)
        await running

    run_virtual(main())
