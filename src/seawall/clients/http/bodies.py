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

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
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


def has_small_body(headers: Mapping[str, str]) -> bool:
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


class HeadLimit:
    """Limit on how much of a failed response is read."""

    def __init__(self) -> None:
        self._clock = current_clock()
        self._until = self._clock.now() + PATIENCE
        self._length = 0
        self.head: list[bytes] = []
        """The chunks read so far."""

    def add(self, part: bytes) -> bool:
        """Add another chunk; return whether to stop reading."""
        self.head.append(part)
        self._length += len(part)
        return self._length > KEPT or self._clock.now() >= self._until


class StreamedBody:
    """A body (of httpx) on its way to its reader: the head that was read ahead, then the rest.

    Subclasses watch it: `_on_end` is called at its end, when it is closed, and when it is
    garbage-collected, perhaps more than once.
    """

    def __init__(self, stream: Any, head: Iterable[bytes] = (), rest: Any = None) -> None:
        """Start with `head`; continue with `rest`, an iterator over `stream`, or with `stream`."""
        self._stream = stream
        self._head = deque(head)
        self._rest = rest

    def _on_chunk(self, chunk: bytes) -> None:
        """Inspect a chunk, before the reader gets it."""

    def _on_end(self, error: BaseException | None) -> None:
        """Take note of the end; a GeneratorExit means that the reader is gone."""

    def __iter__(self) -> Iterator[bytes]:
        try:
            while self._head:
                yield self._head.popleft()
            for chunk in self._stream if self._rest is None else self._rest:
                self._on_chunk(chunk)
                yield chunk
        except GeneratorExit:
            raise  # the reader stopped: closing the body ends it
        except BaseException as error:
            self._on_end(error)
            raise
        self._on_end(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while self._head:
                yield self._head.popleft()
            async for chunk in self._stream if self._rest is None else self._rest:
                self._on_chunk(chunk)
                yield chunk
        except GeneratorExit:
            raise
        except BaseException as error:
            self._on_end(error)
            raise
        self._on_end(None)

    def close(self) -> None:
        """Close the body: what was read of it was good."""
        try:
            self._stream.close()
        finally:
            self._on_end(None)

    async def aclose(self) -> None:
        """Async twin of `close`."""
        try:
            await self._stream.aclose()
        finally:
            self._on_end(None)

    def __del__(self) -> None:
        self._on_end(GeneratorExit())


class PartlyReadBody(StreamedBody):
    """The body of a failed response: the rest is an iterator that was started."""

    def close(self) -> None:
        """Close the rest and the stream."""
        try:
            getattr(self._rest, "close", lambda: None)()
        finally:
            super().close()

    async def aclose(self) -> None:
        """Async twin of `close`."""
        try:
            if hasattr(self._rest, "aclose"):
                await self._rest.aclose()
        finally:
            await super().aclose()


@cache
def stream_class(kind: type[StreamedBody], library: str) -> Any:
    """Return `kind` as a stream of httpx or httpx2: clients accept only those of their library."""
    module = import_module(library)
    return type(kind.__name__, (kind, module.SyncByteStream, module.AsyncByteStream), {})


@lru_cache(maxsize=64)
def library_of(kind: type) -> str:
    """Return "httpx" or "httpx2" for a class of requests, possibly found by its bases."""
    for base in kind.__mro__:
        name = base.__module__.partition(".")[0]
        if name in {"httpx", "httpx2"}:
            return name
    raise TypeError(f"{kind.__name__}: send requests of httpx or of httpx2")


class BrokenBody:
    """The rest of a body that could not be read: raises the error to its reader."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.closed = False
        """As of a file: urllib3 reads only from an object that is not closed."""

    def read(self, *_: object) -> NoReturn:
        """Raise the error, as a file would."""
        raise self._error

    def close(self) -> None:
        """Mark it as closed, as a file would."""
        self.closed = True

    def __iter__(self) -> BrokenBody:
        return self

    def __next__(self) -> NoReturn:
        raise self._error

    def __aiter__(self) -> BrokenBody:
        return self

    async def __anext__(self) -> NoReturn:
        raise self._error
