"""Members of groups: a row for each group, and one for each of its members.

A row shows what one pod sees. The page and `seawall members` merge the rows of all pods. The level
in a row's history is a share of the threshold: from 1 on the member is suspected.

Pure except for the counters in `Moves`. Values that are missing or have another shape are omitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import WORST, number
from seawall.dashboard._lately import Seen, mapping
from seawall.dashboard._layers import Facts
from seawall.dashboard._lines import Line
from seawall.dashboard._moves import Moves
from seawall.dashboard.views import Row, Tone
from seawall.telemetry import _thresholds as limits

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


def group_lines(name: str, seen: Seen, moves: Moves) -> Iterator[tuple[str, str, Line]]:
    """Yield kind, name and line of a group, then of each of its members."""
    members = members_of(seen)
    yield GROUP, name, _group(name, seen, members, moves)
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


def member_of(row: Row, group: str) -> str | None:
    """Return the name of the member in a row; None if it is in another group."""
    name = row["name"].removeprefix(f"{group}: ")
    return name if row["kind"] == MEMBER and name != row["name"] else None


def _group(name: str, seen: Seen, members: list[Seen], moves: Moves) -> Line:
    states = Counter(str(member.get("state", "unknown")) for member in members)
    told = [f"{states[state]} {state}" for state in ("confirmed", "suspected") if states[state]]
    counts = mapping(seen.get("counts"))
    facts: Facts = [("this pod", str(seen["own"]))] if seen.get("own") else []
    for label, text in (
        ("suspected so far", _suspicions(counts)),
        ("round trip", _round_trips(mapping(seen.get("round_trip")))),
        ("health score", score_of(seen.get("health_score"))),
        ("own pauses", _pauses(counts)),
        ("messages", _messages(name, mapping(seen.get("messages")), moves)),
        ("not shown", say.amount(max(0, len(members) - MOST_MEMBERS))),
    ):
        if text not in {"", "0"}:
            facts.append((label, text))
    state = ", ".join([*told, f"{states['alive']} alive"])
    present = states["alive"] + states["suspected"]
    tones = [tone_of(one, seen) for one in members]
    tone: Tone = min(tones, key=WORST.index, default="off")
    return Line(state, tone, facts, None, float(present))


def _suspicions(counts: Seen) -> str:
    if not number(counts.get("suspicions")):
        return ""
    told = say.several(counts["suspicions"], "time")
    rate = counts.get("false_suspect_rate")
    return told if rate is None else f"{told}, {say.share(rate)} wrong"


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


def _messages(name: str, messages: Seen, moves: Moves) -> str:
    ways = ("sent", "received", "refused")
    for way in ways:
        moves.rate((GROUP, name, way), messages.get(way))
    speeds = {way: moves.lately_rate((GROUP, name, way)) for way in ways}
    if not number(messages.get("sent")):
        return ""
    return ", ".join(f"{say.rate(speed)} {way}" for way, speed in speeds.items() if speed) or "none"


def _member(member: Seen, tone: Tone) -> Line:
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
    return Line(state, tone, facts, None, number(level / threshold), figures)


def _level(level: float, threshold: float) -> str:
    """Return a level for reading; that of a silent member grows without limit."""
    most = max(MOST_LEVEL, threshold)
    told = say.amount(round(level, 1)) if level <= most else f"over {say.amount(most)}"
    return f"{told} of {say.amount(threshold)}"
