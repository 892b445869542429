"""Route templates agree with the framework: a limit by route cannot be bypassed by a path.

The oracle is the framework itself. Apps are made at random, a request is served, and the endpoint
that runs says which route it is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.applications import Starlette
from starlette.convertors import CONVERTOR_TYPES, Convertor
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Host, Match, Mount, Route, Router, WebSocketRoute
from starlette.websockets import WebSocket

from seawall import Bulkhead
from seawall.testing import run_virtual
from seawall.web import Edge, RequestLimit, address_and_route
from seawall.web.edge.dispatch import Dispatch
from seawall.web.fastapi import protect
from seawall.web.request import Incoming
from seawall.web.routes import OTHER, Routes
from seawall.web.trust import Trust
from tests.support import let_pass
from tests.web.support import ask, http_scope, text_app

SEGMENTS = ("orders", "files", "a", "b", "Orders", "été", "x.json", "7")
PARAMETERS = ("", ":str", ":int", ":float", ":uuid", ":path")
METHODS = ("GET", "POST", "HEAD", "DELETE", "BREW")
HOSTS = ("api.test", "API.test:80", "other.test")
UUID = "7306590a-7306-4590-8730-6590a7306590"
VALUES = (
    "7", "0.5", "7.", "7\n", UUID, UUID.replace("-", ""), "x", "x y", "été", "e\u0301", "{id}", "*",
    "..", ".", "", "/", "a/b", "a\nb", "\n", "%2F", ";v=1", "٣", "9" * 5000,
)  # fmt: skip
NOISE = ("", "", "", "/", "//", "\n", "\n\n", "/.", "/..", "?", " ", "\x00", "/x")


def parameter(rng: Random, name: str) -> str:
    return f"{{{name}{rng.choice(PARAMETERS)}}}"


def template(rng: Random, most: int = 3, *, odd: bool = True) -> str:
    """Return the template of a route, as somebody might write it; without odd ones if told so."""
    segments = []
    for number in range(rng.randint(0, most)):
        name = f"p{number}"
        segments.append(
            rng.choice(
                [
                    rng.choice(SEGMENTS),
                    rng.choice(SEGMENTS),
                    parameter(rng, name),
                    parameter(rng, name),
                    f"v-{parameter(rng, name)}",
                    f"{parameter(rng, name)}.json",
                    f"{parameter(rng, name)}-{parameter(rng, name + 'x')}" if odd else "b",
                ]
            )
        )
    return "/" + "/".join(segments) + rng.choice(["", "", "", "/"] if segments else [""])


def endpoint(path: str) -> Any:
    async def served(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(path)

    return served


def socket_endpoint(path: str) -> Any:
    async def served(socket: WebSocket) -> None:
        await socket.close(reason=path)

    return served


class Everything:
    """An endpoint that is a class: it takes all methods."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "reason": self.path})
        else:
            await PlainTextResponse(self.path)(scope, receive, send)


class Wrapped:
    """A middleware around an app that is mounted."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def routes_of(rng: Random, prefix: str, depth: int) -> list[BaseRoute]:
    """Return some routes of Starlette's; each endpoint answers its template behind `prefix`."""
    made: list[BaseRoute] = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["route"] * 6 + ["any", "socket", "mount", "mount", "opaque", "host"])
        if kind in {"mount", "opaque", "host"} and depth > 1:
            kind = "route"
        path = template(rng)
        if kind == "route":
            methods = rng.sample(METHODS, rng.randint(1, 2))
            made.append(Route(path, endpoint(prefix + path), methods=methods))
        elif kind == "any":
            made.append(Route(path, Everything(prefix + path)))
        elif kind == "socket":
            made.append(WebSocketRoute(path, socket_endpoint(prefix + path)))
        elif kind == "host":
            made.append(Host("api.test", Router(routes_of(rng, prefix, depth + 1))))
        else:
            below = rng.choice(["", "/a", "/orders", "/{m}", "/{m:int}", "/a/b"])
            full = prefix + below
            if kind == "opaque":
                made.append(Mount(below, app=Everything(full)))
                continue
            inner: Any = app_of(rng, full, depth + 1)
            made.append(Mount(below, app=Wrapped(inner) if rng.random() < 0.3 else inner))
    return made


def app_of(rng: Random, prefix: str = "", depth: int = 0) -> Starlette | Router:
    """Return an app of FastAPI's or Starlette's, or a router."""
    kind = rng.choice(["starlette", "router", "fastapi", "fastapi"])
    slashes = rng.random() < 0.8
    if kind == "starlette":
        app = Starlette(routes=routes_of(rng, prefix, depth))
        app.router.redirect_slashes = slashes
        return app
    if kind == "router":
        return Router(routes_of(rng, prefix, depth), redirect_slashes=slashes)
    fast = FastAPI(openapi_url=None, redirect_slashes=slashes)
    if rng.random() < 0.3:
        fast.root_path = rng.choice(["/a", "/a/", "/api/", "/orders"])
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.4:
            fast.router.routes.extend(routes_of(rng, prefix, depth))
        else:
            fast.include_router(*included(rng, prefix))
    return fast


def included(rng: Random, prefix: str, depth: int = 0) -> tuple[APIRouter]:
    """Return a router with a prefix of its own, and perhaps another one inside."""
    own = rng.choice(["", "/a", "/orders", "/{r}"])
    router = APIRouter(prefix=own)
    for _ in range(rng.randint(1, 3)):
        path = template(rng, 2)
        methods = rng.sample(METHODS, rng.randint(1, 2))
        router.add_api_route(path, endpoint(prefix + own + path), methods=methods)
    if depth < 2 and rng.random() < 0.4:
        inner = rng.choice(["/b", "/{s}"])
        nested = APIRouter()
        path = template(rng, 1)
        nested.add_api_route(path, endpoint(prefix + own + inner + path), methods=["GET"])
        router.include_router(nested, prefix=inner)
    return (router,)


def filled(rng: Random, path: str) -> str:
    """Return a path that a template might match, and often does."""
    parts = []
    for segment in path.split("/"):
        part = re.sub("{[^}]*}", lambda _: rng.choice(VALUES), segment)
        if part and rng.random() < 0.05:
            part = rng.choice([part.upper(), part + "\n", "", f"/{part}"])
        parts.append(part)
    return "/".join(parts) + rng.choice(NOISE)


def paths_of(rng: Random, templates: list[str]) -> Iterator[str]:
    for _ in range(3):
        yield filled(rng, rng.choice(templates) if templates else "/")
    yield "/" + "/".join(rng.choice((*SEGMENTS, *VALUES)) for _ in range(rng.randint(0, 4)))


def scope_of(rng: Random, path: str) -> dict[str, Any]:
    root = rng.choice(["", "", "", "/a", "/a/", "/api", "/orders"])
    if root and rng.random() < 0.7:
        path = root + path
    if rng.random() < 0.1:
        return {**http_scope(path, root_path=root), "type": "websocket", "method": None}
    return http_scope(
        path,
        root_path=root,
        method=rng.choice(METHODS),
        headers=[("host", rng.choice(HOSTS))],
    )


async def dispatched(app: Any, scope: dict[str, Any]) -> tuple[int, str]:
    """Serve a request; return the status and the template of the endpoint that answered."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect" if scope["type"] == "websocket" else "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        await app(dict(scope), receive, send)
    except Exception:  # noqa: BLE001 - a convertor's, or a 404 or 405 of a router without an app
        return 500, ""
    if scope["type"] == "websocket":
        return 101, next((m.get("reason") or "" for m in sent if m["type"].endswith("close")), "")
    return sent[0]["status"], sent[1].get("body", b"").decode()


def leaves(app: Any) -> list[str]:
    from seawall.web.edge.dispatch import _leaves

    return sorted({path or "/" for path, _ in _leaves(app, "", ()) if path is not None})


def differential(seeds: range) -> tuple[int, int]:
    """Compare what the router is asked with what the app does; return requests, and those served.

    Each app is asked about several paths, twice, so that answers from the cache are compared, too.
    """

    async def main() -> tuple[int, int]:
        asked = served = 0
        for seed in seeds:
            rng = Random(seed)
            app = app_of(rng)
            dispatch = Dispatch(app)
            for path in paths_of(rng, leaves(app)):
                scope = scope_of(rng, path)
                if scope["method"] is None:
                    del scope["method"]
                status, answered = await dispatched(app, scope)
                before = {key: value for key, value in scope.items() if key != "fastapi"}
                for _ in range(2):
                    found = dispatch.ask(scope).template
                    told = f"seed {seed}: {scope} -> {status} {answered!r}, found {found!r}"
                    asked += 1
                    if status in {101, 200} and (answered or scope.get("method") != "HEAD"):
                        served += 1
                        assert (found or "") == answered, told
                    elif status in {404, 307, 101}:
                        assert not found, told
                assert {k: v for k, v in scope.items() if k != "fastapi"} == before
        return asked, served

    return asyncio.run(main())


def test_asked_beforehand_the_router_says_where_it_will_dispatch() -> None:
    """500 apps with mounts, hosts, included routers and root paths: no disagreement."""
    asked, served = differential(range(500))
    assert asked > 3500
    assert served > 700


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_disagreement_in_ten_thousand_route_tables() -> None:
    """The same with 10 000 apps."""
    asked, served = differential(range(10_000))
    assert asked == 80_000
    assert served > 15_000


# Without a router to ask


def matched(routes: list[Route], scope: dict[str, Any]) -> str | None:
    """Return the template of the first route that takes the request."""
    for route in routes:
        try:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path
        except ValueError:  # more digits than Python reads
            return route.path
    return None


def is_approximated(path: str) -> bool:
    """Tell whether a template is matched with more paths than it has: see `_compiled`."""
    return path.count(":path") > 1 or any(part.count("{") > 1 for part in path.split("/"))


def test_templates_match_what_the_routes_of_starlette_match() -> None:
    """800 tables around an app whose router is not seen: no path gets past its template."""
    agreed = over = 0
    for seed in range(800):
        rng = Random(seed)
        odd = seed % 4 == 0
        table = list(dict.fromkeys(template(rng, odd=odd) for _ in range(rng.randint(1, 6))))
        known: list[str] = []
        for path in table:
            try:
                Routes([*known, path])
            except ValueError as error:
                assert "comes first" in str(error)  # noqa: PT017 - it is never dispatched to
            else:
                known.append(path)
        routes = Routes(known)
        starlette = [Route(path, endpoint(path)) for path in table]
        for path in paths_of(rng, table):
            scope = scope_of(rng, path) | {"type": "http", "method": "GET"}
            expected, found = matched(starlette, scope), routes.of(scope)
            told = f"seed {seed}: {table} {scope}"
            if expected is None:
                over += found != OTHER
            elif any(map(is_approximated, table)):
                assert found != OTHER, told
            else:
                assert found == expected, told
                agreed += 1
    assert agreed > 500
    assert over < 1000  # trailing slashes, and roots that end with one


@pytest.mark.parametrize(
    "path",
    [
        "/{a}-{b}-{c}-{d}",
        "/{a:path}/{b:path}/{c:path}/x",
        "/{a:path}{b:path}",
        "/{a:path}/{b}/{c}",
        "/{a:float}{b:float}/x",
    ],
)
def test_no_path_makes_matching_slow(path: str) -> None:
    """Templates for which the regular expression of Starlette backtracks are matched in one go."""
    routes = Routes([path])
    for text in ("-", "a", "/", "a/", "0", "0."):
        routes.of(http_scope("/" + text * 50_000 + "\x00/"))  # or the test's time is over


def test_a_convertor_of_the_apps_own_may_match_anything() -> None:
    """What nobody knows here is limited rather than let past."""

    class Code(Convertor[str]):
        regex = "[A-Z]+/[0-9]+"

        def convert(self, value: str) -> str:
            return value

    CONVERTOR_TYPES["code"] = Code()
    try:
        route = Route("/parts/{code:code}", endpoint(""))
        assert route.matches(http_scope("/parts/AB/7"))[0] is Match.FULL
        routes = Routes(["/parts/{code:code}"])
        assert routes.of(http_scope("/parts/AB/7")) == "/parts/{code:code}"
    finally:
        del CONVERTOR_TYPES["code"]


# What could get past a limit


BYPASSES = {
    "a newline at the end": ("/orders", "/orders%0A", ""),
    "nothing for a path": ("/files/{name:path}", "/files/", ""),
    "a slash at the end of the root": ("/orders", "/api//orders", "/api/"),
    "the whole path below such a root": ("/api/orders", "/api/orders", "/api/"),
    "a root alone": ("/{name:path}", "/api/", "/api"),
    "a variable with a newline": ("/orders/{id}", "/orders/7%0A", ""),
    "half a segment": ("/reports/{id}.json", "/reports/7.json", ""),
    "a path in the middle": ("/files/{name:path}/text", "/files/a/b/text", ""),
    "a literal like a parameter": ("/orders/{id}", "/orders/{id}", ""),
}


def app_with(path: str) -> Starlette:
    """Return an app with that route, whose endpoint takes its time."""

    async def slow(_request: Request) -> PlainTextResponse:
        await let_pass(1.0)
        return PlainTextResponse(path)

    return Starlette(routes=[Route(path, slow), Route("/", endpoint("/"))])


def hidden(app: Any) -> Any:
    """Return an app of which no router is to be seen."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)

    return call


@pytest.mark.parametrize("around", ["protect", "edge"])
@pytest.mark.parametrize("case", BYPASSES, ids=lambda case: case.replace(" ", "-"))
def test_a_path_that_reaches_the_handler_reaches_its_bulkhead(case: str, around: str) -> None:
    """Around any app, and in a Starlette app."""
    path, asked, root = BYPASSES[case]

    async def main() -> None:
        app: Any = app_with(path)
        routes = {path: Bulkhead(1)}
        if around == "protect":
            edge = protect(app, name="bypass", routes=routes)
        else:
            edge = app = Edge(hidden(app), name="bypass", routes=routes)
        first = asyncio.create_task(ask(app, unquote(asked), root_path=root))
        await let_pass(0.5)
        second = await ask(app, unquote(asked), root_path=root)
        served = await first
        assert (served.status, served.body.decode()) == (200, path)
        assert second.status == 503
        assert second.json()["reason"] == "bulkhead_full"
        edge.close()

    run_virtual(main())


def test_a_limit_applies_only_to_what_the_app_dispatches_there() -> None:
    """Methods, the order of the app's routes and redirects decide, as the router says."""

    async def main() -> None:
        app = Starlette(
            routes=[
                Route("/orders/{order}", endpoint("/orders/{order}")),
                Route("/orders/search", endpoint("/orders/search"), methods=["POST"]),
                Mount("/files", app=text_app()),
            ]
        )
        full = Bulkhead(1)
        edge = protect(app, name="exact", routes={"/orders/search": full, "/files/*": Bulkhead(1)})
        assert edge._routes is not None
        seen: dict[str, Any] = edge._routes._gates
        asked: list[str] = []
        for name, (gate, *_) in seen.items():
            enter = gate.enter
            gate.enter = lambda now, name=name, enter=enter: (asked.append(name), enter(now))[1]
        assert (await ask(app, "/orders/search")).body == b"/orders/{order}"
        assert (await ask(app, "/orders/7")).status == 200
        assert (await ask(app, "/orders/7/")).status == 307
        assert asked == []
        assert (await ask(app, "/orders/search", method="POST")).body == b"/orders/search"
        assert (await ask(app, "/files/a")).status == 200
        assert asked == ["/orders/search", "/files/*"]
        edge.close()

    run_virtual(main())


def test_addresses_are_counted_by_the_route_that_the_app_dispatches_to() -> None:
    """`address_and_route` asks the router as well, and "other" stays one bucket."""
    app = Starlette(
        routes=[Mount("/shop", routes=[Route("/orders/{id:int}", endpoint(""))]), Route("/x", str)]
    )
    by = address_and_route("/shop/orders/{id:int}")

    class AtEdge(Incoming):
        _dispatch = Dispatch(app)  # type: ignore[assignment]

    def key(path: str) -> Any:
        return by(AtEdge(http_scope(path), Trust()))

    assert key("/shop/orders/7") == "127.0.0.1 /shop/orders/{id:int}"
    assert key("/shop/orders/seven") == key("/x") == "127.0.0.1 other"


def test_the_route_of_a_request_is_known_at_the_edge() -> None:
    """`Incoming.route` is the template before routing, too; with the paths of mounts."""
    app = FastAPI()
    router = APIRouter(prefix="/v1")
    seen: list[str | None] = []

    @router.get("/orders/{number}")
    async def order(number: int) -> int:
        return number

    app.include_router(router, prefix="/shop")

    def by(incoming: Incoming) -> str:
        seen.append(incoming.route)
        return "all"

    async def main() -> None:
        edge = protect(app, name="known", limits=RequestLimit("9/s", by=by))
        assert (await ask(app, "/shop/v1/orders/7")).status == 200
        assert (await ask(app, "/shop/v1/orderz")).status == 404
        edge.close()

    run_virtual(main())
    assert list(dict.fromkeys(seen)) == ["/shop/v1/orders/{number}", None]


def test_routes_that_are_added_later_are_known() -> None:
    """What was no route a moment ago may have become one."""
    app = Starlette()
    dispatch = Dispatch(app)
    assert dispatch.ask(http_scope("/late")).template is None
    app.router.routes.append(Route("/late", endpoint("")))
    assert dispatch.ask(http_scope("/late")).template == "/late"


def test_what_is_remembered_of_paths_is_bounded() -> None:
    """Callers make up paths, long ones and many."""
    dispatch = Dispatch(Starlette(routes=[Route("/{name:path}", endpoint(""))]))
    for number in range(3000):
        assert dispatch.ask(http_scope(f"/{number}")).template == "/{name:path}"
    assert dispatch.ask(http_scope("/" + "x" * 10_000)).template == "/{name:path}"
    assert len(dispatch._known) <= 1000
    assert all(len(path) <= 200 for path, *_ in dispatch._known)


def test_an_app_that_is_mounted_in_itself_ends() -> None:
    """The walk through the routes of such an app is bounded."""
    app = Starlette(routes=[Route("/a", endpoint(""))])
    app.router.routes.append(Mount("", app=app))
    dispatch = Dispatch(app)
    assert dispatch.ask(http_scope("/a")).template == "/a"
    assert dispatch.ask(http_scope("/b")).template == ""


def test_an_edge_around_a_router_asks_it() -> None:
    """Without an app around it, errors reach the edge, and the order of its routes counts."""

    async def main() -> None:
        router = Router([Route("/{name}", endpoint("/{name}")), Route("/a", endpoint("/a"))])
        edge = Edge(router, name="router", routes={"/a": Bulkhead(1), "/{other}": Bulkhead(1)})
        assert edge._routes is not None
        gate = edge._routes.of(http_scope("/a"), edge._dispatch)
        assert gate is edge._routes._gates["/{other}"]
        assert (await ask(edge, "/a")).body == b"/{name}"
        edge.close()

    run_virtual(main())


class ByHeader(Route):
    """A route that is chosen by more than its path."""

    def matches(self, scope: Any) -> Any:
        found = (b"version", b"2") in scope["headers"]
        return super().matches(scope) if found else (Match.NONE, {})


def test_what_more_than_the_path_decides_is_asked_each_time() -> None:
    """Of such a route no answer is kept; of a class that only derives from another it is."""

    class Plain(Route): ...

    newer = [("version", "2")]
    dispatch = Dispatch(Router([ByHeader("/a", endpoint("")), Route("/{name}", endpoint(""))]))
    for headers, path in ((newer, "/a"), ([], "/{name}"), (newer, "/a")):
        assert dispatch.ask(http_scope("/a", headers=headers)).template == path
    assert not dispatch._known
    hosts = Dispatch(Router([Host("api.test", Router([Route("/a", endpoint(""))]))]))
    assert hosts.ask(http_scope("/a", headers=[("host", "api.test")])).template == "/a"
    assert hosts.ask(http_scope("/a", headers=[("host", "x.test")])).template is None
    plain = Dispatch(Router([Plain("/a", endpoint(""))]))
    assert plain.ask(http_scope("/a")).template == "/a"
    assert len(plain._known) == 1
