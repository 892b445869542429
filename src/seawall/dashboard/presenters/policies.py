"""Policies: the state of each kind, how bad that is, some facts, and its troubles.

Pure except for the counters. A snapshot may be that of a user's own policy: values that are
missing or have another shape are omitted, and nothing raises. An unknown policy is described by
its plain numbers. `settings` describes the settings of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import MOST_KEYS, number
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import (
    Facts,
    FoundTrouble,
    Seen,
    Troubles,
    fact,
    full,
    listed,
    mapping,
    plain_facts,
)
from seawall.dashboard.presenters.settings import level_name
from seawall.dashboard.views import Tone
from seawall.telemetry import thresholds as limits
from seawall.telemetry.readings import spent_share

ENDS: Final = ("succeeded", "failed", "rejected", "cancelled")
"""How a call can end."""


class PolicyState(NamedTuple):
    """Description of a policy; `word` is the state that it gives to its guard."""

    state: str = ""
    tone: Tone = "ok"
    word: str = ""
    facts: Facts = []  # noqa: RUF012 - never changed in place
    acts: tuple[str, ...] = ()


def describe_policy(
    kind: str, name: str, place: int, seen: Seen, counters: Counters
) -> PolicyState:
    """Describe a policy of that kind; see the module."""
    read = _READERS.get(kind, _unknown)
    try:
        return read(name, place, seen, counters)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return _unknown(name, place, seen, counters)  # the known kind, but another shape


def refused_facts(name: str, place: int, seen: Seen, counters: Counters) -> Facts:
    """Return the facts about refused calls."""
    facts: Facts = []
    for counter, label in (("rejected", "refused"), ("would_reject", "would have refused")):
        total = number(seen.get(counter))
        if total:
            recent = counters.recent_rate(("layer", name, place, counter))
            facts.append((label, f"{say.amount(total)} in all, {say.rate(recent)} now"))
    return facts


def recent_share(name: str, place: int, counter: str, counters: Counters) -> float:
    """Return the recent share of a guard's calls that a policy's counter has counted."""
    counted = counters.recent(("layer", name, place, counter))
    calls = sum(counters.recent(("guard", name, end)) for end in ENDS)
    return counted / max(counted, calls) if counted else 0.0


# Breakers


def _breaker(_name: str, _place: int, seen: Seen, _counters: Counters) -> PolicyState:
    state = str(seen["state"])
    tone: Tone = {"open": "bad", "isolated": "bad", "half_open": "warn"}.get(state, "ok")  # type: ignore[assignment]
    facts: Facts = []
    keys = seen.get("keys")
    if isinstance(keys, Mapping):
        broken = broken_keys(keys)
        facts.append(("keys", say.amount(seen.get("all_keys", len(keys)))))
        if broken:
            facts.append(("broken keys", listed(broken)))
    else:
        if "retry_after" in seen and seen["retry_after"] is not None:
            left = round(number(seen["retry_after"]), 1)
            when = f"in {say.seconds(left)}" if left > 0 else "with the next call"
            facts.append(("probes", when))
        if seen.get("failure"):
            facts.append(fact("last failure", str(seen["failure"])))
        facts.append(("in the window", _window(seen)))
    opened = number(mapping(seen.get("transitions")).get("open"))
    if opened:
        facts.append(("opened", say.several(opened, "time")))
    acts: tuple[str, ...] = ("isolate", "close")
    if "all_keys" in seen:  # the breakers of a family belong to guards without a name
        acts = ()
    elif not isinstance(keys, Mapping):
        acts = {"isolated": acts[1:], "closed": acts[:1]}.get(state, acts)
    word = say.plainly(state)
    return PolicyState(word, tone, word, facts, acts)


def _window(seen: Seen) -> str:
    prefix = "shared_" if "shared_calls" in seen else ""
    calls, failed = number(seen.get(f"{prefix}calls")), number(seen.get(f"{prefix}failures"))
    slow = number(seen.get(f"{prefix}slow"))
    more = f", {say.amount(slow)} slow" if slow else ""
    whose = " of all pods" if prefix else ""
    return f"{say.amount(failed)} of {say.several(calls, 'call')}{whose} failed{more}"


def broken_keys(keys: Seen) -> list[str]:
    """Return the keys whose breaker is not closed."""
    return [
        str(key)
        for key, one in keys.items()
        if isinstance(one, Mapping) and one.get("state") in ("open", "half_open", "isolated")
    ]


def _breaker_troubles(name: str, place: int, seen: Seen, _counters: Counters) -> Troubles:
    state = seen.get("state")
    if state not in ("open", "half_open", "isolated"):
        return
    keys = seen.get("keys")
    broken = broken_keys(keys) if isinstance(keys, Mapping) else []
    whose = f" for {say.several(len(broken), 'key')}: {listed(broken)}" if broken else ""
    tone: Tone = "warn" if state == "half_open" else "bad"
    what = f"The breaker is {say.plainly(str(state))}{whose}"
    advice = "Look at what it calls: it failed too often"
    if state == "isolated":
        advice = "Close it when calls may pass again"
    if seen.get("mode") == "shadow":
        tone, what = "warn", f"{what}, in shadow: no call is refused"
    elif state == "isolated" and not whose:
        what += ": all calls are refused until somebody closes it"
    elif state == "half_open" and not whose:
        what += ": a few calls try whether it works again"
    elif not whose:
        what += f", {say.until_probe(seen.get('retry_after'))}"
    yield FoundTrouble(f"breaker:{name}:{place}", tone, name, what, advice, f"breaker:{name}")


# Retries


BudgetState = Literal["", "low", "unfilled", "refusing"]
"""State of a retry budget; see `budget_state`."""


def budget_spent(seen: Seen) -> float | None:
    """Return the share of a retry budget that is spent, from 0 to 1; None if there is none."""
    try:
        return spent_share(seen["budget"])
    except (KeyError, TypeError):  # none, or one of another shape
        return None


def refused_by_budget(name: str, place: int, counters: Counters) -> float:
    """Return the number of recent calls that were not retried because the budget was spent."""
    return counters.recent(("layer", name, place, "refused_by_budget"))


def budget_state(name: str, place: int, seen: Seen, counters: Counters) -> BudgetState:
    """Return the state of a retry budget, if it matters now; otherwise "".

    "refusing": recent calls were not retried because it was spent. "unfilled": none was refused,
    but the next retry would be, since successes have not refilled it. "low": it is nearly spent by
    current retries.
    """
    if refused_by_budget(name, place, counters):
        return "refusing"
    spent = budget_spent(seen)
    if spent is None:
        return ""
    # Only a budget refilled by successes stays spent without traffic; the others show their last
    # state.
    if spent >= limits.BUDGET_SPENT and "maximum" in mapping(seen.get("budget")):
        return "unfilled"
    retried = counters.recent(("layer", name, place, "retries"))
    return "low" if retried and spent >= limits.BUDGET_SPENT_WARN else ""


_BUDGETS: Final[dict[BudgetState, tuple[Tone, str]]] = {
    "": ("ok", ""),
    "low": ("warn", "budget low"),
    "unfilled": ("warn", "budget not refilled"),
    "refusing": ("bad", "budget spent"),
}


def _retry(name: str, place: int, seen: Seen, counters: Counters) -> PolicyState:
    stopped = mapping(seen.get("stopped"))
    # What `budget_state` needs.
    counters.rate(("layer", name, place, "retries"), seen.get("retries"))
    counters.rate(("layer", name, place, "refused_by_budget"), stopped.get("budget"))
    facts: Facts = [("retries", say.amount(seen.get("retries")))]
    spent = budget_spent(seen)
    if spent is not None:
        facts.append(("budget spent", say.share(spent)))
    tone, state = _BUDGETS[budget_state(name, place, seen, counters)]
    for cause, times in list(stopped.items())[:MOST_KEYS]:
        facts.append((f"stopped by {say.plainly(str(cause))}", say.amount(times)))
    return PolicyState(state, tone, state, facts)


def _retry_troubles(name: str, place: int, seen: Seen, counters: Counters) -> Troubles:
    state = budget_state(name, place, seen, counters)
    key = f"budget:{name}:{place}"
    if state == "refusing":
        refused = say.several(refused_by_budget(name, place, counters), "failed call")
        what = f"The retry budget is spent: {refused} in {say.seconds(counters.span)} not retried"
        yield FoundTrouble(key, "bad", name, what, "Look at what it calls: too much of it fails")
    elif state == "unfilled":
        what = "The retry budget is not refilled yet: a call that fails now is not retried"
        advice = "Nothing to do while calls succeed: they refill it, time does not"
        yield FoundTrouble(key, "warn", name, what, advice)
    elif state == "low":
        what = f"{say.share(budget_spent(seen))} of the retry budget are spent"
        yield FoundTrouble(key, "warn", name, what, "Look at what it calls: much of it is retried")


# Slots and limits


def _slots(name: str, place: int, seen: Seen, counters: Counters) -> PolicyState:
    slots = number(seen.get("limit", seen.get("workers")))
    used, waiting = number(seen["in_flight"]), number(seen["waiting"])
    facts: Facts = [("waiting", say.amount(waiting))]
    if number(seen.get("queue_wait")):
        facts.append(("first in line for", say.seconds(seen["queue_wait"])))
    if seen.get("baseline") is not None:
        facts.append(("usually takes", say.seconds(seen["baseline"])))
    if number(seen.get("abandoned")):
        facts.append(("abandoned threads", say.amount(seen["abandoned"])))
    crowded = full(seen) or recent_share(name, place, "rejected", counters) > limits.SHED
    tone: Tone = "warn" if crowded else "ok"
    return PolicyState(say.use(used, slots), tone, "full" if crowded else "", facts)


def _slot_troubles(name: str, place: int, seen: Seen, counters: Counters) -> Troubles:
    slots = seen.get("limit", seen.get("workers"))
    kind = str(seen["policy"])
    if full(seen):
        waiting = say.several(seen.get("waiting"), "call waits", "calls wait")
        what = f"No slot of {say.amount(slots)} is free, {waiting}"
        wait = number(seen.get("queue_wait"))
        tone: Tone = "bad" if wait > limits.SLOT_WAIT_SECONDS else "warn"
        what += f", the first for {say.seconds(wait)}" if wait else ""
        yield FoundTrouble(f"{kind}:{name}:{place}", tone, name, what, "Is what it calls slow?")
    elif recent_share(name, place, "rejected", counters) > limits.SHED:
        yield from _refusing(name, place, seen, counters)


def _rate_limit(name: str, place: int, seen: Seen, counters: Counters) -> PolicyState:
    facts: Facts = []
    for title, limit in list(mapping(seen.get("limits")).items())[:MOST_KEYS]:
        one = mapping(limit)
        if "left" in one:
            facts.append((f"left of {title}", say.amount(one["left"])))
        elif "keys" in one:
            facts.append((f"keys of {title}", say.amount(one["keys"])))
    if number(seen.get("waiting")):
        facts.append(("waiting", say.amount(seen["waiting"])))
    refusing = recent_share(name, place, "rejected", counters) > limits.RATE_LIMITED
    state = "limiting" if refusing else ""
    return PolicyState(state, "warn" if refusing else "ok", state, facts)


def _shed(name: str, place: int, seen: Seen, counters: Counters) -> PolicyState:
    facts: Facts = []
    if seen.get("load") is not None:
        facts.append(("load", say.share(seen["load"])))
    classes = mapping(seen.get("shed_classes"))
    for rule, shed in list(classes.items())[:MOST_KEYS]:
        total = sum(number(one) for one in mapping(shed).values())
        facts.append((f"shed by {say.plainly(str(rule))}", say.amount(total)))
    shedding = recent_share(name, place, "rejected", counters)
    state = "shedding" if shedding else ""
    tone: Tone = "bad" if shedding > limits.SHED else "warn" if shedding else "ok"
    return PolicyState(state, tone, state, facts)


def _throttle(_name: str, _place: int, seen: Seen, _counters: Counters) -> PolicyState:
    rejected = number(seen.get("reject_share"))
    facts: Facts = [
        ("sent", say.amount(seen.get("requests"))),
        ("accepted", say.amount(seen.get("accepts"))),
    ]
    if rejected <= 0:
        return PolicyState("", "ok", "", facts)
    return PolicyState(f"holds back {say.share(rejected)}", "warn", "throttling", facts)


def _loop_admission(name: str, place: int, seen: Seen, counters: Counters) -> PolicyState:
    busy = f"{say.share(seen['busy'])} busy"
    facts: Facts = [
        ("a request costs", say.seconds(seen.get("cost"))),
        ("waiting", say.amount(seen.get("waiting"))),
    ]
    shedding = recent_share(name, place, "rejected", counters)
    tone: Tone = "bad" if shedding > limits.SHED else "warn" if shedding else "ok"
    return PolicyState(busy, tone, "shedding" if shedding else "", facts)


def _refusing(name: str, place: int, seen: Seen, counters: Counters) -> Troubles:
    kind = str(seen["policy"])
    what, most, advice = {
        "rate_limit": (
            "The rate limit refuses",
            limits.RATE_LIMITED,
            "Ask less often, or raise it",
        ),
        "throttle": ("The throttle holds back", limits.RATE_LIMITED, "What it calls has too much"),
        "bulkhead": ("The bulkhead refuses", limits.SHED, "Is what it calls slow?"),
        "thread_bulkhead": ("The threads are taken: refused are", limits.SHED, "Is it slow?"),
        "adaptive_limit": ("The limit refuses", limits.SHED, "Is what it calls slow?"),
    }.get(kind, ("Shedding", limits.SHED, "Start more processes, or wait for the surge to pass"))
    share = recent_share(name, place, "rejected", counters)
    if not share or (share <= most and what != "Shedding"):
        return
    tone: Tone = "bad" if share > most and what == "Shedding" else "warn"
    speed = counters.recent_rate(("layer", name, place, "rejected"))
    text = f"{what} {say.share(share)} of calls, {say.rate(speed)}"
    yield FoundTrouble(f"{kind}:{name}:{place}", tone, name, text, advice)


# Other policies


def _fallback(name: str, place: int, seen: Seen, counters: Counters) -> PolicyState:
    levels = list(mapping(seen["levels"]).items())
    facts = [(level_name(level), say.amount(times)) for level, times in levels[:MOST_KEYS]]
    key = ("layer", name, place, "answered")
    counters.rate(key, sum(number(times) for _, times in levels))
    state = "answering" if counters.recent(key) else ""
    return PolicyState(state, "warn" if state else "ok", "degraded" if state else "", facts)


def _cache(_name: str, _place: int, seen: Seen, _counters: Counters) -> PolicyState:
    hits, misses = number(seen.get("hits")), number(seen.get("misses"))
    looks = hits + misses + number(seen.get("shared"))
    facts: Facts = [("entries", say.amount(seen.get("entries")))]
    state = f"{say.share(hits / looks)} hits" if looks else ""
    facts += [("hits", say.amount(hits)), ("misses", say.amount(misses))]
    return PolicyState(state, "ok", "", facts)


def _timeout(name: str, place: int, seen: Seen, counters: Counters) -> PolicyState:
    key = ("layer", name, place, "timed_out")
    counters.rate(key, seen.get("timed_out"))
    facts: Facts = [("timed out", say.amount(seen.get("timed_out")))]
    return PolicyState("timing out" if counters.recent(key) else "", "ok", "", facts)


def _hedge(_name: str, _place: int, seen: Seen, _counters: Counters) -> PolicyState:
    facts: Facts = [
        ("second calls", say.amount(seen.get("hedges"))),
        ("that came first", say.amount(seen.get("wins"))),
    ]
    delay = seen.get("delay")
    return PolicyState("" if delay is None else f"after {say.seconds(delay)}", "ok", "", facts)


def _chaos(_name: str, _place: int, seen: Seen, _counters: Counters) -> PolicyState:
    injected = list(mapping(seen.get("injected")).items())[:MOST_KEYS]
    facts = [(say.plainly(str(what)), say.amount(times)) for what, times in injected]
    on = seen["enabled"] is True
    return PolicyState("on" if on else "off", "warn" if on else "off", "chaos" if on else "", facts)


def _unknown(_name: str, _place: int, seen: Seen, _counters: Counters) -> PolicyState:
    hidden = ("policy", "mode", "rejected", "would_reject")
    return PolicyState(facts=plain_facts(seen, hidden))


_READERS: Final[dict[str, Callable[[str, int, Seen, Counters], PolicyState]]] = {
    "breaker": _breaker,
    "retry": _retry,
    "bulkhead": _slots,
    "thread_bulkhead": _slots,
    "adaptive_limit": _slots,
    "rate_limit": _rate_limit,
    "shed": _shed,
    "fallback": _fallback,
    "cache": _cache,
    "timeout": _timeout,
    "hedge": _hedge,
    "throttle": _throttle,
    "loop_admission": _loop_admission,
    "chaos": _chaos,
}

TROUBLES: Final[dict[str, Callable[[str, int, Seen, Counters], Troubles]]] = {
    "breaker": _breaker_troubles,
    "retry": _retry_troubles,
    **dict.fromkeys(("rate_limit", "throttle", "shed", "loop_admission"), _refusing),
    **dict.fromkeys(("bulkhead", "thread_bulkhead", "adaptive_limit"), _slot_troubles),
}
"""The rules for the troubles of a policy, by its kind."""
