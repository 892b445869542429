"""Which errors and values are worth another attempt, as `on=` names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from seawall import _checks as check

Predicate = Callable[[Exception | None, Any], bool]
"""`on(error, value)`: whether a call that raised `error`, or returned `value`, is worth another."""
On = type[Exception] | Predicate | Iterable["type[Exception] | Predicate"]


def read_on(on: Any) -> tuple[tuple[type[Exception], ...], tuple[Predicate, ...]]:
    """Return the types and the predicates that `on` names, or raise."""
    items = [on] if isinstance(on, type) or callable(on) else on
    advice = "write exception types, such as on=ConnectionError, or a function of (error, value)"
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise TypeError(f"on={on!r}: {advice}")
    items = tuple(items)
    if not items:
        raise ValueError(f"on={on!r}: {advice}")
    types: list[type[Exception]] = []
    predicates: list[Predicate] = []
    for item in items:
        if isinstance(item, type):
            if not issubclass(item, Exception):
                raise TypeError(
                    f"on={item.__name__}: cancellation and exits are never retried; {advice}"
                )
            types.append(item)
        elif callable(item):
            predicates.append(check.plain_function("on", item))
        else:
            raise TypeError(f"on={item!r}: {advice}")
    return tuple(types), tuple(predicates)
