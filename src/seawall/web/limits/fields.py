"""Response headers about limits: `RateLimit-Policy`, `RateLimit` and `Retry-After`, as bytes.

Only limits of the individual caller are reported. The load of the service as a whole, and its soft
limits, are not disclosed to callers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Final

from seawall.errors import RateLimited
from seawall.models.rate.rates import MICROSECONDS
from seawall.wire.rate_fields import (
    POLICY_HEADER,
    STATE_HEADER,
    RatePolicy,
    RateState,
    write_policies,
    write_states,
)

if TYPE_CHECKING:
    from seawall.policies.rate_limit import Limit
    from seawall.web.limits.limits import RequestLimit

Header = tuple[bytes, bytes]

POLICY: Final = POLICY_HEADER.lower().encode("ascii")
STATE: Final = STATE_HEADER.lower().encode("ascii")

ROUNDING: Final = 1e-6
"""Seconds that an instant may be off by the rounding of floats."""


def policy_header(rates: Iterable[tuple[RequestLimit, Limit]]) -> Header | None:
    """Return the header with the limits, the same for all requests of a tier, or None."""
    policies = []
    for limit, rate in rates:
        if limit.shown:
            whole, part = divmod(rate.rate.period, MICROSECONDS)
            policies.append(RatePolicy(limit.name, rate.rate.limit, None if part else whole))
    return (POLICY, write_policies(policies).encode("ascii")) if policies else None


def field_name(name: str) -> bytes:
    """Return a limit's name as the start of its state; the remaining count follows."""
    return write_states([RateState(name, 0)]).removesuffix("0").encode("ascii")


@lru_cache(maxsize=1000)
def state_header(field: bytes, left: float, seconds: float) -> Header:
    """Return the state of a limit: what remains, and the seconds until there is more.

    It is cached: callers well within their limits get the same values repeatedly.
    """
    return STATE, b"%b%d;t=%d" % (field, left, seconds)


def refused_header(error: RateLimited, limits: Iterable[RequestLimit]) -> Header | None:
    """Return the state for a refused request: nothing remains of the limits that it exceeds."""
    after = error.retry_after
    # A rounding error of the clock is no reason to write 11 for 10 seconds.
    time = b"" if after is None else b";t=%d" % ceil(after - ROUNDING)
    over = [limit.field for limit in limits if limit.shown and limit.name in error.violated]
    return (STATE, b", ".join(b"%b0%b" % (field, time) for field in over)) if over else None
