"""Messages in order, each once, with the place kept where the effects are."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from seawall import subscribe
from seawall.durable import Database, Sqlite, migrate
from seawall.durable.fifo import FifoAck, FifoMessage, FifoReceiver, FifoSender, Skipped
from seawall.errors import FifoFull, FifoStateLost
from seawall.events import FifoGap
from tests.durable.conftest import Opening, opening_by
from tests.durable.fifo.support import World, ask, begun, send
from tests.durable.postgres import Postgres


def test_numbers_have_no_gap(opening: Opening):
    """A transaction that is rolled back gives its number back, also among many senders at once."""

    async def main() -> None:
        async with opening() as database:
            sender = FifoSender(database, "shop", to="billing")

            async def one(number: int) -> None:
                try:
                    async with begun(database) as connection:
                        if database.is_async:
                            await sender.asend(connection, str(number))
                        else:
                            sender.send(connection, str(number))
                        assert number % 3
                except AssertionError:
                    pass

            await asyncio.gather(*(one(number) for number in range(15)))
            kept = await sender.aunacknowledged()
            assert [message.sequence for message in kept] == list(range(1, 11))
            assert all(int(message.payload) % 3 for message in kept)

    asyncio.run(main())


def test_many_processes_receive_as_one(opening: Opening):
    """Messages that come to several at once take effect in order, once."""

    async def main() -> None:
        async with opening() as database:
            world = World(database, window=20)
            await world.set_up()
            messages = [FifoMessage("shop", n, b"x", 1) for n in range(1, 11)] * 2
            Random(3).shuffle(messages)
            await asyncio.gather(*(world.take(message) for message in messages))
            assert await world.effects() == list(range(1, 11))

    asyncio.run(main())


def test_the_window_is_bounded_and_told(opening: Opening):
    """What is too far ahead is refused, the sender is told how far it may go, and keeps to it."""

    async def main() -> None:
        async with opening() as database:
            sender = FifoSender(database, "shop", to="billing", max_unacknowledged=6)
            world = World(database, window=3)
            await world.set_up()
            messages = [await send(sender, str(n)) for n in range(6)]
            with pytest.raises(FifoFull, match="6 messages are not acknowledged"):
                await send(sender, "one too many")
            assert (await world.take(messages[4])).verdict == "beyond"
            ready = await world.take(messages[1])
            assert (ready.verdict, len(ready), ready.ack.allowed) == ("buffered", 0, 3)
            assert await sender.aacknowledge(ready.ack)
            assert [m.sequence for m in await sender.aunacknowledged()] == [1, 2, 3]
            ready = await world.take(messages[0])
            assert [m.sequence for m in ready] == [1, 2]
            assert await sender.aacknowledge(ready.ack)
            assert not await sender.aacknowledge(ready.ack)
            assert [m.sequence for m in await sender.aunacknowledged()] == [3, 4, 5]
            await send(sender, "there is room again")
            assert sender.snapshot()["refused"] == 1

    asyncio.run(main())


def test_a_batch_at_a_time(opening: Opening):
    """What waited behind a gap comes in bounded parts, and `drain` gives the rest."""

    async def main() -> None:
        async with opening() as database:
            world = World(database, window=10, batch=2)
            await world.set_up()
            for number in (5, 4, 3, 2, 1):
                ready = await world.take(FifoMessage("shop", number, b"x", 1))
            assert [m.sequence for m in ready] == [1, 2]
            assert ready.more
            ready = await world.take(None)
            assert ready.more
            ready = await world.take(None)
            assert not ready.more
            assert await world.effects() == [1, 2, 3, 4, 5]
            assert len(await world.take(None, sender="nobody")) == 0

    asyncio.run(main())


def test_a_gap_is_told_once_and_skipped_by_hand(opening: Opening):
    """A message that is missing for too long is told once; skipped, it is recorded, and late."""

    async def main() -> None:
        told: list[FifoGap] = []
        stop = subscribe(told.append, FifoGap)
        async with opening() as database:
            world = World(database, gap_timeout=5, on_gap="wait")
            await world.set_up()
            database._now = "1000000"
            await world.take(FifoMessage("shop", 3, b"x", 1))
            database._now = "5999999"
            assert len(await world.take(None)) == 0
            (gap,) = await world.receiver.agaps()
            assert gap == ("shop", 1, 1, 3, 1, 4.999999)
            assert told == []
            database._now = "6000000"
            ready = await world.take(None)
            await world.take(None)
            await world.receiver.agaps()
            assert [m.sequence for m in ready] == []
            assert [event.skipped_to for event in told] == [None]
            assert await world.receiver.askip("shop", 3) == 2
            assert await world.receiver.askip("shop", 3) == 0
            ready = await world.take(None)
            assert [m.sequence for m in ready] == [3]
            assert await world.receiver.askipped() == [Skipped("shop", 1, 1, 2)]
            assert (await world.take(FifoMessage("shop", 2, b"x", 1))).verdict == "late"
            assert (await world.take(FifoMessage("shop", 3, b"x", 1))).verdict == "duplicate"
            assert await world.effects() == [3]
            assert await world.receiver.acleanup(older_than=1) == 0
            assert await world.receiver.acleanup(older_than=0) == 1
        stop()

    asyncio.run(main())


def test_a_gap_is_skipped_by_policy(tmp_path: Path):
    """With `on_gap="skip"` the next arrival goes on behind the gap, and says so."""
    source = Sqlite(tmp_path / "skip.db")
    database = Database(source, name="skip")
    migrate(database)
    told: list[FifoGap] = []
    stop = subscribe(told.append, FifoGap)

    async def main() -> None:
        world = World(database, gap_timeout=5, on_gap="skip")
        await world.set_up()
        database._now = "1000000"
        for number in (3, 4):
            await world.take(FifoMessage("shop", number, b"x", 1))
        database._now = "6000000"
        ready = await world.take(FifoMessage("shop", 6, b"x", 1))
        assert [m.sequence for m in ready] == [3, 4]
        assert (await world.take(FifoMessage("shop", 1, b"x", 1))).verdict == "late"
        counts = world.receiver.snapshot()
        assert (counts["delivered"], counts["skipped"], counts["late"]) == (2, 2, 1)
        assert world.receiver.skipped() == [Skipped("shop", 1, 1, 2)]
        assert world.receiver.skip("shop", 6) == 1
        assert world.receiver.gaps() == []
        assert [m.sequence for m in await world.take(None)] == [6]

    asyncio.run(main())
    assert [(event.expected, event.skipped_to) for event in told] == [(1, 3)]
    assert told[0].age == 5.0
    stop()
    source.close()


def test_a_sender_that_lost_count_begins_anew(opening: Opening):
    """A restored backup is noticed; the new epoch begins at 1, and the old one is dropped."""

    async def main() -> None:
        async with opening() as database:
            sender = FifoSender(database, "shop", to="billing")
            world = World(database)
            await world.set_up()
            assert await sender.arestart() == 0
            old = [await send(sender, f"old {n}") for n in range(4)]
            await world.take(old[0])
            ready = await world.take(old[1])
            assert await sender.aacknowledge(ready.ack)
            await world.take(old[3])

            async with begun(database) as connection:
                text = "UPDATE {fifo_senders} SET last = 1, acknowledged = 0"
                await ask(database, connection, text)
                await ask(database, connection, "DELETE FROM {fifo_sent}")
            with pytest.raises(FifoStateLost, match="was a backup restored"):
                await sender.aacknowledge(ready.ack)

            await send(sender, "new")
            epoch = await sender.arestart()
            assert epoch > old[0].epoch
            (again,) = await sender.aunacknowledged()
            assert (again.epoch, again.payload) == (epoch, b"new")
            ready = await world.take(again._replace(sequence=1))
            assert [m.payload for m in ready] == [b"new"]
            assert (await world.take(old[2])).verdict == "stale"
            assert not await sender.aacknowledge(ready.ack._replace(epoch=old[0].epoch))
            assert world.receiver.snapshot()["restarts"] == 1
            assert await world.receiver.agaps() == []

    asyncio.run(main())


def test_what_is_unacknowledged_is_numbered_anew(tmp_path: Path):
    """After a restart the messages that are kept are 1, 2, 3... of the new epoch."""
    source = Sqlite(tmp_path / "restart.db")
    database = Database(source, name="restart")
    migrate(database)
    sender = FifoSender(database, "shop", to="billing")
    with database.transaction() as connection:
        messages = [sender.send(connection, str(n)) for n in range(5)]
    ack = FifoAck("shop", "billing", messages[0].epoch, 3, 100)
    assert sender.acknowledge(ack)
    assert not sender.acknowledge(ack._replace(receiver="another"))
    epoch = sender.restart()
    kept = sender.unacknowledged()
    assert [(m.epoch, m.sequence, m.payload) for m in kept] == [
        (epoch, 1, b"2"),
        (epoch, 2, b"3"),
        (epoch, 3, b"4"),
    ]
    with database.transaction() as connection:
        assert sender.send(connection, "5").sequence == 4
    source.close()


def test_sending_again_without_an_event_loop(tmp_path: Path):
    """One round brings over what is not acknowledged; an error ends it, and what came counts."""
    source = Sqlite(tmp_path / "resend.db")
    database = Database(source, name="resend")
    migrate(database)
    sender, receiver = FifoSender(database, "shop", to="b"), FifoReceiver(database, "b")
    with database.transaction() as connection:
        messages = [sender.send(connection, str(n)) for n in range(3)]

    def post(message: FifoMessage) -> FifoAck | None:
        if message == messages[2]:
            raise ConnectionError("no route")
        with database.transaction() as raw, receiver.receive(raw, *message) as ready:
            pass
        return None if message == messages[0] else ready.ack

    with pytest.raises(ConnectionError):
        sender.resend(post)
    assert sender.unacknowledged() == messages[2:]
    assert receiver.skip("shop", 4) == 1
    assert (receiver.cleanup(older_than=60), receiver.cleanup(older_than=0)) == (0, 1)
    assert sender.resend(lambda _: FifoAck("shop", "b", messages[0].epoch, 4, 99)) == 1
    assert sender.resend(post) == 0
    source.close()


def test_what_comes_by_the_wire_is_checked(tmp_path: Path):
    """Values that no sender of ours makes are refused, and leave nothing."""
    source = Sqlite(tmp_path / "wire.db")
    database = Database(source, name="wire")
    migrate(database)
    receiver = FifoReceiver(database, "billing", max_payload=10)
    sender = FifoSender(database, "shop", to="billing", max_payload=10)
    assert "billing" in repr(receiver)
    assert "billing" in repr(sender)
    with database.transaction() as raw:
        for message in (
            ("", 1, b"", 1),
            ("a\0", 1, b"", 1),
            ("shop", 0, b"", 1),
            ("shop", -1, b"", 1),
            ("shop", True, b"", 1),
            ("shop", "1", b"", 1),
            ("shop", 2**60, b"", 1),
            ("shop", 1, b"x" * 11, 1),
            ("shop", 1, 7, 1),
            ("shop", 1, b"", -1),
            ("shop", 1, b"", None),
        ):
            with pytest.raises((TypeError, ValueError)):
                receiver.receive(raw, *message)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at most 10 bytes"):
            sender.send(raw, "x" * 11)
    for ack in (None, (1, 2), ("shop", "billing", 1, 0, 1), ("shop", "billing", "1", 1, 1)):
        with pytest.raises((TypeError, ValueError)):
            sender.acknowledge(ack)  # type: ignore[arg-type]
    source.close()


def test_without_a_transaction_no_number_is_taken(postgres: Postgres, tmp_path: Path):
    """A number that is committed before its message would be a gap for ever: it is refused."""
    source = Sqlite(tmp_path / "a.db")
    database = Database(source, name="without a transaction")
    migrate(database)
    sender = FifoSender(database, "shop", to="billing")
    with (
        closing(source.connect()) as raw,
        pytest.raises(RuntimeError, match="has no transaction: begin one"),
    ):
        sender.send(raw, "lost")
    with database.transaction() as connection:
        assert sender.send(connection, "kept").sequence == 1
    database.close()
    source.close()

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as own:
            awaited = FifoSender(own, "shop", to="billing")
            async with own.source.acquire() as connection:
                with pytest.raises(RuntimeError, match="has no transaction: begin one"):
                    await awaited.asend(connection, "lost")
                async with connection.transaction():
                    assert (await awaited.asend(connection, "kept")).sequence == 1

    asyncio.run(main())
