"""Processes are killed, servers crash, acknowledgements get lost: each effect happens once.

Clients place orders and retry until they know; each order has one event; a consumer with an inbox
handles it. Children are killed with SIGKILL: after a random number of steps, wherever they are
then; and at a step of their own, so that each place is struck, also that between commit and answer.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest

from seawall.clock import SYSTEM
from seawall.durable import Database, Sqlite, migrate
from tests.durable.crash.children import DEADLY, PATIENCE, Nursery
from tests.durable.crash.shop import SCHEMA, TABLES
from tests.durable.postgres import Postgres


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    """Return a nursery; nothing of it is left after the test."""
    made = Nursery()
    yield made
    made.close()


class Shop:
    """A database with orders and handled events, as an onlooker sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        if not url.startswith("postgresql:"):
            file = Sqlite(url)
            migrate(Database(file, name="onlooker's"))
            for text in TABLES:
                file.run(lambda c, t=text: c.execute(t.format(identity="PRIMARY KEY")) and None)
            file.close()
            return
        from psycopg_pool import ConnectionPool

        with ConnectionPool(url, min_size=1, open=True) as pool:
            with pool.connection() as connection:
                connection.execute(f'DROP SCHEMA IF EXISTS "{SCHEMA}" CASCADE')
            migrate(Database(pool, schema=SCHEMA, name="onlooker's"))
            with pool.connection() as connection:
                connection.execute(f'SET LOCAL search_path TO "{SCHEMA}"')
                for text in TABLES:
                    connection.execute(
                        text.format(identity="GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
                    )

    def counts(self, table: str) -> Counter[str]:
        """Return how many rows of a table there are for each key."""
        return Counter(key for (key,) in self._rows("SELECT key FROM {own}" + table))  # noqa: S608

    def pending(self) -> Counter[str]:
        """Return what is under way: events that are not known to be delivered, keys in flight."""
        return Counter(
            what
            for (what,) in self._rows(
                "SELECT aggregate_id FROM {own}seawall_outbox"
                " UNION ALL SELECT operation FROM {own}seawall_idempotency WHERE state = 0"
            )
        )

    def _rows(self, text: str) -> list[tuple[Any, ...]]:
        if self.url.startswith("postgresql:"):
            import psycopg

            with psycopg.connect(self.url) as connection:
                return connection.execute(text.format(own=f'"{SCHEMA}".').encode()).fetchall()
        own = sqlite3.connect(self.url, timeout=30)
        try:
            return own.execute(text.format(own="")).fetchall()
        finally:
            own.close()


def check_that_each_happened_once(
    shop: Shop,
    nursery: Nursery,
    orders: dict[str, Any],
    events: dict[str, Any],
    patience: float | None = None,
) -> None:
    """Let the clients end, and demand one order and one handled event for each key.

    All of them are asked for once more, by who knows of none, after the last kill. It is looked
    only when nothing is under way any more: what is doubled may be so at the very end.
    """
    nursery.kill_all()
    orders = {**orders, "acks": orders["acks"] + " of the last"}
    nursery.start(orders)
    nursery.start(events)
    keys = orders["keys"]
    over = SYSTEM.now() + (PATIENCE + 0.1 * len(keys) if patience is None else patience)
    acks = Path(orders["acks"])
    while True:
        known = set(acks.read_text().split()) if acks.exists() else set()
        if known >= set(keys) and set(shop.counts("handled")) >= set(keys) and not shop.pending():
            break
        assert SYSTEM.now() < over, f"something is stuck: {shop.pending()}"
        nursery.wait_for_steps(20)
    assert shop.counts("orders") == Counter(keys)
    assert shop.counts("handled") == Counter(keys)


@pytest.mark.parametrize(
    ("kills", "where"),
    [
        (30, "postgres"),
        (20, "sqlite"),
        pytest.param(600, "postgres", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(400, "sqlite", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_killed_processes_double_nothing_and_lose_nothing(
    kills: int, where: str, nursery: Nursery, postgres: Postgres, tmp_path: Path, seed: int
):
    """However often and wherever they are killed: one order and one handled event for each key."""
    shop = Shop(postgres.url if where == "postgres" else str(tmp_path / "shop.db"))
    keys = [f"key-{number}" for number in range(5 * kills)]
    orders = {"role": "take_orders", "url": shop.url, "keys": keys, "seed": 0}
    orders["acks"] = str(tmp_path / "acks")
    events = {"role": "handle_events", "url": shop.url}
    nursery.kill_now_and_then([orders, {**orders, "seed": 1}, events], kills, Random(seed))
    assert nursery.killed >= kills  # two may die at the same moment
    # Also where chance would not strike: the commit is done, and nobody has been told.
    assert set(nursery.struck) >= set(DEADLY)
    check_that_each_happened_once(shop, nursery, orders, events)


@pytest.mark.parametrize("careless", ["keys", "inbox"])
def test_without_keys_or_inbox_something_is_doubled(
    careless: str, nursery: Nursery, postgres: Postgres, tmp_path: Path
):
    """The same check notices that each of them is missing."""
    shop = Shop(postgres.url)
    keys = [f"key-{number}" for number in range(30)]
    orders = {"role": "take_orders", "url": shop.url, "keys": keys, "seed": 0}
    orders.update(acks=str(tmp_path / "acks"), careless=careless)
    events = {"role": "handle_events", "url": shop.url, "careless": careless}
    nursery.start(orders)
    while len(shop.counts("orders")) < len(keys):
        nursery.wait_for_steps(1)
    # It dies in the middle of a batch: what was handled is not known to be delivered.
    nursery.start_dying(events, "handled", 5)
    with pytest.raises(AssertionError, match="Counter"):
        check_that_each_happened_once(shop, nursery, orders, events)


def test_without_the_end_of_a_lease_something_is_stuck(
    nursery: Nursery, postgres: Postgres, tmp_path: Path
):
    """The same check notices a key that a dead client has for ever."""
    shop = Shop(postgres.url)
    orders = {"role": "take_orders", "url": shop.url, "keys": ["key-0", "key-1"], "seed": 0}
    orders.update(acks=str(tmp_path / "acks"), lease=3600.0)
    nursery.start_dying({**orders, "keys": ["key-0"]}, "inside", 1)
    events = {"role": "handle_events", "url": shop.url}
    with pytest.raises(AssertionError, match="something is stuck"):
        check_that_each_happened_once(shop, nursery, orders, events, patience=2.0)
    assert shop.counts("orders") == Counter(["key-1"])


def test_a_server_that_crashes_doubles_nothing_and_loses_nothing(
    nursery: Nursery, tmp_path: Path, seed: int
):
    """PostgreSQL is stopped in immediate mode, under clients that retry."""
    server = Postgres()
    try:
        shop, rng = Shop(server.url), Random(seed)
        keys = [f"key-{number}" for number in range(150)]
        orders = {"role": "take_orders", "url": shop.url, "keys": keys, "seed": 0}
        orders["acks"] = str(tmp_path / "acks")
        events = {"role": "handle_events", "url": shop.url}
        for told in (orders, {**orders, "seed": 1}, events):
            nursery.start(told)
        for _ in range(3):
            nursery.wait_for_steps(rng.randint(50, 300))
            server.crash_and_restart()
        check_that_each_happened_once(shop, nursery, orders, events)
        assert nursery.seen["failed"] > 0
        nursery.kill_all()
    finally:
        server.close()


class Proxy:
    """Stands before a server, and keeps some answers to COMMIT for itself: the connection ends."""

    def __init__(self, port: int, share: float, rng: Random) -> None:
        self._target, self._share, self._rng = port, share, rng
        self.lost = 0
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._began = Event()
        self._passing: set[asyncio.Task[None]] = set()
        self._thread = Thread(target=lambda: asyncio.run(self._serve(listener)))
        self._thread.start()
        assert self._began.wait(PATIENCE)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, sock=listener)
        self._began.set()
        await self._end.wait()
        server.close()
        for _ in range(10):  # one that was just accepted has no task of ours yet
            await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = self._loop.create_task(self._pass(reader, writer))
        self._passing.add(passing)  # else the collector may end it
        passing.add_done_callback(self._passing.discard)
        # A task that is cancelled before it began closes nothing.
        passing.add_done_callback(lambda _: writer.transport.abort())

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends, cutting = [writer], asyncio.Event()
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", self._target)
            ends.append(outer)

            async def forth() -> None:
                while data := await reader.read(65536):
                    if b"COMMIT" in data and self._rng.random() < self._share:
                        cutting.set()
                    outer.write(data)
                    await outer.drain()

            async def back() -> None:
                while data := await inner.read(65536):
                    if cutting.is_set():  # the server has committed, and nobody is told
                        self.lost += 1
                        return
                    writer.write(data)
                    await writer.drain()

            ways = [asyncio.ensure_future(forth()), asyncio.ensure_future(back())]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for end in ends:
                end.transport.abort()
            for end in ends:
                with suppress(OSError):
                    await end.wait_closed()

    def close(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


def test_lost_acknowledgements_of_commits_double_nothing(
    nursery: Nursery, postgres: Postgres, tmp_path: Path, seed: int
):
    """A client retries a committed transaction whose answer was lost: it is a repeat."""
    shop = Shop(postgres.url)
    proxy = Proxy(postgres.port, 0.3, Random(seed))
    through = postgres.url.replace(f":{postgres.port}/", f":{proxy.port}/")
    keys = [f"key-{number}" for number in range(60)]
    orders = {"role": "take_orders", "url": through, "keys": keys, "seed": 0}
    orders["acks"] = str(tmp_path / "acks")
    events = {"role": "handle_events", "url": through}
    check_that_each_happened_once(shop, nursery, orders, events)
    assert proxy.lost > 20
    assert nursery.seen["failed"] > 10
    nursery.kill_all()
    proxy.close()
