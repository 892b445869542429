"""`RateLimit-Policy` and `RateLimit`: fields in which a service reports limits to its callers.

According to draft-ietf-httpapi-ratelimit-headers, version 11: if the names change, this module
follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from seawall.wire.structured import integer, string

POLICY_HEADER: Final = "RateLimit-Policy"
"""Limits of the caller, as structured fields: `"name";q=quota;w=seconds`."""
STATE_HEADER: Final = "RateLimit"
"""State of these limits: `"name";r=remaining;t=seconds until there are more`."""


class RatePolicy(NamedTuple):
    """A limit: `quota` units in `window` seconds; None for a window that the field cannot say."""

    name: str
    quota: int
    window: int | None = None


def write_policies(policies: Iterable[RatePolicy]) -> str:
    """Return the value of `RateLimit-Policy`."""
    return ", ".join(_policy(policy) for policy in policies)


def write_state_start(name: str) -> bytes:
    """Return the beginning of a limit's state in `RateLimit`: the number that remains follows."""
    return f"{string(name)};r=".encode("ascii")


def write_state(start: bytes, remaining: float, reset: float | None) -> bytes:
    """Return a limit's state: what remains, and the whole seconds until there is more."""
    state = b"%b%d" % (start, remaining)
    return state if reset is None else b"%b;t=%d" % (state, reset)


def _policy(policy: RatePolicy) -> str:
    text = f"{string(policy.name)};q={integer(policy.quota)}"
    return text if policy.window is None else f"{text};w={integer(max(policy.window, 1))}"
