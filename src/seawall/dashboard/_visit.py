"""A request as the dashboard sees it: what `allow` and `operate` are given to decide by; its body.

Of a body no more is read, and not longer, than is needed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl

from seawall.dashboard._answers import Refusal
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust

LARGEST: Final = 16 * 1024
"""Bytes of a body."""

WITHIN: Final = 10.0
"""Seconds in which all of it has to be there."""

_DIGITS: Final = 9
_MOST_FIELDS: Final = 100
_LONGEST: Final = 16_384
_LONGEST_QUERY: Final = 4096
"""Bytes that are read: to decode as many as a server lets through takes milliseconds."""

_NOBODY_TRUSTED: Final = Trust()


class Visit(Incoming):
    """One request: `header(name)`, `cookies`, `query`, `client`, `path`, and the server's `scope`.

    `client` is the address that may be trusted: that of the connection, unless the service has an
    edge which knows its proxies. What a middleware further out has found out about the caller
    (`scope["user"]`, `scope["session"]`) is in `scope`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> Visit:
        """Return the request of `scope`, with as much trust as the edge around it has."""
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
        """What is behind the question mark; of several of one name, the last."""
        text = self.scope.get("query_string", b"")[:_LONGEST_QUERY].decode("latin-1")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError:
            pairs = []
        return MappingProxyType(dict(pairs))

    @property
    def cookies(self) -> Mapping[str, str]:
        """The cookies; one that is given twice is left out, since nobody knows who set which."""
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


# Bodies


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
        return json.loads(body, object_pairs_hook=_once)
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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of which nobody can read something else than somebody before did."""
    told = dict(pairs)
    if len(told) != len(pairs):
        raise ValueError("a name is there twice")
    return told


def _too_large() -> Refusal:
    return Refusal(413, "Content too large", f"Write at most {LARGEST} bytes.")
