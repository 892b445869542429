"""The middleware where it is used: in FastAPI apps, inside the edge, behind a real server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI, HTTPException, Request
from fastapi.openapi.models import OpenAPI
from fastapi.responses import Response, StreamingResponse

from seawall import Bulkhead, Guard
from seawall.durable import Database, Sqlite, migrate
from seawall.durable.http.middleware import IdempotentRequests, idempotent_request
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.web.fastapi import protect
from tests.web.support import ask, serve


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Idempotency]:
    """Return records in a file."""
    source = Sqlite(tmp_path / "records.db")
    database = Database(source, name="records")
    migrate(database)
    yield Idempotency(database)
    database.close()
    source.close()


class Service:
    """A FastAPI app with a few routes, and what it has done."""

    def __init__(
        self, records: Idempotency, edge: str = "outside", timeout: float | None = None
    ) -> None:
        """Put the middleware around the routes, and the edge around that, inside, or nowhere."""
        self.done: list[str] = []
        self.after: list[str] = []
        self.streaming = threading.Event()
        self.go_on = threading.Event()
        self.full = Guard("full", Bulkhead(1))
        self.app = FastAPI()
        paths = ("order", "missing", "broken", "busy", "slow", "large", "nothing", "stream")
        for path in paths:
            self.app.post(f"/{path}")(getattr(self, path))
        if edge == "inside":
            protect(self.app, name="service", timeout=timeout)
        self.requests = IdempotentRequests.add_to(
            self.app,
            records,
            routes=[f"/{path}" for path in paths],
            scope=lambda incoming: incoming.header("x-user"),
        )
        if edge == "outside":
            protect(self.app, name="service", timeout=timeout)

    async def order(self, request: Request, count: int, tasks: BackgroundTasks) -> Any:
        """Take an order."""
        name = idempotent_request(request)
        assert name is not None
        self.done.append(name.key)
        tasks.add_task(self.after.append, name.key)
        return {"count": count, "of": name.scope}

    async def missing(self) -> None:
        """Find nothing."""
        self.done.append("missing")
        raise HTTPException(404)

    async def broken(self) -> None:
        """Fail."""
        self.done.append("broken")
        raise RuntimeError("broken")

    async def busy(self) -> str:
        """Find no room."""
        self.done.append("busy")
        return await self.full.acall(self._once_more)

    async def _once_more(self) -> str:
        return await self.full.acall(self._once_more)

    async def slow(self) -> None:
        """Take too long."""
        self.done.append("slow")
        await asyncio.Event().wait()

    async def large(self) -> Response:
        """Answer with more than is kept."""
        self.done.append("large")
        headers = {"Location": "/large/1", "Set-Cookie": "a=b"}
        return Response(b"x" * 5000, 201, headers, media_type="text/csv")

    async def nothing(self) -> Response:
        """Have no content."""
        self.done.append("nothing")
        answer = Response(status_code=204, headers={"X-Twice": "a"})
        answer.headers.append("X-Twice", "b")
        return answer

    async def stream(self) -> StreamingResponse:
        """Answer in parts, for as long as it takes."""

        async def parts() -> AsyncIterator[bytes]:
            yield b"begun "
            self.streaming.set()
            await asyncio.to_thread(self.go_on.wait, 20)
            self.done.append("stream")
            yield b"and done"

        return StreamingResponse(parts())


@pytest.mark.parametrize("edge", ["outside", "inside", "none"])
def test_in_fastapi(records: Idempotency, edge: str):
    """What FastAPI answers itself is kept or not as any other answer, wherever the edge is."""
    service = Service(records, edge)

    async def main() -> None:
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:

            async def post(path: str, key: str = "k") -> httpx.Response:
                headers = {"Idempotency-Key": f'"{key}"', "X-User": "ann"}
                return await client.post(path, headers=headers)

            for n in range(2):
                answer = await post("/order?count=3")
                assert answer.json() == {"count": 3, "of": "ann"}
                assert ("idempotent-replayed" in answer.headers) == (n == 1)
                assert (await post("/order?count=x", "invalid")).status_code == 422
                assert (await post("/missing")).status_code == 404
                answer = await post("/broken")
                assert (answer.status_code, answer.json()["reason"]) == (500, "failed")
                assert answer.headers["content-type"] == "application/problem+json"
                assert ("idempotent-replayed" in answer.headers) == (n == 1)
            assert service.done == ["k", "missing", "broken", "missing"]
            assert service.after == ["k"]
            assert (await client.post("/order?count=3")).json()["reason"] == "key_missing"
            # With the edge a refusal is 503, and may be asked for again; without it a failure.
            answers = [await post("/busy") for _ in range(2)]
            assert [a.status_code for a in answers] == [500 if edge == "none" else 503] * 2
            assert service.done.count("busy") == 2
            # Slashes are redirected, and the key is good where they lead to.
            moved = await post("/order/?count=3", "slash")
            assert moved.status_code == 307
            assert (await post("/order?count=3", "slash")).status_code == 200
            assert service.requests.snapshot()["replays"] == 2

    asyncio.run(main())


@pytest.mark.parametrize(("edge", "again"), [("outside", 409), ("inside", 504)])
def test_what_the_edge_cuts_off(records: Idempotency, edge: str, again: int):
    """Outside it cancels: in flight, until the lease is over. Inside it answers: that is kept."""
    service = Service(records, edge, timeout=0.5)

    async def main() -> None:
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": "k", "X-User": "ann"}
            for status in (504, again):
                answer = await client.post("/slow", headers=headers)
                assert (answer.status_code, service.done) == (status, ["slow"])

    asyncio.run(main())


def test_a_mistake_is_told_where_it_is_made(records: Idempotency):
    """Not at the first request, when a server has begun to serve."""
    with pytest.raises(TypeError, match="whose a request is"):
        IdempotentRequests.add_to(FastAPI(), records, routes=["/orders"])
    with pytest.raises(TypeError, match="are put inside"):
        IdempotentRequests.add_to(_plain, records, routes=["/orders"], scope=lambda _: "ann")


async def _plain(_scope: Any, _receive: Any, _send: Any) -> None:
    pass


# Behind a real server


def answers_of(url: str, *paths: str) -> list[bytes]:
    """Ask for each path and return what came over the wire, but for its date."""
    where = urlsplit(url)
    came = []
    for path in paths:
        client = socket.create_connection((where.hostname, where.port), timeout=10)  # type: ignore[arg-type]
        with client:
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nX-User: ann\r\n"
            client.sendall(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
            told = b"".join(iter(lambda c=client: c.recv(65536), b""))  # type: ignore[misc]
        lines = told.split(b"\r\n")
        own = (b"date:", b"connection:")
        came.append(b"\r\n".join(line for line in lines if not line.lower().startswith(own)))
    return came


def test_over_the_wire_a_repeat_is_the_same(records: Idempotency):
    """To the byte, but for a mark; of what is too large the status and where to look."""
    records.max_body = 1000
    service = Service(records)
    mark = b"idempotent-replayed: true"
    with serve(service.app) as url:
        for path in ("/order?count=3", "/nothing", "/broken"):
            told, again = answers_of(url, path, path)
            head, body = told.split(b"\r\n\r\n")
            assert again == b"\r\n".join([head, mark, b"", body])
        told, again = answers_of(url, "/large", "/large")
    assert told.endswith(b"x" * 5000)
    assert b"set-cookie: a=b" in told
    kept = [b"location: /large/1", b"content-type: text/csv; charset=utf-8"]
    marks = [b"content-length: 0", b"idempotent-body: dropped", mark]
    assert again.split(b"\r\n")[1:] == [b"server: uvicorn", *kept, *marks, b"", b""]
    assert again.startswith(b"HTTP/1.1 201 ")
    assert service.done == ["k", "nothing", "broken", "large"]


def test_a_stream_that_was_not_recorded_has_no_end(
    records: Idempotency, monkeypatch: pytest.MonkeyPatch
):
    """Its client knows that it has not got all, and asks again."""
    service = Service(records)
    service.go_on.set()

    async def refuse(*_args: Any, **_options: Any) -> bool:
        return False

    monkeypatch.setattr(records, "acomplete", refuse)
    with serve(service.app) as url:
        headers = {"Idempotency-Key": "k", "X-User": "ann"}
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/stream", headers=headers)
    assert service.done == ["stream"]
    assert service.requests.snapshot()["refused_late"] == 1


def test_a_client_that_hangs_up_has_it_done(records: Idempotency):
    """Behind a real server: the connection is cut in mid-answer, and the repeat has all of it."""
    service = Service(records)
    with serve(service.app) as url:
        where = urlsplit(url)
        client = socket.create_connection((where.hostname, where.port), timeout=10)  # type: ignore[arg-type]
        with client:
            head = b"POST /stream HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nX-User: ann\r\n"
            client.sendall(head + b"Content-Length: 0\r\n\r\n")
            assert service.streaming.wait(10)
            assert client.recv(10)
        headers = {"Idempotency-Key": "k", "X-User": "ann"}
        with httpx.Client(base_url=url, headers=headers) as second:
            answer = second.post("/stream")
            assert (answer.status_code, answer.json()["reason"]) == (409, "key_in_flight")
            service.go_on.set()
            while answer.status_code == 409:
                answer = second.post("/stream")
            assert (answer.status_code, answer.content) == (200, b"begun and done")
            assert answer.headers["idempotent-replayed"] == "true"
        assert service.done == ["stream"]


@pytest.mark.parametrize("how", ["added", "around", "hidden"])
@pytest.mark.parametrize(
    ("template", "path", "root"),
    [
        ("/orders", "/orders%0A", ""),
        ("/files/{name:path}", "/files/", ""),
        ("/orders", "/api//orders", "/api/"),
        ("/orders/{id}.json", "/orders/7.json", ""),
    ],
)
def test_no_path_reaches_a_handler_past_a_key_that_is_required(
    records: Idempotency, how: str, template: str, path: str, root: str
):
    """Whatever the path, a request that the app dispatches to the route needs a key."""

    async def main() -> None:
        app: Any = FastAPI()
        done: list[str] = []

        async def order() -> None:
            done.append(path)

        app.add_api_route(template, order, methods=["POST"])
        options: Any = {"routes": [template], "scope": lambda _: "ann"}
        if how == "added":
            IdempotentRequests.add_to(app, records, **options)
        else:
            inner, hidden = app, Hidden(app)
            app = IdempotentRequests(hidden if how == "hidden" else inner, records, **options)
        answer = await ask(app, unquote(path), method="POST", root_path=root)
        assert (answer.status, done) == (400, [])

    asyncio.run(main())


class Hidden:
    """An app of which no router is to be seen."""

    def __init__(self, app: Any) -> None:
        """Stand around `app`."""
        self._inside = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve what there is to serve."""
        await self._inside(scope, receive, send)


# Beside the routes of the app


@pytest.mark.parametrize("edge", ["outside", "none"])
def test_the_app_describes_the_key_and_its_answers(records: Idempotency, edge: str):
    """OpenAPI has the header, 400, 409 and 422 on idempotent routes, and on no others."""
    app = FastAPI()

    @app.post("/orders/{number}/pay")
    @app.put("/orders/{number}/pay")
    async def pay(number: int) -> dict[str, int]:
        return {"paid": number}

    @app.post("/other")
    async def other() -> None: ...

    IdempotentRequests.add_to(
        app, records, routes=["/orders/{id:int}/pay"], scope=lambda _: "t", required=True
    )
    if edge == "outside":
        protect(app)
    schema = app.openapi()
    OpenAPI.model_validate(schema)
    assert app.openapi() is schema
    paid = schema["paths"]["/orders/{number}/pay"]["post"]
    key = next(each for each in paid["parameters"] if each["in"] == "header")
    assert (key["name"], key["required"]) == ("Idempotency-Key", True)
    assert {"200", "400", "409", "422"} <= set(paid["responses"])
    assert "Retry-After" in paid["responses"]["409"]["headers"]
    assert set(paid["responses"]["422"]["content"]) == {
        "application/json",
        "application/problem+json",
    }
    assert "SeawallProblem" in schema["components"]["schemas"]
    assert ("503" in paid["responses"]) == (edge == "outside")
    for path, method in (("/orders/{number}/pay", "put"), ("/other", "post")):
        untouched = schema["paths"][path][method]
        assert "409" not in untouched["responses"]
        assert all(each["in"] != "header" for each in untouched.get("parameters", []))


def test_a_method_that_a_path_does_not_have_is_405(records: Idempotency):
    """Also without a key: it is the app that knows, and nothing is recorded of it."""
    app = FastAPI()
    inner = FastAPI()

    @app.put("/orders/{number}")
    async def replace(number: int) -> dict[str, int]:
        return {"replaced": number}

    @inner.put("/{number}")
    async def replace_inside(number: int) -> dict[str, int]:
        return {"replaced": number}

    app.mount("/inner", inner)
    routes = ["/orders/{number}", "/inner/{number}"]
    IdempotentRequests.add_to(
        app, records, routes=routes, scope=lambda incoming: incoming.header("x-user")
    )

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            for path in ("/orders/7", "/inner/7"):
                for headers in ({}, {"Idempotency-Key": "k", "X-User": "ann"}):
                    answer = await client.post(path, headers=headers)
                    assert (answer.status_code, answer.headers["allow"]) == (405, "PUT"), path
                assert (await client.put(path)).status_code == 200

    asyncio.run(main())
    assert records.snapshot()["fresh"] == 0
