"""A borrowed resource of a pool, as the context manager of one block."""

from __future__ import annotations

from types import CodeType
from typing import Any, Final, Generic, TypeVar

from seawall.clock import Clock
from seawall.context import deadline_scope, deadline_var, end_scope, nearer_scope
from seawall.resources.pool.lending import DISCARDED, LATE, Lending
from seawall.resources.pool.steps import drive_async, drive_sync
from seawall.resources.pool.stock import Resource
from seawall.runtime.driver import current_task

T = TypeVar("T")

_USED: Final = "this borrow() was used already: write pool.borrow() for each block"


class _Limit:
    """Deadline of a sync block.

    A generator that is suspended inside its block leaves the deadline in its consumer's context,
    and may end after other blocks have started, so `end` removes only its own scope.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.late_at = clock.now() + seconds
        self._scope = nearer_scope(self.late_at, clock, deadline_scope())
        deadline_var.set(self._scope)

    def end(self) -> None:
        """Cancel the deadline, in whatever context this is called."""
        end_scope(self._scope)
        if deadline_var.get() is self._scope:
            deadline_var.set(deadline_scope())


class Borrowed(Generic[T]):
    """A resource lent for one block: `with pool.borrow() as resource:`, or `async with`."""

    __slots__ = (
        "_cancelling",
        "_lending",
        "_limit",
        "_spoiled",
        "_task",
        "has_slot",
        "place",
        "resource",
    )

    def __init__(self, lending: Lending, place: tuple[CodeType, int]) -> None:
        self._lending = lending
        self.place = place
        self.resource: Resource | None = None
        self.has_slot = False
        self._limit: Any = None
        self._spoiled: bool | None = None  # whether to close the resource; None before use

    def __repr__(self) -> str:
        state = "free" if self.resource is None else "borrowed"
        return f"<Borrowed of pool {self._lending.name!r}: {state}>"

    def discard(self) -> None:
        """Close the resource at the end of the block, whatever happens."""
        if self.resource is None:
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
        seconds = lending.settings.read_timeout
        if seconds is not None:
            self._limit = _Limit(seconds, lending.clock)
        value: T = resource.value
        return value

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        resource = self.resource
        if resource is None:
            return
        if self._spoiled and error is None:
            error = DISCARDED
        if self._limit is not None:
            self._limit.end()
            if self._lending.clock.now() >= self._limit.late_at:
                self._lending.overdue()
                error = LATE
        self._lending.take_back(resource, error, self)

    async def __aenter__(self) -> T:
        if self._spoiled is not None:
            raise RuntimeError(_USED)
        self._spoiled = False
        task = current_task()
        if task is None:
            raise RuntimeError("borrow inside a task, such as asyncio.run() makes")
        self._task = task
        self._cancelling = task.cancelling()
        loop = task.get_loop()
        lending = self._lending
        resource = lending.lend_idle(self, loop)
        if resource is None:
            resource = await drive_async(lending.checkout(self, loop), lending.clock)
        seconds = lending.settings.read_timeout
        if seconds is not None:
            from seawall._expiry import Expiry

            self._limit = Expiry(task, seconds)
        value: T = resource.value
        return value

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Nothing is awaited here: no cancellation can intervene, and a coroutine that the garbage
        # collector closes also returns its resource.
        resource = self.resource
        if resource is None:
            return
        # A block that swallowed its cancellation may have left the resource in a bad state.
        spoiled = self._spoiled or self._task.cancelling() > self._cancelling
        late = self._limit is not None and self._limit.disarm(error)
        error_of_block = DISCARDED if spoiled and error is None else error
        self._lending.take_back(resource, error_of_block, self)
        if late:
            raise self._lending.overdue() from error

    def __del__(self) -> None:
        # A signal may have interrupted `__init__` before any attribute was set.
        if getattr(self, "resource", None) is not None or getattr(self, "has_slot", False):
            if isinstance(self._limit, _Limit):
                self._limit.end()
            self._lending.lose(self)
