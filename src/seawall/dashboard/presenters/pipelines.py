"""Pipelines: a row for each, with the data for drawing its stages.

A row shows what one pod runs. The page adds up the pods that run the same pipeline, so nodes have
numbers, and text only where they cannot be added. Names, causes and items come from users: all of
them are truncated here.

Pure except for `Counters`. Values that are missing or have another shape are omitted.
"""

from __future__ import annotations

from typing import Any, Final, cast

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import (
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_AT_WORK,
    MOST_CAUSES,
    MOST_DRAWN,
    MOST_KEYS,
    MOST_NODES,
    MOST_READINGS,
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
    listed,
    mapping,
    things,
    time_of,
)
from seawall.dashboard.presenters.queues import REPLAY
from seawall.dashboard.views import (
    WORST,
    OldestItem,
    PipeNode,
    Pipes,
    PipeWork,
    SourceReading,
    Tone,
)
from seawall.telemetry import thresholds as limits

PIPELINE: Final = "pipeline"
"""The kind of the rows."""
COLLECT: Final = "collect"
"""The kind of an object that reads many sources at once, in a pipeline or not."""
NO_ROOM: Final = "no room in "
"""Prefix by which a stage reports that it waits for the next one, which is the slow one."""
BACKED_UP: Final = 0.4
"""Share of a queue in use from which it is backed up: a full one accepts items again at 0.5."""
LONG_WAIT: Final = 0.25
"""Seconds from which the wait in a backed-up queue is reported."""
TITLE: Final = "Pipelines"
"""The section of these rows."""

COUNTS: Final = (
    *("done", "retries", "failed", "degraded"),
    *("dropped", "dead_letters", "refused", "deaths"),
)
"""The counters in a stage's snapshot."""
_OWN: Final = frozenset({"name", "kind", "read", "rate", "waits", "last_at", "error"})
"""Values of a source that are not shown as facts, but in another way."""


class PipelineRows:
    """The pipelines of one process at one moment, up to a limit."""

    def __init__(self) -> None:
        self._room = MOST_DRAWN
        self._collects: set[str] = set()
        """Names of collecting sources that a pipeline shows."""

    def pipeline(self, name: str, seen: Seen, counters: Counters) -> RowContent:
        """Describe a pipeline."""
        sources, stages = things(seen, "sources"), things(seen, "stages")
        self._collects.update(_name(one) for one in sources if one.get("kind") == COLLECT)
        for stage in stages:
            for counter in ("done", "failed", "dead_letters"):  # what the rules need
                key = PIPELINE, name, str(stage.get("name", "")), counter
                counters.rate(key, stage.get(counter))
        running = seen.get("running") is True
        room = min(MOST_NODES, len(sources) + len(stages))
        if room > self._room:
            facts = [*_facts(seen), ("not drawn", "there are too many stages in this process")]
            state, tone = (_in_flight(seen), "ok") if running else ("not running", "off")
            return RowContent(state, cast("Tone", tone), facts)
        self._room -= room
        nodes = [_source(one) for one in sources[:room]]
        nodes += [_stage(name, one, counters) for one in stages[: room - len(nodes)]]
        _link(nodes, seen.get("links"))
        if not running:
            for node in nodes:
                node["tone"] = "off"
        pipes = Pipes(
            oldest=_oldest(seen),
            nodes=nodes,
            slow=_slowest(nodes) if running else None,
            more=len(sources) + len(stages) - len(nodes),
        )
        return RowContent(
            _state(seen, nodes) if running else "not running",
            min((node["tone"] for node in nodes), key=WORST.index, default="off"),
            _facts(seen),
            max(map(_fullness, nodes), default=None),
            sum(node["rate"] for node in nodes if node["kind"] == "sink"),
            pipes=pipes,
        )

    def collect(self, name: str, seen: Seen) -> list[RowContent]:
        """Describe a `Collect`; return nothing if a pipeline shows it."""
        if shown(name, LONGEST_WORD) in self._collects:
            return []
        missing = [one["name"] for one in readings_of(seen) if one["state"] != "ok"]
        facts: Facts = [fact("missing", listed(missing))] if missing else []
        facts += [
            (say.plainly(key), say.amount(seen.get(key)))
            for key in ("minimum", "collections", "degraded", "too_few")
        ]
        tone: Tone = "bad" if too_few(seen) else "warn" if missing else "ok"
        state = f"{len(missing)} of {say.several(seen.get('sources'), 'source')} missing"
        return [RowContent(state if missing else "all sources answer", tone, facts)]


def _name(seen: Seen, key: str = "name") -> str:
    return shown(seen.get(key, ""), LONGEST_WORD)


def _amount(seen: Seen, key: str) -> float:
    value = number(seen.get(key))
    return value if value > 0 else 0.0


def readings_of(source: Seen) -> list[SourceReading]:
    """Return the readings of a collecting source, the missing ones first."""
    readings = [
        SourceReading(
            name=_name(one, "source"),
            state="stale" if one.get("state") == "stale" else "unavailable",
            seconds=_rounded(_amount(one, "since")),
            cause=shown(one.get("cause") or "", LONGEST_TEXT),
        )
        for one in things(source, "missing")
    ]
    missing = {one["name"] for one in readings}
    names = source.get("names")
    for name in names if isinstance(names, (list, tuple)) else ():
        its_name = shown(name, LONGEST_WORD)
        if its_name not in missing:
            readings.append(SourceReading(name=its_name, state="ok", seconds=0.0, cause=""))
    return readings


def too_few(source: Seen) -> tuple[float, float] | None:
    """Return how many readings have a value and how many are needed, if too few; otherwise None."""
    unavailable = sum(one.get("state") != "stale" for one in things(source, "missing"))
    have, needed = _amount(source, "sources") - unavailable, _amount(source, "minimum")
    return (max(0.0, have), needed) if unavailable and have < needed else None


def _source(seen: Seen) -> PipeNode:
    node = _node("source", seen)
    readings = readings_of(seen)
    missing = sum(one["state"] != "ok" for one in readings)
    answers = f"{missing} of {say.amount(seen.get('sources'))} missing"
    node["readings"] = sorted(readings[:MOST_READINGS], key=lambda one: one["name"])
    node["facts"] = _source_facts(seen)
    error = shown(seen.get("error") or "", LONGEST_TEXT)
    if error:
        node["tone"], node["state"] = "bad", error
    elif too_few(seen) is not None:
        node["tone"], node["state"] = "bad", f"too few, {answers}"
    elif missing:
        node["tone"], node["state"] = "warn", answers
    elif seen.get("waits") is True:
        node["state"] = "waits for room"
    elif not node["rate"] and seen.get("last_at") is not None:
        node["state"] = f"last item {say.seconds(round(_amount(seen, 'last_at'), 1))} ago"
    else:
        node["state"] = "reads" if node["rate"] else "nothing yet"
    return node


def _source_facts(seen: Seen) -> Facts:
    facts: Facts = [fact("kind", str(seen["kind"]))] if seen.get("kind") else []
    facts.append(("read", say.amount(seen.get("read"))))
    if seen.get("last_at") is not None:
        facts.append(("last item", f"{say.seconds(round(_amount(seen, 'last_at'), 1))} ago"))
    for key, value in seen.items():
        if key in _OWN or value is None:
            continue
        if isinstance(value, bool):
            facts.append(fact(say.plainly(str(key)), say.truth(value)))
        elif isinstance(value, (int, float)):
            facts.append(fact(say.plainly(str(key)), say.amount(value)))
        elif isinstance(value, str):
            facts.append(fact(say.plainly(str(key)), say.address(value)))
    return facts[: MOST_CAUSES * 2]


def failing_share(name: str, stage: str, counters: Counters) -> float:
    """Return the share of items that failed in a stage recently, from 0 to 1."""
    failed = counters.long_term((PIPELINE, name, stage, "failed"))
    done = counters.long_term((PIPELINE, name, stage, "done"))
    return failed / (failed + done) if failed else 0.0


def failing_tone(share: float, seen: Seen) -> Tone:
    """Return how bad it is that this share of the items fails; degraded items still arrive."""
    if share > limits.ERROR_RATIO and not degrades_all(seen):
        return "bad"
    return "warn" if share > limits.ERROR_RATIO_WARN else "ok"


def degrades_all(seen: Seen) -> bool:
    """Return whether all items that failed in a stage continued as degraded ones."""
    return 0 < number(seen.get("failed")) <= number(seen.get("degraded"))


def causes_of(seen: Seen) -> list[tuple[str, int]]:
    """Return the causes of a stage's failures, the most frequent first."""
    failures = mapping(seen.get("failures"))
    causes = [(shown(why, LONGEST_NAME), int(_amount(failures, why))) for why in failures]
    return sorted(causes, key=lambda one: -one[1])


def blocked_by(seen: Seen) -> str:
    """Return why a stage waits, unless it waits for the next one; "" if it does not wait."""
    why = shown(seen.get("waits_for") or "", LONGEST_TEXT)
    return "" if why.startswith(NO_ROOM) else why


def blocked_tone(name: str, seen: Seen, counters: Counters) -> Tone:
    """Return how bad it is that a stage waits: "bad" if nothing leaves it, "ok" if not waiting."""
    if not blocked_by(seen):
        return "ok"
    done = counters.recent((PIPELINE, name, str(seen.get("name", "")), "done"))
    return "warn" if done else "bad"


def _stage(name: str, seen: Seen, counters: Counters) -> PipeNode:
    kind = seen.get("kind")
    node = _node(kind if kind in ("sink", "branch") else "stage", seen)
    node["failures"] = causes_of(seen)[:MOST_CAUSES]
    node["at_work"] = [_work(one) for one in things(seen, "at_work")[:MOST_AT_WORK]]
    node["waits_for"] = blocked_by(seen)
    share = failing_share(name, str(seen.get("name", "")), counters)
    tones: list[Tone] = [blocked_tone(name, seen, counters), failing_tone(share, seen)]
    tones.append("bad" if node["oldest"] > limits.QUEUE_AGE_SECONDS else "ok")
    node["tone"] = min(tones, key=WORST.index)
    if node["waits_for"]:
        node["state"] = shown(f"waits: {node['waits_for'].partition(':')[0]}", LONGEST_WORD)
    elif failing_tone(share, seen) != "ok":
        node["state"] = f"{say.share(share)} {'degraded' if degrades_all(seen) else 'fail'}"
    elif seen.get("waits_for"):
        node["state"] = "waits for room"
    elif node["workers"]:
        node["state"] = f"{say.amount(node['busy'])} of {say.amount(node['workers'])} busy"
    return node


def _slowest(nodes: list[PipeNode]) -> int | None:
    """Return the index of the stage that slows down those before it, if there is one.

    Its queue is backed up, and those of the following stages are not. Of several, it is the one
    with the longest wait.
    """
    backed_up = {place for place, node in enumerate(nodes) if _fullness(node) >= BACKED_UP}
    found = [
        place
        for place in sorted(backed_up)
        if nodes[place]["oldest"] >= LONG_WAIT and not backed_up.intersection(nodes[place]["to"])
    ]
    return max(found, key=lambda place: nodes[place]["oldest"], default=None)


def _work(seen: Seen) -> PipeWork:
    return PipeWork(
        item=shown(seen.get("item", ""), LONGEST_KEY),
        items=int(max(1.0, _amount(seen, "items"))),
        since=_rounded(_amount(seen, "since")),
        waits_for=shown(seen.get("waits_for") or "", LONGEST_WORD),
    )


def _node(kind: Any, seen: Seen) -> PipeNode:
    return PipeNode(
        name=_name(seen),
        kind=kind,
        tone="ok",
        state="",
        to=[],
        rate=_rounded(_amount(seen, "rate")),
        waiting=_amount(seen, "waiting"),
        capacity=_amount(seen, "capacity"),
        busy=_amount(seen, "busy"),
        workers=_amount(seen, "workers"),
        oldest=_rounded(_amount(seen, "oldest")),
        p50=time_of(seen, "p50"),
        p99=time_of(seen, "p99"),
        counts={key: _amount(seen, key) for key in COUNTS if seen.get(key)},
        waits_for="",
        failures=[],
        at_work=[],
        readings=[],
        facts=[],
    )


def _link(nodes: list[PipeNode], links: Any) -> None:
    places = {node["name"]: place for place, node in enumerate(nodes)}
    for link in links if isinstance(links, (list, tuple)) else ():
        if not isinstance(link, (list, tuple)) or len(link) != 2:  # noqa: PLR2004 - from and to
            continue
        origin, target = (places.get(shown(name, LONGEST_WORD)) for name in link)
        if origin is None or target is None or target in nodes[origin]["to"]:
            continue
        nodes[origin]["to"].append(target)


def _rounded(value: float) -> float:
    return round(value, 3)


def _fullness(node: PipeNode) -> float:
    return node["waiting"] / node["capacity"] if node["capacity"] else 0.0


def _oldest(seen: Seen) -> OldestItem | None:
    oldest = mapping(seen.get("oldest"))
    if not oldest:
        return None
    age = _rounded(_amount(oldest, "age"))
    return OldestItem(item=_name(oldest, "item"), age=age, stage=_name(oldest, "stage"))


def _state(seen: Seen, nodes: list[PipeNode]) -> str:
    """Summarize a running pipeline by its worst node."""
    worst = [node for tone in ("bad", "warn") for node in nodes if node["tone"] == tone]
    if not worst:
        return _in_flight(seen)
    more = f", and {len(worst) - 1} more" if len(worst) > 1 else ""
    return f"{worst[0]['name']}: {worst[0]['state']}{more}"


def _in_flight(seen: Seen) -> str:
    return f"{say.several(_amount(seen, 'in_flight'), 'item')} in flight"


def _facts(seen: Seen) -> Facts:
    facts: Facts = [
        (label, say.amount(seen.get(key)))
        for key, label in (
            ("read", "read"),
            ("in_flight", "in flight"),
            ("sink", "stored"),
            ("degraded", "degraded"),
            ("dead_letter", "dead letters"),
            ("dropped", "dropped"),
            ("returned", "returned"),
        )
        if number(seen.get(key)) or key in {"read", "in_flight", "sink"}
    ]
    oldest = _oldest(seen)
    if oldest is not None:
        where = f" in {oldest['stage']}" if oldest["stage"] else ""
        facts.append(fact("oldest item", f"{say.seconds(oldest['age'])}{where}"))
    return facts


def pipeline_troubles(_kind: str, name: str, seen: Seen, counters: Counters) -> Troubles:
    """Yield the troubles of a pipeline."""
    if seen.get("running") is not True:
        return
    for source in things(seen, "sources"):
        its_name = str(source.get("name", ""))
        if source.get("error"):
            what = f"Source {shown(its_name, LONGEST_KEY)} cannot be read: {source['error']}"
            advice = "Nothing comes from it until it can"
            yield FoundTrouble(f"source:{name}:{its_name}", "bad", name, what, advice)
        yield from _missing(its_name, name, source)
    for stage in things(seen, "stages"):
        yield from _stage_troubles(name, str(stage.get("name", "")), stage, counters)


def _missing(name: str, where: str, seen: Seen) -> Troubles:
    """Yield what is missing in a collecting source, in a pipeline or not."""
    missing = [one for one in readings_of(seen) if one["state"] != "ok"]
    if not missing:
        return
    short, cause = too_few(seen), ""
    if short is not None:
        have, needed = map(say.amount, short)
        cause = f"minimum:{name}"
        what = f"Too few sources have a value: {have}, and {needed} are needed"
        advice = "It goes on as its too_few= says until enough of them are back"
        lasted = min(one["seconds"] for one in missing)
        yield FoundTrouble(cause, "bad", where, what, advice, degrades=True, lasted=lasted)
    if len(missing) > MOST_KEYS:
        names = listed([one["name"] for one in missing])
        what = f"{len(missing)} sources are missing: {names}"
        lasted = max(one["seconds"] for one in missing)
        yield _missing_trouble(name, "", where, what, cause, lasted)
        return
    for one in missing:
        its_name = shown(one["name"], LONGEST_KEY)
        stands_in = ", its last value stands in" if one["state"] == "stale" else ""
        why = f": {one['cause']}" if one["cause"] else ""
        what = f"Source {its_name} is missing{stands_in}{why}"
        yield _missing_trouble(name, its_name, where, what, cause, one["seconds"])


def _missing_trouble(
    name: str, source: str, where: str, what: str, cause: str, lasted: float
) -> FoundTrouble:
    advice = "The others go on without it: it is asked again each time"
    return FoundTrouble(
        f"missing:{name}:{source}",
        "warn",
        where,
        what,
        advice,
        cause=cause,
        degrades=True,
        lasted=lasted,
    )


def _stage_troubles(name: str, stage: str, seen: Seen, counters: Counters) -> Troubles:
    its_name = shown(stage, LONGEST_KEY)
    guard = seen.get("guard")
    cause = f"{GUARD_OF_STAGE}{guard}" if guard else ""
    tone = blocked_tone(name, seen, counters)
    if tone != "ok":
        waiting = say.several(seen.get("waiting"), "item waits", "items wait")
        what = f"Stage {its_name} waits, {waiting} before it: {blocked_by(seen)}"
        advice = "Look at what it calls: its items wait, none is lost"
        yield FoundTrouble(f"waits:{name}:{stage}", tone, name, what, advice, cause=cause)
    share = failing_share(name, stage, counters)
    tone = failing_tone(share, seen)
    if tone != "ok":
        causes = [f"{why} ({times})" for why, times in causes_of(seen)]
        why = f": {listed(causes)}" if causes else ""
        do = "are degraded" if degrades_all(seen) else "fail"
        what = f"{say.share(share)} of the items {do} in stage {its_name}{why}"
        advice = "Look at why they fail"
        yield FoundTrouble(f"errors:{name}:{stage}", tone, name, what, advice, cause=cause)
    age = number(seen.get("oldest"))
    if age > limits.QUEUE_AGE_SECONDS:
        waiting = f", {say.amount(seen.get('waiting'))} wait"
        what = f"An item has waited for {say.seconds(age)} for stage {its_name}{waiting}"
        advice = "Is it slow? Give it more workers, or batches"
        cause = f"waits:{name}:{stage}"
        yield FoundTrouble(f"age:{name}:{stage}", "bad", name, what, advice, cause=cause)
    dead = counters.recent((PIPELINE, name, stage, "dead_letters"))
    if dead > limits.DEAD:
        what = f"Stage {its_name} sets items aside: {say.several(dead, 'dead letter')} just now"
        cause = f"errors:{name}:{stage}"
        yield FoundTrouble(f"dead:{name}", "warn", name, what, REPLAY, cause=cause)


def collect_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    """Yield the troubles of a `Collect` outside of pipelines."""
    yield from _missing(name, name, seen)


GUARD_OF_STAGE: Final = "guard:"
"""Prefix of a cause that means any problem of the guard of that name."""
