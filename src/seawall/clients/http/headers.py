"""Propagated headers of a request: remaining time, criticality, tenant, attempt, key.

Promises:

- Values that the user set stay, except that a deadline and a criticality may be lowered, an attempt
  raised, and another tenant replaced by that of the context.
- All other members of a baggage header stay.
- Nothing is sent that the settings do not name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from seawall.context import (
    Criticality,
    attempt_var,
    attempts_from,
    criticality_var,
    tenant_var,
)
from seawall.wire.criticality import (
    BAGGAGE_HEADER,
    read_baggage,
    read_criticality,
    read_tenant,
    write_baggage,
)
from seawall.wire.deadlines import TIMEOUT_HEADERS, least_timeout, write_timeout
from seawall.wire.idempotency import IDEMPOTENCY_HEADER, write_key
from seawall.wire.retries import ATTEMPT_HEADER, read_attempt, write_attempt

PROPAGATED: Final = frozenset({"deadline", "criticality", "attempt"})
"""Values that are sent by default; not the tenant, which is a customer's name."""

_ATTEMPT: Final = ATTEMPT_HEADER.lower()
_KEY: Final = IDEMPOTENCY_HEADER.lower()
_ALL: Final = PROPAGATED | {"tenant"}


def read_propagate(propagate: bool | Collection[str]) -> frozenset[str]:  # noqa: FBT001
    """Return the values that the setting names, or raise: True is the default, False nothing."""
    if propagate is True:
        return PROPAGATED
    if propagate is False:
        return frozenset()
    if isinstance(propagate, str) or not isinstance(propagate, Collection):
        raise TypeError(f"propagate={propagate!r}: write True, False, or a set of {sorted(_ALL)}")
    unknown = sorted(str(word) for word in propagate if word not in _ALL)
    if unknown:
        raise ValueError(f"propagate: {unknown[0]!r} is not one of {sorted(_ALL)}")
    return frozenset(propagate)


def headers_for(
    propagate: frozenset[str], given: Mapping[str, str], key: str | None, left: float | None
) -> dict[str, str]:
    """Return the headers to set on the next attempt, with `left` seconds left.

    `given` are the existing headers, by their names in lower case; the result has lower-case names
    too.
    """
    headers: dict[str, str] = {}
    if key is not None:
        headers[_KEY] = write_key(key)
    if "attempt" in propagate:
        sent = given.get(_ATTEMPT)
        own = 0 if sent is None else read_attempt(sent) or 0
        around = (one.number for one in attempts_from(attempt_var.get()))
        headers[_ATTEMPT] = write_attempt(max(own, *around, 1))
    if left is not None and "deadline" in propagate:
        least = None if TIMEOUT_HEADERS.isdisjoint(given) else least_timeout(given.items())
        if least is None or left < least:
            headers.update(write_timeout(left))
    baggage = _baggage_for(propagate, given.get(BAGGAGE_HEADER))
    if baggage:
        headers[BAGGAGE_HEADER] = baggage
    return headers


def _baggage_for(propagate: frozenset[str], existing: str | None) -> str | None:
    """Return the baggage to send instead of the existing one; None if that is sufficient.

    The existing baggage may come from a caller, forwarded by another library. So it can lower the
    criticality of the context, but not raise it, and the tenant of the context wins.
    """
    # Without the variable's default: if the context sets nothing, the existing baggage decides.
    level = criticality_var.get(None) if "criticality" in propagate else None
    tenant = tenant_var.get() if "tenant" in propagate else None
    if existing is None:
        # CRITICAL is the receiver's default.
        level = None if level is Criticality.CRITICAL else level
        return None if level is None and tenant is None else write_baggage(None, level, tenant)
    members = read_baggage(existing)
    sent_level, sent_tenant = read_criticality(members), read_tenant(members)
    if sent_level is not None:
        level = sent_level if level is None else min(sent_level, level)
    elif level is Criticality.CRITICAL:
        level = None
    tenant = tenant or sent_tenant
    if (level, tenant) == (sent_level, sent_tenant):
        return None
    return write_baggage(existing, level, tenant)
