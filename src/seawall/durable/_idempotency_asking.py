"""Checked arguments of a reservation, and the wait for a key that is in flight."""

from __future__ import annotations

from os import urandom
from typing import Final

from seawall import _checks as check
from seawall.context import give_up_at
from seawall.durable._idempotency_records import Wanted
from seawall.durable._json import canonical_json
from seawall.models.idempotency import (
    KeyState,
    Pending,
    check_key,
    check_name,
    fingerprint_of,
    key_digest,
)

FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5
"""Maximum seconds between two looks of a waiter."""


def wanted_of(
    scope: str | None,
    operation: str,
    key: str,
    fingerprint: object,
    *,
    unscoped: bool,
    owned: bool = True,
) -> Wanted:
    """Check the arguments that name a record and return them, with a new owner if `owned`."""
    if scope is None and unscoped:
        scope = ""
    elif scope is None:
        raise TypeError(
            "scope=None: write whose key it is (tenant and principal); or, where everybody may"
            " have everybody's answers, Idempotency(..., unscoped=True)"
        )
    else:
        check_name("scope", scope)
    check_name("operation", operation)
    hashed = key_digest(scope, operation, check_key(key))
    payload = b"" if fingerprint is None else fingerprint_of(payload_of(fingerprint))
    return Wanted(scope, operation, hashed, payload, urandom(16).hex() if owned else "")


def payload_of(fingerprint: object) -> bytes | str:
    """Return the part of a payload that is compared, or raise."""
    if isinstance(fingerprint, (bytes, bytearray, memoryview)):
        return bytes(fingerprint)
    if isinstance(fingerprint, str):
        return fingerprint
    try:
        return canonical_json(fingerprint)
    except TypeError as error:
        raise TypeError(
            f"fingerprint: {error}: write bytes, text or what JSON has (also with Decimal, UUID,"
            " dates, dataclasses and models); or None, to compare nothing"
        ) from None


class Waiting:
    """The schedule of a waiter's looks."""

    def __init__(self, wait: float, now: float) -> None:
        """Wait up to `wait` seconds, but not beyond the current deadline."""
        until, self._late = give_up_at(now, check.seconds("wait", wait, zero=True))
        self._until = now if until is None else until
        self._pause = FIRST_PAUSE

    def pause(self, found: KeyState, now: float) -> float | None:
        """Return the number of seconds until the next look; None if there is none."""
        left = self._until - now
        if not isinstance(found, Pending) or left <= 0:
            return None
        if self._late and left <= self._pause:
            return None  # a look at the deadline would leave no time to report the result
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        return min(pause, left)
