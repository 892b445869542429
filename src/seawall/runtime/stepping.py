"""Operations written once, and carried out by blocking or by awaiting.

An operation is a generator: it yields what it asks for, and is sent the answer. What answers may
raise; the operation sees that where it asked, and may act on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")

Steps = Generator[Any, Any, T]
"""An operation that ends with a T."""


def drive(steps: Steps[T], answer: Callable[[Any], Any]) -> T:
    """Carry `steps` out; `answer(asked)` tells what each of them asks for."""
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
        except BaseException as error:  # noqa: BLE001 - the operation has a say in it
            send, given = steps.throw, error


async def adrive(steps: Steps[T], answer: Callable[[Any], Awaitable[Any]]) -> T:
    """Do the same in an event loop."""
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
        except BaseException as error:  # noqa: BLE001 - the operation has a say in it
            send, given = steps.throw, error
