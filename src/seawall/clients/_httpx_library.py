"""httpx and httpx2 are one library under two names, as far as a transport can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from seawall.clients._bodies import GIVEN_UP, Broken, Enough, Rejoined, is_form
from seawall.clients._exchange_errors import Library
from seawall.clients._httpx_timeouts import TimeLeft, time_left
from seawall.clock import Clock

TRIED: Final = "seawall.tried"
"""The extension of a request that holds the hosts which its call has asked already."""


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
            attributes={"_request": None},
        )
        self._module = module
        self._not_sent = (module.ConnectError, module.ConnectTimeout, module.PoolTimeout)
        streams = (Rejoined, module.SyncByteStream, module.AsyncByteStream)
        self._rejoined: Any = type("Rejoined", streams, {})
        self._late_to_send: dict[str, type[Exception]] = {
            "pool": module.PoolTimeout,
            "connect": module.ConnectTimeout,
            "write": module.WriteTimeout,
        }
        self._late = {**self._late_to_send, "read": module.ReadTimeout}

    def replayable(self, request: Any) -> bool:
        """Tell whether the body is bytes, or a form of files that can be read again."""
        stream = request.stream
        return isinstance(stream, self._module.ByteStream) or is_form(stream)

    def shareable(self, request: Any) -> bool:
        """Tell whether the body is bytes, also where it is a form."""
        stream = request.stream
        return isinstance(stream, self._module.ByteStream) or is_form(stream, shared=True)

    def headers(self, request: Any) -> dict[str, str]:
        """Return the headers, those that are given several times joined."""
        found: dict[str, str] = {}
        for raw_name, raw_value in request.headers.raw:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    def copy(self, request: Any, headers: Mapping[str, str], tried: set[str]) -> Any:
        """Return a request of its own for one attempt."""
        given = request.headers.raw
        if headers:
            others = [pair for pair in given if pair[0].decode("latin-1").lower() not in headers]
            # Back to the very bytes that `headers` read: they may be those of another encoding.
            ours = ((name.encode(), value.encode("latin-1")) for name, value in headers.items())
            given = [*others, *ours]
        return self._module.Request(
            request.method,
            request.url,
            headers=given,
            stream=request.stream,
            extensions={TRIED: tried, **request.extensions},
        )

    def nothing_sent(self, error: Exception) -> bool:
        """Tell whether there was no connection yet."""
        return isinstance(error, self._not_sent)

    def note(self, response: Any, text: str) -> None:
        """Leave the note in `response.extensions["seawall_note"]`."""
        response.extensions["seawall_note"] = text

    def keep(self, response: Any) -> bool:
        """Read the body of a failed answer, or the head of a large or slow one."""
        stream, read, whole = response.stream, Enough(), False
        rest: Any = iter(stream)
        try:
            for part in rest:
                if read.after(part):
                    break
            else:
                whole = True
        except Exception as error:  # noqa: BLE001 - for who reads the answer, if anybody does
            rest = Broken(error)
        response.stream = self._rejoined(read.head, rest, stream)
        if whole:
            stream.close()
            response.stream = self._module.ByteStream(b"".join(read.head))
        return whole

    async def akeep(self, response: Any) -> bool:
        """Do the same for an async one, and give it up if nothing comes.

        That is before the guard would cancel it, if `response` knows the request as it was sent.
        """
        from asyncio import timeout

        stream, read, whole = response.stream, Enough(), False
        left = time_left(getattr(response, "_request", None))
        patience = GIVEN_UP if left is None else min(GIVEN_UP, left)
        rest: Any = aiter(stream)
        try:
            async with timeout(patience):
                async for part in rest:
                    if read.after(part):
                        break
                else:
                    whole = True
        except TimeoutError:
            rest = Broken(self._late["read"]("the rest of the failed answer did not come"))
        except Exception as error:  # noqa: BLE001 - for who reads the answer, if anybody does
            rest = Broken(error)
        response.stream = self._rejoined(read.head, rest, stream)
        if whole:
            await stream.aclose()  # who is cancelled here leaves a response that can be closed
            response.stream = self._module.ByteStream(b"".join(read.head))
        return whole

    def lower_timeouts(
        self, request: Any, seconds: float | None, clock: Clock, *, cancels: bool
    ) -> Any:
        """Let waiting for the pool, connecting, writing and reading take no more than `seconds`.

        Reading not, where somebody else `cancels` it: then a stream that is begun to be read before
        it is handed out has the user's read timeout all along.
        """
        if seconds is not None:
            own = request.extensions.get("timeout") or {}
            late = self._late_to_send if cancels else self._late
            request.extensions["timeout"] = TimeLeft(own, seconds, clock, late)
        return request
