"""A transport that sends each request to one of several hosts; for httpx and httpx2.

It is written once for both libraries, and for plain and async clients: all it needs of a library is
in the request that it is handed. The request itself is never changed, since another attempt may be
under way with it: what is sent is a copy with another address.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakKeyDictionary

from seawall.clients._exchange_errors import as_library_error
from seawall.clients._upstream_hosts import Endpoint
from seawall.clients._upstream_picks import Pick
from seawall.errors import CircuitOpen

if TYPE_CHECKING:
    from seawall.clients.upstreams import Upstreams

    _Base = Any  # fits wherever a transport of httpx or httpx2 is asked for
else:
    _Base = object

KEPT: Final = 256
"""How many addresses are remembered: making one costs more than all the rest of a request here."""

HOST: Final = "seawall.host"
"""The extension of a response that tells which host gave it."""


class UpstreamTransport(_Base):  # type: ignore[misc]  # Any, for type checkers
    """Send requests to the hosts of `upstreams`, whatever host their URLs name.

    Path and query are kept, behind the path of the host's own URL if it has one. The `Host` header
    names the host that is asked, unless the user wrote another than the URL's.
    """

    def __init__(self, upstreams: Upstreams, transport: Any = None) -> None:
        """Send by `transport`, any of the library's own; by default a new one of its default kind.

        Place it inside a `GuardedTransport`: then each attempt is sent to another host.
        """
        pick = getattr(upstreams, "pick", None)
        if isinstance(upstreams, type) or not callable(pick):
            raise TypeError(f"UpstreamTransport({upstreams!r}): the first argument is an Upstreams")
        if transport is not None and not any(
            callable(getattr(transport, name, None))
            for name in ("handle_request", "handle_async_request")
        ):
            raise TypeError(f"transport={transport!r}: pass a transport, such as HTTPTransport()")
        upstreams._require_urls()
        self._upstreams = upstreams
        self._inner = transport
        self._made: dict[tuple[str, str], Any] = {}
        """Transports of the default kind, by library and name."""
        self._addresses: dict[tuple[str, str] | None, Any] = {}
        self._tried: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"UpstreamTransport({self._upstreams!r})"

    def handle_request(self, request: Any) -> Any:
        """Send a request to one of the hosts, and return the response."""
        inner = self._inner or self._default(request, "HTTPTransport")
        try:
            with self._upstreams.pick(tried=self._tried_by(request)) as pick:
                response = inner.handle_request(self._readdressed(request, pick))
                pick.answered(response)
                response.extensions[HOST] = pick.url
                return response
        except CircuitOpen as error:
            raise _told(error, request) from None

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request to one of the hosts, and return the response."""
        inner = self._inner or self._default(request, "AsyncHTTPTransport")
        try:
            async with self._upstreams.pick(tried=self._tried_by(request)) as pick:
                response = await inner.handle_async_request(self._readdressed(request, pick))
                pick.answered(response)
                response.extensions[HOST] = pick.url
                return response
        except CircuitOpen as error:
            raise _told(error, request) from None

    def _tried_by(self, request: Any) -> set[str]:
        """Return the hosts that this request was sent to before, to be added to.

        Attempts are copies of one request, made by a guard further out: what they have in common
        is the body.
        """
        try:
            return self._tried.setdefault(request.stream, set())
        except TypeError:  # a stream of the user's that cannot be remembered
            return set()

    def _readdressed(self, request: Any, pick: Pick) -> Any:
        before = request.url
        # With a query it is mostly used once, and may hold what should not be kept.
        key = None if before.query else (pick.url, str(before))
        after = self._addresses.get(key)
        if after is None:
            after = _moved(before, pick._endpoint)
            if key is not None:
                if len(self._addresses) >= KEPT:
                    self._addresses.clear()
                self._addresses[key] = after
        own, new = before.netloc, after.netloc
        headers = [
            (name, new if value == own and name.lower() == b"host" else value)
            for name, value in request.headers.raw
        ]
        return type(request)(
            request.method,
            after,
            headers=headers,
            stream=request.stream,
            extensions=request.extensions,
        )

    def _default(self, request: Any, name: str) -> Any:
        """Return a transport of the library that the request is of, made when first needed."""
        library = _library_of(request)
        known = self._made.get((library, name))
        if known is None:
            # Of two threads that are the first, one has made its own in vain.
            made = getattr(import_module(library), name)()
            known = self._made.setdefault((library, name), made)
        return known

    def close(self) -> None:
        """Close the transport inside; the hosts, which others may use too, stay as they are."""
        for inner in (self._inner, *self._made.values()):
            if hasattr(inner, "close"):
                inner.close()

    async def aclose(self) -> None:
        """Close the transport inside; the hosts, which others may use too, stay as they are."""
        for inner in (self._inner, *self._made.values()):
            if hasattr(inner, "aclose"):
                await inner.aclose()

    def __enter__(self) -> Self:
        if self._inner is not None:
            self._inner.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._inner is None:
            self.close()
        else:
            self._inner.__exit__(*raised)

    async def __aenter__(self) -> Self:
        if self._inner is not None:
            await self._inner.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._inner is None:
            await self.aclose()
        else:
            await self._inner.__aexit__(*raised)


def _library_of(request: Any) -> str:
    return type(request).__module__.partition(".")[0]


def _told(error: CircuitOpen, request: Any) -> Exception:
    """Return a refusal as an error of the library too, as a guarded transport does."""
    library = import_module(f"seawall.clients.{_library_of(request)}")._LIBRARY
    return as_library_error(error, library, request)


def _moved(url: Any, to: Endpoint) -> Any:
    changes: dict[str, Any] = {"scheme": to.scheme, "host": to.address, "port": to.port}
    if to.prefix:
        changes["raw_path"] = to.prefix.encode("ascii") + url.raw_path
    return url.copy_with(**changes)
