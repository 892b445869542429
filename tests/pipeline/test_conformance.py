"""What every source keeps to: nothing is lost, nothing is handed out twice, ends are kept."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from seawall.errors import StoreUnavailable
from seawall.pipeline import Source
from tests.pipeline.places import FAILING, PLACES, RESUMING, Place, RealPlace

Pulled = tuple[int, Any]


def of_each(places: list[type[Place]]) -> Any:
    """Run a test with a fresh place of each kind."""
    marked = [
        pytest.param(place, marks=[pytest.mark.alone] if issubclass(place, RealPlace) else [])
        for place in places
    ]
    return pytest.mark.parametrize("place", marked, indirect=True, ids=lambda one: one.__name__)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Return a fresh place of one kind."""
    made: Place = request.param(request)
    return made


# A pull that is cancelled while a client connects may leave a socket to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _sockets_are_collected() -> Iterator[None]:
    """Collect them here, not in the tests of another module."""
    yield
    gc.collect()


def run(place: Place, test: Callable[[], Awaitable[None]]) -> None:
    """Run a test with a place that is ready."""

    async def main() -> None:
        await place.begin()
        try:
            await test()
        finally:
            await place.end()

    place.run(main())


async def pull(source: Source[Any], number: int, most: int = 7) -> list[Pulled]:
    """Return the next `number` items, pulled a few at a time."""
    items: list[Pulled] = []
    while len(items) < number:
        asked = min(most, number - len(items))
        pulled = await source.pull(asked)
        assert 0 < len(pulled) <= asked
        items += [(int(value), handle) for value, handle in pulled]
    return items


def values(items: list[Pulled]) -> list[int]:
    return sorted(value for value, _ in items)


def handles(items: list[Pulled]) -> list[Any]:
    return [handle for _, handle in items]


@of_each(PLACES)
def test_everything_is_handed_out_once(place: Place) -> None:
    """Also if it is put in while it is read; never more at once than there is room for."""

    async def test() -> None:
        await place.put(list(range(10 if place.grows else 25)))
        source = place.open()
        items = await pull(source, 8)
        if place.grows:
            await place.put(list(range(10, 25)))
        await source.acknowledge(handles(items))
        items += await pull(source, 17, most=5)
        await source.acknowledge(handles(items[8:]))
        await source.close()
        assert values(items) == list(range(25))
        assert len({str(handle) for handle in handles(items)}) == 25

    run(place, test)


@of_each(RESUMING)
def test_what_is_acknowledged_never_comes_again(place: Place) -> None:
    """After a stop in good order, and after a crash, a new reader gets the rest."""

    async def test() -> None:
        await place.put(list(range(12)))
        first = place.open()
        items = await pull(first, 4)
        await first.acknowledge(handles(items))
        await first.close()
        crashed = place.open()
        more = await pull(crashed, 3)
        await crashed.acknowledge(handles(more))
        place.kill(crashed)
        last = place.open()
        rest = await pull(last, 5)
        await last.acknowledge(handles(rest))
        await last.close()
        assert values(items + more + rest) == list(range(12))

    run(place, test)


@of_each(PLACES)
def test_what_has_not_ended_comes_again_with_the_same_id(place: Place) -> None:
    """What was given back, and what a process had when it was killed."""

    async def test() -> None:
        await place.put(list(range(8)))
        first = place.open()
        items = await pull(first, 6)
        await first.acknowledge(handles(items[:2]))
        await first.give_back(handles(items[2:]) if not place.resumes else handles(items[2:4]))
        if not place.resumes:
            await first.close()
        else:
            place.kill(first)
        second = place.open()
        again = await pull(second, 6)
        await second.acknowledge(handles(again))
        await second.close()
        assert values(again) == list(range(2, 8))
        if place.resumes:
            before = {value: str(handle) for value, handle in items}
            after = {value: str(handle) for value, handle in again}
            assert {value: after[value] for value in range(2, 6)} == {
                value: before[value] for value in range(2, 6)
            }

    run(place, test)


@of_each(PLACES)
def test_a_cancelled_pull_has_taken_nothing(place: Place) -> None:
    """Cancelled after each number of turns of the event loop, while there is something or not."""

    async def test() -> None:
        await place.put(list(range(30)))
        source = place.open()
        items: list[Pulled] = []
        for turns in range(24):
            pulling = asyncio.create_task(pull(source, 1))
            for _ in range(turns):
                await asyncio.sleep(0)  # noqa: TID251 - one turn
            pulling.cancel()
            try:
                items += await pulling
            except asyncio.CancelledError:
                pass
        items += await pull(source, 30 - len(items))
        if place.grows:
            waiting = asyncio.create_task(source.pull(5))
            for _ in range(20):
                await asyncio.sleep(0)  # noqa: TID251 - one turn
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            await place.put([30])
            items += await pull(source, 1)
        await source.acknowledge(handles(items))
        await source.close()
        assert values(items) == list(range(31 if place.grows else 30))

    run(place, test)


@of_each(PLACES)
def test_it_can_be_closed_twice(place: Place) -> None:
    """Whether it was used or not."""

    async def test() -> None:
        await place.put([1, 2])
        unused = place.open()
        await unused.close()
        await unused.close()
        used = place.open()
        await used.acknowledge(handles(await pull(used, 2)))
        await used.close()
        await used.close()

    run(place, test)


@of_each(FAILING)
def test_errors_of_the_store_lose_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends that could not be kept are said again, which does no harm where they were kept."""

    async def test() -> None:
        await place.put(list(range(9)))
        source = place.open()
        items = await pull(source, 6)
        with monkeypatch.context() as broken:
            place.cut(broken)
            with pytest.raises((ConnectionError, OSError, StoreUnavailable)):
                await source.acknowledge(handles(items[:3]))
            pulling = asyncio.create_task(pull(source, 1))
            await asyncio.wait([pulling], timeout=0.05)
            pulling.cancel()
            await asyncio.wait([pulling])
            if not pulling.cancelled() and pulling.exception() is None:
                items += pulling.result()
        await source.acknowledge(handles(items[:3]))
        await source.acknowledge(handles(items))
        items += await pull(source, 9 - len(items))
        await source.acknowledge(handles(items[6:]))
        await source.close()
        assert values(items) == list(range(9))
        await place.put([9, 10])
        later = place.open()
        rest = await pull(later, 2)
        await later.acknowledge(handles(rest))
        await later.close()
        assert values(rest) == [9, 10]

    run(place, test)
