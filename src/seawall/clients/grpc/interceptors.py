"""gRPC calls under a guard: interceptors for channels of grpcio, sync and aio.

    orders = Guard.standard("orders", on=transient, timeout=0.5, sync="cooperative")
    reads = {"/shop.Orders/Get", "/shop.Orders/List"}
    grpc.intercept_channel(channel, GuardedInterceptor(orders, idempotent=reads))
    grpc.aio.insecure_channel(target, interceptors=aio_interceptors(orders, idempotent=reads))

Promises:

- A call with one response passes through the whole guard. A stream does so up to its first item, if
  it may be repeated, and holds the gates until the RPC is over.
- The server gets the earliest deadline, the criticality and the attempt number; its pushback is
  obeyed.
- A refusal raises an exception that belongs to Seawall and is a `grpc.RpcError` too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import call
from typing import Any

import grpc

from seawall.clients.grpc.calls import Idempotent, Rpc, RpcCancelled, RpcTerms
from seawall.clients.grpc.completed_calls import AioCompletedCall, CompletedCall
from seawall.clients.grpc.errors import RpcAnswer, RpcErrorMixin, is_failure, raise_failure
from seawall.clients.grpc.held_calls import start_held_call, start_repeatable_stream
from seawall.clients.http.headers import PROPAGATED
from seawall.clients.http.terms import RetryAt
from seawall.guard import Guard
from seawall.runtime.driver import Steps, adrive, drive


class GuardedInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Guard of a sync channel: `grpc.intercept_channel(channel, GuardedInterceptor(g))`.

    A `future(...)` enters the gates and starts immediately; it leaves them when it is over. It is
    not retried: no thread waits for it that could retry.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        idempotent: Idempotent = False,
        retry_at: RetryAt = "everywhere",
        propagate: bool | Collection[str] = PROPAGATED,
        reserve: float | None = None,
    ) -> None:
        """Send every call through `guard`.

        `idempotent` says which methods may be called twice: full names, a function of one, or True
        for all. By default none may, unless an `idempotency_key(...)` identifies the effect of the
        call. `retry_at="edge"` leaves retries to the service at the start of the chain. `propagate`
        names what is sent to the server: a set of "attempt", "criticality", "deadline" (which gRPC
        sends too, rounded up) and "tenant" (sent only if named); False for nothing. `reserve` is
        the number of seconds of the context's deadline that are withheld from the whole call: by
        default a tenth of what is left, at least 10 ms and at most 0.5 s.
        """
        terms = RpcTerms(
            guard,
            "sync",
            idempotent=idempotent,
            retry_at=retry_at,
            propagate=propagate,
            reserve=reserve,
        )
        self._terms = terms

        def attempt(rpc: Rpc) -> RpcAnswer:
            call = rpc.send(terms.details(rpc, terms.seconds_left()), rpc.message())
            return _settled(call, call.exception(), guard.name)

        self._call_repeatable = terms.repeatable_guard(attempt)
        self._call_once = terms.unrepeatable_guard(attempt)

    def __repr__(self) -> str:
        return f"<GuardedInterceptor {self._terms.guard.name!r}>"

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Make a call with one request and one response."""
        rpc = self._terms.rpc(client_call_details, request, continuation, stream=False)
        return self._call_unary(rpc)

    def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Make a call with many requests and one response."""
        rpc = self._terms.rpc(client_call_details, request_iterator, continuation, stream=True)
        return self._call_unary(rpc)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Make a call with one request and many responses."""
        rpc = self._terms.rpc(client_call_details, request, continuation, stream=False)
        return self._call_stream(rpc)

    def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Make a call with many requests and many responses."""
        rpc = self._terms.rpc(client_call_details, request_iterator, continuation, stream=True)
        return self._call_stream(rpc)

    def _call_unary(self, rpc: Rpc) -> Any:
        if _is_future(rpc.send):
            steps = start_held_call(self._terms, rpc, timed=True)
            return self._start(rpc, steps)
        try:
            with self._terms.call_context(rpc):
                value = (self._call_repeatable if rpc.repeatable else self._call_once)(rpc)
        except RpcCancelled as cancelled:
            return cancelled.call
        # A fallback returns a response, not a call.
        return value.call if isinstance(value, RpcAnswer) else CompletedCall(value)

    def _call_stream(self, rpc: Rpc) -> Any:
        if rpc.repeatable:
            return self._start(rpc, start_repeatable_stream(self._terms, rpc))
        return self._start(rpc, start_held_call(self._terms, rpc, timed=False))

    def _start(self, rpc: Rpc, steps: Steps[Any]) -> Any:
        """Start a call that the caller uses later; a gRPC error is such a call too."""
        try:
            with self._terms.call_context(rpc):
                return drive(steps, call)
        except grpc.RpcError as error:
            # If an interceptor raises, gRPC reports the code INTERNAL.
            if isinstance(error, (RpcErrorMixin, grpc.Call)):
                return error
            raise


class _Aio:
    """Base of the four interceptors of an aio channel."""

    def __init__(self, terms: RpcTerms) -> None:
        self._terms = terms
        name = terms.guard.name

        async def attempt(rpc: Rpc) -> RpcAnswer:
            call = await rpc.send(terms.details(rpc, terms.seconds_left()), rpc.message())
            try:
                await call
            except grpc.RpcError as error:
                return _settled(call, error, name)
            return RpcAnswer(call, grpc.StatusCode.OK)

        self._call_repeatable = terms.repeatable_guard(attempt)
        self._call_once = terms.unrepeatable_guard(attempt)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.strip('_')} interceptor of guard {self._terms.guard.name!r}>"

    async def _call_unary(self, rpc: Rpc) -> Any:
        try:
            with self._terms.call_context(rpc):
                value = await (self._call_repeatable if rpc.repeatable else self._call_once)(rpc)
        except RpcCancelled as cancelled:
            return cancelled.call
        return value.call if isinstance(value, RpcAnswer) else AioCompletedCall(value)

    async def _call_stream(self, rpc: Rpc) -> Any:
        with self._terms.call_context(rpc):
            if rpc.repeatable:
                return await adrive(start_repeatable_stream(self._terms, rpc), call)
            return await adrive(start_held_call(self._terms, rpc, timed=False), call)


class _UnaryUnary(_Aio, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        rpc = self._terms.rpc(client_call_details, request, continuation, stream=False)
        return await self._call_unary(rpc)


class _UnaryStream(_Aio, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        rpc = self._terms.rpc(client_call_details, request, continuation, stream=False)
        return await self._call_stream(rpc)


class _StreamUnary(_Aio, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        rpc = self._terms.rpc(client_call_details, request_iterator, continuation, stream=True)
        if rpc.resendable:
            return await self._call_unary(rpc)
        with self._terms.call_context(rpc):
            return await adrive(start_held_call(self._terms, rpc, timed=True), call)


class _StreamStream(_Aio, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        rpc = self._terms.rpc(client_call_details, request_iterator, continuation, stream=True)
        return await self._call_stream(rpc)


def aio_interceptors(
    guard: Guard,
    *,
    idempotent: Idempotent = False,
    retry_at: RetryAt = "everywhere",
    propagate: bool | Collection[str] = PROPAGATED,
    reserve: float | None = None,
) -> list[grpc.aio.ClientInterceptor]:
    """Return the `interceptors=` of an aio channel that send all of its calls through `guard`.

    The arguments are those of `GuardedInterceptor`.
    """
    terms = RpcTerms(
        guard,
        "async",
        idempotent=idempotent,
        retry_at=retry_at,
        propagate=propagate,
        reserve=reserve,
    )
    return [_UnaryUnary(terms), _UnaryStream(terms), _StreamUnary(terms), _StreamStream(terms)]


def _settled(call: Any, error: Exception | None, guard: str) -> RpcAnswer:
    """Return the result of an RPC, or raise if it indicates the server's health."""
    if error is None:
        return RpcAnswer(call, grpc.StatusCode.OK)
    if is_failure(error):
        raise_failure(error, guard)
    answered: Any = error  # the base class lacks code()
    if answered.code() is grpc.StatusCode.CANCELLED:
        raise RpcCancelled(call)
    return RpcAnswer(call, answered.code())


def _is_future(continuation: Callable[..., Any]) -> bool:
    """Return whether the caller wrote `stub.Method.future(...)`: gRPC gives no other indication."""
    return ".future." in getattr(continuation, "__qualname__", "")
