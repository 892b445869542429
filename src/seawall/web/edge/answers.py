"""How a problem is sent: as a response, to who asked for a websocket, out of an app in an app."""

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
"""The code with which a websocket is closed that was refused."""

CLOSING_TURNS: Final = 4
"""Turns of the loop in which a server closes the connection of a websocket that was refused.

One of uvicorn's implementations takes a handshake as complete only then, and logs an error if the
app returns earlier.
"""


async def send_problem(
    send: Send, problem: Problem, more: Headers, *, method: str | None = None
) -> None:
    """Answer with `problem`, and `more` headers; to a HEAD without the body."""
    body = problem.body()
    length = (b"content-length", str(len(body)).encode())
    headers = [*problem.raw_headers(), length, *more]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})


class SocketAnswer:
    """Sends what is sent as an HTTP response to who asked for a websocket."""

    def __init__(self, scope: MutableMapping[str, Any], send: Send) -> None:
        """Send by `send`, as well as the server can."""
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
                    await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, no time
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER})


class Answering:
    """Answers the errors of an app that is mounted in another, as the edge around that would.

    They do not reach the edge: a Starlette app makes a response of whatever is raised in it.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], *, upstreams: UpstreamLog) -> None:
        """Stand around `app`, inside of what makes that response; `upstreams` is the edge's."""
        self.app = app
        self._upstreams = upstreams

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        """Serve what there is to serve."""
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
