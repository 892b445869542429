"""What vendors say of their limits is read if it makes sense, and ignored if it does not."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire import vendors
from seawall.wire.vendors import (
    NOTHING,
    VendorLimit,
    VendorLimits,
    read_instant,
    read_length,
    read_vendor_limits,
)

NOON = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()

NAMES = st.sampled_from(sorted(vendors._KNOWN))


def test_the_dialect_of_one_vendor() -> None:
    """VendorLimit, reset as an instant, and pushback of an answer in the first dialect."""
    said = read_vendor_limits(
        [
            ("anthropic-ratelimit-requests-limit", "50"),
            ("anthropic-ratelimit-requests-remaining", "49"),
            ("anthropic-ratelimit-requests-reset", "2026-03-01T12:00:02Z"),
            ("anthropic-ratelimit-input-tokens-limit", "40000"),
            ("anthropic-ratelimit-input-tokens-remaining", "39000"),
            ("anthropic-ratelimit-input-tokens-reset", "2026-03-01T13:00:07.5+01:00"),
            ("anthropic-ratelimit-output-tokens-remaining", "0"),
            ("anthropic-ratelimit-output-tokens-reset", "2026-03-01T12:01:00Z"),
            ("Retry-After", "7"),
        ],
        NOON,
    )
    assert said == VendorLimits(
        requests=VendorLimit(49, 2.0, 50),
        input_tokens=VendorLimit(39000, 7.5, 40000),
        output_tokens=VendorLimit(0, 60.0),
        retry_after=7.0,
    )


def test_the_dialect_of_another() -> None:
    """Reset as a length of time, and bytes as a transport has them."""
    said = read_vendor_limits(
        [
            (b"X-RateLimit-Limit-Requests", b"60"),
            (b"x-ratelimit-remaining-requests", b"59"),
            (b"x-ratelimit-reset-requests", b"1s"),
            (b"x-ratelimit-limit-tokens", b"150000"),
            (b"x-ratelimit-remaining-tokens", b"149984"),
            (b"x-ratelimit-reset-tokens", b"6m0s"),
            (b"retry-after", b"9"),
            (b"retry-after-ms", b"1500"),
        ],
        NOON,
    )
    assert said == VendorLimits(
        requests=VendorLimit(59, 1.0, 60),
        tokens=VendorLimit(149984, 360.0, 150000),
        retry_after=1.5,
    )


@pytest.mark.parametrize(
    "pairs",
    [
        {"remaining": "-1", "reset": "6m0s"},
        {"remaining": "0", "reset": "0"},
        {"remaining": "0", "reset": "0s"},
        {"remaining": "5", "reset": "-1"},
        {"remaining": "0", "reset": "1s", "limit": "0"},
        {"remaining": "0", "reset": "1s", "limit": "-1"},
        {"remaining": "61", "reset": "1s", "limit": "60"},
        {"remaining": "5"},
        {"reset": "1s"},
        {"remaining": "5", "reset": "nan"},
        {"remaining": "5", "reset": "inf"},
        {"remaining": "5", "reset": "1e3s"},
        {"remaining": "5", "reset": "1s1"},
        {"remaining": "5", "reset": "400d"},
        {"remaining": "9" * 400, "reset": "1s"},
        {"remaining": "5", "reset": "2026-02-30T12:00:00Z"},
        {"remaining": "5", "reset": "2026-03-01T11:59:59Z"},
        {"remaining": "\u0665", "reset": "1s"},
        {"remaining": "5", "reset": "1s" + " " * 9000},
    ],
)
def test_what_says_nothing(pairs: dict[str, str]) -> None:
    """What some gateways send where nothing is limited, and what nobody can mean, is ignored."""
    headers = [(f"x-ratelimit-{what}-tokens", value) for what, value in pairs.items()]
    assert read_vendor_limits(headers, NOON).tokens is None


def test_a_header_that_contradicts_itself() -> None:
    """Given twice with different values it says nothing; the same value twice is one value."""
    said = [("x-ratelimit-remaining-tokens", "5"), ("x-ratelimit-reset-tokens", "1s")]
    assert read_vendor_limits([*said, said[0]], NOON).tokens == VendorLimit(5, 1.0)
    twice = [*said, ("x-ratelimit-remaining-tokens", "6")]
    assert read_vendor_limits(twice, NOON).tokens is None
    again = [*twice, ("x-ratelimit-remaining-tokens", "5")]
    assert read_vendor_limits(again, NOON).tokens is None


def test_lengths() -> None:
    """Lengths of time are read as they are written by the vendors' servers."""
    for text, seconds in {
        "12ms": 0.012,
        "1m2.5s": 62.5,
        "1h0m0s": 3600.0,
        "20": 20.0,
        "0.5": 0.5,
        "850µs": 0.00085,
    }.items():
        assert read_length(text) == pytest.approx(seconds)
    for text in ("", "s", "1m2", "m1", "1x", "-1s", "1 s"):
        assert read_length(text) is None


@given(st.lists(st.tuples(NAMES, st.text(max_size=40) | st.binary(max_size=40)), max_size=12))
def test_anything_may_come(headers: list[tuple[str, str | bytes]]) -> None:
    """Whatever is sent, nothing is raised, and what comes out is within bounds."""
    said = read_vendor_limits(headers, NOON)
    for standing in said[:4]:
        if standing is not None:
            assert standing.remaining >= 0
            assert 0 < standing.reset_after <= 31_536_000
    assert said.retry_after is None or 0 <= said.retry_after <= 31_536_000


@given(
    st.integers(0, 10**9),
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
    st.integers(0, 999),
)
def test_what_was_written_is_read(left: int, hours: int, minutes: int, secs: int, ms: int) -> None:
    """A length and an instant that mean the same are read as the same."""
    seconds = hours * 3600 + minutes * 60 + secs + ms / 1000
    assert read_length(f"{hours}h{minutes}m{secs}s{ms}ms") == pytest.approx(seconds)
    at = datetime.fromtimestamp(NOON + left, UTC)
    assert read_instant(at.isoformat()) == NOON + left
    assert read_instant(at.strftime("%Y-%m-%dT%H:%M:%SZ").encode()) == NOON + left


@pytest.mark.parametrize("piece", ["1h", "1", "1.", "2026-", "\u0663", "9m"])
def test_long_values_take_no_time(piece: str) -> None:
    """Values that are too long are ignored: a megabyte takes no more time than 16 KiB."""

    def seconds(size: int) -> float:
        value = piece * (size // len(piece))
        headers = [(name, value) for name in sorted(vendors._KNOWN)]
        took = []
        for _ in range(9):
            began = time.perf_counter()
            assert read_vendor_limits(headers, NOON) == NOTHING
            took.append(time.perf_counter() - began)
        return min(took)

    assert seconds(1 << 20) < 8 * seconds(1 << 14)
