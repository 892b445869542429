"""Seawall in a server of aiohttp, in one line.

    edge = protect(app)

puts the edge around the app, with the same parts and defaults as `seawall.web.fastapi.protect`. The
edge speaks ASGI: a middleware of aiohttp shows it each request as a scope, and each response as the
messages that its start and its end would be. Two things stay aiohttp's own: a slow upload holds its
place, and a response that its client does not read is not cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Final, Unpack

try:
    from aiohttp import web
except ImportError as error:
    raise ImportError(
        "seawall.web.aiohttp needs aiohttp: pip install 'seawall[aiohttp]'"
    ) from error

from multidict import CIMultiDict

from seawall.web.asgi_types import Headers, Message, Receive, Scope, Send
from seawall.web.edge import Edge
from seawall.web.edge.edge import EdgeParts, default_edge

__all__ = ["protect"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST: Final = "seawall.aiohttp_request"
_SWITCHING: Final = 101


def protect(app: web.Application, **parts: Unpack[EdgeParts]) -> Edge:
    """Put the edge around `app` and return it; call this once, before the app runs.

    `parts` and their defaults are those of `seawall.web.fastapi.protect`.
    """
    if not isinstance(app, web.Application):
        raise TypeError(f"protect({app!r}): pass an Application of aiohttp; others take Edge(app)")
    if any(isinstance(one, _Middleware) for one in app.middlewares):
        raise RuntimeError("protect(): this app has an edge already")
    edge = default_edge(_serve, **parts)
    edge._sends_at_once = False  # aiohttp sends what the middleware returns
    app.middlewares.insert(0, _Middleware(edge))
    app.on_response_prepare.append(_started)
    app.cleanup_ctx.append(_Lifespan(edge))
    return edge


class _Middleware:
    """The middleware around all others: it hands requests to the edge."""

    __middleware_version__ = 1  # as `web.middleware` marks a function

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        handled = _EdgeRequest(request, handler)
        token = _current.set(handled)
        try:
            await self._edge(handled.scope, _receive, handled.write)
        finally:
            _current.reset(token)
        return handled.result()


class _EdgeRequest:
    """A request of aiohttp as the edge sees it, and its response."""

    def __init__(self, request: web.Request, handler: Handler) -> None:
        self._request = request
        self._handler = handler
        self._headers: Headers = [(name.lower(), value) for name, value in request.raw_headers]
        self._response: web.StreamResponse | None = None
        self._send: Send | None = None
        self._answer: Message | None = None
        self._body = b""
        upgrade = request.headers.get("Upgrade", "").lower() == "websocket"
        self._kind = "websocket" if upgrade else "http"
        self.scope = _scope(request, self._kind, self._headers)
        self.scope[_REQUEST] = self

    async def serve(self, send: Send) -> None:
        """Call the handler, and report its response to the edge."""
        self._send = send
        request = self._request
        if self.scope["headers"] != self._headers:  # the edge believes less than what came
            given = [(name.decode(), _text(value)) for name, value in self.scope["headers"]]
            request = request.clone(headers=CIMultiDict(given))
        try:
            response = await self._handler(request)
        except web.HTTPException as raised:  # a response, too
            response = raised
        if self._response is None:
            await self.start(response)
        self._send = None
        if self._kind == "http":
            await send({"type": "http.response.body", "body": b""})

    async def start(self, response: web.StreamResponse) -> None:
        """Report the start of a response; the edge may add headers."""
        if self._send is None or self._response is not None:
            return
        self._response = response
        message: Message = {"status": response.status, "headers": []}
        if self._kind == "http":
            message["type"] = "http.response.start"
        elif response.status == _SWITCHING:
            message["type"] = "websocket.accept"
        else:
            message["type"] = "websocket.http.response.start"
        await self._send(message)

    async def write(self, message: Message) -> None:
        """Take a message of the edge: about the handler's response, or a response of its own."""
        if message["type"].endswith("body"):
            self._body += message.get("body", b"")
        elif self._response is None:
            self._answer = message
        else:
            _add(self._response, message.get("headers", ()))

    def result(self) -> web.StreamResponse:
        """Return the response, or raise it if it was raised."""
        if self._response is None:
            answer = self._answer or {}  # without a status: a closed handshake
            refusal = web.Response(status=answer.get("status", 403), body=self._body)
            _add(refusal, answer.get("headers", ()))
            return refusal
        if isinstance(self._response, web.HTTPException):
            raise self._response
        return self._response


class _Lifespan:
    """Runs the edge's lifespan for as long as the app runs: warm-up, signals, draining."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, _app: web.Application) -> AsyncIterator[None]:
        orders: asyncio.Queue[Message] = asyncio.Queue()
        replies: asyncio.Queue[Message] = asyncio.Queue()
        scope: Scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        task = asyncio.create_task(self._edge(scope, orders.get, replies.put))
        try:
            for order in ("startup", "shutdown"):
                orders.put_nowait({"type": f"lifespan.{order}"})
                reply = await replies.get()
                if reply["type"] != f"lifespan.{order}.complete":
                    raise RuntimeError(reply.get("message", f"the edge failed at {order}"))
                if order == "startup":
                    yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _serve(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve as the app inside the edge."""
    if scope["type"] != "lifespan":
        await scope[_REQUEST].serve(send)
        return
    for order in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{order}.complete"})


async def _started(_request: web.Request, response: web.StreamResponse) -> None:
    """Hear of a response that a handler has started itself, before its headers are sent."""
    handled = _current.get()
    if handled is not None:
        await handled.start(response)


_current: ContextVar[_EdgeRequest | None] = ContextVar("_current", default=None)


async def _receive() -> Message:
    return {"type": "http.disconnect"}  # handlers read from aiohttp, not from here


def _scope(request: web.Request, kind: str, headers: Headers) -> Scope:
    peer = request.transport.get_extra_info("peername") if request.transport else None
    schemes = ("http", "https") if kind == "http" else ("ws", "wss")
    return {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": f"{request.version.major}.{request.version.minor}",
        "method": request.method,
        "scheme": schemes[request.secure],
        "path": request.path,
        "raw_path": request.rel_url.raw_path.encode(),
        "query_string": request.rel_url.raw_query_string.encode(),
        "root_path": "",
        "headers": headers,
        "client": tuple(peer[:2]) if isinstance(peer, tuple) else None,
        "extensions": {"websocket.http.response": {}},
        "state": {},
    }


def _add(response: web.StreamResponse, headers: Iterable[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        response.headers[name.decode()] = _text(value)
        if name == b"connection" and value == b"close":
            response.force_close()


def _text(value: bytes) -> str:
    return value.decode("latin-1")
