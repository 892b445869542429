"""Refusals and timeouts of a pool: their errors, counts and events."""

from __future__ import annotations

from operator import itemgetter
from typing import NoReturn

from seawall.clock import Clock
from seawall.context import seconds_left
from seawall.errors import DeadlineExceeded, PoolExhausted, Rejected, TimedOut
from seawall.events import CallRejected, CallTimedOut
from seawall.events.bus import emit
from seawall.resources.pool.steps import Work
from seawall.resources.pool.upkeep import Upkeep
from seawall.runtime.slots import Refusal


class Refusals:
    """The refusals of one pool."""

    def __init__(self, upkeep: Upkeep, clock: Clock) -> None:
        """Count in `upkeep`."""
        self.name = upkeep.name
        self.clock = clock
        self.upkeep = upkeep
        self.settings = upkeep.settings
        self.closed = False

    def turned_away(self, why: Refusal) -> NoReturn:
        """Refuse a borrower whose wait ended, or that found the queue full."""
        self.check_open()
        if why == "deadline":
            self.refuse(DeadlineExceeded(f"pool {self.name!r}: the deadline passed while waiting"))
        if why == "no room":
            self.refuse(self.full("and no room to wait"))
        self.refuse(self.full(f"waited {self.settings.checkout_timeout:g} s"))

    def full(self, why: str) -> PoolExhausted:
        """Return the error for an exhausted pool: its longest borrower, and when to retry."""
        now = self.clock.now()
        longest = ""
        borrowed = self.upkeep.stock.borrowed()
        if borrowed:
            since, resource = min(borrowed, key=itemgetter(0))
            longest = f"; the longest borrower, for {now - since:.3g} s, is {resource.place}"
        return PoolExhausted(
            f"pool {self.name!r}: no free resource of {self.settings.max_size}: {why}{longest}",
            retry_after=self.upkeep.median(now),
        )

    def check_open(self) -> None:
        """Refuse if the pool is closed."""
        if self.closed:
            self.refuse(PoolExhausted(f"pool {self.name!r} is closed"))

    def time_left(self, limit: float | None) -> float | None:
        """Return the smaller of `limit` and the time to the deadline; refuse if that has passed."""
        left = seconds_left()
        if left is None:
            return limit
        if left <= 0:
            self.refuse(DeadlineExceeded(f"pool {self.name!r}: the deadline has passed"))
        return left if limit is None else min(left, limit)

    def refuse(self, error: Rejected) -> NoReturn:
        """Count a refusal, emit its event, and raise it."""
        self.upkeep.counts["rejected"] += 1
        emit(CallRejected, self.name, policy="pool", reason=error.reason, enforced=True)
        error.guard = self.name
        error.policy = "pool"
        try:
            raise error
        finally:
            del error  # break the reference cycle between the exception and this frame

    def overdue(self) -> TimedOut:
        """Count a borrower that took too long, and return its error."""
        seconds = self.settings.read_timeout or 0.0
        self.upkeep.counts["timed_out"] += 1
        emit(CallTimedOut, self.name, seconds=seconds)
        message = f"pool {self.name!r}: the borrower took more than {seconds:g} s"
        return TimedOut(message, guard=self.name, seconds=seconds)

    def note_timeout(self, work: Work) -> None:
        """Count work that took too long, if it did."""
        if work.expired and work.seconds is not None:
            self.upkeep.counts["timed_out"] += 1
            emit(CallTimedOut, self.name, seconds=work.seconds)
