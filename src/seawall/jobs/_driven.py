"""Drivers for a queue's operations, blocking and awaiting.

Each operation is a generator. It yields a question to the rules (`Ask`) or a waiter, and is sent
the answer; or it yields a command without an answer (`Tell`). The queue decides what answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from seawall.clock import Clock
from seawall.runtime.layers import Kind, Waiter
from seawall.runtime.runners import wait_async, wait_sync

T = TypeVar("T")


class Ask(NamedTuple):
    """A question: one operation of the queue's rules, with its arguments."""

    operation: str
    args: tuple[Any, ...]


class Tell(NamedTuple):
    """An operation whose answer is not awaited."""

    ask: Ask


Steps: TypeAlias = Generator[Ask | Tell | Waiter, Any, T]


class Driven:
    """Base of a queue: the hooks that answer operations, and the two drivers."""

    clock: Clock

    # Hooks that answer, in memory or in a store

    def _answering(self, kind: Kind, ask: Ask) -> Waiter | Callable[[], Any]:
        """Return a waiter for the answer, or a function that returns it at once."""
        raise NotImplementedError

    def _telling(self, kind: Kind, ask: Ask) -> None:
        """Send `ask` without waiting for its answer. It may get lost."""
        raise NotImplementedError

    def _undo(self, ask: Ask, lease: int) -> None:
        """Undo a claim by `ask`. Callable from anywhere; never blocks or raises."""
        raise NotImplementedError

    def _listen(self, topic: str) -> None:
        """Subscribe to changes elsewhere that concern `topic`."""

    @property
    def _up(self) -> bool:
        """Whether asking makes sense now."""
        return True

    @property
    def _closed(self) -> bool:
        """Whether there will never be an answer again."""
        return False

    # The two drivers

    def _sync(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    waiter = self._begin("sync", request)
                    result = waiter() if callable(waiter) else wait_sync(waiter, self.clock)
                except BaseException as error:  # noqa: BLE001 - the steps handle it
                    request = steps.throw(error)
                else:
                    request = steps.send(result)
        except StopIteration as end:
            return cast("T", end.value)

    async def _async(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    waiter = self._begin("async", request)
                    result = waiter() if callable(waiter) else await wait_async(waiter, self.clock)
                except BaseException as error:  # noqa: BLE001 - the steps handle it
                    request = steps.throw(error)
                else:
                    request = steps.send(result)
        except StopIteration as end:
            return cast("T", end.value)

    def _begin(self, kind: Kind, request: Ask | Tell | Waiter) -> Waiter | Callable[[], Any]:
        """Return a waiter for the answer, or a function that returns it at once."""
        if isinstance(request, Ask):
            return self._answering(kind, request)
        if isinstance(request, Tell):
            return partial(self._telling, kind, request.ask)
        return request
