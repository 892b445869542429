"""The attempt number of a request, so that only one service in a chain retries.

Three services with three attempts each turn one request into 27. A client therefore sends the
greater of the attempt it received and its own; a service that receives more than 1 does not retry
again.
"""

from __future__ import annotations

import re
from typing import Final

from seawall.wire.text import text_of

ATTEMPT_HEADER: Final = "Seawall-Attempt"
"""Number of the attempt, from 1 to 99; a service that receives more than 1 does not retry."""

_MOST: Final = 99
_ATTEMPT: Final = re.compile(r"[1-9][0-9]?")


def read_attempt(value: str | bytes) -> int | None:
    """Return the attempt number, from 1 to 99, or None."""
    text = text_of(value)
    return int(text) if text is not None and _ATTEMPT.fullmatch(text) else None


def write_attempt(attempt: int) -> str:
    """Return the header's value; numbers above 99 become 99."""
    return str(min(max(attempt, 1), _MOST))
