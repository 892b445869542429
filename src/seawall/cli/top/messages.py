"""Validation of messages from a dashboard: bounded, typed, and safe for a terminal.

A dashboard is a server, and its texts come from users and from other pods, so they are untrusted.

Promises:
- Reading raises `NotADashboard` or returns a whole message.
- A pod whose view is invalid is omitted, with a note.
- No text has control characters, escape sequences or direction overrides (`dashboard.bounds.shown`
  escapes them), nor many combining marks on one letter.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple, TypedDict, cast
from unicodedata import category

from seawall.dashboard.bounds import LONGEST_NAME, number, shown
from seawall.dashboard.summary import service_events, service_troubles, service_verdict
from seawall.dashboard.validation import parse_json, valid_history, valid_view
from seawall.dashboard.views import (
    FORMAT,
    WORST,
    DashboardMessage,
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


class NotADashboard(ValueError):
    """The received data is no message of a dashboard; the text says what is wrong with it."""


class ParsedMessage(NamedTuple):
    """A message that can be shown, and notes about what is missing in it."""

    message: DashboardMessage
    notes: tuple[str, ...]


def parse(text: str | bytes, name: str = "views") -> dict[str, Any]:
    """Parse `text` as a JSON object with the list `name`, or raise `NotADashboard`."""
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise NotADashboard(_NOT_ONE) from error
    if not isinstance(raw, dict) or not isinstance(raw.get(name), list):
        raise NotADashboard(_NOT_ONE)
    return raw


def validated(raw: dict[str, Any]) -> ParsedMessage:
    """Turn the result of `parse` into a message that can be shown."""
    views: dict[str, View] = {}
    foreign = broken = 0
    for one in raw["views"][:MOST_PODS]:
        try:
            view = cast("View", _limit_marks(valid_view(one)))
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
    views = [
        v for v in message["views"] if not wanted_pods or _matches(v["pod"]["name"], wanted_pods)
    ]
    if wanted:
        views = [_only_guards(view, wanted) for view in views]
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


def limit_marks(text: str) -> str:
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
    return limit_marks(shown(text, longest))


def _limit_marks(value: Any) -> Any:
    if isinstance(value, str):
        return limit_marks(value)
    if isinstance(value, dict):
        return {_limit_marks(key): _limit_marks(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_limit_marks(one) for one in value)
    return value


def _notes(foreign: int, broken: int, beyond: int) -> Iterable[str]:
    if foreign:
        yield f"{_pods(foreign)} of another version of Seawall not shown"
    if broken:
        yield f"{_pods(broken)} not shown: what was sent of them cannot be read"
    if beyond > 0:
        yield f"{_pods(beyond)} more not shown: the first {MOST_PODS} are"


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _only_guards(view: View, patterns: tuple[str, ...]) -> View:
    whole = view.copy()
    whole.pop("all_guards", None)  # the total number of matching guards is unknown
    return {
        **whole,
        "guards": [guard for guard in view["guards"] if _matches(guard["name"], patterns)],
        "troubles": [one for one in view["troubles"] if _matches(one["where"], patterns)],
        "happenings": [one for one in view["happenings"] if _matches(one["where"], patterns)],
        "sections": {},
    }


def _histories(histories: dict[str, Any], views: Iterable[str]) -> dict[str, History]:
    """Return the histories of these pods; one that makes no sense is omitted."""
    known: dict[str, History] = {}
    for pod, past in histories.items():
        name = legible(pod)
        if name in views:
            with suppress(ValueError):
                known[name] = cast("History", _limit_marks(valid_history(past)))
    return known
