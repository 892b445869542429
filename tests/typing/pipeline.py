"""What a type checker makes of `seawall.pipeline`: checked by mypy, never run."""

from __future__ import annotations

from typing import Any, assert_type

from seawall.durable import Database, Inbox
from seawall.pipeline import (
    DatabaseDeadLetters,
    InboxSink,
    ItemFlow,
    IterableSource,
    Page,
    Pipeline,
    QueueSource,
    RedisStreamSource,
    calls,
    csv_rows,
    lines,
    pages,
    table,
)
from seawall.resources import Channel


def read() -> list[float]:
    """Return readings."""
    return [1.0]


async def page(cursor: int) -> Page[str]:
    """Return a page."""
    return Page([str(cursor)], cursor + 1)


def decoded(fields: dict[str, bytes]) -> float:
    """Return a number."""
    return float(fields["value"])


async def store(_conn: Any, _value: str) -> None:
    """Store nothing."""


def check_sources(channel: Channel[int], queue: QueueSource, database: Database) -> None:
    """Check what the items of each source are."""
    pipeline = Pipeline("typed")
    assert_type(pipeline.read(channel), ItemFlow[int])
    assert_type(pipeline.read(queue), ItemFlow[Any])
    assert_type(pipeline.read([1, 2]), ItemFlow[int])
    assert_type(pipeline.read(IterableSource(["a"], checkpoint="place")), ItemFlow[str])
    assert_type(pipeline.read(table(database, "orders")), ItemFlow[dict[str, Any]])
    assert_type(pipeline.read(calls(read)), ItemFlow[float])
    flow = pipeline.read(pages(page, start=0))
    assert_type(flow, ItemFlow[str])
    assert_type(flow.sink(InboxSink(Inbox(database), "store", store)), Pipeline)
    assert_type(pipeline.read(lines("orders.txt")), ItemFlow[str])
    assert_type(pipeline.read(csv_rows("orders.csv")), ItemFlow[list[str]])
    stream = RedisStreamSource("redis://host", "orders", group="g", decode=decoded)
    assert_type(pipeline.read(stream), ItemFlow[float])
    Pipeline("kept", dead_letters=DatabaseDeadLetters(database, "kept"))
