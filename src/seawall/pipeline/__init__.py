"""Pipelines that degrade instead of crashing: sources, stages, sinks, an end for every item."""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall`: importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.durable.database.table_reader import DatabaseCheckpoint
    from seawall.pipeline.checkpoint import Checkpoint
    from seawall.pipeline.collect import (
        Collect,
        Collection,
        CollectSource,
        Reading,
        ReadingState,
        TooFewSources,
    )
    from seawall.pipeline.dead_letters import (
        DatabaseDeadLetters,
        DeadLetters,
        MemoryDeadLetters,
        ReplayClaim,
    )
    from seawall.pipeline.files import FileSource, csv_rows, lines
    from seawall.pipeline.item import (
        DROP,
        DeadLetter,
        Ending,
        Item,
        ItemDegradation,
        ItemResult,
        current_item,
    )
    from seawall.pipeline.pipeline import ItemFlow, Pipeline
    from seawall.pipeline.polling import Page, PageSource, calls, pages, poll
    from seawall.pipeline.queues import ChannelSource, QueueSource
    from seawall.pipeline.source import FaultyItem, IterableSource, Source, TooManyDeliveries
    from seawall.pipeline.stage import BatchFailed, NotBefore, degrade
    from seawall.pipeline.streams.jetstream import (
        JetStreamMessage,
        JetStreamSink,
        JetStreamSource,
    )
    from seawall.pipeline.streams.redis import RedisStreamSink, RedisStreamSource, StreamHandle
    from seawall.pipeline.tables import InboxSink, TableSource, table

__all__ = [
    "DROP",
    "BatchFailed",
    "ChannelSource",
    "Checkpoint",
    "Collect",
    "CollectSource",
    "Collection",
    "DatabaseCheckpoint",
    "DatabaseDeadLetters",
    "DeadLetter",
    "DeadLetters",
    "Ending",
    "FaultyItem",
    "FileSource",
    "InboxSink",
    "Item",
    "ItemDegradation",
    "ItemFlow",
    "ItemResult",
    "IterableSource",
    "JetStreamMessage",
    "JetStreamSink",
    "JetStreamSource",
    "MemoryDeadLetters",
    "NotBefore",
    "Page",
    "PageSource",
    "Pipeline",
    "QueueSource",
    "Reading",
    "ReadingState",
    "RedisStreamSink",
    "RedisStreamSource",
    "ReplayClaim",
    "Source",
    "StreamHandle",
    "TableSource",
    "TooFewSources",
    "TooManyDeliveries",
    "calls",
    "csv_rows",
    "current_item",
    "degrade",
    "lines",
    "pages",
    "poll",
    "table",
]

_HOMES = {
    "durable.database.table_reader": "DatabaseCheckpoint",
    "pipeline.checkpoint": "Checkpoint",
    "pipeline.collect": "Collect CollectSource Collection Reading ReadingState TooFewSources",
    "pipeline.dead_letters": "DatabaseDeadLetters DeadLetters MemoryDeadLetters ReplayClaim",
    "pipeline.files": "FileSource csv_rows lines",
    "pipeline.item": "DROP DeadLetter Ending Item ItemDegradation ItemResult current_item",
    "pipeline.pipeline": "ItemFlow Pipeline",
    "pipeline.polling": "Page PageSource calls pages poll",
    "pipeline.queues": "ChannelSource QueueSource",
    "pipeline.source": "FaultyItem IterableSource Source TooManyDeliveries",
    "pipeline.stage": "BatchFailed NotBefore degrade",
    "pipeline.streams.jetstream": "JetStreamMessage JetStreamSink JetStreamSource",
    "pipeline.streams.redis": "RedisStreamSink RedisStreamSource StreamHandle",
    "pipeline.tables": "InboxSink TableSource table",
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
