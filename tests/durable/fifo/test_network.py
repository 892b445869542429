"""Messages in order, each once, whatever the network does and whoever crashes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall.durable import Database, Sqlite, migrate
from seawall.durable import fifo as receiver_module
from seawall.durable.database.connections import TextQuery
from seawall.durable.fifo import FifoAck, FifoMessage, FifoReceiver, FifoSender
from seawall.models.fifo import Receiver
from tests.durable.conftest import Opening, opening_by
from tests.durable.fifo.support import World, send
from tests.durable.postgres import Postgres


class Network:
    """Carries messages badly: it loses, repeats and reorders them, and the receiver crashes."""

    def __init__(self, world: World, sender: FifoSender, seed: int) -> None:
        self.world = world
        self.sender = sender
        self.chance = Random(seed)
        self.under_way: list[FifoMessage] = []
        self.crashes = 0

    async def carry(self) -> None:
        """Bring a message over, perhaps."""
        chance = self.chance
        message = chance.choice(self.under_way)
        if chance.random() < 0.5:
            self.under_way.remove(message)
        if chance.random() < 0.3:
            return
        crash = chance.choice(["", "", "", "inside", "before the commit", "dropped"])
        try:
            ready = await self.world.take(message, crash)
        except Exception:  # noqa: BLE001 - each driver has its own for a lost connection
            assert crash
            self.crashes += 1
            return
        assert not crash
        if chance.random() < 0.5:
            await self.sender.aacknowledge(ready.ack)


@pytest.mark.parametrize("seed", [7, 8])
def test_in_order_once_over_a_bad_network(opening: Opening, seed: int):
    """Messages are lost, repeated and reordered, the receiver crashes: in order, once, and all."""

    async def main() -> None:
        async with opening() as database:
            sender = FifoSender(database, "shop", to="billing")
            world = World(database, window=8, batch=3)
            await world.set_up()
            network, sent = Network(world, sender, seed), 0
            for _ in range(60):
                for _ in range(min(network.chance.randrange(3), 40 - sent)):
                    sent += 1
                    network.under_way.append(await send(sender, f"event {sent}"))
                if network.chance.random() < 0.3:
                    network.under_way += await sender.aunacknowledged(8)
                for _ in range(min(network.chance.randrange(4), len(network.under_way))):
                    if network.under_way:
                        await network.carry()
            while await sender.aunacknowledged():  # the network behaves at last
                await sender.aresend(lambda message: answer(world, message), limit=8)
            assert await world.effects() == list(range(1, sent + 1))
            assert await world.receiver.agaps() == []
            counts = world.receiver.snapshot()
            assert counts["delivered"] >= sent  # some of these were rolled back after the block
            assert min(counts["duplicate"], counts["buffered"], network.crashes) > 0

    asyncio.run(main())


async def answer(world: World, message: FifoMessage) -> FifoAck:
    """Carry a message over, and its acknowledgement back."""
    ready = await world.take(message)
    while ready.more:
        ready = await world.take(None)
    return ready.ack


def agreement(database: Database, model: Receiver, seed: int, *, crashes: bool) -> None:
    """Give a receiver and its model the same messages, and see that they do the same."""
    chance, source = Random(seed), database.source
    raw = source.connect()
    raw.execute("CREATE TABLE IF NOT EXISTS test_clock (us integer)")
    raw.execute("DELETE FROM test_clock")
    raw.execute("INSERT INTO test_clock VALUES (0)")
    database._now = "(SELECT us FROM test_clock)"
    name = f"seed {seed} {crashes}"
    receiver = FifoReceiver(database, name, window=model.window, on_gap="skip", gap_timeout=1e-5)
    now, epoch = 0, 1
    try:
        for _ in range(40):
            now += chance.randrange(5)
            epoch += chance.random() < 0.05
            raw.execute("UPDATE test_clock SET us = ?", [now])
            message = ("shop", chance.randrange(1, 16), b"", epoch - (chance.random() < 0.1))
            if crashes and chance.random() < 0.3:
                dying = source.connect()
                dying.execute("BEGIN IMMEDIATE")
                with receiver.receive(dying, *message):
                    pass
                dying.close()
                continue
            raw.execute("BEGIN IMMEDIATE")
            with receiver.receive(raw, *message) as ready:
                pass
            raw.execute("COMMIT")
            verdict, numbers = model.arrive(now, message[3], message[1])
            told = "duplicate" if ready.verdict == "late" else ready.verdict
            assert (told, [m.sequence for m in ready]) == (verdict, numbers)
            assert ready.ack[2:4] == model.position
    finally:
        raw.close()


@pytest.mark.parametrize("crashes", [False, True])
def test_the_database_agrees_with_the_model(tmp_path: Path, *, crashes: bool):
    """Whatever comes, with gaps that are skipped and epochs that end, both say the same."""
    source = Sqlite(tmp_path / "agreement.db")
    database = Database(source, name="agreement")
    migrate(database)
    for seed in range(8):
        agreement(database, Receiver(5, timeout=10), seed, crashes=crashes)
    source.close()


@pytest.mark.parametrize("missing", ["the place", "the buffer"])
def test_without_persistence_a_crash_would_lose_or_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
):
    """Where place or buffer are not written with the effect, the same agreement fails."""
    real = receiver_module.NamedQuery
    words = {"the place": "fifo.move", "the buffer": "fifo.buffer"}

    def careless(which: str, arguments: dict[str, Any]) -> Any:
        if which == words[missing]:
            return TextQuery("SELECT 1", {})
        return real(which, arguments)

    monkeypatch.setattr(receiver_module, "NamedQuery", careless)
    source = Sqlite(tmp_path / "agreement.db")
    database = Database(source, name="agreement")
    migrate(database)

    def all_agree() -> None:
        for seed in range(8):
            agreement(database, Receiver(5, timeout=10), seed, crashes=True)

    with pytest.raises((AssertionError, KeyError)):
        all_agree()
    source.close()


def test_a_crash_of_the_server_loses_nothing_that_was_committed(postgres: Postgres, tmp_path: Path):
    """What was buffered is there after it; what was not committed is as if it had not come."""
    opening = opening_by("asyncpg", postgres, tmp_path)

    async def crash_in_the_block() -> None:
        async with opening() as database:
            world = World(database)
            await world.set_up()
            for number in (3, 1):
                await world.take(FifoMessage("shop", number, b"x", 1))
            async with (
                database.atransaction() as connection,
                world.receiver.receive(connection, "shop", 2, b"x", 1) as ready,
            ):
                assert len(ready) == 2
                await asyncio.to_thread(postgres.crash_and_restart)

    async def go_on() -> None:
        async with opening() as database:
            world = World(database)
            assert await world.effects() == [1]
            ready = await world.take(FifoMessage("shop", 2, b"x", 1))
            assert [m.sequence for m in ready] == [2, 3]
            assert await world.effects() == [1, 2, 3]

    with pytest.raises(Exception, match=r"connection|transaction"):
        asyncio.run(crash_in_the_block())
    asyncio.run(go_on())
