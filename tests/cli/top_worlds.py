"""Messages of dashboards that do not exist, and servers that send them."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rich.console import Console

NOW = 1_790_000_000.0


def layer(title: str = "Breaker", tone: str = "ok", state: str = "closed") -> dict[str, Any]:
    return {
        "policy": title.lower(),
        "title": title,
        "settings": "50 % of 30 s",
        "tone": tone,
        "state": state,
        "facts": [["failures", "12"]],
        "sharing": "shared",
        "acts": [],
        "changes": [],
    }


def guard(name: str = "vendor", tone: str = "ok", **more: Any) -> dict[str, Any]:
    rates = dict.fromkeys(
        ("succeeded", "degraded", "failed", "rejected", "cancelled", "retries"), 0.0
    )
    told: dict[str, Any] = {
        "name": name,
        "tone": tone,
        "state": "open" if tone == "bad" else "well",
        "edge": False,
        "breaker": "open" if tone == "bad" else "closed",
        "rates": {**rates, "succeeded": 40.0, "failed": 10.0},
        "error_ratio": 0.2,
        "p50": 0.0123,
        "p95": 0.25,
        "p99": 1.5,
        "stack": [layer("Retry", "ok", ""), layer()],
    }
    return told | more


def row(name: str = "orders", tone: str = "ok", **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "kind": "queue",
        "name": name,
        "tone": tone,
        "state": "3 wait",
        "facts": [["oldest", "2 s"]],
        "gauge": 0.5,
        "track": 3.0,
    }
    return told | more


def trouble(where: str = "vendor", tone: str = "bad", **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": f"breaker/{where}",
        "tone": tone,
        "where": where,
        "what": "The breaker is open.",
        "advice": "Look at the vendor.",
        "since": NOW - 130,
    }
    return told | more


def view(pod: str = "web-1", **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "format": 1,
        "pod": {"name": pod, "host": "h", "pid": 7, "version": "0.1.0", "up_seconds": 60.0},
        "at": NOW,
        "every": 1.0,
        "load": 0.42,
        "operable": False,
        "troubles": [],
        "guards": [guard()],
        "sections": {"Queues": [row()]},
        "happenings": [
            {
                "at": NOW - 130,
                "began": NOW - 130,
                "tone": "bad",
                "where": "vendor",
                "what": "The breaker opened.",
                "about": "the breaker",
                "counts": {"opened": 1},
            }
        ],
    }
    return told | more


def history(points: int = 20, name: str = "vendor") -> dict[str, Any]:
    numbers = [float(place) for place in range(points)]
    states = ["closed"] * (points - points // 2) + ["open"] * (points // 2)
    track = dict.fromkeys(("succeeded", "degraded", "failed", "rejected", "p50", "p99"), numbers)
    return {
        "at": [NOW - points + 1 + place for place in range(points)],
        "guards": {name: {**track, "breaker": states}},
        "rows": {"queue/orders": numbers},
    }


def message(*views: dict[str, Any], **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "title": "Orders",
        "at": NOW,
        "operator": None,
        "views": list(views) or [view()],
        "history": None,
        "extra": None,
    }
    return told | more


def ill(**more: Any) -> dict[str, Any]:
    """Return a message in which something is wrong."""
    pod = view(troubles=[trouble()], guards=[guard(tone="bad")])
    return message(pod, history={"web-1": history()}, **more)


def text_of(drawn: Any, width: int) -> str:
    """Return a frame as it stands in a terminal of that width, without colours."""
    console = Console(file=io.StringIO(), width=width, record=True, color_system=None)
    console.print(drawn)
    return console.export_text()


# Servers

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def served(**routes: Answer) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve `routes` below /seawall; give the address, and the headers of each request."""
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
            self.close_connection = True
            answer = routes.get(self.path.removeprefix("/seawall/"), status(404))
            try:
                answer(self)
            except ConnectionError:
                pass  # who asked is gone

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/seawall", asked
        finally:
            server.shutdown()
            thread.join()


def status(code: int, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def body(data: bytes, kind: str = "application/json", length: int | None = None) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(data) if length is None else length))
        request.end_headers()
        request.wfile.write(data)

    return answer


def state(told: Any) -> Answer:
    return body(json.dumps(told).encode())


def stream(*pieces: bytes, until: threading.Event | None = None) -> Answer:
    """Send each piece as a chunk, wait for `until`, and end it properly."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream; charset=utf-8")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for piece in pieces:
            request.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if until is not None:
            until.wait(30)
        request.wfile.write(b"0\r\n\r\n")

    return answer


def event(told: Any) -> bytes:
    return b"event: message\ndata: " + json.dumps(told).encode() + b"\n\n"
