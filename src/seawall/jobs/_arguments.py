"""What is checked of a queue's arguments, in one place."""

from __future__ import annotations

from typing import Final

from seawall import _checks as check
from seawall._failures import report_of, split_report
from seawall._redaction import safe_line
from seawall.jobs._records import Claim

MOST_TEXT: Final = 500
"""Characters of a reason that are kept, and of a dedupe id or a job's id that are taken."""
MOST_SECONDS: Final = 366 * 86_400.0
"""More than a year is a mistake (milliseconds, perhaps)."""


def microseconds(seconds: float) -> int:
    """Return `seconds` as the rules count them."""
    return round(seconds * 1e6)


def bounded_seconds(name: str, value: object, most: float, *, zero: bool = False) -> float:
    """Return `value` as seconds up to `most`, or raise."""
    seconds = check.seconds(name, value, zero=zero)
    if seconds > most:
        raise ValueError(f"{name}={value!r}: write at most {most:g} seconds")
    return seconds


def short_text(name: str, value: object) -> str:
    """Return `value` if it is text that a store can hold, and not too long, or raise."""
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
    """Return `text` without control characters, and not too long: it will be logged and shown."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


def stored_reason(reason: str | BaseException) -> str:
    """Return why an attempt failed, as it is stored: redacted, as it is logged and searched.

    The traceback of an error is below it; a text becomes one line.
    """
    if isinstance(reason, BaseException):
        return report_of(reason, MOST_TEXT)
    if not isinstance(reason, str):
        raise TypeError(f"reason={reason!r}: write text, or pass the error")
    return safe_line(" ".join(reason.splitlines()), MOST_TEXT)


def read_reason(stored: str) -> tuple[str, str]:
    """Return a stored reason and its traceback, fit to be shown."""
    said, trace = split_report(stored)
    return legible(said), trace


def claim_of(claim: Claim) -> Claim:
    """Return `claim` if it is one, or raise."""
    if not isinstance(claim, Claim):
        raise TypeError(f"{claim!r}: pass the Claim that claim() returned")
    return claim
