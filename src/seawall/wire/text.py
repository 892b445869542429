"""Basics of all parsers here: text of a bounded length, numbers of a bounded size.

Numbers are matched by pattern and never passed to `float()` unchecked: that would accept "nan",
"1e999", "1_000" and non-ASCII digits.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 8192
"""Maximum number of characters of a value. Longer values are ignored: no legitimate value comes
close."""
A_YEAR: Final = 31_536_000.0
"""Maximum number of seconds. Longer times are meaningless for a request, and ignored or capped."""
_DECIMAL: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_DIGITS: Final = 15


def text_of(value: object) -> str | None:
    """Return a header's value without surrounding blanks; None if it is too long or not text."""
    if isinstance(value, str):
        return value.strip(" \t") if len(value) <= LONGEST else None
    if isinstance(value, bytes):
        return value.decode("latin-1").strip(" \t") if len(value) <= LONGEST else None
    return None


def whole_of(text: str, digits: int = 15) -> int | None:
    """Return a non-negative integer of at most `digits` digits, or None."""
    return int(text) if 0 < len(text) <= digits and text.isascii() and text.isdigit() else None


def decimal_of(text: str) -> float | None:
    """Return a number that is written with digits and an optional point, or None.

    A number with more than 15 integer digits becomes 10**15, which every caller caps or rejects.
    """
    if not _DECIMAL.fullmatch(text):
        return None
    whole, _, part = text.partition(".")
    whole = whole.lstrip("0")
    return 1e15 if len(whole) > _DIGITS else float(f"{whole}.{part[:_DIGITS]}0")
