"""Events as members of a WITH clause: business row, key and events in one statement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from seawall.durable.database.statements import quoted
from seawall.durable.outbox.events import (
    FromRow,
    NewEvent,
    headers_text,
    payload_bytes,
    text,
)

MOST_TOGETHER: Final = 1_000
MOST_REMEMBERED: Final = 16
"""Maximum number of events for which the text is cached: longer texts rarely repeat."""
FROM_ROW: Final = " AS r)"
"""Occurs in every text that uses a column of the business row, and in no other."""
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,50}")


class EventMembers(NamedTuple):
    """Members of a WITH clause as `sql/` text, with their arguments."""

    text: str
    arguments: dict[str, Any]

    @property
    def ids(self) -> list[str]:
        """The ids of the events, in order."""
        return [id_ for name, id_ in self.arguments.items() if name.startswith("outbox_id_")]


class _EventShape(NamedTuple):
    """The properties of an event that determine the text."""

    number: int
    payload: FromRow | None
    """The column that holds it; None for a parameter."""
    headers: bool
    """Whether the event has headers."""


Shape = tuple[tuple[FromRow | None, tuple[_EventShape, ...]], ...]
"""For each aggregate: the column of its id (None for a parameter), and its events."""


def write(
    arguments: dict[str, Any],
    outbox: str,
    events: Mapping[str, NewEvent],
    source: str | None,
    max_payload: int,
) -> str:
    """Return the text of the members that add `events` by id, and add their values to `arguments`.

    One update of the counter serves all events of an aggregate.
    """
    if len(events) > MOST_TOGETHER:
        raise ValueError(f"{len(events)} events: write at most {MOST_TOGETHER} in one statement")
    arguments["outbox_name"] = outbox
    groups: dict[tuple[str, str | FromRow], list[_EventShape]] = {}
    for number, (id_, event) in enumerate(events.items()):
        arguments[f"outbox_id_{number}"] = id_
        aggregate, aggregate_id, shaped = _put(arguments, number, event, max_payload)
        groups.setdefault((aggregate, aggregate_id), []).append(shaped)
    # Always in the same order: concurrent transactions on the same aggregates wait instead of
    # deadlocking.
    shape = []
    for n, ((aggregate, aggregate_id), group) in enumerate(sorted(groups.items(), key=_name_of)):
        arguments[f"outbox_aggregate_{n}"] = aggregate
        column = aggregate_id if isinstance(aggregate_id, FromRow) else None
        if column is None:
            arguments[f"outbox_of_{n}"] = aggregate_id
        shape.append((column, tuple(group)))
    kept = len(events) <= MOST_REMEMBERED
    written = _written if kept else _written.__wrapped__
    return written(tuple(shape), source)


def _name_of(group: tuple[tuple[str, str | FromRow], object]) -> str:
    return str(group[0])


def _put(
    arguments: dict[str, Any], number: int, event: NewEvent, max_payload: int
) -> tuple[str, str | FromRow, _EventShape]:
    """Add an event's values to `arguments`; return its aggregate, aggregate id and shape."""
    aggregate, aggregate_id, type_, payload, headers = event
    if not isinstance(aggregate_id, FromRow):
        aggregate_id = text("aggregate_id", aggregate_id)
    arguments[f"outbox_type_{number}"] = text("event_type", type_)
    if headers:
        arguments[f"outbox_headers_{number}"] = headers_text(headers)
    column = None
    if isinstance(payload, FromRow):
        column = payload
    else:
        arguments[f"outbox_payload_{number}"] = payload_bytes(payload, max_payload)
    return text("aggregate", aggregate), aggregate_id, _EventShape(number, column, bool(headers))


@lru_cache(maxsize=256)
def _written(shape: Shape, source: str | None) -> str:
    """Return the text for events of this shape. Cached: most services repeat few shapes."""
    if source is not None and not (isinstance(source, str) and _NAME.fullmatch(source)):
        raise ValueError(f"source={source!r}: write the name of a member, such as 'business'")
    written: list[str] = []
    rows = "" if source is None else f" FROM (SELECT FROM {source} LIMIT 1) AS one"
    for n, (aggregate_id, group) in enumerate(shape):
        written.append(
            f"outbox_place_{n} AS (\n"
            "INSERT INTO {outbox_sequences} AS s"
            " (outbox, aggregate, aggregate_id, last, touched_at)\n"
            f"SELECT CAST(:outbox_name AS text), CAST(:outbox_aggregate_{n} AS text),"
            f" {_value(aggregate_id, f'outbox_of_{n}', source)}, {len(group)}, {{now}}{rows}\n"
            "ON CONFLICT (outbox, aggregate, aggregate_id)"
            f" DO UPDATE SET last = s.last + {len(group)}, touched_at = excluded.touched_at\n"
            "RETURNING s.lane, s.last, s.touched_at, s.aggregate, s.aggregate_id)"
        )
        for m, (own, column, headed) in enumerate(group):
            headers = f"CAST(:outbox_headers_{own} AS text)" if headed else "CAST(NULL AS text)"
            payload = f"CAST(:outbox_payload_{own} AS bytea)"
            if column is not None:
                payload = f"convert_to({_value(column, '', source)}, 'UTF8')"
            written.append(
                f"outbox_event_{own} AS (\n"
                "INSERT INTO {outbox} (outbox, lane, sequence, id, aggregate, aggregate_id,"
                " type, payload, headers, created_at)\n"
                f"SELECT CAST(:outbox_name AS text), p.lane, p.last - {len(group) - 1 - m},"
                f" CAST(:outbox_id_{own} AS text), p.aggregate, p.aggregate_id,"
                f" CAST(:outbox_type_{own} AS text), {payload},"
                f" {headers}, p.touched_at\n"
                f"FROM outbox_place_{n} AS p)"
            )
    return ",\n".join(written)


def _value(value: FromRow | None, parameter: str, source: str | None) -> str:
    if value is None:
        return f"CAST(:{parameter} AS text)"
    if source is None:
        raise ValueError(f"{value!r}: write source= too, the member that returns that row")
    column = quoted(value.column).replace("{", "{{").replace("}", "}}")
    # With several rows the choice would be arbitrary: then the subquery makes the statement fail.
    return f"(SELECT CAST(r.{column} AS text) FROM {source}{FROM_ROW}"  # noqa: S608 - quoted, and checked
