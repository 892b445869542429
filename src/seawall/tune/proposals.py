"""What to set instead: rules from measurements to settings, each with its reason. Pure.

Promises:
- Too few samples are refused, with how many there are and how many are needed.
- Attempts are only lowered, and budgets only added or made smaller. A retry or a hedge is never
  added.
- While the dependency fails, or its breaker is not closed, nothing is proposed that could add load
  to it: no longer timeout, no larger limit, no slower breaker. While it may hang, no larger limit
  and no slower breaker.
- Policies that pods share, and those with keys or costs of their own, are left alone: the numbers
  of one pod say nothing about them. So are settings that TOML cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, comb, floor, log, log10, sqrt
from typing import Any, Final, NamedTuple

from seawall.models.rate.rates import Rate
from seawall.tune.measurements import Measurement, Table

ENOUGH: Final = 1000  # samples below which nothing is proposed: ten of them are above the p99
ENOUGH_FOR_P999: Final = 10_000  # samples from which the p99.9 is used
FAR_ABOVE: Final = 2.0  # how many times what is needed a timeout may be
MUCH_LARGER: Final = 4  # how many times what is needed a limit may be
REFUSED: Final = 0.005  # share of the calls that a limit may refuse while the dependency is well
FALSE_TIMEOUTS: Final = 0.005  # share of attempts that may time out while the dependency is well
USUAL_ATTEMPTS: Final = 3
USUAL_MIN_CALLS: Final = 20
MIN_CALLS: Final = (20, 50, 100, 200)
TOO_OFTEN: Final = 1e-6  # chance, for each decision, that a breaker opens for nothing

LONGEST_WINDOW: Final = 600.0
EARLY: Final = 0.1  # share of the calls that may still be running when they are hedged

HEDGE_CAP: Final = 0.05

ORDER: Final = (
    *("fallback", "cache", "shed", "timeout", "retry", "hedge", "breaker", "throttle"),
    *("rate_limit", "bulkhead", "adaptive_limit", "thread_bulkhead"),
)
"""The recommended order; the timeout of an attempt follows."""

_LIMITS: Final = ("bulkhead", "adaptive_limit", "thread_bulkhead")
_PRIVATE: Final = ("shared", "key", "cost", "settle", "partitions")
"""Settings with which a policy is left alone."""

FAILS: Final = "; but the dependency fails, and a larger limit would add load to it"

Settings = dict[str, Any]


class Proposal(NamedTuple):
    """Other settings for one policy, or for a pool."""

    guard: str
    policy: str
    """Its kind: "timeout", "breaker" ..., or "pool"."""
    place: int
    """Its place in today's stack; that before which it is added, if it is not there yet."""
    added: bool
    before: Settings
    after: Settings
    reason: str
    samples: int

    @property
    def words(self) -> str:
        """The change in a few words: "seconds 30 -> 0.62"."""
        if self.added and not self.before:
            listed = ", ".join(f"{name} {shown(one)}" for name, one in self.after.items())
            return f"add it: {listed}"
        return ", ".join(
            f"{name} {shown(self.before.get(name))} -> {shown(value)}"
            for name, value in self.after.items()
        )


class Refusal(NamedTuple):
    """Why nothing is proposed for a guard, or for one of its policies."""

    guard: str
    policy: str
    """Empty if it is about the whole guard."""
    reason: str


class TuningAdvice(NamedTuple):
    """What the rules say about one guard or pool."""

    proposals: list[Proposal]
    refusals: list[Refusal]


Found = Iterator[Proposal | Refusal]


def propose(measured: Measurement) -> TuningAdvice:
    """Return better settings for a guard or pool, or why there are none."""
    found = list(_found(measured))
    return TuningAdvice(
        [one for one in found if isinstance(one, Proposal)],
        [one for one in found if isinstance(one, Refusal)],
    )


def apply(table: Table, proposals: Sequence[Proposal]) -> dict[str, Any]:
    """Return today's settings with all `proposals` in them."""
    policies = [dict(policy) for policy in table.get("policies", ())]
    for one in proposals:
        if not one.added:
            policies[one.place] |= one.after
    places = list(range(len(policies)))
    for one in sorted(proposals, key=_inwards):
        if one.added:
            at = places.index(one.place) if one.place in places else len(policies)
            policies.insert(at, {"policy": one.policy, **one.after})
            places.insert(at, -1)
    return {**table, "policies": policies}


def _inwards(proposal: Proposal) -> tuple[int, int]:
    """Return the key that sorts added policies from the outermost to the innermost."""
    is_last = proposal.policy == "timeout"
    return proposal.place, len(ORDER) if is_last else ORDER.index(proposal.policy)


def shown(value: Any) -> str:
    """Return a setting for people."""
    if value is None:
        return "none"
    if value is True:
        return "on"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key}={shown(one)}" for key, one in value.items() if key != "kind")
        return f"{value.get('kind', '')}({rest})"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    return str(value)


def _found(measured: Measurement) -> Found:
    if measured.samples < ENOUGH:
        reason = f"{measured.samples} calls were measured, {ENOUGH} are needed"
        yield Refusal(measured.name, "", reason)
    elif measured.rate <= 0:
        reason = "how long the counts cover is not known: pass --span SECONDS"
        yield Refusal(measured.name, "", reason)
    elif measured.kind == "pool":
        yield from _pool(measured)
    elif measured.table is None:
        yield from _stack(measured)
    else:
        for rule in _RULES:
            for found in rule(measured, measured.table["policies"]):
                yield _without_unwritten(found, measured.table.get("unwritten", ()))


def _without_unwritten(found: Proposal | Refusal, unwritten: Sequence[str]) -> Proposal | Refusal:
    """Refuse a change of settings that TOML cannot hold: today's values are not known."""
    if isinstance(found, Refusal) or found.added:
        return found
    names = {found.policy, *(f"{found.policy}: {name}" for name in found.after)}
    if names.isdisjoint(unwritten):
        return found
    reason = "today's settings are an object of your own, which cannot be compared"
    return Refusal(found.guard, found.policy, reason)


# Timeouts


def _timeout(measured: Measurement, policies: Sequence[Table]) -> Found:
    places = [at for at, policy in enumerate(policies) if policy["policy"] == "timeout"]
    retry = _place(policies, "retry")
    inner = [at for at in places if retry is None or at > retry]
    wanted, why = _wanted_timeout(measured)
    if _is_beyond(measured):
        longest = seconds(measured.longest_known)
        reason = f"calls take longer than {longest}, and how much longer is not measured"
        yield Refusal(measured.name, "timeout", reason)
        return
    if not inner:
        if places:
            return  # a total timeout only; there may be a reason for that
        after = {"seconds": wanted}
        yield _added(measured, policies, "timeout", after, f"there is none; {why}")
        return
    at = inner[-1]
    today = policies[at].get("seconds")
    if not isinstance(today, (int, float)):
        return  # adaptive
    outer = [policies[place].get("seconds") for place in places if place < at]
    most = min((one for one in outer if isinstance(one, (int, float))), default=None)
    if today > FAR_ABOVE * wanted and measured.timing_out <= FALSE_TIMEOUTS:
        yield _changed(measured, policies, at, {"seconds": wanted}, why)
    elif measured.timing_out > FALSE_TIMEOUTS:
        yield from _longer_timeout(measured, policies, at, float(today), most)


def _longer_timeout(
    measured: Measurement, policies: Sequence[Table], at: int, today: float, most: float | None
) -> Found:
    share = f"{measured.timing_out:.1%} of {number(measured.attempts)} attempts time out"
    if measured.is_failing:
        reason = f"{share}, and the dependency fails: a longer timeout would add load to it"
        yield Refusal(measured.name, "timeout", reason)
        return
    without = measured.without_timeout(today)
    if without is None:
        reason = (
            f"{share}: too many to tell what they would have taken; raise it by hand, and ask again"
        )
        yield Refusal(measured.name, "timeout", reason)
        return
    typical = without.quantile(0.999)
    wanted = rounded(min(1.2 * typical, 10 * today, most or typical * 10))
    if wanted > 1.2 * today:
        why = f"{share}; without it, the p99.9 would be about {seconds(typical)}"
        yield _changed(measured, policies, at, {"seconds": wanted}, why)


def _wanted_timeout(measured: Measurement) -> tuple[float, str]:
    p = _slow_share(measured)
    factor = 1.5 if measured.samples >= ENOUGH_FOR_P999 else 2.5
    value = measured.quantile(p)
    why = f"p{100 * p:g} of {number(measured.samples)} calls is {seconds(value)}"
    return rounded(max(0.01, factor * value)), why


def _slow_share(measured: Measurement) -> float:
    """Return the share of the calls that a timeout is for."""
    return 0.999 if measured.samples >= ENOUGH_FOR_P999 else 0.99


def _is_beyond(measured: Measurement) -> bool:
    """Return whether the slow calls are beyond the longest duration that is measured."""
    return measured.quantile(_slow_share(measured)) >= measured.longest_known


# Retries


def _attempts(measured: Measurement, policies: Sequence[Table]) -> Found:
    at = _place(policies, "retry")
    today = None if at is None else policies[at].get("attempts", USUAL_ATTEMPTS)
    if at is None or not isinstance(today, int) or today <= USUAL_ATTEMPTS:
        return
    failed = min(0.5, max(1e-4, measured.failed / max(1.0, measured.attempts)))
    needed = min(USUAL_ATTEMPTS, max(2, ceil(log(1e-3) / log(failed))))
    why = (
        f"{failed:.1%} of {number(measured.attempts)} attempts fail; {needed} attempts leave"
        f" {failed**needed:.2g} of the calls, and more are only load when it is down"
    )
    yield _changed(measured, policies, at, {"attempts": needed}, why)


def _budget(measured: Measurement, policies: Sequence[Table]) -> Found:
    at = _place(policies, "retry")
    if at is None or policies[at].get("attempts", USUAL_ATTEMPTS) == 1:
        return
    failed = min(0.3, measured.failed / max(1.0, measured.attempts))
    earned = 1.5 * failed / (1 - failed)
    today = policies[at].get("budget")
    share = f"{failed:.1%} of {number(measured.attempts)} attempts fail"
    if not today:
        after: Any = True
        if earned > 0.1 and not measured.is_in_trouble:  # noqa: PLR2004 - the default's
            after = {"kind": "success_deposit", "ratio": rounded(earned)}
        why = f"{share}; without a budget, every call is retried when it is down"
        yield _changed(measured, policies, at, {"budget": after}, why)
    elif isinstance(today, Mapping) and today.get("kind") == "request_ratio":
        ratio = today.get("ratio", 0.2)
        wanted = rounded(max(0.1, earned))
        if ratio > 2 * wanted:
            after = {**today, "ratio": wanted}
            why = f"{share}; {ratio:g} of the requests may be retries, {wanted:g} are enough"
            yield _changed(measured, policies, at, {"budget": after}, why)


# Breakers


def _breaker(measured: Measurement, policies: Sequence[Table]) -> Found:
    at = _place(policies, "breaker")
    if at is None:
        after = _usual_breaker(measured)
        why = f"there is none; {_in_window(measured, after)}"
        yield _added(measured, policies, "breaker", after, why)
        return
    today = policies[at]
    if _is_private(today) or "window_calls" in today:
        return
    if "consecutive" in today and "failure_ratio" not in today:
        yield from _consecutive(measured, policies, at)
        return
    ratio = today.get("failure_ratio", 0.5)
    window, least = today.get("window", 30.0), today.get("min_calls", USUAL_MIN_CALLS)
    usual = measured.failing + measured.timing_out
    inside = measured.rate * window
    if inside < least:
        wanted = rounded(2 * least / measured.rate)
        rate = f"{measured.rate:.3g} calls a second are {inside:.3g} in {window:g} s"
        why = f"{rate}: it can never open"
        if wanted <= LONGEST_WINDOW:
            yield _changed(measured, policies, at, {"window": wanted}, why)
        return
    opened = _opened(measured, at)
    if opened and usual < ratio / 2 and _false_trips(usual, ratio, least) > TOO_OFTEN:
        if measured.is_in_trouble:
            reason = "the dependency fails: a breaker that opens later would add load to it"
            yield Refusal(measured.name, "breaker", reason)
            return
        enough = (one for one in MIN_CALLS if _false_trips(usual, ratio, one) <= TOO_OFTEN)
        wanted_calls = next(enough, MIN_CALLS[-1])
        after = {"min_calls": max(least, wanted_calls)}
        if measured.rate * window < 2 * wanted_calls:
            after["window"] = rounded(2 * wanted_calls / measured.rate)
        why = (
            f"it opened {opened} times while {usual:.1%} of"
            f" {number(measured.attempts)} attempts failed: {least} calls are too few to judge by"
        )
        yield _changed(measured, policies, at, after, why)


def _consecutive(measured: Measurement, policies: Sequence[Table], at: int) -> Found:
    usual = min(0.5, max(1e-6, measured.failing + measured.timing_out))
    today = policies[at]["consecutive"]
    wanted = ceil(log(TOO_OFTEN) / log(usual))
    opened = _opened(measured, at)
    if today < wanted and opened and not measured.is_in_trouble:
        why = (
            f"it opened {opened} times while {usual:.1%} of {number(measured.attempts)} attempts"
            f" failed: {today} in a row happen by chance"
        )
        yield _changed(measured, policies, at, {"consecutive": wanted}, why)


def _usual_breaker(measured: Measurement) -> Settings:
    window = min(LONGEST_WINDOW, max(10.0, rounded(2 * USUAL_MIN_CALLS / measured.rate)))
    return {
        "window": window,
        "min_calls": USUAL_MIN_CALLS,
        "break_for": {"kind": "growing", "base": 0.25, "cap": 1.0},
        "probes": {"kind": "slow_start"},
    }


def _in_window(measured: Measurement, breaker: Settings) -> str:
    window = breaker["window"]
    return f"{number(measured.rate * window)} calls come in {window:g} s"


def _opened(measured: Measurement, at: int) -> int:
    if at >= len(measured.policies):
        return 0
    transitions = measured.policies[at].get("transitions")
    return int(transitions.get("open", 0)) if isinstance(transitions, Mapping) else 0


def _false_trips(failing: float, ratio: float, calls: int) -> float:
    """Return the chance that so many of `calls` fail that a breaker opens."""
    least = ceil(ratio * calls)
    rest = 1 - failing
    return sum(
        comb(calls, count) * failing**count * rest ** (calls - count)
        for count in range(least, calls + 1)
    )


# Limits


def _limit(measured: Measurement, policies: Sequence[Table]) -> Found:
    wanted, why = _wanted_slots(measured)
    found = [at for at, policy in enumerate(policies) if policy["policy"] in _LIMITS]
    if not found:
        yield _added(measured, policies, "bulkhead", {"limit": wanted}, f"there is none; {why}")
        return
    for at in found:
        yield from _slots(measured, policies, at, wanted, why)


def _slots(
    measured: Measurement, policies: Sequence[Table], at: int, wanted: int, why: str
) -> Found:
    kind = policies[at]["policy"]
    if _is_private(policies[at]) or kind == "thread_bulkhead":
        return
    name, limit = "limit", policies[at].get("limit")
    if kind == "adaptive_limit":
        limit = dict(limit or {"kind": "vegas"})
        today = limit.get("maximum", 1000 if limit["kind"] == "vegas" else 200)
        wanted, fitting = 2 * wanted, {**limit, "maximum": 2 * wanted}
        after: Settings = {name: fitting}
    else:
        today, after = int(limit or 0), {name: wanted}
    share = _refused(measured, at)
    if share > REFUSED and today < wanted:
        refusals = f"{share:.1%} of {number(measured.calls)} calls were refused; {why}"
        if measured.is_in_trouble:
            yield Refusal(measured.name, kind, refusals + FAILS)
        else:
            yield _changed(measured, policies, at, after, refusals)
    elif kind == "bulkhead" and today > MUCH_LARGER * wanted and share <= REFUSED:
        yield _changed(measured, policies, at, after, f"{why}; {today} bound nothing")


def _wanted_slots(measured: Measurement) -> tuple[int, str]:
    """Return how many calls may be in flight: for twice the calls, and what chance adds."""
    busy = measured.attempt_rate * measured.mean
    wanted = max(4, ceil(2 * busy + 3 * sqrt(2 * busy)))
    why = (
        f"{measured.attempt_rate:.3g} attempts a second of {seconds(measured.mean)}"
        f" ({number(measured.samples)} measured) keep {busy:.2g} in flight, twice the load at most"
        f" {wanted}"
    )
    return wanted, why


def _rate_limit(measured: Measurement, policies: Sequence[Table]) -> Found:
    at = _place(policies, "rate_limit")
    if at is None or _is_private(policies[at]):
        return
    limits = policies[at].get("limits", [])
    share = _refused(measured, at)
    if len(limits) != 1 or not isinstance(limits[0], str) or share <= REFUSED:
        return
    rate = Rate.parse(limits[0])
    today = rate.limit / (rate.period / 1e6)
    wanted = ceil(rounded(1.5 * measured.attempt_rate))
    if today >= wanted:
        return
    refusals = f"{share:.1%} of {number(measured.calls)} calls were refused"
    refusals += f", at {measured.rate:.3g} a second"
    if measured.is_in_trouble:
        yield Refusal(measured.name, "rate_limit", refusals + FAILS)
        return
    why = f"{refusals}, and {measured.failing:.1%} of the attempts failed; keep it if it is a quota"
    yield _changed(measured, policies, at, {"limits": [f"{wanted}/s"]}, why)


def _refused(measured: Measurement, at: int) -> float:
    if at >= len(measured.policies):
        return 0.0
    return float(measured.policies[at].get("rejected") or 0) / max(1.0, measured.calls)


# Hedges


def _hedge(measured: Measurement, policies: Sequence[Table]) -> Found:
    at = _place(policies, "hedge")
    if at is None:
        return
    delay, cap = policies[at].get("delay"), policies[at].get("cap", HEDGE_CAP)
    if not isinstance(delay, (int, float)):
        return  # it follows the latency
    early = measured.slower_than(delay)
    if early > EARLY:
        after: Settings = {"delay": {"kind": "quantile", "p": 0.95}}
        if cap > HEDGE_CAP:
            after["cap"] = HEDGE_CAP
        why = (
            f"{early:.0%} of {number(measured.samples)} calls take longer than {seconds(delay)};"
            f" the slow ones are those above the p95 of {seconds(measured.quantile(0.95))}"
        )
        yield _changed(measured, policies, at, after, why)


# Pools, and guards whose settings are not known


def _pool(measured: Measurement) -> Found:
    assert measured.table is not None  # noqa: S101 - for the type checker
    today = measured.table["max_size"]
    busy = measured.rate * measured.mean
    wanted = max(2, ceil(2 * busy + 3 * sqrt(2 * busy)))
    why = (
        f"{measured.rate:.3g} borrowers a second for {seconds(measured.mean)}"
        f" ({number(measured.samples)} measured) use {busy:.2g}, twice as many at most {wanted}"
    )
    share = measured.rejected / max(1.0, measured.calls)
    if share > REFUSED and today < wanted:
        if measured.is_in_trouble:
            reason = "connections fail: more of them would add load to the server"
            yield Refusal(measured.name, "pool", reason)
            return
        why = f"{share:.1%} of {number(measured.calls)} borrowers got none; {why}"
    elif today <= MUCH_LARGER * wanted or share > REFUSED or not measured.seconds:
        return  # without a span, the last seconds are all that is known, and they may be quiet
    yield _proposal(measured, "pool", 0, {"max_size": wanted}, why, {"max_size": today})


def _stack(measured: Measurement) -> Found:
    """Propose the recommended stack for a guard whose settings are not known."""
    timeout, why = _wanted_timeout(measured)
    slots, because = _wanted_slots(measured)
    breaker = _usual_breaker(measured)
    for policy, after, reason in (
        ("breaker", breaker, _in_window(measured, breaker)),
        ("bulkhead", {"limit": slots}, because),
        ("timeout", {"seconds": timeout}, why),
    ):
        if policy != "timeout" or not _is_beyond(measured):
            yield _proposal(measured, policy, 0, after, reason)


# What rules have in common

_RULES: Final = (_timeout, _attempts, _budget, _breaker, _limit, _rate_limit, _hedge)


def _changed(
    measured: Measurement, policies: Sequence[Table], at: int, after: Settings, why: str
) -> Proposal:
    before = {name: policies[at][name] for name in after if name in policies[at]}
    return _proposal(measured, policies[at]["policy"], at, after, why, before)


def _added(
    measured: Measurement, policies: Sequence[Table], kind: str, after: Settings, why: str
) -> Proposal:
    """Propose a policy that is not there yet, at its place in the recommended order."""
    place = len(policies)
    if kind != "timeout":
        later = set(ORDER[ORDER.index(kind) :])
        retry = _place(policies, "retry")
        inner = [
            at
            for at, policy in enumerate(policies)
            if policy["policy"] in later
            or policy["policy"] == "chaos"
            or (policy["policy"] == "timeout" and (retry is None or at > retry))
        ]
        place = min(inner, default=place)
    return _proposal(measured, kind, place, after, why)


def _proposal(
    measured: Measurement,
    policy: str,
    place: int,
    after: Settings,
    reason: str,
    before: Settings | None = None,
) -> Proposal:
    """Return a proposal; without `before`, to add the policy."""
    added, samples = before is None, measured.samples
    return Proposal(measured.name, policy, place, added, before or {}, after, reason, samples)


def _place(policies: Sequence[Table], kind: str) -> int | None:
    return next((at for at, one in enumerate(policies) if one["policy"] == kind), None)


def _is_private(policy: Table) -> bool:
    return any(name in policy for name in _PRIVATE)


def rounded(value: float) -> float:
    """Return `value` rounded up to two digits."""
    step = 10.0 ** (floor(log10(value)) - 1)
    return float(f"{ceil(value / step - 1e-9) * step:.6g}")


def seconds(value: float) -> str:
    """Return a duration for people."""
    return f"{value:.2g} s" if value < 100 else f"{value:.0f} s"  # noqa: PLR2004


def number(value: float) -> str:
    """Return a number for people, with a space between thousands."""
    return f"{value:,.0f}".replace(",", " ")
