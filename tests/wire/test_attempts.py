from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire.retries import read_attempt, write_attempt


@given(st.integers(-5, 1000))
def test_what_is_written_is_read(attempt: int):
    """An attempt arrives as it was sent, cut to 1 to 99."""
    assert read_attempt(write_attempt(attempt)) == min(max(attempt, 1), 99)


@pytest.mark.parametrize(
    "value", ["0", "00", "01", "100", "-1", "+1", "1.0", "", "x", "٣", b"\xb2"]
)
def test_what_is_no_attempt(value: str | bytes):
    """Only 1 to 99, in plain digits, is an attempt."""
    assert read_attempt(value) is None
