"""Operations written once, and carried out by blocking or by awaiting.

An operation is a generator: it yields requests and is sent the answers. If answering raises, the
operation sees the exception at its `yield` and may handle it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")

Steps = Generator[Any, Any, T]
"""An operation that returns a T."""


def drive(steps: Steps[T], answer: Callable[[Any], Any]) -> T:
    """Run `steps`; `answer(asked)` returns the answer to each request."""
    send: Any = steps.send
    given: Any = None
    while True:
        try:
            asked = send(given)
        except StopIteration as end:
            ended: T = end.value
            return ended
        try:
            send, given = steps.send, answer(asked)
        except BaseException as error:  # noqa: BLE001 - the operation may handle it
            send, given = steps.throw, error


async def adrive(steps: Steps[T], answer: Callable[[Any], Awaitable[Any]]) -> T:
    """Async twin of `drive`."""
    send: Any = steps.send
    given: Any = None
    while True:
        try:
            asked = send(given)
        except StopIteration as end:
            ended: T = end.value
            return ended
        try:
            send, given = steps.send, await answer(asked)
        except BaseException as error:  # noqa: BLE001 - the operation may handle it
            send, given = steps.throw, error
