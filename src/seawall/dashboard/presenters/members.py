"""Members of groups: a row for each group, and one for each of its members.

A row shows what one pod sees. The page and `seawall members` merge the rows of all pods. The level
in a row's history is a share of the threshold: from 1 on the member is suspected.

Pure except for `Counters`. Values that are missing or have another shape are omitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import LONGEST_KEY, MOST_KEYS, number, shown
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import (
    Facts,
    FoundTrouble,
    RowContent,
    Seen,
    Troubles,
    listed,
    mapping,
)
from seawall.dashboard.views import WORST, RowView, Tone
from seawall.telemetry import thresholds as limits

GROUP: Final = "members"
MEMBER: Final = "member"
"""The kinds of the rows."""
TITLE: Final = "Members"
"""The section of these rows."""
MOST_MEMBERS: Final = 200
"""Maximum number of members of a group, the worst first; beyond that, only their number is shown.
"""

MOST_LEVEL: Final = 100.0
"""The highest level that is shown as a number."""
TONES: Final[dict[str, Tone]] = {"alive": "ok", "suspected": "warn", "confirmed": "bad"}
"""Tones by state; others are "off"."""
WORDS: Final = {"suspected": "suspected", "confirmed": "confirmed as failed"}
"""The states that are problems, as worded in sentences."""


def group_rows(name: str, seen: Seen, counters: Counters) -> Iterator[tuple[str, str, RowContent]]:
    """Yield kind, name and line of a group, then of each of its members."""
    members = members_of(seen)
    yield GROUP, name, _group(name, seen, members, counters)
    for member in members[:MOST_MEMBERS]:
        yield MEMBER, f"{name}: {member.get('name', '')}", _member(member, tone_of(member, seen))


def members_of(seen: Seen) -> list[Seen]:
    """Return the members in a group's snapshot, the worst first."""
    members = seen.get("members")
    return list(map(mapping, members)) if isinstance(members, (list, tuple)) else []


def tone_of(member: Seen, group: Seen) -> Tone:
    """Return how bad the state of a member is; one that is gone for good is not bad."""
    state = str(member.get("state", "unknown"))
    lasted = number(member.get("seconds"))
    if state == "confirmed" and group.get("kind") == "cluster" and lasted > limits.GONE_SECONDS:
        return "off"
    return TONES.get(state, "off")


def member_of(row: RowView, group: str) -> str | None:
    """Return the name of the member in a row; None if it is in another group."""
    name = row["name"].removeprefix(f"{group}: ")
    return name if row["kind"] == MEMBER and name != row["name"] else None


def _group(name: str, seen: Seen, members: list[Seen], counters: Counters) -> RowContent:
    states = Counter(str(member.get("state", "unknown")) for member in members)
    troubled = [f"{states[state]} {state}" for state in ("confirmed", "suspected") if states[state]]
    counts = mapping(seen.get("counts"))
    facts: Facts = [("this pod", str(seen["own"]))] if seen.get("own") else []
    for label, text in (
        ("suspected so far", _suspicions(counts)),
        ("round trip", _round_trips(mapping(seen.get("round_trip")))),
        ("health score", score_of(seen.get("health_score"))),
        ("own pauses", _pauses(counts)),
        ("messages", _messages(name, mapping(seen.get("messages")), counters)),
        ("not shown", say.amount(max(0, len(members) - MOST_MEMBERS))),
    ):
        if text not in {"", "0"}:
            facts.append((label, text))
    state = ", ".join([*troubled, f"{states['alive']} alive"])
    present = states["alive"] + states["suspected"]
    tones = [tone_of(one, seen) for one in members]
    tone: Tone = min(tones, key=WORST.index, default="off")
    return RowContent(state, tone, facts, None, float(present))


def _suspicions(counts: Seen) -> str:
    if not number(counts.get("suspicions")):
        return ""
    times = say.several(counts["suspicions"], "time")
    rate = counts.get("false_suspect_rate")
    return times if rate is None else f"{times}, {say.share(rate)} wrong"


def _round_trips(times: Seen) -> str:
    known = [(p, times.get(p)) for p in ("p50", "p99")]
    return ", ".join(f"{say.seconds(value)} ({p})" for p, value in known if value is not None)


def score_of(score: Any) -> str:
    """Return a health score as text; "" if there is none."""
    return "" if score is None else f"{say.amount(score)} of 8"


def _pauses(counts: Seen) -> str:
    if not number(counts.get("own_pauses")):
        return ""
    return f"{say.amount(counts['own_pauses'])}, {say.seconds(counts.get('paused_seconds'))}"


def _messages(name: str, messages: Seen, counters: Counters) -> str:
    ways = ("sent", "received", "refused")
    for way in ways:
        counters.rate((GROUP, name, way), messages.get(way))
    speeds = {way: counters.recent_rate((GROUP, name, way)) for way in ways}
    if not number(messages.get("sent")):
        return ""
    return ", ".join(f"{say.rate(speed)} {way}" for way, speed in speeds.items() if speed) or "none"


def _member(member: Seen, tone: Tone) -> RowContent:
    state = str(member.get("state", "unknown"))
    seconds, level = number(member.get("seconds")), number(member.get("level"))
    threshold = number(member.get("threshold")) or 1.0
    facts: Facts = [("for", say.seconds(seconds)), ("level", _level(level, threshold))]
    figures = {"seconds": seconds, "level": level, "threshold": threshold}
    if member.get("round_trip") is not None:
        figures["round_trip"] = number(member["round_trip"])
        facts.append(("round trip", say.seconds(figures["round_trip"])))
    if state != "alive":
        facts += [(key, str(member[key])) for key in ("reason", "by") if member.get(key)]
    return RowContent(state, tone, facts, None, number(level / threshold), figures)


def _level(level: float, threshold: float) -> str:
    """Return a level for reading; that of a silent member grows without limit."""
    most = max(MOST_LEVEL, threshold)
    shown_level = say.amount(round(level, 1)) if level <= most else f"over {say.amount(most)}"
    return f"{shown_level} of {say.amount(threshold)}"


def member_troubles(_kind: str, name: str, seen: Seen, counters: Counters) -> Troubles:
    """Yield the troubles of a group and its members."""
    for state in WORDS:
        found = [
            one
            for one in members_of(seen)
            if one.get("state") == state and tone_of(one, seen) != "off"
        ]
        if len(found) > MOST_KEYS:
            yield _many_members(name, state, found, seen)
        else:
            yield from (_one_member(name, state, one) for one in found)
    score = seen.get("health_score")
    if number(score) >= limits.HEALTH_SCORE:
        what = f"This pod may be the slow one: health score {score_of(score)}"
        advice = "It gives others more time. Look at its CPU and its event loop"
        yield FoundTrouble(f"member_health:{name}", "warn", name, what, advice)
    refused = counters.recent_rate(("members", name, "refused"))
    if refused:
        what = f"Messages of members are refused, {say.rate(refused)}"
        yield FoundTrouble(f"member_messages:{name}", "warn", name, what, "Have all the same keys?")


def _one_member(name: str, state: str, member: Seen) -> FoundTrouble:
    its_name = shown(member.get("name", ""), LONGEST_KEY)
    reason = f": {member['reason']}" if member.get("reason") else ""
    what = f"{its_name} is {WORDS[state]}{reason}"
    advice = {"suspected": "It may only be slow: it is cleared as soon as it answers"}
    lasted = number(member.get("seconds"))
    return _member_trouble(state, f"{name}:{its_name}", name, what, advice.get(state, ""), lasted)


def _many_members(name: str, state: str, found: list[Seen], seen: Seen) -> FoundTrouble:
    names = listed([str(member.get("name", "")) for member in found])
    what = f"{len(found)} of {len(members_of(seen))} members are {WORDS[state]}: {names}"
    advice = "If it is most of them, look at the network of the pod that says so"
    lasted = max(number(member.get("seconds")) for member in found)
    return _member_trouble(state, name, name, what, advice, lasted)


def _member_trouble(
    state: str, key: str, group: str, what: str, advice: str, lasted: float
) -> FoundTrouble:
    cause = f"confirmed:{key}" if state == "suspected" else ""
    tone = TONES[state]
    return FoundTrouble(f"{state}:{key}", tone, group, what, advice, cause=cause, lasted=lasted)
