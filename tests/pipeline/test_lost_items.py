"""Items that a source cannot hand out, and items that it loses to another process meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from seawall import Guard, Retry
from seawall.pipeline import Ending, FaultyItem, IterableSource, Pipeline, degrade
from seawall.testing import run_virtual


class Shared(IterableSource[Any]):
    """A source that loses the items in `lost` to another process."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items, name="shared")
        self.lost: set[int] = set()
        self.acknowledged: list[int] = []

    def holds(self, handle: int) -> bool:
        return handle not in self.lost

    async def acknowledge(self, handles: Sequence[int]) -> None:
        self.acknowledged += handles


def test_a_faulty_item_is_a_dead_letter_of_its_source():
    """It is acknowledged as one, with its cause; the others go on."""
    source, stored = Shared([1, FaultyItem("bad", ValueError("no JSON"), attempts=5), 3]), []
    pipeline = Pipeline("faulty")
    pipeline.read(source).stage(lambda value: value, name="same").sink(stored.append, name="keep")
    assert run_virtual(pipeline.run())
    assert stored == [1, 3]
    (letter,) = pipeline.dead_letters.letters
    assert (letter.value, letter.stage, letter.attempts) == ("bad", "shared", 5)
    assert letter.cause == "ValueError: no JSON"
    assert sorted(source.acknowledged) == [0, 1, 2]


def test_a_lost_item_is_given_back_before_the_next_call():
    """The call that is under way ends; no further function sees the item."""
    source, seen = Shared([1, 2, 3]), []

    async def first(value: int) -> int:
        if value == 2:
            source.lost.add(1)
        return value

    async def store(value: int) -> None:
        seen.append(value)

    pipeline = Pipeline("lost")
    pipeline.read(source).stage(first, workers=1).sink(store, workers=1, ordered_by=lambda _: 0)
    assert run_virtual(pipeline.run())
    assert seen == [1, 3]
    assert source.returned == [1]
    assert source.acknowledged == [0, 2]
    assert pipeline.snapshot()[Ending.RETURNED] == 1


@pytest.mark.parametrize("when_failed", ["block", "set_aside"])
@pytest.mark.parametrize("batch", [None, (10, 0.0)])
def test_a_lost_item_is_not_tried_again(
    when_failed: Literal["block", "set_aside"], batch: tuple[int, float] | None
):
    """An item that blocks its key is given up when another process has it."""
    source, calls = Shared([1, 2]), []

    async def store(given: Any) -> None:
        calls.append(given)
        if given in (1, [1, 2]):
            source.lost.add(0)
            raise ConnectionError("down")

    pipeline = Pipeline("blocked")
    settings: dict[str, Any] = {"when_failed": when_failed, "ordered_by": lambda value: value}
    if batch is not None:
        settings["batch"] = batch
    pipeline.read(source).sink(store, workers=1, **settings)

    async def main() -> None:
        async with asyncio.timeout(3600):
            await pipeline.run()

    run_virtual(main())
    assert calls.count(1) == (batch is None)
    if when_failed == "block":
        assert (source.returned, source.acknowledged) == ([0], [1])


def test_a_plain_function_on_the_way_is_not_called_with_a_lost_item():
    """It has no worker, so whoever brings the item looks before the call."""
    source, stored = Shared([1, 2, 3]), []

    async def slow(value: int) -> int:
        if value == 2:
            source.lost.add(1)
        return value

    pipeline = Pipeline("lost")
    pipeline.read(source).stage(slow).sink(stored.append, name="store")
    assert run_virtual(pipeline.run())
    assert stored == [1, 3]
    assert (source.returned, source.acknowledged) == ([1], [0, 2])


def test_a_guard_does_not_try_a_lost_item_again():
    """Its retries are further calls, and the item is somebody else's."""
    source, calls = Shared([1]), []

    async def store(value: int) -> None:
        calls.append(value)
        source.lost.add(0)
        raise ConnectionError

    pipeline = Pipeline("lost")
    guard = Guard("store", Retry(attempts=3, on=ConnectionError))
    pipeline.read(source).sink(store, guard=guard)
    assert run_virtual(pipeline.run())
    assert calls == [1]
    assert (source.returned, source.acknowledged) == ([0], [])


@pytest.mark.parametrize("on_failure", ["dead_letter", "drop", "stop", "degrade"])
def test_an_item_that_was_lost_in_the_call_that_failed_is_given_back(on_failure: str):
    """No fallback is called with it, and it is no dead letter: the other process has it."""
    source, fallback = Shared([1]), []

    async def store(_value: int) -> None:
        source.lost.add(0)
        raise ConnectionError

    lesser = degrade(lambda value, _error: fallback.append(value))
    pipeline = Pipeline("lost")
    action: Any = lesser if on_failure == "degrade" else on_failure
    pipeline.read(source).sink(store, on_failure=action)
    assert run_virtual(pipeline.run())
    assert (fallback, pipeline.dead_letters.letters) == ([], [])
    assert (source.returned, source.acknowledged) == ([0], [])
