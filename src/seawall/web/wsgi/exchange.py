"""One request under WSGI: its environ as the parts of the edge see it, and its response.

Promises:

- Every gate that was entered is left exactly once: with the end of the body, when the server closes
  it, or when the app raises.
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
from contextvars import copy_context
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from seawall.context import end_scope
from seawall.web.asgi_types import Headers
from seawall.web.edge.degradation_report import write_degraded
from seawall.web.edge.held_request import EdgeState, HeldRequest
from seawall.web.request import INCOMING
from seawall.web.wsgi.arrivals import waited

if TYPE_CHECKING:
    from types import TracebackType

    from seawall.runtime.degradation import Degradations
    from seawall.web.wsgi.edge import Edge

Environ = dict[str, Any]
Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]
ExcInfo = tuple[type[BaseException], BaseException, "TracebackType | None"]
TextHeaders = list[tuple[str, str]]

_CONTENT: Final = {"CONTENT_TYPE": b"content-type", "CONTENT_LENGTH": b"content-length"}
_MOST_NAMES: Final = 1000


class Exchange(HeldRequest):
    """One request in a WSGI edge, and the progress of its response."""

    __slots__ = (
        "around",  # the request as an edge around this one sees it
        "context",  # the context in which all of the app's code runs
        "degraded",  # the header for degraded parts, and their collector, if they are reported
        "environ",
        "over",  # whether the request has ended
        "started",  # whether a part of the body was passed to the server
        "to",  # the server's `start_response`
        "tokens",  # state for `Inbound.undo`
        "waited",  # seconds that it waited in the server's queue
    )

    def __init__(self, environ: Environ, to: StartResponse, edge: EdgeState) -> None:
        """Start with no gates; pass the response `to` the server."""
        self.environ = environ
        super().__init__(scope_of(environ), edge.trust)
        self._edge = edge
        self.to = to
        self.context = copy_context()
        self.answered_at = 0.0
        self.status = 0
        self.entered = self.left = self.started = self.over = False
        self.gates = ()
        self.granted = None
        self.more_headers = None
        self.around: Any = environ.get(INCOMING)
        if self.around is not None:
            self.scope[INCOMING] = self.around
        self.degraded: tuple[str, Degradations] | None = None
        self.tokens: Any = None
        self.waited = waited(environ, self)

    @property
    def has_started(self) -> bool:
        """Whether a part of the body was sent: before, the server takes another response."""
        return self.started

    def replace_headers(self, headers: Headers) -> None:
        """Replace the headers, here and for the app."""
        super().replace_headers(headers)
        environ = self.environ
        for name in [key for key in environ if _name_of(key) is not None]:
            del environ[name]
        for raw, value in headers:
            text = raw.decode("latin-1").upper().replace("-", "_")
            environ[text if text in _CONTENT else f"HTTP_{text}"] = value.decode("latin-1")

    def start_response(
        self, status: str, headers: TextHeaders, exc_info: ExcInfo | None = None
    ) -> Write:
        """Start the response, or replace one that has not been sent yet; for the app."""
        self.status = int(status[:3])
        more: TextHeaders = []
        if self.more_headers is not None:
            more += text_headers(self.more_headers())
        if self.degraded is not None and self.degraded[1]:
            name, seen = self.degraded
            more.append((name, write_degraded(seen)))
        if more:
            headers = [*headers, *more]
        write = self.to(status, headers, exc_info) if exc_info else self.to(status, headers)

        def write_part(part: bytes) -> object:
            self.note_part(part)
            return write(part)

        return write_part

    def note_part(self, part: bytes) -> None:
        """Note that `part` of the body goes to the server; the first one ends the deadline."""
        if part and not self.started:
            self.started = True
            self.answered_at = self._edge.clock()
            if self._deadline is not None:
                end_scope(self._deadline)


class Body:
    """The body of a response, as the server reads it."""

    __slots__ = ("_close", "_edge", "_exchange", "_parts")

    def __init__(self, edge: Edge, exchange: Exchange, parts: Iterable[bytes]) -> None:
        """Read from `parts`, and close it at the end."""
        self._edge = edge
        self._exchange = exchange
        self._close: Callable[[], object] | None = getattr(parts, "close", None)
        self._parts: Iterator[bytes] | None = exchange.context.run(iter, parts)

    def __iter__(self) -> Body:
        return self

    def __next__(self) -> bytes:
        exchange = self._exchange
        parts = self._parts
        if parts is None:
            raise StopIteration
        try:
            part = exchange.context.run(next, parts, None)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            self._parts = None
            return self._edge._fail(exchange, error)
        if part is None:
            self._parts = None
            self._edge._finish(exchange)
            raise StopIteration
        if part and not exchange.started:
            exchange.note_part(part)
        return part

    def close(self) -> None:
        """Close the app's body and end the request: called by the server, in any case."""
        close, self._close, self._parts = self._close, None, None
        try:
            if close is not None:
                self._exchange.context.run(close)
        finally:
            self._edge._release(self._exchange)


def scope_of(environ: Environ) -> dict[str, Any]:
    """Return the request as an ASGI scope, which is the form that the parts of the edge read.

    Functions of the user, such as `classify`, find the environ in it.
    """
    root, below = environ.get("SCRIPT_NAME", ""), environ.get("PATH_INFO", "")
    path = f"{root}{below}" or "/"
    if not path.isascii():
        path = path.encode("latin-1").decode("utf-8", "replace")
        root = root.encode("latin-1").decode("utf-8", "replace")
    headers = [
        (name, value.encode("latin-1"))
        for key, value in environ.items()
        if (name := _name_of(key)) is not None and value
    ]
    address = environ.get("REMOTE_ADDR")
    return {
        "type": "http",
        "method": environ["REQUEST_METHOD"],
        "path": path,
        "root_path": root,
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": headers,
        "client": (address, 0) if address else None,
        "environ": environ,
        "server": None if not address and _on_unix_socket(environ) else ("", 0),
    }


def _on_unix_socket(environ: Environ) -> bool:
    """Return whether the server listens on a unix socket; only gunicorn tells."""
    connection = environ.get("gunicorn.socket")
    return connection is not None and connection.family == socket.AF_UNIX


@lru_cache(maxsize=_MOST_NAMES)
def _name_of(key: str) -> bytes | None:
    """Return the name of the header that a key of the environ stands for; None if it is none."""
    if key.startswith("HTTP_"):
        return key[5:].replace("_", "-").lower().encode("latin-1")
    return _CONTENT.get(key)


def text_headers(headers: Headers) -> TextHeaders:
    """Return headers in the form of WSGI."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def send(to: StartResponse, status: int, headers: Headers, *, again: bool = False) -> None:
    """Start a response of the edge's own; `again` while an exception of the app is handled."""
    line = f"{status} {HTTPStatus(status).phrase}"
    if again:
        to(line, text_headers(headers), sys.exc_info())
    else:
        to(line, text_headers(headers))
