"""How the edge sends a problem: as a response, to a websocket client, or from a mounted app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from seawall.errors import RateLimited, SeawallError
from seawall.web.asgi_types import Send
from seawall.web.edge.sending import Headers
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.problems import Problem, problem_of
from seawall.web.request import Incoming
from seawall.web.trust import Trust

TRY_AGAIN_LATER: Final = 1013
"""Close code of a refused websocket."""

CLOSING_TURNS: Final = 4
"""Number of loop iterations in which a server closes the connection of a refused websocket.

One of uvicorn's implementations treats the handshake as complete only then, and logs an error if
the app returns earlier.
"""


async def send_problem(
    send: Send, problem: Problem, more: Headers, *, method: str | None = None
) -> None:
    """Send `problem` with `more` headers; omit the body in the response to a HEAD request."""
    body = problem.body()
    length = (b"content-length", str(len(body)).encode())
    headers = [*problem.raw_headers(), length, *more]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})


class SocketAnswer:
    """Adapter that sends the messages of an HTTP response to a websocket client."""

    def __init__(self, scope: MutableMapping[str, Any], send: Send) -> None:
        """Send with `send`, as a full response if the server supports it, else as a close code."""
        self._offered = "websocket.http.response" in (scope.get("extensions") or {})
        self._send = send
        self.done = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send a message of an HTTP response."""
        self.done = True
        if self._offered:
            await self._send({**message, "type": f"websocket.{message['type']}"})
            if message["type"] == "http.response.body" and not message.get("more_body"):
                for _ in range(CLOSING_TURNS):
                    await asyncio.sleep(0)  # noqa: TID251 - one loop iteration, no delay
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER})


class Answering:
    """Middleware that answers errors of a mounted app, as the edge of the outer app would.

    They do not reach the edge: a Starlette app turns every exception into a response.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], *, upstreams: UpstreamLog) -> None:
        """Wrap `app`, inside the middleware that makes responses; `upstreams` is the edge's log."""
        self.app = app
        self._upstreams = upstreams

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        """Serve a request, and answer the exception that it raises with a problem."""
        started = False

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception as error:
            problem = None if started else problem_of(error)
            if problem is None or scope["type"] not in ("http", "websocket"):
                raise
            if not isinstance(error, SeawallError):
                self._upstreams.note(Incoming(scope, Trust()), problem, error)
            answer = send if scope["type"] == "http" else SocketAnswer(scope, send)
            more = list(error.headers) if isinstance(error, RateLimited) else []
            await send_problem(answer, problem, more, method=scope.get("method"))
