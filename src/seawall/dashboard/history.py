"""History of a pod for the charts: one point for each view, and coarser ones for hours.

Promises:
- All lists are as long as `at`, the oldest first, and at most `keep` long.
- A missing value is None, or 0 for a number of calls.
- Numbers have four significant digits: a small chart shows no more.
- At most as many guards and rows are followed as a view shows; those absent from the whole history
  are forgotten.
- Guards also have the coarse points of `STEPS`: one for each 10 s over an hour, and one for each 60
  s over twelve hours. A guard costs 25 bytes for each of these points, 27 kB in total.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan, nan
from typing import Any, Final, NamedTuple, cast

from seawall import _checks as check
from seawall.dashboard.bounds import MOST_GUARDS, MOST_POINTS, MOST_TRACKS
from seawall.dashboard.views import GuardTrack, GuardView, History, View


class HistoryStep(NamedTuple):
    """Resolution of the coarse points."""

    seconds: float
    """Seconds between two points."""
    points: int
    """Maximum number of points."""

    @property
    def span(self) -> float:
        """Number of seconds that all points cover."""
        return self.seconds * self.points


STEPS: Final = (HistoryStep(10.0, 360), HistoryStep(60.0, 720))

_STATES: Final = (None, "closed", "half_open", "open", "isolated")
"""States of a breaker by their byte: when several are combined, the last in this order is kept."""

Point = tuple[Any, ...]
"""Values at one moment: `_GUARD_NUMBERS` of a guard, the number of a row."""
_RATES: Final = ("succeeded", "degraded", "failed", "rejected")
_TIMES: Final = ("p50", "p99")


class PodHistory:
    """The history of one pod. Not safe for concurrent use."""

    def __init__(self, keep: int = 180) -> None:
        self.keep = check.count("keep", keep, maximum=MOST_POINTS)
        self._at: deque[float] = deque(maxlen=keep)
        self._guards: dict[str, _Track] = {}
        self._rows: dict[str, _Track] = {}
        self._hours = tuple(CoarseHistory(step) for step in STEPS)

    def add(self, view: View) -> int:
        """Add a view; return the number of guards and rows without room."""
        before = len(self._at)
        self._at.append(view["at"])
        guards = {guard["name"]: _guard_point(guard) for guard in view["guards"]}
        rows = {name: (_rounded(track),) for name, track in tracks_of(view)}
        left_out = self._follow(self._guards, guards, _NO_GUARD, before, MOST_GUARDS)
        for hours in self._hours:
            hours.add(view["at"], guards)
        return left_out + self._follow(self._rows, rows, _NO_ROW, before, MOST_TRACKS)

    def _follow(
        self,
        tracks: dict[str, _Track],
        points: Mapping[str, Point],
        gap: Point,
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
            track.points.append(point)
            track.gone = 0
        for name, track in tracks.items():
            if name not in points:
                track.points.append(gap)
                track.gone += 1
        return left_out

    def hours(self, span: float, guard: str) -> tuple[list[float], GuardTrack] | None:
        """Return the times and the history of a guard over `span` seconds, a span of `STEPS`.

        Return None if the guard is unknown.
        """
        return next((hours.track(guard) for hours in self._hours if hours.step.span == span), None)

    @property
    def history(self) -> History:
        """All points of the last minutes, as they are sent."""
        return History(
            at=list(self._at),
            guards={
                name: cast("GuardTrack", track.lists(_GUARD_NUMBERS))
                for name, track in self._guards.items()
            },
            rows={name: track.lists(("track",))["track"] for name, track in self._rows.items()},
        )


class CoarseHistory:
    """History of guards in coarse points: means of rates and p50, the worst p99 and breaker."""

    def __init__(self, step: HistoryStep) -> None:
        self.step = step
        self._at: array[float] = array("d")
        self._guards: dict[str, _CoarseTrack] = {}
        self._sums: dict[str, _Sum] = {}
        self._begun: float | None = None

    def add(self, at: float, guards: Mapping[str, Point]) -> None:
        """Add the points of a view; a clock that was set back starts a new point."""
        begun = self._begun
        if begun is not None and not 0 <= at - begun < self.step.seconds:
            self._close(begun)
            begun = None
        if begun is None:
            self._begun = at - at % self.step.seconds
        for name, point in guards.items():
            self._sums.setdefault(name, _Sum()).add(point)

    def _close(self, at: float) -> None:
        """Make a coarse point of what was added since the last one."""
        sums, self._sums = self._sums, {}
        before, most = len(self._at), self.step.points
        self._at.append(at)
        for name, one in sums.items():
            track = self._guards.get(name)
            if track is None:
                if len(self._guards) >= MOST_GUARDS:
                    continue  # until one that is gone is forgotten
                track = self._guards[name] = _CoarseTrack(before)
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
        """Return the times and the history of a guard; None if it is unknown."""
        track = self._guards.get(guard)
        return None if track is None else (list(self._at), cast("GuardTrack", track.lists()))


class _Sum:
    """Values of a guard since the last coarse point."""

    __slots__ = ("_breaker", "_p50", "_p99", "_rates", "_seen", "_timed")

    def __init__(self) -> None:
        self._seen = self._timed = self._breaker = 0
        self._rates = [0.0] * len(_RATES)
        self._p50 = 0.0
        self._p99 = nan

    def add(self, point: Point) -> None:
        *rates, p50, p99, state = point
        self._seen += 1
        for place, rate in enumerate(rates):
            self._rates[place] += rate
        if p50 is not None:
            self._p50 += p50
            self._timed += 1
        if p99 is not None:
            self._p99 = p99 if isnan(self._p99) else max(self._p99, p99)
        if state in _STATES:
            self._breaker = max(self._breaker, _STATES.index(state))

    def point(self) -> tuple[list[float], int]:
        p50 = self._p50 / self._timed if self._timed else nan
        return [*(rate / self._seen for rate in self._rates), p50, self._p99], self._breaker


_NOTHING: Final[tuple[list[float], int]] = ([0.0] * len(_RATES) + [nan] * len(_TIMES), 0)


class _CoarseTrack:
    """The coarse points of one guard, in few bytes."""

    __slots__ = ("breaker", "gone", "numbers")

    def __init__(self, before: int) -> None:
        """Start absent at the first `before` points."""
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
    """The history of one object, point by point."""

    __slots__ = ("gone", "points")

    def __init__(self, keep: int, gap: Point, before: int) -> None:
        self.gone = 0
        self.points: deque[Point] = deque([gap] * before, maxlen=keep)

    def lists(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """Return a list for each number of the points, which are in the order of `names`."""
        columns = zip(*self.points, strict=True)
        return {name: list(values) for name, values in zip(names, columns, strict=True)}


_GUARD_NUMBERS: Final = (*_RATES, *_TIMES, "breaker")
_NO_GUARD: Final[Point] = (*[0.0] * len(_RATES), *[None] * len(_TIMES), None)
_NO_ROW: Final[Point] = (None,)


def tracks_of(view: View) -> Iterator[tuple[str, float | None]]:
    """Yield the charted values: "kind/name" for rows, "pipe/pipeline/name" for nodes."""
    for section in view["sections"].values():
        for row in section:
            yield f"{row['kind']}/{row['name']}", row["track"]
            if "pipes" in row:
                for node in row["pipes"]["nodes"]:
                    yield f"pipe/{row['name']}/{node['name']}", node["rate"]


def _guard_point(guard: GuardView) -> Point:
    rates: Mapping[str, Any] = guard["rates"]
    numbers = (*(rates[name] for name in _RATES), guard["p50"], guard["p99"])
    return (*map(_rounded, numbers), guard["breaker"])


def _rounded(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.4g}")


def _make_room(tracks: dict[str, _Track], points: Mapping[str, Any]) -> bool:
    """Forget the object that has been gone longest; return whether there was one."""
    gone = [(track.gone, name) for name, track in tracks.items() if name not in points]
    if not gone:
        return False
    del tracks[max(gone)[1]]
    return True


MOST_HISTORIES: Final = 16
"""Maximum number of other pods whose history is kept here."""
MOST_CURVES: Final = 4000
"""Maximum number of curves of all these pods: a pod may report much more than is ever viewed."""


class OtherHistories:
    """The histories of other pods, for one event loop."""

    def __init__(self) -> None:
        self._other_histories: dict[str, PodHistory] = {}
        self._last_at: dict[str, float] = {}

    def histories(self) -> Iterator[tuple[str, History]]:
        """Yield the name and history of each pod."""
        for name, tracks in self._other_histories.items():
            yield name, tracks.history

    def hours(self, span: float, guard: str) -> Iterator[tuple[str, Any]]:
        """Yield the history of a guard over `span` seconds for each pod that has it, by its name.

        It starts with the first viewer here: other pods are fetched only while there are viewers.
        """
        for name, tracks in self._other_histories.items():
            known = tracks.hours(span, guard)
            if known is not None:
                yield name, known

    def remember(self, views: Sequence[View]) -> None:
        """Add the new samples of these pods, and forget pods that are gone."""
        kept: dict[str, View] = {}
        room = MOST_CURVES
        for view in views[:MOST_HISTORIES]:
            rows = sum(map(len, view["sections"].values()))
            room -= len(GuardTrack.__annotations__) * len(view["guards"]) + rows
            if room >= 0:
                kept[view["pod"]["name"]] = view
        self._other_histories = {
            name: self._other_histories.get(name) or PodHistory() for name in kept
        }
        self._last_at = {name: at for name, at in self._last_at.items() if name in kept}
        for name, view in kept.items():
            if view["at"] > self._last_at.get(name, 0.0):
                self._last_at[name] = view["at"]
                self._other_histories[name].add(view)
