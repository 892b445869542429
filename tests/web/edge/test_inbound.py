from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from math import nextafter
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Criticality, DeadlineExceeded, current_deadline, deadline
from seawall.clock import VirtualClock
from seawall.context import (
    Attempt,
    Deadline,
    attempt_var,
    attempts_from,
    criticality_var,
    current_criticality,
    current_idempotency_key,
    current_tenant,
    deadline_var,
    idempotency_key_var,
    tenant_var,
    tier_var,
)
from seawall.web.edge import Edge
from seawall.web.edge import inbound as inbound_module
from seawall.web.edge.inbound import Inbound
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust
from seawall.wire.criticality import write_baggage
from seawall.wire.deadlines import write_timeout
from tests.support import falsified, received_attempt
from tests.web.support import http_scope, serve

CALLER = ("10.0.0.1", 1)
STRANGER = ("203.0.113.9", 1)
TRUST = Trust(callers=["10.0.0.0/8"])
EVERYTHING = [
    ("grpc-timeout", "2S"),
    ("x-envoy-expected-rq-timeout-ms", "1500"),
    ("X-Server-Timeout", "3"),
    ("baggage", "a=1,seawall.criticality=sheddable,seawall.tenant=acme,b=2"),
    ("Seawall-Attempt", "2"),
    ("Idempotency-Key", "k"),
]
NOTHING = (Criticality.CRITICAL, None, 0)


def received(
    inbound: Inbound,
    headers: list[tuple[str, str]],
    client: tuple[str, int] | None = CALLER,
) -> tuple[float | None, tuple[Criticality, str | None, int], Incoming]:
    """Return the seconds left, the rest of the context, and the request after it was read."""
    clock = VirtualClock(100.0)
    incoming = Incoming(http_scope(headers=headers, client=client), inbound.trust)

    def read() -> Any:
        inbound.read(incoming, clock)
        limit = current_deadline()
        rest = (current_criticality(), current_tenant(), received_attempt())
        return None if limit is None else limit.at - 100.0, rest, incoming

    return copy_context().run(read)


def test_a_caller_is_heard():
    """The least time, the criticality, the tenant and the attempt of a believed caller count."""
    seconds, rest, incoming = received(Inbound(trust=TRUST), EVERYTHING)
    assert seconds == 1.5
    assert rest == (Criticality.SHEDDABLE, "acme", 2)
    assert len(incoming.headers) == len(EVERYTHING)


@pytest.mark.parametrize("trust", [TRUST, Trust(), None])
def test_a_stranger_is_not(trust: Trust | None):
    """Whoever is not believed gets the server's own time; only its attempt counts."""
    inbound = Inbound(trust=trust)
    seconds, rest, incoming = received(inbound, EVERYTHING, STRANGER)
    assert (seconds, rest) == (30.0, (*NOTHING[:2], 2))
    kept = [(b"seawall-attempt", b"2"), (b"idempotency-key", b"k"), (b"baggage", b"a=1,b=2")]
    assert incoming.scope["headers"] == kept
    assert incoming.headers == incoming.scope["headers"]
    assert inbound.snapshot() == {"expired": 0, "dropped": 1, "unclassified": 0}


def test_an_edge_in_a_chain_that_trusts_nobody_says_so():
    """Once a request brought what only callers may say, the edge's dangers name the remedy."""
    inbound = Inbound()
    assert inbound.dangers() == []
    received(inbound, EVERYTHING, STRANGER)
    (danger,) = inbound.dangers()
    assert "1 requests carried a deadline or criticality" in danger
    assert "trust=Trust(callers=" in danger
    careful = Inbound(trust=TRUST)
    received(careful, EVERYTHING, STRANGER)
    assert careful.dangers() == []


def test_nothing_is_taken_from_harmless_requests():
    """A stranger's other headers, and baggage without members of ours, stay as they are."""
    inbound = Inbound()
    _, _, incoming = received(inbound, [("Accept", "*/*"), ("baggage", "a=1")], STRANGER)
    assert incoming.headers == [(b"accept", b"*/*"), (b"baggage", b"a=1")]
    assert inbound.snapshot()["dropped"] == 0


@pytest.mark.parametrize("headers", [[[b"baggage", b"a=1"]], ((b"baggage", b" "),), ()])
def test_only_what_was_removed_is_counted(headers: Any):
    """A server may hand over pairs and lists of any kind; they are not counted for that."""
    inbound = Inbound()
    scope = http_scope(client=STRANGER) | {"headers": headers}
    copy_context().run(inbound.read, Incoming(scope, inbound.trust), VirtualClock())
    assert inbound.snapshot()["dropped"] == 0
    assert scope["headers"] is headers


@pytest.mark.parametrize(
    ("lines", "kept", "looks"),
    [
        (["a=1", "seawall.tenant=x", "b=2"], "a=1,b=2", 1),
        (["seawall.tenant=x"], None, 1),
        (["a=1"] * 63 + ["seawall.tenant=x"], ",".join(["a=1"] * 63), 1),
        (["a=1"] * 65, None, 0),
        (["a=" + "1" * 5000] * 2, None, 0),
    ],
)
def test_a_strangers_baggage_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], kept: str | None, looks: int
):
    """However many its lines, the work is that of 8 KiB; more lines or characters are dropped."""
    looked: list[str] = []
    clean = inbound_module.baggage_without_ours
    monkeypatch.setattr(
        inbound_module, "baggage_without_ours", lambda text: looked.append(text) or clean(text)
    )
    inbound = Inbound()
    _, _, incoming = received(inbound, [("baggage", line) for line in lines], STRANGER)
    assert incoming.header("baggage") == kept
    assert (len(looked), inbound.snapshot()["dropped"]) == (looks, 1)


def test_every_request_has_a_deadline():
    """Who asks for no time gets the server's, unless that is None."""
    assert received(Inbound(), [])[0] == 30.0
    assert received(Inbound(timeout=2.5), [])[0] == 2.5
    assert received(Inbound(timeout=None), [])[0] is None
    assert received(Inbound(trust=TRUST, timeout=None), EVERYTHING)[0] == 1.5


@pytest.mark.parametrize(
    ("most", "said", "level"),
    [
        ("CRITICAL", "critical-plus", "CRITICAL"),
        ("CRITICAL", "sheddable-plus", "SHEDDABLE_PLUS"),
        ("CRITICAL_PLUS", "critical-plus", "CRITICAL_PLUS"),
        ("CRITICAL_PLUS", "", "CRITICAL"),
        ("SHEDDABLE", "critical", "SHEDDABLE"),
        ("SHEDDABLE", "", "SHEDDABLE"),
    ],
)
def test_criticality_is_only_lowered(most: str, said: str, level: str):
    """Nobody is above the server's highest, and nobody is raised to it."""
    inbound = Inbound(trust=TRUST, max_criticality=Criticality[most])
    headers = [("baggage", f"seawall.criticality={said}")] if said else []
    assert received(inbound, headers)[1][0] is Criticality[level]


def test_several_baggage_lines_are_one():
    """Members may come in several lines; a contradiction between them says nothing."""
    lines = [("baggage", "seawall.tenant=acme"), ("baggage", "seawall.criticality=sheddable")]
    assert received(Inbound(trust=TRUST), lines)[1] == (Criticality.SHEDDABLE, "acme", 0)
    lines.append(("baggage", "seawall.tenant=other"))
    assert received(Inbound(trust=TRUST), lines)[1] == (Criticality.SHEDDABLE, None, 0)


def test_the_callers_key_is_not_ours():
    """The key that came with the request does not name the calls that are made for it."""

    def read() -> tuple[str | None, str | None]:
        incoming = Incoming(http_scope(headers=EVERYTHING, client=CALLER), TRUST)
        Inbound(trust=TRUST).read(incoming, VirtualClock())
        return incoming.idempotency_key, current_idempotency_key()

    assert copy_context().run(read) == ("k", None)


@pytest.mark.parametrize("inside", [{INCOMING: None}, {"type": "grpc"}])
def test_an_earlier_deadline_stays(inside: dict[str, Any]):
    """Inside another edge, and in a gRPC server, a deadline is never moved to a later instant."""
    clock, other = VirtualClock(), VirtualClock(500.0)
    incoming = Incoming(http_scope(headers=EVERYTHING, client=CALLER) | inside, TRUST)
    inbound = Inbound(trust=TRUST)
    for outer in (Deadline(1.0, clock), Deadline(501.0, other)):
        with deadline(outer):
            tokens = inbound.read(incoming, clock)
            kept = current_deadline()
            assert kept is not None
            assert (kept.at, kept.clock) == (outer.at, outer.clock)
            inbound.undo(incoming, tokens)
    with deadline(Deadline(9.0, clock)):
        tokens = inbound.read(incoming, clock)
        kept = current_deadline()
        inbound.undo(incoming, tokens)
        assert kept is not None
        assert kept.at == 1.5


@pytest.mark.parametrize("value", ["0", "00"])
def test_expired_work_is_not_begun(value: str):
    """No time left is refused at once, with nothing set and the refusal counted."""
    inbound = Inbound(trust=TRUST)
    headers = [*EVERYTHING[3:], ("x-envoy-expected-rq-timeout-ms", value)]
    before = current_criticality(), current_tenant(), received_attempt()
    incoming = Incoming(http_scope(headers=headers, client=CALLER), TRUST)
    with pytest.raises(DeadlineExceeded):
        inbound.read(incoming, VirtualClock())
    assert (current_criticality(), current_tenant(), received_attempt()) == before
    assert current_deadline() is None
    assert inbound.snapshot() == {"expired": 1, "dropped": 0, "unclassified": 0}


def test_a_deadline_that_has_passed_is_expired():
    """Also a deadline that the edge around this one has set counts."""
    clock = VirtualClock(5.0)
    scope = http_scope() | {INCOMING: None}
    with deadline(Deadline(5.0, clock)), pytest.raises(DeadlineExceeded):
        Inbound().read(Incoming(scope, Trust()), clock)


def test_undo_leaves_no_trace():
    """After it, the context is as before, whatever was read."""
    before = dict(copy_context().items())
    inbound = Inbound(trust=TRUST, max_criticality=Criticality.SHEDDABLE)
    for headers in ([], EVERYTHING):
        incoming = Incoming(http_scope(headers=headers, client=CALLER), TRUST)
        tokens = inbound.read(incoming, VirtualClock())
        assert tokens
        inbound.undo(incoming, tokens)
        assert dict(copy_context().items()) == before


def test_undo_ends_the_deadline_wherever_it_was_copied_to():
    """A task that the handler started has a copy of the context, which no reset reaches."""
    inbound = Inbound(trust=TRUST)
    for headers in ([], EVERYTHING):
        incoming = Incoming(http_scope(headers=headers, client=CALLER), TRUST)
        tokens = inbound.read(incoming, VirtualClock())
        copied = copy_context()
        assert copied.run(current_deadline) is not None
        inbound.undo(incoming, tokens)
        assert copied.run(current_deadline) is None


def test_undo_from_another_context_does_no_harm():
    """A coroutine that is closed from elsewhere cannot undo, and must not fail."""
    inbound, incoming = Inbound(), Incoming(http_scope(), Trust())
    tokens = copy_context().run(inbound.read, incoming, VirtualClock())
    inbound.undo(incoming, tokens)


# --- What an earlier request left ---

VARIABLES: dict[ContextVar[Any], Any] = {
    deadline_var: st.none() | st.floats(-5, 50).map(lambda at: [at, VirtualClock(), None, True]),
    criticality_var: st.sampled_from(Criticality),
    tenant_var: st.none() | st.just("acme"),
    tier_var: st.none() | st.just("free"),
    idempotency_key_var: st.none() | st.just("order-5"),
    attempt_var: st.integers(1, 3).map(lambda number: Attempt(number, "another", None)),
}
LEFT = st.fixed_dictionaries({}, optional=VARIABLES)
CASES = st.tuples(LEFT, st.sampled_from([None, 30.0]), st.sampled_from([[], EVERYTHING]))


def starts_clean(case: tuple[dict[ContextVar[Any], Any], float | None, list]) -> None:
    """Read a request in the context of another, and in an empty one: it must not see which."""
    left, timeout, headers = case
    inbound = Inbound(trust=TRUST, timeout=timeout)
    clock = VirtualClock()

    def seen() -> list[Any]:
        incoming = Incoming(http_scope(headers=headers, client=CALLER), TRUST)
        before = dict(copy_context().items())
        tokens = inbound.read(incoming, clock)
        around = attempts_from(attempt_var.get())
        values = [var.get() for var in VARIABLES if var is not attempt_var]
        values.append([(one.number, one.guard) for one in around])
        inbound.undo(incoming, tokens)
        assert dict(copy_context().items()) == before
        return values

    def seen_after() -> list[Any]:
        for var, value in left.items():
            var.set(value)
        return seen()

    try:
        assert copy_context().run(seen_after) == copy_context().run(seen)
    except DeadlineExceeded:
        raise AssertionError("refused for the deadline of another request") from None


@given(CASES)
def test_the_outermost_edge_starts_clean(case: Any):
    """Whatever the context holds, a request has what it brought, and undoing leaves it so."""
    starts_clean(case)


@pytest.mark.parametrize("kept", VARIABLES, ids=lambda var: var.name)
def test_each_variable_has_to_be_cleaned(monkeypatch: pytest.MonkeyPatch, kept: ContextVar[Any]):
    """The property depends on each of them."""
    fewer = {var: clean for var, clean in inbound_module._UNSET.items() if var is not kept}
    monkeypatch.setattr(inbound_module, "_UNSET", fewer)
    assert falsified(starts_clean, CASES)


def test_a_refusal_leaves_the_context_alone():
    """A request without time changes nothing, also where there is something to clean."""

    def refused() -> str | None:
        tenant_var.set("acme")
        with pytest.raises(DeadlineExceeded):
            received(Inbound(trust=TRUST), [("grpc-timeout", "0S")])
        return current_tenant()

    assert copy_context().run(refused) == "acme"


def _told(path: str, *headers: str, body: int = 0) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {body}", *headers, "", ""]
    return "\r\n".join(lines).encode() + b"x" * body


FIRST = ("Baggage: seawall.tenant=acme,seawall.criticality=sheddable", "Seawall-Attempt: 2")
LARGE = _told("/1", *FIRST, body=300_000)
SMALL = _told("/1", *FIRST)
SECOND = _told("/2")


@contextmanager
def connected(seen: dict[str, Any]) -> Iterator[socket.socket]:
    """Connect to a real server, whose app notes by path what it finds in the context."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        seen[scope["path"]] = current_tenant(), current_criticality().name, deadline_var.get()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"1")],
            }
        )
        await send({"type": "http.response.body", "body": b"."})

    edge = Edge(app, name="one after another", inbound=Inbound(trust=Trust(callers=["127.0.0.1"])))
    try:
        with serve(edge, loop="asyncio", lifespan="off", proxy_headers=False) as url:
            where = urlsplit(url)
            with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
                yield connection
    finally:
        edge.close()


def one_after_another(together: bool) -> tuple[Any, Any]:  # noqa: FBT001
    """Ask twice on one connection: a large body first, or both before the first answer."""
    seen: dict[str, Any] = {}
    with connected(seen) as connection:
        answers = connection.makefile("rb")
        for request in [SMALL + SECOND] if together else [LARGE, SECOND]:
            connection.sendall(request)
            for _ in range(request.count(b"POST")):
                while answers.readline() not in (b"\r\n", b""):
                    pass
                assert answers.read(1) == b"."
    return seen["/1"], seen["/2"]


@pytest.mark.parametrize("together", [False, True], ids=["large body", "pipelined"])
def test_a_request_has_nothing_of_the_one_before(together: bool):  # noqa: FBT001
    """Also where the server calls the app from the context of an earlier request."""
    first, second = one_after_another(together)
    assert (first[:2], second[:2]) == (("acme", "SHEDDABLE"), (None, "CRITICAL"))
    assert second[2][0] > first[2][0]


def test_without_a_clean_start_it_would(monkeypatch: pytest.MonkeyPatch):
    """The server really does so, with pipelined requests and, before 3.15, after large bodies."""
    monkeypatch.setattr(inbound_module, "_clear_context", list)
    for together in (True,) if sys.version_info >= (3, 15) else (False, True):
        # An app that is fast enough may have read a large body before the server pauses.
        seconds = (one_after_another(together)[1] for _ in range(5))
        assert any(second[:2] == ("acme", "SHEDDABLE") for second in seconds)


# --- Along a chain of services ---

SERVICES = st.lists(
    st.tuples(st.floats(0.0001, 100), st.floats(0, 0.5), st.sampled_from(Criticality)),
    min_size=1,
    max_size=6,
)


def chain(services: list[tuple[float, float, Criticality]]) -> None:
    """Send a request along services, each with its own bounds: time and criticality only fall."""
    left, level, tenant = 60.0, Criticality.CRITICAL_PLUS, "acme"
    for timeout, spent, most in services:
        headers = [*write_timeout(left), ("baggage", write_baggage("x=y", level, tenant))]
        inbound = Inbound(trust=TRUST, timeout=timeout, max_criticality=most)
        try:
            seconds, (now, whose, _), _ = received(inbound, headers)
        except DeadlineExceeded:
            assert left < 0.001
            return
        assert seconds is not None
        # An instant and back: the last bit of the sum may be rounded.
        assert seconds <= nextafter(min(left, timeout), 1e9) + 1e-12
        assert now <= min(level, most)
        assert whose == tenant
        left, level = max(0.0, min(seconds, left, timeout) - spent), now


@given(SERVICES)
def test_time_and_criticality_only_fall_along_a_chain(services: list):
    """What one service writes, the next reads as never more."""
    chain(services)


def test_without_the_clamp_criticality_would_rise(monkeypatch: pytest.MonkeyPatch):
    """The property depends on the server's highest."""
    monkeypatch.setattr(inbound_module, "min", lambda said, _most: said, raising=False)
    assert falsified(chain, SERVICES)


def test_without_the_servers_maximum_time_would_not_fall(monkeypatch: pytest.MonkeyPatch):
    """The property depends on the server's own maximum."""
    plain = Inbound.__init__
    monkeypatch.setattr(
        Inbound, "__init__", lambda self, **settings: plain(self, **settings | {"timeout": None})
    )
    assert falsified(chain, SERVICES)


# --- Settings ---


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"trust": "10.0.0.0/8"}, TypeError, r"pass a Trust"),
        ({"timeout": 0}, ValueError, r"timeout=0"),
        ({"timeout": "5"}, TypeError, r"seconds as a number"),
        ({"max_criticality": 2}, TypeError, r"write a Criticality"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: type[Exception], message: str):
    """Each mistake is told with what to write instead."""
    with pytest.raises(error, match=message):
        Inbound(**settings)


def test_repr():
    """It shows its bounds."""
    assert repr(Inbound()) == "Inbound(trust=Trust(), timeout=30.0, max_criticality=CRITICAL)"
