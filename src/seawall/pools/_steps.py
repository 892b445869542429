"""Steps that are written once, and carried out by blocking or by awaiting.

A generator yields what takes time: a `Waiter` to wait for, or `Work` of the user's to be done. It
is sent the result, or thrown the error; so is a cancellation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from seawall.clock import Clock
from seawall.context import deadline
from seawall.errors import TimedOut
from seawall.runtime.layers import Waiter
from seawall.runtime.runners import wait_async, wait_sync


class Work:
    """Something of the user's to be called, and awaited if it is async, in so many seconds."""

    __slots__ = ("args", "awaited", "expired", "function", "pool", "seconds", "what")

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

    def here(self, clock: Clock) -> Any:
        """Do it in this thread. Its time is a deadline in its context: nobody can stop it."""
        if self.seconds is None:
            result = self.function(*self.args)
        else:
            with deadline(self.seconds, clock=clock):
                result = self.function(*self.args)
        if hasattr(result, "__await__"):
            drop(result)
            raise TypeError(f"pool {self.pool!r}: {self.what} is async: write `async with`")
        return result

    async def in_task(self) -> Any:
        """Do it in this task, and cancel it when its time is over."""
        from seawall._expiry import Expiry, running_task

        result = self.function(*self.args)
        if not hasattr(result, "__await__"):
            return result
        self.awaited = True
        if self.seconds is None:
            return await result
        expiry = Expiry(running_task(), self.seconds)
        try:
            value = await result
        except BaseException as error:
            self.expired = expiry.disarm(error)
            if not self.expired:
                raise
            message = f"pool {self.pool!r}: {self.what} took more than {self.seconds:g} s"
            raise TimedOut(message, guard=self.pool, seconds=self.seconds) from error
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
                    result = await request.in_task()
                else:
                    result = await wait_async(request, clock)
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration as end:
        value: R = end.value
        return value


def drop(result: Any) -> None:
    """Throw away a coroutine that nobody can run, so that it does not complain."""
    if hasattr(result, "close"):
        result.close()
