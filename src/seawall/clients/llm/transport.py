"""The layer between a guarded transport and the network that understands language models.

It sees each attempt: it passes the vendor's reports to the limits, reads the usage from the body as
it is read, and inspects the first event of a stream. If that is an error, the response becomes an
error response with the corresponding status: then it can be retried, since the caller has not seen
an item yet. The body itself is passed on unchanged, byte for byte.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any, Final

from seawall.clients.http.httpx_transports import AsyncAround, SyncAround
from seawall.clients.llm.endings import CLIENT, mark_unsent, was_refused
from seawall.clients.llm.estimate import is_free
from seawall.clients.llm.limits import LATE, TokenLimits
from seawall.clients.llm.operations import Operation, Operations
from seawall.clients.llm.usage import (
    FIRST_EVENT,
    NONE_USED,
    UNKNOWN,
    JsonReader,
    Late,
    Reader,
    SseReader,
    Unpacking,
)
from seawall.context import check_deadline
from seawall.guard import Guard

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


class Vendor:
    """Base of both layers: the limits to update, and the warning if the SDK retries on its own."""

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

    def _failed(self, operation: Operation, error: BaseException) -> None:
        """Record that a request had no response."""
        operation.failed(error)
        if isinstance(error, Exception):
            mark_unsent(error, self._guard)

    def _answered(self, request: Any, response: Any) -> tuple[Late, SseReader | None]:
        """Pass the vendor's report to the limits; return readers of the usage and of the events."""
        status, headers = response.status_code, response.headers
        for limits in self._limits:
            try:
                limits.hear(headers.raw, status, request)
            except Exception:
                import logging

                # The response is more important than its report about limits.
                logging.getLogger("seawall").exception("guard %r: not understood", self._guard)
        late, events = Late(None), None
        if was_refused(status):
            late = Late(None, NONE_USED)
        elif _OK <= status < _REDIRECT:
            reader, events = _readers(response)
            # If a request uses no tokens, its response can only report the usage of another one.
            late = Late(events and reader, NONE_USED) if is_free(request) else Late(reader)
        response.extensions[LATE] = late
        return late, events

    def _pass_by(self, response: Any, passing: type, base: str, late: Late) -> Any:
        """Inspect the body as it is read; return it, or None if it was read already."""
        if response.is_stream_consumed:
            late.feed(response.content)
            late.end()
            return None
        stream = response.stream
        response.stream = _stream_class(passing, _base_of(stream, base))(stream, late)
        return response.stream


def _follow(operation: Operation, response: Any) -> None:
    """End `operation` with its response: immediately for an error, else when it was read."""
    if response.status_code >= CLIENT:
        operation.failed(response.status_code)
    else:
        operation.follow(response.extensions[LATE])


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
        said = None if error is None else error.get(name)
        status = _STATUSES.get(said) if isinstance(said, str) else None
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
        LATE: Late(None, NONE_USED if was_refused(status) else UNKNOWN),
    }
    return type(response)(
        status,
        headers=[*headers, ("content-type", "application/json")],
        content=json.dumps(event).encode(),
        extensions=extensions,
    )


class _Passing:
    """A body in transit: the part that was inspected already, then the rest."""

    def __init__(self, stream: Any, late: Late) -> None:
        self.stream = stream
        self.late = late
        self.head: deque[bytes] = deque()
        self.held = 0
        """Number of bytes that were read before the caller asked for them."""
        self.rest: Any = None

    def seen(self, chunk: bytes) -> bytes:
        """Inspect a chunk, and return it."""
        self.late.feed(chunk)
        return chunk

    def enough(self, events: SseReader) -> bool:
        """Return whether the beginning of the stream is known, or too long."""
        return events.began or self.held > FIRST_EVENT

    def hold(self, chunk: bytes) -> None:
        """Inspect a chunk of the beginning, and keep it for the caller."""
        self.head.append(self.seen(chunk))
        self.held += len(chunk)


class _Passes(_Passing):
    def begin(self, events: SseReader) -> None:
        """Read until the first event has arrived."""
        self.rest = iter(self.stream)
        try:
            while not self.enough(events):
                chunk = next(self.rest, None)
                if chunk is None:
                    break
                self.hold(chunk)
                check_deadline()  # each chunk restarts the library's own timeout
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[bytes]:
        try:
            while self.head:
                yield self.head.popleft()
            for chunk in iter(self.stream) if self.rest is None else self.rest:
                yield self.seen(chunk)
        except GeneratorExit:  # the reader stopped
            raise
        except BaseException as error:
            self.late.error = type(error).__name__
            raise
        finally:
            self.late.end()

    def close(self) -> None:
        try:
            self.stream.close()
        finally:
            self.late.end()


class _PassesAsync(_Passing):
    async def begin(self, events: SseReader) -> None:
        """Read until the first event has arrived."""
        self.rest = aiter(self.stream)
        try:
            while not self.enough(events):
                chunk = await anext(self.rest, None)
                if chunk is None:
                    break
                self.hold(chunk)
        except BaseException:
            await self.aclose()
            raise

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while self.head:
                yield self.head.popleft()
            rest = aiter(self.stream) if self.rest is None else self.rest
            async for chunk in rest:
                yield self.seen(chunk)
        except GeneratorExit:  # the reader stopped
            raise
        except BaseException as error:
            self.late.error = type(error).__name__
            raise
        finally:
            self.late.end()

    async def aclose(self) -> None:
        try:
            await self.stream.aclose()
        finally:
            self.late.end()


@cache
def _stream_class(passing: type, base: type) -> Any:
    """Return a stream class that is also the library's, which checks the type."""
    return type(passing.__name__.strip("_"), (passing, base), {})


def _base_of(stream: object, name: str) -> type:
    """Return the library's own class of that name, among the bases of `stream`."""
    for kind in type(stream).__mro__:
        if kind.__name__ == name:
            return kind
    return object


class VendorTransport(SyncAround, Vendor):
    """The layer for a `Client`."""

    def handle_request(self, request: Any) -> Any:
        """Send `request` once."""
        self._prepare(request)
        operation = self._operations.begin(request)
        try:
            response = self.transport.handle_request(request)
        except BaseException as error:
            self._failed(operation, error)
            raise
        late, events = self._answered(request, response)
        body = self._pass_by(response, _Passes, "SyncByteStream", late)
        if events is not None:
            if body is not None:
                try:
                    body.begin(events)
                except BaseException as error:
                    operation.failed(error)
                    raise
            operation.streams()
            status = _status_of(events)
            if status is not None and events.error is not None:
                response.close()
                response = _as_error(response, status, events.error)
        _follow(operation, response)
        return response


class AsyncVendorTransport(AsyncAround, Vendor):
    """The layer for an `AsyncClient`."""

    async def handle_async_request(self, request: Any) -> Any:
        """Send `request` once."""
        self._prepare(request)
        operation = self._operations.begin(request)
        try:
            response = await self.transport.handle_async_request(request)
        except BaseException as error:
            self._failed(operation, error)
            raise
        late, events = self._answered(request, response)
        body = self._pass_by(response, _PassesAsync, "AsyncByteStream", late)
        if events is not None:
            if body is not None:
                try:
                    await body.begin(events)
                except BaseException as error:
                    operation.failed(error)
                    raise
            operation.streams()
            status = _status_of(events)
            if status is not None and events.error is not None:
                await response.aclose()
                response = _as_error(response, status, events.error)
        _follow(operation, response)
        return response
