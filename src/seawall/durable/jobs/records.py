"""Records of jobs, and how they are stored."""

from __future__ import annotations

import re
from hashlib import blake2b
from json import dumps
from typing import Any, Final, NamedTuple

from seawall._failures import report_of, split_report
from seawall._redaction import safe_text
from seawall.errors import RecordGarbled
from seawall.jobs.encoding import decode, encode
from seawall.models.durable_jobs import ENDED, STATES, State

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"

LONGEST_NAME: Final = 255
LONGEST_TEXT: Final = 2_000
"""Maximum stored characters of an error or a progress message."""

_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


class Job(NamedTuple):
    """The state of a job. Times are seconds since 1970 by the database's clock."""

    id: str
    scope: str
    kind: str
    state: State
    priority: int
    attempts: int
    max_attempts: int
    cancelling: bool
    """Whether it is being cancelled: a running job continues until its worker learns of it."""
    progress: float
    """From 0 to 1, as its worker reports it."""
    message: str
    body: bytes | None
    """The result in its stored form."""
    content_type: str | None
    error: str
    """Why the last attempt failed: exception type and message, on one line."""
    created_at: float
    started_at: float | None
    ended_at: float | None
    expires_at: float | None
    due_at: float
    """When it may be started; for a running job, when its lease expires."""
    age: float
    """Seconds from the submission until it was read."""
    is_new: bool = False
    """Whether this call submitted it: False if an earlier call with the same key did."""
    traceback: str = ""
    """Traceback of `error`, redacted and shortened, for operators; empty if there is none."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in ENDED

    @property
    def result(self) -> Any:
        """The result: the value if it is JSON, else the bytes; None if there is none."""
        if self.body is None or self.content_type != JSON:
            return self.body
        try:
            return decode(self.body)
        except ValueError as error:
            raise RecordGarbled(f"job {self.id}: its result is no JSON ({error})") from None

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.kind} {self.state}, attempt {self.attempts}>"


# Decoding


def job_of(row: tuple[Any, ...], *, is_new: bool = False) -> Job:
    """Return the job of a row; raise if the row is invalid."""
    (id_, scope, kind, state, priority, attempts, most, cancelling, progress, message, *rest) = row
    (body, content_type, error, created, started, ended, expires, due, _fingerprint, now) = rest
    texts = (id_, scope, kind, state, message, error)
    numbers = (priority, attempts, most, cancelling, created, due, now)
    moments = (started, ended, expires)
    if not (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) for number in numbers)
        and all(moment is None or isinstance(moment, int) for moment in moments)
        and isinstance(progress, (int, float))
        and state in STATES
        and (body is None or isinstance(body, (bytes, memoryview)))
        and (content_type is None or content_type in (JSON, BYTES))
    ):
        raise RecordGarbled("what is stored of a job cannot be read")
    error, trace = split_report(error)
    expired = expires is not None and expires <= now
    seconds = (None if moment is None else moment / 1e6 for moment in (created, *moments, due))
    share = min(max(float(progress), 0.0), 1.0)
    return Job._make(
        [
            *(id_, scope, kind, "expired" if expired else state, priority, attempts, most),
            *(bool(cancelling), share, message, None if body is None else bytes(body)),
            *(content_type, error, *seconds, max(0.0, (now - created) / 1e6), is_new, trace),
        ]
    )


def claimed_payload(id_: str, payload: Any) -> Any:
    """Return the decoded payload of a claimed job; a `RecordGarbled` if it cannot be read."""
    try:
        return decode(payload.encode())
    except (ValueError, AttributeError):
        return RecordGarbled(f"job {id_}: its payload cannot be read")


# Encoding


def is_id(text: object) -> bool:
    """Return whether `text` has the form of a job id."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def name_of(what: str, value: object) -> str:
    """Return a valid scope or kind, or raise an error that says what to write instead."""
    if not isinstance(value, str):
        raise TypeError(f"{what}={value!r}: write text, such as {what}='acme'")
    if not value or len(value) > LONGEST_NAME or "\0" in value:
        raise ValueError(f"{what} is to have 1 to {LONGEST_NAME} characters, and no NUL")
    value.encode()  # raises ValueError for a lone surrogate
    return value


def key_digest(key: str) -> bytes:
    """Return the stored digest of a key: the key itself is not stored."""
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise ValueError("key: write 1 to 255 visible ASCII characters, such as a UUID")
    return blake2b(key.encode(), digest_size=32, person=b"seawall job key").digest()


def payload_of(value: Any, limit: int) -> tuple[str, bytes]:
    """Return the payload as JSON, and its fingerprint, which ignores the order of members."""
    text = encode("payload", value, limit).decode()
    ordered = dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return text, blake2b(ordered, digest_size=32, person=b"seawall job body").digest()


class StoredResult(NamedTuple):
    """A result in its stored form."""

    body: bytes | None
    content_type: str | None


def result_of(value: Any, limit: int) -> StoredResult:
    """Return a result in its stored form, or raise."""
    if isinstance(value, StoredResult):
        return value
    if value is None:
        return StoredResult(None, None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if len(data) > limit:
            raise ValueError(f"the result has {len(data)} bytes, and {limit} are allowed")
        return StoredResult(data, BYTES)
    return StoredResult(encode("the result", value, limit), JSON)


def stored_error(error: str | BaseException) -> str:
    """Return the stored form of an attempt's error, redacted as in logs.

    For an exception it includes the traceback.
    """
    if isinstance(error, BaseException):
        line, _, trace = report_of(error, LONGEST_TEXT).partition("\n")
        return f"{shown(line)}\n{trace}" if trace else shown(line)
    return shown(safe_text(str(error)))


def shown(text: object) -> str:
    """Return `text` shortened, without characters that a database cannot store."""
    whole = str(text).replace("\0", "\N{REPLACEMENT CHARACTER}")
    whole = whole.encode("utf-8", "replace").decode()  # replaces lone surrogates
    return whole if len(whole) <= LONGEST_TEXT else f"{whole[: LONGEST_TEXT - 1]}…"
