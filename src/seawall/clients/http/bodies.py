"""Bodies: which of a request can be sent again, and how that of a failed answer is kept.

A request's body is sent again if it begins anew when it is read again. Everything else is sent
once: a generator that was begun, or a file that was read, would be sent as the half that is left,
and the server would take that for the whole. A file that begins anew has one place all the same:
two attempts at the same time would each get some of it.

The body of an answer that means failure is read at once, unless it is large or slow: then its
connection is free again during the pause before the next attempt, and it can still be handed out.
What breaks meanwhile breaks for whoever reads it, not before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, NoReturn

from seawall.clock import current_clock

KEPT: Final = 65_536
"""The most bytes of a failed answer that are kept in memory."""

PATIENCE: Final = 1.0
"""The seconds after which no more of it is read: a server in trouble may send it in drops."""

GIVEN_UP: Final = 2.0
"""The seconds after which an async client does not even wait for the next drop.

Fewer, if the guard would cancel it before: a cancelled attempt has no status, and no wishes.
"""


def is_text(body: object) -> bool:
    """Tell whether `body` is there as a whole."""
    return body is None or isinstance(body, (bytes, bytearray, str))


def is_form(stream: object, *, shared: bool = False) -> bool:
    """Tell whether `stream` is a multipart form (of httpx) whose files can be read again.

    If it is to be `shared`, by attempts that run at the same time, then no file may be an open one.
    """
    fields = getattr(stream, "fields", None)
    if type(stream).__name__ != "MultipartStream" or not isinstance(fields, list):
        return False
    files = [getattr(field, "file", None) for field in fields]
    return all(is_text(file) or (not shared and _rewinds(file)) for file in files)


def _rewinds(file: Any) -> bool:
    """Tell whether `file` stands at its beginning, to which the library goes back."""
    try:
        return bool(file.seekable()) and file.tell() == 0
    except Exception:  # noqa: BLE001 - not a file that can be asked, so not one to rely on
        return False


class Enough:
    """Tells when to stop reading a failed answer."""

    __slots__ = ("_clock", "_length", "_until", "head")

    def __init__(self) -> None:
        """Begin now."""
        self._clock = current_clock()
        self._until = self._clock.now() + PATIENCE
        self._length = 0
        self.head: list[bytes] = []
        """What has been read."""

    def after(self, part: bytes) -> bool:
        """Take another part; tell whether no more is to be read."""
        self.head.append(part)
        self._length += len(part)
        return self._length > KEPT or self._clock.now() >= self._until


class Rejoined:
    """A body (of httpx) of which the head was read: gives that, and then the rest of it."""

    def __init__(self, head: list[bytes], rest: Any, stream: Any) -> None:
        """Begin with `head`, go on with the iterator `rest` over `stream`."""
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
        """Close what the head was read from."""
        try:
            getattr(self._rest, "close", _nothing)()
        finally:
            self._stream.close()

    async def aclose(self) -> None:
        """Close what the head was read from."""
        try:
            await getattr(self._rest, "aclose", _anothing)()
        finally:
            await self._stream.aclose()


class Broken:
    """The rest of a body that could not be read: says so to whoever tries."""

    def __init__(self, error: Exception) -> None:
        """Raise `error` in place of each part."""
        self._error = error
        self.closed = False
        """As a file has it: urllib3 reads only from what says that it is open."""

    def read(self, *_: object) -> NoReturn:
        """Give no part, as a file would."""
        raise self._error

    def close(self) -> None:
        """Be closed, as a file would."""
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
