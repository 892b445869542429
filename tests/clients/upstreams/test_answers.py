"""What a transport of upstreams makes of answers: bodies, refusals, redirects, and whose fault."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from random import Random
from types import SimpleNamespace

import httpx
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall._expiry import EXPIRED
from seawall.clients.upstreams import Outliers, Upstreams, UpstreamTransport
from seawall.clients.upstreams.picks import Pick
from seawall.clients.upstreams.transport import WatchedBody
from seawall.clock import VirtualClock
from seawall.context import deadline
from seawall.models.balance import Load
from seawall.testing import run_virtual
from tests.support import falsified, let_pass

LIBRARIES = [httpx, httpx2]


def seen_of(upstreams: Upstreams, url: str = "http://one") -> SimpleNamespace:
    return SimpleNamespace(**upstreams.snapshot()["hosts"][url])


def parts_of(library, parts: list):
    """Return a stream, plain and async, that gives parts and raises those that are errors."""

    class Stream(library.SyncByteStream, library.AsyncByteStream):
        closed = 0

        def __iter__(self):
            for part in parts:
                if isinstance(part, BaseException):
                    raise part
                yield part

        async def __aiter__(self):
            for part in self:
                yield part

        def close(self) -> None:
            self.closed += 1

        async def aclose(self) -> None:
            self.closed += 1

    return Stream()


class Network:
    """Answers each request by a function of it: with a response, or an error."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def handle_request(self, request):
        answer = self.answer(request)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def handle_async_request(self, request):
        return self.handle_request(request)


class Clients:
    """A plain or an async client of a library, used in the same way."""

    def __init__(self, library, kind: str, upstreams: Upstreams, answer) -> None:
        self.library, self.kind = library, kind
        self.transport = upstreams.transport(Network(answer))

    async def send(self, method: str = "GET", url: str = "http://v/", **more):
        request = self.library.Request(method, url, **more)
        if self.kind == "sync":
            return self.transport.handle_request(request)
        return await self.transport.handle_async_request(request)

    async def read(self, response) -> bytes:
        return response.read() if self.kind == "sync" else await response.aread()

    async def close(self, response) -> None:
        if self.kind == "sync":
            response.close()
        else:
            await response.aclose()


both = pytest.mark.parametrize("kind", ["sync", "async"])
libraries = pytest.mark.parametrize("library", LIBRARIES)


# --- Bodies ---


@libraries
@both
def test_a_host_is_busy_until_the_body_is_over(library, kind):
    """Latency is taken at the head; the request is in flight, and no success, until the end."""

    async def main():
        clock = VirtualClock()
        upstreams = Upstreams("v", ["http://one"], clock=clock)
        stream = parts_of(library, [b"the ", b"answer"])
        clients = Clients(library, kind, upstreams, lambda _: library.Response(200, stream=stream))
        response = await clients.send()
        own = library.SyncByteStream if kind == "sync" else library.AsyncByteStream
        assert isinstance(response.stream, own)
        assert seen_of(upstreams).in_flight == 1
        record = upstreams._set.hosts[0].record
        assert record.window.totals(0.0).calls == 0
        clock.advance(60.0)
        assert await clients.read(response) == b"the answer"
        await clients.close(response)
        assert stream.closed == 1
        now = seen_of(upstreams)
        assert (now.in_flight, now.requests, now.failures) == (0, 1, 0)
        assert now.latency < 0.01
        assert record.window.totals(60.0)[:2] == (1, 0)

    run_virtual(main())


@libraries
@both
def test_a_body_that_breaks_off_is_a_failure(library, kind):
    """Whatever the status was: five of them in a row eject the host, each counted once."""

    async def main():
        upstreams = Upstreams("v", ["http://one", "http://two"], rng=Random(1))
        broken = library.RemoteProtocolError("peer closed connection")

        def answer(request):
            parts = [b"x", broken] if request.url.host == "one" else [b"x"]
            return library.Response(200, stream=parts_of(library, parts))

        clients = Clients(library, kind, upstreams, answer)
        for _ in range(40):
            response = await clients.send()
            try:
                await clients.read(response)
            except library.RemoteProtocolError:
                await clients.close(response)
        one = seen_of(upstreams)
        assert (one.state, one.failures, one.in_flight) == ("ejected", 5, 0)
        assert seen_of(upstreams, "http://two").failures == 0

    run_virtual(main())


ERRORS_WITHIN = {
    "broken": httpx.ReadError("reset"),
    "own error": KeyError("a bug"),
    "cancelled": asyncio.CancelledError(),
}
ENDS = ["read", "closed", "closed early", "dropped", "bad", "none", *ERRORS_WITHIN]


def answer_that(end: str) -> httpx.Response:
    """Return an answer that can end so."""
    status = 503 if end == "bad" else 200
    if end == "none":
        return httpx.Response(status, text="all of it at once")
    parts = [b"x", b"y", ERRORS_WITHIN.get(end, b"z")]
    return httpx.Response(status, stream=parts_of(httpx, parts))


async def use(clients: Clients, response: httpx.Response, end: str) -> None:
    """Do with a response what leads to that end."""
    if end == "dropped":
        return
    if end == "closed early" and clients.kind == "sync":
        next(response.iter_raw())
    elif end == "closed early":
        await anext(response.aiter_raw())
    elif end != "closed":
        with contextlib.suppress(httpx.ReadError, KeyError, asyncio.CancelledError):
            await clients.read(response)
    await clients.close(response)


def every_body_ends_once(case: list[tuple[str, str]]) -> None:
    """Assert that nothing stays in flight, and that only broken bodies are failures."""

    async def main():
        upstreams = Upstreams("v", ["http://one"], clock=VirtualClock(), outliers=None)
        for kind, end in case:
            clients = Clients(httpx, kind, upstreams, lambda _, end=end: answer_that(end))
            response = await clients.send()
            assert seen_of(upstreams).in_flight == (end != "none")
            await use(clients, response, end)
            del response
            gc.collect(0)
            assert seen_of(upstreams).in_flight == 0
        seen = seen_of(upstreams)
        ends = Counter(end for _, end in case)
        assert seen.requests == len(case)
        assert seen.failures == ends["broken"] + ends["bad"]
        successes = sum(ends[end] for end in ("read", "closed", "closed early", "none"))
        calls, failures, _ = upstreams._set.hosts[0].record.window.totals(0.0)
        assert (calls, failures) == (successes + seen.failures, seen.failures)

    run_virtual(main())


BODIES = st.lists(st.tuples(st.sampled_from(["sync", "async"]), st.sampled_from(ENDS)), max_size=5)


@given(BODIES)
def test_every_body_ends_once(case):
    """However a body ends, the request is counted out once, with the right verdict."""
    every_body_ends_once(case)


@pytest.mark.parametrize("safeguard", ["close", "__del__", "__iter__"])
def test_every_body_ends_once_needs_each_way(monkeypatch, safeguard):
    """Without any one of closing, collecting and reading to the end, hosts fill up with ghosts."""
    plain = {
        "close": lambda self: self._stream.close(),
        "__del__": lambda _self: None,
        "__iter__": lambda self: iter(self._stream),
    }[safeguard]
    monkeypatch.setattr(WatchedBody, safeguard, plain)
    assert falsified(every_body_ends_once, BODIES)


def test_many_open_streams_are_load():
    """Of two hosts the one with open streams gets less, though its heads come as soon."""

    async def main():
        upstreams = Upstreams("v", ["http://one", "http://two"], rng=Random(1))

        def answer(_request):
            return httpx.Response(200, stream=parts_of(httpx, [b"x"]))

        clients = Clients(httpx, "async", upstreams, answer)
        open_ones = [await clients.send() for _ in range(20)]
        assert [host["in_flight"] for host in upstreams.snapshot()["hosts"].values()] == [10, 10]
        for response in open_ones:
            await clients.close(response)
        assert upstreams.snapshot()["in_flight"] == 0

    run_virtual(main())


@pytest.mark.parametrize("error", [httpx.ReadTimeout("late"), asyncio.CancelledError(EXPIRED)])
def test_a_body_cut_by_the_deadline_is_no_failure(error):
    """A stream may be longer than its reader has time for; that says nothing of the host."""

    async def main():
        upstreams = Upstreams("v", ["http://one"])
        stream = parts_of(httpx, [b"x", error])
        clients = Clients(httpx, "async", upstreams, lambda _: httpx.Response(200, stream=stream))
        with deadline(1.0):
            response = await clients.send()
            await let_pass(2.0)
            with pytest.raises(type(error)):
                await clients.read(response)
        assert (seen_of(upstreams).failures, seen_of(upstreams).in_flight) == (0, 0)

    run_virtual(main())


# --- Whose fault ---


class Disconnected(Exception):
    """What a web framework raises where the visitor hangs up."""


def only_the_hosts_errors(case: tuple[object, str, int]) -> None:
    """Assert that errors of the library and of the network count, and others do not."""
    library, kind, which = case
    errors = [
        (library.ReadError("reset"), 1),
        (library.ConnectTimeout("late"), 1),
        (ConnectionResetError(), 1),
        (Disconnected(), 0),
        (RuntimeError("a bug"), 0),
        (UnicodeError("a bug"), 0),
        (library.DecodingError("bad gzip"), 0),
    ]
    error, failures = errors[which]

    async def main():
        upstreams = Upstreams("v", ["http://one"])
        clients = Clients(library, kind, upstreams, lambda _: error)
        with pytest.raises(type(error)):
            await clients.send("POST", content=b"x")
        seen = seen_of(upstreams)
        assert (seen.failures, seen.requests, seen.in_flight) == (failures, 1, 0)

    run_virtual(main())


ERRORS = st.tuples(
    st.sampled_from(LIBRARIES), st.sampled_from(["sync", "async"]), st.integers(0, 6)
)


@given(ERRORS)
def test_only_errors_of_the_network_are_the_hosts(case):
    """A client that disconnects while uploading, or a bug here, ejects no host."""
    only_the_hosts_errors(case)


def test_whose_fault_needs_the_kinds(monkeypatch):
    """If any error were the host's, visitors could eject hosts by hanging up."""
    monkeypatch.setattr(UpstreamTransport, "_pick", lambda self, *_: self._upstreams.pick())
    assert falsified(only_the_hosts_errors, ERRORS)


@pytest.mark.parametrize("name", ["PoolTimeout", "LocalProtocolError", "UnsupportedProtocol"])
@libraries
def test_what_was_never_sent_leaves_no_trace(library, name):
    """Waiting for a connection in vain does not make a host look slow; it was tried, though."""
    clock = VirtualClock()
    upstreams = Upstreams("v", ["http://one"], clock=clock)

    def answer(_request):
        clock.advance(5.0)
        return getattr(library, name)("never sent")

    tried: set[str] = set()
    request = library.Request("GET", "http://v/", extensions={"seawall.tried": tried})
    with pytest.raises(getattr(library, name)):
        upstreams.transport(Network(answer)).handle_request(request)
    seen = seen_of(upstreams)
    assert (seen.requests, seen.failures, seen.in_flight) == (0, 0, 0)
    assert upstreams._set.hosts[0].load.latency == 0.0
    assert tried == {"http://one"}


async def call(upstreams: Upstreams, left: float, takes: float) -> None:
    """Ask a host that takes `takes` seconds, for a caller with that much time left."""
    with contextlib.suppress(TimeoutError), deadline(left):
        async with upstreams.pick():
            await let_pass(min(left, takes))
            if takes > left:
                raise TimeoutError


def patience(case: list[tuple[float, float]]) -> None:
    """Assert that no host of 50 ms is ejected by callers with less time than that."""

    async def main():
        upstreams = Upstreams(
            "v", ["http://one", "http://two"], rng=Random(1), outliers=Outliers(consecutive=1)
        )
        for left, takes in case:
            await call(upstreams, left, takes)
        failures = [host["failures"] for host in upstreams.snapshot()["hosts"].values()]
        assert failures == [0, 0]

    run_virtual(main())


HURRIES = st.lists(st.tuples(st.sampled_from([0.001, 0.01, 0.04, 1.0]), st.just(0.05)), max_size=12)


@given(HURRIES)
def test_callers_in_a_hurry_eject_nobody(case):
    """Who leaves a host less time than it usually takes learns nothing about it."""
    patience(case)


def test_callers_in_a_hurry_need_the_comparison(monkeypatch):
    """If a deadline that passed were always the host's failure, the hurried would eject all."""
    monkeypatch.setattr(Pick, "_had_too_little_time", lambda _self, _sent: False)
    assert falsified(patience, HURRIES)


def test_a_host_that_hangs_past_its_usual_time_has_failed():
    """A deadline that left more time than usual is the host's failure, also when it came back."""

    async def main():
        upstreams = Upstreams("v", ["http://one"])
        await call(upstreams, 1.0, 0.05)
        upstreams._set.hosts[0].load.forget()
        await call(upstreams, 1.0, 60.0)
        assert seen_of(upstreams).failures == 1

    run_virtual(main())


# --- Refusals ---


def share_of_who_refuses(status: int) -> float:
    """Return the share of one host of four that refuses at once, while the others work."""
    hosts = ["http://one", "http://two", "http://three", "http://four"]
    rng, counts = Random(2), Counter()

    async def ask(upstreams):
        async with upstreams.pick() as host:
            counts[host.url] += 1
            refuses = host.url == hosts[0]
            await let_pass(0.001 if refuses else 0.015 + 0.01 * rng.random())
            host.answered(SimpleNamespace(status_code=status if refuses else 200))

    async def main():
        upstreams = Upstreams("v", hosts, rng=Random(1))
        tasks = []
        for _ in range(800):
            tasks.append(asyncio.create_task(ask(upstreams)))
            await let_pass(0.01)
        await asyncio.gather(*tasks)

    run_virtual(main())
    return counts[hosts[0]] / counts.total()


def test_who_refuses_at_once_does_not_draw_traffic(monkeypatch):
    """A quick 401 or 429 gets no more than its share; a quick 408 is a failure, and gets none."""
    assert 0.15 < share_of_who_refuses(401) < 0.3
    assert 0.15 < share_of_who_refuses(429) < 0.3
    assert share_of_who_refuses(408) < 0.02
    monkeypatch.setattr(Load, "refused", Load.answered)
    assert share_of_who_refuses(429) > 0.4


# --- Redirects ---


@libraries
@pytest.mark.parametrize(
    ("host", "location", "back"),
    [
        ("http://one", "http://one/things/?a=1#b", "http://v/things/?a=1#b"),
        ("http://one", "HTTP://ONE:80/things/", "http://v/things/"),
        ("http://one", "//one/x", "http://v/x"),
        ("http://one", "/x", "/x"),
        ("http://one", "x", "x"),
        ("http://one", "http://two/x", "http://two/x"),
        ("http://one", "https://one/x", "https://one/x"),
        ("http://one", "http://one:81/x", "http://one:81/x"),
        ("http://one", "http://one.example/x", "http://one.example/x"),
        ("http://one/api", "http://one/api/x", "http://v/x"),
        ("http://one/api", "http://one/api?x", "http://v/?x"),
        ("http://one/api", "/api/x", "http://v/x"),
        ("http://one/api", "http://one/apiary", "http://one/apiary"),
        ("http://one/api", "http://one/other", "http://one/other"),
        ("http://one", "http://one:99999999/", "http://one:99999999/"),
        ("http://one", "http://[", "http://["),
    ],
)  # fmt: skip
def test_redirects_lead_back_to_the_set(library, host, location, back):
    """What a host calls its own address becomes the user's; all else stays as it was written."""
    upstreams = Upstreams("v", [host])
    answer = lambda _: library.Response(307, headers={"Location": location})  # noqa: E731
    request = library.Request("GET", "http://user:secret@v/things")
    response = upstreams.transport(Network(answer)).handle_request(request)
    assert response.headers["location"] == back


@libraries
def test_a_redirect_keeps_the_credentials(library):
    """A client that follows a redirect among the hosts is still logged in."""

    def answer(request):
        if request.url.path.endswith("/"):
            return library.Response(200, text=request.headers.get("authorization", "nobody"))
        return library.Response(307, headers={"Location": f"{request.url}/"})

    transport = Upstreams("v", ["http://one/api", "http://two/api"]).transport(
        library.MockTransport(answer)
    )
    with library.Client(
        transport=transport, headers={"Authorization": "me"}, follow_redirects=True
    ) as client:
        response = client.get("http://v/things")
    assert (response.text, str(response.url)) == ("me", "http://v/things/")


# --- One call, and the right transport ---


@libraries
@both
def test_attempts_of_one_call_share_what_they_tried(library, kind):
    """A guard gives all attempts of a call one set; requests of other calls have none."""

    async def main():
        asked = []

        def answer(request):
            asked.append(request.url.host)
            return library.Response(200)

        hosts = ["http://one", "http://two", "http://three"]
        upstreams = Upstreams("v", hosts, rng=Random(3))
        clients = Clients(library, kind, upstreams, answer)
        for _ in range(10):
            del asked[:]
            tried: set[str] = set()
            for _ in hosts:
                await clients.send(extensions={"seawall.tried": tried})
            assert sorted(asked) == ["one", "three", "two"]
        await clients.send(extensions={"seawall.tried": "what is no set"})

    run_virtual(main())


@libraries
def test_the_wrong_kind_of_transport_says_so(library):
    """A plain client over an async transport is a mistake of the user's, not of the hosts."""
    upstreams = Upstreams("v", ["http://one"])
    client = library.Client(transport=upstreams.transport(library.AsyncHTTPTransport()))
    with pytest.raises(TypeError, match=r"such as HTTPTransport\(\)"):
        client.get("http://v/")
    plain = upstreams.transport(library.HTTPTransport())
    with pytest.raises(TypeError, match=r"such as AsyncHTTPTransport\(\)"):
        asyncio.run(plain.handle_async_request(library.Request("GET", "http://v/")))
    with pytest.raises(TypeError, match="of httpx or of httpx2"):
        plain.handle_request(SimpleNamespace())
    assert seen_of(upstreams).requests == 0


@libraries
def test_a_request_of_the_users_own_class(library):
    """The library is found by the bases of a request, whatever module its class is in."""

    class Own(library.Request):
        def __init__(self, path: str) -> None:
            super().__init__("GET", f"http://v{path}")

    transport = Upstreams("v", ["http://127.0.0.1:9"]).transport()
    with pytest.raises(library.ConnectError):
        transport.handle_request(Own("/x"))
    transport.close()
