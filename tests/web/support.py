"""What tests of the server's edge need: an ASGI driver, and a real server on loopback."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from seawall.testing import held_permits

App = Callable[[Any, Any, Any], Awaitable[None]]


class Answer(NamedTuple):
    """What an app sent in answer to one request."""

    status: int
    headers: dict[str, str]
    body: bytes
    messages: list[dict[str, Any]]

    def json(self) -> Any:
        """Return the body as what its JSON says."""
        return json.loads(self.body)


def http_scope(
    path: str = "/",
    *,
    method: str = "GET",
    headers: Iterable[tuple[str, str]] = (),
    client: tuple[str, int] | None = ("127.0.0.1", 50000),
    **more: Any,
) -> dict[str, Any]:
    """Return the scope of one HTTP request."""
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": raw,
        "client": client,
        "server": ("127.0.0.1", 80),
        **more,
    }


def answer_of(messages: list[dict[str, Any]]) -> Answer:
    """Return what the messages of one exchange amount to; status 0 without a response."""
    start: dict[str, Any] = next((m for m in messages if m["type"].endswith("response.start")), {})
    headers = {name.decode(): value.decode() for name, value in start.get("headers", ())}
    parts = [m.get("body", b"") for m in messages if m["type"].endswith("response.body")]
    return Answer(start.get("status", 0), headers, b"".join(parts), messages)


async def ask(
    app: App,
    path: str = "/",
    *,
    method: str = "GET",
    headers: Iterable[tuple[str, str]] = (),
    body: bytes = b"",
    on_send: Callable[[dict[str, Any]], Awaitable[None] | None] | None = None,
    **more: Any,
) -> Answer:
    """Make one request of `app`, which is called directly; what it raises is raised here.

    `on_send(message)` may await or raise, as a server does when the client is slow or gone.
    """
    messages: list[dict[str, Any]] = []
    pending = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if pending:
            return pending.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            gone.set()  # after its response a server reports a disconnect
        if on_send is not None:
            waited = on_send(message)
            if waited is not None:
                await waited

    await app(http_scope(path, method=method, headers=headers, **more), receive, send)
    return answer_of(messages)


def text_app(text: str = "hello", status: int = 200) -> App:
    """Return an app that answers everything with `text`."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    return app


@contextmanager
def serve(app: App, **settings: Any) -> Iterator[str]:
    """Serve `app` with uvicorn in a thread; gives its base URL, such as http://127.0.0.1:40000."""
    import uvicorn

    options: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "lifespan": "auto",
        "timeout_graceful_shutdown": 2,
        **settings,
    }
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, **options))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
    thread.start()
    try:
        _until_started(server, thread)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def _until_started(server: Any, thread: threading.Thread) -> None:
    waited = threading.Event()
    for _ in range(1000):
        if server.started:
            return
        assert thread.is_alive(), "the server did not start"
        waited.wait(0.01)
    raise AssertionError("the server did not start in time")


def held_slots() -> dict[str, int]:
    """Return the slots that are taken; not threads, which other tests may have left hanging.

    Garbage of other tests, such as a pool whose borrower is gone, is collected first.
    """
    gc.collect()
    return {name: n for name, n in held_permits().items() if not name.endswith(" threads")}
