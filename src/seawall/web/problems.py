"""Responses to errors: problem details (RFC 9457), a status, and when to retry.

Promises:

- Every exception of Seawall has a status.
- A 429 and a 503 say when a retry may help, unless it never will, and so does the 409 of a request
  that is still in progress.
- Nothing internal is disclosed: no message of an exception, no address, no stack, only fixed texts
  and the names given to limits.

The statuses:

    429  the caller's own limit (`quota-exceeded`, with `violated-policies`)
    503  shed, the limit of all callers together, an open circuit, a full bulkhead, pool or queue, a
         vendor's limit, an unavailable store (`temporary-reduced-capacity`)
    409  the first request with the same idempotency key is still in progress, and when to retry
    400  no idempotency key where one is needed, and 422 for the key of another payload; 400 for a
         header that is given twice, with different values
    504  no time left: refused before it began, or cancelled
    502  an upstream failed, according to the exceptions of httpx, requests, grpc and the like

An exception of theirs which means that the call itself was wrong, such as a URL without a host, is
a bug like any other: it gets no problem here.

Callers that were shed get a randomized Retry-After, longer by up to `SPREAD` seconds: if all of
them came back together, they would be the next wave. The same holds for callers over the limit of
all callers together. The exact time of a caller's own limit or of a breaker is sent unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any, Final, NamedTuple, overload

from seawall import errors
from seawall.web.asgi_types import Headers, Send
from seawall.wire.retries import write_retry_after

QUOTA_EXCEEDED: Final = "https://iana.org/assignments/http-problem-types#quota-exceeded"
REDUCED_CAPACITY: Final = (
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
)

UNKNOWN_WAIT: Final = 1.0
"""Retry-After in seconds where the time is unknown."""

FAILURE: Final = 500
"""Lowest status that counts as a failure of the app."""

UPSTREAM: Final = "upstream"
"""Reason that is sent where an upstream failed."""

SPREAD: Final = 2.0
"""Maximum number of seconds added at random for callers that were shed."""

_LONGEST_CHAIN: Final = 8  # maximum number of causes of an exception that are examined

_rng: Final = Random()  # noqa: S311 - jitter needs no secure randomness


class Problem:
    """One problem response: status, body and headers."""

    __slots__ = ("detail", "extensions", "retry_after", "status", "title", "type")

    def __init__(
        self,
        status: int,
        title: str,
        detail: str = "",
        type: str = "about:blank",  # noqa: A002 - the name of the member
        retry_after: float | None = None,
        extensions: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a problem; `title` is the same for all of this type, `detail` is specific.

        `extensions` are further members of the body.
        """
        self.status = status
        self.title = title
        self.detail = detail
        self.type = type
        self.retry_after = retry_after
        self.extensions = extensions or {}

    def __repr__(self) -> str:
        return f"<Problem {self.status} {self.title!r}>"

    def body(self) -> bytes:
        """Return the body as JSON."""
        more = self.extensions
        if len(more) == 1 and isinstance(more.get("reason"), str):
            return _usual_body(more["reason"], self.status, self.title, self.detail, self.type)
        return _body(more, self.status, self.title, self.detail, self.type)

    def headers(self) -> dict[str, str]:
        """Return the headers of the response as text, without the length of its body."""
        return {name.decode(): value.decode() for name, value in self.raw_headers()}

    def raw_headers(self) -> Headers:
        """Return the headers of the response in ASGI form."""
        headers = [(b"content-type", b"application/problem+json")]
        if self.retry_after is not None:
            headers.append((b"retry-after", write_retry_after(self.retry_after).encode()))
        return headers

    def response(self, more: Headers, method: str | None = None) -> tuple[Headers, bytes]:
        """Return all headers, with `more` of them, and the body: none for a HEAD request."""
        body = self.body()
        length = (b"content-length", str(len(body)).encode())
        return [*self.raw_headers(), length, *more], b"" if method == "HEAD" else body


async def send_problem(
    send: Send, problem: Problem, more: Headers, *, method: str | None = None
) -> None:
    """Send `problem` with `more` headers; omit the body in the response to a HEAD request."""
    headers, body = problem.response(more, method)
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _body(extensions: Mapping[str, Any], status: int, title: str, detail: str, uri: str) -> bytes:
    members = {"type": uri, "title": title, "status": status}
    if detail:
        members["detail"] = detail
    return json.dumps({**extensions, **members}).encode()


@lru_cache(maxsize=64)
def _usual_body(reason: str, *rest: Any) -> bytes:
    """Return the body of a refusal with only a reason; cached, as it is frequent and constant."""
    return _body({"reason": reason}, *rest)


class _Kind(NamedTuple):
    """Fixed response to one kind of error."""

    status: int
    title: str
    detail: str
    type: str = "about:blank"
    spread: bool = False
    """Whether Retry-After is randomized."""


def _busy(detail: str, *, spread: bool = False) -> _Kind:
    return _Kind(503, "Temporary reduced capacity", detail, REDUCED_CAPACITY, spread=spread)


def _failed(detail: str) -> _Kind:
    return _Kind(500, "Internal server error", detail)


_OWN_LIMIT: Final = _Kind(
    429, "Quota exceeded", "Too many requests in a short time.", QUOTA_EXCEEDED
)
_LIMIT_OF_ALL: Final = _busy("The service has more requests than it accepts.", spread=True)
_IN_FLIGHT: Final = _Kind(
    409,
    "A request is outstanding for this Idempotency-Key",
    "The first request with this key is still being processed.",
)
_STORE_AWAY: Final = _busy("A store that this service needs is unavailable.")
_UPSTREAM: Final = _Kind(502, "Bad gateway", "A service that this one depends on failed.")
_UPSTREAM_LATE: Final = _Kind(
    504, "Gateway timeout", "A service that this one depends on did not answer in time."
)

_KINDS: Final[Mapping[type[errors.SeawallError], _Kind]] = {
    errors.DeadlineExceeded: _Kind(
        504, "Gateway timeout", "The deadline had passed before the work began."
    ),
    errors.TimedOut: _Kind(504, "Gateway timeout", "The work did not finish in time."),
    errors.CircuitOpen: _busy("A service that this one depends on is not called at the moment."),
    errors.RateLimited: _busy("The rate limit of a service that this one depends on is reached."),
    errors.Overloaded: _busy("The service is overloaded.", spread=True),
    errors.BulkheadFull: _busy("All slots are in use.", spread=True),
    errors.PoolExhausted: _busy("All slots are in use.", spread=True),
    errors.ChannelFull: _busy("There is no room for more work.", spread=True),
    errors.QueueFull: _busy("There is no room for more work.", spread=True),
    errors.DeferredCallsFull: _busy("There is no room for more work.", spread=True),
    errors.FifoFull: _busy("There is no room for more messages.", spread=True),
    errors.KeyInFlight: _IN_FLIGHT,
    errors.Rejected: _busy("The work was refused for now.", spread=True),
    errors.StoreUnavailable: _STORE_AWAY,
    errors.LeaseLost: _busy("Another worker took over the work."),
    errors.Contended: _busy("Others changed the same data at the same time.", spread=True),
    errors.ChannelClosed: _busy("The service accepts no more work."),
    errors.CacheMiss: _busy("No answer is stored that could replace the real one."),
    errors.WorkerDied: _failed("The worker process ended unexpectedly."),
    errors.JobLost: _Kind(409, "Conflict", "The job belongs to another worker, or has ended."),
    errors.UnknownJob: _Kind(404, "Not found", "There is no such job."),
    errors.JobExpired: _Kind(410, "Gone", "The result of this job is no longer stored."),
    errors.JobCancelled: _Kind(409, "Conflict", "The job was cancelled."),
    errors.JobFailed: _failed("The job has no result."),
    errors.AmbiguousHeader: _Kind(
        400, "Bad request", "A header is given more than once, with different values."
    ),
    errors.KeyMissing: _Kind(
        400,
        "Idempotency-Key is missing",
        "This operation needs an Idempotency-Key: a new one for each effect, the same one for each"
        " repeat.",
    ),
    errors.KeyReused: _Kind(
        422,
        "Idempotency-Key is already used",
        "This key was used with another payload: use a new key for another effect.",
    ),
    errors.RecordedFailure: _failed("This was tried before, and failed. It is not tried again."),
    errors.AnswerNotKept: _failed(
        "This was done before, and its answer was too large to be stored. It is not done again."
    ),
    errors.RecordGarbled: _failed("The stored record cannot be read, so nothing was done."),
    errors.FifoStateLost: _failed("A sender of messages must be restarted."),
    errors.NotDelivered: _UPSTREAM,
    errors.BadSignature: _Kind(403, "Forbidden", "The signature of the request is not valid."),
    errors.SeawallError: _failed("The work failed."),
}

_UPSTREAM_ERRORS: Final = frozenset(
    {
        ("httpx", "HTTPError"),
        ("httpx2", "HTTPError"),
        ("requests", "RequestException"),
        ("urllib3", "HTTPError"),
        ("aiohttp", "ClientError"),
        ("grpc", "RpcError"),
        ("openai", "APIError"),
        ("anthropic", "APIError"),
    }
)
"""Top-level package and name of its base class: recognized without importing any of them."""

_MISTAKES: Final = frozenset(
    {
        ("httpx", "InvalidURL"),  # no HTTPError, but a cause of SDKs' exceptions
        ("httpx", "LocalProtocolError"),
        ("httpx", "UnsupportedProtocol"),
        ("httpx2", "InvalidURL"),
        ("httpx2", "LocalProtocolError"),
        ("httpx2", "UnsupportedProtocol"),
        ("requests", "InvalidHeader"),
        ("requests", "InvalidJSONError"),
        ("requests", "InvalidSchema"),
        ("requests", "InvalidURL"),
        ("requests", "MissingSchema"),
        ("requests", "StreamConsumedError"),
        ("requests", "URLRequired"),
        ("urllib3", "ClosedPoolError"),
        ("urllib3", "LocationValueError"),
        ("urllib3", "TimeoutStateError"),
        ("aiohttp", "InvalidURL"),
        ("aiohttp", "NonHttpUrlClientError"),
    }
)
"""Exceptions of these packages which mean that the call itself is wrong, for any upstream."""

_NO_MISTAKES: Final = frozenset(
    {("requests", "JSONDecodeError"), ("aiohttp", "RedirectClientError")}
)
"""Subclasses of those that are nevertheless caused by the response of an upstream."""


@overload
def problem_of(error: errors.SeawallError, *, rng: Random | None = None) -> Problem: ...
@overload
def problem_of(error: BaseException, *, rng: Random | None = None) -> Problem | None: ...
def problem_of(error: BaseException, *, rng: Random | None = None) -> Problem | None:
    """Return the response for `error`; None if it comes neither from Seawall nor from an upstream.

    Return None also if the exception means that an HTTP client was called wrongly.
    """
    ours = error if isinstance(error, errors.SeawallError) else None
    if ours is None:
        if _names(error).isdisjoint(_UPSTREAM_ERRORS):
            return None
        chain = _chain_of(error)
        # A vendor's SDK may have wrapped it in an exception of its own.
        ours = next((cause for cause in chain if isinstance(cause, errors.SeawallError)), None)
        if ours is None:
            if any(
                not names.isdisjoint(_MISTAKES) and names.isdisjoint(_NO_MISTAKES)
                for names in map(_names, chain)
            ):
                return None
            kind = _UPSTREAM_LATE if _is_late(error) else _UPSTREAM
            return Problem(kind.status, kind.title, kind.detail, extensions={"reason": UPSTREAM})
    kind = _kind_of(ours)
    extensions: dict[str, Any] = {"reason": ours.reason}
    if kind is _OWN_LIMIT and isinstance(ours, errors.RateLimited):
        violated = ours.violated or (ours.limit,)
        extensions["violated-policies"] = [name for name in violated if name]
    wait = _wait(ours, kind, rng or _rng)
    return Problem(kind.status, kind.title, kind.detail, kind.type, wait, extensions)


class ClientGone(BaseException):
    """Signal to gates that the client has disconnected: like a cancellation, not a failure."""


def failure_in(error: BaseException) -> BaseException | None:
    """Return `error` if it is a failure of the app; None if its response is below 500."""
    problem = problem_of(error)
    return error if problem is None or problem.status >= FAILURE else None


def _kind_of(error: errors.SeawallError) -> _Kind:
    if isinstance(error, errors.RateLimited):
        if error.own_limit:
            return _OWN_LIMIT
        if error.violated:
            return _LIMIT_OF_ALL
        if error.reason == errors.StoreUnavailable.reason:
            return _STORE_AWAY
    return next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)


def _wait(error: errors.SeawallError, kind: _Kind, rng: Random) -> float | None:
    """Return the seconds after which a retry may help; None if the status has no Retry-After.

    A limit of the edge without a time is one that the request can never pass.
    """
    if kind.status not in (429, 503) and kind is not _IN_FLIGHT:
        return None
    known = getattr(error, "retry_after", None)
    if known is None and kind in (_OWN_LIMIT, _LIMIT_OF_ALL):
        return None
    usable = isinstance(known, (int, float)) and 0 <= known < float("inf")
    wait = max(float(known), 0.001) if usable and known is not None else UNKNOWN_WAIT
    return wait + SPREAD * rng.random() if kind.spread else wait


# Exceptions of other packages


def _names(error: BaseException) -> set[tuple[str, str]]:
    return {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(error).__mro__}


def _chain_of(error: BaseException) -> list[BaseException]:
    chain = [error]
    while len(chain) < _LONGEST_CHAIN and (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    return chain


def _is_late(error: BaseException) -> bool:
    names = _names(error)
    if ("urllib3", "NewConnectionError") in names:  # refused, though it derives from a timeout
        return False
    if isinstance(error, TimeoutError) or any("Timeout" in name for _, name in names):
        return True
    code = getattr(error, "code", None)  # a method of gRPC's exceptions
    return callable(code) and getattr(code(), "name", "") == "DEADLINE_EXCEEDED"
