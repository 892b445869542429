"""How a problem is sent: as a response, or to who asked for a websocket."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from seawall.web.problems import Problem
from seawall.web.sending import Headers, Send

TRY_AGAIN_LATER: Final = 1013
"""The code with which a websocket is closed that was refused."""


async def send_problem(send: Send, problem: Problem, more: Headers) -> None:
    """Answer with `problem`, and `more` headers."""
    body = problem.body()
    length = (b"content-length", str(len(body)).encode())
    headers = [*problem.headers(), length, *more]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
