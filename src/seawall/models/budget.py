"""Retry budgets: how many retries a client may add to a struggling server's load.

A maximum number of attempts bounds one call; a budget bounds all calls together. Share one budget
among the callers of one dependency. A budget never makes a caller wait: a refused retry is not
made.

    SuccessDeposit   successes pay for retries; lets an overloaded server recover fastest
    RequestRatio     retries are a share of the requests of the last seconds
    InFlightRatio    retries are a share of the calls in flight
    HedgeCap         the same for hedges, the calls that are sent twice
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from math import inf
from typing import ClassVar

from seawall import _checks as check

WHOLE = 1_000_000  # one hedge in units of credit: whole numbers have no rounding errors
BUCKETS = 10  # number of buckets into which `RequestRatio` divides its window


class Budget:
    """Interface between a retry policy and its budget.

    A budget overrides the methods it needs. `now` is any clock that does not go back, in the unit
    of the budget's own settings. The caller is responsible for locking.
    """

    __slots__ = ()

    counts_calls: ClassVar[bool] = True
    """Whether the budget uses `started` and `ended`. If not, a policy may skip them."""

    def started(self, _now: float, /) -> None:
        """Note that a call began (its first attempt, not a retry)."""

    def succeeded(self, _now: float, /) -> None:
        """Note that an attempt succeeded."""

    def failed(self, _now: float, /) -> None:
        """Note that an attempt failed in a retryable way, or the server asked for no retry."""

    def try_retry(self, _now: float, /) -> bool:
        """Take the permission for one retry, or return False. Called before the backoff."""
        raise NotImplementedError

    def retry_ended(self, _now: float, /) -> None:
        """Note that a permitted retry is over, whether it was made or not."""

    def ended(self, _now: float, /) -> None:
        """Note that a call is over, regardless of its result."""

    def forget_in_flight(self) -> None:
        """Reset the calls in flight to zero: the callers that would have ended them are gone."""

    def fresh(self) -> Budget:
        """Return a new budget with the same settings. The default is a deep copy."""
        return deepcopy(self)

    def snapshot(self) -> dict[str, float]:
        """Return the state as of the last recorded event."""
        raise NotImplementedError


class SuccessDeposit(Budget):
    """A failure costs one token, a success earns `ratio`; a retry needs more than half to be left.

    So between any two moments, if each retry follows its own failure, there are fewer than
    `maximum / 2 + ratio * successes` retries. While `tokens == maximum` a success changes nothing
    and need not be reported.
    """

    __slots__ = ("maximum", "ratio", "tokens")

    counts_calls = False

    def __init__(self, maximum: float = 10, ratio: float = 0.1) -> None:
        # With 2 or fewer the first failure would already forbid its own retry.
        self.maximum = check.at_least("maximum", maximum, 3)
        self.ratio = check.ratio("ratio", ratio)
        self.tokens = self.maximum

    def succeeded(self, _now: float, /) -> None:
        """Earn `ratio` tokens, up to the maximum: a long calm does not pay for a storm."""
        self.tokens = min(self.maximum, self.tokens + self.ratio)

    def failed(self, _now: float, /) -> None:
        """Spend a token, down to none: a long storm does not delay the recovery."""
        self.tokens = max(0.0, self.tokens - 1)

    def allows(self) -> bool:
        """Return whether a retry or a hedge may be made."""
        return self.tokens > self.maximum / 2

    def try_retry(self, _now: float, /) -> bool:
        """Return whether the retry may be made; its failure has already paid for it."""
        return self.allows()

    def fresh(self) -> SuccessDeposit:
        """Return a new budget with the same settings."""
        return SuccessDeposit(self.maximum, self.ratio)

    def snapshot(self) -> dict[str, float]:
        """Return the tokens left, and their maximum."""
        return {"tokens": self.tokens, "maximum": self.maximum}

    def __repr__(self) -> str:
        return f"SuccessDeposit(maximum={self.maximum:g}, ratio={self.ratio:g})"


class RequestRatio(Budget):
    """In the window, retries <= max(`ratio` * requests, `floor` * `window`), whenever one is made.

    `floor` is the number of retries per unit of time for callers with few requests; where `ratio` *
    requests is larger, it adds nothing. The window has ten buckets: the current, unfinished one and
    the nine before it.
    """

    __slots__ = ("_bucket", "_requests", "_retries", "floor", "ratio", "window")

    def __init__(self, ratio: float = 0.2, window: float = 10.0, floor: float = 0.1) -> None:
        self.ratio = check.ratio("ratio", ratio, zero=True)
        self.window = check.seconds("window", window)
        self.floor = check.at_least("floor", floor, 0)
        self._bucket = -inf
        self._requests = deque([0] * BUCKETS, BUCKETS)
        self._retries = deque([0] * BUCKETS, BUCKETS)

    def started(self, now: float, /) -> None:
        """Count a request."""
        self._advance(now)
        self._requests[-1] += 1

    def try_retry(self, now: float, /) -> bool:
        """Count a retry if the window has room for it."""
        self._advance(now)
        if sum(self._retries) + 1 > self._allowed():
            return False
        self._retries[-1] += 1
        return True

    def fresh(self) -> RequestRatio:
        """Return a new budget with the same settings."""
        return RequestRatio(self.ratio, self.window, self.floor)

    def snapshot(self) -> dict[str, float]:
        """Return the requests, the retries and the retries allowed in the window."""
        requests, retries = sum(self._requests), sum(self._retries)
        return {"requests": requests, "retries": retries, "allowed": self._allowed()}

    def __repr__(self) -> str:
        settings = f"ratio={self.ratio:g}, window={self.window:g}, floor={self.floor:g}"
        return f"RequestRatio({settings})"

    def _allowed(self) -> float:
        return max(self.ratio * sum(self._requests), self.floor * self.window)

    def _advance(self, now: float) -> None:
        bucket = now // (self.window / BUCKETS)
        # A time read just before another thread's may be older: count it in the newer bucket.
        if bucket > self._bucket:
            empty = [0] * int(min(bucket - self._bucket, BUCKETS))
            self._requests.extend(empty)
            self._retries.extend(empty)
            self._bucket = bucket


class InFlightRatio(Budget):
    """Retries in flight <= max(`floor`, `ratio` * calls in flight), whenever one is made.

    A retry is in flight from its permission on, including its backoff.
    """

    __slots__ = ("active", "floor", "ratio", "retries")

    def __init__(self, ratio: float = 0.2, floor: int = 3) -> None:
        self.ratio = check.ratio("ratio", ratio, zero=True)
        self.floor = check.count("floor", floor, minimum=0)
        self.active = 0
        self.retries = 0

    def started(self, _now: float, /) -> None:
        """Count a call as in flight."""
        self.active += 1

    def try_retry(self, _now: float, /) -> bool:
        """Count a retry as in flight if there is room for it."""
        if self.retries + 1 > self._allowed():
            return False
        self.retries += 1
        return True

    def retry_ended(self, _now: float, /) -> None:
        """Remove a retry. One that began before this budget was installed was never counted."""
        self.retries = max(0, self.retries - 1)

    def ended(self, _now: float, /) -> None:
        """Remove a call. One that began before this budget was installed was never counted."""
        self.active = max(0, self.active - 1)

    def forget_in_flight(self) -> None:
        """Reset to nothing in flight."""
        self.active = self.retries = 0

    def fresh(self) -> InFlightRatio:
        """Return a new budget with the same settings."""
        return InFlightRatio(self.ratio, self.floor)

    def snapshot(self) -> dict[str, float]:
        """Return the calls, the retries and the retries allowed in flight."""
        return {"active": self.active, "retries": self.retries, "allowed": self._allowed()}

    def __repr__(self) -> str:
        return f"InFlightRatio(ratio={self.ratio:g}, floor={self.floor})"

    def _allowed(self) -> float:
        return max(self.floor, self.ratio * self.active)


class HedgeCap:
    """Credit earned by calls and spent by hedges. The caller is responsible for locking.

    Every call earns the fraction `cap` of a hedge, every hedge spends a whole one, and at most
    `burst` can be saved up. So between any two moments: hedges <= cap * calls + burst.
    """

    def __init__(self, cap: float = 0.05, burst: int = 5) -> None:
        self.cap = check.ratio("cap", cap, zero=True)
        self.burst = check.count("burst", burst)
        self._earned = int(self.cap * WHOLE)
        self._credit = self.burst * WHOLE
        self._seen = 0

    def try_hedge(self, calls: int) -> bool:
        """Spend a hedge if one has been earned. `calls` is the total number of calls so far.

        A number that is too low (from a counter that threads share without a lock) allows fewer
        hedges, never more.
        """
        self._earn(calls)
        if self._credit < WHOLE:
            return False
        self._credit -= WHOLE
        return True

    def give_back(self) -> None:
        """Return a hedge that was permitted and not made."""
        self._credit = min(self.burst * WHOLE, self._credit + WHOLE)

    def available(self, calls: int) -> float:
        """Return how many hedges could be made now."""
        self._earn(calls)
        return self._credit / WHOLE

    def change(self, cap: float, burst: int, calls: int) -> None:
        """Change the settings. Saved credit is kept, up to the new burst."""
        fresh = HedgeCap(cap, burst)
        self._earn(calls)
        self.cap, self.burst, self._earned = fresh.cap, fresh.burst, fresh._earned
        self._credit = min(self._credit, self.burst * WHOLE)

    def _earn(self, calls: int) -> None:
        if calls > self._seen:
            earned = (calls - self._seen) * self._earned
            self._credit = min(self.burst * WHOLE, self._credit + earned)
            self._seen = calls
