"""Partial results: what a collection has, what is missing, and since when."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Guard
from seawall.pipeline import Collect, Collection, Pipeline, ReadingState, TooFewSources
from seawall.testing import run_virtual


async def pause(seconds: float) -> None:
    """Let virtual time pass."""
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


def source(value: float, *, fails: Callable[[], bool] = bool, takes: float = 0.0) -> Any:
    """Return a source that may fail, or be slow."""

    async def read() -> float:
        await pause(takes)
        if fails():
            raise ConnectionError("no signal")
        return value

    return read


def test_two_of_five_sources_down() -> None:
    """The batch goes on, says which are missing and why, and is marked."""

    async def main() -> None:
        sensors = Collect(
            {
                "S1": source(1.0),
                "S2": source(2.0, fails=lambda: True),
                "S3": source(3.0),
                "S4": source(4.0, takes=60.0),
                "S5": source(5.0),
            },
            minimum=3,
            within=1.0,
        )
        batch = await sensors.collect()
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)
        assert batch.values == {"S1": 1.0, "S3": 3.0, "S5": 5.0}
        assert batch.degraded
        assert batch.fresh == 3
        assert {name: one.cause for name, one in batch.missing.items()} == {
            "S2": "ConnectionError: no signal",
            "S4": "no answer within 1 s",
        }
        missing = sensors.snapshot()["missing"]
        assert [one["source"] for one in missing] == ["S2", "S4"]

    run_virtual(main())


def test_a_last_known_value_stands_in_with_its_age() -> None:
    """For as long as it may; then the source is missing; back again, it is fresh at once."""
    down = False

    async def main() -> None:
        nonlocal down
        sensors = Collect(
            {"S1": source(1.0, fails=lambda: down)}, minimum=0, within=1.0, keep_last=10.0
        )
        assert not (await sensors.collect()).degraded
        down = True
        await pause(4.0)
        reading = (await sensors.collect()).readings["S1"]
        assert (reading.state, reading.value) == (ReadingState.STALE, 1.0)
        assert reading.age == pytest.approx(4.0)
        assert reading.since == pytest.approx(4.0)
        await pause(7.0)
        assert (await sensors.collect()).missing["S1"].since == pytest.approx(11.0)
        down = False
        assert not (await sensors.collect()).degraded
        assert sensors.snapshot()["missing"] == []

    run_virtual(main())


def test_the_cause_of_a_missing_source_is_its_failure_not_that_it_is_not_asked() -> None:
    """An open breaker refuses each read: the cause stays the failure that opened it."""

    async def main() -> None:
        guard = Guard("S1-behind-a-breaker", Breaker(consecutive=1, break_for=60.0))
        read = guard(source(1.0, fails=lambda: True))
        sensors = Collect({"S1": read}, minimum=0, within=1.0)
        for _ in range(3):
            missing = (await sensors.collect()).missing["S1"]
            assert missing.cause == "ConnectionError: no signal"
        (seen,) = sensors.snapshot()["missing"]
        assert seen["cause"] == "ConnectionError: no signal"
        # A source that was refused from the beginning has no other cause.
        others = Collect({"S1": read}, minimum=0, within=1.0)
        assert (await others.collect()).missing["S1"].cause.startswith("CircuitOpen: ")

    run_virtual(main())


def test_too_few_sources_are_an_error_that_has_what_there_is() -> None:
    """Whoever catches it can still go on."""

    async def main() -> None:
        sensors = Collect(
            {"S1": source(1.0), "S2": source(2.0, fails=lambda: True)}, minimum=2, within=1.0
        )
        with pytest.raises(TooFewSources, match=r"1 of 2 sources .* missing: S2") as raised:
            await sensors.collect()
        assert raised.value.collection.values == {"S1": 1.0}
        assert sensors.snapshot()["too_few"] == 1

    run_virtual(main())


def test_collections_come_regularly_and_too_small_ones_are_left_out() -> None:
    """Every second; an outage is a gap, not the end."""
    down = False

    async def main() -> list[float]:
        nonlocal down
        sensors = Collect({"S1": source(1.0, fails=lambda: down)}, minimum=1, within=0.5)
        at = []
        async for batch in sensors.every(1.0):
            at.append(batch.at)
            down = len(at) == 2
            if down:
                asyncio.get_running_loop().call_later(2.5, heal)
            if len(at) == 4:
                return at
        raise AssertionError

    def heal() -> None:
        nonlocal down
        down = False

    assert run_virtual(main()) == pytest.approx([0.0, 1.0, 4.0, 5.0])


def test_a_source_that_came_back_is_read_within_one_probe() -> None:
    """Behind a breaker: while it is open the source is missing; the first probe brings it back."""
    up_at = 30.0

    def down() -> bool:
        return asyncio.get_running_loop().time() < up_at

    async def main() -> Collection[float]:
        guard = Guard("S1", Breaker(consecutive=2, break_for=5.0), replace=True)
        read: Callable[[], Awaitable[float]] = guard(source(1.0, fails=down))
        sensors = Collect({"S1": read}, minimum=0, within=0.5)
        try:
            async for batch in sensors.every(1.0):
                if not batch.degraded:
                    return batch
        finally:
            guard.close()
        raise AssertionError

    assert up_at <= run_virtual(main()).at <= up_at + 8.0


def test_a_value_of_none_is_kept_like_any_other() -> None:
    """It was read, so it stands in while the source does not answer."""
    down = False

    async def read() -> None:
        if down:
            raise ConnectionError("no signal")

    async def main() -> None:
        nonlocal down
        sensors = Collect({"S1": read}, minimum=1, within=1.0, keep_last=10.0)
        await sensors.collect()
        down = True
        await pause(4.0)
        reading = (await sensors.collect()).readings["S1"]
        assert (reading.state, reading.value, reading.age) == (ReadingState.STALE, None, 4.0)

    run_virtual(main())


def test_a_read_that_ignores_its_cancellation_costs_no_time_and_is_not_begun_again() -> None:
    """It is left alone; until it has ended its source is missing, with that as the cause."""
    begun: list[float] = []

    async def stubborn() -> int:
        begun.append(asyncio.get_running_loop().time())
        try:
            await pause(60.0)
        except asyncio.CancelledError:
            await pause(5.0)
        return 1

    async def main() -> None:
        sensors = Collect({"S1": stubborn, "S2": source(2.0)}, minimum=1, within=1.0)
        took = []
        for _ in range(3):
            began = asyncio.get_running_loop().time()
            batch = await sensors.collect()
            took.append(asyncio.get_running_loop().time() - began)
        assert took == pytest.approx([1.0, 0.0, 0.0])
        assert "has not ended" in batch.missing["S1"].cause
        await pause(10.0)
        await sensors.collect()

    run_virtual(main())
    assert begun == pytest.approx([0.0, 11.0])


def test_a_read_that_did_not_end_is_begun_again_in_another_event_loop() -> None:
    """Its loop is gone, and so is the read."""
    begun = 0

    async def stubborn() -> None:
        nonlocal begun
        begun += 1
        while True:
            try:
                await pause(60.0)
            except asyncio.CancelledError:
                continue

    sensors = Collect({"S1": stubborn}, minimum=0, within=1.0)
    for _ in range(2):
        run_virtual(sensors.collect())
    assert begun == 2


@pytest.mark.parametrize(("too_few", "sizes"), [("skip", [2, 2]), ("pass", [2, 1, 2])])
def test_too_few_sources_are_left_out_or_passed_on(
    too_few: Any, sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As was chosen; the log says when they are too few, and when they are enough again."""
    answers = iter([False, True, False])
    stored: list[int] = []
    sensors = Collect(
        {"S1": source(1.0), "S2": source(2.0, fails=lambda: next(answers))}, minimum=2, within=0.5
    )
    pipeline = Pipeline("p")

    def store(batch: Collection[float]) -> None:
        stored.append(len(batch.values))
        if len(stored) == len(sizes):
            pipeline.stop(0.0)

    pipeline.read(sensors.every(1.0, too_few=too_few)).sink(store)
    run_virtual(pipeline.run())
    assert stored == sizes
    said = [one.getMessage() for one in caplog.records if "collection_changed" in one.getMessage()]
    assert len(said) == 2


def test_too_few_sources_may_end_the_source() -> None:
    """With the error, which has what there is."""
    sensors = Collect({"S1": source(1.0, fails=lambda: True)}, minimum=1, within=0.5)

    async def main() -> None:
        async for _batch in sensors.every(1.0, too_few="stop"):
            raise AssertionError

    with pytest.raises(TooFewSources):
        run_virtual(main())


def test_a_pipeline_says_which_sources_are_missing_and_since_when() -> None:
    """In its snapshot, whatever reads them; a kept value is stale, and not unavailable."""

    async def main() -> dict[str, Any]:
        sensors = Collect(
            {
                "S1": source(1.0),
                "S2": source(2.0, fails=lambda: True),
                "S3": source(3.0, fails=lambda: asyncio.get_running_loop().time() > 1.0),
            },
            minimum=1,
            within=0.5,
            keep_last=60.0,
            name="sensors",
        )
        pipeline = Pipeline("p")
        pipeline.read(sensors.every(1.0)).sink(lambda _batch: None, name="store")
        assert pipeline.snapshot()["missing"] == []
        running = asyncio.create_task(pipeline.run())
        await pause(5.5)
        seen = pipeline.snapshot()
        pipeline.stop(0.0)
        await running
        return seen

    seen = run_virtual(main())
    assert seen["missing"] == [
        {
            "source": "S2",
            "state": "unavailable",
            "since": pytest.approx(5.5),
            "cause": "ConnectionError: no signal",
        },
        {
            "source": "S3",
            "state": "stale",
            "since": pytest.approx(4.5),
            "cause": "ConnectionError: no signal",
        },
    ]
    (sensor,) = seen["sources"]
    assert (sensor["name"], sensor["kind"], sensor["read"]) == ("sensors", "collect", 6)
    assert (sensor["minimum"], sensor["degraded"]) == (1, 6)


@given(
    takes=st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 3.0]), st.booleans()), min_size=1, max_size=8
    ),
    minimum=st.integers(0, 8),
)
def test_a_collection_takes_no_longer_than_it_may(
    takes: list[tuple[float, bool]], minimum: int
) -> None:
    """Whatever the sources do, each has its reading, and the counts are right."""
    minimum = min(minimum, len(takes))

    async def main() -> None:
        sensors = Collect(
            {
                f"S{number}": source(number, fails=lambda bad=bad: bad, takes=seconds)
                for number, (seconds, bad) in enumerate(takes)
            },
            minimum=minimum,
            within=1.0,
        )
        good = sum(seconds < 1.0 and not bad for seconds, bad in takes)
        try:
            batch = await sensors.collect()
        except TooFewSources as error:
            batch = error.collection
            assert good < minimum
        else:
            assert good >= minimum
        assert asyncio.get_running_loop().time() <= 1.0 + 1e-9
        assert len(batch.readings) == len(takes)
        assert batch.fresh == len(batch.values) == good

    run_virtual(main())


def test_a_collection_that_is_cancelled_leaves_no_error_behind() -> None:
    """A source that had failed by then has failed: asyncio has nothing to complain about."""
    complaints: list[dict[str, Any]] = []

    async def fail() -> int:
        raise ConnectionError("no signal")

    async def hang() -> int:
        await asyncio.Event().wait()
        return 1

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: complaints.append(context)
        )
        collect = Collect({"S1": fail, "S2": hang}, minimum=1, within=1.0)
        collecting = asyncio.create_task(collect.collect())
        await asyncio.sleep(0.1)  # noqa: TID251 - virtual time
        collecting.cancel()
        await asyncio.wait([collecting])
        del collecting, collect
        gc.collect()

    run_virtual(main())
    assert complaints == []
