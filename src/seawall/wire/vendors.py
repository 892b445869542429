"""Limits that the vendors of language models report in response headers.

    anthropic-ratelimit-tokens-remaining: 39000       x-ratelimit-remaining-tokens: 149984
    anthropic-ratelimit-tokens-reset: 2026-01-01T00:00:07Z      x-ratelimit-reset-tokens: 6m0s
    retry-after-ms: 1500

Both forms are parsed into the same values. A number below 0, a limit of 0 and a reset in the past
are ignored: some gateways send them where nothing is limited. So is a header that is given twice
with different values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple

from seawall.wire.retries import RETRY_AFTER_HEADER, read_milliseconds, read_retry_after
from seawall.wire.text import A_YEAR, decimal_of, text_of, whole_of

KINDS: Final = ("requests", "tokens", "input_tokens", "output_tokens")
"""Quantities that vendors limit."""

_FIELDS: Final[dict[str, tuple[str, str]]] = {
    **{
        f"anthropic-ratelimit-{kind.replace('_', '-')}-{what}": (kind, what)
        for kind in KINDS
        for what in ("limit", "remaining", "reset")
    },
    **{
        f"x-ratelimit-{what}-{kind}": (kind, what)
        for kind in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    },
}
_KNOWN: Final = frozenset((*_FIELDS, RETRY_AFTER_HEADER, "retry-after-ms"))

_PARTS: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|us|µs|ns|h|m|s|d)")
_LENGTHS: Final = {
    "d": 86_400.0,
    "h": 3_600.0,
    "m": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
}
_LONGEST_LENGTH: Final = 64


class VendorLimit(NamedTuple):
    """State of one limit of a vendor."""

    remaining: int  # remaining amount
    reset_after: float  # seconds until the limit is fully reset
    limit: int | None = None  # total amount, if the vendor reports it


class VendorLimits(NamedTuple):
    """Limits that a vendor reports in one response; None where a value is missing or invalid."""

    requests: VendorLimit | None = None
    tokens: VendorLimit | None = None
    input_tokens: VendorLimit | None = None
    output_tokens: VendorLimit | None = None
    retry_after: float | None = None  # seconds to wait before a retry


NOTHING: Final = VendorLimits()


def read_vendor_limits(
    headers: Iterable[tuple[str | bytes, str | bytes]], wall: float
) -> VendorLimits:
    """Parse the limits in a response's `headers`, at the wall-clock time `wall` (since 1970)."""
    found: dict[str, str | None] = {}
    for raw, value in headers:
        name = (raw.decode("latin-1") if isinstance(raw, bytes) else raw).lower()
        if name in _KNOWN:
            text = text_of(value)
            found[name] = text if found.get(name, text) == text else None
    if not found:
        return NOTHING
    given: dict[str, dict[str, str]] = {}
    for name, text in found.items():
        field = _FIELDS.get(name)
        if field is not None and text is not None:
            given.setdefault(field[0], {})[field[1]] = text
    wait = read_milliseconds(found.get("retry-after-ms") or "")
    if wait is None:
        wait = read_retry_after(found.get(RETRY_AFTER_HEADER) or "", wall)

    def limit(kind: str) -> VendorLimit | None:
        return _limit(given[kind], wall) if kind in given else None

    return VendorLimits(**{kind: limit(kind) for kind in KINDS}, retry_after=wait)


def _limit(fields: dict[str, str], wall: float) -> VendorLimit | None:
    remaining = whole_of(fields.get("remaining", ""))
    reset = fields.get("reset", "")
    after = read_length(reset)
    if after is None:
        instant = read_instant(reset)
        after = None if instant is None else instant - wall
    if remaining is None or after is None or not 0 < after <= A_YEAR:
        return None
    if "limit" not in fields:
        return VendorLimit(remaining, after)
    limit = whole_of(fields["limit"])
    if not limit or remaining > limit:
        return None
    return VendorLimit(remaining, after, limit)


def read_length(value: str | bytes) -> float | None:
    """Return the seconds of "6m0s", "12ms", "1h2m3.5s" or a plain number of seconds, or None."""
    text = text_of(value)
    if not text or len(text) > _LONGEST_LENGTH:
        return None
    plain = decimal_of(text)
    if plain is not None:
        return plain if plain <= A_YEAR else None
    seconds, end = 0.0, 0
    while end < len(text):
        part = _PARTS.match(text, end)
        if part is None:
            return None
        seconds += float(part[1]) * _LENGTHS[part[2]]
        end = part.end()
    return seconds if seconds <= A_YEAR else None


def read_instant(value: str | bytes) -> float | None:
    """Return the seconds since 1970 of a time with its offset from UTC, as in RFC 3339, or None."""
    try:
        at = datetime.fromisoformat(text_of(value) or "")
    except ValueError:
        return None
    return None if at.tzinfo is None else at.timestamp()
