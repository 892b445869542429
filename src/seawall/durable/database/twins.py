"""Public methods with an async twin, written once.

A method is a generator of steps, from which two methods are made: one that blocks, and one that is
awaited, with the prefix `a`. Both have the generator's arguments and its result:

    def _dead(self, limit: int = 100) -> Steps[list[DeadEvent]]: ...
    dead, adead = transaction_twins(_dead)
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from seawall.clock import Clock
from seawall.durable.database.database import Database, Operation
from seawall.runtime.driver import Steps, adrive, drive, wait_async, wait_sync
from seawall.runtime.layers import Waiter


class HasDatabase(Protocol):
    """An object whose operations run in a database."""

    @property
    def database(self) -> Database:
        """The database."""


P = ParamSpec("P")
S = TypeVar("S", bound=HasDatabase)
T = TypeVar("T")


class OnConnection(NamedTuple):
    """A request of `twins`: an operation on the user's own connection.

    With `so_that`, it is part of the open transaction, and a connection without one is refused.
    """

    raw: Any
    operation: Operation[Any]
    so_that: str | None = None

    def run(self, database: Database) -> Any:
        """Run it."""
        own, steps = database.connection(self.raw), self.operation()
        return own.run(steps) if self.so_that is None else own.join(steps, self.so_that)

    async def arun(self, database: Database) -> Any:
        """Async twin of `run`. A blocking connection belongs to this thread, and is used here."""
        own = database.connection(self.raw)
        if not own.kind.is_async:
            return self.run(database)
        steps = self.operation()
        return await (own.arun(steps) if self.so_that is None else own.ajoin(steps, self.so_that))


class WaitRequest(NamedTuple):
    """A request of `twins`: wait until `waiter` is woken, or its time is over."""

    waiter: Waiter
    clock: Clock

    def run(self, _database: Database) -> Any:
        """Wait."""
        return wait_sync(self.waiter, self.clock)

    async def arun(self, _database: Database) -> Any:
        """Async twin of `run`."""
        return await wait_async(self.waiter, self.clock)


Twins = tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]
"""A method that blocks, and its async twin."""


def twins(method: Callable[Concatenate[S, P], Steps[T]]) -> Twins[S, P, T]:
    """Return the twins of a method that yields operations.

    Each operation is a transaction of its own. So what the method does after a `yield` is done
    once, after the commit. The method may also yield a request with `run(database)` and `arun`.
    """

    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        database = self.database

        def answer(asked: Any) -> Any:
            return asked.run(database) if hasattr(asked, "arun") else database.run(asked)

        return drive(method(self, *args, **kwargs), answer)

    async def arun(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        database = self.database

        def answer(asked: Any) -> Coroutine[Any, Any, Any]:
            return asked.arun(database) if hasattr(asked, "arun") else database.arun(asked)

        return await adrive(method(self, *args, **kwargs), answer)

    return _described(method, run), _described(method, arun, "a")


def transaction_twins(method: Callable[Concatenate[S, P], Steps[T]]) -> Twins[S, P, T]:
    """Return the twins of a method that yields queries, all of them in one transaction.

    The method may run more than once, if the transaction lost a conflict.
    """

    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.run(lambda: method(self, *args, **kwargs))

    async def arun(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.database.arun(lambda: method(self, *args, **kwargs))

    return _described(method, run), _described(method, arun, "a")


def _described(method: Callable[..., Any], twin: Any, prefix: str = "") -> Any:
    """Give a twin the name, the signature and the docstring of `_name`."""
    name = method.__name__.removeprefix("_")
    shape = signature(method)
    result = shape.return_annotation.removeprefix("Steps[").removesuffix("]")
    twin.__name__ = f"{prefix}{name}"
    twin.__qualname__ = method.__qualname__.replace(method.__name__, twin.__name__)
    twin.__module__ = method.__module__
    twin.__doc__ = f"Async twin of `{name}`." if prefix else method.__doc__
    twin.__signature__ = shape.replace(return_annotation=result)
    return twin
