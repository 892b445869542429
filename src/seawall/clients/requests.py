"""A guarded adapter for requests.

    session = requests.Session()
    session.mount("https://", GuardedAdapter(guard))

See docs/clients/http-clients.md for what is retried and what is sent to the next service.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from operator import methodcaller
from typing import Any

try:
    import requests
except ImportError as error:
    raise ImportError(
        "seawall.clients.requests needs requests: pip install 'seawall[requests]'"
    ) from error

from requests.adapters import BaseAdapter, HTTPAdapter
from requests.exceptions import ConnectionError as NotConnected
from requests.exceptions import ConnectTimeout, Timeout
from urllib3 import HTTPResponse
from urllib3.exceptions import ConnectTimeoutError, MaxRetryError, NewConnectionError

from seawall.clients.http.bodies import BrokenBody, has_small_body, is_text
from seawall.clients.http.exchange import Carrier, exchange
from seawall.clients.http.headers import PROPAGATED
from seawall.clients.http.library import Library, lower_urllib3_timeout, relax_urllib3_timeout
from seawall.clients.http.terms import FAILURES, RetryAt, Terms
from seawall.guard import Guard

__all__ = ["GuardedAdapter"]


class _Requests(Library):
    """What an exchange must know about requests."""

    def __init__(self) -> None:
        super().__init__(
            "requests",
            error=NotConnected,
            timeout_error=Timeout,
            transient=(NotConnected, Timeout),
            attributes={"request": None, "response": None},
        )

    def replayable(self, request: Any) -> bool:
        return is_text(request.body)

    shareable = replayable

    def headers(self, request: Any) -> dict[str, str]:
        return {name.lower(): _text(value) for name, value in request.headers.items()}

    def copy(self, request: Any, headers: Mapping[str, str], tried: set[str]) -> Any:
        copy = request.copy()
        copy.headers.update(headers)
        return copy

    def nothing_sent(self, error: Exception) -> bool:
        if isinstance(error, ConnectTimeout):
            return True
        cause = error.args[0] if isinstance(error, NotConnected) and error.args else None
        return isinstance(cause, MaxRetryError) and isinstance(
            cause.reason, (NewConnectionError, ConnectTimeoutError)
        )


_LIBRARY = _Requests()


class GuardedAdapter(BaseAdapter):
    """An adapter for `requests.Session` that sends requests through a guard."""

    def __init__(
        self,
        guard: Guard,
        adapter: BaseAdapter | None = None,
        *,
        retry_at: RetryAt = "everywhere",
        generate_keys: bool = False,
        repeatable: Callable[[requests.PreparedRequest], bool] | None = None,
        statuses: Collection[int] = FAILURES,
        propagate: bool | Collection[str] = PROPAGATED,
        reserve: float | None = None,
    ) -> None:
        """Send all requests through `guard`, using `adapter` (by default a new HTTPAdapter).

        The settings are those of `seawall.clients.httpx.GuardedTransport`.
        """
        super().__init__()
        self._terms = Terms(
            guard,
            _LIBRARY,
            "sync",
            retry_at=retry_at,
            generate_keys=generate_keys,
            repeatable=repeatable,
            statuses=statuses,
            propagate=propagate,
            reserve=reserve,
        )
        self.adapter = HTTPAdapter() if adapter is None else _checked(adapter)

    def __repr__(self) -> str:
        over = type(self.adapter).__name__
        return f"<GuardedAdapter of guard {self._terms.guard.name!r} over {over}>"

    @property
    def guard(self) -> Guard:
        """The guard of all requests."""
        return self._terms.guard

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 - as in requests
        timeout: Any = None,
        verify: Any = True,  # noqa: FBT002 - as in requests
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """Return the response to `request`."""

        def send(
            outgoing: requests.PreparedRequest, seconds: float | None, _cancels: object
        ) -> requests.Response:
            least = lower_urllib3_timeout(timeout, seconds)
            response = self.adapter.send(outgoing, stream, least, verify, cert, proxies)
            # As without a guard: an authentication that repeats the request starts with this
            # request, and uses this connection.
            response.request = request
            response.connection = self  # type: ignore[assignment]
            return response

        def relax_rest(_request: object, response: requests.Response) -> None:
            relax_urllib3_timeout(response.raw, timeout)

        carrier = Carrier(send, _keep, methodcaller("close"), relax_rest)
        answer: requests.Response = exchange(self._terms, request, carrier)
        return answer

    def close(self) -> None:
        """Close the inner adapter; the guard stays open."""
        self.adapter.close()


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _checked(adapter: Any) -> BaseAdapter:
    """Return `adapter`; raise if it is not an adapter, or retries on its own."""
    if not isinstance(adapter, BaseAdapter):
        raise TypeError(f"adapter={adapter!r}: write an adapter of requests, such as HTTPAdapter()")
    retries = getattr(adapter, "max_retries", None)
    total = getattr(retries, "total", 0)
    parts = [getattr(retries, part, 0) for part in ("connect", "read", "status", "other")]
    # None means "as many as the others allow".
    if (total is None or total) and any(part is None or part for part in parts):
        raise ValueError(
            f"this adapter retries by itself ({retries!r}), beside the guard:"
            " write HTTPAdapter(max_retries=0)"
        )
    return adapter


def _keep(response: requests.Response) -> bool:
    """Read a failed response that announces a small length, undecoded, and put it back."""
    raw = response.raw
    if not has_small_body(response.headers) or not isinstance(raw, HTTPResponse):
        return False
    body: Any
    try:
        body = BytesIO(raw.read(decode_content=False))
    except Exception as error:  # noqa: BLE001 - for the reader of the response, if any
        body = BrokenBody(error)
        raw.close()
    response.raw = HTTPResponse(
        body,
        headers=raw.headers,
        status=raw.status,
        version=raw.version,
        reason=raw.reason,
        preload_content=False,
        original_response=raw._original_response,
        request_method=response.request.method,
    )
    return True
