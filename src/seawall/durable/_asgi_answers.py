"""What an HTTP answer leaves in a record, and what is told where there is none of the app's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from seawall.models.idempotency import Answer, Garbled, Headers, headers_fit, storable
from seawall.web.problems import Problem, problem_of
from seawall.web.sending import FAILURE, Send

REPLAYED: Final = (b"idempotent-replayed", b"true")
BODY_DROPPED: Final = (b"idempotent-body", b"dropped")

NOTHING_DONE: Final = frozenset(
    {307, 308}  # to be sent again elsewhere, and the key with it
    | {400, 401, 403, 404, 405, 406, 408, 409, 411, 412, 413, 414, 415, 417, 421, 422}
    | {425, 426, 428, 429, 431}
)
"""Statuses that say that nothing was done: they are not kept, and the next one runs."""

_BUSY: Final = 503
_RETRY_AFTER: Final = b"retry-after"
_LENGTH: Final = b"content-length"
_OF_ITS_MESSAGE: Final = frozenset({b"date"})
"""A replay is another message: the server gives it a date of its own."""

_OF_THE_BODY: Final = frozenset({_LENGTH, b"etag", b"digest", b"repr-digest", b"accept-ranges"})


def keeps(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether an answer is kept: every one, unless it says that nothing was done.

    A 503 says so by its Retry-After, as all refusals of Seawall's do.
    """
    if status == _BUSY:
        return all(name.lower() != _RETRY_AFTER for name, _ in headers)
    return status not in NOTHING_DONE


def recorded(
    status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, never: frozenset[bytes]
) -> Answer:
    """Return what is kept of an answer; nothing of a login or a connection, and none of `never`.

    More headers than a record holds are as a body that is too large: the record is without.
    """
    left_out = never | _OF_ITS_MESSAGE
    kept = [pair for pair in storable(headers) if pair[0].lower() not in left_out]
    return Answer(status, kept, body) if headers_fit(kept) else Answer(status, [], b"", kept=False)


async def send_replay(send: Send, answer: Answer, never: frozenset[bytes]) -> None:
    """Answer as the first was answered; raise `Garbled` where no server could send that."""
    status, headers, body = _sendable(answer)
    left_out = never | _OF_ITS_MESSAGE
    # Once more: who can write into the table must not log anybody in.
    told = [pair for pair in storable(headers) if pair[0].lower() not in left_out]
    if not answer.kept:
        body = b""
        told = [pair for pair in told if not _is_of_the_body(pair[0].lower())]
        told += [(_LENGTH, b"0"), BODY_DROPPED]
    start = {"type": "http.response.start", "status": status, "headers": [*told, REPLAYED]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _sendable(answer: Answer) -> tuple[int, Headers, bytes]:
    status, headers, body, kept = answer
    if not isinstance(status, int) or not 200 <= status <= 599 or not isinstance(body, bytes):  # noqa: PLR2004 - final ones
        raise Garbled("no answer")
    lengths = {value for name, value in headers if name.lower() == _LENGTH}
    if kept and body and lengths - {str(len(body)).encode()}:
        raise Garbled("a body that is not as long as it says")
    for name, value in headers:
        if not name or any(byte <= 0x20 or byte >= 0x7F or byte == 0x3A for byte in name):  # noqa: PLR2004 - visible, no colon
            raise Garbled("a header without a name that could be one")
        if any(byte in value for byte in b"\r\n\0"):
            raise Garbled("a header with a line's end in it")
    return status, headers, body


def _is_of_the_body(name: bytes) -> bool:
    return name in _OF_THE_BODY or (name.startswith(b"content-") and name != b"content-location")


def failure_of(error: BaseException | None) -> tuple[int, Headers, bytes]:
    """Return the answer to who asked for what then failed."""
    problem = None if error is None else problem_of(error)
    if problem is None or problem.status < FAILURE:
        problem = Problem(
            500, "Internal server error", "The work failed.", extensions={"reason": "failed"}
        )
    body = problem.body()
    return problem.status, [*problem.headers(), (_LENGTH, str(len(body)).encode())], body


# What is told instead


def _told(status: int, title: str, detail: str, reason: str, wait: float | None = None) -> Problem:
    extensions: dict[str, Any] = {"reason": reason}
    return Problem(status, title, detail, retry_after=wait, extensions=extensions)


KEY_MISSING: Final = _told(
    400,
    "Idempotency-Key is missing",
    "This operation needs an Idempotency-Key header: a fresh one for each effect, the same one"
    " whenever that is asked for again.",
    "key_missing",
)
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
REUSED: Final = _told(
    422,
    "Idempotency-Key is already used",
    "This key was used with another payload: take a fresh key for another effect.",
    "key_reused",
)
TOO_LARGE: Final = _told(413, "Content too large", "The body is too large.", "body_too_large")
UNREADABLE: Final = _told(
    500,
    "Internal server error",
    "This was done before, and the stored answer cannot be read. It is not done again.",
    "record_garbled",
)


def in_flight(wait: float) -> Problem:
    """Return what is told to who asks for what is under way."""
    return _told(
        409,
        "A request is outstanding for this Idempotency-Key",
        "The first request with this key is still at work.",
        "key_in_flight",
        wait,
    )


def store_away(wait: float) -> Problem:
    """Return what is told where no record can be made: nothing is done without one."""
    return _told(
        503, "Service unavailable", "A store that this service needs is away.", "store_away", wait
    )
