"""One holder at a time, for a limited time, with a number that tells later holders from earlier.

Time is whole microseconds of one clock, that of the server. A holder is whoever took the lease
last, until `ttl` has passed since it was taken or renewed. Each time it is taken, the token is
higher than ever before: a resource that remembers the highest token it has seen, and refuses lower
ones, cannot be harmed by somebody who still believes in a lease that is over.

The token is the clock's reading, or one more than the last token where that is higher. So it goes
on rising when all that was stored is lost; only a clock that was set back meanwhile breaks it then.
"""

from __future__ import annotations

from typing import NamedTuple


class Granted(NamedTuple):
    """The lease was taken; `token` is the number of this holder."""

    token: int


class Busy(NamedTuple):
    """Somebody else holds it, under `token`, for `left` microseconds more if it is not renewed."""

    token: int
    left: int


class LeaseModel:
    """Who holds one lease. `lua/lease.lua` does the same, step by step."""

    __slots__ = ("attempt", "holder", "token", "ttl", "until")

    def __init__(self) -> None:
        """Begin free."""
        self.token = 0
        self.holder = ""
        self.attempt = 0
        self.ttl = 0
        self.until = 0

    def take(self, now: int, holder: str, attempt: int, ttl: int) -> Granted | Busy:
        """Take the lease for `holder`, if it is free or over.

        A holder numbers its attempts. If an answer was lost on the way, a later attempt of the same
        holder takes over from the earlier one, with a new token; an attempt that arrives after a
        later one is refused.
        """
        self._look(now)
        newer = self.holder == holder and attempt > self.attempt
        if self.until > now and not newer:
            return Busy(self.token, self.until - now)
        self.token = max(self.token + 1, now)
        self.holder, self.attempt = holder, attempt
        self.ttl, self.until = ttl, now + ttl
        return Granted(self.token)

    def renew(self, now: int, token: int, ttl: int) -> bool:
        """Let the holder of `token` keep the lease from `now`; False if it is no longer its own."""
        self._look(now)
        if self.token != token or self.until <= now:
            return False
        self.ttl, self.until = ttl, now + ttl
        return True

    def release(self, now: int, token: int) -> bool:
        """End the lease, if it is still that of `token`."""
        self._look(now)
        if self.token != token or self.until <= now:
            return False
        self.until = 0
        return True

    def withdraw(self, now: int, holder: str, attempt: int) -> bool:
        """End the lease, if `holder` took it by this attempt or one before: it never heard so."""
        self._look(now)
        if self.holder != holder or self.attempt > attempt or self.until <= now:
            return False
        self.until = 0
        return True

    def _look(self, now: int) -> None:
        """Notice a clock that was set back: nobody holds the lease for longer than its `ttl`."""
        self.until = min(self.until, now + self.ttl)
