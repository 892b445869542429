"""A small HTTP client for many requests on this machine: GET, JSON, keep-alive.

It is cheap, so that measurements show the service and not the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from seawall_demo._settings import HOST

LONGEST: Final = 4 * 2**20
"""Maximum size of an answer in bytes."""

_Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Broken(Exception):
    """No answer: the connection was refused or reset, or the answer is not the expected HTTP."""


class Caller:
    """Keeps connections to ports of this machine, and closes those of cancelled requests."""

    def __init__(self) -> None:
        """Start without connections."""
        self._idle: dict[int, list[_Link]] = {}

    async def get(
        self, port: int, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of a GET request; raise Broken."""
        lines = [f"GET {path} HTTP/1.1", f"Host: {HOST}:{port}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        idle = self._idle.setdefault(port, [])
        while idle:
            link = idle.pop()
            if link[0].at_eof() or link[1].is_closing():
                link[1].close()
                continue
            try:
                return await self._exchange(link, port, request)
            except Broken:
                break  # the server may have closed it while we wrote: try a new connection
        try:
            link = await asyncio.open_connection(HOST, port)
        except OSError as error:
            raise Broken(str(error)) from error
        return await self._exchange(link, port, request)

    async def _exchange(self, link: _Link, port: int, request: bytes) -> tuple[int, bytes]:
        reader, writer = link
        kept = False
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
            fields = dict(_fields(head))
            size = int(fields[b"content-length"])
            if not 0 <= size <= LONGEST:
                raise Broken(f"an answer of {size} bytes")
            body = await reader.readexactly(size)
            kept = fields.get(b"connection", b"").lower() != b"close"
        except (OSError, EOFError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        finally:
            if kept:
                self._idle.setdefault(port, []).append(link)
            else:
                writer.close()
        return status, body

    def close(self) -> None:
        """Close all idle connections."""
        for links in self._idle.values():
            for _reader, writer in links:
                writer.close()
        self._idle.clear()


def _fields(head: bytes) -> list[tuple[bytes, bytes]]:
    found = []
    for line in head.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            found.append((name.strip().lower(), value.strip()))
    return found
