"""A transport that sends each request to one of several hosts; for httpx and httpx2.

One implementation serves both libraries, and sync and async clients: everything it needs of a
library is in the request. It never changes the request itself, since another attempt may be using
it: it sends a copy with another address.

The bodies of responses are watched. A host is done when the body is: a hundred open streams are
load, and a body that breaks off is a failure, however well it began. The outcome of a body is
reported once: at its end, when it is closed, or when it is garbage-collected.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from operator import call
from typing import TYPE_CHECKING, Any, Final, Self

from seawall.clients.http.bodies import StreamedBody, library_of, stream_class
from seawall.clients.http.httpx_family import TRIED_HOSTS
from seawall.clients.http.library import as_library_error
from seawall.clients.upstreams.hosts import Endpoint
from seawall.clients.upstreams.picks import Pick
from seawall.errors import CircuitOpen
from seawall.runtime.driver import Steps, adrive, drive

if TYPE_CHECKING:
    from seawall.clients.upstreams.upstreams import Upstreams

    _Base = Any  # accepted wherever a transport of httpx or httpx2 is expected
else:
    _Base = object

MOST_ADDRESSES: Final = 256
"""Maximum number of cached addresses: creating one costs more than the rest of a request here."""

CREATED: Final = 201
REDIRECTS: Final = range(300, 400)

HOST: Final = "seawall.host"
"""Extension of a response that names its host."""


class WatchedBody(StreamedBody):
    """The body of a response; reports its end to `pick`."""

    def __init__(self, stream: Any, pick: Pick) -> None:
        super().__init__(stream)
        self._pick = pick

    def _on_end(self, error: BaseException | None) -> None:
        self._pick._end(error)  # does nothing if it has ended


class UpstreamTransport(_Base):  # type: ignore[misc]  # Any, for type checkers
    """Transport that sends requests to the hosts of `upstreams`, whatever host their URLs name.

    Path and query are kept, behind the path of the host's own URL if it has one. The `Host` header
    names the chosen host, unless the user set another than the URL's.
    """

    def __init__(self, upstreams: Upstreams, transport: Any = None) -> None:
        """Send with `transport`, any of the library's own; by default a new one.

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
        self._default_transports: dict[tuple[str, str], Any] = {}
        """Transports of the default kind, by library and name."""
        self._addresses: dict[tuple[str, str] | None, Any] = {}

    def __repr__(self) -> str:
        return f"UpstreamTransport({self._upstreams!r})"

    def handle_request(self, request: Any) -> Any:
        """Send a request to one of the hosts, and return the response."""
        return drive(self._exchange(request, "HTTPTransport", "handle_request"), call)

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request to one of the hosts, and return the response."""
        steps = self._exchange(request, "AsyncHTTPTransport", "handle_async_request")
        return await adrive(steps, call)

    def _exchange(self, request: Any, default: str, handler: str) -> Steps[Any]:
        """Send a request with the `handler` of the inner transport, or of a `default` one."""
        library = import_module(library_of(request.__class__))
        send = self._sender(library, default, handler)
        pick = self._pick(request, library)
        try:
            yield pick.__enter__ if handler == "handle_request" else pick.__aenter__
        except CircuitOpen as error:
            guarded = import_module(f"seawall.clients.{library.__name__}")
            raise as_library_error(error, guarded._LIBRARY, request) from None
        try:
            sent = self._addressed_to_host(request, pick, library)
            response = yield partial(send, sent)
            return self._received(response, request, sent, pick, library)
        except BaseException as error:
            pick._end(error)
            raise

    def _pick(self, request: Any, library: Any) -> Pick:
        tried = request.extensions.get(TRIED_HOSTS)
        pick = self._upstreams.pick(tried=tried if isinstance(tried, set) else None)
        # Other errors come from the user's own body, or are bugs.
        pick._host_errors = (library.TransportError, OSError)
        return pick

    def _received(self, response: Any, request: Any, sent: Any, pick: Pick, library: Any) -> Any:
        """Record the head of a response; the request is over when its body is."""
        response.extensions[HOST] = pick.url
        rewrite_location(response, request.url, sent.url, pick._endpoint.prefix)
        pick.answered(response)
        if response.is_closed:  # there is no body, or it is complete
            pick._end(None)
        else:
            pick._begin_body()
            body = stream_class(WatchedBody, library.__name__)
            response.stream = body(response.stream, pick)
        return response

    def _addressed_to_host(self, request: Any, pick: Pick, library: Any) -> Any:
        before = request.url
        # A URL with a query is mostly used once, and may contain secrets.
        key = None if before.query else (pick.url, str(before))
        after = self._addresses.get(key)
        if after is None:
            after = _at_host(before, pick._endpoint)
            if key is not None:
                if len(self._addresses) >= MOST_ADDRESSES:
                    self._addresses.clear()
                self._addresses[key] = after
        own, new = before.netloc, after.netloc
        headers = [
            (name, new if value == own and name.lower() == b"host" else value)
            for name, value in request.headers.raw
        ]
        return library.Request(
            request.method,
            after,
            headers=headers,
            stream=request.stream,
            extensions=request.extensions,
        )

    def _sender(self, library: Any, default: str, name: str) -> Any:
        """Return the send function of the inner transport, or of a default one, made on demand."""
        inner = self._inner
        if inner is None:
            key = library.__name__, default
            inner = self._default_transports.get(key)
            if inner is None:
                # Of two concurrent first threads, one discards its own.
                inner = self._default_transports.setdefault(key, getattr(library, default)())
        send = getattr(inner, name, None)
        if send is None:
            raise TypeError(
                f"transport={inner!r}: this client needs one with {name}(), such as {default}()"
            )
        return send

    def close(self) -> None:
        """Close the inner transport; the hosts, which may be shared, stay usable."""
        for inner in (self._inner, *self._default_transports.values()):
            if hasattr(inner, "close"):
                inner.close()

    async def aclose(self) -> None:
        """Async twin of `close`."""
        for inner in (self._inner, *self._default_transports.values()):
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


def _at_host(url: Any, to: Endpoint) -> Any:
    changes: dict[str, Any] = {"scheme": to.scheme, "host": to.address, "port": to.port}
    if to.prefix:
        changes["raw_path"] = to.prefix.encode("ascii") + url.raw_path
    return url.copy_with(**changes)


def rewrite_location(response: Any, asked: Any, sent: Any, prefix: str) -> None:
    """Rewrite a `Location` at the chosen host to the host that the user requested.

    `asked` is the URL that the user wrote, `sent` the one that was sent. Otherwise a redirect would
    bypass the other hosts, and the client would treat it as another origin and drop the user's
    credentials.
    """
    if response.status_code not in REDIRECTS and response.status_code != CREATED:
        return
    location = response.headers.get("location")
    if location is None or not (prefix or "//" in location):
        return  # a relative URL fits both
    try:
        target = sent.join(location)
        own = (target.scheme, target.host, target.port) == (sent.scheme, sent.host, sent.port)
        path = target.raw_path.decode("ascii")
        if not own or not path.startswith(prefix) or path[len(prefix) :][:1] not in ("", "/", "?"):
            return
        rest = path[len(prefix) :]
        if not rest.startswith("/"):
            rest = f"/{rest}"
        back = asked.copy_with(
            userinfo=b"", raw_path=rest.encode("ascii"), fragment=target.fragment or None
        )
    except Exception:  # noqa: BLE001 - a host may send anything: leave it unchanged
        return
    response.headers["location"] = str(back)
