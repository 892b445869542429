"""What is handed out of jobs: what is known of one, a claim on one; and how they are written."""

from __future__ import annotations

import re
from hashlib import blake2b
from json import dumps
from typing import Any, Final, NamedTuple, cast

from seawall._failures import report_of, split_report
from seawall._redaction import safe_text
from seawall.errors import RecordGarbled
from seawall.jobs._codec import decode, encode
from seawall.models.durable_jobs import ENDED, STATES, State

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"

LONGEST_NAME: Final = 255
LONGEST_TEXT: Final = 2_000
"""Characters that are kept of an error or of a message on the progress."""

_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


class Job(NamedTuple):
    """What is known of a job. Times are seconds since 1970, of the database's clock."""

    id: str
    scope: str
    kind: str
    state: State
    priority: int
    attempts: int
    max_attempts: int
    cancelling: bool
    """Whether it is to be cancelled: one at work goes on until its worker has heard of it."""
    progress: float
    """From 0 to 1, as its worker says."""
    message: str
    body: bytes | None
    """The result as it was stored."""
    content_type: str | None
    error: str
    """Why it failed, or why the last attempt did: the error's name and message, on one line."""
    created_at: float
    started_at: float | None
    ended_at: float | None
    expires_at: float | None
    due_at: float
    """When it may be begun; of one at work, when its lease is over."""
    age: float
    """Seconds since it was submitted, when it was read."""
    is_new: bool = False
    """Whether this very call submitted it: False if the same key had done so before."""
    traceback: str = ""
    """That of `error`, redacted and cut, for operators; empty if there is none."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will be done."""
        return self.state in ENDED

    @property
    def result(self) -> Any:
        """What came out of it: of JSON the value, else the bytes; None if there is none."""
        if self.body is None or self.content_type != JSON:
            return self.body
        try:
            return decode(self.body)
        except ValueError as error:
            raise RecordGarbled(f"job {self.id}: its result is no JSON ({error})") from None

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.kind} {self.state}, attempt {self.attempts}>"


class JobClaim(NamedTuple):
    """A job that is its claimer's until the lease is over."""

    id: str
    scope: str
    kind: str
    epoch: int
    """Higher for each claim of the same job."""
    attempt: int
    """1 for the first."""
    max_attempts: int
    payload: Any
    owner: str
    progress: float
    message: str
    until: float
    """The instant of the clock here at which the lease is over, or a little before."""

    def __repr__(self) -> str:
        return f"<JobClaim {self.id}: {self.kind}, attempt {self.attempt}>"


# Reading what is stored


def job_of(row: tuple[Any, ...], *, is_new: bool = False) -> Job:
    """Return what a row says, or raise: it may hold anything."""
    *told, _fingerprint, now = row
    (id_, scope, kind, state, priority, attempts, most, cancelling) = told[:8]
    (progress, message, body, content_type, error, created, started, ended, expires) = told[8:17]
    due = told[17]
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
    return Job(
        id_,
        scope,
        kind,
        cast("State", "expired" if expires is not None and expires <= now else state),
        priority,
        attempts,
        most,
        bool(cancelling),
        min(max(float(progress), 0.0), 1.0),
        message,
        None if body is None else bytes(body),
        content_type,
        error,
        created / 1e6,
        None if started is None else started / 1e6,
        None if ended is None else ended / 1e6,
        None if expires is None else expires / 1e6,
        due / 1e6,
        max(0.0, (now - created) / 1e6),
        is_new,
        trace,
    )


# Writing


def is_id(text: object) -> bool:
    """Tell whether `text` can be the id of a job at all."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def name_of(what: str, value: object) -> str:
    """Return a scope or a kind, or raise and say what to write instead."""
    if not isinstance(value, str):
        raise TypeError(f"{what}={value!r}: write text, such as {what}='acme'")
    if not value or len(value) > LONGEST_NAME or "\0" in value:
        raise ValueError(f"{what} is to have 1 to {LONGEST_NAME} characters, and no NUL")
    value.encode()  # half a surrogate pair is no text: a ValueError
    return value


def key_digest(key: str) -> bytes:
    """Return what is stored of a key: nobody reads the key itself there."""
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise ValueError("key: write 1 to 255 visible ASCII characters, such as a UUID")
    return blake2b(key.encode(), digest_size=32, person=b"seawall job key").digest()


def payload_of(value: Any, limit: int) -> tuple[str, bytes]:
    """Return the payload as JSON, and its fingerprint, which the order of members is no part of."""
    text = encode("payload", value, limit).decode()
    ordered = dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return text, blake2b(ordered, digest_size=32, person=b"seawall job body").digest()


class Stored(NamedTuple):
    """A result as it is stored."""

    body: bytes | None
    content_type: str | None


def result_of(value: Any, limit: int) -> Stored:
    """Return a result as it is stored; or raise."""
    if isinstance(value, Stored):
        return value
    if value is None:
        return Stored(None, None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if len(data) > limit:
            raise ValueError(f"the result has {len(data)} bytes, and {limit} are allowed")
        return Stored(data, BYTES)
    return Stored(encode("the result", value, limit), JSON)


def stored_error(error: str | BaseException) -> str:
    """Return why an attempt failed, as it is stored: redacted, as it is logged and searched.

    The traceback of an error is below it.
    """
    if isinstance(error, BaseException):
        said, _, trace = report_of(error, LONGEST_TEXT).partition("\n")
        return f"{shown(said)}\n{trace}" if trace else shown(said)
    return shown(safe_text(str(error)))


def shown(text: object) -> str:
    """Return `text` short enough to be kept, without what a database cannot hold."""
    said = str(text).replace("\0", "\N{REPLACEMENT CHARACTER}")
    said = said.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
    return said if len(said) <= LONGEST_TEXT else f"{said[: LONGEST_TEXT - 1]}…"
