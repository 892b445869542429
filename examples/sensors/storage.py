"""Where samples end: in a database, once, however often they come.

DATABASE_URL says which one it is: PostgreSQL, or a file of SQLite's.
"""

from __future__ import annotations

import os
from dataclasses import asdict

from samples import Sample
from sqlalchemy import Column, Float, Integer, MetaData, Table, Text, insert
from sqlalchemy.exc import DataError
from sqlalchemy.ext.asyncio import create_async_engine

from seawall import Breaker, Guard, Retry, Timeout, transient
from seawall.durable import Database, Inbox, amigrate
from seawall.pipeline import BatchFailed, DatabaseDeadLetters

tables = MetaData()
samples = Table(
    "samples",
    tables,
    Column("number", Integer, primary_key=True),
    Column("id", Text, nullable=False),
    Column("sensor", Text, nullable=False),
    Column("at", Text, nullable=False),
    Column("place", Text),
    Column("rms", Float),
    Column("missing", Text, nullable=False),
    Column("lesser", Text, nullable=False),
)
engine = create_async_engine(os.environ["DATABASE_URL"], pool_pre_ping=True)
database = Database(engine, name="samples")
inbox = Inbox(database)
dead_letters = DatabaseDeadLetters(
    database, "analytics", encode=Sample.to_json, decode=Sample.from_json
)

guard = Guard(
    "database",
    Retry(on=transient, attempts=3, backoff=0.05),
    # One outage that outlasts the retries, and samples wait until the database is back. A row that
    # the database refuses is no outage.
    Breaker(consecutive=1, is_failure=transient, break_for=0.5),
    Timeout(30.0),
)


async def prepare() -> None:
    """Make the tables that are missing."""
    await amigrate(database)
    async with engine.begin() as connection:
        await connection.run_sync(tables.create_all)


async def store(batch: list[Sample]) -> None:
    """Store each sample with the note that it is stored: all of them in one transaction.

    One that was stored before, by a process that died before it could say so, is left out. A row
    that the database refuses fails alone; the others are stored.
    """
    refused: dict[int, Exception] = {}
    async with engine.begin() as connection:
        for place, sample in enumerate(batch):
            try:
                async with inbox.once(connection, "samples", sample.id) as first:
                    if first:
                        async with connection.begin_nested():
                            await connection.execute(insert(samples), row_of(sample))
            except DataError as error:
                refused[place] = error
    if refused:
        raise BatchFailed(refused)


def row_of(sample: Sample) -> dict[str, object]:
    """Return what is stored of a sample."""
    return {name: value for name, value in asdict(sample).items() if name in samples.c}
