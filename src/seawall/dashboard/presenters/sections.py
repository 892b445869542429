"""Everything beside the guards, by section: limits, queues, outboxes, pools, stores, health...

Pure except for the counters in `Counters`. The number of rows is bounded, and each row has a unique
name within its kind. Nothing raises, whatever a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, cast

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import LONGEST_NAME, LONGEST_WORD, MOST_FACTS, MOST_ROWS, shown
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters import queues, resources, service
from seawall.dashboard.presenters.content import (
    Presenter,
    RowContent,
    Seen,
    Snapshot,
    fact,
    plain_row,
    things,
)
from seawall.dashboard.presenters.guards import (
    guard_limit_rows,
    guard_troubles,
    request_limit_rows,
    request_limit_troubles,
)
from seawall.dashboard.presenters.members import TITLE as MEMBERS
from seawall.dashboard.presenters.members import group_rows, member_troubles
from seawall.dashboard.presenters.pipelines import (
    COLLECT,
    PIPELINE,
    PipelineRows,
    collect_troubles,
    pipeline_troubles,
)
from seawall.dashboard.presenters.pipelines import TITLE as PIPELINES
from seawall.dashboard.views import MemberFigures, RowView

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
        "deferred_calls",
        "deferred_call_worker",
        "dead_letters",
    ),
    PIPELINES: (PIPELINE,),
    "Pools and executors": ("pool", "executor"),
    "Stores and leases": ("store", "lease"),
    "Upstreams": ("upstreams", "models", "llm", COLLECT),
    "Once only": ("idempotency", "idempotent_requests", "inbox", "fifo_sender", "fifo_receiver"),
    MEMBERS: ("members",),  # they may be many, so other rows come first
}
"""The sections and their kinds, in order; other kinds come last."""
OTHERS: Final = "Others"


NOT_ROWS: Final = frozenset({"guard", "edge"})
"""Kinds that are shown as guards."""


def guard_rows(guard: Seen, counters: Counters) -> list[RowView]:
    """Return the rows of the limits in a guard's stack."""
    return [_row(kind, name, line) for kind, name, line in guard_limit_rows(guard, counters)]


def sections_of(
    snapshot: Snapshot, counters: Counters, limits: Iterable[RowView] = ()
) -> tuple[dict[str, list[RowView]], int]:
    """Return the rows by section, and the number of rows omitted because there are too many.

    `limits` are the rows of the guards.
    """
    sections: dict[str, list[RowView]] = {title: [] for title in (*SECTIONS, OTHERS)}
    names: dict[tuple[str, str], int] = {}
    rows, left_out = 0, 0
    for title, row in chain((("Limits", row) for row in limits), _rows(snapshot, counters)):
        if rows >= MOST_ROWS:
            left_out += 1
            continue
        rows += 1
        key = row["kind"], row["name"]
        names[key] = number = names.get(key, 0) + 1
        numbered = row if number == 1 else RowView(**{**row, "name": f"{row['name']} {number}"})
        sections[title].append(numbered)
    return {title: section for title, section in sections.items() if section}, left_out


def _rows(snapshot: Snapshot, counters: Counters) -> Iterator[tuple[str, RowView]]:
    """Yield the rows of everything but the guards, each with its section."""
    place = {kind: title for title, kinds in SECTIONS.items() for kind in kinds}
    order = {kind: number for number, kind in enumerate(place)}
    drawing = PipelineRows()
    for kind in sorted(map(str, snapshot), key=lambda kind: order.get(kind, len(order))):
        if kind in NOT_ROWS:
            continue
        for thing in things(snapshot, kind):
            title = place.get(kind, OTHERS)
            for row_kind, name, line in _lines(kind, thing, counters, drawing):
                yield title, _row(row_kind, name, line)


def _lines(
    kind: str, thing: Seen, counters: Counters, drawing: PipelineRows
) -> Iterable[tuple[str, str, RowContent]]:
    name = str(thing.get("name", ""))
    if kind == "request_limits":
        return ((kind, limit, line) for limit, line in request_limit_rows(name, thing, counters))
    if "snapshot_error" not in thing:
        if kind == "members":
            return group_rows(name, thing, counters)
        if kind == PIPELINE:
            return [(kind, name, drawing.pipeline(name, thing, counters))]
        if kind == "dead_letters" and queues.has_no_letters(thing):
            return ()
        if kind == COLLECT:
            return [(kind, name, line) for line in drawing.collect(name, thing)]
    return [(kind, name, describe_row(kind, name, thing, counters))]


def describe_row(kind: str, name: str, seen: Seen, counters: Counters) -> RowContent:
    """Describe an object of that kind."""
    if "snapshot_error" in seen:
        return RowContent("unreadable", "warn")
    try:
        line = PRESENTERS.get(kind, _UNKNOWN).row(kind, name, seen, counters)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        line = plain_row(kind, name, seen, counters)
    if "stored_error" in seen:
        return line._replace(state="cannot be asked", tone="warn")
    if "stored_age" in seen:
        age = seen["stored_age"]
        known = "never" if age is None else f"{say.seconds(age)} ago"
        line = line._replace(facts=[*line.facts, ("asked", known)])
        if age is None:
            return line._replace(state=line.state or "not asked yet")
    return line


def _row(kind: str, name: str, line: RowContent) -> RowView:
    row = RowView(
        kind=shown(kind, LONGEST_WORD),
        name=shown(name, LONGEST_NAME - 8),  # leaves room for a number
        tone=line.tone,
        state=shown(line.state, LONGEST_WORD),
        facts=[fact(*one) for one in line.facts[:MOST_FACTS]],
        gauge=None if line.gauge is None else round(min(1.0, max(0.0, line.gauge)), 3),
        track=None if line.track is None else round(line.track, 3),
    )
    if line.figures is not None:
        figures = {name: round(value, 6) for name, value in line.figures.items()}
        row["figures"] = cast("MemberFigures", figures)
    if line.pipes is not None:
        row["pipes"] = line.pipes
    return row


PRESENTERS: Final[dict[str, Presenter]] = {
    **queues.PRESENTERS,
    **resources.PRESENTERS,
    **service.PRESENTERS,
    # Their rows come from `_lines`.
    "guard": Presenter(troubles=guard_troubles),
    "members": Presenter(troubles=member_troubles),
    "request_limits": Presenter(troubles=request_limit_troubles),
    PIPELINE: Presenter(troubles=pipeline_troubles),
    COLLECT: Presenter(troubles=collect_troubles),
}
"""The presenters by kind."""
_UNKNOWN: Final = Presenter()
