"""Completed calls without an RPC: a fallback, or an inner interceptor, provides the response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Never

import grpc


class EndedCall:
    """What every call that is over has in common, sync or aio, an exception too."""

    def done(self) -> bool:
        """Return True: the call is over."""
        return True

    def cancel(self) -> bool:
        """Do nothing: the call is over."""
        return False

    cancelled = running = is_active = cancel

    def time_remaining(self) -> None:
        """Return None: there is no deadline any more."""

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Return False: the callback will not be called."""
        return False

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Call back immediately."""
        fn(self)


class CompletedCall(EndedCall, grpc.Call, grpc.Future):  # type: ignore[type-arg, misc]  # see the stubs
    """A completed sync call with `response`."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def result(self, timeout: float | None = None) -> Any:
        """Return the response."""
        return self._response

    def code(self) -> grpc.StatusCode:
        """Return OK."""
        return grpc.StatusCode.OK

    def details(self) -> str:
        """Return "": there are no details."""
        return ""

    def initial_metadata(self) -> tuple[()]:
        """Return no metadata: no server answered."""
        return ()

    trailing_metadata = initial_metadata

    def exception(self, timeout: float | None = None) -> None:
        """Return None: the call succeeded."""

    traceback = exception


class AioCompletedCall(
    EndedCall,
    grpc.aio.UnaryUnaryCall[Any, Any],
    grpc.aio.UnaryStreamCall[Any, Any],
    grpc.aio.StreamUnaryCall[Any, Any],
    grpc.aio.StreamStreamCall[Any, Any],
):
    """A completed aio call of any kind: `response` is awaited, or `items` are read."""

    def __init__(self, response: Any, items: AsyncIterator[Any] | None = None) -> None:
        self._response = response
        self._items = items

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response
        yield  # makes this a generator

    def __aiter__(self) -> AsyncIterator[Any]:
        assert self._items is not None  # noqa: S101 - for the type checker
        return self._items

    async def read(self) -> Any:
        """Return the next item, or EOF."""
        return await anext(aiter(self), grpc.aio.EOF)

    async def write(self, request: Any) -> Never:
        """Raise: there is no RPC to write to."""
        raise RuntimeError("this call was answered without an RPC: nothing can be written to it")

    async def done_writing(self) -> None:
        """Do nothing: there is no RPC."""

    wait_for_connection = done_writing

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Return no metadata: no server answered."""
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    async def code(self) -> grpc.StatusCode:
        """Return OK."""
        return grpc.StatusCode.OK

    async def details(self) -> str:
        """Return "": there are no details."""
        return ""

    debug_error_string = details
