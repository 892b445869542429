"""Errors of Seawall in Quart and Litestar: the app's own handlers come first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from litestar import Litestar, Request, Response, get
from quart import Quart, abort

from seawall import CircuitOpen
from seawall.testing import run_virtual
from seawall.web import Edge
from seawall.web.litestar import protect as protect_litestar
from seawall.web.quart import protect as protect_quart
from tests.web.support import Answer, ask, http_scope


class VendorError(CircuitOpen):
    """An error that the app handles itself."""


def quart_app() -> Quart:
    """Return a Quart app whose paths raise."""
    app = Quart(__name__)

    @app.get("/refused")
    async def refused() -> str:
        raise CircuitOpen("open", retry_after=15.0)

    @app.get("/own")
    async def own() -> str:
        raise VendorError("open")

    @app.get("/teapot")
    async def teapot() -> str:
        abort(418)

    @app.get("/bug")
    async def bug() -> str:
        raise ValueError("a bug")

    @app.websocket("/socket")
    async def socket() -> None:
        raise CircuitOpen("open", retry_after=15.0)

    @app.errorhandler(VendorError)
    async def handle(_error: VendorError) -> tuple[str, int]:
        return "own handler", 299

    return app


def litestar_app() -> Edge:
    """Return the same in Litestar, behind its edge."""

    @get("/refused")
    async def refused() -> str:
        raise CircuitOpen("open", retry_after=15.0)

    @get("/own")
    async def own() -> str:
        raise VendorError("open")

    @get("/bug")
    async def bug() -> str:
        raise ValueError("a bug")

    def handle(_request: Request[Any, Any, Any], _error: VendorError) -> Response[str]:
        return Response("own handler", status_code=299, media_type="text/plain")

    handlers: Any = {VendorError: handle}
    return protect_litestar(Litestar([refused, own, bug], exception_handlers=handlers))


def quart_edge() -> Edge:
    """Return the edge of a Quart app."""
    return protect_quart(quart_app())


def answer(edge: Edge, path: str) -> Answer:
    """Ask an app once."""
    return run_virtual(ask(edge, path))


@pytest.mark.parametrize("make", [quart_edge, litestar_app])
def test_the_apps_own_handler_comes_first(make: Any) -> None:
    """Ours answers what the app has no handler for."""
    edge = make()
    assert answer(edge, "/own").body == b"own handler"
    refused = answer(edge, "/refused")
    assert (refused.status, refused.headers["retry-after"]) == (503, "15")
    assert answer(edge, "/bug").status == 500
    assert answer(edge, "/nowhere").status == 404
    assert edge.snapshot()["failed"] == 2  # the refusal and the bug


def test_http_errors_of_quart_are_left_alone() -> None:
    """They are exceptions too, and have a response of their own."""
    assert answer(quart_edge(), "/teapot").status == 418


def test_a_general_handler_of_the_app_gets_bugs_but_no_refusals() -> None:
    """It may be registered before or after the edge is put around the app."""
    for early in (True, False):
        app = quart_app()
        edge = None if early else protect_quart(app)
        app.register_error_handler(Exception, lambda _error: ("general", 299))
        edge = edge or protect_quart(app)
        assert answer(edge, "/bug").body == b"general"
        assert answer(edge, "/refused").status == 503


def test_a_websocket_that_a_handler_of_quart_refuses_gets_the_problem() -> None:
    """As the response to its handshake, where the server can send one."""
    sent: list[Any] = []
    messages = [{"type": "websocket.disconnect", "code": 1006}, {"type": "websocket.connect"}]

    async def main() -> None:
        answered = asyncio.Event()

        async def receive() -> Any:
            if len(messages) == 1:
                await answered.wait()  # a client leaves when it has the answer
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message)
            answered.set()

        scope = http_scope("/socket", type="websocket", scheme="ws", subprotocols=[])
        await quart_edge()({**scope, "extensions": {"websocket.http.response": {}}}, receive, send)

    run_virtual(main())
    assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 503)


def test_protect_takes_the_app_of_its_framework_once() -> None:
    """The error says what to write instead."""
    app = quart_app()
    protect_quart(app)
    with pytest.raises(RuntimeError, match="has an edge already"):
        protect_quart(app)
    for protect in (protect_quart, protect_litestar):
        with pytest.raises(TypeError, match=r"others take Edge\(app\)"):
            protect(object())  # type: ignore[operator]


def test_an_unknown_setting_of_protect_raises() -> None:
    """A misspelt one was ignored by the frameworks that pass on all of their arguments."""
    app = Litestar()
    with pytest.raises(TypeError, match="unexpected keyword argument 'timout'"):
        protect_litestar(app, timout=5.0)  # type: ignore[call-arg]
