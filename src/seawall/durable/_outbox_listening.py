"""Being told of new events by PostgreSQL: on a connection of its own, never one of a pool.

A hint and no more: whoever is not told looks by itself a little later. So whatever goes wrong here
is tried again, and nobody waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, Final

from seawall.durable._sql import quoted
from seawall.models.backoff import full_jitter

if TYPE_CHECKING:
    import asyncio

AGAIN: Final = full_jitter(0.5, cap=30.0)
CLOSING: Final = 2.0


class Listening:
    """Calls `heard` when something is notified on a channel."""

    def __init__(
        self, channel: str, connect: Callable[[], Awaitable[Any]], heard: Callable[[], None]
    ) -> None:
        """Listen on what `connect` opens: a connection of asyncpg or of psycopg (async)."""
        if not callable(connect):
            raise TypeError(f"listen={connect!r}: pass a function that opens a connection")
        self._channel = channel
        self._connect = connect
        self._heard = heard
        self._task: asyncio.Task[None] | None = None
        self.is_listening = False

    def start(self, rng: Random) -> Listening:
        """Begin, in this event loop."""
        import asyncio

        self._task = asyncio.ensure_future(self._forever(rng))
        return self

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return what is to be cancelled to end it: closing the connection is part of that."""
        task, self._task = self._task, None
        return [] if task is None else [task]

    async def _forever(self, rng: Random) -> None:
        from seawall.runtime.runners import sleep_async

        delays = AGAIN.delays(rng.random)
        while True:
            try:
                connection = await self._connect()
                try:
                    if hasattr(connection, "add_listener"):
                        await self._by_asyncpg(connection)
                    else:
                        await self._by_psycopg(connection)
                finally:
                    if self.is_listening:
                        delays = AGAIN.delays(rng.random)  # it was good: soon again
                    self.is_listening = False
                    await _closed(connection)
            except Exception as error:  # noqa: BLE001 - polling goes on without it
                logging.getLogger("seawall").warning(
                    "not listening on %r: %s", self._channel, type(error).__name__
                )
            await sleep_async(next(delays))

    async def _by_asyncpg(self, connection: Any) -> None:
        import asyncio

        gone = asyncio.Event()
        connection.add_termination_listener(lambda _connection: gone.set())
        await connection.add_listener(self._channel, lambda *_told: self._heard())
        self._begun()
        if not connection.is_closed():
            await gone.wait()

    async def _by_psycopg(self, connection: Any) -> None:
        if not connection.autocommit:
            await connection.set_autocommit(True)
        await connection.execute(f"LISTEN {quoted(self._channel)}")
        self._begun()
        async for _told in connection.notifies():
            self._heard()

    def _begun(self) -> None:
        """Look once: what was told before was not heard."""
        self.is_listening = True
        self._heard()


async def _closed(connection: Any) -> None:
    import asyncio

    with suppress(Exception):
        async with asyncio.timeout(CLOSING):
            await connection.close()
