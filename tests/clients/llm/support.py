"""A vendor of language models that speaks both dialects, keeps a log, and misbehaves on cue."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

import httpx2

from tests.support import let_pass

HANG = b"for ever"
"""A piece of a body that never comes."""


class Answer(NamedTuple):
    """What the vendor answers: status, headers, and the pieces of the body."""

    status: int
    headers: dict[str, str]
    chunks: list[bytes]


def error_of(path: str, kind: str, message: str = "no") -> dict[str, Any]:
    """Return the body of an error, in the dialect of that path."""
    if path.endswith("/messages"):
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "code": kind}}


def refuses(status: int, kind: str = "api_error", **headers: str) -> Callable[..., Answer]:
    """Return a step that answers with an error."""

    def step(path: str, _body: dict[str, Any]) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = json.dumps(error_of(path, kind)).encode()
        return Answer(status, {"content-type": "application/json", **named}, [content])

    return step


def streams_error(kind: str, *, after_ping: bool = False) -> Callable[..., Answer]:
    """Return a step that answers 200 and then an error as the first event."""

    def step(path: str, _body: dict[str, Any]) -> Answer:
        ping = [b": hello\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'] if after_ping else []
        event = b"event: error\ndata: " + json.dumps(error_of(path, kind)).encode() + b"\n\n"
        return Answer(200, {"content-type": "text/event-stream"}, [*ping, event])

    return step


def breaks(error: type[Exception]) -> Callable[..., Answer]:
    """Return a step that ends in an error of the library."""

    def step(_path: str, _body: dict[str, Any]) -> Answer:
        raise error("no")

    return step


class Vendor:
    """Answers as its script says, step by step; then as all is well."""

    def __init__(self, *steps: Any, used: tuple[int, int] = (7, 5), **headers: str) -> None:
        """Report that usage, and the remaining tokens, in every answer."""
        self.steps = list(steps)
        self.used = used
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.log: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.opened = self.closed = 0
        self.words = ["one ", "two ", "three"]

    @property
    def asked(self) -> int:
        """How many requests have come."""
        return len(self.log)

    def answer(self, path: str, content: bytes, headers: dict[str, str]) -> Answer:
        """Answer one request."""
        body = json.loads(content or b"{}")
        self.log.append((path, body, headers))
        step = self.steps.pop(0) if self.steps else None
        if step is not None:
            found: Answer = step(path, body)
            return found
        one = path.endswith("/messages")
        if body.get("stream"):
            events = self._messages_events() if one else self._chat_events(body)
            return Answer(200, {"content-type": "text/event-stream", **self.headers}, events)
        whole = self._message() if one else self._chat()
        made = {"content-type": "application/json", **self.headers}
        return Answer(200, made, [json.dumps(whole).encode()])

    def _chat(self) -> dict[str, Any]:
        went_in, came_out = self.used
        return {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "".join(self.words)},
                }
            ],
            "usage": {
                "prompt_tokens": went_in,
                "completion_tokens": came_out,
                "total_tokens": went_in + came_out,
            },
        }

    def _chat_events(self, body: dict[str, Any]) -> list[bytes]:
        base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        asked = bool((body.get("stream_options") or {}).get("include_usage"))
        events: list[dict[str, Any]] = [
            {
                **base,
                "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
                **({"usage": None} if asked else {}),
            }
            for word in self.words
        ]
        if asked:
            events.append({**base, "choices": [], "usage": self._chat()["usage"]})
        return [f"data: {json.dumps(e)}\n\n".encode() for e in events] + [b"data: [DONE]\n\n"]

    def _message(self) -> dict[str, Any]:
        went_in, came_out = self.used
        return {
            "id": "m1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "".join(self.words)}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": went_in - 2,
                "cache_creation_input_tokens": 2,
                "cache_read_input_tokens": 1000,
                "output_tokens": came_out,
            },
        }

    def _messages_events(self) -> list[bytes]:
        message = self._message()
        start = {**message, "content": [], "stop_reason": None}
        start["usage"] = {**start["usage"], "output_tokens": 1}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": start},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            {"type": "ping"},
            *(
                {
                    "type": "content_block_delta",
                    "index": 0,
                    "delta": {"type": "text_delta", "text": word},
                }
                for word in self.words
            ),
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"output_tokens": self.used[1]},
            },
            {"type": "message_stop"},
        ]
        return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]

    def transport(self, library: Any = httpx2) -> Any:
        """Return a transport by which it can be asked, in the same process."""
        vendor = self

        class Body(library.SyncByteStream, library.AsyncByteStream):  # type: ignore[misc]
            def __init__(self, chunks: list[bytes]) -> None:
                self.chunks = chunks
                self.open = True
                vendor.opened += 1

            def __iter__(self) -> Iterator[bytes]:
                yield from self.chunks

            async def __aiter__(self) -> AsyncIterator[bytes]:
                for chunk in self.chunks:
                    await let_pass(0.0)
                    if chunk is HANG:
                        await asyncio.get_running_loop().create_future()
                    yield chunk

            def close(self) -> None:
                vendor.closed += self.open
                self.open = False

            async def aclose(self) -> None:
                self.close()

        def handle(request: Any) -> Any:
            try:
                given = vendor.answer(request.url.path, request.content, dict(request.headers))
            except library.TransportError as error:
                error.request = request
                raise
            return library.Response(given.status, headers=given.headers, stream=Body(given.chunks))

        return library.MockTransport(handle)


@contextmanager
def served(vendor: Vendor, *, packed: bool = False) -> Iterator[str]:
    """Serve a vendor over a socket, packed if asked; give its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            given = vendor.answer(
                self.path, content, {k.lower(): v for k, v in self.headers.items()}
            )
            body = b"".join(given.chunks)
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            if packed:
                body = gzip.compress(body)
                self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # a client that has gone
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}"
    finally:
        serving.shutdown()
        thread.join()
        serving.server_close()
