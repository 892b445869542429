"""`RateLimit-Policy` and `RateLimit`: fields in which a service reports limits to its callers.

According to draft-ietf-httpapi-ratelimit-headers, version 11: if the names change, this module
follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from seawall.wire.structured import byte_sequence, integer, string

POLICY_HEADER: Final = "RateLimit-Policy"
"""Limits of the caller, as structured fields: `"name";q=quota;w=seconds`."""
STATE_HEADER: Final = "RateLimit"
"""State of these limits: `"name";r=remaining;t=seconds until there are more`."""


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


def _policy(policy: RatePolicy) -> str:
    text = f"{string(policy.name)};q={integer(policy.quota)}"
    if policy.window is not None:
        text += f";w={integer(max(policy.window, 1))}"
    if policy.unit is not None:
        text += f";qu={string(policy.unit)}"
    if policy.partition is not None:
        text += f";pk={byte_sequence(policy.partition)}"
    return text
