"""What it costs that an effect happens once: writes a second with key and event, and without.

Each case of a comparison has its turns between those of the others, on the same server and tables,
and is compared within the round.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from seawall.durable.database.database import Database
from seawall.durable.database.migrations import amigrate, migrate
from seawall.durable.database.sqlite import Sqlite
from seawall.durable.idempotency import single_statement as _idempotency_single
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.idempotency.records import key_request
from seawall.durable.outbox.dispatcher import Dispatcher
from seawall.durable.outbox.events import NewEvent
from seawall.durable.outbox.outbox import Outbox
from tests.durable.postgres import Postgres

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

BARE, SINGLE, ONCE = "bare", "single statement", "inside the transaction"
ALONE = "its text alone"
"""The single statement as a driver is given it: what the database takes for it, and nobody else."""
DRAIN, GROUPED, EACH = "drain", "committed together", "one commit each"
ON_ONE, ON_EIGHT = "durable, write on one connection", "durable, write on eight connections"
TRANSACTION = "durable, transaction of two statements on one connection"
OUT, FILE = "durable, events out in batches of 1000", "durable, SQLite with 64 callers"
INSERT = "INSERT INTO orders (customer, total) VALUES ({one}, {two}) RETURNING id"
STOCK = "UPDATE stock SET n = n - 1 WHERE id = $1"


class Plan(NamedTuple):
    """How much is measured."""

    seed: int = 1
    rounds: int = 15
    seconds: float = 0.25
    events: int = 40_000


Rates = dict[str, dict[str, list[float]]]
"""Operations a second by comparison, case and round."""


@asynccontextmanager
async def opened(server: Postgres) -> AsyncIterator[tuple[Any, Database]]:
    """Open a pool, with our tables and those of a shop."""
    import asyncpg

    async with asyncpg.create_pool(server.url, min_size=11, max_size=11) as pool:
        database = Database(pool, schema="bench", name="bench")
        await amigrate(database)
        await pool.execute(
            "CREATE TABLE orders (id bigserial PRIMARY KEY, customer text, total int)"
        )
        await pool.execute("CREATE TABLE stock (id int PRIMARY KEY, n int)")
        await pool.execute("INSERT INTO stock SELECT g, 1000000 FROM generate_series(1, 64) g")
        yield pool, database
        database.close()


def _keys() -> Iterator[str]:
    """Give keys as clients send them: to make them is their business, and costs next to nothing."""
    bits = Random().getrandbits
    while True:
        yield f"{bits(128):032x}"


def as_sent(idempotency: Idempotency, outbox: Outbox, sql: str) -> tuple[Any, dict[str, Any]]:
    """Return the text of a single statement with an event, and its arguments."""
    wanted = key_request("shop", "POST /orders", "k", b"7", unscoped=False)
    event = NewEvent("order", "k", "placed", {"total": 7})
    arguments = {"customer": "ann", "total": 7}
    statement_of = _idempotency_single._statement_of  # noqa: SLF001 - what is measured is what it sends
    asked = statement_of(idempotency, sql, arguments, wanted, outbox, [event])
    names = idempotency.database.names
    text = _idempotency_single.text_of("dollar", names, None, asked.sql, asked.events, asked.terms)
    return text, asked.arguments


def writers(database: Database) -> dict[str, dict[str, Callable[[Any], Awaitable[None]]]]:
    """Return what is compared: each writes one order on the connection that it is given."""
    idempotency, outbox = Idempotency(database), Outbox(database)
    bare_sql = INSERT.format(one="$1", two="$2")
    own_sql = INSERT.format(one=":customer", two=":total")
    rng = Random(1)
    keys = _keys()
    ready = as_sent(idempotency, outbox, own_sql)

    async def bare(connection: Any) -> None:
        await connection.fetchval(bare_sql, "ann", 7)

    async def write_by(own: Idempotency, connection: Any) -> None:
        key = next(keys)
        event = NewEvent("order", key, "placed", {"total": 7})
        await own.asingle(
            own_sql,
            {"customer": "ann", "total": 7},
            scope="shop", operation="POST /orders", key=key, fingerprint=b"7",
            outbox=outbox, events=[event], conn=connection,
        )  # fmt: skip

    async def single(connection: Any) -> None:
        await write_by(idempotency, connection)

    async def alone(connection: Any) -> None:
        key = next(keys)
        text, arguments = ready
        told = {"seawall_key_hash": key.encode(), "outbox_of_0": key, "outbox_id_0": key}
        await connection.fetch(text.sql, *text.positional({**arguments, **told}))

    async def transaction(connection: Any) -> None:
        async with connection.transaction():
            await connection.fetchval(bare_sql, "ann", 7)
            await connection.execute(STOCK, rng.randint(1, 64))

    async def once(connection: Any) -> None:
        key = next(keys)
        event = NewEvent("order", key, "placed", {"total": 7})
        asked = {"scope": "shop", "operation": "POST /orders", "key": key, "fingerprint": b"7"}
        async with connection.transaction(), idempotency.once(connection, **asked) as first:
            number = await connection.fetchval(bare_sql, "ann", 7)
            await connection.execute(STOCK, rng.randint(1, 64))
            first.answer({"id": number}, outbox=outbox, events=[event])

    return {
        "write": {BARE: bare, SINGLE: single, ALONE: alone},
        "many": {BARE: bare, SINGLE: single, ALONE: alone},
        "transaction": {BARE: transaction, ONCE: once},
    }


async def rate(
    pool: Any, write: Callable[[Any], Awaitable[None]], width: int, seconds: float
) -> float:
    """Return how many writes a second `width` connections make."""
    over = time.perf_counter() + seconds
    began, done = time.perf_counter(), 0

    async def work() -> None:
        nonlocal done
        async with pool.acquire() as connection:
            while time.perf_counter() < over:
                await write(connection)
                done += 1

    await asyncio.gather(*(work() for _ in range(width)))
    return done / (time.perf_counter() - began)


async def compare(pool: Any, database: Database, plan: Plan) -> Rates:
    """Return the rates of all writers, on one connection and on eight."""
    rng, rates = Random(plan.seed), {}
    made = writers(database)
    for name, which, width in (
        (ON_ONE, "write", 1),
        (ON_EIGHT, "many", 8),
        (TRANSACTION, "transaction", 1),
    ):
        cases = made[which]
        rates[name] = {case: [] for case in cases}
        for number in range(plan.rounds + 1):
            for case in rng.sample(list(cases), len(cases)):
                found = await rate(pool, cases[case], width, plan.seconds)
                if number:
                    rates[name][case].append(found)
    return rates


async def drain(pool: Any, database: Database, plan: Plan) -> list[float]:
    """Return how many events a second one dispatcher hands out, a thousand at a time."""
    outbox = Outbox(database, name="drained")
    found = []

    def take(_events: list[Any]) -> None:
        return None

    for number in range(4):
        for start in range(0, plan.events, 1000):
            events = [
                NewEvent("thing", str((start + n) % 5000), "changed", {"n": n}) for n in range(1000)
            ]
            async with pool.acquire() as connection, connection.transaction():
                await outbox.aadd_all(connection, events)
        dispatcher = Dispatcher(outbox, take, batch=1000, batched=True)
        began = time.perf_counter()
        delivered = await dispatcher.drain()
        if number:
            found.append(delivered / (time.perf_counter() - began))
    return found


def group_commit(plan: Plan) -> dict[str, list[float]]:
    """Return the rates of 64 callers on a file: committed together, and each for itself."""
    found: dict[str, list[float]] = {EACH: [], GROUPED: []}
    with tempfile.TemporaryDirectory() as folder:
        file = Sqlite(Path(folder) / "bench.db")
        database = Database(file, name="bench file")
        migrate(database)
        file.run(
            lambda c: c.execute("CREATE TABLE orders (id integer PRIMARY KEY, total int)") and None
        )
        own = file.connect()

        def insert(connection: Any) -> None:
            connection.execute("INSERT INTO orders (total) VALUES (7)")

        def each(seconds: float) -> float:
            over, began, done = time.perf_counter() + seconds, time.perf_counter(), 0
            while time.perf_counter() < over:
                own.execute("BEGIN IMMEDIATE")
                insert(own)
                own.execute("COMMIT")
                done += 1
            return done / (time.perf_counter() - began)

        async def together(seconds: float) -> float:
            over, began, done = time.perf_counter() + seconds, time.perf_counter(), 0

            async def work() -> None:
                nonlocal done
                while time.perf_counter() < over:
                    await file.arun(insert)
                    done += 1

            await asyncio.gather(*(work() for _ in range(64)))
            return done / (time.perf_counter() - began)

        for number in range(plan.rounds + 1):
            one, many = each(plan.seconds), asyncio.run(together(plan.seconds))
            if number:
                found[EACH].append(one)
                found[GROUPED].append(many)
        own.close()
        file.close()
        database.close()
    return found


def measure(plan: Plan, progress: Callable[[str], None]) -> Rates:
    """Measure all of it, on a server of its own."""

    async def on_postgres() -> Rates:
        async with opened(server) as (pool, database):
            progress("writes")
            rates = await compare(pool, database, plan)
            progress(DRAIN)
            rates[OUT] = {DRAIN: await drain(pool, database, plan)}
            return rates

    server = Postgres(fsync="on")  # as it is in production: a commit waits for the disk
    try:
        rates = asyncio.run(on_postgres())
    finally:
        server.close()
    progress("SQLite")
    rates[FILE] = group_commit(plan)
    return rates
