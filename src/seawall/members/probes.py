"""Probes: check whether a peer responds, over HTTP, TCP or gRPC, or by a user's function.

A probe is any callable without arguments, plain or async. It fails if it raises, returns False or
takes too long. The ready-made probes open a new connection each time, so that a stale connection
cannot hide a failure; they work in any event loop and after a fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from seawall import _checks as check
from seawall.runtime.functions import kind_of
from seawall.runtime.http_status import http_status

if TYPE_CHECKING:
    from ssl import SSLContext

    from seawall.resources.executors.executors import IoPool

PORTS: Final = {"http": 80, "https": 443}
CHECK: Final = "/grpc.health.v1.Health/Check"
"""Check method of the standard gRPC health service."""
CONNECTING: Final = 5000
"""Timeout in milliseconds for connecting; gRPC keeps connecting after its channel was closed.

With gRPC's default of 20 s, a hanging peer would have twenty sockets open.
"""
STATUSES: Final = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
"""Names of the statuses in the health service's response."""


class ProbeFailed(Exception):
    """The peer answered, but did not report itself healthy."""


class HttpProbe:
    """The probe of `http_probe`."""

    def __init__(self, url: str, ssl: SSLContext | None) -> None:
        wanted = "write a URL without a user, such as url='http://10.0.0.1:8080/health/live'"
        if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
            raise TypeError(f"url={url!r}: {wanted}")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url: {error}: {wanted}") from None
        if parts.scheme not in PORTS or not parts.hostname or port == 0 or "@" in parts.netloc:
            raise ValueError(f"url: {wanted}")
        if ssl is not None and not hasattr(ssl, "wrap_bio"):
            raise TypeError(f"ssl={ssl!r}: pass an SSLContext, of ssl.create_default_context(...)")
        self._address = parts.hostname
        self._port = PORTS[parts.scheme] if port is None else port
        self._host = parts.netloc
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._is_secure = parts.scheme == "https"
        self._ssl = ssl

    def __repr__(self) -> str:
        return f"http_probe({self._shown!r})"

    async def __call__(self) -> None:
        """Send the request; raise if there is no answer or no good one."""
        if self._is_secure and self._ssl is None:
            from ssl import create_default_context

            self._ssl = create_default_context()
        ssl = self._ssl if self._is_secure else None
        status = await http_status(self._address, self._port, self._host, self._target, ssl=ssl)
        if not 200 <= status < 400:  # noqa: PLR2004
            raise ProbeFailed(f"status {status}" if status else "the answer is no HTTP")


def http_probe(url: str, *, ssl: SSLContext | None = None) -> HttpProbe:
    """Return a probe that GETs `url` and expects a status from 200 to 399, without redirects.

    `ssl` is for https servers whose certificates the system does not trust.
    """
    return HttpProbe(url, ssl)


class TcpProbe:
    """The probe of `tcp_probe`."""

    def __init__(self, host: str, port: int) -> None:
        self._host = checked_text("host", host, "10.0.0.1")
        self._port = check.count("port", port, maximum=65_535)

    def __repr__(self) -> str:
        return f"tcp_probe({self._host!r}, {self._port})"

    async def __call__(self) -> None:
        """Connect; raise if that fails."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.transport.abort()


def tcp_probe(host: str, port: int) -> TcpProbe:
    """Return a probe that connects to a port and closes the connection.

    It shows that a machine is up and accepts connections, not that the program behind it answers.
    """
    return TcpProbe(host, port)


class GrpcProbe:
    """The probe of `grpc_probe`."""

    def __init__(self, target: str, service: str, credentials: Any) -> None:
        try:
            import grpc
        except ImportError as error:
            raise ImportError("grpc_probe needs grpcio: pip install 'seawall[grpc]'") from error
        self._grpc = grpc
        self._target = checked_text("target", target, "10.0.0.1:50051")
        if not isinstance(service, str) or len(service.encode()) > 127:  # noqa: PLR2004 - the length is encoded in one byte
            raise TypeError(f"service={service!r:.200}: write the name of a service, or nothing")
        if credentials is not None and not hasattr(credentials, "_credentials"):
            raise TypeError(
                f"credentials={credentials!r}: pass what grpc.ssl_channel_credentials() returns"
            )
        name = service.encode()
        # The message HealthCheckRequest, whose only field is the first, a string.
        self._request = bytes([0x0A, len(name)]) + name if name else b""
        self._credentials = credentials

    def __repr__(self) -> str:
        return f"grpc_probe({self._target!r})"

    async def __call__(self) -> None:
        """Query the health service; raise if the peer does not serve."""
        grpc = self._grpc
        loop = asyncio.get_running_loop()
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.min_reconnect_backoff_ms", CONNECTING),
        ]
        if self._credentials is None:
            channel = grpc.insecure_channel(self._target, options)
        else:
            channel = grpc.secure_channel(self._target, self._credentials, options)
        try:
            # A blocking channel works with every loop; channels of grpc.aio share one loop's
            # poller.
            method: Any = channel.unary_unary(CHECK)
            call = method.future(self._request)
            answered = loop.create_future()
            call.add_done_callback(lambda _call: _wake(loop, answered))
            try:
                await answered
            except BaseException:
                call.cancel()
                raise
            status = _status(call.result())
        finally:
            channel.close()
        if status != STATUSES.index("SERVING"):
            known = STATUSES[status] if status < len(STATUSES) else str(status)
            raise ProbeFailed(f"the service is {known}")


def grpc_probe(target: str, *, service: str = "", credentials: Any = None) -> GrpcProbe:
    """Return a probe that queries the standard health service of a gRPC server.

    It expects SERVING for `service`, or for the server as a whole. `credentials` come from
    `grpc.ssl_channel_credentials()`, for a server with TLS. Needs the extra `grpc`.
    """
    return GrpcProbe(target, service, credentials)


def _status(reply: bytes) -> int:
    """Return the status in a HealthCheckResponse: its first field, 0 if omitted."""
    if not reply:
        return 0
    if len(reply) < 2 or reply[0] != 0x08:  # noqa: PLR2004 - the first field, a varint
        raise ProbeFailed("the answer makes no sense")
    return reply[1]


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """Wake the coroutine that awaits `waiter` in `loop`; from any thread."""

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:
        pass  # the loop is closed: there is no waiter left


class ProbeRunner:
    """Calls one peer's probe: in the loop if it is async, otherwise in a thread."""

    def __init__(self, function: Callable[[], Any], threads: Callable[[], IoPool]) -> None:
        """Call `function`; `threads()` returns the pool for plain functions."""
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"probe={function!r}: pass http_probe(url), tcp_probe(host, port),"
                " grpc_probe(target), or a function without arguments"
            )
        kind = kind_of(function)
        if kind not in {"sync", "async"}:
            raise TypeError(f"probe={function!r} is a generator: pass a function")
        self._function = function
        self._threads = threads
        self._is_async = kind == "async"
        self._is_running = False

    async def __call__(self, note_start: Callable[[], None]) -> Any:
        """Run the probe and return or raise what it does; call `note_start()` when it starts.

        A plain function that is still running from the last probe is not called a second time.
        """
        if self._is_async:
            note_start()
            return await self._function()
        if self._is_running:
            note_start()
            raise ProbeFailed("the last probe still runs in its thread")
        (result,) = await self._threads().arun(self._call, note_start)
        return await result if hasattr(result, "__await__") else result

    def _call(self, note_start: Callable[[], None]) -> tuple[Any]:
        """Call the function in a thread; the tuple keeps an awaitable result for the loop."""
        self._is_running = True
        try:
            note_start()
            return (self._function(),)
        finally:
            self._is_running = False


def checked_text(name: str, value: object, example: str) -> str:
    """Return `value` if it is text that is not empty, or raise."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}={value!r}: write text, such as {name}={example!r}")
    return value
