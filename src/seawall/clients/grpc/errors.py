"""Exceptions of guarded RPCs: those of Seawall, as gRPC errors too.

Code that catches `grpc.RpcError` and calls `code()` handles refusals and timeouts like any status
from a server; code that catches `CircuitOpen` works as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple, Never, Self

import grpc
from grpc.aio import AioRpcError

from seawall.clients.grpc.completed_calls import EndedCall
from seawall.errors import SeawallError, TimedOut
from seawall.wire.grpc import FAILURES, pushback_of, status_name

LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
EXHAUSTED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED

FAILED_CODES: Final = frozenset(code for code in grpc.StatusCode if code.name in FAILURES)

Predicate = Callable[[Exception | None, Any], bool]


class RpcAnswer(NamedTuple):
    """The end of an RPC that is not a failure of the server; NOT_FOUND is a normal response too."""

    call: Any
    code: grpc.StatusCode


class RpcErrorMixin(EndedCall, AioRpcError):
    """Mixin that makes an exception a gRPC error, for sync and async code.

    A sync gRPC error is also the call and its future, which outer interceptors use.
    """

    seawall_class: ClassVar[type[SeawallError]] = SeawallError
    """The Seawall class of the exception."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r}, code={self.code().name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.seawall_class, self.args, dict(vars(self)))

    def result(self, timeout: float | None = None) -> Never:
        """Raise this exception: there is no response."""
        raise self

    __next__ = next = result

    def exception(self, timeout: float | None = None) -> Self:
        """Return this exception."""
        return self

    def __iter__(self) -> Self:
        return self

    def traceback(self, timeout: float | None = None) -> Any:
        """Return the traceback of this exception."""
        return self.__traceback__


_known: Final[dict[type[SeawallError], type[RpcErrorMixin]]] = {}


def _combined_class(kind: type[SeawallError]) -> type[RpcErrorMixin]:
    """Return the class of exceptions that are of `kind` and gRPC errors."""
    combined = _known.get(kind)
    if combined is None:
        body = {"seawall_class": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
        combined = _known.setdefault(kind, type(kind.__name__, (RpcErrorMixin, kind), body))
    return combined


def _restored(
    kind: type[SeawallError], args: tuple[Any, ...], state: dict[str, Any]
) -> RpcErrorMixin:
    combined = _combined_class(kind)
    error = combined.__new__(combined)
    vars(error).update(state)
    error.args = args
    return error


def as_rpc_error(error: SeawallError, original: Any = None) -> Exception:
    """Return `error` as a gRPC error too; `original` is its gRPC error, if any."""
    if isinstance(error, grpc.RpcError):
        return error
    state = {
        **vars(error),
        "_code": grpc.StatusCode[status_name(error)],
        "_details": str(error),
        "_initial_metadata": None if original is None else original.initial_metadata(),
        "_trailing_metadata": None if original is None else original.trailing_metadata(),
        "_debug_error_string": "",
    }
    return _restored(type(error), error.args, state)


def is_failure(error: BaseException) -> bool:
    """Return whether the error indicates that the server is unhealthy or unreachable."""
    code = getattr(error, "code", None)
    return not isinstance(error, grpc.RpcError) or code is None or code() in FAILED_CODES


def raise_failure(error: Exception, guard: str) -> Never:
    """Raise a failed RPC as the guard should see it: with its pushback, or as a timeout."""
    if not isinstance(error, grpc.RpcError) or isinstance(error, SeawallError):
        raise error
    rpc_error: Any = error  # the base class lacks these methods
    seen = rpc_error
    if rpc_error.code() is LATE:
        late = TimedOut(f"guard {guard!r}: {rpc_error.details()}", guard=guard)
        seen = as_rpc_error(late, rpc_error)
    pushback = pushback_of(rpc_error.trailing_metadata())
    if pushback is not None:
        seen.retry_after = pushback
    if seen is rpc_error:
        raise error
    raise seen from error


def retry_on(*codes: grpc.StatusCode) -> Predicate:
    """Return a predicate for `Retry(on=...)` that retries RPCs which ended with these `codes`.

    These are retried: the `codes`; an attempt that timed out, if DEADLINE_EXCEEDED is one of them;
    and RESOURCE_EXHAUSTED where the server says when to retry.
    """
    if not codes or not all(isinstance(code, grpc.StatusCode) for code in codes):
        raise TypeError(f"retry_on{codes!r}: write status codes, such as StatusCode.UNAVAILABLE")
    if grpc.StatusCode.OK in codes:
        raise ValueError("retry_on(OK): what went well is not repeated")
    if grpc.StatusCode.CANCELLED in codes:
        raise ValueError("retry_on(CANCELLED): what was called off is not repeated")
    wanted = frozenset(codes)

    def is_retryable(error: Exception | None, value: Any) -> bool:
        """Return whether to retry an RPC with this result; for `Retry(on=...)`."""
        if error is None:
            return isinstance(value, RpcAnswer) and value.code in wanted
        if isinstance(error, TimedOut):
            return LATE in wanted
        code = error.code() if isinstance(error, grpc.RpcError) and hasattr(error, "code") else None
        pushed = code is EXHAUSTED and getattr(error, "retry_after", None) is not None
        return pushed or code in wanted

    is_retryable.__name__ = f"retry_on({', '.join(code.name for code in codes)})"
    return is_retryable
