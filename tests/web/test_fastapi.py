"""FastAPI and Starlette: one line for the app, dependencies for a route, answers in OpenAPI."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from fastapi.openapi.models import OpenAPI
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route, Router
from starlette.testclient import TestClient

from seawall import (
    Breaker,
    Bulkhead,
    CircuitOpen,
    Guard,
    Overloaded,
    RateLimit,
    SeawallError,
    TimedOut,
    current_deadline,
)
from seawall.clients.llm import Model, Models
from seawall.testing import run_virtual
from seawall.web import RequestLimit, Trust, address_and_route, primed
from seawall.web.fastapi import guarded, limited, protect
from tests.redis.support import eventually
from tests.support import let_pass, new_guard
from tests.web.support import Answer, ask, http_scope, serve


def asked(app: Any, path: str = "/", **more: Any) -> Answer:
    """Make one request of `app`."""
    return asyncio.run(ask(app, path, **more))


def lines(answer: Answer, name: str) -> list[str]:
    """Return all values of one header of `answer`."""
    start = answer.messages[0]
    return [value.decode() for key, value in start["headers"] if key == name.encode()]


async def connected(app: Any, path: str) -> list[dict[str, Any]]:
    """Open a websocket; return what the app sent."""
    sent: list[dict[str, Any]] = []
    scope = http_scope(path, extensions={"websocket.http.response": {}}) | {"type": "websocket"}
    del scope["method"]
    said = iter([{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}])

    async def receive() -> dict[str, Any]:
        return next(said)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


# Errors

BROKEN = {
    "circuit": (CircuitOpen("guard 'x' at 10.0.0.1", retry_after=7.0), 503, "circuit_open"),
    "connect": (httpx.ConnectError("10.0.0.1 refused"), 502, "upstream"),
    "status": (
        httpx.HTTPStatusError(
            "500 of http://10.0.0.1",
            request=httpx.Request("GET", "http://10.0.0.1"),
            response=httpx.Response(500),
        ),
        502,
        "upstream",
    ),
    "late": (TimedOut("10.0.0.1 was slow"), 504, "timed_out"),
    "read": (httpx.ReadTimeout("10.0.0.1 was slow"), 504, "upstream"),
}


class Passing(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Any:
        return await call_next(request)


async def opens(kind: str) -> AsyncIterator[str]:
    yield kind


def broken_app(*, between: bool) -> FastAPI:
    """Return an app whose routes raise what they are told, in each way that FastAPI knows."""
    app = FastAPI()
    if between:
        app.add_middleware(Passing)
    protect(app)

    async def needs(kind: str) -> None:
        raise BROKEN[kind][0]

    @app.get("/async/{kind}")
    async def in_coroutine(kind: str) -> None:
        raise BROKEN[kind][0]

    @app.get("/sync/{kind}")
    def in_thread(kind: str) -> None:
        raise BROKEN[kind][0]

    @app.get("/dependency/{kind}", dependencies=[Depends(needs)])
    async def in_dependency(kind: str) -> None:
        raise AssertionError(f"called for {kind}")

    @app.get("/opened/{kind}")
    async def after_a_dependency(kind: Annotated[str, Depends(opens)]) -> None:
        raise BROKEN[kind][0]

    return app


@pytest.mark.parametrize("between", [False, True], ids=["bare", "BaseHTTPMiddleware"])
@pytest.mark.parametrize("way", ["async", "sync", "dependency", "opened"])
def test_what_a_handler_lets_pass_is_answered(way: str, *, between: bool) -> None:
    """Errors of ours and of upstreams become problems, wherever in the app they are raised."""
    app = broken_app(between=between)
    for kind, (_error, status, reason) in BROKEN.items():
        answer = asked(app, f"/{way}/{kind}")
        assert (answer.status, answer.json()["reason"]) == (status, reason)
        assert answer.headers["content-type"] == "application/problem+json"
        assert ("retry-after" in answer.headers) == (status == 503)
        assert b"10.0.0.1" not in answer.body


@pytest.mark.parametrize("way", ["async", "sync"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_primed_stream_that_fails_before_its_first_item_is_no_200(kind: str, way: str) -> None:
    """The error is raised before the response starts, so that its status can say so."""
    app = FastAPI()
    protect(app)
    error, status, reason = BROKEN[kind]

    async def abroken() -> AsyncIterator[str]:
        raise error
        yield ""

    def broken() -> Iterator[str]:
        raise error
        yield ""

    @app.get("/async")
    async def in_coroutine() -> StreamingResponse:
        return StreamingResponse(await primed(Models(Model("one", abroken)).astream()))

    @app.get("/sync")
    def in_thread() -> StreamingResponse:
        return StreamingResponse(primed(Models(Model("one", broken)).stream()))

    @app.get("/without")
    async def without() -> StreamingResponse:
        return StreamingResponse(Models(Model("one", abroken)).astream())

    answer = asked(app, f"/{way}")
    assert (answer.status, answer.json()["reason"]) == (status, reason)
    sent: list[dict[str, Any]] = []
    with pytest.raises(BaseException):  # noqa: B017,PT011 - in a group or not, by the way it is sent
        asyncio.run(ask(app, "/without", on_send=sent.append))
    assert [message.get("status") for message in sent] == [200]


@pytest.mark.parametrize("way", ["async", "sync"])
def test_a_primed_stream_is_sent_whole_and_gives_its_place_back(way: str) -> None:
    """All items arrive; the guard's place is free at the end, and also if the client leaves."""
    app = FastAPI()
    protect(app)
    slots = Bulkhead(1)
    guard = new_guard(slots)

    @guard
    async def awords() -> AsyncIterator[str]:
        for word in ("one ", "two ", "three"):
            yield word

    @guard
    def words() -> Iterator[str]:
        yield from ("one ", "two ", "three")

    @app.get("/async")
    async def in_coroutine() -> StreamingResponse:
        return StreamingResponse(await primed(awords()))

    @app.get("/sync")
    def in_thread() -> StreamingResponse:
        return StreamingResponse(primed(words()))

    async def leaves(message: dict[str, Any]) -> None:
        if b"two" in message.get("body", b""):
            raise OSError("gone")

    async def main() -> None:
        answer = await ask(app, f"/{way}")
        assert (answer.status, answer.body, slots.in_flight) == (200, b"one two three", 0)
        with suppress(BaseException):
            await ask(app, f"/{way}", on_send=leaves)
        gc.collect()
        await let_pass(0.0)  # the event loop closes the generators that were dropped
        await let_pass(0.0)
        assert slots.in_flight == 0

    asyncio.run(main())


def holding(*, own: bool = False, name: str = "edge") -> FastAPI:
    """Return an app with a broken one mounted in one that is mounted in it."""
    innermost, inner, app = FastAPI(), FastAPI(), FastAPI()

    @innermost.get("/bug")
    async def bug() -> None:
        raise ValueError("bug")

    @innermost.get("/started")
    async def started() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"half"
            raise CircuitOpen("too late")

        return StreamingResponse(parts())

    @innermost.get("/{kind}")
    async def broken(kind: str) -> None:
        raise BROKEN[kind][0]

    @innermost.websocket("/{kind}")
    async def socket(kind: str) -> None:
        raise BROKEN[kind][0]

    if own:

        @innermost.exception_handler(CircuitOpen)
        async def handler(_request: Request, _error: Exception) -> JSONResponse:
            return JSONResponse("own", 418)

    inner.mount("/most", innermost)
    app.mount("/inner", inner)
    protect(app, name=name)
    return app


def test_apps_that_are_mounted_in_the_app_answer_alike() -> None:
    """What is raised there does not reach the edge, and is answered as the edge would."""
    app = holding()
    for kind, (_error, status, reason) in BROKEN.items():
        answer = asked(app, f"/inner/most/{kind}")
        assert (answer.status, answer.json()["reason"]) == (status, reason)
        sent = asyncio.run(connected(app, f"/inner/most/{kind}"))
        assert sent[0]["status"] == status
    assert asked(holding(own=True, name="own"), "/inner/most/circuit").status == 418
    alone = TestClient(app, raise_server_exceptions=False)
    assert alone.get("/inner/most/bug").status_code == 500
    assert alone.get("/inner/most/started").status_code == 200


class Wrapping:
    """A middleware that keeps what it stands around, under a name that is not `app`."""

    def __init__(self, app: Any) -> None:
        self._inside = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._inside(scope, receive, send)


def test_mounted_apps_behind_middlewares_answer_alike() -> None:
    """Whether a mount has them or somebody has put them around the app, and around a router."""

    def broken() -> Starlette:
        async def raises(_request: Request) -> None:
            raise CircuitOpen("open", retry_after=7.0)

        return Starlette(routes=[Route("/x", raises)])

    app = Starlette(
        routes=[
            Mount("/by-mount", app=broken(), middleware=[Middleware(Wrapping)]),
            Mount("/by-hand", app=GZipMiddleware(GZipMiddleware(broken()))),
            Mount("/router", app=GZipMiddleware(Router([Mount("/deep", app=broken())]))),
        ]
    )
    app.mount("/again", GZipMiddleware(app))
    protect(app)
    for path in ("/by-mount/x", "/by-hand/x", "/router/deep/x", "/again/by-hand/x"):
        answer = asked(app, path)
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")


def test_a_middleware_around_itself_is_left_alone() -> None:
    """Who looks for what it stands around does not look forever."""
    circle = Wrapping(PlainTextResponse("hello"))
    circle.app = circle  # type: ignore[attr-defined]
    app = Starlette(routes=[Mount("/", app=circle)])
    protect(app)
    assert asked(app, "/").body == b"hello"


def test_without_our_answers_a_mounted_app_says_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework makes that of what is raised in it."""
    monkeypatch.setattr("seawall.web.fastapi._mounted_in", lambda _routes: ())
    app = holding()
    with pytest.raises(CircuitOpen):
        asked(app, "/inner/most/circuit")
    client = TestClient(app, raise_server_exceptions=False)
    assert client.get("/inner/most/circuit").status_code == 500


def test_a_mounted_app_with_an_edge_of_its_own_is_left_alone() -> None:
    """Nor is one told twice, in whatever apps it is mounted."""
    inner, plain, app, other = FastAPI(), FastAPI(), FastAPI(), FastAPI()
    for outer in (app, other):
        outer.mount("/inner", inner)
        outer.mount("/plain", plain)
    for name, protected in {"inner": inner, "app": app, "other": other}.items():
        protect(protected, name=name)

    @inner.get("/")
    @plain.get("/")
    async def broken() -> None:
        raise CircuitOpen("open")

    for outer in (app, other):
        assert asked(outer, "/inner/").status == asked(outer, "/plain/").status == 503
    assert [len(known.user_middleware) for known in (inner, plain)] == [1, 1]


def test_a_bug_of_the_app_stays_its_own() -> None:
    """What is neither ours nor an upstream's is answered by the framework, and raised."""
    app = FastAPI()
    protect(app)

    @app.get("/")
    async def bug() -> None:
        raise ValueError("bug")

    answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    with pytest.raises(ValueError, match="bug"):
        asked(app)


def test_a_handler_of_the_apps_own_comes_first() -> None:
    """Who registers a handler for errors of ours answers them as they like."""
    app = FastAPI()
    protect(app)

    @app.exception_handler(SeawallError)
    async def own(_request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"own": type(error).__name__}, 418)

    @app.get("/")
    async def broken() -> None:
        raise Overloaded("shed")

    answer = asked(app)
    assert (answer.status, answer.json()) == (418, {"own": "Overloaded"})


def test_a_vendors_limit_is_503_and_a_routes_own_429() -> None:
    """The limit of a guard is this service's affair; that of a route is its caller's."""
    app = FastAPI()
    protect(app, limits=RequestLimit("100/min", by="address"))
    vendor = Guard("vendor", RateLimit("1/min"))

    @app.get("/vendor", dependencies=[Depends(guarded(vendor))])
    async def by_vendor() -> str:
        return "asked"

    @app.get(
        "/own", dependencies=[Depends(limited(RequestLimit("1/min", by="address", name="own")))]
    )
    async def by_route() -> str:
        return "asked"

    assert [asked(app, "/vendor").status for _ in range(2)] == [200, 503]
    passed, refused = asked(app, "/own"), asked(app, "/own")
    assert (passed.status, refused.status) == (200, 429)
    assert refused.json()["violated-policies"] == ["own"]
    assert int(refused.headers["retry-after"]) in range(1, 61)
    for answer, left in ((passed, "0"), (refused, "0")):
        assert lines(answer, "ratelimit-policy") == ['"address";q=100;w=60', '"own";q=1;w=60']
        assert [line.partition(";t=")[0] for line in lines(answer, "ratelimit")] == [
            f'"address";r={97 if answer is passed else 96}',
            f'"own";r={left}',
        ]


# A route's own limit or guard


@pytest.mark.parametrize("returned", ["value", "response", "error", "problem"])
def test_whatever_a_route_returns_its_limits_are_told(returned: str) -> None:
    """A response that the route made itself, and one that another part makes, tell of them too."""
    app = FastAPI()
    protect(app)

    @app.get("/", dependencies=[Depends(limited(RequestLimit("5/min", by="address")))])
    async def route() -> Any:
        if returned == "error":
            raise CircuitOpen("open", retry_after=1.0)
        if returned == "problem":
            raise httpx.ConnectError("away")
        return PlainTextResponse("made") if returned == "response" else "value"

    answer = asked(app)
    assert lines(answer, "ratelimit-policy") == ['"address";q=5;w=60']
    assert lines(answer, "ratelimit") == ['"address";r=4;t=12']


def test_without_an_edge_a_limit_still_counts_and_tells() -> None:
    """Nobody is trusted then, and nobody maps the error."""
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limited(RequestLimit("1/min", by="address")))])
    async def route() -> str:
        return "value"

    assert lines(asked(app), "ratelimit-policy") == ['"address";q=1;w=60']
    with pytest.raises(SeawallError, match="1/min"):
        asked(app, headers=[("x-forwarded-for", "192.0.2.7")])


def test_behind_a_trusted_proxy_each_client_has_its_own_limit() -> None:
    """What protect is told to trust holds for the edge and for dependencies."""
    app = FastAPI()
    protect(app, trust=Trust(proxies=["127.0.0.0/8"]), limits=RequestLimit("3/min", by="address"))

    @app.get("/", dependencies=[Depends(limited(RequestLimit("1/min", by="address", name="own")))])
    async def route() -> str:
        return "value"

    def as_client(address: str, peer: str = "127.0.0.1") -> Answer:
        forwarded = [("x-forwarded-for", address)]
        return asked(app, headers=forwarded, client=(peer, 1))

    assert [as_client("192.0.2.1").status for _ in range(2)] == [200, 429]
    assert [as_client("192.0.2.2").status for _ in range(2)] == [200, 429]
    # Who is no proxy speaks for nobody else.
    assert as_client("192.0.2.3", "203.0.113.9").status == 200
    assert as_client("192.0.2.4", "203.0.113.9").status == 429
    assert [as_client("192.0.2.1").json()["violated-policies"] for _ in range(2)] == [
        ["own"],
        ["address"],
    ]


def test_a_routes_limit_counts_by_what_a_login_has_found() -> None:
    """Whoever stands between the edge and the route may rewrite a header that anybody can send."""

    class Login:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            known = [pair for pair in scope.get("headers", ()) if pair[0] != b"x-user"]
            await self.app({**scope, "headers": [*known, (b"x-user", b"ann")]}, receive, send)

    app = FastAPI()
    by_user = RequestLimit("1/min", by=lambda incoming: incoming.header("x-user"), name="own")

    @app.get("/", dependencies=[Depends(limited(by_user))])
    async def there() -> str:
        return "ok"

    app.add_middleware(Login)
    protect(app, name="past a login")
    with TestClient(app) as client:
        statuses = [client.get("/", headers={"x-user": f"made-up-{n}"}).status_code for n in (1, 2)]
    assert statuses == [200, 429]


def test_trusted_callers_set_the_deadline_of_a_route() -> None:
    """The edge that protect makes reads what they send, and drops what strangers do."""
    app = FastAPI()
    protect(app, timeout=20.0, trust=Trust(callers=["10.0.0.0/8"]))

    @app.get("/")
    async def route() -> float:
        found = current_deadline()
        assert found is not None
        return found.remaining()

    def left(peer: str) -> float:
        header = [("x-envoy-expected-rq-timeout-ms", "5000")]
        found: float = asked(app, headers=header, client=(peer, 1)).json()
        return found

    assert 4.0 < left("10.0.0.1") <= 5.0
    assert 19.0 < left("192.0.2.1") <= 20.0


def nested() -> FastAPI:
    """Return an app with one dependency in two included routers, and in an app mounted twice."""
    by_route = Depends(limited(RequestLimit("1/min", by=address_and_route(), name="route")))
    router = APIRouter()

    @router.get("/search", dependencies=[by_route])
    async def search() -> str:
        return "found"

    @router.get("/items/{item}", dependencies=[by_route])
    async def find(item: str) -> str:
        return item

    inner = FastAPI()
    inner.include_router(router)
    app = FastAPI()
    protect(app, trust=Trust(proxies=["127.0.0.0/8"]))
    app.include_router(router, prefix="/a")
    app.include_router(router, prefix="/b/{tenant}")
    app.mount("/inner", inner)
    return app


def test_limits_act_in_included_routers_and_mounted_apps() -> None:
    """Templates tell routes apart, with the prefix of their router; what is made up does not."""
    app = nested()

    def status(path: str, client: str = "192.0.2.1") -> int:
        return asked(app, path, headers=[("x-forwarded-for", client)]).status

    assert [status("/a/search") for _ in range(2)] == [200, 429]
    assert [status("/b/x/search"), status("/b/y/search")] == [200, 429]
    assert [status("/a/items/1"), status("/a/items/2")] == [200, 429]
    assert [status("/a/search", "192.0.2.2") for _ in range(2)] == [200, 429]
    assert [status("/inner/search") for _ in range(2)] == [200, 429]


def test_a_websocket_passes_the_limit_of_its_route() -> None:
    """Who is refused gets the problem as an answer to the handshake."""
    app = FastAPI()
    protect(app)

    @app.websocket("/ws", dependencies=[Depends(limited(RequestLimit("1/min", by="address")))])
    async def route(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    async def main() -> None:
        opened, refused = await connected(app, "/ws"), await connected(app, "/ws")
        assert [message["type"] for message in opened] == ["websocket.accept", "websocket.close"]
        assert (b"ratelimit-policy", b'"address";q=1;w=60') in opened[0]["headers"]
        assert refused[0]["type"] == "websocket.http.response.start"
        assert refused[0]["status"] == 429
        assert (b"ratelimit-policy", b'"address";q=1;w=60') in refused[0]["headers"]

    asyncio.run(main())


def test_a_guard_is_held_while_the_function_runs() -> None:
    """Its gates are left when the route is over, and told how that went."""
    guard = Guard("reports", Bulkhead(1), Breaker(consecutive=2, break_for=60.0))
    app = FastAPI()
    protect(app)

    @app.get("/{seconds}", dependencies=[Depends(guarded(guard))])
    async def report(seconds: int) -> str:
        await let_pass(float(seconds))
        if seconds == 0:
            raise httpx.ConnectError("away")
        return "report"

    async def main() -> None:
        first = asyncio.create_task(ask(app, "/2"))
        await let_pass(1.0)
        assert (await ask(app, "/1")).json()["reason"] == "bulkhead_full"
        assert (await first).status == 200
        assert [(await ask(app, "/0")).status for _ in range(3)] == [502, 502, 503]

    run_virtual(main())
    with pytest.raises(TypeError, match="pass a Guard"):
        guarded(Bulkhead(1))  # type: ignore[arg-type]


# The app as a whole


def test_routes_have_places_of_their_own_wherever_they_are() -> None:
    """A template is that of the whole path below where the app is served."""
    app = FastAPI()
    router = APIRouter()

    @router.get("/{report}")
    async def route(report: str) -> str:
        await let_pass(1.0)
        return report

    app.include_router(router, prefix="/included")
    inner = FastAPI()
    inner.include_router(router)
    app.mount("/mounted", inner)
    routes = {"/included/{report}": Bulkhead(1), "/mounted/{report}": Bulkhead(1)}
    edge = protect(app, routes=routes)

    async def main() -> None:
        for root in ("", "/api"):
            for prefix in ("/included", "/mounted"):
                paths = [f"{root}{prefix}/{name}" for name in ("x", "y")]
                answers = await asyncio.gather(*(ask(app, p, root_path=root) for p in paths))
                assert [answer.status for answer in answers] == [200, 503]
        assert set(edge.snapshot()["routes"]) == set(routes)

    run_virtual(main())


class Marking:
    """A middleware that notes its name on the way in, and on the response."""

    seen: list[str] = []  # noqa: RUF012 - one list for all

    def __init__(self, app: Any, name: str) -> None:
        self.app = app
        self.name = name

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.seen.append(self.name)
        await self.app(scope, receive, send)


def test_middlewares_stand_around_the_edge_or_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One added before is spared what the edge refuses; CORS, added after, marks refusals too."""
    monkeypatch.setattr(Marking, "seen", [])
    app = FastAPI()
    app.add_middleware(Marking, name="inside")
    protect(app, limits=RequestLimit("1/min", by="address"))
    app.add_middleware(Marking, name="outside")
    app.add_middleware(CORSMiddleware, allow_origins=["https://page.example"])

    @app.get("/")
    async def route() -> str:
        return "value"

    origin = [("origin", "https://page.example")]
    answers = [asked(app, headers=origin) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 429]
    assert Marking.seen == ["outside", "inside", "outside"]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "https://page.example"


def test_an_app_is_protected_once_and_before_it_starts() -> None:
    """Each mistake says what it is, and takes no name."""
    app = FastAPI()
    protect(app, name="once")
    with pytest.raises(RuntimeError, match="has an edge already"):
        protect(app, name="twice")
    started = FastAPI()
    asked(started)
    with pytest.raises(RuntimeError, match="started already"):
        protect(started, name="twice")
    with pytest.raises(TypeError, match="others take Edge"):
        protect(asked, name="twice")  # type: ignore[arg-type]
    protect(FastAPI(), name="twice")


def test_before_its_app_is_called_an_edge_has_nothing_to_serve() -> None:
    """The edge that protect returns is for looking at; servers are given the app."""
    edge = protect(FastAPI())
    with pytest.raises(RuntimeError, match="not been called yet"):
        asked(edge)
    assert edge.snapshot()["lifecycle"]["in_flight"] == 0


def test_an_app_is_used_by_test_clients_again_and_again() -> None:
    """With a lifespan or without one, in one loop after another."""
    app = FastAPI()
    protect(app, limits=RequestLimit("100/min", by="address"))

    @app.get("/")
    async def route() -> str:
        return "value"

    for _ in range(2):
        with TestClient(app) as client:
            assert client.get("/").status_code == 200
            assert client.get("/health/ready").status_code == 200
        alone = TestClient(app)
        assert [alone.get("/").status_code for _ in range(2)] == [200, 200]


def test_a_starlette_app_is_protected_as_well() -> None:
    """It has no description, and needs none."""
    app = Starlette(routes=[Mount("/", app=PlainTextResponse("hello")), Route("/x", asked)])
    protect(app, limits=RequestLimit("1/min", by="address"))
    assert [asked(app).status for _ in range(2)] == [200, 429]


def test_parts_can_be_left_out() -> None:
    """None is no part at all, and the app has the path of the probes for itself."""
    app = FastAPI()
    parts = {"loop_admission": None, "concurrency": None, "health": None, "lifecycle": None}
    edge = protect(app, timeout=None, **parts)

    @app.get("/health/live")
    async def route() -> bool:
        return current_deadline() is None

    assert asked(app, "/health/live").json() is True
    assert {"health", "lifecycle"}.isdisjoint(edge.snapshot())


# OpenAPI


def described() -> FastAPI:
    """Return an app with routes of all kinds."""
    app = FastAPI()
    router = APIRouter()

    @router.post("/orders")
    async def order() -> str:
        return "ordered"

    @app.get("/own", responses={429: {"description": "Slow down, please"}})
    @app.put("/own")
    async def own() -> str:
        return "own"

    protect(app)
    app.include_router(router, prefix="/shop")
    return app


def test_every_operation_tells_of_refusals() -> None:
    """Also those that were added later; words of the route's own are kept; all of it is valid."""
    app = described()
    schema = app.openapi()
    operations = {
        (path, method): operation["responses"]
        for path, item in schema["paths"].items()
        for method, operation in item.items()
    }
    assert set(operations) == {("/own", "get"), ("/own", "put"), ("/shop/orders", "post")}
    for responses in operations.values():
        assert {"429", "503", "504"} <= set(responses)
        assert "Retry-After" in responses["503"]["headers"]
        assert "application/problem+json" in responses["504"]["content"]
    assert operations["/own", "get"]["429"]["description"] == "Slow down, please"
    assert "RateLimit" in operations["/own", "put"]["429"]["headers"]
    OpenAPI.model_validate(schema)
    assert asked(app, "/openapi.json").json() == schema


def test_a_description_is_made_once_and_is_the_apps_own() -> None:
    """It is kept as FastAPI keeps it, and changing one app's changes no other's."""
    app, other = described(), FastAPI()
    protect(other, name="other")
    first = app.openapi()
    assert app.openapi() is first
    first["components"]["schemas"]["SeawallProblem"]["title"] = "Changed"
    first["paths"]["/own"]["put"]["responses"]["503"]["headers"]["Retry-After"].clear()
    assert other.openapi()["components"]["schemas"]["SeawallProblem"]["title"] == "Problem"

    @other.get("/later")
    async def later() -> str:
        return "later"

    other.openapi_schema = None
    told = other.openapi()["paths"]["/later"]["get"]["responses"]
    assert told["503"]["headers"]["Retry-After"]


def test_who_made_a_description_before_keeps_it() -> None:
    """A function that the app was given describes; ours adds to it."""
    app = FastAPI()
    own: dict[str, Any] = {"openapi": "3.1.0", "paths": {"/x": {"get": {}, "summary": "an x"}}}
    app.openapi = lambda: own  # type: ignore[method-assign]
    protect(app)
    told = app.openapi()["paths"]["/x"]
    assert set(told["get"]["responses"]) == {"429", "503", "504"}
    assert told["summary"] == "an x"


def test_an_app_can_be_made_again() -> None:
    """As factories do, in tests above all: each edge has a name of its own."""
    edges = [protect(FastAPI()) for _ in range(3)]
    assert [edge.guard.name for edge in edges] == ["edge", "edge 2", "edge 3"]


@pytest.mark.alone
def test_a_client_that_leaves_a_primed_stream_frees_its_place() -> None:
    """Behind a real server: a stream without end is closed when its client has gone."""
    app = FastAPI()
    protect(app)
    slots = Bulkhead(1)
    guard = new_guard(slots)
    closed: list[bool] = []

    @guard
    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                yield "x" * 1000
                await let_pass(0.001)
        finally:
            closed.append(True)

    @app.get("/")
    async def stream() -> StreamingResponse:
        return StreamingResponse(await primed(endless()))

    with serve(app) as url:
        with httpx.stream("GET", url) as answer:
            body = answer.iter_raw()  # held: if it is dropped, the connection is closed
            next(body)
            assert (answer.status_code, slots.in_flight) == (200, 1)
            assert httpx.get(url).json()["reason"] == "bulkhead_full"
        eventually(lambda: slots.in_flight == 0)
        assert closed == [True]
