"""Events as members of a WITH clause: business row, key and events in one statement."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from seawall.durable._outbox_events import (
    FromRow,
    NewEvent,
    headers_text,
    new_id,
    payload_bytes,
    text,
)
from seawall.durable._sql import quoted

MOST_TOGETHER: Final = 1_000
MOST_REMEMBERED: Final = 16
"""Of so many events the text is kept; that of many is long, and hardly two are alike."""
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,50}")


class Members(NamedTuple):
    """Members of a WITH clause as text of `sql/`, and their arguments."""

    text: str
    arguments: dict[str, Any]

    @property
    def ids(self) -> list[str]:
        """The events' ids, in their order."""
        count = sum(name.startswith("outbox_id_") for name in self.arguments)
        return [self.arguments[f"outbox_id_{index}"] for index in range(count)]


Shape = tuple[tuple[FromRow | None, tuple[tuple[int, FromRow | None], ...]], ...]
"""Of each aggregate: which column its id is, and its events by number with that of the payload."""


def members(outbox: str, events: list[NewEvent], source: str | None, max_payload: int) -> Members:
    """Write the members: a row's counter is moved once for all events of its aggregate."""
    if len(events) > MOST_TOGETHER:
        raise ValueError(f"{len(events)} events: write at most {MOST_TOGETHER} in one statement")
    groups: dict[tuple[str, str | FromRow], list[tuple[int, FromRow | None]]] = {}
    arguments: dict[str, Any] = {"outbox_name": outbox}
    for own, event in enumerate(events):
        if not isinstance(event, NewEvent):
            raise TypeError(f"{event!r}: pass NewEvent(aggregate, aggregate_id, type, payload)")
        whose, payload = event.aggregate_id, event.payload
        if not isinstance(whose, FromRow):
            whose = text("aggregate_id", whose)
        id_, type_, headers_, payload_ = _names(own)
        arguments[id_] = new_id()
        arguments[type_] = text("event_type", event.type)
        arguments[headers_] = headers_text(event.headers)
        if not isinstance(payload, FromRow):
            arguments[payload_] = payload_bytes(payload, max_payload)
            payload = None
        group = groups.setdefault((text("aggregate", event.aggregate), whose), [])
        group.append((own, payload))
    shape: list[Any] = []
    # In one order everywhere: who adds to the same aggregates at once waits, and does not deadlock.
    for n, ((aggregate, whose), group) in enumerate(sorted(groups.items(), key=_by_name)):
        arguments[f"outbox_aggregate_{n}"] = aggregate
        if not isinstance(whose, FromRow):
            arguments[f"outbox_of_{n}"] = whose
        shape.append((whose if isinstance(whose, FromRow) else None, tuple(group)))
    write = _written if len(events) <= MOST_REMEMBERED else _written.__wrapped__
    return Members(write(tuple(shape), source), arguments)


@cache
def _names(own: int) -> tuple[str, str, str, str]:
    return tuple(f"outbox_{what}_{own}" for what in ("id", "type", "headers", "payload"))  # type: ignore[return-value]


def _by_name(item: tuple[tuple[str, str | FromRow], Any]) -> tuple[str, str]:
    (aggregate, whose), _ = item
    return aggregate, str(whose)


@lru_cache(maxsize=256)
def _written(shape: Shape, source: str | None) -> str:
    """Return the text for events of this shape: the same again and again, in most services."""
    if source is not None and not (isinstance(source, str) and _NAME.fullmatch(source)):
        raise ValueError(f"source={source!r}: write the name of a member, such as 'business'")
    written: list[str] = []
    rows = "" if source is None else f" FROM (SELECT * FROM {source} LIMIT 1) AS r"  # noqa: S608 - a checked name
    also = "" if source is None else f" CROSS JOIN (SELECT * FROM {source} LIMIT 1) AS r"  # noqa: S608 - a checked name
    for n, (whose, group) in enumerate(shape):
        written.append(
            f"outbox_place_{n} AS (\n"
            "INSERT INTO {outbox_sequences} AS s"
            " (outbox, aggregate, aggregate_id, last, touched_at)\n"
            f"SELECT CAST(:outbox_name AS text), CAST(:outbox_aggregate_{n} AS text),"
            f" {_value(whose, f'outbox_of_{n}', source)}, {len(group)}, {{now}}{rows}\n"
            "ON CONFLICT (outbox, aggregate, aggregate_id)"
            f" DO UPDATE SET last = s.last + {len(group)}, touched_at = excluded.touched_at\n"
            "RETURNING s.lane, s.last, s.touched_at, s.aggregate, s.aggregate_id)"
        )
        for m, (own, column) in enumerate(group):
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
                f" CAST(:outbox_headers_{own} AS text), p.touched_at\n"
                f"FROM outbox_place_{n} AS p{'' if column is None else also})"
            )
    return ",\n".join(written)


def _value(value: FromRow | None, parameter: str, source: str | None) -> str:
    if value is None:
        return f"CAST(:{parameter} AS text)"
    if source is None:
        raise ValueError(f"{value!r}: write source= too, the member that returns that row")
    if not isinstance(value.column, str) or not value.column or not value.column.isprintable():
        raise ValueError(f"{value!r}: write a column's name, such as FromRow('id')")
    column = quoted(value.column).replace("{", "{{").replace("}", "}}")
    return f"CAST(r.{column} AS text)"
