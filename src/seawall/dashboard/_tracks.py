"""The past of a pod, for the small curves: one point for each view.

Promises: all lists are as long as `at` is, the oldest first, and none is longer than `keep`. What
was not there at a point has None, or 0 where a number of calls is counted. Numbers have four digits
that count: more is not seen in a small curve. At most as many guards and rows are followed as a
view shows; what is gone for all of the past is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, cast

from seawall import _checks as check
from seawall.dashboard._bounds import MOST_GUARDS, MOST_ROWS
from seawall.dashboard.views import GuardTrack, GuardView, History, View

LONGEST: Final = 3600
"""Points that may be kept: more than a screen can show."""

_RATES: Final = ("succeeded", "degraded", "failed", "rejected")
_TIMES: Final = ("p50", "p99")


class Tracks:
    """The past of one pod. For one thread at a time."""

    def __init__(self, keep: int = 180) -> None:
        """Keep the last `keep` points."""
        self.keep = check.count("keep", keep, maximum=LONGEST)
        self._at: deque[float] = deque(maxlen=keep)
        self._guards: dict[str, _Track] = {}
        self._rows: dict[str, _Track] = {}

    def __repr__(self) -> str:
        return (
            f"<Tracks of {len(self._guards)} guards and {len(self._rows)} rows:"
            f" {len(self._at)} of {self.keep} points>"
        )

    def add(self, view: View) -> int:
        """Add what a view shows; return how many guards and rows there is no room for."""
        before = len(self._at)
        self._at.append(view["at"])
        guards = {guard["name"]: _guard_point(guard) for guard in view["guards"]}
        rows = {
            f"{row['kind']}/{row['name']}": {"track": _rounded(row["track"])}
            for section in view["sections"].values()
            for row in section
        }
        left_out = self._follow(self._guards, guards, _GUARD_GAP, before, MOST_GUARDS)
        return left_out + self._follow(self._rows, rows, _ROW_GAP, before, MOST_ROWS)

    def _follow(
        self,
        tracks: dict[str, _Track],
        points: Mapping[str, dict[str, Any]],
        gap: Mapping[str, Any],
        before: int,
        most: int,
    ) -> int:
        for name in [name for name, track in tracks.items() if track.gone >= self.keep - 1]:
            if name not in points:
                del tracks[name]
        left_out = 0
        for name, point in points.items():
            track = tracks.get(name)
            if track is None:
                if len(tracks) >= most and not _make_room(tracks, points):
                    left_out += 1
                    continue
                track = tracks[name] = _Track(self.keep, gap, before)
            track.add(point)
        for name, track in tracks.items():
            if name not in points:
                track.miss(gap)
        return left_out

    @property
    def history(self) -> History:
        """All of it, as it is sent."""
        return History(
            at=list(self._at),
            guards={
                name: cast("GuardTrack", track.lists()) for name, track in self._guards.items()
            },
            rows={name: track.lists()["track"] for name, track in self._rows.items()},
        )


class _Track:
    """The past of one thing: a list for each of its numbers."""

    __slots__ = ("gone", "values")

    def __init__(self, keep: int, gap: Mapping[str, Any], before: int) -> None:
        """Not have been there at the points `before`."""
        self.gone = 0
        self.values: dict[str, deque[Any]] = {
            name: deque([empty] * before, maxlen=keep) for name, empty in gap.items()
        }

    def add(self, point: Mapping[str, Any]) -> None:
        self.gone = 0
        for name, values in self.values.items():
            values.append(point[name])

    def miss(self, gap: Mapping[str, Any]) -> None:
        self.gone += 1
        for name, values in self.values.items():
            values.append(gap[name])

    def lists(self) -> dict[str, list[Any]]:
        return {name: list(values) for name, values in self.values.items()}


_GUARD_GAP: Final[dict[str, Any]] = {
    **dict.fromkeys(_RATES, 0.0),
    **dict.fromkeys(_TIMES),
    "breaker": None,
}
_ROW_GAP: Final[dict[str, Any]] = {"track": None}


def _guard_point(guard: GuardView) -> dict[str, Any]:
    rates: Mapping[str, Any] = guard["rates"]
    point: dict[str, Any] = {name: _rounded(rates[name]) for name in _RATES}
    times = {"p50": _rounded(guard["p50"]), "p99": _rounded(guard["p99"])}
    return {**point, **times, "breaker": guard["breaker"]}


def _rounded(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.4g}")


def _make_room(tracks: dict[str, _Track], points: Mapping[str, Any]) -> bool:
    """Forget what has been gone for longest, if anything has."""
    gone = [(track.gone, name) for name, track in tracks.items() if name not in points]
    if not gone:
        return False
    del tracks[max(gone)[1]]
    return True
