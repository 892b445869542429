"""JetStream as a source and a sink, with a real nats_server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from random import Random
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

from seawall.pipeline import (
    BatchFailed,
    Ending,
    JetStreamMessage,
    JetStreamSink,
    JetStreamSource,
    NotBefore,
    Pipeline,
)
from seawall.pipeline.streams.jetstream.connection import JetStreamConnection
from seawall.redis.streams import partition_of
from seawall.testing import run_virtual
from tests.support_nats import NatsServer

PATIENCE = 60.0
numbers = count(1)


class Stream:
    """A stream of one test, and a client that looks at it."""

    def __init__(self, url: str, name: str, client: Any) -> None:
        self.url = url
        self.name = name
        self.client = client
        self.context = client.jetstream(timeout=10.0)

    def source(self, **settings: Any) -> JetStreamSource[Any]:
        return JetStreamSource(self.url, self.name, **{"consumer": "workers", **settings})

    async def publish(self, *values: Any, subject: str = "all") -> None:
        for value in values:
            await self.context.publish(f"{self.name}.{subject}", json.dumps(value).encode())

    async def left(self, consumer: str = "workers") -> tuple[int, int]:
        """Return how many messages were delivered and not acknowledged, and never delivered."""
        info = await self.context.consumer_info(self.name, consumer)
        return info.num_ack_pending, info.num_pending

    async def deliver(self, times: int, most: int, consumer: str = "workers") -> None:
        """Deliver the first messages to somebody who gives them back, or dies."""
        bound = await self.context.pull_subscribe_bind(consumer, self.name)
        for _ in range(times):
            for message in await bound.fetch(most, timeout=PATIENCE):
                await self.client.request(message.reply, b"-NAK", timeout=PATIENCE)
        await bound.unsubscribe()


@asynccontextmanager
async def stream(nats_server: NatsServer) -> AsyncIterator[Stream]:
    """Give an empty stream."""
    name = f"test{next(numbers)}"

    async def quiet(_error: Exception) -> None:
        """Print nothing: the server is away on purpose."""

    async with asyncio.timeout(4 * PATIENCE):
        client = await nats.connect(
            nats_server.url, error_cb=quiet, reconnect_time_wait=0.05, max_reconnect_attempts=-1
        )
        try:
            made = Stream(nats_server.url, name, client)
            await made.context.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
            yield made
        finally:
            await client.close()


def value_of(message: JetStreamMessage) -> Any:
    return json.loads(message.data)


async def pulled(source: JetStreamSource[Any], number: int) -> list[tuple[Any, Any]]:
    """Pull until there are that many, without an end of any."""
    found: list[tuple[Any, Any]] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < number:
            found += await source.pull(number - len(found))
    return found


async def run_until(pipeline: Pipeline, condition: Any) -> None:
    """Run a pipeline until `condition` is set."""
    running = asyncio.create_task(pipeline.run())
    async with asyncio.timeout(PATIENCE):
        await condition.wait()
    pipeline.stop(10.0)
    await running


class Kept:
    """A sink that remembers, and says when there are enough."""

    def __init__(self, enough: int) -> None:
        self.values: list[Any] = []
        self.is_enough = asyncio.Event()
        self._enough = enough

    async def __call__(self, message: JetStreamMessage) -> None:
        self.values.append(value_of(message))
        if len(self.values) >= self._enough:
            self.is_enough.set()


# The source


def test_each_message_ends_once_and_is_acknowledged(nats_server: NatsServer):
    """With ids of their own, headers and subjects; and the consumer has nothing left."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(*range(250))
            await made.context.publish(f"{made.name}.x", b"250", headers={"Nats-Msg-Id": "a/1"})
            seen: list[JetStreamMessage] = []
            kept = Kept(251)

            async def store(message: JetStreamMessage) -> None:
                seen.append(message)
                await kept(message)

            pipeline = Pipeline(f"all of {made.name}")
            pipeline.read(made.source()).sink(store, workers=4)
            await run_until(pipeline, kept.is_enough)
            assert sorted(kept.values) == list(range(251))
            assert len({message.id for message in seen}) == 251
            last = next(message for message in seen if value_of(message) == 250)
            assert (last.id, last.subject) == ("a/1", f"{made.name}.x")
            assert last.headers == {"Nats-Msg-Id": "a/1"}
            assert await made.left() == (0, 0)
            facts = pipeline.snapshot()["sources"][0]
            assert (facts["kind"], facts["read"], facts["at_work"]) == ("jetstream", 251, 0)

    asyncio.run(main())


def test_a_message_has_the_same_id_in_each_delivery(nats_server: NatsServer):
    """An inbox tells repeats by it, in whichever process."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1)
            ids = []
            for _ in range(2):
                source = made.source()
                ((message, handle),) = await pulled(source, 1)
                ids.append(message.id)
                await source.give_back([handle])
                await source.close()
            assert ids[0] == ids[1]
            assert re.fullmatch(rf"{made.name}/1/\d{{16}}", ids[0])

    asyncio.run(main())


def test_what_is_given_back_is_delivered_to_another_process_at_once(nats_server: NatsServer):
    """Long before a process that has died would be noticed."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(*range(10))
            stuck, hangs = asyncio.Event(), asyncio.Event()

            async def hang(_message: JetStreamMessage) -> None:
                stuck.set()
                await hangs.wait()

            first = Pipeline(f"first of {made.name}")
            first.read(made.source(lost_after=3600.0)).sink(hang, capacity=2)
            running = asyncio.create_task(first.run())
            await stuck.wait()
            first.stop(0.0)
            await running
            assert first.snapshot()[Ending.RETURNED] >= 1
            kept = Kept(10)
            second = Pipeline(f"second of {made.name}")
            second.read(made.source(lost_after=3600.0)).sink(kept)
            await run_until(second, kept.is_enough)
            assert sorted(kept.values) == list(range(10))
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_a_message_that_is_at_work_for_long_is_not_delivered_again(nats_server: NatsServer):
    """As long as its process lives; ablation: without that it is delivered again."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1)
            slow, other = made.source(lost_after=3.0), made.source(lost_after=3.0)
            ((_, handle),) = await pulled(slow, 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.0):
                    await other.pull(1)
            assert slow.holds(handle)
            assert slow._keeper is not None
            slow._keeper.cancel()
            ((_, repeated),) = await pulled(other, 1)
            assert repeated.deliveries == 2
            assert not slow.holds(handle)
            await slow.give_back([handle])  # it is not ours any more: no third delivery
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await slow.pull(1)
            await other.acknowledge([repeated])
            await slow.close()
            await other.close()
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_a_message_that_came_while_the_event_loop_stood_still_is_not_held(nats_server: NatsServer):
    """It may have waited in the socket for longer than the server waits for an acknowledgement."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1, 2)
            source = made.source(lost_after=3600.0)
            ((_, first),) = await source.pull(1)
            source._responsive_since -= 3600.0  # as if the event loop had been blocked for an hour
            ((_, second),) = await source.pull(1)
            assert (source.holds(first), source.holds(second)) == (True, False)
            await source.acknowledge([first, second])
            await source.close()
            assert await made.left() == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_a_pull_that_is_cancelled_loses_nothing(nats_server: NatsServer, seed: int):
    """Whenever it is cancelled, what has arrived is handed out by the next one, in order."""
    rng = Random(seed)

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(*range(60))
            source, found = made.source(lost_after=3600.0), []
            async with asyncio.timeout(PATIENCE):
                while len(found) < 60:
                    pulling = asyncio.create_task(source.pull(rng.randrange(1, 9)))
                    for _ in range(rng.randrange(40)):
                        await asyncio.sleep(0)  # noqa: TID251 - turns of the loop, not time
                    if rng.random() < 0.7:
                        pulling.cancel()
                    with suppress(asyncio.CancelledError):
                        found += await pulling
            assert [value_of(message) for message, _ in found] == list(range(60))
            await source.acknowledge([handle for _, handle in found])
            await source.close()
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_what_arrived_and_was_not_handed_out_goes_to_others_at_the_end(nats_server: NatsServer):
    """A closed source keeps nothing to itself."""

    async def main() -> None:
        async with stream(nats_server) as made:
            source, other = made.source(lost_after=3600.0), made.source(lost_after=3600.0)
            pulling = asyncio.create_task(source.pull(1))
            async with asyncio.timeout(PATIENCE):
                while not source._consumers[0].expected:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.01)  # noqa: TID251 - a real server
            pulling.cancel()
            await asyncio.wait([pulling])
            await made.publish(1)  # it goes to the request that is still under way
            await source.close()
            ((message, handle),) = await pulled(other, 1)
            assert value_of(message) == 1
            await other.acknowledge([handle])
            await other.close()
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_an_item_of_which_processes_die_is_a_dead_letter_and_all_others_arrive(
    nats_server: NatsServer,
):
    """After `most_deliveries`, with its cause."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(*range(6))
            source = made.source(most_deliveries=4)
            await source._open()
            await made.deliver(4, 2)
            kept = Kept(4)
            pipeline = Pipeline(f"poison of {made.name}")
            pipeline.read(source).sink(kept)
            await run_until(pipeline, kept.is_enough)
            assert kept.values == [2, 3, 4, 5]
            letters = list(pipeline.dead_letters.letters)  # type: ignore[attr-defined]
            assert [value_of(letter.value) for letter in letters] == [0, 1]
            assert {(letter.cause, letter.attempts) for letter in letters} == {
                ("TooManyDeliveries: delivered 4 times, and no process has finished it", 4)
            }
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_a_message_that_cannot_be_decoded_is_a_dead_letter(nats_server: NatsServer):
    """With all that there is of it; the others have the value that `decode` makes."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1, "two", 3)
            stored: list[int] = []
            enough = asyncio.Event()

            async def store(value: int) -> None:
                stored.append(value)
                if len(stored) == 2:
                    enough.set()

            pipeline = Pipeline(f"decoding of {made.name}")
            pipeline.read(made.source(decode=lambda message: int(message.data))).sink(store)
            await run_until(pipeline, enough)
            assert stored == [1, 3]
            (letter,) = pipeline.dead_letters.letters  # type: ignore[attr-defined]
            assert letter.value.data == b'"two"'
            assert letter.cause.startswith("ValueError")
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_a_message_that_was_delivered_twice_is_handed_out_alone(nats_server: NatsServer):
    """So a process that dies of it costs no other message a delivery."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(*range(4))
            source = made.source()
            await source._open()
            await made.deliver(2, 2)
            for wanted in ([0], [1]):
                found = await source.pull(10)
                assert [value_of(message) for message, _ in found] == wanted
                pulling = asyncio.create_task(source.pull(10))
                await asyncio.wait([pulling], timeout=0.2)
                assert not pulling.done()
                pulling.cancel()
                await asyncio.wait([pulling])
                await source.acknowledge([handle for _, handle in found])
            found = await source.pull(10)
            assert [value_of(message) for message, _ in found] == [2, 3]
            assert [handle.deliveries for _, handle in found] == [1, 1]
            await source.acknowledge([handle for _, handle in found])
            await source.close()
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_acknowledgements_are_repeated_until_a_server_that_was_killed_confirms_them(
    nats_server: NatsServer,
):
    """Nothing is delivered again, and nothing is left: though it died before it was told."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(*range(3))
            source = made.source(lost_after=8.0)
            found = await pulled(source, 3)
            nats_server.kill()
            await source.acknowledge([handle for _, handle in found[:2]])
            assert source.snapshot()["unconfirmed"] == 2
            nats_server.start()
            # It may have forgotten that it has delivered them, and then delivers them again.
            await made.publish(3)
            await source.acknowledge([found[2][1]])
            ((message, handle),) = await pulled(source, 1)
            assert value_of(message) == 3
            await source.acknowledge([handle])
            pulling = asyncio.create_task(source.pull(1))
            async with asyncio.timeout(PATIENCE):
                while await made.left() != (0, 0):
                    assert not pulling.done()
            await source.close()
            pulling.cancel()
            await asyncio.wait([pulling])

    asyncio.run(main())


def test_a_message_that_comes_again_after_its_end_is_not_handed_out(nats_server: NatsServer):
    """Its acknowledgement was lost: it is sent once more."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1, 2)
            source = made.source()
            ((_, first),) = await source.pull(1)
            source._unconfirmed[first.sequence] = first  # as if no answer had come
            del source._unfinished[first.sequence]
            await made.client.request(first.reply, b"-NAK", timeout=PATIENCE)
            ((message, second),) = await pulled(source, 1)
            assert value_of(message) == 2
            await source.acknowledge([second])
            async with asyncio.timeout(PATIENCE):
                while (await made.left()) != (0, 0):
                    pass
            await source.close()

    asyncio.run(main())


def test_a_message_that_comes_again_while_it_is_at_work_is_not_handed_out_twice(
    nats_server: NatsServer,
):
    """As after an outage: it is the same item, and its end counts for both deliveries."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1, 2)
            source = made.source()
            ((_, first),) = await source.pull(1)
            await made.client.request(first.reply, b"-NAK", timeout=PATIENCE)
            ((message, second),) = await pulled(source, 1)
            assert value_of(message) == 2
            await source.acknowledge([first, second])
            await source.close()
            assert await made.left() == (0, 0)

    asyncio.run(main())


def test_a_consumer_that_was_removed_is_made_again(nats_server: NatsServer):
    """Reading goes on; what was acknowledged before is delivered once more, as to a new one."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1)
            source = made.source()
            ((_, handle),) = await source.pull(1)
            await source.acknowledge([handle])
            pulling = asyncio.create_task(source.pull(1))
            await asyncio.wait([pulling], timeout=0.1)
            await made.context.delete_consumer(made.name, "workers")
            async with asyncio.timeout(PATIENCE):
                ((message, handle),) = await pulling
            assert value_of(message) == 1
            await source.acknowledge([handle])
            await source.close()

    asyncio.run(main())


def test_a_missing_stream_is_named(nats_server: NatsServer):
    """With what to do."""

    async def main() -> None:
        source = JetStreamSource[Any](nats_server.url, "nowhere", consumer="workers")
        with pytest.raises(nats.js.errors.NotFoundError) as caught:
            await source.pull(1)
        await source.close()
        assert "create the stream" in caught.value.__notes__[0]

    asyncio.run(main())


def test_a_client_of_the_user_stays_open_and_a_closed_one_is_an_error(nats_server: NatsServer):
    """The source closes only connections that it has made."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1)
            for connected in (made.client, lambda: nats.connect(nats_server.url)):
                source = JetStreamSource[Any](connected, made.name, consumer="workers")
                ((_, handle),) = await pulled(source, 1)
                client = source._client
                await source.give_back([handle])
                await source.close()
                assert client.is_closed == (client is not made.client)
            source = JetStreamSource[Any](made.client, made.name, consumer="workers")
            ((_, handle),) = await pulled(source, 1)
            await made.client.close()
            with pytest.raises((ConnectionError, nats.errors.ConnectionClosedError)):
                await pulled(source, 1)
            await source.close()

    asyncio.run(main())


def test_a_connection_that_cannot_be_made_is_tried_again(nats_server: NatsServer):
    """A function that fails is called again; a server that is away is waited for, and said so."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1)
            failures = [OSError("no route"), OSError("no route")]

            async def connect() -> Any:
                if failures:
                    raise failures.pop()
                return await nats.connect(nats_server.url)

            # The server may forget that it was given back, and waits that long.
            source = JetStreamSource[Any](connect, made.name, consumer="workers", lost_after=3.0)
            for _ in range(2):
                with pytest.raises(OSError, match="no route"):
                    await source.pull(1)
            ((_, handle),) = await pulled(source, 1)
            await source.give_back([handle])
            await source.close()

            nats_server.kill()
            source = made.source(lost_after=3.0)
            sink = JetStreamSink[int](nats_server.url, f"{made.name}.all")
            pulling = asyncio.create_task(source.pull(1))
            publishing = asyncio.create_task(sink([2]))
            async with asyncio.timeout(PATIENCE):
                while not source.snapshot()["waits_for"]:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.05)  # noqa: TID251 - a real server
                with pytest.raises(NotBefore):
                    await publishing
                nats_server.start()
                ((message, handle),) = await pulling
                await sink([2])
            assert value_of(message) == 1
            assert source.snapshot()["waits_for"] == ""
            await source.acknowledge([handle])
            await source.close()
            await sink.close()

    asyncio.run(main())


# Partitions


class Ordered:
    """A sink that keeps each value once, in the order in which they come first."""

    def __init__(self, enough: int, rng: Random) -> None:
        self.values: list[dict[str, Any]] = []
        self.is_enough = asyncio.Event()
        self._enough = enough
        self._rng = rng

    async def __call__(self, message: JetStreamMessage) -> None:
        for _ in range(self._rng.randrange(5)):
            await asyncio.sleep(0)  # noqa: TID251 - turns of the loop, not time
        if value_of(message) not in self.values:
            self.values.append(value_of(message))
        if len(self.values) == self._enough:
            self.is_enough.set()


def test_partitions_keep_the_order_of_each_key_with_processes_that_come_and_go(
    nats_server: NatsServer,
):
    """One message of a partition is at work at a time, in whichever process."""
    keys = [f"k{number}" for number in range(7)]
    values = [{"key": keys[number % 7], "number": number} for number in range(140)]
    rng = Random(7)

    async def run_for_a_while(made: Stream, store: Ordered, name: str) -> None:
        """Be a process that stops at once, with items at work."""
        pipeline = Pipeline(f"{name} of {made.name}")
        source = made.source(subject=f"{made.name}.{{partition}}", partitions=4)
        pipeline.read(source).sink(store, workers=8)
        running = asyncio.create_task(pipeline.run())
        enough = asyncio.create_task(store.is_enough.wait())
        await asyncio.wait([enough], timeout=rng.random() / 2)
        enough.cancel()
        pipeline.stop(0.0)
        await running

    async def main() -> None:
        async with stream(nats_server) as made:
            sink: JetStreamSink[dict[str, Any]] = JetStreamSink(
                made.client,
                f"{made.name}.{{partition}}",
                key=lambda value: value["key"],
                partitions=4,
            )
            await sink(values)
            store = Ordered(len(values), rng)
            async with asyncio.timeout(PATIENCE):
                while not store.is_enough.is_set():
                    turn = next(numbers)
                    await asyncio.gather(
                        run_for_a_while(made, store, f"{turn}a"),
                        run_for_a_while(made, store, f"{turn}b"),
                    )
            for key in keys:
                of_key = [value for value in store.values if value["key"] == key]
                assert of_key == [value for value in values if value["key"] == key]

    asyncio.run(main())


def test_a_partition_has_one_message_at_work(nats_server: NatsServer):
    """The next one comes after the end of the one before it; or the same again."""

    async def main() -> None:
        async with stream(nats_server) as made:
            await made.publish(1, 2, subject="0")
            first, second = (
                made.source(subject=f"{made.name}.{{partition}}", partitions=2) for _ in range(2)
            )
            ((message, handle),) = await pulled(first, 1)
            assert value_of(message) == 1
            pulling = asyncio.create_task(second.pull(10))
            await asyncio.wait([pulling], timeout=0.3)
            assert not pulling.done()
            await first.give_back([handle])
            ((message, handle),) = await pulling
            assert value_of(message) == 1
            await second.acknowledge([handle])
            found = await pulled(second, 1)
            assert [value_of(message) for message, _ in found] == [2]
            await first.close()
            await second.close()

    asyncio.run(main())


# The sink


def test_the_sink_drops_what_it_has_stored_before_and_fails_only_what_is_refused(
    nats_server: NatsServer,
):
    """By the identity of a value; one that cannot be encoded has failed, the others have not."""

    async def main() -> None:
        async with stream(nats_server) as made:
            subject = f"{made.name}.all"
            sink: JetStreamSink[Any] = JetStreamSink(nats_server.url, subject, identity=str)
            with pytest.raises(BatchFailed) as caught:
                await sink([1, {2}, "three"])
            assert list(caught.value.failures) == [1]
            assert isinstance(caught.value.failures[1], TypeError)
            await sink([1, b"four", "three"])
            info = await made.context.stream_info(made.name)
            assert info.state.messages == 3
            found = [(await made.context.get_msg(made.name, place)).data for place in (1, 2, 3)]
            assert sorted(found) == [b"1", b"four", b"three"]
            with pytest.raises(TypeError, match="batch="):
                await sink("one")  # type: ignore[arg-type]
            await sink.close()

    asyncio.run(main())


def test_values_wait_while_the_server_is_away(nats_server: NatsServer, monkeypatch: Any):
    """None is given up, and values of one key stay in their order."""
    monkeypatch.setattr("seawall.pipeline.streams.jetstream.sink.PUBLISH_WITHIN", 1.0)

    async def main() -> None:
        async with stream(nats_server) as made:
            sink: JetStreamSink[Any] = JetStreamSink(
                nats_server.url,
                f"{made.name}.{{partition}}",
                key=lambda value: value % 3,
                partitions=2,
                identity=str,
            )
            await sink([0])
            nats_server.kill()
            with pytest.raises(BatchFailed) as caught:
                await sink([3, 4, 6])
            failures = caught.value.failures
            assert set(failures) == {0, 1, 2}
            assert all(isinstance(error, NotBefore) for error in failures.values())
            pipeline = Pipeline(f"into {made.name}")
            pipeline.read(range(3, 30)).sink(sink, batch=(10, 0.1), name="publish")
            running = asyncio.create_task(pipeline.run())
            await asyncio.wait([running], timeout=0.5)
            nats_server.start()
            async with asyncio.timeout(PATIENCE):
                assert await running
            assert pipeline.snapshot()[Ending.SINK] == 27
            info = await made.context.stream_info(made.name)
            found = [
                await made.context.get_msg(made.name, place)
                for place in range(1, info.state.last_seq + 1)
            ]
            for key in range(3):
                of_key = [int(one.data) for one in found if int(one.data) % 3 == key]
                assert of_key == [value for value in [0, *range(3, 30)] if value % 3 == key]
                partition = partition_of(key, 2)
                subjects = {one.subject for one in found if int(one.data) % 3 == key}
                assert subjects == {f"{made.name}.{partition}"}
            await sink.close()

    asyncio.run(main())


def test_closing_does_not_fail_while_a_connection_is_still_being_made() -> None:
    """A client may ignore its cancellation; then it is abandoned."""

    async def main() -> None:
        may_end = asyncio.Event()

        async def connect() -> None:
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()

        connection = JetStreamConnection(connect, "JetStreamSource")
        waiting = asyncio.create_task(connection.client())
        await asyncio.wait([waiting], timeout=1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await connection.close()
        may_end.set()

    run_virtual(main())
