"""Flask: errors, limits of views and blueprints, guards, all with Flask's own client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from flask import Blueprint, Flask, Response, abort, stream_with_context
from flask import request as flask_request
from werkzeug.exceptions import NotFound
from werkzeug.test import TestResponse

from seawall import (
    Breaker,
    Bulkhead,
    CircuitOpen,
    DeadlineExceeded,
    Guard,
    Overloaded,
    RateLimited,
    TimedOut,
)
from seawall.context import seconds_left
from seawall.web import RequestLimit, address_and_route, user
from seawall.web.flask import guarded, limited, protect
from seawall.web.wsgi import Edge
from tests.web.support import held_slots


@pytest.fixture
def make() -> Iterator[Callable[..., Flask]]:
    """Return a function that makes apps with an edge, which is closed afterwards."""
    edges: list[Edge] = []

    def app(**parts: Any) -> Flask:
        made = Flask("shop")
        edges.append(protect(made, **parts))
        return made

    yield app
    for edge in edges:
        edge.close()
    assert held_slots() == {}


def get(app: Flask, path: str = "/", **more: Any) -> TestResponse:
    return app.test_client().get(path, **more)


def vendor_limit() -> RateLimited:
    return RateLimited("guard 'vendor': over the limit", retry_after=3.0)


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (CircuitOpen("secret", retry_after=7.0), 503, "7"),
        (vendor_limit(), 503, "3"),
        (DeadlineExceeded("late"), 504, None),
        (TimedOut("late"), 504, None),
        (httpx.ConnectError("no route"), 502, None),
        (httpx.ReadTimeout("slow"), 504, None),
    ],
)
@pytest.mark.parametrize("testing", [True, False])
def test_errors_are_answered_without_a_handler(
    make: Callable[..., Flask],
    error: Exception,
    status: int,
    retry_after: str | None,
    testing: bool,  # noqa: FBT001
) -> None:
    """Also where Flask passes exceptions on, as it does in tests."""
    app = make()
    app.testing = testing

    @app.get("/")
    def view() -> str:
        raise error

    answer = get(app)
    assert (answer.status_code, answer.headers.get("Retry-After")) == (status, retry_after)
    assert answer.content_type == "application/problem+json"
    assert "secret" not in answer.text
    edge = app.extensions["seawall"]
    assert edge.snapshot()["failed"] == 1


def test_a_handler_of_the_users_comes_first(make: Callable[..., Flask]) -> None:
    """For the very error; one for all exceptions is less specific than ours."""
    app = make()
    app.register_error_handler(CircuitOpen, lambda _error: ("mine", 418))
    app.register_error_handler(Exception, lambda _error: ("any", 500))

    @app.get("/<kind>")
    def view(kind: str) -> str:
        raise {"open": CircuitOpen("x"), "shed": Overloaded("x"), "bug": ValueError("x")}[kind]

    answers = [get(app, path) for path in ("/open", "/shed", "/bug", "/")]
    assert [answer.status_code for answer in answers] == [418, 503, 500, 500]
    assert (answers[0].text, answers[2].text) == ("mine", "any")


def test_a_bug_is_flasks_affair(make: Callable[..., Flask]) -> None:
    """A 500 by Flask where it answers them, the exception itself in tests."""
    app = make()

    @app.get("/")
    def view() -> str:
        raise ZeroDivisionError

    assert get(app).status_code == 500
    app.testing = True
    with pytest.raises(ZeroDivisionError):
        get(app)
    assert get(app, "/nowhere").status_code == 404


def test_an_upstreams_failure_is_logged_by_its_route(
    make: Callable[..., Flask], caplog: pytest.LogCaptureFixture
) -> None:
    """The rule is logged, not the path, and after_request functions run as for any response."""
    app = make()
    app.after_request(_stamped)

    @app.get("/orders/<int:number>")
    def order(number: int) -> str:
        raise httpx.ConnectError(f"no route for {number}")

    with caplog.at_level(logging.WARNING, "seawall"):
        answer = get(app, "/orders/7")
    assert (answer.status_code, answer.headers["X-Stamp"]) == (502, "yes")
    assert "GET /orders/<int:number> is answered with 502" in caplog.text
    assert not [record for record in caplog.records if record.name == "shop"]  # no traceback


def _stamped(response: Response) -> Response:
    response.headers["X-Stamp"] = "yes"
    return response


def test_a_views_limit_is_told_beside_the_edges(make: Callable[..., Flask]) -> None:
    """On success and on refusal; other views are not limited by it."""
    app = make(limits=RequestLimit("9/h", by="address"))

    @app.get("/search/<words>")
    @limited(RequestLimit("2/h", by="address", name="search"))
    def search(words: str) -> str:
        return words

    @app.get("/")
    def home() -> str:
        return "home"

    answers = [get(app, f"/search/{n}") for n in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].text == "0"
    assert answers[0].headers.getlist("RateLimit") == ['"address";r=8;t=400', '"search";r=1;t=1800']
    assert answers[2].headers["Retry-After"] == "1800"
    assert answers[2].get_json()["violated-policies"] == ["search"]
    assert get(app).headers.getlist("RateLimit") == ['"address";r=5;t=400']


def test_a_blueprint_has_one_limit_for_all_its_views(make: Callable[..., Flask]) -> None:
    """Its views count together, nested blueprints too."""
    app = make()
    admin, inner = Blueprint("admin", __name__, url_prefix="/admin"), Blueprint("in", __name__)
    assert limited(RequestLimit("3/h", by="address", name="admin"))(admin) is admin

    @admin.get("/users")
    def users() -> str:
        return "users"

    @admin.get("/orders")
    def orders() -> str:
        return "orders"

    @inner.get("/deep")
    def deep() -> str:
        return "deep"

    @app.get("/")
    def home() -> str:
        return "home"

    admin.register_blueprint(inner)
    app.register_blueprint(admin)
    paths = ("/admin/users", "/admin/orders", "/admin/deep", "/admin/users", "/")
    assert [get(app, path).status_code for path in paths] == [200, 200, 200, 429, 200]


def test_principals_know_the_route_and_the_request(make: Callable[..., Flask]) -> None:
    """By the rule that Flask has matched, or by whatever Flask knows of the user."""
    app = make()

    @app.get("/a/<n>")
    @limited(RequestLimit("1/h", by=address_and_route("/a/<n>")))
    def by_route(n: str) -> str:
        return n

    @app.get("/u")
    @limited(RequestLimit("1/h", by=user(lambda _incoming: flask_request.args.get("user"))))
    def by_user() -> str:
        return "hello"

    assert [get(app, path).status_code for path in ("/a/1", "/a/2")] == [200, 429]
    paths = ("/u?user=ann", "/u?user=bob", "/u?user=ann", "/u", "/u")
    assert [get(app, path).status_code for path in paths] == [200, 200, 429, 200, 200]


def test_a_limit_works_without_an_edge() -> None:
    """The headers are added by Flask then; the refusal needs protect() for its answer."""
    app = Flask("alone")

    @app.get("/")
    @limited(RequestLimit("1/h", by="address"))
    def home() -> str:
        return "home"

    assert get(app).headers["RateLimit"] == '"address";r=0;t=3600'
    app.testing = True
    with pytest.raises(RateLimited):
        get(app)


def test_a_guard_is_held_while_the_view_runs(make: Callable[..., Flask]) -> None:
    """Its bulkhead refuses, and what the caller did wrong does not open its breaker."""
    app = make()
    places = Bulkhead(1)
    items = Guard("items", Breaker(consecutive=2, break_for=60), places)

    @app.get("/items/<int:number>")
    @guarded(items)
    def item(number: int) -> str:
        assert places.in_flight == 1
        if number < 3:
            raise NotFound
        if number == 3:
            abort(503)
        return "item"

    numbers = (1, 2, 4, 3, 3, 4)
    assert [get(app, f"/items/{n}").status_code for n in numbers] == [404, 404, 200, 503, 503, 503]
    assert places.in_flight == 0
    items.close()


def test_async_views_can_be_limited_and_guarded(make: Callable[..., Flask]) -> None:
    """Flask runs them in a loop of their own, in the request's thread and context."""
    app = make(timeout=10, reserve=1)
    guard = Guard("async view", Bulkhead(1))

    @app.get("/")
    @limited(RequestLimit("1/h", by="address"))
    @guarded(guard)
    async def view() -> str:
        left = seconds_left()
        assert left is not None
        return f"{left:.0f}"

    assert get(app).text == "9"
    assert get(app).status_code == 429
    guard.close()


def test_a_stream_holds_its_place(make: Callable[..., Flask]) -> None:
    """Until Flask's generator is closed; its request context is kept."""
    places = Bulkhead(1)
    app = make(concurrency=places)

    @app.get("/")
    def stream() -> Response:
        def parts() -> Iterator[str]:
            yield "a"
            yield flask_request.path

        return Response(stream_with_context(parts()))

    with get(app) as answer:
        assert places.in_flight == 1
        assert answer.text == "a/"
    assert places.in_flight == 0
    assert app.extensions["seawall"].snapshot()["lifecycle"]["in_flight"] == 0


@pytest.mark.parametrize("read", ["", "a/"])
def test_a_test_client_may_keep_the_context_of_a_stream(
    make: Callable[..., Flask], read: str
) -> None:
    """Flask leaves the contexts of a request in the test, which is in another one."""
    app = make(timeout=20)

    @app.get("/")
    def stream() -> Response:
        def parts() -> Iterator[str]:
            yield "a"
            yield flask_request.path

        return Response(stream_with_context(parts()))

    with app.test_client() as client:
        for _ in range(2):
            with client.get("/?n=1") as answer:
                assert not read or answer.text == read
                assert flask_request.args["n"] == "1"
    assert seconds_left() is None
    assert app.extensions["seawall"].snapshot()["lifecycle"]["in_flight"] == 0


def test_probes_never_reach_flask(make: Callable[..., Flask]) -> None:
    """They are answered though every other request is refused."""
    app = make(concurrency=(places := Bulkhead(1)))
    app.before_request(lambda: abort(500))
    with Guard("holder", places).hold():
        assert get(app).status_code == 503
        probes = [get(app, f"/health/{level}") for level in ("live", "ready", "deep")]
    assert [probe.status_code for probe in probes] == [200, 200, 200]


def test_an_app_has_one_edge(make: Callable[..., Flask]) -> None:
    """A second one would count every request twice."""
    app = make()
    with pytest.raises(RuntimeError, match="already"):
        protect(app)
    with pytest.raises(TypeError, match="Flask"):
        protect(lambda _environ, _start: [])  # type: ignore[arg-type]


def test_decorators_want_views() -> None:
    """A class, or a guard in place of a view, is told at once."""
    guard = Guard("views", Bulkhead(1))
    for decorate in (limited(RequestLimit("1/h", by="address")), guarded(guard)):
        with pytest.raises(TypeError, match="no view"):
            decorate(5)  # type: ignore[type-var]
    guard.close()
