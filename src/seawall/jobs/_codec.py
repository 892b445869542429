"""JSON codec of payloads and results, with bounded size and depth in both directions."""

from __future__ import annotations

import re
from json import dumps, loads
from typing import Any, Final, NoReturn

MOST_BYTES: Final = 67_108_864
"""Maximum bytes to decode, whatever `max_payload` is here: another pod may allow more."""
MOST_DEPTH: Final = 64
"""Maximum nesting of lists and objects: deeper ones could exhaust the reader's stack."""

_MARKS: Final = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


def encode(what: str, value: Any, limit: int) -> bytes:
    """Return `value` as JSON, or raise an error that says what to write instead."""
    try:
        text = dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{what} cannot be written as JSON ({error}): use text, finite numbers, True, False,"
            " None, lists and dicts"
        ) from None
    if len(data) > limit:
        raise ValueError(
            f"{what} is {len(data)} bytes long as JSON, and {limit} are allowed: keep what is large"
            " elsewhere and pass its name, or raise max_payload"
        )
    if _depth(text) > MOST_DEPTH:
        raise ValueError(f"{what} is nested more than {MOST_DEPTH} deep: make it flatter")
    return data


def decode(data: bytes) -> Any:
    """Return the value of `data`; raise ValueError for anything that `encode` would not write."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes, and {MOST_BYTES} are allowed")
    text = data.decode()
    if _depth(text) > MOST_DEPTH:
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    return loads(text, parse_constant=_refuse)


def _depth(text: str) -> int:
    """Return the maximum nesting of lists and objects, in one pass; 0 if it is surely allowed."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return 0  # too few brackets to be too deep, even if all of them are nested
    depth = deepest = 0
    quoted = False
    for match in _MARKS.finditer(text):
        mark = match[0]
        if mark == '"':
            quoted = not quoted
        elif not quoted and mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif not quoted and mark in "]}":
            depth -= 1
    return deepest


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
