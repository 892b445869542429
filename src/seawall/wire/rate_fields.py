"""`RateLimit-Policy` and `RateLimit`: fields in which a service reports limits to its callers.

According to draft-ietf-httpapi-ratelimit-headers, version `DRAFT`: if the names change, this module
follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from seawall.wire._text import text_of
from seawall.wire.structured import Item, Token, byte_sequence, integer, read_list, string

DRAFT: Final = 11
POLICY_HEADER: Final = "RateLimit-Policy"
STATE_HEADER: Final = "RateLimit"


class RatePolicy(NamedTuple):
    """A limit: `quota` units in `window` seconds, for the partition with that key."""

    name: str
    quota: int
    window: int | None = None
    unit: str | None = None
    partition: bytes | None = None


class RateState(NamedTuple):
    """State of a limit: `remaining` units, and the seconds until there are more."""

    name: str
    remaining: int
    reset: int | None = None


def write_policies(policies: Iterable[RatePolicy]) -> str:
    """Return the value of `RateLimit-Policy`."""
    return ", ".join(_policy(policy) for policy in policies)


def write_states(states: Iterable[RateState]) -> str:
    """Return the value of `RateLimit`."""
    return ", ".join(
        f"{string(state.name)};r={integer(state.remaining)}"
        + ("" if state.reset is None else f";t={integer(state.reset)}")
        for state in states
    )


def read_policies(value: str | bytes) -> list[RatePolicy]:
    """Return the policies that a service announces; none if anything in the field is malformed."""
    policies = []
    for item in _items(value):
        said = item.parameters
        quota, window = said.get("q"), said.get("w")
        unit, partition = said.get("qu"), said.get("pk")
        if (
            not _is_name(item.value)
            or not _is_count(quota)
            or (window is not None and (not _is_count(window) or not window))
            or (unit is not None and not _is_name(unit))
            or (partition is not None and not isinstance(partition, bytes))
        ):
            return []
        policies.append(RatePolicy(item.value, quota, window, unit, partition))  # type: ignore[arg-type]
    return policies


def read_states(value: str | bytes) -> list[RateState]:
    """Return the states of a service's limits; none if anything in the field is malformed."""
    states = []
    for item in _items(value):
        remaining, reset = item.parameters.get("r"), item.parameters.get("t")
        if (
            not _is_name(item.value)
            or not _is_count(remaining)
            or (reset is not None and not _is_count(reset))
        ):
            return []
        states.append(RateState(item.value, remaining, reset))  # type: ignore[arg-type]
    return states


def _policy(policy: RatePolicy) -> str:
    text = f"{string(policy.name)};q={integer(policy.quota)}"
    if policy.window is not None:
        text += f";w={integer(max(policy.window, 1))}"
    if policy.unit is not None:
        text += f";qu={string(policy.unit)}"
    if policy.partition is not None:
        text += f";pk={byte_sequence(policy.partition)}"
    return text


def _items(value: str | bytes) -> list[Item]:
    text = text_of(value)
    return (read_list(text) if text is not None else None) or []


def _is_name(said: object) -> bool:
    return isinstance(said, str) and not isinstance(said, Token)


def _is_count(said: object) -> bool:
    return isinstance(said, int) and not isinstance(said, bool) and said >= 0
