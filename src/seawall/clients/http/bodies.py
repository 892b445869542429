"""Bodies: which requests can be sent again, and how the body of a failed response is kept.

A request's body is sent again if reading it again starts from the beginning. All others are sent
once: of a generator that was started, or a file that was read, only the rest would be sent, and the
server would take that for the whole. Even a file that can be rewound has only one position: two
concurrent attempts would each get some of it.

The body of a failed response is read immediately, unless it is large or slow. Then its connection
is free during the pause before the next attempt, and the response can still be returned to the
caller. An error while reading is raised to the reader of the body, not before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, NoReturn

from seawall.clock import current_clock

KEPT: Final = 65_536
"""Maximum number of bytes of a failed response that are kept in memory."""

PATIENCE: Final = 1.0
"""Seconds after which reading stops: a failing server may send the body slowly."""

GIVEN_UP: Final = 2.0
"""Seconds after which an async client does not even wait for the next chunk.

Less, if the guard would cancel the attempt before: a cancelled attempt has no status and no
Retry-After.
"""


def is_text(body: object) -> bool:
    """Return whether `body` is completely in memory."""
    return body is None or isinstance(body, (bytes, bytearray, str))


def announces_little(headers: Mapping[str, str]) -> bool:
    """Return whether the headers of a failed response announce a body that is small enough."""
    length = headers.get("content-length", "")
    return length.isdecimal() and len(length) < 10 and int(length) <= KEPT  # noqa: PLR2004


def is_form(stream: object, *, shared: bool = False) -> bool:
    """Return whether `stream` is a multipart form (of httpx) whose files can be read again.

    If concurrent attempts are to share it (`shared`), no part may be an open file.
    """
    fields = getattr(stream, "fields", None)
    if type(stream).__name__ != "MultipartStream" or not isinstance(fields, list):
        return False
    files = [getattr(field, "file", None) for field in fields]
    return all(is_text(file) or (not shared and rewinds(file)) for file in files)


def rewinds(file: Any) -> bool:
    """Return whether `file` is at its beginning, to which the library rewinds it."""
    try:
        return bool(file.seekable()) and file.tell() == 0
    except Exception:  # noqa: BLE001 - not a regular file, so not reliable
        return False


class Enough:
    """Limit on how much of a failed response is read."""

    __slots__ = ("_clock", "_length", "_until", "head")

    def __init__(self) -> None:
        """Start the time limit."""
        self._clock = current_clock()
        self._until = self._clock.now() + PATIENCE
        self._length = 0
        self.head: list[bytes] = []
        """The chunks read so far."""

    def after(self, part: bytes) -> bool:
        """Add another chunk; return whether to stop reading."""
        self.head.append(part)
        self._length += len(part)
        return self._length > KEPT or self._clock.now() >= self._until


class Rejoined:
    """A body (of httpx) whose head was read: yields the head, and then the rest."""

    def __init__(self, head: list[bytes], rest: Any, stream: Any) -> None:
        """Start with `head`, continue with the iterator `rest` over `stream`."""
        self._head = head
        self._rest = rest
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield from self._head
        yield from self._rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._head:
            yield part
        async for part in self._rest:
            yield part

    def close(self) -> None:
        """Close the underlying stream."""
        try:
            getattr(self._rest, "close", _nothing)()
        finally:
            self._stream.close()

    async def aclose(self) -> None:
        """Close the underlying stream."""
        try:
            await getattr(self._rest, "aclose", _anothing)()
        finally:
            await self._stream.aclose()


class Broken:
    """The rest of a body that could not be read: raises the error to its reader."""

    def __init__(self, error: Exception) -> None:
        """Raise `error` instead of each chunk."""
        self._error = error
        self.closed = False
        """As of a file: urllib3 reads only from an object that is not closed."""

    def read(self, *_: object) -> NoReturn:
        """Raise the error, as a file would."""
        raise self._error

    def close(self) -> None:
        """Mark it as closed, as a file would."""
        self.closed = True

    def __iter__(self) -> Broken:
        return self

    def __next__(self) -> NoReturn:
        raise self._error

    def __aiter__(self) -> Broken:
        return self

    async def __anext__(self) -> NoReturn:
        raise self._error


def _nothing() -> None:
    pass


async def _anothing() -> None:
    pass
