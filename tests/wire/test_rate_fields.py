from __future__ import annotations

import http_sfv
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire.rate_fields import (
    RatePolicy,
    RateState,
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
    assert write_states([RateState("burst", 50, 30)]) == '"burst";r=50;t=30'


@given(st.lists(POLICIES, min_size=1, max_size=4))
def test_policies_are_read_as_written(policies: list[RatePolicy]):
    """An independent parser reads the policies that were written."""
    text = write_policies(policies)
    for policy, (name, said) in zip(policies, parsed(text), strict=True):
        assert (policy.name, policy.quota) == (name, said["q"])
        assert (policy.window, policy.unit) == (said.get("w"), said.get("qu"))
        assert policy.partition == said.get("pk")


@given(st.lists(STATES, min_size=1, max_size=4))
def test_states_are_read_as_written(states: list[RateState]):
    """An independent parser reads the states that were written."""
    text = write_states(states)
    for state, (name, said) in zip(states, parsed(text), strict=True):
        assert (state.name, state.remaining, state.reset) == (name, said["r"], said.get("t"))


@given(st.text(max_size=10), st.integers(), st.integers())
def test_whatever_is_written_is_valid(name: str, number: int, other: int):
    """Names of any alphabet and numbers of any size make valid fields."""
    assert len(parsed(write_policies([RatePolicy(name, number, other)]))) == 1
    assert len(parsed(write_states([RateState(name, number, other)]))) == 1
