"""A primed stream has its first item: an error before it is raised; its source is closed once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Bulkhead, BulkheadFull, CircuitOpen, Guard
from seawall.runtime import streams as module
from seawall.testing import run_virtual
from seawall.web import primed
from tests.support import falsified, let_pass, new_guard


class Source:
    """A stream as SDKs have them: iterators of its own, and a close of its own."""

    def __init__(self, items: int, *, fails: bool = False, slow: bool = False) -> None:
        """Give so many items, then fail or end."""
        self.closed = 0
        self.given = 0
        self._items = items
        self._fails = fails
        self._slow = slow

    def __next__(self) -> int:
        if self.given == self._items:
            if self._fails:
                raise ConnectionError("broken off")
            raise StopIteration
        self.given += 1
        return self.given

    def __iter__(self) -> Iterator[int]:
        return self

    def close(self) -> None:
        self.closed += 1


class AsyncSource(Source):
    """The same, async."""

    async def __anext__(self) -> int:
        if self._slow:
            await let_pass(1.0)
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def aclose(self) -> None:
        await let_pass(1.0)
        self.closed += 1


class Apart:
    """A stream whose iterator is another object: an async generator, as with `openai`."""

    def __init__(self) -> None:
        """Begin with nothing closed."""
        self.closed: list[str] = []

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            self.closed.append("iterator")

    def close(self) -> None:
        self.closed.append("source")


class ApartSync:
    """The same for plain iteration."""

    def __init__(self) -> None:
        """Begin with nothing closed."""
        self.closed: list[str] = []

    def __iter__(self) -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            self.closed.append("iterator")

    def close(self) -> None:
        self.closed.append("source")


CASES = st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 4))
"""How many items there are, whether an error follows them, and how many of them are read."""


def read_sync(case: tuple[int, bool, int]) -> tuple[Source, list[int], str]:
    """Prime a source, read some items and close it; return what was seen, and where it failed."""
    items, fails, wanted = case
    source, seen = Source(items, fails=fails), []
    try:
        stream = primed(source)
    except ConnectionError:
        return source, [], "primed"
    try:
        for item in stream:
            if len(seen) == wanted:
                break
            seen.append(item)
    except ConnectionError:
        return source, seen, "read"
    finally:
        stream.close()
        stream.close()
    return source, seen, ""


async def read_async(case: tuple[int, bool, int]) -> tuple[Source, list[int], str]:
    """Do the same with an async source."""
    items, fails, wanted = case
    source, seen = AsyncSource(items, fails=fails), []
    try:
        stream = await primed(source)
    except ConnectionError:
        return source, [], "primed"
    try:
        async for item in stream:
            if len(seen) == wanted:
                break
            seen.append(item)
    except ConnectionError:
        return source, seen, "read"
    finally:
        await stream.aclose()
        await stream.aclose()
    return source, seen, ""


def begun_and_closed_once(case: tuple[int, bool, int]) -> None:
    """Check what comes of a stream, whatever it gives and whenever it is left."""
    items, fails, wanted = case
    for source, seen, failed in (read_sync(case), run_virtual(read_async(case))):
        assert seen == list(range(1, min(items, wanted) + 1))
        if fails and items == 0:
            assert failed == "primed"
        else:
            assert failed == ("read" if fails and items <= wanted else "")
        assert source.closed == 1


@given(CASES)
def test_an_error_before_the_first_item_is_raised_and_every_source_is_closed_once(
    case: tuple[int, bool, int],
) -> None:
    """All items come in order; empty, broken and unread streams are closed, each exactly once."""
    begun_and_closed_once(case)


def test_without_the_close_at_the_end_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails if the source is left to the collector."""
    monkeypatch.setattr(module, "_close", lambda _opened: None)
    assert falsified(begun_and_closed_once, CASES)


def test_a_stream_that_nobody_reads_is_closed() -> None:
    """A client may be gone before the response starts: closing the unread stream closes all."""

    async def main() -> None:
        source = AsyncSource(3)
        await (await primed(source)).aclose()
        assert (source.given, source.closed) == (1, 1)

    run_virtual(main())
    source = Source(3)
    primed(source).close()
    assert (source.given, source.closed) == (1, 1)


@pytest.mark.parametrize("after", [0.5, 1.5])
def test_cancellation_closes_the_source_once(after: float) -> None:
    """Cancelled while it waits for the first item, or for another one, the source is closed."""

    async def main() -> None:
        source = AsyncSource(3, slow=True)

        async def read() -> list[int]:
            return [item async for item in await primed(source)]

        task = asyncio.create_task(read())
        await let_pass(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (source.given, source.closed) == (int(after), 1)

    run_virtual(main())


@pytest.mark.parametrize("items", [0, 1, 2])
def test_an_iterator_of_its_own_is_closed_before_its_source(items: int) -> None:
    """Where a stream makes an iterator, that one is closed first, and both once."""

    async def main() -> list[str]:
        source = Apart()
        stream = await primed(source)
        for _ in range(items):
            await anext(stream)
        await stream.aclose()
        return source.closed

    assert run_virtual(main()) == ["iterator", "source"]
    source = ApartSync()
    stream = primed(source)
    for _ in range(items):
        next(stream)
    stream.close()
    assert source.closed == ["iterator", "source"]


def test_the_source_is_closed_also_if_its_iterator_cannot_be() -> None:
    """An iterator that fails when it is closed does not keep its source open."""

    class Fails(Apart):
        async def __aiter__(self) -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                raise OSError("not closed")

    async def main() -> None:
        source = Fails()
        stream = await primed(source)
        with pytest.raises(OSError, match="not closed"):
            await stream.aclose()
        assert source.closed == ["source"]

    run_virtual(main())


def guarded_words(guard: Guard) -> Any:
    """Return an async generator under `guard`, and what it has closed."""
    closed: list[int] = []

    @guard
    async def words(count: int) -> AsyncIterator[int]:
        try:
            for item in range(count):
                yield item
        finally:
            closed.append(count)

    return words, closed


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_guarded_generator_holds_its_place_until_the_primed_stream_ends(count: int) -> None:
    """The gates of a guard are held by the primed stream, also from another task, and left once."""

    async def main() -> None:
        slots = Bulkhead(1)
        guard = new_guard(slots)
        words, closed = guarded_words(guard)
        stream = await primed(words(count))
        assert slots.in_flight == min(1, count)  # an empty stream has ended already

        async def read() -> list[int]:
            return [item async for item in stream]

        assert await asyncio.create_task(read()) == list(range(count))
        assert (slots.in_flight, closed) == (0, [count])
        early = await primed(words(count))
        await early.aclose()
        assert (slots.in_flight, closed) == (0, [count, count])

    run_virtual(main())


def test_a_refusal_is_raised_before_the_stream() -> None:
    """What a guard refuses is refused by `primed`, not by the first step of the iteration."""

    async def main() -> None:
        guard = new_guard(Bulkhead(1))
        words, _ = guarded_words(guard)
        with guard.hold(), pytest.raises(BulkheadFull):
            await primed(words(3))

    run_virtual(main())


def test_a_dropped_stream_gives_its_place_back() -> None:
    """A primed stream that is dropped, as servers drop those of clients that left, is closed."""

    async def main() -> None:
        slots = Bulkhead(1)
        words, closed = guarded_words(new_guard(slots))
        stream = await primed(words(3))
        assert await anext(stream) == 0
        del stream
        gc.collect()
        await let_pass(1.0)
        assert (slots.in_flight, closed) == (0, [3])

    run_virtual(main())


def test_plain_iterables_are_streams_too() -> None:
    """Whatever can be iterated over can be primed; what cannot says what to write."""
    assert list(primed([1, 2])) == [1, 2]
    assert list(primed(())) == []

    async def stream() -> Any:
        raise CircuitOpen("never asked")

    asking = stream()
    with pytest.raises(TypeError, match="await a function that returns one first"):
        primed(asking)
    asking.close()
    with pytest.raises(TypeError, match="pass a stream"):
        primed(3)  # type: ignore[call-overload]


def test_thrown_errors_reach_the_reader_and_close_the_source() -> None:
    """An error that is thrown into a primed stream ends it as any generator."""
    source = Source(3)
    stream = primed(source)
    next(stream)
    with suppress(KeyError):
        stream.throw(KeyError())
    assert source.closed == 1
    assert list(stream) == []
