"""A relay between the pods and Valkey, so that the connection can be cut and restored.

Cutting looks like a dead server to a client: open connections are reset, and no more are accepted.
The port stays reserved in the meantime.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

from seawall_demo._settings import HOST


class Relay:
    """Forwards a port of this machine to a socket file, both ways."""

    def __init__(self, target: Path) -> None:
        """Forward to `target`, once `mend` is called."""
        self.target = target
        self._server: asyncio.Server | None = None
        self.open: set[asyncio.Transport] = set()
        """Both ends of each open connection."""
        # Bound but never listening, this socket refuses connections and keeps the port reserved.
        self._reserve = socket.socket()
        self._reserve.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserve.bind((HOST, 0))
        self.port: int = self._reserve.getsockname()[1]

    async def mend(self) -> None:
        """Accept connections."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: _Near(self), HOST, self.port, reuse_port=True
            )

    def cut(self) -> None:
        """Reset open connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for transport in list(self.open):
            transport.abort()

    def close(self) -> None:
        """Cut the connection for good."""
        self.cut()
        self._reserve.close()


class _End(asyncio.Protocol):
    """One of the two ends of a connection: data received here is written to the other."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.own: asyncio.Transport | None = None
        self.other: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.own = cast("asyncio.Transport", transport)
        self.relay.open.add(self.own)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self.own is not None:
            self.relay.open.discard(self.own)
        if self.other is not None:
            self.other.close()


class _Near(_End):
    """The end that a pod sees; it opens the other one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._reaching = asyncio.get_running_loop().create_task(self._reach())

    async def _reach(self) -> None:
        far = _End(self.relay)
        far.other = self.own
        try:
            await asyncio.get_running_loop().create_unix_connection(
                lambda: far, str(self.relay.target)
            )
        except OSError:
            if self.own is not None:
                self.own.abort()
            return
        if self.own is None or self.own.is_closing():
            if far.own is not None:
                far.own.abort()
            return
        self.other = far.own
        if self.other is not None:
            self.other.writelines(self.early)
        self.early.clear()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._reaching.cancel()
