"""What one call takes from one limit, and those who wait for the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from seawall.models.rate_accounts import Account
from seawall.models.rate_rule import Rule

if TYPE_CHECKING:
    from seawall.policies._rate_meters import Meter
    from seawall.policies._rate_waiting import RateWaiter


class Charge:
    """What one call takes, or has taken, from one limit."""

    __slots__ = (
        *("account", "asked", "at", "cost", "estimated", "key"),
        *("mark", "meter", "place", "receipt", "rule", "times"),
    )

    def __init__(
        self, meter: Meter, key: Hashable, cost: int, *, estimated: bool, times: int = 1
    ) -> None:
        """Want `cost` of what `key` may have; `estimated` if the actual cost is told later.

        Where each of several pods counts alone it takes so many `times` as much, up to all.
        """
        self.meter = meter
        self.key = key
        self.place = key
        """Where the state is kept, as of the last look."""
        self.cost = self.asked = cost
        self.times = times
        if times > 1:
            most = meter.rule.capacity
            self.cost = cost * times if most is None else max(cost, min(cost * times, most))
        self.estimated = estimated
        self.mark = self.at = 0.0
        self.rule: Rule[Any] | None = None
        """The rule by which it was taken; None while it is not."""
        self.account: Account | None = None
        """Where it is an open estimate."""
        self.receipt: Any = None
        """Where it was taken in a store, with all other charges of the call."""

    def again(self) -> Charge:
        """Return the same, not taken yet."""
        return Charge(self.meter, self.key, self.asked, estimated=self.estimated, times=self.times)

    def known(self, cost: int) -> Charge:
        """Return the same with its actual cost: `cost` if it is estimated, else its own."""
        cost = cost if self.estimated else self.asked
        return Charge(self.meter, self.key, cost, estimated=False, times=self.times)

    @property
    def is_open(self) -> bool:
        """Whether it is an estimate that somebody keeps account of."""
        return self.account is not None or (self.receipt is not None and self.estimated)

    def counted(self, actual: int) -> int:
        """Return what an `actual` cost counts here."""
        if actual > self.asked:
            return self.cost + (actual - self.asked) * self.times
        return min(actual * self.times, self.cost)


class Lane:
    """Those who wait for the same, in the order in which they came."""

    __slots__ = ("total", "waiters")

    def __init__(self) -> None:
        # Whoever leaves from the middle costs no more than who is served.
        self.waiters: OrderedDict[RateWaiter, None] = OrderedDict()
        self.total = 0
        """What they want, together."""

    @property
    def first(self) -> RateWaiter:
        """Whose turn is next."""
        return next(iter(self.waiters))

    def ahead(self, waiter: RateWaiter | None) -> int:
        """Return what those want who came before `waiter`; before a newcomer, if None."""
        if waiter is None or waiter.number > next(reversed(self.waiters)).number:
            return self.total
        ahead = 0
        for other in self.waiters:
            if other.number >= waiter.number:
                break
            ahead += other.wants
        return ahead

    def join(self, waiter: RateWaiter) -> None:
        """Let `waiter` wait behind all who began to wait before it."""
        newer = []
        for other in reversed(self.waiters):
            if other.number < waiter.number:
                break
            newer.append(other)
        self.waiters[waiter] = None
        self.total += waiter.wants
        if newer:
            for other in reversed(newer):
                self.waiters.move_to_end(other)
