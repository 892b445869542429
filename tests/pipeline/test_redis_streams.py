"""Redis streams as sources and sinks, with a real Valkey server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from secrets import token_hex
from typing import Any

import pytest
import redis

from seawall import RedisStore
from seawall.errors import StoreUnavailable
from seawall.pipeline import (
    BatchFailed,
    FaultyItem,
    NotBefore,
    Pipeline,
    RedisStreamSink,
    RedisStreamSource,
    Source,
    StreamHandle,
    TooManyDeliveries,
    current_item,
)
from seawall.redis import streams
from tests.redis.faults import Proxy
from tests.redis.support import Server, mutate

pytestmark = pytest.mark.alone

PATIENCE = 60.0
"""Seconds for what must happen sooner or later, on a busy machine."""


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE):
            await main

    asyncio.run(bounded())


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - a real server


async def eventually(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await pause(0.01)


@pytest.fixture
def stream() -> str:
    """Return a name that no other test has."""
    return f"orders-{token_hex(6)}"


@asynccontextmanager
async def reading(
    url: Any, stream: str, group: str = "g", **settings: Any
) -> AsyncIterator[RedisStreamSource[Any]]:
    source = RedisStreamSource[Any](url, stream, group=group, **settings)
    try:
        yield source
    finally:
        await source.close()


async def write(url: str, stream: str, values: Sequence[Any], **settings: Any) -> None:
    sink = RedisStreamSink[Any](url, stream, **settings)
    try:
        await sink(values)
    finally:
        await sink.close()


async def pull(source: RedisStreamSource[Any], number: int) -> dict[Any, StreamHandle]:
    """Pull until there are so many; by value."""
    got: dict[Any, StreamHandle] = {}
    async with asyncio.timeout(PATIENCE):
        while len(got) < number:
            got.update(await source.pull(number - len(got)))
    return got


async def pulls_nothing(source: RedisStreamSource[Any], seconds: float = 0.3) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(source.pull(100), seconds)


def pending(url: str, stream: str, group: str = "g") -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.xpending(stream, group)["pending"])  # type: ignore[index]


def consumers(url: str, stream: str, group: str = "g") -> list[str]:
    with redis.Redis.from_url(url) as client:
        return [one["name"].decode() for one in client.xinfo_consumers(stream, group)]  # type: ignore[union-attr]


# Shared by all processes


def test_a_pipeline_reads_what_another_has_written(redis_url: str, stream: str):
    """Every value comes to the sink once, is acknowledged, and is removed from the stream."""
    stored: list[int] = []

    async def main() -> None:
        first = Pipeline("writes")
        target = RedisStreamSink[int](redis_url, stream)
        first.read(range(500)).sink(target, batch=(100, 0.01), name="stream")
        assert await first.run()
        await target.close()
        second = Pipeline("reads")
        source = RedisStreamSource[int](redis_url, stream, group="g", lost_after=0.3)
        assert isinstance(source, Source)

        async def store(values: list[int]) -> None:
            stored.extend(values)

        second.read(source).sink(store, batch=(50, 0.01))
        running = asyncio.create_task(second.run())
        await eventually(lambda: len(stored) == 500)
        await eventually(lambda: pending(redis_url, stream) == 0)
        with redis.Redis.from_url(redis_url) as client:
            await eventually(lambda: client.xlen(stream) <= 1)  # the last one stays
        facts = second.snapshot()["sources"][0]
        assert (facts["kind"], facts["error"]) == ("redis-stream", "")
        second.stop(5.0)
        assert not await running

    run(main())
    assert stored == list(range(500))
    assert consumers(redis_url, stream) == []


def test_what_is_given_back_goes_to_another_at_once(redis_url: str, stream: str):
    """Long before the time after which a silent process loses its entries; it is no delivery."""

    async def main() -> None:
        await write(redis_url, stream, [1, 2, 3])
        async with (
            reading(redis_url, stream, lost_after=3600) as one,
            reading(redis_url, stream, lost_after=3600) as two,
        ):
            got = await pull(one, 3)
            assert [handle.deliveries for handle in got.values()] == [1, 1, 1]
            await one.acknowledge([got[1]])
            await one.give_back([got[2]])
            again = await pull(two, 1)
            assert [(value, handle.deliveries) for value, handle in again.items()] == [(2, 1)]
            await pulls_nothing(two)
            await two.acknowledge(list(again.values()))
            assert pending(redis_url, stream) == 1

    run(main())


def test_what_a_source_has_when_it_is_closed_goes_to_another(redis_url: str, stream: str):
    """Also what it has pulled and never reported; and its consumer is removed."""

    async def main() -> None:
        await write(redis_url, stream, [1, 2])
        async with reading(redis_url, stream, lost_after=3600) as one:
            await pull(one, 2)
        assert consumers(redis_url, stream) == ["seawall-returned"]
        async with reading(redis_url, stream, lost_after=3600) as two:
            assert sorted(await pull(two, 2)) == [1, 2]

    run(main())


def test_the_entries_of_a_silent_process_are_taken_over(redis_url: str, stream: str):
    """After `lost_after`, with a second delivery; those of a live one are not."""

    async def main() -> None:
        await write(redis_url, stream, [1, 2, 3])
        async with (
            reading(redis_url, stream, lost_after=1.5) as dead,
            reading(redis_url, stream, lost_after=1.5) as slow,
            reading(redis_url, stream, lost_after=1.5) as other,
        ):
            lost = await pull(dead, 1)
            kept = await pull(slow, 1)
            assert dead._keeper is not None
            dead._keeper.cancel()  # it is silent from now on
            got = await pull(other, 2)
            assert got[1].deliveries == 2
            assert got[3].deliveries == 1
            assert list(lost) == [1]
            await pulls_nothing(other, 2.5)
            assert list(kept) == [2]

    run(main())


def test_a_value_that_cannot_be_decoded_is_a_dead_letter(redis_url: str, stream: str):
    """The pipeline sets it aside with its cause, and goes on."""
    stored: list[Any] = []

    async def main() -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.xadd(stream, {"other": "x"})
            client.xadd(stream, {"value": "no JSON"})
            client.xadd(stream, {"value": json.dumps(7)})
        pipeline = Pipeline("faulty")
        source = RedisStreamSource[Any](redis_url, stream, group="g")
        pipeline.read(source).sink(stored.append, name="keep")
        running = asyncio.create_task(pipeline.run())
        await eventually(lambda: stored == [7] and pending(redis_url, stream) == 0)
        pipeline.stop(5.0)
        await running
        causes = [letter.cause for letter in pipeline.dead_letters.letters]  # type: ignore[attr-defined]
        assert causes[0].startswith("ValueError: no field 'value' among ['other']: pass decode=")
        assert causes[1].startswith("JSONDecodeError")

    run(main())


async def life(url: str, stream: str, done: list[int]) -> str:
    """Be one process that dies of the value 3; return how it ended."""
    source = RedisStreamSource[int](url, stream, group="g", lost_after=0.2)
    while True:
        pulled = await source.pull(100)
        for value, handle in pulled:
            if isinstance(value, FaultyItem):
                assert isinstance(value.error, TooManyDeliveries)
                assert (value.attempts, json.loads(value.value["value"])) == (5, 3)
                await source.acknowledge([handle])
                await source.close()
                return "dead letter"
            if value == 3:
                assert source._keeper is not None
                source._keeper.cancel()
                await source._place.close()
                return f"died in company of {len(pulled) - 1}"
            if handle.deliveries > 1:  # at first all were in flight when it died
                await source.acknowledge([handle])
                done.append(value)


def test_an_item_of_which_processes_die_becomes_a_dead_letter(redis_url: str, stream: str):
    """It is suspected, handed out alone, and set aside; its companions are all done."""
    done: list[int] = []

    async def main() -> None:
        await write(redis_url, stream, range(8))
        ends = [await life(redis_url, stream, done) for _ in range(6)]
        assert ends[0] == "died in company of 7"
        assert ends[2:] == ["died in company of 0"] * 3 + ["dead letter"]
        async with reading(redis_url, stream, lost_after=0.2) as source:
            while len(done) < 7:
                for value, handle in (await pull(source, 1)).items():
                    await source.acknowledge([handle])
                    done.append(value)
        assert sorted(done) == [0, 1, 2, 4, 5, 6, 7]
        assert pending(redis_url, stream) == 0

    run(main())


# Partitions


def test_a_key_goes_to_one_partition_for_ever():
    """The same in every process and release, or keys would change their stream."""
    assert [streams.partition_of(key, 8) for key in ("a", "b", 7, ("a", 1), b"x")] == PLACES


PLACES = [7, 5, 1, 2, 4]


async def held(*sources: RedisStreamSource[Any]) -> list[list[int]]:
    return [source.snapshot()["held"] for source in sources]


def begun(*sources: RedisStreamSource[Any]) -> list[asyncio.Task[Any]]:
    """Let sources wait for items, as pipelines do."""
    return [asyncio.ensure_future(source.pull(1)) for source in sources]


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def share(source: RedisStreamSource[Any]) -> int:
    return len(source.snapshot()["held"])


def test_partitions_are_shared_fairly_by_those_that_live(redis_url: str, stream: str):
    """One has all; with a second each has half; when one leaves, the other has all again."""

    async def main() -> None:
        settings = {"partitions": 5, "lost_after": 0.9}
        async with reading(redis_url, stream, **settings) as one:
            tasks = begun(one)
            await eventually(lambda: share(one) == 5)
            async with reading(redis_url, stream, **settings) as two:
                tasks += begun(two)
                await eventually(lambda: {share(one), share(two)} == {2, 3})
                both = one.snapshot()["held"] + two.snapshot()["held"]
                assert sorted(both) == [0, 1, 2, 3, 4]
                assert one.snapshot()["processes"] == 2
                await ended(tasks[1:])
            await eventually(lambda: share(one) == 5)
            await ended(tasks)

    run(main())


def test_a_partition_begins_with_what_the_last_process_has_not_finished(
    redis_url: str, stream: str
):
    """In order, also across a takeover; the fencing token rises; the old process has lost it."""

    async def main() -> None:
        settings = {"partitions": 1, "lost_after": 0.6}
        await write(redis_url, stream, range(6), key=lambda _: "k", partitions=1)
        async with (
            reading(redis_url, stream, **settings) as one,
            reading(redis_url, stream, **settings) as two,
        ):
            first = await pull(one, 4)
            await one.acknowledge([first[0]])
            assert all(one.holds(handle) for handle in first.values())
            assert one._keeper is not None
            one._keeper.cancel()  # it neither beats nor balances from now on,
            one._holdings[0].lease._holding._renewal.stop()  # type: ignore[union-attr]
            second = await pull(two, 5)  # and so it loses the partition
            assert list(second) == [1, 2, 3, 4, 5]
            assert [handle.deliveries for handle in second.values()] == [2, 2, 2, 1, 1]
            assert second[1].token > first[1].token
            assert not any(one.holds(handle) for handle in first.values())
            await one.acknowledge(list(first.values()))  # is not accepted
            await one.give_back([first[3]])
            assert pending(redis_url, f"{stream}.0") == 5
            await two.acknowledge(list(second.values()))
            assert pending(redis_url, f"{stream}.0") == 0

    run(main())


def test_the_store_accepts_nothing_from_an_earlier_holder(redis_url: str, stream: str):
    """Not even a question that was under way while the partition changed hands."""

    async def main() -> None:
        async with RedisStore(redis_url, timeout=10.0) as store:
            assert await streams.append(store, stream, [{"n": n} for n in range(3)], 9, trims=False)
            old = streams.StreamConsumer(store, stream, "g", "old", 5)
            new = streams.StreamConsumer(store, stream, "g", "new", 6)
            await old.hold()
            ids = [entry.id for entry in await old.read(2)]
            await new.hold()
            for late in (
                old.hold(),
                old.read(1),
                old.pending(1.0),
                old.take([(ids[0], 2)]),
                old.acknowledge(ids),
                old.give_back(ids),
                old.renew(1.0),
                old.leave(),
            ):
                with pytest.raises(streams.HeldByAnother):
                    await late
            assert await new.pending(1.0) == [(ids[0], 1), (ids[1], 1)]
            assert len(await new.read(5)) == 1

    run(main())


@pytest.mark.parametrize(
    ("before", "after"),
    [("if not holds then", "if false then"), ("take_over('0', math.huge)", "take_over('0', 1)")],
)
def test_without_a_safeguard_entries_are_lost_to_the_new_holder(
    redis_url: str, stream: str, monkeypatch: pytest.MonkeyPatch, before: str, after: str
):
    """Without the fence a late question takes entries; without the takeover they are forgotten."""
    mutate(monkeypatch, "streams", before, after)

    async def main() -> None:
        async with RedisStore(redis_url, timeout=10.0) as store:
            entries = [{"n": n} for n in range(1200)]
            assert await streams.append(store, stream, entries, 5000, trims=False)
            old = streams.StreamConsumer(store, stream, "g", "old", 5)
            new = streams.StreamConsumer(store, stream, "g", "new", 6)
            await old.hold()
            await old.read(1100)
            await new.hold()
            with suppress(streams.HeldByAnother):
                await old.read(50)
            found = len(await new.pending(1.0)) + len(await new.read(5000))
            assert found < 1200

    run(main())


def test_a_process_that_joins_gets_a_partition_when_its_items_have_ended(
    redis_url: str, stream: str
):
    """Nothing is taken away in mid-work: the partition changes hands after the acknowledgement."""

    async def main() -> None:
        settings = {"partitions": 2, "lost_after": 2.0}
        await write(redis_url, stream, range(20), key=lambda n: n, partitions=2)
        async with (
            reading(redis_url, stream, **settings) as one,
            reading(redis_url, stream, **settings) as two,
        ):
            await asyncio.wait_for(one.pull(1), PATIENCE)
            await eventually(lambda: share(one) == 2)
            mine = dict([*await one.pull(20), *await one.pull(20)])
            waits = begun(two)
            await eventually(lambda: any(h.leave_by for h in one._holdings.values()))
            assert share(two) == 0
            assert all(one.holds(handle) for handle in mine.values())
            await one.acknowledge(list(mine.values()))
            for holding in one._holdings.values():
                holding.in_flight.clear()  # the very first one, too
            one._due.set()
            await eventually(lambda: (share(one), share(two)) == (1, 1))
            await ended(waits)

    run(main())


# A store that fails


def test_a_lost_answer_loses_no_entry(redis_url: str, stream: str):
    """Whether it was an answer to a read or to a take: the next look finds the entries."""

    async def main() -> None:
        await write(redis_url, stream, range(4))
        async with reading(redis_url, stream, lost_after=3600) as one:
            got = await pull(one, 1)
            consumer = one._holdings[0].consumer
            assert len(await consumer.read(2)) == 2  # nobody hears of it
            one._holdings[0].is_unsure = True
            got |= await pull(one, 3)
            assert [got[n].deliveries for n in range(4)] == [1, 2, 2, 1]

    run(main())


def test_an_answer_that_is_lost_again_and_again_is_one_delivery(redis_url: str, stream: str):
    """A store that is slow makes no dead letters."""

    async def main() -> None:
        await write(redis_url, stream, [1])
        async with reading(redis_url, stream, lost_after=3600) as one:
            assert one._keeper is None
            one._begin()
            consumer = one._holdings[0].consumer
            await consumer.read(1)
            holding, take = one._holdings[0], consumer.take

            async def lost(wanted: Any) -> Any:
                await take(wanted)
                raise StoreUnavailable("the answer is lost")

            consumer.take = lost  # type: ignore[method-assign]
            for _ in range(10):
                with pytest.raises(StoreUnavailable):
                    await one._read(holding, 1)
            consumer.take = take  # type: ignore[method-assign]
            got = await pull(one, 1)
            assert got[1].deliveries == 2

    run(main())


@pytest.mark.parametrize("partitions", [None, 2])
def test_a_cancelled_pull_loses_nothing(redis_url: str, stream: str, partitions: int | None):
    """Cancelled at any moment; what it was given comes with the next pull."""

    async def main() -> None:
        writing: dict[str, Any] = {"key": lambda n: n, "partitions": 2} if partitions else {}
        await write(redis_url, stream, range(50), **writing)
        async with reading(redis_url, stream, partitions=partitions) as one:
            got: dict[Any, StreamHandle] = {}
            for step in range(100):
                pulling = asyncio.ensure_future(one.pull(1))
                for _ in range(step % 17):
                    await pause(0)
                pulling.cancel()
                await asyncio.wait([pulling])
                if not pulling.cancelled():
                    got |= dict(pulling.result())
            got |= await pull(one, 50 - len(got))
            assert sorted(got) == list(range(50))

    run(main())


@pytest.mark.parametrize("partitions", [None, 2])
@pytest.mark.parametrize("fault", ["killed", "frozen", "deaf"])
def test_a_store_that_comes_back_is_read_on(
    server: Server, stream: str, partitions: int | None, fault: str
):
    """Nothing is lost, nothing is stuck: killed and restarted, frozen, or deaf connections."""
    seen: list[int] = []

    async def main() -> None:
        proxy = Proxy(server.port)
        writing: dict[str, Any] = {"key": lambda n: n, "partitions": 2} if partitions else {}
        first, second = Pipeline("writes"), Pipeline("reads")
        sink = RedisStreamSink[int](server.url, stream, **writing)
        source = RedisStreamSource[int](
            proxy.url, stream, group="g", lost_after=1.0, partitions=partitions
        )

        async def store(value: int) -> None:
            seen.append(value)

        async def numbers() -> AsyncIterator[int]:
            for number in range(60):
                yield number
                await pause(0.01)

        first.read(numbers()).sink(sink, batch=(5, 0.01), name="stream")
        second.read(source).sink(store)
        tasks = [asyncio.create_task(one.run()) for one in (first, second)]
        await eventually(lambda: len(seen) >= 10)
        if fault == "killed":
            server.kill()
            await pause(0.5)
            server.start()
        elif fault == "frozen":
            server.freeze()
            await pause(1.5)
            server.thaw()
        else:
            proxy.deafen()
        await eventually(lambda: set(seen) == set(range(60)))
        second.stop(5.0)
        assert await tasks[0]
        await tasks[1]
        await sink.close()
        proxy.close()

    run(main())


def test_a_stream_that_was_deleted_is_read_on(redis_url: str, stream: str):
    """Its group is made again, and begins with the first entry."""

    async def main() -> None:
        for partitions in (None, 1):
            name = f"{stream}-{partitions}"
            writing: dict[str, Any] = {"key": lambda n: n, "partitions": 1} if partitions else {}
            await write(redis_url, name, [1], **writing)
            async with reading(redis_url, name, partitions=partitions, lost_after=0.5) as one:
                await one.acknowledge([(await pull(one, 1))[1]])
                with redis.Redis.from_url(redis_url) as client:
                    client.delete(name, f"{name}.0")
                await write(redis_url, name, [2], **writing)
                await one.acknowledge([(await pull(one, 1))[2]])

    run(main())


# The sink


def test_a_full_stream_makes_the_pipeline_wait(redis_url: str, stream: str):
    """Nothing is removed that nobody has read: the writer waits until the reader has."""
    seen: list[int] = []

    async def main() -> None:
        sink = RedisStreamSink[int](redis_url, stream, max_length=20)
        writer, reader = Pipeline("writes"), Pipeline("reads")
        writer.read(range(100)).sink(sink, batch=(10, 0.0), name="stream")
        writing = asyncio.create_task(writer.run())
        with redis.Redis.from_url(redis_url) as client:
            await eventually(lambda: client.xlen(stream) >= 20)
            await eventually(lambda: "20 entries" in writer.snapshot()["stages"][0]["waits_for"])
            assert client.xlen(stream) < 30

            async def store(value: int) -> None:
                seen.append(value)

            source = RedisStreamSource[int](redis_url, stream, group="g", lost_after=0.15)
            reader.read(source).sink(store)
            reading = asyncio.create_task(reader.run())
            assert await writing
            await eventually(lambda: len(seen) == 100)
            reader.stop(5.0)
            await reading
        await sink.close()

    run(main())
    assert seen == list(range(100))


def test_only_what_is_not_written_is_written_again(redis_url: str, stream: str):
    """One that cannot be encoded fails alone; while the store is away, nothing does."""

    async def main() -> None:
        sink = RedisStreamSink[Any](redis_url, stream, key=str, partitions=2)
        with pytest.raises(BatchFailed) as failed:
            await sink([1, {2}, 3])
        assert [type(e) for e in failed.value.failures.values()] == [TypeError]
        assert list(failed.value.failures) == [1]
        await sink.close()
        away = RedisStreamSink[Any]("redis://127.0.0.1:1/0", stream)
        with pytest.raises(BatchFailed) as failed:
            await away([1, {2}])
        assert [type(e) for e in failed.value.failures.values()] == [NotBefore, NotBefore]
        await away.close()

    run(main())


def test_a_duplicate_has_the_identity_of_its_twin(redis_url: str, stream: str):
    """What was written twice, since an answer was lost, is one item to an inbox."""
    ids: list[str] = []

    async def main() -> None:
        for _ in range(2):
            await write(redis_url, stream, [{"n": 1}], identity=lambda value: f"order-{value['n']}")
        await write(redis_url, stream, [{"n": 2}])
        pipeline = Pipeline("ids")
        source = RedisStreamSource[Any](redis_url, stream, group="g", name="orders")

        def keep(_value: Any) -> None:
            ids.append(current_item().id)

        pipeline.read(source).sink(keep)
        running = asyncio.create_task(pipeline.run())
        await eventually(lambda: len(ids) == 3)
        pipeline.stop(5.0)
        await running

    run(main())
    assert ids[:2] == ["orders:order-1"] * 2
    assert ids[2].startswith(f"orders:{stream}/")


def test_a_source_can_be_read_again_after_it_was_closed(redis_url: str, stream: str):
    """In another event loop, too."""
    source = RedisStreamSource[int](redis_url, stream, group="g", partitions=1, lost_after=0.6)

    async def once(value: int) -> None:
        await write(redis_url, stream, [value], key=lambda n: n, partitions=1)
        got = await pull(source, 1)
        assert list(got) == [value]
        await source.acknowledge(list(got.values()))
        await source.close()
        await source.close()

    run(once(1))
    run(once(2))
