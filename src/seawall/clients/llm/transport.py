"""The layer between a guarded transport and the network that understands language models.

It sees each attempt: it passes the vendor's reports to the limits, reads the usage from the body as
it is read, and inspects the first event of a stream. If that is an error, the response becomes an
error response with the corresponding status: then it can be retried, since the caller has not seen
an item yet. The body itself is passed on unchanged, byte for byte.
"""

from __future__ import annotations

import json
from functools import partial
from operator import call
from typing import Any, ClassVar, Final

from seawall.clients.http.bodies import StreamedBody, library_of, stream_class
from seawall.clients.http.httpx_family import AsyncWrapper, SyncWrapper
from seawall.clients.llm.estimate import is_free
from seawall.clients.llm.limits import USAGE, TokenLimits
from seawall.clients.llm.operations import Operation, Operations
from seawall.clients.llm.outcomes import CLIENT, mark_unsent, was_refused
from seawall.clients.llm.usage import (
    FIRST_EVENT,
    NONE_USED,
    UNKNOWN,
    JsonReader,
    PendingUsage,
    Reader,
    SseReader,
    Unpacking,
)
from seawall.context import check_deadline
from seawall.guard import Guard
from seawall.runtime.driver import Steps, adrive, drive

_STATUSES: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "tokens": 429,
    "requests": 429,
    "insufficient_quota": 429,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""Statuses for the errors of the vendors; other errors stay events of a stream."""

_PACKED: Final = ("gzip", "x-gzip", "deflate")
_READABLE: Final = "gzip, deflate"
_OK, _REDIRECT = 200, 300
_ABOUT_BODY: Final = ("content-encoding", "content-length", "content-type", "transfer-encoding")


class VendorLayer:
    """Base of both layers: the limits to update, and the warning if the SDK retries on its own."""

    _handler: ClassVar[str]
    _read_ahead: ClassVar[str]
    _close: ClassVar[str]

    def __init__(self, guard: Guard, transport: Any, operations: Operations | None = None) -> None:
        """Send with `transport`; pass the vendor's reports to the `TokenLimits` of `guard`.

        `operations` counts usage and duration of requests; several layers may share it.
        """
        self.transport = transport
        self._operations = Operations(guard) if operations is None else operations
        self._limits = [policy for policy in guard.policies if isinstance(policy, TokenLimits)]
        self._guard = guard.name
        self._warned = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {type(self.transport).__name__}>"

    def _prepare(self, request: Any) -> None:
        """Ensure that the response can be read here, and warn if the SDK retries."""
        headers = request.headers
        accepted = headers.get("accept-encoding")
        if accepted and ("br" in accepted or "zstd" in accepted):
            headers["accept-encoding"] = _READABLE
        retried = headers.get("x-stainless-retry-count", "0")
        if retried != "0" and not self._warned:
            self._warned = True
            import logging

            logging.getLogger("seawall").warning(
                "guard %r: the SDK retries too, so attempts multiply: make its client with"
                " max_retries=0",
                self._guard,
            )

    def _exchange(self, request: Any) -> Steps[Any]:
        """Send `request` once, and return the response."""
        self._prepare(request)
        operation = Operation(self._operations, request)
        try:
            response = yield partial(getattr(self.transport, self._handler), request)
        except BaseException as error:
            operation.failed(error)
            if isinstance(error, Exception):
                mark_unsent(error, self._guard)
            raise
        usage, events = self._read_report(request, response)
        body = self._inspected(request, response, usage)
        if events is not None:
            if body is not None:
                try:
                    yield from self._read_first_event(body, events)
                except BaseException as error:
                    operation.failed(error)
                    raise
            operation.streams()
            status = _status_of(events)
            if status is not None and events.error is not None:
                yield getattr(response, self._close)
                response = _as_error(response, status, events.error)
        if response.status_code >= CLIENT:
            operation.failed(response.status_code)
        else:  # ends when the response was read
            operation.follow(response.extensions[USAGE])
        return response

    def _inspected(self, request: Any, response: Any, usage: PendingUsage) -> InspectedBody | None:
        """Return the body, inspected as it is read; None if it was read already."""
        if response.is_stream_consumed:
            usage.feed(response.content)
            usage.end()
            return None
        kind = stream_class(InspectedBody, library_of(request.__class__))
        body: InspectedBody = kind(response.stream, usage)
        response.stream = body
        return body

    def _read_first_event(self, body: InspectedBody, events: SseReader) -> Steps[None]:
        """Read `body` until the first event has arrived, or the beginning is too long."""
        read = 0
        try:
            while not (events.began or read > FIRST_EVENT):
                chunk = yield getattr(body, self._read_ahead)
                if chunk is None:
                    break
                read += len(chunk)
        except BaseException:
            yield getattr(body, self._close)
            raise

    def _read_report(self, request: Any, response: Any) -> tuple[PendingUsage, SseReader | None]:
        """Pass the vendor's report to the limits; return readers of the usage and of the events."""
        status, headers = response.status_code, response.headers
        for limits in self._limits:
            try:
                limits.apply_headers(headers.raw, status, request)
            except Exception:
                import logging

                # The response is more important than its report about limits.
                logging.getLogger("seawall").exception("guard %r: not understood", self._guard)
        usage, events = PendingUsage(None), None
        if was_refused(status):
            usage = PendingUsage(None, NONE_USED)
        elif _OK <= status < _REDIRECT:
            reader, events = _readers(response)
            # If a request uses no tokens, its response can only report the usage of another one.
            free = is_free(request)
            usage = PendingUsage(events and reader, NONE_USED) if free else PendingUsage(reader)
        response.extensions[USAGE] = usage
        return usage, events


def _readers(response: Any) -> tuple[Reader | None, SseReader | None]:
    """Return readers for the body of `response`, and for its events if it is a stream of them."""
    reader: Reader | None = None
    events = None
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        reader = events = SseReader()
    elif "json" in kind:
        reader = JsonReader()
    packed = response.headers.get("content-encoding", "identity").strip().lower()
    if reader is None or response.is_stream_consumed or packed == "identity":
        return reader, events  # a body that was created here from bytes is not compressed
    return (Unpacking(reader), events) if packed in _PACKED else (None, None)


def _status_of(events: SseReader) -> int | None:
    """Return the status that a stream should have had, if it begins with an error."""
    error = None if events.error is None else events.error["error"]
    for name in ("type", "code"):
        kind = None if error is None else error.get(name)
        status = _STATUSES.get(kind) if isinstance(kind, str) else None
        if status is not None:
            return status
    return None


def _as_error(response: Any, status: int, event: dict[str, Any]) -> Any:
    """Return the error response that a vendor sends if it fails before it answers."""
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name.lower() not in _ABOUT_BODY
    ]
    extensions: dict[str, Any] = {
        "http_version": response.extensions.get("http_version", b"HTTP/1.1"),
        USAGE: PendingUsage(None, NONE_USED if was_refused(status) else UNKNOWN),
    }
    return type(response)(
        status,
        headers=[*headers, ("content-type", "application/json")],
        content=json.dumps(event).encode(),
        extensions=extensions,
    )


class InspectedBody(StreamedBody):
    """A body in transit, which `usage` inspects; its beginning may be read ahead."""

    def __init__(self, stream: Any, usage: PendingUsage) -> None:
        super().__init__(stream)
        self._usage = usage

    def read_ahead(self) -> bytes | None:
        """Read a chunk before the caller asks for it; None at the end."""
        if self._rest is None:
            self._rest = iter(self._stream)
        chunk = self._kept(next(self._rest, None))
        if chunk is not None:
            check_deadline()  # each chunk restarts the library's own timeout
        return chunk

    async def aread_ahead(self) -> bytes | None:
        """Async twin of `read_ahead`; at the deadline it is cancelled."""
        if self._rest is None:
            self._rest = aiter(self._stream)
        return self._kept(await anext(self._rest, None))

    def _kept(self, chunk: bytes | None) -> bytes | None:
        if chunk is not None:
            self._on_chunk(chunk)
            self._head.append(chunk)
        return chunk

    def _on_chunk(self, chunk: bytes) -> None:
        self._usage.feed(chunk)

    def _on_end(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self._usage.error = type(error).__name__
        self._usage.end()


class VendorTransport(SyncWrapper, VendorLayer):
    """The layer for a `Client`."""

    _handler, _read_ahead, _close = "handle_request", "read_ahead", "close"

    def handle_request(self, request: Any) -> Any:
        """Send `request` once."""
        return drive(self._exchange(request), call)


class AsyncVendorTransport(AsyncWrapper, VendorLayer):
    """The layer for an `AsyncClient`."""

    _handler, _read_ahead, _close = "handle_async_request", "aread_ahead", "aclose"

    async def handle_async_request(self, request: Any) -> Any:
        """Send `request` once."""
        return await adrive(self._exchange(request), call)
