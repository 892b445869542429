"""Which answers are kept, what is stored of them, and the answers that are not the app's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from seawall.durable._missing_tables import TablesMissing
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
from seawall.web.edge.sending import FAILURE
from seawall.web.problems import Problem, problem_of
from seawall.wire.idempotency import REPLAYED_HEADER

REPLAYED: Final = (REPLAYED_HEADER.lower().encode(), b"true")
BODY_DROPPED: Final = (b"idempotent-body", b"dropped")

NOTHING_DONE: Final = frozenset(
    {307, 308}  # to be sent again elsewhere, and the key with it
    | {400, 401, 403, 404, 405, 406, 408, 409, 411, 412, 413, 414, 415, 417, 421, 422}
    | {425, 426, 428, 429, 431, 503}
)
"""Statuses which say that nothing was done. By default they free the key."""

_LENGTH: Final = b"content-length"
_OF_ITS_MESSAGE: Final = frozenset({b"date"})
"""A replay is another message: the server gives it a date of its own."""

_OF_A_TOMBSTONE: Final = frozenset(
    {b"content-location", b"content-type", b"etag", b"last-modified", b"location"}
)
"""What a client needs to find what was done, where the answer itself is too large to be kept."""

_MOST_OF_A_TOMBSTONE: Final = 4096
"""Bytes of them."""

_NO_CONTENT: Final = 204
_FINAL: Final = range(200, 600)
_NAME: Final = re.compile(rb"[!-9;-~]+")
"""Visible, and no colon."""
_LINE_END: Final = re.compile(rb"[\r\n\0]")


class RequestOutcome(NamedTuple):
    """How a request that was carried out has ended; the argument of `keep=`."""

    status: int
    """The status of the answer. Of an error, the one that its client is sent."""
    headers: Headers
    error: Exception | None = None
    """What the app raised, if it did not answer."""
    rolled_back: bool = False
    """Whether the app had completed it in its own transaction, and that was rolled back."""


Keep = Callable[[RequestOutcome], bool | None]


def keeps(outcome: RequestOutcome) -> bool:
    """Tell whether an answer is kept by default.

    A failure is kept, since nobody knows what was done before it. It frees the key only where that
    is certain: the transaction of the effect was rolled back, or the status says so.
    """
    if outcome.rolled_back and outcome.status >= FAILURE:
        return False
    return outcome.status not in NOTHING_DONE


def recorded(status: int, headers: Headers, body: bytes | None, never: frozenset[bytes]) -> Answer:
    """Return what is kept of an answer; nothing of a login or a connection, and none of `never`.

    A tombstone, where there are more headers than a record holds, or more of a body: then None.
    """
    kept = _storable(headers, never)
    if body is None or not headers_fit(kept):
        return tombstone(status, kept)
    return Answer(status, kept, body)


def tombstone(status: int, headers: Headers) -> Answer:
    """Return what is kept of an answer that is too large: that it was done, and where to look.

    It is an answer of its own: without a body, and it says so.
    """
    left, told = _MOST_OF_A_TOMBSTONE, []
    for name, value in headers:
        if name.lower() in _OF_A_TOMBSTONE and len(name) + len(value) <= left:
            left -= len(name) + len(value)
            told.append((name, value))
    if status != _NO_CONTENT:
        told.append((_LENGTH, b"0"))
    return Answer(status, [*told, BODY_DROPPED], b"")


def is_tombstone(answer: Answer) -> bool:
    """Tell whether more was answered than is kept."""
    return BODY_DROPPED in answer.headers


def _storable(headers: Headers, never: frozenset[bytes]) -> Headers:
    left_out = never | _OF_ITS_MESSAGE
    return [pair for pair in storable(headers) if pair[0].lower() not in left_out]


async def send_stored(
    send: Send, answer: Answer, never: frozenset[bytes], *, replayed: bool
) -> None:
    """Answer as the first was answered; raise `Garbled` where no server could send that."""
    if not answer.kept:
        answer = tombstone(answer.status, answer.headers)
    status, headers, body = _sendable(answer)
    # Once more: who can write into the table must not log anybody in.
    told = [*_storable(headers, never), *([REPLAYED] if replayed else ())]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


def _sendable(answer: Answer) -> tuple[int, Headers, bytes]:
    status, headers, body, _ = answer
    if not isinstance(status, int) or not isinstance(body, bytes):
        raise Garbled("no answer")
    try:
        check_sendable(status, headers)
    except ValueError:
        raise Garbled("no answer that could be sent") from None  # it is logged: nothing of it
    lengths = {value for name, value in headers if name.lower() == _LENGTH}
    if lengths - {str(len(body)).encode()}:
        raise Garbled("a body that is not as long as it says")
    return status, headers, body


def check_sendable(status: int, headers: Headers) -> None:
    """Raise `ValueError` unless a server could send that, now and from the record."""
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
    """Return the answer to who asked for what then failed, now and whenever it is asked again.

    So it says to nobody that asking again may help.
    """
    problem = None if error is None else problem_of(error)
    if problem is None or problem.status < FAILURE or problem.retry_after is not None:
        problem = Problem(
            500, "Internal server error", "The work failed.", extensions={"reason": "failed"}
        )
    body = problem.body()
    return problem.status, [*problem.raw_headers(), (_LENGTH, str(len(body)).encode())], body


# What is told instead


def _told_of(error: SeawallError) -> Problem:
    """Return what everybody is told of it, here and where a handler raises it."""
    problem = problem_of(error)
    assert problem is not None  # noqa: S101 - of all errors of Seawall something is told
    return problem


def _told(status: int, title: str, detail: str, reason: str) -> Problem:
    return Problem(status, title, detail, extensions={"reason": reason})


KEY_MISSING: Final = _told_of(KeyMissing())
KEY_MALFORMED: Final = _told(
    400,
    "Idempotency-Key is malformed",
    "Send the header once, with 1 to 255 visible ASCII characters, such as a UUID.",
    "key_malformed",
)
NOBODY: Final = _told(
    403,
    "Forbidden",
    "An Idempotency-Key is of no use to somebody unknown.",
    "scope_unknown",
)
REUSED: Final = _told_of(KeyReused())
TOO_LARGE: Final = _told(413, "Content too large", "The body is too large.", "body_too_large")
UNREADABLE: Final = _told_of(RecordGarbled())
NOT_DONE: Final = _told(
    500,
    "Internal server error",
    "The work failed, and its key is free: the same request may be sent again with it.",
    "not_done",
)
NOT_SET_UP: Final = _told(
    500,
    "Internal server error",
    "This service is not set up: it has nowhere to keep records.",
    "tables_missing",
)


def in_flight(wait: float) -> Problem:
    """Return what is told to who asks for what is under way."""
    return _told_of(KeyInFlight("at work", retry_after=wait))


def store_away(error: Exception, wait: float) -> Problem:
    """Return what is told where no record can be made: nothing is done without one.

    Who was told to come again after `wait` would come for ever, where the tables were never made.
    """
    if isinstance(error, TablesMissing):
        return NOT_SET_UP
    problem = _told_of(StoreUnavailable())
    problem.retry_after = wait
    return problem
