"""Request the status of one path from an HTTP server, over a new connection.

For health checks and probes: nothing is pooled, redirected, decoded or kept, so that the answer
shows the server's current state.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ssl import SSLContext

LONGEST: Final = 65_536  # maximum bytes of an answer that are read; only its first line matters
INTERIM: Final = 8  # interim answers such as "103 Early Hints" before the final one, at most


async def http_status(
    address: str,
    port: int,
    host: str,
    target: str,
    *,
    ssl: SSLContext | None = None,
    within: float | None = None,
    linger: float = 0.0,
) -> int:
    """GET `target` and return the status; 0 if the answer is not HTTP.

    `host` is the value of the Host header. Raise OSError, EOFError or ValueError if there is no
    valid answer `within` this many seconds. Then wait `linger` seconds for the server to close the
    connection first, so that it sees no reset.
    """
    writer = None
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(address, port, ssl=ssl, limit=LONGEST)
            writer.write(
                f"GET {target} HTTP/1.1\r\n"
                f"Host: {host}\r\nUser-Agent: seawall\r\nConnection: close\r\n\r\n"
                "".encode("ascii")
            )
            status = await _status(reader)
        if linger:
            try:
                async with asyncio.timeout(linger):
                    await reader.readexactly(LONGEST)
            except (OSError, EOFError):
                pass  # it has answered, whatever it does now
        return status
    finally:
        if writer is not None:
            writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> int:
    for _turn in range(INTERIM):
        version, status, *_ = (await reader.readline()).split(None, 2)
        if not version.startswith(b"HTTP/1.") or not status.isdigit():
            return 0
        if int(status) >= 200:  # noqa: PLR2004
            return int(status)
        while (await reader.readline()).strip():
            pass
    return 0
