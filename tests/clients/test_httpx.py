"""The transports of httpx and httpx2 at work: cancelled, hedged, timed out, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import socket
from contextlib import ExitStack, suppress
from io import BytesIO
from threading import Event
from typing import Any

import httpx
import httpx2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    CircuitOpen,
    Fallback,
    Hedge,
    Retry,
    TimedOut,
    Timeout,
    deadline,
    static,
    transient,
)
from seawall.clients import httpx as guarded_httpx
from seawall.clients import httpx2 as guarded_httpx2
from seawall.clients.http import exchange as _exchange
from seawall.clients.http.bodies import GIVEN_UP
from seawall.clients.http.exchange import GuardedExchange
from seawall.clients.http.httpx_family import HttpxLibrary
from seawall.clients.httpx import AsyncGuardedTransport, GuardedTransport
from seawall.clock import VirtualClock
from seawall.testing import no_leaked_permits, run_virtual
from tests.clients.support import (
    LARGE,
    URL,
    Body,
    Server,
    Step,
    in_thread,
    real_server,
    transport_to,
)
from tests.support import falsified, let_pass, new_guard, quarters

OK = Step()
LIBRARIES = [(httpx, guarded_httpx), (httpx2, guarded_httpx2)]
libraries = pytest.mark.parametrize(
    ("library", "guarded"), LIBRARIES, ids=lambda module: module.__name__
)


def retrying(*policies: Any, **options: Any) -> Any:
    """Return a guard that makes up to three attempts, with next to no pause."""
    return new_guard(Retry(on=transient, backoff=0.001), *policies, **options)


# --- Names ---


@libraries
def test_they_are_transports_of_their_library(library: Any, guarded: Any):
    """The transports are what the library's clients take, and their refusals its errors."""
    guard = retrying()
    assert isinstance(guarded.GuardedTransport(guard), library.BaseTransport)
    assert isinstance(guarded.AsyncGuardedTransport(guard), library.AsyncBaseTransport)


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
    guard = new_guard(Retry(on=transient, backoff=0.5), *race, slots, Timeout(1.5), clock=clock)

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
@example(([Step(503, {}, b"", delay=0.5)], 1.0, True))  # while it closes what it has read
def test_nothing_stays_open_when_a_call_is_cancelled(case: Any):
    """Cancelled at any moment, retried, hedged or timed out: each answer is closed once."""
    nothing_stays_open(case)


def test_without_closing_losers_answers_stay_open(monkeypatch: pytest.MonkeyPatch):
    """Ablation: without closing what lost, cancelled and hedged calls leave answers open."""
    monkeypatch.setattr(GuardedExchange, "_discard", lambda *_: iter(()))
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
    assert left == ["5.000", "5.000"]  # each copy has a timeout of its own


@pytest.mark.parametrize("place", ["around", "in a child task", "in the stack"])
def test_the_server_is_told_the_time_of_the_nearest_timeout(place: str):
    """A Timeout is a deadline for all that is inside it, the client of another guard too."""
    server = Server(Step(body=b"answer"))
    clock = VirtualClock()
    total, attempt = new_guard(Timeout(0.5), clock=clock), Timeout(2.0)
    policies = [Timeout(0.5), attempt] if place == "in the stack" else [attempt]
    guard = new_guard(*policies, clock=clock)

    async def main() -> None:
        transport = AsyncGuardedTransport(guard, transport_to(server, httpx, sync=False))
        async with httpx.AsyncClient(transport=transport) as client:

            async def ask() -> None:
                if place == "in a child task":
                    await asyncio.gather(client.get(URL))
                else:
                    await client.get(URL)

            for _ in range(2):
                await (ask() if place == "in the stack" else total.acall(ask))

    run_virtual(main(), clock=clock)
    told = "0.500" if place == "in the stack" else "0.450"  # of the caller's time a tenth is kept
    assert [seen.headers["x-server-timeout"] for seen in server.seen] == [told] * 2


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


def test_a_loser_that_answers_late_in_its_thread_is_no_failure():
    """A plain call's copy that lost, and answers 200 all the same, counts as what it is."""
    server = Server(OK)
    won, lost = Event(), Event()

    class FirstIsSlow(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            inner = transport_to(server, httpx, sync=True)
            if not server.seen and not began.is_set():
                began.set()
                won.wait(5.0)
            answer: httpx.Response = inner.handle_request(request)
            return answer

    began = Event()
    breaker = Breaker()
    race = Hedge(0.01, cap=1.0, sync="thread", dispose=lambda _: lost.set())
    guard = new_guard(race, breaker)
    with httpx.Client(transport=GuardedTransport(guard, FirstIsSlow())) as client:
        assert client.get(URL).content == OK.body
        won.set()
        assert lost.wait(5.0)
    assert guard.snapshot()["policies"][1]["failures"] == 0
    assert [body.closed for body in server.bodies] == [1, 1]


def test_the_winner_is_closed_if_the_call_is_cancelled_while_a_loser_is():
    """Who cancels a call that closes its losers gets no answer, and none stays open."""

    class SlowToClose(Body, httpx.AsyncByteStream):
        async def aclose(self) -> None:
            await let_pass(1.0 if self.content == b"loser" else 0.0)
            await super().aclose()

    bodies = [SlowToClose(b"loser"), SlowToClose(b"winner")]
    waiting = iter(bodies)

    class Stubborn(httpx.AsyncBaseTransport):
        async def handle_async_request(self, _request: httpx.Request) -> httpx.Response:
            body = next(waiting)
            with suppress(asyncio.CancelledError):
                await let_pass(3.0 if body.content == b"loser" else 0.25)
            return httpx.Response(200, stream=body)

    clock = VirtualClock()
    guard = new_guard(Hedge(0.5, cap=1.0), clock=clock)

    async def main() -> None:
        transport = AsyncGuardedTransport(guard, Stubborn())
        async with httpx.AsyncClient(transport=transport) as client:
            call = asyncio.create_task(client.get(URL))
            await let_pass(1.0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    run_virtual(main(), clock=clock)
    assert bodies[1].closed == 1


# --- Bodies ---

FILE = b"".join(bytes([letter]) * 65_536 for letter in b"abc")
FORMS = st.tuples(
    st.lists(st.tuples(st.sampled_from([200, 503]), quarters(4)), min_size=1, max_size=3),
    st.booleans(),
)


def files_arrive_whole(case: Any) -> None:
    """Send a form with a file under a hedge, to servers that take each piece in their own time."""
    steps, opened = case
    clock = VirtualClock()
    policies = Retry(on=transient, backoff=0.5), Hedge(0.25, cap=1.0, burst=100)
    guard = new_guard(*policies, clock=clock)
    arrived: list[bytes] = []
    under_way = itertools.count()

    class Server(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            status, pause = steps[next(under_way) % len(steps)]
            body = b""
            async for part in request.stream:  # type: ignore[union-attr]
                body += part
                await let_pass(pause)
            arrived.append(body)
            return httpx.Response(status)

    async def main() -> None:
        transport = AsyncGuardedTransport(guard, Server())
        async with httpx.AsyncClient(transport=transport) as client:
            await client.put(URL, files={"f": BytesIO(FILE) if opened else FILE})

    run_virtual(main(), clock=clock)
    guard.close()
    assert arrived
    assert all(FILE in body for body in arrived)
    answers = [steps[n % len(steps)][0] for n in range(len(arrived))]
    assert len(arrived) == 3 or 200 in answers or not opened


@given(FORMS)
def test_files_arrive_whole(case: Any):
    """A form whose files are open ones is not sent twice at the same time; but again, if it fails.

    What is there as bytes is hedged.
    """
    files_arrive_whole(case)


def test_without_asking_who_reads_it_a_file_is_garbled(monkeypatch: pytest.MonkeyPatch):
    """Ablation: if every body could be read by two at once, servers would get mixed up files."""
    monkeypatch.setattr(HttpxLibrary, "shareable", lambda *_: True)
    assert falsified(files_arrive_whole, FORMS)


class Ends(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A body that stops in the middle: with an error, or by never going on."""

    closed = 0

    def __init__(self, *, hangs: bool = False) -> None:
        self._hangs = hangs

    def __iter__(self) -> Any:
        yield b"so "
        raise httpx.ReadTimeout("nothing came")

    async def __aiter__(self) -> Any:
        yield b"so "
        await let_pass(1e9 if self._hangs else 0.25)
        raise httpx.ReadTimeout("nothing came")

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("kind", ["plain", "async", "hanging"])
def test_a_failed_answer_whose_body_stops_is_still_that_answer(kind: str):
    """Status and wishes of a failed answer count, whatever becomes of its body."""
    clock = VirtualClock()
    guard = new_guard(Retry(on=transient, backoff=0.5), clock=clock)
    bodies: list[Ends] = []

    def refuse(_request: httpx.Request) -> httpx.Response:
        bodies.append(Ends(hangs=kind == "hanging"))
        last = {"x-should-retry": "false"} if len(bodies) == 2 else {}
        return httpx.Response(429, headers={"retry-after": "7", **last}, stream=bodies[-1])

    inner = httpx.MockTransport(refuse)

    async def main() -> None:
        async with (
            httpx.AsyncClient(transport=AsyncGuardedTransport(guard, inner)) as client,
            client.stream("GET", URL) as answer,
        ):
            assert answer.status_code == 429
            with pytest.raises(httpx.ReadTimeout):
                await answer.aread()

    if kind == "plain":
        client = httpx.Client(transport=GuardedTransport(guard, inner))
        with client, client.stream("GET", URL) as answer:
            assert answer.status_code == 429
            with pytest.raises(httpx.ReadTimeout):
                answer.read()
    else:
        run_virtual(main(), clock=clock)
    assert [body.closed for body in bodies] == [1, 1]
    reading = 2 * GIVEN_UP if kind == "hanging" else 0.5
    assert 7.0 <= clock.now() <= 1.25 * 7.0 + reading


@libraries
@pytest.mark.parametrize("limit", ["attempt", "hedged", "deadline"])
def test_a_stalled_body_of_a_failed_answer_ends_before_its_attempt(
    limit: str, library: Any, guarded: Any
):
    """Status and pushback count also if the guard would cancel the read of the body."""
    clock = VirtualClock()
    race = [Hedge(0.25, cap=1.0)] if limit == "hedged" else []
    bound = [] if limit == "deadline" else [Timeout(0.5)]
    retry = Retry(on=transient, attempts=2, backoff=0.25)
    guard = new_guard(Timeout(30.0), retry, *bound, *race, clock=clock)
    stalled = type("Stalled", (Ends, library.AsyncByteStream), {})
    bodies: list[Any] = []

    def refuse(_request: Any) -> Any:
        bodies.append(stalled(hangs=True))
        return library.Response(503, headers={"retry-after": "7"}, stream=bodies[-1])

    async def main() -> None:
        transport = guarded.AsyncGuardedTransport(guard, library.MockTransport(refuse))
        async with (
            library.AsyncClient(transport=transport) as client,
            deadline(0.5 if limit == "deadline" else 1000.0, clock=clock),
            client.stream("GET", URL) as answer,
        ):
            assert (answer.status_code, str(answer.request.url)) == (503, URL)
            with pytest.raises(library.ReadTimeout):
                await answer.aread()

    run_virtual(main(), clock=clock)
    guard.close()
    tries = 1 if limit == "deadline" else 2
    assert [body.closed for body in bodies] == [1] * len(bodies)
    assert len(bodies) == (2 * tries if race else tries)
    assert guard.snapshot()["timed_out"] == 0
    assert 7.0 * (tries - 1) + 0.4 * tries <= clock.now() <= 8.75 * (tries - 1) + 0.5 * tries


def hedged_failure_is_readable() -> None:
    """Let a copy begin while the failed answer of the first is being read; read that answer."""
    steps = iter([(0.25, [b"the ", b"problem"]), (1.0, [b"another"])])

    class Slow(httpx.AsyncByteStream):
        def __init__(self, parts: list[bytes]) -> None:
            self._parts = parts
            self._closed = False

        async def __aiter__(self) -> Any:
            for part in self._parts:
                await let_pass(0.25)
                if self._closed:
                    raise httpx.ReadError("closed by another")
                yield part

        async def aclose(self) -> None:
            self._closed = True

    class Failing(httpx.AsyncBaseTransport):
        async def handle_async_request(self, _request: httpx.Request) -> httpx.Response:
            delay, parts = next(steps)
            await let_pass(delay)
            return httpx.Response(503, stream=Slow(parts))

    clock = VirtualClock()
    guard = new_guard(Hedge(0.6, cap=1.0), clock=clock)

    async def main() -> None:
        transport = AsyncGuardedTransport(guard, Failing())
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.get(URL)).content == b"the problem"

    run_virtual(main(), clock=clock)


def test_a_copy_leaves_alone_what_another_reads():
    """The failed answer that one copy reads is not closed because another copy begins."""
    hedged_failure_is_readable()


def test_without_that_the_user_gets_a_closed_answer(monkeypatch: pytest.MonkeyPatch):
    """Ablation: if answers that are being read were closed too, the user could not read them."""

    def any_answer(exchange: Any, _number: int) -> Any:
        return exchange._reading.pop() if exchange._reading else None

    monkeypatch.setattr(GuardedExchange, "_pop_earlier_response", any_answer)
    with pytest.raises((httpx.StreamClosed, httpx.ReadError)):
        hedged_failure_is_readable()


# --- The library gives up first ---


def never_cancelled_inside(case: Any) -> None:
    """Time out while the library connects, and see who was interrupted.

    In a busy loop, both its timeout and the guard's are over when the library gets its turn.
    """
    seconds, by_deadline, hedged, busy = case
    clock = VirtualClock()
    cancelled: list[str] = []

    class Hangs(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            try:
                await let_pass(request.extensions["timeout"].get("connect"))
            except asyncio.CancelledError:
                cancelled.append("in the pool")
                raise
            clock.advance(busy)
            raise httpx.ConnectTimeout("nobody there", request=request)

    race = [Hedge(seconds / 2, cap=1.0)] if hedged else []
    limit = [] if by_deadline else [Timeout(seconds)]
    guard = new_guard(*limit, *race, Breaker(), clock=clock)

    async def main() -> None:
        transport = AsyncGuardedTransport(guard, Hangs(), reserve=0.0)
        with pytest.raises(TimedOut):
            async with (
                httpx.AsyncClient(transport=transport, timeout=None) as client,  # noqa: S113
                deadline(seconds if by_deadline else 1000.0, clock=clock),
            ):
                await client.get(URL)

    run_virtual(main(), clock=clock)
    guard.close()
    assert cancelled == []
    assert seconds <= clock.now() <= seconds + 0.01 + 2 * busy
    assert by_deadline or guard.snapshot()["timed_out"] == 1


HANGING = st.tuples(
    st.sampled_from([0.05, 0.5, 3.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 10.0]),
)


@given(HANGING)
def test_the_library_gives_up_before_it_is_cancelled(case: Any):
    """The library's timeout ends a connect before the guard's; the guard counts it."""
    never_cancelled_inside(case)


def test_without_that_moment_it_is_cancelled(monkeypatch: pytest.MonkeyPatch):
    """Ablation: if the library gave up when the guard does, its pool would be left as it is."""
    monkeypatch.setattr(_exchange, "safety_margin", lambda _: -0.05)
    assert falsified(never_cancelled_inside, HANGING)


# --- Over real sockets ---


@pytest.mark.alone
@libraries
def test_a_client_survives_an_outage(library: Any, guarded: Any):
    """After many timeouts while it connects, to a host that takes no more, a client is as good."""
    with socket.socket() as full, ExitStack() as queue:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)  # noqa: FBT003
            waiting.connect_ex(full.getsockname())
        gone = f"http://127.0.0.1:{full.getsockname()[1]}/"

        async def main() -> tuple[int, list[Any]]:
            pool = library.AsyncHTTPTransport(limits=library.Limits(max_connections=2))
            transport = guarded.AsyncGuardedTransport(new_guard(Timeout(0.2)), pool)
            async with library.AsyncClient(transport=transport) as client:
                for _ in range(3):
                    calls = [client.get(gone) for _ in range(4)]
                    ended = await asyncio.gather(*calls, return_exceptions=True)
                    assert {type(error).__name__ for error in ended} == {"TimedOut"}
                return len(pool._pool.connections), pool._pool._requests

        assert in_thread(main) == (0, [])


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


@pytest.mark.alone
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
    """A refused connection sent nothing, so a POST without a key is retried as well."""
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
    breaker = Breaker()
    breaker.isolate()
    client = httpx.Client(transport=GuardedTransport(new_guard(breaker)))
    with client, pytest.raises(httpx.HTTPError) as caught:
        client.get(URL)
    assert isinstance(caught.value, CircuitOpen)
    assert caught.value.request.url == URL


# What does not fit


def test_a_retry_that_matches_no_error_of_the_client_is_warned_of():
    """`on=` names errors that httpx never raises: nothing would be retried."""
    guard = new_guard(Retry(on=KeyError, attempts=3))
    with pytest.warns(UserWarning, match="none of the errors of httpx.*on=transient") as warned:
        AsyncGuardedTransport(guard)
    assert [warning.filename for warning in warned] == [__file__]
    assert "retries none of the errors of httpx" in guard.explain()


@pytest.mark.parametrize("value", ["later", httpx.Response(200, text="later")], ids=["str", "own"])
@pytest.mark.parametrize("kind", [GuardedTransport, AsyncGuardedTransport])
def test_a_static_answer_is_refused_when_the_transport_is_made(kind: Any, value: object):
    """In an outage a text would be an AttributeError, and a response would be shared by callers."""
    guard = new_guard(Fallback(lambda _request: None, static(value)), Retry(on=transient))
    with pytest.raises(TypeError, match=r"Fallback\(lambda request: httpx\.Response\(\.\.\.\)\)"):
        kind(guard)


def test_a_guard_that_fits_its_client_is_not_warned_of():
    """`on=transient` matches the client's errors, and the fallback makes responses."""
    later = Fallback(lambda _request: httpx.Response(200, text="later"))
    guard = new_guard(later, Retry(on=transient, attempts=3, backoff=[0.0]))

    def lost(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("lost")

    transport = GuardedTransport(guard, httpx.MockTransport(lost))
    assert "httpx" not in guard.explain().partition("take care")[2]
    with httpx.Client(transport=transport) as client:
        answers = [client.get(f"http://vendor.example/{path}") for path in "ab"]
    assert [(answer.text, answer.url.path) for answer in answers] == [
        ("later", "/a"),
        ("later", "/b"),
    ]


def test_transient_is_what_a_guarded_client_retries():
    """A lost connection and a 503, until it is answered."""
    answers = iter([httpx.ConnectError("lost"), httpx.Response(503), httpx.Response(200)])

    def handle(_request: httpx.Request) -> httpx.Response:
        one = next(answers)
        if isinstance(one, Exception):
            raise one
        return one

    guard = new_guard(Retry(on=transient, attempts=3, backoff=[0.0]))
    transport = GuardedTransport(guard, httpx.MockTransport(handle))
    with httpx.Client(transport=transport) as client:
        assert client.get("http://vendor.example").status_code == 200
