"""Events of an outbox and their validation, for writing and for reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import urandom
from typing import Any, Final, NamedTuple, NoReturn
from uuid import UUID

from seawall._failures import report_of, split_report
from seawall._redaction import safe_line
from seawall.durable.database.json_values import encoder, plain

LONGEST_TEXT: Final = 255
"""Maximum characters of an aggregate's or a type's name."""
LARGEST_HEADERS: Final = 16_384
"""Maximum bytes of an event's stored headers."""
LARGEST_ERROR: Final = 1_000
"""Maximum characters of a stored error."""


class OutboxEvent(NamedTuple):
    """An event as passed to a sink."""

    id: str
    """The same for every delivery, so that a consumer can recognise duplicates."""
    aggregate: str
    aggregate_id: str
    sequence: int
    """Its sequence number in its aggregate."""
    type: str
    payload: bytes
    headers: dict[str, str]
    created_at: float
    """When it was added: seconds since 1970 by the database's clock."""

    def json(self) -> Any:
        """Return the decoded JSON payload; dates, UUIDs and Decimals are text."""
        return json.loads(self.payload)


class DeadEvent(NamedTuple):
    """An event that was given up."""

    event: OutboxEvent
    attempts: int
    error: str
    """Why the last attempt failed: exception type and message, on one line."""
    died_at: float
    traceback: str = ""
    """Traceback of the sink's error, redacted and shortened; empty if there is none."""


class BlockedAggregate(NamedTuple):
    """An aggregate that waits for an operator's `unblock`."""

    aggregate: str
    aggregate_id: str
    attempts: int
    error: str
    """Why the last attempt failed: exception type and message, on one line."""
    traceback: str = ""
    """Traceback of the sink's error, redacted and shortened; empty if there is none."""


@dataclass(frozen=True, slots=True)
class FromRow:
    """A column of the business row that the same statement writes (see `Outbox.rows_cte`)."""

    # Not a tuple, unlike the others here: JSON would silently encode it anywhere in a payload.

    column: str

    def __post_init__(self) -> None:
        """Refuse a value that is not a column name."""
        if not isinstance(self.column, str):
            raise TypeError(f"{self!r}: write a column's name, such as FromRow('id')")
        if not self.column or not self.column.isprintable():
            raise ValueError(f"{self!r}: write a column's name, such as FromRow('id')")


class NewEvent(NamedTuple):
    """An event to be added."""

    aggregate: str
    aggregate_id: str | int | UUID | FromRow
    type: str
    payload: Any
    """Bytes, text, or a value to encode as JSON; a `FromRow` in a single statement."""
    headers: Mapping[str, str] | None = None


def new_id() -> str:
    """Return a unique id: visible ASCII, valid in a header."""
    return urandom(16).hex()


def refuse_column(name: str, value: FromRow) -> NoReturn:
    """Raise, because there is no row here that the column could come from."""
    raise TypeError(f"{name}: {_where_it_belongs(value)}")


def _where_it_belongs(value: FromRow) -> str:
    return (
        f"{value!r} is a column of the row that the same statement writes: use it as aggregate_id"
        " or as the whole payload, in rows_cte(..., source=...) or Idempotency.single; elsewhere"
        " write the value itself"
    )


def _plain(value: object) -> Any:
    """Return a part of a payload as a JSON type, or raise."""
    if isinstance(value, FromRow):
        raise TypeError(_where_it_belongs(value))
    return plain(value)


_as_json: Final = encoder(_plain)


def text(name: str, value: object) -> str:
    """Return a name in its stored form, or raise."""
    if type(value) is str and 0 < len(value) <= LONGEST_TEXT and "\0" not in value:
        return value
    if isinstance(value, (int, UUID)) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, FromRow):
        refuse_column(name, value)
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: write a text, such as {name}='order'")
    if not value or len(value) > LONGEST_TEXT or "\0" in value:
        raise ValueError(f"{name}: write 1 to {LONGEST_TEXT} characters, without NUL")
    return value


def payload_bytes(payload: object, largest: int) -> bytes:
    """Return a payload in its stored form, or raise."""
    if isinstance(payload, (bytes, bytearray, memoryview)):
        data = bytes(payload)
    elif isinstance(payload, str):
        data = payload.encode()
    else:
        try:
            data = _as_json(payload).encode()
        except TypeError as error:
            raise TypeError(
                "payload: write bytes, text, or what JSON can say; Decimal, UUID, datetime, date,"
                f" dataclasses and pydantic models, too ({error})"
            ) from None
    if len(data) > largest:
        raise ValueError(
            f"payload of {len(data)} bytes: at most {largest}; store it elsewhere and send where"
        )
    return data


def headers_text(headers: Mapping[str, str] | None) -> str | None:
    """Return headers in their stored form, or raise."""
    if not headers:
        return None
    if not isinstance(headers, Mapping) or not all(
        isinstance(part, str) and part.isprintable() for item in headers.items() for part in item
    ):
        raise TypeError("headers: write a dict of printable texts, such as {'tenant': 'acme'}")
    data = json.dumps(dict(headers), separators=(",", ":"))
    if len(data) > LARGEST_HEADERS:
        raise ValueError(f"headers of {len(data)} bytes: at most {LARGEST_HEADERS}")
    return data


def event_of(row: tuple[Any, ...]) -> OutboxEvent:
    """Return the event of a row. The unpacking below shows the order of the columns."""
    number, aggregate, aggregate_id, sequence, kind, payload, headers, created_at = row
    return OutboxEvent(
        number,
        aggregate,
        aggregate_id,
        sequence,
        kind,
        payload if type(payload) is bytes else bytes(payload),
        _headers(headers) if headers is not None else {},
        created_at / 1e6,
    )


def _headers(stored: object) -> dict[str, str]:
    """Return stored headers; ignore invalid ones, which other programs may have written."""
    if not isinstance(stored, str) or len(stored) > LARGEST_HEADERS:
        return {}
    try:
        found = json.loads(stored)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def error_text(error: object) -> str:
    """Return the stored form of an error: one redacted line, and the traceback below it.

    An error read from the database keeps its traceback.
    """
    if isinstance(error, BaseException):
        return report_of(error, LARGEST_ERROR)
    line, trace = split_report(str(error))
    line = safe_line(line, LARGEST_ERROR)
    return f"{line}\n{trace}" if trace else line
