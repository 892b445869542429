"""One request under WSGI: its environ as the parts of the edge see it, and its response.

Promises:

- Every gate that was entered is left exactly once: with the end of the body, when the server closes
  it, or when the app raises. A body that a middleware around the edge drops without closing it is
  closed when it is freed.
- All of the app's code for a request, the steps of its body too, runs in one context, which ends
  with the request: the thread goes on to serve others.
- A list or tuple is a complete body: its gates are left before it is sent. Any other body holds
  them until it ends or is closed. A file that the server sends by itself (`wsgi.file_wrapper`)
  holds none.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, copy_context
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

from seawall.web.asgi_types import Headers
from seawall.web.edge import inbound
from seawall.web.edge.edge_request import EdgeRequest
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust
from seawall.web.wsgi.queue_wait import queue_wait

if TYPE_CHECKING:
    from types import TracebackType

    from seawall.web.wsgi.edge import Edge

T = TypeVar("T")
Environ = dict[str, Any]
Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]
ExcInfo = tuple[type[BaseException], BaseException, "TracebackType | None"]
TextHeaders = list[tuple[str, str]]

_CONTENT: Final = {"CONTENT_TYPE": b"content-type", "CONTENT_LENGTH": b"content-length"}
_MOST_NAMES: Final = 1000
_ANY_SERVER: Final = ("", 0)
INBOUND_KEYS: Final = frozenset(
    f"HTTP_{name.decode().upper().replace('-', '_')}" for name in inbound.KNOWN
)
"""Keys of the headers that `Inbound` reads."""
_SINGLE_VALUED: Final = INBOUND_KEYS - {"HTTP_BAGGAGE"}
"""Those that have one value. A server joins the lines of a repeated header with commas."""

PRESERVE_CONTEXT: Final = "werkzeug.debug.preserve_context"
"""Key of Flask's test client and of werkzeug's debugger. They take over the contexts that Flask has
entered, which must be left in the context in which they were entered."""


class _ThreadContext:
    """Stands for the context of the server's thread."""

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` without another context."""
        return function(*args)


_THREAD_CONTEXT: Final = _ThreadContext()


class WsgiRequest(EdgeRequest):
    """One request in a WSGI edge, and its response: the server reads the body from it."""

    # Class attributes are set in few requests, or late: each assignment costs.
    _parts: Iterator[bytes] | None = None  # the app's body, until it ends
    _close: Callable[[], object] | None = None
    """Function that closes the app's body; None if there is none, or it was called."""
    outer: Any = None
    """The request as an edge around this one sees it."""
    is_over = False
    """Whether the request has ended."""
    body_started = False
    """Whether a part of the body was passed to the server."""
    context_tokens: Any = None
    """State for `Inbound.undo`."""
    write: Write
    """What the server's `start_response` returned."""
    _edge: Edge

    def __init__(self, environ: Environ, start_response: StartResponse, edge: Edge) -> None:
        # Everything is set here and not by super(): each frame costs, too.
        self._edge = edge
        self.environ = environ
        self.scope = scope_of(environ)
        self.trust = edge._trust
        self._deadline = None
        self.server_start_response = start_response
        self.context: Context | _ThreadContext = (
            _THREAD_CONTEXT if PRESERVE_CONTEXT in environ else copy_context()
        )
        """The context in which all of the app's code runs."""
        self.body_started_at = 0.0
        self.status = 0
        self.admitted = self.has_left = False
        self.gates = ()
        self.granted = self.extra_headers = None
        if INCOMING in environ:
            self.outer = self.scope[INCOMING] = environ[INCOMING]
        waited = queue_wait(environ, self)
        if waited:
            self.waited = waited

    def __getattr__(self, name: str) -> Any:
        """Read the headers when they are first asked for: most requests need none of them."""
        if name == "headers":
            self.headers = self.scope["headers"] = headers = headers_of(self.environ)
            return headers
        if name == "named":
            self.named = named = dict(self.headers)
            return named
        raise AttributeError(name)

    @property
    def has_response_started(self) -> bool:
        """Whether a part of the body was sent: before, the server takes another response."""
        return self.body_started

    def replace_headers(self, headers: Headers) -> None:
        """Replace the headers, here and for the app."""
        super().replace_headers(headers)
        environ = self.environ
        for name in [key for key in environ if _header_name(key) is not None]:
            del environ[name]
        for raw, value in headers:
            text = raw.decode("latin-1").upper().replace("-", "_")
            environ[text if text in _CONTENT else f"HTTP_{text}"] = value.decode("latin-1")

    # The response, as the app makes it

    def start_response(
        self, status: str, headers: TextHeaders, exc_info: ExcInfo | None = None
    ) -> Write:
        """Start the response, or replace one that has not been sent yet."""
        self.status = int(status[:3])
        if self.extra_headers is not None:
            headers = [*headers, *map(_text_header, self.extra_headers())]
        start = self.server_start_response
        self.write = start(status, headers, exc_info) if exc_info else start(status, headers)
        return self.write_part

    def write_part(self, part: bytes) -> object:
        """Write a part of the body to the server: for apps that do not return it."""
        if part and not self.body_started:
            self._begin_body()
        return self.write(part)

    def _begin_body(self) -> None:
        """Note that the first part of the body goes to the server, which ends the deadline."""
        self.body_started = True
        self.body_started_at = self._edge._now()
        if self._deadline is not None:
            self._deadline[3] = None  # inlined copy of `end_scope()`

    # The body, as the server reads it

    def read_from(self, parts: Iterable[bytes]) -> WsgiRequest:
        """Return the body that reads from `parts`, and closes it at the end."""
        self._close = getattr(parts, "close", lambda: None)
        self._parts = self.context.run(iter, parts)
        return self

    def __iter__(self) -> WsgiRequest:
        return self

    def __next__(self) -> bytes:
        parts = self._parts
        if parts is None:
            raise StopIteration
        try:
            part = self.context.run(next, parts, None)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            self._parts = None
            return self._edge._fail(self, error)
        if part is None:
            self._parts = None
            self.leave(*self.verdict())
            raise StopIteration
        if part and not self.body_started:
            self._begin_body()
        return part

    def close(self) -> None:
        """Close the app's body and end the request: called by the server, in any case."""
        close, self._close, self._parts = self._close, None, None
        try:
            if close is not None:
                self.context.run(close)
        finally:
            self._edge._release(self)

    def __del__(self) -> None:
        if self._close is not None:
            self.close()


def scope_of(environ: Environ) -> dict[str, Any]:
    """Return the request as an ASGI scope, which is the form that the parts of the edge read.

    It is without the headers. Functions of the user, such as `classify`, find the environ in it.
    """
    root, path = environ.get("SCRIPT_NAME", ""), environ.get("PATH_INFO", "")
    if root or not path:
        path = f"{root}{path}" or "/"
    if not path.isascii():
        path = path.encode("latin-1").decode("utf-8", "replace")
        root = root.encode("latin-1").decode("utf-8", "replace")
    address, connection = environ.get("REMOTE_ADDR"), environ.get("gunicorn.socket")
    on_unix_socket = connection is not None and connection.family == socket.AF_UNIX
    return {
        "type": "http",
        "method": environ["REQUEST_METHOD"],
        "path": path,
        "root_path": root,
        "client": (address, 0) if address else None,
        "server": None if on_unix_socket and not address else _ANY_SERVER,
        "environ": environ,
    }


def headers_of(environ: Environ) -> Headers:
    """Return the headers of a request in the form of ASGI."""
    return [
        (name, line.encode("latin-1"))
        for key, value in environ.items()
        if (name := _header_name(key)) is not None and value
        for line in (map(str.strip, value.split(",")) if key in _SINGLE_VALUED else (value,))
    ]


def incoming_of(environ: Environ) -> Incoming:
    """Return a request that no edge has seen, without trust in any peer."""
    return Incoming({**scope_of(environ), "headers": headers_of(environ)}, Trust())


@lru_cache(maxsize=_MOST_NAMES)
def _header_name(key: str) -> bytes | None:
    """Return the name of the header that a key of the environ stands for; None if it is none."""
    if key.startswith("HTTP_"):
        return key[5:].replace("_", "-").lower().encode("latin-1")
    return _CONTENT.get(key)


@lru_cache(maxsize=_MOST_NAMES)
def _text_header(header: tuple[bytes, bytes]) -> tuple[str, str]:
    return header[0].decode("latin-1"), header[1].decode("latin-1")


def text_headers(headers: Headers) -> TextHeaders:
    """Return headers in the form of WSGI."""
    return [*map(_text_header, headers)]


def start_own_response(
    start: StartResponse, status: int, headers: Headers, *, again: bool = False
) -> None:
    """Start a response of the edge's own; `again` while an exception of the app is handled."""
    line = f"{status} {HTTPStatus(status).phrase}"
    if again:
        start(line, text_headers(headers), sys.exc_info())
    else:
        start(line, text_headers(headers))
