"""The middleware of aiohttp over real sockets; what holds for all libraries is in test_exchange."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from seawall import (
    Breaker,
    CircuitOpen,
    Guard,
    Retry,
    TimedOut,
    Timeout,
    criticality,
    deadline,
    transient,
)
from seawall.clients.aiohttp import GuardedMiddleware
from seawall.context import Criticality, idempotency_key
from tests.clients.support import LARGE, real_server
from tests.support import new_guard


def session_of(guard: Guard, **settings: Any) -> aiohttp.ClientSession:
    """Return a session all of whose requests go through `guard`."""
    return aiohttp.ClientSession(middlewares=[GuardedMiddleware(guard)], **settings)


def retrying(*policies: Any) -> Guard:
    """Return a guard that makes up to three attempts, with next to no pause."""
    return new_guard(Retry(on=transient, backoff=0.001), *policies)


@asynccontextmanager
async def served(handler: Any) -> AsyncIterator[str]:
    """Serve all requests with `handler`, by a server of aiohttp; give its address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("body", [b"sorry", b"x" * 1_000_000], ids=["small", "large"])
def test_no_connection_leaks(body: bytes):
    """One connection is enough for all attempts, and is back in its pool at the end."""

    async def main(url: str) -> None:
        connector = aiohttp.TCPConnector(limit=1)
        async with session_of(retrying(), connector=connector) as session:
            for _ in range(20):
                async with session.get(url) as answer:
                    assert (answer.status, await answer.read()) == (503, body)
            assert connector._acquired == set()

    with real_server(503, body=body) as server:
        asyncio.run(main(server.url))
        assert server.requests == 60


def test_headers_are_sent_and_retry_after_is_obeyed():
    """The server sees attempt, time left and criticality; its Retry-After is waited for."""
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers, asyncio.get_running_loop().time()))
        busy = len(seen) == 1
        return web.Response(status=429 if busy else 200, headers={"Retry-After": "0.2"})

    async def main() -> None:
        async with served(handler) as url, session_of(retrying()) as session:
            with deadline(5.0), criticality(Criticality.SHEDDABLE):
                async with session.get(url) as answer:
                    assert answer.status == 200

    asyncio.run(main())
    (first, began), (second, again) = seen
    assert [one["Seawall-Attempt"] for one in (first, second)] == ["1", "2"]
    assert 0 < float(second["x-server-timeout"]) < float(first["x-server-timeout"]) < 5.0
    assert first["baggage"] == "seawall.criticality=sheddable"
    assert again - began >= 0.2


def test_a_lost_connection_is_tried_again_by_the_guard_only():
    """A session repeats a lost GET on its own, which does not double the guard's attempts."""

    async def main(url: str) -> None:
        async with session_of(retrying()) as session:
            for _ in range(2):
                with pytest.raises(aiohttp.ServerDisconnectedError):
                    await session.get(url)

    with real_server(hangs=True) as server:
        server.released.set()  # it closes the connection and does not answer
        asyncio.run(main(server.url))
        assert server.requests == 6


def test_a_post_is_sent_again_only_with_a_key():
    """What may have been done is not done again, unless a key makes that safe."""

    async def main(url: str) -> None:
        async with session_of(retrying()) as session:
            async with session.post(url, json={"item": 7}) as answer:
                assert answer.status == 503
                assert "POST without an idempotency key" in answer.seawall_note  # type: ignore[attr-defined]
            with idempotency_key("order-7"):
                async with session.post(url, json={"item": 7}) as answer:
                    assert answer.status == 200

    with real_server(503, 503, 200) as server:
        asyncio.run(main(server.url))
        assert server.requests == 3


@pytest.mark.parametrize(
    ("data", "attempts"),
    [
        (b"bytes", 3),
        ({"a": "form"}, 3),
        (aiohttp.FormData({"a": "text"}, default_to_multipart=True), 3),
        (BytesIO(b"a file"), 1),
    ],
    ids=["bytes", "form", "multipart", "file"],
)
def test_bodies_in_memory_are_sent_again_whole(data: Any, attempts: int):
    """Bytes and forms are the same in each attempt; a file is sent once."""
    bodies: list[bytes] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(status=503)

    async def main() -> None:
        async with (
            served(handler) as url,
            session_of(retrying()) as session,
            session.put(url, data=data),
        ):
            pass

    asyncio.run(main())
    assert len(bodies) == attempts
    assert len(set(bodies)) == 1
    assert bodies[0] != b""


def test_a_request_that_awaits_100_continue_is_sent_once():
    """Its future serves one attempt."""

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=503)

    async def main() -> None:
        guard = retrying()
        async with (
            served(handler) as url,
            session_of(guard) as session,
            session.put(url, data=b"x", expect100=True) as answer,
        ):
            assert (answer.status, guard.snapshot()["retries"]) == (503, 0)

    asyncio.run(main())


@pytest.mark.alone
@pytest.mark.parametrize("policy", [Timeout(0.1), Breaker()], ids=["timeout", "deadline"])
def test_a_hung_server_is_given_up_on(policy: Any):
    """The guard's Timeout, and the deadline of a plain `with`, end an attempt."""

    async def main(url: str) -> None:
        async with session_of(new_guard(policy)) as session:
            with deadline(0.2), pytest.raises(TimedOut) as caught:
                await session.get(url)
            assert isinstance(caught.value, aiohttp.ServerTimeoutError)
            assert session.connector is not None
            assert session.connector._acquired == set()  # type: ignore[attr-defined]

    with real_server(hangs=True) as server:
        asyncio.run(main(server.url))
        assert server.requests == 1


@pytest.mark.alone
def test_a_host_that_cannot_be_reached_within_the_total_time_has_failed():
    """Not a cancellation by the caller: the breaker opens."""

    async def main() -> None:
        guard = new_guard(Breaker(consecutive=1))
        total = aiohttp.ClientTimeout(total=0.05)
        with socket.socket() as host, ExitStack() as others:
            host.bind(("127.0.0.1", 0))
            host.listen(0)
            for _ in range(4):  # its queue is full: no connection is accepted any more
                other = others.enter_context(socket.socket())
                other.setblocking(False)  # noqa: FBT003
                other.connect_ex(host.getsockname())
            async with session_of(guard, timeout=total) as session:
                url = f"http://127.0.0.1:{host.getsockname()[1]}"
                with pytest.raises(TimeoutError):
                    await session.get(url)
                with pytest.raises(CircuitOpen):
                    await session.get(url)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    asyncio.run(main())


def test_nothing_is_sent_after_the_total_time_of_the_session():
    """The time that aiohttp gives a whole call ends its attempts too."""

    async def main(url: str) -> None:
        total = aiohttp.ClientTimeout(total=0.1)
        async with session_of(retrying(), timeout=total) as session:
            with pytest.raises(TimeoutError):
                await session.get(url)

    with real_server(hangs=True) as server:
        asyncio.run(main(server.url))
        assert server.requests == 1


def test_a_refused_connection_is_tried_again_for_a_post():
    """A refused connection sent nothing, so a POST without a key is retried as well."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    guard = retrying()

    async def main() -> None:
        async with session_of(guard) as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.post(f"http://127.0.0.1:{port}/", data=b"x")

    asyncio.run(main())
    assert guard.snapshot()["retries"] == 2


def test_a_breaker_by_host_opens_for_one_host():
    """With `key=` one session serves many hosts: the circuit of one that fails is open."""
    breaker = Breaker(consecutive=1, key=lambda request: request.url.authority)

    async def main(broken: str, well: str) -> None:
        async with session_of(new_guard(breaker)) as session:
            async with session.get(broken) as answer:
                assert answer.status == 503
            with pytest.raises(aiohttp.ClientConnectionError) as caught:
                await session.get(broken)
            assert isinstance(caught.value, CircuitOpen)
            async with session.get(well) as answer:
                assert answer.status == 200

    with real_server(503) as broken, real_server(200) as well:
        asyncio.run(main(broken.url, well.url))
        assert (broken.requests, well.requests) == (1, 1)


def test_redirects_streams_and_websockets_work_as_without_a_guard():
    """Each hop is one guarded request; bodies and messages come afterwards."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/moved":
            raise web.HTTPFound("/here")
        if request.path == "/socket":
            messages = web.WebSocketResponse()
            await messages.prepare(request)
            await messages.send_str("hello")
            await messages.close()
            return messages
        return web.Response(body=LARGE)

    async def main() -> None:
        guard = retrying(Timeout(5.0))
        async with served(handler) as url, session_of(guard) as session:
            async with session.get(f"{url}/moved") as answer:
                parts = [part async for part in answer.content.iter_chunked(1000)]
            assert b"".join(parts) == LARGE
            assert guard.snapshot()["succeeded"] == 2
            async with session.ws_connect(f"{url}/socket") as messages:
                assert await messages.receive_str() == "hello"

    asyncio.run(main())


def test_it_says_what_it_is():
    """The repr names the guard."""
    guard = new_guard(Breaker())
    middleware = GuardedMiddleware(guard)
    assert repr(middleware) == f"<GuardedMiddleware of guard {guard.name!r}>"
    assert middleware.guard is guard
