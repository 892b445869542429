"""The edge of a gRPC server: deadlines and criticality in, shedding before any work, errors out.

    gates = Guard("api", Shed(...), AdaptiveLimit(...))

    grpc.server(pool, interceptors=[ServerInterceptor(gates, trust=Trust(callers=["10.0.0.0/8"]))])
    grpc.aio.server(interceptors=[AioServerInterceptor(gates)])

Promises: those of `seawall.web._grpc_door`, for methods of all four kinds. An aio handler is
stopped when its time is over; a sync one cannot be, but whatever guard it calls knows. A refusal,
and every error of Seawall that a handler raises, becomes a status with `grpc-retry-pushback-ms`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NoReturn

try:
    import grpc
except ImportError as error:  # pragma: no cover - the tests have it
    raise ImportError("seawall.web.grpc needs grpcio: pip install 'seawall[grpc]'") from error

from seawall.context import Criticality, Deadline, deadline, deadline_var
from seawall.errors import SeawallError
from seawall.guard import Guard
from seawall.web._grpc_door import Door, refusal, trailing_of
from seawall.web.trust import Trust

__all__ = ["AioServerInterceptor", "ServerInterceptor"]

Behavior = Callable[[Any, Any], Any]

_END: Final = object()


class ServerInterceptor(grpc.ServerInterceptor):
    """Put into `grpc.server(..., interceptors=[ServerInterceptor(guard)])`, before all others."""

    def __init__(
        self,
        guard: Guard | None = None,
        *,
        trust: Trust | None = None,
        timeout: float | None = 30.0,
        stream_timeout: float | None = None,
        max_criticality: Criticality = Criticality.CRITICAL,
    ) -> None:
        """Let calls in through the gates of `guard`; health checks pass by them.

        `trust` says whose criticality, tenant, attempt and timeout headers count: nobody's without
        it. `timeout` is the most that a call gets, and what one gets that brings no deadline;
        `stream_timeout` the same for streams, which by default may take as long as they do.
        """
        self._door = Door(
            guard,
            trust=trust,
            timeout=timeout,
            stream_timeout=stream_timeout,
            max_criticality=max_criticality,
        )

    def __repr__(self) -> str:
        guard = self._door.guard
        whose = "without a guard" if guard is None else repr(guard.name)
        return f"<{type(self).__name__} {whose}>"

    def snapshot(self) -> dict[str, int]:
        """Return how many calls came too late, and how many said what they may not."""
        return self._door.snapshot()

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's handler with the door before it."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return _rewrapped(handler, _around_sync(self._door, handler, handler_call_details.method))


class AioServerInterceptor(grpc.aio.ServerInterceptor):
    """Put into `grpc.aio.server(interceptors=[AioServerInterceptor(guard)])`, before all others."""

    __init__ = ServerInterceptor.__init__
    __repr__ = ServerInterceptor.__repr__
    snapshot = ServerInterceptor.snapshot
    _door: Door

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the method's handler with the door before it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        behavior = _behavior(handler)
        # As gRPC itself asks: a plain function runs in its thread pool, with a sync context.
        if inspect.isasyncgenfunction(behavior):
            around = _around_items(self._door, handler, method)
        elif inspect.iscoroutinefunction(behavior):
            around = _around_coroutine(self._door, handler, method)
        else:
            around = _around_sync(self._door, handler, method)
        return _rewrapped(handler, around)


def _behavior(handler: Any) -> Behavior:
    requests = "stream" if handler.request_streaming else "unary"
    responses = "stream" if handler.response_streaming else "unary"
    behavior: Behavior = getattr(handler, f"{requests}_{responses}")
    return behavior


def _rewrapped(handler: Any, behavior: Behavior) -> Any:
    """Return a handler of the same kind for another function."""
    requests = "stream" if handler.request_streaming else "unary"
    responses = "stream" if handler.response_streaming else "unary"
    make = getattr(grpc, f"{requests}_{responses}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _is_stream(handler: Any) -> bool:
    return bool(handler.request_streaming or handler.response_streaming)


def _around_sync(door: Door, handler: Any, method: str) -> Behavior:
    behavior, stream = _behavior(handler), _is_stream(handler)

    def respond(request: Any, context: Any) -> Any:
        try:
            with door.admitted(method, context, stream=stream):
                return behavior(request, context)
        except SeawallError as error:
            _abort(context, error)

    def respond_with_items(request: Any, context: Any) -> Iterator[Any]:
        try:
            with door.admitted(method, context, stream=stream):
                yield from behavior(request, context)
        except SeawallError as error:
            _abort(context, error)

    return respond_with_items if handler.response_streaming else respond


def _around_coroutine(door: Door, handler: Any, method: str) -> Behavior:
    behavior, stream = _behavior(handler), _is_stream(handler)

    async def respond(request: Any, context: Any) -> Any:
        try:
            async with door.aadmitted(method, context, stream=stream), _in_time():
                return await behavior(request, context)
        except SeawallError as error:
            await _aabort(context, error)

    return respond


def _around_items(door: Door, handler: Any, method: str) -> Behavior:
    behavior = _behavior(handler)

    async def respond(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with door.aadmitted(method, context, stream=True):
                items = behavior(request, context)
                try:
                    # Each step has what is left: between two of them gRPC's own code runs.
                    while True:
                        async with _in_time():
                            item = await anext(items, _END)
                        if item is _END:
                            break
                        # A client that goes now takes the generator with it: it is closed here.
                        yield item
                finally:
                    await items.aclose()
        except SeawallError as error:
            await _aabort(context, error)

    return respond


def _in_time() -> AbstractAsyncContextManager[Any]:
    """Stop the task when the deadline that stands has passed."""
    held = deadline_var.get()
    if held is None:
        from contextlib import nullcontext

        return nullcontext()
    return deadline(Deadline(*held))


def _abort(context: Any, error: SeawallError) -> NoReturn:
    code, details, trailing = refusal(error)
    context.set_trailing_metadata((*trailing_of(context), *trailing))
    context.abort(code, details)
    raise AssertionError from error  # abort raises


async def _aabort(context: Any, error: SeawallError) -> NoReturn:
    code, details, trailing = refusal(error)
    await context.abort(code, details, (*trailing_of(context), *trailing))
    raise AssertionError from error  # abort raises
