"""Structured fields (RFC 9651), limited to what the headers of this package need.

`read_string` accepts a field that contains exactly one string, with any parameters. As the standard
requires, one mistake invalidates the whole field.
"""

from __future__ import annotations

import re
from typing import Final

from seawall.wire.text import LONGEST

MOST: Final = 999_999_999_999_999
"""The largest integer of a structured field."""

_PLAIN: Final = re.compile(r"[\x20-\x21\x23-\x5b\x5d-\x7e]*")
_UNSAYABLE: Final = re.compile(r"[^\x20-\x7e]")
_STRING: Final = r'"(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"'
# Each alternative begins with a different character, so no input is scanned twice.
_VALUE: Final = rf"""(?:
    -?[0-9]{{1,15}}(?:\.[0-9]{{1,3}})?
    |{_STRING}
    |[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*
    |:[A-Za-z0-9+/=]*:
    |\?[01]
    |@-?[0-9]{{1,15}}
    |%"(?:[\x20-\x21\x23-\x24\x26-\x7e]|%[0-9a-f]{{2}})*"
)"""
_ITEM: Final = re.compile(
    rf"[ ]*({_STRING})(?:;[ ]*[a-z*][a-z0-9_\-.*]*(?:={_VALUE})?)*[ ]*", re.VERBOSE
)


def read_string(text: str) -> str | None:
    """Return the string that is the only item of a field, without its parameters, or None."""
    found = _ITEM.fullmatch(text) if len(text) <= LONGEST else None
    if found is None:
        return None
    # Three passes in C; the null character cannot be in a string that matched.
    return found[1][1:-1].replace("\\\\", "\0").replace('\\"', '"').replace("\0", "\\")


def string(text: str) -> str:
    """Return `text` as a quoted string; unsupported characters become question marks."""
    if not _PLAIN.fullmatch(text):
        text = _UNSAYABLE.sub("?", text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def integer(number: int) -> str:
    """Return a non-negative integer, clamped to the valid range."""
    return str(min(max(int(number), 0), MOST))
