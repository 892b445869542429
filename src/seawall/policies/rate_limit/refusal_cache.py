"""What a store has refused lately: refused here too, for a moment, without asking again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.windows import FixedWindow
from seawall.policies.rate_limit.meters import Blocked
from seawall.policies.rate_limit.reservation import Charge

BELIEVED: Final = 1_000_000.0
"""For so many microseconds a refusal is believed: another pod may give something back."""

ON_ITS_WAY: Final = 100_000.0
"""For so many microseconds what was given back may still be on its way to the store."""

KNOWN: Final = 10_000
"""So many keys are known to be exhausted at once; of more, the store is asked."""


class Exhausted:
    """What the store refused lately: it would refuse it again, until its time.

    Unless something is given back: what this pod gives back is known at once, and as another may,
    nothing is believed for longer than a moment. The store is asked, too, where it is not
    sure when a larger cost would be admitted: who comes back at the time that it is told is not to
    be refused once more.
    """

    def __init__(self) -> None:
        """Know of nothing."""
        self.known: dict[tuple[int, Hashable], tuple[int, float, float]] = {}
        """Of which limit and key how much, until when, and for how long that is believed."""
        self._freed: dict[tuple[int, Hashable], float] = {}
        """When something was given back: a refusal from before then says nothing any more."""
        self.used = 0
        """How often somebody was refused, or let wait, without asking the store."""

    def note(self, limit: int, key: Hashable, cost: int, asked: float, until: float) -> None:
        """Remember what was refused until an instant, and when it was asked; in microseconds."""
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
        """Know nothing of it any more: something is given back."""
        self.known.pop((limit, key), None)
        if len(self._freed) >= KNOWN:
            self._freed.clear()
        self._freed[limit, key] = now

    def clear(self) -> None:
        """Know nothing any more."""
        self.known.clear()

    def look(self, charges: Sequence[Charge], now: float) -> Blocked | None:
        """Return why the charges would surely be refused; None if it has to be asked."""
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
    """Return how much later the cost of `charge` is admitted than `cost`; None: ask."""
    if charge.cost == cost:
        return 0.0
    meter = charge.meter
    rule, most = meter.rule, meter.rule.capacity
    if charge.cost < cost or meter.caps or (most is not None and charge.cost > most):
        return None
    if isinstance(rule, TokenBucket):
        return rule.amount(charge.cost) - rule.amount(cost)
    return 0.0 if isinstance(rule, (LeakyBucket, FixedWindow)) else None
