"""A resource of a pool for the time of one block."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from seawall.context import deadline
from seawall.pools._lending import DISCARDED, Lending
from seawall.pools._resources import Resource
from seawall.pools._steps import drive_async, drive_sync

if TYPE_CHECKING:
    from asyncio import Task

T = TypeVar("T")

_USED: Final = "this borrow() was used already: write pool.borrow() for each block"


class Lease(Generic[T]):
    """A resource for the time of one block: `with pool.borrow() as resource:`, or `async with`."""

    __slots__ = (
        "_cancelling",
        "_lending",
        "_limit",
        "_resource",
        "_spoiled",
        "_task",
        "place",
    )

    def __init__(self, lending: Lending, place: tuple[CodeType, int]) -> None:
        """Remember where in the program it is."""
        self._lending = lending
        self.place = place
        self._resource: Resource | None = None
        self._spoiled: bool | None = None
        """None before use."""

    def __repr__(self) -> str:
        state = "free" if self._resource is None else "borrowed"
        return f"<Lease of pool {self._lending.name!r}: {state}>"

    def discard(self) -> None:
        """Have the resource closed at the end of the block, whatever happens."""
        if self._resource is None:
            raise RuntimeError("discard() is for inside the block: nothing is borrowed here")
        self._spoiled = True

    def __enter__(self) -> T:
        if self._spoiled is not None:
            raise RuntimeError(_USED)
        self._spoiled = False
        lending = self._lending
        resource = lending.lend_idle(self, None)
        if resource is None:
            resource = drive_sync(lending.checkout(self, None), lending.clock)
        self._resource = resource
        seconds = lending.settings.read_timeout
        if seconds is None:
            self._limit: Any = None
        else:
            self._limit = deadline(seconds, clock=lending.clock)
            self._limit.__enter__()
        value: T = resource.value
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        resource, self._resource = self._resource, None
        if resource is None:
            return
        if self._limit is not None:
            self._limit.__exit__(kind, error, traceback)
        if self._spoiled and error is None:
            error = DISCARDED
        self._lending.take_back(resource, error)

    async def __aenter__(self) -> T:
        if self._spoiled is not None:
            raise RuntimeError(_USED)
        self._spoiled = False
        task = _find_task()
        if task is None:
            raise RuntimeError("borrow inside a task, such as asyncio.run() makes")
        self._task = task
        self._cancelling = task.cancelling()
        loop = task.get_loop()
        lending = self._lending
        resource = lending.lend_idle(self, loop)
        if resource is None:
            resource = await drive_async(lending.checkout(self, loop), lending.clock)
        self._resource = resource
        seconds = lending.settings.read_timeout
        if seconds is None:
            self._limit = None
        else:
            from seawall._expiry import Expiry

            self._limit = Expiry(task, seconds)
        value: T = resource.value
        return value

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Nothing is awaited here: no cancellation can come in between, and a coroutine that the
        # garbage collector closes gives back what it has, too.
        resource, self._resource = self._resource, None
        if resource is None:
            return
        # A block that swallowed its cancellation leaves the resource no better.
        spoiled = self._spoiled or self._task.cancelling() > self._cancelling
        late = self._limit is not None and self._limit.disarm(error)
        self._lending.take_back(resource, DISCARDED if spoiled and error is None else error)
        if late:
            raise self._lending.overdue() from error

    def __del__(self) -> None:
        if self._resource is not None:
            self._lending.lose(self._resource)


def _first_find() -> Task[Any] | None:
    global _find_task  # noqa: PLW0603 - asyncio is imported when it is first needed
    from seawall._expiry import current_task

    _find_task = current_task
    return current_task()


_find_task: Callable[[], Task[Any] | None] = _first_find
"""The current task."""
