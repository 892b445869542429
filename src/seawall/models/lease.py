"""Lease: one holder at a time, for a limited time, with a fencing token.

Time is in whole microseconds of one clock, that of the server. The holder is the one that took the
lease last, until `ttl` has passed since it was taken or renewed. Each time it is taken, the token
is higher than ever before: a resource that remembers the highest token it has seen, and refuses
lower ones, is safe from a holder that still believes in an expired lease.

The token is the clock's reading, or one more than the last token if that is higher. So it keeps
rising even if all stored data is lost, unless the clock was also set back meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LeaseGranted(NamedTuple):
    """The lease was taken. `token` is the fencing token of this holder."""

    token: int


class Busy(NamedTuple):
    """Another holder has the lease, under `token`, for `left` more microseconds unless renewed."""

    token: int
    left: int


@dataclass
class LeaseModel:
    """State of one lease. `lua/lease.lua` implements the same rules, step by step."""

    token: int = 0
    holder: str = ""
    attempt: int = 0
    ttl: int = 0
    until: int = 0

    def take(self, now: int, holder: str, attempt: int, ttl: int) -> LeaseGranted | Busy:
        """Take the lease for `holder`, if it is free or expired.

        A holder numbers its attempts. If a reply was lost, a later attempt of the same holder takes
        over from the earlier one, with a new token; an attempt that arrives after a later one is
        refused.
        """
        self._look(now)
        newer = self.holder == holder and attempt > self.attempt
        if self.until > now and not newer:
            return Busy(self.token, self.until - now)
        self.token = max(self.token + 1, now)
        self.holder, self.attempt = holder, attempt
        self.ttl, self.until = ttl, now + ttl
        return LeaseGranted(self.token)

    def renew(self, now: int, token: int, ttl: int) -> bool:
        """Renew the lease of `token` from `now`. Return False if it no longer holds the lease."""
        self._look(now)
        if self.token != token or self.until <= now:
            return False
        self.ttl, self.until = ttl, now + ttl
        return True

    def release(self, now: int, token: int) -> bool:
        """End the lease if `token` still holds it."""
        self._look(now)
        if self.token != token or self.until <= now:
            return False
        self.until = 0
        return True

    def withdraw(self, now: int, holder: str, attempt: int) -> bool:
        """End the lease if `holder` took it by this or an earlier attempt, whose reply was lost."""
        self._look(now)
        if self.holder != holder or self.attempt > attempt or self.until <= now:
            return False
        self.until = 0
        return True

    def _look(self, now: int) -> None:
        """Handle a clock that was set back: a lease is never held for longer than its `ttl`."""
        self.until = min(self.until, now + self.ttl)
