"""Whatever strangers send: no parser raises, none reads more than 8 KiB, and none is slow."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire import criticality, structured
from seawall.wire import text as wire_text
from seawall.wire.criticality import read_baggage, read_criticality, read_tenant, write_baggage
from seawall.wire.deadlines import TIMEOUT_HEADERS, least_timeout, read_timeout
from seawall.wire.idempotency import read_key
from seawall.wire.retries import read_attempt, read_milliseconds, read_retry_after
from seawall.wire.structured import read_string
from tests.support import falsified
from tests.wire.support import HOSTILE, grows

WALL = 784_111_770.0
LONGEST = 8192


def _baggage(value: str | bytes) -> Any:
    members = read_baggage(value)
    return [members, read_criticality(members), read_tenant(members)] if members else None


def _timeout(name: str) -> Callable[[str | bytes], Any]:
    return lambda value: read_timeout(name, value)


PARSERS: dict[str, Callable[[str | bytes], Any]] = {
    **{name: _timeout(name) for name in sorted(TIMEOUT_HEADERS)},
    "least timeout": lambda value: least_timeout([("grpc-timeout", value), ("x", value)]),
    "baggage": _baggage,
    "attempt": read_attempt,
    "idempotency key": read_key,
    "retry-after": lambda value: read_retry_after(value, WALL),
    "retry-after-ms": read_milliseconds,
    "string": lambda value: read_string(value) if isinstance(value, str) else None,
}
VALID = (
    "1500m",
    "1500",
    "2.250",
    "a=1;p=2,seawall.criticality=sheddable,seawall.tenant=a%20b",
    '"8e03978e-40d5-43dd-bc93-6894a57f9324"',
    "Sun, 06 Nov 1994 08:49:37 GMT",
    "Sunday, 06-Nov-94 08:49:37 GMT",
    "Sun Nov  6 08:49:37 1994",
    '"burst";q=100;w=60;qu="requests";pk=:YQ==:',
    '"burst";r=50;t=30',
)
PIECES = st.sampled_from([*'"\\,;=:%-+._( \t\0', "", "\r\n", "%zz", "%c3"]) | st.sampled_from(
    ["e9", "nan", "inf", "9" * 20, "٣", "é", "\ud800", "\U0001f600", "\u202e"]
)


@st.composite
def mutated(draw: Any) -> str:
    """Change a valid value in a few places: what a clever stranger would send."""
    text = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, len(text)))
        piece = draw(PIECES | st.just(text[start:stop] * 2))
        text = text[:start] + piece + text[stop:]
    return text


VALUES = st.one_of(
    mutated(),
    mutated().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(),
    st.binary(),
)


@given(VALUES)
def test_no_parser_raises(value: str | bytes):
    """Each answers with something sensible, or with None."""
    for read in PARSERS.values():
        said = read(value)
        if isinstance(said, float):
            assert isfinite(said)
            assert said >= 0


@given(st.none() | mutated() | st.text(), st.none() | st.text())
def test_baggage_of_strangers_can_be_passed_on(existing: str | None, tenant: str | None):
    """Whatever the baggage holds, ours can be added to it."""
    assert isinstance(write_baggage(existing, None, tenant), str)


@pytest.mark.parametrize("odd", [None, 5, 1.5, [], ["1"], bytearray(b"1"), object()])
def test_what_is_no_text_says_nothing(odd: Any):
    """A value of another type is not understood."""
    for name, read in PARSERS.items():
        assert read(odd) is None, name


# --- At most 8 KiB ---


def padded(text: str) -> str:
    """Make a valid value too long without making it invalid, as blanks around it do."""
    return text + " " * (LONGEST + 1 - len(text))


def nothing_long_is_read(value: str) -> None:
    for name, read in PARSERS.items():
        assert read(padded(value)) is None, name
        assert read(padded(value).encode()) is None, name


@pytest.mark.parametrize("value", VALID)
def test_a_header_over_8_kib_is_ignored(value: str):
    """One character more than 8 KiB, and the value says nothing, where it said much before."""
    nothing_long_is_read(value)
    assert any(read(padded(value)[:-1]) is not None for read in PARSERS.values())


def test_without_the_cap_it_would_be_read(monkeypatch: pytest.MonkeyPatch):
    """The property depends on the cap."""
    monkeypatch.setattr(wire_text, "LONGEST", 1 << 20)
    monkeypatch.setattr(structured, "LONGEST", 1 << 20)
    assert falsified(nothing_long_is_read, st.sampled_from(VALID))


# --- Linear in the length ---


@pytest.mark.parametrize("begin", ["", '"', "a="])
def test_work_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch, begin: str):
    """Also without the cap, 32 KiB of anything take no more than their share of time."""
    for module in (wire_text, structured, criticality):
        monkeypatch.setattr(module, "LONGEST", 1 << 20)
    monkeypatch.setattr(criticality, "_MOST_MEMBERS", 1 << 20)

    def all_parsers(value: str) -> None:
        for read in PARSERS.values():
            read(begin + value)
        write_baggage(begin + value, None, None)

    # Noise may strike once, but not three times in a row.
    slow = [unit for unit in HOSTILE if all(grows(all_parsers, unit) for _ in range(3))]
    assert slow == []


def test_a_quadratic_parser_would_be_noticed():
    """The measure tells a parser that looks at everything again for each character."""

    def quadratic(value: str) -> None:
        for at in range(0, len(value), 64):
            value[at:].swapcase()

    assert any(grows(quadratic, "a") for _ in range(3))
