"""Reads the sensors five times a second, and writes what they say into the journal.

    seawall worker collector:pipeline

Each sensor has its own retry and breaker. One that is flaky is asked again, one that is dead costs
the others nothing: it is noted as missing, with the cause. With fewer than three of five there is
nothing to analyse; that is logged, and the next collection follows.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
from samples import Sample

from seawall import Breaker, Guard, Retry, Timeout, transient
from seawall.pipeline import Collect, Collection, Pipeline

SENSORS = ("S1", "S2", "S3", "S4", "S5")
journal = Path(os.environ.get("JOURNAL", "journal.jsonl"))
plant = httpx.AsyncClient(base_url=os.environ.get("PLANT_URL", "http://127.0.0.1:8100"))

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


def write(collection: Collection[list[float]]) -> None:
    """Append one line for each sensor, also for those that are missing."""
    at = datetime.now(UTC).isoformat()
    with journal.open("a") as file:
        for sensor, reading in collection.readings.items():
            sample = Sample(uuid4().hex, sensor, at, reading.value or [], missing=reading.cause)
            file.write(sample.to_line())


collect = Collect(
    {name: partial(measure, name) for name in SENSORS}, minimum=3, within=0.8, name="sensors"
)
pipeline = Pipeline("collector")
pipeline.read(collect.every(0.2)).sink(write)
