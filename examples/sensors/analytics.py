"""Turns samples into features, and stores them: the pipeline that this example is about.

    seawall worker analytics:opened --drain 5

It reads the stream of the collector. Start it as often as you like: the processes share the
sensors, and what one of them has not finished another one takes. What fails costs the samples that
need it, and nothing else:

- the directory does not answer: samples go on without a place, and say why;
- a worker process dies of a sample: the sample is a dead letter after the third death;
- the database is away: samples wait, and the stream is read no further;
- SIGTERM: what is begun is finished within five seconds, the rest is given back to the stream;
- the process is killed: the others have its samples after `LOST_AFTER`, and store none twice.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import storage
from samples import PARTITIONS, STREAM, Sample, by_sensor, with_features

from seawall import Breaker, Guard, Retry, Timeout, transient
from seawall.pipeline import Pipeline, RedisStreamSource, degrade
from seawall.resources import CpuPool

LOST_AFTER = float(os.environ.get("LOST_AFTER", "10"))
plant = httpx.AsyncClient(base_url=os.environ.get("PLANT_URL", "http://127.0.0.1:8100"))
directory = Guard(
    "directory",
    Retry(on=transient, attempts=2, backoff=0.02),
    Breaker(consecutive=3, break_for=1.0),
    Timeout(0.3),
)


async def with_place(sample: Sample) -> Sample:
    """Ask the directory where the sensor is."""
    answer = await plant.get(f"/places/{sample.sensor}")
    answer.raise_for_status()
    return replace(sample, place=answer.json()["place"])


def without_place(sample: Sample, error: Exception) -> Sample:
    """Go on without it."""
    return replace(sample, lesser=f"no place: {type(error).__name__}")


def is_missing(sample: Sample) -> bool:
    """Tell whether there is nothing to analyse."""
    return bool(sample.missing)


def build(processes: CpuPool) -> Pipeline:
    """Return the pipeline."""
    stream = RedisStreamSource(
        os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"),
        STREAM,
        group="analytics",
        partitions=PARTITIONS,
        decode=Sample.from_entry,
        lost_after=LOST_AFTER,
    )
    pipeline = Pipeline("analytics", dead_letters=storage.dead_letters)
    missing, measured = pipeline.read(stream).branch(is_missing)
    analysed = measured.stage(
        with_place,
        guard=directory,
        workers=8,
        ordered_by=by_sensor,
        on_failure=degrade(without_place),
    ).stage(with_features, workers=processes, ordered_by=by_sensor)
    return analysed.merge(missing).sink(storage.store, guard=storage.guard, batch=(20, 0.2))


@asynccontextmanager
async def opened() -> AsyncIterator[Pipeline]:
    """Give the pipeline with all that it needs, and close that in the end."""
    await storage.prepare()
    async with plant:
        with CpuPool("features", workers=2) as processes:
            yield build(processes)
    await storage.engine.dispose()
