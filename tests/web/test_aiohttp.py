"""The edge around a server of aiohttp; what holds for all frameworks is in frameworks/."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from seawall import Bulkhead, current_deadline
from seawall.context import current_criticality
from seawall.web import Lifecycle, RequestLimit, Trust, address_and_route
from seawall.web.aiohttp import protect
from tests.support import let_pass

pytestmark = pytest.mark.alone


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve `app` on loopback; give a client for it."""
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(url) as client:
            yield client
    finally:
        await runner.cleanup()


def app_of(handler: Callable[..., Any], **parts: Any) -> tuple[web.Application, Any]:
    """Return an app that answers everything with `handler`, and its edge."""
    app = web.Application()
    edge = protect(app, **{"lifecycle": None, **parts})
    app.router.add_route("*", "/{path:.*}", handler)
    return app, edge


def in_flight(edge: Any) -> int:
    """Return how many requests hold a place of the edge."""
    policies = edge.snapshot()["policies"]
    return sum(policy.get("in_flight", 0) for policy in policies)


def test_streams_hold_their_place_and_get_the_headers_of_the_edge():
    """A response that the handler starts itself is counted until the handler returns."""
    seen: list[int] = []

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=202)
        await response.prepare(request)
        for part in (b"one ", b"two"):
            await response.write(part)
            seen.append(in_flight(edge))
        return response

    limit = RequestLimit("10/min", by=address_and_route(), name="callers")
    app, edge = app_of(stream, concurrency=Bulkhead(5), limits=limit)

    async def main() -> None:
        async with served(app) as client, client.get("/") as answer:
            assert (answer.status, await answer.text()) == (202, "one two")
            assert answer.headers["RateLimit"].startswith('"callers"')
            await let_pass(0.01)
            assert in_flight(edge) == 0

    asyncio.run(main())
    assert seen == [1, 1]


def test_a_stream_that_was_started_is_not_cut_at_the_deadline():
    """There is no status left to tell it by."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await let_pass(0.4)
        await response.write(b"late")
        return response

    app, _ = app_of(stream, timeout=0.1)

    async def main() -> None:
        async with served(app) as client, client.get("/") as answer:
            assert (answer.status, await answer.text()) == (200, "late")

    asyncio.run(main())


def test_responses_that_are_raised_are_responses():
    """A redirect and a 404 pass as they are, with the headers of the edge, and are no failures."""

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/moved":
            raise web.HTTPFound("/here")
        raise web.HTTPNotFound(text="nothing here")

    limit = RequestLimit("10/min", by=address_and_route(), name="callers")
    app, edge = app_of(handler, limits=limit)

    async def main() -> None:
        async with served(app) as client:
            async with client.get("/moved", allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (302, "/here")
                assert "RateLimit" in answer.headers
            async with client.get("/else") as answer:
                assert (answer.status, await answer.text()) == (404, "nothing here")

    asyncio.run(main())
    assert edge.snapshot()["failed"] == 0


def test_websockets_hold_a_place_of_their_own():
    """A handshake passes the edge; an open socket holds only its own place, and may be refused."""

    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    app, _ = app_of(
        echo, concurrency=Bulkhead(1), websockets=Bulkhead(2), websockets_per_address=None
    )

    async def main() -> None:
        async with served(app) as client:
            first, second = await client.ws_connect("/"), await client.ws_connect("/")
            for socket in (first, second):
                await socket.send_str("hello")
                assert await socket.receive_str() == "hello"
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await client.ws_connect("/")
            assert refused.value.status == 503
            await first.close()
            await second.close()
            async with client.ws_connect("/") as third:
                await third.send_str("again")
                assert await third.receive_str() == "again"

    asyncio.run(main())


def test_a_draining_service_closes_its_connections():
    """Each answer says so, and the server does so."""

    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app, edge = app_of(handler, lifecycle=Lifecycle(delay=5.0))

    async def main() -> None:
        async with served(app) as client:
            async with client.get("/") as answer:
                assert "close" not in answer.headers.get("Connection", "")
            draining = asyncio.create_task(edge._lifecycle.drain())
            await let_pass(0.01)
            async with client.get("/") as answer:
                assert (answer.status, answer.headers["Connection"]) == (200, "close")
            async with client.get("/health/ready") as answer:
                assert answer.status == 503
            draining.cancel()

    asyncio.run(main())


def test_what_a_stranger_says_is_not_believed():
    """Deadline and criticality of a caller that is not trusted are taken out of the request."""
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        left = current_deadline()
        assert left is not None
        seen.append(
            (left.remaining() > 5.0, current_criticality().name, "baggage" in request.headers)
        )
        return web.Response(text=await request.text())

    said = {"x-server-timeout": "2.000", "baggage": "seawall.criticality=sheddable"}

    async def ask(trust: Trust | None) -> None:
        app, _ = app_of(handler, trust=trust)
        async with served(app) as client, client.post("/", data="body", headers=said) as answer:
            assert await answer.text() == "body"

    asyncio.run(ask(None))
    asyncio.run(ask(Trust(callers=["127.0.0.0/8"])))
    assert seen == [(True, "CRITICAL", False), (False, "SHEDDABLE", True)]


def test_the_rest_of_the_app_is_as_it_was():
    """Further middlewares and signals see requests; sub-apps are inside."""

    @web.middleware
    async def own(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        response.headers["x-own"] = "yes"
        return response

    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text="inside")

    app = web.Application(middlewares=[own])
    edge = protect(app, lifecycle=None)
    sub = web.Application()
    sub.router.add_get("/in", handler)
    app.add_subapp("/sub", sub)

    async def main() -> None:
        async with served(app) as client:
            async with client.get("/sub/in") as answer:
                assert (await answer.text(), answer.headers["x-own"]) == ("inside", "yes")
            async with client.get("/health/live") as answer:
                assert answer.status == 200

    asyncio.run(main())
    assert edge.snapshot()["succeeded"] >= 1


def test_protect_is_called_once_and_for_apps_of_aiohttp():
    """A second edge, and something else than an app, are refused with advice."""
    app = web.Application()
    protect(app)
    with pytest.raises(RuntimeError, match="an edge already"):
        protect(app)
    wrong: Any = "app"
    with pytest.raises(TypeError, match="Application of aiohttp"):
        protect(wrong)
