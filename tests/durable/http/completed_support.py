"""A till: an app whose handler completes its own request, with a payment in the same transaction.

Run as a program it is a worker that is killed between its commit and its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from seawall.durable import (
    Answer,
    Database,
    Idempotency,
    IdempotentRequests,
    NewEvent,
    Outbox,
    Sqlite,
    idempotent_request,
)
from seawall.durable.http.responses import Reply
from tests.durable.http.support import post, said, user

PAID = Answer(201, [(b"content-type", b"text/plain"), (b"location", b"/payments/1")], b"paid")


async def nothing(*_args: Any) -> None:
    """Do nothing."""


class Till:
    """Takes payments; `before`, `inside` and `after` its transaction a test may do something."""

    def __init__(self, database: Database, answer: Any = PAID, **options: Any) -> None:
        self.database = database
        self.answer = answer
        self.payments = database.names.table("payments")
        self.idempotency = Idempotency(database, **options)
        self.outbox = Outbox(database)
        self.options: dict[str, Any] = {}
        self.before: Callable[[], Awaitable[None]] = nothing
        self.inside: Callable[[], Awaitable[None]] = nothing
        self.after: Callable[[Any], Awaitable[Any]] = nothing
        self.runs = 0
        self.app = IdempotentRequests(self, self.idempotency, routes=["/orders"], scope=user)

    async def prepare(self) -> Till:
        """Make its table."""
        await self.database.arun(lambda: said(f"CREATE TABLE {self.payments} (cents integer)"))
        return self

    async def paid(self) -> int:
        """Return how many payments there are."""
        text = f"SELECT count(*) FROM {self.payments}"  # noqa: S608 - our own
        rows: Any = await self.database.arun(lambda: said(text))
        return int(rows[0][0])

    async def events(self) -> int:
        """Return how many events there are."""
        text = f"SELECT count(*) FROM {self.database.names.table('outbox')}"  # noqa: S608 - our own
        rows: Any = await self.database.arun(lambda: said(text))
        return int(rows[0][0])

    async def take(self, claim: Any) -> Any:
        """Take a payment, in one transaction."""
        pay = lambda: said(f"INSERT INTO {self.payments} VALUES (100)")  # noqa: E731, S608 - our own
        more = {"outbox": self.outbox, "events": [NewEvent("payment", "1", "paid", {})]}
        more |= self.options
        if isinstance(self.database.source, Sqlite):
            with self.database.transaction() as conn:
                self.database.connection(conn).run(pay())
                back = claim.complete(conn, self.answer, **more)
                await self.inside()
            return back
        async with self.database.atransaction() as conn:
            await self.database.connection(conn).arun(pay())
            back = await claim.acomplete(conn, self.answer, **more)
            await self.inside()
        return back

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        self.runs += 1
        await self.before()
        back = await self.take(idempotent_request(scope, required=True))
        reply: Reply = (await self.after(back)) or back
        await reply(scope, receive, send)


async def die(*_args: Any) -> None:
    """End as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


async def _main(url: str, schema: str, mode: str) -> None:
    if url.startswith("postgresql"):
        import asyncpg

        database = Database(await asyncpg.create_pool(url, min_size=1), schema=schema)
    else:
        database = Database(Sqlite(url))
    till = Till(database)
    if mode == "completed":
        till.after = die
    else:  # as it was without: what the middleware would store is not stored yet

        async def paid_and_dead(*_asked: Any) -> None:
            text = f"INSERT INTO {till.payments} VALUES (100)"  # noqa: S608 - our own
            await database.arun(lambda: said(text))
            await die()

        till.app.app = paid_and_dead
    await post(till.app)


if __name__ == "__main__":
    asyncio.run(_main(*json.loads(sys.argv[1])))
