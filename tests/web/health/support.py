"""What the tests of health and of the lifecycle need: a probe, and a server's lifespan."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from seawall.web.asgi_types import App
from seawall.web.lifecycle import Lifecycle


class Answer:
    """What an ASGI app answered."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.body)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += message["body"]


async def probe(
    app: Callable[..., Awaitable[None]], path: str, method: str = "GET", **scope: Any
) -> Answer:
    """Ask an ASGI app for a path."""
    answer = Answer()

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asked = {"type": "http", "method": method, "path": path, "headers": [], **scope}
    await app(asked, receive, answer.send)
    return answer


class Server:
    """The server's side of the lifespan protocol, step by step."""

    def __init__(self, lifecycle: Lifecycle, app: App) -> None:
        self.told: list[str] = []
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._answered = asyncio.Event()
        run = lifecycle.lifespan(app, {"type": "lifespan"}, self._messages.get, self._send)
        self.task = asyncio.create_task(run)

    async def _send(self, message: Any) -> None:
        self.told.append(message["type"].removeprefix("lifespan."))
        self._answered.set()

    async def startup(self) -> None:
        """Say that it starts, and wait until the app has answered."""
        await self._say("startup")

    async def shutdown(self) -> None:
        """Say that it ends, and wait until the app has."""
        await self._say("shutdown")
        await self.task

    async def _say(self, word: str) -> None:
        self._answered.clear()
        self._messages.put_nowait({"type": f"lifespan.{word}"})
        await self._answered.wait()


async def plain_app(scope: Any, receive: Any, send: Any) -> None:
    """Know the lifespan protocol, and do nothing else."""
    assert scope["type"] == "lifespan"
    assert (await receive())["type"] == "lifespan.startup"
    await send({"type": "lifespan.startup.complete"})
    assert (await receive())["type"] == "lifespan.shutdown"
    await send({"type": "lifespan.shutdown.complete"})
