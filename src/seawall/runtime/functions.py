"""Classification of a user's function, without importing `inspect`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from seawall._checks import ASYNC_GENERATOR, COROUTINE, GENERATOR, FunctionKind, function_kind

NO_CALL: Final = GENERATOR | ASYNC_GENERATOR  # flags of functions that no guard can call
NO_PLAIN_CALL: Final = NO_CALL | COROUTINE  # or not without `await`


def kind_of(function: Callable[..., Any]) -> FunctionKind:
    """Return how `function` runs; raise if it cannot be guarded."""
    if isinstance(function, (staticmethod, classmethod)):
        name = type(function).__name__
        raise TypeError(f"put the guard below @{name}, next to the function itself")
    if isinstance(function, type):
        raise TypeError(f"{function!r} is a class: guard a function or a method of it")
    if not callable(function):
        raise TypeError(f"{function!r} cannot be called: guard the function, not its result")
    return function_kind(function)


class WrongCall(BaseException):
    """The program is wrong, not the dependency: no layer handles it; it becomes a TypeError."""


def refuse(function: Callable[..., Any]) -> NoReturn:
    """Raise because `function` needs iterating or awaiting, not this kind of call."""
    if kind_of(function) == "async":
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"{name} is async: write `await guard.acall({name}, ...)`")
    raise TypeError(
        f"{function!r} is a generator, which runs when it is iterated over:"
        " decorate it with the guard instead"
    )


def is_async(function: Any) -> bool:
    """Return whether `function` is an `async def`, quickly; False if that needs a closer look."""
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & COROUTINE)


def awaiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` in a form that can be awaited; a plain function simply runs.

    A plain function may return a coroutine, which is awaited. Any other result is a success, and
    must not count as a failure because it cannot be awaited.
    """
    if kind_of(function) == "async":
        return function

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return await result if hasattr(result, "__await__") else result

    return awaited
