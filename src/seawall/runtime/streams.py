"""Started streams: `primed` reads the first item before the caller responds with the stream.

Promises:
- An error before the first item is raised by `primed`, not by the first step of the iteration.
- The items are those of the source, in order; an empty source gives an empty stream.
- The source is closed exactly once: at its end, after an error, when it is cancelled, or when the
  stream is closed early, even if it was never iterated over.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Generator, Iterable
from inspect import isawaitable
from typing import Any, Final, TypeVar, overload

from seawall.runtime.generators import first_step

T = TypeVar("T")

_NO_MORE: Final = object()


@overload
def primed(source: AsyncIterable[T]) -> Coroutine[Any, Any, AsyncGenerator[T, None]]: ...
@overload
def primed(source: Iterable[T]) -> Generator[T, None, None]: ...
def primed(source: Any) -> Any:
    """Read the first item of `source`, and return a stream of that item and all others.

    For an async stream write `await primed(source)`. An error before the first item is raised here,
    so that a web service can still answer with the right status.
    """
    if hasattr(source, "__aiter__"):
        return aprime(source)
    if isawaitable(source) or not hasattr(source, "__iter__"):
        raise TypeError(
            f"primed({source!r}): pass a stream, such as primed(models.astream(prompt)); await a"
            " function that returns one first"
        )
    return prime(source)


def prime(source: Iterable[T]) -> Generator[T, None, None]:
    """Prime a plain iterable; see `primed`."""
    stream: Any = _stream(source)
    next(stream)
    return stream  # type: ignore[no-any-return]


async def aprime(source: AsyncIterable[T], *, owned: bool = False) -> AsyncGenerator[T, None]:
    """Prime an async iterable, see `primed`; `owned` if another async generator closes it."""
    stream: Any = _astream(source)
    await (first_step(stream) if owned else anext(stream))
    return stream  # type: ignore[no-any-return]


def _stream(source: Any) -> Generator[Any, None, None]:
    rest = source
    try:
        rest = iter(source)
        first = next(rest, _NO_MORE)
        yield None  # Taken by `prime`. Only a started generator runs its `finally`.
        if first is not _NO_MORE:
            yield first
            for item in rest:  # noqa: UP028 - `yield from` would close `rest` a second time
                yield item
    finally:
        try:
            if rest is not source:
                _close(rest)
        finally:
            _close(source)


async def _astream(source: Any) -> AsyncGenerator[Any, None]:
    rest = source
    try:
        rest = aiter(source)
        try:
            first = await first_step(rest)
        except StopAsyncIteration:
            first = _NO_MORE
        yield None  # Taken by `aprime`; see `_stream`.
        if first is not _NO_MORE:
            yield first
            async for item in rest:
                yield item
    finally:
        try:
            if rest is not source:
                await _aclose(rest)
        finally:
            await _aclose(source)


def _close(opened: Any) -> None:
    if hasattr(opened, "close"):
        opened.close()


async def _aclose(opened: Any) -> None:
    close = getattr(opened, "aclose", None) or getattr(opened, "close", None)
    closing = None if close is None else close()
    if isawaitable(closing):
        await closing
