"""A connection to NATS, and a message of a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from seawall._failures import described
from seawall.runtime.abandon import end

MOST_PARTITIONS: Final = 1024
RECONNECT_AFTER: Final = 0.2
"""Seconds between two attempts to connect."""

_log = logging.getLogger("seawall")


class JetStreamMessage(NamedTuple):
    """A message of a stream, as the stages get it."""

    id: str
    """The same in each delivery: its Nats-Msg-Id, or stream, sequence and time of storage."""
    data: bytes
    subject: str
    headers: dict[str, str]


class JetStreamConnection:
    """A connection to NATS: the user's, or one that is made when it is needed first."""

    def __init__(self, server: Any, user: str) -> None:
        """Take a URL, several, a client of nats-py, or an async function that returns one."""
        self._client: Any = None
        self._connect: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self._connecting: asyncio.Task[Any] | None = None
        urls = [server] if isinstance(server, str) else server
        if isinstance(urls, list | tuple) and urls and all(isinstance(url, str) for url in urls):
            try:
                import nats
            except ImportError as error:
                raise ImportError(f"{user} needs nats-py: pip install 'seawall[nats]'") from error
            self._connect = lambda: nats.connect(
                servers=list(urls),
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_AFTER,
                error_cb=_note,
            )
        elif hasattr(server, "jetstream"):
            self._client = server
        elif callable(server):
            self._connect = server
        else:
            raise TypeError(
                f"server={server!r}: pass a URL such as 'nats://localhost:4222', a client of"
                " nats-py, or an async function that connects one"
            )

    async def client(self) -> Any:
        """Return the client, connected."""
        if self._client is None:
            assert self._connect is not None  # noqa: S101 - one of the two is there
            if self._connecting is None:
                self._connecting = asyncio.ensure_future(self._connect())
            # Shielded: a client of nats-py that is cancelled while it connects leaves its socket.
            connecting = self._connecting
            try:
                self._client = await asyncio.shield(connecting)
            finally:
                if connecting.done():
                    self._connecting = None
        return self._client

    async def close(self) -> None:
        """Close the connection, unless it is the user's."""
        if self._connecting is not None:
            connecting, self._connecting = self._connecting, None
            await end([connecting])
            # It may go on in spite of its cancellation.
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                self._client = connecting.result()
        if self._connect is not None and self._client is not None:
            client, self._client = self._client, None
            await client.close()


async def _note(error: Exception) -> None:
    """Log what the client reports; it connects again by itself."""
    _log.debug("NATS: %s", described(error))
