"""Events as members of a WITH clause: business row, key and events in one statement."""

from __future__ import annotations

import re
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


def members(outbox: str, events: list[NewEvent], source: str | None, max_payload: int) -> Members:
    """Write the members: a row's counter is moved once for all events of its aggregate."""
    if len(events) > MOST_TOGETHER:
        raise ValueError(f"{len(events)} events: write at most {MOST_TOGETHER} in one statement")
    if source is not None and not _NAME.fullmatch(source):
        raise ValueError(f"source={source!r}: write the name of a member, such as 'business'")
    groups: dict[tuple[str, str | FromRow], list[int]] = {}
    for index, event in enumerate(events):
        if not isinstance(event, NewEvent):
            raise TypeError(f"{event!r}: pass NewEvent(aggregate, aggregate_id, type, payload)")
        whose = event.aggregate_id
        if not isinstance(whose, FromRow):
            whose = text("aggregate_id", whose)
        groups.setdefault((text("aggregate", event.aggregate), whose), []).append(index)
    written: list[str] = []
    arguments: dict[str, Any] = {"outbox_name": outbox}
    rows = "" if source is None else f" FROM (SELECT * FROM {source} LIMIT 1) AS r"  # noqa: S608 - a checked name
    also = "" if source is None else f" CROSS JOIN (SELECT * FROM {source} LIMIT 1) AS r"  # noqa: S608 - a checked name
    for n, ((aggregate, aggregate_id), group) in enumerate(groups.items()):
        arguments[f"outbox_aggregate_{n}"] = aggregate
        if not isinstance(aggregate_id, FromRow):
            arguments[f"outbox_of_{n}"] = aggregate_id
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
        for m, index in enumerate(group):
            event, own = events[index], index
            arguments[f"outbox_id_{own}"] = new_id()
            arguments[f"outbox_type_{own}"] = text("event_type", event.type)
            arguments[f"outbox_headers_{own}"] = headers_text(event.headers)
            if isinstance(event.payload, FromRow):
                payload = f"convert_to({_value(event.payload, '', source)}, 'UTF8')"
            else:
                payload = f"CAST(:outbox_payload_{own} AS bytea)"
                arguments[f"outbox_payload_{own}"] = payload_bytes(event.payload, max_payload)
            written.append(
                f"outbox_event_{own} AS (\n"
                "INSERT INTO {outbox} (outbox, lane, sequence, id, aggregate, aggregate_id,"
                " type, payload, headers, created_at)\n"
                f"SELECT CAST(:outbox_name AS text), p.lane, p.last - {len(group) - 1 - m},"
                f" CAST(:outbox_id_{own} AS text), p.aggregate, p.aggregate_id,"
                f" CAST(:outbox_type_{own} AS text), {payload},"
                f" CAST(:outbox_headers_{own} AS text), p.touched_at\n"
                f"FROM outbox_place_{n} AS p"
                f"{also if isinstance(event.payload, FromRow) else ''})"
            )
    return Members(",\n".join(written), arguments)


def _value(value: object, parameter: str, source: str | None) -> str:
    if not isinstance(value, FromRow):
        return f"CAST(:{parameter} AS text)"
    if source is None:
        raise ValueError(f"{value!r}: write source= too, the member that returns that row")
    if not isinstance(value.column, str) or not value.column or not value.column.isprintable():
        raise ValueError(f"{value!r}: write a column's name, such as FromRow('id')")
    column = quoted(value.column).replace("{", "{{").replace("}", "}}")
    return f"CAST(r.{column} AS text)"
