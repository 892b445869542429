"""A blocking library, used from an event loop without blocking it.

SQLite is queried in two dedicated threads, their queue is bounded, and the deadline of the request
is passed to the thread.

    python examples/blocking.py
"""

# ruff: noqa: T201 - it prints what it does

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

from seawall import Guard, ThreadBulkhead, current_deadline, deadline

database = Guard("database", ThreadBulkhead(2, max_queue=4))


def square(number: int) -> int:
    """Query the database, for no longer than the caller waits."""
    left = current_deadline()
    patience = left.remaining() if left else 5.0
    with closing(sqlite3.connect(":memory:", timeout=patience)) as connection:
        (answer,) = connection.execute("SELECT ? * ?", (number, number)).fetchone()
    return int(answer)


async def main() -> None:
    """Query six times at once: two run, four wait, and a seventh might be refused."""
    with deadline(30.0):
        print(await asyncio.gather(*(database.acall(square, n) for n in range(6))))
    with deadline(0.0):
        print((await database.aattempt(square, 7)).reason)


if __name__ == "__main__":
    asyncio.run(main())

# It prints:
#
# > [0, 1, 4, 9, 16, 25]
# > deadline_exceeded
