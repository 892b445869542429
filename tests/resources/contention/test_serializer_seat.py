"""The thousand-contenders seat: one winner, and 999 clean refusals."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall.resources import Serializer, aupdate_optimistically, update_optimistically
from seawall.testing import run_virtual
from tests.support import let_pass

CONTENDERS = 1000
THREADS = 32


class SeatTaken(Exception):
    """The clean refusal."""


class Seat:
    """A seat in a remote store: each read and each write takes a moment, in which others act."""

    compares = True

    def __init__(self, rng: Random) -> None:
        self.owner: str | None = None
        self.version = 0
        self.rng = rng

    async def read(self) -> tuple[str | None, int]:
        await let_pass(self.rng.random() / 100)
        return self.owner, self.version

    async def write(self, owner: str | None, version: int) -> bool:
        await let_pass(self.rng.random() / 100)
        if self.compares and version != self.version:
            return False
        self.owner, self.version = owner, version + 1
        return True


def take_for(name: str) -> Callable[[str | None], str | None]:
    """Return the change that each contender wants to make."""

    def change(owner: str | None) -> str | None:
        if owner is not None:
            raise SeatTaken(owner)
        return name

    return change


async def _contend(take: Callable[[str], Awaitable[Any]]) -> Counter[str]:
    """Let all contend at once; return how it ended for how many."""

    async def one(number: int) -> str:
        try:
            await take(f"contender {number}")
        except SeatTaken:
            return "refused"
        return "won"

    return Counter(await asyncio.gather(*(one(number) for number in range(CONTENDERS))))


def _contend_in_threads(take: Callable[[str], Any]) -> Counter[str]:
    """Let all contend, from many threads at once."""
    start = threading.Barrier(THREADS)
    ended: list[str] = []

    def work(first: int) -> None:
        start.wait(30)
        for number in range(first, CONTENDERS, THREADS):
            try:
                take(f"contender {number}")
            except SeatTaken:
                ended.append("refused")
            except BaseException as error:  # noqa: BLE001 - counted: none is expected
                ended.append(repr(error))
            else:
                ended.append("won")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return Counter(ended)


ONE_WINNER = Counter(won=1, refused=CONTENDERS - 1)
SEEDS = [1, 2, 3]


@pytest.fixture
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# By optimistic update


def _seat_for_tasks(seed: int) -> tuple[Counter[str], str | None]:
    async def main() -> tuple[Counter[str], str | None]:
        rng = Random(seed)
        seat = Seat(rng)

        async def take(name: str) -> None:
            await aupdate_optimistically(seat.read, take_for(name), seat.write, rng=rng)

        return await _contend(take), seat.owner

    return run_virtual(main(), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_a_thousand_tasks_wins_the_seat(seed: int) -> None:
    """By compare-and-set: all others are told that it is taken."""
    ended, owner = _seat_for_tasks(seed)
    assert ended == ONE_WINNER
    assert owner is not None


def test_without_comparing_several_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write whatever was read before, and the seat is sold more than once."""
    monkeypatch.setattr(Seat, "compares", False)
    ended, _ = _seat_for_tasks(1)
    assert ended["won"] > 1


class Memory:
    """A seat in memory, whose compare-and-set is atomic; reading lets other threads in."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.version = 0
        self._lock = threading.Lock()

    def read(self) -> tuple[str | None, int]:
        return self.owner, self.version

    def write(self, owner: str | None, version: int) -> bool:
        with self._lock:
            if version != self.version:
                return False
            self.owner, self.version = owner, version + 1
            return True


@pytest.mark.usefixtures("_many_switches")
def test_one_of_a_thousand_calls_in_threads_wins_the_seat() -> None:
    """The same, for threads."""
    seat = Memory()
    ended = _contend_in_threads(
        lambda name: update_optimistically(seat.read, take_for(name), seat.write)
    )
    assert ended == ONE_WINNER


# Against a real database


class Database:
    """Seats in SQLite; each thread has a connection of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        with self.connection() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE seat (id PRIMARY KEY, owner, version NOT NULL)")
            connection.execute("INSERT INTO seat VALUES ('7A', NULL, 0)")

    def connection(self) -> sqlite3.Connection:
        if not hasattr(self._local, "connection"):
            connection = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
            self._local.connection = connection
            self._all.append(connection)
        return self._local.connection

    def read(self) -> tuple[str | None, int]:
        query = "SELECT owner, version FROM seat WHERE id = '7A'"
        return self.connection().execute(query).fetchone()

    def write(self, owner: str | None, version: int) -> int:
        with self.connection() as connection:
            changed = connection.execute(
                "UPDATE seat SET owner = ?, version = version + 1 WHERE id = '7A' AND version = ?",
                (owner, version),
            )
        return changed.rowcount

    def write_blindly(self, owner: str | None, version: int) -> int:
        with self.connection() as connection:
            changed = connection.execute("UPDATE seat SET owner = ? WHERE id = '7A'", (owner,))
        return changed.rowcount

    def close(self) -> None:
        for connection in self._all:
            connection.close()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Return a database with one free seat."""
    database = Database(tmp_path / "seats.db")
    yield database
    database.close()


def test_one_of_a_thousand_calls_wins_the_row_of_a_database(database: Database) -> None:
    """`UPDATE ... WHERE version = ?` is the compare-and-set; its row count is the answer."""
    ended = _contend_in_threads(
        lambda name: update_optimistically(database.read, take_for(name), database.write)
    )
    assert ended == ONE_WINNER
    owner, version = database.read()
    assert owner is not None
    assert version == 1


def test_without_the_version_the_row_is_sold_twice(database: Database) -> None:
    """Two read that it is free before either writes; without the version both win."""
    first_has_read = threading.Barrier(2)

    def take(name: str, write: Callable[[str | None, int], int]) -> str:
        def read() -> tuple[str | None, int]:
            found = database.read()
            if found[0] is None:
                first_has_read.wait(30)
            return found

        try:
            update_optimistically(read, take_for(name), write)
        except SeatTaken:
            return "refused"
        return "won"

    def both(write: Callable[[str | None, int], int]) -> list[str]:
        ended: list[str] = []
        threads = [
            threading.Thread(target=lambda name=name: ended.append(take(name, write)))
            for name in ("first", "second")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return sorted(ended)

    assert both(database.write_blindly) == ["won", "won"]
    database.write_blindly(None, 0)
    assert both(database.write) == ["refused", "won"]


# By serializer


class Shop:
    """Sells a seat by looking and writing, with no other protection than the turns."""

    def __init__(self) -> None:
        self.owner: str | None = None

    async def sell(self, name: str) -> None:
        owner = self.owner
        await let_pass(0.001)
        self.owner = take_for(name)(owner)

    def sell_now(self, name: str) -> None:
        owner = self.owner
        for _ in range(3):
            threading.Event().is_set()  # lets other threads in
        self.owner = take_for(name)(owner)


def _seat_by_turns(seed: int, *, serialized: bool) -> Counter[str]:
    async def main() -> Counter[str]:
        shop = Shop()
        serializer = Serializer(max_waiting=CONTENDERS)

        async def take(name: str) -> None:
            if serialized:
                await serializer.arun("7A", shop.sell, name)
            else:
                await shop.sell(name)

        ended = await _contend(take)
        assert serializer.snapshot()["in_flight"] == 0
        return ended

    return run_virtual(main(), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_a_thousand_tasks_wins_by_turns(seed: int) -> None:
    """One at a time looks and writes: the first wins."""
    assert _seat_by_turns(seed, serialized=True) == ONE_WINNER


def test_without_turns_several_win() -> None:
    """All look before the first has written."""
    assert _seat_by_turns(1, serialized=False)["won"] > 1


@pytest.mark.usefixtures("_many_switches")
def test_one_of_a_thousand_calls_in_threads_wins_by_turns() -> None:
    """The same, for threads."""
    shop = Shop()
    serializer = Serializer(max_waiting=CONTENDERS)
    ended = _contend_in_threads(lambda name: serializer.run("7A", shop.sell_now, name))
    assert ended == ONE_WINNER
    assert serializer._lanes == {}
