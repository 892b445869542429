"""Errors of an app behind an edge: its own handlers and the server learn of each of them once."""

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
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, StreamingResponse

from seawall import CircuitOpen, current_deadline
from seawall.web import Edge
from seawall.web.fastapi import protect
from seawall.web.lifecycle import Lifecycle
from tests.web.support import ask

_serial = count()


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


APPS: dict[str, Callable[[], FastAPI]] = {
    "as it is": make_app,
    "debug": lambda: make_app(debug=True),
    "own handler": lambda: with_handler([]),
}


@pytest.mark.parametrize(("path", "status"), [("/ok", 200), ("/broken", 500), ("/refused", 503)])
@pytest.mark.parametrize("kind", APPS)
def test_an_app_answers_its_own_errors(kind: str, path: str, status: int) -> None:
    """By its handler, if it has one; the edge answers refusals."""
    app = APPS[kind]()
    edged(app)
    client = TestClient(app, raise_server_exceptions=False)
    expected = 555 if kind == "own handler" and path == "/broken" else status
    assert client.get(path).status_code == expected


def test_errors_reach_the_server_and_the_handler_once() -> None:
    """The server logs them; the handler has no deadline of the request's any more."""
    seen: list[Any] = []
    app = with_handler(seen)
    edge = edged(app)
    with TestClient(app) as client:
        client.get("/ok")
        with pytest.raises(BrokenError, match="at the app"):
            client.get("/broken")
        assert edge.snapshot()["lifecycle"]["in_flight"] == 0
    assert seen == [("at the app", "/broken", None)]


def test_a_response_that_has_begun_gets_no_second() -> None:
    """But the handler learns of the error, as it does without an edge."""
    seen: list[Any] = []
    app = with_handler(seen)
    edged(app)
    with TestClient(app, raise_server_exceptions=False) as client:
        client.get("/ok")
        answer = client.get("/half")
        assert (answer.status_code, answer.text) == (200, "half")
    assert [error for error, *_ in seen] == ["in mid-body"]


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


def test_an_answer_that_nobody_gets_is_not_made() -> None:
    """Neither its parts, of which there may be no end, nor what it does in the background."""
    app = make_app()
    app.add_exception_handler(Exception, unused)  # a plain function: it runs in a thread
    quiet(app)

    async def main() -> None:
        async with living(app):
            with pytest.raises(BrokenError, match="in mid-body"):
                await asyncio.create_task(ask(app, "/half"))

    asyncio.run(main())


@pytest.mark.parametrize("broken", [1, 2], ids=["its start", "its body"])
def test_a_refusal_that_breaks_off_gets_no_second(broken: int) -> None:
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
                await asyncio.create_task(ask(app, "/refused", on_send=send))
            assert edge.snapshot()["lifecycle"]["in_flight"] == 0

    asyncio.run(main())
    assert sent == [503, None][:broken]


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
