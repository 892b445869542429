"""What the children do: take orders, and handle the events of these."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Self

from seawall.durable.database.database import Database
from seawall.durable.database.sqlite import Sqlite
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.inbox import Inbox
from seawall.durable.outbox.dispatcher import Dispatcher
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import KeyInFlight
from seawall.runtime.driver import sleep_async

SCHEMA = "shop"
TABLES = (
    "CREATE TABLE IF NOT EXISTS orders (id integer {identity}, key text NOT NULL)",
    "CREATE TABLE IF NOT EXISTS handled (key text NOT NULL)",
)
ORDER = 'INSERT INTO "shop".orders (key) VALUES ($1) RETURNING id'
HANDLE = 'INSERT INTO "shop".handled VALUES ($1)'
Step = Callable[[str], None]


class Careless:
    """Stands for a key or an inbox, and remembers nothing."""

    first = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None: ...

    def answer(self, value: object) -> None:
        """Keep nothing."""


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    """Open the database: an address of PostgreSQL's, or a file."""
    if not url.startswith("postgresql:"):
        file = Sqlite(url)
        yield Database(file, name="shop")
        file.close()
        return
    import asyncpg

    while True:
        try:
            pool = await asyncpg.create_pool(url, min_size=1, max_size=3, timeout=5)
            break
        except (OSError, asyncpg.PostgresError):  # also a timeout, on a machine that is busy
            await sleep_async(0.05)  # as a service that is started again; or nobody would be left
    async with pool:
        yield Database(pool, schema=SCHEMA, name="shop")


async def take_orders(
    *,
    url: str,
    keys: list[str],
    acks: str,
    seed: int,
    step: Step,
    careless: str = "",
    lease: float = 1.0,
) -> None:
    """Place each order until it is known to be placed, some of them twice; then any again.

    Half of them go by a function that is done once for its key, whose records have a lease.
    """
    rng = Random(seed)
    async with opened(url) as database:
        idempotency, outbox = Idempotency(database, lease=lease), Outbox(database)
        if careless == "keys":
            idempotency.once = lambda *_args, **_kwargs: Careless()  # type: ignore[method-assign,assignment,return-value]
        place = place_in_file if isinstance(database.source, Sqlite) else place_order

        async def placed(key: str) -> None:
            await place(database, idempotency, outbox, key, step)

        leased = idempotency.idempotent(operation="order", key="key", scope=lambda _: "shop")(
            placed
        )
        ack = os.open(acks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        known = set(Path(acks).read_text().split())  # noqa: ASYNC240 - nothing else is to be done
        todo = [key for key in keys if key not in known]
        while True:
            if not todo:
                await sleep_async(0.01)
            key = rng.choice(todo or keys)
            try:
                await (placed if careless or int(key[-1]) % 2 else leased)(key)
            except Exception as error:  # noqa: BLE001 - a client that retries, whatever it was
                step("failed")
                if isinstance(error, KeyInFlight):
                    await sleep_async(0.02)  # somebody else is at it, or was
                continue
            step("committed")
            if rng.random() < 0.2:
                continue  # the acknowledgement got lost: once more
            os.write(ack, f"{key}\n".encode())
            step("known")
            if key in todo:
                todo.remove(key)


async def place_order(
    database: Database, idempotency: Idempotency, outbox: Outbox, key: str, step: Step
) -> None:
    """Place an order: its row, its event and its key in one transaction."""
    async with database.atransaction() as connection:
        async with idempotency.once(
            connection, scope="shop", operation="POST /orders", key=key, fingerprint=key.encode()
        ) as once:
            if once.first:
                step("inside")
                number = await connection.fetchval(ORDER, key)
                await outbox.aadd(connection, "order", key, "placed", {"key": key})
                once.answer({"id": number})
        step("committing")


async def place_in_file(
    database: Database, idempotency: Idempotency, outbox: Outbox, key: str, step: Step
) -> None:
    """Do the same in a file."""
    with database.transaction() as connection:
        with idempotency.once(
            connection, scope="shop", operation="POST /orders", key=key, fingerprint=key.encode()
        ) as once:
            if once.first:
                step("inside")
                placed = connection.execute("INSERT INTO orders (key) VALUES (?)", (key,))
                outbox.add(connection, "order", key, "placed", {"key": key})
                once.answer({"id": placed.lastrowid})
        step("committing")


async def handle_events(*, url: str, step: Step, careless: str = "") -> None:
    """Hand each event to a consumer that has an inbox, for ever."""
    async with opened(url) as database:
        outbox, inbox = Outbox(database), Inbox(database)
        if careless == "inbox":
            inbox.once = lambda *_args: Careless()  # type: ignore[method-assign,assignment,return-value]

        async def handle(event: OutboxEvent) -> None:
            async with database.atransaction() as connection:
                async with inbox.once(connection, "billing", event.id) as first:
                    if first:
                        step("inside")
                        await connection.execute(HANDLE, event.aggregate_id)
                step("committing")
            step("handled")

        def handle_in_file(event: OutboxEvent) -> None:
            with database.transaction() as connection:
                with inbox.once(connection, "billing", event.id) as first:
                    if first:
                        step("inside")
                        connection.execute("INSERT INTO handled VALUES (?)", (event.aggregate_id,))
                step("committing")
            step("handled")

        in_file = isinstance(database.source, Sqlite)
        sink: Any = handle_in_file if in_file else handle
        dispatcher = Dispatcher(outbox, sink, batch=20, lease=1.0, poll=0.05, backoff=0.05)
        await dispatcher.run()
