"""Rate limits for requests: by user, API key, tenant, address, or for all together.

Promises:

- A request passes all of its limits or takes from none. A request that is refused further in gives
  back what it took.
- A caller that exceeds its own limit gets 429, with the time to retry. If the limit for all callers
  together is exceeded, the response is 503. Soft limits never refuse: they alert.
- Callers get their limits and what remains, in the fields `RateLimit-Policy` and `RateLimit`.
- A request that waits further in and is refused there gives back exactly what it took, if
  `LimitGrant.open_accounts()` was called before; to a store, only what was not refilled meanwhile.

`principals` distinguishes callers. `seawall.RateLimit` counts, once for all limits of this process,
and once for all that a store keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.context import tier_var
from seawall.errors import RateLimited
from seawall.events import SoftLimitExceeded
from seawall.events.bus import emit
from seawall.models.rate.rates import ROUND
from seawall.policies.rate_limit import Limit
from seawall.policies.rate_limit.limit import Algorithm, Cost
from seawall.policies.rate_limit.sharing import OnStoreFailure, SharingKind
from seawall.runtime.driver import Steps, adrive, drive
from seawall.runtime.store import LimitStore
from seawall.web.limits.groups import (
    Header,
    LimitGrant,
    LimitGroup,
    TierLimits,
    policy_header,
    refused_header,
)
from seawall.web.principals import Principal, name_for, plain_function, principal_of
from seawall.wire.rate_fields import write_state_start

if TYPE_CHECKING:
    from seawall.web.request import Incoming

__all__ = ["RequestLimit", "RequestLimits"]

ALERT_EVERY: Final = 1.0
"""Minimum number of seconds between two events of one soft limit."""

_LONGEST_NAME: Final = 64

_SHARED: Final[WeakValueDictionary[tuple[int, str], RequestLimits]] = WeakValueDictionary()
"""The limits of this process by store and name; they hold a reference to the store, so its id is
unique."""


class RequestLimit:
    """Configuration of one request limit: rate, key and cost. Written as `RequestLimit(...)`."""

    def __init__(
        self,
        rate: str,
        *,
        by: str | Principal | None,
        otherwise: str | Principal | None = None,
        tiers: Mapping[str, str] | None = None,
        burst: int | None = None,
        algorithm: Algorithm = "token_bucket",
        cost: Cost = 1,
        soft: bool = False,
        local: bool = False,
        name: str | None = None,
    ) -> None:
        """Admit `rate`, such as "600/min", to each principal that `by` distinguishes.

        `by` is "address", "tenant", `user(...)`, `api_key(...)`, `address_and_route(...)`, or any
        function of the request; None counts all requests together. Where `by` finds no principal,
        the limit counts by `otherwise`; without it a limit by `user(...)` does not apply to the
        request, and any other limit counts by address. Requests of one of the `tiers` have that
        tier's rate instead. A request takes `cost`, a number or a function of the request. A `soft`
        limit never refuses. A `local` limit is not shared, even if the others are. `name` is the
        name that callers see; by default that of the principal.
        """
        self.by = principal_of(by)
        self.otherwise = principal_of(otherwise, "otherwise")
        if self.otherwise is not None and self.by is None:
            raise TypeError("otherwise=: by=None counts all requests together; leave it out")
        self.name = _checked_name(name or name_for(self.by) or _without_spaces(str(rate)))
        self.soft = check.flag("soft", soft)
        self.local = check.flag("local", local)
        if tiers is not None and not isinstance(tiers, Mapping):
            raise TypeError(f"tiers={tiers!r}: write rates by tier, such as {{'free': '60/min'}}")
        if callable(cost):
            plain_function("cost", cost)
        key = None if self.by is None else lambda found: found  # keys are computed before
        self.rates: dict[str | None, Limit] = {}
        """The limit of each tier; None is the key of the limit for all other requests."""
        all_rates: dict[str | None, str] = {None: rate}
        all_rates.update(tiers or {})
        for tier, own in all_rates.items():
            if tier is not None and (not isinstance(tier, str) or not tier):
                raise TypeError(f"tiers={tiers!r}: write a tier as text, such as 'free'")
            named = self.name if tier is None else f"{self.name} ({tier})"
            self.rates[tier] = Limit(
                own, burst=burst, algorithm=algorithm, key=key, cost=cost, name=named
            )
        self.text = ", ".join(
            own.text if tier is None else f"{tier}: {own.text}" for tier, own in self.rates.items()
        )
        self.is_reported = self.by is not None and not self.soft
        """Whether the limit is reported to callers."""
        self.state_start = write_state_start(self.name)

    def __repr__(self) -> str:
        soft = ", soft=True" if self.soft else ""
        other = "" if self.otherwise is None else f", otherwise={self.otherwise!r}"
        return f"RequestLimit({self.text!r}, by={self.by!r}{other}, name={self.name!r}{soft})"


class RequestLimits:
    """Several limits for requests, taken all or none."""

    def __init__(
        self,
        *limits: RequestLimit,
        tier: Callable[[Incoming], str | None] | None = None,
        headers: bool = True,
        max_keys: int = 100_000,
        shared: LimitStore | None = None,
        sharing: SharingKind = "exact",
        on_store_failure: OnStoreFailure = "local",
        name: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Apply all `limits` to requests.

        `tier(incoming)` returns the tier of a request; by default the context provides it
        (`seawall.tier`). With `headers=False`, limits are not reported to callers. Each limit keeps
        separate states for `max_keys` keys; if more are in use, the rest share one.

        With a store in `shared`, all pods with limits of this `name` count together, except for
        soft and `local` limits; so `name` is required. `sharing` and `on_store_failure` are as for
        `RateLimit`.
        """
        for given in limits:
            if not isinstance(given, RequestLimit):
                raise TypeError(f"{given!r}: write RequestLimit('600/min', by='address')")
        names = [given.name for given in limits]
        for known in names:
            if names.count(known) > 1:
                raise ValueError(
                    f"two limits are called {known!r}: write RequestLimit(..., name='other')"
                )
        if shared is None and (sharing != "exact" or on_store_failure != "local"):
            raise TypeError("sharing= and on_store_failure= are for shared limits: give shared=")
        if shared is not None and name is None:
            raise TypeError("shared=: write name='orders', too; pods with this name count together")
        self.limits = limits
        self.name = _checked_name(name or "edge")
        self._tier = None if tier is None else plain_function("tier", tier)
        self._headers = check.flag("headers", headers)
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._now = self._clock.now
        hard = [given for given in limits if not given.soft]
        apart = [given for given in hard if shared is None or given.local]
        together = [given for given in hard if given not in apart]
        self._counted = {given.name: given.text for given in together}
        if shared is not None:
            self._share_name(shared)
        self._local = self._group(apart, max_keys)
        options = {"sharing": sharing, "on_store_failure": on_store_failure}
        self._shared = self._group(together, max_keys, shared=shared, name=self.name, **options)
        made = [self._group([given], max_keys) for given in limits if given.soft]
        self._soft = [group for group in made if group is not None]
        registry.enter(self, "request_limits", self.name)
        self._alerted: dict[str, float] = {}
        self._failing: set[str] = set()
        """Soft limits whose functions fail: logged once, and no request is refused."""
        self.uses_store = self._shared is not None
        """Whether a store is used: then `admit` blocks, and an event loop needs `aadmit`."""
        tiers = {None: None, **{known: None for given in limits for known in given.rates}}
        self._plans = {known: self._plan(known) for known in tiers}
        self._other = self._plans[None]

    def __repr__(self) -> str:
        return f"RequestLimits({', '.join(map(repr, self.limits))}, name={self.name!r})"

    def _share_name(self, store: LimitStore) -> None:
        """Ensure that limits of one name on one store are the same: else their counts would mix."""
        known = _SHARED.setdefault((id(store), self.name), self)
        if known._counted != self._counted:
            raise ValueError(
                f"name={self.name!r}: this process has other limits of that name on the same store:"
                f" {known._counted}; write another name"
            )

    def _group(
        self, limits: Sequence[RequestLimit], max_keys: int, **shared: Any
    ) -> LimitGroup | None:
        if not limits:
            return None
        return LimitGroup(self.name, self._clock, limits, max_keys=max_keys, shared=shared or None)

    def _plan(self, tier: str | None) -> _TierPlan:
        local = None if self._local is None else self._local.for_tier(tier)
        shared = None if self._shared is None else self._shared.for_tier(tier)
        entries = [
            entry
            for tier_limits in (local, shared)
            if tier_limits is not None
            for entry in tier_limits.entries
        ]
        policy = policy_header((entry.limit, entry.rate) for entry in entries)
        soft = tuple(group.for_tier(tier) for group in self._soft)
        return _TierPlan(local, shared, soft, policy if self._headers else None, self.limits)

    def admit(self, incoming: Incoming) -> LimitGrant:
        """Take the cost of a request from all of its limits, or raise `RateLimited`.

        If a store is used (`uses_store`), this blocks until it has answered.
        """
        tier = tier_var.get() if self._tier is None else self._tier(incoming)
        plan = self._other if tier is None else self._plans.get(tier, self._other)
        granted = self._take_local(plan, incoming)
        if plan.shared is not None:
            gate = plan.shared.group.gate
            drive(_take_shared(plan, granted, incoming), lambda question: gate.ask_sync(*question))
        if plan.soft:
            self._watch(plan, incoming, granted)
        return granted

    async def aadmit(self, incoming: Incoming) -> LimitGrant:
        """Async twin of `admit`."""
        tier = tier_var.get() if self._tier is None else self._tier(incoming)
        plan = self._other if tier is None else self._plans.get(tier, self._other)
        granted = self._take_local(plan, incoming)
        if plan.shared is not None:
            gate = plan.shared.group.gate
            taking = _take_shared(plan, granted, incoming)
            await adrive(taking, lambda question: gate.ask_async(*question))
        if plan.soft:
            self._watch(plan, incoming, granted)
        return granted

    def _take_local(self, plan: _TierPlan, incoming: Incoming) -> LimitGrant:
        """Take from the limits of this process: most requests do it without the lock."""
        tier_limits = plan.local
        if tier_limits is None:
            granted = LimitGrant(None, None, None)
        else:
            taken = None
            if tier_limits.quick is not None:
                us = self._now() * 1e6 + ROUND - ROUND  # inlined copy of `whole_microseconds`
                taken = tier_limits.quick(us, incoming)
            if taken is not None:
                granted = LimitGrant(tier_limits, taken[0], (us, taken[1]))
            else:
                try:
                    granted = tier_limits.group.take(tier_limits, incoming)
                except RateLimited as error:
                    plan.describe(error)
                    raise
        granted.policy_header = plan.policy
        return granted

    def _watch(self, plan: _TierPlan, incoming: Incoming, granted: LimitGrant) -> None:
        """Count an admitted request in the soft limits, and alert if it exceeds one."""
        for tier_limits in plan.soft:
            name, now = tier_limits.entries[0].limit.name, self._now()
            try:
                held = tier_limits.group.take_soft(tier_limits, incoming)
            except Exception:
                if name not in self._failing:
                    import logging

                    self._failing.add(name)
                    logging.getLogger("seawall").exception("soft limit %r fails: not counted", name)
                continue
            if held is not None:
                granted.others += (held,)
                continue
            if now >= self._alerted.get(name, float("-inf")) + ALERT_EVERY:
                self._alerted[name] = now
                emit(SoftLimitExceeded, self.name, limit=name)

    def snapshot(self) -> dict[str, Any]:
        """Return the limits, how many requests exceeded each, and how many keys are counted."""
        shown: dict[str, Any] = {"limits": {}, "soft": {}}
        for group in (self._local, self._shared):
            if group is not None:
                seen = group.snapshot()
                shown["limits"].update(seen.pop("limits"))
                shown.update(seen)
        for group in self._soft:
            shown["soft"].update(group.snapshot()["limits"])
        return shown


@dataclass(frozen=True, slots=True)
class _TierPlan:
    """The limits and headers for requests of one tier."""

    local: TierLimits | None
    shared: TierLimits | None
    soft: tuple[TierLimits, ...]
    policy: Header | None
    """The header with the limits; None if limits are not reported to callers."""
    limits: tuple[RequestLimit, ...]
    """All limits, of any tier."""

    def describe(self, error: BaseException) -> None:
        """Add the headers for the caller to a refusal."""
        if self.policy is not None and isinstance(error, RateLimited):
            over = refused_header(error, self.limits)
            error.headers = (self.policy,) if over is None else (self.policy, over)


def _take_shared(plan: _TierPlan, granted: LimitGrant, incoming: Incoming) -> Steps[None]:
    """Take from the limits in the store; if that fails, give back what was `granted` here."""
    tier_limits: Any = plan.shared
    try:
        granted.others = ((yield from tier_limits.group.take_shared(tier_limits, incoming)),)
    except BaseException as error:
        granted.cancel()
        plan.describe(error)
        raise


def _without_spaces(rate: str) -> str:
    """Return a rate as a name: "10/min" for "10 / min", "600-per-minute" for "600 per minute"."""
    return "/".join("-".join(piece.split()) for piece in rate.split("/"))


def _checked_name(name: object) -> str:
    """Return `name` if it fits into a field unchanged, else raise `ValueError`."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _LONGEST_NAME
        or not all(" " < letter < "\x7f" and letter not in '"\\' for letter in name)
    ):
        raise ValueError(
            f"name={name!r}: write 1 to {_LONGEST_NAME} letters, digits and signs without spaces"
            " and quotes, such as name='user'"
        )
    return name
