"""Limits: a row for each limit in a guard's stack, and for each limit of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import MOST_KEYS, number
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import (
    Facts,
    FoundTrouble,
    RowContent,
    Seen,
    Troubles,
    full,
    mapping,
    share_of,
    things,
)
from seawall.dashboard.presenters.guards import lost_store
from seawall.models.rate.rates import Rate

_GUARD_LIMITS: Final = ("rate_limit", "bulkhead", "adaptive_limit", "thread_bulkhead")


def guard_limit_rows(guard: Seen, counters: Counters) -> Iterator[tuple[str, str, RowContent]]:
    """Yield the limits in a guard's stack, whose counters are recorded already."""
    name = str(guard.get("name", ""))
    for place, seen in enumerate(things(guard, "policies")):
        kind = seen.get("policy")
        if seen.get("mode") == "off" or kind not in _GUARD_LIMITS:
            continue
        refused = counters.recent_rate(("layer", name, place, "rejected"))
        facts: Facts = [("refused", say.rate(refused))]
        if kind == "rate_limit":
            try:
                yield "rate_limit", name, _rate_limit(seen, refused, facts)
            except (TypeError, ValueError):  # the known kind, but another shape
                yield "rate_limit", name, RowContent(facts=facts, track=refused)
        else:
            slots = seen.get("limit", seen.get("workers"))
            used = number(seen.get("in_flight"))
            line = RowContent(
                say.use(used, slots),
                "warn" if full(seen) else "ok",
                [("waiting", say.amount(seen.get("waiting"))), *facts],
                share_of(used, slots),
                used,
            )
            yield str(kind), name, line


def _rate_limit(seen: Seen, refused: float, facts: Facts) -> RowContent:
    texts: list[str] = []
    used: list[float] = []
    for limit in mapping(seen.get("limits")).values():
        one = mapping(limit)
        texts.append(str(one.get("limit", "")))
        if "left" in one:
            left = share_of(one["left"], Rate.parse(texts[-1]).limit)
            used.append(1 - min(1.0, left or 0.0))
    named = ", ".join(texts[:MOST_KEYS])
    state = "limiting" if refused else named
    own_facts = [("limit", named), *facts]
    return RowContent(
        state, "warn" if refused else "ok", own_facts, max(used, default=None), refused
    )


def request_limit_rows(
    name: str, seen: Seen, counters: Counters
) -> Iterator[tuple[str, RowContent]]:
    """Yield the name and content of the row of each limit."""
    for group, soft in (("limits", False), ("soft", True)):
        for limit, raw in mapping(seen.get(group)).items():
            one = mapping(raw)
            over = counters.rate(("request_limits", name, group, limit), one.get("over"))
            facts: Facts = [
                ("rate", str(one.get("rate", ""))),
                ("keys", say.amount(one.get("keys"))),
                ("over in all", say.amount(one.get("over"))),
            ]
            shared = seen.get("shared")
            if isinstance(shared, Mapping) and "mode" in shared:
                facts.append(("sharing", str(shared["mode"])))
            what = "would refuse" if soft else "refuses"
            state = f"{what} {say.rate(over)}" if over else "well"
            yield f"{name}: {limit}", RowContent(state, "warn" if over else "ok", facts, None, over)


def request_limit_troubles(_kind: str, name: str, seen: Seen, counters: Counters) -> Troubles:
    """Yield the troubles of the limits of requests."""
    for limit in mapping(seen.get("limits")):
        over = counters.recent(("request_limits", name, "limits", limit))
        if over:
            what = f"The limit {limit} refuses {say.rate(over / counters.span)}"
            yield FoundTrouble(f"request_limits:{name}:{limit}", "warn", name, what)
    shared = mapping(seen.get("shared"))
    if shared.get("mode", "shared") != "shared":
        what = f"The limits go without their store: {say.plainly(str(shared['mode']))}"
        key = f"store_mode:{name}"
        advice = "See whether the store answers"
        began, cause = f"{key}:rate_limit", lost_store(shared)
        yield FoundTrouble(f"{key}:limits", "warn", name, what, advice, began, cause)
