"""Concurrent commits with gaps: no event is skipped, aggregates keep their order."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall.durable.database.driver_errors import is_conflict
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.outbox.outbox import Outbox
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox.support import Seen, a_moment, add, begun, dispatcher, numbered, without
from tests.durable.postgres import Postgres


class Undone(Exception):
    """A transaction that changed its mind."""


@pytest.fixture(params=["asyncpg", "psycopg"])
def server(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a database in which several transactions write at once."""
    return opening_by(request.param, postgres, tmp_path)


async def history(opening: Opening, seed: int) -> None:  # noqa: C901 - one history, whole
    """Write and deliver at the same time; demand that all of it came, in order."""
    rng = Random(seed)
    async with opening() as database:
        outbox = Outbox(database)
        wanted: set[str] = set()
        came: dict[str, list[OutboxEvent]] = defaultdict(list)
        writing = True

        async def write(writer: int) -> None:
            for turn in range(6):
                chosen = sorted(rng.sample(range(5), rng.randint(1, 3)))
                ids = []
                try:
                    async with begun(database) as connection:
                        for aggregate in chosen:
                            payload = [writer, turn]
                            ids.append(
                                await add(outbox, connection, "order", str(aggregate), "m", payload)
                            )
                            for _ in range(rng.randint(0, 6)):
                                await a_moment()
                        if rng.random() < 0.3:
                            raise Undone  # noqa: TRY301 - as a user would
                except Undone:
                    continue
                except Exception as error:
                    if not is_conflict(error):
                        raise
                    continue
                wanted.update(ids)

        async def sink(event: OutboxEvent) -> None:
            if rng.random() < 0.5:
                await a_moment()
            came[event.aggregate_id].append(event)

        async def deliver() -> None:
            worker = dispatcher(outbox, sink, batch=rng.randint(1, 8), concurrency=2)
            while writing or (await outbox.asurvey())["pending"]:
                await worker.run_once()
                await a_moment()

        delivering = [asyncio.create_task(deliver()) for _ in range(2)]
        await asyncio.gather(*(write(writer) for writer in range(6)))
        writing = False
        await asyncio.gather(*delivering)
        delivered = [event.id for events in came.values() for event in events]
        assert set(delivered) == wanted
        assert len(delivered) == len(wanted)
        for events in came.values():
            numbers = [event.sequence for event in events]
            assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_skipped_and_every_aggregate_is_in_order(server: Opening, seed: int):
    """Whatever is rolled back or commits late, each committed event comes once and in its place."""
    asyncio.run(history(server, seed))


def test_without_its_safeguard_order_is_lost(
    monkeypatch: pytest.MonkeyPatch, postgres: Postgres, tmp_path: Path
):
    """Ablation: where a claim does not exclude others, events come twice or out of order."""
    held = "WHERE NOT c.blocked AND c.lease_until <= {now} AND c.next_at <= {now}"
    looked = "SELECT NOT c.blocked AND c.lease_until <= times.now AND c.next_at <= times.now"
    opening = opening_by("asyncpg", postgres, tmp_path)

    def broken(seed: int) -> bool:
        try:
            asyncio.run(history(opening, seed))
        except AssertionError:
            return True
        return False

    with (
        without(monkeypatch, "claim", held, ""),
        without(monkeypatch, "claim", looked, "SELECT true"),
        without(monkeypatch, "claim", "FOR UPDATE SKIP LOCKED", ""),
    ):
        assert any(broken(seed) for seed in range(10))


def test_a_slow_transaction_stalls_nobody_else(server: Opening):
    """While one is open, others of other aggregates are delivered, and what its own had before."""

    async def main() -> None:
        async with server() as database:
            outbox, seen = Outbox(database), Seen()
            worker = dispatcher(outbox, seen.each)
            await numbered(outbox, "slow", 1)
            async with begun(database) as slow:
                await add(outbox, slow, "order", "slow", "made", 1)
                await add(outbox, slow, "order", "new", "made", 1)
                await numbered(outbox, "quick", 2)
                async with asyncio.timeout(10):
                    assert await worker.drain() == 3
                await numbered(outbox, "later", 1)
                async with asyncio.timeout(10):
                    assert await worker.drain() == 1
            assert await worker.drain() == 2
            assert seen.of("slow") == [1, 2]
            assert seen.of("new") == [1]

    asyncio.run(main())


def test_a_slow_delivery_makes_no_transaction_wait(server: Opening):
    """While events of an aggregate are at the sink, others are added to it and commit."""

    async def main() -> None:
        async with server() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 1)

            async def sink(event: OutboxEvent) -> None:
                if event.sequence == 1:
                    async with asyncio.timeout(10):
                        await numbered(outbox, "1", 1)
                await seen.each(event)

            assert await dispatcher(outbox, sink).drain() == 2
            assert seen.of("1") == [1, 2]

    asyncio.run(main())


async def two_in_one_aggregate(database: Any) -> list[int]:
    """Add in two transactions, of which the second tries to commit first; return what came."""
    outbox, seen = Outbox(database), Seen()
    worker = dispatcher(outbox, seen.each)
    await numbered(outbox, "1", 1)
    async with begun(database) as first:
        await add(outbox, first, "order", "1", "made", 1)
        second = asyncio.create_task(numbered(outbox, "1", 1))
        await asyncio.wait([second], timeout=0.3)
        await worker.drain()
    await second
    await worker.drain()
    return seen.of("1")


def test_commits_of_one_aggregate_are_in_the_order_of_its_numbers(server: Opening):
    """The second waits for the first, so that no number becomes visible before a lower one."""

    async def main() -> None:
        async with server() as database:
            assert await two_in_one_aggregate(database) == [1, 2, 3]

    asyncio.run(main())


def test_without_the_row_lock_numbers_are_overtaken(
    monkeypatch: pytest.MonkeyPatch, postgres: Postgres, tmp_path: Path
):
    """Ablation: with numbers of a plain sequence, a late commit comes after a higher number."""
    upsert = (
        "DO UPDATE SET last = s.last + 1, touched_at = excluded.touched_at\n"
        "    RETURNING s.lane, s.last, s.touched_at"
    )
    plain = "DO NOTHING\n    RETURNING s.lane"
    place = "FROM place"
    counted = (
        "FROM (SELECT lane, nextval('test_numbers') AS last, 0 AS touched_at"
        " FROM {outbox_sequences} WHERE outbox = :outbox AND aggregate_id = :aggregate_id) AS place"
    )

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            await database.source.execute("CREATE SEQUENCE test_numbers START 2")
            try:
                await numbered(Outbox(database), "1", 1)
                with (
                    without(monkeypatch, "add", upsert, plain),
                    without(monkeypatch, "add", place, counted),
                ):
                    came = await two_in_one_aggregate(database)
                assert came != sorted(came)
            finally:
                await database.source.execute("DROP SEQUENCE test_numbers")

    asyncio.run(main())


async def commit_behind(database: Any) -> int:
    """Deliver an aggregate while an older one is not committed yet; return how many came in all."""
    outbox, seen = Outbox(database), Seen()
    worker = dispatcher(outbox, seen.each)
    async with begun(database) as late:
        await add(outbox, late, "order", "older", "made", 1)
        await numbered(outbox, "newer", 1)
        await worker.drain()
    for _ in range(3):
        await worker.drain()
    return len(seen.events)


def test_a_late_commit_behind_is_found(server: Opening):
    """What becomes visible before the place where the last look ended is delivered all the same."""

    async def main() -> None:
        async with server() as database:
            assert await commit_behind(database) == 2

    asyncio.run(main())


def test_with_a_cursor_a_late_commit_is_skipped(
    monkeypatch: pytest.MonkeyPatch, postgres: Postgres, tmp_path: Path
):
    """Ablation: a dispatcher with a cursor never delivers a late commit."""
    from seawall.durable.outbox import dispatcher as module

    original = module.claim_aggregates
    seen_upto = 0

    def forwards(*args: Any, after: int, **options: Any) -> Any:
        nonlocal seen_upto
        found = yield from original(*args, after=max(after, seen_upto), **options)
        seen_upto = max([seen_upto, *(one.lane for one in found.aggregates)])
        return found

    monkeypatch.setattr(module, "claim_aggregates", forwards)

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            assert await commit_behind(database) == 1

    asyncio.run(main())


def test_were_the_counter_claimed_a_slow_transaction_would_stall_all(
    monkeypatch: pytest.MonkeyPatch, postgres: Postgres, tmp_path: Path
):
    """Ablation: if a claim locked the row that adders lock, one of them would hold up the batch."""
    head = (
        "SELECT o.lane\n"
        "        FROM {outbox} AS o\n"
        "        WHERE o.outbox = :outbox AND o.lane = free.lane AND o.sequence = free.head\n"
        "        FOR UPDATE SKIP LOCKED"
    )
    counter = (
        "SELECT s.lane FROM {outbox_sequences} AS s"
        " WHERE s.outbox = :outbox AND s.lane = free.lane FOR UPDATE"
    )

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "slow", 1)
            await numbered(outbox, "quick", 1)
            with without(monkeypatch, "claim", head, counter):
                async with begun(database) as slow:
                    await add(outbox, slow, "order", "slow", "made", 1)
                    draining = asyncio.create_task(dispatcher(outbox, seen.each).drain())
                    await asyncio.wait([draining], timeout=0.3)
                    assert not seen.events
                assert await draining >= 2

    asyncio.run(main())
