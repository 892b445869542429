"""Public methods with an async twin, written once.

A method is a generator of steps, from which two methods are made: one that blocks, and one that is
awaited, with the prefix `a`. Both have the generator's arguments and its result:

    def _push(self, payload: Any) -> Steps[str]: ...
    push, apush = make_twins(_push, run, arun)
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from seawall.runtime.driver import Steps

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

Twins = tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]
"""A method that blocks, and its async twin."""


def make_twins(
    method: Callable[Concatenate[S, P], Steps[T]],
    run: Callable[[S, Callable[[], Steps[T]]], T],
    arun: Callable[[S, Callable[[], Steps[T]]], Coroutine[Any, Any, T]],
) -> Twins[S, P, T]:
    """Return the twins of `method`.

    `run(self, begin)` carries out the steps that `begin()` returns, and `arun` awaits them.
    """

    def blocking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(self, lambda: method(self, *args, **kwargs))

    async def awaited(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await arun(self, lambda: method(self, *args, **kwargs))

    return _described(method, blocking), _described(method, awaited, "a")


def _described(method: Callable[..., Any], twin: Any, prefix: str = "") -> Any:
    """Give a twin the name, the signature and the docstring of `method`, which is `_name`."""
    name = method.__name__.removeprefix("_")
    shape = signature(method)
    result = shape.return_annotation.partition("[")[2].removesuffix("]")  # of Steps[...]
    twin.__name__ = f"{prefix}{name}"
    twin.__qualname__ = method.__qualname__.replace(method.__name__, twin.__name__)
    twin.__module__ = method.__module__
    twin.__doc__ = f"Async twin of `{name}`." if prefix else method.__doc__
    twin.__signature__ = shape.replace(return_annotation=result)
    return twin
