"""Errors are named as people name them: by status and host, by code, by the cause in a wrapper."""

from __future__ import annotations

import urllib.error
from email.message import Message
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    BreakerChanged,
    CallRejected,
    CallRetried,
    CircuitOpen,
    Guard,
    RateLimit,
    Rejected,
    Retry,
    RetryStopped,
    TimedOut,
    subscribe,
)
from seawall._failures import LONGEST_NAME, described, reason_of, said_by
from seawall.clients.httpx import GuardedTransport, retryable

URL = "https://bob:hunter2@vendor.example:8443/orders?token=hunter2"


def answered(status: int, url: str = URL) -> httpx.Response:
    """Return an answer of the vendor's."""
    return httpx.Response(status, request=httpx.Request("GET", url))


def status_error(status: int) -> httpx.HTTPStatusError:
    """Return what `raise_for_status` raises."""
    response = answered(status)
    return httpx.HTTPStatusError("so it is", request=response.request, response=response)


def requests_error(status: int) -> requests.HTTPError:
    """Return the same, of requests."""
    response = requests.Response()
    response.status_code, response.url = status, URL
    return requests.HTTPError("so it is", response=response)


def caused(error: Exception, cause: BaseException) -> Exception:
    """Return `error` as it is raised from `cause`."""
    error.__cause__ = cause
    return error


class APIConnectionError(Exception):
    """As SDKs call it."""


class PaymentFailed(Exception):
    """An error of the user's own."""


class RpcError(Exception):
    """As gRPC's errors are."""

    def code(self) -> Any:
        return SimpleNamespace(name="UNAVAILABLE")

    def details(self) -> str:
        return "no address is reached"


class ClientResponseError(Exception):
    """As aiohttp's."""

    status = 502
    request_info = SimpleNamespace(url=SimpleNamespace(host="vendor.example"))


class Throttled(Exception):
    """As an SDK's error for a status."""

    status_code = 429
    response = answered(429)


urllib_error = urllib.error.HTTPError(URL, 503, "Unavailable", Message(), None)


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (status_error(503), "503", "503 from vendor.example"),
        (requests_error(429), "429", "429 from vendor.example"),
        (ClientResponseError(), "502", "502 from vendor.example"),
        (urllib_error, "503", "503 from vendor.example"),
        (Throttled("quota"), "429", "429 from vendor.example (Throttled: quota)"),
        (RpcError(), "UNAVAILABLE", "UNAVAILABLE: no address is reached"),
        (httpx.ConnectTimeout("late"), "ConnectTimeout", "ConnectTimeout: late"),
        (ValueError(), "ValueError", "ValueError"),
        (CircuitOpen("open"), "circuit_open", "CircuitOpen: open"),
        (
            caused(APIConnectionError("Connection error."), CircuitOpen("open")),
            "circuit_open",
            "APIConnectionError -> CircuitOpen: open",
        ),
        (
            caused(APIConnectionError("Connection error."), httpx.ConnectTimeout("late")),
            "ConnectTimeout",
            "APIConnectionError -> ConnectTimeout: late",
        ),
        (
            caused(PaymentFailed("order 7"), TimedOut("2 s")),
            "timed_out",
            "PaymentFailed: order 7 -> TimedOut: 2 s",
        ),
        (
            caused(PaymentFailed("order 7"), KeyError("x")),
            "PaymentFailed",
            "PaymentFailed: order 7",
        ),
        (
            ExceptionGroup("one", [status_error(503)]),
            "503",
            "ExceptionGroup -> 503 from vendor.example",
        ),
    ],
)
def test_an_error_is_named_as_people_name_it(error: Exception, reason: str, text: str) -> None:
    """The word for metrics has no host and no message; the line for logs has both."""
    assert reason_of(error) == reason
    assert described(error) == text


def test_a_status_without_a_host_is_told_alone() -> None:
    """An answer that was made by hand has no request; httpx raises where one asks for it."""
    error = httpx.HTTPStatusError("x", request=None, response=httpx.Response(429))  # type: ignore[arg-type]
    assert described(error) == said_by(error) == "429"


def test_a_loop_of_causes_ends() -> None:
    """Errors that are each other's cause are named all the same."""
    first, second = APIConnectionError("a"), APIConnectionError("b")
    caused(first, caused(second, first))
    assert reason_of(first) == "APIConnectionError"


@given(st.text(), st.text(), st.sampled_from([200, 503, "503", None, 10**9, True]))
def test_naming_never_raises_and_is_bounded(name: str, text: str, status: Any) -> None:
    """Whatever an error holds, its word and its line are printable and short."""

    class Odd(Exception):
        status_code = status
        url = text

        @property
        def response(self) -> Any:
            if status is None:
                raise KeyError(text)
            return self

    Odd.__name__ = name.replace("\0", "") or "Odd"
    for error in (Odd(text), caused(APIConnectionError(text), Odd(text))):
        assert reason_of(error).isprintable()
        assert len(reason_of(error)) <= LONGEST_NAME
        assert described(error).isprintable()
        assert len(described(error)) <= 200


def test_events_of_an_http_guard_name_status_host_and_key() -> None:
    """Nobody has to know what the transport calls a failed answer inside."""
    seen: list[Any] = []
    with_key = Breaker(consecutive=2, key=lambda request: request.url.host)
    guard = Guard("failing", Retry(on=retryable, attempts=2, backoff=0.0), with_key)
    transport = GuardedTransport(guard, httpx.MockTransport(lambda _request: httpx.Response(503)))
    stop = subscribe(seen.append, CallRetried, RetryStopped, BreakerChanged, CallRejected)
    try:
        with httpx.Client(transport=transport) as client:
            for _ in range(2):
                assert client.get("http://vendor.example/orders").status_code == 503
            with pytest.raises(CircuitOpen) as refused:
                client.get("http://vendor.example/orders")
    finally:
        stop()
    failed = [event for event in seen if not isinstance(event, CallRejected)]
    assert {event.reason for event in failed} == {"503"}
    assert {event.failure for event in failed} == {"503 from vendor.example"}
    rejected = seen[-1]
    assert (rejected.key, rejected.reason) == ("vendor.example", "circuit_open")
    assert "the last failure: 503 from vendor.example" in rejected.message
    assert refused.value.key == "vendor.example"


def test_a_refusal_by_a_limit_names_its_key() -> None:
    """Who was over the limit is part of the event."""
    seen: list[CallRejected] = []
    guard = Guard("limited", RateLimit("1/h", key=lambda user: user))
    stop = subscribe(seen.append, CallRejected)
    try:
        guard.call(str, "alice")
        with pytest.raises(Rejected):
            guard.call(str, "alice")
    finally:
        stop()
    (event,) = seen
    assert event.key == "alice"
    assert event.message.startswith("guard 'limited': over the limit")
