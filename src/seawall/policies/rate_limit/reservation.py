"""Quotas and reservations: what is left of a limit, and what a call has taken from it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from seawall import _checks as check
from seawall._failures import log_failure

if TYPE_CHECKING:
    from seawall.models.rate.buckets import Account
    from seawall.models.rate.rule import RateRule
    from seawall.policies.rate_limit.meters import Meter
    from seawall.policies.rate_limit.policy import RateLimit


class Quota(NamedTuple):
    """What a limit has left for a call."""

    limit: str
    """The limit's name."""
    left: int
    """How much may be taken at once now."""
    retry_after: float | None
    """Seconds until the call would be admitted; 0 if it is now, None if it never will be."""
    reset_after: float
    """Seconds until all takings have expired."""


class Charge:
    """What one call takes, or has taken, from one limit."""

    __slots__ = (
        *("account", "asked", "at", "cost", "estimated", "key"),
        *("mark", "meter", "place", "receipt", "rule", "times"),
    )

    def __init__(
        self, meter: Meter, key: Hashable, cost: int, *, estimated: bool, times: int = 1
    ) -> None:
        """Request `cost` of the budget of `key`; `estimated` if the actual cost is known later.

        Where each of several pods counts alone, it takes `times` as much, up to the capacity.
        """
        self.meter = meter
        self.key = key
        self.place = key  # key under which the state is stored, as of the last lookup
        self.cost = self.asked = cost
        self.times = times
        if times > 1:
            most = meter.rule.capacity
            self.cost = cost * times if most is None else max(cost, min(cost * times, most))
        self.estimated = estimated
        self.mark = self.at = 0.0
        self.rule: RateRule[Any] | None = None  # the rule by which it was taken; None before that
        self.account: Account | None = None  # the account that holds it as an open estimate
        self.receipt: Any = None  # the store's receipt, shared by all charges of the call

    def again(self, times: int | None = None) -> Charge:
        """Return a copy that is not taken yet, for `times` as many pods."""
        times = self.times if times is None else times
        return Charge(self.meter, self.key, self.asked, estimated=self.estimated, times=times)

    def known(self, cost: int) -> Charge:
        """Return a copy with its actual cost: `cost` if it is estimated, else its own."""
        cost = cost if self.estimated else self.asked
        return Charge(self.meter, self.key, cost, estimated=False, times=self.times)

    @property
    def is_open(self) -> bool:
        """Whether it is an estimate with an open account."""
        return self.account is not None or (self.receipt is not None and self.estimated)

    def counted(self, actual: int) -> int:
        """Return what an `actual` cost counts here."""
        if actual > self.asked:
            return self.cost + (actual - self.asked) * self.times
        return min(actual * self.times, self.cost)


class Reservation:
    """What a call has taken from the limits, until it is settled or given back, once."""

    __slots__ = ("_asked", "_held", "_policy")

    def __init__(
        self, policy: RateLimit, charges: Sequence[Charge], asked: Sequence[Charge] | None = None
    ) -> None:
        """Hold what was taken. `asked` is what was requested, if nothing was taken for it."""
        self._policy = policy
        self._held = [charges]
        self._asked = charges if asked is None else asked

    def __repr__(self) -> str:
        charges = [charge for charges in self._held for charge in charges]
        held = ", ".join(f"{charge.asked} of {charge.meter.limit.name!r}" for charge in charges)
        return f"<Reservation of {held or 'nothing'}>"

    def quota(self) -> Quota:
        """Return what is left now of the limits that it took from, and when they reset.

        As `peek` for the same call: `retry_after` says when as much could be taken again. Shared
        limits block until the store replies: in an event loop, use `await aquota()`.
        """
        return self._policy._quota_for([charge.again() for charge in self._asked])

    async def aquota(self) -> Quota:
        """Async twin of `quota`."""
        return await self._policy._aquota_for([charge.again() for charge in self._asked])

    def settle(self, actual: int) -> None:
        """Settle an estimate by the actual cost: less is given back, more is taken.

        Raises if called twice, or if nothing was estimated.
        """
        actual = _actual("actual", actual)
        charges = self._end()
        if charges is None:
            raise RuntimeError("this reservation was settled or cancelled already")
        estimates = [charge for charge in charges if charge.estimated]
        if charges and not estimates:
            self._held.append(charges)
            raise RuntimeError(
                "nothing was estimated here: write reserve(cost=...), or cancel() to give all back"
            )
        self._policy._settle([(charge, actual) for charge in estimates])

    def cancel(self) -> None:
        """Give everything back, as if it had never been taken. Does nothing once settled."""
        self._policy._settle([(charge, 0) for charge in self._end() or ()])

    def _end(self) -> Sequence[Charge] | None:
        try:
            return self._held.pop()  # atomic: only one of two threads gets them
        except IndexError:
            return None

    def _settle_by(self, value: Any, guard: str) -> None:
        """Settle by the value that the call returned, each limit by its own `settle`."""
        settled = []
        for charge in self._end() or ():
            settle = charge.meter.limit.settle
            if settle is None:
                continue
            actual = charge.asked
            try:
                actual = _actual("settle(...)", settle(value))
            except Exception:  # noqa: BLE001 - logged
                message = "settle of guard %r failed; the estimate of %d stays"
                log_failure(message, guard, charge.asked)
            settled.append((charge, actual))
        self._policy._settle(settled)

    def _keep(self) -> None:
        """Keep the estimates permanently."""
        charges = self._end() or ()
        self._policy._settle([(charge, charge.asked) for charge in charges if charge.is_open])


def _actual(name: str, cost: int) -> int:
    """Return a valid cost, or raise. One that is too large is reduced later, with an event."""
    return check.count(name, min(cost, check.MOST) if type(cost) is int else cost, minimum=0)
