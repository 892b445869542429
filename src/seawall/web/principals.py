"""Principals: the party that a request belongs to, for `limit(by=...)`, and its key.

A principal is called with the `Incoming` request and returns text, bytes, an integer, a UUID, an
Enum or a tuple of these, or None if the party is unknown. Other types are refused: a new object for
each request, such as a coroutine, would be a new limit each time.

None from `user(...)` means an anonymous request: its limit does not apply, unless `otherwise=`
names another principal. None from any other principal counts by address: not in one bucket with all
other unknown callers, where one could lock out the rest, and not without a limit.

Different principals never share a key: addresses begin with "@", texts with "=", other types with a
letter and "=", those of an `otherwise=` with "~", hashes with "#". An API key is hashed before it
is stored, and so is every text of more than `LONGEST` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar

from seawall import _checks as check
from seawall.context import tenant_var
from seawall.web.routes import Routes

if TYPE_CHECKING:
    from seawall.web.request import Incoming

__all__ = ["address_and_route", "api_key", "user"]

Principal = Callable[["Incoming"], Hashable]
"""Function that returns the principal of a request; None if it is unknown."""

LONGEST: Final = 64
"""Maximum number of characters of a key. Longer texts are hashed, to one length."""

_PERSON: Final = b"seawall-key"
_HEADER: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)

F = TypeVar("F", bound=Callable[..., Any])


def user(read: Principal) -> Principal:
    """Distinguish users by the result of `read(incoming)`: an authenticated id, or None.

    A limit by user does not apply to an anonymous request, unless it is written as
    `RequestLimit(..., otherwise="address")`.
    """
    plain_function("user(...)", read)
    return _Principal("user", f"user({getattr(read, '__qualname__', read)})", read)


def api_key(header: str = "x-api-key", *, known: Callable[[str], bool] | None = None) -> Principal:
    """Distinguish the holders of API keys by that header; only a hash of the key is kept.

    A key for which `known(key)` is false is ignored: its caller counts as one without a key.
    Without `known`, a caller that invents a key for each request gets a new limit each time; add a
    limit by address then.
    """
    if not isinstance(header, str) or not _HEADER.fullmatch(header.strip()):
        raise ValueError(f"header={header!r}: write a header's name, such as 'x-api-key'")
    header = header.strip().lower()
    name = header.encode("ascii")
    if known is not None:
        plain_function("known", known)

    def read(incoming: Incoming) -> str | None:
        given = incoming.header(name)
        if not given or (known is not None and not known(given)):
            return None
        return digest(given)

    text = f"api_key({header!r}{', known=...' if known else ''})"
    return _Principal("api-key", text, read)


def address_and_route(*routes: str) -> Principal:
    """Distinguish addresses at each of these routes: "/search", "/orders/{id}", "/files/*".

    A request for none of them counts as "other". A path itself never becomes a key, since callers
    can invent paths.
    """
    listed = Routes(routes)

    def read(incoming: Incoming) -> str:
        # Within a route's own limit, routing is complete. At the edge only the listed routes count.
        route = incoming.route if incoming._dispatch is None else None
        if route is None:
            route = listed.of(incoming.scope, incoming._dispatch)
        return f"{incoming.client} {route}"

    text = f"address_and_route({', '.join(map(repr, listed.templates))})"
    return _Principal("address-route", text, read)


class _Principal:
    """A principal of this module, with a name for its limits and a text for `repr`."""

    def __init__(self, limit_name: str, text: str, read: Principal) -> None:
        self.limit_name = limit_name
        self.read = read
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __call__(self, incoming: Incoming, /) -> Hashable:
        return self.read(incoming)


Reader = Callable[["Incoming"], str | None]
"""Function that returns the key of a request's bucket; None: the limit does not apply to it."""


def key_of(principal: Principal, otherwise: Reader, incoming: Incoming) -> str | None:
    """Return the key of a request's bucket: from `principal`, or if None from `otherwise`."""
    found = principal(incoming)
    if type(found) is not str:
        if found is None:
            return otherwise(incoming)
        if not isinstance(found, str):
            key = _written(found)
            return key if len(key) <= LONGEST else digest(key)
        found = str.__str__(found)  # bypasses a `__str__` of a subclass
    if found:
        return "=" + found if len(found) <= LONGEST else digest("=" + found)
    return otherwise(incoming)


def key_reader(principal: Principal, otherwise: Principal | None = None) -> Reader:
    """Return `key_of` for one principal, without extra frames, as it runs for each request."""
    if principal is WORDS["address"]:
        return _address_key
    read = principal
    others: Reader = _address_key
    if isinstance(principal, _Principal):
        read = principal.read
        if principal.limit_name == "user":
            others = _nobody
    if otherwise is not None:
        others = key_reader(otherwise)
        if others is not _address_key:
            others = partial(_other_key, others)
    return partial(key_of, read, others)


def _nobody(_incoming: Incoming) -> None:
    return None


def _other_key(read: Reader, incoming: Incoming) -> str | None:
    key = read(incoming)
    return key if key is None or key[0] == "@" else f"~{key}"


def _address_key(incoming: Incoming) -> str:
    try:  # for most requests, inlined copy of `incoming.client`
        return incoming.trust.direct_keys[incoming.scope["client"][0]]
    except (KeyError, TypeError):
        return "@" + incoming.client


def _written(found: object) -> str:
    """Return `found` as text: the same in every process, and unique for each value."""
    from uuid import UUID

    if isinstance(found, str):
        return "=" + str.__str__(found)
    if isinstance(found, Enum):
        return f"e={type(found).__qualname__}.{found.name}"
    if isinstance(found, int):
        return f"i={int(found):x}"  # hexadecimal has no limit on the number of digits
    if isinstance(found, bytes):
        return f"b={bytes(found).hex()}"
    if isinstance(found, tuple):
        parts = [_written(part) for part in found]
        return "t=" + "".join(f"{len(part)}:{part}" for part in parts)
    if isinstance(found, UUID):
        return f"u={found.int:x}"
    raise TypeError(
        f"a limit's by= returned {type(found).__name__}: return text, bytes, a whole number, a"
        " UUID, an Enum, a tuple of these, or None for somebody unknown"
    )


def plain_function(name: str, function: F) -> F:
    """Return `function` if it is a plain function, as the edge cannot await it here; or raise."""
    advice = (
        "find out what has to be awaited before the edge, and read it from the request's scope here"
    )
    return check.plain_function(name, function, advice)


def digest(secret: str) -> str:
    """Return a hash of `secret`: the same in every process, and not reversible."""
    data = secret.encode("utf-8", "surrogatepass")
    return "#" + blake2b(data, digest_size=16, person=_PERSON).hexdigest()


WORDS: Final[dict[str, Principal]] = {
    "address": _Principal("address", "'address'", lambda _incoming: None),
    "tenant": _Principal("tenant", "'tenant'", lambda _incoming: tenant_var.get()),
}
"""The trusted client address, and the tenant of the context, which only trusted callers set."""


def principal_of(by: str | Principal | None, name: str = "by") -> Principal | None:
    """Return the principal for `by=` (or the argument `name`); None: all requests together."""
    if isinstance(by, str):
        return WORDS[check.choice(name, by, WORDS)]
    if by is not None and not callable(by):
        raise TypeError(f"{name}={by!r}: write 'address', 'tenant', user(...) or a function")
    return None if by is None else plain_function(name, by)


def name_for(principal: Principal | None) -> str | None:
    """Return the default name of a limit for `principal`; None if it has none."""
    return "global" if principal is None else getattr(principal, "limit_name", None)
