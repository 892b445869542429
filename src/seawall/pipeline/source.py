"""Sources: where items come from, and where their ends are reported.

A source hands out items when it is asked, so it never gives more than the pipeline has room for.
The end of each item is reported to it exactly once: by `acknowledge` after a sink has it (or it is
a dead letter, or dropped), by `give_back` if the pipeline stopped before.

A source that shares its items with other processes may lose them: then it has a method
`holds(handle) -> bool`, and an item that it does not hold any more is given back before the next
function is called with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from seawall.models.fifo import Positions
from seawall.pipeline.checkpoint import CheckpointTarget, SavedPlace, wait_for_oldest
from seawall.resources.channel import Channel
from seawall.runtime.functions import kind_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Source(Protocol[T_co]):
    """What a pipeline reads from.

    `pull` that raises is called again, with growing pauses, unless the error is a mistake in the
    code or its settings (`TypeError`, `ValueError`, `LookupError`, `FileNotFoundError` and the
    like): that ends the run. A source with `repeatable = False` is never read again. With a method
    `snapshot()` that returns a dictionary, it shows facts of its own in `Pipeline.snapshot()`.
    One whose handles mean the same items for ever, also to other processes, has an attribute
    `keeps_ids = True`. Then an item that is read again is the same dead letter.
    """

    name: str
    """Unique in the pipeline; the ids of items begin with it."""

    async def pull(self, most: int) -> Sequence[tuple[T_co, Any]]:
        """Wait for items and return up to `most`, each with its handle; none when it is over.

        Cancelled, it has taken nothing. The text of a handle is the second half of the item's id:
        it stays the same when the item is handed out again, also after a restart.
        """

    async def acknowledge(self, handles: Sequence[Any]) -> None:
        """Take note that these items have ended, and never hand them out again.

        After an error it is called again with the same handles.
        """

    async def give_back(self, handles: Sequence[Any]) -> None:
        """Take these items back: they were not finished."""

    async def close(self) -> None:
        """Let go of what it holds; a second time it does nothing."""


class FaultyItem(NamedTuple):
    """Pulled in place of a value: an item that no stage can take, and why.

    The pipeline makes it a dead letter of its source, and acknowledges it then.
    """

    value: Any
    """What there is of it."""
    error: Exception
    attempts: int = 0
    """How often it was delivered."""


class TooManyDeliveries(Exception):
    """Why an item is faulty that was delivered again and again, and no process has finished."""

    def __init__(self, deliveries: int) -> None:
        super().__init__(f"delivered {deliveries} times, and no process has finished it")


class IterableSource(Generic[T]):
    """The items of an iterable, plain or async.

    A plain one is read in the event loop, so it must not block. Without a checkpoint it forgets
    what it has handed out; what is given back is kept in `returned`. An error of the iterable ends
    the run.
    """

    repeatable = False
    """An iterable that has raised is over."""

    def __init__(
        self,
        items: Iterable[T] | AsyncIterable[T] | Callable[[int], Iterable[T] | AsyncIterable[T]],
        *,
        name: str = "items",
        checkpoint: CheckpointTarget = None,
        every: float = 1.0,
    ) -> None:
        """Read `items` once, from their beginning.

        With `checkpoint`, the path of a file, a resumed run goes on behind the last item before
        which all have ended: the place is saved `every` few seconds. The iterable has to have the
        same items in each run; those before the place are skipped. A function `items(offset)`
        returns an iterable that begins there, and skips them without reading them.
        """
        self.name = checked_name(name)
        self.keeps_ids = checkpoint is not None
        self.returned: list[int] = []
        """The places of items that were given back, in the order of the iterable."""
        self._place = SavedPlace(checkpoint, every)
        self._positions: Positions | None = None
        """Which items have ended; None without a checkpoint, and before the first pull."""
        self._items = items
        self._to_skip = 0
        """Items of an async iterable that had ended before, and are still to be read over."""
        self._numbers: Iterator[int] = count()
        self._error: Exception | None = None
        """What the iterable has raised after the items that were pulled last."""
        self._sync: Iterator[T] | None = None
        self._async: AsyncIterator[T] | None = None
        if checkpoint is None:
            self._begin(items)
        elif not callable(items) or kind_of(items) == "async":
            _check_iterable(items)

    def _begin(self, items: Any) -> None:
        _check_iterable(items)
        self._error = None
        if isinstance(items, AsyncIterable):
            self._async = aiter(items)
        else:
            self._sync = iter(items)

    async def _resume(self) -> None:
        """Go to the place where the last run ended."""
        offset = await self._place.load(lambda place: type(place) is int and place >= 0) or 0
        items: Any = self._items
        if isinstance(items, Iterable | AsyncIterable):
            self._begin(items)
            if self._sync is not None:
                next(islice(self._sync, offset, offset), None)
            else:
                self._to_skip = offset
        else:
            self._begin(items(offset))
        self._numbers = count(offset)
        self._positions = Positions(offset)

    async def pull(self, most: int) -> Sequence[tuple[T, int]]:
        """Return the next items."""
        positions = self._positions
        if positions is None and self._place.checkpoint is not None:
            await self._resume()
            positions = self._positions
        if positions is not None:
            await wait_for_oldest(positions, self.name)
        if self._sync is not None:
            pulled = self._next_of(self._sync, most)
        else:
            pulled = []
            assert self._async is not None  # noqa: S101 - one of the two is there
            async for item in self._async:
                if self._to_skip:
                    self._to_skip -= 1
                    continue
                pulled = [(item, next(self._numbers))]
                break
        if positions is not None:
            for _, number in pulled:
                positions.begin(number + 1)
        return pulled

    def _next_of(self, items: Iterator[T], most: int) -> list[tuple[T, int]]:
        """Return the next items; those before an error are handed out before it is raised."""
        if self._error is not None:
            raise self._error
        pulled: list[tuple[T, int]] = []
        try:
            pulled.extend(zip(islice(items, most), self._numbers, strict=False))
        except Exception as error:
            if not pulled:
                raise
            self._error = error
        return pulled

    async def acknowledge(self, handles: Sequence[int]) -> None:
        """Move the checkpoint, if there is one, and save it now and then."""
        positions = self._positions
        if positions is not None:
            for number in handles:
                positions.finish(number + 1)
            await self._place.save_if_due(lambda: positions.checkpoint)

    async def give_back(self, handles: Sequence[int]) -> None:
        """Remember their places; a checkpoint stays before them."""
        self.returned = sorted([*self.returned, *handles])

    async def close(self) -> None:
        """Save the checkpoint, and close an async generator."""
        try:
            if self._positions is not None:
                await self._place.save(self._positions.checkpoint)
                if not isinstance(self._items, Iterator | AsyncIterator):
                    self._positions = None  # another run begins at the checkpoint
        finally:
            close = getattr(self._async, "aclose", None)
            if close is not None:
                await close()


def _check_iterable(items: Any) -> None:
    if not isinstance(items, AsyncIterable | Iterable) or isinstance(items, str | bytes):
        raise TypeError(f"{items!r} has no items: pass an iterable, or an async iterable")


def checked_name(value: Any, argument: str = "name", example: str = "orders") -> str:
    """Return `value` if it is a name, or raise."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{argument}={value!r}: write a name, such as {example!r}")
    return value


def name_for(function: Any, name: str | None) -> str:
    """Return `name`; without one, the name of the function."""
    return str(getattr(function, "__name__", type(function).__name__)) if name is None else name


async def wait_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set, for at most `seconds`; return whether it is."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def as_source(source: Any, name: str | None, usual: str = "items") -> Source[Any]:
    """Return `source` itself, or a source of the channel or iterable that it is."""
    if isinstance(source, Channel):
        from seawall.pipeline.queues import ChannelSource

        return ChannelSource(source, name=name)
    if isinstance(source, Source):
        return source
    return IterableSource(source, name=usual if name is None else name)
