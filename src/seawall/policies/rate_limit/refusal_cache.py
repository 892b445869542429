"""Cache of a store's recent refusals, which are repeated briefly without asking again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.windows import FixedWindow
from seawall.policies.rate_limit.meters import Blocked
from seawall.policies.rate_limit.reservation import Charge

BELIEVED: Final = 1_000_000.0
"""Microseconds for which a refusal is valid: another pod may give something back."""

ON_ITS_WAY: Final = 100_000.0
"""Microseconds that a returned cost may take to reach the store."""

KNOWN: Final = 10_000
"""Maximum number of cached refusals. Beyond it, ask the store."""


class RefusalCache:
    """Refusals that the store would repeat if it were asked again.

    Giving something back in this pod clears the entry of its key. Since other pods may give
    something back too, entries are valid only briefly. The store is asked where it is not certain
    when a larger cost would be admitted: a caller that comes back at the time it was given must not
    be refused again.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.known: dict[tuple[int, Hashable], tuple[int, float, float]] = {}
        """By limit and key: the refused cost, until when, and how long the entry is valid."""
        self._freed: dict[tuple[int, Hashable], float] = {}
        """When something was given back. Earlier refusals are no longer valid."""
        self.used = 0
        """Number of calls that were refused, or had to wait, without asking the store."""

    def note(self, limit: int, key: Hashable, cost: int, asked: float, until: float) -> None:
        """Record a cost that was refused until `until`. Times are in microseconds."""
        if self._freed:
            freed = self._freed.get((limit, key))
            if freed is not None and asked < freed + ON_ITS_WAY:
                return
            self._freed.pop((limit, key), None)
        if len(self.known) >= KNOWN and (limit, key) not in self.known:
            try:
                del self.known[next(iter(self.known))]  # the oldest
            except (StopIteration, KeyError, RuntimeError):
                pass  # another thread was faster
        self.known[limit, key] = cost, until, min(until, asked + BELIEVED)

    def free(self, limit: int, key: Hashable, now: float) -> None:
        """Remove the entry, because something is given back."""
        self.known.pop((limit, key), None)
        if len(self._freed) >= KNOWN:
            self._freed.clear()
        self._freed[limit, key] = now

    def clear(self) -> None:
        """Remove all entries."""
        self.known.clear()

    def look(self, charges: Sequence[Charge], now: float) -> Blocked | None:
        """Return why the charges would certainly be refused; None if the store must be asked."""
        if not self.known:
            return None
        first = longest = None
        most = 0.0
        for limit, charge in enumerate(charges):
            known = self.known.get((limit, charge.key)) if charge.cost else None
            if known is None:
                continue
            cost, until, believed = known
            if believed <= now:
                self.known.pop((limit, charge.key), None)
                continue
            later = _later(charge, cost)
            if later is None:
                continue
            first = first or charge
            if longest is None or until + later - now > most:
                longest, most = charge, until + later - now
        return None if first is None or longest is None else Blocked(first, longest, most)


def _later(charge: Charge, cost: int) -> float | None:
    """Return how much later the cost of `charge` is admitted than `cost`; None means ask."""
    if charge.cost == cost:
        return 0.0
    meter = charge.meter
    rule, most = meter.rule, meter.rule.capacity
    if charge.cost < cost or meter.caps or (most is not None and charge.cost > most):
        return None
    if isinstance(rule, TokenBucket):
        return rule.amount(charge.cost) - rule.amount(cost)
    return 0.0 if isinstance(rule, (LeakyBucket, FixedWindow)) else None
