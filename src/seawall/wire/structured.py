"""Structured fields (RFC 9651), limited to what the headers of this package need: lists of items.

`read_list` accepts every item and parameter, and nothing else: inner lists are not supported, and
one mistake invalidates the whole field, as the standard requires. A field of more than 256 items
and parameters is rejected, to save time.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from seawall.wire.text import LONGEST

MOST: Final = 999_999_999_999_999
"""The largest integer of a structured field."""

_MOST_PARTS: Final = 256
_BLANKS: Final = re.compile(r"[ \t]*")
_KEY: Final = re.compile(r"[a-z*][a-z0-9_\-.*]*")
# Each alternative begins with a different character, so no input is scanned twice.
_BARE: Final = re.compile(
    r"""(?P<number>-?[0-9]{1,15}(?:\.[0-9]{1,3})?)(?![0-9.])
    |"(?P<string>(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"
    |(?P<token>[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*)
    |:(?P<bytes>[A-Za-z0-9+/=]*):
    |\?(?P<boolean>[01])
    |@(?P<date>-?[0-9]{1,15})(?![0-9.])
    |%"(?P<display>(?:[\x20-\x21\x23-\x24\x26-\x7e]|%[0-9a-f]{2})*)"
    """,
    re.VERBOSE,
)
_PLAIN: Final = re.compile(r"[\x20-\x21\x23-\x5b\x5d-\x7e]*")
_UNSAYABLE: Final = re.compile(r"[^\x20-\x7e]")
_DECIMAL_DIGITS: Final = 12


class Token(str):
    """A token: a word without quotes, which is distinct from a string."""

    __slots__ = ()


Bare = int | float | bool | bytes | str | Token


class FieldItem(NamedTuple):
    """A value and its parameters; the last of duplicate parameters counts."""

    value: Bare
    parameters: dict[str, Bare]


def read_list(text: str) -> list[FieldItem] | None:
    """Return the items of a list, or None if it is invalid; an empty field is an empty list."""
    if len(text) > LONGEST or text.count(",") + text.count(";") > _MOST_PARTS:
        return None
    text = text.strip(" ")
    items: list[FieldItem] = []
    at, end = 0, len(text)
    while at < end:
        found = _item(text, at)
        if found is None:
            return None
        item, at = found
        items.append(item)
        at = _blanks(text, at)
        if at == end:
            return items
        if text[at] != ",":
            return None
        at = _blanks(text, at + 1)
        if at == end:
            return None  # a trailing comma
    return items


def read_item(text: str) -> FieldItem | None:
    """Return the item of a field with exactly one item, or None."""
    items = read_list(text)
    return items[0] if items is not None and len(items) == 1 else None


def string(text: str) -> str:
    """Return `text` as a quoted string; unsupported characters become question marks."""
    if not _PLAIN.fullmatch(text):
        text = _UNSAYABLE.sub("?", text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def byte_sequence(value: bytes) -> str:
    """Return bytes as base64 between colons."""
    return f":{b64encode(value).decode('ascii')}:"


def integer(number: int) -> str:
    """Return a non-negative integer, clamped to the valid range."""
    return str(min(max(int(number), 0), MOST))


def _blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def _item(text: str, at: int) -> tuple[FieldItem, int] | None:
    """Return the item that begins at `at`, and the position after it."""
    found = _bare(text, at)
    if found is None:
        return None
    value, at = found
    parameters: dict[str, Bare] = {}
    while at < len(text) and text[at] == ";":
        at += 1
        while at < len(text) and text[at] == " ":
            at += 1
        key = _KEY.match(text, at)
        if key is None:
            return None
        at = key.end()
        said: Bare = True
        if at < len(text) and text[at] == "=":
            found = _bare(text, at + 1)
            if found is None:
                return None
            said, at = found
        parameters[key[0]] = said
    return FieldItem(value, parameters), at


def _bare(text: str, at: int) -> tuple[Bare, int] | None:
    found = _BARE.match(text, at)
    if found is None:
        return None
    kind = found.lastgroup or ""
    raw = found[kind]
    try:
        return _MEANING[kind](raw), found.end()
    except ValueError:
        return None


def _number(raw: str) -> int | float:
    whole, point, _ = raw.partition(".")
    if not point:
        return int(raw)
    if len(whole.lstrip("-")) > _DECIMAL_DIGITS:
        raise ValueError("a decimal has at most 12 digits before its point")
    return float(raw)


def _unescaped(raw: str) -> str:
    # Three passes in C; the null character cannot be in a string that matched.
    return raw.replace("\\\\", "\0").replace('\\"', '"').replace("\0", "\\")


def _bytes(raw: str) -> bytes:
    try:
        return b64decode(raw + "=" * (-len(raw) % 4), validate=True)
    except NotBase64 as error:
        raise ValueError("no base64") from error


_MEANING: Final[dict[str, Callable[[str], Bare]]] = {
    "number": _number,
    "string": _unescaped,
    "token": Token,
    "bytes": _bytes,
    "boolean": lambda raw: raw == "1",
    "date": int,
    "display": lambda raw: unquote_to_bytes(raw).decode("utf-8"),
}
