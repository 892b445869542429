"""Public methods with an async twin, written once.

A method is a generator of steps, from which two methods are made: one that blocks, and one that is
awaited, with the prefix `a`. Both have the generator's arguments and its result:

    def _dead(self, limit: int = 100) -> Steps[list[DeadEvent]]: ...
    dead, adead = transaction_twins(_dead)
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from seawall.durable.database.database import Database, Operation
from seawall.runtime.driver import Steps, adrive, drive


class HasDatabase(Protocol):
    """An object whose operations run in a database."""

    @property
    def database(self) -> Database:
        """The database."""


P = ParamSpec("P")
S = TypeVar("S", bound=HasDatabase)
T = TypeVar("T")


class OnConnection:
    """A request of `twins`: an operation on the user's own connection.

    With `so_that`, it is part of the open transaction, and a connection without one is refused.
    """

    def __init__(self, raw: Any, operation: Operation[Any], so_that: str | None = None) -> None:
        """Run `operation` on `raw`."""
        self._raw = raw
        self._operation = operation
        self._so_that = so_that

    def run(self, database: Database) -> Any:
        """Run it."""
        own, steps = database.connection(self._raw), self._operation()
        return own.run(steps) if self._so_that is None else own.join(steps, self._so_that)

    async def arun(self, database: Database) -> Any:
        """Async twin of `run`. A blocking connection belongs to this thread, and is used here."""
        own = database.connection(self._raw)
        if not own.kind.is_async:
            return self.run(database)
        steps = self._operation()
        return await (own.arun(steps) if self._so_that is None else own.ajoin(steps, self._so_that))


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
