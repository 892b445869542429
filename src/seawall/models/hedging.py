"""Cap on hedged requests: how much load a client may add by sending requests twice.

Every call earns the fraction `cap` of a hedge, every hedge spends a whole one, and at most `burst`
can be saved up. So between any two moments: hedges <= cap * calls + burst.
"""

from __future__ import annotations

from seawall import _checks as check

WHOLE = 1_000_000
"""One hedge in units of credit. Whole numbers, so that rounding errors do not add up."""


class HedgeCap:
    """Credit earned by calls and spent by hedges. The caller is responsible for locking."""

    __slots__ = ("_credit", "_earned", "_seen", "burst", "cap")

    def __init__(self, cap: float = 0.05, burst: int = 5) -> None:
        """Start with `burst` hedges to spend."""
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

    def __repr__(self) -> str:
        return f"HedgeCap(cap={self.cap:g}, burst={self.burst})"
