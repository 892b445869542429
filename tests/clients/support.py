"""One scripted server behind six clients: httpx and httpx2, sync and async, aiohttp and requests.

What is promised of guarded clients is promised of all of them, so each test runs with each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import aiohttp
import httpx
import httpx2
import requests
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict, CIMultiDictProxy
from requests.adapters import BaseAdapter
from urllib3 import HTTPResponse

from seawall import Guard
from seawall.clients import httpx as guarded_httpx
from seawall.clients import httpx2 as guarded_httpx2
from seawall.clients.aiohttp import GuardedMiddleware
from seawall.clients.requests import GuardedAdapter
from seawall.testing import run_virtual
from tests.support import let_pass

T = TypeVar("T")

URL = "http://vendor.test/orders"


class _Large(bytes):
    """Bytes that take little room in a report."""

    def __repr__(self) -> str:
        return "LARGE"


LARGE = _Large(b"x" * 70_000)
"""More than what is kept of a failed answer."""


class Seen(NamedTuple):
    """A request as the server saw it; headers in lower case."""

    method: str
    headers: dict[str, str]
    body: bytes
    timeout: Any
    tried: set[str] | None = None
    """The hosts that were asked before, if the library can tell."""


class Body:
    """The body of a scripted answer; counts how often it was closed."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        yield from (self.content[:10], self.content[10:])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        await let_pass(0.0)  # a close that takes its time, as real ones do
        self.closed += 1


class Step(NamedTuple):
    """What the server does with a request: raise the library's error of that name, or answer."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    body: bytes = b"hello, and goodbye"
    error: str = ""
    delay: float = 0.0
    stubborn: bool = False
    """Whether it answers also when it is cancelled meanwhile."""

    @property
    def sends(self) -> bool:
        """Whether the request gets as far as being sent."""
        return self.error not in {"ConnectError", "ConnectTimeout", "PoolTimeout"}


class Server:
    """Does what its script says, request by request; the last step repeats for ever."""

    def __init__(self, *steps: Step) -> None:
        self._steps = steps
        self._taken = 0
        self.seen: list[Seen] = []
        self.bodies: list[Body] = []
        self.sent = 0
        """How many requests it has really received."""

    def next(self) -> Step:
        """Take the step for one more request, whatever becomes of it."""
        step = self._steps[min(self._taken, len(self._steps) - 1)]
        self._taken += 1
        self.sent += step.sends
        return step


class _Scripted:
    """A transport to the scripted server, for whichever of the two libraries."""

    module: Any

    def __init__(self, server: Server) -> None:
        self.server = server

    def _see(self, step: Step, request: Any, body: bytes) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        timeout = request.extensions.get("timeout")
        tried = request.extensions["seawall.tried"]
        self.server.seen.append(Seen(request.method, headers, body, timeout, tried))
        if step.error:
            raise getattr(self.module, step.error)(step.error, request=request)

    def _response(self, step: Step) -> Any:
        module = self.module
        kinds = (Body, module.SyncByteStream, module.AsyncByteStream)
        stream = type("Stream", kinds, {})(step.body)
        self.server.bodies.append(stream)
        return module.Response(step.status, headers=step.headers, stream=stream)

    def handle_request(self, request: Any) -> Any:
        step = self.server.next()
        self._see(step, request, b"".join(request.stream) if step.sends else b"")
        return self._response(step)

    async def handle_async_request(self, request: Any) -> Any:
        step = self.server.next()
        body = b"".join([part async for part in request.stream]) if step.sends else b""
        self._see(step, request, body)
        try:
            await let_pass(step.delay)
        except asyncio.CancelledError:
            if not step.stubborn:
                raise
        return self._response(step)


def transport_to(server: Server, module: Any, *, sync: bool) -> Any:
    """Return a transport of `module` to the scripted server."""
    base = module.BaseTransport if sync else module.AsyncBaseTransport
    return type("Scripted", (_Scripted, base), {"module": module})(server)


class _ScriptedAdapter(BaseAdapter):
    """An adapter of requests to the scripted server."""

    ERRORS = {  # noqa: RUF012
        "ConnectError": lambda request: requests.exceptions.ConnectTimeout(request=request),
        "ConnectTimeout": lambda request: requests.exceptions.ConnectTimeout(request=request),
        "PoolTimeout": lambda request: requests.exceptions.ConnectTimeout(request=request),
        "ReadTimeout": lambda request: requests.exceptions.ReadTimeout(request=request),
    }

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server

    def send(self, request: Any, stream: Any = None, timeout: Any = None, *_: Any) -> Any:
        step = self.server.next()
        body = request.body or b""
        if not isinstance(body, (str, bytes)):
            body = b"".join(body) if step.sends else b""
        body = body.encode() if isinstance(body, str) else body
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.server.seen.append(Seen(request.method, headers, body, timeout))
        if step.error:
            other = lambda request: requests.ConnectionError(request=request)  # noqa: E731
            raise self.ERRORS.get(step.error, other)(request)
        response = requests.Response()
        response.status_code = step.status
        response.headers.update({"content-length": str(len(step.body)), **step.headers})
        raw = _Raw(step.body)
        self.server.bodies.append(raw)
        response.raw = HTTPResponse(
            raw, headers=response.headers, status=step.status, preload_content=False
        )
        response.url = request.url
        response.request = request
        return response

    def close(self) -> None:
        pass


class _Raw(Body, BytesIO):
    """What requests reads a body from; reading it to its end gives the connection back."""

    def __init__(self, content: bytes) -> None:
        BytesIO.__init__(self, content)
        self.content = content
        self.times = 0

    def read(self, size: int | None = -1) -> bytes:
        data = BytesIO.read(self, size)
        if not data and not self.times:
            self.times = 1
        return data

    def close(self) -> None:
        self.times = self.times or 1

    @property
    def closed(self) -> int:  # type: ignore[override]
        return self.times


class _AiohttpBody(aiohttp.StreamReader):
    """The body of an aiohttp response, complete but for its end, which must be awaited."""

    def __init__(self, step: Step) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(BaseProtocol(loop), 2**16, loop=loop)
        self.feed_data(step.body)
        if "content-encoding" in step.headers:  # as that of a body that cannot be unpacked
            self.set_exception(aiohttp.ClientPayloadError("not gzip"))

    async def read(self, n: int = -1) -> bytes:
        self.feed_eof()
        return await super().read(n)

    async def wait_eof(self) -> None:
        self.feed_eof()


class AiohttpResponse(aiohttp.ClientResponse):
    """An answer of aiohttp; at its end its connection is given back."""

    def __init__(self, request: Any, step: Step) -> None:
        super().__init__(
            request.method,
            request.url,
            writer=None,
            continue100=None,
            timer=request._timer,
            request_info=request.request_info,
            traces=[],
            loop=request.loop,
            session=request.session,
            stream_writer=SimpleNamespace(output_size=0),  # type: ignore[arg-type]
        )
        self._closed = False
        self.status, self.reason = step.status, ""
        length = {"content-length": str(len(step.body)), **step.headers}
        self._headers = CIMultiDictProxy(CIMultiDict(length))
        self.body, self.content = step.body, _AiohttpBody(step)
        self.content.on_eof(self._response_eof)


class _AiohttpClosed:
    """How often an answer of aiohttp was closed."""

    def __init__(self, response: AiohttpResponse) -> None:
        self.response = response
        self.content = response.body

    @property
    def closed(self) -> int:
        return int(self.response.closed)


class _Written:
    """What a request of aiohttp writes."""

    def __init__(self) -> None:
        self.body = b""

    async def write(self, part: bytes) -> None:
        self.body += bytes(part)


def _aiohttp_error(name: str, request: Any) -> Exception:
    if name == "ConnectError":
        return aiohttp.ClientConnectorError(request.connection_key, OSError(111, "refused"))
    if name in {"ConnectTimeout", "PoolTimeout"}:
        return aiohttp.ConnectionTimeoutError(name)
    return aiohttp.SocketTimeoutError(name) if "Timeout" in name else _lost(name)


def _lost(name: str) -> Exception:
    return aiohttp.ServerDisconnectedError(name)


def aiohttp_handler(server: Server) -> Any:
    """Return an aiohttp middleware that asks only the scripted server."""

    async def ask(request: Any, _handler: Any) -> Any:
        step, written = server.next(), _Written()
        if step.sends and request.body:
            await request.body.write(written)
        headers = {name.lower(): value for name, value in request.headers.items()}
        server.seen.append(Seen(request.method, headers, written.body, None))
        if step.error:
            raise _aiohttp_error(step.error, request)
        try:
            await let_pass(step.delay)
        except asyncio.CancelledError:
            if not step.stubborn:
                raise
        response = AiohttpResponse(request, step)
        server.bodies.append(_AiohttpClosed(response))  # type: ignore[arg-type]
        return response

    return ask


class Carrier(NamedTuple):
    """A client library, sync or async."""

    name: str
    module: Any
    sync: bool

    def request(
        self,
        guard: Guard,
        server: Server,
        method: str = "GET",
        *,
        body: Any = None,
        headers: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Return the answer that a user gets, on the guard's own clock."""
        settings = settings or {}
        if self.module is requests:
            with requests.Session() as session:
                adapter = GuardedAdapter(guard, _ScriptedAdapter(server), **settings)
                session.mount("http://", adapter)
                return session.request(method, URL, data=body, headers=headers, **options)
        if self.module is aiohttp:
            return self._ask_aiohttp(guard, server, method, body, headers, settings, options)
        wrapped = transport_to(server, self.module, sync=self.sync)
        made = guarded_httpx if self.module is httpx else guarded_httpx2
        if self.sync:
            transport = made.GuardedTransport(guard, wrapped, **settings)
            with self.module.Client(transport=transport) as client:
                return client.request(method, URL, content=body, headers=headers, **options)

        async def main() -> Any:
            content = _later(body) if hasattr(body, "__next__") else body
            transport = made.AsyncGuardedTransport(guard, wrapped, **settings)
            async with self.module.AsyncClient(transport=transport) as client:
                return await client.request(
                    method, URL, content=content, headers=headers, **options
                )

        clock: Any = guard.clock
        return run_virtual(main(), clock=clock)

    def _ask_aiohttp(
        self,
        guard: Guard,
        server: Server,
        method: str,
        body: Any,
        headers: dict[str, str] | None,
        settings: dict[str, Any],
        options: Any,
    ) -> Any:
        async def main() -> Any:
            data = _later(body) if hasattr(body, "__next__") else body
            chain = [GuardedMiddleware(guard, **settings), aiohttp_handler(server)]
            async with (
                aiohttp.ClientSession(middlewares=chain) as session,
                session.request(method, URL, data=data, headers=headers, **options) as answer,
            ):
                content = await answer.read()
            return SimpleNamespace(
                status_code=answer.status,
                headers=answer.headers,
                content=content,
                text=content.decode(),
                seawall_note=getattr(answer, "seawall_note", None),
            )

        clock: Any = guard.clock
        return run_virtual(main(), clock=clock)

    @property
    def error(self) -> type[Exception]:
        """What code that was there before the guard catches."""
        kind: type[Exception]
        if self.module is aiohttp:
            return aiohttp.ClientConnectionError
        own = self.module is requests
        kind = requests.RequestException if own else self.module.TransportError
        return kind

    @property
    def timeout_error(self) -> type[Exception]:
        """What such code catches for a timeout."""
        kind: type[Exception]
        if self.module is aiohttp:
            return aiohttp.ServerTimeoutError
        kind = requests.Timeout if self.module is requests else self.module.TimeoutException
        return kind


async def _later(items: Iterator[bytes]) -> AsyncIterator[bytes]:
    for item in items:
        yield item


def status_of(answer: Any) -> int:
    """Return the status of an answer of any library."""
    status: int = answer.status if isinstance(answer, AiohttpResponse) else answer.status_code
    return status


CARRIERS = [
    Carrier("httpx", httpx, sync=True),
    Carrier("httpx async", httpx, sync=False),
    Carrier("httpx2", httpx2, sync=True),
    Carrier("httpx2 async", httpx2, sync=False),
    Carrier("aiohttp", aiohttp, sync=False),
    Carrier("requests", requests, sync=True),
]


def in_thread(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on a loop of its own, in a thread that is waited for; return what it returns."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, main()).result()


class _Handler(BaseHTTPRequestHandler):
    """Answers as scripted."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: RealServer

    def answer(self) -> None:
        """Answer with the server's status and body; or not at all, while it hangs."""
        server = self.server
        self.rfile.read(int(self.headers.get("content-length", 0)))
        server.requests += 1
        if server.hangs:
            server.released.wait(10.0)
            self.close_connection = True
            return
        status = server.statuses[min(server.requests, len(server.statuses)) - 1]
        self.send_response_only(status)
        for name, value in server.headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body)

    do_GET = do_POST = do_PUT = answer  # noqa: N815 - the library's names

    def handle(self) -> None:
        """Serve a connection; a client that closes it in the middle is what is tested."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class RealServer(ThreadingHTTPServer):
    """A real server on loopback, in threads."""

    daemon_threads = True

    def __init__(self, *statuses: int, body: bytes = b"sorry", hangs: bool = False) -> None:
        """Answer with these statuses, the last one for ever; or hang."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = statuses or (200,)
        self.headers: list[tuple[str, str]] = []
        self.body = body
        self.hangs = hangs
        self.released = Event()
        self.requests = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


@contextmanager
def real_server(*statuses: int, **options: Any) -> Iterator[RealServer]:
    """Run a real server for the length of a `with` block."""
    server = RealServer(*statuses, **options)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
