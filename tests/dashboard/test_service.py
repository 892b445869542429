from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from seawall import Breaker, Guard
from tests.dashboard.app_support import Shown
from tests.web.support import serve

ISOLATE = {"pod": "here", "guard": "vendor", "layer": 0, "act": "isolate"}

pytestmark = pytest.mark.alone  # some start real servers


def test_it_is_live_in_a_real_service():
    """Mounted in FastAPI, behind the edge, it streams; an operator acts; then the service stops."""
    from fastapi import FastAPI

    from seawall.web.fastapi import protect

    policy = Breaker(consecutive=3)
    vendor = Guard("vendor", policy)
    app = FastAPI()
    app.mount("/seawall", Shown(operate=lambda _: "ann", every=0.05))
    edge = protect(app, timeout=0.3)
    with serve(app) as url, httpx.Client(base_url=f"{url}/seawall/") as client:
        assert client.get(f"{url}/seawall", follow_redirects=True).status_code == 200
        token = client.get("session").json()["token"]
        seen: list[Any] = []
        with client.stream("GET", "events") as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                if len(seen) == 12:  # twice as long as a request may take to begin its answer
                    break
        assert len(seen) == 12
        headers = {"origin": url, "x-seawall-token": token}
        assert client.post("act", json=ISOLATE).status_code == 403
        done = client.post("act", json=ISOLATE, headers=headers)
        assert done.json() == {"done": "Isolated Breaker of vendor."}
    assert policy.state == "isolated"
    vendor.close()
    edge.close()


RAW = {
    b"GET /session HTTP/1.1\r\nHost: localhost\r\n": 200,
    b"GET /session HTTP/1.1\r\nHost: LOCALHOST:80\r\n": 200,
    b"GET /session HTTP/1.0\r\n": 403,
    b"GET /session HTTP/1.0\r\nHost: localhost\r\n": 403,
    b"GET /session HTTP/1.1\r\n": 400,
    b"GET /session HTTP/1.1\r\nHost: localhost.\r\n": 403,
    b"GET /session HTTP/1.1\r\nHost: x@localhost\r\n": 403,
    b"GET /session HTTP/1.1\r\nHost: evil.example\r\n": 403,
    b"GET /session HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n": 400,
    b"GET http://localhost/session HTTP/1.1\r\nHost: evil.example\r\n": 403,
    b"GET http://evil.example/session HTTP/1.1\r\nHost: localhost\r\n": 404,
    b"GET //evil.example HTTP/1.1\r\nHost: localhost\r\n": 404,
    b"GET /page%2f..%2fapp.py HTTP/1.1\r\nHost: localhost\r\n": 404,
    b"GET /page/..%2f..%2fapp.py HTTP/1.1\r\nHost: localhost\r\n": 404,
    b"GET /session HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 127.0.0.1\r\n": 403,
    b"GET /session HTTP/1.1\r\nHost: localhost\r\nX_Forwarded_For: 127.0.0.1\r\n": 403,
    b"GET /session HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n": 403,
    b"POST /act HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n": 403,
    b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n": 403,
    b"TRACE /session HTTP/1.1\r\nHost: localhost\r\n": 405,
    b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n": 404,
}
"""Requests as they come over the wire, and how a server with the dashboard answers them."""


def test_requests_that_no_browser_makes():
    """Raw bytes to a real server: only valid requests succeed."""
    with serve(Shown(operate=lambda _: "ann", every=60.0), http="h11") as url:
        port = int(url.rpartition(":")[2])
        answered = {}
        for raw in RAW:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(raw + b"Connection: close\r\n\r\n")
                answered[raw] = int(connection.recv(100).split()[1])
    assert answered == RAW
