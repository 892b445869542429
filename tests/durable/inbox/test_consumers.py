"""Consumers of brokers through an inbox: FastStream on a real NATS server.

That of aiokafka is a snippet of docs/durable/inbox.md, which is run with records of aiokafka.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from faststream import AckPolicy
from faststream.nats import JStream, NatsBroker, NatsMessage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from seawall.durable import Database, Inbox, JetStream, OutboxEvent, Sqlite, amigrate
from tests.support_nats import NatsServer

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Return a server of this file's own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill()


@asynccontextmanager
async def billing(folder: Path) -> AsyncIterator[tuple[AsyncEngine, Inbox]]:
    """Give the database of a consumer, with a table for its effects, and its inbox."""
    source = Sqlite(folder / "billing.db")
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/billing.db")
    database = Database(source, name=f"billing {folder.name}")
    try:
        await amigrate(database)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE invoices (order_id integer)"))
        yield engine, Inbox(database)
    finally:
        await engine.dispose()
        database.close()
        source.close()


async def invoices(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT order_id FROM invoices ORDER BY order_id"))
        return [row[0] for row in rows]


def event(number: int) -> OutboxEvent:
    return OutboxEvent(
        f"event-{number}", "order", str(number), 1, "made", b'{"order": %d}' % number, {}, 1.0
    )


@pytest.mark.parametrize("through_inbox", [True, False], ids=["inbox", "without"])
def test_a_redelivered_message_has_one_effect(
    nats_server: NatsServer,
    tmp_path: Path,
    through_inbox: bool,  # noqa: FBT001 - a parameter of the test
):
    """A consumer that dies between commit and acknowledgement is given the message again.

    Without the inbox each delivery has its effect: the test can fail.
    """
    name = f"orders{through_inbox:d}"
    wanted = 5
    deliveries: Counter[str] = Counter()

    async def main() -> list[int]:
        done = asyncio.Event()
        broker = NatsBroker(nats_server.url, logger=None)
        async with billing(tmp_path) as (engine, inbox):

            @broker.subscriber(
                f"{name}.>",
                stream=JStream(name, subjects=[f"{name}.>"]),
                durable="billing",
                pull_sub=True,
                ack_policy=AckPolicy.NACK_ON_ERROR,
            )
            async def on_order(order: dict[str, int], message: NatsMessage) -> None:
                message_id = message.headers["Nats-Msg-Id"]
                async with (
                    engine.begin() as connection,
                    inbox.once(connection, "billing", message_id) as first,
                ):
                    if first or not through_inbox:
                        row = text("INSERT INTO invoices VALUES (:order)")
                        await connection.execute(row, order)
                deliveries[message_id] += 1
                if deliveries[message_id] == 1:
                    raise ConnectionError("committed, and not acknowledged")
                if len(deliveries) == wanted and min(deliveries.values()) > 1:
                    done.set()

            client = await nats.connect(nats_server.url)
            try:
                async with broker:
                    await broker.start()
                    sink = JetStream(client.jetstream(timeout=20.0), f"{name}.made")
                    for number in range(wanted):
                        await sink(event(number))
                    async with asyncio.timeout(60):
                        await done.wait()
            finally:
                await client.close()
            return await invoices(engine)

    found = asyncio.run(main())
    if through_inbox:
        assert found == list(range(wanted))
    else:
        assert len(found) >= 2 * wanted
    assert all(count >= 2 for count in deliveries.values())
