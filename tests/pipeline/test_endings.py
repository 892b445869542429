"""What a function does at its worst changes nothing about the ends of other items."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seawall import Guard, Retry
from seawall.pipeline import Pipeline
from seawall.testing import run_virtual


class Source:
    """Numbers, and how each of them ended."""

    name = "numbers"

    def __init__(self, numbers: int) -> None:
        self.left = list(range(numbers))
        self.acknowledged: list[int] = []
        self.given_back: list[int] = []

    async def pull(self, most: int) -> list[tuple[int, int]]:
        pulled, self.left = self.left[:most], self.left[most:]
        return [(number, number) for number in pulled]

    async def acknowledge(self, numbers: list[int]) -> None:
        self.acknowledged += numbers

    async def give_back(self, numbers: list[int]) -> None:
        self.given_back += numbers

    async def close(self) -> None:
        """Nothing to close."""

    def holds(self, number: int) -> bool:
        asyncio.get_running_loop()  # as a source that looks at the loop's time
        return number not in self.acknowledged


class Abort(BaseException):
    """No error that a pipeline handles."""


def test_what_a_sink_has_stored_is_not_given_back_when_it_raises_no_usual_error():
    """The items before it are acknowledged, as each of them has its effect."""
    source, stored = Source(20), list[int]()

    async def store(number: int) -> None:
        if number == 10:
            raise Abort
        stored.append(number)

    async def main() -> None:
        pipeline = Pipeline("numbers")
        pipeline.read(source).sink(store, workers=1)
        with pytest.raises(Abort):
            await pipeline.run()

    run_virtual(main())
    assert stored == list(range(10))
    assert not set(stored) & set(source.given_back)
    assert source.acknowledged == stored


def test_retries_in_a_thread_of_the_function_are_its_own():
    """They are no attempts at the item, and the source is not asked from that thread."""
    source, tries, guard = Source(1), list[int](), Guard("inner", Retry(on=OSError, backoff=0.001))
    dead: list[Any] = []

    def fetch() -> int:
        tries.append(1)
        if len(tries) < 2:
            raise OSError("again")
        return 1

    async def stage(_number: int) -> int:
        return await asyncio.to_thread(guard.call, fetch)

    async def store(_number: int) -> None:
        """Store nothing."""

    async def main() -> None:
        pipeline = Pipeline("numbers", dead_letters=_collector(dead))
        pipeline.read(source).stage(stage, guard=guard, workers=1).sink(store)
        await pipeline.run()

    asyncio.run(main())
    assert (len(tries), dead, source.acknowledged) == (2, [], [0])


def _collector(dead: list[Any]) -> Any:
    async def collect(letter: Any) -> None:
        dead.append(letter)

    return collect
