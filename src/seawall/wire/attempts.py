"""Which attempt of a call a request is, so that only one service in a chain retries.

Three services with three attempts each make 27 requests of one. A client therefore sends the
greater of the attempt it received and its own; who receives more than 1 does not retry again.
"""

from __future__ import annotations

import re
from typing import Final

from seawall.wire._text import text_of

ATTEMPT_HEADER: Final = "Seawall-Attempt"

_MOST: Final = 99
_ATTEMPT: Final = re.compile(r"[1-9][0-9]?")


def read_attempt(value: str | bytes) -> int | None:
    """Return the number of the attempt, from 1 to 99, or None."""
    text = text_of(value)
    return int(text) if text is not None and _ATTEMPT.fullmatch(text) else None


def write_attempt(attempt: int) -> str:
    """Return the header's value; what is above 99 is said as 99."""
    return str(min(max(attempt, 1), _MOST))
