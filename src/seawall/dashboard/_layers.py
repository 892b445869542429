"""Description of each kind of policy: its state, how bad that is, and some facts.

Pure except for the counters in `Moves`. A snapshot may be that of a user's own policy: values that
are missing or have another shape are omitted, and nothing raises. An unknown policy is described by
its plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import (
    LONGEST_KEY,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_FACTS,
    MOST_KEYS,
    number,
    shown,
)
from seawall.dashboard._lately import (
    BudgetState,
    Seen,
    budget_spent,
    budget_state,
    full,
    mapping,
    note_retries,
    share_lately,
)
from seawall.dashboard._moves import Moves
from seawall.dashboard._settings import level_name
from seawall.dashboard.views import Tone
from seawall.telemetry import _thresholds as limits

Facts = list[tuple[str, str]]


class Told(NamedTuple):
    """Description of a policy; `word` is the state that it gives to its guard."""

    state: str = ""
    tone: Tone = "ok"
    word: str = ""
    facts: Facts = []  # noqa: RUF012 - never changed in place
    acts: tuple[str, ...] = ()


def told_of(kind: str, name: str, place: int, seen: Seen, moves: Moves) -> Told:
    """Describe a policy of that kind; see the module."""
    read = _READERS.get(kind, _unknown)
    try:
        return read(name, place, seen, moves)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return _unknown(name, place, seen, moves)  # the known kind, but another shape


def refused_facts(name: str, place: int, seen: Seen, moves: Moves) -> Facts:
    facts: Facts = []
    for counter, label in (("rejected", "refused"), ("would_reject", "would have refused")):
        total = number(seen.get(counter))
        if total:
            lately = moves.lately_rate(("layer", name, place, counter))
            facts.append((label, f"{say.amount(total)} in all, {say.rate(lately)} now"))
    return facts


def fact(label: str, value: str) -> tuple[str, str]:
    """Return a label and its value, shortened and sanitized."""
    return shown(label, LONGEST_WORD), shown(value, LONGEST_TEXT)


def _breaker(_name: str, _place: int, seen: Seen, _moves: Moves) -> Told:
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
            facts.append(
                ("probes", f"in {say.seconds(left)}" if left > 0 else "with the next call")
            )
        if seen.get("failure"):
            facts.append(fact("last failure", str(seen["failure"])))
        facts.append(_window(seen))
    opened = number(mapping(seen.get("transitions")).get("open"))
    if opened:
        facts.append(("opened", f"{say.several(opened, 'time')}"))
    acts: tuple[str, ...] = ("isolate", "close")
    acts = {"isolated": acts[1:], "closed": acts[:1]}.get(state, acts)
    if isinstance(keys, Mapping):
        # The breakers of a family belong to guards that have no name of their own.
        acts = () if "all_keys" in seen else ("isolate", "close")
    word = say.plainly(state)
    return Told(word, tone, word, facts, acts)


def _window(seen: Seen) -> tuple[str, str]:
    prefix = "shared_" if "shared_calls" in seen else ""
    calls, failed = number(seen.get(f"{prefix}calls")), number(seen.get(f"{prefix}failures"))
    slow = number(seen.get(f"{prefix}slow"))
    more = f", {say.amount(slow)} slow" if slow else ""
    whose = " of all pods" if prefix else ""
    told = f"{say.amount(failed)} of {say.several(calls, 'call')}{whose} failed{more}"
    return "in the window", told


def broken_keys(keys: Seen) -> list[str]:
    """Return the keys whose breaker is not closed."""
    return [
        str(key)
        for key, one in keys.items()
        if isinstance(one, Mapping) and one.get("state") in {"open", "half_open", "isolated"}
    ]


def listed(keys: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    named = ", ".join(shown(key, LONGEST_KEY) for key in keys[:MOST_KEYS])
    more = len(keys) - MOST_KEYS
    return f"{named} and {more} more" if more > 0 else named


_BUDGETS: Final[dict[BudgetState, tuple[Tone, str]]] = {
    "": ("ok", ""),
    "low": ("warn", "budget low"),
    "unfilled": ("warn", "budget not refilled"),
    "refusing": ("bad", "budget spent"),
}


def _retry(name: str, place: int, seen: Seen, moves: Moves) -> Told:
    note_retries(name, place, seen, moves)
    facts: Facts = [("retries", say.amount(seen.get("retries")))]
    spent = budget_spent(seen)
    if spent is not None:
        facts.append(("budget spent", say.share(spent)))
    tone, state = _BUDGETS[budget_state(name, place, seen, moves)]
    stopped = mapping(seen.get("stopped"))
    for cause, times in list(stopped.items())[:MOST_KEYS]:
        facts.append((f"stopped by {say.plainly(str(cause))}", say.amount(times)))
    return Told(state, tone, state, facts)


def _slots(name: str, place: int, seen: Seen, moves: Moves) -> Told:
    slots = number(seen.get("limit", seen.get("workers")))
    used, waiting = number(seen["in_flight"]), number(seen["waiting"])
    facts: Facts = [("waiting", say.amount(waiting))]
    if number(seen.get("queue_wait")):
        facts.append(("first in line for", say.seconds(seen["queue_wait"])))
    if seen.get("baseline") is not None:
        facts.append(("usually takes", say.seconds(seen["baseline"])))
    if number(seen.get("abandoned")):
        facts.append(("abandoned threads", say.amount(seen["abandoned"])))
    crowded = full(seen) or share_lately(name, place, "rejected", moves) > limits.SHED
    tone: Tone = "warn" if crowded else "ok"
    return Told(say.use(used, slots), tone, "full" if crowded else "", facts)


def _rate_limit(name: str, place: int, seen: Seen, moves: Moves) -> Told:
    facts: Facts = []
    for title, limit in list(mapping(seen.get("limits")).items())[:MOST_KEYS]:
        one = mapping(limit)
        if "left" in one:
            facts.append((f"left of {title}", say.amount(one["left"])))
        elif "keys" in one:
            facts.append((f"keys of {title}", say.amount(one["keys"])))
    if number(seen.get("waiting")):
        facts.append(("waiting", say.amount(seen["waiting"])))
    refusing = share_lately(name, place, "rejected", moves) > limits.RATE_LIMITED
    state = "limiting" if refusing else ""
    return Told(state, "warn" if refusing else "ok", state, facts)


def _shed(name: str, place: int, seen: Seen, moves: Moves) -> Told:
    facts: Facts = []
    if seen.get("load") is not None:
        facts.append(("load", say.share(seen["load"])))
    classes = mapping(seen.get("shed_classes"))
    for rule, shed in list(classes.items())[:MOST_KEYS]:
        total = sum(number(one) for one in mapping(shed).values())
        facts.append((f"shed by {say.plainly(str(rule))}", say.amount(total)))
    shedding = share_lately(name, place, "rejected", moves)
    state = "shedding" if shedding else ""
    tone: Tone = "bad" if shedding > limits.SHED else "warn" if shedding else "ok"
    return Told(state, tone, state, facts)


def _fallback(name: str, place: int, seen: Seen, moves: Moves) -> Told:
    levels = list(mapping(seen["levels"]).items())
    facts = [(level_name(level), say.amount(times)) for level, times in levels[:MOST_KEYS]]
    key = ("layer", name, place, "answered")
    moves.rate(key, sum(number(times) for _, times in levels))
    state = "answering" if moves.lately(key) else ""
    return Told(state, "warn" if state else "ok", "degraded" if state else "", facts)


def _cache(_name: str, _place: int, seen: Seen, _moves: Moves) -> Told:
    hits, misses = number(seen.get("hits")), number(seen.get("misses"))
    looks = hits + misses + number(seen.get("shared"))
    facts: Facts = [("entries", say.amount(seen.get("entries")))]
    state = f"{say.share(hits / looks)} hits" if looks else ""
    facts += [("hits", say.amount(hits)), ("misses", say.amount(misses))]
    return Told(state, "ok", "", facts)


def _timeout(name: str, place: int, seen: Seen, moves: Moves) -> Told:
    key = ("layer", name, place, "timed_out")
    moves.rate(key, seen.get("timed_out"))
    facts: Facts = [("timed out", say.amount(seen.get("timed_out")))]
    return Told("timing out" if moves.lately(key) else "", "ok", "", facts)


def _hedge(_name: str, _place: int, seen: Seen, _moves: Moves) -> Told:
    facts: Facts = [
        ("second calls", say.amount(seen.get("hedges"))),
        ("that came first", say.amount(seen.get("wins"))),
    ]
    delay = seen.get("delay")
    return Told("" if delay is None else f"after {say.seconds(delay)}", "ok", "", facts)


def _throttle(_name: str, _place: int, seen: Seen, _moves: Moves) -> Told:
    rejected = number(seen.get("reject_share"))
    facts: Facts = [
        ("sent", say.amount(seen.get("requests"))),
        ("accepted", say.amount(seen.get("accepts"))),
    ]
    if rejected <= 0:
        return Told("", "ok", "", facts)
    return Told(f"holds back {say.share(rejected)}", "warn", "throttling", facts)


def _turns(name: str, place: int, seen: Seen, moves: Moves) -> Told:
    busy = f"{say.share(seen['busy'])} busy"
    facts: Facts = [
        ("a request costs", say.seconds(seen.get("cost"))),
        ("waiting", say.amount(seen.get("waiting"))),
    ]
    shedding = share_lately(name, place, "rejected", moves)
    tone: Tone = "bad" if shedding > limits.SHED else "warn" if shedding else "ok"
    return Told(busy, tone, "shedding" if shedding else "", facts)


def _chaos(_name: str, _place: int, seen: Seen, _moves: Moves) -> Told:
    injected = list(mapping(seen.get("injected")).items())[:MOST_KEYS]
    facts = [(say.plainly(str(what)), say.amount(times)) for what, times in injected]
    on = seen["enabled"] is True
    return Told("on" if on else "off", "warn" if on else "off", "chaos" if on else "", facts)


def _unknown(_name: str, _place: int, seen: Seen, _moves: Moves) -> Told:
    return Told(facts=plain_facts(seen, leave_out=("policy", "mode", "rejected", "would_reject")))


def plain_facts(seen: Seen, leave_out: Iterable[str] = ()) -> Facts:
    """Return values that are plain numbers or bools; texts may come from anyone."""
    left = frozenset(leave_out)
    told = [
        (say.plainly(str(key)), say.truth(value) if isinstance(value, bool) else say.amount(value))
        for key, value in seen.items()
        if key not in left and isinstance(value, (bool, int, float))
    ]
    return told[:MOST_FACTS]


_READERS: Final[dict[str, Callable[[str, int, Seen, Moves], Told]]] = {
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
    "turns": _turns,
    "chaos": _chaos,
}
