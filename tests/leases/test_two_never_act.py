"""Leaders in real processes that are stopped, whose store goes away, whose clocks jump.

Two never act at once: a real database with a fence keeps what they do, and an act of an earlier
leader never comes after one of a later leader.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

import psycopg
import pytest
import redis

from seawall.clock import SYSTEM
from seawall.durable import Database, Sqlite, migrate
from tests.durable.postgres import Postgres
from tests.redis.support import Server

TTL = 1.5
MARGIN = 0.3
SOON = 120.0
"""How long to wait for what must happen, also on a machine that is very busy."""


Heard = Callable[["Process", str, int], None]


class Process:
    """One actor, and what it has said."""

    def __init__(
        self, settings: dict[str, Any], heard: Callable[[Process, str, int], None]
    ) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own text
            [sys.executable, str(Path(__file__).with_name("actor.py")), json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._heard = heard
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, token = line.split()
            self._heard(self, what, int(token))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait(SOON)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Arena:
    """Actors around one store and one ledger, and what can happen to them."""

    def __init__(self, store: str, ledger: str, folder: Path, **options: Any) -> None:
        self.prefix = f"actors-{token_hex(4)}"
        self.store, self.ledger = store, ledger
        self.heard: list[tuple[Process, str, int]] = []
        self._news = threading.Condition()
        for place, table in ((ledger, "acts"), (store, "seawall_step")):
            if not place.startswith("redis://"):
                self._make_tables(place, table)
        settings = {
            "store": store,
            "ledger": ledger,
            "prefix": self.prefix,
            "ttl": TTL,
            "margin": MARGIN,
            "work": 0.03,
            "fenced": True,
            **options,
        }
        self.folder = folder
        self.processes = [Process(settings, self._hear) for _ in range(3)]

    def _make_tables(self, place: str, table: str) -> None:
        if "://" in place:
            from psycopg_pool import ConnectionPool

            with ConnectionPool(place, min_size=1, open=True) as pool:
                self._migrate(Database(pool, name=self.prefix))
        else:
            source = Sqlite(place)
            self._migrate(Database(source, name=self.prefix))
            source.close()
        if table == "acts":
            self.sql(place, "DROP TABLE IF EXISTS acts")
            kind = "bigserial" if "://" in place else "integer"
            self.sql(place, f"CREATE TABLE acts (place {kind} PRIMARY KEY, token bigint)")
        else:
            self.sql(place, "DROP TABLE IF EXISTS seawall_step")
            self.sql(place, "CREATE TABLE seawall_step (us bigint)")
            self.sql(place, "INSERT INTO seawall_step VALUES (0)")

    @staticmethod
    def _migrate(database: Database) -> None:
        migrate(database)
        database.close()

    @staticmethod
    def sql(place: str, text: str) -> list[Any]:
        """Ask a database by a connection of its own."""
        if "://" in place:
            with psycopg.connect(place, autocommit=True) as connection:
                cursor = connection.execute(text)
                return cursor.fetchall() if cursor.description else []
        plain = sqlite3.connect(place, isolation_level=None, timeout=SOON)
        try:
            return plain.execute(text).fetchall()
        finally:
            plain.close()

    def close(self) -> None:
        for process in self.processes:
            process.end()

    # What is heard

    def _hear(self, process: Process, what: str, token: int) -> None:
        with self._news:
            self.heard.append((process, what, token))
            self._news.notify_all()

    def mark(self) -> int:
        """Return a place in what was heard: all before it is old."""
        with self._news:
            return len(self.heard)

    def hear_of(
        self, wanted: Callable[[Process, str, int], bool], since: int | None, seconds: float
    ) -> tuple[Process, str, int] | None:
        """Return the first thing heard from now on, or since a mark, that is wanted."""
        until = SYSTEM.now() + seconds
        with self._news:
            seen = len(self.heard) if since is None else since
            while True:
                for one in self.heard[seen:]:
                    if wanted(*one):
                        return one
                seen = len(self.heard)
                left = until - SYSTEM.now()
                if left <= 0:
                    return None
                self._news.wait(left)

    def wait_for(
        self, wanted: Callable[[Process, str, int], bool], since: int | None = None
    ) -> tuple[Process, str, int]:
        """Return the same; it must happen."""
        heard = self.hear_of(wanted, since, SOON)
        assert heard is not None, [one[1:] for one in self.heard[-10:]]
        return heard

    def next_act(self, above: int = 0) -> int:
        """Wait for an act of a leader whose token is higher; return its token."""
        return self.wait_for(lambda _p, what, token: what == "act" and token > above)[2]

    # What happens

    def stop_the_leader(self) -> None:
        """Stop the leader past its lease, until another acts; then let it go on.

        If it was stopped in the middle of a transaction, nobody else passes its lock before that.
        """
        leader, _what, token = self.wait_for(lambda _p, what, _t: what == "checked")
        leader.stop()
        self.hear_of(lambda _p, what, other: what == "act" and other > token, None, 6 * TTL)
        before = self.mark()
        leader.go_on()
        self.wait_for(lambda process, _what, _token: process is leader, before)

    def set_the_clock(self, seconds: float) -> None:
        """Set the store's clock: forward by more than a lease, it is another's at once."""
        token, us = self.next_act(), round(seconds * 1e6)
        if self.store.startswith("redis://"):
            with redis.Redis.from_url(self.store) as client:
                client.incrby(f"{self.prefix}:step", us)
        else:
            self.sql(self.store, f"UPDATE seawall_step SET us = us + {us}")  # noqa: S608 - a number
        self.next_act(above=token if seconds > TTL else 0)

    def take_the_store_away(self, site: Site) -> None:
        """Stop the store for longer than a lease: afterwards there is a new leader."""
        token = self.next_act()
        with site.store_gone():
            SYSTEM.sleep(TTL * 2)
        self.next_act(above=token)

    # What came of it

    def acts(self) -> list[int]:
        """Return the tokens of all acts, in the order in which they were committed."""
        return [
            token for (token,) in self.sql(self.ledger, "SELECT token FROM acts ORDER BY place")
        ]

    def late_acts(self) -> int:
        """Return the number of acts that came after one of a later leader."""
        highest = late = 0
        for token in self.acts():
            late += token < highest
            highest = max(highest, token)
        return late

    def count(self, what: str) -> int:
        with self._news:
            return sum(1 for one in self.heard if one[1] == what)


class Site:
    """A store for the lease, and another database for the ledger."""

    def __init__(self, kind: str, valkey: Server, postgres: Postgres, folder: Path) -> None:
        self.kind = kind
        self._valkey, self._postgres, self._folder = valkey, postgres, folder
        file = str(folder / "ledger.db")
        self.store, self.ledger = {
            "redis": (valkey.url, postgres.url),
            "postgres": (postgres.url, file),
            "sqlite": (str(folder / "lease.db"), file),
        }[kind]

    def arena(self, **options: Any) -> Arena:
        return Arena(self.store, self.ledger, self._folder, **options)

    @contextmanager
    def store_gone(self) -> Iterator[None]:
        """Kill the server, and start it again; a file is locked by another."""
        if self.kind == "redis":
            self._valkey.kill()
            yield
            self._valkey.start()
        elif self.kind == "postgres":
            self._postgres.stop("immediate")
            yield
            self._postgres.start()
        else:
            blocker = sqlite3.connect(self.store, isolation_level=None, timeout=SOON)
            blocker.execute("BEGIN EXCLUSIVE")
            yield
            blocker.rollback()
            blocker.close()


@pytest.fixture(params=["redis", "postgres", "sqlite"])
def site(
    request: pytest.FixtureRequest, valkey: Server, postgres: Postgres, tmp_path: Path
) -> Site:
    """Return each store in turn."""
    return Site(request.param, valkey, postgres, tmp_path)


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    """Return a list of arenas that are closed in the end."""
    made: list[Arena] = []
    yield made
    for arena in made:
        arena.close()


@pytest.mark.timeout(600)
def test_two_never_act_at_once(site: Site, arenas: list[Arena]):
    """A leader is stopped past its lease, the store's clock jumps, the store is gone."""
    arena = site.arena()
    arenas.append(arena)
    arena.next_act()
    arena.stop_the_leader()
    arena.set_the_clock(2 * TTL)
    arena.take_the_store_away(site)
    arena.set_the_clock(-3600)
    arena.close()
    assert len(set(arena.acts())) >= 3, "three leaders at least"
    assert arena.late_acts() == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_without_the_fence_two_act(site: Site, arenas: list[Arena]):
    """A leader that was stopped after its look at the clock acts when it goes on."""
    arena = site.arena(fenced=False, work=0.5)
    arenas.append(arena)
    for _ in range(10):
        arena.stop_the_leader()
        if arena.late_acts():
            return
    raise AssertionError("no act of an earlier leader came late")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_never_act_in_a_campaign(site: Site, arenas: list[Arena], seed: int):
    """Many rounds in a random order."""
    rng, arena = Random(seed), site.arena()
    arenas.append(arena)
    rounds = int(os.environ.get("SEAWALL_LEADER_ROUNDS", "30"))
    for _ in range(rounds):
        choice = rng.random()
        if choice < 0.6:
            arena.stop_the_leader()
        elif choice < 0.85:
            arena.set_the_clock(rng.choice([-3600, 2 * TTL, TTL / 2, -TTL / 2]))
        else:
            arena.take_the_store_away(site)
    arena.close()
    acts = arena.acts()
    sys.stderr.write(
        f"\n{site.kind}: {rounds} rounds, {len(acts)} acts of {len(set(acts))} leaders, "
        f"{arena.count('refused')} refused by the fence, {arena.late_acts()} late\n"
    )
    assert arena.late_acts() == 0
