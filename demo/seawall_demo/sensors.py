"""The pipeline of the demo: reads five sensors, then enriches, analyses and stores their samples.

The class `Plant` simulates everything that the pipeline depends on, so that each part of it can be
broken. The worker processes that die are real, and so is the database, an SQLite file.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from seawall import _checks as check
from seawall_demo._lifeline import Lifeline, Message
from seawall_demo._settings import EVERY, pause
from seawall_demo._switches import PIPELINE

if TYPE_CHECKING:
    from seawall.durable import Inbox, Sqlite
    from seawall.pipeline import Collection, Pipeline
    from seawall.resources.executors.executors import CpuPool

SENSORS: Final = ("S1", "S2", "S3", "S4", "S5")
FLAKY: Final = {"S4": 0.02, "S5": 0.02}
"""Failure rates of sensors that are otherwise well: lower than what the page warns of."""
READ_EVERY: Final = 0.1
HANGS: Final = 30.0
POISONED: Final = 0.03
"""Share of samples, after the first one, with a record that kills the process."""
LOOSE_WIRE: Final = -999.0
HIGH: Final = 22.5
"""Temperature above which a sample is an alarm."""
SLOW_PLACE: Final = 1.5
SLOW_BATCH: Final = 4.0
MOST_ALARMS: Final = 1000
DRAIN: Final = 0.2
FINISH_WITHIN: Final = 10.0


class Plant:
    """Everything that the pipeline depends on."""

    def __init__(self, rng: Random | None = None) -> None:
        """Start with nothing broken."""
        self.broken: set[str] = set()
        self._poison_is_due = False
        """Whether the next sample is poison, so that the switch has an immediate effect."""
        self._rng = rng or Random()  # noqa: S311 - needs no secrecy

    def switch(self, name: str, *, on: bool) -> None:
        """Break something, or repair it."""
        name = check.choice("switch", name, [switch.name for switch in PIPELINE])
        if on:
            self.broken.add(name)
            self._poison_is_due |= name == "poison"
        else:
            self.broken.discard(name)

    async def measure(self, sensor: str) -> float:
        """Return the temperature at a sensor."""
        if sensor in self.broken:
            await pause(HANGS)
        await pause(self._rng.uniform(0.002, 0.02))
        if self._rng.random() < FLAKY.get(sensor, 0.0):
            raise ConnectionError("no signal")
        if sensor == "S5" and "poison" in self.broken:
            is_poison = self._poison_is_due or self._rng.random() < POISONED
            self._poison_is_due = False
            if is_poison:
                return LOOSE_WIRE
        return self._rng.gauss(20.0, 1.0)

    async def place_of(self, sensor: str) -> str:
        """Look up the place of a sensor in the directory."""
        if "down" in self.broken:
            raise ConnectionRefusedError("the directory is down")
        await pause(SLOW_PLACE if "slow" in self.broken else self._rng.uniform(0.005, 0.02))
        return f"hall {SENSORS.index(sensor) + 1}"

    async def reach_database(self) -> None:
        """Connect to the database."""
        if "failover" in self.broken:
            raise ConnectionRefusedError("the database fails over")
        if "sink" in self.broken:
            await pause(SLOW_BATCH)


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of the sensors at one moment."""

    id: str
    values: dict[str, float]
    missing: tuple[str, ...]
    place: str | None = None
    hottest: float = math.nan

    @classmethod
    def of(cls, collection: Collection[float]) -> Sample:
        """Create a sample from a collection."""
        return cls(uuid4().hex, collection.values, tuple(collection.missing))


def without_place(sample: Sample, _error: Exception) -> Sample:
    """Continue without the data of the directory."""
    return sample


def analyse(sample: Sample) -> Sample:
    """Compute the features of a sample; simulates a library that crashes on some records."""
    if LOOSE_WIRE in sample.values.values():
        os._exit(139)
    return replace(sample, hottest=max(sample.values.values()))


def is_alarm(sample: Sample) -> bool:
    """Return whether the sample is an alarm."""
    return sample.hottest > HIGH


class Storage:
    """Samples in an SQLite file, each stored once."""

    def __init__(self, plant: Plant, file: Sqlite, inbox: Inbox) -> None:
        """Create the table."""
        self._plant = plant
        self._file = file
        self._inbox = inbox
        file.run(lambda db: db.execute("CREATE TABLE samples (id text, place text, hottest real)"))

    async def store(self, samples: list[Sample]) -> None:
        """Store a batch in one transaction."""
        await self._plant.reach_database()
        await self._file.arun(lambda connection: self._insert(connection, samples))

    def _insert(self, connection: Any, samples: list[Sample]) -> None:
        for sample in samples:
            with self._inbox.once(connection, "samples", sample.id) as first:
                if first:
                    row = (sample.id, sample.place, sample.hottest)
                    connection.execute("INSERT INTO samples VALUES (?, ?, ?)", row)


def build(plant: Plant, storage: Storage, processes: CpuPool) -> Pipeline:
    """Return the pipeline."""
    from seawall import Breaker, Guard, Retry, Timeout, transient
    from seawall.pipeline import Collect, Pipeline, degrade

    sensors = Guard.family(
        "sensor",
        lambda _name: (
            # A sensor that does not answer at all is read again by the next collection.
            Retry(on=ConnectionError, attempts=3, backoff=0.02),
            Breaker(consecutive=2, break_for=0.5),
            Timeout(0.15),
        ),
    )
    directory = Guard(
        "directory",
        Retry(on=transient, attempts=2, backoff=0.02),
        Breaker(consecutive=3, break_for=0.5),
        Timeout(0.25),
    )
    database = Guard(
        "database",
        Retry(on=transient, attempts=3, backoff=0.05),
        Breaker(consecutive=1, is_failure=transient, break_for=0.5),
    )
    measure = sensors(by="sensor")(plant.measure)
    collect = Collect(
        {name: partial(measure, name) for name in SENSORS}, minimum=3, within=0.5, name="plant"
    )
    alarms: deque[Sample] = deque(maxlen=MOST_ALARMS)

    async def add_place(sample: Sample) -> Sample:
        return replace(sample, place=await plant.place_of(next(iter(sample.values))))

    pipeline = Pipeline("analytics")
    alarming, normal = (
        pipeline.read(collect.every(READ_EVERY))
        .stage(Sample.of, name="sample")
        .stage(
            add_place, guard=directory, workers=4, on_failure=degrade(without_place), capacity=20
        )
        .stage(analyse, workers=processes, capacity=20)
        .branch(is_alarm)
    )
    alarming.sink(alarms.append, name="raise_alarm")
    return normal.sink(storage.store, guard=database, batch=(20, 0.25), capacity=40)


async def _nothing(_scope: Any, _receive: Any, send: Any) -> None:
    """Answer 404: this process serves only its dashboard."""
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _main(lifeline: Lifeline, folder: str) -> None:
    from seawall.dashboard import Dashboard
    from seawall.durable import Database, Inbox, Sqlite, migrate
    from seawall.resources.executors.executors import CpuPool
    from seawall_demo._serving import serve
    from seawall_demo.pod import beside

    plant = Plant()
    with (
        closing(Sqlite(Path(folder) / "samples.db")) as file,
        CpuPool("features", workers=2) as processes,
    ):
        database = Database(file, name="samples")
        migrate(database)
        pipeline = build(plant, Storage(plant, file, Inbox(database)), processes)
        running = asyncio.create_task(pipeline.run())

        reports: set[asyncio.Task[None]] = set()

        def on_message(message: Message) -> None:
            if "start" in message:
                reports.add(asyncio.create_task(report()))
            elif "finish" in message:
                pipeline.stop(FINISH_WITHIN)
            else:
                plant.switch(message["switch"], on=message["on"])

        async def report() -> None:
            """Report each second how items have ended, and finally that all have."""
            while not running.done():
                lifeline.send(account=account(pipeline))
                await asyncio.wait([running], timeout=1.0)
            lifeline.send(account=account(pipeline), finished=True)

        dashboard = Dashboard(local=True, operate=lambda _visit: "demo", pod="plant", every=EVERY)
        try:
            await serve(beside(_nothing, dashboard), lifeline, on_message=on_message)
        finally:
            pipeline.stop(DRAIN)
            await running


def account(pipeline: Pipeline) -> dict[str, int]:
    """Return how many items were read, and how they ended."""
    seen = pipeline.snapshot()
    names = ("read", "in_flight", "sink", "degraded", "dead_letter", "dropped", "returned")
    return {name: seen[name] for name in names}


if __name__ == "__main__":
    asyncio.run(_main(Lifeline(), *sys.argv[1:]))
