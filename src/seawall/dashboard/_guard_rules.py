"""What is wrong with a guard: rules over its snapshot and what its counters did lately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import number
from seawall.dashboard._found import Found, kept_of
from seawall.dashboard._lately import (
    Seen,
    budget_spent,
    failing,
    full,
    policies_of,
    share_lately,
)
from seawall.dashboard._layers import broken_keys, listed
from seawall.dashboard._moves import Moves
from seawall.dashboard.views import Tone
from seawall.telemetry import _thresholds as limits


def guard_rule(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    for place, policy in enumerate(policies_of(seen)):
        if policy.get("mode") != "off":
            rule = _POLICIES.get(str(policy.get("policy")))
            if rule is not None:
                yield from kept_of(rule(name, place, policy, moves))
            yield from _without_store(name, place, policy)
    tone = failing(seen, moves)
    if tone is not None:
        what = f"{say.share(seen['error_rate'])} of recent attempts failed"
        yield Found(f"errors:{name}", tone, name, what, "Look at what it calls")
    degraded = moves.lately(("guard", name, "degraded"))
    if degraded:
        what = f"{say.several(degraded, 'call')} in {say.seconds(moves.span)} got less:"
        what += " a fallback or an old answer"
        yield Found(f"degraded:{name}", "warn", name, what, "Look at what it calls")
    abandoned = number(seen.get("abandoned"))
    if abandoned > limits.ABANDONED_THREADS:
        threads = say.several(abandoned, "thread runs", "threads run")
        what = f"{threads} on without a caller"
        advice = "Give what they call a timeout of its own"
        yield Found(f"abandoned:{name}", "warn", name, what, advice)


def _without_store(name: str, place: int, seen: Seen) -> Iterator[Found]:
    shared = seen.get("shared")
    mode = shared.get("mode", "shared") if isinstance(shared, Mapping) else "shared"
    if mode != "shared":
        kind = str(seen.get("policy"))
        tone: Tone = "bad" if mode == "closed" else "warn"
        ways = {
            "local": "by what this pod knows",
            "open": "and admits everything",
            "closed": "and refuses everything",
        }
        what = f"The {say.plainly(kind)} goes without its store, {ways.get(str(mode), str(mode))}"
        advice = "See whether the store answers"
        key = f"store_mode:{name}"
        yield Found(f"{key}:{place}", tone, name, what, advice, f"{key}:{kind}")


def _breaker(name: str, place: int, seen: Seen, _moves: Moves) -> Iterator[Found]:
    state = seen.get("state")
    if state not in {"open", "half_open", "isolated"}:
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
        more = seen.get("retry_after")
        what += ", calls are refused"
        what += "" if more is None else f" for {say.seconds(max(0.0, round(number(more), 1)))} more"
    yield Found(f"breaker:{name}:{place}", tone, name, what, advice, f"breaker:{name}")


def _retry(name: str, place: int, seen: Seen, _moves: Moves) -> Iterator[Found]:
    spent = budget_spent(seen)
    if spent is None or spent < limits.BUDGET_SPENT_WARN:
        return
    tone: Tone = "bad" if spent >= limits.BUDGET_SPENT else "warn"
    what = f"{say.share(spent)} of the retry budget are spent"
    what += ": failed calls are not retried" if tone == "bad" else ""
    advice = "Look at what it calls: most retries fail"
    yield Found(f"budget:{name}:{place}", tone, name, what, advice)


def _refusing(name: str, place: int, seen: Seen, moves: Moves) -> Iterator[Found]:
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
    share = share_lately(name, place, "rejected", moves)
    if not share or (share <= most and what != "Shedding"):
        return
    tone: Tone = "bad" if share > most and what == "Shedding" else "warn"
    speed = moves.lately_rate(("layer", name, place, "rejected"))
    told = f"{what} {say.share(share)} of calls, {say.rate(speed)}"
    yield Found(f"{kind}:{name}:{place}", tone, name, told, advice)


def _slots(name: str, place: int, seen: Seen, moves: Moves) -> Iterator[Found]:
    slots = seen.get("limit", seen.get("workers"))
    kind = str(seen["policy"])
    if full(seen):
        waiting = say.several(seen.get("waiting"), "call waits", "calls wait")
        what = f"No slot of {say.amount(slots)} is free, {waiting}"
        wait = number(seen.get("queue_wait"))
        tone: Tone = "bad" if wait > limits.SLOT_WAIT_SECONDS else "warn"
        what += f", the first for {say.seconds(wait)}" if wait else ""
        yield Found(f"{kind}:{name}:{place}", tone, name, what, "Is what it calls slow?")
    elif share_lately(name, place, "rejected", moves) > limits.SHED:
        yield from _refusing(name, place, seen, moves)


_POLICIES: Final[dict[str, Callable[[str, int, Seen, Moves], Iterator[Found]]]] = {
    "breaker": _breaker,
    "retry": _retry,
    **dict.fromkeys(("rate_limit", "throttle", "shed", "turns"), _refusing),
    **dict.fromkeys(("bulkhead", "thread_bulkhead", "adaptive_limit"), _slots),
}
