"""What kind of function a user hands over, told without importing `inspect`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, Literal

FunctionKind = Literal["sync", "async", "generator", "async generator"]

_GENERATOR, _COROUTINE, _ITERABLE_COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x100, 0x200


def kind_of(function: Callable[..., Any]) -> FunctionKind:
    """Tell how `function` runs; raises if it is nothing that can be guarded."""
    if isinstance(function, (staticmethod, classmethod)):
        name = type(function).__name__
        raise TypeError(f"put the guard below @{name}, next to the function itself")
    if isinstance(function, type):
        raise TypeError(f"{function!r} is a class: guard a function or a method of it")
    if not callable(function):
        raise TypeError(f"{function!r} cannot be called: guard the function, not its result")
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__code__"):
        inner = type(inner).__call__
    flags = getattr(getattr(inner, "__code__", None), "co_flags", None)
    if flags is None:
        return _ask_inspect(function)
    if flags & _ASYNC_GENERATOR:
        return "async generator"
    if flags & (_COROUTINE | _ITERABLE_COROUTINE):
        return "async"
    return "generator" if flags & _GENERATOR else "sync"


def is_generator(code: CodeType) -> bool:
    """Tell whether `code` is that of a generator, async or not."""
    return bool(code.co_flags & (_GENERATOR | _ASYNC_GENERATOR))


def _ask_inspect(function: Callable[..., Any]) -> FunctionKind:
    """Tell of a function that was not compiled from Python."""
    import inspect

    if inspect.isasyncgenfunction(function):
        return "async generator"
    if inspect.iscoroutinefunction(function):
        return "async"
    return "generator" if inspect.isgeneratorfunction(function) else "sync"
