from __future__ import annotations

import asyncio
import sqlite3
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database.connections import TextQuery
from seawall.durable.outbox.events import FromRow, NewEvent
from seawall.durable.outbox.outbox import Outbox
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox.support import Seen, add, begun, committed, dispatcher, numbered, timed
from tests.durable.postgres import Postgres


def test_committed_is_delivered_once_and_in_order(opening: Opening):
    """Events come in the order of their aggregate, with their content, and then are gone."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            ids = await committed(
                outbox,
                ("order", "1", "made", {"total": 3}),
                ("order", "2", "made", "text"),
                ("order", "1", "paid", b"\x00\xff"),
            )
            assert (await outbox.asurvey())["pending"] == 3
            worker = dispatcher(outbox, seen.each)
            assert await worker.run_once() == 3
            assert await worker.run_once() == 0
            assert seen.of("1") == [1, 2]
            assert seen.of("2") == [1]
            first = next(event for event in seen.events if event.id == ids[0])
            assert first.json() == {"total": 3}
            assert (first.aggregate, first.type, first.headers) == ("order", "made", {})
            assert {event.payload for event in seen.events} >= {b"text", b"\x00\xff"}
            assert {event.id for event in seen.events} == set(ids)
            assert await outbox.asurvey() == {
                "pending": 0,
                "oldest_age": 0.0,
                "dead": 0,
                "blocked": 0,
            }

    asyncio.run(main())


def test_every_way_of_failing_is_written_down(opening: Opening):
    """By each driver: tried again, blocked, put aside, freed late, kept, and gone on."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            seen = Seen()
            seen.poison = {"2"}
            for whose in "12":
                await numbered(outbox, whose, 2)
            worker = dispatcher(outbox, seen.batch, batched=True, attempts=2, keep=10.0)
            assert await worker.drain() == 2
            await time.pass_by(1.5)
            assert await worker.drain() == 0
            assert [told[:3] for told in await outbox.ablocked()] == [("order", "2", 2)]
            assert await outbox.aunblock("order", "2")
            skipping = dispatcher(outbox, seen.each, attempts=1, poison="skip", batch=1)
            assert await skipping.drain() == 0
            dead = sorted(await outbox.adead(), key=lambda told: told.event.sequence)
            assert [told.event.sequence for told in dead] == [1, 2]
            seen.poison.clear()
            assert await outbox.aretry(dead[1].event.id)
            assert await worker.drain() == 1
            assert seen.order == [("1", 1), ("1", 2), ("2", 3)]
            await time.pass_by(20.0)
            assert await outbox.acleanup(keep=10.0, keep_dead=10.0) == 4

    asyncio.run(main())


def test_rolled_back_is_never_delivered(opening: Opening):
    """What the user's transaction undid leaves no event, and no gap in the numbers."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 1)
            with pytest.raises(RuntimeError):  # noqa: PT012 - what a user does
                async with begun(database) as connection:
                    await add(outbox, connection, "order", "1", "made", 1)
                    raise RuntimeError
            await numbered(outbox, "1", 1)
            await dispatcher(outbox, seen.each).drain()
            assert seen.order == [("1", 1), ("1", 2)]

    asyncio.run(main())


def test_several_at_once_have_their_places(opening: Opening):
    """Events added together, of one aggregate and of others, are numbered as they were given."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            events = [NewEvent("order", str(n % 2), "moved", n, {"n": str(n)}) for n in range(5)]
            async with begun(database) as connection:
                ids = await outbox.aadd_all(connection, events)
            await numbered(outbox, "0", 1)
            await dispatcher(outbox, seen.each).drain()
            by_id = {event.id: event for event in seen.events}
            assert [by_id[one].json() for one in ids] == [0, 1, 2, 3, 4]
            assert [by_id[one].sequence for one in ids] == [1, 1, 2, 2, 3]
            assert by_id[ids[3]].headers == {"n": "3"}
            assert seen.of("0") == [1, 2, 3, 4]

    asyncio.run(main())


def test_two_outboxes_of_a_database_know_nothing_of_each_other(opening: Opening):
    """Each name has its own events, numbers and survey."""

    async def main() -> None:
        async with opening() as database:
            one, other, seen = Outbox(database, "one"), Outbox(database, "other"), Seen()
            await numbered(one, "1", 2)
            await numbered(other, "1", 1)
            assert await dispatcher(other, seen.each).drain() == 1
            assert seen.order == [("1", 1)]
            assert (await one.asurvey())["pending"] == 2

    asyncio.run(main())


def test_what_is_kept_is_cleaned_in_its_time(opening: Opening):
    """Delivered events stay for as long as asked, then they go; unasked they go at once."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            await numbered(outbox, "1", 3)
            await dispatcher(outbox, Seen().each, keep=60.0).drain()
            assert await outbox.acleanup(keep=60.0) == 0
            await time.pass_by(61.0)
            assert await outbox.acleanup(keep=60.0) == 3

    asyncio.run(main())


def test_counters_of_idle_aggregates_are_forgotten(opening: Opening):
    """Only where nothing is pending and nothing was added for long; ids do not repeat."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            seen = Seen()
            await numbered(outbox, "1", 1)
            await dispatcher(outbox, seen.each).drain()
            await numbered(outbox, "2", 1)
            await time.pass_by(100.0)
            await numbered(outbox, "3", 1)
            assert await outbox.aforget(idle=50.0) == 1
            await numbered(outbox, "1", 1)
            await dispatcher(outbox, seen.each).drain()
            assert seen.of("1") == [1, 1]
            assert len({event.id for event in seen.events}) == 4

    asyncio.run(main())


def test_wrong_arguments_are_refused_at_once(opening: Opening):
    """What cannot be stored raises where it is written, and says what to write."""

    async def main() -> None:
        async with opening() as database:
            outbox = Outbox(database, max_payload=10)
            async with begun(database) as connection:
                for wrong in (
                    ("", "1", "made", 1),
                    ("order", "x" * 256, "made", 1),
                    ("order", "1", "a\0b", 1),
                    ("order", "1", "made", b"x" * 11),
                    ("order", "1", "made", object()),
                    ("order", "1", "made", float("nan")),
                    ("order", None, "made", 1),
                ):
                    with pytest.raises((TypeError, ValueError)):
                        await add(outbox, connection, *wrong)
                with pytest.raises(TypeError):
                    await add(outbox, connection, "order", "1", "made", 1, headers={"a": 1})
            assert (await outbox.asurvey())["pending"] == 0

    asyncio.run(main())


def test_business_values_are_delivered_as_text(opening: Opening):
    """A UUID names an aggregate; Decimal, dates and UUIDs of a payload come as standard text."""
    whose = UUID("12345678-1234-5678-1234-567812345678")
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    payload = {"total": Decimal("12.30"), "at": at, "due": at.date(), "order": whose}

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            async with begun(database) as connection:
                await add(outbox, connection, "order", whose, "made", payload)
                await outbox.aadd_all(connection, [NewEvent("order", whose, "paid", payload)])
            await dispatcher(outbox, seen.each).drain()
            assert seen.order == [(str(whose), 1), (str(whose), 2)]
            for event in seen.events:
                assert event.json() == {
                    "total": "12.30",
                    "at": "2026-01-02T03:04:05+00:00",
                    "due": "2026-01-02",
                    "order": str(whose),
                }
            assert not await outbox.aunblock("order", whose)

    asyncio.run(main())


def test_what_somebody_else_stored_does_no_harm(opening: Opening):
    """Headers that are no JSON object of texts are left out; the event is delivered."""

    async def main() -> None:
        async with opening() as database:
            outbox, seen = Outbox(database), Seen()
            await numbered(outbox, "1", 4)
            for n, stored in enumerate(["[" * 5000, "{", "[1]", '{"a": 1, "b": "c"}'], start=1):
                given = {"n": n, "stored": stored}

                def spoil(given: dict[str, Any] = given) -> Any:
                    yield TextQuery(
                        "UPDATE {outbox} SET headers = :stored WHERE sequence = :n", given
                    )

                await database.arun(spoil)
            await dispatcher(outbox, seen.each).drain()
            assert [event.headers for event in seen.events] == [{}, {}, {}, {"b": "c"}]

    asyncio.run(main())


def test_a_plain_program_adds_and_looks(tmp_path: Path):
    """Without an event loop the same is done by the names without an a."""
    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name="plain outbox")
    try:
        migrate(database)
        outbox = Outbox(database)
        connection = source.connect()
        connection.execute("BEGIN")
        assert isinstance(outbox.add(connection, "order", 1, "made", None), str)
        connection.execute("COMMIT")
        connection.close()
        outbox.announce()
        assert outbox.survey()["pending"] == 1
        assert outbox.dead() == []
        assert outbox.blocked() == []
        assert not outbox.retry("unknown")
        assert not outbox.unblock("order", "1")
        assert outbox.cleanup() == 0
        assert outbox.forget(idle=1.0) == 0
        assert isinstance(connection, sqlite3.Connection)
        assert "Outbox 'outbox'" in repr(outbox)
    finally:
        database.close()
        source.close()


def test_events_of_a_single_statement_use_the_row_it_writes(postgres: Postgres, tmp_path: Path):
    """Business row and events are one statement; without a row there is no event."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            outbox, seen = Outbox(database), Seen()
            table = "CREATE TABLE {test_orders} (id bigserial, total int)"
            await database.arun(lambda: iter_ask(table))
            events = [
                NewEvent("order", FromRow("id"), "made", FromRow("total")),
                NewEvent("order", FromRow("id"), "priced", {"a": 1}),
                NewEvent("customer", "7", "ordered", b"x"),
            ]
            told = outbox.rows_cte(events, source="business")
            text, arguments = told
            for where in ("true", "false"):
                made = (
                    "WITH business AS (INSERT INTO {test_orders} (total)"  # noqa: S608 - a test's
                    f" SELECT 5 WHERE {where} RETURNING id, total), {text} SELECT id FROM business"
                )
                await database.arun(lambda made=made: iter_ask(made, arguments))
            await dispatcher(outbox, seen.each).drain()
            seen.events.sort(key=lambda event: told.ids.index(event.id))
            assert [(e.aggregate, e.aggregate_id, e.sequence, e.payload) for e in seen.events] == [
                ("order", "1", 1, b"5"),
                ("order", "1", 2, b'{"a":1}'),
                ("customer", "7", 1, b"x"),
            ]
            with pytest.raises(ValueError, match="source"):
                outbox.rows_cte(events)

    asyncio.run(main())


def iter_ask(text: str, arguments: dict[str, Any] | None = None) -> Any:
    """Ask one thing."""
    return (yield TextQuery(text, arguments or {}))
