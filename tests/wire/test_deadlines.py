from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire import deadlines
from seawall.wire.deadlines import (
    TIMEOUT_HEADERS,
    least_timeout,
    read_timeout,
    write_timeout,
)
from tests.support import falsified

A_YEAR = 31_536_000
SECONDS = st.floats(0, A_YEAR) | st.integers(0, 10**6).map(lambda n: n / 1000)


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        ("grpc-timeout", "1H", 3600.0),
        ("grpc-timeout", "2M", 120.0),
        ("grpc-timeout", "3S", 3.0),
        ("grpc-timeout", b"250m", 0.25),
        ("grpc-timeout", "99999999u", 99.999999),
        ("grpc-timeout", "5n", 5e-9),
        ("x-envoy-expected-rq-timeout-ms", b"1500", 1.5),
        ("x-envoy-expected-rq-timeout-ms", " 1500\t", 1.5),
        ("x-envoy-expected-rq-timeout-ms", "0", 0.0),
        ("x-server-timeout", "2", 2.0),
        ("x-server-timeout", b"0.25", 0.25),
    ],
)
def test_each_header_has_its_unit(name: str, value: str | bytes, seconds: float):
    """Hours to nanoseconds, milliseconds and seconds are all read as seconds."""
    assert read_timeout(name, value) == seconds


@pytest.mark.parametrize("name", sorted(TIMEOUT_HEADERS))
@pytest.mark.parametrize(
    "value",
    [
        "",
        "nan",
        "inf",
        "-1",
        "-1S",
        "+1",
        "1e3",
        "1_0",
        "0x10",
        "1 S",
        "1.2.3",
        "٣",
        "٣S",
        "5d",
        "123456789S",
        "9" * 16,
        "9" * 400,
        "99999999H",
        "1,2",
        "1;2",
        "\x00",
        b"\xff\xfe",
        "1\n",
    ],
)
def test_what_makes_no_sense_says_nothing(name: str, value: str | bytes):
    """No sign, exponent, foreign digit, list, or number of more than a year is a timeout."""
    assert read_timeout(name, value) is None


def test_an_unknown_header_says_nothing():
    """Only the headers that are listed are read."""
    assert read_timeout("x-timeout", "1") is None


def test_the_least_counts():
    """Of several headers the one that leaves the least time counts, whatever their order."""
    pairs = [(b"X-Server-Timeout", b"3"), (b"grpc-timeout", b"2S"), ("accept", "*/*")]
    assert least_timeout(pairs) == least_timeout(reversed(pairs)) == 2.0
    assert least_timeout([]) is None


def test_a_malformed_one_does_not_spoil_the_others():
    """A header that says nothing leaves the word to the next."""
    assert least_timeout([(b"grpc-timeout", b"soon"), (b"x-server-timeout", b"3")]) == 3.0


@pytest.mark.parametrize("values", [["1", "2"], ["1", "2", "1"], ["1", "2", "2"], ["1", "x"]])
def test_a_header_given_twice_says_nothing(values: list[str]):
    """Different values of one header contradict each other, so none of them counts."""
    assert least_timeout([("x-server-timeout", value) for value in values]) is None


def test_a_header_repeated_word_by_word_counts():
    """The same value twice is no contradiction."""
    assert least_timeout([("x-server-timeout", "1"), ("x-server-timeout", "1")]) == 1.0


@given(SECONDS)
def test_what_is_written_is_read_as_never_more(seconds: float):
    """The next service reads at most what is left here, and at most a millisecond less."""
    for header in write_timeout(seconds):
        read = read_timeout(*header)
        assert read is not None
        assert seconds - 0.001 <= read <= seconds
    assert len(write_timeout(seconds)) == 2


def test_what_nobody_waits_for_is_not_written():
    """More than a year, or no number, makes no header."""
    assert write_timeout(inf) == write_timeout(nan) == write_timeout(1e9) == []


def test_no_time_is_said_as_none():
    """What is over is written as 0, which the next one reads as over."""
    assert write_timeout(-1.0) == write_timeout(0.0)
    assert least_timeout(write_timeout(-1.0)) == 0.0


# --- Along a chain ---

HOPS = st.lists(
    st.tuples(st.floats(0, 0.01), st.floats(0.001, 60), st.booleans()), min_size=1, max_size=8
)
CHAINS = st.tuples(st.floats(0.001, 60) | st.integers(1, 60_000).map(lambda n: n / 1000), HOPS)


def never_grows(chain: tuple[float, list[tuple[float, float, bool]]]) -> None:
    """Pass a deadline on from service to service, over HTTP or gRPC, each with its own maximum."""
    left, hops = chain
    for spent, own_maximum, grpc in hops:
        before = left
        sent = max(0.0, left - spent)
        # A gRPC library sends whole units, and at most what is left.
        milliseconds = max(0, int(sent * 1000) - 1)
        headers = [("grpc-timeout", f"{milliseconds}m")] if grpc else write_timeout(sent)
        read = least_timeout(headers)
        assert read is not None
        left = min(read, own_maximum)
        assert left <= sent <= before


@given(CHAINS)
def test_remaining_time_never_grows_along_a_chain(chain: tuple[float, list]):
    """Whatever the services, what is left at the next is never more than at the one before."""
    never_grows(chain)


def test_rounding_to_the_nearest_would_let_it_grow(monkeypatch: pytest.MonkeyPatch):
    """The property depends on rounding down."""
    monkeypatch.setattr(deadlines, "_round_down", lambda seconds, units: round(seconds * units))
    assert falsified(never_grows, CHAINS)


def test_rounding_down_the_product_alone_would_let_it_grow(monkeypatch: pytest.MonkeyPatch):
    """A product may be rounded up to a whole number, and then reads as more than there was."""
    cases = st.integers(1, 10**6).map(lambda n: (_just_below(n / 1000), [(0.0, 1e4, False)]))
    assert not falsified(never_grows, cases, most=500)
    monkeypatch.setattr(deadlines, "_round_down", lambda seconds, units: int(seconds * units))
    assert falsified(never_grows, cases)


def _just_below(number: float) -> float:
    from math import nextafter

    return nextafter(number, 0.0)
