"""Bad arguments of pipelines: what is called, the bad values, and a word of the advice."""

from __future__ import annotations

import asyncio
from inspect import signature
from math import inf, nan
from random import Random
from typing import Any

from seawall.durable import Database, Inbox, Sqlite
from seawall.jobs import LocalQueue
from seawall.pipeline import (
    BatchFailed,
    ChannelSource,
    Collect,
    DatabaseCheckpoint,
    DatabaseDeadLetters,
    InboxSink,
    ItemFlow,
    IterableSource,
    JetStreamSink,
    JetStreamSource,
    MemoryDeadLetters,
    NotBefore,
    Pipeline,
    QueueSource,
    RedisStreamSink,
    RedisStreamSource,
    calls,
    csv_rows,
    degrade,
    lines,
    pages,
    poll,
    table,
)
from seawall.resources import Channel

HUGE = 10**400

_SECONDS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (True, TypeError)]
_FINITE = [*_SECONDS, (inf, ValueError), (HUGE, ValueError)]
_POSITIVE = [*_FINITE, (0, ValueError)]
_COUNTS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)]
_TEXTS = [("", TypeError), (5, TypeError)]
_RNGS = [(5, TypeError), (Random, TypeError)]
_FUNCTIONS = [(5, TypeError), ("work", TypeError)]
_BATCHES = [(5, TypeError), ((1,), TypeError), ((0, 1.0), ValueError), ((5, -1.0), ValueError)]
_SOURCES = [(5, TypeError), ("text", TypeError), (b"text", TypeError)]


async def _work(value: Any) -> Any:
    return value


def _flow() -> ItemFlow[Any]:
    return Pipeline("bad").read([1])


def _stage(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    def stage(value: Any) -> Any:
        return _flow().stage(_work, **{name: value})

    def sink(value: Any) -> Any:
        return _flow().sink(_work, **{name: value})

    return [
        (f"pipeline.ItemFlow.stage({name})", stage, bads, advice),
        (f"pipeline.ItemFlow.sink({name})", sink, bads, advice),
    ]


def _collect(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    def make(value: Any) -> Any:
        return Collect(**{"sources": {"S1": _read}, "minimum": 1, "within": 1.0, name: value})

    return [(f"pipeline.Collect({name})", make, bads, advice)]


async def _read() -> int:
    return 1


def _every(value: Any) -> Any:
    return Collect({"S1": _read}, minimum=1, within=1.0).every(value)


_PIPELINE_NAMES: list[tuple[Any, type]] = [*_TEXTS, (None, TypeError)]
_DATABASE = Database(Sqlite("never-opened.db"), name="bad letters")


def _letters_in(database: Any) -> Any:
    return DatabaseDeadLetters(database, "bad")


def _letters(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    usual = {"name": "bad", "encode": str, "decode": str}

    def make(value: Any) -> Any:
        return DatabaseDeadLetters(_DATABASE, **{**usual, name: value})

    return [(f"pipeline.DatabaseDeadLetters({name})", make, bads, advice)]


def _looked(
    act: str, name: str, bads: list[tuple[Any, type]], advice: str, **given: Any
) -> list[tuple[Any, ...]]:
    memory, stored = MemoryDeadLetters("bad"), DatabaseDeadLetters(_DATABASE, "bad")
    return [
        (
            f"pipeline.{type(letters).__name__}.{word}({name})",
            lambda x, letters=letters, word=word: _done(
                getattr(letters, word)(**given, **{name: x})
            ),
            bads,
            advice,
        )
        for letters in (memory, stored)
        for word in (act, f"a{act}")
    ]


def _done(result: Any) -> Any:
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def _file(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    return [
        (
            f"pipeline.{made.__name__}({name})",
            lambda value, made=made: made(**{"path": "orders.txt", name: value}),
            bads,
            advice,
        )
        for made in (lines, csv_rows)
    ]


def _stream(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    usual: dict[str, dict[str, Any]] = {
        "RedisStreamSource": {"group": "billing"},
        "RedisStreamSink": {"key": str, "partitions": 2},
    }

    def make(kind: Any) -> Any:
        def made(value: Any) -> Any:
            given = {"target": "redis://127.0.0.1:1", "stream": "orders", **usual[kind.__name__]}
            return kind(**{**given, name: value})

        return made

    return [
        (f"pipeline.{kind.__name__}({name})", make(kind), bads, advice)
        for kind in (RedisStreamSource, RedisStreamSink)
        if name in signature(kind).parameters
    ]


_DATABASE = Database(Sqlite("never opened.db"), name="bad arguments of pipelines")


class _Client:
    async def get(self, _url: str, headers: Any) -> Any:
        """Answer nothing."""


def _asked(
    name: str, bads: list[tuple[Any, type]], advice: str, functions: tuple[str, ...]
) -> list[tuple[Any, ...]]:
    usual: dict[str, Any] = {
        "calls": lambda **given: calls(**{"function": _read, **given}),
        "pages": lambda **given: pages(**{"function": _work, **given}),
        "poll": lambda **given: poll(**{"client": _Client(), "url": "http://x", **given}),
    }
    return [
        (
            f"pipeline.{function}({name})",
            lambda value, make=usual[function]: make(**{name: value}),
            bads,
            advice,
        )
        for function in functions
    ]


def _store(_conn: Any, _value: Any) -> None:
    """Store nothing."""


def _table(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    def make(value: Any) -> Any:
        return table(**{"database": _DATABASE, "name": "orders", name: value})

    return [(f"pipeline.table({name})", make, bads, advice)]


def _jetstream(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    def source(value: Any) -> Any:
        usual = {"server": "nats://localhost", "stream": "orders", "consumer": "workers"}
        subject = {"subject": "orders.{partition}"} if name == "partitions" else {}
        return JetStreamSource(**{**usual, **subject, name: value})

    return [(f"pipeline.JetStreamSource({name})", source, bads, advice)]


def _jetstream_sink(name: str, bads: list[tuple[Any, type]], advice: str) -> list[tuple[Any, ...]]:
    def sink(value: Any) -> Any:
        usual: dict[str, Any] = {"server": "nats://localhost", "subject": "orders"}
        if name == "partitions":
            usual |= {"subject": "orders.{partition}", "key": str}
        return JetStreamSink(**{**usual, name: value})

    return [(f"pipeline.JetStreamSink({name})", sink, bads, advice)]


_SERVERS = [(5, TypeError), ([], TypeError), (None, TypeError), ([5], TypeError)]
_NAMES = [("", ValueError), ("a b", ValueError), ("a.b", ValueError), (5, ValueError)]
_PARTITIONS = [*_COUNTS, (2000, ValueError)]

PIPELINE: list[tuple[Any, ...]] = [
    ("pipeline.Pipeline(name)", Pipeline, [*_TEXTS, (None, TypeError)], "write a name"),
    (
        "pipeline.Pipeline(dead_letters)",
        lambda x: Pipeline("bad", dead_letters=x),
        [*_FUNCTIONS, (print, TypeError)],
        "",
    ),
    ("pipeline.Pipeline(rng)", lambda x: Pipeline("bad", rng=x), _RNGS, "random.Random"),
    ("pipeline.Pipeline.read(source)", Pipeline("bad").read, _SOURCES, "pass an iterable"),
    ("pipeline.Pipeline.read(name)", lambda x: Pipeline("b").read([1], name=x), _TEXTS, "write"),
    ("pipeline.Pipeline.stop(grace)", Pipeline("bad").stop, _FINITE, "seconds"),
    ("pipeline.Pipeline.run_sync(drain)", Pipeline("bad").run_sync, _FINITE, "seconds"),
    (
        "pipeline.Pipeline.test(call_sinks)",
        lambda x: _flow().sink(_work).test([1], call_sinks=x),
        [(1, TypeError), ("yes", TypeError)],
        "",
    ),
    ("pipeline.ItemFlow.stage(function)", lambda x: _flow().stage(x), _FUNCTIONS, ""),
    ("pipeline.ItemFlow.sink(function)", lambda x: _flow().sink(x), _FUNCTIONS, ""),
    ("pipeline.ItemFlow.branch(predicate)", lambda x: _flow().branch(x), _FUNCTIONS, ""),
    ("pipeline.ItemFlow.branch(name)", lambda x: _flow().branch(bool, name=x), _TEXTS, "write"),
    ("pipeline.ItemFlow.merge(others)", lambda x: _flow().merge(x), [(5, TypeError)], "flows"),
    *_stage("name", _TEXTS, "write a name"),
    *_stage("guard", [(5, TypeError)], "pass a Guard"),
    *_stage("workers", [*_COUNTS, (20_000, ValueError)], ""),
    *_stage("timeout", _POSITIVE, "seconds"),
    *_stage("batch", _BATCHES, "batch"),
    *_stage("ordered_by", _FUNCTIONS, ""),
    *_stage("when_failed", [("retry", ValueError), (None, ValueError)], "set_aside"),
    *_stage("on_failure", [("retry", ValueError), (None, ValueError)], "degrade"),
    *_stage("capacity", _COUNTS, ""),
    _stage("most_deaths", _COUNTS, "")[0],
    ("pipeline.degrade(function)", degrade, _FUNCTIONS, ""),
    (
        "pipeline.MemoryDeadLetters(name)",
        MemoryDeadLetters,
        _PIPELINE_NAMES,
        "name of the pipeline",
    ),
    ("pipeline.MemoryDeadLetters(most)", lambda x: MemoryDeadLetters("b", most=x), _COUNTS, ""),
    ("pipeline.DatabaseDeadLetters(database)", _letters_in, [(5, TypeError)], "pass a Database"),
    *_letters("name", _PIPELINE_NAMES, "name of the pipeline"),
    *_letters("lease", _POSITIVE, "seconds"),
    *_letters("poll", _POSITIVE, "seconds"),
    *_letters("encode", _FUNCTIONS, ""),
    *_letters("decode", _FUNCTIONS, ""),
    *(
        row
        for name, bads, advice in (
            ("state", [("lost", ValueError), (5, ValueError)], "write one of"),
            ("search", [(5, TypeError), ("x" * 300, ValueError)], "write"),
            ("after", [(5, ValueError), ("no place", ValueError)], "write None"),
            ("limit", [*_COUNTS, (1000, ValueError)], ""),
            ("payloads", [(1, TypeError)], ""),
        )
        for row in _looked("browse", name, bads, advice)
    ),
    *(row for act in ("inspect", "retry", "drop") for row in _looked(act, "id", _TEXTS, "write")),
    *_looked("inspect", "payload", [(1, TypeError)], "", id="s:1"),
    ("pipeline.NotBefore(seconds)", NotBefore, _FINITE, "seconds"),
    (
        "pipeline.BatchFailed(failures)",
        BatchFailed,
        [({}, TypeError), ({0: "no error"}, TypeError), ({"0": ValueError()}, TypeError)],
        "place",
    ),
    (
        "pipeline.BatchFailed(failures, results)",
        lambda x: BatchFailed({0: ValueError()}, x),
        [(5, TypeError), (iter(()), TypeError)],
        "results",
    ),
    (
        "pipeline.Collect(sources)",
        lambda x: Collect(x, minimum=1, within=1.0),
        [(5, TypeError), ({}, TypeError), ({"": _work}, TypeError), ({"S1": print}, TypeError)],
        "",
    ),
    *_collect("minimum", [*_COUNTS[1:], (2, ValueError)], ""),
    *_collect("within", _POSITIVE, "seconds"),
    *_collect("keep_last", _SECONDS, "seconds"),
    *_collect("name", _TEXTS, "write a name"),
    ("pipeline.Collect.every(seconds)", _every, _POSITIVE, "seconds"),
    (
        "pipeline.Collect.every(too_few)",
        lambda x: Collect({"S1": _read}, minimum=1, within=1.0).every(1.0, too_few=x),
        [("retry", ValueError), (None, ValueError)],
        "write 'skip'",
    ),
    *_file("path", [(5, TypeError), ("", TypeError)], "write the path"),
    *_file("checkpoint", [(5, TypeError), ("", TypeError)], "write the path"),
    *_file("every", _FINITE, "seconds"),
    *_file("follow", [(1, TypeError), ("yes", TypeError)], ""),
    *_file("name", _TEXTS, "write a name"),
    (
        "pipeline.IterableSource(items)",
        lambda x: IterableSource(x, checkpoint="place"),
        [*_SOURCES, (_work, TypeError)],
        "pass an iterable",
    ),
    *_jetstream("server", _SERVERS, "pass a URL"),
    *_jetstream("stream", _NAMES, "write a name"),
    *_jetstream("consumer", _NAMES, "write a name"),
    *_jetstream("subject", [*_TEXTS, ("orders.{partition}", ValueError)], "write"),
    *_jetstream("partitions", _PARTITIONS, ""),
    *_jetstream("decode", _FUNCTIONS, ""),
    *_jetstream("lost_after", _POSITIVE, "seconds"),
    *_jetstream("most_deliveries", _COUNTS, ""),
    *_jetstream("name", _TEXTS, "write a name"),
    *_jetstream_sink("server", _SERVERS, "pass a URL"),
    *_jetstream_sink("subject", [("", ValueError), ("a b", ValueError), ("a.>", ValueError)], ""),
    *_jetstream_sink("partitions", _PARTITIONS, ""),
    *_jetstream_sink("key", _FUNCTIONS, ""),
    *_jetstream_sink("identity", _FUNCTIONS, ""),
    *_jetstream_sink("encode", _FUNCTIONS, ""),
    *_stream("target", [(5, TypeError), ("localhost", ValueError)], "redis"),
    *_stream("stream", _TEXTS, "write a name"),
    *_stream("group", _TEXTS, "write a name"),
    *_stream("name", _TEXTS, "write a name"),
    *_stream("partitions", _COUNTS, ""),
    *_stream("decode", _FUNCTIONS, ""),
    *_stream("lost_after", _POSITIVE, "seconds"),
    *_stream("most_deliveries", _COUNTS, ""),
    *_stream("key", [*_FUNCTIONS, (None, ValueError)], ""),
    *_stream("identity", _FUNCTIONS, ""),
    *_stream("encode", _FUNCTIONS, ""),
    *_stream("max_length", _COUNTS, ""),
    ("pipeline.IterableSource(name)", lambda x: IterableSource([], name=x), _TEXTS, "write a name"),
    (
        "pipeline.IterableSource(checkpoint)",
        lambda x: IterableSource([], checkpoint=x),
        [(5, TypeError), ("", TypeError)],
        "write the path",
    ),
    ("pipeline.IterableSource(every)", lambda x: IterableSource([], every=x), _FINITE, "seconds"),
    ("pipeline.ChannelSource(channel)", ChannelSource, [(5, TypeError)], "pass a Channel"),
    (
        "pipeline.ChannelSource(name)",
        lambda x: ChannelSource(Channel(1), name=x),
        _TEXTS,
        "write a name",
    ),
    *_table("database", [(5, TypeError), (None, TypeError)], "pass a Database"),
    *_table("name", _TEXTS, "write a name"),
    *_table("position", [*_TEXTS, (None, TypeError)], "write a name"),
    *_table("checkpoint", [(5, TypeError), ("", ValueError)], "write"),
    *_table("columns", [([], TypeError), ("id", TypeError), ([5], TypeError)], "write names"),
    *_table("after", [(-1, ValueError), (1.5, TypeError), ("3", TypeError)], "after"),
    *_table("every", _FINITE, "seconds"),
    *_table("follow", [(1, TypeError), ("yes", TypeError)], ""),
    *_table("poll", _POSITIVE, "seconds"),
    *_table("source", _TEXTS, "write a name"),
    *_asked("function", [*_FUNCTIONS[:1]], "", ("calls", "pages")),
    *_asked("every", _POSITIVE, "seconds", ("calls", "pages", "poll")),
    *_asked("name", _TEXTS, "write a name", ("calls", "pages", "poll")),
    *_asked("checkpoint", [(5, TypeError), ("", TypeError)], "write the path", ("pages", "poll")),
    *_asked("save_every", _FINITE, "seconds", ("pages", "poll")),
    *_asked("client", [(5, TypeError), (None, TypeError)], "httpx.AsyncClient", ("poll",)),
    *_asked("url", [*_TEXTS, (None, TypeError)], "write where", ("poll",)),
    *_asked("items", _FUNCTIONS, "", ("poll",)),
    *_asked("following", _FUNCTIONS, "", ("poll",)),
    (
        "pipeline.DatabaseCheckpoint(database)",
        lambda x: DatabaseCheckpoint(x, "orders"),
        [(5, TypeError)],
        "pass a Database",
    ),
    (
        "pipeline.DatabaseCheckpoint(name)",
        lambda x: DatabaseCheckpoint(_DATABASE, x),
        [("", ValueError), (5, TypeError)],
        "write",
    ),
    (
        "pipeline.InboxSink(inbox)",
        lambda x: InboxSink(x, "store", _store),
        [(5, TypeError)],
        "pass an Inbox",
    ),
    (
        "pipeline.InboxSink(consumer)",
        lambda x: InboxSink(Inbox(_DATABASE), x, _store),
        _TEXTS,
        "write a name",
    ),
    (
        "pipeline.InboxSink(function)",
        lambda x: InboxSink(Inbox(_DATABASE), "store", x),
        [*_FUNCTIONS, (_work, TypeError)],
        "",
    ),
    (
        "pipeline.InboxSink(id)",
        lambda x: InboxSink(Inbox(_DATABASE), "store", _store, id=x),
        _FUNCTIONS,
        "",
    ),
    ("pipeline.QueueSource(queue)", QueueSource, [(5, TypeError)], "pass a queue"),
    (
        "pipeline.QueueSource(lease)",
        lambda x: QueueSource(LocalQueue(), lease=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "pipeline.QueueSource(name)",
        lambda x: QueueSource(LocalQueue(), name=x),
        _TEXTS,
        "write a name",
    ),
]

AWAITED_BY_PIPELINES = {
    "pipeline.calls(function)",
    "pipeline.pages(function)",
    "pipeline.Collect(sources)",
    "pipeline.ItemFlow.sink(function)",
    "pipeline.ItemFlow.stage(function)",
    "pipeline.InboxSink(function)",
    "pipeline.IterableSource(items)",  # an async generator begins at an offset, too
    "pipeline.JetStreamSink(server)",
    "pipeline.JetStreamSource(server)",
    "pipeline.Pipeline(dead_letters)",
    "pipeline.degrade(function)",
}
"""Arguments that may be async functions: what they return is awaited."""

MADE = {"pipeline.PageSource(ask)", "pipeline.FileSource(parse)", "pipeline.FileSource(is_whole)"}
"""Arguments that Seawall gives."""

DECORATORS = MADE | {"pipeline.ItemFlow.sink(guard)", "pipeline.ItemFlow.stage(guard)"}
"""Arguments that are guards, or what a family returns."""


def _given(name: str, *parameters: str) -> list[str]:
    return [f"pipeline.{name}({parameter})" for parameter in parameters]


def _source(*names: str) -> list[str]:
    methods = (("pull", "most"), ("acknowledge", "handles"), ("give_back", "handles"))
    return [
        given
        for name in names
        for method, argument in methods
        for given in _given(f"{name}.{method}", argument)
    ]


UNCHECKED_BY_PIPELINES = frozenset(
    [
        # made by Seawall
        *_given("ItemFlow", "pipeline", "ends"),
        *_given("Collection", "readings", "at"),
        *_given("CollectSource", "collect", "seconds", "too_few"),
        *_given("Reading", "state", "value", "age", "cause", "since"),
        *_given("Item", "value", "source", "handle", "read_at"),
        *_given("FileSource", "path", "parse", "is_whole", "checkpoint", "every", "follow", "name"),
        *_given("PageSource", "ask", "kind", "start", "every", "checkpoint", "save_every", "name"),
        *_given("TableSource", "reader", "name", "after", "place", "follow", "poll"),
        # called by Seawall
        *_source(
            "ChannelSource", "FileSource", "IterableSource", "QueueSource", "Source", "TableSource"
        ),
        *_source("PageSource", "RedisStreamSource", "JetStreamSource"),
        *_given("QueueSource.holds", "handle"),
        *_given("Checkpoint.save", "place"),
        *_given("DatabaseCheckpoint.save", "place"),
        *(
            f"pipeline.{store}.{act}({given})"
            for store in ("MemoryDeadLetters", "DatabaseDeadLetters", "DeadLetters")
            for act, given in (
                ("aadd", "letter"),
                ("aadd", "claim"),
                ("aclaim", "most"),
                ("arenew", "claims"),
                ("asettle", "claims"),
                ("arelease", "claims"),
            )
        ),
        *_given("RedisStreamSource.holds", "handle"),
        *_given("JetStreamSource.holds", "handle"),
        *_given("RedisStreamSink.__call__", "values"),
        *_given("JetStreamMessage", "id", "data", "subject", "headers"),
        *_given("TooManyDeliveries", "deliveries"),
        *_given("StreamHandle", "stream", "id", "identity", "deliveries", "token", "partition"),
        # whatever is wrong is an error of the iterable, or of random.Random
        *_given("Pipeline.test", "items", "seed"),
        # whatever the user's function takes
        *_given("pages", "start"),
    ]
)
