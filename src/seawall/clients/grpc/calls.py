"""One RPC under a guard: the parts that sync and async calls have in common.

Promises:

- A method is called twice only if it was declared idempotent, or an idempotency key identifies the
  effect of the call, and only if its request can be sent again. Nothing is retried for a request
  that is a retry itself.
- The deadline that gRPC sends to the server is the earliest of the call's own timeout, that of the
  context, and those of the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import grpc

from seawall import _checks as check
from seawall.clients.grpc.errors import FAILED_CODES, as_rpc_error
from seawall.clients.http.headers import headers_for
from seawall.clients.http.terms import ClientTerms, RetryAt
from seawall.context import (
    Scope,
    deadline,
    deadline_scope,
    idempotency_key_var,
    keeping_back,
    reset,
)
from seawall.errors import SeawallError
from seawall.guard import Guard, MarkedGuard
from seawall.policies.timeout.policy import TimeoutBound
from seawall.runtime.layers import Kind, Layer
from seawall.wire.idempotency import IDEMPOTENCY_HEADER, read_key
from seawall.wire.text import A_YEAR

Idempotent = bool | Collection[str] | Callable[[str], bool]

_KEY: Final = IDEMPOTENCY_HEADER.lower()


class RpcCancelled(BaseException):
    """Signal to a gate that an RPC was cancelled: it ran, and is neither success nor failure."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        self.call = call


class Rpc:
    """A call in progress, as `key=` and `cost=` functions and fallbacks see it.

    `method` is the full name, such as "/shop.Orders/Get"; `request` the message, or an iterator of
    messages; `metadata` the pairs that the caller gave.
    """

    __slots__ = (
        "details",
        "headers",
        "key",
        "metadata",
        "method",
        "repeatable",
        "request",
        "resendable",
        "send",
        "streams",
    )

    def __init__(self, details: Any, request: Any, send: Callable[..., Any]) -> None:
        method = details.method
        self.method: str = method.decode("latin-1") if isinstance(method, bytes) else method
        self.request = request
        self.metadata: tuple[tuple[str, Any], ...] = tuple(details.metadata or ())
        self.details = details
        self.send = send
        self.headers = _texts(self.metadata)
        self.key: str | None = None
        """Idempotency key, if it must still be sent to the server."""
        self.streams = False
        """Whether the request is a stream of messages."""
        self.resendable = True
        """Whether the request can be sent twice: an iterator can be read only once."""
        self.repeatable = False
        """Whether the call may be made twice."""

    def __repr__(self) -> str:
        return f"<Rpc {self.method}>"

    def message(self) -> Any:
        """Return the request as gRPC expects it: an iterator for a stream of messages."""
        return iter(self.request) if self.streams and self.resendable else self.request


def _texts(pairs: tuple[tuple[str, Any], ...]) -> dict[str, str]:
    """Return the text values of metadata by lower-case names; several values are joined."""
    texts: dict[str, str] = {}
    for name, value in pairs:
        if isinstance(value, str):
            key = name.lower()
            texts[key] = f"{texts[key]},{value}" if key in texts else value
    return texts


class RpcTerms(ClientTerms):
    """The validated settings of a client's interceptors."""

    def __init__(
        self,
        guard: Guard,
        kind: Kind,
        *,
        idempotent: Idempotent,
        retry_at: RetryAt,
        propagate: bool | Collection[str],
        reserve: float | None,
    ) -> None:
        advice = (
            "a Cache here would keep calls, those that ended badly too: put the Cache around the"
            " function that makes the call"
        )
        super().__init__(guard, kind, retry_at, propagate, reserve, no_cache=advice)
        self.kind = kind
        self.repeatable_guard = guard if guard.idempotent else MarkedGuard(guard, idempotent=True)
        """The same guard for calls that may be repeated."""
        self._idempotent = _read_idempotent(idempotent)
        self.timeouts = [bound for bound in guard.bounds if isinstance(bound, TimeoutBound)]
        self._in_threads = [
            bound for bound in self.timeouts if not isinstance(bound.layer(kind), Layer)
        ]
        every = [bound.layer(kind) for bound in guard.bounds]
        self.stream_layers = [layer for layer in every if isinstance(layer, Layer)]
        """Layers that apply to a stream: none that would run it twice, or in a thread."""

    def rpc(self, details: Any, request: Any, send: Callable[..., Any], *, stream: bool) -> Rpc:
        """Return the call to make; `stream`: the request is an iterator."""
        rpc = Rpc(details, request, send)
        given = [value for name, value in rpc.metadata if name.lower() == _KEY]
        own = read_key(given[0]) if len(given) == 1 else None  # two keys are ambiguous
        rpc.key = None if given else idempotency_key_var.get()
        safe = self._idempotent(rpc.method) or rpc.key is not None or own is not None
        rpc.streams = stream
        rpc.resendable = not stream or isinstance(request, Sequence)
        rpc.repeatable = safe and rpc.resendable and self.retried_above() is None
        return rpc

    def guard_for(self, rpc: Rpc) -> Guard:
        """Return the guard for that call."""
        return self.repeatable_guard if rpc.repeatable else self.unrepeatable_guard

    @contextmanager
    def call_context(self, rpc: Rpc) -> Iterator[None]:
        """Set the call's own timeout as the deadline, and make refusals gRPC errors too."""
        # With a key in the context, a guard considers every call repeatable.
        token = None if rpc.repeatable else idempotency_key_var.set(None)
        try:
            with keeping_back(self.reserve), self._own_limit(rpc):
                yield
        except SeawallError as error:
            rpc_error = as_rpc_error(error)
            if rpc_error is error:
                raise
            raise rpc_error from error
        finally:
            if token is not None:
                reset(idempotency_key_var, token)

    def _own_limit(self, rpc: Rpc) -> AbstractContextManager[Any]:
        seconds = rpc.details.timeout
        if seconds is None or not seconds < A_YEAR:
            return nullcontext()
        return deadline(max(0.0, float(seconds)), clock=self.guard.clock)

    def seconds_left(self) -> float | None:
        """Return the seconds that an attempt inside the guard has; None without a deadline."""
        return self.seconds_until(deadline_scope())

    def seconds_until_first(self, until: Scope | None) -> float | None:
        """Return the seconds that a stream has for its first item, if gRPC does not enforce them.

        `until` is the deadline that was passed to gRPC.
        """
        held = deadline_scope()
        left = None if held is until else self.seconds_until(held)
        now = self.guard.clock.now()
        ends = [bound.seconds(now) for bound in self._in_threads]
        return min(ends if left is None else [left, *ends], default=None)

    def seconds_until(self, held: Scope | None, *, timed: bool = False) -> float | None:
        """Return the seconds until a deadline, or None if it is None.

        `timed`: the guard's timeouts do not run, so the shortest of them is applied here.
        """
        ends = [] if held is None else [held[0] - held[1].now()]
        if timed and self.timeouts:
            now = self.guard.clock.now()
            ends += [bound.seconds(now) for bound in self.timeouts]
        left = min(ends, default=None)
        if left is not None and left <= 0:
            raise self.deadline_error()
        return left

    def details(self, rpc: Rpc, seconds: float | None) -> Any:
        """Return the details of the next attempt, with `seconds` left."""
        # The time is also sent in a separate header: gRPC rounds it up by up to a hundredth, so
        # it would grow along a chain of services.
        ours = headers_for(self.propagate, rpc.headers, rpc.key, seconds)
        pairs = [pair for pair in rpc.metadata if pair[0].lower() not in ours]
        pairs += ours.items()
        details = rpc.details
        if self.kind == "async":
            metadata: Any = grpc.aio.Metadata(*pairs)
            return grpc.aio.ClientCallDetails(
                details.method, seconds, metadata, details.credentials, details.wait_for_ready
            )
        return _Details(details, seconds, pairs)


class _Details(grpc.ClientCallDetails):
    """The details of a sync call: gRPC reads these attributes, but has no concrete class."""

    def __init__(self, given: Any, timeout: float | None, metadata: list[tuple[str, Any]]) -> None:
        self.method = given.method
        self.timeout = timeout
        self.metadata = tuple(metadata)
        self.credentials = given.credentials
        self.wait_for_ready = getattr(given, "wait_for_ready", None)
        self.compression = getattr(given, "compression", None)


def verdict(code: grpc.StatusCode | None) -> BaseException | None:
    """Return the outcome to report to a gate for an RPC with status `code`; None for success."""
    if code is None or code is grpc.StatusCode.CANCELLED:
        return RpcCancelled()
    return _FailedRpc(code.name) if code in FAILED_CODES else None


def verdict_of_error(error: BaseException) -> BaseException | None:
    """Return the outcome to report to a gate for an RPC that raised `error`."""
    code = getattr(error, "code", None) if isinstance(error, grpc.RpcError) else None
    return error if code is None else verdict(code())


class _FailedRpc(Exception):
    """Failure of an RPC after its first item."""


def _read_idempotent(idempotent: Idempotent) -> Callable[[str], bool]:
    if isinstance(idempotent, bool):
        return lambda _method: idempotent
    if callable(idempotent):
        return check.plain_function("idempotent", idempotent)
    advice = 'write True, a set of full names such as {"/shop.Orders/Get"}, or a function of one'
    if isinstance(idempotent, str) or not isinstance(idempotent, Collection):
        raise TypeError(f"idempotent={idempotent!r}: {advice}")
    names = frozenset(idempotent)
    for name in names:
        if not isinstance(name, str) or not name.startswith("/"):
            raise ValueError(f"idempotent: {name!r} is no full name of a method; {advice}")
    return names.__contains__
