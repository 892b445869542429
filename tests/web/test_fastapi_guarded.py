"""A guard as a dependency of a route: for how long it is held, and what counts as a failure."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import StreamingResponse
from starlette.exceptions import WebSocketException
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from seawall import Breaker, Bulkhead, Guard, Overloaded
from seawall.errors import KeyMissing, UnknownJob
from seawall.testing import run_virtual
from seawall.web import RequestLimit
from seawall.web.fastapi import guarded, limited, protect
from tests.support import let_pass
from tests.web.support import ask, http_scope


def breaking(name: str) -> Guard:
    """Return a guard that two failures in a row open."""
    return Guard(name, Breaker(consecutive=2, break_for=60.0))


def counts(guard: Guard) -> dict[str, int]:
    """Return how the guard has counted what it held, without what is zero."""
    told = guard.snapshot()
    found = {name: told[name] for name in ("succeeded", "failed", "cancelled", "rejected")}
    return {name: count for name, count in found.items() if count}


# What counts


def raising(guard: Guard, error: Exception) -> FastAPI:
    """Return an app with a guarded route, and a guarded websocket, that raise `error`."""
    app = FastAPI()
    protect(app, name="raising")

    @app.get("/{number}", dependencies=[Depends(guarded(guard))])
    async def route(number: int) -> None:  # noqa: ARG001 - FastAPI reads it
        raise error

    @app.websocket("/{number}", dependencies=[Depends(guarded(guard))])
    async def socket(socket: WebSocket, number: int) -> None:  # noqa: ARG001 - the same
        await socket.accept()
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "status"),
    [(HTTPException(404), 404), (UnknownJob("gone"), 404), (KeyMissing("none"), 400)],
    ids=["HTTPException", "UnknownJob", "KeyMissing"],
)
def test_a_callers_mistake_opens_no_circuit(error: Exception, status: int) -> None:
    """Whoever asks for what is not there has got a good answer, however often."""
    guard = breaking("mistakes")
    app = raising(guard, error)
    assert [asyncio.run(ask(app, "/1")).status for _ in range(3)] == [status] * 3
    assert counts(guard) == {"succeeded": 3}


def test_a_request_that_does_not_validate_opens_no_circuit() -> None:
    """The function has not even run."""
    guard = breaking("invalid")
    app = raising(guard, ValueError("never raised"))
    assert [asyncio.run(ask(app, "/x")).status for _ in range(3)] == [422] * 3
    assert counts(guard) == {"succeeded": 3}


def test_a_refusal_by_the_routes_own_limit_opens_no_circuit() -> None:
    """It is the caller who asks too often, whichever of the two dependencies comes first."""
    guard = breaking("often")
    app = FastAPI()
    protect(app, name="often edge")
    own = limited(RequestLimit("1/min", by="address", name="own"))

    @app.get("/", dependencies=[Depends(guarded(guard)), Depends(own)])
    async def route() -> str:
        return "value"

    assert [asyncio.run(ask(app)).status for _ in range(4)] == [200, 429, 429, 429]
    assert counts(guard) == {"succeeded": 4}


@pytest.mark.parametrize(
    ("error", "status"),
    [(HTTPException(502), 502), (Overloaded("inside"), 503)],
    ids=["HTTPException", "Overloaded"],
)
def test_a_failure_of_the_route_opens_the_circuit(error: Exception, status: int) -> None:
    """From 500 on it is the service that did not do what it was asked for."""
    guard = breaking("failures")
    app = raising(guard, error)
    answers = [asyncio.run(ask(app, "/1")) for _ in range(3)]
    assert [answer.status for answer in answers] == [status, status, 503]
    assert answers[2].json()["reason"] == "circuit_open"
    assert counts(guard) == {"failed": 2, "rejected": 1}


def test_a_bug_of_the_route_opens_the_circuit() -> None:
    """What nobody makes an answer of is a failure as well."""
    guard = breaking("bugs")
    client = TestClient(raising(guard, ValueError("bug")), raise_server_exceptions=False)
    assert [client.get("/1").status_code for _ in range(3)] == [500, 500, 503]


def test_a_client_that_hangs_up_is_no_verdict() -> None:
    """Neither in the middle of what it sends nor of a talk; it is counted as a cancellation."""
    guard = breaking("gone")
    app = FastAPI()
    protect(app, name="gone edge")

    @app.post("/", dependencies=[Depends(guarded(guard))])
    async def route(request: Request) -> int:
        return len(await request.body())

    @app.websocket("/", dependencies=[Depends(guarded(guard))])
    async def socket(socket: WebSocket) -> None:
        await socket.accept()
        await socket.receive_text()

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def unheard(_message: dict[str, Any]) -> None:
        pass

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(ClientDisconnect):
                await app(http_scope(method="POST"), gone, unheard)

    asyncio.run(main())
    with TestClient(app) as client:
        for _ in range(3):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect("/") as talk:
                talk.close()
    assert counts(guard) == {"cancelled": 6}


@pytest.mark.parametrize(
    ("error", "path", "counted"),
    [
        (WebSocketException(1008), "/1", {"succeeded": 2}),
        (ValueError("never raised"), "/x", {"succeeded": 2}),
        (WebSocketException(1011), "/1", {"failed": 2}),
    ],
    ids=["policy", "invalid", "internal"],
)
def test_the_code_of_a_websocket_tells_whose_fault_it_was(
    error: Exception, path: str, counted: dict[str, int]
) -> None:
    """A code for trouble of the server's is a failure; one for the client's is not."""
    guard = breaking("codes")
    with TestClient(raising(guard, error)) as client:
        for _ in range(2):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(path) as talk:
                talk.receive_text()
    assert counts(guard) == counted


# For how long


def long_after(guard: Guard) -> FastAPI:
    """Return an app with guarded routes that have much to do after their functions."""
    app = FastAPI()
    protect(app, name="long after")

    @app.get("/task", dependencies=[Depends(guarded(guard))])
    async def task(tasks: BackgroundTasks) -> str:
        tasks.add_task(let_pass, 60.0)
        return "answered"

    @app.get("/stream", dependencies=[Depends(guarded(guard))])
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await let_pass(60.0)
            yield b"last"

        return StreamingResponse(parts())

    return app


@pytest.mark.parametrize("path", ["/task", "/stream"])
def test_the_gates_are_left_when_the_function_is_over(path: str) -> None:
    """Neither a background task nor the stream that the function returned holds a place."""
    guard = Guard("short", Bulkhead(1))
    app = long_after(guard)

    async def main() -> None:
        first = asyncio.create_task(ask(app, path))
        await let_pass(1.0)
        assert not first.done()
        assert counts(guard) == {"succeeded": 1}
        assert (await ask(app, path)).status == 200
        await first

    run_virtual(main())


def test_a_fastapi_that_cannot_be_asked_ends_it_when_it_ends_dependencies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 0.121 there is no scope to ask for, and the guard acts all the same."""
    depends = fastapi.Depends

    def as_before(dependency: Any) -> Any:
        return depends(dependency)

    monkeypatch.setattr("fastapi.Depends", as_before)
    guard = Guard("old", Bulkhead(1))
    app = long_after(guard)

    async def main() -> None:
        first = asyncio.create_task(ask(app, "/task"))
        await let_pass(1.0)
        assert (await ask(app, "/task")).json()["reason"] == "bulkhead_full"
        assert (await first).status == 200

    run_virtual(main())
    assert counts(guard) == {"succeeded": 1, "rejected": 1}


def test_without_fastapi_there_is_nothing_to_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "fastapi.exceptions", None)
    with pytest.raises(ImportError, match="pip install 'seawall\\[fastapi\\]'"):
        guarded(breaking("alone"))
