"""What a pipeline tells subscribers and the log: what fails, is back or died, how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from seawall import Breaker, Guard, subscribe
from seawall.events import (
    CollectionChanged,
    Event,
    ItemDied,
    PipelineEnded,
    SourceChanged,
    StageChanged,
    log,
)
from seawall.pipeline import Collect, Collection, MemoryDeadLetters, Pipeline
from seawall.testing import run_virtual

KINDS = (CollectionChanged, ItemDied, PipelineEnded, SourceChanged, StageChanged)


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """Return the events of pipelines that are told."""
    events: list[Any] = []
    stop = subscribe(events.append, *KINDS)
    yield events
    stop()


@pytest.fixture
def lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Return what is logged, with a bound that no other test has used."""
    monkeypatch.setattr(log, "changes", log.ChangeLog())
    caplog.set_level(logging.INFO, "seawall")
    return caplog


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


def of(heard: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in heard if isinstance(event, kind)]


# --- Items, stages, runs ---


def test_a_dead_letter_is_told_of_with_its_item_and_its_stage(
    heard: list[Any], lines: pytest.LogCaptureFixture
) -> None:
    """To subscribers, and to the log as fields."""
    pipeline = Pipeline("orders")
    pipeline.read(["1", "x"]).stage(int, name="parse").sink(lambda _number: None, name="keep")
    run_virtual(pipeline.run())
    (died,) = of(heard, ItemDied)
    assert (died.guard, died.item, died.stage, died.attempts) == ("orders", "items:1", "parse", 1)
    assert died.cause.startswith("ValueError: invalid literal")
    (record,) = [one for one in lines.records if "item_died" in one.getMessage()]
    assert (record.__dict__["seawall_item"], record.__dict__["seawall_stage"]) == (
        "items:1",
        "parse",
    )
    assert record.levelname == "ERROR"


def test_a_stage_that_cannot_store_dead_letters_is_told_of_once(
    heard: list[Any], lines: pytest.LogCaptureFixture
) -> None:
    """However often it is tried, and again when it flows."""
    letters = MemoryDeadLetters("p", most=1)
    pipeline = Pipeline("p", dead_letters=letters, rng=Random(1))

    def poison(_number: int) -> int:
        raise ValueError("poison")

    pipeline.read(range(2)).stage(poison).sink(print)

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        await pause(200.0)
        assert letters.drop("items:0")
        await running

    run_virtual(main())
    blocked, flows = of(heard, StageChanged)
    assert (blocked.stage, blocked.after, blocked.item) == ("poison", "blocked", "items:1")
    assert "dead letter cannot be stored: DeadLettersFull" in blocked.cause
    assert (flows.before, flows.after, flows.duration >= 199.0) == ("blocked", "flows", True)
    records = [one for one in lines.records if "stage_changed" in one.getMessage()]
    assert [one.levelname for one in records] == ["ERROR", "ERROR"]
    assert "blocked -> flows item=items:1" in records[1].getMessage()  # no cause, so no "()"


def failing() -> Iterator[int]:
    yield 1
    raise ValueError("no such table")


@pytest.mark.parametrize(
    ("items", "result"), [([1, 2], "over"), ([1, 2], "stopped"), (failing(), "failed")]
)
def test_the_end_of_a_run_is_told_with_its_account(
    items: Any, result: str, heard: list[Any]
) -> None:
    """Once, with why it failed."""
    pipeline = Pipeline("p")

    async def keep(_number: int) -> None:
        if result == "stopped":
            pipeline.stop(0.0)
            await pause(1.0)

    pipeline.read(items).sink(keep)
    if result == "failed":
        with pytest.raises(ValueError, match="no such table"):
            run_virtual(pipeline.run())
    else:
        run_virtual(pipeline.run())
    (ended,) = of(heard, PipelineEnded)
    assert (ended.guard, ended.result) == ("p", result)
    assert ended.read == ended.stored + ended.dead_letters + ended.dropped + ended.returned
    assert ended.cause == ("ValueError: no such table" if result == "failed" else "")
    assert bool(ended.returned) == (result == "stopped")


# --- Two of five sources down ---


class Plant:
    """Five sensors behind breakers of their own; some are down for a while."""

    def __init__(self, **options: Any) -> None:
        self.down: set[str] = set()
        self.guards = [
            Guard(f"plant {name}", Breaker(consecutive=2, break_for=5.0)) for name in self.names
        ]
        reads = {
            name: guard(self._reader(name))
            for name, guard in zip(self.names, self.guards, strict=True)
        }
        self.collect = Collect(reads, within=0.5, **options)

    names = ("S1", "S2", "S3", "S4", "S5")

    def _reader(self, name: str) -> Any:
        async def read() -> float:
            if name in self.down:
                raise ConnectionError(f"{name} has no signal")
            return float(name[1:])

        return read

    def close(self) -> None:
        for guard in self.guards:
            guard.close()

    async def outage(self, pipeline: Pipeline, sources: set[str]) -> list[dict[str, Any]]:
        """Run for a minute, with an outage from 10 s to 30 s; return a snapshot each second."""
        running = asyncio.create_task(pipeline.run())
        seen = []
        for second in range(60):
            self.down = sources if 10 <= second < 30 else set()
            await pause(1.0)
            seen.append(pipeline.snapshot())
        assert not running.done(), "no crash"
        pipeline.stop(1.0)
        await running
        return seen


@pytest.fixture
def plants() -> Iterator[list[Plant]]:
    """Return a list of plants that are closed at the end."""
    made: list[Plant] = []
    yield made
    for plant in made:
        plant.close()


def test_two_of_five_sources_down_batches_go_on_marked(
    plants: list[Plant], heard: list[Any]
) -> None:
    """With the age of what is stale and the cause; a source is back within one probe."""
    stored: list[tuple[float, Collection[float]]] = []

    async def main() -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        plant = Plant(minimum=3, keep_last=8.0)
        plants.append(plant)
        pipeline = Pipeline("analytics")
        pipeline.read(plant.collect.every(1.0)).sink(
            lambda batch: stored.append((loop.time(), batch)), name="keep"
        )
        began = loop.time()
        seen = await plant.outage(pipeline, {"S2", "S4"})
        stored[:] = [(at - began, batch) for at, batch in stored]
        return seen

    seen = run_virtual(main())
    assert len(stored) >= 59, "one a second, whatever is down"
    for at, batch in stored:
        if 11 < at < 29:
            assert batch.degraded
            assert set(batch.missing) | set(batch.stale) == {"S2", "S4"}
        if 11 < at < 17:
            ages = [reading.age for reading in batch.stale.values()]
            assert ages == [pytest.approx(at - 9, abs=1.6)] * 2
        if 20 < at < 29:
            assert set(batch.missing) == {"S2", "S4"}
            assert all(one.cause for one in batch.missing.values())
        if at < 10 or at > 37:
            assert not batch.degraded
    assert {one["source"] for one in seen[20]["missing"]} == {"S2", "S4"}
    changes = [(one.source, one.after) for one in of(heard, SourceChanged)]
    assert sorted(changes) == [
        (name, state) for name in ("S2", "S4") for state in ("missing", "ok")
    ]
    back = [one.duration for one in of(heard, SourceChanged) if one.after == "ok"]
    # 20 s of outage; then the breaker lets a probe through after 5 s at most, each second one read.
    assert all(20.0 <= seconds <= 20.0 + 5.0 + 2.0 for seconds in back)
    assert not of(heard, CollectionChanged)


@pytest.mark.parametrize("too_few", ["skip", "pass"])
def test_less_than_the_minimum_is_an_alert_and_no_crash(
    too_few: Any, plants: list[Plant], heard: list[Any], lines: pytest.LogCaptureFixture
) -> None:
    """The policy decides what becomes of the batch; it is told once, and when it is over."""
    stored: list[Collection[float]] = []

    async def main() -> list[dict[str, Any]]:
        plant = Plant(minimum=3)
        plants.append(plant)
        pipeline = Pipeline("analytics")
        pipeline.read(plant.collect.every(1.0, too_few=too_few)).sink(stored.append, name="keep")
        return await plant.outage(pipeline, {"S1", "S2", "S3"})

    seen = run_virtual(main())
    short = [batch for batch in stored if len(batch.values) < 3]
    assert bool(short) == (too_few == "pass")
    assert all(batch.degraded for batch in short)
    begun, over = of(heard, CollectionChanged)
    assert (begun.after, begun.values, begun.minimum) == ("too_few", 2, 3)
    assert begun.missing == "S1, S2, S3"
    assert (over.before, over.after) == ("too_few", "enough")
    levels = [one.levelname for one in lines.records if "collection_changed" in one.getMessage()]
    assert levels == ["ERROR", "ERROR"]
    (source,) = seen[20]["sources"]
    assert source["is_short"]
    assert source["too_few"] >= 5
    assert not seen[-1]["sources"][0]["is_short"]


def test_less_than_the_minimum_may_end_the_run(plants: list[Plant], heard: list[Any]) -> None:
    """With too_few="stop"; the event says why."""

    async def main() -> None:
        plant = Plant(minimum=3)
        plants.append(plant)
        plant.down = {"S1", "S2", "S3"}
        pipeline = Pipeline("analytics")
        pipeline.read(plant.collect.every(1.0, too_few="stop")).sink(print)
        await pipeline.run()

    with pytest.raises(Exception, match="3 are needed"):
        run_virtual(main())
    (ended,) = of(heard, PipelineEnded)
    assert ended.result == "failed"
    assert ended.cause.startswith("TooFewSources: 2 of 5")


def test_all_lines_of_a_pipeline_have_fields(lines: pytest.LogCaptureFixture) -> None:
    """Each says by fields which pipeline it is about; of an event it is the guard."""

    class Odd:
        name = "odd"

        async def pull(self, most: int) -> list[tuple[int, int]]:
            del most
            return [] if self.closed else [(1, 1)]

        closed = False

        async def acknowledge(self, handles: Any) -> None:
            self.closed = True
            raise TypeError("no")

        async def give_back(self, handles: Any) -> None:
            """Never."""

        async def close(self) -> None:
            raise ValueError("cannot")

    pipeline = Pipeline("orders")
    pipeline.read(Odd()).sink(lambda _number: None, name="keep")
    run_virtual(pipeline.run())
    assert lines.records
    for record in lines.records:
        fields = record.__dict__
        assert "orders" in (fields.get("seawall_pipeline"), fields.get("seawall_guard"))
