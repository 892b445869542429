"""A request as the dashboard sees it, which `allow` and `operate` decide by; and its body.

Reading a body is limited in size and time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl

from seawall.dashboard.responses import RequestRefused
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust

LARGEST: Final = 16 * 1024
"""Maximum size of a body in bytes."""
WITHIN: Final = 10.0
"""Timeout in seconds for the whole body."""
_DIGITS: Final = 9
_MOST_FIELDS: Final = 100
_LONGEST: Final = 16_384
_LONGEST_QUERY: Final = 4096
"""Maximum number of bytes read: decoding as much as a server accepts takes milliseconds."""
_NOBODY_TRUSTED: Final = Trust()


class Visit(Incoming):
    """One request: `header(name)`, `cookies`, `query`, `client`, `path`, and the server's `scope`.

    `client` is the trustworthy address: that of the connection, unless the service has an edge
    which knows its proxies. Results of outer middleware about the caller (`scope["user"]`,
    `scope["session"]`) are in `scope`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> Visit:
        """Return the request of `scope`, with the trust settings of the edge around it."""
        seen = scope.get(INCOMING)
        return cls(scope, seen.trust if isinstance(seen, Incoming) else _NOBODY_TRUSTED)

    def __repr__(self) -> str:
        return f"<Visit {self.method[:16]!r} {self.path[:80]!r}>"

    def header(self, name: str | bytes) -> str | None:
        """Return a header's value; None if it is absent, or given more than once."""
        name = (name.encode() if isinstance(name, str) else name).lower()
        lines = [value for key, value in self.headers if key == name]
        return lines[0].decode("latin-1") if len(lines) == 1 else None

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters; the last one of each name."""
        text = self.scope.get("query_string", b"")[:_LONGEST_QUERY].decode("latin-1")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError:
            pairs = []
        return MappingProxyType(dict(pairs))

    @property
    def cookies(self) -> Mapping[str, str]:
        """The cookies; one that is given twice is omitted, since its origin is unknown."""
        found: dict[str, str] = {}
        twice: set[str] = set()
        for name, value in self.headers:
            if name != b"cookie":
                continue
            for part in value[:_LONGEST].decode("latin-1").split(";")[:_MOST_FIELDS]:
                key, _, said = part.strip().partition("=")
                if key in found:
                    twice.add(key)
                found[key] = said
        return MappingProxyType({key: said for key, said in found.items() if key not in twice})


async def json_body(visit: Visit, receive: Callable[[], Awaitable[Any]]) -> Any:
    """Parse the JSON of a request; raise `RequestRefused` if it is too large, slow or invalid."""
    length = visit.header("content-length") or "0"
    # Its length is checked first: parsing a number of a million digits takes long.
    if not (length.isascii() and length.isdigit()) or len(length) > _DIGITS:
        raise _too_large()
    if int(length) > LARGEST:
        raise _too_large()
    try:
        async with asyncio.timeout(WITHIN):
            body = await _all(receive)
    except TimeoutError:
        raise RequestRefused(408, "Request timeout", "The request took too long.") from None
    try:
        return json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise RequestRefused(400, "Bad request", "Write JSON.") from None


async def _all(receive: Callable[[], Awaitable[Any]]) -> bytes:
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused(400, "Bad request", "The request ended early.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST:
            raise _too_large()
    return body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise if a name occurs twice, which other parsers may read differently."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is there twice")
    return fields


def _too_large() -> RequestRefused:
    return RequestRefused(413, "Content too large", f"Write at most {LARGEST} bytes.")
