"""Stands between the pods and Valkey, so that the way can be cut and mended.

Cut means what a dead server means to a client: what was open is reset, and nothing more is
accepted. The port stays ours meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

from seawall.demo._settings import HOST


class Relay:
    """Passes on what comes to a port of this machine to a socket file, both ways."""

    def __init__(self, target: Path) -> None:
        """Lead to `target`, once it is mended."""
        self.target = target
        self._server: asyncio.Server | None = None
        self.open: set[asyncio.Transport] = set()
        """Both ends of each connection that is there."""
        # Bound and never listening, it refuses; and it keeps the port while nothing else has it.
        self._reserve = socket.socket()
        self._reserve.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserve.bind((HOST, 0))
        self.port: int = self._reserve.getsockname()[1]

    def __repr__(self) -> str:
        state = "cut" if self._server is None else f"{len(self.open) // 2} connections"
        return f"<Relay at port {self.port}: {state}>"

    @property
    def whole(self) -> bool:
        """Whether the way is there."""
        return self._server is not None

    async def mend(self) -> None:
        """Let connections through."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: _Near(self), HOST, self.port, reuse_port=True
            )

    def cut(self) -> None:
        """Reset what is open and refuse what comes."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for transport in list(self.open):
            transport.abort()

    def close(self) -> None:
        """Cut it for good."""
        self.cut()
        self._reserve.close()


class _End(asyncio.Protocol):
    """One of the two ends of a connection: what comes in here goes out at the other."""

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
    """The end that a pod sees; it makes the other one."""

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
