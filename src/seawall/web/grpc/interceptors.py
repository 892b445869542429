"""The edge of a gRPC server: reads deadlines and criticality, sheds early, answers errors.

    gates = Guard("api", Shed(...), AdaptiveLimit(...))
    grpc.server(pool, interceptors=[ServerInterceptor(gates, trust=Trust(callers=["10.0.0.0/8"]))])
    grpc.aio.server(interceptors=[AioServerInterceptor(gates)])

Promises:

- The headers of a caller count as far as `Trust` permits, within the server's bounds.
- A call whose deadline has passed is not run.
- The gates are entered before the handler and left exactly once, when it has really ended: with its
  response, an exception, or because its caller has disconnected.
- An aio handler is cancelled at its deadline. A sync handler cannot be, but every guard that it
  calls respects the deadline.
- A refusal, and every exception of Seawall that a handler raises, becomes a status with
  `grpc-retry-pushback-ms`.
"""

from __future__ import annotations

import inspect
from asyncio import Task, current_task
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from threading import Timer
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import unquote

import grpc

from seawall.clock import Clock, current_clock
from seawall.context import (
    Criticality,
    current_deadline,
    deadline,
    deadline_scope,
    deadline_var,
    end_scope,
    keeping_back,
    seconds_left,
)
from seawall.context import Scope as DeadlineScope
from seawall.errors import SeawallError
from seawall.guard import Guard
from seawall.runtime.blocks import Hold
from seawall.runtime.policy import GateBound
from seawall.web.edge.inbound import Classify, Inbound, Tokens
from seawall.web.problems import ClientGone, problem_of
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from seawall.wire.grpc import FAILURES, PUSHBACK_KEY, pushback_for, status_name, write_pushback
from seawall.wire.text import A_YEAR

__all__ = ["AioServerInterceptor", "ServerInterceptor"]

Behavior = Callable[[Any, Any], Any]
Leave = Callable[[BaseException | None], None]

HEALTH: Final = "/grpc.health.v1.Health/"

_CODES: Final[dict[Any, str]] = {
    **{code: code.name for code in grpc.StatusCode},
    **{code.value[0]: code.name for code in grpc.StatusCode},
}
"""Names by code, and by the numbers that aio contexts use for codes."""

_SAME: Final = 0.001  # seconds by which two clocks may differ for the same instant


class _FailureStatus(Exception):
    """Failure of a handler that set a status which means failure, and returned."""


class CallAdmission:
    """The admission of calls, which the interceptors of both kinds of servers have."""

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
        if guard is not None:
            if not isinstance(guard, Guard):
                raise TypeError(f"{guard!r}: the first argument is a Guard, such as Guard('api')")
            for bound in guard.bounds:
                if not isinstance(bound, GateBound):
                    raise TypeError(
                        f"guard {guard.name!r}: {bound.policy!r} cannot act on a server's calls:"
                        " use gates (Shed, RateLimit, Bulkhead, AdaptiveLimit), and timeout= here"
                    )
        self._guard = guard
        self._unary, self._stream = (
            Inbound(
                trust=trust,
                timeout=longest,
                reserve=reserve,
                max_criticality=max_criticality,
                classify=classify,
            )
            for longest in (timeout, stream_timeout)
        )
        self._clock: Clock = current_clock() if guard is None else guard.clock

    def __repr__(self) -> str:
        whose = "without a guard" if self._guard is None else repr(self._guard.name)
        return f"<{type(self).__name__} {whose}>"

    @contextmanager
    def _admitted(
        self,
        method: str,
        context: Any,
        *,
        stream: bool,
        when_gone: Callable[[Callable[[], None]], None] | None = None,
    ) -> Iterator[None]:
        """Admit a call: set its context and enter the gates; leave and undo at the end.

        `when_gone` registers a callback for the caller's disconnect, which leaves the gates early.
        """
        with self._context_of(method, context, stream=stream) as hold:
            if hold is not None:
                hold.__enter__()
            leave = _once(hold)
            if when_gone is not None:
                when_gone(lambda: leave(ClientGone()))
            with _left(leave, context):
                yield

    @asynccontextmanager
    async def _aadmitted(self, method: str, context: Any, *, stream: bool) -> AsyncIterator[None]:
        """Async twin of `_admitted`."""
        with self._context_of(method, context, stream=stream) as hold:
            if hold is not None:
                await hold.__aenter__()
            with _left(_once(hold), context):
                yield

    @contextmanager
    def _context_of(self, method: str, context: Any, *, stream: bool) -> Iterator[Hold | None]:
        """Set the context of a call until it ends; gives the gates to enter."""
        inbound = self._stream if stream else self._unary
        incoming = _incoming(method, context, inbound.trust)
        left = context.time_remaining()
        held: DeadlineScope | None = None
        tokens: Tokens = []
        if left is not None and left < A_YEAR:
            # gRPC itself ends the call at that time, for every caller.
            held = [self._clock.now() + left, self._clock, deadline_scope(), True]
            tokens.append(deadline_var.set(held))
        try:
            tokens += inbound.read(incoming, self._clock)
            guard = None if method.startswith(HEALTH) else self._guard
            yield None if guard is None else guard.hold(incoming)
        finally:
            inbound.undo(incoming, tokens)
            if held is not None:
                end_scope(held)

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of expired, of stripped and of unclassified calls."""
        both = (self._unary.snapshot(), self._stream.snapshot())
        return {name: sum(part[name] for part in both) for name in both[0]}


class ServerInterceptor(CallAdmission, grpc.ServerInterceptor):
    """Interceptor for `grpc.server(..., interceptors=[ServerInterceptor(guard)])`; put it first."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's handler, wrapped in the admission of calls."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        around = _around_sync(self, handler, handler_call_details.method, _Caller())
        return _rewrapped(handler, around)


class AioServerInterceptor(CallAdmission, grpc.aio.ServerInterceptor):
    """Interceptor for `grpc.aio.server(interceptors=[AioServerInterceptor(guard)])`, put first."""

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
            around = _around_async(self, handler, method)
        else:
            around = _around_sync(self, handler, method, _Caller(current_task()))
        return _rewrapped(handler, around)


def _once(hold: Hold | None) -> Leave:
    """Return a function that leaves the gates once, whichever thread calls it first."""
    held = [] if hold is None else [hold]

    def leave(error: BaseException | None) -> None:
        try:
            taken = held.pop()
        except IndexError:
            return
        taken.__exit__(None, error, None)

    return leave


@contextmanager
def _left(leave: Leave, context: Any) -> Iterator[None]:
    """Leave the gates with the outcome of the call."""
    try:
        yield
    except BaseException as error:
        leave(_verdict(error, context))
        raise
    leave(_verdict(None, context))


def _verdict(error: BaseException | None, context: Any) -> BaseException | None:
    """Return the outcome to report to gates; an abort with NOT_FOUND is a normal response."""
    # The context of a plain function in an aio server has no code.
    name = _CODES.get(context.code(), "OK") if hasattr(context, "code") else "OK"
    if error is None:
        return _FailureStatus(name) if name in FAILURES else None
    # An abort raises, so its status counts; without a status the exception counts.
    answered = isinstance(error, Exception) and name != "OK" and name not in FAILURES
    return None if answered else error


def _incoming(method: str, context: Any, trust: Trust) -> Incoming:
    """Return the call in the form in which limits and key functions see requests."""
    headers = [
        # gRPC decodes values as UTF-8, though they should be ASCII.
        (
            key.encode(),
            value if isinstance(value, bytes) else value.encode(errors="surrogateescape"),
        )
        for key, value in context.invocation_metadata() or ()
    ]
    peer = _peer_address(context.peer())
    scope = {
        "type": "grpc",
        "headers": headers,
        "client": None if peer is None else (peer, 0),
        "path": method,
        "method": "POST",
        "route": SimpleNamespace(path=method),  # a name of the server: callers cannot invent it
    }
    return Incoming(scope, trust)


def _peer_address(peer: str) -> str | None:
    """Return the address in gRPC's name of a peer, None for a unix socket.

    The name is "ipv4:1.2.3.4:5", "ipv6:[::1]:5" (perhaps percent-encoded), "unix:/path". Any other
    name is returned unchanged, and matches no trusted address.
    """
    scheme, _, rest = peer.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return None
    if scheme == "ipv4":
        return rest.rpartition(":")[0]
    if scheme == "ipv6":
        return unquote(rest).rpartition(":")[0].strip("[]")
    return peer


def _refusal(context: Any, error: SeawallError) -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
    """Return status, details (a fixed text) and trailing metadata, with that of the handler."""
    problem = problem_of(error)
    pushback = pushback_for(error)
    if pushback is None and problem is not None and problem.retry_after is not None:
        pushback = write_pushback(problem.retry_after)
    given = context.trailing_metadata() if hasattr(context, "trailing_metadata") else None
    trailing = () if pushback is None else ((PUSHBACK_KEY, pushback),)
    details = "" if problem is None else problem.detail
    return grpc.StatusCode[status_name(error)], details, (*(given or ()), *trailing)


def _kind(handler: Any) -> str:
    requests = "stream" if handler.request_streaming else "unary"
    responses = "stream" if handler.response_streaming else "unary"
    return f"{requests}_{responses}"


def _behavior(handler: Any) -> Behavior:
    behavior: Behavior = getattr(handler, _kind(handler))
    return behavior


def _rewrapped(handler: Any, behavior: Behavior) -> Any:
    """Return a handler of the same kind for another function."""
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
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
    when_gone = caller.when_gone if handler.response_streaming else None

    @contextmanager
    def admitted(context: Any) -> Iterator[bool]:
        """Give whether to call the handler: not if a caller was refused that is gone by now."""
        begun = False
        try:
            with (
                admission._admitted(method, context, stream=stream, when_gone=when_gone),
                _cut_off(context, stream=stream),
                keeping_back(admission._unary.reserve),
            ):
                begun = True
                yield True
        except SeawallError as error:
            _abort(context, error, caller)
            if not begun:
                yield False

    def respond(request: Any, context: Any) -> Any:
        # The context must not be used after a disconnect: gRPC has freed its internals.
        if caller.gone:
            return None
        with admitted(context) as runs:
            return behavior(request, context) if runs else None

    def respond_with_items(request: Any, context: Any) -> Iterator[Any]:
        if caller.gone:
            return
        with admitted(context) as runs:
            for item in behavior(request, context) if runs else ():
                if caller.gone:
                    return  # gRPC's thread would wait forever for a reader
                yield item

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
            async with admission._aadmitted(method, context, stream=stream), _in_time():
                with keeping_back(admission._unary.reserve):
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
    code, details, trailing = _refusal(context, error)
    context.set_trailing_metadata(trailing)
    with suppress(grpc.aio.InternalError):  # the caller has just disconnected
        context.abort(code, details)


async def _aabort(context: Any, error: SeawallError) -> None:
    if context.done():
        return
    with suppress(grpc.aio.InternalError):  # the caller has just disconnected
        await context.abort(*_refusal(context, error))
