"""Plain requests go past what an app has around its edge for errors alone; errors do not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from weakref import ref

import pytest
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from seawall import Bulkhead, CircuitOpen, current_deadline
from seawall.web import Edge
from seawall.web.fastapi import protect
from seawall.web.lifecycle import Lifecycle
from tests.web.support import ask

_serial = count()
PLAIN: dict[str, str] = {}
UNUSUAL = {"Baggage": "a=b"}
"""A header that the edge reads: such a request takes the long way."""


class BrokenError(Exception):
    """Raised by the app."""


class GoneError(OSError):
    """Raised by a server."""


def make_app(**settings: Any) -> FastAPI:
    """Return an app that fails in several ways."""
    app = FastAPI(**settings)

    @app.get("/ok")
    async def ok() -> str:
        return "ok"

    @app.get("/broken")
    async def broken() -> None:
        raise BrokenError("at the app")

    @app.get("/refused")
    async def refused() -> None:
        raise CircuitOpen("the bank is away", retry_after=3.0)

    @app.get("/half")
    async def half() -> StreamingResponse:
        async def parts() -> Any:
            yield "half"
            raise BrokenError("in mid-body")

        return StreamingResponse(parts())

    return app


def with_handler(seen: list[Any]) -> FastAPI:
    """Return one that answers what nobody handles itself."""
    app = make_app()

    @app.exception_handler(Exception)
    async def answer(request: Request, error: Exception) -> JSONResponse:
        seen.append((str(error), request.url.path, current_deadline()))
        return JSONResponse({"mine": str(error)}, 555)

    return app


def edged(app: Any, **parts: Any) -> Edge:
    """Protect the app, by a name that nobody has yet."""
    return protect(app, name=f"past-{next(_serial)}", **parts)


def asked(app: Any, path: str, headers: dict[str, str], *, alive: bool) -> tuple[int, str]:
    """Ask the app; `alive` if it is told that it begins to live."""
    client = TestClient(app, raise_server_exceptions=False)
    if not alive:
        return _told(client, path, headers)
    with client:
        client.get("/ok")  # the first of a life is never plain
        return _told(client, path, headers)


def _told(client: TestClient, path: str, headers: dict[str, str]) -> tuple[int, str]:
    answer = client.get(path, headers=headers)
    return answer.status_code, answer.text.split("site-packages")[0][:60]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the paths of those that pass what is there for errors."""
    seen: list[str] = []
    call = ServerErrorMiddleware.__call__

    async def noting(self: Any, scope: Any, *more: Any) -> None:
        seen.append(scope.get("path", scope["type"]))
        await call(self, scope, *more)

    monkeypatch.setattr(ServerErrorMiddleware, "__call__", noting)
    return seen


@pytest.mark.parametrize("kind", ["FastAPI", "Starlette"])
def test_plain_requests_go_past(kind: str, passes: list[str]) -> None:
    """Those of both frameworks as they are installed: their middlewares have the names we know."""

    async def there(_request: Request) -> JSONResponse:
        return JSONResponse("ok")

    app: Any = make_app() if kind == "FastAPI" else Starlette(routes=[Route("/ok", there)])
    edge = edged(app)
    with TestClient(app) as client:
        assert client.get("/ok").json() == "ok"
        assert app.middleware_stack.app is edge
        passes.clear()
        assert [client.get("/ok").status_code for _ in range(3)] == [200, 200, 200]
        assert passes == []
        assert client.get("/ok", headers=UNUSUAL).status_code == 200
        assert client.get("/health/live").status_code == 200
        assert passes == ["/ok", "/health/live"]


APPS: dict[str, Callable[[], FastAPI]] = {
    "as it is": make_app,
    "debug": lambda: make_app(debug=True),
    "own handler": lambda: with_handler([]),
}


@pytest.mark.parametrize("path", ["/ok", "/broken", "/refused", "/nowhere", "/health/live"])
@pytest.mark.parametrize("headers", [PLAIN, UNUSUAL], ids=["plain", "unusual"])
@pytest.mark.parametrize("kind", APPS)
def test_answers_are_the_same(kind: str, headers: dict[str, str], path: str) -> None:
    """As where every request passes all middlewares: without a life, that is so."""
    whole, short = APPS[kind](), APPS[kind]()
    edged(whole), edged(short)
    expected = asked(whole, path, headers, alive=False)
    assert asked(short, path, headers, alive=True) == expected
    wanted = {"/ok": 200, "/broken": 555 if kind == "own handler" else 500, "/refused": 503}
    assert expected[0] == wanted.get(path, expected[0])


@pytest.mark.parametrize("headers", [PLAIN, UNUSUAL], ids=["plain", "unusual"])
def test_errors_reach_the_server_and_the_handler_once(headers: dict[str, str]) -> None:
    """The server logs them; the handler has no deadline of the request's any more."""
    seen: list[Any] = []
    app = with_handler(seen)
    edge = edged(app)
    with TestClient(app) as client:
        client.get("/ok")
        with pytest.raises(BrokenError, match="at the app"):
            client.get("/broken", headers=headers)
        assert edge.snapshot()["lifecycle"]["in_flight"] == 0
    assert seen == [("at the app", "/broken", None)]


@pytest.mark.parametrize("headers", [PLAIN, UNUSUAL], ids=["plain", "unusual"])
def test_a_response_that_has_begun_gets_no_second(headers: dict[str, str]) -> None:
    """But the handler learns of the error, as it does without an edge."""
    seen: list[Any] = []
    app = with_handler(seen)
    edged(app)
    with TestClient(app, raise_server_exceptions=False) as client:
        client.get("/ok")
        answer = client.get("/half", headers=headers)
        assert (answer.status_code, answer.text) == (200, "half")
    assert [error for error, *_ in seen] == ["in mid-body"]


def test_other_middlewares_stay(passes: list[str]) -> None:
    """What stands around the edge and is not for errors alone is passed by every request."""
    app = make_app()
    edged(app)
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    with TestClient(app) as client:
        client.get("/ok")
        answer = client.get("/ok", headers={"Origin": "https://a.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert client.get("/refused").status_code == 503
    assert isinstance(app.middleware_stack, ServerErrorMiddleware)
    assert passes == ["lifespan", "/ok", "/ok", "/refused"]


def test_middlewares_that_are_put_together_anew_are_all_passed(passes: list[str]) -> None:
    """As by what instruments an app that runs already."""
    app = make_app()
    edge = edged(app)
    with TestClient(app, raise_server_exceptions=False) as client:
        client.get("/ok")
        app.middleware_stack = app.build_middleware_stack()
        passes.clear()
        assert client.get("/ok").status_code == 200
        assert client.get("/broken").status_code == 500
        assert passes == ["/ok", "/broken"]
        assert edge.snapshot()["lifecycle"]["in_flight"] == 0


def test_an_edge_on_which_nothing_is_plain_stays_inside(passes: list[str]) -> None:
    """Its long way is for errors too."""
    app = make_app()
    edged(app, timeout=None, concurrency=Bulkhead(5))
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/broken").status_code == 500
        assert isinstance(app.middleware_stack, ServerErrorMiddleware)
    assert passes == ["lifespan", "/broken"]


# With a server that tells what it was sent


@asynccontextmanager
async def living(app: Any) -> AsyncIterator[None]:
    """Let the app live in this loop, until after its first request, which is never plain."""
    said: asyncio.Queue[Any] = asyncio.Queue()
    begun = asyncio.Event()

    async def send(_message: Any) -> None:
        begun.set()

    life = asyncio.create_task(app({"type": "lifespan", "asgi": {}}, said.get, send))
    said.put_nowait({"type": "lifespan.startup"})
    await begun.wait()
    await asyncio.create_task(ask(app, "/ok"))
    yield
    said.put_nowait({"type": "lifespan.shutdown"})
    await life


def quiet(app: Any) -> Edge:
    """Protect the app, and leave the signals of this process alone."""
    return edged(app, lifecycle=Lifecycle(signals=False))


def unused(_request: Request, _error: Exception) -> JSONResponse:
    """Answer with what must never begin, where there is an answer already."""
    return JSONResponse("second", 555, background=BackgroundTask(pytest.fail, "it was sent"))


@pytest.mark.parametrize("headers", [PLAIN, UNUSUAL], ids=["plain", "unusual"])
def test_an_answer_that_nobody_gets_is_not_made(headers: dict[str, str]) -> None:
    """Neither its parts, of which there may be no end, nor what it does in the background."""
    app = make_app()
    app.add_exception_handler(Exception, unused)  # a plain function: it runs in a thread
    quiet(app)

    async def main() -> None:
        async with living(app):
            with pytest.raises(BrokenError, match="in mid-body"):
                await asyncio.create_task(ask(app, "/half", headers=headers.items()))

    asyncio.run(main())


@pytest.mark.parametrize("broken", [1, 2], ids=["its start", "its body"])
@pytest.mark.parametrize("headers", [PLAIN, UNUSUAL], ids=["plain", "unusual"])
def test_a_refusal_that_breaks_off_gets_no_second(headers: dict[str, str], broken: int) -> None:
    """The client was gone: the error is noted, but the server has one answer only."""
    app = make_app()
    app.add_exception_handler(Exception, unused)
    edge = quiet(app)
    sent: list[Any] = []

    async def main() -> None:
        def send(message: Any) -> None:
            sent.append(message.get("status"))
            if len(sent) == broken:
                raise OSError("the client is gone")

        async with living(app):
            with pytest.raises(OSError, match="is gone"):
                await asyncio.create_task(
                    ask(app, "/refused", headers=headers.items(), on_send=send)
                )
            assert edge.snapshot()["lifecycle"]["in_flight"] == 0

    asyncio.run(main())
    assert sent == [503, None][:broken]


@pytest.mark.parametrize("used", [False, True], ids=["only looked at", "used"])
def test_what_began_outside_ends_there(used: bool) -> None:  # noqa: FBT001 - a case
    """Though middlewares are put together anew meanwhile; if only to be looked at, for all."""
    seen: list[Any] = []
    app = with_handler(seen)
    quiet(app)

    @app.get("/late")
    async def late() -> None:
        stack = app.build_middleware_stack()
        if used:
            app.middleware_stack = stack
        raise BrokenError("late")

    async def main() -> None:
        async with living(app):
            for path in ("/late", "/broken"):
                with pytest.raises(BrokenError):
                    await asyncio.create_task(ask(app, path))

    asyncio.run(main())
    assert [error for error, *_ in seen] == ["late", "at the app"]


def test_who_looks_for_a_middleware_finds_it() -> None:
    """As FastAPI does for that of OpenTelemetry, so as not to note each request twice."""
    app = make_app()
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    edged(app)
    with TestClient(app):
        found, inner = [], app.middleware_stack
        while inner is not None:
            found.append(type(inner))
            inner = getattr(inner, "app", None)
    assert CORSMiddleware in found


class Begun(JSONResponse):
    """Breaks off; without a task of its own, which would keep the error (in Starlette's stream)."""

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        raise BrokenError("begun")


@pytest.mark.parametrize("path", ["/broken", "/begun", "/refused"])
def test_an_error_is_freed(path: str) -> None:
    """Without the collector, though it was handed to those who stand around the edge."""
    errors: list[ref[BaseException]] = []
    app = make_app()

    @app.exception_handler(Exception)
    async def answer(_request: Request, error: Exception) -> JSONResponse:
        errors.append(ref(error))
        return JSONResponse("mine", 555)

    @app.get("/begun")
    async def begun() -> Begun:
        return Begun("begun")

    quiet(app)

    def send(_message: Any) -> None:
        if path == "/refused":
            raise GoneError("the client is gone")

    async def failing() -> None:
        with pytest.raises((BrokenError, GoneError)):
            await ask(app, path, on_send=send)

    async def main() -> None:
        async with living(app):
            gc.collect()
            gc.disable()
            try:
                for _ in range(2):
                    await asyncio.create_task(failing())
                assert [error() for error in errors] == [None, None]
            finally:
                gc.enable()

    asyncio.run(main())
