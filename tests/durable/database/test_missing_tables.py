"""A forgotten `migrate` is said as that, by whatever needs our tables, and is no outage."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from seawall.clock import VirtualClock
from seawall.durable import Idempotency, IdempotentRequests, Outbox, amigrate
from seawall.durable.database.connections import TextQuery
from seawall.durable.database.driver_errors import TablesMissing, raise_if_missing
from seawall.durable.database.outage_log import OutageLog
from seawall.durable.database.statements import TableNames
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.support import Shop, first, post, user
from tests.durable.outbox.support import Seen, a_moment, committed, dispatcher

ADVICE = r"run migrate\(database\), or `await amigrate\(database\)`, first"


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Return the lines of the log so far, with their levels."""
    caplog.set_level(logging.INFO, "seawall")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def asking(text: str) -> Callable[[], Any]:
    """Return an operation that asks by this text."""

    def steps() -> Any:
        return (yield TextQuery(text, {}))

    return steps


def test_it_is_said_by_every_driver(opening: Opening):
    """Whoever reads or writes our tables is told what to do, and why; afterwards it goes well."""

    async def main() -> None:
        async with opening(migrated=False) as database:
            outbox, keys = Outbox(database), Idempotency(database)
            for _ in range(2):
                with pytest.raises(TablesMissing, match=f"seawall_outbox.*{ADVICE}") as survey:
                    await outbox.asurvey()
                with pytest.raises(TablesMissing, match=f"seawall_idempotency: {ADVICE}"):
                    await keys.areserve("ann", "order", "1", b"")
                assert survey.value.__cause__ is not None
            await amigrate(database)
            assert (await outbox.asurvey())["pending"] == 0

    asyncio.run(main())


def test_a_missing_table_of_the_users_is_the_users(opening: Opening):
    """The driver's own error comes, also where the statement names a table of ours."""

    async def main() -> None:
        async with opening() as database:
            for text in ("SELECT 1 FROM orders", "SELECT 1 FROM {outbox}, seawall_outboxes"):
                with pytest.raises(Exception, match=r"orders|seawall_outboxes") as error:
                    await database.arun(asking(text))
                assert not isinstance(error.value, TablesMissing)

    asyncio.run(main())


class Undefined(Exception):
    """What a driver of PostgreSQL's raises."""

    sqlstate = "42P01"


@pytest.mark.parametrize(
    ("text", "schema", "prefix", "ours"),
    [
        ('relation "seawall_jobs" does not exist', None, "seawall_", True),
        ("Relation »seawall_jobs« existiert nicht", None, "seawall_", True),
        ('relation "shop.seawall_jobs" does not exist', "shop", "seawall_", True),
        ('relation "shop.seawall_jobs" does not exist', None, "seawall_", False),
        ('relation "shop.seawall_jobs" does not exist', "other", "seawall_", False),
        ('relation "seawall_jobs" does not exist', "shop", "seawall_", False),
        ('relation "jobs" does not exist', None, "", True),
        ('relation "my_jobs" does not exist', None, "", False),
        ('relation "jobs_of_mine" does not exist', None, "", False),
    ],
)
def test_a_name_tells_whose_it_is(text: str, schema: str | None, prefix: str, ours: bool):  # noqa: FBT001 - a parameter of the test
    """Schema, prefix and the whole name have to be ours, in whatever language it is said."""
    with pytest.raises(TablesMissing) if ours else nullcontext():
        raise_if_missing(Undefined(text), TableNames(schema, prefix))


def test_other_errors_with_such_words_are_left_alone():
    """Only what a database says counts: a class and a code, not words in a message."""
    names = TableNames()
    raise_if_missing(ValueError("no such table: seawall_jobs"), names)
    raise_if_missing(sqlite3.OperationalError("no such column: seawall_jobs"), names)
    with pytest.raises(TablesMissing):
        raise_if_missing(sqlite3.OperationalError("no such table: seawall_jobs"), names)


def test_a_request_is_answered_with_500_until_it_is_done(quick: Opening, said: Any):
    """No `Retry-After`, which would be sent for ever; nothing is carried out, nothing kept."""
    shop = Shop()

    async def main() -> None:
        async with quick(migrated=False) as database:
            app = IdempotentRequests(shop, Idempotency(database), routes=["/orders"], scope=user)
            answer = await post(app)
            assert (answer.status, answer.json()["reason"]) == (500, "tables_missing")
            assert "retry-after" not in answer.headers
            assert "seawall" not in answer.body.decode()
            assert shop.orders == []
            assert app.snapshot()["store_away"] == 1
            await amigrate(database)
            answer = await post(app)
            assert answer.status == 201
            assert first(answer)

    asyncio.run(main())
    ((level, line),) = said()
    assert level == "ERROR"
    assert re.fullmatch(f"POST /orders: its record: .* seawall_idempotency: {ADVICE}", line)


def test_a_dispatcher_says_it_once_and_begins_when_it_is_done(quick: Opening, said: Any):
    """At ERROR; it looks again, so that nobody has to start it anew after migrating."""

    async def main() -> None:
        async with quick(migrated=False) as database:
            outbox, seen = Outbox(database), Seen()
            worker = dispatcher(outbox, seen.each)
            running = asyncio.create_task(worker.run())
            while worker.snapshot()["errors"] < 2:
                worker.wake()
                await a_moment()
            await amigrate(database)
            await committed(outbox, ("order", "1", "placed", {}))
            while not seen.events:
                worker.wake()
                await a_moment()
            worker.stop()
            await running

    asyncio.run(main())
    (level, line), (after, _) = said()
    assert (level, after) == ("ERROR", "INFO")
    assert "run migrate(database)" in line


def test_it_is_said_also_after_an_outage(said: Any):
    """A server that comes back without our tables is worth a line of its own; then none more."""
    trouble = OutageLog("outbox 'x'", VirtualClock())
    missing = TablesMissing("there is no table x")
    for error in (OSError("away"), OSError("away"), missing, missing, OSError("away")):
        trouble.failed(None, "the database", error)
    trouble.succeeded(None)
    trouble.failed(None, "the database", OSError("away"))
    assert [level for level, _ in said()] == ["WARNING", "ERROR", "INFO", "WARNING"]
