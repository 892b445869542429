"""Twins (see `seawall.runtime.twins`) of methods whose steps run in a database.

def _dead(self, limit: int = 100) -> Steps[list[DeadEvent]]: ...
dead, adead = transaction_twins(_dead)
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from seawall.clock import Clock
from seawall.durable.database.database import Database, Operation
from seawall.runtime.driver import Steps, adrive, drive, wait_async, wait_sync
from seawall.runtime.layers import Waiter
from seawall.runtime.twins import Twins, make_twins


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
    """A request of `twins`: wait until `waiter` is woken or late; a float is a pause."""

    waiter: Waiter | float
    clock: Clock

    def run(self, _database: Database) -> Any:
        """Wait."""
        return wait_sync(self.waiter, self.clock)

    async def arun(self, _database: Database) -> Any:
        """Async twin of `run`."""
        return await wait_async(self.waiter, self.clock)


def twins(method: Callable[Concatenate[S, P], Steps[T]]) -> Twins[S, P, T]:
    """Return the twins of a method that yields operations.

    Each operation is a transaction of its own. So what the method does after a `yield` is done
    once, after the commit. The method may also yield a request with `run(database)` and `arun`.
    """

    def run(self: S, begin: Callable[[], Steps[T]]) -> T:
        database = self.database

        def answer(request: Any) -> Any:
            return request.run(database) if hasattr(request, "arun") else database.run(request)

        return drive(begin(), answer)

    async def arun(self: S, begin: Callable[[], Steps[T]]) -> T:
        database = self.database

        def answer(request: Any) -> Coroutine[Any, Any, Any]:
            return request.arun(database) if hasattr(request, "arun") else database.arun(request)

        return await adrive(begin(), answer)

    return make_twins(method, run, arun)


def transaction_twins(method: Callable[Concatenate[S, P], Steps[T]]) -> Twins[S, P, T]:
    """Return the twins of a method that yields queries, all of them in one transaction.

    The method may run more than once, if the transaction lost a conflict.
    """

    def run(self: S, begin: Callable[[], Steps[T]]) -> T:
        return self.database.run(begin)

    async def arun(self: S, begin: Callable[[], Steps[T]]) -> T:
        return await self.database.arun(begin)

    return make_twins(method, run, arun)
