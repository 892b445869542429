"""Signatures of webhooks after the Standard Webhooks specification, version 1.

Promises:

- Id, time of sending and body are signed together: nobody without the secret can change one of
  them, or give a message another id.
- A message older than `tolerance`, or from the future, is refused. Within it, repeats have the same
  id: `Inbox.once` drops them.
- While a secret is replaced, a sender signs with both, and a receiver accepts either.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from hmac import compare_digest
from hmac import new as hmac
from time import time  # noqa: TID251 - senders and receivers compare it with each other's clock
from typing import Final, Protocol

from seawall import _checks as check
from seawall.errors import BadSignature

PREFIX: Final = "whsec_"
_FEWEST, _MOST = 24, 64
"""Bytes of a secret, as the specification wants them."""
_ID: Final = re.compile(r"[!-\-/-~]{1,255}")
"""Visible ASCII without the dot, which separates what is signed."""
_NUMBER: Final = re.compile(r"[0-9]{1,12}")
_LONGEST: Final = 4_096
"""Maximum characters of the header with the signatures."""
_WANTED: Final = f"write {PREFIX!r} and the base64 of {_FEWEST} to {_MOST} random bytes"
_NAMES: Final = ("webhook-id", "webhook-timestamp", "webhook-signature")


class HeaderItems(Protocol):
    """The headers of a request in any framework; those of Flask are not a Mapping."""

    def items(self) -> Iterable[tuple[str, str]]:
        """Return names and values."""


def sign_webhook(
    secret: str | Sequence[str], body: bytes, *, message_id: str, now: int | None = None
) -> dict[str, str]:
    """Return the three headers that sign `body`: webhook-id, -timestamp and -signature.

    A secret is `whsec_` and the base64 of 24 to 64 bytes. Several secrets allow rotation: the
    message is signed with each of them. `now` is the time of sending in seconds since the epoch.
    """
    sent = int(time()) if now is None else check.count("now", now, minimum=0)
    if not isinstance(message_id, str) or not _ID.fullmatch(message_id):
        raise ValueError(f"message_id={message_id!r}: write 1 to 255 ASCII characters, no dots")
    keys = secret_keys(secret)
    signatures = " ".join(_signature(key, message_id, sent, _bytes(body)) for key in keys)
    return dict(zip(_NAMES, (message_id, str(sent), signatures), strict=True))


def verify_webhook(
    secret: str | Sequence[str],
    headers: HeaderItems,
    body: bytes,
    *,
    tolerance: float = 300.0,
    now: float | None = None,
) -> str:
    """Return the id of the message, or raise `BadSignature` if it is forged, changed or too old.

    `body` is the bytes as they were received, before any parsing. Several secrets allow rotation:
    one of them is enough. The comparison takes constant time.
    """
    allowed = check.seconds("tolerance", tolerance)
    keys = secret_keys(secret)
    at = time() if now is None else check.at_least("now", now, 0)
    content = _bytes(body)
    message_id, sent, given = _read(headers)
    good = False
    for key in keys:
        wanted = _signature(key, message_id, sent, content).encode()
        for signature in given:
            good |= compare_digest(wanted, signature)
    if not good:
        raise BadSignature("signed by somebody else, or changed on its way")
    if abs(at - sent) > allowed:
        raise BadSignature(f"signed more than {allowed:g} s ago, or in the future")
    return message_id


def secret_keys(secret: str | Sequence[str]) -> tuple[bytes, ...]:
    """Return the bytes of each secret, or raise; no message shows one."""
    listed = secret if isinstance(secret, (list, tuple)) else (secret,)
    if not listed:
        raise ValueError("secret=[]: write the secret, or the new one and the old one")
    return tuple(map(_key, listed))


def _key(secret: object) -> bytes:
    if not isinstance(secret, str):
        raise TypeError(f"secret: {_WANTED}, not {type(secret).__name__}")
    text = secret.removeprefix(PREFIX).rstrip("=")
    try:
        key = b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not _FEWEST <= len(key) <= _MOST:
        raise ValueError(f"secret: {_WANTED}")
    return key


def _signature(key: bytes, message_id: str, sent: int, body: bytes) -> str:
    made = hmac(key, f"{message_id}.{sent}.".encode() + body, sha256).digest()
    return f"v1,{b64encode(made).decode()}"


def _read(headers: HeaderItems) -> tuple[str, int, list[bytes]]:
    """Return id, time and signatures; a header that is missing or there twice is unreadable."""
    items = getattr(headers, "items", None)
    if items is None:
        raise TypeError(f"headers: pass the request's headers, not {type(headers).__name__}")
    found: dict[str, str] = {}
    for name, value in items():
        if (known := str(name).lower()) in _NAMES:
            if known in found:
                raise BadSignature("no signature that can be read")
            found[known] = str(value)
    message_id, sent, signatures = (found.get(name, "") for name in _NAMES)
    if (
        not _ID.fullmatch(message_id)
        or not _NUMBER.fullmatch(sent)
        or str(int(sent)) != sent  # the signed text has no leading zeros
        or len(signatures) > _LONGEST
    ):
        raise BadSignature("no signature that can be read")
    return message_id, int(sent), [one.encode("utf-8", "replace") for one in signatures.split(" ")]


def _bytes(body: object) -> bytes:
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise TypeError(f"body: pass the bytes as they are sent, not {type(body).__name__}")
    return bytes(body)
