"""Keys in the store: all are distinct, and no user's text chooses where it is kept.

A key is `prefix:1:{kind:name}:part:part`. The braces are ours, so everything that belongs to one
policy is in one slot of a cluster. Plain text stays readable; long or unusual text is hashed.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from hashlib import sha256
from typing import Final

VERSION: Final = 1
"""Version of the stored format; other versions never use the same keys."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.@/+-]{1,64}")


def name_part(text: str) -> str:
    """Return `text` if it is plain, otherwise its hash; different texts give different names."""
    return text if _PLAIN.fullmatch(text) else _hashed(f"s{text}")


def key_part(key: Hashable) -> str:
    """Return the name of a user's key: equal in all processes, different for different keys.

    Keys that are equal in Python (1, 1.0 and True) are the same here. Raise if the key has no text
    that all processes agree on.
    """
    if isinstance(key, str):
        return name_part(str.__str__(key))  # an enum member is the text that it equals
    return _hashed(_canonical(key))


def make_key(prefix: str, kind: str, name: str, *parts: str) -> str:
    """Return the key of a part of `name`; the parts are names already."""
    return ":".join((prefix, str(VERSION), f"{{{kind}:{name_part(name)}}}", *parts))


def _hashed(text: str) -> str:
    return "~" + sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _canonical(key: object) -> str:
    if isinstance(key, str):
        return f"s{len(key)}:{str.__str__(key)}"
    if isinstance(key, int):
        return f"i{int(key)}"
    if isinstance(key, float):
        return f"i{int(key)}" if key.is_integer() else f"f{key!r}"
    if isinstance(key, bytes):
        return f"y{key.hex()}"
    if key is None:
        return "n"
    if isinstance(key, tuple):
        return f"({','.join(map(_canonical, key))})"
    raise TypeError(
        f"the key {key!r} cannot be shared between processes: return text, a number, bytes or a"
        " tuple of these"
    )
