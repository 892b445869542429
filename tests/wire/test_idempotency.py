from __future__ import annotations

import http_sfv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire.idempotency import read_key, write_key

VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)


@given(VISIBLE)
def test_a_key_arrives_as_it_was_sent(key: str):
    """What is written is read again, and is a string to the independent parser."""
    assert read_key(write_key(key)) == key
    item = http_sfv.Item()
    item.parse(write_key(key).encode())
    assert item.value == key


@given(st.text(min_size=1, max_size=300))
def test_every_key_can_be_sent(key: str):
    """Any text makes a header that can be read, the same one each time."""
    assert read_key(write_key(key)) is not None
    assert write_key(key) == write_key(key)


@given(st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=2, unique=True))
def test_different_keys_stay_different(keys: list[str]):
    """Two keys never become one on the way."""
    assert write_key(keys[0]) != write_key(keys[1])


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ('"8e03978e-40d5"', "8e03978e-40d5"),
        (b"8e03978e-40d5", "8e03978e-40d5"),
        (' "a\\"b" ', 'a"b'),
        ('"abc";v=1', "abc"),
    ],
)
def test_quoted_or_bare(value: str | bytes, key: str):
    """A string in quotes is meant, and a bare value is understood."""
    assert read_key(value) == key


@pytest.mark.parametrize(
    "value",
    [
        "",
        '""',
        "a b",
        '"a b"',
        '"open',
        '"a" b',
        '"a", "b"',
        "é",
        "x" * 256,
        f'"{"x" * 256}"',
        "\x7f",
    ],
)
def test_what_is_no_key(value: str):
    """Nothing, blanks, other alphabets, and more than 255 characters are no key."""
    assert read_key(value) is None
