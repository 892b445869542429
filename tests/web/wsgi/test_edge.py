"""The WSGI edge: what it admits and refuses, when it gives back, and what it answers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from io import BytesIO
from typing import Any
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest

from seawall import (
    Bulkhead,
    CircuitOpen,
    Criticality,
    DeadlineExceeded,
    Fallback,
    Guard,
    Shed,
    TimedOut,
    Timeout,
)
from seawall.clients.http.terms import wall_time
from seawall.clock import VirtualClock
from seawall.context import (
    check_deadline,
    current_criticality,
    current_tenant,
    deadline_var,
    seconds_left,
)
from seawall.shedding import by_criticality
from seawall.web import Health, Lifecycle, Rank, RequestLimit, Trust
from seawall.web.wsgi import Edge, QueueAdmission
from tests.support import received_attempt
from tests.web.support import held_slots
from tests.web.wsgi.support import WsgiServer, ask, environ_of

CALLERS = Trust(callers=["127.0.0.1"])


@pytest.fixture
def make() -> Iterator[Callable[..., Edge]]:
    """Return a function that makes edges, which are closed afterwards."""
    made: list[Edge] = []

    def edge(app: Any, **parts: Any) -> Edge:
        made.append(Edge(app, **parts))
        return made[-1]

    yield edge
    for one in made:
        one.close()
    assert held_slots() == {}


def hello(_environ: Any, start: Any) -> list[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def raising(error: BaseException) -> Callable[..., list[bytes]]:
    def app(_environ: Any, _start: Any) -> list[bytes]:
        raise error

    return app


def counts(edge: Edge) -> tuple[int, int, int, int]:
    shown = edge.snapshot()
    return shown["succeeded"], shown["failed"], shown["cancelled"], shown["rejected"]


# Requests that are served


def test_a_request_passes_unchanged(make: Callable[..., Edge]) -> None:
    """Environ, status, headers and body are those of the app and its client."""
    seen: list[dict[str, Any]] = []

    def app(environ: dict[str, Any], start: Any) -> list[bytes]:
        seen.append(dict(environ))
        return hello(environ, start)

    edge = make(app)
    answer = ask(edge, "/a", headers=[("X-One", "1")], body=b"12")
    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.headers == {"content-type": "text/plain"}
    assert (seen[0]["PATH_INFO"], seen[0]["HTTP_X_ONE"]) == ("/a", "1")
    assert counts(edge) == (1, 0, 0, 0)


def test_it_is_a_wsgi_app_by_the_letter(make: Callable[..., Edge]) -> None:
    """The checker of the standard library stands on both sides of the edge."""

    def app(environ: dict[str, Any], start: Any) -> Iterator[bytes]:
        start("200 OK", [("Content-Type", "text/plain")])
        yield environ["wsgi.input"].read(2)

    edge = validator(make(validator(app), limits=RequestLimit("1/h", by="address")))
    paths = ("/a", "/a", "/health/ready")
    assert [ask(edge, path, body=b"12").status for path in paths] == [200, 429, 200]


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_a_body_of_any_kind_is_sent_and_ends_its_request(
    make: Callable[..., Edge], kind: Callable[..., Any]
) -> None:
    """Lists, tuples and iterators all give back what their request holds."""

    def app(_environ: Any, start: Any) -> Any:
        start("200 OK", [])
        return kind([b"a", b"", b"b"])

    places = Bulkhead(1)
    edge = make(app, concurrency=places)
    assert [ask(edge).body for _ in range(3)] == [b"ab"] * 3
    assert places.in_flight == 0
    assert edge.snapshot()["lifecycle"]["in_flight"] == 0
    assert counts(edge) == (3, 0, 0, 0)


def test_a_stream_holds_its_place_until_it_is_closed(make: Callable[..., Edge]) -> None:
    """Work that produces a body is work; the server ends it by closing the body, once."""
    closed: list[bool] = []

    def app(_environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [])
        try:
            yield b"a"
            yield b"b"
        finally:
            closed.append(True)

    places = Bulkhead(1)
    edge = make(app, concurrency=places)
    server = WsgiServer()
    body: Any = edge(environ_of(), server.start_response)
    assert places.in_flight == 1
    assert next(body) == b"a"
    refused = ask(edge)
    assert (refused.status, refused.json()["reason"]) == (503, "bulkhead_full")
    assert edge.snapshot()["lifecycle"]["in_flight"] == 1
    body.close()
    body.close()
    assert closed == [True]
    assert places.in_flight == 0
    assert edge.snapshot()["lifecycle"]["in_flight"] == 0
    assert counts(edge) == (0, 0, 1, 1)  # its client had gone: neither success nor failure


@pytest.mark.parametrize("read", [1, 2])
def test_a_body_that_nobody_closes_ends_when_it_is_freed(
    make: Callable[..., Edge], read: int
) -> None:
    """A middleware around the edge forgets close(): read to its end or not, the request ends."""
    closed: list[bool] = []

    def app(_environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [])
        try:
            yield b"a"
        finally:
            closed.append(True)

    edge = make(app, concurrency=Bulkhead(1))

    def middleware() -> Iterator[bytes]:
        for part in edge(environ_of(), WsgiServer().start_response):  # noqa: UP028 - would close
            yield part

    parts = middleware()
    for _ in range(read):
        next(parts, None)
    parts.close()  # type: ignore[attr-defined] # as the server does
    gc.collect()
    assert closed == [True]
    assert edge.snapshot()["lifecycle"]["in_flight"] == 0


def test_a_file_is_left_to_the_server(make: Callable[..., Edge]) -> None:
    """The server sends it by itself, so it must see its own wrapper."""

    def app(environ: dict[str, Any], start: Any) -> Any:
        start("200 OK", [])
        return environ["wsgi.file_wrapper"](BytesIO(b"file"))

    places = Bulkhead(1)
    edge = make(app, concurrency=places)
    environ = environ_of(**{"wsgi.file_wrapper": FileWrapper})
    assert isinstance(edge(environ, WsgiServer().start_response), FileWrapper)
    assert places.in_flight == 0


def test_parts_that_are_written_count_as_the_response(make: Callable[..., Edge]) -> None:
    """An app that calls write() has begun to answer: there is no other status any more."""

    def app(_environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [])(b"written ")
        raise CircuitOpen("too late for another answer")

    server = WsgiServer()
    with pytest.raises(CircuitOpen):
        make(app)(environ_of(), server.start_response)
    assert server.answer[:3] == (200, {}, b"written ")


# Refusals and errors


def test_an_error_of_seawall_is_a_problem(make: Callable[..., Edge]) -> None:
    """Status, Retry-After and problem+json are those of the ASGI edge."""
    edge = make(raising(CircuitOpen("guard 'db': secret", retry_after=7.0)))
    answer = ask(edge)
    assert answer.status == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "7"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.json()["reason"] == "circuit_open"
    assert b"secret" not in answer.body
    assert counts(edge) == (0, 1, 0, 0)


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), TimedOut("late")])
def test_no_time_is_504(make: Callable[..., Edge], error: Exception) -> None:
    """A deadline that escapes from the app is a gateway timeout."""
    assert ask(make(raising(error))).status == 504


def test_an_upstream_is_502_and_logged(
    make: Callable[..., Edge], caplog: pytest.LogCaptureFixture
) -> None:
    """The failure of another service is no bug of this one; the path is not logged."""
    import httpx

    edge = make(raising(httpx.ConnectError("refused")))
    assert ask(edge, "/secret").status == 502
    assert "GET (no route) is answered with 502" in caplog.text
    assert "/secret" not in caplog.text


def test_a_bug_is_raised(make: Callable[..., Edge]) -> None:
    """The server, or a middleware around the edge, gets what the edge does not know."""
    edge = make(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        ask(edge)
    assert counts(edge) == (0, 1, 0, 0)
    assert edge.snapshot()["lifecycle"]["in_flight"] == 0


def test_a_refusal_of_head_has_no_body(make: Callable[..., Edge]) -> None:
    """It has the headers that GET would have."""
    answer = ask(make(raising(TimedOut("late"))), method="HEAD")
    assert (answer.status, answer.body) == (504, b"")
    assert int(answer.headers["content-length"]) > 0


def test_an_error_before_the_first_part_replaces_the_answer(make: Callable[..., Edge]) -> None:
    """Until a part of the body is sent the server can take another status."""

    def app(_environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [("Content-Length", "5")])
        yield b""
        raise CircuitOpen("guard 'db': open")

    edge = make(app)
    answer = ask(edge)
    assert (answer.status, answer.starts) == (503, 2)
    assert answer.json()["reason"] == "circuit_open"
    assert counts(edge) == (0, 1, 0, 0)


def test_an_error_after_the_first_part_is_raised(make: Callable[..., Edge]) -> None:
    """Then the server has to break the connection off."""

    def app(_environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [])
        yield b"a"
        raise CircuitOpen("guard 'db': open")

    places = Bulkhead(1)
    edge = make(app, concurrency=places)
    with pytest.raises(CircuitOpen):
        ask(edge)
    assert places.in_flight == 0
    assert counts(edge) == (0, 1, 0, 0)


def test_a_start_with_an_exception_is_passed_on(make: Callable[..., Edge]) -> None:
    """An app may replace its own answer, as PEP 3333 allows."""
    import sys

    def app(_environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [])
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            start("500 Internal Server Error", [], sys.exc_info())
        return [b"sorry"]

    edge = make(app)
    answer = ask(edge)
    assert (answer.status, answer.body, answer.starts) == (500, b"sorry", 2)
    assert counts(edge) == (0, 1, 0, 0)  # by the status that was sent in the end


def test_limits_are_told_and_kept(make: Callable[..., Edge]) -> None:
    """Headers and refusals are those of the ASGI edge."""
    edge = make(hello, limits=[RequestLimit("2/h", by="address")])
    first, _, third = (ask(edge) for _ in range(3))
    assert first.headers["ratelimit"] == '"address";r=1;t=1800'
    assert third.status == 429
    assert third.headers["ratelimit"] == '"address";r=0;t=1800'
    assert third.headers["retry-after"] == "1800"
    assert third.json()["violated-policies"] == ["address"]
    assert ask(edge, client="127.0.0.2").status == 200


def test_a_request_that_is_refused_further_in_gives_back(make: Callable[..., Edge]) -> None:
    """Nothing is taken from a limit for a request that got no place."""
    places = Bulkhead(1)
    edge = make(hello, limits=RequestLimit("1/h", by="address"), concurrency=places)
    with Guard("holder", places).hold():
        refused = ask(edge)
    assert (refused.status, refused.headers.get("ratelimit")) == (503, None)
    assert ask(edge).status == 200
    assert ask(edge).status == 429


def test_a_place_is_waited_for_in_the_thread(make: Callable[..., Edge]) -> None:
    """A bulkhead with max_wait blocks the thread until a place is free."""
    places = Bulkhead(1, max_wait=30)
    edge = make(hello, concurrency=places, limits=RequestLimit("9/h", by="address"))
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(edge).status))
    with Guard("other", places).hold():
        waiting.start()
        while not places.waiting:
            pass
    waiting.join(10)
    assert answers == [200]


def test_a_route_has_its_own_places(make: Callable[..., Edge]) -> None:
    """Templates are matched below SCRIPT_NAME."""
    reports = Bulkhead(1)
    edge = make(hello, routes={"/reports/{id}": reports})
    with Guard("report", reports).hold():
        assert ask(edge, "/reports/7").status == 503
        assert ask(edge, "/reports/7", SCRIPT_NAME="/shop").status == 503
        assert ask(edge, "/other").status == 200


def test_shedding_goes_by_criticality(make: Callable[..., Edge]) -> None:
    """What classify says is known before the shedder is asked."""

    def rank(incoming: Any) -> Rank:
        return Rank(Criticality.SHEDDABLE if incoming.path == "/batch" else Criticality.CRITICAL)

    edge = make(hello, classify=rank, shed=Shed(by_criticality(), load=lambda: 0.82))
    assert [ask(edge, path).status for path in ("/batch", "/page")] == [503, 200]


# The context


def test_the_deadline_is_in_the_context_of_all_of_the_app(make: Callable[..., Edge]) -> None:
    """Also where the app is a generator, until its response begins."""
    clock = VirtualClock()
    seen: list[float | None] = []

    def app(_environ: Any, start: Any) -> Iterator[bytes]:
        seen.append(seconds_left())
        start("200 OK", [])
        yield b"first"
        seen.append(seconds_left())  # the response has begun: nothing is left to cut off

    edge = make(app, timeout=10, reserve=1, trust=CALLERS, clock=clock)
    before = deadline_var.get()
    ask(edge)
    ask(edge, headers=[("Grpc-Timeout", "3S")])
    assert seen == [pytest.approx(9), None, pytest.approx(2), None]
    assert deadline_var.get() is before


def test_a_caller_out_of_time_is_not_run(make: Callable[..., Edge]) -> None:
    """It gets 504, and the app is not called."""
    edge = make(hello, trust=CALLERS)
    answer = ask(edge, headers=[("Grpc-Timeout", "0S")])
    assert answer.status == 504
    assert counts(edge) == (0, 0, 0, 0)
    assert edge.snapshot()["inbound"]["expired"] == 1


@pytest.mark.parametrize(
    ("name", "value", "left", "attempt"),
    [
        ("X-Server-Timeout", "5,5", 5, 0),
        ("X-Server-Timeout", "5, 5", 5, 0),
        ("X-Server-Timeout", "5,6", 10, 0),
        ("Seawall-Attempt", "2,2", 10, 2),
        ("Seawall-Attempt", "2,3", 10, 0),
    ],
)
def test_lines_that_the_server_has_joined_count_as_lines(
    make: Callable[..., Edge], name: str, value: str, left: int, attempt: int
) -> None:
    """Equal values are one, different ones are none, as in the edge for ASGI."""
    seen: list[Any] = []

    def app(environ: Any, start: Any) -> list[bytes]:
        seen.append((seconds_left(), received_attempt()))
        return hello(environ, start)

    ask(make(app, timeout=10, reserve=0.001, trust=CALLERS), headers=[(name, value)])
    assert seen == [(pytest.approx(left, abs=0.5), attempt)]


def test_time_in_the_servers_queue_counts(make: Callable[..., Edge]) -> None:
    """The time since a trusted proxy passed the request on is part of its time."""
    seen: list[float | None] = []

    def app(environ: Any, start: Any) -> list[bytes]:
        seen.append(seconds_left())
        return hello(environ, start)

    proxied = Trust(proxies=["127.0.0.1"], callers=["10.0.0.1"])
    edge = make(app, timeout=10, reserve=0.01, trust=proxied, queue_admission=None)
    start = [("X-Forwarded-For", "10.0.0.1"), ("X-Request-Start", f"t={wall_time() - 4:.3f}")]
    assert ask(edge, headers=start).status == 200
    assert seen[0] == pytest.approx(6, abs=1)
    late = [*start, ("Grpc-Timeout", "3S")]
    assert ask(edge, headers=late).status == 504
    assert ask(edge, headers=start, client="10.0.0.9").status == 200  # no proxy: not believed
    assert seen[1] == pytest.approx(10, abs=1)


def test_guards_inside_obey_the_deadline(make: Callable[..., Edge]) -> None:
    """A thread cannot be cancelled, but guards in it see the deadline."""
    clock = VirtualClock()
    vendor = Guard("vendor", Timeout(60, sync="cooperative"), clock=clock)

    @vendor
    def call() -> None:
        clock.advance(5)
        check_deadline()

    def app(environ: Any, start: Any) -> list[bytes]:
        call()
        return hello(environ, start)

    assert ask(make(app, timeout=3, clock=clock)).status == 504
    vendor.close()


def test_headers_of_strangers_do_not_reach_the_app(make: Callable[..., Edge]) -> None:
    """So no client in the app can pass them on."""
    seen: list[dict[str, Any]] = []

    def app(environ: dict[str, Any], start: Any) -> list[bytes]:
        seen.append({key: value for key, value in environ.items() if key.startswith("HTTP_")})
        return hello(environ, start)

    edge = make(app)
    sent = [
        ("Grpc-Timeout", "5S"),
        ("Baggage", "criticality=0,color=red"),
        ("Accept", "*/*"),
    ]
    ask(edge, headers=sent)
    assert "HTTP_GRPC_TIMEOUT" not in seen[0]
    assert seen[0]["HTTP_ACCEPT"] == "*/*"


leaked: ContextVar[str] = ContextVar("leaked", default="")


def test_a_thread_keeps_nothing_of_a_request(make: Callable[..., Edge]) -> None:
    """The thread serves others next: neither our values nor the app's own may stay."""

    def app(_environ: Any, start: Any) -> Iterator[bytes]:
        seen.append((leaked.get(), current_criticality(), current_tenant()))
        leaked.set("by the app")
        start("200 OK", [])
        yield b"a"
        leaked.set("by its body")
        yield b"b"

    seen: list[Any] = []
    edge = make(app, classify=lambda _incoming: Criticality.SHEDDABLE)
    for _ in range(2):
        ask(edge)
    assert seen == [("", Criticality.SHEDDABLE, None)] * 2
    assert leaked.get() == ""
    assert current_criticality() is Criticality.CRITICAL


def test_steps_of_a_body_share_the_context_of_the_app(make: Callable[..., Edge]) -> None:
    """A framework may set a variable in one step and reset it in another."""

    def app(_environ: Any, start: Any) -> Iterator[bytes]:
        token = leaked.set("one")
        start("200 OK", [])
        yield leaked.get().encode()
        leaked.reset(token)  # raises in any other context
        yield leaked.get().encode() or b"-"

    assert ask(make(app)).body == b"one-"


def test_an_edge_inside_an_edge_keeps_the_nearer_deadline(make: Callable[..., Edge]) -> None:
    """The inner one cannot give more time than is left."""
    clock = VirtualClock()
    seen: list[float | None] = []

    def app(environ: Any, start: Any) -> list[bytes]:
        seen.append(seconds_left())
        return hello(environ, start)

    inner = make(app, timeout=50, reserve=0.5, clock=clock, name="inner")
    outer = make(inner, timeout=10, reserve=1, clock=clock, name="outer")
    assert ask(outer).status == 200
    assert seen == [pytest.approx(8.5)]


def test_degraded_answers_are_told_if_asked_for(make: Callable[..., Edge]) -> None:
    """The header is that of the ASGI edge."""
    prices = Guard("prices", Fallback(old))

    def app(environ: Any, start: Any) -> list[bytes]:
        prices.call(broken)
        return hello(environ, start)

    assert ask(make(app, report_degraded=True)).headers["seawall-degraded"] == '"old";level=1'
    assert "seawall-degraded" not in ask(make(app, name="silent")).headers

    def breaks(environ: Any, start: Any) -> list[bytes]:
        app(environ, start)
        raise CircuitOpen("open")

    replaced = ask(make(breaks, name="breaks", report_degraded=True))
    assert (replaced.status, replaced.headers.get("seawall-degraded")) == (503, None)
    prices.close()


def old() -> str:
    return "old"


def broken() -> str:
    raise ConnectionError("no route")


# Health and settings


def test_probes_are_answered(make: Callable[..., Edge]) -> None:
    """Checks run off the request's thread, plain functions and coroutines."""
    lifecycle = Lifecycle()
    health = Health(lifecycle=lifecycle)
    state = {"db": True}
    health.add("db", lambda: state["db"], ttl=0)

    async def queue() -> str:
        return "long"

    health.add("queue", queue, level="deep")
    edge = make(raising(AssertionError()), health=health, lifecycle=lifecycle)
    assert ask(edge, "/health/ready").json() == {"status": "pass"}
    assert ask(edge, "/health/live", method="HEAD").body == b""
    assert ask(edge, "/health/live", method="POST").status == 405
    deep = ask(edge, "/health/deep")
    assert (deep.status, deep.json()["status"]) == (200, "warn")
    assert deep.headers["content-type"] == "application/health+json"
    state["db"] = False
    assert ask(edge, "/health/ready").status == 503
    assert counts(edge) == (0, 0, 0, 0)


def test_it_is_ready_after_its_warm_up(make: Callable[..., Edge]) -> None:
    """Requests are served meanwhile; the load balancer waits."""
    lifecycle = Lifecycle()
    warm = threading.Event()
    lifecycle.warm_up(lambda: warm.wait(20))
    edge = make(hello, lifecycle=lifecycle)
    assert ask(edge).status == 200
    assert ask(edge, "/health/ready").json() == {"status": "fail", "output": "starting"}
    warm.set()
    while ask(edge, "/health/ready").status != 200:
        pass
    assert edge.snapshot()["lifecycle"]["state"] == "ready"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"queue_admission": Bulkhead(1)}, "QueueAdmission"),
        ({"concurrency": 5}, "AdaptiveLimit"),
        ({"limits": "600/min"}, "RequestLimit"),
        ({"health": True}, "Health"),
        ({"lifecycle": True}, "Lifecycle"),
        ({"routes": {"/a": 1}}, "Bulkhead"),
        ({"report_degraded": 1}, "report_degraded"),
    ],
)
def test_wrong_parts_say_what_to_write(parts: dict[str, Any], says: str) -> None:
    """At construction, before any request."""
    with pytest.raises(TypeError, match=says):
        Edge(hello, **parts)


def test_an_app_must_be_callable() -> None:
    """Anything else is told at once."""
    with pytest.raises(TypeError, match="app"):
        Edge(7)  # type: ignore[arg-type]


def test_it_works_without_any_part(make: Callable[..., Edge]) -> None:
    """Each part can be left out."""
    edge = make(hello, timeout=None, queue_admission=None, health=None, lifecycle=None, name="bare")
    assert ask(edge, "/health/live").body == b"hello"
    assert edge.snapshot()["succeeded"] == 1
    assert repr(edge) == "<Edge 'bare'>"


def test_queue_admission_has_sane_settings() -> None:
    """A queue must be allowed to last for longer than a wait."""
    with pytest.raises(ValueError, match="patience"):
        QueueAdmission(target=1, patience=1)
