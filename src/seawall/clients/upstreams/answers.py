"""Responses of hosts: their bodies are watched, and their redirects lead back to the set.

A host is done when the body is: a hundred open streams are load, and a body that breaks off is a
failure, however well it began. The outcome of a body is reported once: at its end, when it is
closed, or when it is garbage-collected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from seawall.clients.upstreams.picks import Pick

LIBRARIES: Final = ("httpx", "httpx2")

CREATED: Final = 201
REDIRECTS: Final = range(300, 400)


class Body:
    """The body of a response; reports its end to `pick`."""

    def __init__(self, stream: Any, pick: Pick) -> None:
        """Pass on the chunks of `stream`."""
        self._stream = stream
        self._pick = pick

    def __del__(self) -> None:
        self._pick._end(GeneratorExit())  # not a failure; does nothing if it has ended


class SyncBody(Body):
    """The body of a response of a sync client."""

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._stream
        except GeneratorExit:
            raise  # the reader stopped: closing the body ends it
        except BaseException as error:
            self._pick._end(error)
            raise
        self._pick._end(None)

    def close(self) -> None:
        """Close the body: what was read of it was good."""
        try:
            self._stream.close()
        finally:
            self._pick._end(None)


class AsyncBody(Body):
    """The body of a response of an async client."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._stream:
                yield part
        except GeneratorExit:
            raise  # the reader stopped: closing the body ends it
        except BaseException as error:
            self._pick._end(error)
            raise
        self._pick._end(None)

    async def aclose(self) -> None:
        """Close the body: what was read of it was good."""
        try:
            await self._stream.aclose()
        finally:
            self._pick._end(None)


class TransportParts(NamedTuple):
    """The required parts of httpx or httpx2."""

    module: Any
    failures: tuple[type[Exception], ...]
    """Exceptions that a host may have caused: others come from the user's own body, or are bugs."""
    sync_body: Any
    async_body: Any


@lru_cache(maxsize=64)
def library_of(kind: Any) -> TransportParts:
    """Return the library of a request class, possibly found by its bases."""
    for base in kind.__mro__:
        name = base.__module__.partition(".")[0]
        if name in LIBRARIES:
            return _library(name)
    raise TypeError(f"{kind.__name__}: send requests of httpx or of httpx2")


@lru_cache(maxsize=len(LIBRARIES))
def _library(name: str) -> TransportParts:
    module = import_module(name)
    return TransportParts(
        module,
        (module.TransportError, OSError),
        # A client requires a stream class of its own library, and of its own kind.
        type("SyncBody", (SyncBody, module.SyncByteStream), {}),
        type("AsyncBody", (AsyncBody, module.AsyncByteStream), {}),
    )


def send_back(response: Any, asked: Any, sent: Any, prefix: str) -> None:
    """Rewrite a `Location` at the chosen host to the host that the user requested.

    `asked` is the URL that the user wrote, `sent` the one that was sent. Otherwise a redirect would
    bypass the other hosts, and the client would treat it as another origin and drop the user's
    credentials.
    """
    if response.status_code not in REDIRECTS and response.status_code != CREATED:
        return
    location = response.headers.get("location")
    if location is None or not (prefix or "//" in location):
        return  # a relative URL fits both
    try:
        target = sent.join(location)
        own = (target.scheme, target.host, target.port) == (sent.scheme, sent.host, sent.port)
        path = target.raw_path.decode("ascii")
        if not own or not path.startswith(prefix) or path[len(prefix) :][:1] not in ("", "/", "?"):
            return
        rest = path[len(prefix) :]
        if not rest.startswith("/"):
            rest = f"/{rest}"
        back = asked.copy_with(
            userinfo=b"", raw_path=rest.encode("ascii"), fragment=target.fragment or None
        )
    except Exception:  # noqa: BLE001 - a host may send anything: leave it unchanged
        return
    response.headers["location"] = str(back)
