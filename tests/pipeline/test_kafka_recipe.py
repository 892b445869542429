"""The Kafka source of the documentation, with a stand-in for aiokafka's consumer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, NamedTuple

from seawall.pipeline import Pipeline, Source
from seawall.testing import run_virtual
from tests.docs.test_snippets import ROOT, blocks


class Record(NamedTuple):
    offset: int
    value: int


class Consumer:
    """What the recipe uses of an AIOKafkaConsumer: partitions are texts here."""

    def __init__(self, log: dict[str, list[int]]) -> None:
        self.log = log
        self.committed: dict[str, int] = defaultdict(int)
        self.position: dict[str, int] = defaultdict(int)
        self.is_stopped = False

    async def getmany(self, *, timeout_ms: int, max_records: int) -> dict[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for partition, values in self.log.items():
            at = self.position[partition]
            taken = values[at : at + max_records]
            if taken:
                found[partition] = [Record(at + place, value) for place, value in enumerate(taken)]
                self.position[partition] += len(taken)
                max_records -= len(taken)
        if not found:
            await asyncio.sleep(timeout_ms / 1000)  # noqa: TID251 - virtual time
        return found

    async def commit(self, offsets: dict[str, int]) -> None:
        self.committed.update(offsets)

    async def stop(self) -> None:
        self.is_stopped = True


def recipe(consumer: Consumer) -> Any:
    """Return the source as it stands in the documentation."""
    page = ROOT / "docs" / "pipeline" / "streams.md"
    (block,) = (b for b in blocks(page.read_text("utf-8"), "python") if "KafkaSource" in b.text)
    namespace: dict[str, Any] = {}
    exec(block.text, namespace)  # noqa: S102 - our own page
    return namespace["KafkaSource"](consumer)


def test_an_offset_is_committed_when_all_items_before_it_have_ended():
    """In whatever order they end; those of a partition that was lost do not count."""

    async def main() -> None:
        consumer = Consumer({"a": [1, 2, 3], "b": [4]})
        source = recipe(consumer)
        assert isinstance(source, Source)
        pulled = dict(await source.pull(10))
        await source.acknowledge([pulled[3], pulled[2]])
        assert consumer.committed == {"a": 0}
        await source.acknowledge([pulled[1]])
        assert consumer.committed == {"a": 3}
        source.forget(["b"])
        assert not source.holds(pulled[4])
        await source.acknowledge([pulled[4]])
        await source.give_back([])
        assert consumer.committed == {"a": 3}
        await source.close()
        assert consumer.is_stopped

    run_virtual(main())


def test_a_pipeline_that_is_stopped_is_gone_on_with_by_the_next_process():
    """Items that had not ended come again; none is left out."""
    stored: list[int] = []
    log = {"a": list(range(50)), "b": list(range(100, 150))}

    async def run(consumer: Consumer, enough: int) -> None:
        pipeline = Pipeline(f"kafka {enough}")

        async def store(value: int) -> None:
            await asyncio.sleep(0.1)  # noqa: TID251 - virtual time
            stored.append(value)
            if len(stored) >= enough:
                pipeline.stop(0.0)

        pipeline.read(recipe(consumer)).sink(store, workers=3)
        await pipeline.run()

    async def main() -> None:
        first = Consumer(log)
        await run(first, 30)
        second = Consumer(log)
        second.position.update(first.committed)
        await run(second, 100 + len(stored) - sum(first.committed.values()))
        assert set(stored) == {*log["a"], *log["b"]}
        assert len(stored) <= 106

    run_virtual(main())
