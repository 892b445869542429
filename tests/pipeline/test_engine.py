"""What a pipeline promises, on virtual time: ends, order, backpressure, batches, stops."""

from __future__ import annotations

import asyncio
import gc
import pickle
import sys
import threading
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Guard, Retry
from seawall.errors import WorkerDied
from seawall.pipeline import (
    DROP,
    BatchFailed,
    DeadLetter,
    Ending,
    IterableSource,
    MemoryDeadLetters,
    NotBefore,
    Pipeline,
    current_item,
    degrade,
)
from seawall.resources import CpuPool
from seawall.testing import run_virtual
from tests.pipeline.slow_start import TAKES, dies_once


class Recorded(IterableSource[Any]):
    """A source that records what it was told."""

    def __init__(self, items: Sequence[Any], name: str = "recorded") -> None:
        super().__init__(items, name=name)
        self.pulled = 0
        self.ends: list[tuple[str, int]] = []

    async def pull(self, most: int) -> Sequence[tuple[Any, int]]:
        pulled = await super().pull(most)
        self.pulled += len(pulled)
        return pulled

    async def acknowledge(self, handles: Sequence[int]) -> None:
        await pause(0)
        self.ends += [("acknowledged", handle) for handle in handles]

    async def give_back(self, handles: Sequence[int]) -> None:
        self.ends += [("returned", handle) for handle in handles]


def check_account(pipeline: Pipeline) -> None:
    """Check that what was read has ended, or is in flight."""
    seen = pipeline.snapshot()
    ended = sum(seen[ending] for ending in Ending)
    assert seen["read"] == ended + seen["in_flight"], seen
    run = pipeline._run or pipeline._last
    assert run is None or len(run.live) == seen["in_flight"], seen


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


# --- Every item ends once ---

actions = st.sampled_from(["dead_letter", "drop", "degrade"])
scripts = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), min_size=0, max_size=40
)


@given(
    scripts=scripts,
    actions=st.tuples(actions, actions, actions),
    workers=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.tuples(st.integers(1, 7), st.sampled_from([0.0, 0.05, 2.0])),
    capacity=st.integers(1, 5),
    stop_at=st.none() | st.tuples(st.floats(0, 5), st.floats(0, 3)),
    seed=st.integers(0, 2**16),
)
def test_every_item_ends_exactly_once(  # noqa: C901 - one world, several functions in it
    scripts: list[tuple[int, float]],
    actions: tuple[str, str, str],
    workers: tuple[int, int],
    batch: tuple[int, float],
    capacity: int,
    stop_at: tuple[float, float] | None,
    seed: int,
) -> None:
    """Whatever fails where, and whenever it is stopped; the account is right at each instant."""
    source = Recorded(range(len(scripts)))
    stored: list[int] = []
    buried: list[int] = []
    pipeline = Pipeline("p", dead_letters=lambda_async(buried), rng=Random(seed))

    def fails(place: int, number: int) -> bool:
        check_account(pipeline)
        return scripts[number][0] == place

    def parse(number: int) -> int:
        if fails(1, number):
            raise ValueError(number)
        return number

    async def enrich(number: int) -> int:
        await pause(scripts[number][1])
        if fails(2, number):
            raise ValueError(number)
        return number

    async def store(numbers: list[int]) -> None:
        await pause(0.1)
        failures: dict[int, Exception] = {
            place: ValueError(number) for place, number in enumerate(numbers) if fails(3, number)
        }
        stored.extend(number for place, number in enumerate(numbers) if place not in failures)
        if failures:
            raise BatchFailed(failures)

    def action(place: int) -> Any:
        if actions[place] != "degrade":
            return actions[place]
        return degrade(lambda value, _error: stored.append(value) or value if place == 2 else value)

    (
        pipeline.read(source)
        .stage(parse, on_failure=action(0), capacity=capacity)
        .stage(enrich, workers=workers[0], on_failure=action(1), capacity=capacity)
        .sink(store, workers=workers[1], batch=batch, on_failure=action(2), capacity=capacity)
    )

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        if stop_at is not None:
            await pause(stop_at[0])
            check_account(pipeline)
            pipeline.stop(stop_at[1])
        await running

    run_virtual(main())
    check_account(pipeline)
    seen = pipeline.snapshot()
    assert seen["in_flight"] == 0
    assert seen["read"] == source.pulled
    assert sorted(handle for _, handle in source.ends) == list(range(source.pulled))
    told = Counter(kind for kind, _ in source.ends)
    assert told["returned"] == seen["returned"]
    assert seen["sink"] <= len(stored) == len(set(stored))
    assert seen["dead_letter"] <= len(buried)
    if stop_at is None:
        assert seen["returned"] == 0
        assert source.pulled == len(scripts)
        assert seen["sink"] == len(stored)


@given(
    scripts=scripts,
    actions=st.tuples(actions, actions, actions),
    deaths=st.dictionaries(st.integers(0, 39), st.integers(1, 4), max_size=5),
    sizes=st.lists(st.integers(0, 15), min_size=1, max_size=3),
    capacity=st.integers(1, 5),
    stop_at=st.none() | st.tuples(st.floats(0, 5), st.floats(0, 3)),
    seed=st.integers(0, 2**16),
)
def test_every_item_ends_once_on_whatever_way_it_goes(  # noqa: C901, PLR0915 - one world, several functions in it
    scripts: list[tuple[int, float]],
    actions: tuple[str, str, str],
    deaths: dict[int, int],
    sizes: list[int],
    capacity: int,
    stop_at: tuple[float, float] | None,
    seed: int,
) -> None:
    """Several sources that merge, a branch, a batch that fails in part, workers that die."""
    scripts = scripts or [(0, 0.0)]
    sources = [Recorded(range(size), f"source-{number}") for number, size in enumerate(sizes)]
    stored: list[Any] = []
    left = dict(deaths)
    pipeline = Pipeline("p", dead_letters=lambda_async([]), rng=Random(seed))

    def script(number: int) -> tuple[int, float]:
        check_account(pipeline)
        return scripts[number % len(scripts)]

    async def work(number: int) -> int:
        await pause(script(number)[1])
        if left.get(number, 0):
            left[number] -= 1
            raise WorkerDied("killed")
        if script(number)[0] == 1:
            raise ValueError(number)
        return number

    async def work_all(numbers: list[int]) -> list[int]:
        await pause(0.05)
        if any(left.get(number, 0) for number in numbers):
            for number in numbers:
                left[number] = left.get(number, 0) - 1
            raise WorkerDied("killed")
        failures: dict[int, Exception] = {
            place: ValueError() for place, number in enumerate(numbers) if script(number)[0] == 2
        }
        if failures:
            raise BatchFailed(failures, numbers)
        return [DROP if script(number)[0] == 3 else number for number in numbers]

    async def store(number: int) -> None:
        check_account(pipeline)
        stored.append(number)

    def is_even(number: int) -> bool:
        if number == 13:
            raise ValueError(number)
        return not number % 2

    def action(place: int) -> Any:
        return (
            degrade(lambda value, _error: value) if actions[place] == "degrade" else actions[place]
        )

    first, *others = [pipeline.read(source) for source in sources]
    even, odd = first.merge(*others).branch(is_even)
    even = even.stage(work, workers=3, on_failure=action(0), capacity=capacity)
    odd = odd.stage(
        work_all, batch=(4, 0.2), workers=2, on_failure=action(1), capacity=capacity, most_deaths=2
    )
    even.merge(odd).sink(store, workers=2, on_failure=action(2), capacity=capacity)

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        if stop_at is not None:
            await pause(stop_at[0])
            check_account(pipeline)
            pipeline.stop(stop_at[1])
        await running

    run_virtual(main())
    check_account(pipeline)
    seen = pipeline.snapshot()
    assert seen["in_flight"] == 0
    for source in sources:
        assert sorted(handle for _, handle in source.ends) == list(range(source.pulled))
    told = Counter(kind for source in sources for kind, _ in source.ends)
    assert told["returned"] == seen["returned"]
    assert seen["sink"] <= len(stored)
    if stop_at is None:
        assert told["acknowledged"] == sum(sizes)
        assert seen["sink"] == len(stored)
    by_stage = {one["name"]: one for one in seen["stages"]}
    assert sum(one["dead_letters"] for one in by_stage.values()) == seen["dead_letter"]
    assert sum(one["dropped"] for one in by_stage.values()) == seen["dropped"]


def lambda_async(buried: list[int]) -> Callable[[DeadLetter], Any]:
    async def bury(letter: DeadLetter) -> None:
        await pause(0.01)
        buried.append(letter.value)

    return bury


# --- Order ---


@given(
    keys=st.lists(st.integers(0, 3), max_size=40),
    failing=st.dictionaries(st.integers(0, 39), st.integers(1, 3)),
    slow=st.sets(st.integers(0, 39)),
    blocks=st.booleans(),
    batched=st.booleans(),
    workers=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_order_by_key_survives_failures_and_retries(
    keys: list[int],
    failing: dict[int, int],
    slow: set[int],
    blocks: bool,  # noqa: FBT001 - a property
    batched: bool,  # noqa: FBT001 - a property
    workers: int,
    seed: int,
) -> None:
    """Blocking, every item arrives in its key's order; set aside, all but the failed ones do."""
    left = dict(failing)
    arrived: dict[int, list[int]] = defaultdict(list)
    pipeline = Pipeline("p", rng=Random(seed))

    async def work(number: int) -> int:
        await pause(1.0 if number in slow else 0.0)
        if left.get(number, 0):
            left[number] -= 1
            raise ConnectionError(number)
        return number

    async def store(number: int) -> None:
        arrived[keys[number]].append(number)

    async def store_many(numbers: list[int]) -> None:
        assert len({keys[number] for number in numbers}) == len(numbers)
        for number in numbers:
            await store(number)

    def key(number: int) -> int:
        return keys[number]

    flow = pipeline.read(range(len(keys))).stage(
        work, workers=workers, ordered_by=key, when_failed="block" if blocks else "set_aside"
    )
    if batched:
        flow.sink(store_many, batch=(5, 0.5), workers=workers, ordered_by=key)
    else:
        flow.sink(store, workers=workers, ordered_by=key)
    run_virtual(pipeline.run())
    check_account(pipeline)
    expected: dict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(keys):
        if blocks or number not in failing:
            expected[one].append(number)
    assert arrived == expected


def test_a_blocked_key_does_not_hold_up_others() -> None:
    """Items of other keys pass the one that is tried again and again."""
    arrived: list[str] = []
    healed_at = 100.0

    async def store(value: str) -> None:
        if value == "a1" and asyncio.get_running_loop().time() < healed_at:
            raise ConnectionError
        arrived.append(value)

    pipeline = Pipeline("p", rng=Random(1))
    (
        pipeline.read(["a1", "a2", "b1", "b2"])
        .sink(store, workers=2, ordered_by=lambda value: value[0], when_failed="block")
    )  # fmt: skip
    run_virtual(pipeline.run())
    assert arrived == ["b1", "b2", "a1", "a2"]
    assert pipeline.snapshot()["dead_letter"] == 0


# --- Backpressure ---


def test_a_slow_sink_slows_the_source_down() -> None:
    """Ten minutes of a slow sink: the source is pulled at its rate, and little is in flight."""
    most = 0
    source = Recorded(range(100_000))
    pipeline = Pipeline("p")

    async def store(_number: int) -> None:
        nonlocal most
        most = max(most, pipeline.snapshot()["in_flight"])
        await pause(1.0)

    (
        pipeline.read(source)
        .stage(lambda number: number + 1, name="one")
        .stage(lambda number: number + 1, name="two", workers=1, capacity=10)
        .sink(store, capacity=10)
    )

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        await pause(600.0)
        assert pipeline.snapshot()["sink"] in (599, 600)
        pipeline.stop(0.0)
        await running

    run_virtual(main())
    assert source.pulled <= 600 + 130
    assert most <= 130


@pytest.mark.slow
def test_a_slow_sink_keeps_memory_flat_for_a_minute() -> None:
    """In real time: nothing grows after the queues are full, and little is read ahead."""
    source = Recorded(count())  # type: ignore[arg-type]
    stored = 0
    held: list[int] = []
    pipeline = Pipeline("p")

    async def store(_values: list[bytes]) -> None:
        nonlocal stored
        await pause(0.01)
        stored += 1
        source.ends.clear()

    (
        pipeline.read(source)
        .stage(lambda number: bytes(10_000 + number % 7), name="load")
        .sink(store, workers=2)
    )

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        for _ in range(12):
            await pause(5.0)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
            assert source.pulled <= stored + 200
        pipeline.stop(1.0)
        await running

    tracemalloc.start()
    try:
        asyncio.run(main())
    finally:
        tracemalloc.stop()
    assert stored > 100
    assert max(held[1:]) - held[0] < 1_000_000


def test_a_sink_may_say_not_before() -> None:
    """The item waits, and is not taken for failed."""
    at: list[float] = []

    async def store(_value: int) -> None:
        at.append(asyncio.get_running_loop().time())
        if len(at) == 1:
            raise NotBefore(30.0)

    pipeline = Pipeline("p", rng=Random(1))
    pipeline.read([1]).sink(store)
    run_virtual(pipeline.run())
    assert 30.0 <= at[1] - at[0] < 30.1
    assert pipeline.snapshot()["sink"] == 1


@pytest.mark.parametrize("batch", [None, (4, 1.0)])
def test_items_wait_while_the_breaker_is_open(batch: tuple[int, float] | None) -> None:
    """A minute's outage costs those that failed before the breaker opened, and no other item."""
    up_at = 60.0

    async def store(_numbers: Any) -> None:
        if asyncio.get_running_loop().time() < up_at:
            raise ConnectionError("down")

    async def main() -> dict[str, Any]:
        guard = Guard(
            "vendor",
            Retry(on=ConnectionError, attempts=3, backoff=0.1),
            Breaker(consecutive=3, break_for=5.0),
        )
        pipeline = Pipeline("p", rng=Random(1))
        pipeline.read(range(20)).sink(store, guard=guard, workers=3, batch=batch)  # type: ignore[call-overload]
        await pipeline.run()
        guard.close()
        return pipeline.snapshot()

    seen = run_virtual(main())
    size = 1 if batch is None else batch[0]
    assert (seen["sink"], seen["dead_letter"]) == (20 - 2 * size, 2 * size)
    assert seen["stages"][0]["refused"] > 0


# --- Batches ---


def test_only_failed_members_of_a_batch_are_tried_again() -> None:
    """By the guard's retry; each call has those that are left."""
    calls: list[list[int]] = []
    left = {2: 1, 4: 2}

    async def store(numbers: list[int]) -> None:
        calls.append(numbers)
        failures: dict[int, Exception] = {}
        for place, number in enumerate(numbers):
            if left.get(number, 0):
                left[number] -= 1
                failures[place] = ConnectionError(number)
        if failures:
            raise BatchFailed(failures)

    guard = Guard("store", Retry(on=ConnectionError, attempts=3, backoff=0.1), replace=True)
    pipeline = Pipeline("p")
    pipeline.read(range(5)).sink(store, batch=(5, 1.0), guard=guard)
    run_virtual(pipeline.run())
    guard.close()
    assert calls == [[0, 1, 2, 3, 4], [2, 4], [4]]
    assert pipeline.snapshot()["sink"] == 5


def test_a_batch_is_sent_when_it_is_full_or_its_time_is_over() -> None:
    """Three make a batch; one that is alone waits for its second."""
    sizes: list[tuple[float, int]] = []

    async def numbers() -> Any:
        for number in range(4):
            yield number
        await pause(10.0)
        yield 4

    async def store(batch: list[int]) -> None:
        sizes.append((asyncio.get_running_loop().time(), len(batch)))

    pipeline = Pipeline("p")
    pipeline.read(numbers()).sink(store, batch=(3, 2.0))
    run_virtual(pipeline.run())
    assert [size for _, size in sizes] == [3, 1, 1]
    assert sizes[1][0] - sizes[0][0] == pytest.approx(2.0)


def test_a_batch_stage_must_return_one_result_for_each() -> None:
    """Else its items fail, with what to write."""
    pipeline = Pipeline("p")
    pipeline.read(range(3)).stage(lambda _batch: [1], name="odd", batch=(3, 0.1)).sink(print)
    run_virtual(pipeline.run())
    letters = pipeline.dead_letters
    assert isinstance(letters, MemoryDeadLetters)
    assert len(letters.letters) == 3
    assert "one result for each" in letters.letters[0].cause


# --- Failing ---


def test_lesser_items_are_marked_to_the_end() -> None:
    """With the stage and the cause; later stages see it."""
    seen: list[bool] = []

    async def enrich(number: int) -> dict[str, int]:
        if number == 1:
            raise TimeoutError("profile service")
        return {"id": number, "profile": 7}

    def check(value: dict[str, int]) -> dict[str, int]:
        seen.append(bool(current_item().degradations))
        return value

    pipeline = Pipeline("p")
    (
        pipeline.read(())
        .stage(enrich, on_failure=degrade(lambda number, _error: {"id": number}))
        .stage(check)
        .sink(lambda _value: None, name="store")
    )
    ended = pipeline.test([0, 1])
    assert seen == [False, True]
    assert [one.value for one in ended] == [{"id": 0, "profile": 7}, {"id": 1}]
    assert [bool(one.degradations) for one in ended] == [False, True]
    assert ended[1].degradations[0].stage == "enrich"
    assert "profile service" in ended[1].degradations[0].cause
    assert pipeline.snapshot()["degraded"] == 1


def test_a_fallback_sink_takes_what_the_first_cannot() -> None:
    """And the item counts as stored, degraded."""
    elsewhere: list[int] = []

    async def store(_number: int) -> None:
        raise ConnectionError

    async def keep(number: int, _error: Exception) -> None:
        elsewhere.append(number)

    pipeline = Pipeline("p")
    pipeline.read(range(3)).sink(store, on_failure=degrade(keep))
    run_virtual(pipeline.run())
    assert elsewhere == [0, 1, 2]
    assert (pipeline.snapshot()["sink"], pipeline.snapshot()["degraded"]) == (3, 3)


def test_stop_on_failure_gives_everything_back() -> None:
    """The error is raised with its stage and item, and nothing is begun after it."""
    source = Recorded(range(10))
    stored: list[int] = []

    async def store(number: int) -> None:
        if number == 3:
            raise ValueError("broken")
        stored.append(number)

    pipeline = Pipeline("p")
    pipeline.read(source).sink(store, on_failure="stop")
    with pytest.raises(ValueError, match="broken") as raised:
        run_virtual(pipeline.run())
    assert "stage 'store', item recorded:3" in raised.value.__notes__[0]
    assert stored == [0, 1, 2]
    assert sorted(source.ends) == sorted(
        [("acknowledged", n) for n in range(3)] + [("returned", n) for n in range(3, 10)]
    )


def test_unwanted_items_are_dropped_and_counted() -> None:
    """By a stage that returns DROP, on the way, in a worker or in a batch."""

    async def even(number: int) -> Any:
        return DROP if number % 2 else number

    async def small(numbers: list[int]) -> list[Any]:
        return [DROP if number > 6 else number for number in numbers]

    pipeline = Pipeline("p")
    (
        pipeline.read(())
        .stage(lambda number: DROP if number == 0 else number, name="positive")
        .stage(even)
        .stage(small, batch=(3, 0.1))
        .sink(lambda _number: None, name="store")
    )
    ended = pipeline.test(range(10))
    assert sorted(one.value for one in ended if one.ending is Ending.SINK) == [2, 4, 6]
    assert Counter(one.ending for one in ended) == {Ending.SINK: 3, Ending.DROPPED: 7}


def test_dead_letters_that_cannot_be_stored_stop_the_flow_and_lose_nothing() -> None:
    """The source is told only after a dead letter is stored."""
    source = Recorded(range(5))
    letters = MemoryDeadLetters("p", most=2)
    pipeline = Pipeline("p", dead_letters=letters, rng=Random(1))

    def parse(_number: int) -> int:
        raise ValueError("poison")

    pipeline.read(source).stage(parse).sink(print)

    async def main() -> None:
        running = asyncio.create_task(pipeline.run())
        await pause(300.0)
        assert len(source.ends) == 2
        assert all(letters.drop(letter.id) for letter in letters.letters)
        await pause(300.0)
        assert len(source.ends) == 4
        pipeline.stop(0.0)
        await running

    run_virtual(main())
    assert Counter(kind for kind, _ in source.ends) == {"acknowledged": 4, "returned": 1}


# --- Processes ---


def crash_on_seven(number: int) -> int:
    """Die of one item."""
    if number == 7:
        import os

        os._exit(3)
    return number * 2


@pytest.mark.parametrize("batch", [None, (4, 0.1)])
def test_a_poison_item_kills_as_many_workers_as_it_may(batch: tuple[int, float] | None) -> None:
    """Then it is a dead letter with its cause; all others arrive."""
    stored: list[int] = []
    pipeline = Pipeline("p")
    with CpuPool("pool", workers=2) as pool:
        function: Any = crash_on_seven if batch is None else crash_in_batch
        (
            pipeline.read(range(20))
            .stage(function, workers=pool, batch=batch, most_deaths=2)  # type: ignore[call-overload]
            .sink(stored.append, name="store")
        )
        asyncio.run(pipeline.run())
    assert sorted(stored) == [2 * number for number in range(20) if number != 7]
    letters = pipeline.dead_letters
    assert isinstance(letters, MemoryDeadLetters)
    (letter,) = letters.letters
    assert (letter.value, letter.stage) == (7, function.__name__)
    assert "WorkerDied" in letter.cause
    assert pipeline.snapshot()["stages"][0]["deaths"] == (2 if batch is None else 3)


def crash_in_batch(numbers: list[int]) -> list[int]:
    """Die of a batch with that item in it."""
    return [crash_on_seven(number) for number in numbers]


# --- Branches ---


def test_branches_and_merges() -> None:
    """Each item goes one way; two ways may become one again."""
    large_seen: list[int] = []
    pipeline = Pipeline("p")
    numbers = pipeline.read(())

    def is_large(number: int) -> bool:
        return number > 5

    def review(number: int) -> int:
        large_seen.append(number)
        return -number

    large, small = numbers.branch(is_large)
    large.stage(review).merge(small).sink(lambda _number: None, name="store")
    ended = pipeline.test(range(8))
    assert [one.value for one in ended] == [0, 1, 2, 3, 4, 5, -6, -7]
    assert large_seen == [6, 7]
    assert pipeline.explain() == (
        "pipeline 'p'\n"
        "  read items\n"
        "  ? is_large: yes\n"
        "    stage review: on the way, on failure: dead_letter\n"
        "    sink store: on the way, on failure: dead_letter\n"
        "  ? is_large: no\n"
        "    -> store"
    )


def test_a_degraded_item_does_not_pass_those_before_it() -> None:
    """Also where the worker has finished them in the same turn of the event loop."""
    stored: list[int] = []

    async def work(number: int) -> int:
        if number % 3 == 0:
            raise ValueError(number)
        return number

    async def store(number: int) -> None:
        stored.append(number)

    pipeline = Pipeline("p")
    (
        pipeline.read(range(50))
        .stage(work, ordered_by=lambda _: "key", on_failure=degrade(lambda number, _: number))
        .sink(store)
    )
    assert [ended.value for ended in pipeline.test(range(50), call_sinks=True)] == stored
    assert stored == list(range(50))


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_finished_is_handed_on_before_its_worker_is_suspended(*, ordered: bool) -> None:
    """A worker that waits for its next item holds back none that it has finished."""
    stored: dict[int, float] = {}

    async def work(number: int) -> int:
        if number == 5:
            await pause(100.0)
        return number

    async def store(number: int) -> None:
        stored[number] = asyncio.get_running_loop().time()

    pipeline = Pipeline("p")
    key = (lambda _: "key") if ordered else None
    pipeline.read(range(8)).stage(work, ordered_by=key).sink(store)
    pipeline.test(range(8), call_sinks=True)
    began = stored[0]
    assert [stored[number] - began for number in range(8)] == [0.0] * 5 + [100.0] * 3


def test_attempts_are_those_of_the_guard_of_the_stage() -> None:
    """A guard that retries inside of the function is not counted."""
    tried: Counter[int] = Counter()
    seen: list[tuple[int, int]] = []

    async def fails_once(number: int) -> None:
        tried[number] += 1
        if tried[number] == 1:
            raise ConnectionError(number)

    async def work(number: int) -> int:
        await inner.acall(fails_once, number)
        seen.append((number, current_item().attempts))
        if tried[number] <= number:
            raise TimeoutError(number)
        return number

    inner = Guard("inner", Retry(on=ConnectionError, attempts=2, backoff=0.1), replace=True)
    outer = Guard("outer", Retry(on=TimeoutError, attempts=3, backoff=0.1), replace=True)
    pipeline = Pipeline("p")
    pipeline.read(()).stage(work, guard=outer).sink(print)
    assert [ended.ending for ended in pipeline.test([1, 2, 3])] == [Ending.SINK] * 3
    assert seen == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
    assert pipeline.snapshot()["stages"][0]["retries"] == 3


def test_the_start_of_a_process_does_not_count_for_the_timeout(tmp_path: Path) -> None:
    """Neither the first one, nor that of one which takes the place of a process that died."""
    with CpuPool("slow", workers=1) as pool:
        pipeline, stored = Pipeline("p"), []
        paths = ["", str(tmp_path / "died"), ""]
        pipeline.read(paths).stage(dies_once, workers=pool, timeout=TAKES / 1.5).sink(stored.append)
        asyncio.run(pipeline.run())
    assert stored == paths
    assert pipeline.snapshot()["stages"][0]["deaths"] == 1


# --- The same seed gives the same history ---


def test_an_hour_of_outage_replays_by_its_seed() -> None:
    """Two runs with one seed end alike, to the order of the ends."""

    def history(seed: int) -> list[Any]:
        chance = Random(seed)
        calls = Counter[int]()

        async def enrich(number: int) -> int:
            calls[number] += 1
            await pause(chance.random())
            if asyncio.get_running_loop().time() < 3600.0 and chance.random() < 0.9:
                raise ConnectionError
            return number

        guard = Guard(
            "vendor",
            Retry(on=ConnectionError, attempts=4, backoff=1.0),
            rng=Random(seed),
            replace=True,
        )
        pipeline = Pipeline("p")
        (
            pipeline.read(())
            .stage(enrich, guard=guard, workers=4)
            .sink(lambda _number: None, name="store")
        )
        ended = pipeline.test(range(200), seed=seed)
        guard.close()
        return [*ended, calls]

    assert history(1) == history(1)
    assert history(1) != history(2)


def outage(seed: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the history of a pipeline whose store is down for an hour, and its last snapshot."""
    history: list[Any] = []
    chance = Random(seed)

    async def readings() -> Any:
        for number in range(5400):
            await pause(chance.expovariate(1.0))
            yield number

    async def store(number: int) -> None:
        at = asyncio.get_running_loop().time()
        await pause(chance.random() / 10)
        is_down = 600.0 <= at < 4200.0
        history.append((at, number, is_down))
        if is_down or chance.random() < 0.05:
            raise ConnectionError("the store is down")

    async def main() -> dict[str, Any]:
        guard = Guard(
            "store",
            Retry(on=ConnectionError, attempts=4, backoff=0.5),
            Breaker(consecutive=5, break_for=15.0),
            rng=Random(seed),
            replace=True,
        )
        pipeline = Pipeline("p", rng=Random(seed))
        pipeline.read(readings()).sink(store, guard=guard, workers=4)
        await pipeline.run()
        guard.close()
        return pipeline.snapshot()

    return history, run_virtual(main())


def test_an_hour_of_outage_costs_few_items_and_replays_by_its_seed() -> None:
    """The store is probed, and not hammered; the source waits, and all but a few items arrive."""
    history, seen = outage(1)
    assert seen["read"] == 5400
    assert seen["dead_letter"] <= 4
    assert seen["sink"] == 5400 - seen["dead_letter"]
    assert history[-1][0] > 5400.0
    assert len([call for call in history if call[2]]) < 500
    assert outage(1)[0] == history
    assert outage(2)[0] != history


# --- Testing and running ---


def test_a_test_calls_no_sink_unless_asked() -> None:
    """What a pipeline does in production must not happen because it is tested."""
    stored: list[int] = []
    pipeline = Pipeline("p")
    pipeline.read(()).stage(str).stage(int).sink(stored.append, name="store")
    assert [one.value for one in pipeline.test([1, 2])] == [1, 2]
    assert stored == []
    pipeline.test([1, 2], call_sinks=True)
    assert stored == [1, 2]


def test_ends_are_in_the_order_of_the_items() -> None:
    """Whichever ended first: a test can compare them with its items, one by one."""

    async def waited(seconds: float) -> float:
        if seconds == 0:
            raise ValueError("nothing to wait for")
        await pause(seconds)
        return seconds

    pipeline = Pipeline("p")
    pipeline.read([]).stage(waited, workers=3).sink(print, name="store")
    ended = pipeline.test([3.0, 1.0, 0.0, 2.0])
    assert [one.value for one in ended] == [3.0, 1.0, 0.0, 2.0]
    assert [one.ending.value for one in ended] == ["sink", "sink", "dead_letter", "sink"]


def test_what_has_a_loop_of_its_own_is_refused_inside_another() -> None:
    """With what to write instead, and no coroutine left behind."""
    pipeline = Pipeline("p")
    pipeline.read([1]).sink(print)

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"use await pipeline.run\(\)"):
            pipeline.run_sync()
        with pytest.raises(RuntimeError, match="a plain test function"):
            pipeline.test([1])

    run_virtual(main())


def test_run_says_whether_it_came_to_the_end() -> None:
    """True at the end of the sources, False if it was stopped."""
    pipeline = Pipeline("p")
    pipeline.read([1]).sink(lambda _number: None, name="store")
    assert run_virtual(pipeline.run())
    stopped = Pipeline("q")
    stopped.read(range(10)).sink(lambda _number: stopped.stop(1.0), name="store")
    assert not run_virtual(stopped.run())
    again = Pipeline("r")
    again.read([1]).sink(lambda _number: None, name="store")
    assert again.run_sync()


# --- Mistakes ---


def test_mistakes_are_reported_when_the_pipeline_is_made() -> None:
    """Each with what to write instead."""

    async def work(number: int) -> int:
        return number

    pipeline = Pipeline("p")
    flow = pipeline.read([1])
    with pytest.raises(TypeError, match="pass an iterable"):
        pipeline.read(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="retrying is a Retry in guard="):
        flow.stage(work, on_failure="retry")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="needs ordered_by="):
        flow.stage(work, when_failed="block")
    with pytest.raises(ValueError, match="cannot stop a plain function"):
        flow.stage(lambda number: number, timeout=1.0)
    with CpuPool("pool", workers=1) as pool:
        with pytest.raises(TypeError, match="this one is async"):
            flow.stage(work, workers=pool)
        with pytest.raises(TypeError, match=r"'twice': .* from the top level of a module"):
            flow.stage(lambda number: 2 * number, workers=pool, name="twice")
    with pytest.raises(TypeError, match=r"write \(size, seconds\)"):
        flow.stage(work, batch=5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="'items' leads nowhere"):
        run_virtual(pipeline.run())
    flow.stage(work)
    with pytest.raises(ValueError, match="leads somewhere already"):
        flow.sink(print)
    with pytest.raises(ValueError, match="'work' leads nowhere"):
        pipeline.explain()


def test_order_that_is_lost_on_the_way_is_a_danger() -> None:
    """An ordered stage behind one that works at several at once."""

    async def work(number: int) -> int:
        return number

    pipeline = Pipeline("p")
    pipeline.read([1]).stage(work, workers=5).sink(print, ordered_by=lambda number: number)
    assert "danger: stage 'print' keeps the order" in pipeline.explain()


# --- Functions that misbehave ---


def test_members_of_a_batch_that_are_dropped_go_no_further() -> None:
    """Neither into the queue of a stage with workers, nor on the way."""
    stored: list[int] = []

    async def store(number: int) -> None:
        stored.append(number)

    pipeline = Pipeline("p")
    (
        pipeline.read(range(6))
        .stage(lambda numbers: [n if n % 2 else DROP for n in numbers], batch=(3, 1.0), name="odd")
        .sink(store, workers=2)
    )
    run_virtual(pipeline.run())
    assert stored == [1, 3, 5]
    assert pipeline.snapshot()["dropped"] == 3
    check_account(pipeline)


def test_done_members_of_a_failed_batch_go_on_with_their_results() -> None:
    """A stage that does not give them has failed with all its members."""

    def partial(numbers: list[int]) -> list[int]:
        raise BatchFailed({1: ValueError("bad")}, [10 * number for number in numbers])

    def without_results(_numbers: list[int]) -> list[int]:
        raise BatchFailed({1: ValueError("bad")})

    ends = {}
    for function in (partial, without_results):
        stored: list[int] = []
        pipeline = Pipeline("p")
        pipeline.read(()).stage(function, batch=(3, 1.0)).sink(stored.append, name="store")
        ends[function.__name__] = (
            [(one.ending, one.value) for one in pipeline.test([1, 2, 3], call_sinks=True)],
            stored,
        )
    set_aside = Ending.DEAD_LETTER
    assert ends["partial"] == (
        [(Ending.SINK, 10), (set_aside, 2), (Ending.SINK, 30)],
        [10, 30],
    )
    assert ends["without_results"] == ([(set_aside, number) for number in (1, 2, 3)], [])


def test_what_a_worker_process_raises_arrives_whole() -> None:
    """`BatchFailed` and `NotBefore` are pickled on their way out of a process."""
    failed = pickle.loads(pickle.dumps(BatchFailed({1: ValueError("bad")}, [1, 2])))  # noqa: S301 - ours
    assert (list(failed.failures), failed.results) == ([1], [1, 2])
    assert pickle.loads(pickle.dumps(NotBefore(2.0))).seconds == 2.0  # noqa: S301 - ours


@pytest.mark.parametrize("batch", [None, (1, 0.0)])
def test_a_function_that_was_cancelled_inside_has_failed(batch: tuple[int, float] | None) -> None:
    """Its worker goes on with the next item."""
    stored: list[Any] = []

    async def store(value: Any) -> None:
        number = value[0] if isinstance(value, list) else value
        if number == 1:
            raise asyncio.CancelledError
        stored.append(number)

    async def numbers() -> Any:
        for number in range(4):
            yield number
            await pause(1)

    pipeline = Pipeline("p")
    pipeline.read(numbers()).sink(store, batch=batch)  # type: ignore[call-overload]
    run_virtual(pipeline.run())
    assert stored == [0, 2, 3]
    assert pipeline.snapshot()["dead_letter"] == 1
    check_account(pipeline)


def test_a_source_that_was_cancelled_inside_is_not_over() -> None:
    """It has failed, and the run says so."""

    async def numbers() -> Any:
        yield 1
        raise asyncio.CancelledError

    pipeline = Pipeline("p")
    pipeline.read(numbers()).sink(lambda _number: None, name="store")
    with pytest.raises(RuntimeError, match="a source was cancelled"):
        run_virtual(pipeline.run())
    assert pipeline.snapshot()["sink"] == 1


@pytest.mark.parametrize("batch", [None, (1, 0.0)])
@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_a_function_that_swallows_its_end_does_not_hold_up_the_stop(
    batch: tuple[int, float] | None, seconds: float
) -> None:
    """Whether it returns then or goes on: its item is given back once, and no other is begun."""
    begun: list[Any] = []

    async def store(value: Any) -> None:
        begun.append(value)
        try:
            await pause(100)
        except asyncio.CancelledError:
            await pause(seconds)

    source = Recorded(range(3))

    async def main() -> float:
        pipeline = Pipeline("p")
        pipeline.read(source).sink(store, batch=batch)  # type: ignore[call-overload]
        running = asyncio.create_task(pipeline.run())
        await pause(1)
        pipeline.stop(1.0)
        await running
        check_account(pipeline)
        ended_at = asyncio.get_running_loop().time()
        await pause(2000)
        return ended_at

    began = run_virtual(main())
    assert len(begun) == 1
    assert source.ends == [("returned", number) for number in range(3)]
    assert began < 10


def test_a_run_that_is_cancelled_twice_gives_everything_back() -> None:
    """The second one comes while functions clean up after the first."""
    source = Recorded(range(3))

    async def store(_value: int) -> None:
        try:
            await pause(100)
        finally:
            await pause(2)

    async def main() -> None:
        pipeline = Pipeline("p")
        pipeline.read(source).sink(store)
        running = asyncio.create_task(pipeline.run())
        for _ in range(2):
            await pause(1)
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtual(main())
    assert source.ends == [("returned", number) for number in range(3)]


def test_a_pipeline_with_threads_runs_after_a_test() -> None:
    """`test` does not use the threads, and does not close them."""
    stored: list[int] = []
    pipeline = Pipeline("p")
    (
        pipeline.read(range(3))
        .stage(lambda number: number + 1, workers=2, name="add")
        .sink(stored.append, name="store")
    )
    assert len(pipeline.test([7])) == 1
    stored.clear()
    asyncio.run(pipeline.run())
    assert sorted(stored) == [1, 2, 3]


# --- What lies between the promises ---


def test_stages_ordered_by_different_keys_do_not_mix_them_up() -> None:
    """An item has the key of the next stage already when it leaves the one before."""
    done: list[tuple[str, int, int]] = []

    async def same(item: Any) -> Any:
        await pause(item[2] % 3)
        return item

    async def store(item: Any) -> None:
        await pause(item[2] % 2)
        done.append(item)

    async def all_at_once(items: list[Any]) -> list[Any]:
        return items

    items = [(f"k{number % 2}", number % 3, number) for number in range(30)]
    pipeline = Pipeline("p")
    (
        pipeline.read(items)
        .stage(same, workers=4, ordered_by=lambda item: item[0])
        .stage(all_at_once, batch=(4, 1.0), workers=2, ordered_by=lambda item: item[1])
        .sink(store, workers=4, ordered_by=lambda item: item[0])
    )
    assert run_virtual(pipeline.run())
    assert len(done) == len(items)
    for key in ("k0", "k1"):
        for second in range(3):
            numbers = [number for one, other, number in done if (one, other) == (key, second)]
            assert numbers == sorted(numbers)


def drop_odd(number: int) -> Any:
    return DROP if number % 2 else number


def test_a_worker_process_may_drop_an_item() -> None:
    """What it returns is a copy, and `DROP` is recognised all the same."""
    assert pickle.loads(pickle.dumps([DROP]))[0] is DROP  # noqa: S301 - of this line
    stored: list[int] = []
    with CpuPool("drop", workers=1) as pool:
        pipeline = Pipeline("p")
        pipeline.read(range(4)).stage(drop_odd, workers=pool).sink(stored.append, name="store")
        assert asyncio.run(pipeline.run())
    assert sorted(stored) == [0, 2]
    assert pipeline.snapshot()["dropped"] == 2


def test_a_lesser_item_may_be_none_at_all() -> None:
    """The function of `degrade` may drop the item, as that of the stage may."""
    stored: list[Any] = []
    pipeline = Pipeline("p")
    pipeline.read([b"{", b"1"]).stage(int, on_failure=degrade(lambda _value, _error: DROP)).sink(
        stored.append, name="store"
    )
    assert run_virtual(pipeline.run())
    seen = pipeline.snapshot()
    assert (stored, seen["dropped"], seen["degraded"]) == ([1], 1, 0)


@pytest.mark.parametrize("seconds", [5.0, 600.0])
def test_a_plain_sink_on_the_way_may_say_not_before(seconds: float) -> None:
    """Its items wait as those of a stage with workers do, for as long as it says."""
    calls: list[tuple[int, float]] = []

    async def main() -> Pipeline:
        now = asyncio.get_running_loop().time

        def store(number: int) -> None:
            calls.append((number, now()))
            if len(calls) == 2:
                raise NotBefore(seconds)

        pipeline = Pipeline("p")
        pipeline.read([1, 2, 3]).sink(store)
        assert await pipeline.run()
        return pipeline

    seen = run_virtual(main()).snapshot()
    assert [number for number, _ in calls] == [1, 2, 2, 3]
    assert calls[2][1] - calls[1][1] >= seconds
    assert (seen["sink"], seen["dead_letter"], seen["stages"][0]["refused"]) == (3, 0, 1)


def test_members_of_a_batch_end_each_by_its_own_error() -> None:
    """One has failed for good, one is to wait, one is done."""
    batches: list[list[int]] = []

    async def store(numbers: list[int]) -> None:
        batches.append(numbers)
        if len(batches) == 1:
            raise BatchFailed({0: ValueError("bad"), 1: NotBefore(5.0)})

    pipeline = Pipeline("p")
    pipeline.read([1, 2, 3]).sink(store, batch=(3, 1.0))
    assert run_virtual(pipeline.run())
    assert batches == [[1, 2, 3], [2]]
    assert [letter.value for letter in pipeline.dead_letters.letters] == [1]


def test_members_of_a_batch_do_not_wait_for_one_that_blocks_its_key() -> None:
    """They are in the sink, and the next ones of their keys follow."""
    source = Recorded(["a1", "b1", "b2", "c1"])

    async def store(values: list[str]) -> None:
        bad = {place: OSError() for place, value in enumerate(values) if value == "a1"}
        if bad:
            raise BatchFailed(bad)

    async def main() -> None:
        pipeline = Pipeline("p")
        settings: Any = {"batch": (3, 1.0), "workers": 2, "when_failed": "block"}
        pipeline.read(source).sink(store, ordered_by=lambda value: value[0], **settings)
        running = asyncio.create_task(pipeline.run())
        await pause(600)
        assert sorted(source.ends) == [("acknowledged", number) for number in (1, 2, 3)]
        pipeline.stop(0)
        await running

    run_virtual(main())
    assert ("returned", 0) in source.ends


def test_a_batch_that_names_a_member_it_does_not_have_has_failed() -> None:
    """Who counts from 1 would lose the last member, which nobody has stored."""

    async def store(_values: list[int]) -> None:
        raise BatchFailed({3: ValueError("the third one")})

    pipeline = Pipeline("p")
    pipeline.read([1, 2, 3]).sink(store, batch=(3, 1.0))
    assert run_virtual(pipeline.run())
    causes = {letter.cause for letter in pipeline.dead_letters.letters}
    assert (pipeline.snapshot()["sink"], len(pipeline.dead_letters.letters)) == (0, 3)
    assert all("count from 0" in cause for cause in causes), causes


def test_what_an_iterable_yields_before_its_error_is_not_lost() -> None:
    """It is read, and so it ends, or is given back."""
    stored: list[int] = []

    def numbers() -> Any:
        yield from range(10)
        raise OSError("the disk")

    pipeline = Pipeline("p")
    pipeline.read(numbers()).sink(stored.append, name="store")
    with pytest.raises(OSError, match="the disk"):
        run_virtual(pipeline.run())
    assert stored == list(range(10))


def test_a_source_that_makes_an_error_of_its_cancellation_is_read_no_more() -> None:
    """The stop does not wait for its next pull."""
    pulls = []

    class Translating(Recorded):
        async def pull(self, most: int) -> Sequence[tuple[Any, int]]:
            pulls.append(most)
            try:
                await pause(1e6)
            except asyncio.CancelledError:
                raise ConnectionError("closed") from None
            return ()

    Translating.repeatable = True

    async def main() -> None:
        pipeline = Pipeline("p")
        pipeline.read(Translating([])).sink(print)
        running = asyncio.create_task(pipeline.run())
        await pause(1)
        began = asyncio.get_running_loop().time()
        pipeline.stop(100.0)
        await running
        assert asyncio.get_running_loop().time() == began

    run_virtual(main())
    assert len(pulls) == 1


def test_dead_letters_whose_function_was_cancelled_inside_are_stored_again() -> None:
    """The item waits, as it does after any other failure to store it."""
    attempts = []

    async def keep(letter: DeadLetter) -> None:
        attempts.append(letter.value)
        if len(attempts) == 1:
            raise asyncio.CancelledError

    async def fail(_number: int) -> None:
        raise ValueError

    pipeline = Pipeline("p", dead_letters=keep)
    pipeline.read([1]).sink(fail)
    assert run_virtual(pipeline.run())
    assert attempts == [1, 1]


def test_order_that_is_lost_before_a_branch_is_a_danger() -> None:
    """On both ways, once each, also where they meet again."""

    async def same(number: int) -> int:
        return number

    pipeline = Pipeline("p")
    small, large = pipeline.read([1]).stage(same, name="wide", workers=4).branch(bool)
    small.stage(same, name="narrow").merge(large).sink(same, name="end", ordered_by=int)
    (danger,) = pipeline.dangers()
    assert "'end'" in danger
    assert "'wide'" in danger


def test_numbers_seen_from_another_thread_fit_together() -> None:
    """The account is right at each instant, whoever looks."""
    pipeline, wrong, is_over = Pipeline("p"), [], threading.Event()

    async def same(number: int) -> int:
        return number

    def look() -> None:
        while not is_over.is_set():
            seen = pipeline.snapshot()
            if seen["read"] != seen["in_flight"] + sum(seen[ending] for ending in Ending):
                wrong.append(seen)

    pipeline.read(range(20_000)).stage(same, workers=4).sink(id, name="store")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert asyncio.run(pipeline.run())
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not wrong
