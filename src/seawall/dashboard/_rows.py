"""Everything beside the guards, by section: limits, queues, outboxes, pools, stores, health...

Pure except for the counters in `Moves`. The number of rows is bounded, and each row has a unique
name within its kind. Nothing raises, whatever a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

from seawall.dashboard._bounds import (
    LONGEST_NAME,
    LONGEST_WORD,
    MOST_FACTS,
    MOST_ROWS,
    shown,
)
from seawall.dashboard._layers import fact
from seawall.dashboard._lines import Line, guard_limits, has_no_letters, line_of, request_limits
from seawall.dashboard._members import TITLE as MEMBERS
from seawall.dashboard._members import group_lines
from seawall.dashboard._moves import Moves
from seawall.dashboard._pipelines import COLLECT, PIPELINE, Drawing
from seawall.dashboard._pipelines import TITLE as PIPELINES
from seawall.dashboard.views import Row

Seen = Mapping[str, Any]
Snapshot = Mapping[str, Iterable[Seen]]

SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Service": ("health", "lifecycle", "service_levels", "watchdog"),
    "Limits": ("request_limits",),
    "Queues": ("queue", "worker", "channel", "serializer"),
    "Outbox and jobs": (
        "outbox",
        "dispatcher",
        "jobs",
        "job_worker",
        "jobs_api",
        "later",
        "later_worker",
        "dead_letters",
    ),
    PIPELINES: (PIPELINE,),
    "Pools and executors": ("pool", "executor"),
    "Stores and leases": ("store", "lease"),
    "Upstreams": ("upstreams", "models", "llm", COLLECT),
    "Once only": (
        "idempotency",
        "idempotent_requests",
        "inbox",
        "fifo_sender",
        "fifo_receiver",
    ),
    MEMBERS: ("members",),  # they may be many, so other rows come first
}
"""The sections and their kinds, in order; other kinds come last."""

OTHERS: Final = "Others"
NOT_ROWS: Final = frozenset({"guard", "edge"})
"""Kinds that are shown as guards."""


def guard_rows(guard: Seen, moves: Moves) -> list[Row]:
    """Return the rows of the limits in a guard's stack."""
    return [_row(kind, name, line) for kind, name, line in guard_limits(guard, moves)]


def sections_of(
    snapshot: Snapshot, moves: Moves, limits: Iterable[Row] = ()
) -> tuple[dict[str, list[Row]], int]:
    """Return the rows by section, and the number of rows omitted because there are too many.

    `limits` are the rows of the guards.
    """
    sections: dict[str, list[Row]] = {title: [] for title in (*SECTIONS, OTHERS)}
    names: dict[tuple[str, str], int] = {}
    rows, left_out = 0, 0
    for title, row in chain((("Limits", row) for row in limits), _rows(snapshot, moves)):
        if rows >= MOST_ROWS:
            left_out += 1
            continue
        rows += 1
        key = row["kind"], row["name"]
        names[key] = number = names.get(key, 0) + 1
        numbered = row if number == 1 else Row(**{**row, "name": f"{row['name']} {number}"})
        sections[title].append(numbered)
    return {title: section for title, section in sections.items() if section}, left_out


def _rows(snapshot: Snapshot, moves: Moves) -> Iterator[tuple[str, Row]]:
    """Yield the rows of everything but the guards, each with its section."""
    place = {kind: title for title, kinds in SECTIONS.items() for kind in kinds}
    order = {kind: number for number, kind in enumerate(place)}
    drawing = Drawing()
    for kind in sorted(map(str, snapshot), key=lambda kind: order.get(kind, len(order))):
        if kind in NOT_ROWS:
            continue
        for thing in things(snapshot, kind):
            title = place.get(kind, OTHERS)
            for row_kind, name, line in _lines(kind, thing, moves, drawing):
                yield title, _row(row_kind, name, line)


def _lines(
    kind: str, thing: Seen, moves: Moves, drawing: Drawing
) -> Iterable[tuple[str, str, Line]]:
    """Return kind, name and line of each row of an object."""
    name = str(thing.get("name", ""))
    if kind == "request_limits":
        return ((kind, limit, line) for limit, line in request_limits(name, thing, moves))
    if "snapshot_error" not in thing:
        if kind == "members":
            return group_lines(name, thing, moves)
        if kind == PIPELINE:
            return [(kind, name, drawing.pipeline(name, thing, moves))]
        if kind == "dead_letters" and has_no_letters(thing):
            return ()
        if kind == COLLECT:
            return [(kind, name, line) for line in drawing.collect(name, thing)]
    return [(kind, name, line_of(kind, name, thing, moves))]


def things(snapshot: Snapshot, kind: str) -> list[Seen]:
    """Return the readable objects of a kind."""
    known = snapshot.get(kind, ())
    if not isinstance(known, (list, tuple)):
        return []
    return [thing for thing in known if isinstance(thing, (dict, Mapping))]


def _row(kind: str, name: str, line: Line) -> Row:
    row = Row(
        kind=shown(kind, LONGEST_WORD),
        name=shown(name, LONGEST_NAME - 8),  # leaves room for a number
        tone=line.tone,
        state=shown(line.state, LONGEST_WORD),
        facts=[fact(*one) for one in line.facts[:MOST_FACTS]],
        gauge=None if line.gauge is None else round(min(1.0, max(0.0, line.gauge)), 3),
        track=None if line.track is None else round(line.track, 3),
    )
    if line.figures is not None:
        row["figures"] = {name: round(value, 6) for name, value in line.figures.items()}
    if line.pipes is not None:
        row["pipes"] = line.pipes
    return row
