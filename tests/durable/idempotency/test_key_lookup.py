"""What an operator can find out about a key: its state, its events, and who has handled them."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from seawall.cli import main as cli
from seawall.durable import (
    Database,
    Dispatcher,
    Idempotency,
    Inbox,
    NewEvent,
    Outbox,
    Sqlite,
    migrate,
)
from seawall.durable.idempotency.records import trail_of
from tests.durable.conftest import Opening
from tests.durable.http.completed_support import Till
from tests.durable.http.support import post, set_time
from tests.durable.postgres import Postgres

NAMED = ("ann", "POST /orders", "8e03978e-40d5")


def test_a_key_leads_to_its_answer_and_events(opening: Opening):
    """By every driver: what was completed with the request is found, and nothing of its body."""

    async def main() -> None:
        async with opening() as database:
            till = await Till(database).prepare()
            keys = till.idempotency
            assert await keys.alookup(*NAMED) is None
            till.options = {"events": [NewEvent("payment", str(n), "paid", {}) for n in range(12)]}
            await post(till.app)
            found = await keys.alookup(*NAMED)
            assert found is not None
            assert found[:5] == ("succeeded", 201, 4, True, 0)
            assert found.expires_at - found.created_at >= keys.ttl
            assert [event[2:] for event in found.events] == [
                ("payment", str(n), "paid", "pending") for n in range(12)
            ]
            delivered: list[str] = []

            async def sink(event: Any) -> None:
                delivered.append(event.id)

            await Dispatcher(till.outbox, sink, keep=3600.0).drain()
            assert sorted(delivered) == sorted(event.id for event in found.events)
            later = await keys.alookup(*NAMED)
            assert later is not None
            assert {event.state for event in later.events} == {"delivered"}
            assert await keys.alookup("bob", *NAMED[1:]) is None

    asyncio.run(main())


def test_states_of_a_key(opening: Opening):
    """In flight, given up when its lease is over, failed, and nothing when its time is over."""

    async def main() -> None:
        async with opening() as database:
            keys = Idempotency(database)
            await set_time(database, 0)
            claim = (await keys.areserve("t", "o", "k", None)).claim  # type: ignore[union-attr]

            async def state() -> Any:
                found = await keys.alookup("t", "o", "k")
                return found and found.state

            assert await state() == "in flight"
            await set_time(database, 31)
            assert await state() == "given up"
            await keys.acomplete(claim, {"error": 1}, failed=True)
            assert await state() == "failed"
            await set_time(database, 100_000)
            assert await state() is None

    asyncio.run(main())


def test_events_of_a_block_are_found(opening: Opening):
    """`once.answer` with events: as the key's, with ids of their own at each use of the key."""

    async def main() -> None:
        async with opening() as database:
            keys, outbox, seen = Idempotency(database), Outbox(database), []
            await set_time(database, 0)
            naming: dict[str, Any] = {"scope": "t", "operation": "o", "key": "k"}
            for at in (0, 100_000):  # when its time is over the key is free
                await set_time(database, at)
                await _done_once(database, keys, outbox, naming)
                found = await keys.alookup(**naming)
                assert found is not None
                seen.append([event.id for event in found.events])
            assert len(seen[0]) == len(seen[1]) == 2
            assert not set(seen[0]) & set(seen[1])

    asyncio.run(main())


async def _done_once(database: Database, keys: Any, outbox: Any, naming: Any) -> None:
    events = [NewEvent("order", "7", "placed", {}), NewEvent("order", "7", "paid", {})]
    if isinstance(database.source, Sqlite):
        with database.transaction() as conn, keys.once(conn, **naming, fingerprint=None) as once:
            once.answer(1, outbox=outbox, events=events)
        return
    async with (
        database.atransaction() as conn,
        keys.once(conn, **naming, fingerprint=None) as once,
    ):
        once.answer(1, outbox=outbox, events=events)


def test_a_trail_belongs_to_one_claim():
    """Another owner or epoch is another trail: no inbox drops the event of a later use."""
    assert trail_of("a", 1) != trail_of("b", 1) != trail_of("b", 2) != trail_of("a", 1)
    assert len(trail_of("a", 1)) == 32


# The command


@pytest.fixture(params=["postgres", "sqlite"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Give the address of a database with one key, and what opens it."""
    with ExitStack() as stack:
        if request.param == "postgres":
            from psycopg_pool import ConnectionPool

            postgres: Postgres = request.getfixturevalue("postgres")
            address, options = postgres.url, {"prefix": "cli_"}
            source: Any = ConnectionPool(address, min_size=1, open=True)
        else:
            address, options = str(tmp_path / "keys.db"), {}
            source = Sqlite(address)
        stack.callback(source.close)
        database = Database(source, name=f"keys {request.param}", **options)  # type: ignore[arg-type]
        stack.callback(database.close)
        migrate(database)
        keys = Idempotency(database)
        event = NewEvent("order", "7", "placed", {"card": "4111"})
        naming = {"scope": '["acme", "ann"]', "operation": "POST /orders", "key": "k-7"}
        keys.forget(**naming)
        with (
            database.transaction() as conn,
            keys.once(conn, **naming, fingerprint=None) as once,
        ):
            once.answer({"secret": 1}, outbox=Outbox(database), events=[event])
        yield address, options.get("prefix", "seawall_"), database, keys


def test_the_command_shows_a_key_and_its_trail(filled: Any, capsys: pytest.CaptureFixture[str]):
    """Its state, its events, and who has handled them; not what was answered."""
    address, prefix, database, keys = filled
    (event,) = keys.lookup('["acme", "ann"]', "POST /orders", "k-7").events
    with database.transaction() as conn, Inbox(database).once(conn, "warehouse", event.id):
        pass
    asked = ["--database", address, "--prefix", prefix, "POST /orders", "k-7"]
    whose = ["--scope", "acme", "--scope", "ann"]
    consumers = ["--consumer", "warehouse", "--consumer", "mail", "--inbox", address]
    assert cli(["keys", "show", *asked, *whose, *consumers]) == 0
    told = capsys.readouterr().out
    assert "state      succeeded" in told
    assert "placed of order 7" in told
    assert "handled by warehouse;" in told
    assert "secret" not in told
    assert "4111" not in told

    assert cli(["keys", "show", *asked, "--scope", '["acme", "ann"]', "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["state"], read["events"][0]["handled_by"]) == ("succeeded", [])
    assert cli(["keys", "show", *asked, "--scope", "bob"]) == 1
    assert "no record" in capsys.readouterr().out


def test_the_command_forgets_a_key(
    filled: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Only if confirmed, and never one that is in flight; the key may come from the input."""
    address, prefix, _, keys = filled
    monkeypatch.setenv("SEAWALL_DATABASE", address)
    asked = ["keys", "forget", "--prefix", prefix, "POST /orders", "--scope", "acme"]
    both = [*asked, "--scope", "ann"]
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert cli([*both, "k-7"]) == 1
    assert "Nothing was done." in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("k-7\ny\n"))
    assert cli([*both, "-"]) == 0
    assert "Forgotten." in capsys.readouterr().out
    assert cli([*both, "k-7", "--yes"]) == 1
    assert "no record" in capsys.readouterr().out
    found = keys.reserve("acme", "POST /orders", "k-8", None)
    assert cli([*asked, "k-8", "--yes"]) == 1
    assert "in flight" in capsys.readouterr().out
    keys.abandon(found.claim)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--database", "mysql://a:hidden@b/c", "--scope", "a"], "postgresql://"),
        (["--database", "/no/such/file.db", "--scope", "a"], "SQLite file"),
        (["--scope", "a"], "SEAWALL_DATABASE"),
        (["--database", "x"], "--scope"),
    ],
)
def test_mistakes_are_told(
    options: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """In a line, with status 2, and without a password."""
    monkeypatch.delenv("SEAWALL_DATABASE", raising=False)
    assert cli(["keys", "show", "POST /orders", "k", *options]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "hidden" not in told
