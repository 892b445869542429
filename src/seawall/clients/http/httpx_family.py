"""Transports of httpx and httpx2, which are identical as far as a transport can see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import methodcaller
from typing import Any, ClassVar, Final, Self

from seawall.clients.http.bodies import (
    GIVEN_UP,
    BrokenBody,
    HeadLimit,
    PartlyReadBody,
    is_form,
    stream_class,
)
from seawall.clients.http.exchange import Carrier, aexchange, exchange
from seawall.clients.http.headers import PROPAGATED
from seawall.clients.http.library import Library, safety_margin
from seawall.clients.http.terms import FAILURES, RetryAt, Terms
from seawall.clock import Clock
from seawall.guard import Guard
from seawall.runtime.layers import Kind

_ERROR: Final = 400
"""The lowest status that may mean failure."""

_SENDING: Final = ("connect", "write")
_LEAST: Final = 0.001
TRIED_HOSTS: Final = "seawall.tried"
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
            extensions={TRIED_HOSTS: tried, **request.extensions},
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
                if read.add(part):
                    break
            else:
                whole = True
        except Exception as error:  # noqa: BLE001 - for the reader of the response, if any
            rest = BrokenBody(error)
        response.stream = self._rejoined(stream, read, rest)
        if whole:
            stream.close()
            response.stream = self._module.ByteStream(b"".join(read.head))
        return whole

    def _rejoined(self, stream: Any, read: HeadLimit, rest: Any) -> Any:
        return stream_class(PartlyReadBody, self.name)(stream, read.head, rest)

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
                    if read.add(part):
                        break
                else:
                    whole = True
        except TimeoutError:
            rest = BrokenBody(self._late["read"]("the rest of the failed answer did not come"))
        except Exception as error:  # noqa: BLE001 - for the reader of the response, if any
            rest = BrokenBody(error)
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
        self._moment = safety_margin(seconds)
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

    def restore(self) -> None:
        """Use the user's own timeouts from now on."""
        self._until = None


def time_left(request: Any) -> float | None:
    """Return the number of seconds left for `request`; None if unlimited or unknown."""
    timeouts = None if request is None else request.extensions.get("timeout")
    return timeouts.left() if isinstance(timeouts, TimeLeft) else None


def restore_timeouts(request: Any, _response: Any) -> None:
    """Apply the user's own timeouts to the rest of a response."""
    timeouts = request.extensions.get("timeout")
    if isinstance(timeouts, TimeLeft):
        timeouts.restore()


# Transports


class SyncWrapper:
    """A transport of a `Client` around `transport`."""

    transport: Any

    def __enter__(self) -> Self:
        self.transport.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.transport.__exit__(*raised)

    def close(self) -> None:
        """Close the inner transport; a guard stays open."""
        self.transport.close()


class AsyncWrapper:
    """A transport of an `AsyncClient` around `transport`."""

    transport: Any

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.transport.__aexit__(*raised)

    async def aclose(self) -> None:
        """Close the inner transport; a guard stays open."""
        await self.transport.aclose()


class HttpxTransport:
    """Base of both transports: a guard, the inner transport, and the settings."""

    _library: ClassVar[HttpxLibrary]
    _kind: ClassVar[Kind]
    _default: ClassVar[Callable[[], Any]]
    _handler: ClassVar[str]
    """Name of the method that a transport of this kind must have."""

    def __init__(
        self,
        guard: Guard,
        transport: Any = None,
        *,
        retry_at: RetryAt = "everywhere",
        generate_keys: bool = False,
        repeatable: Callable[[Any], bool] | None = None,
        statuses: Collection[int] = FAILURES,
        propagate: bool | Collection[str] = PROPAGATED,
        reserve: float | None = None,
    ) -> None:
        """Send all requests through `guard`, using `transport` (by default a new HTTPTransport).

        `retry_at="edge"` leaves retries to the first service of a chain. `generate_keys` gives each
        POST and PATCH an idempotency key: only for servers that honour it. `repeatable` returns
        whether a request without a key can be repeated safely (such as a search by POST).
        `statuses` are the statuses that mean failure. `propagate` names the values that are sent to
        the next service: any of "deadline", "criticality", "attempt" (these three by default) and
        "tenant". `reserve` is the number of seconds of the caller's deadline that are withheld from
        the whole request, so that there is time left to handle its failure: by default a tenth of
        what is left, at least 10 ms and at most 0.5 s.
        """
        self._terms = Terms(
            guard,
            self._library,
            self._kind,
            retry_at=retry_at,
            generate_keys=generate_keys,
            repeatable=repeatable,
            statuses=statuses,
            propagate=propagate,
            reserve=reserve,
        )
        if transport is not None:
            self._check(transport)
        self.transport = type(self)._default() if transport is None else transport

    def _check(self, transport: Any) -> None:
        """Refuse an object that is not a transport of this kind, or one that retries on its own."""
        kind = type(transport)
        own = self._library.name
        of = {base.__module__.partition(".")[0] for base in kind.__mro__} & {"httpx", "httpx2"}
        foreign = bool(of) and own not in of
        if foreign or not callable(getattr(kind, self._handler, None)):
            right = getattr(type(self)._default, "__name__", "HTTPTransport")
            raise TypeError(
                f"transport={transport!r}: write one of {own}'s for this kind of client,"
                f" such as {own}.{right}()"
            )
        retries = getattr(getattr(transport, "_pool", None), "_retries", 0)
        if retries:
            raise ValueError(
                f"this transport retries by itself ({retries} times), beside the guard:"
                f" write {kind.__name__}(retries=0)"
            )

    def _lowered(self, request: Any, seconds: float | None, *, cancels: bool) -> Any:
        clock = self._terms.guard.clock
        return self._library.lower_timeouts(request, seconds, clock, cancels=cancels)

    def __repr__(self) -> str:
        over = type(self.transport).__name__
        return f"<{type(self).__name__} of guard {self._terms.guard.name!r} over {over}>"

    @property
    def guard(self) -> Guard:
        """The guard of all requests."""
        return self._terms.guard


class SyncTransport(SyncWrapper, HttpxTransport):
    """The transport of a `Client`."""

    _kind: ClassVar[Kind] = "sync"
    _handler: ClassVar[str] = "handle_request"

    def handle_request(self, request: Any) -> Any:
        """Return the response to `request`."""
        carrier = Carrier(self._send, self._library.keep, methodcaller("close"), restore_timeouts)
        return exchange(self._terms, request, carrier)

    def _send(self, request: Any, seconds: float | None, cancels: bool) -> Any:  # noqa: FBT001
        return self.transport.handle_request(self._lowered(request, seconds, cancels=cancels))


class AsyncTransport(AsyncWrapper, HttpxTransport):
    """The transport of an `AsyncClient`."""

    _kind: ClassVar[Kind] = "async"
    _handler: ClassVar[str] = "handle_async_request"

    async def handle_async_request(self, request: Any) -> Any:
        """Return the response to `request`."""
        carrier = Carrier(self._send, self._library.akeep, methodcaller("aclose"), restore_timeouts)
        return await aexchange(self._terms, request, carrier)

    async def _send(self, request: Any, seconds: float | None, cancels: bool) -> Any:  # noqa: FBT001
        lowered = self._lowered(request, seconds, cancels=cancels)
        response = await self.transport.handle_async_request(lowered)
        if response.status_code >= _ERROR:
            # `akeep` reads the time left from this request; the client replaces it with its own.
            response.request = lowered
        return response
