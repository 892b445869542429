"""The sync and async transports of httpx and httpx2; a subclass names its library."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import methodcaller
from typing import Any, ClassVar, Final, Self

from seawall.clients.http.exchange import Carrier, aexchange, exchange
from seawall.clients.http.headers import PROPAGATED
from seawall.clients.http.httpx_library import HttpxLibrary, relax
from seawall.clients.http.terms import FAILURES, RetryAt, Terms
from seawall.guard import Guard
from seawall.runtime.layers import Kind

_ERROR: Final = 400
"""The lowest status that may mean failure."""


class SyncAround:
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


class AsyncAround:
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


class Guarded:
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


class SyncGuarded(SyncAround, Guarded):
    """The transport of a `Client`."""

    _kind: ClassVar[Kind] = "sync"
    _handler: ClassVar[str] = "handle_request"

    def handle_request(self, request: Any) -> Any:
        """Return the response to `request`."""
        carrier = Carrier(self._send, self._library.keep, methodcaller("close"), relax)
        return exchange(self._terms, request, carrier)

    def _send(self, request: Any, seconds: float | None, cancels: bool) -> Any:  # noqa: FBT001
        return self.transport.handle_request(self._lowered(request, seconds, cancels=cancels))


class AsyncGuarded(AsyncAround, Guarded):
    """The transport of an `AsyncClient`."""

    _kind: ClassVar[Kind] = "async"
    _handler: ClassVar[str] = "handle_async_request"

    async def handle_async_request(self, request: Any) -> Any:
        """Return the response to `request`."""
        carrier = Carrier(self._send, self._library.akeep, methodcaller("aclose"), relax)
        return await aexchange(self._terms, request, carrier)

    async def _send(self, request: Any, seconds: float | None, cancels: bool) -> Any:  # noqa: FBT001
        lowered = self._lowered(request, seconds, cancels=cancels)
        response = await self.transport.handle_async_request(lowered)
        if response.status_code >= _ERROR:
            # `akeep` reads the time left from this request; the client replaces it with its own.
            response.request = lowered
        return response
