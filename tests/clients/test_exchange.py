"""What guarded clients promise, of every library: what is repeated, kept, closed and told."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from requests.adapters import HTTPAdapter
from urllib3.util import Retry as Retries
from urllib3.util import Timeout as Urllib3Timeout

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitOpen,
    Criticality,
    DeadlineExceeded,
    Fallback,
    Guard,
    Hedge,
    Retry,
    SeawallError,
    TimedOut,
    Timeout,
    criticality,
    deadline,
    transient,
)
from seawall.clients.http import bodies as _bodies
from seawall.clients.http.exchange import AttemptTime, GuardedExchange
from seawall.clients.http.httpx_family import TimeLeft
from seawall.clients.http.library import Library, as_library_error
from seawall.clients.http.terms import Terms
from seawall.clients.httpx import AsyncGuardedTransport, GuardedTransport
from seawall.clients.httpx2 import AsyncGuardedTransport as AsyncGuardedTransport2
from seawall.clients.httpx2 import GuardedTransport as GuardedTransport2
from seawall.clients.requests import GuardedAdapter
from seawall.clock import VirtualClock
from seawall.context import idempotency_key, tenant
from seawall.testing import virtual_time
from seawall.wire.deadlines import least_timeout
from tests.clients.support import (
    CARRIERS,
    LARGE,
    AiohttpResponse,
    Carrier,
    Server,
    Step,
    status_of,
)
from tests.support import falsified, new_guard, receiving

OK = Step()
BUSY = Step(503)
ENVOY = "x-envoy-expected-rq-timeout-ms"

carriers = pytest.mark.parametrize("carrier", CARRIERS, ids=lambda carrier: carrier.name)
TIMED = [carrier for carrier in CARRIERS if carrier.module is not aiohttp]
"""Those whose own timeouts are lowered; aiohttp's cannot be, see test_aiohttp."""
BROKEN_BODIES = "DecodingError", "ClientPayloadError"


def guard_of(*policies: Any, attempts: int = 3, **options: Any) -> Guard:
    """Return a guard with its own clock and that maximum of attempts."""
    clock = VirtualClock(1000.0)
    retry = Retry(on=transient, attempts=attempts, backoff=0.5)
    return new_guard(retry, *policies, clock=clock, rng=Random(7), **options)


def stops(guard: Guard) -> dict[str, int]:
    """Return why the guard's retry stopped."""
    found: dict[str, int] = guard.snapshot()["policies"][0]["stopped"]
    return found


# --- What is repeated ---


@carriers
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599])
def test_failed_answers_are_retried(carrier: Carrier, status: int):
    """A status that means failure is asked for again, and the answer after it is handed out."""
    server = Server(Step(status), Step(status, body=LARGE), Step(body=b"fine"))
    answer = carrier.request(guard_of(), server)
    assert (answer.status_code, answer.content, server.sent) == (200, b"fine", 3)


@carriers
@pytest.mark.parametrize("status", [200, 204, 301, 400, 404, 409, 501, 505])
def test_other_answers_are_not(carrier: Carrier, status: int):
    """Answers that a repeat would not change are not retried."""
    server = Server(Step(status, body=b""))
    answer = carrier.request(guard_of(), server, settings={})
    assert (answer.status_code, server.sent) == (status, 1)


@carriers
def test_the_last_answer_itself_is_handed_out(carrier: Carrier):
    """After the last attempt the user has its answer, whole, large or small, and no error."""
    for body in (b"so sorry", LARGE):
        server = Server(Step(500), Step(502), Step(503, body=body))
        answer = carrier.request(guard_of(), server)
        assert (answer.status_code, answer.content, server.sent) == (503, body, 3)


@carriers
@pytest.mark.parametrize("error", ["ReadError", "ReadTimeout", "RemoteProtocolError"])
def test_transport_errors_are_retried(carrier: Carrier, error: str):
    """Network trouble is asked again for; at last it is raised as what it is."""
    server = Server(Step(error=error), OK)
    assert carrier.request(guard_of(), server).status_code == 200
    with pytest.raises(carrier.error) as caught:
        carrier.request(guard_of(), Server(Step(error=error)))
    assert not isinstance(caught.value, SeawallError)


@carriers
@pytest.mark.parametrize("method", ["POST", "PATCH"])
@pytest.mark.parametrize("step", [BUSY, Step(500), Step(error="ReadTimeout")], ids=str)
def test_what_is_not_idempotent_is_sent_once(carrier: Carrier, method: str, step: Step):
    """A POST or PATCH without a key is sent once, and a note says why."""
    guard, server = guard_of(), Server(step)
    note = f"seawall: not retried: {method} without an idempotency key"
    if step.error:
        with pytest.raises(carrier.error) as caught:
            carrier.request(guard, server, method, body=b"x")
        notes = caught.value.__notes__
    else:
        answer = carrier.request(guard, server, method, body=b"x")
        left = getattr(answer, "extensions", None) or vars(answer)
        notes = [left["seawall_note"]]
    assert note in notes
    assert (server.sent, stops(guard)) == (1, {"not idempotent": 1})


@carriers
def test_a_key_makes_it_repeatable(carrier: Carrier):
    """With a key, given or made, a POST is repeated; the key is the same in each attempt."""
    for settings_, headers, key in (
        ({}, {"Idempotency-Key": "mine"}, None),
        ({"generate_keys": True}, {}, None),
        ({}, {}, "order-7"),
        ({"repeatable": lambda request: request.method == "POST"}, {}, None),
    ):
        server = Server(BUSY, BUSY, OK)
        with ExitStack() as stack:
            if key is not None:
                stack.enter_context(idempotency_key(key))
            options: Any = {"settings": settings_, "headers": headers}
            answer = carrier.request(guard_of(), server, "POST", body=b"x", **options)
        assert answer.status_code == 200
        keys = {seen.headers.get("idempotency-key") for seen in server.seen}
        assert len(keys) == 1
        if "repeatable" in settings_:
            assert keys == {None}
        elif headers:
            assert keys == {"mine"}
        elif key:
            assert keys == {'"order-7"'}
        else:
            assert len(keys.pop() or "") == 38


AT_WORK = Step(409, {"Retry-After": "2"})
KEYED = {"Idempotency-Key": "order-7"}


@carriers
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_key_that_is_still_at_work_is_asked_again(carrier: Carrier, method: str):
    """A timeout, then 409 while the first request is being done: the user gets its answer."""
    breaker = Breaker(consecutive=1)
    guard = guard_of(breaker, attempts=4)
    server = Server(AT_WORK, AT_WORK, Step(201, body=b"charged"))
    answer = carrier.request(guard, server, method, body=b"x", headers=KEYED)
    assert (answer.status_code, answer.content, server.sent) == (201, b"charged", 3)
    assert guard.clock.now() >= 1004.0
    assert (breaker.state, guard.snapshot()["failed"]) == ("closed", 0)


@carriers
def test_the_last_409_is_handed_out(carrier: Carrier):
    """Where the attempts are over the user has the server's own answer, with its Retry-After."""
    server = Server(AT_WORK)
    answer = carrier.request(guard_of(), server, "POST", body=b"x", headers=KEYED)
    assert (answer.status_code, answer.headers["retry-after"], server.sent) == (409, "2", 3)


@carriers
@pytest.mark.parametrize(
    ("step", "headers"),
    [
        (AT_WORK, {}),  # a conflict, of a request without a key
        (Step(409), KEYED),
        (Step(409, {"Retry-After": "soon"}), KEYED),
        (Step(409, {"Retry-After": "2", "X-Should-Retry": "false"}), KEYED),
    ],
)
def test_other_conflicts_are_final(carrier: Carrier, step: Step, headers: dict[str, str]):
    """Without a key, or without a time to come back, a 409 is an answer like any other."""
    server = Server(step)
    answer = carrier.request(guard_of(), server, "PUT", body=b"x", headers=headers)
    assert (answer.status_code, server.sent) == (409, 1)


@carriers
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_replayed_failure_is_an_answer(carrier: Carrier, status: int):
    """It is what was answered before: not asked for again, and no sign of a server that is down."""
    breaker = Breaker(consecutive=1)
    guard = guard_of(breaker)
    server = Server(Step(status, {"Idempotent-Replayed": "true"}, body=b"sorry"))
    answer = carrier.request(guard, server, "POST", body=b"x", headers=KEYED)
    assert (answer.status_code, answer.content, server.sent) == (status, b"sorry", 1)
    assert (breaker.state, guard.snapshot()["failed"]) == ("closed", 0)


@carriers
def test_only_an_answer_to_a_key_can_be_replayed(carrier: Carrier):
    """A server that marks every failure does not escape the breaker of requests without a key."""
    breaker = Breaker(consecutive=1)
    server = Server(Step(500, {"Idempotent-Replayed": "true"}))
    carrier.request(guard_of(breaker), server)
    assert (server.sent, breaker.state) == (3, "open")


def test_a_copy_that_finds_its_key_at_work_does_not_win():
    """A hedged request is not answered by the 409 of its second copy."""
    carrier = CARRIERS[1]
    guard = new_guard(Hedge(delay=0.5), clock=VirtualClock(1000.0), rng=Random(7))
    server = Server(Step(201, body=b"charged", delay=3.0), AT_WORK)
    answer = carrier.request(guard, server, "POST", body=b"x", headers=KEYED)
    assert (answer.status_code, answer.content, server.sent) == (201, b"charged", 2)


@carriers
def test_keys_are_for_methods_that_need_one(carrier: Carrier):
    """A GET carries no key, whatever the context says."""
    server = Server(OK)
    with idempotency_key("order-7"):
        carrier.request(guard_of(), server)
    assert "idempotency-key" not in server.seen[0].headers


@carriers
def test_what_was_never_sent_is_safe_to_repeat(carrier: Carrier):
    """A POST whose connection could not be made is tried again; what was sent then is not."""
    server = Server(Step(error="ConnectError"), Step(error="PoolTimeout"), OK)
    assert carrier.request(guard_of(), server, "POST", body=b"x").status_code == 200
    server = Server(Step(error="ConnectTimeout"), Step(error="ReadTimeout"), OK)
    with pytest.raises(carrier.timeout_error):
        carrier.request(guard_of(), server, "POST", body=b"x")
    assert server.sent == 1


@carriers
def test_a_stream_is_sent_once_and_whole(carrier: Carrier):
    """A body that can be read once is not sent again, key or not; unless nothing was read of it."""

    def stream() -> Iterator[bytes]:
        yield from (b"one ", b"two")

    server = Server(BUSY, OK)
    with idempotency_key("k"):
        answer = carrier.request(guard_of(), server, "PUT", body=stream())
    assert (answer.status_code, [seen.body for seen in server.seen]) == (503, [b"one two"])
    server = Server(Step(error="ConnectError"), OK)
    answer = carrier.request(guard_of(), server, "PUT", body=stream())
    assert (answer.status_code, server.seen[-1].body) == (200, b"one two")


def test_forms_of_files_that_can_be_read_again_are_repeatable():
    """A multipart form is repeated if all of its files are there, or rewind to their beginning."""

    def form(file: Any) -> Any:
        return httpx.Request("PUT", "http://x", files={"f": ("f", file)}).stream

    assert _bodies.is_form(form(b"bytes"))
    assert _bodies.is_form(form(io.BytesIO(b"bytes")))
    moved = io.BytesIO(b"bytes")
    moved.read(1)
    assert not _bodies.is_form(form(moved))
    pipe = io.BytesIO(b"bytes")
    pipe.seekable = lambda: False  # type: ignore[method-assign]
    assert not _bodies.is_form(form(pipe))


@carriers
def test_a_retry_is_not_retried_again(carrier: Carrier):
    """For a request that came as a retry nothing is retried; at the edge only, for none at all."""
    for received, retry_at, sent in (
        (0, "everywhere", 3),
        (1, "everywhere", 3),
        (2, "everywhere", 1),
        (0, "edge", 3),
        (1, "edge", 1),
    ):
        for step in (BUSY, Step(error="ConnectError")):
            server = Server(step)
            with suppress(carrier.error), receiving(received):
                carrier.request(guard_of(), server, settings={"retry_at": retry_at})
            assert len(server.seen) == sent
            told = [int(seen.headers["seawall-attempt"]) for seen in server.seen]
            assert told == [max(received, n + 1) for n in range(sent)]


# --- What the server asks for ---


@carriers
@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "7", "retry-after-ms": "2500"}, 2.5),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, 0.5),
        ({"retry-after": "soon"}, 0.5),
        ({"retry-after": "x" * 9000}, 0.5),
    ],
    ids=str,
)
def test_pushback_is_a_floor(carrier: Carrier, headers: Any, pause: float):
    """The server is asked again when it wants to be or a little later, never earlier."""
    guard = guard_of()
    carrier.request(guard, Server(Step(429, headers), OK))
    waited = guard.clock.now() - 1000.0
    assert pause <= waited <= 1.25 * pause if pause > 0.5 else waited <= pause


@carriers
def test_a_pushback_beyond_the_bound_ends_the_retries(carrier: Carrier):
    """A server that asks for an hour is not asked again after a minute."""
    guard, server = guard_of(), Server(Step(429, {"retry-after": "3600"}), OK)
    assert carrier.request(guard, server).status_code == 429
    assert (guard.clock.now(), stops(guard)) == (1000.0, {"retry_after too long": 1})


@carriers
def test_a_wait_that_the_deadline_cannot_hold_is_not_begun(carrier: Carrier):
    """When asking again is too late anyway, the answer is handed out at once."""
    guard, server = guard_of(), Server(Step(429, {"retry-after": "7"}), OK)
    with deadline(3.0, clock=guard.clock):
        assert carrier.request(guard, server).status_code == 429
    assert (guard.clock.now(), stops(guard)) == (1000.0, {"deadline": 1})


@carriers
def test_a_server_may_refuse_or_ask_for_a_retry(carrier: Carrier):
    """`x-should-retry: false` ends it; `true` makes an answer a failure that is retried."""
    guard, server = guard_of(), Server(Step(503, {"x-should-retry": "false"}), OK)
    assert carrier.request(guard, server).status_code == 503
    assert stops(guard) == {"server said no": 1}
    server = Server(Step(409, {"x-should-retry": "true"}), OK)
    assert carrier.request(guard_of(), server).status_code == 200


@carriers
@pytest.mark.parametrize("wish", ["7", "Sunday, 06-Nov-94 08:49:37 GMT"], ids=["seconds", "date"])
def test_a_413_that_says_when_to_come_again_is_retried(carrier: Carrier, wish: str):
    """It is about the server's present state; without a `Retry-After` the request is too large."""
    guard = guard_of()
    server = Server(Step(413, {"retry-after": wish}), OK)
    assert carrier.request(guard, server).status_code == 200
    waited = guard.clock.now() - 1000.0
    assert 7.0 <= waited <= 8.75 if wish == "7" else waited <= 0.5
    for headers in ({}, {"retry-after": "soon"}, {"retry-after": "1", "x-should-retry": "false"}):
        server = Server(Step(413, headers), OK)
        assert carrier.request(guard_of(), server).status_code == 413
        assert len(server.seen) == 1


@carriers
def test_which_statuses_mean_failure_is_a_setting(carrier: Carrier):
    """Further statuses can be configured as failures."""
    server = Server(Step(404), OK)
    answer = carrier.request(guard_of(), server, settings={"statuses": {404}})
    assert answer.status_code == 200
    server = Server(Step(503), OK)
    assert carrier.request(guard_of(), server, settings={"statuses": {404}}).status_code == 503


# --- What the guard sees, and what the user sees of the guard ---


@carriers
def test_failed_answers_open_the_circuit(carrier: Carrier):
    """A breaker counts answers that mean failure; its refusal is also an error of the library's."""
    breaker = Breaker(failure_ratio=0.5, min_calls=4)
    guard, server = guard_of(breaker, attempts=1), Server(BUSY)
    for _ in range(4):
        assert carrier.request(guard, server).status_code == 503
    with pytest.raises(CircuitOpen) as caught:
        carrier.request(guard, server)
    error: Any = caught.value
    assert isinstance(error, carrier.error)
    assert (error.guard, error.policy, server.sent) == (guard.name, "breaker", 4)
    assert error.retry_after == pytest.approx(30.0, abs=15.1)
    assert str(error.request.url) == "http://vendor.test/orders"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is type(error)
    assert (str(again), again.retry_after) == (str(error), error.retry_after)


@carriers
def test_the_failure_is_told_not_that_the_next_attempt_was_refused(carrier: Carrier):
    """When the circuit opens between attempts, the answer there was is handed out, readable."""
    for body in (b"so sorry", LARGE):
        server = Server(Step(503, body=body))
        guard = guard_of(Breaker(failure_ratio=0.5, min_calls=1, counts="attempts"))
        answer = carrier.request(guard, server)
        assert (answer.status_code, answer.content, server.sent) == (503, body, 1)


@carriers
def test_refusals_are_errors_of_the_library(carrier: Carrier):
    """A full bulkhead and a deadline that has passed raise what both kinds of code catch."""
    guard = guard_of(Bulkhead(1))
    with guard.hold(), pytest.raises(BulkheadFull) as full:
        carrier.request(guard, Server(OK))
    assert isinstance(full.value, carrier.error)
    server = Server(OK)
    with deadline(0.0, clock=guard.clock), pytest.raises(DeadlineExceeded) as late:
        carrier.request(guard, server)
    assert isinstance(late.value, carrier.timeout_error)
    assert server.seen == []


@carriers
def test_a_fallback_answers_instead(carrier: Carrier):
    """A fallback gets the request and answers in place of the server."""

    def cached(request: Any) -> Any:
        if carrier.module is aiohttp:
            return AiohttpResponse(request, Step(200, body=b"cached /orders"))
        if carrier.module is not requests:
            return carrier.module.Response(200, text=f"cached {request.url.path}")
        response = requests.Response()
        response.status_code, response._content = 200, b"cached /orders"
        return response

    guard = new_guard(Fallback(cached), clock=VirtualClock())
    assert carrier.request(guard, Server(BUSY)).text == "cached /orders"


@carriers
def test_that_nothing_was_sent_is_no_business_of_others(carrier: Carrier):
    """A guard further out, around more than this request, does not take it for harmless."""
    outer = guard_of(idempotent=False)
    server = Server(Step(error="ConnectError"))

    def order() -> None:
        carrier.request(guard_of(attempts=1), server, "POST", body=b"x")

    with pytest.raises(carrier.error):
        outer.call(order)
    assert (len(server.seen), stops(outer)) == (1, {"not idempotent": 1})


def test_every_error_is_one_of_each_library_too():
    """Whatever Seawall raises can be raised as an error of the library, copied and pickled."""
    from seawall import errors

    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, SeawallError)
    ]
    for library in Library._known.values():
        for kind in kinds:
            original = kind("so it is")
            mixed: Any = as_library_error(original, library, "the request")
            assert isinstance(mixed, kind)
            assert isinstance(mixed, (library.error, library.timeout_error))
            assert type(mixed) is type(as_library_error(kind("again"), library, None))
            again = pickle.loads(pickle.dumps(mixed))  # noqa: S301 - our own
            for error in (mixed, again):
                assert (str(error), error.request) == ("so it is", "the request")
                assert type(error) is type(mixed)
                assert vars(error).items() >= vars(original).items()
                assert library.name != "requests" or error.response is None
            assert as_library_error(mixed, library, None) is mixed


def test_refusals_are_not_retryable():
    """A refusal is not worth another attempt, whichever library's error it is as well."""
    for library in Library._known.values():
        for error in (CircuitOpen("no"), DeadlineExceeded("late")):
            assert not transient(as_library_error(error, library, None))
        assert transient(as_library_error(TimedOut("slow"), library, None))


@carriers
def test_a_guard_that_is_not_for_repeating_says_so(carrier: Carrier):
    """With idempotent=False a GET is sent once, and a note says why; with a key it is repeated."""
    server = Server(BUSY, OK)
    guard = guard_of(idempotent=False)
    answer = carrier.request(guard, server)
    left = getattr(answer, "extensions", None) or vars(answer)
    assert left["seawall_note"] == "seawall: not retried: its guard is marked idempotent=False"
    with idempotency_key("k"):
        assert carrier.request(guard, Server(BUSY, OK)).status_code == 200


@carriers
def test_a_failed_answer_that_breaks_is_still_that_answer(carrier: Carrier):
    """What goes wrong with the body of a failed answer changes neither its status nor its wishes.

    It is an error for who reads the body, as without a guard.
    """
    for wish, sent in (({"x-should-retry": "false"}, 1), ({}, 3)):
        server = Server(Step(503, {"content-encoding": "gzip", **wish}, body=b"not gzip at all"))
        guard = guard_of()
        broken = [getattr(carrier.module, name, OSError) for name in BROKEN_BODIES]
        with pytest.raises((carrier.error, *broken)):
            carrier.request(guard, server)
        assert server.sent == sent
        assert [body.closed for body in server.bodies] == [1] * sent


@carriers
def test_answers_of_earlier_attempts_are_closed_before_the_next(carrier: Carrier):
    """Where a value is retried, the answer before has given its connection back by then."""

    class OneConnection(Server):
        def next(self) -> Step:
            assert all(body.closed for body in self.bodies)
            return super().next()

    def not_ready(_error: object, value: Any) -> bool:
        return value is not None and status_of(value) == 202

    guard = new_guard(Retry(on=not_ready, backoff=0.5), clock=VirtualClock())
    server = OneConnection(Step(202), Step(202, body=LARGE), OK)
    assert carrier.request(guard, server).content == OK.body


@pytest.mark.parametrize("carrier", CARRIERS[:4], ids=lambda carrier: carrier.name)
def test_attempts_of_one_call_know_what_was_tried(carrier: Carrier):
    """All attempts of a call carry one set for the hosts that were asked; another call another."""
    server, guard = Server(BUSY, BUSY, OK), guard_of()
    carrier.request(guard, server)
    carrier.request(guard, server)
    first, second, third, fourth = (seen.tried for seen in server.seen)
    assert first is second is third is not fourth
    assert first == set()


@pytest.mark.parametrize("carrier", CARRIERS[:4], ids=lambda carrier: carrier.name)
def test_the_users_timeouts_count_for_the_body(carrier: Carrier):
    """Once the headers are there, the pieces of the body have the time that the user gave them."""
    for steps in ([OK], [Step(503, body=LARGE)]):
        guard, server = guard_of(attempts=1), Server(*steps)
        with deadline(3.0, clock=guard.clock):
            carrier.request(guard, server, timeout=9.0)
        timeout = server.seen[0].timeout
        assert (timeout["read"], timeout.get("write")) == (9.0, 9.0)
        assert max(_parts(timeout)) <= 3.0  # as it was in the beginning


def test_a_failed_answer_that_drips_is_not_waited_for():
    """Of a failed answer that comes in drops only the first second's are read beforehand."""

    class Drips(httpx.SyncByteStream):
        read = closed = 0

        def __iter__(self) -> Iterator[bytes]:
            for self.read in range(1, 101):
                clock.sleep(0.4)
                yield b"x"

        def close(self) -> None:
            self.closed += 1

    with virtual_time() as clock:
        drips = Drips()
        inner = httpx.MockTransport(lambda _: httpx.Response(503, stream=drips))
        guard = new_guard(Breaker())
        client = httpx.Client(transport=GuardedTransport(guard, inner))
        with client, client.stream("GET", "http://x.test/") as answer:
            assert (drips.read, drips.closed) == (3, 0)
            assert len(answer.read()) == 100
    assert drips.closed == 1


# --- Time ---


@pytest.mark.parametrize("carrier", TIMED, ids=lambda carrier: carrier.name)
def test_the_librarys_timeouts_are_lowered_to_the_deadline(carrier: Carrier):
    """Each of the library's own timeouts is at most what is left, and never raised."""
    guard, server = guard_of(), Server(BUSY, OK)
    with deadline(2.55, clock=guard.clock):
        carrier.request(guard, server, timeout=2.5, settings={"reserve": 0.0})
    first, second = (_parts(seen.timeout) for seen in server.seen)
    assert set(first) == {2.5}
    left = 2.55 - (guard.clock.now() - 1000.0)
    assert left - 0.05 <= min(second) <= max(second) <= left < 2.5
    server = Server(OK)
    carrier.request(guard_of(), server, timeout=2.5)
    assert set(_parts(server.seen[0].timeout)) == {2.5}


def _parts(timeout: Any) -> list[float]:
    if isinstance(timeout, dict):
        return list(timeout.values())
    if isinstance(timeout, Urllib3Timeout):
        return [min(part, timeout.total) for part in (timeout._connect, timeout._read)]
    return [timeout]


@pytest.mark.parametrize("carrier", TIMED, ids=lambda carrier: carrier.name)
def test_a_timeout_of_the_guard_is_a_deadline_too(carrier: Carrier):
    """The guard's remaining time bounds the library's timeout and is sent to the server."""
    guard, server = guard_of(Timeout(1.5, sync="cooperative")), Server(OK)
    carrier.request(guard, server, timeout=9.0)
    timeout = server.seen[0].timeout
    if not carrier.sync:
        # The guard cancels: so what is streamed later need not be hurried now.
        assert timeout.pop("read") == 9.0
    assert 1.4 <= min(_parts(timeout)) <= max(_parts(timeout)) <= 1.5
    assert server.seen[0].headers[ENVOY] == "1500"


@pytest.mark.parametrize(
    "carrier", [c for c in CARRIERS if c.sync], ids=lambda carrier: carrier.name
)
def test_a_cooperative_timeout_says_that_time_is_over(carrier: Carrier):
    """A timeout of the library's at the deadline is the guard's: raised as `TimedOut`, counted."""
    guard = guard_of(Timeout(1.5, sync="cooperative"), attempts=1)

    class Slow(Server):
        def next(self) -> Step:
            guard.clock.sleep(1.5)
            return super().next()

    with pytest.raises(TimedOut) as caught:
        carrier.request(guard, Slow(Step(error="ReadTimeout")))
    assert isinstance(caught.value, carrier.timeout_error)
    assert guard.snapshot()["policies"][1]["timed_out"] == 1


PLAIN = CARRIERS[0], CARRIERS[2]
STAGES = st.tuples(
    st.sampled_from(PLAIN),
    st.tuples(*[st.integers(0, 12).map(lambda tenths: tenths / 10)] * 4),
    st.sampled_from([None, 0.7, 5.0]),
)


def steps_end_together(case: Any) -> None:
    """Let a plain client's library take its time with each step, as far as its timeouts allow."""
    carrier, seconds, own = case
    guard = guard_of(Timeout(1.0, sync="cooperative"), attempts=1)
    sent_at: list[float] = []

    def handle(_self: Any, request: Any) -> Any:
        for part, taken in zip(("pool", "connect", "write", "read"), seconds, strict=True):
            allowed = request.extensions["timeout"].get(part)
            if part == "write":
                sent_at.append(guard.clock.now())
            guard.clock.sleep(min(taken, allowed))
            if taken > allowed:
                name = f"{part.capitalize()}Timeout"
                raise getattr(carrier.module, name)(part, request=request)
        return carrier.module.Response(200)

    kind = type("Staged", (carrier.module.BaseTransport,), {"handle_request": handle})
    made = {"httpx": GuardedTransport, "httpx2": GuardedTransport2}[carrier.module.__name__]
    client = carrier.module.Client(transport=made(guard, kind()), timeout=own)
    with client:
        try:
            client.get("http://x.test/")
        except TimedOut:
            assert guard.clock.now() >= 1001.0
            assert guard.snapshot()["timed_out"] == 1
        except carrier.timeout_error:
            assert own == 0.7  # the user's own, in time
    guard.close()
    assert guard.clock.now() <= 1001.001
    assert all(instant < 1001.0 for instant in sent_at)


@given(STAGES)
def test_steps_of_a_plain_client_end_together(case: Any):
    """Pool, connecting, writing and reading share what is left; with none left nothing is sent."""
    steps_end_together(case)


def test_with_timeouts_of_the_beginning_they_add_up(monkeypatch: pytest.MonkeyPatch):
    """Ablation: with what was left in the beginning for each step, a call takes far too long."""
    monkeypatch.setattr(TimeLeft, "get", dict.get)
    assert falsified(steps_end_together, STAGES)


# --- Headers ---


@carriers
def test_headers_tell_the_next_service(carrier: Carrier):
    """Deadline, criticality and attempt are sent; the tenant only on request."""
    server = Server(BUSY, OK)
    guard = guard_of()
    given_ = {"baggage": "a=1;p=2, b=3", "x-mine": "7"}
    with deadline(9.0, clock=guard.clock), criticality(Criticality.SHEDDABLE), tenant("acme"):
        carrier.request(guard, server, headers=given_)
        told = Server(OK)
        carrier.request(guard, told, settings={"propagate": {"tenant"}})
        silent = Server(OK)
        carrier.request(guard, silent, settings={"propagate": False}, headers=given_)
    first, second = (seen.headers for seen in server.seen)
    assert first["baggage"] == "seawall.criticality=sheddable,a=1;p=2, b=3"
    assert (first["seawall-attempt"], second["seawall-attempt"]) == ("1", "2")
    assert (first[ENVOY], first["x-server-timeout"]) == ("8500", "8.500"), "0.5 s are kept back"
    assert int(second[ENVOY]) < 8500
    assert first["x-mine"] == "7"
    assert told.seen[0].headers["baggage"] == "seawall.tenant=acme"
    assert ENVOY not in told.seen[0].headers
    assert silent.seen[0].headers["baggage"] == given_["baggage"]
    assert not {ENVOY, "seawall-attempt"} & set(silent.seen[0].headers)


@carriers
def test_what_the_user_set_stays(carrier: Carrier):
    """A header of the user's is only changed to lower a deadline or to raise an attempt."""
    own = {
        "x-server-timeout": "2.5",
        "baggage": "seawall.criticality=sheddable,a=1",
        "Seawall-Attempt": "4",
        "Idempotency-Key": "mine",
    }
    guard, server = guard_of(), Server(OK)
    with criticality(Criticality.CRITICAL_PLUS), idempotency_key("other"):
        with deadline(3.0, clock=guard.clock):
            carrier.request(guard, server, "POST", body=b"", headers=own)
        with deadline(2.0, clock=guard.clock):
            still = {"reserve": 0.0}
            carrier.request(guard, server, "POST", body=b"", headers=own, settings=still)
    kept, lowered = (seen.headers for seen in server.seen)
    assert (kept["x-server-timeout"], ENVOY in kept) == ("2.5", False)
    assert (lowered["x-server-timeout"], lowered[ENVOY]) == ("2.000", "2000")
    for seen in (kept, lowered):
        assert seen["baggage"] == "seawall.criticality=sheddable,a=1"
        assert (seen["seawall-attempt"], seen["idempotency-key"]) == ("4", "mine")


@pytest.mark.parametrize("carrier", PLAIN, ids=lambda carrier: carrier.name)
def test_bytes_of_other_encodings_go_through(carrier: Carrier):
    """Foreign members of a baggage header stay the bytes that they are."""
    seen: list[bytes] = []

    def look(request: Any) -> Any:
        seen.extend(value for name, value in request.headers.raw if name == b"baggage")
        return carrier.module.Response(200)

    made = {"httpx": GuardedTransport, "httpx2": GuardedTransport2}[carrier.module.__name__]
    transport = made(guard_of(), carrier.module.MockTransport(look), propagate={"tenant"})
    with carrier.module.Client(transport=transport) as client, tenant("acme"):
        client.get("http://x.test/", headers=[(b"baggage", "k=é".encode())])
    assert seen == ["seawall.tenant=acme,k=é".encode()]


# --- Wrong settings ---


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"retry_at": "middle"}, "write one of 'everywhere', 'edge'"),
        ({"generate_keys": 1}, "write True or False"),
        ({"statuses": {302}}, "write 400 or more"),
        ({"statuses": 503}, "write a set of them"),
        ({"propagate": "deadline"}, "write True, False, or a set of"),
        ({"propagate": {"user"}}, "'user' is not one of"),
        ({"repeatable": True}, "pass a function"),
    ],
)
def test_wrong_settings_are_refused(settings_: dict[str, Any], message: str):
    """A setting that makes no sense is refused at once, with what to write instead."""
    for kind in (GuardedTransport, AsyncGuardedTransport, GuardedAdapter):
        with pytest.raises((TypeError, ValueError), match=message):
            kind(guard_of(), **settings_)


def test_stacks_that_cannot_work_are_refused():
    """No guard, a cache of responses, a timeout that cannot act, retries beside the guard's."""
    guard: Any = "vendor"
    with pytest.raises(TypeError, match="the first argument is a Guard"):
        GuardedTransport(guard)
    with pytest.raises(TypeError, match="its body can be read once"):
        GuardedTransport(new_guard(Cache(ttl=1.0)))
    with pytest.raises(TypeError, match=r"sync='cooperative'.*Guard\.standard"):
        GuardedTransport(new_guard(Timeout(1.0)))
    for retries in (2, Retries(total=None, status=2), Retries(connect=1), Retries(total=None)):
        with pytest.raises(ValueError, match="max_retries=0"):
            GuardedAdapter(guard_of(), HTTPAdapter(max_retries=retries))
    GuardedAdapter(guard_of(), HTTPAdapter(max_retries=Retries(total=False)))
    with pytest.raises(ValueError, match=r"HTTPTransport\(retries=0"):
        GuardedTransport(guard_of(), httpx.HTTPTransport(retries=3))


def test_what_is_no_transport_of_that_kind_is_refused():
    """A transport of the other kind, of the other library, a client or a word is refused."""
    wrong: list[Any] = ["x", httpx.AsyncHTTPTransport(), httpx.Client(), httpx2.HTTPTransport()]
    for transport in [*wrong, httpx.HTTPTransport]:
        with pytest.raises(TypeError, match=r"such as httpx\.HTTPTransport\(\)"):
            GuardedTransport(guard_of(), transport)
    with pytest.raises(TypeError, match=r"such as httpx2\.AsyncHTTPTransport\(\)"):
        AsyncGuardedTransport2(guard_of(), httpx2.HTTPTransport())
    for adapter in ("x", requests.Session()):
        with pytest.raises(TypeError, match=r"such as HTTPAdapter\(\)"):
            GuardedAdapter(guard_of(), adapter)  # type: ignore[arg-type]


def test_they_say_what_they_are():
    """The repr names the guard and what is inside."""
    guard = guard_of()
    assert repr(GuardedTransport(guard)) == (
        f"<GuardedTransport of guard {guard.name!r} over HTTPTransport>"
    )
    assert repr(GuardedAdapter(guard)) == (
        f"<GuardedAdapter of guard {guard.name!r} over HTTPAdapter>"
    )
    assert GuardedTransport(guard).guard is GuardedAdapter(guard).guard is guard


# --- The rules, for any history ---

STEPS = st.one_of(
    st.tuples(
        st.sampled_from([200, 408, 429, 500, 503]),
        st.sampled_from([{}, {"retry-after": "1"}, {"x-should-retry": "false"}]),
        st.sampled_from([b"", b"sorry", LARGE]),
    ).map(lambda parts: Step(*parts)),
    st.sampled_from(["ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError"]).map(
        lambda name: Step(error=name)
    ),
)
CASES = st.tuples(
    st.sampled_from(CARRIERS),
    st.lists(STEPS, min_size=1, max_size=4),
    st.sampled_from(["GET", "PUT", "POST", "PATCH"]),
    st.sampled_from([None, "key"]),
    st.booleans(),
    st.sampled_from([0, 1, 2]),
)


def rules_hold(case: Any) -> None:
    """Demand what must hold whatever the server does."""
    carrier, steps, method, key, streamed, received = case
    server = Server(*steps)
    guard = guard_of(Breaker(failure_ratio=0.9, min_calls=3))
    whole = b"one two"
    answer: Any = None
    with ExitStack() as stack:
        if key is not None:
            stack.enter_context(idempotency_key(key))
        stack.enter_context(receiving(received))
        stack.enter_context(deadline(5.0, clock=guard.clock))
        body = iter([b"one ", b"two"]) if streamed else whole
        again: Exception | None = None
        try:
            answer = carrier.request(guard, server, method, body=body)
        except carrier.error:
            pass
        except (RuntimeError, TypeError) as error:
            again = error
    guard.close()
    assert again is None, f"sent again: {again!r}"
    assert len(server.seen) <= 3
    repeatable = (method in ("GET", "PUT") or key) and not streamed and received < 2
    assert repeatable or server.sent <= 1
    unsent = {"ConnectError", "ConnectTimeout"}
    scripted = [steps[min(n, len(steps) - 1)] for n in range(len(server.seen))]
    for seen, step in zip(server.seen, scripted, strict=True):
        assert seen.body == (b"" if step.error in unsent and seen.body != whole else whole)
    assert len({seen.headers.get("idempotency-key") for seen in server.seen}) <= 1
    left = [least_timeout(seen.headers.items()) for seen in server.seen]
    assert left == sorted(left, key=float, reverse=True)
    # The last answer was read by the client, which closed it; all others are closed as well.
    assert [body.closed for body in server.bodies] == [1] * len(server.bodies)
    assert answer is None or answer.content == server.bodies[-1].content


@given(CASES)
def test_the_rules_hold(case: Any):
    """Nothing is sent too often, in part, or with another key; all answers are closed once."""
    rules_hold(case)


def test_without_asking_why_once_something_is_sent_twice(monkeypatch: pytest.MonkeyPatch):
    """Ablation: without the look at method, key and body, the rules are broken."""
    monkeypatch.setattr(Terms, "reason_not_to_repeat", lambda *_: None)
    assert falsified(rules_hold, CASES)


def test_without_closing_losers_answers_stay_open(monkeypatch: pytest.MonkeyPatch):
    """Ablation: without closing what was superseded, answers stay open."""
    monkeypatch.setattr(GuardedExchange, "_discard", lambda *_: iter(()))
    assert falsified(rules_hold, CASES)


def test_without_the_body_rule_half_a_body_is_sent(monkeypatch: pytest.MonkeyPatch):
    """Ablation: if every stream is taken to be replayable, the second attempt sends half of it."""
    from seawall.clients.http.httpx_family import HttpxLibrary

    monkeypatch.setattr(HttpxLibrary, "replayable", lambda *_: True)
    assert falsified(rules_hold, CASES)


def test_without_lowering_the_deadline_time_grows(monkeypatch: pytest.MonkeyPatch):
    """Ablation: with a time left that does not follow the clock, it does not shrink."""
    chance = Random(7)
    monkeypatch.setattr(GuardedExchange, "_time_left", lambda _: AttemptTime(chance.random() * 5))
    assert falsified(rules_hold, CASES)
