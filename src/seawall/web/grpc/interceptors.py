"""The edge of a gRPC server: reads deadlines and criticality, sheds early, answers errors.

    gates = Guard("api", Shed(...), AdaptiveLimit(...))
    grpc.server(pool, interceptors=[ServerInterceptor(gates, trust=Trust(callers=["10.0.0.0/8"]))])
    grpc.aio.server(interceptors=[AioServerInterceptor(gates)])

Promises:

- Those of `seawall.web.grpc.admission`, for methods of all four kinds.
- An aio handler is cancelled at its deadline. A sync handler cannot be, but every guard that it
  calls respects the deadline.
- A refusal, and every exception of Seawall that a handler raises, becomes a status with
  `grpc-retry-pushback-ms`.
"""

from __future__ import annotations

import inspect
from asyncio import Task, current_task
from collections.abc import Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    contextmanager,
    nullcontext,
    suppress,
)
from threading import Timer
from typing import Any, Final

import grpc

from seawall.context import Criticality, current_deadline, deadline, keeping_back, seconds_left
from seawall.errors import SeawallError
from seawall.guard import Guard
from seawall.web.edge.inbound import Classify
from seawall.web.grpc.admission import CallAdmission, refusal, trailing_of
from seawall.web.trust import Trust

__all__ = ["AioServerInterceptor", "ServerInterceptor"]

Behavior = Callable[[Any, Any], Any]

_SAME: Final = 0.001
"""Seconds by which two clocks may differ for the same instant."""


class ServerInterceptor(grpc.ServerInterceptor):
    """Interceptor for `grpc.server(..., interceptors=[ServerInterceptor(guard)])`; put it first."""

    def __init__(
        self,
        guard: Guard | None = None,
        *,
        trust: Trust | None = None,
        timeout: float | None = 30.0,
        stream_timeout: float | None = None,
        reserve: float | None = None,
        max_criticality: Criticality = Criticality.CRITICAL,
        classify: Classify | None = None,
    ) -> None:
        """Admit calls through the gates of `guard`; health checks bypass them.

        `trust` names the callers whose criticality, tenant and timeout headers count: by default
        none. The attempt number is trusted from any caller. `timeout` is the maximum time of a
        call, and the default for a call without a deadline. `stream_timeout` is the same for
        streams, which by default have no limit. `reserve` is the part of the time that is withheld
        from the handler's own calls, as for `Inbound`. `classify(incoming)` ranks calls, as for
        `Inbound`.
        """
        self._admission = CallAdmission(
            guard,
            trust=trust,
            timeout=timeout,
            stream_timeout=stream_timeout,
            reserve=reserve,
            max_criticality=max_criticality,
            classify=classify,
        )

    def __repr__(self) -> str:
        guard = self._admission.guard
        whose = "without a guard" if guard is None else repr(guard.name)
        return f"<{type(self).__name__} {whose}>"

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of expired, of stripped and of unclassified calls."""
        return self._admission.snapshot()

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's handler, wrapped in the admission of calls."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        around = _around_sync(self._admission, handler, handler_call_details.method, _Caller())
        return _rewrapped(handler, around)


class AioServerInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor for `grpc.aio.server(interceptors=[AioServerInterceptor(guard)])`, put first."""

    __init__ = ServerInterceptor.__init__
    __repr__ = ServerInterceptor.__repr__
    snapshot = ServerInterceptor.snapshot
    _admission: CallAdmission

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the method's handler, wrapped in the admission of calls."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        behavior = _behavior(handler)
        # The same test as in gRPC: a plain function runs in its thread pool, with a sync context.
        if inspect.isasyncgenfunction(behavior) or inspect.iscoroutinefunction(behavior):
            around = _around_async(self._admission, handler, method)
        else:
            around = _around_sync(self._admission, handler, method, _Caller(current_task()))
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


class _Caller:
    """Connection state of the caller of a plain handler, where an aio server knows it."""

    def __init__(self, task: Task[Any] | None = None) -> None:
        """Derive the state from the `task` of gRPC in which the call runs."""
        self.gone = False
        self._callbacks: list[Callable[[], None]] = []
        if task is not None:
            task.add_done_callback(self._over)

    def _over(self, _task: Task[Any]) -> None:
        self.gone = True
        for callback in self._callbacks:
            callback()

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call back when the caller has disconnected, from any thread and possibly twice."""
        self._callbacks.append(callback)
        if self.gone:
            callback()


def _around_sync(admission: CallAdmission, handler: Any, method: str, caller: _Caller) -> Behavior:
    behavior, stream = _behavior(handler), _is_stream(handler)

    def respond(request: Any, context: Any) -> Any:
        # The context must not be used after a disconnect: gRPC has freed its internals.
        if caller.gone:
            return None
        try:
            with (
                admission.admitted(method, context, stream=stream),
                _cut_off(context, stream=stream),
                keeping_back(admission.reserve),
            ):
                return behavior(request, context)
        except SeawallError as error:
            _abort(context, error, caller)

    def respond_with_items(request: Any, context: Any) -> Iterator[Any]:
        if caller.gone:
            return
        try:
            with (
                admission.admitted(method, context, stream=True, when_gone=caller.when_gone),
                _cut_off(context, stream=True),
                keeping_back(admission.reserve),
            ):
                for item in behavior(request, context):
                    if caller.gone:
                        return  # gRPC's thread would wait forever for a reader
                    yield item
        except SeawallError as error:
            _abort(context, error, caller)

    return respond_with_items if handler.response_streaming else respond


@contextmanager
def _cut_off(context: Any, *, stream: bool) -> Iterator[None]:
    """Cancel a stream of a sync server at its deadline: its client may have stopped reading."""
    left = seconds_left()
    if not stream or left is None or not hasattr(context, "cancel"):
        yield
        return
    if left > context.time_remaining() - _SAME:
        yield  # gRPC's own deadline, which gRPC enforces
        return
    timer = Timer(left, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _around_async(admission: CallAdmission, handler: Any, method: str) -> Behavior:
    behavior, stream = _behavior(handler), _is_stream(handler)
    items = inspect.isasyncgenfunction(behavior)

    async def respond(request: Any, context: Any) -> Any:
        try:
            async with admission.aadmitted(method, context, stream=stream), _in_time():
                with keeping_back(admission.reserve):
                    if not items:
                        return await behavior(request, context)
                    # Written here, not by gRPC, so that the time of a slow reader counts too.
                    async with aclosing(behavior(request, context)) as each:
                        async for item in each:
                            await context.write(item)
        except SeawallError as error:
            await _aabort(context, error)

    return respond


def _in_time() -> AbstractAsyncContextManager[Any]:
    """Cancel the task when the current deadline has passed."""
    held = current_deadline()
    return nullcontext() if held is None else deadline(held)


def _abort(context: Any, error: SeawallError, caller: _Caller) -> None:
    if caller.gone:
        return
    code, details, trailing = refusal(error)
    context.set_trailing_metadata((*trailing_of(context), *trailing))
    with suppress(grpc.aio.InternalError):  # the caller has just disconnected
        context.abort(code, details)


async def _aabort(context: Any, error: SeawallError) -> None:
    if context.done():
        return
    code, details, trailing = refusal(error)
    with suppress(grpc.aio.InternalError):  # the caller has just disconnected
        await context.abort(code, details, (*trailing_of(context), *trailing))
