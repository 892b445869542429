"""The middleware where it is used: in FastAPI apps, inside the edge, behind a real server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from seawall import Bulkhead, Guard
from seawall.durable import Database, Sqlite, migrate
from seawall.durable.asgi import IdempotentRequests, keyed
from seawall.durable.idempotency import Idempotency
from seawall.web.fastapi import protect
from tests.web.support import serve


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

    def __init__(self, records: Idempotency, *, edge: bool) -> None:
        """Put the middleware around the routes, and the edge around that."""
        self.done: list[str] = []
        self.after: list[str] = []
        self.streaming = threading.Event()
        self.go_on = threading.Event()
        self.full = Guard("full", Bulkhead(1))
        self.app = FastAPI()
        for path in ("order", "missing", "broken", "busy", "stream"):
            self.app.post(f"/{path}")(getattr(self, path))
        self.app.add_middleware(
            IdempotentRequests,
            idempotency=records,
            routes=["/order", "/missing", "/broken", "/busy", "/stream"],
            scope=lambda incoming: incoming.header("x-user"),
        )
        self.edge = protect(self.app, name="service") if edge else None

    async def order(self, request: Request, count: int, tasks: BackgroundTasks) -> Any:
        """Take an order."""
        name = keyed(request)
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

    async def stream(self) -> StreamingResponse:
        """Answer in parts, for as long as it takes."""

        async def parts() -> AsyncIterator[bytes]:
            yield b"begun "
            self.streaming.set()
            await asyncio.to_thread(self.go_on.wait, 20)
            self.done.append("stream")
            yield b"and done"

        return StreamingResponse(parts())


@pytest.mark.parametrize("edge", [True, False])
def test_in_fastapi(records: Idempotency, edge: bool):  # noqa: FBT001 - as drawn
    """What FastAPI answers itself is kept or not as any other answer, with and without the edge."""
    service = Service(records, edge=edge)

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
                assert (await post("/broken")).status_code == 500
            assert service.done == ["k", "missing", "broken", "missing"]
            assert service.after == ["k"]
            assert (await client.post("/order?count=3")).json()["reason"] == "key_missing"
            # With the edge a refusal is 503, and may be asked for again; without it a failure.
            answers = [await post("/busy") for _ in range(2)]
            assert [a.status_code for a in answers] == [503 if edge else 500] * 2
            assert service.done.count("busy") == 2
            # Slashes are redirected, and the key is good where they lead to.
            moved = await post("/order/?count=3", "slash")
            assert moved.status_code == 307
            assert (await post("/order?count=3", "slash")).status_code == 200

    asyncio.run(main())


def test_a_client_that_hangs_up_has_it_done(records: Idempotency):
    """Behind a real server: the connection is cut in mid-answer, and the repeat has all of it."""
    service = Service(records, edge=True)
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
