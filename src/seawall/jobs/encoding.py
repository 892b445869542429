"""Validation and JSON encoding of what a queue stores, with bounded size and depth."""

from __future__ import annotations

import re
from json import dumps, loads
from typing import Any, Final, NoReturn

from seawall import _checks as check
from seawall._failures import report_of, split_report
from seawall._redaction import safe_line
from seawall.jobs.records import Claim

MOST_BYTES: Final = 67_108_864
"""Maximum bytes to decode, whatever `max_payload` is here: another pod may allow more."""
MOST_DEPTH: Final = 64
"""Maximum nesting of lists and objects: deeper ones could exhaust the reader's stack."""
_MARKS: Final = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
MOST_TEXT: Final = 500
"""Maximum characters of a stored reason, a dedupe id and a job id."""
MOST_SECONDS: Final = 366 * 86_400.0
"""Maximum duration: more than a year is probably a mistake (milliseconds, for instance)."""


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


def microseconds(seconds: float) -> int:
    """Return `seconds` in microseconds, the unit of the queue's rules."""
    return round(seconds * 1e6)


def bounded_seconds(name: str, value: object, most: float, *, zero: bool = False) -> float:
    """Return `value` in seconds if it is at most `most`, or raise."""
    seconds = check.seconds(name, value, zero=zero)
    if seconds > most:
        raise ValueError(f"{name}={value!r}: write at most {most:g} seconds")
    return seconds


def short_text(name: str, value: object) -> str:
    """Return `value` if it is storable text of acceptable length, or raise."""
    if not isinstance(value, str) or not 0 < len(value) <= MOST_TEXT:
        raise TypeError(f"{name} is text of 1 to {MOST_TEXT} characters, not {value!r:.50}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name}={value!r:.50}: half a character (a lone surrogate) cannot be stored; write"
            " whole ones"
        ) from None
    return value


def legible(text: str) -> str:
    """Return `text` without control characters and shortened, safe to log and display."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


def stored_reason(reason: str | BaseException) -> str:
    """Return the stored form of a failure's reason, redacted as in logs.

    For an exception it includes the traceback; text becomes one line.
    """
    if isinstance(reason, BaseException):
        return report_of(reason, MOST_TEXT)
    if not isinstance(reason, str):
        raise TypeError(f"reason={reason!r}: write text, or pass the error")
    return safe_line(" ".join(reason.splitlines()), MOST_TEXT)


def read_reason(stored: str) -> tuple[str, str]:
    """Return a stored reason and its traceback, safe to display."""
    said, trace = split_report(stored)
    return legible(said), trace


def claim_of(claim: Claim) -> Claim:
    """Return `claim` if it is a `Claim`, or raise."""
    if not isinstance(claim, Claim):
        raise TypeError(f"{claim!r}: pass the Claim that claim() returned")
    return claim
