"""Validation of a queue's arguments."""

from __future__ import annotations

from typing import Final

from seawall import _checks as check
from seawall._failures import report_of, split_report
from seawall._redaction import safe_line
from seawall.jobs._records import Claim

MOST_TEXT: Final = 500
"""Maximum characters of a stored reason, a dedupe id and a job id."""
MOST_SECONDS: Final = 366 * 86_400.0
"""Maximum duration: more than a year is probably a mistake (milliseconds, for instance)."""


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
