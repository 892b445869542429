"""Adapter for httpx and httpx2, which are identical as far as a transport can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from seawall.clients.http.bodies import (
    GIVEN_UP,
    Broken,
    HeadLimit,
    RejoinedBody,
    is_form,
    stream_class,
)
from seawall.clients.http.library import Library, a_moment
from seawall.clock import Clock

_SENDING: Final = ("connect", "write")
_LEAST: Final = 0.001
TRIED: Final = "seawall.tried"
"""Extension of a request that holds the hosts which its call has already used."""


class HttpxLibrary(Library):
    """What an exchange must know about httpx or httpx2."""

    def __init__(self, module: Any) -> None:
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
        self._late_to_send: dict[str, type[Exception]] = {
            "pool": module.PoolTimeout,
            "connect": module.ConnectTimeout,
            "write": module.WriteTimeout,
        }
        self._late = {**self._late_to_send, "read": module.ReadTimeout}

    def replayable(self, request: Any) -> bool:
        """Return whether the body is bytes, or a form whose files can be read again."""
        stream = request.stream
        return isinstance(stream, self._module.ByteStream) or is_form(stream)

    def shareable(self, request: Any) -> bool:
        """Return whether the body is bytes, or a form that contains only bytes."""
        stream = request.stream
        return isinstance(stream, self._module.ByteStream) or is_form(stream, shared=True)

    def headers(self, request: Any) -> dict[str, str]:
        """Return the headers; values of duplicate headers are joined."""
        found: dict[str, str] = {}
        for raw_name, raw_value in request.headers.raw:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    def copy(self, request: Any, headers: Mapping[str, str], tried: set[str]) -> Any:
        """Return a new request for one attempt."""
        given = request.headers.raw
        if headers:
            others = [pair for pair in given if pair[0].decode("latin-1").lower() not in headers]
            # Restore the exact bytes that `headers` read: they may be in another encoding.
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
        """Return whether there was no connection yet."""
        return isinstance(error, self._not_sent)

    def note(self, response: Any, text: str) -> None:
        """Store the note in `response.extensions["seawall_note"]`."""
        response.extensions["seawall_note"] = text

    def keep(self, response: Any) -> bool:
        """Read the body of a failed response, or the head of a large or slow one."""
        stream, read, whole = response.stream, HeadLimit(), False
        rest: Any = iter(stream)
        try:
            for part in rest:
                if read.after(part):
                    break
            else:
                whole = True
        except Exception as error:  # noqa: BLE001 - for the reader of the response, if any
            rest = Broken(error)
        response.stream = self._rejoined(stream, read, rest)
        if whole:
            stream.close()
            response.stream = self._module.ByteStream(b"".join(read.head))
        return whole

    def _rejoined(self, stream: Any, read: HeadLimit, rest: Any) -> Any:
        return stream_class(RejoinedBody, self.name)(stream, read.head, rest)

    async def akeep(self, response: Any) -> bool:
        """Async twin of `keep`, which also gives up if no chunk arrives.

        That is before the guard would cancel it, if `response` knows the request that was sent.
        """
        from asyncio import timeout

        stream, read, whole = response.stream, HeadLimit(), False
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
        except Exception as error:  # noqa: BLE001 - for the reader of the response, if any
            rest = Broken(error)
        response.stream = self._rejoined(stream, read, rest)
        if whole:
            await stream.aclose()  # a cancellation here leaves a response that can be closed
            response.stream = self._module.ByteStream(b"".join(read.head))
        return whole

    def lower_timeouts(
        self, request: Any, seconds: float | None, clock: Clock, *, cancels: bool
    ) -> Any:
        """Limit waiting for the pool, connecting, writing and reading to `seconds`.

        Reading is not limited if another mechanism `cancels` it: then a stream that is partly read
        before it is returned has the user's read timeout throughout.
        """
        if seconds is not None:
            own = request.extensions.get("timeout") or {}
            late = self._late_to_send if cancels else self._late
            request.extensions["timeout"] = TimeLeft(own, seconds, clock, late)
        return request


class TimeLeft(dict[str, float | None]):
    """Timeouts that are lowered to the time left at the moment when the library reads one.

    It reads one before each step, so all steps together take no longer than `seconds`, and nothing
    is sent if no time is left. (It reads one for all of the headers, or the body, of a response: if
    they arrive in pieces, each may take that long.) The first step, the wait for a place in the
    pool, ends a moment before the others. As a plain dict it holds the initial values.
    """

    def __init__(
        self,
        own: Mapping[str, float | None],
        seconds: float,
        clock: Clock,
        late: Mapping[str, type[Exception]],
    ) -> None:
        """Lower those of the user's `own` timeouts for which `late` has an exception."""
        super().__init__(own)
        for part in late:
            known = own.get(part)
            self[part] = seconds if known is None else min(known, seconds)
        self._own = own
        self._late = late
        self._clock = clock
        self._moment = a_moment(seconds)
        self._until: float | None = clock.now() + seconds

    def __getitem__(self, part: str) -> float | None:
        own = self._own.get(part)
        if self._until is None or part not in self._late:
            return own
        left = self._until - self._clock.now()
        if part == "pool":
            left -= self._moment
        elif left <= 0 and part in _SENDING:
            raise self._late[part]("no time is left to send the request")
        left = max(left, _LEAST)
        return left if own is None else min(own, left)

    def get(self, part: str, _default: Any = None) -> Any:
        """Return the current timeout for a part."""
        return self[part]

    def left(self) -> float | None:
        """Return the current number of seconds left; None if unlimited."""
        return None if self._until is None else self._until - self._clock.now()

    def relax(self) -> None:
        """Use the user's own timeouts from now on."""
        self._until = None


def time_left(request: Any) -> float | None:
    """Return the number of seconds left for `request`; None if unlimited or unknown."""
    timeouts = None if request is None else request.extensions.get("timeout")
    return timeouts.left() if isinstance(timeouts, TimeLeft) else None


def relax(request: Any, _response: Any) -> None:
    """Apply the user's own timeouts to the rest of a response."""
    timeouts = request.extensions.get("timeout")
    if isinstance(timeouts, TimeLeft):
        timeouts.relax()
