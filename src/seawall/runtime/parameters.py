"""How a generated function takes arguments and passes them on.

Taking `*args, **kwargs` builds a tuple and a dict at each call. If the guarded function is plain
Python, its own parameters are written instead, and arguments pass straight through.
"""

from __future__ import annotations

from collections.abc import Callable
from keyword import iskeyword
from types import FunctionType
from typing import Any, NamedTuple

_VARARGS, _VARKEYWORDS = 0x04, 0x08


class Parameters(NamedTuple):
    """Pieces of program text, and the defaults that they refer to as `defaults_[n]`."""

    declared: str  # as in `def f(declared)`
    passed: str  # as in `f(passed)`
    args: str  # an expression for the tuple of positional arguments
    kwargs: str  # an expression for the dict of keyword arguments
    defaults: tuple[Any, ...] = ()


ANY = Parameters("*args, **kwargs", "*args, **kwargs", "args", "kwargs")


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return how to take and pass on the arguments of `function`; `ANY` if that is unknown."""
    if type(function) is not FunctionType:
        return ANY
    code = function.__code__
    ordinary, keyword_only = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    positional = names[:ordinary]
    keywords = names[ordinary : ordinary + keyword_only]
    extra = list(names[ordinary + keyword_only :])
    varargs = extra.pop(0) if code.co_flags & _VARARGS else None
    varkeywords = extra.pop(0) if code.co_flags & _VARKEYWORDS else None
    used = [*positional, *keywords, *filter(None, (varargs, varkeywords))]
    # The text's own names all end in an underscore, and only identifiers may become part of it.
    if any(not n.isidentifier() or iskeyword(n) or n.endswith("_") for n in used):
        return ANY
    declared, defaults = _declared(function, positional, keywords, varargs, varkeywords)
    star = [f"*{varargs}"] if varargs else []
    stars = [f"**{varkeywords}"] if varkeywords else []
    return Parameters(
        declared=declared,
        passed=", ".join([*positional, *star, *(f"{n}={n}" for n in keywords), *stars]),
        args=f"({''.join(f'{item}, ' for item in [*positional, *star])})",
        kwargs=f"{{{', '.join([*(f'{n!r}: {n}' for n in keywords), *stars])}}}",
        defaults=defaults,
    )


def _declared(
    function: FunctionType,
    positional: tuple[str, ...],
    keywords: tuple[str, ...],
    varargs: str | None,
    varkeywords: str | None,
) -> tuple[str, tuple[Any, ...]]:
    given = function.__defaults__ or ()
    named = function.__kwdefaults__ or {}
    defaults = [*given]
    first = len(positional) - len(given)
    parts = []
    for position, name in enumerate(positional):
        parts.append(name if position < first else f"{name}=defaults_[{position - first}]")
        if position + 1 == function.__code__.co_posonlyargcount:
            parts.append("/")
    if varargs or keywords:
        parts.append(f"*{varargs or ''}")
    for name in keywords:
        if name in named:
            parts.append(f"{name}=defaults_[{len(defaults)}]")
            defaults.append(named[name])
        else:
            parts.append(name)
    if varkeywords:
        parts.append(f"**{varkeywords}")
    return ", ".join(parts), tuple(defaults)
