from __future__ import annotations

from contextvars import copy_context
from math import nextafter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Criticality,
    Deadline,
    DeadlineExceeded,
    VirtualClock,
    current_criticality,
    current_deadline,
    current_idempotency_key,
    current_tenant,
    deadline,
)
from seawall.context import received_attempt_var
from seawall.web import inbound as inbound_module
from seawall.web.inbound import Inbound
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from seawall.wire.criticality import write_baggage
from seawall.wire.deadlines import write_timeout
from tests.support import falsified
from tests.web.support import http_scope

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
        rest = (current_criticality(), current_tenant(), received_attempt_var.get())
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
    """Whoever is not believed gets the server's own time, and nothing else."""
    inbound = Inbound(trust=trust)
    seconds, rest, incoming = received(inbound, EVERYTHING, STRANGER)
    assert (seconds, rest) == (30.0, NOTHING)
    assert incoming.scope["headers"] == [(b"baggage", b"a=1,b=2"), (b"idempotency-key", b"k")]
    assert incoming.headers == incoming.scope["headers"]
    assert inbound.snapshot() == {"expired": 0, "dropped": 1}


def test_nothing_is_taken_from_harmless_requests():
    """A stranger's other headers, and baggage without members of ours, stay as they are."""
    inbound = Inbound()
    _, _, incoming = received(inbound, [("Accept", "*/*"), ("baggage", "a=1")], STRANGER)
    assert incoming.headers == [(b"accept", b"*/*"), (b"baggage", b"a=1")]
    assert inbound.snapshot()["dropped"] == 0


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


def test_an_earlier_deadline_stays():
    """A deadline that applies already is never moved to a later instant."""
    clock, other = VirtualClock(), VirtualClock(500.0)
    incoming = Incoming(http_scope(headers=EVERYTHING, client=CALLER), TRUST)
    inbound = Inbound(trust=TRUST)
    for outer in (Deadline(1.0, clock), Deadline(501.0, other)):
        with deadline(outer):
            tokens = inbound.read(incoming, clock)
            kept = current_deadline()
            assert kept is not None
            assert (kept.at, kept.clock) == (outer.at, outer.clock)
            inbound.undo(tokens)
    with deadline(Deadline(9.0, clock)):
        tokens = inbound.read(incoming, clock)
        kept = current_deadline()
        inbound.undo(tokens)
        assert kept is not None
        assert kept.at == 1.5


@pytest.mark.parametrize("value", ["0", "00"])
def test_expired_work_is_not_begun(value: str):
    """No time left is refused at once, with nothing set and the refusal counted."""
    inbound = Inbound(trust=TRUST)
    headers = [*EVERYTHING[3:], ("x-envoy-expected-rq-timeout-ms", value)]
    before = current_criticality(), current_tenant(), received_attempt_var.get()
    incoming = Incoming(http_scope(headers=headers, client=CALLER), TRUST)
    with pytest.raises(DeadlineExceeded):
        inbound.read(incoming, VirtualClock())
    assert (current_criticality(), current_tenant(), received_attempt_var.get()) == before
    assert current_deadline() is None
    assert inbound.snapshot() == {"expired": 1, "dropped": 0}


def test_a_deadline_that_has_passed_is_expired():
    """Also a deadline from outside the request counts."""
    clock = VirtualClock(5.0)
    with deadline(Deadline(5.0, clock)), pytest.raises(DeadlineExceeded):
        Inbound().read(Incoming(http_scope(), Trust()), clock)


def test_undo_leaves_no_trace():
    """After it, the context is as before, whatever was read."""
    before = dict(copy_context().items())
    inbound = Inbound(trust=TRUST, max_criticality=Criticality.SHEDDABLE)
    for headers in ([], EVERYTHING):
        tokens = inbound.read(
            Incoming(http_scope(headers=headers, client=CALLER), TRUST), VirtualClock()
        )
        assert tokens
        inbound.undo(tokens)
        assert dict(copy_context().items()) == before


def test_undo_from_another_context_does_no_harm():
    """A coroutine that is closed from elsewhere cannot undo, and must not fail."""
    inbound = Inbound()
    tokens = copy_context().run(inbound.read, Incoming(http_scope(), Trust()), VirtualClock())
    inbound.undo(tokens)


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
