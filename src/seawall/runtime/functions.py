"""What kind of function a user hands over, told without importing `inspect`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from seawall._checks import (
    ASYNC_GENERATOR,
    COROUTINE,
    GENERATOR,
    FunctionKind,
    function_kind,
)

NO_CALL: Final = GENERATOR | ASYNC_GENERATOR
"""The flags of code that cannot be called under a guard."""
NO_PLAIN_CALL: Final = NO_CALL | COROUTINE
"""The same where nobody awaits it."""


def kind_of(function: Callable[..., Any]) -> FunctionKind:
    """Tell how `function` runs; raises if it is nothing that can be guarded."""
    if isinstance(function, (staticmethod, classmethod)):
        name = type(function).__name__
        raise TypeError(f"put the guard below @{name}, next to the function itself")
    if isinstance(function, type):
        raise TypeError(f"{function!r} is a class: guard a function or a method of it")
    if not callable(function):
        raise TypeError(f"{function!r} cannot be called: guard the function, not its result")
    return function_kind(function)


class WrongCall(BaseException):
    """The program is wrong, not the dependency: no layer answers it, and it ends as a TypeError."""


def refuse(function: Callable[..., Any]) -> NoReturn:
    """Raise: what `function` would do is not done by calling it, or not by this kind of call."""
    if kind_of(function) == "async":
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"{name} is async: write `await guard.acall({name}, ...)`")
    raise TypeError(
        f"{function!r} is a generator, which runs when it is iterated over:"
        " decorate it with the guard instead"
    )


def is_async(function: Any) -> bool:
    """Tell at a glance whether `function` is an `async def`; False if that takes a closer look."""
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & COROUTINE)


def awaiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for a call that awaits it, if it may be a plain one: then it just runs.

    A plain function may hand out a coroutine; what is none was done, and must not count as failed.
    """
    if kind_of(function) == "async":
        return function

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return await result if hasattr(result, "__await__") else result

    return awaited
