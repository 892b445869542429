from __future__ import annotations

import http_sfv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire.rate_fields import (
    DRAFT,
    RatePolicy,
    RateState,
    read_policies,
    read_states,
    write_policies,
    write_states,
)

NAMES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=8)
COUNTS = st.integers(0, 999_999_999_999_999)
POLICIES = st.builds(
    RatePolicy,
    NAMES,
    COUNTS,
    st.none() | st.integers(1, 999_999_999_999_999),
    st.none() | NAMES,
    st.none() | st.binary(max_size=8),
)
STATES = st.builds(RateState, NAMES, COUNTS, st.none() | COUNTS)


def parsed(text: str) -> list[tuple[str, dict[str, object]]]:
    field = http_sfv.List()
    field.parse(text.encode("ascii"))
    return [(item.value, dict(item.params)) for item in field]


def test_examples():
    """The fields look as the draft shows them."""
    burst = RatePolicy("burst", 100, 60)
    daily = RatePolicy("daily", 1000, 86400, "content-bytes", b"\x01")
    text = '"burst";q=100;w=60, "daily";q=1000;w=86400;qu="content-bytes";pk=:AQ==:'
    assert write_policies([burst, daily]) == text
    assert read_policies('"burst";q=100;w=60,"daily";q=1000;w=86400') == [
        burst,
        RatePolicy("daily", 1000, 86400),
    ]
    assert write_states([RateState("burst", 50, 30)]) == '"burst";r=50;t=30'
    assert read_states(b'"burst";r=50;t=30') == [RateState("burst", 50, 30)]
    assert DRAFT == 11


@given(st.lists(POLICIES, min_size=1, max_size=4))
def test_policies_are_read_as_written(policies: list[RatePolicy]):
    """Policies survive the way, and the independent parser reads the same."""
    text = write_policies(policies)
    assert read_policies(text) == policies
    for policy, (name, said) in zip(policies, parsed(text), strict=True):
        assert (policy.name, policy.quota) == (name, said["q"])
        assert (policy.window, policy.unit) == (said.get("w"), said.get("qu"))
        assert policy.partition == said.get("pk")


@given(st.lists(STATES, min_size=1, max_size=4))
def test_states_are_read_as_written(states: list[RateState]):
    """States survive the way, and the independent parser reads the same."""
    text = write_states(states)
    assert read_states(text) == states
    for state, (name, said) in zip(states, parsed(text), strict=True):
        assert (state.name, state.remaining, state.reset) == (name, said["r"], said.get("t"))


@given(st.text(max_size=10), st.integers(), st.integers())
def test_whatever_is_written_is_valid(name: str, number: int, other: int):
    """Names of any alphabet and numbers of any size make fields that can be read."""
    assert len(parsed(write_policies([RatePolicy(name, number, other)]))) == 1
    assert len(read_policies(write_policies([RatePolicy(name, number, other)]))) == 1
    assert len(read_states(write_states([RateState(name, number, other)]))) == 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        "burst;q=1",
        '"a"',
        '"a";q',
        '"a";q="1"',
        '"a";q=1.0',
        '"a";q=-1',
        '"a";q=1;w=0',
        "1;q=1",
        '"a";q=1;w=-5',
        '"a";q=1;qu=requests',
        '"a";q=1;pk="x"',
        '"a";q=1, "b"',
        '"a";q=?1',
        "(1)",
        '"a";q=1,',
        '"a" q=1',
        '"a";q=9999999999999999',
        b'"\xff";q=1',
    ],
)
def test_one_mistake_spoils_the_field(value: str | bytes):
    """What is malformed in any part is ignored as a whole."""
    assert read_policies(value) == []
    assert read_states(value) == []


@pytest.mark.parametrize("value", ['"a";r=1;t=-1', '"a";r=1;t=1.5', '"a";r=-1', '"a";q=1', "a;r=1"])
def test_malformed_states(value: str):
    """The same holds for how limits stand."""
    assert read_states(value) == []


def test_unknown_parameters_are_ignored():
    """What a later draft may add does no harm."""
    assert read_states('"a";r=1;new=%"x";t=2') == [RateState("a", 1, 2)]
