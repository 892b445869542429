"""JSON for stored values: the types of `json`, and common business types.

`Decimal` and `UUID` are written as text, `datetime` and `date` as ISO 8601, a dataclass as an
object of its fields, a pydantic model by its own JSON mode. Decoding returns text and objects: JSON
does not know these types.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any, Final
from uuid import UUID


def plain(value: object) -> Any:
    """Return a JSON type for a value that `json` cannot encode, or raise TypeError.

    It is the `default=` of an encoder. It does not descend into containers: the encoder calls it
    for each part.
    """
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, date):  # includes datetime
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if callable(dump := getattr(type(value), "model_dump", None)):
        return dump(value, mode="json")
    raise TypeError(f"{type(value).__name__} is not one of the types that can be written")


def encoder(default: Callable[[Any], Any] = plain) -> Callable[[object], str]:
    """Return a function that writes compact JSON, or raises TypeError."""
    return _checked(
        json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=default).encode
    )


def _checked(write: Callable[[object], str]) -> Callable[[object], str]:
    def written(value: object) -> str:
        try:
            return write(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(str(error)) from None

    return written


json_text: Final = encoder()
"""Write a value as compact JSON, or raise TypeError. NaN and infinity are refused."""

canonical_json: Final = _checked(
    json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=plain).encode
)
"""Write a value as text that is the same for all equal values, or raise TypeError.

Keys are sorted; NaN and infinity are written. For comparison only, not for reading back.
"""

MOST_COMPARED: Final = 64 * 1024
"""Maximum bytes of a document that is parsed for comparison: it blocks the event loop."""


def canonical_document(data: bytes) -> bytes | None:
    """Return the same bytes for all JSON documents of equal meaning; None if in doubt.

    The order of members, spaces and escapes do not matter. Doubtful are duplicate members, numbers
    that are not in their shortest form (1.50, 1E3, -0), NaN, large or deeply nested documents, and
    input that is not UTF-8 or not JSON. 1 and 1.0 are different.
    """
    if len(data) > MOST_COMPARED:
        return None
    try:
        return canonical_json(_read(data.decode())).encode()
    except (ValueError, TypeError, RecursionError):
        return None


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        raise ValueError("a member that is there twice")
    return found


def _shortest(kind: type[int | float], text: str) -> int | float:
    number = kind(text)
    if repr(number) != text:
        raise ValueError("a number that could be written otherwise")
    return number


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_read: Final = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=partial(_shortest, int),
    parse_float=partial(_shortest, float),
    parse_constant=_no_number,
).decode
