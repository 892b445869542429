"""What children do that receive messages: badly carried, in order, each once."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from seawall.durable import fifo as _fifo_receiver
from seawall.durable.database.connections import NamedQuery, TextQuery
from seawall.durable.database.database import Database
from seawall.durable.fifo import FifoMessage, FifoReceiver, FifoSender
from seawall.runtime.driver import sleep_async
from tests.durable.crash.shop import Step, opened
from tests.durable.fifo.support import ask, begun, entered

EFFECT = "INSERT INTO {effects} (sequence, payload) VALUES (:sequence, :payload)"
UNLOCKED = """SELECT epoch, expected, buffered, {now}, version FROM {fifo_positions}
WHERE receiver = :receiver AND sender = :sender"""
MOVED = """UPDATE {fifo_positions}
SET epoch = :epoch, expected = :expected, buffered = :buffered
WHERE receiver = :receiver AND sender = :sender RETURNING 1"""
WITHOUT: dict[str, dict[str, str]] = {
    "": {},
    "the place": {"fifo.move": "SELECT 1"},
    "the buffer": {"fifo.buffer": "SELECT 1"},
    "the version": {"fifo.move": MOVED},
    "the lock": {"fifo.place": UNLOCKED, "fifo.move": MOVED},
}
"""What is asked instead, where a safeguard is taken away."""


def asking(missing: str) -> Callable[[str, dict[str, Any]], Any]:
    """Return what stands for `NamedQuery` in a receiver that has no such safeguard."""

    def ask_without(which: str, arguments: dict[str, Any]) -> Any:
        instead = WITHOUT[missing].get(which)
        return NamedQuery(which, arguments) if instead is None else TextQuery(instead, arguments)

    return ask_without


async def receive_messages(*, url: str, seed: int, step: Step, careless: str = "") -> None:
    """Carry messages over, losing, repeating and reordering them and their acknowledgements."""
    _fifo_receiver.NamedQuery = asking(careless)  # type: ignore[attr-defined]
    rng = Random(seed)
    async with opened(url) as database:
        sender = FifoSender(database, "shop", to="ledger")
        receiver = FifoReceiver(database, "ledger", window=8, batch=3)
        under_way: list[FifoMessage] = []
        while True:
            try:
                if not under_way or rng.random() < 0.2:
                    under_way += await sender.aunacknowledged(12)
                    del under_way[:-40]  # what is still under way from long ago is lost
                if not under_way:
                    await sleep_async(0.01)
                    continue
                message = under_way.pop(rng.randrange(len(under_way)))
                if rng.random() < 0.3:
                    under_way.append(message)
                if rng.random() < 0.2:
                    continue
                ready = await take(database, receiver, message, step)
                while ready.more:
                    ready = await take(database, receiver, None, step)
                if rng.random() < 0.5:
                    await sender.aacknowledge(ready.ack)
            except Exception:  # noqa: BLE001 - a transport that tries again, whatever it was
                step("failed")


async def take(
    database: Database, receiver: FifoReceiver, message: FifoMessage | None, step: Step
) -> Any:
    """Receive a message, or what waits; each effect is a row of the same transaction."""
    async with begun(database) as connection:
        block = (
            receiver.drain(connection, "shop")
            if message is None
            else receiver.receive(connection, *message)
        )
        async with entered(database, block) as ready:
            for one in ready:
                step("inside")
                what = {"sequence": one.sequence, "payload": one.payload.decode()}
                await ask(database, connection, EFFECT, **what)
        step("committing")
    step("committed")
    return ready
