"""Two at once, in an explicit order: one has begun, and is not over while the other comes.

The first may be long dead: its machine is gone, and the server has not noticed. So nobody waits for
it who need not.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from seawall.clock import SYSTEM
from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database.connections import NamedQuery
from seawall.durable.deferred import DeferredCalls
from seawall.durable.outbox.operations import (
    AggregateOutcome,
    claim_aggregates,
    renew_leases,
    store_outcomes,
)
from seawall.durable.outbox.outbox import Outbox
from seawall.runtime.driver import Steps
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox.support import Seen, dispatcher, numbered
from tests.durable.postgres import Postgres

T = TypeVar("T")


@pytest.fixture
def server(postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a database in which several transactions write at once."""
    return opening_by("asyncpg", postgres, tmp_path)


async def soon(work: Awaitable[T]) -> T:
    """Return what `work` does, which is not to wait for anybody."""
    async with asyncio.timeout(5):
        return await work


def asked(which: str, **arguments: Any) -> Steps[list[tuple[Any, ...]]]:
    """Ask one statement."""
    return (yield NamedQuery(which, arguments))


# The outbox


@pytest.mark.parametrize("dies", ["renewing", "telling", "keeping"])
def test_who_dies_in_its_transaction_stalls_its_own_aggregates_only(server: Opening, dies: str):
    """Others deliver the rest, while its claims are locked and their lease is over."""

    async def main() -> None:
        async with server() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "its own", 2)
            database._now = "1000"
            where = {"after": 0, "far": False, "batch": 10, "largest": 1000}
            claim = {"owner": "dead", "lease": 1000}
            lanes = (
                await database.arun(
                    lambda: claim_aggregates("postgres", outbox.name, **where, **claim)
                )
            ).aggregates
            held = {"lanes": str(lanes[0].lane), "epochs": str(lanes[0].epoch), "uptos": "1"}
            failed = [AggregateOutcome(lane, 0, "again", 1) for lane in lanes]
            steps: dict[str, Steps[Any]] = {
                "renewing": renew_leases("postgres", "dead", lanes, 1000),
                "telling": store_outcomes("postgres", outbox.name, "dead", failed, keep=False),
                "keeping": asked("outbox.keep", outbox=outbox.name, owner="dead", **held),
            }
            async with database.atransaction() as raw:
                await database.connection(raw).arun(steps[dies])
                await numbered(outbox, "another", 2)
                database._now = "10000"
                assert await soon(dispatcher(outbox, seen.each).drain()) == 2
                assert seen.order == [("another", 1), ("another", 2)]
            database._now = "20000"
            await soon(dispatcher(outbox, seen.each).drain())
            assert seen.of("its own") == [1, 2]

    asyncio.run(main())


def test_a_file_is_locked_from_the_look_at_ones_claims_on(tmp_path: Path):
    """Claims cannot be taken over between the check and the write, with any driver."""
    source = Sqlite(tmp_path / "outbox.db")
    database = Database(source, name="late")
    migrate(database)
    outbox = Outbox(database)
    with database.transaction() as connection:
        outbox.add(connection, "order", "7", "placed", {})
    where = {"after": 0, "far": False, "batch": 10, "largest": 1000}
    claimed = partial(claim_aggregates, "sqlite", outbox.name, **where, owner="me", lease=1)
    lanes = database.run(claimed).aggregates
    late = sqlite3.connect(source.path)  # as its default is, and as SQLAlchemy has it
    try:
        settled = [AggregateOutcome(lanes[0], 1, "done")]
        telling = store_outcomes("sqlite", outbox.name, "me", settled, keep=False)
        looked = database.connection(late).run(first_of(telling))
        assert looked == [(lanes[0].lane,)]
        assert late.in_transaction
    finally:
        late.close()
        source.close()


def first_of(steps: Steps[Any]) -> Steps[Any]:
    """Ask only what is asked first."""
    return (yield next(steps))


async def waited_for(database: Database, lock: int) -> None:
    """Wait until another transaction waits for that lock."""
    over = SYSTEM.now() + 10
    while SYSTEM.now() < over:
        async with database.atransaction() as raw:
            if await raw.fetchval(
                "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = $1 AND NOT granted",
                lock,
            ):
                return
    raise AssertionError("nobody waits")


def test_what_is_added_while_counters_are_looked_at_keeps_its_counter(server: Opening):
    """A transaction that was open for long commits in between: its aggregate goes on in order."""

    async def main() -> None:
        async with server() as database:
            outbox, seen = Outbox(database), Seen()
            database._now = "1000"
            await numbered(outbox, "long", 1)
            await dispatcher(outbox, seen.each).drain()
            async with database.atransaction() as gate:
                await gate.execute("SELECT pg_advisory_xact_lock(4711)")
                async with database.atransaction() as adding:
                    await outbox.aadd(adding, "order", "long", "moved", 1)
                    # Much later; whoever looks begins now, and sees nothing of what is added.
                    database._now = "(SELECT 1000000000000 FROM pg_advisory_xact_lock_shared(4711))"
                    forgetting = asyncio.ensure_future(outbox.aforget(idle=1.0))
                    await waited_for(database, 4711)
                    database._now = "1000000000000"
            assert await soon(forgetting) == 0
            await numbered(outbox, "long", 1)
            await dispatcher(outbox, seen.each).drain()
            assert seen.of("long") == [1, 2, 3]
            assert await outbox.aforget(idle=0.001) == 0

    asyncio.run(main())


# Calls for later


def test_what_is_being_revived_is_not_cleaned_away(server: Opening):
    """Who cleans up neither waits for it, nor takes what is dead no more."""

    async def main() -> None:
        async with server() as database:
            later = DeferredCalls(database, "mail", ttl=1.0, delay=0.0, keep_dead=0.0)
            database._now = "1000"
            stored = await later.astore(1)
            claim = {"queue": "mail", "owner": "me", "lease": 1, "most": 1}
            ((_, _, epoch, *_),) = await database.arun(
                lambda: asked("deferred_calls.claim", **claim)
            )
            dead = {"id": stored.id, "owner": "me", "epoch": epoch, "error": "no route"}
            await database.arun(lambda: asked("deferred_calls.dead", **dead))
            database._now = str(10**9)
            async with database.atransaction() as raw:
                revive = asked("deferred_calls.revive", queue="mail", id=stored.id, ttl=10**9)
                assert await database.connection(raw).arun(revive)
                assert await soon(later.acleanup()) == 0
            assert (await later.acounts())["waiting"] == 1

    asyncio.run(main())
