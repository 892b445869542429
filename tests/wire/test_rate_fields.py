from __future__ import annotations

import http_sfv
from hypothesis import given
from hypothesis import strategies as st

from seawall.wire.rate_fields import (
    RatePolicy,
    write_policies,
    write_state,
    write_state_start,
)

NAMES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=8)
COUNTS = st.integers(0, 999_999_999_999_999)
POLICIES = st.builds(RatePolicy, NAMES, COUNTS, st.none() | st.integers(1, 999_999_999_999_999))


def parsed(text: str) -> list[tuple[str, dict[str, object]]]:
    field = http_sfv.List()
    field.parse(text.encode("ascii"))
    return [(item.value, dict(item.params)) for item in field]


def test_examples():
    """The fields look as the draft shows them."""
    burst, daily = RatePolicy("burst", 100, 60), RatePolicy("daily", 1000)
    assert write_policies([burst, daily]) == '"burst";q=100;w=60, "daily";q=1000'
    assert write_state(write_state_start("burst"), 50, 30) == b'"burst";r=50;t=30'


@given(st.lists(POLICIES, min_size=1, max_size=4))
def test_policies_are_read_as_written(policies: list[RatePolicy]):
    """An independent parser reads the policies that were written."""
    text = write_policies(policies)
    for policy, (name, said) in zip(policies, parsed(text), strict=True):
        assert (policy.name, policy.quota) == (name, said["q"])
        assert policy.window == said.get("w")


@given(NAMES, COUNTS, st.none() | COUNTS)
def test_a_state_is_read_as_written(name: str, remaining: int, reset: int | None):
    """An independent parser reads the state that was written."""
    text = write_state(write_state_start(name), remaining, reset).decode()
    ((read_name, said),) = parsed(text)
    assert (name, remaining, reset) == (read_name, said["r"], said.get("t"))


@given(st.text(max_size=10), st.integers(), st.integers())
def test_whatever_is_written_is_valid(name: str, number: int, other: int):
    """Names of any alphabet and numbers of any size make valid fields."""
    assert len(parsed(write_policies([RatePolicy(name, number, other)]))) == 1
    assert len(parsed(write_state(write_state_start(name), 1, 1).decode())) == 1
