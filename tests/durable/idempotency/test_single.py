"""The user's statement, its key and its events as one: on PostgreSQL, by every driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from seawall.durable import Database, migrate
from seawall.durable.database.connections import TextQuery
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.idempotency.single_statement import Single, text_of
from seawall.durable.outbox.events import FromRow, NewEvent
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import AnswerNotKept, KeyInFlight, KeyReused, RecordGarbled
from seawall.models.idempotency import Fresh
from tests.durable.conftest import opening_by
from tests.durable.postgres import Postgres

DRIVERS = ["asyncpg", "psycopg", "sqlalchemy"]


def told(text: str, **arguments: Any) -> Any:
    """Ask one thing."""

    def steps() -> Any:
        rows = yield TextQuery(text, arguments)
        return rows

    return steps


class Shop:
    """A table of orders, and an idempotency."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.idempotency = Idempotency(database)
        self.outbox = Outbox(database, "shop")
        self.table = database.names.table("orders")
        self.insert = (
            f"INSERT INTO {self.table} (customer, note)"  # noqa: S608 - names of our own
            " VALUES (:customer, '{\"a\": 1}'::text)"
            " RETURNING id, customer;"
        )

    async def begin(self) -> None:
        """Make the table."""
        text = (
            "CREATE TABLE IF NOT EXISTS {orders} (id bigint GENERATED ALWAYS AS IDENTITY,"
            " customer text NOT NULL, note text)"
        )
        await self.database.arun(told(text))

    async def order(self, customer: str = "c", key: str = "k", **options: Any) -> Single:
        """Place an order."""
        options = {"fingerprint": customer, **options}
        sql = options.pop("sql", self.insert)
        return await self.idempotency.asingle(
            sql, {"customer": customer}, scope="t", operation="order", key=key, **options
        )

    async def count(self, table: str = "orders") -> int:
        """Count rows."""
        rows = await self.database.arun(told("SELECT count(*) FROM {%s}" % table))  # noqa: S608, UP031 - our own
        number: int = rows[0][0]
        return number


@pytest.fixture(params=DRIVERS)
def shop(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Any:
    """Return what gives a shop by each driver."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Shop]:
        async with opening_by(request.param, postgres, tmp_path)() as database:
            made = Shop(database)
            await made.begin()
            yield made

    return opened


def test_a_repeat_has_the_rows_of_the_first(shop: Any):
    """One order, one key; a repeat returns the same rows."""

    async def main() -> None:
        async with shop() as s:
            first = await s.order("c%d")
            assert first.first
            assert first.value[0]["customer"] == "c%d"
            again = await s.order("c%d")
            assert again == Single(first=False, value=first.value)
            with pytest.raises(KeyReused):
                await s.order("other")
            assert await s.count() == 1
            assert await s.count("idempotency") == 1

    asyncio.run(main())


def test_many_at_once_place_one_order(shop: Any):
    """64 callers with one key."""

    async def main() -> None:
        async with shop() as s:
            done = await asyncio.gather(*(s.order() for _ in range(64)))
            assert sum(one.first for one in done) == 1
            assert len({one.value[0]["id"] for one in done}) == 1
            assert await s.count() == 1

    asyncio.run(main())


def test_a_conflict_of_the_users_own_is_the_users(shop: Any):
    """Another key for a customer who has an order: that error passes, and no key is kept."""

    async def main() -> None:
        async with shop() as s:
            await s.database.arun(told("CREATE UNIQUE INDEX ON {orders} (customer)"))
            first = await s.order("c", "k1")
            assert await s.order("c", "k1") == Single(first=False, value=first.value)
            with pytest.raises(Exception, match="duplicate key"):
                await s.order("c", "k2")
            assert await s.count("idempotency") == 1

    asyncio.run(main())


def test_an_update_that_finds_nothing_to_do(shop: Any):
    """Without a row nothing is kept; and a repeat whose row is as the first left it is a repeat."""

    async def main() -> None:
        async with shop() as s:
            update = (
                f"UPDATE {s.table} SET note = 'paid' WHERE customer = :customer"  # noqa: S608 - our own
                " AND note <> 'paid' RETURNING id"
            )
            events = {"outbox": s.outbox, "events": [NewEvent("order", FromRow("id"), "paid", {})]}
            none = await s.order("c", "pay", sql=update, **events)
            assert none == Single(first=True, value=[])
            assert await s.count("idempotency") == await s.count("outbox") == 0
            await s.order("c", "place")
            first = await s.order("c", "pay", sql=update, **events)
            again = await s.order("c", "pay", sql=update, **events)
            assert (first.first, again.first) == (True, False)
            assert first.value == again.value != []
            assert await s.count("outbox") == 1

    asyncio.run(main())


def test_several_rows_are_all_told(shop: Any):
    """What the statement returned, row by row, now and to a repeat; one key, one event of each."""

    async def main() -> None:
        async with shop() as s:
            for number in range(5):
                await s.order("c", f"place{number}")
            update = (
                f"UPDATE {s.table} SET note = :note WHERE customer = :customer"  # noqa: S608 - our own
                " RETURNING id, note"
            )
            note = 'a "quoted" \\ back\nslash, {brace} and \u00fc'
            asked: dict[str, Any] = {
                "scope": "t", "operation": "note", "key": "k", "fingerprint": None,
                "outbox": s.outbox,
                "events": [
                    NewEvent("order", "c", "noted", {"n": 1}, {"by": "ann"}),
                    NewEvent("order", "c", "noted", {"n": 2}),
                ],
            }  # fmt: skip
            told_args = {"customer": "c", "note": note}
            for most in (None, 10):
                own = Idempotency(s.database, **({} if most is None else {"max_body": most}))
                asked["key"] = f"k{most}"
                first = await own.asingle(update, told_args, **asked)
                assert first.first
                assert sorted(row["id"] for row in first.value) == [1, 2, 3, 4, 5]
                assert {row["note"] for row in first.value} == {note}
                if most is None:
                    again = await own.asingle(update, told_args, **asked)
                    assert again == Single(first=False, value=first.value)
            rows = await s.database.arun(
                told("SELECT sequence, payload, headers FROM {outbox} ORDER BY sequence")
            )
            assert [(n, bytes(payload), headers) for n, payload, headers in rows] == [
                (1, b'{"n":1}', '{"by":"ann"}'),
                (2, b'{"n":2}', None),
                (3, b'{"n":1}', '{"by":"ann"}'),
                (4, b'{"n":2}', None),
            ]

    asyncio.run(main())


async def debits(s: Shop, times: int) -> list[Any]:
    """Take 60 of a balance of 100, which may not be less than 0, with one key, all at once."""
    table = s.database.names.table("accounts")
    await s.database.arun(
        told("CREATE TABLE {accounts} (id int PRIMARY KEY, balance bigint CHECK (balance >= 0))")
    )
    await s.database.arun(told("INSERT INTO {accounts} VALUES (1, 100)"))
    debit = f"UPDATE {table} SET balance = balance - 60 WHERE id = 1 RETURNING balance"  # noqa: S608 - our own
    asked = {"scope": "t", "operation": "debit", "key": "k", "fingerprint": None}
    done = [await s.idempotency.asingle(debit, {}, **asked)] if times == 1 else []
    tries = (s.idempotency.asingle(debit, {}, **asked) for _ in range(times))
    return [*done, *await asyncio.gather(*tries, return_exceptions=True)]


@pytest.mark.parametrize("times", [1, 6])
def test_a_repeat_that_could_not_be_done_again_has_the_first_answer(shop: Any, times: int):
    """What the first has done may be why the statement fails now: that is no answer to a repeat."""

    async def main() -> None:
        async with shop() as s:
            done = await debits(s, times)
            assert [one.value for one in done] == [[{"balance": 40}]] * len(done)
            assert [one.first for one in done].count(True) == 1
            other = {"scope": "t", "operation": "debit", "key": "other", "fingerprint": None}
            debit = f"UPDATE {s.database.names.table('accounts')} SET balance = -1 RETURNING id"  # noqa: S608 - our own
            with pytest.raises(Exception, match="check constraint"):  # one of its own
                await s.idempotency.asingle(debit, {}, **other)
            assert await s.count("idempotency") == 1

    asyncio.run(main())


def test_unless_it_looks_a_repeat_is_told_a_failure(shop: Any, monkeypatch: pytest.MonkeyPatch):
    """Ablation: raising the statement's own error reports a payment as failed."""
    from seawall.durable.idempotency import single_statement as module

    monkeypatch.setattr(module, "_is_refusal", lambda error: module._has_state(error, "23505"))

    async def main() -> None:
        async with shop() as s:
            first, again = await debits(s, 1)
            assert first.first
            assert "check constraint" in str(again)

    asyncio.run(main())


COLONS = r"""
INSERT INTO {orders} (customer, note) -- :comment
VALUES (:Id, 'to :id, it''s' || E' \' :e' || $q$ :q $q$ || :b::text || (ARRAY[1,2,3])[:2]::text)
RETURNING /* :block */ note AS "a :name", (:c)::int AS c
"""


def test_colons_that_begin_no_argument(shop: Any):
    """In texts, quoted names, comments, casts and slices they are what they were."""

    async def main() -> None:
        async with shop() as s:
            sql = COLONS.replace("{orders}", s.table)
            asked: dict[str, Any] = {"scope": "t", "operation": "o", "key": "k", "fingerprint": ""}
            given = {"Id": "c", "b": "b%s", "c": 7}
            done = await s.idempotency.asingle(sql, given, **asked)
            note = "to :id, it's ' :e :q b%s{1,2}"
            assert done.value == [{"a :name": note, "c": 7}]
            with pytest.raises(ValueError, match=r"\['b', 'c'\] are not given"):
                await s.idempotency.asingle(sql, {"Id": "c"}, **{**asked, "key": "k2"})
            assert await s.count() == 1

    asyncio.run(main())


def test_several_rows_for_an_event_of_one_are_refused(shop: Any):
    """Of whose row the event would tell is anybody's guess: nothing is done, and it says so."""

    async def main() -> None:
        async with shop() as s:
            for number in range(2):
                await s.order("c", f"place{number}")
            update = (
                f"UPDATE {s.table} SET note = 'x' WHERE customer = :customer RETURNING id, note"  # noqa: S608 - our own
            )
            for event in (
                NewEvent("order", FromRow("id"), "noted", {}),
                NewEvent("order", "7", "noted", FromRow("note")),
            ):
                with pytest.raises(ValueError, match="several rows"):
                    await s.order("c", "n", sql=update, outbox=s.outbox, events=[event])
            rows = await s.database.arun(told("SELECT count(*) FROM {orders} WHERE note = 'x'"))
            assert rows == [(0,)]
            assert await s.count("outbox") == await s.count("outbox_sequences") == 0

    asyncio.run(main())


def test_rows_that_cannot_be_read_are_told_as_done(shop: Any):
    """A number too long for Python's JSON: it was done, says the error, and so does a repeat's."""

    async def main() -> None:
        async with shop() as s:
            long = (
                f"INSERT INTO {s.table} (customer) VALUES (:customer)"  # noqa: S608 - our own
                " RETURNING repeat('9', 5000)::json AS x"
            )
            for _ in range(2):
                with pytest.raises(RecordGarbled):
                    await s.order("c", "long", sql=long)
            assert await s.count() == 1

    asyncio.run(main())


def test_long_texts_are_not_kept(shop: Any):
    """Hardly two of them are alike, and they would fill the memory."""

    async def main() -> None:
        async with shop() as s:
            before = text_of.cache_info().currsize
            for number in range(4):
                long = s.insert.replace("INSERT", f"/* {number} {'x' * 20_000} */ INSERT")
                assert (await s.order("c", f"long{number}", sql=long)).first
            assert text_of.cache_info().currsize == before

    asyncio.run(main())


def test_who_is_cancelled_while_a_thread_works_waits_for_its_end(
    postgres: Postgres, tmp_path: Path
):
    """With a blocking pool a cancelled caller waits until its statement is done."""
    from psycopg_pool import ConnectionPool

    async def main(idempotency: Idempotency, table: str) -> None:
        insert = f"INSERT INTO {table} SELECT 1 FROM pg_sleep(0.2) RETURNING id"  # noqa: S608 - our own
        named = {"scope": "t", "operation": "o", "key": "k", "fingerprint": None}
        task = asyncio.ensure_future(idempotency.asingle(insert, {}, **named))
        while not (await asyncio.to_thread(idempotency.database.run, told(SLEEPING)))[0][0]:
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert idempotency.snapshot()["completed"] == 1

    with ConnectionPool(postgres.url, min_size=1, max_size=2, open=True) as pool:
        database = Database(pool, schema=f"single {tmp_path.name}"[:38], name="single cancelled")
        migrate(database)
        database.run(told("CREATE TABLE {slow} (id int)"))
        asyncio.run(main(Idempotency(database), database.names.table("slow")))
        database.close()


SLEEPING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE query LIKE '%FROM pg_sleep(0.2) RETURNING%' AND pid <> pg_backend_pid()"
)


def test_events_come_with_the_row(shop: Any):
    """Of 16 at once, one order and one event of it are there."""

    async def main() -> None:
        async with shop() as s:
            placed = NewEvent("order", FromRow("id"), "placed", {"by": "c"})
            done = await asyncio.gather(
                *(s.order(outbox=s.outbox, events=[placed]) for _ in range(16))
            )
            rows = await s.database.arun(told("SELECT aggregate_id FROM {outbox}"))
            assert rows == [(str(done[0].value[0]["id"]),)]
            with pytest.raises(TypeError, match="outbox="):
                await s.order(events=[placed])

    asyncio.run(main())


def test_what_is_over_is_taken(shop: Any):
    """An expired key, or one with a dead owner, is taken over; one at work is not."""

    async def main() -> None:
        async with shop() as s:
            await s.order("c1", "old")
            over = "UPDATE {idempotency} SET expires_at = 0, lease_until = 0"
            await s.database.arun(told(over))
            assert (await s.order("c2", "old")).first
            found = await s.idempotency.areserve("t", "order", "dead", "c3")
            assert isinstance(found, Fresh)
            with pytest.raises(KeyInFlight):
                await s.order("c3", "dead")
            await s.database.arun(told("UPDATE {idempotency} SET lease_until = 0"))
            assert (await s.order("c3", "dead")).first
            assert not await s.idempotency.acomplete(found.claim, 1)

    asyncio.run(main())


def test_a_connection_of_ones_own(shop: Any):
    """It may be given where it is in no transaction; else the key would break that."""

    async def main() -> None:
        async with shop() as s, s.database.atransaction() as conn:
            with pytest.raises(RuntimeError, match="in none"):
                await s.order(conn=conn)
        async with shop() as s:
            if not hasattr(s.database.source, "acquire"):
                return
            async with s.database.source.acquire() as conn:
                assert (await s.order(key="own", conn=conn)).first
                again = await s.order(key="own", conn=conn)
                assert not again.first
                await s.database.arun(told("UPDATE {idempotency} SET expires_at = 0"))
                assert (await s.order(key="own", conn=conn)).first

    asyncio.run(main())


def test_rows_that_are_too_large_are_done_and_not_kept(shop: Any):
    """The first call returns them; a repeat does nothing and says why."""

    async def main() -> None:
        async with shop() as s:
            s.idempotency = Idempotency(s.database, max_body=10)
            assert (await s.order()).value[0]["customer"] == "c"
            with pytest.raises(AnswerNotKept):
                await s.order()
            assert await s.count() == 1

    asyncio.run(main())


def test_without_the_key_each_places_an_order(shop: Any, monkeypatch: pytest.MonkeyPatch):
    """Ablation: the key's row is what makes it one."""
    from seawall.durable.idempotency import single_statement as module

    def keyless(*asked: Any) -> Any:
        whole = text_of(*asked)
        before, found, after = whole.sql.rpartition("LIMIT 1) AS seawall_made")
        assert found
        return whole._replace(sql=f"{before}LIMIT 0) AS seawall_made{after}")

    monkeypatch.setattr(module, "text_of", keyless)

    async def main() -> None:
        async with shop() as s:
            done = await asyncio.gather(*(s.order() for _ in range(4)))
            assert [one.first for one in done] == [True] * 4
            assert await s.count() == 4

    asyncio.run(main())


def test_blocking_and_refusals(postgres: Postgres, tmp_path: Path):
    """It is there without an event loop, too; SQLite and names of our own are refused."""
    from psycopg_pool import ConnectionPool

    named: dict[str, Any] = {"scope": "t", "operation": "o", "key": "k", "fingerprint": None}
    with ConnectionPool(postgres.url, min_size=1, max_size=2, open=True) as pool:
        database = Database(pool, schema=f"single {tmp_path.name}"[:38], name="single blocking")
        migrate(database)
        database.run(told("CREATE TABLE {orders} (n bigint)"))
        table = database.names.table("orders")
        insert = f"INSERT INTO {table} VALUES (:n) RETURNING n"  # noqa: S608 - names of our own
        idempotency = Idempotency(database)
        assert idempotency.single(insert, {"n": 2}, **named) == Single(first=True, value=[{"n": 2}])
        assert not idempotency.single(insert, {"n": 3}, **named).first
        with pytest.raises(ValueError, match="our own"):
            idempotency.single(insert, {"seawall_scope": 2}, **named)
        with pytest.raises(TypeError, match="RETURNING"):
            idempotency.single("", {}, **named)
        database.close()

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            with pytest.raises(TypeError, match="PostgreSQL"):
                await Idempotency(database).asingle("INSERT", {}, **named)

    asyncio.run(main())
