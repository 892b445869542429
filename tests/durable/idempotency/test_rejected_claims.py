"""What operators hear: of what is blocked or dead by events, of what begins to fail by the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seawall import subscribe
from seawall.clock import VirtualClock
from seawall.durable import (
    Database,
    DeferredCalls,
    DeferredCallWorker,
    Jobs,
    JobWorker,
    Outbox,
    OutboxEvent,
    Sqlite,
    migrate,
)
from seawall.durable.database.outage_log import MOST, RETRY_SLACK, OutageLog
from seawall.durable.outbox import dispatcher as _outbox_page
from seawall.events import EventDied, OutboxBlocked
from tests.durable.conftest import Opening, opening_by
from tests.durable.outbox.support import Seen, Time, committed, dispatcher, numbered, timed
from tests.durable.postgres import Postgres

Told = list[Any]


@pytest.fixture(params=["asyncpg", "sqlite"])
def opening(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens each database by one driver."""
    return opening_by(request.param, postgres, tmp_path)


@pytest.fixture
def file(postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens a file."""
    return opening_by("sqlite", postgres, tmp_path)


@pytest.fixture
def told() -> Iterator[Told]:
    """Hear of what is blocked, and of what has died."""
    heard: Told = []
    stop = subscribe(heard.append, OutboxBlocked, EventDied)
    yield heard
    stop()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Return the lines of the log so far, with their levels."""
    caplog.set_level(logging.INFO, "seawall")

    def lines() -> list[tuple[str, str]]:
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return lines


# Events


@pytest.mark.parametrize(("poison", "kind"), [("block", OutboxBlocked), ("skip", EventDied)])
def test_what_is_given_up_is_told_once(opening: Opening, told: Told, poison: str, kind: Any):
    """After the last attempt, of the event that failed, and not again while it waits."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            seen = Seen()
            seen.poison = {"2"}
            (_, (id_, _)) = [await numbered(outbox, whose, 2) for whose in "12"]
            worker = dispatcher(outbox, seen.each, attempts=2, poison=poison)
            await worker.drain()
            assert told == []
            await time.pass_by(1.5)
            seen.poison = {"2"}
            await worker.run_once()
            seen.poison = set()
            for _ in range(2):
                await time.pass_by(10)
                await worker.drain()
            (one,) = told
            assert type(one) is kind
            fields = one.fields()
            assert fields.pop("traceback").endswith("\nValueError: poison")
            assert fields == {
                "guard": "outbox",
                "aggregate": "order",
                "aggregate_id": "2",
                "event_id": id_,
                "attempts": 2,
                "cause": "ValueError: poison",
            }

    asyncio.run(main())


class Unheard:
    """A database whose answer to a COMMIT, or the whole word, is lost."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meanwhile: Callable[[], Any] | None = None
        self._arun = database.arun
        self._losses: list[str] = []
        monkeypatch.setattr(database, "arun", self.arun)

    def lose(self, *when: str) -> None:
        """Lose the next words of a page: each "after" it was committed, or "before"."""
        self._losses = list(when)

    async def arun(self, operation: Any) -> Any:
        writing = getattr(getattr(operation, "func", None), "__name__", "") == "_store_steps"
        if not writing or not self._losses:
            return await self._arun(operation)
        if self._losses.pop(0) == "after":
            await self._arun(operation)
        if self.meanwhile is not None:
            await self.meanwhile()
        raise ConnectionError("the answer is lost")


async def lost_answers(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, poison: str, losses: tuple[str, ...]
) -> int:
    """Lose answers when an event is given up; return how many words were refused as late."""
    async with opening() as database:
        outbox, seen = Outbox(database, clock=VirtualClock()), Seen()
        seen.poison = {"2"}
        await numbered(outbox, "2", 1)
        unheard = Unheard(database, monkeypatch)
        unheard.lose(*losses)
        worker = dispatcher(outbox, seen.each, attempts=1, poison=poison)

        async def no_time(_seconds: float) -> None:
            pass

        monkeypatch.setattr(worker, "_pause", no_time)
        await worker.run_once()
        late: int = worker.snapshot()["refused_late"]
        return late


@pytest.mark.parametrize("poison", ["block", "skip"])
@pytest.mark.parametrize("losses", [("after",), ("before", "after"), ("after", "before")])
def test_a_lost_answer_does_not_silence_it(
    opening: Opening,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    poison: str,
    losses: tuple[str, ...],
):
    """A commit whose answer was lost still emits the event, once."""
    late = asyncio.run(lost_answers(opening, monkeypatch, poison, losses))
    assert [one.aggregate_id for one in told] == ["2"]
    assert late == 0


@pytest.mark.parametrize("poison", ["block", "skip"])
def test_unless_it_looks_what_was_written(
    file: Opening, told: Told, monkeypatch: pytest.MonkeyPatch, poison: str
):
    """Ablation: trusting the second answer, a refusal, emits no event."""

    def nothing(*_: Any, **__: Any) -> Any:
        return set()
        yield

    monkeypatch.setattr(_outbox_page, "stored_earlier", nothing)
    asyncio.run(lost_answers(file, monkeypatch, poison, ("after",)))
    assert told == []


async def taken_over(opening: Opening, monkeypatch: pytest.MonkeyPatch, poison: str) -> int:
    """Have one fail to write until its lease is over, and another give the event up meanwhile."""
    async with opening() as database:
        time, clock, seen = Time(database), VirtualClock(), Seen()
        await time.begin()
        seen.poison = {"2"}
        outbox = Outbox(database, clock=clock)
        await numbered(outbox, "2", 1)
        unheard = Unheard(database, monkeypatch)
        options = {"attempts": 1, "poison": poison}

        async def another() -> None:
            await time.pass_by(31.0)
            await dispatcher(outbox, seen.each, **options).run_once()

        async def slow(event: OutboxEvent) -> None:
            clock.advance(2.0)
            await seen.each(event)

        async def no_time(_seconds: float) -> None:
            clock.advance(29.0)  # which is, since it was claimed, more than the lease

        late = dispatcher(outbox, slow, **options)
        monkeypatch.setattr(late, "_pause", no_time)
        unheard.meanwhile = another
        unheard.lose("before")
        await late.run_once()
        refused: int = late.snapshot()["refused_late"]
        return refused


@pytest.mark.parametrize("poison", ["block", "skip"])
def test_who_was_taken_over_tells_nothing(
    opening: Opening, told: Told, monkeypatch: pytest.MonkeyPatch, poison: str
):
    """If a second one gives the event up after the lease, only that one emits."""
    assert asyncio.run(taken_over(opening, monkeypatch, poison)) == 1
    assert len(told) == 1


def test_past_its_lease_it_would_tell_twice(
    file: Opening, told: Told, monkeypatch: pytest.MonkeyPatch
):
    """Ablation: taking the other's dead letter for its own emits the event twice."""
    looking = _outbox_page.stored_earlier

    def trusting(*args: Any, **_held: Any) -> Any:
        return looking(*args, held=True)

    monkeypatch.setattr(_outbox_page, "stored_earlier", trusting)
    asyncio.run(taken_over(file, monkeypatch, "skip"))
    assert len(told) == 2


# The log


async def failing(outbox: Outbox, time: Time, seen: Seen, rounds: int, **options: Any) -> Any:
    """Deliver to a sink that fails for one of two aggregates, again and again."""
    worker = dispatcher(outbox, seen.each, **options)
    for _ in range(rounds):
        await committed(outbox, ("order", "1", "made", 0))
        await worker.drain()
        await time.pass_by(1.5)
    return worker


def test_a_failing_sink_is_logged_at_each_attempt(
    file: Opening, said: Any, caplog: pytest.LogCaptureFixture
):
    """One line with the traceback for each, and one at ERROR when it is given up; no payload."""

    async def main() -> None:
        async with timed(file) as (outbox, time):
            seen = Seen()
            seen.poison = {"2\nforged"}
            await committed(outbox, ("order", "2\nforged", "made", {"card": "4111"}))
            worker = await failing(outbox, time, seen, 3, attempts=3)
            assert worker.snapshot()["failed"] == 3
            (blocked,) = await outbox.ablocked()
            assert blocked.error == "ValueError: poison"
            assert blocked.traceback.endswith("\nValueError: poison")

    asyncio.run(main())
    whats = [(level, line.partition(" of ")[2].partition(", tried")[0]) for level, line in said()]
    who = r"'order' '2\nforged' failed at attempt"
    end = f"{who} 3, given up: ValueError: poison"
    assert whats == [("WARNING", f"{who} 1"), ("WARNING", f"{who} 2"), ("ERROR", end)]
    assert caplog.text.count("Traceback (most recent call last):") == 3
    assert caplog.text.count("in each\n") == 3  # the sink's own frame
    assert "4111" not in caplog.text


class Verbose(Exception):
    """An error of a driver's, which lists parameters below its first line."""

    def __str__(self) -> str:
        return "no such table\n[parameters: ('4111',)]"


def test_an_outage_is_said_once_and_says_no_parameters(
    file: Opening, said: Any, monkeypatch: pytest.MonkeyPatch
):
    """Of a database that is away there is one line, with the first line of the error."""

    async def main() -> None:
        async with file() as database:
            outbox, jobs, later = Outbox(database), Jobs(database), DeferredCalls(database, "mail")
            workers: list[Any] = [dispatcher(outbox, Seen().each)]
            workers += [
                JobWorker(jobs, {"report": print}),
                DeferredCallWorker(later, print, poll=0.01),
            ]
            arun, tries = database.arun, [0]

            async def away(_operation: Any) -> Any:
                tries[0] += 1
                if tries[0] > 30:
                    monkeypatch.setattr(database, "arun", arun)
                raise Verbose

            monkeypatch.setattr(database, "arun", away)
            running = [asyncio.create_task(worker.run()) for worker in workers]
            while sum(level == "INFO" for level, _ in said()) < 3:  # noqa: ASYNC110 - until it was said
                await asyncio.sleep(0.01)  # noqa: TID251 - the same
            for worker in workers:
                worker.stop()
            await asyncio.gather(*running)

    asyncio.run(main())
    warnings = sorted(line for level, line in said() if level == "WARNING")
    assert warnings == [
        "deferred calls 'mail': nothing can be claimed: Verbose: no such table",
        "jobs 'jobs': nothing can be claimed: Verbose: no such table",
        "outbox 'outbox': the database: Verbose: no such table",
    ]


def test_jobs_and_calls_that_fail_are_logged_at_each_attempt(
    tmp_path: Path, said: Any, caplog: pytest.LogCaptureFixture
):
    """The same holds for the functions of workers: which, the attempt, the error, the traceback."""
    source = Sqlite(tmp_path / "told.db")
    database = Database(source, name="told")
    migrate(database)
    jobs, later = Jobs(database), DeferredCalls(database, "mail", delay=0)

    def work(_given: Any) -> None:
        raise Verbose

    worker = JobWorker(jobs, {"report": work}, backoff=[0.0])
    caller = DeferredCallWorker(later, work, backoff=[0.0], attempts=2)
    job = jobs.submit(None, "report", {"card": "4111"}, scope="acme", attempts=2)
    call = later.store("4111")

    async def both() -> None:
        await worker.run_once()
        await caller.run_once()

    for _ in range(3):
        asyncio.run(both())
    first = f"jobs 'jobs': job {job.id} ('report') failed at attempt"
    second = f"deferred calls 'mail': call {call.id} failed at attempt"
    assert said() == [
        ("WARNING", f"{first} 1, tried again in 0 s: Verbose: no such table"),
        ("WARNING", f"{second} 1, tried again in 0 s: Verbose: no such table"),
        ("ERROR", f"{first} 2, given up: Verbose: no such table"),
        ("ERROR", f"{second} 2, given up: Verbose: no such table"),
    ]
    assert caplog.text.count("in work\n    raise Verbose\nVerbose: no such table\n") == 4
    assert "4111" not in caplog.text
    (letter,) = later.dead()
    ended = jobs.get(job.id, scope="acme")
    for error, trace in [(letter.reason, letter.traceback), (ended.error, ended.traceback)]:
        assert error == "Verbose: no such table"
        assert trace.endswith("in work\n    raise Verbose\nVerbose: no such table")
    source.close()


def test_what_others_have_mended_is_not_waited_for(said: Any):
    """What failed here and is done elsewhere is forgotten some time after its next try."""
    clock = VirtualClock()
    trouble = OutageLog("jobs 'x'", clock)
    for key in range(MOST + 10):
        trouble.failed(key, f"job {key}", ValueError("no"), delay=5.0)
    assert len(trouble._failing) == MOST
    trouble.succeeded("another")
    clock.advance(5.0 + RETRY_SLACK)
    trouble.succeeded("another")
    assert [level for level, _ in said()] == ["WARNING", "INFO"]
    trouble.failed(1, "job 1", "not taken")
    trouble.succeeded(1)
    assert [level for level, _ in said()] == ["WARNING", "INFO"] * 2


# Stopping


@pytest.mark.parametrize("grace", [0.0, 10.0])
def test_a_worker_for_later_has_its_grace(file: Opening, grace: float):
    """What ends within the grace is done; what does not is given back, with no attempt less."""

    async def main() -> None:
        async with file() as database:
            later, go, begun = (
                DeferredCalls(database, "mail", delay=0),
                asyncio.Event(),
                asyncio.Event(),
            )

            async def send(_to: str) -> None:
                begun.set()
                await go.wait()

            await later.astore("ann")
            worker = DeferredCallWorker(later, send)
            running = asyncio.create_task(worker.run())
            await begun.wait()
            worker.stop(grace)
            if grace:
                go.set()
            await running
            counts = await later.acounts()
            assert counts["waiting"] == (0 if grace else 1)
            assert worker.snapshot()["returned"] == (0 if grace else 1)
            go.set()
            again = DeferredCallWorker(later, send, attempts=1)
            assert await again.run_once() == (0 if grace else 1)
            assert again.snapshot()["dead"] == 0

    asyncio.run(main())


def test_a_second_stop_may_be_shorter(file: Opening):
    """A second, immediate stop does not wait for the first grace period."""

    async def main() -> None:
        async with file() as database:
            later, begun = DeferredCalls(database, "mail", delay=0), asyncio.Event()

            async def send(_to: str) -> None:
                begun.set()
                await asyncio.Event().wait()

            await later.astore("ann")
            worker = DeferredCallWorker(later, send)
            running = asyncio.create_task(worker.run())
            await begun.wait()
            worker.stop(3600.0)
            worker.stop(0.0)
            await asyncio.wait_for(running, 10.0)
            assert worker.snapshot()["returned"] == 1

    asyncio.run(main())


def test_what_is_done_is_told_to_the_end(file: Opening, monkeypatch: pytest.MonkeyPatch):
    """A call that has ended when the grace is over is not done again for being cut short."""

    async def main() -> None:
        async with file() as database:
            later = DeferredCalls(database, "mail", delay=0)
            await later.astore("ann")
            telling, go = asyncio.Event(), asyncio.Event()

            async def send(_to: str) -> None:
                pass

            worker = DeferredCallWorker(later, send)
            change = worker._change

            async def slowly(claim: Any, what: str, **more: Any) -> bool:
                telling.set()
                await go.wait()
                return await change(claim, what, **more)

            monkeypatch.setattr(worker, "_change", slowly)
            running = asyncio.create_task(worker.run())
            await telling.wait()
            worker.stop(0.0)
            asyncio.get_running_loop().call_later(0.05, go.set)
            await running
            assert worker.snapshot()["done"] == 1
            assert (await later.acounts())["waiting"] == 0

    asyncio.run(main())


# Twins


def test_workers_of_ones_own_need_no_event_loop(tmp_path: Path):
    """What a worker says and asks can be said and asked without awaiting, too."""
    source = Sqlite(tmp_path / "twins.db")
    database = Database(source, name="twins")
    migrate(database)
    jobs = Jobs(database, attempts=2)
    job = jobs.submit(None, "report", scope="acme")
    (claim,) = jobs.claim(["report"], owner="me")
    assert jobs.give_back(claim) == "queued"
    for state in ("queued", "failed"):
        (claim,) = jobs.claim(["report"], owner="me")
        assert jobs.fail(claim, "no") == state
    assert jobs.fail(claim, "no") is None
    assert jobs.give_back(claim) is None
    assert (jobs.get(job.id, scope="acme").error, jobs.counts()["failed"][0]) == ("no", 1)
    source.close()


def test_cleaning_up_goes_batch_by_batch_for_some_time(opening: Opening):
    """Expired rows of each kind are removed in batches, one transaction each, until time is up."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            seen, database = Seen(), outbox.database
            seen.poison = {"2"}
            await numbered(outbox, "1", 5)
            await numbered(outbox, "2", 3)
            await dispatcher(outbox, seen.each, keep=60.0, attempts=1, poison="skip").drain()
            await time.pass_by(120.0)
            begun, arun = [], database.arun

            async def counted(operation: Any) -> Any:
                begun.append(operation)
                return await arun(operation)

            database.arun = counted  # type: ignore[method-assign]
            assert await outbox.acleanup(keep=60.0, keep_dead=60.0, batch=2, within=1e-9) == 2
            assert len(begun) == 1
            assert await outbox.acleanup(keep=60.0, keep_dead=60.0, batch=2) == 6
            assert len(begun) == 1 + 2 + 2
            assert await outbox.aforget(idle=1.0, batch=1) == 2

    asyncio.run(main())
