"""What the tests of inbox and FIFO share: transactions by any driver, and a receiver's world."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from seawall.durable import Database
from seawall.durable.database.connections import TextQuery
from seawall.durable.fifo import FifoMessage, FifoReceiver, FifoSender


class Crashed(Exception):
    pass


@asynccontextmanager
async def begun(database: Database) -> AsyncIterator[Any]:
    """Give a connection with a transaction begun, and commit it at the end."""
    if database.is_async:
        async with database.atransaction() as connection:
            yield connection
    else:
        with database.transaction() as connection:
            yield connection


@asynccontextmanager
async def entered(database: Database, block: Any) -> AsyncIterator[Any]:
    """Enter a block as the database's connections want it."""
    if database.is_async:
        async with block as given:
            yield given
    else:
        with block as given:
            yield given


async def ask(database: Database, connection: Any, text: str, **arguments: Any) -> Any:
    """Ask something on a connection that has a transaction begun."""

    def steps() -> Any:
        return (yield TextQuery(text, arguments))

    own = database.connection(connection)
    return await own.arun(steps()) if own.kind.is_async else own.run(steps())


async def drop(database: Database, connection: Any) -> None:
    """Let the connection be gone, with all that was not committed."""
    if database.dialect == "sqlite":
        connection.close()
    await ask(database, connection, "SELECT pg_terminate_backend(pg_backend_pid())")


async def send(sender: FifoSender, payload: str) -> FifoMessage:
    """Send in a transaction of its own."""
    async with begun(sender.database) as connection:
        if sender.database.is_async:
            return await sender.asend(connection, payload)
        return sender.send(connection, payload)


class World:
    """A receiver whose effects are rows of a table: written where its place is."""

    def __init__(self, database: Database, **options: Any) -> None:
        self.database = database
        self.receiver = FifoReceiver(database, "billing", **options)

    async def set_up(self) -> None:
        async with begun(self.database) as connection:
            text = "CREATE TABLE {effects} (position {serial}, sequence bigint, payload text)"
            kind = (
                "bigint GENERATED ALWAYS AS IDENTITY"
                if self.database.dialect == "postgres"
                else "integer PRIMARY KEY AUTOINCREMENT"
            )
            await ask(self.database, connection, text.replace("{serial}", kind))

    async def take(self, message: FifoMessage | None, crash: str = "", sender: str = "shop") -> Any:
        """Receive, and make the effects; crash before the end of the block, or of the commit."""
        async with begun(self.database) as connection:
            block = (
                self.receiver.drain(connection, sender)
                if message is None
                else self.receiver.receive(connection, *message)
            )
            async with entered(self.database, block) as ready:
                for one in ready:
                    await ask(
                        self.database,
                        connection,
                        "INSERT INTO {effects} (sequence, payload) VALUES (:sequence, :payload)",
                        sequence=one.sequence,
                        payload=one.payload.decode(),
                    )
                if crash == "inside":
                    raise Crashed
                if crash == "dropped":
                    await drop(self.database, connection)
            if crash == "before the commit":
                raise Crashed
        return ready

    async def effects(self) -> list[int]:
        async with begun(self.database) as connection:
            text = "SELECT sequence FROM {effects} ORDER BY position"
            return [number for (number,) in await ask(self.database, connection, text)]
