"""What every parser here begins with: text of a bounded length, numbers of a bounded size.

Numbers are matched by pattern and never handed to `float()` as they came: that would take "nan",
"1e999", "1_000" and the digits of every script.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 8192
"""A value of more characters is ignored: nothing that is sent in good faith comes near."""

A_YEAR: Final = 31_536_000.0
"""More seconds than this mean nothing to a request, and are ignored or cut."""

_DECIMAL: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_DIGITS: Final = 15


def text_of(value: object) -> str | None:
    """Return a header's value without the blanks around it; None if it is too long, or no text."""
    if isinstance(value, str):
        return value.strip(" \t") if len(value) <= LONGEST else None
    if isinstance(value, bytes):
        return value.decode("latin-1").strip(" \t") if len(value) <= LONGEST else None
    return None


def whole_of(text: str, digits: int = 15) -> int | None:
    """Return a whole number of at most that many digits, or None."""
    return int(text) if 0 < len(text) <= digits and text.isascii() and text.isdigit() else None


def decimal_of(text: str) -> float | None:
    """Return a number that is written with digits and perhaps a point, or None.

    What has more than 15 digits is cut to 10**15, which is more than any caller takes as it is.
    """
    if not _DECIMAL.fullmatch(text):
        return None
    whole, _, part = text.partition(".")
    whole = whole.lstrip("0")
    return 1e15 if len(whole) > _DIGITS else float(f"{whole}.{part[:_DIGITS]}0")
