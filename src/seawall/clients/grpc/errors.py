"""Errors of guarded RPCs: what Seawall raised, as an error of gRPC's too.

Code that catches `grpc.RpcError` and asks for `code()` sees refusals and timeouts as it sees
whatever a server answers; code that catches `CircuitOpen` sees them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple, Never, Self

import grpc
from grpc.aio import AioRpcError

from seawall.errors import SeawallError, TimedOut
from seawall.wire.grpc import FAILURES, pushback_of, status_name

LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
EXHAUSTED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED

FAILED_CODES: Final = frozenset(code for code in grpc.StatusCode if code.name in FAILURES)

Predicate = Callable[[Exception | None, Any], bool]


class Answer(NamedTuple):
    """What an RPC ended with that is no failure of the server's; NOT_FOUND is an answer too."""

    call: Any
    code: grpc.StatusCode


class RpcFace(AioRpcError):
    """What makes an error one of gRPC's, for sync and async code.

    A sync error of gRPC's is also the call and its future, which interceptors further out use.
    """

    of: ClassVar[type[SeawallError]] = SeawallError
    """The kind of error that it is as well."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r}, code={self.code().name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.of, self.args, dict(vars(self)))

    def result(self, timeout: float | None = None) -> Never:
        """Raise: there is no response."""
        raise self

    def exception(self, timeout: float | None = None) -> Self:
        """Return this error."""
        return self

    def traceback(self, timeout: float | None = None) -> Any:
        """Return where it was raised."""
        return self.__traceback__

    def done(self) -> bool:
        """Tell that the call is over."""
        return True

    def cancel(self) -> bool:
        """Do nothing: the call is over."""
        return False

    running = is_active = cancelled = cancel

    def time_remaining(self) -> None:
        """Return None: no time is counted any more."""

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call back at once: the call is over."""
        callback(self)

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Tell that it is too late to be called back."""
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Never:
        raise self

    next = __next__


_known: Final[dict[type[SeawallError], type[RpcFace]]] = {}


def _both(kind: type[SeawallError]) -> type[RpcFace]:
    """Return the class of errors that are of `kind` and of gRPC's."""
    both = _known.get(kind)
    if both is None:
        body = {"of": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
        both = _known.setdefault(kind, type(kind.__name__, (RpcFace, kind), body))
    return both


def _restored(kind: type[SeawallError], args: tuple[Any, ...], state: dict[str, Any]) -> RpcFace:
    both = _both(kind)
    error = both.__new__(both)
    vars(error).update(state)
    error.args = args
    return error


def as_rpc_error(error: SeawallError, said: Any = None) -> Exception:
    """Return `error` as one of gRPC's too; `said` is the error of gRPC's own that it stands for."""
    if isinstance(error, grpc.RpcError):
        return error
    state = {
        **vars(error),
        "_code": grpc.StatusCode[status_name(error)],
        "_details": str(error),
        "_initial_metadata": None if said is None else said.initial_metadata(),
        "_trailing_metadata": None if said is None else said.trailing_metadata(),
        "_debug_error_string": "",
    }
    return _restored(type(error), error.args, state)


def is_failure(error: BaseException) -> bool:
    """Tell whether the error says that the server is not well, or could not be asked."""
    code = getattr(error, "code", None)
    return not isinstance(error, grpc.RpcError) or code is None or code() in FAILED_CODES


def failure(error: Exception, guard: str) -> Any:
    """Return what the guard is to see of a failed RPC: when to ask again, or that time ran out."""
    if not isinstance(error, grpc.RpcError) or isinstance(error, SeawallError):
        return error
    rpc_error: Any = error  # of a class of gRPC's own: its base has none of these methods
    seen = rpc_error
    if rpc_error.code() is LATE:
        seen = as_rpc_error(
            TimedOut(f"guard {guard!r}: {rpc_error.details()}", guard=guard), rpc_error
        )
    pushback = pushback_of(rpc_error.trailing_metadata())
    if pushback is not None:
        seen.retry_after = pushback
    return seen


def retry_on(*codes: grpc.StatusCode) -> Predicate:
    """Return a predicate for `Retry(on=...)`: whether an RPC that ended so is worth another.

    These are retried: the `codes`; what ran out of its attempt's time, if DEADLINE_EXCEEDED is one
    of them; and RESOURCE_EXHAUSTED where the server says when to come back.
    """
    if not codes or not all(isinstance(code, grpc.StatusCode) for code in codes):
        raise TypeError(f"retry_on{codes!r}: write status codes, such as StatusCode.UNAVAILABLE")
    if grpc.StatusCode.OK in codes:
        raise ValueError("retry_on(OK): what went well is not repeated")
    if grpc.StatusCode.CANCELLED in codes:
        raise ValueError("retry_on(CANCELLED): what was called off is not repeated")
    wanted = frozenset(codes)

    def worth_another(error: Exception | None, value: Any) -> bool:
        """Tell whether an RPC that ended so is worth another; for `Retry(on=...)`."""
        if error is None:
            return isinstance(value, Answer) and value.code in wanted
        if isinstance(error, TimedOut):
            return LATE in wanted
        code = error.code() if isinstance(error, grpc.RpcError) and hasattr(error, "code") else None
        pushed = code is EXHAUSTED and getattr(error, "retry_after", None) is not None
        return pushed or code in wanted

    worth_another.__name__ = f"retry_on({', '.join(code.name for code in codes)})"
    return worth_another
