"""A request as the dashboard sees it: what `allow` and `operate` are given to decide by."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl

from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust

_MOST_FIELDS: Final = 100
_LONGEST: Final = 16_384
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

    @property
    def query(self) -> Mapping[str, str]:
        """What is behind the question mark; of several of one name, the last."""
        text = self.scope.get("query_string", b"")[:_LONGEST].decode("latin-1")
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
