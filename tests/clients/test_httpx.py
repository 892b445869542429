"""The transports of httpx and httpx2 at work: cancelled, hedged, timed out, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from threading import Event
from typing import Any

import httpx
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Bulkhead, CircuitOpen, Hedge, Retry, TimedOut, Timeout, VirtualClock
from seawall.clients import httpx as guarded_httpx
from seawall.clients import httpx2 as guarded_httpx2
from seawall.clients._exchange import Exchange
from seawall.clients.httpx import AsyncGuardedTransport, GuardedTransport, retryable
from seawall.testing import no_leaked_permits, run_virtual
from tests.clients.support import (
    LARGE,
    URL,
    Server,
    Step,
    in_thread,
    real_server,
    transport_to,
)
from tests.support import falsified, let_pass, new_guard, quarters

LIBRARIES = [(httpx, guarded_httpx), (httpx2, guarded_httpx2)]
libraries = pytest.mark.parametrize(
    ("library", "guarded"), LIBRARIES, ids=lambda module: module.__name__
)


def retrying(*policies: Any, **options: Any) -> Any:
    """Return a guard that makes up to three attempts, with next to no pause."""
    return new_guard(Retry(on=retryable, backoff=0.001), *policies, **options)


# --- Names ---


@libraries
def test_they_are_transports_of_their_library(library: Any, guarded: Any):
    """The transports are what the library's clients take, and their refusals its errors."""
    guard = retrying()
    assert isinstance(guarded.GuardedTransport(guard), library.BaseTransport)
    assert isinstance(guarded.AsyncGuardedTransport(guard), library.AsyncBaseTransport)
    assert guarded.retryable is retryable


# --- Losers are closed ---

ANSWERS = st.tuples(
    st.sampled_from([200, 503]),
    st.sampled_from([b"", b"sorry", LARGE]),
    quarters(8),
    st.booleans(),
).map(lambda parts: Step(parts[0], {}, parts[1], "", parts[2], parts[3]))
CANCELLED = st.tuples(st.lists(ANSWERS, min_size=1, max_size=4), quarters(20), st.booleans())


def nothing_stays_open(case: Any) -> None:
    """Cancel a call at an instant, whatever it is doing, and look at what it leaves behind."""
    steps, instant, hedged = case
    server = Server(*steps)
    slots = Bulkhead(2)
    clock = VirtualClock()
    race = [Hedge(0.5, cap=1.0, burst=100)] if hedged else []
    guard = new_guard(Retry(on=retryable, backoff=0.5), *race, slots, Timeout(1.5), clock=clock)

    async def main() -> None:
        transport = AsyncGuardedTransport(guard, transport_to(server, httpx, sync=False))
        async with httpx.AsyncClient(transport=transport) as client:
            call = asyncio.create_task(client.get(URL))
            await let_pass(instant)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    run_virtual(main(), clock=clock)
    guard.close()
    assert slots.in_flight == 0
    assert [body.closed for body in server.bodies] == [1] * len(server.bodies)


@given(CANCELLED)
def test_nothing_stays_open_when_a_call_is_cancelled(case: Any):
    """Cancelled at any moment, retried, hedged or timed out: each answer is closed once."""
    nothing_stays_open(case)


def test_without_closing_losers_answers_stay_open(monkeypatch: pytest.MonkeyPatch):
    """Ablation: without closing what lost, cancelled and hedged calls leave answers open."""
    monkeypatch.setattr(Exchange, "_discard", lambda *_: iter(()))
    assert falsified(nothing_stays_open, CANCELLED)


def test_a_hedged_call_takes_the_faster_answer():
    """The copy that answers first is the answer; the other, which answers late, is closed."""
    server = Server(Step(body=b"slow", delay=3.0, stubborn=True), Step(body=b"fast", delay=0.1))
    clock = VirtualClock()
    guard = new_guard(Hedge(1.0, cap=1.0), Timeout(5.0), clock=clock)

    async def main() -> bytes:
        transport = AsyncGuardedTransport(guard, transport_to(server, httpx, sync=False))
        async with httpx.AsyncClient(transport=transport) as client:
            return (await client.get(URL)).content

    assert run_virtual(main(), clock=clock) == b"fast"
    assert [body.closed for body in server.bodies] == [1, 1]
    left = [seen.headers["x-server-timeout"] for seen in server.seen]
    assert left == ["5.000", "4.000"]


def test_what_is_not_repeatable_is_not_hedged():
    """A slow POST without a key is waited for, not sent twice."""
    server = Server(Step(delay=3.0))
    clock = VirtualClock()
    guard = new_guard(Hedge(1.0, cap=1.0), clock=clock)

    async def main() -> int:
        transport = AsyncGuardedTransport(guard, transport_to(server, httpx, sync=False))
        async with httpx.AsyncClient(transport=transport) as client:
            return (await client.post(URL)).status_code

    assert run_virtual(main(), clock=clock) == 200
    assert server.sent == 1


def test_an_answer_that_comes_to_an_abandoned_thread_is_closed():
    """Where a thread was given up on, the answer that it still gets is closed, once."""
    server = Server(Step(body=b"late"))
    answered, ended = Event(), Event()

    class Slow(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answered.wait(5.0)
            response: httpx.Response = transport_to(server, httpx, sync=True).handle_request(
                request
            )
            return response

    guard = new_guard(Timeout(0.05, sync="thread"))
    with no_leaked_permits():
        transport = GuardedTransport(guard, Slow())
        with httpx.Client(transport=transport) as client, pytest.raises(TimedOut) as caught:
            client.get(URL)
        assert isinstance(caught.value, httpx.TimeoutException)
        caught.value.abandoned_work.when_stopped(ended.set)  # type: ignore[attr-defined]
        answered.set()
        assert ended.wait(5.0)
    assert [body.closed for body in server.bodies] == [1]


# --- Over real sockets ---


@libraries
@pytest.mark.parametrize("body", [b"sorry", LARGE], ids=["small", "large"])
def test_no_connection_leaks_sync(library: Any, guarded: Any, body: bytes):
    """A pool of one connection serves a thousand failures, each with three attempts."""
    with real_server(503, body=body) as server:
        pool = library.HTTPTransport(limits=library.Limits(max_connections=1))
        transport = guarded.GuardedTransport(retrying(), pool)
        calls = 334 if library is httpx and body is not LARGE else 15
        with library.Client(transport=transport) as client:
            for _ in range(calls):
                assert client.get(server.url).content == body
            assert [c.is_idle() for c in pool._pool.connections] == [True]
        assert server.requests == 3 * calls


@libraries
@pytest.mark.parametrize("body", [b"sorry", LARGE], ids=["small", "large"])
def test_no_connection_leaks_async(library: Any, guarded: Any, body: bytes):
    """The same with tasks: as many connections as calls at once, all idle in the end."""
    with real_server(503, body=body) as server:
        calls = 99 if library is httpx and body is not LARGE else 15

        async def main() -> list[bool]:
            pool = library.AsyncHTTPTransport(limits=library.Limits(max_connections=3))
            transport = guarded.AsyncGuardedTransport(retrying(), pool)
            async with library.AsyncClient(transport=transport) as client:

                async def user() -> None:
                    for _ in range(calls // 3):
                        assert (await client.get(server.url)).content == body

                await asyncio.gather(*(user() for _ in range(3)))
                return [c.is_idle() for c in pool._pool.connections]

        idle = asyncio.run(main())
        assert len(idle) <= 3
        assert all(idle)
        assert server.requests == calls // 3 * 9


@libraries
def test_a_hung_server_is_given_up_on(library: Any, guarded: Any):
    """A cooperative timeout ends a sync call by the library's own timeouts."""
    with real_server(hangs=True) as server:
        guard = new_guard(Timeout(0.1, sync="cooperative"))
        with library.Client(transport=guarded.GuardedTransport(guard)) as client:
            with pytest.raises(TimedOut) as caught:
                client.get(server.url, timeout=None)
            assert isinstance(caught.value, library.TimeoutException)
            assert isinstance(caught.value.__cause__, library.ReadTimeout)

        async def main() -> None:
            transport = guarded.AsyncGuardedTransport(guard)
            async with library.AsyncClient(transport=transport) as client:
                with pytest.raises(TimedOut):
                    await client.get(server.url, timeout=None)
                assert transport.transport._pool.connections == []

        in_thread(main)


@libraries
def test_a_refused_connection_is_tried_again_for_a_post(library: Any, guarded: Any):
    """Where nobody listens nothing was sent, so a POST without a key is tried again as well."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    guard = retrying()
    client = library.Client(transport=guarded.GuardedTransport(guard))
    with client, pytest.raises(library.ConnectError):
        client.post(f"http://127.0.0.1:{port}/")
    assert guard.snapshot()["retries"] == 2


@libraries
def test_streams_are_read_as_before(library: Any, guarded: Any):
    """A streamed answer is read piece by piece; the guard's gates are left by then."""
    slots = Bulkhead(1)
    client = library.Client(transport=guarded.GuardedTransport(retrying(slots)))
    with (
        real_server(503, 200, body=LARGE) as server,
        client,
        client.stream("GET", server.url) as answer,
    ):
        assert (answer.status_code, slots.in_flight) == (200, 0)
        assert sum(len(part) for part in answer.iter_bytes()) == len(LARGE)


def test_old_code_catches_refusals():
    """Code that catches httpx's errors catches an open circuit."""
    from seawall import Breaker

    breaker = Breaker()
    breaker.isolate()
    client = httpx.Client(transport=GuardedTransport(new_guard(breaker)))
    with client, pytest.raises(httpx.HTTPError) as caught:
        client.get(URL)
    assert isinstance(caught.value, CircuitOpen)
    assert caught.value.request.url == URL
