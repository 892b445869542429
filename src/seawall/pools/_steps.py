"""Steps that are written once, and carried out by blocking or by awaiting.

A generator yields what takes time: a `Waiter` to wait for, or `Work` of the user's to be done. It
is sent the result, or thrown the error; so is a cancellation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

from seawall.clock import Clock
from seawall.context import deadline
from seawall.errors import TimedOut
from seawall.runtime.layers import Waiter
from seawall.runtime.runners import wait_async, wait_sync

NOTHING: Final = object()


class Work:
    """Something of the user's to be called, and awaited if it is async, in so many seconds."""

    __slots__ = (
        "args",
        "awaited",
        "expired",
        "function",
        "instead",
        "left",
        "pool",
        "seconds",
        "what",
    )

    def __init__(
        self,
        pool: str,
        what: str,
        seconds: float | None,
        function: Callable[..., Any],
        *args: Any,
    ) -> None:
        """Do `function(*args)`, which is the `what` of the pool of that name."""
        self.pool = pool
        self.what = what
        self.seconds = seconds
        self.function = function
        self.args = args
        self.awaited = False
        self.expired = False
        """Whether it was stopped because its time was over."""
        self.instead = "`async with`"
        """What to write where it turns out to be async, and nobody can await it."""
        self.left: Any = NOTHING
        """A result that came at the last moment: its task was cancelled, and it is nobody's."""

    def here(self, clock: Clock) -> Any:
        """Do it in this thread."""
        result = self._call(clock)
        if hasattr(result, "__await__"):
            drop(result)
            raise TypeError(f"pool {self.pool!r}: {self.what} is async: write {self.instead}")
        return result

    def _call(self, clock: Clock) -> Any:
        """Call it; if it is plain, nobody can stop it, but its time is the deadline there."""
        if self.seconds is None:
            return self.function(*self.args)
        with deadline(self.seconds, clock=clock):
            return self.function(*self.args)

    async def in_task(self, clock: Clock) -> Any:
        """Do it in this task, and cancel it when its time is over."""
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
    """Carry out in this thread what `steps` ask for, and return their result."""
    try:
        request = next(steps)
        while True:
            try:
                if isinstance(request, Work):
                    result = request.here(clock)
                else:
                    result = wait_sync(request, clock)
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration as end:
        value: R = end.value
        return value


async def drive_async(steps: Generator[Request, Any, R], clock: Clock) -> R:
    """Carry out in this task what `steps` ask for, and return their result."""
    try:
        request = next(steps)
        while True:
            try:
                if isinstance(request, Work):
                    result = await request.in_task(clock)
                else:
                    result = await wait_async(request, clock)
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration as end:
        value: R = end.value
        return value


def _result_of(awaitable: Any) -> Any:
    """Return what a future has in it; NOTHING if it has none, or is a coroutine."""
    from asyncio import isfuture

    if isfuture(awaitable) and awaitable.done() and not awaitable.cancelled():
        return awaitable.result() if awaitable.exception() is None else NOTHING
    return NOTHING


def drop(result: Any) -> None:
    """Throw away a coroutine that nobody can run, so that it does not complain."""
    if hasattr(result, "close"):
        result.close()
