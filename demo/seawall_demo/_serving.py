"""A web server inside a process of the demo, on a free port that it reports to the parent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Literal

import uvicorn

from seawall_demo._lifeline import Lifeline, Message
from seawall_demo._settings import HOST, pause


class QuietServer(uvicorn.Server):
    """A server that does not handle the signals of the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the owner of the process handles signals."""
        yield


def server_for(
    app: Any, *, lifespan: Literal["on", "off"] = "off", most: int | None = None
) -> QuietServer:
    """Return a server for an ASGI app that logs only problems.

    It has at most `most` connections, if given; others are answered with 503.
    """
    config = uvicorn.Config(
        app,
        lifespan=lifespan,
        # A warning would be logged for each refusal.
        log_level="warning" if most is None else "error",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=1,
        limit_concurrency=most,
    )
    return QuietServer(config)


def listening(port: int = 0) -> socket.socket:
    """Return a socket that listens on this machine only."""
    return socket.create_server((HOST, port), backlog=512)


def free_ports(count: int) -> list[int]:
    """Return ports on which a process may listen by TCP and UDP.

    They are below the system's range for outgoing connections, so a pod that is away for a while
    finds its port free when it comes back.
    """
    found: list[int] = []
    candidates = Random().sample(range(20_000, 32_000), 1000)  # noqa: S311 - needs no secrecy
    for port in candidates:
        if len(found) == count:
            return found
        try:
            with listening(port), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                datagrams.bind((HOST, port))
        except OSError:
            continue
        found.append(port)
    raise OSError(f"no {count} ports from 20000 to 32000 are free")


async def serve(
    app: Any,
    lifeline: Lifeline,
    *,
    on_message: Callable[[Message], None] = lambda _message: None,
    lifespan: Literal["on", "off"] = "off",
    most: int | None = None,
) -> None:
    """Serve `app` until the parent ends it; report the port to the parent when ready."""
    server = server_for(app, lifespan=lifespan, most=most)

    def end() -> None:
        server.should_exit = True

    lifeline.listen(on_message, end)
    with listening() as own:
        serving = asyncio.create_task(server.serve(sockets=[own]))
        while not server.started and not serving.done():
            await pause(0.01)
        if server.started:
            lifeline.send(port=own.getsockname()[1])
        await serving
    if not server.started:
        raise RuntimeError("the server did not start; what it wrote is above")
