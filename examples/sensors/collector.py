"""Reads the sensors twice a second, and writes what they say into a stream.

    seawall worker collector:opened

Each sensor has its own retry and breaker. One that is flaky is asked again, one that is dead costs
the others nothing: it is noted as missing, with the cause. With fewer than three of five there is
nothing to analyse; that is logged, and the next collection follows.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from uuid import uuid4

import httpx
from samples import PARTITIONS, STREAM, Sample, by_sensor

from seawall import Breaker, Guard, Retry, Timeout, transient
from seawall.pipeline import Collect, Collection, Pipeline, RedisStreamSink

SENSORS = ("S1", "S2", "S3", "S4", "S5")
plant = httpx.AsyncClient(base_url=os.environ.get("PLANT_URL", "http://127.0.0.1:8100"))

stream = RedisStreamSink(
    os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"),
    STREAM,
    key=by_sensor,
    partitions=PARTITIONS,
    encode=Sample.to_json,
)
sensors = Guard.family(
    "sensor",
    lambda _name: (
        Retry(on=transient, attempts=3, backoff=0.02),
        Breaker(consecutive=2, break_for=1.0),
        Timeout(0.2),
    ),
)


@sensors(by="name")
async def measure(name: str) -> list[float]:
    """Ask one sensor what it measures now."""
    answer = await plant.get(f"/sensors/{name}")
    answer.raise_for_status()
    vibration: list[float] = answer.json()["vibration"]
    return vibration


async def write(collection: Collection[list[float]]) -> None:
    """Write one entry for each sensor, also for those that are missing."""
    at = datetime.now(UTC).isoformat()
    await stream(
        [
            Sample(uuid4().hex, sensor, at, reading.value or [], missing=reading.cause)
            for sensor, reading in collection.readings.items()
        ]
    )


collect = Collect(
    {name: partial(measure, name) for name in SENSORS}, minimum=3, within=0.8, name="sensors"
)
pipeline = Pipeline("collector")
pipeline.read(collect.every(0.5)).sink(write)


@asynccontextmanager
async def opened() -> AsyncIterator[Pipeline]:
    """Give the pipeline, and close what it needs in the end."""
    async with plant:
        yield pipeline
    await stream.close()
