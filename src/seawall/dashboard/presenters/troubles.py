"""The problems of this process, as sentences, with their start.

The rules are pure except for the counters in `Counters`, which are recorded before the rules run.
Nothing raises, whatever a snapshot holds. The thresholds are those of the alert rules
(`seawall.telemetry.thresholds`). `summary` merges the problems of all pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import LONGEST_NAME, LONGEST_TEXT, MOST_TROUBLES, number, shown
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import FoundTrouble, Seen, Snapshot, found_by, things
from seawall.dashboard.presenters.pipelines import GUARD_OF_STAGE
from seawall.dashboard.presenters.sections import PRESENTERS
from seawall.dashboard.views import PodTrouble, Tone
from seawall.telemetry import thresholds as limits

FORGET_AFTER: Final = 3
"""Number of samples without a problem before it starts anew: a flicker does not end it."""


class TroubleStarts:
    """Start times of the problems. Not safe for concurrent use."""

    def __init__(self) -> None:
        self._kept: dict[str, list[float]] = {}

    def date(
        self,
        found: Iterable[FoundTrouble],
        wall: float,
        began: Mapping[str, float],
        traces: Mapping[str, str] = MappingProxyType({}),
    ) -> list[PodTrouble]:
        """Return the problems with their start times: the worst first, then the oldest.

        A problem starts with its event, if there was one (`began`, and `traces` if the event had a
        trace), or when the snapshot says; otherwise with the first sample that shows it.
        """
        first = {one.id: one for one in reversed(list(found))}
        for known, (_, missing) in list(self._kept.items()):
            if known not in first:
                self._kept[known][1] += 1
                if missing + 1 >= FORGET_AFTER:
                    del self._kept[known]
        troubles = []
        for one in first.values():
            begin = min(wall - one.lasted, began.get(one.began, wall))
            kept = self._kept.setdefault(one.id, [begin, 0])
            kept[1] = 0
            trouble = _trouble(one, kept[0])
            if one.began in traces:
                trouble["trace"] = traces[one.began]
            troubles.append(trouble)
        troubles.sort(key=lambda one: (one["tone"] != "bad", one["since"], one["id"]))
        return _cut(troubles, wall)


def _trouble(one: FoundTrouble, since: float) -> PodTrouble:
    trouble = PodTrouble(
        id=shown(one.id, LONGEST_TEXT),
        tone=one.tone,
        where=shown(one.where, LONGEST_NAME),
        what=shown(one.what, LONGEST_TEXT),
        advice=shown(one.advice, LONGEST_TEXT),
        since=since,
    )
    if one.cause:
        trouble["cause"] = shown(one.cause, LONGEST_TEXT)
    if one.degrades:
        trouble["degrades"] = True
    return trouble


def _cut(troubles: list[PodTrouble], wall: float) -> list[PodTrouble]:
    if len(troubles) <= MOST_TROUBLES:
        return troubles
    shown_ones = troubles[: MOST_TROUBLES - 1]
    left = len(troubles) - len(shown_ones)
    since = min((one["since"] for one in troubles[MOST_TROUBLES - 1 :]), default=wall)
    tone = troubles[MOST_TROUBLES - 1]["tone"]
    more = FoundTrouble("more", tone, "here", f"{left} more troubles")
    return [*shown_ones, _trouble(more, since)]


def troubles_of(
    snapshot: Snapshot, counters: Counters, load: float, differing: Iterable[tuple[str, str]] = ()
) -> list[FoundTrouble]:
    """Return all problems except those of guards, which `troubles_in` finds."""
    found: list[FoundTrouble] = []
    for kind in snapshot:
        if kind != "guard":
            for thing in things(snapshot, kind):
                found += troubles_in(kind, thing, counters)
    if load > limits.LOAD_WARN:
        tone: Tone = "bad" if load > limits.LOAD else "warn"
        what = f"This process is full to {say.share(load)}"
        found.append(FoundTrouble("load", tone, "here", what, "Start more processes, or shed more"))
    for guard, policy in differing:
        what = f"Pods do not agree on the settings of the {say.plainly(policy)}"
        advice = "Give all pods the same settings"
        found.append(FoundTrouble(f"differ:{guard}:{policy}", "warn", guard, what, advice))
    return found


def troubles_in(kind: str, thing: Seen, counters: Counters) -> list[FoundTrouble]:
    """Return the problems of one object of that kind."""
    name = str(thing.get("name", ""))
    presenter = PRESENTERS.get(kind)
    found = list(_unreadable(kind, name, thing))
    if presenter is None or presenter.troubles is None:
        return found
    return found + found_by(presenter.troubles(kind, name, thing, counters))


def _unreadable(kind: str, name: str, seen: Seen) -> Iterator[FoundTrouble]:
    what = say.plainly(kind)
    if "snapshot_error" in seen:
        text = f"The {what} cannot be read"
        yield FoundTrouble(f"unreadable:{kind}:{name}", "warn", name, text, "See its logs")
    elif "stored_error" in seen:
        text, advice = f"The {what} cannot be asked", "See whether its store or database answers"
        yield FoundTrouble(f"unreadable:{kind}:{name}", "warn", name, text, advice)
    elif number(seen.get("stored_age")) > limits.READING_AGE_SECONDS:
        text = f"What is known of the {what} is {say.seconds(seen['stored_age'])} old"
        advice = "Let a Refresher ask more often"
        yield FoundTrouble(f"old:{kind}:{name}", "warn", name, text, advice)


def with_guards(found: list[FoundTrouble]) -> list[FoundTrouble]:
    """Set the problems of their guards as causes of stages that wait or fail."""
    roots = {one.where: one.id for one in reversed(found) if not one.cause}
    return [
        one._replace(cause=roots.get(one.cause.removeprefix(GUARD_OF_STAGE), ""))
        if one.cause.startswith(GUARD_OF_STAGE)
        else one
        for one in found
    ]
