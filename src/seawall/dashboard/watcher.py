"""The watcher: samples everything in this process periodically, and returns its view.

A sample takes the snapshot, computes the rates since the last one, finds problems and their start,
and adds a point to the history. It queries no store and no database.

Promises:
- `sample()` may be called from any thread; one at a time does the work. It does not raise, whatever
  a snapshot holds.
- A view has only types of JSON, and as JSON at most `MOST_BYTES`: if there is too much to show,
  healthy parts lose detail, or are omitted first.
- A watcher subscribes only to rare events (see `events`), and one that is dropped leaves
  nothing behind.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.dashboard.bounds import LONGEST_NAME, LONGEST_WORD, MOST_GUARDS, number, shown
from seawall.dashboard.counters import Counters
from seawall.dashboard.events import EventHistory
from seawall.dashboard.history import PodHistory
from seawall.dashboard.presenters.content import FoundTrouble, Seen, Snapshot, things
from seawall.dashboard.presenters.guards import guard_view
from seawall.dashboard.presenters.sections import guard_rows, sections_of
from seawall.dashboard.presenters.troubles import (
    TroubleStarts,
    troubles_in,
    troubles_of,
    with_guards,
)
from seawall.dashboard.view_writer import ViewWriter, fit_view, keep_worst
from seawall.dashboard.views import FORMAT, GuardTrack, GuardView, History, Pod, RowView, View
from seawall.runtime.mutex import Mutex
from seawall.telemetry.readings import autoscale_load

AT_ONCE: Final = 16


class GuardReading(NamedTuple):
    """The snapshot of a guard, and what was derived from it."""

    seen: Seen
    view: GuardView
    found: list[FoundTrouble]
    limits: list[RowView]
    counters: Counters


class GuardRotation:
    """The last reading of each guard. Not safe for concurrent use."""

    def __init__(self, apart: float) -> None:
        self._apart = apart
        self._readings: dict[str, GuardReading] = {}
        """By name, the one that was read longest ago first."""

    def kept(self, changed_guards: Collection[str]) -> dict[str, Seen]:
        """Return the snapshots of the guards that are not read in this sample.

        The guards in `changed_guards` had a recent event.
        """
        if len(self._readings) <= AT_ONCE:
            return {}
        urgent = [name for name in self._readings if name in changed_guards]
        urgent += [name for name, reading in self._readings.items() if reading.view["tone"] != "ok"]
        chosen = dict.fromkeys(urgent[: AT_ONCE // 2])
        for name in self._readings:
            if len(chosen) >= AT_ONCE:
                break
            chosen[name] = None
        return {
            name: reading.seen for name, reading in self._readings.items() if name not in chosen
        }

    def read(
        self,
        seen: Seen,
        now: float,
        kept: Mapping[str, Seen],
        make: Callable[[Counters], tuple[GuardView, list[FoundTrouble], list[RowView]]],
    ) -> GuardReading:
        """Return the result of `make` for a guard, or its last result if it is among the `kept`."""
        name = str(seen.get("name", ""))
        last = self._readings.get(name)
        if last is not None and name in kept and last.seen is seen:
            return last
        counters = Counters(self._apart) if last is None else last.counters
        counters.begin(now)
        reading = GuardReading(seen, *make(counters), counters)
        self._readings.pop(name, None)
        self._readings[name] = reading
        return reading

    def forget_others(self, names: Iterable[str]) -> None:
        """Forget the guards that are not among these."""
        alive = set(names)
        for name in [name for name in self._readings if name not in alive]:
            del self._readings[name]


HERE: Final = "here"
"""Name of the place of problems that concern the process as a whole."""


class Watcher:
    """Samples this process; see the module."""

    def __init__(
        self,
        *,
        pod: str | None = None,
        every: float = 1.0,
        keep: int = 180,
        wall: Callable[[], float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to sample each `every` seconds, and keep the last `keep` points of history.

        `pod` is the name of this process, by default host and process id. `wall` returns unix
        seconds.
        """
        if pod is not None and (not isinstance(pod, str) or not pod):
            raise TypeError(f"pod={pod!r}: write a name, such as pod='web-1'")
        self.every = check.seconds("every", every)
        self._given = None if pod is None else shown(pod, LONGEST_NAME)
        self._host = shown(socket.gethostname(), LONGEST_NAME)
        self._wall = time.time if wall is None else check.plain_function("wall", wall)  # noqa: TID251 - the default of a parameter
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._keep = keep
        self._version = _version()
        self._events = EventHistory(self._wall)
        self._begin()
        survives_fork(self)

    def _begin(self) -> None:
        """Start empty, in this process."""
        self._mutex = Mutex()
        self._pid = os.getpid()
        self.pod: str = self._given or shown(f"{self._host}-{self._pid}", LONGEST_NAME)
        self._started = self._clock.now()
        self._counters = Counters(self.every / 2)
        self._writer = ViewWriter()
        self._rotation = GuardRotation(self.every / 2)
        self._trouble_starts = TroubleStarts()
        self._history = PodHistory(self._keep)
        self._left_out = 0
        self._view: View | None = None

    def __repr__(self) -> str:
        return f"<Watcher of {self.pod!r}>"

    def close(self) -> None:
        """Stop listening to events; the last view can still be read."""
        self._events.close()

    @property
    def view(self) -> View | None:
        """The last view; None before the first sample."""
        return self._view

    @property
    def history(self) -> History:
        """The history, one point for each sample."""
        with self._mutex:
            return self._history.history

    def hours(self, span: float, guard: str) -> tuple[list[float], GuardTrack] | None:
        """Return the times and history of a guard over `span` seconds; None if it has none."""
        with self._mutex:
            return self._history.hours(span, guard)

    def sample(self) -> View:
        """Take a sample now."""
        with self._mutex:
            self._events.process_recorded()
            kept = self._rotation.kept(self._events.changed_guards)
            view = self._view_of(registry.snapshot_with(kept), kept)
            self._view = view
            return view

    def _view_of(self, snapshot: Snapshot, kept: Mapping[str, Seen] = MappingProxyType({})) -> View:
        """Return the view of a snapshot; guards in `kept` keep their last views."""
        wall, now = self._wall(), self._clock.now()
        self._counters.begin(now)
        readings = self._readings(snapshot, kept, now)
        # All guards were read, even those beyond the limit: their state is not known before.
        guards = keep_worst([reading.view for reading in readings], MOST_GUARDS)
        more_guards = max(0, len(readings) - MOST_GUARDS)
        limits = [row for reading in readings for row in reading.limits]
        sections, more_rows = sections_of(snapshot, self._counters, limits)
        load = _load(snapshot)
        happenings = self._events
        found = [one for reading in readings for one in reading.found]
        found += troubles_of(snapshot, self._counters, load, happenings.differing)
        troubles = self._trouble_starts.date(
            with_guards(found), wall, happenings.began, happenings.traces
        )
        pod = Pod(
            name=self.pod,
            host=self._host,
            pid=self._pid,
            version=self._version,
            up_seconds=round(max(0.0, now - self._started), 3),
        )
        view = View(
            format=FORMAT,
            pod=pod,
            at=wall,
            every=self.every,
            load=round(load, 4),
            operable=True,
            troubles=troubles,
            guards=guards,
            sections=sections,
            happenings=[],
        )
        # The history includes everything; what does not fit into the view is removed afterwards.
        if more_guards:
            view["all_guards"] = len(guards) + more_guards
        more = more_guards + more_rows + self._history.add(view)
        view["happenings"] = happenings.latest()
        self._writer.begin()
        view, cut = fit_view(view, writer=self._writer)
        self._note_left_out(more + cut, view)
        return view

    def _readings(
        self, snapshot: Snapshot, kept: Mapping[str, Seen], now: float
    ) -> list[GuardReading]:
        stacks = {guard.name: guard.policies for guard in registry.guards()}
        families = {family.name: family.policies for family in registry.families()}
        edges = {str(edge.get("name", "")) for edge in things(snapshot, "edge")}

        def make(
            seen: Seen, counters: Counters
        ) -> tuple[GuardView, list[FoundTrouble], list[RowView]]:
            name = str(seen.get("name", ""))
            policies = families.get(name) or stacks.get(name, ())
            edge = name in edges and name not in families
            view = guard_view(seen, policies, counters, edge=edge)
            if name in families:
                for layer in view["stack"]:
                    layer["changes"] = []  # they would be those of one key
            return view, troubles_in("guard", seen, counters), guard_rows(seen, counters)

        guards = things(snapshot, "guard")
        readings = [self._rotation.read(seen, now, kept, partial(make, seen)) for seen in guards]
        self._rotation.forget_others(str(seen.get("name", "")) for seen in guards)
        return readings

    def _note_left_out(self, left_out: int, view: View) -> None:
        """Report once that not everything is shown, and again when that changes much."""
        if (left_out > 0) != (self._left_out > 0) or left_out > 2 * self._left_out:
            if left_out:
                what = f"there is too much to show: {left_out} guards or rows are left out, or cut"
                self._events.note(HERE, "warn", what)
            self._left_out = left_out
            view["happenings"] = self._events.latest()[-max(1, len(view["happenings"])) :]

    def _after_fork(self) -> None:
        """Start over in a child process, which is another pod."""
        self._events.forget()
        self._begin()


def _load(snapshot: Snapshot) -> float:
    kinds: Iterable[str] = map(str, snapshot)
    try:
        return max(0.0, number(autoscale_load({kind: things(snapshot, kind) for kind in kinds})))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return 0.0  # the known kind, but another shape


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return shown(version("seawall"), LONGEST_WORD)
    except PackageNotFoundError:  # not installed: running from a source tree
        return ""
