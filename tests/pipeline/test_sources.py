"""Sources that fail, hang, or do not take the ends of their items."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seawall.durable import Database, Sqlite, migrate
from seawall.pipeline import Collect, IterableSource, Page, Pipeline, lines, pages, table
from seawall.pipeline.reader import MOST_UNREPORTED
from seawall.resources import Channel
from seawall.testing import run_virtual


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


def now() -> float:
    return asyncio.get_running_loop().time()


class Store:
    """A source in a store of our own: each of its methods may be told to fail or to hang."""

    def __init__(self, name: str, items: int, **on: Callable[[], Any]) -> None:
        self.name = name
        self.acknowledged: list[int] = []
        self.returned: list[int] = []
        self.pulls: list[float] = []
        self.is_closed = False
        self._left = list(range(items))
        self._on = on

    async def pull(self, most: int) -> Sequence[tuple[int, int]]:
        self.pulls.append(now())
        await self._do("pull")
        pulled, self._left = self._left[:most], self._left[most:]
        return [(number, number) for number in pulled]

    async def acknowledge(self, handles: Sequence[int]) -> None:
        await self._do("acknowledge")
        self.acknowledged += handles

    async def give_back(self, handles: Sequence[int]) -> None:
        await self._do("give_back")
        self.returned += handles

    async def close(self) -> None:
        await self._do("close")
        self.is_closed = True

    async def _do(self, what: str) -> None:
        if what in self._on:
            await self._on[what]()


async def hang() -> None:
    await asyncio.Event().wait()


def down_until(at: float, error: type[BaseException] = ConnectionError) -> Any:
    async def fail() -> None:
        if now() < at:
            raise error("the store is down")

    return fail


def merged(*sources: Store) -> tuple[Pipeline, list[Any]]:
    """Return a pipeline of all sources, and what it stores."""
    stored: list[Any] = []
    pipeline = Pipeline("p", rng=Random(1))
    first, *others = [pipeline.read(source) for source in sources]
    first.merge(*others).sink(stored.append, name="store")
    return pipeline, stored


# --- Reading ---


def test_a_source_that_cannot_be_read_for_a_while_is_read_again() -> None:
    """With growing pauses; the others go on meanwhile, and nothing is lost."""
    broken, sound = Store("broken", 3, pull=down_until(600.0)), Store("sound", 3)
    pipeline, stored = merged(broken, sound)

    async def main() -> dict[str, Any]:
        running = asyncio.create_task(pipeline.run())
        await pause(300.0)
        seen = pipeline.snapshot()
        assert await running
        return seen

    seen = run_virtual(main())
    assert seen["sink"] == 3
    shown = seen["sources"][0]
    assert shown["error"] == "ConnectionError: the store is down"
    assert shown["errors"] == len([at for at in broken.pulls if at < 300.0])
    assert 5 < len(broken.pulls) < 60
    assert len(stored) == 6
    assert pipeline.snapshot()["sources"][0]["error"] == ""


def test_the_log_says_once_that_a_source_fails_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However often it was tried in between."""
    pipeline, _ = merged(Store("broken", 3, pull=down_until(600.0)))
    with caplog.at_level(logging.INFO, "seawall"):
        run_virtual(pipeline.run())
    said = [
        (record.__dict__["seawall_source"], record.__dict__["seawall_after"], record.levelname)
        for record in caplog.records
        if record.__dict__.get("seawall_event") == "source_changed"
    ]
    assert said == [("broken", "failing", "WARNING"), ("broken", "ok", "WARNING")]


def test_a_source_that_waits_for_items_again_is_not_shown_as_failing_for_ever() -> None:
    """It has nothing to give, but it can be read."""

    async def fail_then_wait() -> None:
        await down_until(60.0)()
        await hang()

    pipeline, _ = merged(Store("idle", 3, pull=fail_then_wait))

    async def main() -> list[str]:
        running = asyncio.create_task(pipeline.run())
        errors = []
        for seconds in (50.0, 110.0):
            await pause(seconds)
            errors.append(pipeline.snapshot()["sources"][0]["error"])
        pipeline.stop(0.0)
        await running
        return errors

    assert run_virtual(main()) == ["ConnectionError: the store is down", ""]


def test_a_stop_does_not_wait_for_a_source_that_fails() -> None:
    """Neither for its pause, nor for its next attempt."""
    pipeline, _ = merged(Store("broken", 3, pull=down_until(1e9)))

    async def main() -> float:
        running = asyncio.create_task(pipeline.run())
        await pause(500.0)
        pipeline.stop(10.0)
        assert not await running
        return now()

    assert run_virtual(main()) == pytest.approx(500.0)


@pytest.mark.parametrize("error", [TypeError, KeyError, ValueError, FileNotFoundError])
def test_a_mistake_in_a_source_ends_the_run(error: type[Exception]) -> None:
    """No repetition mends it; what was read is given back, and every source is closed."""
    wrong, sound = Store("wrong", 3, pull=down_until(1.0, error)), Store("sound", 3)
    pipeline, _ = merged(wrong, sound)
    with pytest.raises(error, match="the store is down"):
        run_virtual(pipeline.run())
    assert wrong.is_closed
    assert sound.is_closed
    assert len(wrong.pulls) == 1


def test_an_iterable_that_raises_ends_the_run_with_its_error() -> None:
    """It is over, and read again it would look as if it had come to its end."""

    async def numbers() -> Any:
        yield 1
        raise ConnectionError("cut off")

    pipeline = Pipeline("p")
    pipeline.read(numbers()).sink(lambda _number: None, name="store")
    with pytest.raises(ConnectionError, match="cut off"):
        run_virtual(pipeline.run())


# --- Reporting ---


def test_a_source_that_does_not_take_its_ends_holds_up_no_other() -> None:
    """Its own items go on too, until too many ends are not taken; then it is read no more."""
    stuck = Store("stuck", 50_000, acknowledge=hang)
    sound = Store("sound", 5000)
    pipeline, _ = merged(stuck, sound)

    async def main() -> tuple[dict[str, Any], float]:
        running = asyncio.create_task(pipeline.run())
        await pause(100.0)
        seen = pipeline.snapshot()
        pipeline.stop(1.0)
        began = now()
        await running
        return seen, now() - began

    seen, took = run_virtual(main())
    assert len(sound.acknowledged) == 5000
    assert MOST_UNREPORTED <= seen["sources"][0]["unreported"] <= MOST_UNREPORTED + 200
    assert "has not taken the ends" in seen["sources"][0]["error"]
    assert seen["sources"][1]["error"] == ""
    assert took <= 10.0
    assert stuck.is_closed


@pytest.mark.parametrize("error", [ConnectionError, asyncio.CancelledError])
def test_ends_that_a_source_could_not_take_are_reported_again(error: type[BaseException]) -> None:
    """Until it takes them: an outage of the store costs no acknowledgement."""
    source = Store("orders", 5000, acknowledge=down_until(60.0, error))
    pipeline, _ = merged(source)
    assert run_virtual(pipeline.run())
    assert source.acknowledged == list(range(5000))


def test_a_mistake_in_acknowledge_is_logged_and_the_pipeline_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The source may hand the items out again."""
    pipeline, stored = merged(Store("wrong", 500, acknowledge=down_until(1e9, TypeError)))
    assert run_virtual(pipeline.run())
    assert len(stored) == 500
    assert "may hand them out again" in caplog.text


def test_a_source_that_does_not_close_holds_up_neither_the_end_nor_other_sources() -> None:
    """It has five seconds; then it is left alone."""
    stuck, sound = Store("stuck", 3, close=hang), Store("sound", 3)
    pipeline, _ = merged(stuck, sound)

    async def main() -> float:
        assert await pipeline.run()
        return now()

    assert run_virtual(main()) <= 5.0
    assert sound.is_closed


def test_what_is_given_back_at_a_stop_is_given_again_while_the_store_is_down() -> None:
    """For as long as the end may take."""
    source = Store("orders", 50, give_back=down_until(12.0))
    pipeline = Pipeline("p", rng=Random(1))

    async def store(_number: int) -> None:
        await hang()

    pipeline.read(source).sink(store)

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        await pause(10.0)
        pipeline.stop(0.0)
        await running

    run_virtual(main())
    assert sorted(source.returned) == list(range(50))


def test_a_source_whose_close_was_cancelled_inside_does_not_cancel_the_run() -> None:
    """Everything has ended by then, and the run says so."""

    async def cancel() -> None:
        raise asyncio.CancelledError

    pipeline = Pipeline("p")
    pipeline.read(Store("store", 3, close=cancel)).sink(id, name="end")
    assert run_virtual(pipeline.run())
    assert pipeline.snapshot()["sink"] == 3


@pytest.mark.parametrize("seed", range(5))
def test_a_source_that_takes_ends_again_hears_the_last_ones_at_a_stop(seed: int) -> None:
    """The stop does not wait for a pause of a minute to be over, nor gives up in it."""
    is_away = True

    async def refuse() -> None:
        if is_away:
            raise ConnectionError

    async def store(number: int) -> None:
        if number:
            await asyncio.Event().wait()

    async def main() -> Store:
        nonlocal is_away
        source = Store("source", 3, acknowledge=refuse)
        pipeline = Pipeline("p", rng=Random(seed))
        pipeline.read(source).sink(store, workers=3)
        running = asyncio.create_task(pipeline.run())
        await pause(600)
        is_away = False
        pipeline.stop(0)
        await running
        return source

    source = run_virtual(main())
    assert (source.acknowledged, sorted(source.returned)) == ([0], [1, 2])


# --- A second run of the same pipeline ---


def file_of(path: Path, checkpoint: Path | None) -> Any:
    path.write_text("0\n1\n2\n3\n")
    return lines(path, checkpoint=checkpoint)


def pages_of(_path: Path, checkpoint: Path | None) -> Any:
    def page(cursor: int | None) -> Page[str] | None:
        first = cursor or 0
        return Page([f"{first}", f"{first + 1}"], first + 2, more=True) if first < 4 else None

    return pages(page, checkpoint=checkpoint)


def table_of(path: Path, checkpoint: Path | None) -> Any:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE numbers (id INTEGER PRIMARY KEY)")
        connection.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(1, 5)])
    database = Database(Sqlite(str(path)))
    if checkpoint is not None:
        migrate(database)
    return table(database, "numbers", checkpoint=checkpoint and "export")


def list_of(_path: Path, checkpoint: Path | None) -> Any:
    return IterableSource(["0", "1", "2", "3"], checkpoint=checkpoint)


def channel_of(_path: Path, _checkpoint: Path | None) -> Any:
    channel: Channel[str] = Channel(10)
    for number in range(4):
        channel.put(f"{number}")
    return channel


@pytest.mark.parametrize(
    ("make", "is_kept"),
    [
        *[(make, is_kept) for make in (file_of, pages_of, table_of) for is_kept in (False, True)],
        (list_of, True),
        (channel_of, False),
    ],
)
def test_a_second_run_goes_on_behind_what_has_ended(
    tmp_path: Path, make: Callable[[Path, Path | None], Any], *, is_kept: bool
) -> None:
    """What was given back comes again, and nothing else; a stop is for one run."""
    source = make(tmp_path / "numbers", tmp_path / "place" if is_kept else None)
    seen: list[int] = []
    all_seen = asyncio.Event()

    def number_of(value: Any) -> int:
        return value["id"] - 1 if isinstance(value, dict) else int(value)

    async def store(number: int) -> None:
        if number == 2 and 2 not in seen:
            seen.append(number)
            pipeline.stop(0)
            await asyncio.Event().wait()
        seen.append(number)
        if number == 3:
            all_seen.set()

    pipeline = Pipeline("p")
    pipeline.read(source).stage(number_of, workers=1).sink(store)

    async def main() -> None:
        assert not await pipeline.run()
        assert seen[:3] == [0, 1, 2]
        running = asyncio.create_task(pipeline.run())
        await all_seen.wait()
        pipeline.stop(5)
        await running

    asyncio.run(asyncio.wait_for(main(), 60))
    assert seen == [0, 1, 2, 2, 3]


def test_a_second_run_reads_an_iterable_that_had_raised_anew(tmp_path: Path) -> None:
    """The error of the first run is not that of the second one."""

    class Rows:
        is_broken = True

        def __iter__(self) -> Iterator[int]:
            yield from range(3)
            if self.is_broken:
                raise OSError("the disk is gone")
            yield 3

    rows, stored = Rows(), list[int]()
    pipeline = Pipeline("p")
    source = IterableSource(rows, checkpoint=tmp_path / "place")
    pipeline.read(source).sink(stored.append, name="store")

    async def main() -> None:
        with pytest.raises(OSError, match="the disk is gone"):
            await pipeline.run()
        rows.is_broken = False
        assert await pipeline.run()

    run_virtual(main())
    assert stored[-1] == 3
    assert sorted(set(stored)) == [0, 1, 2, 3]


def test_a_second_run_collects_again() -> None:
    """The collections of the first run are over, not the source."""

    async def read() -> int:
        return 1

    async def main() -> int:
        pipeline = Pipeline("p")
        collected = []
        pipeline.read(Collect({"S1": read}, minimum=1, within=1.0).every(1.0)).sink(
            collected.append, name="store"
        )
        for _ in range(2):
            running = asyncio.create_task(pipeline.run())
            await pause(2.5)
            pipeline.stop(0)
            assert not await running
        return len(collected)

    assert run_virtual(main()) == 6
