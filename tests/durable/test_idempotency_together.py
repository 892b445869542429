"""Single statements of many callers that are committed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall import deadline
from seawall.durable import (
    Database,
    FromRow,
    Idempotency,
    KeyReused,
    NewEvent,
    Outbox,
    Single,
    Sqlite,
)
from seawall.durable import _together as module
from seawall.durable._connections import AskText
from tests.durable.conftest import opening_by
from tests.durable.postgres import Postgres

MANY = 24


class Shop:
    """Orders, each of a customer of its own; and how many statements went together."""

    def __init__(self, database: Database, together: int) -> None:
        self.database = database
        self.idempotency = Idempotency(database, together=together)
        self.outbox = Outbox(database, "shop")
        self.table = database.names.table("orders")
        self.insert = f"INSERT INTO {self.table} (customer) VALUES (:customer) RETURNING id"  # noqa: S608 - our own

    async def ask(self, text: str) -> Any:
        """Ask one thing."""

        def steps() -> Any:
            rows = yield AskText(text, {})
            return rows

        return await self.database.arun(steps)

    async def order(self, customer: str, key: str, **options: Any) -> Single:
        """Place an order, with an event of it."""
        asked = {"scope": "t", "operation": "order", "key": key, "fingerprint": customer, **options}
        event = NewEvent("order", FromRow("id"), "placed", {"of": customer})
        arguments = {"customer": customer}
        own: dict[str, Any] = {"outbox": self.outbox, "events": [event]}
        return await self.idempotency.asingle(self.insert, arguments, **asked, **own)

    async def counted(self) -> list[int]:
        """Count orders, keys and events."""
        names = ("orders", "idempotency", "outbox")
        found = [await self.ask("SELECT count(*) FROM {%s}" % name) for name in names]  # noqa: S608, UP031 - our own
        return [rows[0][0] for rows in found]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many statements each sending had, in their order."""
    noted: list[int] = []

    async def noting(fetch: Any, sql: str, every: list[Any]) -> Any:
        noted.append(len(every))
        return await fetch(sql, every)

    fetching(monkeypatch, noting)
    monkeypatch.setattr(module, "PATIENCE", 1000.0)  # however busy the machine is
    return noted


def fetching(monkeypatch: pytest.MonkeyPatch, instead: Any) -> None:
    """Let `instead(fetch, sql, every)` be done where statements are sent together."""
    from asyncpg import Connection

    fetch = Connection.fetchmany

    async def fetchmany(self: Any, sql: str, every: list[Any]) -> Any:
        return await instead(partial(fetch, self), sql, every)

    monkeypatch.setattr(Connection, "fetchmany", fetchmany)


@pytest.fixture
def shop(postgres: Postgres, tmp_path: Path) -> Any:
    """Return what opens a shop."""

    @asynccontextmanager
    async def opened(together: int = 100) -> AsyncIterator[Shop]:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            made = Shop(database, together)
            table = "CREATE TABLE IF NOT EXISTS {orders} (id bigserial, customer text UNIQUE)"
            await made.ask(table)
            yield made

    return opened


def test_who_comes_meanwhile_goes_together(shop: Any, sent: list[int]):
    """Each has its own answer; a repeat has it, too; and all took a few commits."""

    async def main() -> None:
        async with shop() as s:
            done = await asyncio.gather(*(s.order(f"c{n}", f"k{n}") for n in range(MANY)))
            assert all(one.first for one in done)
            assert len({one.value[0]["id"] for one in done}) == MANY
            assert sum(sent) == MANY - module.UNDER_WAY
            assert len(sent) <= 5
            seen = s.idempotency.snapshot()
            assert (seen["together"], seen["apart"]) == (sum(n for n in sent if n > 1), 0)
            for n, one in enumerate(done):
                place = f"{s.table} WHERE id = {one.value[0]['id']}"
                rows = await s.ask(f"SELECT customer FROM {place}")  # noqa: S608 - our own
                assert rows[0][0] == f"c{n}"
            again = await asyncio.gather(*(s.order(f"c{n}", f"k{n}") for n in range(MANY)))
            assert [one.value for one in again] == [one.value for one in done]
            assert not any(one.first for one in again)
            assert await s.counted() == [MANY] * 3
            assert not s.idempotency._together._lines

    asyncio.run(main())


def test_those_who_come_again_and_again_share_fairly(shop: Any, sent: list[int]):
    """Nobody goes alone for ever beside all others; without a share, one does."""

    async def main() -> None:
        async with shop() as s:

            async def client(number: int) -> None:
                for turn in range(10):
                    await s.order(f"c{number}-{turn}", f"k{number}-{turn}")

            await asyncio.gather(*(client(number) for number in range(8)))
            assert sent
            assert max(sent) <= 8 // module.UNDER_WAY
            assert await s.counted() == [80] * 3

    asyncio.run(main())


def test_who_is_alone_is_not_held_up(shop: Any, sent: list[int]):
    """One after another, each goes by itself."""

    async def main() -> None:
        async with shop() as s:
            for n in range(5):
                assert (await s.order(f"c{n}", f"k{n}")).first
            assert sent == []

    asyncio.run(main())


def test_at_most_so_many_go_together(shop: Any, sent: list[int]):
    """The rest goes with the next ones."""

    async def main() -> None:
        async with shop(together=5) as s:
            await asyncio.gather(*(s.order(f"c{n}", f"k{n}") for n in range(MANY)))
            assert max(sent) == 5
            assert sum(sent) == MANY - module.UNDER_WAY
            assert await s.counted() == [MANY] * 3

    asyncio.run(main())


def test_one_that_fails_spoils_nothing(shop: Any, sent: list[int]):
    """A mistake of one caller is told to that one; a repeat and a reused key are what they are."""

    async def main() -> None:
        async with shop() as s:
            await s.order("known", "known")
            calls = [s.order(f"c{n}", f"k{n}") for n in range(10)]
            calls += [s.order("known", "another"), s.order("known", "known")]
            calls += [s.order("other", "known"), s.order("twice", "twin"), s.order("twice", "twin")]
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert all(one.first for one in done[:10])
            assert "customer" in str(done[10])  # its own index
            assert done[11] == Single(first=False, value=[{"id": 1}])
            assert isinstance(done[12], KeyReused)
            assert sorted(one.first for one in done[13:]) == [False, True]
            assert done[13].value == done[14].value
            assert sent
            assert s.idempotency.snapshot()["apart"] >= 2
            assert await s.counted() == [12] * 3

    asyncio.run(main())


def test_after_a_failure_fewer_go_together(shop: Any, sent: list[int]):
    """Where there are repeats among all of them, little is done in vain."""

    async def main() -> None:
        async with shop(together=16) as s:
            await s.order("known", "known")
            calls = [s.order(f"c{n}", f"k{n}") for n in range(160)]
            for place in range(0, 180, 5):
                calls.insert(place, s.order("known", "known"))
            await asyncio.gather(*calls)
            assert sent[0] == 16
            assert max(sent[2:]) <= 8
            assert await s.counted() == [161] * 3

    asyncio.run(main())


def test_a_statement_that_does_nothing_leaves_no_key(shop: Any, sent: list[int]):
    """No row is no row, also among others."""

    async def main() -> None:
        async with shop() as s:
            await s.order("c", "k")
            update = f"UPDATE {s.table} SET customer = :new WHERE customer = :old RETURNING id"  # noqa: S608 - our own
            asked = {"scope": "t", "operation": "rename", "fingerprint": None}
            calls = [
                s.idempotency.asingle(update, {"old": old, "new": "d"}, key=f"u{n}", **asked)
                for n, old in enumerate(["x", "x", "x", "c", "x"])
            ]
            done = await asyncio.gather(*calls)
            assert [one.value for one in done] == [[], [], [], [{"id": 1}], []]
            assert sum(sent) == 3
            assert (await s.counted())[1] == 2

    asyncio.run(main())


def test_who_is_cancelled_while_it_waits_has_done_nothing(shop: Any, sent: list[int]):
    """And holds up nobody else. Cancelled later, it is done, and a repeat is told so."""

    async def main() -> None:
        async with shop() as s:
            tasks = [asyncio.ensure_future(s.order(f"c{n}", f"k{n}")) for n in range(6)]
            await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop
            tasks[4].cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(done[4], asyncio.CancelledError)
            assert sum(sent) == 3
            assert await s.counted() == [5] * 3
            assert (await s.order("c4", "k4")).first

    asyncio.run(main())


def test_who_is_late_goes_by_itself(shop: Any, sent: list[int]):
    """Its time is over before it was sent: the others do not carry it."""

    async def main() -> None:
        async with shop() as s:

            async def late() -> Single:
                with deadline(0.0):
                    return await s.order("late", "late")

            first = [asyncio.ensure_future(s.order(f"c{n}", f"k{n}")) for n in range(4)]
            last = asyncio.ensure_future(late())
            await asyncio.gather(*first, last, return_exceptions=True)
            assert sum(sent) == 2

    asyncio.run(main())


def test_an_answer_that_was_lost_is_asked_for_again(shop: Any, monkeypatch: pytest.MonkeyPatch):
    """The commit was done and nobody heard of it: each finds its own key."""

    async def lost(fetch: Any, sql: str, every: list[Any]) -> Any:
        await fetch(sql, every)
        raise ConnectionError("lost in mid-reply")

    async def main() -> None:
        async with shop() as s:
            fetching(monkeypatch, lost)
            done = await asyncio.gather(*(s.order(f"c{n}", f"k{n}") for n in range(8)))
            assert [one.first for one in done].count(True) == module.UNDER_WAY
            assert len({one.value[0]["id"] for one in done}) == 8
            assert await s.counted() == [8] * 3

    asyncio.run(main())


def test_the_end_of_a_sending_task_strands_nobody(shop: Any, monkeypatch: pytest.MonkeyPatch):
    """Whoever cancels it: those who go with it, and those who wait, see for themselves."""

    async def cancelled(*_: Any) -> Any:
        raise asyncio.CancelledError

    async def main() -> None:
        async with shop(together=3) as s:
            fetching(monkeypatch, cancelled)
            done = await asyncio.gather(*(s.order(f"c{n}", f"k{n}") for n in range(12)))
            assert all(one.first for one in done)
            assert await s.counted() == [12] * 3
            assert not s.idempotency._together._lines

    asyncio.run(main())


def test_a_sending_task_that_never_began_strands_nobody(shop: Any):
    """Cancelled before its first step, it runs no line of its own."""

    async def main() -> None:
        async with shop() as s:
            together = s.idempotency._together
            create_task = asyncio.get_running_loop().create_task
            cut: list[Any] = []

            def cutting(coroutine: Any, **options: Any) -> Any:
                task = create_task(coroutine, **options)
                if coroutine.__name__ == "_send":
                    cut.append(task.cancel())
                return task

            asyncio.get_running_loop().create_task = cutting  # type: ignore[method-assign]
            for turn in range(3):
                calls = (s.order(f"c{turn}-{n}", f"k{turn}-{n}") for n in range(6))
                async with asyncio.timeout(20):
                    assert all(one.first for one in await asyncio.gather(*calls))
            assert cut
            assert not together._lines
            assert await s.counted() == [18] * 3

    asyncio.run(main())


@pytest.mark.parametrize("patient", [False, True])
def test_who_waits_behind_what_is_stuck_goes_by_itself(
    shop: Any, monkeypatch: pytest.MonkeyPatch, *, patient: bool
):
    """Two wait for a row that a transaction holds: the third does not; with patience, it does."""
    if patient:
        monkeypatch.setattr(module, "PATIENCE", 1000.0)

    async def main() -> None:
        async with shop() as s:
            async with s.database.atransaction() as holder:
                await holder.execute(f"INSERT INTO {s.table} (customer) VALUES ('x'), ('y')")  # noqa: S608 - our own
                stuck = [asyncio.ensure_future(s.order(who, who)) for who in "xy"]
                third = asyncio.ensure_future(s.order("z", "z"))
                done, _ = await asyncio.wait([third], timeout=2.0 if patient else 20.0)
                assert bool(done) is not patient
            assert (await third).first
            said = await asyncio.gather(*stuck, return_exceptions=True)
            assert all("customer" in str(one) for one in said)

    asyncio.run(main())


def test_a_connection_is_given_back_while_others_want_it(postgres: Postgres, tmp_path: Path):
    """However many come again and again: who asks the pool for one gets it."""
    import asyncpg

    async def main() -> None:
        async with (
            opening_by("asyncpg", postgres, tmp_path)() as database,
            asyncpg.create_pool(postgres.url, min_size=2, max_size=2) as small,
        ):
            database.source = small
            s = Shop(database, 100)
            await s.ask("CREATE TABLE {orders} (id bigserial, customer text UNIQUE)")
            over = False

            async def client(number: int) -> None:
                turn = 0
                while not over:
                    turn += 1
                    await s.order(f"{number}-{turn}", f"{number}-{turn}")

            clients = [asyncio.ensure_future(client(number)) for number in range(8)]
            async with asyncio.timeout(30):
                for _ in range(5):
                    assert await small.fetchval("SELECT 1") == 1
            over = True
            await asyncio.gather(*clients)

    asyncio.run(main())


def test_what_is_large_goes_by_itself(shop: Any, sent: list[int]):
    """And what is large together goes in several parts."""

    async def main() -> None:
        async with shop() as s:
            each = module.LARGEST // 3
            calls = [s.order(f"{n}" * each, f"k{n}") for n in range(8)]
            calls += [s.order("x" * module.LARGEST, "x")]
            assert all(one.first for one in await asyncio.gather(*calls))
            assert max(sent) <= 3
            assert sum(sent) == 6

    asyncio.run(main())


def test_without_going_apart_one_mistake_is_everybodys(shop: Any, monkeypatch: pytest.MonkeyPatch):
    """Ablation: tell all who went together what the database said of one."""

    async def told(_: Any, connection: Any, line: Any, taken: list[Any]) -> list[Any]:
        try:
            return list(await connection.fetchmany(line.sql, [one.arguments for one in taken]))
        except Exception as error:  # noqa: BLE001 - the same to all
            for one in taken:
                one.answer.set_exception(error)
            return [None] * len(taken)

    async def main() -> None:
        async with shop() as s:
            await s.order("known", "known")
            monkeypatch.setattr(module.Together, "_sent", told)
            monkeypatch.setattr(module, "PATIENCE", 1000.0)  # however busy the machine is
            # In the midst of others: the first ones may be sent each by itself.
            calls = [s.order(f"c{n}", f"k{n}") for n in range(24)]
            calls.insert(12, s.order("known", "new"))
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(one, Exception) for one in done) > 1

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(6))
def test_histories_with_repeats_mistakes_and_cancellations(shop: Any, seed: int):
    """One order, one event and one answer for each key, whatever happens to those beside it."""
    rng = Random(seed)

    async def main() -> None:
        async with shop(together=rng.choice([2, 4, 50])) as s:
            answers: dict[str, list[Any]] = {}

            async def client(number: int) -> None:
                for _ in range(12):
                    key = f"k{rng.randrange(40)}"
                    task = asyncio.ensure_future(s.order(f"of {key}", key))
                    if rng.random() < 0.2:
                        asyncio.get_running_loop().call_later(rng.random() / 200, task.cancel)
                    if rng.random() < 0.2:
                        with pytest.raises(Exception, match="customer"):  # who is there already
                            await s.order("of k0", f"wrong-{number}-{rng.random()}")
                    for one in await asyncio.gather(task, return_exceptions=True):
                        if isinstance(one, asyncio.CancelledError):
                            continue
                        assert isinstance(one, Single)
                        answers.setdefault(key, []).append(one)

            await s.order("of k0", "k0")
            async with asyncio.timeout(50):
                await asyncio.gather(*(client(number) for number in range(8)))
            for key, given in answers.items():
                assert len({str(one.value) for one in given}) == 1, key
                assert [one.first for one in given].count(True) <= 1, key
            orders, keys, events = await s.counted()
            assert orders == keys == events
            customers = await s.ask(f"SELECT customer FROM {s.table}")  # noqa: S608 - our own
            assert len(customers) == len(set(customers)) == orders

    asyncio.run(main())


def test_only_where_it_can_be_done(shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Elsewhere it is refused at once, and told why."""
    import asyncpg

    source = Sqlite(tmp_path / "a.db")
    database = Database(source, name="no group")
    with pytest.raises(TypeError, match="needs a pool of asyncpg"):
        Idempotency(database, together=2)
    assert Idempotency(database, together=1)._together is None
    database.close()
    source.close()

    async def main() -> None:
        async with shop() as s:
            monkeypatch.delattr(asyncpg.Connection, "fetchmany")
            with pytest.raises(TypeError, match=r"asyncpg 0\.30"):
                Idempotency(s.database, together=2)

    asyncio.run(main())
