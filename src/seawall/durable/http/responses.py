"""Which responses are stored, what is stored of them, and the middleware's own responses."""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from typing import Any, Final, NamedTuple

from seawall.durable.database.driver_errors import TablesMissing
from seawall.errors import (
    KeyInFlight,
    KeyMissing,
    KeyReused,
    RecordGarbled,
    SeawallError,
    StoreUnavailable,
)
from seawall.models.idempotency import Answer, Garbled, Headers, headers_fit, storable
from seawall.web.asgi_types import Send
from seawall.web.problems import FAILURE, Problem, problem_of
from seawall.wire.idempotency import REPLAYED_HEADER

REPLAYED: Final = (REPLAYED_HEADER.lower().encode(), b"true")
BODY_DROPPED: Final = (b"idempotent-body", b"dropped")

NOTHING_DONE: Final = frozenset(
    {307, 308}  # to be sent again elsewhere, with the same key
    | {400, 401, 403, 404, 405, 406, 408, 409, 411, 412, 413, 414, 415, 417, 421, 422}
    | {425, 426, 428, 429, 431, 503}
)
"""Statuses which mean that nothing was done. By default they free the key."""

_LENGTH: Final = b"content-length"
_OF_ITS_MESSAGE: Final = frozenset({b"date"})
"""A replay is a new message: the server gives it its own date."""

_OF_A_TOMBSTONE: Final = frozenset(
    {b"content-location", b"content-type", b"etag", b"last-modified", b"location"}
)
"""The headers that help a client find the result if the response is too large to store."""

_MOST_OF_A_TOMBSTONE: Final = 4096
"""Maximum total bytes of these headers."""

_NO_CONTENT: Final = 204
_FINAL: Final = range(200, 600)
_NAME: Final = re.compile(rb"[!-9;-~]+")
"""Visible ASCII without a colon."""
_LINE_END: Final = re.compile(rb"[\r\n\0]")


class Reply(NamedTuple):
    """A response: an ASGI app, or a Starlette response by `response()`."""

    status: int
    headers: Headers
    body: bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        """Send the response."""
        headers = list(self.headers)
        if self.status != _NO_CONTENT:  # a 204 has no content-length (RFC 9110, 8.6)
            headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        body = b"" if scope.get("method") == "HEAD" else self.body
        await send({"type": "http.response.body", "body": body})

    def response(self) -> Any:
        """Return the response for a FastAPI or Starlette route."""
        from starlette.responses import Response

        response = Response(self.body, self.status)
        own = [(name, value) for name, value in self.headers if name != b"content-length"]
        length = (b"content-length", str(len(self.body)).encode())
        response.raw_headers = [*own, length]
        return response


class RequestOutcome(NamedTuple):
    """How the execution of a request has ended; the argument of `keep=`."""

    status: int
    """The status of the response. For an exception, the status that is sent to the client."""
    headers: Headers
    error: Exception | None = None
    """The exception of the app, if it did not respond."""
    rolled_back: bool = False
    """Whether the app had completed the request in its own transaction, which was rolled back."""


Keep = Callable[[RequestOutcome], bool | None]


def keeps(outcome: RequestOutcome) -> bool:
    """Return whether a response is stored by default.

    A failure is stored, because its effects are unknown. It frees the key only if certainly nothing
    was done: the transaction of the effect was rolled back, or the status says so.
    """
    if outcome.rolled_back and outcome.status >= FAILURE:
        return False
    return outcome.status not in NOTHING_DONE


def recorded(status: int, headers: Headers, body: bytes | None, never: frozenset[bytes]) -> Answer:
    """Return what is stored of a response, without login or connection headers and `never`.

    If there are more headers than a record holds, or the body was too large (None), return a
    tombstone.
    """
    kept = _storable(headers, never)
    if body is None or not headers_fit(kept):
        return tombstone(status, kept)
    return Answer(status, kept, body)


def tombstone(status: int, headers: Headers) -> Answer:
    """Return what is stored of a response that is too large: that it was done, and where to look.

    It is a response of its own, without a body, and a header says so.
    """
    left, kept = _MOST_OF_A_TOMBSTONE, []
    for name, value in headers:
        if name.lower() in _OF_A_TOMBSTONE and len(name) + len(value) <= left:
            left -= len(name) + len(value)
            kept.append((name, value))
    if status != _NO_CONTENT:
        kept.append((_LENGTH, b"0"))
    return Answer(status, [*kept, BODY_DROPPED], b"")


def is_tombstone(answer: Answer) -> bool:
    """Return whether the body of the response was dropped."""
    return BODY_DROPPED in answer.headers


def _storable(headers: Headers, never: frozenset[bytes]) -> Headers:
    left_out = never | _OF_ITS_MESSAGE
    return [pair for pair in storable(headers) if pair[0].lower() not in left_out]


async def send_stored(
    send: Send, answer: Answer, never: frozenset[bytes], *, replayed: bool
) -> None:
    """Send the stored response; raise `Garbled` if no server could send it."""
    if not answer.kept:
        answer = tombstone(answer.status, answer.headers)
    status, headers, body = _sendable(answer)
    # Filter again: write access to the table must not be enough to log a client in.
    sent = [*_storable(headers, never), *([REPLAYED] if replayed else ())]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


def _sendable(answer: Answer) -> tuple[int, Headers, bytes]:
    status, headers, body, _ = answer
    if not isinstance(status, int) or not isinstance(body, bytes):
        raise Garbled("no answer")
    try:
        check_sendable(status, headers)
    except ValueError:
        # the message is logged, so it contains nothing of the answer
        raise Garbled("no answer that could be sent") from None
    lengths = {value for name, value in headers if name.lower() == _LENGTH}
    if lengths - {str(len(body)).encode()}:
        raise Garbled("a body that is not as long as it says")
    return status, headers, body


def check_sendable(status: int, headers: Headers) -> None:
    """Raise `ValueError` unless a server can send this, now and from the record."""
    if status not in _FINAL:
        raise ValueError(f"status={status!r}: write that of a final answer, such as 201")
    for name, value in headers:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"headers: {name!r} is no name: write visible ASCII, without space and colon"
            )
        if _LINE_END.search(value):
            raise ValueError(f"headers: {name!r} has a line's end in it: leave that out")


def failure_of(error: BaseException | None) -> tuple[int, Headers, bytes]:
    """Return the response to a failed request, which is also the response to its repeats.

    So it never suggests that a retry may help.
    """
    problem = None if error is None else problem_of(error)
    if problem is None or problem.status < FAILURE or problem.retry_after is not None:
        problem = Problem(
            500, "Internal server error", "The work failed.", extensions={"reason": "failed"}
        )
    body = problem.body()
    return problem.status, [*problem.raw_headers(), (_LENGTH, str(len(body)).encode())], body


# The middleware's own responses


def _problem_of(error: SeawallError) -> Problem:
    """Return the usual problem document of the error, the same as for a handler that raises it."""
    problem = problem_of(error)
    assert problem is not None  # noqa: S101 - each error of Seawall has a problem document
    return problem


def _problem(status: int, title: str, detail: str, reason: str) -> Problem:
    return Problem(status, title, detail, extensions={"reason": reason})


KEY_MISSING: Final = _problem_of(KeyMissing())
KEY_MALFORMED: Final = _problem(
    400,
    "Idempotency-Key is malformed",
    "Send the header once, with 1 to 255 visible ASCII characters, such as a UUID.",
    "key_malformed",
)
NOBODY: Final = _problem(
    403, "Forbidden", "An Idempotency-Key is of no use to somebody unknown.", "scope_unknown"
)
REUSED: Final = _problem_of(KeyReused())
TOO_LARGE: Final = _problem(413, "Content too large", "The body is too large.", "body_too_large")
UNREADABLE: Final = _problem_of(RecordGarbled())
NOT_DONE: Final = _problem(
    500,
    "Internal server error",
    "The work failed, and its key is free: the same request may be sent again with it.",
    "not_done",
)
NOT_SET_UP: Final = _problem(
    500,
    "Internal server error",
    "This service is not set up: it has nowhere to keep records.",
    "tables_missing",
)


def in_flight(wait: float) -> Problem:
    """Return the response to a repeat of a request that is in flight."""
    return _problem_of(KeyInFlight("at work", retry_after=wait))


def store_away(error: Exception, wait: float) -> Problem:
    """Return the response if no record can be made: no request runs without one.

    If the tables are missing, there is no `Retry-After`: clients would retry forever.
    """
    if isinstance(error, TablesMissing):
        return NOT_SET_UP
    problem = _problem_of(StoreUnavailable())
    problem.retry_after = wait
    return problem
