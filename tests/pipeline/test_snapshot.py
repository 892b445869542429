"""What a pipeline shows of itself: before it runs, while it runs, and when it is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from seawall import Breaker, Guard, Retry, registry
from seawall.pipeline import DROP, IterableSource, MemoryDeadLetters, NotBefore, Pipeline, degrade
from seawall.pipeline.counts import MOST_SAMPLES, StageCounts
from seawall.testing import run_virtual

STAGE = {
    "name", "kind", "workers", "capacity", "busy", "waiting", "oldest", "at_work", "done", "rate",
    "retries", "failed", "degraded", "dropped", "dead_letters", "refused", "deaths", "failures",
    "p50", "p99", "histogram", "waits_for", "guard",
}  # fmt: skip
SOURCE = {"name", "read", "rate", "waits", "last_at", "unreported", "errors", "error"}
WHOLE = {
    "name", "running", "read", "in_flight", "sink", "dead_letter", "dropped", "returned",
    "degraded", "replayed", "oldest", "sources", "stages", "links", "missing",
}  # fmt: skip


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


def watched(pipeline: Pipeline, at: Sequence[float]) -> list[dict[str, Any]]:
    """Run `pipeline` and return its snapshots at these times; then stop it."""

    async def main() -> list[dict[str, Any]]:
        running = asyncio.create_task(pipeline.run())
        seen, now = [], 0.0
        for moment in at:
            await pause(moment - now)
            now = moment
            seen.append(pipeline.snapshot())
        pipeline.stop(0.0)
        await running
        return seen

    return run_virtual(main())


def test_a_snapshot_has_the_same_form_before_during_and_after_a_run() -> None:
    """Of stages, sinks and branches; it is plain data, and the registry has it too."""
    pipeline = Pipeline("shown")

    async def work(number: int) -> int:
        await pause(1.0)
        return number

    large, small = pipeline.read(range(5)).branch(lambda number: number > 2, name="large")
    large.stage(work).merge(small).sink(lambda _number: None, name="store")
    before = pipeline.snapshot()
    (during,) = watched(pipeline, [0.5])
    after = pipeline.snapshot()
    for seen in (before, during, after):
        assert set(seen) == WHOLE
        assert [set(one) for one in seen["stages"]] == [STAGE] * 3
        assert [set(one) for one in seen["sources"]] == [SOURCE]
        assert [one["kind"] for one in seen["stages"]] == ["branch", "stage", "sink"]
        assert seen["links"] == [
            ["items", "large"],
            ["large", "work"],
            ["large", "store"],
            ["work", "store"],
        ]
        json.dumps(seen)
    assert [seen["running"] for seen in (before, during, after)] == [False, True, False]
    assert [seen["read"] for seen in (before, during, after)] == [0, 5, 5]
    (entry,) = [one for one in registry.snapshot()["pipeline"] if one["name"] == "shown"]
    assert entry["links"] == after["links"]


def test_a_pipeline_that_is_not_complete_can_be_looked_at() -> None:
    """What there is of it is shown."""
    pipeline = Pipeline("p")
    flow = pipeline.read([1])
    assert pipeline.snapshot()["links"] == []
    flow.stage(str)
    assert pipeline.snapshot()["links"] == [["items", "str"]]


def test_names_are_unique_among_sources_and_stages() -> None:
    """So that links are clear."""
    pipeline = Pipeline("p")
    flow = pipeline.read([1], name="orders")
    with pytest.raises(ValueError, match="two parts named 'orders'"):
        pipeline.read([1], name="orders")
    with pytest.raises(ValueError, match="two parts named 'orders'"):
        flow.stage(str, name="orders")
    with pytest.raises(ValueError, match="named 'mine' already"):
        pipeline.read(IterableSource([1], name="mine"), name="other")


def test_rates_are_those_of_the_last_seconds() -> None:
    """They follow a change within ten seconds, and fall to nothing when nothing comes."""

    async def numbers() -> Any:
        for number in range(120):
            await pause(0.5 if number < 60 else 0.1)
            yield number
        await pause(1000.0)

    pipeline = Pipeline("p")
    pipeline.read(numbers()).sink(lambda _number: None, name="store")
    seen = watched(pipeline, [*range(1, 36), 60, 75])
    for one, rate in ((seen[9], 2.0), (seen[29], 2.0), (seen[33], 5.2), (seen[34], 6.0)):
        assert one["sources"][0]["rate"] == pytest.approx(rate, abs=0.3)
        assert one["stages"][0]["rate"] == pytest.approx(rate, abs=0.3)
    assert seen[36]["sources"][0]["rate"] == 0.0
    assert seen[35]["sources"][0]["last_at"] == pytest.approx(24.0)
    assert pipeline.snapshot()["stages"][0]["done"] == 120


def test_each_stage_counts_what_became_of_its_items() -> None:
    """Retries, failures by cause, lesser items, dropped ones and dead letters."""
    calls: dict[int, int] = {}

    async def work(number: int) -> Any:
        calls[number] = calls.get(number, 0) + 1
        if number == 1 and calls[number] < 3:
            raise ConnectionError
        if number == 2:
            raise ValueError
        return DROP if number == 3 else number

    async def store(numbers: list[int]) -> None:
        if 4 in numbers and calls[4] == 1:
            calls[4] = 2
            raise ConnectionError

    def check(number: int) -> int:
        if number == 5:
            raise KeyError
        return number

    def guard(name: str) -> Guard:
        return Guard(name, Retry(on=ConnectionError, attempts=3, backoff=0.1), replace=True)

    pipeline = Pipeline("p", rng=Random(1))
    guards = [guard("work"), guard("store")]
    (
        pipeline.read(range(8))
        .stage(work, guard=guards[0])
        .stage(check, on_failure="drop")
        .stage(lambda n: n + 0 // (n - 6), name="odd", on_failure=degrade(lambda n, _error: n))
        .sink(store, batch=(10, 1.0), guard=guards[1])
    )
    run_virtual(pipeline.run())
    for one in guards:
        one.close()
    seen = {one["name"]: one for one in pipeline.snapshot()["stages"]}
    assert (seen["work"]["retries"], seen["work"]["dropped"]) == (2, 1)
    assert (seen["work"]["dead_letters"], seen["work"]["failures"]) == (1, {"ValueError": 1})
    assert (seen["check"]["dropped"], seen["check"]["dead_letters"]) == (1, 0)
    assert seen["odd"]["degraded"] == 1
    assert (seen["store"]["retries"], seen["store"]["done"]) == (4, 5)  # item 0 came first


def test_a_branch_that_cannot_judge_counts_a_dead_letter() -> None:
    """Under its own name."""
    pipeline = Pipeline("p")
    yes, no = pipeline.read([1, "x"]).branch(lambda one: one > 0, name="positive")
    yes.merge(no).sink(lambda _one: None, name="store")
    run_virtual(pipeline.run())
    branch = pipeline.snapshot()["stages"][0]
    assert (branch["done"], branch["dead_letters"]) == (1, 1)
    assert branch["failures"] == {"TypeError": 1}


def test_a_snapshot_says_what_each_worker_is_doing_and_since_when() -> None:
    """With the item, and with why it waits, if it does."""

    async def work(number: int) -> int:
        await pause(10.0)
        return number

    async def store(_number: int) -> None:
        raise NotBefore(50.0)

    pipeline = Pipeline("p", rng=Random(1))
    pipeline.read(range(20)).stage(work, capacity=4).sink(store, capacity=1)
    early, late = watched(pipeline, [5.0, 45.0])
    (at_work,) = early["stages"][0]["at_work"]
    assert at_work == {"item": "items:0", "items": 1, "since": pytest.approx(5.0), "waits_for": ""}
    assert early["stages"][0]["waits_for"] == ""
    work_seen, store_seen = late["stages"]
    assert store_seen["waits_for"] == "NotBefore: not before 50 s from now"
    assert store_seen["at_work"][0]["since"] == pytest.approx(35.0)
    assert work_seen["waits_for"] == "no room in 'store'"
    assert work_seen["at_work"][0]["item"] == "items:2"
    assert work_seen["at_work"][0]["since"] == pytest.approx(25.0)
    assert work_seen["waiting"] == 4
    assert late["sources"][0]["waits"]
    assert late["oldest"] == {"item": "items:0", "age": pytest.approx(45.0), "stage": "store"}


def test_a_snapshot_says_that_dead_letters_cannot_be_stored() -> None:
    """While that is so, and not after."""
    letters = MemoryDeadLetters("p", most=1)
    pipeline = Pipeline("p", dead_letters=letters, rng=Random(1))

    async def fail(_number: int) -> None:
        raise ValueError

    pipeline.read(range(3)).sink(fail)

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        await pause(5.0)
        assert "1 dead letters in memory" in pipeline.snapshot()["stages"][0]["waits_for"]
        letters.drop(letters.letters[0].id)
        await pause(100.0)
        letters.drop(letters.letters[0].id)
        await running

    run_virtual(main())
    (sink,) = pipeline.snapshot()["stages"]
    assert (sink["waits_for"], sink["dead_letters"]) == ("", 3)


def test_times_in_a_stage_are_all_counted_from_the_first_look_on() -> None:
    """The histogram grows by each item; quantiles are those of the latest thousand."""
    counts = StageCounts()

    def add(number: int, seconds: float) -> None:
        for _ in range(number):
            counts.times.append(seconds)
            if len(counts.times) >= MOST_SAMPLES:
                counts.fold_times()

    add(2500, 0.01)
    assert len(counts.times) == 500
    before = counts.snapshot(0.0)
    assert sum(before["histogram"]["counts"]) == 500
    assert before["p99"] == pytest.approx(0.01, rel=0.05)
    add(4321, 2.0)
    after = counts.snapshot(0.0)
    assert sum(after["histogram"]["counts"]) == 500 + 4321
    assert after["histogram"]["sum"] == pytest.approx(5.0 + 2 * 4321, rel=0.05)
    assert after["p50"] == pytest.approx(2.0, rel=0.05)
    pairs = zip(before["histogram"]["counts"], after["histogram"]["counts"], strict=True)
    assert all(old <= new for old, new in pairs)


def test_the_facts_of_a_source_are_shown_and_a_broken_look_hides_nothing() -> None:
    """What a source says of itself stands beside what the pipeline knows."""

    class Known(IterableSource[int]):
        def snapshot(self) -> dict[str, Any]:
            return {"kind": "known", "lag": 7, "read": "not yours to say"}

    class Broken(IterableSource[int]):
        def snapshot(self) -> dict[str, Any]:
            raise ConnectionError("down")

    pipeline = Pipeline("p")
    known = pipeline.read(Known(range(3), name="known"))
    known.merge(pipeline.read(Broken(range(3), name="broken"))).sink(print, name="store")
    first, second = pipeline.snapshot()["sources"]
    assert (first["kind"], first["lag"], first["read"]) == ("known", 7, 0)
    assert second["snapshot_error"] == "ConnectionError: down"


def test_the_reason_to_wait_for_a_breaker_has_no_seconds_that_grow_old() -> None:
    """It says what is open and why, for as long as the item waits."""

    async def store(_number: int) -> None:
        raise ConnectionError("refused")

    guard = Guard("database", Breaker(consecutive=1, break_for=50.0), replace=True)
    pipeline = Pipeline("p", rng=Random(1))
    pipeline.read(range(3)).sink(store, guard=guard)
    (seen,) = watched(pipeline, [20.0])
    (sink,) = seen["stages"]
    assert sink["waits_for"] == (
        "CircuitOpen: guard 'database': the circuit is open; the last failure:"
        " ConnectionError: refused"
    )
