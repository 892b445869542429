"""Of an upstream's failure that the edge has answered, the log is told; of a bug, everybody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, WebSocket
from fastapi.responses import PlainTextResponse
from hypothesis import given
from hypothesis import strategies as st

from seawall import CircuitOpen, Overloaded
from seawall.testing import VirtualClock
from seawall.web.edge import Edge
from seawall.web.edge import upstream_log as _upstream_log
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.fastapi import protect
from seawall.web.problems import problem_of
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from tests.web.support import App, ask, http_scope


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    """Hear what is said at WARNING, as most services do."""
    caplog.set_level(logging.WARNING, "seawall")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the log, which must all be warnings of ours."""
    assert {(record.name, record.levelname) for record in caplog.records} <= {
        ("seawall", "WARNING")
    }
    return [record.getMessage() for record in caplog.records]


def failing(*failures: Exception, name: str | None = None) -> FastAPI:
    """Return an app with an edge and a route that fails in these ways, by their numbers."""
    app = FastAPI()
    protect(app, name=name)
    router = APIRouter(prefix="/v1")

    @router.get("/orders/{number}")
    async def order(number: int) -> None:
        raise failures[number]

    app.include_router(router)
    return app


# What is said


def test_an_upstreams_failure_is_answered_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """The line has method, template, status and error, and nothing that the caller wrote."""
    away, late = httpx.ConnectError("All connection attempts failed"), httpx.ReadTimeout("late")
    app = failing(away, late, name="shop")
    answers = [
        asyncio.run(ask(app, f"/v1/orders/{number}", query_string=b"token=secret"))
        for number in range(2)
    ]
    assert [answer.status for answer in answers] == [502, 504]
    first, second = said(caplog)
    assert first == (
        "edge 'shop': GET /v1/orders/{number} is answered with 502, as an upstream failed:"
        " ConnectError: All connection attempts failed"
    )
    assert second == (
        "edge 'shop': GET /v1/orders/{number} is answered with 504, as an upstream failed:"
        " ReadTimeout: late"
    )
    assert not any(record.exc_info for record in caplog.records)


def test_the_stack_is_shown_to_who_asks_for_all(caplog: pytest.LogCaptureFixture) -> None:
    """It is part of the same line where the logger is set to DEBUG."""
    error = httpx.ConnectError("away")
    with caplog.at_level(logging.DEBUG, "seawall"):
        asyncio.run(ask(failing(error), "/v1/orders/0"))
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_refusals_of_seawalls_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """They are counted where they are made, also if a vendor's SDK has wrapped them."""
    import openai

    wrapped = openai.APIConnectionError(request=None)  # type: ignore[arg-type]
    wrapped.__cause__ = CircuitOpen("open", retry_after=4.0)
    app = failing(Overloaded("shed"), CircuitOpen("open"), wrapped)
    for number in range(3):
        assert asyncio.run(ask(app, f"/v1/orders/{number}")).status == 503
    assert said(caplog) == []


def test_what_is_told_costs_nothing_where_nobody_hears_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the logger at ERROR not even the text of the error is looked at, but as the last error.

    A guard describes its last error at most ten times a second.
    """

    class Watched(httpx.ConnectError):
        looked_at = 0

        def __str__(self) -> str:
            self.looked_at += 1
            return "away"

    error = Watched("away")
    with caplog.at_level(logging.ERROR, "seawall"):
        assert asyncio.run(ask(failing(error), "/v1/orders/0")).status == 502
    assert error.looked_at == 1
    assert asyncio.run(ask(failing(error), "/v1/orders/0")).status == 502
    assert error.looked_at == 3


def test_a_route_without_a_template_is_told_by_the_name_of_what_serves_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Older routers leave no more than that; an app without any has nothing to tell."""
    error = httpx.ConnectError("away")
    asyncio.run(ask(Edge(bare(error), inbound=Inbound()), "/secret", endpoint=problem_of))
    asyncio.run(ask(Edge(bare(error), name="2", inbound=Inbound()), "/secret", endpoint=Told()))
    asyncio.run(ask(Edge(bare(error), name="3", inbound=Inbound()), "/secret"))
    first, second, third = said(caplog)
    assert "GET seawall.web.problems.problem_of is answered" in first
    assert f"GET {__name__}.Told is answered" in second
    assert "GET (no route) is answered" in third


def test_mounted_apps_tell_as_the_edge_does(caplog: pytest.LogCaptureFixture) -> None:
    """What is raised in them never reaches the edge, and is told by its pace all the same."""
    inner, app = FastAPI(), FastAPI()

    @inner.get("/orders/{number}")
    async def order(number: int) -> None:
        raise httpx.ConnectError("away") if number else CircuitOpen("open")

    app.mount("/inner", inner)
    protect(app, name="outer")
    statuses = [asyncio.run(ask(app, f"/inner/orders/{number}")).status for number in (0, 1, 2)]
    assert statuses == [503, 502, 502]
    (line,) = said(caplog)
    assert line == (
        "edge 'outer': GET /orders/{number} is answered with 502, as an upstream failed:"
        " ConnectError: away"
    )


def test_the_handshake_of_a_websocket_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    """It is refused as a request is."""
    app = FastAPI()
    protect(app, name="sockets")

    @app.websocket("/live/{number}")
    async def live(_socket: WebSocket, number: int) -> None:
        raise httpx.ConnectError(f"away {number}")

    scope = http_scope("/live/7") | {"type": "websocket"}
    del scope["method"]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1013}]
    (line,) = said(caplog)
    assert "WEBSOCKET /live/{number} is answered with 502" in line


# How often


def bare(error: Exception) -> App:
    """Return an app without routes that raises `error`."""

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise error

    return app


class Told:
    """A log with a clock of its own."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log = UpstreamLog("shop", self.clock.now)

    def __call__(self, error: Exception, route: str = "/orders", method: str = "GET") -> None:
        """Note that `error` was answered."""

        class Template:
            path = route

        incoming = Incoming(http_scope("/", method=method, route=Template()), Trust())
        assert self.log.answer(incoming, error) is not None


def test_an_outage_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line a second for each route and kind; the next says how many there were besides."""
    told = Told()
    for _ in range(100):
        told(httpx.ConnectError("away"))
    told(httpx.ReadTimeout("late"))
    told(httpx.ConnectError("away"), route="/users")
    assert len(said(caplog)) == 3
    assert "more" not in caplog.text
    told.clock.advance(0.999)
    told(httpx.ConnectError("away"))
    assert len(said(caplog)) == 3
    told.clock.advance(0.001)
    told(httpx.ConnectError("away"))
    told.clock.advance(1.0)
    told(httpx.ConnectError("away"))
    fourth, fifth = said(caplog)[3:]
    assert fourth.endswith("ConnectError: away (100 more since the last such line)")
    assert fifth.endswith("ConnectError: away")


def test_kinds_without_number_do_not_fill_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond the most that are remembered have one pace together."""
    monkeypatch.setattr(_upstream_log, "MOST", 3)
    told = Told()
    for number in range(50):
        told(httpx.ConnectError("away"), route=f"/{number}")
    assert len(said(caplog)) == 4
    assert len(told.log._paces) == 4
    told.clock.advance(1.0)
    told(httpx.ConnectError("away"), route="/50")
    assert said(caplog)[-1].endswith("(46 more since the last such line)")


# What errors say


def test_addresses_are_told_without_what_they_may_hide(caplog: pytest.LogCaptureFixture) -> None:
    """Clients write whole URLs into their errors: with keys, tokens and passwords."""
    import requests

    url = "https://user:secret@vendor.example:8443/bot-secret/x?key=secret#secret"
    response = httpx.Response(404, request=httpx.Request("GET", url))
    told = Told()
    told(
        httpx.HTTPStatusError(
            f"404 for url '{url}'\nsecret", request=response.request, response=response
        )
    )
    told(requests.HTTPError(f"404 for url: {url}"))
    told(
        requests.ConnectionError("Max retries exceeded with url: /secret/a?b=secret (Caused by x)")
    )
    told(requests.Timeout("late: vendor/a?token=secret"))
    assert "secret" not in caplog.text
    whats = [line.partition("failed: ")[2] for line in said(caplog)]
    assert whats == [
        "404 from vendor.example",
        "HTTPError: 404 for url: https://vendor.example:8443/...",
        "ConnectionError: Max retries exceeded with url: /... (Caused by x)",
        "Timeout: late: vendor/a?...",
    ]


def test_the_cause_is_told_where_it_says_more(caplog: pytest.LogCaptureFixture) -> None:
    """An SDK says that there is no connection, and its cause says why."""
    import openai

    wrapped = openai.APIConnectionError(request=None)  # type: ignore[arg-type]
    wrapped.__cause__ = httpx.ConnectError("refused by https://vendor/secret")
    same = httpx.ReadError("away")
    same.__cause__ = OSError("away")
    told = Told()
    told(wrapped)
    told(same)
    first, second = said(caplog)
    assert first.endswith(
        "failed: APIConnectionError -> ConnectError: refused by https://vendor/..."
    )
    assert second.endswith("failed: ReadError: away")


def test_of_grpcs_errors_code_and_details_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The first line of their text says nothing."""
    import grpc

    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "no address is reached\nand more"

    Failed.__module__ = "grpc"
    told = Told()
    told(Failed("<Failed of RPC that terminated with:"))
    assert said(caplog)[0].endswith("failed: UNAVAILABLE: no address is reached")


@given(st.text(), st.text())
def check_line(text: str, method: str) -> None:
    """Whatever an error or a caller says, it is part of one line that is not long."""
    heard_lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard_lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("seawall")
    log.addHandler(handler)
    try:
        Told()(httpx.ConnectError(text * 50), method=method * 50)
    finally:
        log.removeHandler(handler)
    (line,) = heard_lines
    assert line.isprintable()
    assert len(line) < 10 * (200 + 16) + 200  # an escape has up to ten characters


def test_nobody_writes_lines_of_their_own_into_the_log() -> None:
    """Control characters are escaped, and all of it is bounded."""
    check_line()


def test_an_error_that_cannot_be_told_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Its kind is told then, and nothing goes wrong."""

    class Mute(httpx.ConnectError):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert asyncio.run(ask(failing(Mute("")), "/v1/orders/0")).status == 502
    (line,) = said(caplog)
    assert line.endswith("Mute")


# Who else is told


def handled(kind: type[Exception], error: Exception) -> tuple[int, list[Exception]]:
    """Let a route raise `error` where the app has a handler of `kind`; what came of it."""
    app = failing(error)
    seen: list[Exception] = []

    @app.exception_handler(kind)
    async def mine(_request: Request, error: Exception) -> PlainTextResponse:
        seen.append(error)
        return PlainTextResponse("mine", 418)

    async def asking() -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return (await client.get("/v1/orders/0")).status_code

    return asyncio.run(asking()), seen


def test_a_handler_of_the_apps_own_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    """It answers, and what is to be said is its affair; one for all errors sees only bugs."""
    error = httpx.ConnectError("away")
    assert handled(httpx.HTTPError, error) == (418, [error])
    assert said(caplog) == []
    assert handled(Exception, error) == (502, [])
    assert len(said(caplog)) == 1


def client_called_wrongly() -> Exception:
    """Return what httpx says of a URL without a host."""
    with pytest.raises(httpx.UnsupportedProtocol) as caught:
        httpx.get("vendor/orders")
    return caught.value


@pytest.mark.parametrize(
    "bug", [client_called_wrongly, lambda: KeyError("bug")], ids=["called wrongly", "any other"]
)
def test_a_client_that_is_called_wrongly_is_a_bug_like_any_other(
    bug: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """The handler for all errors sees it, the server gets it, and the edge says nothing."""
    error = bug()
    assert handled(Exception, error) == (418, [error])
    with pytest.raises(type(error)) as raised:
        asyncio.run(ask(failing(error), "/v1/orders/0"))
    assert raised.value is error
    assert said(caplog) == []
