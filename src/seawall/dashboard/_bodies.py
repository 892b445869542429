"""The body of a request: JSON, of which no more is read, and not longer, than is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from seawall.dashboard._answers import Refusal
from seawall.dashboard._visit import Visit

LARGEST: Final = 16 * 1024
WITHIN: Final = 10.0
"""Seconds in which all of it has to be there."""

_DIGITS: Final = 9


async def json_body(visit: Visit, receive: Callable[[], Awaitable[Any]]) -> Any:
    """Return what the JSON of a request says; `Refusal` if it is too large, too slow, or none."""
    length = visit.header("content-length") or "0"
    # Compared as text first: a number of a million digits takes long to read.
    if not (length.isascii() and length.isdigit()) or len(length) > _DIGITS:
        raise _too_large()
    if int(length) > LARGEST:
        raise _too_large()
    try:
        async with asyncio.timeout(WITHIN):
            body = await _all(receive)
    except TimeoutError:
        raise Refusal(408, "Request timeout", "The request took too long.") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "Bad request", "Write JSON.") from None


async def _all(receive: Callable[[], Awaitable[Any]]) -> bytes:
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "Bad request", "The request ended early.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST:
            raise _too_large()
    return body


def _too_large() -> Refusal:
    return Refusal(413, "Content too large", f"Write at most {LARGEST} bytes.")
