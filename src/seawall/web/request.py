"""A request as the parts of the edge and key functions (`by=`) see it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from seawall.context import Scope as DeadlineScope
from seawall.errors import AmbiguousHeader
from seawall.web.trust import Trust
from seawall.wire.idempotency import IDEMPOTENCY_HEADER, read_key

if TYPE_CHECKING:
    from seawall.web.edge.dispatch import Dispatch

INCOMING: Final = "seawall.incoming"
"""Key in the scope of the request as the edge saw it, for inner layers."""

_KEY_HEADER: Final = IDEMPOTENCY_HEADER.lower().encode()
_SHOWN: Final = 80


def route_path(scope: Mapping[str, Any]) -> str:
    """Return the path that routes are matched against, exactly as Starlette computes it."""
    path: str = scope["path"]
    root = scope.get("root_path")
    if not root or not path.startswith(root):
        return path
    below = path[len(root) :]
    return below if not below or below[0] == "/" else path


def path_below_root(scope: Mapping[str, Any]) -> str:
    """Return the path below the root path, which servers and mounts put in front of it."""
    path: str = scope["path"]
    root = scope.get("root_path")
    if root:
        root = root.rstrip("/")
        if path == root:
            return "/"
        if path.startswith(f"{root}/"):
            return path[len(root) :]
    return path


class Incoming:
    """An HTTP request (or a websocket handshake) before it reaches the app.

    `scope` is the server's own; `headers` its raw list, names in lower case. `client` is the
    trusted address, never one that an untrusted caller sent.
    """

    __slots__ = ("_client", "_deadline", "headers", "named", "scope", "trust")
    # `_client` is unset until it is first used.

    waited: float = 0.0
    """Seconds that the request has waited in the server's queue, where the edge can know."""

    def __init__(self, scope: MutableMapping[str, Any], trust: Trust) -> None:
        """Wrap the request of `scope`, whose peer is trusted as far as `trust` says."""
        self.scope = scope
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.named: dict[bytes, bytes] = dict(self.headers)
        """The headers by name; of several with one name, the last."""
        self.trust = trust
        self._deadline: DeadlineScope | None = None
        """The deadline that the edge gave the request, in the context of its handler."""

    def __repr__(self) -> str:
        # The caller controls both: truncate them, and escape control characters.
        asked = f"{self.method[:_SHOWN]} {self.path[:_SHOWN]}"
        return f"<Incoming {asked!r}>"

    def header(self, name: str | bytes) -> str | None:
        """Return a header's value; None if it is absent.

        Several lines with the same value count as one. Different values raise `AmbiguousHeader`,
        which is answered with 400: the app might use one of them, and a limit another. The lines of
        a cookie are joined to one list (HTTP/2 splits it).
        """
        value = self.named.get(name)  # type: ignore[arg-type]
        if value is None:
            name = (name.encode() if isinstance(name, str) else name).lower()
            value = self.named.get(name)
            if value is None:
                return None
        if len(self.named) != len(self.headers):  # there are duplicates: check this one
            given = dict.fromkeys(value for key, value in self.headers if key == name)
            if name == b"cookie":
                value = b"; ".join(given)
            elif len(given) > 1:
                raise AmbiguousHeader(f"header {name!r}: given more than once, with other values")
        return value.decode("latin-1")

    def replace_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Replace the headers, here and for the app."""
        self.headers = self.scope["headers"] = headers
        self.named = dict(headers)

    @property
    def peer(self) -> str | None:
        """The address of the connection's peer; None for a unix socket, "" if unknown."""
        client = self.scope.get("client")
        if client:
            address = client[0]
            return address if isinstance(address, str) else ""
        # A network peer that disconnected immediately has no address either, and must not be
        # trusted. Only a server that listens on no port has peers on a unix socket.
        server = self.scope.get("server")
        return None if not server or server[1] is None else ""

    @property
    def client(self) -> str:
        """The client's address as limits count it: IPv4, the /64 of IPv6, "unix"."""
        try:
            return self._client
        except AttributeError:
            self._client: str = self.trust.client_address(self.peer, self.headers)
            return self._client

    @property
    def method(self) -> str:
        """The method, such as "GET"; "WEBSOCKET" for the handshake of a websocket."""
        method: str = self.scope.get("method", "WEBSOCKET")
        return method

    @property
    def path(self) -> str:
        """The requested path: the caller controls it, so do not use it as a key or label."""
        path: str = self.scope["path"]
        return path

    @property
    def _dispatch(self) -> Dispatch | None:
        """Lookup of the route in the app's router; None if the app has no visible router."""
        return None

    @property
    def route(self) -> str | None:
        """The template of the request's route, such as "/orders/{id}"; None if it has none.

        Before routing, the app's router determines it, if the edge is that of a Starlette or
        FastAPI app.
        """
        route = self.scope.get("route")
        dispatch = self._dispatch
        if dispatch is not None and not hasattr(route, "endpoint"):  # none yet, or a mount
            found = dispatch.ask(self.scope).template
            if found:
                return found
        fastapi = self.scope.get("fastapi")
        if isinstance(fastapi, dict):  # here a route lacks the prefix of its router
            included = fastapi.get("effective_route_context")
            if getattr(included, "original_route", None) is route:
                route = included
        template = getattr(route, "path", None)
        return template if isinstance(template, str) else None

    @property
    def idempotency_key(self) -> str | None:
        """The idempotency key of this request, if it has exactly one valid key.

        It is not put into the context: see `docs/web/wire.md`.
        """
        lines = [value for name, value in self.headers if name == _KEY_HEADER]
        return read_key(lines[0].decode("latin-1")) if len(lines) == 1 else None
