"""Settings of guarded transports: which requests may be repeated, which responses mean failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, Literal

from seawall import _checks as check
from seawall.clients.http.headers import PROPAGATED, read_propagate
from seawall.clients.http.library import Library
from seawall.context import attempt_var, check_reserve, idempotency_key_var, retried_above
from seawall.errors import DeadlineExceeded
from seawall.guard import Guard, MarkedGuard
from seawall.policies.fallback import Fallback, Static
from seawall.policies.retry import Retry
from seawall.runtime.layers import Kind
from seawall.wire.idempotency import (
    IDEMPOTENCY_HEADER,
    IN_FLIGHT,
    REPLAYED_HEADER,
    is_replayed,
)
from seawall.wire.retries import read_milliseconds, read_retry_after

RetryAt = Literal["everywhere", "edge"]

FAILURES: Final = frozenset({408, 429, *range(500, 600)} - {501, 505})
"""Statuses that mean failure; not 501 and 505, as a retry of the same request cannot help."""

IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PUT", "DELETE"})
"""Methods whose repetition has no effect beyond that of the first request (RFC 9110, 9.2.2)."""

_ERROR: Final = 400
_TOO_LARGE: Final = 413


class BadStatus(Exception):
    """A failed response, as policies inside the guard see it; unwrapped outside."""

    transient = True
    no_verdict = False
    """Whether it says nothing about the server's health; see `Call.outcome`."""
    throttled = False
    """Whether the server did nothing, and says so."""
    nothing_sent = False

    def __init__(self, request: Any, response: Any, status: int, retry_after: float | None) -> None:
        """Carry request and response, and the server's Retry-After (below 0: never)."""
        super().__init__(f"answered {status}")
        self.response = response
        self.request = request
        self.status = status
        self.retry_after = retry_after


class KeyInProgress(BadStatus):
    """The first request with this key is still in progress: retry, it is not a failure."""

    no_verdict = True


class Throttled(BadStatus):
    """The server refused to carry out the request for now: any request may be repeated."""

    throttled = True


class ClientTerms:
    """The validated settings that guarded clients of HTTP and gRPC have in common."""

    def __init__(
        self,
        guard: Guard,
        kind: Kind,
        retry_at: RetryAt,
        propagate: bool | Collection[str],  # noqa: FBT001 - as in the clients
        reserve: float | None,
        *,
        no_cache: str,
    ) -> None:
        """Validate the settings; `no_cache` says why the guard must not have a Cache."""
        if not isinstance(guard, Guard):
            raise TypeError(f"{guard!r}: the first argument is a Guard, such as Guard('vendor')")
        if any(policy.kind == "cache" for policy in guard.policies):
            raise TypeError(f"guard {guard.name!r}: {no_cache}")
        guard._plan.check(kind)  # raises now, not when called, if a Timeout cannot act here
        self.guard = guard
        self.unrepeatable_guard = (
            MarkedGuard(guard, idempotent=False) if guard.idempotent else guard
        )
        """The same guard for requests that may not be repeated."""
        self._edge = check.choice("retry_at", retry_at, ("everywhere", "edge")) == "edge"
        self.propagate = read_propagate(propagate)
        self.reserve = check_reserve(reserve)

    def retried_above(self) -> str | None:
        """Return the reason why another service retries instead of this client, or None."""
        above = retried_above(attempt_var.get(), edge=self._edge)
        return None if above is None else above.reason

    def deadline_error(self) -> DeadlineExceeded:
        """Return the refusal of a request for which no time is left."""
        return DeadlineExceeded(
            f"guard {self.guard.name!r}: the deadline passed before the request was sent",
            guard=self.guard.name,
            policy="deadline",
        )


class Terms(ClientTerms):
    """The validated settings of one guarded transport."""

    def __init__(
        self,
        guard: Guard,
        library: Library,
        kind: Kind,
        *,
        retry_at: RetryAt = "everywhere",
        generate_keys: bool = False,
        repeatable: Callable[[Any], bool] | None = None,
        statuses: Collection[int] = FAILURES,
        propagate: bool | Collection[str] = PROPAGATED,
        reserve: float | None = None,
    ) -> None:
        advice = (
            "a Cache would hand out one response many times, and its body can be read once: put the"
            " Cache around the function that reads it"
        )
        super().__init__(guard, kind, retry_at, propagate, reserve, no_cache=advice)
        for policy in guard.policies:
            if isinstance(policy, Fallback):
                _refuse_static_answers(policy, guard, library)
        for problem in _ineffective_policies(guard, library):
            guard.note_danger(problem)
            from warnings import warn

            warn(f"guard {guard.name!r}: {problem}", stacklevel=3)  # at the transport's creation
        self.library = library
        self.generate_keys = check.flag("generate_keys", generate_keys)
        self.repeatable = (
            None if repeatable is None else check.plain_function("repeatable", repeatable)
        )
        if isinstance(statuses, str) or not isinstance(statuses, Collection):
            raise TypeError(f"statuses={statuses!r}: write a set of them, such as {{502, 503}}")
        self.statuses = frozenset(
            check.count("statuses", status, minimum=_ERROR, maximum=599) for status in statuses
        )
        self.retries = any(getattr(policy, "most_attempts", 1) > 1 for policy in guard.policies)
        self.hedges = any(policy.kind == "hedge" for policy in guard.policies)

    def reason_not_to_repeat(self, request: Any, key: str | None) -> str | None:
        """Return why `request` may be sent only once; None if it may be repeated."""
        above = self.retried_above()
        if above is not None:
            return above
        if (
            request.method not in IDEMPOTENT
            and key is None
            and not (self.repeatable and self.repeatable(request))
        ):
            return f"{request.method} without an idempotency key"
        if not self.guard.idempotent and key is None and idempotency_key_var.get() is None:
            return "its guard is marked idempotent=False"
        if not self.library.replayable(request):
            return "its body is a stream, which can be read once"
        return None

    def key_of(self, request: Any) -> tuple[str | None, bool]:
        """Return the idempotency key of `request`, and whether it must still be sent."""
        if request.method in IDEMPOTENT or not self.library.honours_keys:
            return None, False
        own = request.headers.get(IDEMPOTENCY_HEADER)
        if own:
            return str(own), False
        key = idempotency_key_var.get()
        if key is None and self.generate_keys:
            from uuid import uuid4

            key = str(uuid4())
        return key, key is not None

    def failure_in(self, request: Any, response: Any, *, keyed: bool) -> BadStatus | None:
        """Return the failure that a response means, if any; `keyed`: sent with a key."""
        status, headers = self.library.status(response), response.headers
        if status < _ERROR or (keyed and is_replayed(headers.get(REPLAYED_HEADER))):
            # A replayed response is of a server that is healthy now; a retry changes nothing.
            return None
        seconds = _retry_after(headers)
        if self.library.throttled(response):
            return Throttled(request, response, status, seconds)
        wish = (headers.get("x-should-retry") or "").strip().lower()
        if wish == "false":
            return BadStatus(request, response, status, -1.0) if status in self.statuses else None
        if keyed and status == IN_FLIGHT and seconds is not None:
            return KeyInProgress(request, response, status, seconds)
        # A 413 with Retry-After is temporary (RFC 9110, 15.5.14).
        temporary = status == _TOO_LARGE and seconds is not None
        if status not in self.statuses and wish != "true" and not temporary:
            return None
        return BadStatus(request, response, status, seconds)


def _refuse_static_answers(fallback: Fallback, guard: Guard, library: Library) -> None:
    """Refuse a value that all callers would share: clients modify the responses they get."""
    for level in fallback.levels:
        if isinstance(level, Static):
            raise TypeError(
                f"guard {guard.name!r}: the client of {library.name} needs a new response for each"
                f" request, and {level!r} is always the same value. Write"
                f" Fallback(lambda request: {library.response}(...)), which in Guard.standard"
                " is fallback=lambda request: ..., or put the Fallback into a guard around the"
                " function that calls the client"
            )


def _ineffective_policies(guard: Guard, library: Library) -> Iterator[str]:
    """Yield a warning for each policy of the guard that has no effect for this library."""
    for policy in guard.policies:
        # A user's function may look at responses, and must not be called as a test.
        if isinstance(policy, Retry) and policy.most_attempts > 1 and not policy.checks_values:
            errors = [kind.__new__(kind) for kind in library.transient]
            errors.append(BadStatus(None, None, 503, None))
            if not any(policy.is_retryable(error, None) for error in errors):
                yield (
                    f"{policy!r} retries none of the errors of {library.name}, and no status:"
                    " write on=transient (from seawall import transient)"
                )


def _retry_after(headers: Any) -> float | None:
    exact, usual = headers.get("retry-after-ms"), headers.get("retry-after")
    seconds = None if exact is None else read_milliseconds(exact)
    if seconds is None and usual is not None:
        seconds = read_retry_after(usual, wall_time())
    return seconds


def wall_time() -> float:
    """Return the seconds since 1970, for dates in responses."""
    import time

    return time.time()  # noqa: TID251 - a Retry-After may be a date
