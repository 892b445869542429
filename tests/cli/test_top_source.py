"""`seawall top`: where its messages come from, against real servers on this machine."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from itertools import islice, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.cli.top import client
from seawall.cli.top.client import (
    DashboardAddress,
    DashboardClient,
    Events,
    Unreachable,
    _reason,
    parse_address,
    parse_header,
)
from seawall.cli.top.messages import NotADashboard
from seawall.clock import SystemClock, VirtualClock
from tests.cli.top_worlds import Answer, body, event, message, served, state, status, stream

pytestmark = pytest.mark.alone  # real servers

PLAIN, TLS = False, True


def source(url: str, **headers: str) -> DashboardClient:
    return DashboardClient(parse_address(url), headers, clock=VirtualClock(), rng=Random(7))


def silent(_why: str) -> None:
    pass


# --- Addresses and headers ---


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://127.0.0.1:8000/seawall", DashboardAddress(PLAIN, "127.0.0.1", 8000, "/seawall")),
        ("http://h/seawall/", DashboardAddress(PLAIN, "h", 80, "/seawall")),
        ("https://h", DashboardAddress(TLS, "h", 443, "")),
        ("localhost:8000/a/b", DashboardAddress(PLAIN, "localhost", 8000, "/a/b")),
        ("http://[::1]:9/x", DashboardAddress(PLAIN, "::1", 9, "/x")),
    ],
)
def test_an_address_is_understood(url: str, place: DashboardAddress):
    """The address of a dashboard may have a path, and leave out what is usual."""
    assert parse_address(url) == place
    assert parse_address(str(place)) == place


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://h/x", "no address of http"),
        ("http://", "no address of http"),
        ("http://me:secret@h/", "names a user"),
        ("http://h/?token=secret", "has a query"),
        ("http://h:99999/", "port is no port"),
        ("http://h/\x1b[31m", "belong in none"),
        ("http://h/a b\r\nX: y", "belong in none"),
    ],
)
def test_a_wrong_address_is_refused(url: str, said: str):
    """What is no address says what to write instead, and repeats no secret."""
    with pytest.raises(ValueError, match=said) as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_header_is_understood():
    """A header is a name and a value."""
    assert parse_header("Authorization: Bearer a:b") == ("Authorization", "Bearer a:b")


@pytest.mark.parametrize(
    "text",
    ["secret", "secret:", "a b: secret", "A: secret\r\nB: c", "A: secret\x00", "Host: secret"],
)
def test_a_wrong_header_is_refused_and_not_repeated(text: str):
    """A header that is none, or not to be set, is refused without its value."""
    with pytest.raises(ValueError, match="header") as caught:
        parse_header(text)
    assert "secret" not in str(caught.value)


# --- The stream of events ---

LINES = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b"event: message",
        b"event: other",
        b": still here",
        b"",
        b"id: 1",
    ]
)


@given(st.lists(LINES, max_size=20), st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_events_do_not_depend_on_how_bytes_are_cut(lines: list[bytes], cuts: list[int]):
    """The same messages come out of a stream in whichever pieces it arrives, and with CRLF."""
    whole = b"\n".join([*lines, b"", b""])
    expected = Events().feed(whole)
    for text in (whole, whole.replace(b"\n", b"\r\n")):
        events, found, rest = Events(), [], text
        for cut in cuts:
            found += events.feed(rest[:cut])
            rest = rest[cut:]
        assert found + events.feed(rest) == expected


def test_events_of_other_kinds_are_left_out():
    """Only messages are read; comments, other events and empty ones are not."""
    text = b"retry: 2\n\nevent: other\ndata: x\n\n: hello\n\nevent: message\ndata: 1\ndata: 2\n\n"
    assert Events().feed(text) == [b"1\n2"]


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 999, b"data: xxxxxxxxx\n"])
def test_a_message_without_end_is_refused(piece: bytes, monkeypatch: pytest.MonkeyPatch):
    """Neither a line nor a number of lines can fill the memory."""
    monkeypatch.setattr(client, "MOST_BYTES", 100_000)
    events = Events()

    def feed() -> None:
        for _ in range(20_000):
            events.feed(piece)

    with pytest.raises(NotADashboard, match="too large"):
        feed()
    assert len(events._rest) + events._size < 102_000


# --- One message ---


def test_the_state_is_read_with_the_headers_given():
    """One message is read from `state`, with the headers that were given."""
    with served(state=state(message())) as (url, asked):
        assert source(url, Authorization="Bearer x").once() == message()
    assert asked[0]["path"] == "/seawall/state"
    assert asked[0]["authorization"] == "Bearer x"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(401), r"asks who you are \(401\)"),
        (status(403), r"does not let you in \(403\)"),
        (status(404), r"no dashboard \(404\)"),
        (status(503), "status 503"),
        (body(b"<html>", "text/html"), "not a Seawall dashboard"),
        (body(b"{}"), "not a Seawall dashboard"),
        (body(b"[1"), "not a Seawall dashboard"),
        (body(b'{"views":[]}', length=99), "does not speak HTTP"),
        (lambda request: request.wfile.write(b"hello\r\n\r\n"), "does not speak HTTP"),
        (lambda _request: None, "ended the connection without an answer"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(answer: Answer, said: str):
    """Each way not to be a dashboard has its own line, with the address and without headers."""
    with served(state=answer) as (url, _), pytest.raises(Unreachable, match=said) as caught:
        source(url, Authorization="hidden").once()
    assert str(caught.value).startswith(url)
    assert "hidden" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_redirects_are_not_followed():
    """A redirect is reported, escaped, and not followed: headers reach no other host."""
    with served(state=state(message())) as (other, asked_there):
        answer = status(302, Location=f"{other}/state\x1b[2J")
        with served(state=answer) as (url, _), pytest.raises(Unreachable) as caught:
            source(url, Authorization="x").once()
    assert asked_there == []
    assert "it points to" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_message_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A body beyond the bound is not read to its end."""
    monkeypatch.setattr(client, "MOST_BYTES", 1000)
    with (
        served(state=body(b" " * 100_000)) as (url, _),
        pytest.raises(Unreachable, match="too large"),
    ):
        source(url).once()


def test_nobody_there_is_said():
    """A refused connection is reported as such."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match="connection refused"):
        source(f"http://127.0.0.1:{port}").once()


def test_tls_with_who_does_not_speak_it_is_said():
    """HTTPS to a plain HTTP server is reported in one line."""
    with served() as (url, _), pytest.raises(Unreachable, match="TLS failed"):
        source(url.replace("http:", "https:")).once()


def test_certificates_are_verified():
    """The context of https is the default one: it checks the certificate and the name."""
    made: list[ssl.SSLContext] = []
    with pytest.MonkeyPatch.context() as patched:
        default = ssl.create_default_context
        patched.setattr(ssl, "create_default_context", lambda: made.append(default()) or made[0])
        with served() as (url, _), pytest.raises(Unreachable):
            source(url.replace("http:", "https:")).once()
    assert made[0].check_hostname
    assert made[0].verify_mode is ssl.CERT_REQUIRED
    error = ssl.SSLCertVerificationError(1, "failed")
    error.verify_message = "self-signed certificate"
    assert "not trusted (self-signed certificate)" in _reason(error, parse_address("https://h"))


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """Who accepts and says nothing is given up after a while."""
    monkeypatch.setattr(client, "CONNECTING", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(Unreachable, match="not answer in time"),
    ):
        source(f"http://127.0.0.1:{mute.getsockname()[1]}").once()


# --- Messages as they come ---


def numbered(number: int) -> dict[str, Any]:
    return message(title=str(number))


def test_messages_come_one_by_one_in_whatever_chunks():
    """Messages are read from a chunked stream, cut anywhere."""
    whole = b"retry: 2000\n\n" + b"".join(event(numbered(n)) for n in range(5))
    pieces = [whole[at : at + 37] for at in range(0, len(whole), 37)]
    with served(events=stream(*pieces)) as (url, asked):
        read = source(url)
        titles = [one["title"] for one in islice(read.messages(silent), 5)]
        read.close()
    assert titles == list("01234")
    assert asked[0]["accept"] == "text/event-stream"


def test_it_reconnects_and_says_so():
    """After an end, garbage, a refusal or a broken chunk it says why, waits, and asks again."""
    ends: list[Answer] = [
        stream(event(numbered(0))),
        stream(b"data: {]\n\n"),
        status(503),
        lambda request: request.wfile.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n"
        ),
        stream(event(numbered(1))),
    ]
    told: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        ends.pop(0)(request)

    with served(events=answer) as (url, _):
        read = source(url)
        titles = [one["title"] for one in islice(read.messages(told.append), 2)]
        read.close()
    assert titles == ["0", "1"]
    parts = ("ended the connection", "not a Seawall dashboard", "status 503", "does not speak HTTP")
    assert all(part in said for part, said in zip(parts, told, strict=True))
    assert all("next try in" in said for said in told)


def test_pauses_grow_and_begin_anew_after_a_message():
    """It asks less and less often who does not answer, at most every ten seconds."""
    clock, told = VirtualClock(), []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    read = DashboardClient(parse_address(f"http://127.0.0.1:{port}"), clock=clock, rng=Random(7))

    def count(why: str) -> None:
        told.append((clock.now(), why))
        if len(told) == 8:
            read.close()

    assert list(read.messages(count)) == []
    pauses = [b[0] - a[0] for a, b in pairwise(told)]
    assert all(2**n / 4 <= pause <= 2**n / 2 for n, pause in enumerate(pauses[:4]))
    assert all(5 <= pause <= 10 for pause in pauses[5:])


def test_quiet_is_the_end_of_a_connection(monkeypatch: pytest.MonkeyPatch):
    """A stream on which nothing comes any more is given up, and asked for again."""
    monkeypatch.setattr(client, "QUIET", 0.05)
    over, told = threading.Event(), []
    with served(events=stream(event(numbered(0)), until=over)) as (url, _):
        read = source(url)
        assert len(list(islice(read.messages(told.append), 2))) == 2
        read.close()
        over.set()
    assert "does not answer in time" in told[0]


@pytest.mark.parametrize("begun", [True, False])
def test_close_ends_it_wherever_it_waits(begun: bool):  # noqa: FBT001
    """Closing ends a reader that waits for the next message, or for its next try."""
    over, reached = threading.Event(), threading.Event()
    answer = stream(event(numbered(0)), until=over) if begun else status(503)
    with served(events=answer) as (url, _):
        read = DashboardClient(parse_address(url), clock=SystemClock(), rng=Random(7))
        told: Callable[[str], None] = lambda _why: reached.set()  # noqa: E731

        def run() -> None:
            for _ in read.messages(told):
                reached.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert reached.wait(10)
        read.close()
        read.close()
        thread.join(10)
        over.set()
        assert not thread.is_alive()


def test_json_is_what_was_sent():
    """What is given on is the message as it came, with all that is in it."""
    told = {**message(), "more": [1, {"x": "\u202e"}]}
    with served(state=state(told)) as (url, _):
        assert json.dumps(source(url).once()) == json.dumps(told)
