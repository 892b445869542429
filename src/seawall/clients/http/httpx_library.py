"""httpx and httpx2 are one library under two names, as far as a transport can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from seawall.clients.http.bodies import GIVEN_UP, Broken, Enough, Rejoined, is_form
from seawall.clients.http.errors import Library, a_moment
from seawall.clock import Clock

_SENDING: Final = ("connect", "write")
_LEAST: Final = 0.001
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


class TimeLeft(dict[str, float | None]):
    """Timeouts that are lowered to what is left at the moment when the library asks for one.

    It asks before each step: so all steps together take no longer than `seconds`, and with none
    left nothing is sent. (It asks once for all of the headers, or the body, of an answer: if they
    come in drops, each may take that long.) The first step, the wait for a place in the pool, is
    given up a moment before the others. As a plain dict it holds what they were in the beginning.
    """

    def __init__(
        self,
        own: Mapping[str, float | None],
        seconds: float,
        clock: Clock,
        late: Mapping[str, type[Exception]],
    ) -> None:
        """Lower those of the user's `own` that `late` has an error for."""
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
        """Return the timeout for a part, as of now."""
        return self[part]

    def left(self) -> float | None:
        """Return after how many seconds all is to be given up, as of now; None if never."""
        return None if self._until is None else self._until - self._clock.now()

    def relax(self) -> None:
        """Be the user's own from now on."""
        self._until = None


def time_left(request: Any) -> float | None:
    """Return after how many seconds `request` is to be given up; None if never, or unknown."""
    timeouts = None if request is None else request.extensions.get("timeout")
    return timeouts.left() if isinstance(timeouts, TimeLeft) else None


def relax(request: Any, _response: Any) -> None:
    """Leave the rest of a response the timeouts that the user has set."""
    timeouts = request.extensions.get("timeout")
    if isinstance(timeouts, TimeLeft):
        timeouts.relax()
