"""Errors are named as people name them: by status and host, by code, by the cause in a wrapper."""

from __future__ import annotations

import asyncio
import gc
import logging
import urllib.error
from contextlib import suppress
from email.message import Message
from types import SimpleNamespace
from typing import Any
from weakref import ref

import httpx
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    CircuitOpen,
    Family,
    Guard,
    RateLimit,
    Rejected,
    Retry,
    TimedOut,
    Timeout,
    subscribe,
    transient,
)
from seawall._failures import (
    LONGEST_NAME,
    LONGEST_TRACEBACK,
    described,
    reason_of,
    report_of,
    said_by,
    split_report,
    traceback_of,
)
from seawall.clients.http.terms import BadStatus, KeyInProgress
from seawall.clients.httpx import GuardedTransport
from seawall.clock import VirtualClock
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.guards import guard_view
from seawall.errors import JobFailed
from seawall.events import (
    BreakerChanged,
    CallRejected,
    CallRetried,
    JobDied,
    RetryStopped,
)
from seawall.events.log import FAILURES_AT_ONCE, FAILURES_PER_SECOND, FailureLog
from seawall.jobs import Claim, LocalQueue, Worker
from seawall.testing import run_virtual

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


@pytest.mark.parametrize("kind", [BadStatus, KeyInProgress])
def test_a_failed_status_is_told_once(kind: type[BadStatus]) -> None:
    """Its own text has the status again, and nothing else."""
    request = httpx.Request("POST", "https://vendor.example/orders?key=x")
    error = kind(request, httpx.Response(409, request=request), 409, 1.0)
    assert described(error) == "409 from vendor.example"


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


class Unreadable(ConnectionError):
    """An error of which no attribute can be read that its class does not have."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Unfinished(ConnectionError):
    """An error with properties that raise."""

    @property
    def code(self) -> int:
        raise RuntimeError("no code yet")

    details = nothing_sent = response = abandoned_work = work_withdrawn = code


class Obliging(ConnectionError):
    """An error that has whatever attribute it is asked for, as a mock has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace()


@pytest.mark.parametrize("kind", [Unreadable, Unfinished, Obliging])
@pytest.mark.parametrize("retries", [False, True])
def test_an_error_with_attributes_that_cannot_be_read_is_raised_and_counted(
    kind: type[Exception], *, retries: bool
) -> None:
    """What its own code raises does not replace it; breaker, retries and counters see it."""
    breaker = Breaker(consecutive=3)
    retry = [Retry(on=kind, attempts=2, backoff=[0.0], budget=None)] if retries else []
    guard = Guard("vendor", *retry, breaker, Timeout(9.0, sync="cooperative"))
    error = kind("vendor down")

    runs: list[str] = []

    def vendor() -> None:
        runs.append("failed")
        raise error

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(kind) as caught:
                await guard.acall(avendor)
            assert caught.value is error

    async def avendor() -> None:
        vendor()

    for _ in range(3):
        with pytest.raises(kind) as caught:
            guard.call(vendor)
        assert caught.value is error
    assert breaker.state == "open"
    assert guard.snapshot()["failed"] == len(runs)
    assert described(error) == f"{kind.__name__}: vendor down"
    breaker.close()
    run_virtual(main())
    assert breaker.state == "open"


def test_events_of_an_http_guard_name_status_host_and_key() -> None:
    """Nobody has to know what the transport calls a failed answer inside."""
    seen: list[Any] = []
    with_key = Breaker(consecutive=2, key=lambda request: request.url.host)
    guard = Guard("failing", Retry(on=transient, attempts=2, backoff=0.0), with_key)
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


# Reports: what dead letters and the log keep of a handler's error


class Wrong(ValueError):
    """An error that can be watched."""


class Handler:
    """A handler with a typo, around which there is a guard."""

    def __init__(self) -> None:
        self.seen: list[ref[BaseException]] = []

    def __call__(self, claim: Claim) -> None:
        try:
            connect(f"postgres://bob:hunter2@db/{claim.payload}", password="hunter2")  # noqa: S106
        except Wrong as error:
            self.seen.append(ref(error))
            raise


def connect(url: str, password: str) -> None:
    """Fail, and tell too much."""
    raise Wrong(f"cannot connect to {url} with password={password}\nhunter2")


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handlers_error_is_logged_at_each_attempt_and_kept_by_the_dead_letter(
    caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """With job, attempt and queue; WARNING until the last, ERROR then; no secret."""
    caplog.set_level(logging.INFO, "seawall")
    plain, died = Handler(), list[JobDied]()

    async def handle(claim: Claim) -> None:
        plain(claim)

    async def main() -> None:
        queue = LocalQueue("mails", max_attempts=3)
        id_ = queue.push("shop")
        guard = Guard(f"handled-{kind}", Retry(on=OSError))
        handler = handle if kind == "async" else plain
        worker = Worker(queue, handler, guard=guard, backoff=[0.0, 0.0], concurrency=1)
        running = asyncio.create_task(worker.run())
        with pytest.raises(JobFailed) as failed:
            await queue.ajoin(id_)
        worker.stop(0.0)
        await running
        said = "Wrong: cannot connect to postgres://db/... with password=***"
        assert failed.value.cause == queue.status(id_).reason == said
        (letter,) = queue.dead()
        assert letter.reason == said
        lines = letter.traceback.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert "test_failures.py" in lines[1]  # none of our own frames stand before it
        assert lines[-1] == said
        assert len(letter.traceback) <= LONGEST_TRACEBACK
        assert [(event.cause, event.traceback) for event in died] == [(said, letter.traceback)]
        assert queue.inspect(id_).traceback == letter.traceback  # type: ignore[union-attr]
        named = f"queue 'mails': job {id_} failed at attempt"
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("WARNING", f"{named} 1, tried again in 0 s: {said}"),
            ("WARNING", f"{named} 2, tried again in 0 s: {said}"),
            ("ERROR", f"{named} 3, given up: {said}"),
        ]
        record = caplog.records[-1]
        assert record.exc_info is not None
        assert record.exc_info[0] is Wrong
        fields = {name: value for name, value in vars(record).items() if name[:8] == "seawall_"}
        assert fields == {
            "seawall_queue": "mails",
            "seawall_id": id_,
            "seawall_attempt": 3,
            "seawall_reason": "Wrong",
        }
        assert caplog.text.count("Traceback (most recent call last):") == 3
        assert "hunter2@" not in caplog.text

    stop = subscribe(died.append, JobDied)
    try:
        asyncio.run(main())
    finally:
        stop()


def test_no_worker_keeps_an_error_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of it is text: its frames hold whatever the handler had."""
    logger = logging.getLogger("seawall")
    monkeypatch.setattr(logger, "propagate", False)  # or the test's own capture would keep it
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    handler = Handler()

    async def main() -> None:
        queue = LocalQueue("mails", max_attempts=2)
        id_ = queue.push("shop")
        worker = Worker(queue, handler, backoff=[0.0], concurrency=1)
        running = asyncio.create_task(worker.run())
        with pytest.raises(JobFailed):
            await queue.ajoin(id_)
        worker.stop(0.0)
        await running
        assert queue.dead()[0].traceback

    asyncio.run(main())
    gc.collect()
    assert [seen() for seen in handler.seen] == [None] * 2


def test_a_flood_of_failures_is_bounded_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """After a burst there are a few lines a second; each tells how many were left out."""
    caplog.set_level(logging.INFO, "seawall")
    clock = VirtualClock()
    log = FailureLog("queue", "mails", clock)

    def flood() -> None:
        for number in range(1000):
            log.failed("job", str(number), 1, ValueError("no"), delay=1.0, dead=False)

    flood()
    assert len(caplog.records) == FAILURES_AT_ONCE
    log.failed("job", "x", 1, "not taken", delay=0.0, dead=True)  # a death is not in their shadow
    assert caplog.records[-1].levelname == "ERROR"
    clock.advance(1.0)
    caplog.clear()
    flood()
    assert len(caplog.records) == FAILURES_PER_SECOND
    assert (
        caplog.records[0].getMessage().endswith(f"({1000 - FAILURES_AT_ONCE} more were left out)")
    )


def test_a_log_handler_that_raises_harms_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log handler of the user that raises does not keep the job's end from the queue."""

    def broken(_record: logging.LogRecord) -> None:
        raise RuntimeError

    monkeypatch.setattr(logging.getLogger("seawall"), "handle", broken)
    log = FailureLog("queue", "mails", VirtualClock())
    log.failed("job", "1", 1, ValueError("no"), delay=1.0, dead=True)


def deep(levels: int, text: str) -> None:
    """Raise far down."""
    if levels:
        deep(levels - 1, text)
    raise Wrong(text)


@given(st.integers(0, 60), st.text())
@settings(deadline=None)
def test_a_report_is_bounded_and_comes_apart_again(levels: int, text: str) -> None:
    """The innermost frames are kept, and the line above them; nothing is unprintable."""
    with pytest.raises(Wrong) as caught:
        deep(levels, text)
    said, trace = split_report(report_of(caught.value))
    assert said == described(caught.value)
    assert trace == traceback_of(caught.value)
    assert len(trace) <= LONGEST_TRACEBACK
    assert trace.splitlines()[-1] == said
    assert trace.splitlines()[-2] == "    raise Wrong(text)"
    assert all(line.isprintable() for line in trace.splitlines())


def test_an_error_that_was_not_raised_has_no_traceback() -> None:
    """Then a report is its line."""
    assert report_of(ValueError("no")) == "ValueError: no"
    assert split_report("ValueError: no") == ("ValueError: no", "")
    assert split_report("") == ("", "")


# The last error of a guard


def fail_with(guard: Guard, error: BaseException) -> None:
    """Let a call of `guard` raise `error`."""

    def broken() -> None:
        raise error

    with suppress(type(error)):
        guard.call(broken)


def test_a_snapshot_has_the_last_error_with_its_age_and_count() -> None:
    """The count is of errors with the same name in a row; another name begins anew."""
    clock = VirtualClock()
    guard = Guard("last", Bulkhead(5), clock=clock)
    assert guard.snapshot()["last_error"] is None
    guard.call(int)
    assert guard.snapshot()["last_error"] is None
    for _ in range(3):
        fail_with(guard, status_error(503))
        clock.advance(1.0)
    told = {"reason": "503", "text": "503 from vendor.example", "age": 1.0, "count": 3}
    assert guard.snapshot()["last_error"] == told
    guard.call(int)
    assert guard.snapshot()["last_error"] == told
    fail_with(guard, ConnectionError("refused by https://bob:hunter2@vendor/x"))
    told = guard.snapshot()["last_error"]
    assert told["text"] == "ConnectionError: refused by https://vendor/..."
    assert (told["count"], told["age"]) == (1, 0.0)


def test_the_text_of_a_flood_is_made_ten_times_a_second() -> None:
    """Errors of the same name in between are only counted: to redact a text takes a while."""
    clock = VirtualClock()
    guard = Guard("flood", Bulkhead(5), clock=clock)
    for number in range(100):
        fail_with(guard, ConnectionError(str(number)))
        clock.advance(0.01)
    told = guard.snapshot()["last_error"]
    assert told["count"] == 100
    assert told["text"] in {f"ConnectionError: {number}" for number in range(90, 100)}


def test_a_call_that_is_cut_off_is_named_as_timed_out() -> None:
    """Inside, it was cancelled: nobody looks for that."""

    async def main() -> None:
        guard = Guard("late", Timeout(1.0))
        with pytest.raises(TimedOut):
            await guard.acall(asyncio.Event().wait)
        told = guard.snapshot()["last_error"]
        assert (told["reason"], told["text"]) == ("timed_out", "TimedOut")

    run_virtual(main())


def test_the_last_error_keeps_no_error_alive() -> None:
    """Its frames may hold a request and its body."""
    guard, error = Guard("alive", Bulkhead(5)), Wrong("no")
    watched = ref(error)
    fail_with(guard, error)
    del error
    gc.collect()
    assert watched() is None
    assert guard.snapshot()["last_error"]["text"] == "Wrong: no"


def test_a_family_has_the_latest_error_of_its_keys() -> None:
    """Whichever key it was."""
    clock = VirtualClock()
    family = Family("tenants", lambda _key: (Bulkhead(5),), clock=clock)
    fail_with(family["a"], KeyError("a"))
    clock.advance(1.0)
    fail_with(family["b"], ValueError("b"))
    assert family.snapshot()["last_error"]["text"] == "ValueError: b"


def test_the_page_shows_the_last_error() -> None:
    """In a line: what, how often, and when."""
    clock = VirtualClock()
    guard = Guard("shown", Bulkhead(5), clock=clock)
    for _ in range(2):
        fail_with(guard, status_error(503))
    clock.advance(75.4)
    view = guard_view(guard.snapshot(), (), Counters(), edge=False)
    assert view["last_error"] == "503 from vendor.example, 2 times, 75 s ago"
    well = Guard("well", Bulkhead(5)).snapshot()
    assert "last_error" not in guard_view(well, (), Counters(), edge=False)
