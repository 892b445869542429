"""PostgreSQL notifications of new events, on a dedicated connection outside the pool.

A notification is only a hint: without it, workers poll a little later. So every failure here is
retried, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, Final

from seawall.durable.database.statements import quoted
from seawall.models.backoff import full_jitter
from seawall.runtime.driver import sleep_async

RECONNECT_DELAYS: Final = full_jitter(0.5, cap=30.0)
CLOSE_TIMEOUT: Final = 2.0


class NotificationListener:
    """Calls `on_notification` at each notification on a channel."""

    def __init__(
        self,
        channel: str,
        connect: Callable[[], Awaitable[Any]],
        on_notification: Callable[[], object],
    ) -> None:
        """Listen on the connection that `connect` opens, of asyncpg or psycopg (async)."""
        if not callable(connect):
            raise TypeError(f"listen={connect!r}: pass a function that opens a connection")
        self._channel = channel
        self._connect = connect
        self._on_notification = on_notification
        self.is_listening = False

    def start(self, rng: Random) -> asyncio.Task[None]:
        """Start in this event loop; return the task, which closes the connection when cancelled."""
        return asyncio.ensure_future(self._forever(rng))

    async def _forever(self, rng: Random) -> None:
        delays = RECONNECT_DELAYS.delays(rng.random)
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
                        delays = RECONNECT_DELAYS.delays(rng.random)  # it worked: reconnect soon
                    self.is_listening = False
                    with suppress(Exception):
                        async with asyncio.timeout(CLOSE_TIMEOUT):
                            await connection.close()
            except Exception as error:  # noqa: BLE001 - polling continues without it
                logging.getLogger("seawall").warning(
                    "not listening on %r: %s", self._channel, type(error).__name__
                )
            await sleep_async(next(delays))

    async def _by_asyncpg(self, connection: Any) -> None:
        gone = asyncio.Event()
        connection.add_termination_listener(lambda _connection: gone.set())
        await connection.add_listener(self._channel, lambda *_notification: self._on_notification())
        self._on_listening()
        if not connection.is_closed():
            await gone.wait()

    async def _by_psycopg(self, connection: Any) -> None:
        if not connection.autocommit:
            await connection.set_autocommit(True)
        await connection.execute(f"LISTEN {quoted(self._channel)}")
        self._on_listening()
        async for _notification in connection.notifies():
            self._on_notification()

    def _on_listening(self) -> None:
        """Look once: earlier notifications were missed."""
        self.is_listening = True
        self._on_notification()
