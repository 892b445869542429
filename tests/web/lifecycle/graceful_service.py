"""A small service for tests to send signals to: prints its port, serves until it is drained.

Its arguments are the settings of its Lifecycle, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import suppress
from typing import Any

import uvicorn

from seawall.web import Edge, Health, Lifecycle
from tests.web.health.support import plain_app


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer after the seconds that the path names; at draining, or never, if it names none."""
    if scope["type"] == "lifespan":
        await plain_app(scope, receive, send)
        print("closed", flush=True)  # noqa: T201 - the test reads it
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    try:
        seconds = float(scope["path"][1:])
    except ValueError:
        if scope["path"] == "/until-draining":
            await send({"type": "http.response.body", "body": b"tick\n", "more_body": True})
            await scope["lifecycle"].until_draining()
            await send({"type": "http.response.body", "body": b"goodbye"})
            return
        while True:
            await send({"type": "http.response.body", "body": b"tick\n", "more_body": True})
            await _pause(0.05)
    await _pause(seconds)
    await send({"type": "http.response.body", "body": b"done"})


async def _pause(seconds: float) -> None:
    over = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, lambda: over.done() or over.set_result(None))
    await over


def main() -> None:
    """Serve on a free port of the loopback."""
    lifecycle = Lifecycle(**json.loads(sys.argv[1]))

    async def served(scope: Any, receive: Any, send: Any) -> None:
        scope["lifecycle"] = lifecycle
        await app(scope, receive, send)

    edge = Edge(served, health=Health(lifecycle=lifecycle), lifecycle=lifecycle)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)  # noqa: T201
    config = uvicorn.Config(edge, log_level="error", http="httptools", lifespan="on")
    with suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again when it has stopped
        uvicorn.Server(config).run(sockets=[listening])
    print(json.dumps(lifecycle.snapshot()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
