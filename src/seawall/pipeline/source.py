"""Sources: where items come from, and where their ends are reported.

A source hands out items when it is asked, so it never gives more than the pipeline has room for. It
is told of each item exactly once how it ended: `acknowledge` after the sink has it (or it is a dead
letter, or dropped), `give_back` if the pipeline stopped before.

A source that shares its items with other processes may lose them: then it has a method
`holds(handle) -> bool`, and an item that it does not hold any more is given back before the next
function is called with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Source(Protocol[T_co]):
    """What a pipeline reads from.

    `pull` that raises is called again, with growing pauses, unless the error is a mistake in the
    code or its settings (`TypeError`, `ValueError`, `LookupError`, `FileNotFoundError` and the
    like): that ends the run. A source with `repeatable = False` is never read again. With a method
    `snapshot()` that returns a dictionary, it shows facts of its own in `Pipeline.snapshot()`.
    """

    name: str
    """Unique in the pipeline; the ids of items begin with it."""

    async def pull(self, most: int) -> Sequence[tuple[T_co, Any]]:
        """Wait for items and return up to `most`, each with its handle; none when it is over."""

    async def acknowledge(self, handles: Sequence[Any]) -> None:
        """Take note that these items have ended, and never hand them out again.

        After an error it is called again with the same handles.
        """

    async def give_back(self, handles: Sequence[Any]) -> None:
        """Take these items back: they were not finished."""

    async def close(self) -> None:
        """Let go of what it holds."""


class Faulty(NamedTuple):
    """Pulled in place of a value: an item that no stage can take, and why.

    The pipeline makes it a dead letter of its source, and acknowledges it then.
    """

    value: Any
    """What there is of it."""
    error: Exception
    attempts: int = 0
    """How often it was delivered."""


class IterableSource(Generic[T]):
    """The items of an iterable, plain or async; it forgets what it has handed out.

    A plain one is read in the event loop, so it must not block. What is given back is kept in
    `returned`. An error of the iterable ends the run.
    """

    repeatable = False
    """An iterable that has raised is over."""

    def __init__(self, items: Iterable[T] | AsyncIterable[T], *, name: str = "items") -> None:
        """Read `items` once, from their beginning."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write a name, such as 'orders'")
        self.name = name
        self.returned: list[int] = []
        """The places of items that were given back, in the order of the iterable."""
        self._numbers = count()
        self._sync: Iterator[T] | None = None
        self._async: AsyncIterator[T] | None = None
        if isinstance(items, AsyncIterable):
            self._async = aiter(items)
        elif isinstance(items, Iterable) and not isinstance(items, str | bytes):
            self._sync = iter(items)
        else:
            raise TypeError(f"{items!r} has no items: pass an iterable, or an async iterable")

    async def pull(self, most: int) -> Sequence[tuple[T, int]]:
        """Return the next items."""
        if self._sync is not None:
            return list(zip(islice(self._sync, most), self._numbers, strict=False))
        assert self._async is not None  # noqa: S101 - one of the two is there
        async for item in self._async:
            return [(item, next(self._numbers))]
        return ()

    async def acknowledge(self, handles: Sequence[int]) -> None:
        """Do nothing: an iterable keeps no account."""

    async def give_back(self, handles: Sequence[int]) -> None:
        """Remember their places."""
        self.returned = sorted([*self.returned, *handles])

    async def close(self) -> None:
        """Close an async generator."""
        close = getattr(self._async, "aclose", None)
        if close is not None:
            await close()


def as_source(source: Any, name: str) -> Source[Any]:
    """Return `source` itself, or a source of the iterable that it is."""
    return source if isinstance(source, Source) else IterableSource(source, name=name)
