"""An HTTP client that retries only what is safe, and stops calling a server that is down.

python examples/http_client.py
"""

# ruff: noqa: T201 - it prints what it does

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx

from seawall import Breaker, CircuitOpen, Guard, Retry, Timeout, deadline, transient
from seawall.clients.httpx import GuardedTransport
from seawall.context import idempotency_key


class Orders(BaseHTTPRequestHandler):
    """A server that answers 503 to each first attempt, and always to /reports."""

    def do_GET(self) -> None:
        """Answer with 200 or 503."""
        attempt = self.headers["Seawall-Attempt"]
        status = 503 if attempt == "1" or self.path == "/reports" else 200
        print(f"  server: {self.command} {self.path}, attempt {attempt}: {status}")
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        """Log nothing more."""


def main() -> None:
    """Send requests in several ways."""
    server = HTTPServer(("127.0.0.1", 0), Orders)
    Thread(target=server.serve_forever, daemon=True).start()
    guard = Guard(
        "orders",
        Retry(on=transient, attempts=3, backoff=0.001),
        Breaker(failure_ratio=0.5, min_calls=4),
        Timeout(2.0, sync="cooperative"),
    )
    url = f"http://127.0.0.1:{server.server_port}"
    with httpx.Client(base_url=url, transport=GuardedTransport(guard)) as client, deadline(5.0):
        print("GET:", client.get("/orders").status_code)
        print("POST without a key:", client.post("/orders").status_code)
        with idempotency_key("order-7"):
            print("POST with a key:", client.post("/orders").status_code)
        print("reports:", client.get("/reports").status_code)
        try:
            client.get("/reports")
        except httpx.TransportError as error:
            print("reports:", type(error).__name__, isinstance(error, CircuitOpen))
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()

# It prints:
#
# >   server: GET /orders, attempt 1: 503
# >   server: GET /orders, attempt 2: 200
# > GET: 200
# >   server: POST /orders, attempt 1: 503
# > POST without a key: 503
# >   server: POST /orders, attempt 1: 503
# >   server: POST /orders, attempt 2: 200
# > POST with a key: 200
# >   server: GET /reports, attempt 1: 503
# >   server: GET /reports, attempt 2: 503
# >   server: GET /reports, attempt 3: 503
# > reports: 503
# > reports: CircuitOpen True
