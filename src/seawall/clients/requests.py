"""A guarded adapter for requests.

    session = requests.Session()
    session.mount("https://", GuardedAdapter(guard))

What is retried and what is told the next service is explained in docs/http-clients.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
from urllib3.exceptions import ConnectTimeoutError, MaxRetryError, NewConnectionError
from urllib3.util import Timeout as Urllib3Timeout

from seawall.clients._bodies import KEPT, is_text
from seawall.clients._exchange import Carrier, exchange, retryable
from seawall.clients._exchange_errors import Library
from seawall.clients._exchange_headers import PROPAGATED
from seawall.clients._exchange_terms import FAILURES, RetryAt, Terms
from seawall.guard import Guard

__all__ = ["GuardedAdapter", "retryable"]


class _Requests(Library):
    """What an exchange must know of requests."""

    def __init__(self) -> None:
        super().__init__(
            "requests",
            error=NotConnected,
            timeout_error=Timeout,
            transient=(NotConnected, Timeout),
        )

    def replayable(self, request: Any) -> bool:
        return is_text(request.body)

    def headers(self, request: Any) -> dict[str, str]:
        return {name.lower(): _text(value) for name, value in request.headers.items()}

    def copy(self, request: Any, headers: Mapping[str, str]) -> Any:
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

    def note(self, response: Any, text: str) -> None:
        response.seawall_note = text


_LIBRARY = _Requests()


class GuardedAdapter(BaseAdapter):
    """An adapter for `requests.Session` that goes through a guard."""

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
    ) -> None:
        """Send all requests through `guard`, and on by `adapter` (a new HTTPAdapter).

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
        )
        self.adapter = HTTPAdapter() if adapter is None else adapter
        retries = getattr(getattr(self.adapter, "max_retries", None), "total", 0)
        if retries:
            raise ValueError(
                f"this adapter retries by itself ({retries} times), beside the guard:"
                " write HTTPAdapter(max_retries=0)"
            )

    def __repr__(self) -> str:
        over = type(self.adapter).__name__
        return f"<GuardedAdapter of guard {self._terms.guard.name!r} over {over}>"

    @property
    def guard(self) -> Guard:
        """The guard that all requests go through."""
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
        """Return the answer to `request`."""

        def send(outgoing: requests.PreparedRequest, seconds: float | None) -> requests.Response:
            lowered = _lowered(timeout, seconds)
            response = self.adapter.send(outgoing, stream, lowered, verify, cert, proxies)
            # As without a guard: an authentication that asks again begins with this one.
            response.request = request
            return response

        answer: requests.Response = exchange(self._terms, request, Carrier(send, _keep, _close))
        return answer

    def close(self) -> None:
        """Close what is inside; the guard stays as it is."""
        self.adapter.close()


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _lowered(timeout: Any, seconds: float | None) -> Any:
    """Return requests' `timeout` with connecting and reading bounded by `seconds`."""
    if seconds is None:
        return timeout
    if isinstance(timeout, Urllib3Timeout):
        connect, read = timeout.connect_timeout, timeout.read_timeout
    elif isinstance(timeout, tuple):
        connect, read = timeout
    else:
        connect = read = timeout
    return _least(connect, seconds), _least(read, seconds)


def _least(known: Any, seconds: float) -> float:
    return min(known, seconds) if isinstance(known, (int, float)) else seconds


def _keep(response: Any) -> None:
    """Read the body of a failed answer, unless it is large."""
    length = response.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 10 and int(length) <= KEPT:  # noqa: PLR2004
        _ = response.content


def _close(response: Any) -> None:
    response.close()
