"""Guards and their stacks: turns a guard's snapshot into its view.

Pure except for the counters in `Moves`; nothing raises, whatever a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from seawall.dashboard._bounds import (
    LONGEST_NAME,
    LONGEST_WORD,
    MOST_FACTS,
    MOST_LAYERS,
    WORST,
    number,
    shown,
)
from seawall.dashboard._lately import degraded_share, failing, last_error, policies_of, time_of
from seawall.dashboard._layers import fact, refused_facts, told_of
from seawall.dashboard._moves import Moves
from seawall.dashboard._settings import Settings, settings_of
from seawall.dashboard.views import GuardView, Layer, Rates, Tone
from seawall.telemetry import _thresholds as limits

Seen = Mapping[str, Any]
Asked = Callable[[str, Any], Settings]
"""Returns the settings of a policy of some kind."""

COUNTS: Final = ("succeeded", "degraded", "failed", "rejected", "cancelled", "retries")

BREAKERS: Final = ("isolated", "open", "half_open", "closed")


def guard_view(
    seen: Seen, policies: Sequence[Any], moves: Moves, *, edge: bool, settings: Asked = settings_of
) -> GuardView:
    """Return the view of a guard; `policies` are the objects of its stack, if known."""
    name = str(seen.get("name", ""))
    rates = {one: round(moves.rate(("guard", name, one), seen.get(one)), 3) for one in COUNTS}
    told = policies_of(seen)[:MOST_LAYERS]
    known = policies if len(policies) >= len(told) else ()
    stack: list[Layer] = []
    worst: tuple[Tone, str] = ("ok", "well")
    for place, one in enumerate(told):
        layer, word = _layer(name, place, one, known[place] if known else None, moves, settings)
        stack.append(layer)
        if WORST.index(layer["tone"]) < WORST.index(worst[0]):
            worst = layer["tone"], word or layer["state"] or layer["policy"]
    errors = failing(seen, moves)
    if errors is not None and WORST.index(errors) < WORST.index(worst[0]):
        worst = errors, "failing"
    if worst[0] == "ok" and degraded_share(name, moves) >= limits.DEGRADED:
        worst = "warn", "degraded"  # each layer may be well while fallbacks answer
    if "snapshot_error" in seen:
        worst = "warn", "unreadable"
    broken = {one["state"] for one in stack if (one["policy"], one["tone"]) == ("breaker", "bad")}
    if broken:
        # Of all problems, an open breaker is the one that blocks all calls; the rest is in the
        # stack.
        worst = "bad", next((state for state in BREAKERS if state in broken), worst[1])
    states = [str(one.get("state")) for one in told if one.get("policy") == "breaker"]
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


# Layers


def _layer(
    name: str, place: int, seen: Seen, policy: Any, moves: Moves, ask: Asked
) -> tuple[Layer, str]:
    kind = str(seen.get("policy", ""))
    for counter in ("rejected", "would_reject"):
        if counter in seen:
            moves.rate(("layer", name, place, counter), seen[counter])
    told = told_of(kind, name, place, seen, moves)
    facts = [*told.facts, *refused_facts(name, place, seen, moves)]
    sharing, tone, word = "", told.tone, told.word
    shared = seen.get("shared")
    if isinstance(shared, Mapping):
        sharing = shown(shared.get("mode", "shared"), LONGEST_WORD)
        if sharing != "shared" and tone == "ok":
            tone, word = "warn", "without store"
    state, mode = told.state, seen.get("mode")
    if mode == "off":
        tone, state, word = "off", "off", ""
    elif mode == "shadow":
        tone = "warn" if tone == "bad" else tone
        state = f"{state}, shadow" if state else "shadow"
    settings = ask(kind, policy)
    layer = Layer(
        policy=shown(kind, LONGEST_WORD),
        title=settings.title,
        settings=settings.words,
        tone=tone,
        state=shown(state, LONGEST_WORD),
        facts=[fact(*one) for one in facts[:MOST_FACTS]],
        sharing=sharing,
        acts=list(told.acts),
        changes=settings.changes,
    )
    return layer, word
