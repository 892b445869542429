"""Probes: real servers on the loopback, over HTTP, TCP and gRPC."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from seawall.clock import SYSTEM
from seawall.members import (
    Heartbeats,
    MemberChanged,
    fixed_timeout,
    grpc_probe,
    http_probe,
    tcp_probe,
)

PATIENCE = 60.0


@contextmanager
def listening(answer: Callable[[bytes], bytes | None]) -> Iterator[int]:
    """Serve on a port of the loopback: each connection gets the answer to what it sends first.

    None: no answer, and the connection stays open until the client hangs up.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.settimeout(PATIENCE)
                try:
                    reply = answer(client.recv(65_536))
                    if reply is None:
                        client.recv(1)
                    else:
                        client.sendall(reply)
                except OSError:
                    pass  # the client was faster

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(PATIENCE)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ask(probe: Any) -> None:
    """Ask once; a server that does not answer at all would take too long."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            await probe()

    asyncio.run(main())


# HTTP


@pytest.mark.parametrize("status", [200, 204, 302, 399])
def test_an_http_server_that_answers_well_is_alive(status: int) -> None:
    """The path and query of the URL are asked for, at the host that it names."""
    asked: list[bytes] = []

    def answer(request: bytes) -> bytes:
        asked.append(request)
        return f"HTTP/1.1 {status} whatever\r\nContent-Length: 2\r\n\r\nok".encode()

    with listening(answer) as port:
        ask(http_probe(f"http://127.0.0.1:{port}/health/live?full=1"))
    assert asked[0].startswith(b"GET /health/live?full=1 HTTP/1.1\r\n")
    assert f"\r\nHost: 127.0.0.1:{port}\r\n".encode() in asked[0]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 400 x\r\n\r\n", "status 400"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "status 503"),
        (b"SSH-2.0-OpenSSH hello\r\n", "no HTTP"),
        (b"\x16\x03 \x00\r\n", "no HTTP"),
        (b"", "not enough values"),
    ],
)
def test_an_http_server_that_answers_badly_is_not(reply: bytes, said: str) -> None:
    """An error status, another protocol and silence have different reasons."""
    with listening(lambda _request: reply) as port, pytest.raises(Exception, match=said):
        ask(http_probe(f"http://127.0.0.1:{port}"))


def test_interim_answers_are_passed_over() -> None:
    """Only the last status counts."""
    reply = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"
    with listening(lambda _request: reply) as port:
        ask(http_probe(f"http://127.0.0.1:{port}"))


def test_a_secret_in_the_query_is_not_shown() -> None:
    """What stands for the probe in messages has no query."""
    assert repr(http_probe("http://10.0.0.1/live?token=x")) == "http_probe('http://10.0.0.1/live')"
    assert repr(tcp_probe("10.0.0.1", 80)) == "tcp_probe('10.0.0.1', 80)"
    assert repr(grpc_probe("10.0.0.1:1")) == "grpc_probe('10.0.0.1:1')"


def test_nobody_there_is_refused() -> None:
    """All three say so with the system's own error."""
    port = closed_port()
    with pytest.raises(ConnectionRefusedError):
        ask(http_probe(f"http://127.0.0.1:{port}"))
    with pytest.raises(ConnectionRefusedError):
        ask(tcp_probe("127.0.0.1", port))
    with pytest.raises(grpc.RpcError) as refused:
        ask(grpc_probe(f"127.0.0.1:{port}"))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


# TCP


def test_a_port_that_accepts_is_alive() -> None:
    """Also if the program behind it says nothing."""
    with listening(lambda _request: None) as port:
        ask(tcp_probe("127.0.0.1", port))


# gRPC


class Health(grpc.GenericRpcHandler):
    """The standard health service, with the status of each service by name."""

    def __init__(self, replies: dict[bytes, bytes]) -> None:
        self._replies = replies

    def service(self, details: Any) -> Any:
        if details.method != "/grpc.health.v1.Health/Check":
            return None

        def check(request: bytes, context: Any) -> bytes:
            if request not in self._replies:
                context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
            return self._replies[request]

        return grpc.unary_unary_rpc_method_handler(check)


@contextmanager
def grpc_server(replies: dict[bytes, bytes]) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Health(replies),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait(PATIENCE)


def test_a_grpc_server_that_serves_is_alive() -> None:
    """As a whole, or a service of it; what does not serve, or is not known, is not alive."""
    replies = {
        b"": b"\x08\x01",
        b"\x0a\x06ranker": b"\x08\x01",
        b"\x0a\x04down": b"\x08\x02",
        b"\x0a\x05blank": b"",
        b"\x0a\x06future": b"\x08\x09",
        b"\x0a\x07garbled": b"\x12\x01x",
    }
    with grpc_server(replies) as port:
        target = f"127.0.0.1:{port}"
        ask(grpc_probe(target))
        ask(grpc_probe(target, service="ranker"))
        for service, said in (
            ("down", "NOT_SERVING"),
            ("blank", "UNKNOWN"),
            ("future", "9"),
            ("garbled", "no sense"),
        ):
            with pytest.raises(Exception, match=said):
                ask(grpc_probe(target, service=service))
        with pytest.raises(grpc.RpcError) as unknown:
            ask(grpc_probe(target, service="stranger"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_grpc_probe_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that never answers is closed soon, not after gRPC's 20 s."""
    monkeypatch.setattr("seawall.members.probes.CONNECTING", 500)
    hung_up = threading.Event()

    async def main(port: int) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await grpc_probe(f"127.0.0.1:{port}")()

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.settimeout(PATIENCE)
                while client.recv(65_536):
                    pass
            hung_up.set()

        threading.Thread(target=serve, daemon=True).start()
        asyncio.run(main(server.getsockname()[1]))
        assert hung_up.wait(15)


# All of them, in one group


def test_real_servers_are_alive_until_they_are_stopped() -> None:
    """Each in its own way, from a program without an event loop."""
    changed = threading.Condition()
    states: dict[str, str] = {}

    def note(change: MemberChanged) -> None:
        with changed:
            states[change.member] = change.after
            changed.notify_all()

    def wait_for(state: str) -> None:
        with changed:
            reached = changed.wait_for(
                lambda: len(states) == 4 and set(states.values()) == {state}, PATIENCE
            )
            assert reached, states

    # Patient enough for a loaded machine: nobody is suspected before the servers are stopped.
    beats = Heartbeats(
        "servers",
        every=0.1,
        timeout=20.0,
        detector=fixed_timeout(20.0),
        confirm_after=0.1,
        pause_after=1000.0,
        clock=SYSTEM,
    )
    beats.subscribe(note)
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    with beats:
        with (
            listening(lambda _request: ok) as web,
            listening(lambda _request: None) as cache,
            grpc_server({b"": b"\x08\x01"}) as ranker,
        ):
            beats.watch("web", http_probe(f"http://127.0.0.1:{web}/"))
            beats.watch("cache", tcp_probe("127.0.0.1", cache))
            beats.watch("ranker", grpc_probe(f"127.0.0.1:{ranker}"))
            plain = threading.Event()
            plain.set()
            beats.watch("plain", plain.is_set)
            wait_for("alive")
            trips = beats.snapshot()["round_trip"]
            assert trips["p50"] > 0
        plain.clear()
        for peer in states:
            beats.watch(peer, _probe_of(beats, peer), detector=fixed_timeout(0.5))
        wait_for("confirmed")
    reasons = {name: view.reason for name, view in beats.members.items()}
    assert "ConnectionRefusedError" in reasons["web"]
    assert "ConnectionRefusedError" in reasons["cache"]
    assert "UNAVAILABLE" in reasons["ranker"]
    assert "returned False" in reasons["plain"]


def _probe_of(beats: Heartbeats, peer: str) -> Any:
    runner = beats._peers[peer].probe
    assert runner is not None
    return runner._function
