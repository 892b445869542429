"""Workers of every kind, for `seawall worker` to run and tests to stop.

The environment says where their work is kept (WORK: a folder, or the URL of a Valkey), the file in
which each thing that is begun and done is noted (NOTES), and whether some of it never ends (STUCK).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from random import Random
from typing import Any

from seawall import RedisStore
from seawall.durable import (
    Database,
    DeferredCalls,
    DeferredCallWorker,
    Dispatcher,
    JobHandle,
    Jobs,
    JobWorker,
    Outbox,
    OutboxEvent,
    Sqlite,
)
from seawall.jobs import Claim, Worker
from seawall.pipeline import Pipeline, lines
from seawall.redis import PriorityQueue

LEASE = 3600.0
"""Seconds: what is not given back is not taken by another process while a test lasts."""
STUCK = {"0", "1"}
"""What never ends, in a process where that is asked for."""

_chance = Random(7)


def note(what: str, number: Any) -> None:
    """Write it down at once: it outlives the process."""
    file = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what} {number}\n".encode())
    os.close(file)


async def do(number: Any) -> None:
    """Take a moment, or for ever."""
    note("begun", number)
    if str(number) in STUCK and os.environ.get("STUCK"):
        await asyncio.Event().wait()
    await asyncio.sleep(_chance.uniform(0.0, 0.05))  # noqa: TID251 - in a real process
    note("done", number)


async def do_job(job: JobHandle) -> None:
    """Do a durable job."""
    await do(job.payload)


async def deliver(event: OutboxEvent) -> None:
    """Deliver an event."""
    await do(event.aggregate_id)


async def do_claim(claim: Claim) -> None:
    """Do a job of a queue."""
    await do(claim.payload)


@cache
def database() -> Database:
    """Return the one of this process."""
    return Database(Sqlite(f"{os.environ['WORK']}/work.db"), name="work")


def jobs_of(where: Database) -> Jobs:
    """Return the durable jobs, which tests submit and `jobs` does."""
    return Jobs(where, lease=LEASE)


def jobs() -> JobWorker:
    """Do durable jobs."""
    return JobWorker(jobs_of(database()), {"any": do_job}, concurrency=8)


def outbox() -> Dispatcher:
    """Deliver events."""
    where = Outbox(database())
    return Dispatcher(where, deliver, batch=8, lease=LEASE)


async def later() -> list[DeferredCallWorker]:
    """Do stored calls; from an async function, which returns a list."""
    return [DeferredCallWorker(DeferredCalls(database(), "later"), do, concurrency=8, lease=LEASE)]


@asynccontextmanager
async def queue() -> AsyncIterator[Worker]:
    """Do the jobs of a queue, with a store that is closed at the end."""
    async with RedisStore(os.environ["WORK"], prefix=os.environ["PREFIX"], timeout=5.0) as store:
        yield Worker(
            PriorityQueue(store, "work", keep=2 * LEASE),
            do_claim,
            concurrency=8,
            lease=LEASE,
        )
        note("closed", "store")


def pipeline() -> Pipeline:
    """Do the lines of a file, to which more may be added."""
    made = Pipeline("lines")
    folder = os.environ["WORK"]
    numbers = lines(f"{folder}/numbers", checkpoint=f"{folder}/place", follow=True)
    made.read(numbers).sink(do, workers=8)
    return made


def pipelines() -> list[Pipeline]:
    """Do two files, each to its end."""
    made = []
    for number in range(2):
        one = Pipeline(f"numbers-{number}")
        one.read(lines(f"{os.environ['WORK']}/numbers")).sink(do, workers=8)
        made.append(one)
    return made


def pipeline_that_breaks() -> list[Pipeline]:
    """Stop at the first item, beside one that would go on."""
    broken = Pipeline("broken")
    broken.read([1]).sink(lambda number: 1 // (number - 1), name="divide", on_failure="stop")
    return [broken, pipeline()]


async def several() -> list[Any]:
    """Do all that is in the database."""
    return [jobs(), outbox(), *await later()]


def main(kind: str, drain: str) -> None:
    """Run one of them by `run_sync`, without the command line."""
    if kind == "queue":
        store = RedisStore(os.environ["WORK"], prefix=os.environ["PREFIX"], timeout=5.0)
        queued = PriorityQueue(store, "work", keep=2 * LEASE)
        worker: Any = Worker(queued, do_claim, concurrency=8, lease=LEASE)
    elif kind == "later":
        worker = DeferredCallWorker(
            DeferredCalls(database(), "later"), do, concurrency=8, lease=LEASE
        )
    else:
        worker = {"jobs": jobs, "outbox": outbox, "pipeline": pipeline}[kind]()
    worker.run_sync(float(drain))


if __name__ == "__main__":
    main(*sys.argv[1:])
