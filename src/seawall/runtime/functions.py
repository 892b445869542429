"""Classification of a user's function: how it runs, and whether it takes arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import update_wrapper
from types import CodeType
from typing import Any, Final, NoReturn

from seawall._checks import ASYNC_GENERATOR, COROUTINE, GENERATOR, FunctionKind, function_kind

VARIADIC: Final = 0x0C  # flags of functions with *args or **kwargs
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


def takes_arguments(function: Callable[..., Any]) -> bool:
    """Return whether `function` takes arguments; True if that cannot be known."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, ContextVar):
        return False  # its `get` takes a default, not the call's first argument
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        own = owner is not None  # a method's `self` is not an argument of the call
        return bool(code.co_argcount > own or code.co_kwonlyargcount or code.co_flags & VARIADIC)
    import inspect  # a partial, or an object that can be called

    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:  # some callables written in C have no signature
        return True


def with_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one that accepts a call's arguments, even if it ignores them."""
    if takes_arguments(function):
        return function

    def without_arguments(*_args: Any, **_kwargs: Any) -> Any:
        return function()

    return update_wrapper(without_arguments, function)


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
