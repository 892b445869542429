"""A response names the lesser answers in it, to callers who may know."""

from __future__ import annotations

import asyncio
from typing import Any

import http_sfv
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from seawall import Fallback, Guard, static
from seawall.events import CallDegraded
from seawall.web import Edge
from seawall.web.edge.edge_request import write_degraded
from seawall.web.fastapi import protect
from tests.web.support import Answer, ask, text_app

HEADER = "seawall-degraded"


def popular() -> str:
    """Answer for everybody."""
    return "bread"


async def down() -> Any:
    """Fail, and say what nobody is to know."""
    raise ConnectionError("no route to 10.1.2.3")


def shop(**options: Any) -> FastAPI:
    """Return an app with degraded and real answers."""
    app = FastAPI()
    guard = Guard("shop", Fallback(popular))

    @app.get("/")
    async def page() -> list[str]:
        return await asyncio.gather(guard.acall(down), guard.acall(down))

    @app.get("/thread")
    def thread() -> str:
        def fails() -> Any:
            raise ConnectionError

        return guard.call(fails)

    @app.get("/real")
    async def real() -> str:
        return "real"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> Any:
            yield str(await guard.acall(down))

        return StreamingResponse(parts())

    protect(app, **options)
    return app


def asked(app: Any, path: str = "/") -> Answer:
    """Make one request of `app`."""
    return asyncio.run(ask(app, path))


def test_a_response_names_its_degraded_parts():
    """Each source and level once, from tasks and threads alike, and nothing of the error."""
    app = shop(report_degraded=True)
    for path in ("/", "/thread"):
        assert asked(app, path).headers[HEADER] == '"popular";level=1'


def test_a_real_response_has_no_such_header():
    """Nor has one whose degraded part comes after its start."""
    app = shop(report_degraded=True)
    assert HEADER not in asked(app, "/real").headers
    assert HEADER not in asked(app, "/stream").headers


def test_nothing_is_told_unless_asked_for():
    """The names of a service's functions are its own business."""
    assert HEADER not in asked(shop()).headers


def test_the_header_can_have_another_name():
    """A text is its name."""
    assert asked(shop(report_degraded="X-Less")).headers["x-less"] == '"popular";level=1'


def test_a_middleware_that_runs_the_app_in_a_task_does_not_hide_it():
    """Starlette's usual middleware does that: the context goes along."""
    app = shop(report_degraded=True)

    async def passing(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    app.user_middleware.append(_middleware(passing))
    assert asked(app).headers[HEADER] == '"popular";level=1'


def _middleware(dispatch: Any) -> Any:
    from starlette.middleware import Middleware

    return Middleware(BaseHTTPMiddleware, dispatch=dispatch)


def test_requests_at_once_do_not_see_each_other():
    """Each response has its own."""
    app = shop(report_degraded=True)

    async def main() -> list[Answer]:
        return await asyncio.gather(*(ask(app, path) for path in ("/", "/real") * 5))

    assert [HEADER in one.headers for one in asyncio.run(main())] == [True, False] * 5


def test_an_edge_around_a_plain_app_reports_too():
    """It need not be a Starlette app."""
    guard = Guard("shop", Fallback(static("less")))
    inner = text_app("hello")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await guard.acall(down)
        await inner(scope, receive, send)

    answer = asked(Edge(app, name="plain", report_degraded=True))
    assert (answer.body, answer.headers[HEADER]) == (b"hello", '"static";level=1')


def test_the_value_is_a_bounded_structured_field():
    """Whatever a function is called, the field can be read, and is short."""
    names = ["a" * 500, 'quo"te', "back\\slash", "line\r\nbreak: x", "ü", "<lambda>"]
    names += [f"source {number}" for number in range(50)]
    seen = [
        CallDegraded("shop", source=name, level=2, reason="Lost", message="s3cret")
        for name in names
    ]
    value = write_degraded([*seen, *seen])
    items = http_sfv.List()
    items.parse(value.encode())
    assert len(items) == 16
    assert value.isascii()
    assert value.isprintable()
    assert "s3cret" not in value
    assert items[0].value == "a" * 64
    assert [one.value for one in items[1:5]] == ['quo"te', "back\\slash", "line??break: x", "?"]
    assert {one.params["level"] for one in items} == {2}
