"""Admission to a gRPC server, for sync and aio: propagated values of a call, and the guard's gates.

Promises:

- The headers of a caller count as far as `Trust` permits, within the server's bounds.
- A call whose deadline has passed is not run.
- The gates are entered before the handler and left exactly once, when it has really ended: with its
  response, an exception, or because its caller has disconnected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import unquote

import grpc

from seawall.clock import Clock, current_clock
from seawall.context import Criticality, deadline_scope, deadline_var, end_scope
from seawall.context import Scope as DeadlineScope
from seawall.errors import SeawallError
from seawall.guard import Guard
from seawall.runtime.hold import Hold
from seawall.runtime.policy import GateBound
from seawall.web.edge.inbound import Classify, Inbound, Tokens
from seawall.web.problems import problem_of
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from seawall.wire.grpc import FAILURES, PUSHBACK_KEY, pushback_for, status_name, write_pushback
from seawall.wire.text import A_YEAR

HEALTH: Final = "/grpc.health.v1.Health/"

_CODES: Final[dict[Any, str]] = {
    **{code: code.name for code in grpc.StatusCode},
    **{code.value[0]: code.name for code in grpc.StatusCode},
}
"""Names by code, and by the numbers that aio contexts use for codes."""


class _FailureStatus(Exception):
    """Failure of a handler that set a status which means failure, and returned."""


class _CallerGone(BaseException):
    """Signal to a gate that the caller has disconnected: neither success nor failure."""


class _Method:
    """Route of the scope: a method name of the server, which callers cannot invent."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


class CallAdmission:
    """Admission of calls. One for each interceptor."""

    def __init__(
        self,
        guard: Guard | None,
        *,
        trust: Trust | None,
        timeout: float | None,
        stream_timeout: float | None,
        reserve: float | None,
        max_criticality: Criticality,
        classify: Classify | None,
    ) -> None:
        """Store the settings; the interceptors explain them."""
        if guard is not None:
            if not isinstance(guard, Guard):
                raise TypeError(f"{guard!r}: the first argument is a Guard, such as Guard('api')")
            for bound in guard.bounds:
                if not isinstance(bound, GateBound):
                    raise TypeError(
                        f"guard {guard.name!r}: {bound.policy!r} cannot act on a server's calls:"
                        " use gates (Shed, RateLimit, Bulkhead, AdaptiveLimit), and timeout= here"
                    )
        self.guard = guard
        self.trust = trust or Trust()
        self._unary, self._stream = (
            Inbound(
                trust=trust,
                timeout=most,
                reserve=reserve,
                max_criticality=max_criticality,
                classify=classify,
            )
            for most in (timeout, stream_timeout)
        )
        self.reserve = self._unary.reserve
        self._clock: Clock = current_clock() if guard is None else guard.clock

    @contextmanager
    def admitted(
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
        end, hold = self._begin(method, context, stream=stream)
        try:
            if hold is not None:
                hold.__enter__()
            leave = _once(hold)
            if when_gone is not None:
                when_gone(lambda: leave(_CallerGone()))
            with _left(leave, context):
                yield
        finally:
            end()

    @asynccontextmanager
    async def aadmitted(self, method: str, context: Any, *, stream: bool) -> AsyncIterator[None]:
        """Async twin of `admitted`."""
        end, hold = self._begin(method, context, stream=stream)
        try:
            if hold is not None:
                await hold.__aenter__()
            with _left(_once(hold), context):
                yield
        finally:
            end()

    def _begin(
        self, method: str, context: Any, *, stream: bool
    ) -> tuple[Callable[[], None], Hold | None]:
        """Set the context of a call; return a function that ends it, and the gates to enter."""
        incoming = _incoming(method, context, self.trust)
        inbound = self._stream if stream else self._unary
        left = context.time_remaining()
        held: DeadlineScope | None = None
        tokens: Tokens = []
        if left is not None and left < A_YEAR:
            # gRPC itself ends the call at that time, for every caller.
            held = [self._clock.now() + left, self._clock, deadline_scope(), True]
            tokens.append(deadline_var.set(held))

        def end() -> None:
            inbound.undo(incoming, tokens)
            if held is not None:
                end_scope(held)

        try:
            tokens += inbound.read(incoming, self._clock)
        except BaseException:
            end()
            raise
        if self.guard is None or method.startswith(HEALTH):
            return end, None
        return end, self.guard.hold(incoming)

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of expired, of stripped and of unclassified calls."""
        both = (self._unary.snapshot(), self._stream.snapshot())
        return {name: sum(part[name] for part in both) for name in both[0]}


Leave = Callable[[BaseException | None], None]


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
        (key.encode(), value if isinstance(value, bytes) else _encoded(value))
        for key, value in context.invocation_metadata() or ()
    ]
    peer = peer_address(context.peer())
    scope = {
        "type": "grpc",
        "headers": headers,
        "client": None if peer is None else (peer, 0),
        "path": method,
        "method": "POST",
        "route": _Method(method),
    }
    return Incoming(scope, trust)


def _encoded(value: str) -> bytes:
    """Return the bytes of a value; gRPC decodes values as UTF-8, though they should be ASCII."""
    return value.encode("utf-8", "surrogateescape")


def peer_address(peer: str) -> str | None:
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


def trailing_of(context: Any) -> tuple[Any, ...]:
    """Return the trailing metadata that the handler has set, if the context provides it."""
    return tuple(context.trailing_metadata() or ()) if hasattr(context, "trailing_metadata") else ()


def refusal(error: SeawallError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return status, details (a fixed text) and trailing metadata for the caller."""
    problem = problem_of(error)
    pushback = pushback_for(error)
    if pushback is None and problem is not None and problem.retry_after is not None:
        pushback = write_pushback(problem.retry_after)
    trailing = () if pushback is None else ((PUSHBACK_KEY, pushback),)
    details = "" if problem is None else problem.detail
    return grpc.StatusCode[status_name(error)], details, trailing
