"""The security checklist's items about headers and addresses, each as tests named after it.

What belongs to a part alone is tested in depth with that part; here stands what the list demands.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from math import isfinite
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from hypothesis import given
from hypothesis import strategies as st

from seawall import Criticality, DeadlineExceeded, current_deadline
from seawall.clock import VirtualClock
from seawall.context import criticality_var, current_tenant
from seawall.web import trust as trust_module
from seawall.web.edge import inbound as inbound_module
from seawall.web.edge.inbound import Inbound
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from seawall.wire.retries import read_milliseconds, read_retry_after
from tests.support import falsified, received_attempt
from tests.web.support import ask, http_scope
from tests.wire.support import HOSTILE, grows

CALLER = "10.0.0.1"
STRANGER = "203.0.113.9"
TRUST = Trust(callers=["10.0.0.0/8"])
Headers = list[tuple[bytes, bytes]]


def scope_of(headers: Headers, peer: str | None = CALLER) -> dict[str, Any]:
    client, server = (None, None) if peer is None else ((peer, 1), ("127.0.0.1", 80))
    return http_scope(client=client) | {"headers": headers, "server": server}


def context_after(inbound: Inbound, headers: Headers, peer: str | None = CALLER) -> Any:
    """Return what a request of `peer` sets: time left, criticality, tenant and attempt."""
    incoming = Incoming(scope_of(headers, peer), inbound.trust)

    def read() -> Any:
        inbound.read(incoming, VirtualClock())
        limit = current_deadline()
        left = None if limit is None else limit.at
        return left, criticality_var.get(), current_tenant(), received_attempt()

    return copy_context().run(read)


# --- 1. The client's address ---


def test_1_the_socket_peer_is_the_client():
    """Whatever the headers say, without configured proxies the peer is the client."""
    headers = [
        (b"x-forwarded-for", b"198.51.100.1"),
        (b"forwarded", b"for=198.51.100.1"),
        (b"x-real-ip", b"198.51.100.1"),
        (b"cf-connecting-ip", b"198.51.100.1"),
        (b"true-client-ip", b"198.51.100.1"),
    ]
    assert Incoming(scope_of(headers, STRANGER), Trust()).client == STRANGER
    assert Incoming(scope_of(headers, STRANGER), Trust(proxies=["10.0.0.0/8"])).client == STRANGER


def test_1_only_configured_proxies_are_asked_right_to_left():
    """From a proxy, the first hop from the right that is none of ours."""
    trust = Trust(proxies=["10.0.0.0/8"])
    headers = [(b"x-forwarded-for", b"1.1.1.1, 198.51.100.1, 10.9.9.9")]
    assert Incoming(scope_of(headers, CALLER), trust).client == "198.51.100.1"


def test_1_never_a_mix_of_headers():
    """One of the two headers is chosen; the other is anybody's."""
    headers = [(b"forwarded", b"for=1.1.1.1"), (b"x-forwarded-for", b"2.2.2.2")]
    proxies = ["10.0.0.0/8"]
    assert Incoming(scope_of(headers), Trust(proxies=proxies)).client == "2.2.2.2"
    other = Trust(proxies=proxies, forwarded="forwarded")
    assert Incoming(scope_of(headers), other).client == "1.1.1.1"
    assert Incoming(scope_of(headers[1:]), other).client == CALLER


def test_1_hops_and_length_are_capped():
    """Past 32 hops or 8 KiB nothing is looked at."""
    trust = Trust(proxies=["10.0.0.0/8"])
    hops = b", ".join([b"1.1.1.1"] + [b"10.0.0.2"] * 32)
    assert Incoming(scope_of([(b"x-forwarded-for", hops)]), trust).client == "10.0.0.2"
    long = b" " * 8192 + b"1.1.1.1"
    assert Incoming(scope_of([(b"x-forwarded-for", long)]), trust).client == CALLER


def one_key_for_one_sender(address: int) -> None:
    """One machine has a whole /64 to choose from, and two spellings of an IPv4 address."""
    trust = Trust()
    v4 = ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))
    assert trust.client_address(f"::ffff:{v4}", ()) == trust.client_address(v4, ())
    assert trust.client_address(f"2001:db8::{address & 0xFFFF:x}", ()) == "2001:db8::/64"


@given(st.integers(0, 2**32 - 1))
def test_1_unmapped_before_masking_and_keyed_by_64(address: int):
    """A sender cannot get a second key by another spelling or another address of its own."""
    one_key_for_one_sender(address)


@pytest.mark.parametrize("missing", ["unmapping", "masking"])
def test_1_without_unmapping_or_masking_it_could(monkeypatch: pytest.MonkeyPatch, missing: str):
    """The property depends on both."""
    if missing == "unmapping":
        monkeypatch.setattr(trust_module, "_address", trust_module.ip_address)
    else:
        monkeypatch.setattr(trust_module, "_NETWORK_BITS", 128)
    assert falsified(one_key_for_one_sender, st.integers(0, 2**32 - 1))


# --- 2. Deadline, criticality, tenant and attempt ---

SAID = st.lists(
    st.sampled_from(
        [
            (b"grpc-timeout", b"1S"),
            (b"grpc-timeout", b"99999H"),
            (b"x-envoy-expected-rq-timeout-ms", b"5"),
            (b"x-envoy-expected-rq-timeout-ms", b"0"),
            (b"x-server-timeout", b"100"),
            (b"baggage", b"seawall.criticality=critical-plus,seawall.tenant=mallory"),
            (b"baggage", b"seawall.criticality=sheddable"),
            (b"baggage", b"%73eawall.tenant=mallory"),
            (b"seawall-attempt", b"1"),
            (b"seawall-attempt", b"99"),
            (b"accept", b"*/*"),
        ]
    ),
    max_size=6,
)


def strangers_set_nothing(headers: Headers) -> None:
    """Give a stranger the server's time and nothing else, and leave nothing to be passed on.

    But for the attempt, which only makes the server do less.
    """
    scope = scope_of(headers, STRANGER)
    incoming = Incoming(scope, TRUST)
    inbound = Inbound(trust=TRUST)
    try:
        *rest, attempt = context_after(inbound, headers, STRANGER)
        assert rest == [30.0, Criticality.CRITICAL, None]
        said = {int(value) for name, value in headers if name == b"seawall-attempt"}
        assert attempt == (said.pop() if len(said) == 1 else 0)
        copy_context().run(inbound.read, incoming, VirtualClock())
    except DeadlineExceeded:
        raise AssertionError("a stranger had its request refused by a header") from None
    harmless = (b"accept", b"seawall-attempt" if attempt else b"")
    assert [pair for pair in scope["headers"] if pair[0] not in harmless] == []


@given(SAID)
def test_2_dropped_at_an_untrusted_edge(headers: Headers):
    """Nothing that a stranger sends reaches the context or the app, but for its attempt."""
    strangers_set_nothing(headers)


def test_2_with_blind_trust_strangers_would_set_everything(monkeypatch: pytest.MonkeyPatch):
    """The property depends on asking who it is."""
    monkeypatch.setattr(Trust, "believes", lambda *_: True)
    assert falsified(strangers_set_nothing, SAID)


def callers_are_clamped(headers: Headers) -> None:
    """Give a caller never more than the server's maximum, in time and in criticality."""
    try:
        left, level, _, attempt = context_after(Inbound(trust=TRUST, timeout=5.0), headers)
    except DeadlineExceeded:
        assert (b"x-envoy-expected-rq-timeout-ms", b"0") in headers
        return
    assert left is not None
    assert 0 < left <= 5.0
    assert level <= Criticality.CRITICAL
    assert 0 <= attempt <= 99
    said = {value for name, value in headers if name == b"x-envoy-expected-rq-timeout-ms"}
    assert said != {b"5"} or left <= 0.005


@given(SAID)
def test_2_clamped_from_trusted_peers(headers: Headers):
    """Whatever the combination, a trusted peer can only ask for less."""
    callers_are_clamped(headers)


def test_2_without_the_minimum_time_could_grow(monkeypatch: pytest.MonkeyPatch):
    """The property depends on taking the least, not the first."""
    first = lambda pairs: next((1.0 for name, _ in pairs if b"timeout" in name), None)  # noqa: E731
    monkeypatch.setattr(inbound_module, "least_timeout", first)
    assert falsified(callers_are_clamped, SAID)


@pytest.mark.parametrize("name", [b"grpc-timeout", b"x-envoy-expected-rq-timeout-ms"])
@pytest.mark.parametrize(
    "value", [b"nan", b"inf", b"-1", b"-5S", b"9" * 30, b"1e3", b"", b"\xff", b"5,5", b"1S 1S"]
)
def test_2_nan_inf_negative_huge_are_ignored(name: bytes, value: bytes):
    """What is no sensible time leaves the server's own."""
    assert context_after(Inbound(trust=TRUST), [(name, value)])[0] == 30.0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (b"x-server-timeout", [b"1", b"2"]),
        (b"seawall-attempt", [b"2", b"3"]),
        (b"baggage", [b"seawall.tenant=a", b"seawall.tenant=b"]),
        (b"baggage", [b"seawall.criticality=sheddable,seawall.criticality=critical"]),
    ],
)
def test_2_duplicates_are_ignored(name: bytes, values: list[bytes]):
    """Two values that contradict each other are none."""
    headers = [(name, value) for value in values]
    assert context_after(Inbound(trust=TRUST), headers) == (30.0, Criticality.CRITICAL, None, 0)


# --- 3. Pushback ---


@given(st.text() | st.integers().map(str) | st.floats().map(str), st.floats())
def test_3_pushback_is_finite(value: str, wall: float):
    """Whatever an upstream says, and whatever the clock, a wait is 0 to a year, or nothing."""
    for seconds in (read_retry_after(value, wall), read_milliseconds(value)):
        assert seconds is None or (isfinite(seconds) and 0 <= seconds <= 31_536_000)


# --- 5. Every map is bounded ---


def remembered(addresses: int) -> int:
    """Return how many of so many peers are remembered; to forget some changes no answer."""
    trust = Trust(callers=["10.0.0.0/8"])
    for number in range(addresses):
        trust.client_address(f"203.{number >> 8 & 255}.{number & 255}.1", ())
    trust.client_address("x" * 1000, ())
    assert max(len(address or "") for address in trust._known) <= 64
    assert trust.client_address("203.0.0.1", ()) == "203.0.0.1"
    assert trust.believes("10.0.0.1")
    return len(trust._known)


def test_5_remembered_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """A bounded number of peers is remembered; without the bound it would be all."""
    assert remembered(5000) <= 4096
    monkeypatch.setattr(trust_module, "_MOST_KNOWN", 1 << 20)
    assert remembered(5000) > 4096


# --- 6. Labels come from route templates ---


def test_6_a_route_is_a_template():
    """Behind FastAPI's router the route is what the programmer wrote, not what was asked for."""
    app = FastAPI()

    @app.get("/orders/{order}")
    async def read_order(order: str, request: Request) -> PlainTextResponse:
        incoming = Incoming(request.scope, Trust())
        return PlainTextResponse(f"{incoming.route} {order}")

    answer = asyncio.run(ask(app, "/orders/secret"))
    assert answer.body == b"/orders/{order} secret"


def test_6_before_routing_there_is_no_route():
    """The path never stands in for a template."""
    assert Incoming(http_scope("/orders/secret"), Trust()).route is None


# --- 11. Logs ---

NASTY = st.text(st.characters() | st.sampled_from("\r\n\x1b\x00\u202e\u2028"), max_size=300)


@given(NASTY)
def test_11_what_is_shown_is_short_and_printable(text: str):
    """Paths, methods and peers are cut and escaped wherever they may be logged."""
    strange = {"path": text, "method": text, "client": (text, 1)}
    incoming = Incoming(http_scope() | strange, Trust())
    assert repr(incoming).isprintable()
    assert len(repr(incoming)) < 1000
    assert incoming.client.isprintable()
    assert len(incoming.client) <= 70


@given(NASTY)
def test_11_a_tenant_is_short_and_printable(text: str):
    """A tenant that could forge a line of the log is none."""
    from urllib.parse import quote

    value = f"seawall.tenant={quote(text, errors='replace')}".encode()
    tenant = context_after(Inbound(trust=TRUST), [(b"baggage", value)])[2]
    assert tenant is None or (tenant.isprintable() and len(tenant) <= 255)


def test_11_a_refusal_repeats_nothing():
    """The error tells nothing that the caller sent."""
    with pytest.raises(DeadlineExceeded) as refused:
        context_after(Inbound(trust=TRUST), [(b"grpc-timeout", b"0S")])
    assert str(refused.value) == "the caller's deadline had passed when the request came"


# --- 12. Header parsers are linear, and fuzzed ---

NAMES = st.sampled_from(
    [
        b"grpc-timeout",
        b"x-envoy-expected-rq-timeout-ms",
        b"x-server-timeout",
        b"baggage",
        b"seawall-attempt",
        b"idempotency-key",
        b"x-forwarded-for",
        b"forwarded",
        b"accept",
    ]
)
VALUES = st.binary(max_size=60) | st.lists(
    st.sampled_from(
        [
            b"1",
            b"10.0.0.2",
            b"for=",
            b'"',
            b"\\",
            b",",
            b";",
            b"=",
            b"[::1]",
            b":80",
            b"_x",
            b"%",
            b"seawall.tenant",
            b"seawall.criticality",
            b"sheddable",
            b" ",
            b"\x00",
            b"\xff",
            b"S",
        ]
    ),
    max_size=12,
).map(b"".join)
PEERS = st.sampled_from([CALLER, STRANGER, None, "", "::1", "::ffff:10.0.0.1", "testclient"])
TRUSTS = st.sampled_from(
    [
        Trust(),
        Trust(proxies=["10.0.0.0/8", "unix"], callers=["0.0.0.0/0"]),
        Trust(proxies=["10.0.0.0/8"], callers=["10.0.0.0/8", "unix"], forwarded="forwarded"),
    ]
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), PEERS, TRUSTS)
def test_12_no_request_breaks_the_reading(headers: Headers, peer: str | None, trust: Trust):
    """Whatever the headers and whoever the peer, reading ends in a context or in a refusal."""
    incoming = Incoming(scope_of(headers, peer), trust)
    assert incoming.client
    assert incoming.idempotency_key is None or incoming.idempotency_key.isprintable()
    try:
        left, level, _, attempt = context_after(Inbound(trust=trust), headers, peer)
    except DeadlineExceeded:
        return
    assert left is not None
    assert 0 < left <= 30.0
    assert level <= Criticality.CRITICAL
    assert 0 <= attempt <= 99


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"forwarded", b"baggage"])
def test_12_work_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch, name: bytes):
    """Also without the caps, eight times the header takes about eight times as long."""
    monkeypatch.setattr(trust_module, "LONGEST", 1 << 20)
    monkeypatch.setattr(trust_module, "_MOST_HOPS", 1 << 20)
    monkeypatch.setattr(trust_module, "_MOST_PAIRS", 1 << 20)
    monkeypatch.setattr(inbound_module, "LONGEST", 1 << 20)
    forwarded = "forwarded" if name == b"forwarded" else "x-forwarded-for"
    trust = Trust(proxies=["10.0.0.0/8"], callers=["10.0.0.0/8"], forwarded=forwarded)
    strict = Inbound()

    def read(value: str) -> None:
        for begin in ("", 'for="', "for="):
            headers = [(name, (begin + value).encode())]
            trust.client_address(CALLER, headers)
            copy_context().run(
                strict.read, Incoming(scope_of(headers, STRANGER), Trust()), VirtualClock()
            )

    units = (*HOSTILE, "10.0.0.2,", "for=10.0.0.2,", "[", "]:", "\\a", "a=b;", ",seawall.tenant")
    assert [unit for unit in units if all(grows(read, unit) for _ in range(3))] == []


def test_12_a_header_over_8_kib_is_ignored():
    """Of a caller's header of more than 8 KiB nothing counts, and a stranger's baggage goes."""
    long = b"a=1," * 2048
    headers = [
        (b"baggage", long + b"seawall.tenant=acme"),
        (b"x-server-timeout", b" " * 8192 + b"1"),
        (b"seawall-attempt", b" " * 8192 + b"2"),
        (b"idempotency-key", b" " * 8192 + b"k"),
    ]
    assert context_after(Inbound(trust=TRUST), headers) == (30.0, Criticality.CRITICAL, None, 0)
    incoming = Incoming(scope_of(headers, STRANGER), TRUST)
    assert incoming.idempotency_key is None
    copy_context().run(Inbound().read, incoming, VirtualClock())
    assert [name for name, _ in incoming.headers] == [b"idempotency-key"]
