"""What carries out a queue's operations, blocking or awaiting.

Each operation is a generator: it yields what it asks of the rules (`Ask`), or a waiter, and is sent
the answer; or it yields what the rules are told (`Tell`), and waits for no answer. What answers is
up to the queue.
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
    """One operation of the queue's rules, and its arguments."""

    operation: str
    args: tuple[Any, ...]


class Tell(NamedTuple):
    """The same, but nobody waits for the answer."""

    ask: Ask


Steps: TypeAlias = Generator[Ask | Tell | Waiter, Any, T]


class Driven:
    """What answers, and what waits for it."""

    clock: Clock

    # What answers: in memory, or in a store

    def _answering(self, kind: Kind, ask: Ask) -> Waiter | Callable[[], Any]:
        """Return what waits for the answer, or what gives it at once."""
        raise NotImplementedError

    def _telling(self, kind: Kind, ask: Ask) -> None:
        """Tell it without waiting for an answer, which may get lost."""
        raise NotImplementedError

    def _undo(self, ask: Ask, lease: int) -> None:
        """See to it that nobody has a claim, by `ask`. From anywhere; never blocks or raises."""
        raise NotImplementedError

    def _listen(self, topic: str) -> None:
        """Be told from now on when something changes elsewhere that is news of `topic`."""

    @property
    def _up(self) -> bool:
        """Whether it is any use to ask."""
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
                except BaseException as error:  # noqa: BLE001 - the steps decide what it means
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
                except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                    request = steps.throw(error)
                else:
                    request = steps.send(result)
        except StopIteration as end:
            return cast("T", end.value)

    def _begin(self, kind: Kind, request: Ask | Tell | Waiter) -> Waiter | Callable[[], Any]:
        """Return what waits for the answer, or what gives it at once."""
        if isinstance(request, Ask):
            return self._answering(kind, request)
        if isinstance(request, Tell):
            return partial(self._telling, kind, request.ask)
        return request
