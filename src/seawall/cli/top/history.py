"""History for drawing: taken from the first message, then one point for each message.

Promises:
- All lists of a pod have the same length, at most `MOST_POINTS`.
- Memory is bounded whatever is sent.
- A point is added only for a new sample of the pod.
"""

from __future__ import annotations

from typing import Any, Final, cast

from seawall.cli.top.messages import MOST_PODS, MOST_POINTS
from seawall.dashboard.views import DashboardMessage, GuardTrack, GuardView, History, View

RATES: Final = ("succeeded", "degraded", "failed", "rejected")

KEPT_FOR: Final = 600.0
"""Seconds for which the history of a pod is kept that is no longer reported."""
MOST_TRACKS: Final = 4000
"""Maximum number of guards and rows with a history, over all pods; later ones have none."""


class TopHistory:
    """The history of all pods, by pod."""

    def __init__(self) -> None:
        self._pods: dict[str, History] = {}

    def take(self, message: DashboardMessage) -> dict[str, History]:
        """Add `message`, and return the history including it."""
        self._pods.update(message["history"] or {})
        self._forget(message)
        room = MOST_TRACKS - sum(len(h["guards"]) + len(h["rows"]) for h in self._pods.values())
        for view in message["views"]:
            new = History(at=[], guards={}, rows={})
            history = self._pods.setdefault(view["pod"]["name"], new)
            if not history["at"] or view["at"] > history["at"][-1]:
                room -= _append(history, view, room)
        return self._pods

    def _forget(self, message: DashboardMessage) -> None:
        present = {view["pod"]["name"] for view in message["views"]}
        gone = {pod: h["at"][-1] if h["at"] else 0.0 for pod, h in self._pods.items()}
        for pod in present:
            gone.pop(pod, None)
        oldest_first = sorted(gone, key=gone.__getitem__)
        beyond = len(self._pods.keys() | present) - MOST_PODS
        for place, pod in enumerate(oldest_first):
            if place < beyond or message["at"] - gone[pod] > KEPT_FOR:
                del self._pods[pod]


def _append(history: History, view: View, room: int) -> int:
    """Add a point for `view`, with at most `room` new tracks; return how many were added."""
    before = len(history["at"])
    had = len(history["guards"]) + len(history["rows"])
    history["at"].append(view["at"])
    guards = {guard["name"]: guard for guard in view["guards"]}
    rows = {f"{row['kind']}/{row['name']}": row for s in view["sections"].values() for row in s}
    for name in guards:
        if name not in history["guards"] and room > 0:
            history["guards"][name] = _blank(before)
            room -= 1
    for name, row in rows.items():
        if name not in history["rows"] and room > 0 and row["track"] is not None:
            history["rows"][name] = [None] * before
            room -= 1
    for name, track in history["guards"].items():
        _extend(track, guards.get(name))
    for name, points in history["rows"].items():
        present = rows.get(name)
        points.append(present["track"] if present else None)
        del points[:-MOST_POINTS]
    del history["at"][:-MOST_POINTS]
    return len(history["guards"]) + len(history["rows"]) - had


def _blank(length: int) -> GuardTrack:
    names = GuardTrack.__annotations__
    track = {name: [0.0 if name in RATES else None] * length for name in names}
    return cast("GuardTrack", track)


def _extend(track: GuardTrack, guard: GuardView | None) -> None:
    """Add the values of `guard`; zeros and gaps if it is gone."""
    seen: dict[str, Any] = {**guard, **guard["rates"]} if guard else dict.fromkeys(RATES, 0.0)
    for name, points in cast("dict[str, list[Any]]", track).items():
        points.append(seen.get(name))
        del points[:-MOST_POINTS]
