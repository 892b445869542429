"""The past of a pod, for the curves: one point for each view, and coarser ones for hours.

Promises: all lists are as long as `at` is, the oldest first, and none is longer than `keep`. What
was not there at a point has None, or 0 where a number of calls is counted. Numbers have four
significant digits: more is not seen in a small curve. At most as many guards and rows are followed
as a view shows; what is gone for all of the past is forgotten. Of guards there are also `STEPS`: a
point for 10 s over an hour, and one for 60 s over twelve. A guard costs 25 bytes for each of these
points, 27 kB in all.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from typing import Any, Final, NamedTuple, cast

from seawall import _checks as check
from seawall.dashboard._bounds import MOST_GUARDS, MOST_ROWS
from seawall.dashboard.views import GuardTrack, GuardView, History, View

LONGEST: Final = 3600
"""Points that may be kept: more than a screen can show."""


class Step(NamedTuple):
    """How coarse the points of some hours are."""

    seconds: float
    """Between two points."""
    points: int
    """Kept at most."""

    @property
    def span(self) -> float:
        """The seconds that all points cover."""
        return self.seconds * self.points


STEPS: Final = (Step(10.0, 360), Step(60.0, 720))

_STATES: Final = (None, "closed", "half_open", "open", "isolated")
"""States of a breaker, by the byte that stands for them: of several, the last is kept."""

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
        self._last: dict[str, tuple[GuardView, dict[str, Any]]] = {}
        self._hours = tuple(Hours(step) for step in STEPS)

    def __repr__(self) -> str:
        return (
            f"<Tracks of {len(self._guards)} guards and {len(self._rows)} rows:"
            f" {len(self._at)} of {self.keep} points>"
        )

    def add(self, view: View) -> int:
        """Add what a view shows; return how many guards and rows there is no room for."""
        before = len(self._at)
        self._at.append(view["at"])
        guards = self._points_of(view["guards"])
        rows = {
            f"{row['kind']}/{row['name']}": {"track": _rounded(row["track"])}
            for section in view["sections"].values()
            for row in section
        }
        left_out = self._follow(self._guards, guards, _GUARD_GAP, before, MOST_GUARDS)
        for hours in self._hours:
            hours.add(view["at"], guards)
        return left_out + self._follow(self._rows, rows, _ROW_GAP, before, MOST_ROWS)

    def _points_of(self, guards: Iterable[GuardView]) -> dict[str, dict[str, Any]]:
        """Return the points of guards; one that was not looked at again has the one it had."""
        before, self._last = self._last, {}
        for guard in guards:
            name = guard["name"]
            known = before.get(name)
            same = known is not None and known[0] is guard
            self._last[name] = known if known is not None and same else (guard, _guard_point(guard))
        return {name: point for name, (_, point) in self._last.items()}

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

    def hours(self, span: float, guard: str) -> tuple[list[float], GuardTrack] | None:
        """Return the times and the past of a guard over `span` seconds, one of those of `STEPS`.

        None if nothing is known of it.
        """
        return next((hours.track(guard) for hours in self._hours if hours.step.span == span), None)

    @property
    def history(self) -> History:
        """All points of the last minutes, as they are sent."""
        return History(
            at=list(self._at),
            guards={
                name: cast("GuardTrack", track.lists()) for name, track in self._guards.items()
            },
            rows={name: track.lists()["track"] for name, track in self._rows.items()},
        )


class Hours:
    """The past of guards in coarse points: means of rates and p50, the worst p99 and breaker."""

    def __init__(self, step: Step) -> None:
        """Begin without a point."""
        self.step = step
        self._at: array[float] = array("d")
        self._guards: dict[str, _Condensed] = {}
        self._sums: dict[str, _Sum] = {}
        self._begun: float | None = None

    def __repr__(self) -> str:
        return f"<Hours of {len(self._guards)} guards, {len(self._at)} points>"

    def add(self, at: float, guards: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what a view shows; a clock that was set back begins a new point."""
        begun = self._begun
        if begun is not None and not 0 <= at - begun < self.step.seconds:
            self._close(begun)
            begun = None
        if begun is None:
            self._begun = at - at % self.step.seconds
        for name, point in guards.items():
            known = self._sums.get(name)
            if known is None:
                known = self._sums[name] = _Sum()
            known.add(point)

    def _close(self, at: float) -> None:
        """Make a point of what was added since the last one."""
        sums, self._sums = self._sums, {}
        before, most = len(self._at), self.step.points
        self._at.append(at)
        for name, one in sums.items():
            track = self._guards.get(name)
            if track is None:
                if len(self._guards) >= MOST_GUARDS:
                    continue  # until one of those that are gone is forgotten
                track = self._guards[name] = _Condensed(before)
            track.add(one.point())
        for name, track in list(self._guards.items()):
            if name not in sums:
                track.add(_NOTHING)
            if len(self._at) > most:
                track.drop()
            if track.gone >= min(most, len(self._at)):
                del self._guards[name]
        if len(self._at) > most:
            del self._at[0]

    def track(self, guard: str) -> tuple[list[float], GuardTrack] | None:
        """Return the times and the past of a guard; None if it is not known."""
        track = self._guards.get(guard)
        return None if track is None else (list(self._at), cast("GuardTrack", track.lists()))


class _Sum:
    """What was seen of a guard since the last coarse point."""

    __slots__ = ("breaker", "p50", "p99", "rates", "seen")

    def __init__(self) -> None:
        self.seen = self.breaker = 0
        self.rates = [0.0] * len(_RATES)
        self.p50: list[float] = []
        self.p99 = nan

    def add(self, point: Mapping[str, Any]) -> None:
        self.seen += 1
        for place, name in enumerate(_RATES):
            self.rates[place] += point[name]
        if point["p50"] is not None:
            self.p50.append(point["p50"])
        if point["p99"] is not None:
            self.p99 = point["p99"] if isnan(self.p99) else max(self.p99, point["p99"])
        state = point["breaker"]
        if state in _STATES:
            self.breaker = max(self.breaker, _STATES.index(state))

    def point(self) -> tuple[list[float], int]:
        p50 = sum(self.p50) / len(self.p50) if self.p50 else nan
        return [*(rate / self.seen for rate in self.rates), p50, self.p99], self.breaker


_NOTHING: Final[tuple[list[float], int]] = ([0.0] * len(_RATES) + [nan] * len(_TIMES), 0)


class _Condensed:
    """The coarse points of one guard, in few bytes."""

    __slots__ = ("breaker", "gone", "numbers")

    def __init__(self, before: int) -> None:
        """Not have been there at the points `before`."""
        self.gone = 0
        values, state = _NOTHING
        self.numbers = [array("f", [value]) * before for value in values]
        self.breaker = bytearray([state]) * before

    def add(self, point: tuple[Sequence[float], int]) -> None:
        self.gone = self.gone + 1 if point is _NOTHING else 0
        for numbers, value in zip(self.numbers, point[0], strict=True):
            numbers.append(value)
        self.breaker.append(point[1])

    def drop(self) -> None:
        for numbers in self.numbers:
            del numbers[0]
        del self.breaker[0]

    def lists(self) -> dict[str, list[Any]]:
        return {
            **{
                name: _known(numbers)
                for name, numbers in zip((*_RATES, *_TIMES), self.numbers, strict=True)
            },
            "breaker": [_STATES[state] for state in self.breaker],
        }


def _known(numbers: Iterable[float]) -> list[float | None]:
    return [None if isnan(one) else _rounded(one) for one in numbers]


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
