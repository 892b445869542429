from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from seawall.web.request import Incoming
from seawall.web.trust import Trust
from tests.web.support import http_scope


def incoming(*headers: tuple[str, str], trust: Trust | None = None, **more: Any) -> Incoming:
    return Incoming(http_scope(headers=headers, **more), trust or Trust())


def test_a_header_is_one():
    """A header has a value if it is there once, or always the same."""
    seen = incoming(("A", "1"), ("B", "2"), ("B", "2"), ("C", "é"))
    assert seen.header(b"a") == "1"
    assert seen.header(b"b") == "2"
    assert seen.header(b"c") == "é"
    assert seen.header(b"d") is None


@pytest.mark.parametrize("name", ["x-api-key", "X-Api-Key", b"x-api-key", b"X-API-Key"])
def test_a_header_may_be_asked_for_in_any_way(name: str | bytes):
    """As text or bytes, in any case: a key function that asks in vain would limit all as one."""
    assert incoming(("X-Api-Key", "k")).header(name) == "k"


def test_where_it_comes_from():
    """The peer is the connection's, the client what may be trusted, asked for once."""
    seen = incoming(
        ("X-Forwarded-For", "203.0.113.9"),
        trust=Trust(proxies=["127.0.0.1"]),
        client=("127.0.0.1", 1),
    )
    assert (seen.peer, seen.client) == ("127.0.0.1", "203.0.113.9")
    seen.headers = []
    assert seen.client == "203.0.113.9"


@pytest.mark.parametrize("server", [("/run/app.sock", None), None])
def test_a_unix_socket_has_no_address(server: tuple[str, None] | None):
    """A server that listens on a path, or says nothing, has peers without an address."""
    seen = incoming(client=None, server=server)
    assert (seen.peer, seen.client) == (None, "unix")


def test_a_peer_that_is_gone_is_nobody():
    """A connection whose address could not be read is not taken for a unix socket's."""
    seen = incoming(
        ("X-Forwarded-For", "203.0.113.9"),
        client=None,
        trust=Trust(proxies=["unix"], callers=["unix"]),
    )
    assert (seen.peer, seen.client) == ("", "unknown")
    assert not seen.trust.believes(seen.peer, seen.headers)


@pytest.mark.parametrize("client", [(None, 0), ("", 0), [None, None]])
def test_a_peer_without_an_address_is_nobody(client: Any):
    """Some servers write a pair without an address: that is no unix socket either."""
    seen = incoming(client=client, trust=Trust(callers=["unix"]))
    assert (seen.peer, seen.client) == ("", "unknown")
    assert not seen.trust.believes(seen.peer)


def test_without_that_it_would_be_a_unix_socket(monkeypatch: pytest.MonkeyPatch):
    """Nobody's peer has to be told from a peer that has no address by its nature."""
    monkeypatch.setattr(
        Incoming, "peer", property(lambda self: (self.scope["client"] or [None])[0])
    )
    for client in (None, (None, 0)):
        seen = incoming(client=client, trust=Trust(callers=["unix"]))
        assert seen.client == "unix"
        assert seen.trust.believes(seen.peer)


def test_what_is_asked_for():
    """Method and path as asked, and the template only where routing has set one."""
    seen = incoming(path="/orders/5", method="PUT")
    assert (seen.method, seen.path, seen.route) == ("PUT", "/orders/5", None)
    seen.scope["route"] = SimpleNamespace(path="/orders/{id}")
    assert seen.route == "/orders/{id}"
    seen.scope["route"] = SimpleNamespace(path=7)
    assert seen.route is None
    assert repr(seen) == "<Incoming 'PUT /orders/5'>"


def test_a_websocket_is_a_request_too():
    """A handshake has no method of its own."""
    scope = {"type": "websocket", "path": "/ws", "headers": [], "client": ("10.0.0.1", 1)}
    assert Incoming(scope, Trust()).method == "WEBSOCKET"


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([("Idempotency-Key", '"order-5"')], "order-5"),
        ([("Idempotency-Key", "order-5")], "order-5"),
        ([("Idempotency-Key", "order 5")], None),
        ([("Idempotency-Key", "a"), ("Idempotency-Key", "a")], None),
        ([("Idempotency-Key", "a"), ("Idempotency-Key", "b")], None),
        ([], None),
    ],
)
def test_the_key_of_the_request(headers: list[tuple[str, str]], key: str | None):
    """A valid key that is given once is the request's."""
    assert incoming(*headers).idempotency_key == key
