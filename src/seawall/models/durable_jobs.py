"""Jobs kept in a database: their states and transitions.

    queued     ->  running, cancelled
    running    ->  running (taken over), queued (tried again, given back),
                   succeeded, failed, cancelled
    succeeded, cancelled  ->  expired
    failed     ->  queued (an operator retries it), expired
    expired    ->  (nothing: forgotten in the end)

Time is in whole microseconds of one clock, that of the database. `sql/*/jobs.sql` implements the
same rules, step by step, and a test drives both with the same histories.

A worker holds a job under an owner token and an epoch that only grows. A worker's request counts
only with the current token and epoch: a worker that was considered dead and comes back is refused.
`due` is the time from which the job may be claimed: for a running job, the end of the lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
"""Allowed transitions: state to possible next states."""

STATES: Final = frozenset(FOLLOWS)
ENDED: Final[frozenset[State]] = frozenset({"succeeded", "failed", "cancelled"})
"""Final states, in which no more work is done."""
LOWEST: Final = 9
"""The priority that is served last; 0 is served first."""
HEAD_START: Final = 60_000_000
"""Microseconds of head start over the next lower priority. Prevents starvation."""
REACH: Final = LOWEST * HEAD_START
"""Maximum distance of a due job from `now`. Those with a higher rank need no look."""
LOST: Final = "the worker was lost"
"""Error of a job whose last attempt was never ended by its worker."""


POLL_LEAST: Final = 1.0
POLL_MOST: Final = 30.0
POLL_SHARE: Final = 0.25


def poll_after(age: float, least: float = POLL_LEAST, most: float = POLL_MOST) -> float:
    """Return the seconds after which to poll a job of `age` seconds again.

    This is a quarter of its age: a poller notices the end at most a quarter of the job's age late,
    and polls about twenty times in an hour. It is never less than `least`, never more than `most`.
    """
    return min(max(age * POLL_SHARE, least), most)


def poll_of(poll: Sequence[float]) -> tuple[float, float]:
    """Return the shortest and the longest polling interval, or raise."""
    if isinstance(poll, str) or not isinstance(poll, Sequence) or len(poll) != 2:  # noqa: PLR2004 - a pair
        raise TypeError(f"poll={poll!r}: write two times in seconds, such as poll=(0.05, 1.0)")
    least, most = (check.seconds("poll", seconds) for seconds in poll)
    if least > most:
        raise ValueError(f"poll={poll!r}: write the shorter time first")
    return least, most


@dataclass
class DurableJob:
    """One job, which may be claimed from `due` on. Each method returns whether it had an effect."""

    due: int
    max_attempts: int
    state: State = "queued"
    attempts: int = 0
    owner: str | None = None
    epoch: int = 0
    cancelling: bool = False
    error: str = ""
    expires: int | None = None

    # For workers

    def claim(self, now: int, owner: str, lease: int, ttl: int) -> bool:
        """Claim the job, or end it if it was cancelled or has no attempts left."""
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
        """Return whether that owner holds the job under that epoch."""
        return self.state == "running" and self.owner == owner and self.epoch == epoch

    def renew(self, now: int, owner: str, epoch: int, lease: int) -> bool:
        """Extend the lease to `now + lease`. Return False if the job is no longer held."""
        if not self.held(owner, epoch):
            return False
        self.due = now + lease
        return True

    def succeed(self, now: int, owner: str, epoch: int, ttl: int) -> bool:
        """End with a result. Return False if the job is no longer held."""
        if not self.held(owner, epoch):
            return False
        self.error = ""
        self._end("succeeded", now, ttl)
        return True

    def fail(
        self, now: int, owner: str, epoch: int, ttl: int, delay: int, error: str, *, retry: bool
    ) -> bool:
        """Queue the job again after `delay`, or end it: cancelled if requested, else failed."""
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
        """Queue the job again after `delay`, without counting this attempt."""
        if not self.held(owner, epoch):
            return False
        self.attempts -= 1
        if self.cancelling:
            self._end("cancelled", now, ttl)
        else:
            self.state, self.owner, self.due = "queued", None, now + delay
        return True

    # For callers that wait for the job

    def cancel(self, now: int, ttl: int) -> bool:
        """End the job, or ask its worker to stop. Return False if it has already ended."""
        if self.state == "queued" or (self.state == "running" and self.due <= now):
            self.cancelling = True
            self._end("cancelled", now, ttl)
            return True
        if self.state == "running":
            self.cancelling = True
            return True
        return False

    def retry(self, now: int) -> bool:
        """Queue a failed job again, with all attempts. Return False if it has expired."""
        if self.state != "failed" or self.expires is None or self.expires <= now:
            return False
        self.state, self.attempts, self.due, self.expires = "queued", 0, now, None
        return True

    def expire(self, now: int, gone_for: int) -> bool:
        """Discard the details of an ended job once it expires. Remember its id for `gone_for`."""
        if self.state not in ENDED or self.expires is None or self.expires > now:
            return False
        self.state, self.error, self.expires = "expired", "", now + gone_for
        return True

    def _end(self, state: State, now: int, ttl: int) -> None:
        self.state, self.owner, self.expires = state, None, now + ttl
