"""The service that is simulated and run for real: an edge, one guard, and a vendor behind it.

Only the way to the vendor differs: a simulated service, or HTTP. The guard and the edge are made
by the same functions in both worlds.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from seawall import Breaker, Bulkhead, Guard
from seawall.web import Edge

CallVendor = Callable[[int], Awaitable[Any]]

PLACES = 12
"""Requests that the edge serves at the same time; others wait for 300 ms."""
CALLS = 6
"""Calls to the vendor at the same time."""


def make_guard() -> Guard:
    """Return the guard around the vendor."""
    return Guard.standard(
        "vendor",
        on=(ConnectionError, TimeoutError),
        timeout=3.0,
        limit=CALLS,
        max_wait=0.5,
        breaker=Breaker(failure_ratio=0.5, window=10.0, min_calls=10, break_for=2.0),
    )


def make_app(call_vendor: CallVendor) -> Edge:
    """Return the service, whose vendor is called by `call_vendor(key)`."""
    ask = make_guard()(call_vendor)

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        status = 200
        try:
            await ask(int(dict(scope["headers"])[b"key"]))
        except ConnectionError:
            status = 502
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    return Edge(app, concurrency=Bulkhead(PLACES, max_wait=0.3, max_waiting=PLACES))


def make_real() -> Edge:
    """Return the service with a vendor that is asked over HTTP; for uvicorn's `--factory`."""
    limits = httpx.Limits(max_keepalive_connections=PLACES)
    client = httpx.AsyncClient(base_url=os.environ["VENDOR_URL"], timeout=30.0, limits=limits)

    async def call_vendor(key: int) -> None:
        try:
            answer = await client.get("/", headers={"key": str(key)})
        except httpx.TransportError as error:
            raise ConnectionError(str(error)) from error
        if answer.is_server_error:
            raise ConnectionError(f"status {answer.status_code}")

    return make_app(call_vendor)
