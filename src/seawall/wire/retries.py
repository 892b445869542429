"""Retries: when to make one (`Retry-After` of RFC 9110, `retry-after-ms`), and how many were made.

Three services with three attempts each turn one request into 27. A client therefore sends the
greater of the attempt it received and its own; a service that receives more than 1 does not retry
again.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from math import ceil
from typing import Final

from seawall.wire.text import A_YEAR, decimal_of, text_of

RETRY_AFTER_HEADER: Final = "retry-after"
"""When to retry: seconds, or a date. Seawall sends seconds, rounded up."""
ATTEMPT_HEADER: Final = "Seawall-Attempt"
"""Number of the attempt, from 1 to 99; a service that receives more than 1 does not retry."""
_MOST_ATTEMPTS: Final = 99
_ATTEMPT: Final = re.compile(r"[1-9][0-9]?")

_MONTHS: Final = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_MONTH: Final = f"(?P<month>{_MONTHS})"
_TIME: Final = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_DATES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # Sun, 06 Nov 1994 08:49:37 GMT: the only format that senders may use today
        rf"[A-Za-z]{{3}}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT",
        # Sunday, 06-Nov-94 08:49:37 GMT
        rf"[A-Za-z]{{6,9}}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT",
        # Sun Nov  6 08:49:37 1994
        rf"[A-Za-z]{{3}} {_MONTH} (?P<day>[ 0-9][0-9]) {_TIME} (?P<year>[0-9]{{4}})",
    )
)
_HALF_A_CENTURY: Final = 50
_LEAP_SECOND: Final = 60


def read_retry_after(value: str | bytes, wall: float) -> float | None:
    """Return the seconds to wait: delay-seconds, or a date relative to `wall` (seconds since 1970).

    A date in the past means now (0.0). More than a year is capped to a year: such a sender does not
    want a retry, and callers cap it further. Return None if it is neither.
    """
    text = text_of(value)
    if text is None:
        return None
    seconds = decimal_of(text)
    if seconds is None:
        instant = _instant(text, wall)
        seconds = None if instant is None else instant - wall
    return None if seconds is None else min(max(0.0, seconds), A_YEAR)


def read_milliseconds(value: str | bytes) -> float | None:
    """Return the seconds in `retry-after-ms`, capped to a year, or None."""
    text = text_of(value)
    number = None if text is None else decimal_of(text)
    return None if number is None else min(number / 1000, A_YEAR)


def write_retry_after(seconds: float) -> str:
    """Return whole seconds, rounded up, so that a caller does not come back too early."""
    return str(ceil(min(max(0.0, seconds), A_YEAR)))


def read_attempt(value: str | bytes) -> int | None:
    """Return the attempt number, from 1 to 99, or None."""
    text = text_of(value)
    return int(text) if text is not None and _ATTEMPT.fullmatch(text) else None


def write_attempt(attempt: int) -> str:
    """Return the header's value; numbers above 99 become 99."""
    return str(min(max(attempt, 1), _MOST_ATTEMPTS))


def _instant(text: str, wall: float) -> float | None:
    """Return the seconds since 1970 of an HTTP-date in any of its three forms, or None."""
    for pattern in _DATES:
        found = pattern.fullmatch(text)
        if found is None:
            continue
        year, month = int(found["year"]), _MONTHS.index(found["month"]) // 4 + 1
        day, hour, minute, second = (int(found[n]) for n in ("day", "hour", "minute", "second"))
        within = month, day, hour, minute, 59 if second == _LEAP_SECOND else second
        try:
            if len(found["year"]) == 2:  # noqa: PLR2004 - the digits of a year without its century
                now, *now_within = datetime.fromtimestamp(wall, UTC).timetuple()[:6]
                ahead = (year - now) % 100
                # More than 50 years ahead means the previous century (RFC 9110, 5.6.7).
                past = (ahead, *within) > (_HALF_A_CENTURY, *now_within)
                year = now + ahead - (100 if past else 0)
            return datetime(year, *within, tzinfo=UTC).timestamp()
        except (ValueError, OverflowError, OSError):
            return None  # such as 31 February
    return None
