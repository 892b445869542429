"""A rate limit inside one guard: the gates, and the success path that takes no lock."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from seawall.errors import DeadlineExceeded, RateLimited
from seawall.models.rates import ROUND, whole_microseconds
from seawall.policies._rate_charges import Charge
from seawall.policies._rate_lock import Blocked
from seawall.policies._rate_meters import Meter
from seawall.policies._rate_reservation import Reservation
from seawall.policies._rate_settings import Key
from seawall.policies._rate_waiting import RateWaiter
from seawall.runtime.call import STREAMED
from seawall.runtime.gil import LOCK_FREE
from seawall.runtime.layers import OK, UNUSED, Host, Inline, Outcome, Wait
from seawall.runtime.policy import GateBound

if TYPE_CHECKING:
    from seawall.policies.rate_limit import RateLimit


class RateGate(GateBound):
    """The rate limit inside one guard."""

    policy: RateLimit

    def __init__(self, policy: RateLimit, host: Host) -> None:
        super().__init__(policy, host)
        self.takes_arguments = any(limit._wants_arguments for limit in policy.limits)
        self.settles = any(limit.settle is not None for limit in policy.limits)
        meters = policy._meters.all
        if LOCK_FREE and all(meter.plain and meter.limit.key is None for meter in meters):
            self.inline = _inline(meters)

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take what the call costs, refuse it, or let it wait."""
        return self.ask(self.policy._charges(args, kwargs), now)

    def ask(self, charges: Sequence[Charge], now: float) -> object:
        """Do the same for charges, under the lock."""
        policy = self.policy
        meters = policy._meters
        us = whole_microseconds(now)
        with meters.mutex, meters:
            blocked = meters.look(charges, us)
            if blocked is None:
                meters.take(charges, us)
        if blocked is None:
            return self.ticket(charges)
        if policy.mode == "enforce" and policy.max_wait:
            waiter = RateWaiter(self, charges, now)
            error = waiter.hopeless(blocked, now)
            if error is None:
                raise Wait(waiter)
            try:
                self.refuse(error)
            finally:
                del error  # or its own frame would keep it alive
        else:
            self.refuse(self.over(blocked, now))
        return None

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Give back what was not used, settle what is known now; a call that was sent keeps it.

        A bucket that is one number gives back only what it cannot have refilled meanwhile: nothing
        for a call that waited further in for longer than its cost takes to refill.
        """
        if outcome is UNUSED:
            if isinstance(ticket, float):
                ticket = self._quick(((meter, None) for meter in self.policy._meters.all), ticket)
            if ticket is not None:
                ticket.cancel()
        elif self.settles and ticket is not None:
            if outcome is OK and detail is not STREAMED:
                ticket._settle_by(detail, self.host.name)
            else:
                ticket._keep()

    def ticket(self, charges: Sequence[Charge]) -> Reservation:
        """Return the ticket of a call that has taken `charges`."""
        return Reservation(self.policy, charges)

    def _quick(self, places: Iterable[tuple[Meter, Hashable]], mark: float) -> Reservation:
        """Return what the success path took, at `mark`."""
        charges = []
        for meter, place in places:
            charge = Charge(meter, place, meter.limit._cost_of((), {}), estimated=False)
            charge.mark = charge.at = mark
            # In this order: `update` changes `since` first, so by a rule of now it was taken now.
            rule = meter.rule
            charge.rule = rule if mark > meter.since else None
            charges.append(charge)
        return self.ticket(charges)

    def over(self, blocked: Blocked, now: float, why: str = "") -> RateLimited:
        """Return the refusal."""
        return self.policy._over(blocked, now, why, f"guard {self.host.name!r}: ")

    def late(self, blocked: Blocked) -> DeadlineExceeded:
        """Return the refusal of a call that has no time to wait."""
        name = blocked.first.meter.limit.name
        return DeadlineExceeded(
            f"guard {self.host.name!r}: the deadline leaves no time to wait for the limit {name!r}"
        )

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the limits, what is left of them, and who waits."""
        meters = self.policy._meters
        us = whole_microseconds(now)
        limits = {}
        with meters.mutex, meters:
            for meter in meters.all:
                shown: dict[str, Any] = {"limit": meter.limit.text}
                limits[meter.limit.name] = shown
                if meter.limit.key is None:
                    shown["left"] = meter.standing(None, us)[0]
                else:
                    shown["keys"] = meter.keys
        return {
            **super().snapshot(now),
            "reserve_rejected": self.policy._reserve_rejected,
            "waiting": meters.waiting,
            "limits": limits,
        }


class KeyedRateGate(RateGate):
    """One token or leaky bucket for each key, with the same cost for all calls."""

    def __init__(self, policy: RateLimit, host: Host, meter: Meter) -> None:
        super().__init__(policy, host)
        self._meter = meter
        self._states = meter.states
        self._key: Key = meter.limit._ask_key or (lambda: None)
        names = {"key": self._key, "meter": meter, "states": meter.states, "slowly": self._slowly}
        arguments = "{arguments}" if self.takes_arguments else ""
        self.inline = Inline(
            names={**names, "str": str, "KeyError": KeyError},
            enter=(
                f"{{own}} = {{key}}({arguments})",
                "if type_({own}) is {str}:",
                f"    {{us}} = now_ * 1e6 + {ROUND!r} - {ROUND!r}",
                "    try:",
                "        {tat} = {states}[{own}]",
                "        if {tat} < {us}:",
                "            {tat} = {us}",
                "        {tat} += {meter}.step",
                "        if {tat} - {us} <= {meter}.slack:",
                "            {states}[{own}] = {tat}",
                "            {ticket} = {own}, {us}",
                "    except {KeyError}:",
                "        pass",
                "if {ticket} is ABSENT_:",
                "    {ticket} = {slowly}({own}, now_)",
            ),
            leave=(),
        )

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take what the call costs, refuse it, or let it wait."""
        meter, states = self._meter, self._states
        key = self._key(*args, **kwargs)
        if type(key) is str:
            us = whole_microseconds(now)
            try:
                # From here on nothing can interrupt: no call, no loop, and text is compared
                # without running Python. So what is read is still true when it is written.
                tat = states[key]
                if tat < us:  # noqa: PLR1730 - max() would be a call
                    tat = us
                tat += meter.step
                if tat - us <= meter.slack:
                    states[key] = tat
                    return key, us
            except KeyError:
                pass
        return self._slowly(key, now)

    def _slowly(self, key: Hashable, now: float) -> object:
        """Do the same under the lock."""
        limit = self._meter.limit
        key = limit._check_key(key)
        return self.ask([Charge(self._meter, key, limit._cost_of((), {}), estimated=False)], now)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Give back what was not used."""
        if outcome is UNUSED and isinstance(ticket, tuple):
            key, mark = ticket
            ticket = self._quick([(self._meter, key)], mark)
        super().leave(ticket, outcome, detail, now)


def _inline(meters: Sequence[Meter]) -> Inline:
    """Return the success path of buckets without keys: ask all, then take from all.

    Between reading and writing there is no call and no loop, so nothing can interrupt.
    """
    numbers = range(len(meters))
    ask, take = [], []
    for n in numbers:
        ask += [
            f"{{tat_{n}}} = {{meter_{n}}}.tat",
            f"if {{tat_{n}}} < {{us}}:",
            f"    {{tat_{n}}} = {{us}}",
            f"{{tat_{n}}} += {{meter_{n}}}.step",
        ]
        take.append(f"    {{meter_{n}}}.tat = {{tat_{n}}}")
    fits = " and ".join(f"{{tat_{n}}} - {{us}} <= {{meter_{n}}}.slack" for n in numbers)
    return Inline(
        names={f"meter_{n}": meters[n] for n in numbers},
        enter=(
            f"{{us}} = now_ * 1e6 + {ROUND!r} - {ROUND!r}",
            *ask,
            f"if {fits}:",
            *take,
            "    {ticket} = {us}",
            "else:",
            "    {ticket} = {enter}(now_)",
        ),
        leave=(),
    )
