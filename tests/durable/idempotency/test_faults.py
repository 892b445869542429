"""What goes wrong around a record: races, cancellations, deadlines, a database that is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from seawall import deadline, models
from seawall.durable import Database, Sqlite, migrate
from seawall.durable.database import statements as _sql
from seawall.durable.database.connections import TextQuery
from seawall.durable.idempotency import decorator as functions
from seawall.durable.idempotency import idempotency as module
from seawall.durable.idempotency import records
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.idempotency.lease_renewal import LeaseKeeper
from seawall.durable.idempotency.records import KeyWait
from seawall.errors import AnswerNotKept, RecordGarbled
from seawall.models import idempotency as rules
from seawall.models.idempotency import Answer, Fresh, Mismatch, Pending, Replay
from seawall.testing import VirtualClock
from tests.durable.conftest import Opening, opening_by
from tests.durable.idempotency.test_idempotency import Time, again, begun, first, told
from tests.durable.postgres import Postgres
from tests.support import let_pass

SAFE = pytest.mark.parametrize("safe", [True, False], ids=["as it is", "without it"])


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Idempotency]:
    """Return an idempotency on SQLite, whose time stands still."""
    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name=f"faults {tmp_path.name}")
    migrate(database)
    database.run(told("CREATE TABLE {clock} (us bigint NOT NULL)"))
    database.run(told("INSERT INTO {clock} VALUES (1000000000)"))
    database._now = "(SELECT us FROM seawall_clock)"
    yield Idempotency(database, ttl=100)
    database.close()
    source.close()


def advance(idempotency: Idempotency, seconds: int) -> None:
    """Let time pass."""
    text = "UPDATE {clock} SET us = us + :by"
    idempotency.database.run(told(text, by=seconds * 1_000_000))


def changed(
    monkeypatch: pytest.MonkeyPatch, file: str, statement: str, part: str, instead: str
) -> None:
    """Take a condition out of a statement of SQLite's."""
    texts = _sql.statements("sqlite", file)
    assert texts[statement].count(part) == 1
    monkeypatch.setitem(texts, statement, texts[statement].replace(part, instead))
    _sql.statement.cache_clear()


# Who has seen that a record is free, and is late


def slow(local: Idempotency, meanwhile: Any) -> Any:
    """Reserve with payload "a"; `meanwhile` happens after the look that found it free."""

    def steps() -> Any:
        own = records.reserve(local._key_request("t", "o", "k", "a"), local.terms)
        asked = next(own)
        while asked.which != "idempotency.take_over":
            asked = own.send((yield asked))
        return own, asked

    own, asked = local.database.run(steps)
    meanwhile()

    def rest() -> Any:
        current = asked
        while True:
            try:
                current = own.send((yield current))
            except StopIteration as end:
                return end.value

    return local.database.run(rest)


RACES = [
    ("lease_until <= {now}", ["reserve a"], Pending),
    ("state = 0", ["reserve a", "complete", "advance 31"], Replay),
    ("fingerprint = :fingerprint\n", ["advance 100", "reserve b", "advance 31"], Mismatch),
]


@SAFE
@pytest.mark.parametrize(
    ("part", "meanwhile", "told_then"), RACES, ids=["lease", "done", "payload"]
)
def test_who_comes_too_late_for_a_takeover_looks_again(
    local: Idempotency,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    meanwhile: list[str],
    told_then: type,
    *,
    safe: bool,
):
    """Another was faster: taken over, done, or with another payload; each condition is needed."""
    if not safe:
        instead = "1 = 1\n" if part.endswith("\n") else "1 = 1"
        changed(monkeypatch, "idempotency", "take_over", part, instead)
    assert isinstance(local.reserve("t", "o", "k", "a"), Fresh)
    advance(local, 31)
    claims: list[Any] = []

    def other() -> None:
        for what, _, which in (word.partition(" ") for word in meanwhile):
            if what == "advance":
                advance(local, int(which))
            elif what == "complete":
                assert local.complete(claims[-1], {"n": 1})
            else:
                found = local.reserve("t", "o", "k", which)
                assert isinstance(found, Fresh)
                claims.append(found.claim)

    try:
        found = slow(local, other)
        assert isinstance(found, told_then if safe else Fresh)
    finally:
        monkeypatch.undo()
        _sql.statement.cache_clear()


def test_repeats_are_in_nobodys_way(postgres: Postgres, tmp_path: Path):
    """A long transaction that got a stored answer holds no lock: others get it, and clean up."""

    async def main() -> None:
        async with begun(opening_by("asyncpg", postgres, tmp_path), ttl=100) as (idempotency, time):
            database, named = idempotency.database, {"scope": "tenant", "operation": "order"}
            await idempotency.acomplete(await first(idempotency), {"n": 1})
            async with database.atransaction() as long, asyncio.timeout(20):
                async with idempotency.once(long, **named, key="k", fingerprint="p") as once:
                    assert once.value == {"n": 1}
                async with database.atransaction() as other:
                    block = idempotency.once(other, **named, key="k", fingerprint="p")
                    async with block as once:
                        assert once.value == {"n": 1}
                assert (await again(idempotency)).value == {"n": 1}
                await time.advance(101)
                assert await idempotency.acleanup() == 1

    asyncio.run(main())


def test_cleaning_looks_at_what_is_over_alone(postgres: Postgres, tmp_path: Path):
    """It goes by the index, or each batch would read the whole table."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            for file, name in (("idempotency", "clean"), ("inbox", "cleanup")):
                text = _sql.statements("postgres", file)[name]

                def steps(text: str = text) -> Any:
                    yield TextQuery("SET LOCAL enable_seqscan = off", {})
                    yield TextQuery("SET LOCAL enable_bitmapscan = off", {})
                    return (yield TextQuery("EXPLAIN " + text, {"batch": 10}))

                plan = "\n".join(row[0] for row in await database.arun(steps))
                assert "Index Cond: (expires_at <=" in plan

    asyncio.run(main())


# Who is cancelled, or out of time


def test_who_is_cancelled_ends_also_without_a_database(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Giving back what may have been taken is tried for a while, not for as long as it takes."""
    monkeypatch.setattr(module, "WITHDRAW_TIMEOUT", 0.02)

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            idempotency = Idempotency(database)
            held = [await database.source.acquire() for _ in range(database.source.get_max_size())]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await idempotency.areserve("t", "o", "k", None)
            for connection in held:
                await database.source.release(connection)

    asyncio.run(asyncio.wait_for(main(), 20))


@SAFE
def test_who_is_cancelled_while_it_reserves_gives_it_back(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """The writer of a file goes on, whoever gave up; without giving it back, the next one waits."""

    def nothing(_wanted: Any) -> Any:
        return False
        yield

    if not safe:
        monkeypatch.setattr(records, "withdraw", nothing)

    plain, writing, go = records.reserve, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        writing.set()
        assert go.wait(20)
        return (yield from plain(*args))

    async def main() -> None:
        async with opening_by("sqlite", postgres, tmp_path)() as database:
            idempotency = Idempotency(database)
            monkeypatch.setattr(records, "reserve", held)
            task = asyncio.create_task(first(idempotency))
            assert await asyncio.to_thread(writing.wait, 20)
            task.cancel()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert isinstance(await again(idempotency), Fresh if safe else Pending)

    asyncio.run(main())


@SAFE
def test_who_is_cancelled_after_its_work_stores_the_result(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """Also while the renewal of its lease is waited for: what was done is not done again."""
    if not safe:
        monkeypatch.setattr(functions, "uninterrupted", lambda work: work)

    async def main() -> None:
        async with opening() as database:
            idempotency = Idempotency(database, lease=0.06)
            plain, renewing, leave = idempotency.arenew, asyncio.Event(), asyncio.Event()
            done = []

            async def arenew(claim: Any) -> bool:
                renewing.set()
                await leave.wait()
                return await plain(claim)

            idempotency.arenew = arenew  # type: ignore[method-assign]

            @idempotency.idempotent(key=lambda: "k", scope=lambda: "t")
            async def work() -> int:
                done.append(1)
                await renewing.wait()
                return 7

            task = asyncio.create_task(work())
            await renewing.wait()
            for _ in range(5):
                await let_pass(0)
            task.cancel()
            await let_pass(0)
            leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            with suppress(module.KeyInFlight):
                assert await work() == 7
            assert idempotency.snapshot()["replays"] == safe
            assert not safe or done == [1]

    asyncio.run(main())


def test_what_was_done_is_stored_after_the_deadline(local: Idempotency):
    """The deadline is for the work: a result that comes too late is there for the next one."""
    clock, done = VirtualClock(), []

    def late() -> int:
        clock.advance(2)
        done.append(1)
        return len(done)

    say: dict[str, Any] = {"scope": lambda: "t", "fingerprint": None, "operation": "o"}
    sync = local.idempotent(key=lambda: "sync", **say)(late)

    @local.idempotent(key=lambda: "async", **say)
    async def awaited() -> int:
        return late()

    for call in (sync, lambda: asyncio.run(awaited())):
        for _ in range(2):
            with deadline(1.0, clock=clock):
                assert call() == len(done)
    assert done == [1, 1]
    claim = local.reserve("t", "o", "direct", None)
    assert isinstance(claim, Fresh)
    with deadline(1.0, clock=clock):
        clock.advance(2)
        assert local.complete(claim.claim, 1)


def test_who_waits_does_not_wait_beyond_its_deadline():
    """It gives up a little before: so it can still say why."""
    clock = VirtualClock(5.0)
    with deadline(1.0, clock=clock):
        waiting, now = KeyWait(30.0, 100.0), 100.0
        while (pause := waiting.pause(Pending(9.0), now)) is not None:
            now += pause
    assert 100.4 < now < 101.0
    assert waiting.pause(Mismatch(), 100.0) is None
    unlimited = KeyWait(1.0, 100.0)
    assert unlimited.pause(Pending(9.0), 100.995) == pytest.approx(0.005)
    assert unlimited.pause(Pending(9.0), 101.0) is None


@SAFE
def test_a_result_is_stored_when_the_database_is_back(
    local: Idempotency, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """It was away for a moment, and the work would be done again after the lease."""
    monkeypatch.setattr(functions, "PAUSES", (0.0, 0.0) if safe else ())
    plain, away, done = local.complete, [1, 2], []

    def complete(*args: Any, **options: Any) -> bool:
        if away:
            raise ConnectionError(away.pop())
        return plain(*args, **options)

    monkeypatch.setattr(local, "complete", complete)

    @local.idempotent(key=lambda: "k", scope=lambda: "t")
    def work() -> int:
        done.append(1)
        return 7

    with suppress(ConnectionError):
        assert work() == 7
    advance(local, 31)
    with suppress(ConnectionError):
        assert work() == 7
    assert done == ([1] if safe else [1, 1])


# Leases of functions


@SAFE
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_lease_is_kept_while_a_function_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, *, safe: bool
):
    """Work of many leases is not taken over, unless nobody renews them."""
    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name="kept")
    migrate(database)
    asyncio.run(Time(database).begin())
    idempotency = Idempotency(database, lease=0.03)
    enough = threading.Event()
    renewals: list[int] = []
    taken: list[bool] = []

    def renewed(claim: Any) -> bool:
        by = told("UPDATE {clock} SET us = us + 20000")
        database.run(by)
        good = not safe or database.run(lambda: records.renew(claim, idempotency.terms))
        renewals.append(1)
        if len(renewals) == 5:
            enough.set()
        return good

    async def arenew(claim: Any) -> bool:
        return await asyncio.to_thread(renewed, claim)

    monkeypatch.setattr(idempotency._keeper, "_renew", renewed)
    monkeypatch.setattr(idempotency, "arenew", arenew)
    say: dict[str, Any] = {"key": lambda: "k", "scope": lambda: "t", "operation": "o"}

    def look() -> None:
        taken.append(isinstance(idempotency.reserve("t", "o", "k", None), Fresh))

    @idempotency.idempotent(**say)
    def blocking() -> None:
        assert enough.wait(20)
        look()

    @idempotency.idempotent(**say)
    async def awaited() -> None:
        assert await asyncio.to_thread(enough.wait, 20)
        look()

    with suppress(Exception):  # where it was taken over it says so
        blocking() if how == "sync" else asyncio.run(awaited())
    assert taken == [not safe]
    database.close()
    source.close()


def test_functions_that_block_share_one_thread(local: Idempotency):
    """However many are called, one after another and at once: no thread for each."""
    seen = set()

    @local.idempotent(key="key", scope=lambda *_: "t")
    def work(key: str, depth: int) -> None:
        seen.add(local._keeper._thread)
        if depth:
            work(f"{key}.{depth}", depth - 1)

    for number in range(20):
        work(str(number), 3)
    assert len(seen) == 1
    assert None not in seen


def test_a_lease_that_is_lost_is_told_once(local: Idempotency):
    """A keeper stops there; and what is renewed too late, after the end, is no loss."""
    lost: list[int] = []
    asked, go, told_so = threading.Event(), threading.Event(), threading.Event()

    def renew(_claim: Any) -> bool:
        asked.set()
        assert go.wait(20)
        return False

    def lose() -> None:
        lost.append(1)
        told_so.set()

    keeper = LeaseKeeper(0.003, renew, lose)
    claim = local.reserve("t", "o", "k", None)
    assert isinstance(claim, Fresh)
    with keeper.keeping(claim.claim):
        assert asked.wait(20)
    thread = keeper._thread
    go.set()
    if thread is not None:
        thread.join(20)
    assert lost == []
    with keeper.keeping(claim.claim):
        assert told_so.wait(20)
    assert lost == [1]


def test_a_child_process_has_a_keeper_of_its_own(local: Idempotency):
    """A fork takes the thread away, and what it kept is the parent's."""
    claim = local.reserve("t", "o", "k", None)
    assert isinstance(claim, Fresh)
    keeper, gone = local._keeper, threading.Thread()
    keeper._thread, keeper._kept = gone, {object(): (0.0, claim.claim)}
    keeper._after_fork()
    with keeper.keeping(claim.claim):
        assert keeper._thread not in {None, gone}
        assert len(keeper._kept) == 1
    assert not keeper._kept


# What is stored, and what is read


@SAFE
def test_of_what_is_too_large_it_is_known_that_it_is_gone(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, *, safe: bool
):
    """Without the tombstone's mark a repeat would take the empty rest for the answer."""
    plain = records.stored
    if not safe:
        monkeypatch.setattr(records, "stored", lambda *a, **k: {**plain(*a, **k), "kept": 1})

    async def main() -> None:
        async with begun(opening, max_body=10) as (idempotency, _):
            large = Answer(201, [(b"a", b"b")], b"x" * 11)
            await idempotency.acomplete(await first(idempotency), large)
            found = await again(idempotency)
            assert isinstance(found, Replay)
            assert found.answer == Answer(201, [], b"", kept=not safe)

    asyncio.run(main())


@SAFE
@pytest.mark.parametrize(
    ("column", "value", "name", "instead"),
    [
        ("headers", '\'[["a", "b\\r\\nset-cookie: c"]]\'', "_latin", str.encode),
        ("status", "7", "STATUSES", range(1000)),
        ("state", "9", "_state", lambda _said: rules.RecordState.SUCCEEDED),
    ],
)
def test_each_look_at_a_record_is_needed(
    local: Idempotency,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    value: str,
    name: str,
    instead: Any,
    *,
    safe: bool,
):
    """Without it, what somebody else wrote would be given out as the answer."""
    claim = local.reserve("t", "o", "k", None)
    assert isinstance(claim, Fresh)
    local.complete(claim.claim, Answer(201, [], b"made"))
    local.database.run(told(f"UPDATE {{idempotency}} SET {column} = {value}"))  # noqa: S608
    if safe:
        with pytest.raises(RecordGarbled):
            local.reserve("t", "o", "k", None)
        return
    monkeypatch.setattr(rules, name, instead)
    assert isinstance(local.reserve("t", "o", "k", None), Replay)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(0, [], b""),
        Answer(status=True, headers=[], body=b""),
        Answer(201, [(b"a", b"b\r\nc")], b""),
        Answer(201, [("a", "b")], b""),  # type: ignore[list-item]
        Answer(201, [], "text"),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_given_again_is_not_stored(local: Idempotency, answer: Answer):
    """It is told to who stores it, and not to who asks later; the claim is good as before."""
    claim = local.reserve("t", "o", "k", None)
    assert isinstance(claim, Fresh)
    with pytest.raises((TypeError, ValueError), match=r"write|line's end"):
        local.complete(claim.claim, answer)
    assert local.complete(claim.claim, Answer(201, [], b""))

    @local.idempotent(key=lambda: "f", scope=lambda: "t")
    def function() -> Answer:
        return answer

    with pytest.raises((TypeError, ValueError)):
        function()
    with pytest.raises(AnswerNotKept):
        function()


def test_what_is_over_counts_as_none_whatever_is_in_it():
    """Also where its state is none that we know."""
    record = rules.Record(9, b"", 0, 0, None, None, 1, 0, 5, 5)
    assert rules.decide(record, b"") == "free"
    with pytest.raises(models.idempotency.Garbled):
        rules.decide(record._replace(expires_at=6), b"")


def test_a_function_of_the_wrong_kind_is_told(postgres: Postgres, tmp_path: Path):
    """When it is decorated: one that blocks, for a database that is awaited; one without a name."""

    async def main() -> None:
        async with opening_by("asyncpg", postgres, tmp_path)() as database:
            idempotent = Idempotency(database).idempotent(key=lambda: "k")

            class Nameless:
                async def __call__(self) -> None:
                    """Do nothing."""

            with pytest.raises(TypeError, match="write `async def`"):
                idempotent(lambda: None)
            with pytest.raises(TypeError, match="write operation="):
                idempotent(Nameless())

    asyncio.run(main())
