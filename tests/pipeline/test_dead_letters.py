"""Dead letters that last: kept once, listed, replayed where they failed, whatever dies."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database.connections import TextQuery
from seawall.pipeline import (
    DatabaseDeadLetters,
    DeadLetter,
    Ending,
    ItemDegradation,
    IterableSource,
    MemoryDeadLetters,
    Pipeline,
    ReplayClaim,
    current_item,
    degrade,
)
from seawall.pipeline.dead_letters.letters import LOST, MOST_CLAIMS, DeadLetters, stored_id
from seawall.resources import Channel
from seawall.runtime.driver import sleep_async
from seawall.testing import run_virtual
from tests.durable.conftest import opening, opening_by, postgres
from tests.durable.outbox.support import Time
from tests.durable.postgres import Postgres

__all__ = ["opening", "postgres"]

Making = Callable[..., Any]


@pytest.fixture(params=["memory", "asyncpg", "psycopg", "sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Making:
    """Return what makes a store of letters, in memory and by each driver."""
    if request.param == "memory":

        @asynccontextmanager
        async def in_memory(name: str = "orders") -> AsyncIterator[DeadLetters]:
            yield MemoryDeadLetters(name)

        return in_memory
    opened = opening_by(request.param, request.getfixturevalue("postgres"), tmp_path)

    @asynccontextmanager
    async def in_database(name: str = "orders") -> AsyncIterator[DeadLetters]:
        async with opened() as database:
            yield DatabaseDeadLetters(database, name, poll=0.01)

    return in_database


def letter(id_: str = "s:1", value: Any = 7, at: float = 100.0, **other: Any) -> DeadLetter:
    given = {"stage": "parse", "cause": "ValueError: poison", "attempts": 2, **other}
    return DeadLetter(id_, value, at=at, **given)


class Numbers(IterableSource[Any]):
    """A source whose handles mean the same items in every run."""

    def __init__(self, items: Sequence[Any], name: str) -> None:
        super().__init__(items, name=name)
        self.keeps_ids = True


async def ids_of(store: Any, state: str = "dead") -> list[str]:
    return [item.id for item in (await store.abrowse(state)).items]


# --- Keeping ---


def test_the_same_item_is_one_letter_however_often_it_is_added(stores: Making) -> None:
    """A crash between the letter and the acknowledgement adds it again."""

    async def main() -> None:
        async with stores() as store:
            await store.aadd(letter())
            await store.aadd(letter())  # the answer was lost, and it is told again
            (item,) = (await store.abrowse()).items
            assert (item.id, item.kind, item.owner, item.attempts) == ("s:1", "parse", "orders", 2)
            assert (item.error, item.acts) == ("ValueError: poison", ("retry", "drop"))
            await store.aadd(letter(at=200.0, cause="TimeoutError: late", attempts=3))
            (item,) = (await store.abrowse()).items
            assert (item.attempts, item.error) == (5, "TimeoutError: late")

    asyncio.run(main())


def test_letters_are_listed_searched_and_dropped(stores: Making) -> None:
    """The latest first, a page at a time, by any of their words."""

    async def main() -> None:
        async with stores() as store:
            for number in range(7):
                await store.aadd(letter(f"s:{number}", {"order": f"No-{number}%"}, at=number))
            page = await store.abrowse(limit=3)
            rest = await store.abrowse(limit=100, after=page.next)
            found = [item.id for item in (*page.items, *rest.items)]
            assert sorted(found) == [f"s:{number}" for number in range(7)]
            assert rest.next is None
            (item,) = (await store.abrowse(search="no-3%")).items
            assert (item.id, item.payload) == ("s:3", b'{"order":"No-3%"}')
            assert not (await store.abrowse(search="no-3%", payloads=False)).items
            assert (await store.ainspect("s:3")).payload == item.payload
            assert (await store.ainspect("s:3", payload=False)).payload == b""
            assert await store.ainspect("other") is None
            assert await store.adrop("s:3")
            assert not await store.adrop("s:3")
            assert len((await store.abrowse()).items) == 6

    asyncio.run(main())


@dataclass
class Order:
    number: int


class Odd:
    """What cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


REPLAYABLE = [
    None,
    7,
    1.5,
    "text\0 \U0001f600 \ud800",
    [1, {"a": [True, None]}],
    b"bytes",
    b"\xff\0",
]
NOT_REPLAYABLE = [Order(7), (1, 2), {1: 2}, float("nan"), Odd(), {"at": {1, 2}}]


def test_values_come_back_as_they_were_or_are_not_replayed(opening: Any) -> None:
    """A value that JSON cannot keep holds nothing up; its text is kept, and it can be dropped."""

    async def main() -> None:
        async with opening() as database:
            store = DatabaseDeadLetters(database, "orders")
            for number, value in enumerate(REPLAYABLE):
                await store.aadd(
                    letter(f"s:{number}", value, degradations=(ItemDegradation("a", "b"),))
                )
                assert await store.aretry(f"s:{number}")
            claims = await store.aclaim(100)
            found = {claim.letter.id: claim.letter for claim in claims}
            for number, value in enumerate(REPLAYABLE):
                kept = found[f"s:{number}"]
                assert kept == letter(
                    f"s:{number}", value, degradations=(ItemDegradation("a", "b"),)
                )
                assert type(kept.value) is type(value)
            for number, value in enumerate(NOT_REPLAYABLE):
                await store.aadd(letter(f"n:{number}", value))
                item = await store.ainspect(f"n:{number}")
                assert item is not None
                assert item.acts == ("drop",)
                assert item.payload
                assert not await store.aretry(f"n:{number}")
            assert (await store.acounts())["dead"][0] == len(NOT_REPLAYABLE)

    asyncio.run(main())


def test_objects_are_replayed_by_codecs_of_your_own(tmp_path: Path, postgres: Postgres) -> None:
    """encode= and decode=; a letter whose text cannot be read is dead again, and says why."""

    def decode(text: str) -> Order:
        return Order(int(text))

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            codec = {"encode": lambda order: str(order.number), "decode": decode}
            store = DatabaseDeadLetters(database, "orders", **codec)  # type: ignore[arg-type]
            await store.aadd(letter(value=Order(7)))
            assert await store.aretry("s:1")
            plain = DatabaseDeadLetters(database, "orders", encode=str, decode=broken)
            assert await plain.aclaim(1) == []
            item = await store.ainspect("s:1")
            assert item is not None
            assert (item.state, item.error) == ("dead", "its value cannot be read: KeyError: 'no'")
            assert await store.aretry("s:1")
            (claim,) = await store.aclaim(1)
            assert claim.letter.value == Order(7)

    asyncio.run(main())


def broken(_text: str) -> Any:
    raise KeyError("no")


@given(st.text(min_size=1, max_size=900))
def test_ids_are_printable_short_and_unique(text: str) -> None:
    """Whatever handle a source has."""
    made = stored_id(text)
    assert made.isprintable()
    assert len(made) <= 400
    assert stored_id(made) == made
    assert (made == text) == (len(text) <= 400 and text.isprintable())
    assert stored_id(text + "x") != made


def test_letters_of_two_pipelines_are_apart(stores: Making) -> None:
    """A pipeline refuses the letters of another one."""

    async def main() -> None:
        async with stores("orders") as store:
            with pytest.raises(ValueError, match="make them with the same name"):
                Pipeline("bills", dead_letters=store)
            if isinstance(store, DatabaseDeadLetters):
                other = DatabaseDeadLetters(store.database, "bills")
                await store.aadd(letter())
                assert not (await other.abrowse()).items
                assert not await other.aretry("s:1")
                assert await store.aretry("s:1")
                assert await other.aclaim(10) == []

    asyncio.run(main())


# --- Claims ---


def test_a_claim_counts_until_a_later_one_is_made(opening: Any) -> None:
    """A process that dies loses no letter, and one that comes back too late is refused."""

    async def main() -> None:
        async with opening() as database:
            time = Time(database)
            await time.begin()
            store = DatabaseDeadLetters(database, "orders", lease=30.0)
            await store.aadd(letter())
            assert await store.aretry("s:1")
            assert not await store.aretry("s:1")
            (first,) = await store.aclaim(10)
            assert await store.aclaim(10) == []
            assert not await store.adrop("s:1")
            await time.pass_by(20.0)
            assert await store.arenew([first]) == [first]
            await time.pass_by(20.0)
            assert await store.aclaim(10) == []
            await time.pass_by(20.0)
            (second,) = await store.aclaim(10)
            assert second == ReplayClaim(first.letter, first.epoch + 1)
            assert await store.arenew([first]) == []
            await store.asettle([first])
            await store.arelease([first])
            assert await ids_of(store, "claimed") == ["s:1"]
            await store.aadd(letter(at=200.0), first)
            assert await ids_of(store, "claimed") == ["s:1"]
            await store.asettle([second])
            assert await store.ainspect("s:1") is None

    asyncio.run(main())


def test_a_letter_that_kills_processes_is_dead_again(opening: Any) -> None:
    """After `MOST_CLAIMS` of them; one that is given back has cost none."""

    async def main() -> None:
        async with opening() as database:
            time = Time(database)
            await time.begin()
            store = DatabaseDeadLetters(database, "orders", lease=30.0)
            await store.aadd(letter())
            assert await store.aretry("s:1")
            for _ in range(10):
                await store.arelease(await store.aclaim(10))
            for _ in range(MOST_CLAIMS):
                assert len(await store.aclaim(10)) == 1
                await time.pass_by(31.0)
            assert await store.aclaim(10) == []
            item = await store.ainspect("s:1")
            assert item is not None
            assert (item.state, item.error, item.acts) == ("dead", LOST, ("retry", "drop"))
            assert await store.aretry("s:1")
            assert len(await store.aclaim(10)) == 1

    asyncio.run(main())


# --- Replaying ---


def test_a_replayed_letter_enters_again_where_it_failed(stores: Making) -> None:
    """With its id and why it is a lesser item; when it is in the sink its letter is deleted."""
    bad = {10, 20}
    seen: list[Any] = []
    stored: list[Any] = []

    def first(number: int) -> int:
        seen.append(number)
        raise KeyError("no profile")

    def second(number: int) -> int:
        if number in bad:
            raise ValueError(f"poison {number}")
        return number + 1

    def keep(number: int) -> None:
        item = current_item()
        stored.append((item.id, number, item.degradations[0].stage))

    async def main() -> None:
        async with stores() as store:
            pipeline = Pipeline("orders", dead_letters=store)
            (
                pipeline.read(Numbers([1, 2], name="s"))
                .stage(first, on_failure=degrade(lambda number, _: number * 10))
                .stage(second)
                .sink(keep)
            )
            assert await pipeline.run()
            assert sorted(await ids_of(store)) == ["s:0", "s:1"]
            assert not stored
            bad.discard(10)
            assert await store.aretry("s:0")
            assert await store.aretry("s:1")
            assert await pipeline.run()  # its source is over; the letters are not
            assert stored == [("s:0", 11, "first")]
            assert seen == [1, 2]
            assert await ids_of(store) == ["s:1"]
            (item,) = (await store.abrowse()).items
            assert (item.attempts, item.error) == (2, "ValueError: poison 20")
            assert item.traceback.startswith("Traceback (most recent call last)")
            assert 'raise ValueError(f"poison {number}")' in item.traceback
            shot = pipeline.snapshot()
            words = ("read", "replayed", "sink", "dead_letter")
            assert [shot[word] for word in words] == [2, 2, 1, 1]
            bad.clear()
            assert await store.aretry("s:1")
            assert await pipeline.run()
            assert stored[1:] == [("s:1", 21, "first")]
            for state in ("dead", "waiting", "claimed"):
                assert not await ids_of(store, state)

    asyncio.run(main())


def test_a_running_pipeline_takes_letters_as_they_are_retried(stores: Making) -> None:
    """While its source goes on; an operator may be in another process."""
    bad = {3}
    over = asyncio.Event()
    stored: asyncio.Queue[int] = asyncio.Queue()

    async def numbers() -> AsyncIterator[int]:
        for number in range(5):
            yield number
        await over.wait()

    def parse(number: int) -> int:
        if number in bad:
            raise ValueError("poison")
        return number

    async def main() -> None:
        async with stores() as store:
            pipeline = Pipeline("orders", dead_letters=store)
            pipeline.read(numbers()).stage(parse).sink(stored.put)
            running = asyncio.create_task(pipeline.run())
            assert [await stored.get() for _ in range(4)] == [0, 1, 2, 4]
            while not await ids_of(store):
                await turn()
            bad.clear()
            other = store
            if isinstance(store, DatabaseDeadLetters):
                other = DatabaseDeadLetters(store.database, "orders")
            (id_,) = await ids_of(store)
            assert await other.aretry(id_)
            assert await stored.get() == 3
            over.set()
            assert await running
            for state in ("dead", "waiting", "claimed"):
                assert not await ids_of(store, state)

    asyncio.run(main())


async def turn() -> None:
    """Let others have their turn."""
    await asyncio.sleep(0.001)  # noqa: TID251 - until something has happened


def test_a_stop_gives_replayed_letters_back() -> None:
    """They wait for the next run."""
    hold = asyncio.Event()
    store = MemoryDeadLetters("orders")
    stored: list[int] = []

    async def slow(number: int) -> int:
        if not hold.is_set():
            await hold.wait()
        return number

    async def main() -> None:
        await store.aadd(letter(stage="slow"))
        store.retry("s:1")
        pipeline = Pipeline("orders", dead_letters=store)
        pipeline.read([]).stage(slow).sink(stored.append, name="store")
        running = asyncio.create_task(pipeline.run())
        while not store.snapshot()["claimed"]:
            await turn()
        pipeline.stop(0.0)
        assert not await running
        assert store.snapshot() == {"dead": 0, "waiting": 1, "claimed": 0}
        assert pipeline.snapshot()["returned"] == 1

    run_virtual(main())


def test_a_letter_whose_stage_is_gone_says_so() -> None:
    """It is dead again, with the stages there are."""
    store = MemoryDeadLetters("orders")

    async def main() -> None:
        await store.aadd(letter(stage="old"))
        store.retry("s:1")
        pipeline = Pipeline("orders", dead_letters=store)
        pipeline.read([]).stage(str).sink(print)
        assert await pipeline.run()

    run_virtual(main())
    (kept,) = store.letters
    assert (kept.stage, kept.attempts) == ("old", 2)
    assert "no stage 'old' to replay it at: there are str, print" in kept.cause


class Broken(MemoryDeadLetters):
    """A store whose database is down."""

    down = True
    asked = 0

    async def aclaim(self, most: int) -> list[ReplayClaim]:
        self.asked += 1
        if self.down:
            raise ConnectionError("no database")
        return await super().aclaim(most)


def test_new_items_go_on_while_letters_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and tried again with pauses."""
    store = Broken("orders")
    stored: list[int] = []

    async def numbers() -> AsyncIterator[int]:
        for number in range(100):
            await asyncio.sleep(10.0)  # noqa: TID251 - of virtual time
            store.down = number < 90
            yield number

    async def main() -> None:
        await store.aadd(letter(stage="store", value=-1))
        store.retry("s:1")
        pipeline = Pipeline("orders", dead_letters=store)
        pipeline.read(numbers()).sink(stored.append, name="store")
        assert await pipeline.run()

    run_virtual(main())
    assert sorted(stored) == [-1, *range(100)]
    assert 10 < store.asked < 300
    assert len([one for one in caplog.records if "cannot be read" in one.message]) == 1


def test_ids_of_sources_that_count_anew_do_not_meet(tmp_path: Path, postgres: Postgres) -> None:
    """Two runs of an iterable have items of the same place: two letters; a lasting id is one."""

    def poison(_number: int) -> int:
        raise ValueError("poison")

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            store = DatabaseDeadLetters(database, "orders")
            for source in (IterableSource, IterableSource, Numbers, Numbers):
                pipeline = Pipeline("orders", dead_letters=store)
                pipeline.read(source([1], name="s")).stage(poison).sink(print)
                assert await pipeline.run()
            ids = await ids_of(store)
            assert len(set(ids)) == 3
            assert "s:0" in ids
            assert all(id_ == "s:0" or id_.startswith("s:0@") for id_ in ids)

    asyncio.run(main())


class Repeating:
    """A source that gives all its items the same handle."""

    name = "pages"
    repeatable = True

    def __init__(self, items: list[int]) -> None:
        self._items = items

    async def pull(self, most: int) -> list[tuple[int, str]]:
        del most
        return [(self._items.pop(0), "start-0")] if self._items else []

    async def acknowledge(self, handles: Sequence[Any]) -> None:
        """Do nothing."""

    async def give_back(self, handles: Sequence[Any]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def test_items_of_one_run_never_share_a_letter(stores: Making) -> None:
    """Whatever handles their source has; each can be replayed."""
    bad = {1, 2, 3}
    stored: list[int] = []

    def parse(number: int) -> int:
        if number in bad:
            raise ValueError("poison")
        return number

    async def main() -> None:
        async with stores() as store:
            pipeline = Pipeline("orders", dead_letters=store)
            pipeline.read(Repeating([1, 2, 3])).stage(parse).sink(stored.append, name="keep")
            assert await pipeline.run()
            ids = await ids_of(store)
            assert len(set(ids)) == 3
            bad.clear()
            for id_ in ids:
                assert await store.aretry(id_)
            assert await pipeline.run()
            assert sorted(stored) == [1, 2, 3]

    asyncio.run(main())


class Renewing(MemoryDeadLetters):
    """A store that records renewals, and loses the second claim."""

    lease = 30.0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.renewed: list[list[str]] = []

    async def arenew(self, claims: Sequence[ReplayClaim]) -> list[ReplayClaim]:
        self.renewed.append([claim.letter.id for claim in claims])
        if len(self.renewed) == 1:
            raise ConnectionError("no database")
        return list(claims[:1])


def test_claims_are_renewed_until_their_items_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Also after the sources are over; what was lost to another process is not deleted."""
    store = Renewing("orders")

    async def slow(number: int) -> int:
        await asyncio.sleep(95.0)  # noqa: TID251 - of virtual time
        return number

    async def main() -> None:
        for number in (1, 2):
            await store.aadd(letter(f"s:{number}", number, stage="slow"))
            store.retry(f"s:{number}")
        pipeline = Pipeline("orders", dead_letters=store)
        pipeline.read([]).stage(slow, workers=2).sink(print)
        assert await pipeline.run()

    run_virtual(main())
    assert store.renewed == [["s:1", "s:2"], ["s:1", "s:2"], *[["s:1"]] * 7]
    assert [one.id for one in store.letters] == ["s:2"]
    texts = [one.getMessage() for one in caplog.records]
    assert any("cannot be renewed: ConnectionError" in text for text in texts)
    assert any("claim of letter s:2 was lost" in text for text in texts)


@given(st.lists(st.tuples(st.sampled_from(["add", "retry", "drop", "run"]), st.integers(0, 3))))
def test_no_letter_is_lost_whatever_operators_do(  # noqa: C901 - the model of four acts
    history: list[tuple[str, int]],
) -> None:
    """Each item that failed is a letter, was dropped by an operator, or is in the sink."""
    store = MemoryDeadLetters("orders")
    stored: list[int] = []
    bad: set[int] = set()
    expected: dict[str, str] = {}

    def parse(number: int) -> int:
        if number in bad:
            raise ValueError("poison")
        return number

    async def main() -> None:
        for act, number in history:
            id_ = f"s:{number}"
            if act == "add":
                bad.add(number)
                await store.aadd(letter(id_, number, at=len(expected)))
                expected[id_] = expected.get(id_, "dead")
            elif act == "drop":
                assert store.drop(id_) == (expected.pop(id_, None) is not None)
            elif act == "retry":
                assert store.retry(id_) == (expected.get(id_) == "dead")
                if id_ in expected:
                    expected[id_] = "waiting"
            else:
                bad.discard(number)
                pipeline = Pipeline("orders", dead_letters=store)
                pipeline.read([]).stage(parse).sink(stored.append, name="store")
                assert await pipeline.run()
                for kept in [one for one, state in expected.items() if state == "waiting"]:
                    if int(kept[2:]) in bad:
                        expected[kept] = "dead"
                    else:
                        del expected[kept]
                        assert stored.pop(stored.index(int(kept[2:]))) >= 0
                assert not stored
            assert {one.id for one in store.letters} == set(expected)

    run_virtual(main())


def test_a_function_still_takes_letters() -> None:
    """It stores them where it likes; nothing is replayed from there."""
    kept: list[DeadLetter] = []

    async def keep(one: DeadLetter) -> None:
        kept.append(one)

    pipeline = Pipeline("orders", dead_letters=keep)
    pipeline.read(["x"]).stage(int).sink(print)
    run_virtual(pipeline.run())
    assert [one.value for one in kept] == ["x"]
    assert pipeline.snapshot()[Ending.DEAD_LETTER] == 1


def test_the_table_is_named_when_it_is_missing(opening: Any) -> None:
    """An operator sees what was forgotten."""

    async def main() -> None:
        async with opening(migrated=False) as database:
            with pytest.raises(RuntimeError, match="run migrate"):
                await DatabaseDeadLetters(database, "orders").acounts()

    asyncio.run(main())


def test_blocking_twins_do_the_same(tmp_path: Path) -> None:
    """For programs without an event loop."""
    source = Sqlite(tmp_path / "letters.db")
    database = Database(source, name="letters twins")
    try:
        migrate(database)
        store = DatabaseDeadLetters(database, "orders")
        asyncio.run(store.aadd(letter()))
        assert store.counts()["dead"][0] == 1
        assert [item.id for item in store.browse().items] == ["s:1"]
        assert store.retry("s:1")
        item = store.inspect("s:1")
        assert item is not None
        assert item.state == "waiting"
        assert store.drop("s:1")
        assert database.run(_rows) == []
    finally:
        database.close()
        source.close()


def _rows() -> Any:
    return (yield TextQuery("SELECT id FROM {dead_letters}", {}))


def test_without_the_epoch_a_late_process_would_delete_what_another_replays(
    opening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safeguard of `settle`, taken away: the test of claims can fail."""
    from seawall.durable.database.statements import statement, statements

    for dialect in ("postgres", "sqlite"):
        texts = statements(dialect, "dead_letters")
        assert " AND epoch = :epoch" in texts["settle"]
        changed = texts["settle"].replace("epoch = :epoch", "epoch >= :epoch")
        monkeypatch.setitem(texts, "settle", changed)
    statement.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_a_claim_counts_until_a_later_one_is_made(opening)
    finally:
        monkeypatch.undo()
        statement.cache_clear()


KILLED = """
import asyncio, os, signal, sys
from seawall.durable import Database, Sqlite, migrate
from seawall.pipeline import DatabaseDeadLetters, DeadLetter, Pipeline

database = Database(Sqlite(sys.argv[1]))
migrate(database)
letters = DatabaseDeadLetters(database, "orders", lease=0.5)


def parse(number):
    os.kill(os.getpid(), signal.SIGKILL)


async def main():
    await letters.aadd(DeadLetter("s:1", 7, "parse", "ValueError: poison", 1, 100.0))
    assert await letters.aretry("s:1")
    pipeline = Pipeline("orders", dead_letters=letters)
    pipeline.read([]).stage(parse).sink(print)
    await pipeline.run()


asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_process_that_is_killed_with_a_letter_loses_nothing(tmp_path: Path) -> None:
    """When the lease is over another process replays it."""
    path = tmp_path / "letters.db"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)  # noqa: S603 - ours
    assert killed.returncode == -signal.SIGKILL
    source = Sqlite(path)
    database = Database(source, name="letters of a killed process")
    stored: list[int] = []
    try:
        letters = DatabaseDeadLetters(database, "orders", lease=0.5)
        item = letters.inspect("s:1")
        assert item is not None
        assert item.state == "claimed"
        pipeline = Pipeline("orders", dead_letters=letters)
        pipeline.read([]).stage(int, name="parse").sink(stored.append, name="keep")
        while letters.inspect("s:1") is not None:
            asyncio.run(pipeline.run())
        assert stored == [7]
    finally:
        database.close()
        source.close()


def test_a_retried_letter_makes_room_in_a_memory_that_is_full() -> None:
    """Also if every worker of its stage waits for that room."""
    is_down, stored = [True], []

    async def store(number: int) -> None:
        if is_down[0]:
            raise OSError
        stored.append(number)

    async def main() -> MemoryDeadLetters:
        letters = MemoryDeadLetters("p", most=2)
        pipeline = Pipeline("p", dead_letters=letters)
        channel: Channel[int] = Channel(10)
        for number in range(4):
            await channel.aput(number)
        pipeline.read(channel).sink(store)
        running = asyncio.create_task(pipeline.run())
        await sleep_async(10)
        assert len(letters.letters) == 2
        is_down[0] = False
        assert letters.retry(letters.letters[0].id)
        await sleep_async(1000)
        channel.close()
        await asyncio.wait_for(running, 1000)
        return letters

    left = run_virtual(main())
    assert sorted(stored) == [0, 3]
    assert [letter.value for letter in left.letters] == [1, 2]
