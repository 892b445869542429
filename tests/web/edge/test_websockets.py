"""Websockets at the edge: let in as a request, then open for as long as they like."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from websockets.asyncio.client import connect as dial_async

from seawall import Bulkhead, Shed
from seawall.context import current_deadline
from seawall.shedding import by_criticality
from seawall.testing import run_virtual
from seawall.web.edge import Edge
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.fastapi import protect
from seawall.web.lifecycle import Lifecycle
from tests.support import let_pass
from tests.web.support import held_slots, http_scope, serve


async def connect(
    app: Any, *, extensions: Any = None, address: str = "127.0.0.1"
) -> list[dict[str, Any]]:
    """Open a websocket; return what the app sent."""
    sent: list[dict[str, Any]] = []
    scope = {**http_scope("/ws"), "type": "websocket", "extensions": extensions or {}}
    scope["client"] = (address, 50000)
    del scope["method"]

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def open_for(seconds: float, *, before: float = 0.0) -> Any:
    """Return an app that accepts after `before` seconds, and closes after `seconds` more."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await let_pass(before)
        await send({"type": "websocket.accept"})
        assert current_deadline() is None
        await let_pass(seconds)
        await send({"type": "websocket.close", "code": 1000})

    return app


def test_an_open_websocket_holds_no_place_among_requests() -> None:
    """Its handshake does; its place among websockets is held to the end."""

    async def main() -> None:
        places, sockets = Bulkhead(1), Bulkhead(2)
        life = Lifecycle(signals=False)
        edge = Edge(
            open_for(60.0, before=0.5),
            name="sockets",
            inbound=Inbound(timeout=5.0),
            loop_admission=LoopAdmission(),
            concurrency=places,
            websockets=sockets,
            lifecycle=life,
        )
        task = asyncio.ensure_future(connect(edge))
        await let_pass(0.25)
        assert (places.in_flight, sockets.in_flight) == (1, 1)
        await let_pass(10.0)  # beyond the deadline of the handshake
        assert (places.in_flight, sockets.in_flight, life.in_flight) == (0, 1, 1)
        kinds = [message["type"] for message in await task]
        assert kinds == ["websocket.accept", "websocket.close"]
        assert not held_slots()
        assert life.in_flight == 0

    run_virtual(main())


def test_a_handshake_that_takes_too_long_is_refused() -> None:
    """Until it is accepted, a websocket has a deadline as a request has."""

    async def main() -> None:
        edge = Edge(open_for(1.0, before=60.0), name="slow-socket", inbound=Inbound(timeout=1.0))
        sent = await connect(edge, extensions={"websocket.http.response": {}})
        assert sent[0]["type"] == "websocket.http.response.start"
        assert sent[0]["status"] == 504

    run_virtual(main())


@pytest.mark.parametrize(("status", "failed"), [(403, False), (500, True)])
def test_a_handshake_that_the_app_refuses_with_500_has_failed(status: int, *, failed: bool) -> None:
    """Gates count the handshake by the status of its response, as they count a request."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "websocket.http.response.start", "status": status, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b""})

    async def main() -> None:
        edge = Edge(app, name=f"refuses with {status}", concurrency=Bulkhead(1))
        await connect(edge, extensions={"websocket.http.response": {}})
        seen = edge.snapshot()
        assert (seen["succeeded"], seen["failed"]) == (not failed, failed)
        assert not held_slots()

    run_virtual(main())


REFUSING: dict[str, dict[str, Any]] = {
    "shed": {"shed": Shed(by_criticality(), load=lambda: 2.0)},
    "no place among requests": {"concurrency": Bulkhead(1)},
    "no place among websockets": {"websockets": Bulkhead(1)},
}


@pytest.mark.parametrize("parts", REFUSING.values(), ids=REFUSING)
def test_a_refused_websocket_is_told_as_well_as_the_server_can(parts: dict[str, Any]) -> None:
    """A problem where the server can send one, else "try again later" before it is accepted."""

    async def main() -> None:
        edge = Edge(open_for(60.0), name="refusing", **parts)
        holding: Any = [bound for bound in edge.guard.bounds if hasattr(bound.policy, "slots")]
        taken = [bound.enter(0.0) for bound in holding]
        told = await connect(edge, extensions={"websocket.http.response": {}})
        assert [message["type"] for message in told] == [
            "websocket.http.response.start",
            "websocket.http.response.body",
        ]
        assert told[0]["status"] == 503
        assert json.loads(told[1]["body"])["status"] == 503
        assert await connect(edge) == [{"type": "websocket.close", "code": 1013}]
        for bound, ticket in zip(holding, taken, strict=True):
            bound.leave(ticket, None, None, 0.0)
        assert not held_slots()
        edge.close()

    run_virtual(main())


def test_while_draining_no_websocket_is_let_in() -> None:
    """The client is to connect elsewhere."""

    async def main() -> None:
        life = Lifecycle(signals=False, drain_timeout=1.0)
        edge = Edge(open_for(1.0), name="drained-sockets", lifecycle=life)
        await connect(edge)
        await life.drain()
        assert await connect(edge) == [{"type": "websocket.close", "code": 1013}]

    run_virtual(main())


def test_a_websocket_that_fails_or_is_cancelled_gives_its_place_back() -> None:
    """Before it is accepted, and after."""

    async def main() -> None:
        sockets = Bulkhead(1)

        async def failing(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})
            raise ValueError("bug")

        edge = Edge(failing, name="failing-socket", websockets=sockets, concurrency=Bulkhead(1))
        with pytest.raises(ValueError, match="bug"):
            await connect(edge)
        for before, seconds in ((60.0, 1.0), (0.0, 60.0)):
            edge.app = open_for(seconds, before=before)
            task = asyncio.ensure_future(connect(edge))
            await let_pass(1.0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not held_slots()

    run_virtual(main())


def test_one_address_has_no_more_than_its_share() -> None:
    """The others are left for others; what is closed is free again."""

    async def main() -> None:
        sockets = Bulkhead(4)
        edge = Edge(open_for(60.0), name="shares", websockets=sockets, websockets_per_address=2)
        refused = [{"type": "websocket.close", "code": 1013}]
        for _ in range(2):
            greedy = [asyncio.ensure_future(connect(edge, address="10.0.0.1")) for _ in range(5)]
            await let_pass(1.0)
            assert sockets.in_flight == 2
            assert [await task for task in greedy if task.done()] == [refused] * 3
            other = asyncio.ensure_future(connect(edge, address="10.0.0.2"))
            await let_pass(1.0)
            assert sockets.in_flight == 3
            greedy[0].cancel()
            await asyncio.gather(*greedy, other, return_exceptions=True)
            assert not held_slots()
        assert edge._address_share is not None
        assert not edge._address_share._open
        edge.close()

    run_virtual(main())


def test_a_share_of_no_websockets_is_refused() -> None:
    """It would bound nothing."""
    with pytest.raises(TypeError, match=r"write websockets=Bulkhead\(...\) too"):
        Edge(open_for(1.0), name="shares of none", websockets_per_address=2)


def test_websockets_are_bounded_unless_told_otherwise() -> None:
    """In all, and for one address; a bound of your own has no share but one of your own."""
    edge = protect(FastAPI(), name="bounded sockets")
    assert edge._websockets is not None
    assert edge._address_share is not None
    assert (edge._websockets.policy.limit, edge._address_share.limit) == (2000, 1000)
    own = protect(FastAPI(), name="own sockets", websockets=Bulkhead(10))
    assert own._address_share is None
    none = protect(FastAPI(), name="unbounded sockets", websockets=None)
    assert none._websockets is None
    for made in (edge, own, none):
        made.close()


@pytest.mark.alone
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_burst_at_an_idle_pod_is_let_in_whole(loop: str) -> None:
    """50 websockets at once, at a real server with what `protect(app)` has by default."""
    app = FastAPI()
    edge = protect(app, name=f"burst {loop}", lifecycle=None)

    @app.websocket("/ws")
    async def greet(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.receive()

    async def greeted(address: str) -> Any:
        async with dial_async(address) as client:
            return await client.recv()

    async def burst(address: str) -> list[Any]:
        return await asyncio.gather(*(greeted(address) for _ in range(50)))

    with serve(app, ws="websockets-sansio", loop=loop) as url:
        for _ in range(2):
            assert asyncio.run(burst(url.replace("http", "ws") + "/ws")) == ["hello"] * 50
    assert edge.snapshot()["rejected"] == 0
    edge.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_refusal_is_no_error_of_the_server(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """Uvicorn has nothing to complain of."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect as dial

    name = f"quiet {loop}"
    edge = Edge(open_for(1.0), name=name, shed=Shed(by_criticality(), load=lambda: 2.0))
    with (
        caplog.at_level("WARNING"),
        serve(edge, ws="websockets-sansio", loop=loop, lifespan="off") as url,
    ):
        for _ in range(10):
            with pytest.raises(InvalidStatus) as caught:
                dial(url.replace("http", "ws"))
            assert caught.value.response.status_code == 503
            assert "retry-after" in caught.value.response.headers
    assert [record.getMessage() for record in caplog.records] == []
    edge.close()


def test_a_real_client_sees_the_refusal() -> None:
    """Uvicorn sends the problem in place of the upgrade."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect as dial

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hello"})
        await send({"type": "websocket.close", "code": 1000})

    load = [2.0]
    edge = Edge(app, name="dialled", shed=Shed(by_criticality(), load=lambda: load[0]))
    with serve(edge, ws="websockets-sansio", lifespan="off") as url:
        address = url.replace("http", "ws")
        with pytest.raises(InvalidStatus) as caught:
            dial(address)
        assert caught.value.response.status_code == 503
        assert "retry-after" in caught.value.response.headers
        load[0] = 0.0
        with dial(address) as client:
            assert client.recv() == "hello"
