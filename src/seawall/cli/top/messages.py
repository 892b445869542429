"""Validation of messages from a dashboard: bounded, typed, and safe for a terminal.

A dashboard is a server, and its texts come from users and from other pods, so they are untrusted.

Promises:
- Reading raises `NotADashboard` or returns a whole message.
- A pod whose view is invalid is omitted, with a note.
- No text has control characters, escape sequences or direction overrides (`dashboard.bounds.shown`
  escapes them), nor many combining marks on one letter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple, NoReturn, TypedDict, cast
from unicodedata import category

from seawall.dashboard.bounds import LONGEST_NAME, MOST_GUARDS, MOST_TRACKS, number, shown
from seawall.dashboard.summary import service_events, service_troubles, service_verdict
from seawall.dashboard.validation import valid_view
from seawall.dashboard.views import (
    FORMAT,
    WORST,
    DashboardMessage,
    GuardTrack,
    GuardView,
    History,
    PodTrouble,
    RowView,
    ServiceEvent,
    ServiceTrouble,
    ServiceVerdict,
    Tone,
    View,
)

MOST_PODS: Final = 200
"""Maximum number of pods; the first ones are shown."""

MOST_POINTS: Final = 180
"""Maximum number of points in the history of a pod; more are not drawn."""

MOST_MARKS: Final = 4
"""Maximum number of combining marks on one letter: no script needs more, and more would cover other
lines.
"""

_NOT_ONE: Final = "what answers there is not a Seawall dashboard"

_SELECTORS: Final = range(0xFE00, 0xFE10)
"""Variation selectors: they change the width of a character, about which terminals disagree."""

_STATES: Final = frozenset({"closed", "open", "half_open", "isolated"})
RATES: Final = ("succeeded", "degraded", "failed", "rejected")
"""The names of the rates in the history of a guard."""


class NotADashboard(ValueError):
    """The received data is no message of a dashboard; the text says what is wrong with it."""


class ParsedMessage(NamedTuple):
    """A message that can be shown, and notes about what is missing in it."""

    message: DashboardMessage
    notes: tuple[str, ...]


def parse(text: str | bytes, name: str = "views") -> dict[str, Any]:
    """Parse `text` as a JSON object with the list `name`, or raise `NotADashboard`."""
    try:
        raw = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise NotADashboard(_NOT_ONE) from error
    if not isinstance(raw, dict) or not isinstance(raw.get(name), list):
        raise NotADashboard(_NOT_ONE)
    return raw


def understood(raw: dict[str, Any]) -> ParsedMessage:
    """Turn the result of `parse` into a message that can be shown."""
    views: dict[str, View] = {}
    foreign = broken = 0
    for one in raw["views"][:MOST_PODS]:
        try:
            view = cast("View", _calm(valid_view(one)))
        except ValueError:
            other = isinstance(one, dict) and one.get("format", FORMAT) != FORMAT
            foreign, broken = foreign + other, broken + (not other)
        else:
            views.setdefault(view["pod"]["name"], view)
    history, at = raw.get("history"), number(raw.get("at"))
    title, operator = raw.get("title"), raw.get("operator")
    message = DashboardMessage(
        title=legible(title) if isinstance(title, str) else "Seawall",
        at=at,
        operator=legible(operator) if isinstance(operator, str) else None,
        **_summary(list(views.values()), at),
        history=_histories(history, views) if isinstance(history, dict) else None,
        extra=None,
    )
    return ParsedMessage(message, tuple(_notes(foreign, broken, len(raw["views"]) - MOST_PODS)))


def narrowed(
    message: DashboardMessage, pods: Iterable[str], guards: Iterable[str]
) -> DashboardMessage:
    """Return `message` with only the pods and guards whose names match one of the patterns.

    Without patterns, everything is kept. With guards, everything that is not about one of them is
    omitted.
    """
    wanted_pods, wanted = tuple(pods), tuple(guards)
    views = [v for v in message["views"] if not wanted_pods or _like(v["pod"]["name"], wanted_pods)]
    if wanted:
        views = [_about(view, wanted) for view in views]
    return {**message, **_summary(views, message["at"])}


class _Summary(TypedDict):
    verdict: ServiceVerdict
    troubles: list[ServiceTrouble]
    happened: list[ServiceEvent]
    views: list[View]


def _summary(views: list[View], at: float) -> _Summary:
    """Return the views with a new summary, as they may be fewer than were sent."""
    problems = service_troubles(views, at)
    return {
        "verdict": service_verdict(views, problems),
        "troubles": problems,
        "happened": service_events(views),
        "views": views,
    }


def worst(tones: Iterable[Tone]) -> Tone:
    """Return the most urgent of `tones`; "ok" if there is none."""
    return min(tones, key=WORST.index, default="ok")


def verdict(message: DashboardMessage) -> Tone:
    """Return the overall tone of `message`: "bad", "warn" or "ok"."""
    tones: list[Tone] = ["ok"]
    for view in message["views"]:
        entries: list[PodTrouble | GuardView | RowView] = [*view["troubles"], *view["guards"]]
        entries += [row for rows in view["sections"].values() for row in rows]
        tones += [one["tone"] for one in entries]
    return worst(tones)


def calm(text: str) -> str:
    """Return `text` without excess combining marks and without variation selectors."""
    if text.isascii():
        return text
    kept, marks = [], 0
    for one in text:
        marks = marks + 1 if category(one).startswith("M") else 0
        if marks <= MOST_MARKS and ord(one) not in _SELECTORS:
            kept.append(one)
    return "".join(kept)


def legible(text: str, longest: int = LONGEST_NAME) -> str:
    """Return `text` in a form that is safe for a terminal, at most `longest` characters."""
    return calm(shown(text, longest))


def _calm(value: Any) -> Any:
    if isinstance(value, str):
        return calm(value)
    if isinstance(value, dict):
        return {_calm(key): _calm(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_calm(one) for one in value)
    return value


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _notes(foreign: int, broken: int, beyond: int) -> Iterable[str]:
    if foreign:
        yield f"{_pods(foreign)} of another version of Seawall not shown"
    if broken:
        yield f"{_pods(broken)} not shown: what was sent of them cannot be read"
    if beyond > 0:
        yield f"{_pods(beyond)} more not shown: the first {MOST_PODS} are"


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def _like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _about(view: View, patterns: tuple[str, ...]) -> View:
    whole = view.copy()
    whole.pop("all_guards", None)  # the total number of matching guards is unknown
    return {
        **whole,
        "guards": [guard for guard in view["guards"] if _like(guard["name"], patterns)],
        "troubles": [one for one in view["troubles"] if _like(one["where"], patterns)],
        "happenings": [one for one in view["happenings"] if _like(one["where"], patterns)],
        "sections": {},
    }


def _histories(histories: dict[str, Any], views: Iterable[str]) -> dict[str, History]:
    shown_pods = set(views)
    named = ((legible(pod), past) for pod, past in histories.items())
    return {pod: _history(past) for pod, past in named if pod in shown_pods}


def _history(raw: Any) -> History:
    """Return the history of a pod, with lists of equal length; empty where it is invalid."""
    raw = raw if isinstance(raw, dict) else {}
    at = [number(one) for one in _list(raw.get("at"))[-MOST_POINTS:]]
    length = len(at)
    return History(
        at=at,
        guards={
            legible(name): _track(track, length)
            for name, track in _members(raw, "guards")[:MOST_GUARDS]
            if isinstance(track, dict)
        },
        rows={
            legible(name, 2 * LONGEST_NAME): _points(points, length)
            for name, points in _members(raw, "rows")[:MOST_TRACKS]
        },
    )


def _list(raw: Any) -> list[Any]:
    return raw if isinstance(raw, list) else []


def _members(raw: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    members = raw.get(name)
    return list(members.items()) if isinstance(members, dict) else []


def _track(raw: dict[str, Any], length: int) -> GuardTrack:
    track: dict[str, list[Any]] = {
        name: [one or 0.0 for one in _points(raw.get(name), length)] for name in RATES
    }
    track |= {name: _points(raw.get(name), length) for name in ("p50", "p99")}
    states = _last(raw.get("breaker"), length)
    track["breaker"] = [one if isinstance(one, str) and one in _STATES else None for one in states]
    return cast("GuardTrack", track)


def _points(raw: Any, length: int) -> list[float | None]:
    return [
        max(number(one), 0.0) if isinstance(one, (int, float)) else None
        for one in _last(raw, length)
    ]


def _last(raw: Any, length: int) -> list[Any]:
    """Return the last `length` values of a list, padded at its old end."""
    values = _list(raw)[-length:] if length else []
    return [None] * (length - len(values)) + values
