"""Argument checks: each error message says what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import isfinite, isnan
from os import environ
from typing import Any, Final, Literal, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

FunctionKind = Literal["sync", "async", "generator", "async generator"]

GENERATOR: Final = 0x20
COROUTINE: Final = 0x80
ITERABLE_COROUTINE: Final = 0x100
ASYNC_GENERATOR: Final = 0x200  # flags of code objects, as in `inspect`, which is slow to import
MOST: Final = 2**53  # up to here every integer is also an exact float, in any language


def seconds(name: str, value: object, *, zero: bool = False, infinite: bool = False) -> float:
    """Return `value` as seconds, or raise: positive and finite, unless the flags allow more."""
    number = _number(name, value, "seconds as a number, such as 2.0")
    if number == float("inf") and infinite:
        return number
    if not isfinite(number) or number < 0 or (number == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        raise ValueError(f"{name}={value!r}: write finite seconds, {least}, such as {name}=2.0")
    return number


def count(name: str, value: object, *, minimum: int = 1, maximum: int = MOST) -> int:
    """Return `value` as an integer from `minimum` to `maximum`, or raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: write a whole number, such as {name}={max(minimum, 3)}")
    if value < minimum:
        raise ValueError(f"{name}={value!r}: write {minimum} or more")
    if value > maximum:
        raise ValueError(f"{name} is too large: write {maximum} or less")
    return value


def ratio(name: str, value: object, *, zero: bool = False) -> float:
    """Return `value` as a fraction, or raise: above 0 (or 0, if allowed) and at most 1."""
    number = _number(name, value, "a share between 0 and 1, such as 0.5")
    if isnan(number) or number > 1 or number < 0 or (number == 0 and not zero):
        least = "from 0" if zero else "above 0"
        raise ValueError(
            f"{name}={value!r}: write a share {least} up to 1, such as {name}=0.5 for 50 %"
        )
    return number


def at_least(name: str, value: object, minimum: float) -> float:
    """Return `value` as a finite number of at least `minimum`, or raise."""
    least = "" if minimum == float("-inf") else f" of at least {minimum:g}"
    number = _number(name, value, f"a number{least}")
    if not isfinite(number) or number < minimum:
        raise ValueError(f"{name}={value!r}: write a finite number{least}")
    return number


def flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False, or raise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: write True or False")
    return value


def choice(name: str, value: T, options: Iterable[T]) -> T:
    """Return `value` if it is one of `options`, or raise and list them."""
    known = list(options)
    if value not in known:
        listed = ", ".join(repr(option) for option in known)
        raise ValueError(f"{name}={value!r}: write one of {listed}")
    return value


def function(name: str, value: Callable[..., T] | None) -> Callable[..., T]:
    """Return `value` if it can be called, or raise. Its result may be an awaitable."""
    if not callable(value):
        raise TypeError(f"{name}={value!r}: pass a function, not its result")
    return value


def plain_function(name: str, value: F, advice: str = "nothing here would await it") -> F:
    """Return `value` if calling it returns the result itself, or raise.

    A coroutine or a generator would be taken for the result: as a key, it differs each time; as the
    result of a predicate, it is always true.
    """
    function(name, value)
    kind = function_kind(value)
    if kind != "sync":
        what = f"is {kind}" if kind == "async" else f"is of the kind {kind!r}"
        raise TypeError(f"{name}={value!r} {what}: pass a plain function; {advice}")
    return value


def function_kind(function: Callable[..., Any]) -> FunctionKind:
    """Return how a callable runs; a class counts as a plain function."""
    if isinstance(function, type):
        return "sync"
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__code__"):
        inner = type(inner).__call__
    flags = getattr(getattr(inner, "__code__", None), "co_flags", None)
    if flags is None:
        return _ask_inspect(function)
    if flags & ASYNC_GENERATOR:
        return "async generator"
    if flags & (COROUTINE | ITERABLE_COROUTINE):
        return "async"
    return "generator" if flags & GENERATOR else "sync"


def _ask_inspect(function: Callable[..., Any]) -> FunctionKind:
    import inspect

    if inspect.isasyncgenfunction(function):
        return "async generator"
    if inspect.iscoroutinefunction(function):
        return "async"
    return "generator" if inspect.isgeneratorfunction(function) else "sync"


def error_types(name: str, value: object) -> tuple[type[Exception], ...]:
    """Return one exception class, or several, as a tuple; or raise."""
    kinds = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise TypeError(f"{name}={value!r}: write classes of errors, such as {name}=ValueError")
    return kinds


def environment(name: str, options: Iterable[str]) -> str | None:
    """Return the value of the environment variable `name`, None if it is unset; or raise."""
    value = environ.get(name, "")
    return choice(name, value, options) if value else None


def listed(name: str, value: Iterable[T], example: str) -> tuple[T, ...]:
    """Return the items of `value` as a tuple, or raise; a string is taken for a mistake."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name}={value!r}: write a list, such as {name}=[{example}]")
    return tuple(value)


def chance(name: str, value: T) -> T:
    """Return `value` if it is a random number generator like `random.Random`, or raise."""
    if isinstance(value, type) or not hasattr(value, "random"):
        raise TypeError(f"{name}={value!r}: pass a random.Random, such as random.Random(7)")
    return value


def _number(name: str, value: object, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: write {wanted}, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}={value!r}: too large; write {wanted}") from None
