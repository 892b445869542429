"""Idempotency keys: how a record is identified, and the answer to a repeated request.

A record is identified by scope (whose), operation (what) and key (which). The first request runs. A
repeated request gets the stored answer, byte for byte; one with a different payload is refused.
While the first is running, the others receive the remaining time of its lease. After the lease they
may take the record over, and the epoch distinguishes the old owner from the new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

LONGEST_NAME: Final = 512  # maximum size of a scope or an operation in bytes
MOST_HEADERS: Final = 256
MOST_HEADER_BYTES: Final = 64 * 1024
STATUSES: Final = range(100, 600)
SHORTEST_PAUSE: Final = 0.1  # minimum number of seconds after which to ask again

Headers = list[tuple[bytes, bytes]]

NEVER_STORED: Final = frozenset(
    {b"authorization", b"authentication-info", b"cookie", b"set-cookie", b"www-authenticate"}
    | {b"proxy-authenticate", b"proxy-authentication-info", b"proxy-authorization"}
    | {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"}
    | {b"transfer-encoding"}
)
"""Headers that belong to one connection or one login, never to an effect."""

_from_json: Final = json.JSONDecoder().decode
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_SECOND: Final = 1_000_000


class RecordState(IntEnum):
    """State of a record."""

    PENDING = 0
    SUCCEEDED = 1
    FAILED = 2


class Form(IntEnum):
    """Kind of a stored value."""

    NOTHING = 0
    BYTES = 1
    JSON = 2
    HTTP = 3


class Garbled(ValueError):
    """The contents of a record cannot have been written by this library."""


class Answer(NamedTuple):
    """The answer to the first request. `kept` is False if the body was too large to store."""

    status: int
    headers: Headers
    body: bytes
    kept: bool = True


class KeyClaim(NamedTuple):
    """The right to complete a record, valid until another request takes it over."""

    scope: str
    operation: str
    key_hash: bytes
    owner: str
    epoch: int
    taken_over: bool = False
    """Whether another request had started and did not finish in time."""


class Fresh(NamedTuple):
    """First request: run the operation, then complete the claim (or abandon it)."""

    claim: KeyClaim


class Replay(NamedTuple):
    """Repeated request: the operation was done before, with this answer."""

    answer: Answer
    failed: bool = False
    form: Form = Form.HTTP

    @property
    def value(self) -> Any:
        """Return the stored value as it was given: JSON values, bytes, an Answer or None."""
        if self.form is Form.JSON and self.answer.kept:
            return json_of(self.answer.body)
        if self.form is Form.BYTES and self.answer.kept:
            return self.answer.body
        return None if self.form is not Form.HTTP else self.answer


class Pending(NamedTuple):
    """Another request is running. Its lease ends in `retry_after` seconds."""

    retry_after: float


class Mismatch(NamedTuple):
    """The key was used before, with a different payload."""


KeyState = Fresh | Replay | Pending | Mismatch
"""What a key means for a request: run it, repeat the answer, wait, or refuse it."""


class Record(NamedTuple):
    """A stored row, and the database's time when it was read. Times are whole microseconds."""

    state: Any
    fingerprint: Any
    form: Any
    status: Any
    headers: Any
    body: Any
    kept: Any
    lease_until: Any
    expires_at: Any
    now: Any


# Identity of a record


def check_key(key: object) -> str:
    """Return `key` if it is valid, or raise."""
    if not isinstance(key, str):
        raise TypeError(f"key={key!r}: write text, 1 to 255 visible ASCII characters")
    if not _KEY.fullmatch(key):
        raise ValueError("key: write 1 to 255 visible ASCII characters, such as a UUID")
    return key


def check_name(what: str, name: object) -> str:
    """Return a valid scope or operation, or raise."""
    if not isinstance(name, str):
        raise TypeError(f"{what}={name!r}: write text, such as {what}='{_EXAMPLES[what]}'")
    return _checked_name(what, name)


@lru_cache(maxsize=1024)  # there are few operations, and they repeat
def _checked_name(what: str, name: str) -> str:
    if not name:
        raise ValueError(f"{what}='': write whose it is, such as {what}='{_EXAMPLES[what]}'")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what}={name!r}: write text without lone surrogates") from None
    if "\0" in name or length > LONGEST_NAME:
        raise ValueError(f"{what}: write at most {LONGEST_NAME} bytes, without NUL")
    return name


_EXAMPLES: Final = {"scope": "tenant 7", "operation": "POST /orders"}


def key_digest(scope: str, operation: str, key: str) -> bytes:
    """Return the digest that is stored in place of a key. It does not reveal the key."""
    whole = _begun(scope, operation) + _sized(key.encode())
    return blake2b(whole, digest_size=32, person=b"seawall key").digest()


@lru_cache(maxsize=1024)
def _begun(scope: str, operation: str) -> bytes:
    """Return the part of the digest's input that precedes the key."""
    return _sized(scope.encode()) + _sized(operation.encode())


def _sized(part: bytes) -> bytes:
    """Return `part` after its size, so that ("a", "b") and ("ab", "") are different names."""
    return len(part).to_bytes(8, "big") + part


def fingerprint_of(*parts: bytes | bytearray | memoryview | str) -> bytes:
    """Return the digest of a payload. ("a", "b") and ("ab", "") have different ones."""
    made = blake2b(digest_size=32, person=b"seawall payload")
    for part in parts:
        made.update(_sized(part if type(part) is bytes else _bytes_of(part)))
    return made.digest()


def _bytes_of(part: object) -> bytes:
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    if isinstance(part, (bytes, bytearray, memoryview)):
        return bytes(part)
    raise TypeError(f"{type(part).__name__} in a fingerprint: pass bytes or text")


# Result of a request


def decide(record: Record | None, fingerprint: bytes) -> KeyState | Literal["free"]:
    """Return the result of a request for `record`, or "free" if it may be claimed.

    Empty fingerprints are not compared. An expired record counts as none, whatever it contains.
    """
    if record is None:
        return "free"
    now = _whole(record.now)
    if _whole(record.expires_at) <= now:
        return "free"
    state = _state(record.state)
    if not same_payload(record.fingerprint, fingerprint):
        return Mismatch()
    if state is not RecordState.PENDING:
        return replay_of(record)
    rest = _whole(record.lease_until) - now
    return Pending(max(rest / _SECOND, SHORTEST_PAUSE)) if rest > 0 else "free"


def same_payload(stored: object, given: bytes) -> bool:
    """Return whether two payloads match, or one of them is not to be compared."""
    if not isinstance(stored, bytes):
        raise Garbled("a fingerprint that is no bytes")
    return not stored or not given or stored == given


def replay_of(record: Record) -> Replay:
    """Return the stored answer of a record. Raise `Garbled` if it is invalid."""
    try:
        form = Form(record.form if record.form is not None else 0)
    except ValueError:
        raise Garbled(f"a form that is not known: {record.form!r}") from None
    status = 0 if record.status is None else _whole(record.status)
    if form is Form.HTTP and status not in STATUSES:
        raise Garbled(f"a status that is none: {status}")
    body = b"" if record.body is None else record.body
    if not isinstance(body, bytes):
        raise Garbled("a body that is no bytes")
    kept = record.kept is None or bool(record.kept)
    answer = Answer(status, headers_of(record.headers), body, kept)
    return Replay(answer, _state(record.state) is RecordState.FAILED, form)


def _state(said: object) -> RecordState:
    try:
        return RecordState(said)  # type: ignore[arg-type]
    except ValueError:
        raise Garbled(f"a state that is not known: {said!r}") from None


def _whole(said: object) -> int:
    if isinstance(said, bool) or not isinstance(said, int):
        raise Garbled(f"no whole number: {said!r}")
    return said


# Stored form of an answer


def check_answer(answer: Answer) -> None:
    """Raise if the answer could not be replayed as it is. Reading applies the same checks."""
    status, headers, body = answer[:3]
    if isinstance(status, bool) or not isinstance(status, int) or status not in STATUSES:
        raise ValueError(f"status={status!r}: write a status of HTTP's, such as 201")
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise TypeError(f"body: write bytes, not {type(body).__name__}")
    for pair in headers:
        match pair:
            case (bytes(name), bytes(value)):
                if any(byte in part for part in (name, value) for byte in b"\r\n\0"):
                    raise ValueError(f"headers: {name!r} has a line's end in it")
            case _:
                raise TypeError(f"headers: write pairs of bytes, not {pair!r}")


def storable(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that may be stored, without those of a login or a connection."""
    given = [(bytes(name), bytes(value)) for name, value in headers]
    values = (value for name, value in given if name.lower() == b"connection")
    named = {word.strip().lower() for value in values for word in value.split(b",")}
    return [pair for pair in given if pair[0].lower() not in NEVER_STORED | named]


def headers_text(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return headers in stored form: their bytes as Latin-1, in JSON."""
    return json.dumps(
        [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers],
        separators=(",", ":"),
    )


def headers_of(text: object) -> Headers:
    """Return stored headers, or raise `Garbled`."""
    if text is None:
        return []
    if not isinstance(text, str) or len(text) > 6 * MOST_HEADER_BYTES:
        raise Garbled("headers that are no text, or too long a one")
    said = json_of(text)
    if not isinstance(said, list) or len(said) > MOST_HEADERS:
        raise Garbled("headers that are no list, or too long a one")
    headers = []
    for pair in said:
        match pair:
            case [str(name), str(value)]:
                headers.append((_latin(name), _latin(value)))
            case _:
                raise Garbled("a header that is no pair of texts")
    return headers


def _latin(text: str) -> bytes:
    try:
        data = text.encode("latin-1")
    except UnicodeEncodeError:
        raise Garbled("a header with letters that none has") from None
    if any(byte in data for byte in b"\r\n\0"):
        raise Garbled("a header with a line's end in it")
    return data


def json_of(text: str | bytes) -> Any:
    """Return the parsed JSON, or raise `Garbled`."""
    try:
        return _from_json(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        raise Garbled("no JSON") from None


def headers_fit(headers: Headers) -> bool:
    """Return whether the headers are few and small enough to be stored."""
    size = sum(len(name) + len(value) for name, value in headers)
    return len(headers) <= MOST_HEADERS and size <= MOST_HEADER_BYTES
