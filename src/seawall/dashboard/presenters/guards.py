"""Guards: the view of a guard and its stack, its troubles, and the rows of its limits.

The limits of requests have rows of the same kind.

Pure except for the counters; nothing raises, whatever a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import (
    LONGEST_NAME,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_FACTS,
    MOST_KEYS,
    MOST_LAYERS,
    number,
    shown,
)
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import (
    Facts,
    FoundTrouble,
    RowContent,
    Seen,
    Troubles,
    fact,
    found_by,
    full,
    mapping,
    share_of,
    things,
    time_of,
)
from seawall.dashboard.presenters.policies import ENDS, TROUBLES, describe_policy, refused_facts
from seawall.dashboard.presenters.settings import settings_of
from seawall.dashboard.views import WORST, GuardView, LayerView, Rates, Tone
from seawall.models.rate.rates import Rate
from seawall.telemetry import thresholds as limits

COUNTS: Final = ("succeeded", "degraded", "failed", "rejected", "cancelled", "retries")


BREAKERS: Final = ("isolated", "open", "half_open", "closed")


def guard_view(seen: Seen, policies: Sequence[Any], counters: Counters, *, edge: bool) -> GuardView:
    """Return the view of a guard; `policies` are the objects of its stack, if known."""
    name = str(seen.get("name", ""))
    rates = {one: round(counters.rate(("guard", name, one), seen.get(one)), 3) for one in COUNTS}
    layers = things(seen, "policies")[:MOST_LAYERS]
    known = policies if len(policies) >= len(layers) else ()
    stack: list[LayerView] = []
    worst: tuple[Tone, str] = ("ok", "well")
    for place, one in enumerate(layers):
        layer, word = _layer(name, place, one, known[place] if known else None, counters)
        stack.append(layer)
        if WORST.index(layer["tone"]) < WORST.index(worst[0]):
            worst = layer["tone"], word or layer["state"] or layer["policy"]
    errors = failing(seen, counters)
    if errors is not None and WORST.index(errors) < WORST.index(worst[0]):
        worst = errors, "failing"
    if worst[0] == "ok" and degraded_share(name, counters) >= limits.DEGRADED:
        worst = "warn", "degraded"  # each layer may be well while fallbacks answer
    if "snapshot_error" in seen:
        worst = "warn", "unreadable"
    broken = {one["state"] for one in stack if (one["policy"], one["tone"]) == ("breaker", "bad")}
    if broken:
        # Of all problems, an open breaker is the one that blocks all calls; the rest is in the
        # stack.
        worst = "bad", next((state for state in BREAKERS if state in broken), worst[1])
    states = [str(one.get("state")) for one in layers if one.get("policy") == "breaker"]
    view = GuardView(
        name=shown(name, LONGEST_NAME),
        tone=worst[0],
        state=shown(worst[1], LONGEST_WORD),
        edge=edge,
        breaker=next((state for state in BREAKERS if state in states), None),
        rates=cast("Rates", rates),
        error_ratio=min(1.0, max(0.0, number(seen.get("error_rate")))),
        p50=time_of(seen, "p50"),
        p95=time_of(seen, "p95"),
        p99=time_of(seen, "p99"),
        stack=stack,
    )
    if last := last_error(seen):
        view["last_error"] = last
    return view


def _layer(
    name: str, place: int, seen: Seen, policy: Any, counters: Counters
) -> tuple[LayerView, str]:
    kind = str(seen.get("policy", ""))
    for counter in ("rejected", "would_reject"):
        if counter in seen:
            counters.rate(("layer", name, place, counter), seen[counter])
    content = describe_policy(kind, name, place, seen, counters)
    facts = [*content.facts, *refused_facts(name, place, seen, counters)]
    sharing, tone, word = "", content.tone, content.word
    shared = seen.get("shared")
    if isinstance(shared, Mapping):
        sharing = shown(shared.get("mode", "shared"), LONGEST_WORD)
        if sharing != "shared" and tone == "ok":
            tone, word = "warn", "without store"
    state, mode = content.state, seen.get("mode")
    if mode == "off":
        tone, state, word = "off", "off", ""
    elif mode == "shadow":
        tone = "warn" if tone == "bad" else tone
        state = f"{state}, shadow" if state else "shadow"
    settings = settings_of(kind, policy)
    layer = LayerView(
        policy=shown(kind, LONGEST_WORD),
        title=settings.title,
        settings=settings.words,
        tone=tone,
        state=shown(state, LONGEST_WORD),
        facts=[fact(*one) for one in facts[:MOST_FACTS]],
        sharing=sharing,
        acts=list(content.acts),
        changes=settings.changes,
    )
    return layer, word


ENOUGH_CALLS: Final = 5.0
"""Minimum number of calls in the last `LONG` seconds for a share of them to be meaningful."""
LONGEST_AGO: Final = 40
"""Maximum length of the text about how often and when an error occurred."""


def failing(seen: Seen, counters: Counters) -> Tone | None:
    """Return how bad the error rate of a guard is, or None if it is not."""
    ratio = number(seen.get("error_rate"))
    if ratio <= limits.ERROR_RATIO_WARN:
        return None
    name = str(seen.get("name", ""))
    if sum(counters.long_term(("guard", name, end)) for end in ENDS) < ENOUGH_CALLS:
        return None
    return "bad" if ratio > limits.ERROR_RATIO else "warn"


def degraded_share(name: str, counters: Counters) -> float:
    """Return the share of degraded ones among the recent answers of a guard, from 0 to 1.

    Failures do not count: a fallback's answer is counted as a failed or refused attempt as well.
    """
    degraded = counters.recent(("guard", name, "degraded"))
    succeeded = counters.recent(("guard", name, "succeeded"))
    return degraded / (degraded + succeeded) if degraded else 0.0


def last_error(seen: Seen, *, when: bool = True) -> str:
    """Return the last error of a guard in a line, with its count and `when`; "" if none."""
    last = seen.get("last_error")
    if not isinstance(last, Mapping):
        return ""
    text = shown(last.get("text", ""), LONGEST_TEXT - LONGEST_AGO)
    if not when:
        return text
    times, age = say.several(last.get("count"), "time"), number(last.get("age"))
    ago = "just now" if age < 1 else f"{say.seconds(int(age))} ago"
    return f"{text}, {times}, {ago}"


def guard_troubles(_kind: str, name: str, seen: Seen, counters: Counters) -> Troubles:
    """Yield the troubles of a guard."""
    yield from _with_causes(found_by(_guard(name, seen, counters)))


def _with_causes(found: list[FoundTrouble]) -> Troubles:
    """Set the causes among the problems of one guard.

    When a dependency fails, the breaker opens, attempts fail, the retry budget is spent, slots stay
    taken, threads are abandoned, and fallbacks answer. The first of these that is present is the
    cause of the later ones. A limit that refuses explains only the fallbacks.
    """
    ranked = [one for one in found if not one.cause and _kind(one) in _EXPLAINS]
    ranked.sort(key=lambda one: _EXPLAINS.index(_kind(one)))
    for one in found:
        if one.cause:
            yield one
            continue
        earlier = (by for by in ranked if _explains(by, one))
        cause = next(earlier, None)
        yield one if cause is None else one._replace(cause=cause.id)


def _explains(cause: FoundTrouble, one: FoundTrouble) -> bool:
    before, after = _kind(cause), _kind(one)
    if after not in _EXPLAINS or _EXPLAINS.index(before) >= _EXPLAINS.index(after):
        return False
    return after == "degraded" or not (before in _LIMITING or after in _LIMITING)


def _kind(one: FoundTrouble) -> str:
    return one.id.partition(":")[0]


_LIMITING: Final = ("rate_limit", "throttle", "shed", "loop_admission")

_EXPLAINS: Final = (
    "breaker",
    "errors",
    *("bulkhead", "thread_bulkhead", "adaptive_limit"),
    *_LIMITING,
    "budget",
    "abandoned",
    "degraded",
)
"""Kinds of a guard's problems: each may be caused by those before it."""


def _guard(name: str, seen: Seen, counters: Counters) -> Troubles:
    for place, policy in enumerate(things(seen, "policies")):
        if policy.get("mode") != "off":
            rule = TROUBLES.get(str(policy.get("policy")))
            if rule is not None:
                yield from found_by(rule(name, place, policy, counters))
            yield from _without_store(name, place, policy)
    tone = failing(seen, counters)
    if tone is not None:
        what = f"{say.share(seen['error_rate'])} of recent attempts failed"
        last = last_error(seen, when=False)
        what += f"; the last: {last}" if last else ""
        yield FoundTrouble(f"errors:{name}", tone, name, what, "Look at what it calls")
    degraded = counters.recent(("guard", name, "degraded"))
    if degraded:
        counters.rate(("guard", name, "stale"), seen.get("stale"))
        stale = counters.recent(("guard", name, "stale"))
        share = degraded_share(name, counters)
        answers = "All answers" if share == 1 else f"{say.share(share)} of answers"
        kinds = [say.several(stale, "stale value")] if stale else []
        kinds += [say.several(degraded - stale, "fallback")] if degraded > stale else []
        what = f"{answers} of the last {say.seconds(round(counters.span, 1))} are lesser ones:"
        what += f" {' and '.join(kinds)}"
        advice = "Look at what it calls"
        degrades = share >= limits.DEGRADED
        yield FoundTrouble(f"degraded:{name}", "warn", name, what, advice, degrades=degrades)
    abandoned = number(seen.get("abandoned"))
    if abandoned > limits.ABANDONED_THREADS:
        threads = say.several(abandoned, "thread runs", "threads run")
        what = f"{threads} on without a caller"
        advice = "Give what they call a timeout of its own"
        yield FoundTrouble(f"abandoned:{name}", "warn", name, what, advice)


def _without_store(name: str, place: int, seen: Seen) -> Troubles:
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
        cause = lost_store(shared)
        yield FoundTrouble(f"{key}:{place}", tone, name, what, advice, f"{key}:{kind}", cause)


def lost_store(shared: Any) -> str:
    """Return the id of the problem that makes a policy work without its store."""
    store = mapping(shared).get("store")
    return f"store:{store}" if store else ""


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
    state, tone = ("limiting", "warn") if refused else (named, "ok")
    gauge = max(used, default=None)
    return RowContent(state, cast("Tone", tone), [("limit", named), *facts], gauge, refused)


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
