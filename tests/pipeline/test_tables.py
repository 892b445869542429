"""Tables by position: late commits, what a table must be; and effects that happen once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall.durable import Database, Inbox, Outbox, Sqlite, migrate
from seawall.durable.database.connections import TextQuery
from seawall.pipeline import (
    DatabaseCheckpoint,
    InboxSink,
    IterableSource,
    Pipeline,
    TableSource,
    table,
)
from tests.durable.conftest import Opening, opening_by
from tests.durable.postgres import Postgres


async def do(database: Database, text: str) -> list[Any]:
    """Carry out one statement in a transaction of its own."""

    def steps() -> Any:
        return (yield TextQuery(text.replace("{", "{{").replace("}", "}}"), {}))

    answer: list[Any] = await database.arun(steps)
    return answer


class Orders:
    """A table of orders in PostgreSQL, and connections that add to it."""

    def __init__(self, database: Database, url: str) -> None:
        self.database = database
        self.name = f"{database.names.schema}.orders"
        self.quoted = ".".join(f'"{part}"' for part in self.name.split("."))
        self.url = url

    @asynccontextmanager
    async def adding(self, *, commit: bool = True) -> AsyncIterator[Any]:
        """Have a transaction open, with a function that adds a row and returns its number."""
        import asyncpg

        connection = await asyncpg.connect(self.url)
        try:
            transaction = connection.transaction()
            await transaction.start()

            async def add() -> int:
                number: int = await connection.fetchval(
                    f"INSERT INTO {self.quoted} (total) VALUES (1) RETURNING id"  # noqa: S608 - our own
                )
                return number

            yield add
            await (transaction.commit() if commit else transaction.rollback())
        finally:
            await connection.close()

    def open(self, **options: Any) -> TableSource:
        """Return a source that looks often."""
        return table(self.database, self.name, **{"follow": True, "poll": 0.01, **options})


@pytest.fixture
def ordering(postgres: Postgres, tmp_path: Path) -> Any:
    """Return what opens a fresh table."""
    opened = opening_by("asyncpg", postgres, tmp_path)

    @asynccontextmanager
    async def orders() -> AsyncIterator[Orders]:
        async with opened() as database:
            made = Orders(database, postgres.url)
            await do(database, f"CREATE TABLE {made.quoted} (id bigserial PRIMARY KEY, total int)")
            yield made

    return orders


async def numbers(source: TableSource, count: int) -> list[int]:
    """Return the next numbers of rows."""
    seen: list[int] = []
    async with asyncio.timeout(60):
        while len(seen) < count:
            seen += [handle for _, handle in await source.pull(100)]
    return seen


async def waits(source: TableSource) -> asyncio.Task[Any]:
    """Begin a pull, and return it when it has found that rows wait for a gap."""
    pulling = asyncio.create_task(source.pull(100))
    async with asyncio.timeout(60):
        while source.snapshot()["held_back"] is None:
            await asyncio.wait([pulling], timeout=0.01)
            assert not pulling.done(), pulling.result()
    return pulling


def test_a_row_that_is_committed_after_a_larger_one_is_read(ordering: Any) -> None:
    """Two transactions: the one with the smaller number is the later to commit."""

    async def main() -> None:
        async with ordering() as orders:
            source = orders.open()
            async with orders.adding() as late, orders.adding() as first:
                assert await first() == 1
            # The transactions have ended in that order: the second one first.
            assert await numbers(source, 1) == [1]
            async with orders.adding() as late:
                assert await late() == 2
                async with orders.adding() as early:
                    assert await early() == 3
                pulling = await waits(source)
            assert [handle for _, handle in await pulling] == [2, 3]
            await source.close()

    asyncio.run(main())


def test_the_gap_of_a_transaction_that_was_rolled_back_holds_up_nobody(ordering: Any) -> None:
    """Nor does a transaction that began to write after the row behind the gap was seen."""

    async def main() -> None:
        async with ordering() as orders:
            source = orders.open()
            async with orders.adding() as later:
                async with orders.adding(commit=False) as undone:
                    assert await undone() == 1
                    async with orders.adding() as add:
                        assert await add() == 2
                    pulling = await waits(source)
                    assert await later() == 3  # it is open for longer, and not waited for
                assert [handle for _, handle in await pulling] == [2]
            assert await numbers(source, 1) == [3]
            await source.close()

    asyncio.run(main())


def test_rows_before_a_gap_do_not_wait_for_it(ordering: Any) -> None:
    """Only those behind it do."""

    async def main() -> None:
        async with ordering() as orders:
            source = orders.open()
            async with orders.adding() as add:
                assert [await add() for _ in range(2)] == [1, 2]
            async with orders.adding() as late:
                assert await late() == 3
                async with orders.adding() as add:
                    assert await add() == 4
                assert await numbers(source, 2) == [1, 2]
                pulling = await waits(source)
            assert [handle for _, handle in await pulling] == [3, 4]
            await source.close()

    asyncio.run(main())


def test_without_the_wait_for_gaps_rows_are_lost(
    ordering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ablation: a reader that believes every number it sees."""
    from seawall.durable.database.table_reader import TableReader

    monkeypatch.setattr(TableReader, "_up_to_gap", lambda _self, rows, _after: rows)

    async def main() -> None:
        async with ordering() as orders:
            source = orders.open()
            async with orders.adding() as late:
                await late()
                async with orders.adding() as add:
                    await add()
                assert await numbers(source, 1) == [2]
            async with orders.adding() as add:
                await add()
            assert await numbers(source, 1) == [3]  # and 1 was never seen
            await source.close()

    asyncio.run(main())


def test_many_writers_with_commits_in_any_order_lose_no_row(ordering: Any) -> None:
    """Eight connections that commit and roll back at random, while one reads along."""

    async def main() -> None:
        async with ordering() as orders:
            chance, committed = Random(5), []

            async def write(number: int) -> None:
                own = Random(number)
                for _ in range(6):
                    commits = own.random() < 0.7
                    async with orders.adding(commit=commits) as add:
                        added = []
                        for _ in range(own.randint(1, 3)):
                            added.append(await add())
                            for _ in range(chance.randint(0, 20)):
                                await asyncio.sleep(0)  # noqa: TID251 - let others go first
                    if commits:
                        committed.extend(added)

            source = orders.open()
            seen: list[int] = []

            async def read() -> None:
                while True:
                    seen.extend(handle for _, handle in await source.pull(7))

            reading = asyncio.create_task(read())
            await asyncio.gather(*(write(number) for number in range(8)))
            async with asyncio.timeout(60):
                while len(seen) < len(committed):
                    await asyncio.wait([reading], timeout=0.02)
                    assert not reading.done()
            reading.cancel()
            await asyncio.wait([reading])
            assert seen == sorted(committed)

    asyncio.run(main())


def test_a_partition_that_is_written_to_is_waited_for(ordering: Any) -> None:
    """Whoever adds to it directly holds no lock of the table above."""

    async def main() -> None:
        async with ordering() as orders:
            whole = f'"{orders.database.names.schema}"."parts"'
            part = f'"{orders.database.names.schema}"."part"'
            await do(
                orders.database,
                f"CREATE TABLE {whole} (id bigserial, total int) PARTITION BY RANGE (id)",
            )
            await do(
                orders.database,
                f"CREATE TABLE {part} PARTITION OF {whole} FOR VALUES FROM (1) TO (1000)",
            )
            orders.quoted, orders.name = part, f"{orders.database.names.schema}.parts"
            source = orders.open()
            async with orders.adding() as late:
                await late()
                async with orders.adding() as add:
                    await add()
                pulling = await waits(source)
            assert [handle for _, handle in await pulling] == [1, 2]
            await source.close()

    asyncio.run(main())


def test_a_table_that_cannot_be_read_by_position_is_refused(ordering: Any) -> None:
    """With what to write instead; a name with any character in it is a name."""

    async def main() -> None:
        async with ordering() as orders:
            database, schema = orders.database, orders.database.names.schema
            await do(database, f'CREATE VIEW "{schema}"."seen" AS SELECT 1 AS id')
            await do(database, f'CREATE TABLE "{schema}"."odd {{}} %s :x" (id int, note text)')
            await do(database, f'INSERT INTO "{schema}"."odd {{}} %s :x" VALUES (1, \'a\')')  # noqa: S608 - our own
            odd = f"{schema}.odd {{}} %s :x"
            for name, options, message in [
                ("none", {}, "there is no table"),
                (f"{schema}.seen", {}, "is a view"),
                (odd, {"position": "number"}, "has no column 'number', but id, note"),
                (odd, {"position": "note"}, "is of type text"),
                (odd, {"columns": ["price"]}, "has no column 'price'"),
            ]:
                with pytest.raises(ValueError, match=message):
                    await table(database, name, **options).pull(1)
            assert await table(database, odd).pull(5) == [({"id": 1, "note": "a"}, 1)]
            await do(database, f'INSERT INTO "{schema}"."odd {{}} %s :x" VALUES (1, \'b\')')  # noqa: S608 - our own
            with pytest.raises(ValueError, match="unique"):
                await table(database, odd).pull(5)

    asyncio.run(main())


def test_every_driver_reads_and_keeps_its_place(opening: Opening) -> None:
    """Rows as dictionaries, of all columns or some; the second run goes on behind the first."""

    async def main() -> None:
        async with opening() as database:
            schema = database.names.schema
            name = "orders" if schema is None else f"{schema}.orders"
            quoted = ".".join(f'"{part}"' for part in name.split("."))
            kind = "INTEGER" if schema is None else "bigint"
            await do(database, f"CREATE TABLE {quoted} (id {kind} PRIMARY KEY, note text)")
            await do(database, f"INSERT INTO {quoted} VALUES (1, 'a'), (7, 'b'), (5000000000, 'c')")  # noqa: S608 - our own
            for change, expected in [
                ("DELETE FROM {} WHERE id = 2", ["a", "b", "c"]),
                ("INSERT INTO {} VALUES (5000000001, 'd')", ["d"]),
            ]:
                await do(database, change.format(quoted))
                stored: list[Any] = []
                pipeline = Pipeline("p")
                source = table(database, name, columns=["note"], checkpoint="export")
                pipeline.read(source).sink(stored.append, name="store")
                assert await pipeline.run()
                assert stored == [{"note": note} for note in expected]

    asyncio.run(main())


def test_any_source_with_positions_can_keep_its_place_in_a_database(tmp_path: Path) -> None:
    """An iterable as well as a table; a place of something else is an error."""

    async def main() -> None:
        database = sqlite(tmp_path)
        for expected in ([0, 1, 2], []):
            stored: list[int] = []
            pipeline = Pipeline("p")
            place = DatabaseCheckpoint(database, "numbers")
            pipeline.read(IterableSource(range(3), checkpoint=place)).sink(
                stored.append, name="store"
            )
            await pipeline.run()
            assert stored == expected
        await place.save({"byte": 1})
        with pytest.raises(ValueError, match="is no checkpoint of this source"):
            await IterableSource(range(3), checkpoint=place).pull(1)
        close(database)

    asyncio.run(main())


def sqlite(folder: Path) -> Database:
    """Return a migrated database in a file."""
    database = Database(Sqlite(folder / "orders.db"))
    migrate(database)
    return database


def close(database: Database) -> None:
    """Close it, with its file."""
    database.close()
    database.source.close()


def test_an_item_that_comes_again_has_one_effect(opening: Opening) -> None:
    """Also where the process died between the effect and the acknowledgement; with an outbox."""

    async def main() -> None:
        async with opening() as database:
            inbox, outbox = Inbox(database), Outbox(database, "exports")

            async def aexport(conn: Any, value: int) -> None:
                await outbox.aadd(conn, "order", value, "exported", {"value": value})

            def export(conn: Any, value: int) -> None:
                outbox.add(conn, "order", value, "exported", {"value": value})

            for run in range(3):
                pipeline = Pipeline("p")
                function = aexport if database.is_async else export
                pipeline.read(range(4 + run)).sink(InboxSink(inbox, "export", function), workers=3)
                await pipeline.run()
                assert pipeline.snapshot()["sink"] == 4 + run
            assert (await outbox.asurvey())["pending"] == 6
            assert inbox.snapshot()["duplicates"] == 9

    asyncio.run(main())


def test_an_effect_that_fails_leaves_neither_rows_nor_a_note(tmp_path: Path) -> None:
    """The item is tried again, and then has its effect; ids may come from the value."""

    async def main() -> None:
        database = sqlite(tmp_path)
        inbox, failures = Inbox(database), 0
        await do(database, "CREATE TABLE done (value integer)")

        def store(conn: Any, value: int) -> None:
            nonlocal failures
            conn.execute("INSERT INTO done VALUES (?)", (value,))
            if value == 1 and not failures:
                failures += 1
                raise ConnectionError("once")

        from seawall import Guard, Retry

        pipeline = Pipeline("p")
        sink = InboxSink(inbox, "store", store, id=lambda value: f"order-{value}")
        guard = Guard("inbox sink", Retry(on=ConnectionError, attempts=2, backoff=0.001))
        pipeline.read([0, 1, 1, 0]).sink(sink, guard=guard)
        await pipeline.run()
        assert await do(database, "SELECT value FROM done ORDER BY value") == [(0,), (1,)]
        assert inbox.seen("store", "order-1")
        close(database)

    asyncio.run(main())


def test_a_batch_has_its_effects_in_one_transaction(opening: Opening) -> None:
    """Once for each item; where one fails, only that one does."""

    async def main() -> None:
        async with opening() as database:
            inbox, outbox = Inbox(database), Outbox(database, "exports")
            called: list[int] = []
            poison: set[int] = set()

            async def aexport(conn: Any, value: int) -> None:
                await outbox.aadd(conn, "order", value, "exported", {"value": value})
                called.append(value)
                if value in poison:
                    raise ValueError(value)

            def export(conn: Any, value: int) -> None:
                outbox.add(conn, "order", value, "exported", {"value": value})
                called.append(value)
                if value in poison:
                    raise ValueError(value)

            async def run(items: range) -> dict[str, Any]:
                called.clear()
                pipeline = Pipeline("p")
                function = aexport if database.is_async else export
                sink = InboxSink(inbox, "export", function, id=lambda value: f"order-{value}")
                pipeline.read(items).sink(sink, batch=(5, 0.1))
                await pipeline.run()
                return pipeline.snapshot()

            seen = await run(range(10))
            assert (seen["sink"], called) == (10, [*range(10)])
            poison.add(12)
            seen = await run(range(8, 15))
            assert (seen["sink"], seen["dead_letter"]) == (6, 1)
            assert called == [10, 11, 12, 10, 11, 12, 13, 14]
            assert (await outbox.asurvey())["pending"] == 14

    asyncio.run(main())


def test_the_function_of_an_inbox_sink_is_as_its_database_is(tmp_path: Path) -> None:
    """An async one cannot run in the transaction of a file."""
    database = sqlite(tmp_path)

    async def store(_conn: Any, _value: int) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="wants a plain function"):
        InboxSink(Inbox(database), "store", store)
    close(database)
