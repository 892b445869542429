"""A guarded middleware for the client of aiohttp.

    session = aiohttp.ClientSession(middlewares=[GuardedMiddleware(guard)])

See docs/clients/http-clients.md for what is retried and what is sent to the next service, and
docs/clients/aiohttp.md for what differs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from copy import copy
from math import inf
from typing import Any

try:
    import aiohttp
except ImportError as error:
    raise ImportError(
        "seawall.clients.aiohttp needs aiohttp: pip install 'seawall[aiohttp]'"
    ) from error

from aiohttp.multipart import MultipartWriter
from aiohttp.payload import BytesPayload
from multidict import CIMultiDict

from seawall.clients.http.bodies import GIVEN_UP, has_small_body
from seawall.clients.http.exchange import Carrier, aexchange
from seawall.clients.http.headers import PROPAGATED
from seawall.clients.http.library import Library
from seawall.clients.http.terms import FAILURES, RetryAt, Terms
from seawall.guard import Guard

__all__ = ["GuardedMiddleware"]

_gave_up: ContextVar[tuple[object, Exception] | None] = ContextVar("_gave_up", default=None)
"""The timer of a session's call that has failed, and its error."""


class _Aiohttp(Library):
    """What an exchange must know about aiohttp."""

    def __init__(self) -> None:
        super().__init__(
            "aiohttp",
            error=aiohttp.ClientConnectionError,
            timeout_error=aiohttp.ServerTimeoutError,
            transient=(aiohttp.ClientConnectionError, aiohttp.ServerTimeoutError),
            attributes={},
        )
        self.response = "aiohttp.ClientResponse"

    def replayable(self, request: Any) -> bool:
        # The future that waits for "100 Continue" serves one attempt.
        return _in_memory(request.body) and "expect" not in request.headers

    shareable = replayable

    def headers(self, request: Any) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, value in request.headers.items():
            lower = name.lower()
            found[lower] = f"{found[lower]}, {value}" if lower in found else value
        return found

    def copy(self, request: Any, headers: Mapping[str, str], tried: set[str]) -> Any:
        attempt = copy(request)
        attempt.headers = CIMultiDict(request.headers)
        attempt.headers.update(headers)
        return attempt

    def nothing_sent(self, error: Exception) -> bool:
        return isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))

    def status(self, response: Any) -> int:
        status: int = response.status
        return status

    def request_of_error(self, request: Any) -> aiohttp.RequestInfo:
        headers: Any = CIMultiDict(request.headers)
        return aiohttp.RequestInfo(request.url, request.method, headers, request.original_url)


_LIBRARY = _Aiohttp()


class GuardedMiddleware:
    """A middleware for `aiohttp.ClientSession` that sends requests through a guard."""

    def __init__(
        self,
        guard: Guard,
        *,
        retry_at: RetryAt = "everywhere",
        generate_keys: bool = False,
        repeatable: Callable[[aiohttp.ClientRequest], bool] | None = None,
        statuses: Collection[int] = FAILURES,
        propagate: bool | Collection[str] = PROPAGATED,
        reserve: float | None = None,
    ) -> None:
        """Send all requests of a session through `guard`.

        The settings are those of `seawall.clients.httpx.AsyncGuardedTransport`.
        """
        self._terms = Terms(
            guard,
            _LIBRARY,
            "async",
            retry_at=retry_at,
            generate_keys=generate_keys,
            repeatable=repeatable,
            statuses=statuses,
            propagate=propagate,
            reserve=reserve,
        )

    def __repr__(self) -> str:
        return f"<GuardedMiddleware of guard {self._terms.guard.name!r}>"

    @property
    def guard(self) -> Guard:
        """The guard of all requests."""
        return self._terms.guard

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Return the response to `request`; `handler` sends it."""
        timer = request._timer  # one for each call of the session
        _stop_repeating(timer)
        times: dict[aiohttp.ClientResponse, float] = {}

        async def send(
            attempt: aiohttp.ClientRequest, seconds: float | None, _cancels: object
        ) -> aiohttp.ClientResponse:
            until = inf if seconds is None else asyncio.get_running_loop().time() + seconds
            response = await _send(attempt, handler, seconds)
            times[response] = until
            return response

        async def keep(response: aiohttp.ClientResponse) -> bool:
            return await _keep(response, times[response])

        carrier = Carrier(send, keep, _close, _relax)
        try:
            answer: aiohttp.ClientResponse = await aexchange(self._terms, request, carrier)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            _gave_up.set((timer, error))
            raise
        return answer


def _stop_repeating(timer: object) -> None:
    """Raise again if the session repeats a request that the guard has given up.

    A session sends an idempotent request once more if its connection was lost, and that cannot be
    turned off: all attempts of the guard would be made twice.
    """
    failed = _gave_up.get()
    if failed is not None:
        _gave_up.set(None)
        if failed[0] is timer:
            raise failed[1]


async def _send(
    attempt: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType, seconds: float | None
) -> aiohttp.ClientResponse:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            # The session's total time: past it nothing is sent, and an attempt that it ends has
            # failed. Without this, the end of an attempt to connect would be a cancellation.
            with attempt._timer:
                return await handler(attempt)
    except TimeoutError as error:
        if limit.expired():
            raise aiohttp.SocketTimeoutError("no time is left for the request") from error
        if type(error) is TimeoutError:
            error.transient = False  # type: ignore[attr-defined] # the total time is over
        raise


async def _keep(response: aiohttp.ClientResponse, until: float) -> bool:
    """Receive a failed response that announces a small length; it is read later, if at all."""
    body = response.content
    if not has_small_body(response.headers) or body.exception() is not None:
        return False
    async with asyncio.timeout_at(min(until, asyncio.get_running_loop().time() + GIVEN_UP)):
        await body.wait_eof()
    return True


async def _close(response: aiohttp.ClientResponse) -> None:
    response.close()


def _relax(_request: object, _response: object) -> None:
    """Change nothing: the time limit of an attempt does not reach the body."""


def _in_memory(body: Any) -> bool:
    """Return whether `body` is bytes, text, JSON, or a form of these."""
    if isinstance(body, MultipartWriter):
        return all(_in_memory(part) for part, *_ in body._parts)
    return body == b"" or isinstance(body, BytesPayload)
