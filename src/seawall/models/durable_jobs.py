"""What becomes of a job that is kept in a database: its states, and what may follow on what.

    queued     ->  running, cancelled
    running    ->  running (taken over), queued (tried again, given back),
                   succeeded, failed, cancelled
    succeeded, cancelled  ->  expired
    failed     ->  queued (an operator retries it), expired
    expired    ->  (nothing: forgotten in the end)

Time is whole microseconds of one clock, that of the database. `sql/*/jobs.sql` does the same, step
by step, and a test drives both with the same histories.

Whoever works on a job holds it under an owner's token and an epoch that only grows. What a worker
says counts only with the token and the epoch of now: one that was taken for dead, and comes back,
is not heard. `due` is when the next one may take it: for a job at work, the end of the lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from seawall import _checks as check

State = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]

FOLLOWS: Final[dict[State, frozenset[State]]] = {
    "queued": frozenset({"running", "cancelled"}),
    "running": frozenset({"running", "queued", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset({"expired"}),
    "failed": frozenset({"queued", "expired"}),
    "cancelled": frozenset({"expired"}),
    "expired": frozenset(),
}
"""Which states may follow on which."""

STATES: Final = frozenset(FOLLOWS)
ENDED: Final[frozenset[State]] = frozenset({"succeeded", "failed", "cancelled"})
"""The states in which nothing more is done."""

LOWEST: Final = 9
"""The priority that is served last; 0 is served first."""
HEAD_START: Final = 60_000_000
"""Microseconds by which a job of one priority is ahead of the next lower one: nobody starves."""
REACH: Final = LOWEST * HEAD_START
"""A job that is due has no rank above now and this: further ones need not be looked at."""

LOST: Final = "the worker was lost"
"""What is told of a job whose last attempt nobody ended."""

# How often to ask how a job is getting on

POLL_LEAST: Final = 1.0
POLL_MOST: Final = 30.0
POLL_SHARE: Final = 0.25


def poll_after(age: float, least: float = POLL_LEAST, most: float = POLL_MOST) -> float:
    """Return the seconds after which to ask again for a job of `age` seconds.

    A quarter of its age: who polls so learns of the end at most a quarter later than it was, and
    asks some twenty times in an hour. Never less than `least`, never more than `most`.
    """
    return min(max(age * POLL_SHARE, least), most)


def poll_of(poll: Sequence[float]) -> tuple[float, float]:
    """Return how soon and how late to look again, or raise."""
    if isinstance(poll, str) or not isinstance(poll, Sequence) or len(poll) != 2:  # noqa: PLR2004 - a pair
        raise TypeError(f"poll={poll!r}: write two times in seconds, such as poll=(0.05, 1.0)")
    least, most = (check.seconds("poll", seconds) for seconds in poll)
    if least > most:
        raise ValueError(f"poll={poll!r}: write the shorter time first")
    return least, most


def rank_of(due: int, priority: int) -> int:
    """Return the place in line of a job that is first due at `due`: the lowest goes first."""
    return due + priority * HEAD_START


class DurableJob:
    """One job. Each method says whether it had an effect, or what the worker has to know."""

    __slots__ = (
        "attempts",
        "cancelling",
        "due",
        "epoch",
        "error",
        "expires",
        "max_attempts",
        "owner",
        "state",
    )

    def __init__(self, due: int, max_attempts: int) -> None:
        """Be queued, to be taken from `due` on."""
        self.state: State = "queued"
        self.due = due
        self.max_attempts = max_attempts
        self.attempts = 0
        self.owner: str | None = None
        self.epoch = 0
        self.cancelling = False
        self.error = ""
        self.expires: int | None = None

    def __repr__(self) -> str:
        return f"<DurableJob {self.state}: attempt {self.attempts}, epoch {self.epoch}>"

    # Those who work on it

    def claim(self, now: int, owner: str, lease: int, ttl: int) -> bool:
        """Take it: True if it is `owner`'s now. One that nobody may try again ends instead."""
        if self.state not in ("queued", "running") or self.due > now:
            return False
        if self.cancelling:
            self._end("cancelled", now, ttl)
            return False
        if self.attempts >= self.max_attempts:
            self.error = self.error or LOST
            self._end("failed", now, ttl)
            return False
        self.state, self.owner, self.due = "running", owner, now + lease
        self.epoch += 1
        self.attempts += 1
        return True

    def held(self, owner: str, epoch: int) -> bool:
        """Tell whether it is that worker's, under that claim."""
        return self.state == "running" and self.owner == owner and self.epoch == epoch

    def renew(self, now: int, owner: str, epoch: int, lease: int) -> bool:
        """Hold it for another `lease` from now; False: it is not held any more."""
        if not self.held(owner, epoch):
            return False
        self.due = now + lease
        return True

    def succeed(self, now: int, owner: str, epoch: int, ttl: int) -> bool:
        """End with a result; False: refused, it is not held any more."""
        if not self.held(owner, epoch):
            return False
        self.error = ""
        self._end("succeeded", now, ttl)
        return True

    def fail(
        self, now: int, owner: str, epoch: int, ttl: int, delay: int, error: str, *, retry: bool
    ) -> bool:
        """Be tried again after `delay`, or end: cancelled if that was wanted, else failed."""
        if not self.held(owner, epoch):
            return False
        self.error = error
        if self.cancelling:
            self._end("cancelled", now, ttl)
        elif retry and self.attempts < self.max_attempts:
            self.state, self.owner, self.due = "queued", None, now + delay
        else:
            self._end("failed", now, ttl)
        return True

    def give_back(self, now: int, owner: str, epoch: int, ttl: int, delay: int = 0) -> bool:
        """Be queued again, as if this attempt had not been; at once, or after `delay`."""
        if not self.held(owner, epoch):
            return False
        self.attempts -= 1
        if self.cancelling:
            self._end("cancelled", now, ttl)
        else:
            self.state, self.owner, self.due = "queued", None, now + delay
        return True

    # Those who wait for it

    def cancel(self, now: int, ttl: int) -> bool:
        """End it, or ask who works on it to stop; False: it has ended, and stays as it is."""
        if self.state == "queued" or (self.state == "running" and self.due <= now):
            self.cancelling = True
            self._end("cancelled", now, ttl)
            return True
        if self.state == "running":
            self.cancelling = True
            return True
        return False

    def retry(self, now: int) -> bool:
        """Queue it again, with all attempts; False: it has not failed, or is not kept any more."""
        if self.state != "failed" or self.expires is None or self.expires <= now:
            return False
        self.state, self.attempts, self.due, self.expires = "queued", 0, now, None
        return True

    def expire(self, now: int, gone_for: int) -> bool:
        """Lose what it held, when its time is over; that it was is remembered for `gone_for`."""
        if self.state not in ENDED or self.expires is None or self.expires > now:
            return False
        self.state, self.error, self.expires = "expired", "", now + gone_for
        return True

    def _end(self, state: State, now: int, ttl: int) -> None:
        self.state, self.owner, self.expires = state, None, now + ttl
