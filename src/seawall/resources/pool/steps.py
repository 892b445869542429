"""Drivers of steps that are written once and run by blocking or by awaiting.

A generator yields what takes time: a `Waiter` to wait for, or `Work`, a user's function to run. It
is sent the result, or the error (also a cancellation) is thrown into it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from seawall.clock import Clock
from seawall.context import deadline
from seawall.errors import TimedOut
from seawall.models.contention import drop
from seawall.runtime.driver import adrive, drive, wait_async, wait_sync
from seawall.runtime.layers import Waiter

NOTHING: Final = object()


@dataclass(slots=True, eq=False)
class Work:
    """A user's function to be called, and awaited if it is async, within a time limit."""

    pool: str
    what: str  # what messages of the pool call it
    seconds: float | None
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    instead: str = "`async with`"  # what to write if the function is async and must not be
    awaited: bool = False
    expired: bool = False  # whether it was stopped at its time limit
    left: Any = NOTHING  # a result that arrived as its task was cancelled, and that has no owner

    def here(self, clock: Clock) -> Any:
        """Run it in this thread."""
        result = self._call(clock)
        if hasattr(result, "__await__"):
            drop(result)
            raise TypeError(f"pool {self.pool!r}: {self.what} is async: write {self.instead}")
        return result

    def _call(self, clock: Clock) -> Any:
        """Call it; a plain function cannot be stopped, but gets its time limit as deadline."""
        if self.seconds is None:
            return self.function(*self.args)
        with deadline(self.seconds, clock=clock):
            return self.function(*self.args)

    async def in_task(self, clock: Clock) -> Any:
        """Run it in this task, and cancel it at its time limit."""
        from seawall._expiry import Expiry, running_task

        result = self._call(clock)
        if not hasattr(result, "__await__"):
            return result
        self.awaited = True
        expiry = None if self.seconds is None else Expiry(running_task(), self.seconds)
        try:
            value = await result
        except BaseException as error:
            self.left = _result_of(result)
            self.expired = expiry is not None and expiry.disarm(error)
            if not self.expired:
                raise
            message = f"pool {self.pool!r}: {self.what} took more than {self.seconds:g} s"
            raise TimedOut(message, guard=self.pool, seconds=self.seconds) from error
        if expiry is not None:
            expiry.disarm(None)
        return value


Request = Work | Waiter
R = TypeVar("R")


def drive_sync(steps: Generator[Request, Any, R], clock: Clock) -> R:
    """Run `steps` in this thread, and return their result."""

    def carry_out(request: Request) -> Any:
        return request.here(clock) if isinstance(request, Work) else wait_sync(request, clock)

    return drive(steps, carry_out)


async def drive_async(steps: Generator[Request, Any, R], clock: Clock) -> R:
    """Run `steps` in this task, and return their result."""

    def carry_out(request: Request) -> Any:
        return request.in_task(clock) if isinstance(request, Work) else wait_async(request, clock)

    return await adrive(steps, carry_out)


def _result_of(awaitable: Any) -> Any:
    """Return the result of a future; NOTHING if it has none, or for a coroutine."""
    from asyncio import isfuture

    if isfuture(awaitable) and awaitable.done() and not awaitable.cancelled():
        return awaitable.result() if awaitable.exception() is None else NOTHING
    return NOTHING
