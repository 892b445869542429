"""httpx and httpx2 are one library under two names, as far as a transport can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seawall.clients._bodies import Enough, Rejoined, is_form
from seawall.clients._exchange_errors import Library


class HttpxLibrary(Library):
    """What an exchange must know of httpx, or of httpx2."""

    def __init__(self, module: Any) -> None:
        """Speak for `module`."""
        super().__init__(
            module.__name__,
            error=module.TransportError,
            timeout_error=module.TimeoutException,
            transient=(
                module.NetworkError,
                module.TimeoutException,
                module.RemoteProtocolError,
                module.ProxyError,
            ),
        )
        self._module = module
        self._not_sent = (module.ConnectError, module.ConnectTimeout, module.PoolTimeout)
        streams = (Rejoined, module.SyncByteStream, module.AsyncByteStream)
        self._rejoined: Any = type("Rejoined", streams, {})

    def replayable(self, request: Any) -> bool:
        """Tell whether the body is bytes, or a form of files that can be read again."""
        stream = request.stream
        return isinstance(stream, self._module.ByteStream) or is_form(stream)

    def headers(self, request: Any) -> dict[str, str]:
        """Return the headers, those that are given several times joined."""
        found: dict[str, str] = {}
        for raw_name, raw_value in request.headers.raw:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    def copy(self, request: Any, headers: Mapping[str, str]) -> Any:
        """Return a request of its own for one attempt."""
        given = request.headers.raw
        if headers:
            others = [pair for pair in given if pair[0].decode("latin-1").lower() not in headers]
            given = [*others, *((name.encode(), headers[name].encode()) for name in headers)]
        return self._module.Request(
            request.method,
            request.url,
            headers=given,
            stream=request.stream,
            extensions=request.extensions,
        )

    def nothing_sent(self, error: Exception) -> bool:
        """Tell whether there was no connection yet."""
        return isinstance(error, self._not_sent)

    def note(self, response: Any, text: str) -> None:
        """Leave the note in `response.extensions["seawall_note"]`."""
        response.extensions["seawall_note"] = text

    def keep(self, response: Any) -> None:
        """Read the body of a failed answer, or the head of a large or slow one."""
        stream, read = response.stream, Enough()
        rest = iter(stream)
        for part in rest:
            if read.after(part):
                response.stream = self._rejoined(read.head, rest, stream)
                return
        stream.close()
        response.stream = self._module.ByteStream(b"".join(read.head))

    async def akeep(self, response: Any) -> None:
        """Do the same for an async one."""
        stream, read = response.stream, Enough()
        rest = aiter(stream)
        async for part in rest:
            if read.after(part):
                response.stream = self._rejoined(read.head, rest, stream)
                return
        await stream.aclose()
        response.stream = self._module.ByteStream(b"".join(read.head))


def lower_timeouts(request: Any, seconds: float | None) -> Any:
    """Let connecting, reading, writing and waiting for the pool take no longer than `seconds`."""
    if seconds is not None:
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            part: seconds if (known := given.get(part)) is None else min(known, seconds)
            for part in ("connect", "read", "write", "pool")
        }
    return request
