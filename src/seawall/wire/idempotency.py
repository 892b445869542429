"""The idempotency key of a request (draft-ietf-httpapi-idempotency-key-header-07)."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

from seawall.wire.structured import read_string, string
from seawall.wire.text import text_of

IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
"""Key of the effect, in quotes or bare: 1 to 255 visible ASCII characters."""
REPLAYED_HEADER: Final = "Idempotent-Replayed"
"""Marks a response as that of an earlier request with the same key, which will not change."""
IN_FLIGHT: Final = 409
"""Status, with a Retry-After, while the first request with the same key is in progress."""
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


def read_key(value: str | bytes) -> str | None:
    """Return the key, quoted or bare; None unless it has 1 to 255 visible characters."""
    text = text_of(value)
    if text is not None and text.startswith('"'):
        text = read_string(text)
    return text if text is not None and _KEY.fullmatch(text) else None


def is_replayed(value: str | None) -> bool:
    """Return whether the value of Idempotent-Replayed marks a replayed response."""
    return value is not None and value.strip().lower() in ("true", "?1")


def write_key(key: str) -> str:
    """Return the header's value: the key in quotes.

    A key that cannot be sent unchanged (longer than 255 characters, blanks, other alphabets) is
    sent as its SHA-256: the same key yields the same text in every attempt.
    """
    if not _KEY.fullmatch(key):
        key = sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return string(key)
