"""Receivers crash, at each statement and by SIGKILL: still in order, once, and all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall.clock import SYSTEM
from seawall.durable import Database, Sqlite, amigrate, migrate
from seawall.durable import fifo as _fifo_receiver
from seawall.durable.database.connections import Connection
from seawall.durable.fifo import FifoMessage, FifoReceiver, FifoSender
from seawall.models import fifo as model
from tests.durable.conftest import Opening, opening_by
from tests.durable.crash.children import DEADLY, PATIENCE, Nursery
from tests.durable.crash.ledger import asking
from tests.durable.crash.shop import SCHEMA, opened
from tests.durable.fifo.support import Crashed, World, ask, begun, entered, send
from tests.durable.postgres import Postgres

# A crash at each statement


class Crash:
    """Happens at one of the statements that are asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        text = Connection._text

        def counted(connection: Connection, asked: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if not self.left:
                    self.left = None
                    raise Crashed
            return text(connection, asked)

        patch.setattr(Connection, "_text", counted)


async def all_is_sent(world: World, sender: FifoSender) -> None:
    """Bring over what is not acknowledged, reordered and repeated, until nothing is left."""
    while messages := await sender.aunacknowledged():
        for message in (*reversed(messages), messages[0]):
            ready = await world.take(message)
            while ready.more:
                ready = await world.take(None, sender=sender.sender)
        await sender.aacknowledge(ready.ack)


@pytest.mark.parametrize("driver", ["asyncpg", "sqlite"])
def test_a_crash_at_each_statement(
    driver: str, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whichever statement a receiver crashes at: with the next try all took effect once."""
    opening, crash = opening_by(driver, postgres, tmp_path), Crash(monkeypatch)

    async def main() -> None:
        async with opening() as database:
            world = World(database, window=3, batch=2)
            await world.set_up()
            crashes = 0
            while True:
                sender = FifoSender(database, f"shop {crashes}", to="billing")
                for _ in range(3):
                    await send(sender, "x")
                before = len(await world.effects())
                crash.left = crashes + 1
                try:
                    await all_is_sent(world, sender)
                except Crashed:
                    crashes += 1
                    await all_is_sent(world, sender)
                crashed, crash.left = crash.left is None, None
                assert (await world.effects())[before:] == [1, 2, 3]
                if not crashed:
                    break
            assert crashes > 20

    asyncio.run(main())


# By SIGKILL


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    """Return a nursery; nothing of it is left after the test."""
    made = Nursery()
    yield made
    made.close()


class Ledger:
    """A database with messages that are to be received, as an onlooker sees it."""

    def __init__(self, url: str, messages: int) -> None:
        self.url, self.messages = url, messages
        asyncio.run(self._set_up())

    async def _set_up(self) -> None:
        async with opened(self.url) as database:
            if database.is_async:
                async with database.atransaction() as connection:
                    await connection.execute(f'DROP SCHEMA IF EXISTS "{SCHEMA}" CASCADE')
            await amigrate(database)
            await World(database).set_up()
            sender = FifoSender(database, "shop", to="ledger")
            async with begun(database) as connection:
                for _ in range(self.messages):
                    if database.is_async:
                        await sender.asend(connection, "x")
                    else:
                        sender.send(connection, "x")

    async def _state(self) -> tuple[list[int], int]:
        async with opened(self.url) as database:
            world, sender = World(database), FifoSender(database, "shop", to="ledger")
            # In this order: what is acknowledged by now has taken effect, and is seen.
            left = len(await sender.aunacknowledged())
            return await world.effects(), left

    def check(self, nursery: Nursery, told: dict[str, Any], receivers: int = 1) -> None:
        """Let it come to an end; demand each message's effect in order, once, and all of them."""
        nursery.kill_all()
        for number in range(receivers):
            nursery.start({**told, "seed": -number - 1})
        over = SYSTEM.now() + PATIENCE + 0.1 * self.messages
        while True:
            effects, left = asyncio.run(self._state())
            # What is wrong stays wrong; what is unacknowledged is still to come.
            assert effects == list(range(1, len(effects) + 1)), "not range(...)"
            if not left:
                break
            assert SYSTEM.now() < over, "something is stuck"
            nursery.wait_for_steps(50)
        assert len(effects) == self.messages


@pytest.mark.parametrize(
    ("kills", "where"),
    [
        (12, "postgres"),
        (12, "sqlite"),
        pytest.param(200, "postgres", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(200, "sqlite", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_killed_receivers_deliver_in_order_once(
    kills: int, where: str, nursery: Nursery, postgres: Postgres, tmp_path: Path, seed: int
):
    """Two at once receive over a bad network, and are killed again and again, wherever they are."""
    ledger = Ledger(postgres.url if where == "postgres" else str(tmp_path / "f.db"), 5 * kills)
    told = {"role": "receive_messages", "url": ledger.url, "seed": 0}
    nursery.kill_now_and_then([told, {**told, "seed": 1}], kills, Random(seed))
    assert nursery.killed == kills
    assert set(nursery.struck) >= set(DEADLY)
    ledger.check(nursery, told)


@pytest.mark.parametrize("missing", ["the place", "the lock"])
def test_without_a_safeguard_receivers_repeat(missing: str, nursery: Nursery, postgres: Postgres):
    """The same check notices that each of them is missing."""
    ledger = Ledger(postgres.url, 200)
    told = {"role": "receive_messages", "url": ledger.url, "careless": missing}
    with pytest.raises(AssertionError, match="range"):
        ledger.check(nursery, told, receivers=4)


# What each of the other safeguards is for


@pytest.mark.parametrize("missing", ["", "the version"])
def test_a_rollback_inside_the_block_is_noticed(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, missing: str
):
    """Effects that are rolled back inside the block are lost, were it not for the version."""
    monkeypatch.setattr(_fifo_receiver, "NamedQuery", asking(missing))

    async def main() -> None:
        async with opening() as database:
            world = World(database)
            await world.set_up()

            async def careless() -> None:
                async with begun(database) as connection:
                    await ask(database, connection, "SAVEPOINT before")
                    block = world.receiver.receive(connection, "shop", 2, b"x", 1)
                    async with entered(database, block) as ready:
                        assert [m.sequence for m in ready] == [2]
                        await ask(database, connection, "ROLLBACK TO SAVEPOINT before")

            await world.take(FifoMessage("shop", 1, b"x", 1))
            if missing:
                await careless()
                assert (await world.take(FifoMessage("shop", 2, b"x", 1))).verdict == "duplicate"
                return
            with pytest.raises(RuntimeError, match="rolled back inside the block"):
                await careless()
            await world.take(FifoMessage("shop", 2, b"x", 1))
            assert await world.effects() == [1, 2]

    asyncio.run(main())


def late_ones_have_no_effect(database: Database, seed: int) -> None:
    """Begin a new epoch, and let messages of the one before come late among the new ones."""
    rng = Random(seed)
    receiver = FifoReceiver(database, f"billing {seed}")
    sender = FifoSender(database, "shop", to=receiver.name)
    effects = []

    def carry(messages: list[FifoMessage]) -> None:
        for message in messages:
            with (
                database.transaction() as connection,
                receiver.receive(connection, *message) as ready,
            ):
                effects.extend(one.payload for one in ready)
        sender.acknowledge(ready.ack)

    with database.transaction() as connection:
        old = [sender.send(connection, f"old {n}") for n in range(4)]
    carry(old[:2])
    sender.restart()
    with database.transaction() as connection:
        for n in range(2):
            sender.send(connection, f"new {n}")
    new = sender.unacknowledged()
    late = old * 2
    rng.shuffle(late)
    carry(new[:1] + late + new)
    assert effects == [b"old 0", b"old 1", b"old 2", b"old 3", b"new 0", b"new 1"]


@pytest.mark.parametrize("safe", [True, False])
def test_the_epoch_keeps_late_messages_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """Without it, what was sent before a restart would be taken for what has its number now."""

    def without_epochs(
        position: model.Position, held: Any, window: int, _epoch: int, sequence: int
    ) -> Any:
        return model.judge(position, held, window, position.epoch, sequence)

    if not safe:
        monkeypatch.setattr(_fifo_receiver, "judge", without_epochs)
    source = Sqlite(tmp_path / "epoch.db")
    database = Database(source, name="epoch")
    migrate(database)
    failed = 0
    for seed in range(3):
        try:
            late_ones_have_no_effect(database, seed)
        except AssertionError:
            failed += 1
    assert failed == (0 if safe else 3)
    source.close()


@pytest.mark.parametrize("safe", [True, False])
def test_the_window_bounds_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """Whatever a sender sends, less than a window waits; without the window all of it would."""
    if not safe:
        real = model.judge
        monkeypatch.setattr(
            _fifo_receiver,
            "judge",
            lambda position, held, _window, *message: real(position, held, 2**60, *message),
        )
    source = Sqlite(tmp_path / "window.db")
    database = Database(source, name="window")
    migrate(database)
    receiver = FifoReceiver(database, "billing", window=5)
    for sequence in range(2, 20):
        with database.transaction() as raw, receiver.receive(raw, "shop", sequence, b"x", 1):
            pass
    (gap,) = receiver.gaps()
    assert (gap.buffered <= 4) is safe
    source.close()


def test_gaps_are_not_hidden_by_what_is_ready(postgres: Postgres, tmp_path: Path):
    """Senders whose messages only wait to be drained are no gaps, and take no place of any."""
    opening = opening_by("asyncpg", postgres, tmp_path)

    async def main() -> None:
        async with opening() as database:
            world = World(database, batch=1)
            await world.set_up()
            database._now = "1"
            for number in (3, 2, 1):
                await world.take(FifoMessage("ready", number, b"x", 1))
            database._now = "2"
            await world.take(FifoMessage("waiting", 2, b"x", 1))
            assert [gap.sender for gap in await world.receiver.agaps(limit=1)] == ["waiting"]

    asyncio.run(main())
