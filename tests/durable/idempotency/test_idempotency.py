"""Reserving and completing: one runs, the others get its answer; on every database and driver."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from seawall.durable import Database
from seawall.durable.database.connections import TextQuery
from seawall.durable.database.sqlite import Sqlite
from seawall.durable.idempotency import records
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.errors import Contended, RecordGarbled
from seawall.models.idempotency import Answer, Form, Fresh, KeyClaim, Mismatch, Pending, Replay
from seawall.runtime.mutex import LOCK_FREE
from tests.durable.conftest import Opening, opening_by
from tests.durable.postgres import Postgres
from tests.support import let_pass

ANSWER = Answer(201, [(b"Content-Type", b"text/plain"), (b"X-Odd", b"\xff\x80 x")], b"\x00made\xff")


class Time:
    """The database's time, as a test wants it: a row of a table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self) -> None:
        """Let time stand still."""

        def made() -> Any:
            yield TextQuery("CREATE TABLE {clock} (us bigint NOT NULL)", {})
            yield TextQuery("INSERT INTO {clock} VALUES (1000000000)", {})

        await self._database.arun(made)
        table = self._database.names.table("clock")
        self._database._now = f"(SELECT us FROM {table})"  # noqa: S608 - names of our own

    async def advance(self, seconds: float) -> None:
        """Let time pass."""

        def moved() -> Any:
            by = {"by": int(seconds * 1_000_000)}
            yield TextQuery("UPDATE {clock} SET us = us + CAST(:by AS bigint)", by)

        await self._database.arun(moved)


def told(text: str, **arguments: Any) -> Callable[[], Any]:
    """Return an operation that asks one thing."""

    def steps() -> Any:
        rows = yield TextQuery(text, arguments)
        return rows

    return steps


@asynccontextmanager
async def begun(opening: Opening, **options: Any) -> Any:
    """Give an Idempotency and its time, which stands still."""
    async with opening() as database:
        time = Time(database)
        await time.begin()
        yield Idempotency(database, **options), time


async def first(idempotency: Idempotency, key: str = "k", payload: str | None = "p") -> KeyClaim:
    """Reserve a key that is free."""
    found = await idempotency.areserve("tenant", "order", key, payload)
    assert isinstance(found, Fresh)
    return found.claim


async def again(idempotency: Idempotency, key: str = "k", payload: str | None = "p") -> Any:
    """Reserve a key that was used before."""
    return await idempotency.areserve("tenant", "order", key, payload)


def test_a_repeat_gets_the_answer_byte_for_byte(opening: Opening):
    """Status, headers and body are those of the first, whatever bytes they are."""

    async def main() -> None:
        async with begun(opening) as (idempotency, _):
            claim = await first(idempotency)
            assert await idempotency.acomplete(claim, ANSWER)
            assert await again(idempotency) == Replay(ANSWER)
            for key, value in (("j", {"a": [1, None]}), ("b", b"\x00\xff"), ("n", None)):
                await idempotency.acomplete(await first(idempotency, key), value)
                assert (await again(idempotency, key)).value == value
            assert idempotency.snapshot()["replays"] == 4

    asyncio.run(main())


def test_threads_that_count_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a lock where the interpreter has one of its own, and with one where it has none."""
    database = Database(Sqlite(tmp_path / "counted.db"), name="counted")
    idempotency = Idempotency(database)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for lock_free in (LOCK_FREE, False):
            monkeypatch.setattr("seawall.durable.idempotency.idempotency.LOCK_FREE", lock_free)

            def count() -> None:
                for _ in range(2000):
                    idempotency._count("fresh", "completed")

            threads = [threading.Thread(target=count) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    finally:
        sys.setswitchinterval(before)
    seen = idempotency.snapshot()
    assert (seen["fresh"], seen["completed"]) == (16_000, 16_000)
    database.source.close()
    database.close()


def test_another_payload_is_told_apart(opening: Opening):
    """Also while the first is at work; unless it is not to be compared."""

    async def main() -> None:
        async with begun(opening) as (idempotency, time):
            claim = await first(idempotency)
            assert await again(idempotency, payload="q") == Mismatch()
            await time.advance(31)
            assert await again(idempotency, payload="q") == Mismatch()
            await idempotency.acomplete(claim, ANSWER)
            assert await again(idempotency, payload="q") == Mismatch()
            assert await again(idempotency, payload=None) == Replay(ANSWER)

    asyncio.run(main())


@dataclass
class Order:
    """A payload."""

    item: UUID
    price: Decimal
    at: datetime


class Model(BaseModel):
    """The same as a model."""

    item: UUID
    price: Decimal
    at: datetime


VALUES = {"item": UUID(int=7), "price": Decimal("1.50"), "at": datetime(2026, 1, 2, tzinfo=UTC)}


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": 1, "b": [2.0]}),
        (Order(**VALUES), Order(**VALUES), Order(**{**VALUES, "price": Decimal("1.5")})),
        (Model(**VALUES), Model(**VALUES), Model(**{**VALUES, "item": UUID(int=8)})),
        (UUID(int=7), UUID(int=7), UUID(int=8)),
        (Decimal("1.0"), Decimal("1.0"), Decimal("1.00")),
        (VALUES["at"], VALUES["at"], datetime(2026, 1, 2)),  # noqa: DTZ001 - not the same instant
        ((b"a".decode(), 1), ["a", 1], ["a", "1"]),
        (b"\xff", bytearray(b"\xff"), b"\xfe"),
    ],
)
def test_payloads_are_compared_as_values(tmp_path: Path, one: Any, same: Any, other: Any):
    """Whatever a service has for a payload can be given as the fingerprint."""

    async def main() -> None:
        async with opening_by("sqlite", None, tmp_path)() as database:  # type: ignore[arg-type]
            idempotency = Idempotency(database)
            found: Any = await idempotency.areserve("t", "o", "k", one)
            await idempotency.acomplete(found.claim, 1)
            assert isinstance(await idempotency.areserve("t", "o", "k", same), Replay)
            assert isinstance(await idempotency.areserve("t", "o", "k", other), Mismatch)

    asyncio.run(main())


def test_who_comes_meanwhile_learns_how_long(opening: Opening):
    """The rest of the lease is said, and other scopes, operations and keys are not concerned."""

    async def main() -> None:
        async with begun(opening) as (idempotency, time):
            await first(idempotency)
            await time.advance(10)
            assert await again(idempotency) == Pending(20.0)
            await time.advance(19.99)
            assert await again(idempotency) == Pending(0.1)
            for scope, operation, key in (("o", "order", "k"), ("tenant", "o", "k")):
                found = await idempotency.areserve(scope, operation, key, "p")
                assert isinstance(found, Fresh)

    asyncio.run(main())


def test_a_crashed_owner_is_taken_over_and_its_late_word_refused(opening: Opening):
    """After the lease the next one runs, with a greater epoch; the first can do nothing more."""

    async def main() -> None:
        async with begun(opening) as (idempotency, time):
            dead = await first(idempotency)
            await time.advance(30.001)
            alive = await first(idempotency)
            assert alive.taken_over
            assert alive.epoch > dead.epoch
            assert alive.owner != dead.owner
            assert not await idempotency.acomplete(dead, {"late": True})
            assert not await idempotency.arenew(dead)
            assert not await idempotency.aabandon(dead)
            assert await idempotency.acomplete(alive, {"by": 2})
            assert not await idempotency.acomplete(dead, {"late": True})
            assert (await again(idempotency)).value == {"by": 2}
            seen = idempotency.snapshot()
            assert (seen["taken_over"], seen["refused_late"]) == (1, 4)

    asyncio.run(main())


def test_who_renews_is_not_taken_over(opening: Opening):
    """Renewing restarts the lease; a late owner may complete if no other took over."""

    async def main() -> None:
        async with begun(opening, ttl=31) as (idempotency, time):
            claim = await first(idempotency)
            for _ in range(4):
                await time.advance(29)
                assert await idempotency.arenew(claim)
                assert isinstance(await again(idempotency), Pending)
            await time.advance(40)
            assert await idempotency.acomplete(claim, {"at": "last"})
            assert (await again(idempotency)).value == {"at": "last"}

    asyncio.run(main())


def test_what_is_abandoned_leaves_nothing(opening: Opening):
    """The next one runs, with whatever payload, and its epoch is greater still."""

    async def main() -> None:
        async with begun(opening) as (idempotency, time):
            claim = await first(idempotency)
            assert await idempotency.aabandon(claim)
            await time.advance(0.001)
            after = await first(idempotency, payload="corrected")
            assert not after.taken_over
            assert after.epoch > claim.epoch
            assert not await idempotency.acomplete(claim, ANSWER)

    asyncio.run(main())


def test_failures_are_kept_if_said(opening: Opening):
    """A failed answer is replayed as one."""

    async def main() -> None:
        async with begun(opening) as (idempotency, _):
            answer = Answer(500, [], b"oh")
            await idempotency.acomplete(await first(idempotency), answer, failed=True)
            assert await again(idempotency) == Replay(answer, failed=True)

    asyncio.run(main())


def test_what_is_too_large_is_not_kept_and_never_done_again(opening: Opening):
    """Of a body over the cap, and of too many headers, the status remains."""

    async def main() -> None:
        async with begun(opening, max_body=10) as (idempotency, _):
            large = Answer(201, [(b"a", b"b")], b"x" * 11)
            many = Answer(201, [(b"a", b"b" * 70_000)], b"")
            for key, answer in (("1", large), ("2", many)):
                await idempotency.acomplete(await first(idempotency, key), answer)
                found = await again(idempotency, key)
                assert found.answer == Answer(201, [], b"", kept=False)
                assert found.value == found.answer
            await idempotency.acomplete(await first(idempotency, "3"), b"x" * 10)
            assert (await again(idempotency, "3")).value == b"x" * 10

    asyncio.run(main())


def test_what_is_over_counts_as_absent_and_is_cleaned_in_batches(opening: Opening):
    """An old record is taken as fresh, with another payload too; the rest is removed."""

    async def main() -> None:
        async with begun(opening, ttl=100) as (idempotency, time):
            for number in range(7):
                claim = await first(idempotency, f"k{number}")
                await idempotency.acomplete(claim, {"n": number})
            await time.advance(99)
            await first(idempotency, "young")
            assert await idempotency.acleanup() == 0
            await time.advance(1)
            found = await first(idempotency, "k0", "other")
            assert not found.taken_over
            assert await idempotency.acleanup(batch=2) == 6
            rows = await idempotency.database.arun(told("SELECT count(*) FROM {idempotency}"))
            assert rows == [(2,)]
            assert idempotency.snapshot()["cleaned"] == 6

    asyncio.run(main())


def test_completing_twice_is_the_same_as_once(opening: Opening):
    """Who did not hear that it was done may say it again; the first answer stays."""

    async def main() -> None:
        async with begun(opening) as (idempotency, _):
            claim = await first(idempotency)
            assert await idempotency.acomplete(claim, {"n": 1})
            assert await idempotency.acomplete(claim, {"n": 2})
            assert not await idempotency.aabandon(claim)
            assert (await again(idempotency)).value == {"n": 1}

    asyncio.run(main())


async def race(idempotency: Idempotency, callers: int = 64) -> list[Any]:
    """Let many do the same thing at once; return who did it."""
    executed = []

    async def caller(number: int) -> Any:
        found = await idempotency.areserve("tenant", "order", "one", "p", wait=30.0)
        if isinstance(found, Fresh):
            executed.append(number)
            await let_pass(0)
            await idempotency.acomplete(found.claim, {"by": number})
            return number
        return found.value["by"]

    answers = await asyncio.gather(*(caller(number) for number in range(callers)))
    assert len(set(answers)) == 1
    return executed


def test_of_many_at_once_one_runs(opening: Opening):
    """64 callers on one key: one execution, and all have its answer."""

    async def main() -> None:
        async with opening() as database:
            assert len(await race(Idempotency(database))) == 1

    asyncio.run(main())


def test_who_waits_gives_up_in_time(opening: Opening):
    """Waiting is bounded; then the result is the same as without waiting."""

    async def main() -> None:
        async with begun(opening) as (idempotency, _):
            await first(idempotency)
            found = await idempotency.areserve("tenant", "order", "k", "p", wait=0.05)
            assert found == Pending(30.0)

    asyncio.run(main())


def test_who_is_cancelled_has_taken_nothing(opening: Opening):
    """Wherever it is cancelled, the next one runs at once."""

    async def main() -> None:
        async with opening() as database:
            idempotency = Idempotency(database)
            for number in range(12):
                key = f"k{number}"
                task = asyncio.create_task(first(idempotency, key))
                for _ in range(number):
                    await let_pass(0)
                task.cancel()
                try:
                    await idempotency.aabandon(await task)
                except asyncio.CancelledError:
                    pass
                await first(idempotency, key)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("headers", "'[[1, 2]]'"),
        ("headers", "'{{'"),
        ("headers", '\'[["a", "b\\r\\nc"]]\''),
        ("status", "7"),
        ("state", "9"),
        ("form", "77"),
    ],
)
def test_a_record_that_makes_no_sense_is_not_done_again(
    postgres: Postgres, tmp_path: Path, column: str, value: str
):
    """A record that another program wrote into the table raises, each time."""

    async def main() -> None:
        for driver in ("asyncpg", "sqlite"):
            async with begun(opening_by(driver, postgres, tmp_path)) as (idempotency, _):
                await idempotency.acomplete(await first(idempotency), ANSWER)
                text = f"UPDATE {{idempotency}} SET {column} = {value}"  # noqa: S608 - names of our own
                await idempotency.database.arun(told(text))
                for _ in range(2):
                    with pytest.raises(RecordGarbled):
                        await again(idempotency)

    asyncio.run(main())


# Without a safeguard the same things fail


def test_without_the_record_many_run(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Looking first and writing later lets several in."""

    def look_and_leap(wanted: records.KeyRequest, *_: Any) -> Any:
        found = yield from records.read(wanted)
        return found if found != "free" else Fresh(KeyClaim(*wanted[:3], wanted.owner, 1))

    monkeypatch.setattr(records, "reserve", look_and_leap)

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            idempotency = Idempotency(database)
            found = await asyncio.gather(*(again(idempotency) for _ in range(8)))
            assert sum(isinstance(one, Fresh) for one in found) > 1

    asyncio.run(main())


def test_forms_are_as_they_are_stored():
    """The numbers in the table do not change."""
    assert [form.value for form in Form] == [0, 1, 2, 3]


# Steps alone


def asking(steps: Any, *answers: Any) -> list[str]:
    """Answer the steps one by one, and return what they asked for."""
    asked = [next(steps).which]
    for answer in answers:
        try:
            asked.append(steps.send(answer).which)
        except StopIteration as end:
            asked.append(type(end.value).__name__)
    return asked


WANTED = records.KeyRequest("s", "o", b"h", b"f", "me")
TERMS = records.KeyTerms(30_000_000, 60_000_000, 10)


def test_who_waited_for_a_transaction_has_its_lease_from_then_on():
    """What it was given was counted from before the wait."""
    soon = asking(records.reserve(WANTED, TERMS), [(5, 0, 29_999_000)])
    late = asking(records.reserve(WANTED, TERMS), [(5, 0, -1)], [(1,)])
    assert soon == ["idempotency.take", "Fresh"]
    assert late == ["idempotency.take", "idempotency.renew", "Fresh"]


def test_a_record_that_never_stands_still_is_given_up():
    """Looking again is bounded."""
    steps = records.reserve(WANTED, TERMS)
    with pytest.raises(Contended, match="changed 8 times"):
        asking(steps, *[[]] * 24)
