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
from seawall.dashboard.presenters.settings import SettingsCache
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
        self._looks: dict[str, GuardReading] = {}
        """By name, the one that was read longest ago first."""

    def kept(self, touched: Collection[str]) -> dict[str, Seen]:
        """Return the snapshots of the guards that are not read in this sample.

        The guards in `touched` had a recent event.
        """
        if len(self._looks) <= AT_ONCE:
            return {}
        urgent = [name for name in self._looks if name in touched]
        urgent += [name for name, look in self._looks.items() if look.view["tone"] != "ok"]
        chosen = dict.fromkeys(urgent[: AT_ONCE // 2])
        for name in self._looks:
            if len(chosen) >= AT_ONCE:
                break
            chosen[name] = None
        return {name: look.seen for name, look in self._looks.items() if name not in chosen}

    def look(
        self,
        seen: Seen,
        now: float,
        kept: Mapping[str, Seen],
        make: Callable[[Counters], tuple[GuardView, list[FoundTrouble], list[RowView]]],
    ) -> GuardReading:
        """Return the result of `make` for a guard, or its last result if it is among the `kept`."""
        name = str(seen.get("name", ""))
        last = self._looks.get(name)
        if last is not None and name in kept and last.seen is seen:
            return last
        counters = Counters(self._apart) if last is None else last.counters
        counters.begin(now)
        look = GuardReading(seen, *make(counters), counters)
        self._looks.pop(name, None)
        self._looks[name] = look
        return look

    def forget_others(self, names: Iterable[str]) -> None:
        """Forget the guards that are not among these."""
        alive = set(names)
        for name in [name for name in self._looks if name not in alive]:
            del self._looks[name]


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
        self._happenings = EventHistory(self._wall)
        self._begin()
        survives_fork(self)

    def _begin(self) -> None:
        """Start empty, in this process."""
        self._mutex = Mutex()
        self._pid = os.getpid()
        self.pod: str = self._given or shown(f"{self._host}-{self._pid}", LONGEST_NAME)
        self._started = self._clock.now()
        self._counters = Counters(self.every / 2)
        self._settings = SettingsCache()
        self.writer = ViewWriter()
        self._turns = GuardRotation(self.every / 2)
        self._since = TroubleStarts()
        self._tracks = PodHistory(self._keep)
        self._left_out = 0
        self._view: View | None = None

    def __repr__(self) -> str:
        return f"<Watcher of {self.pod!r}>"

    def close(self) -> None:
        """Stop listening to events; the last view can still be read."""
        self._happenings.close()

    @property
    def view(self) -> View | None:
        """The last view; None before the first sample."""
        return self._view

    @property
    def history(self) -> History:
        """The history, one point for each sample."""
        with self._mutex:
            return self._tracks.history

    def hours(self, span: float, guard: str) -> tuple[list[float], GuardTrack] | None:
        """Return the times and history of a guard over `span` seconds; None if it has none."""
        with self._mutex:
            return self._tracks.hours(span, guard)

    def sample(self) -> View:
        """Take a sample now."""
        with self._mutex:
            self._happenings.take_in()
            kept = self._turns.kept(self._happenings.touched)
            view = self._look(registry.snapshot_with(kept), kept)
            self._view = view
            return view

    def _look(self, snapshot: Snapshot, kept: Mapping[str, Seen] = MappingProxyType({})) -> View:
        """Return the view of a snapshot; guards in `kept` keep their last views."""
        wall, now = self._wall(), self._clock.now()
        self._counters.begin(now)
        self._settings.begin(self._happenings.changes)
        looks = self._looks(snapshot, kept, now)
        # All guards were read, even those beyond the limit: their state is not known before.
        guards = keep_worst([look.view for look in looks], MOST_GUARDS)
        more_guards = max(0, len(looks) - MOST_GUARDS)
        limits = [row for look in looks for row in look.limits]
        sections, more_rows = sections_of(snapshot, self._counters, limits)
        load = _load(snapshot)
        happenings = self._happenings
        found = [one for look in looks for one in look.found]
        found += troubles_of(snapshot, self._counters, load, happenings.differing)
        troubles = self._since.date(with_guards(found), wall, happenings.began, happenings.traces)
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
        more = more_guards + more_rows + self._tracks.add(view)
        view["happenings"] = happenings.latest()
        self.writer.begin()
        view, cut = fit_view(view, writer=self.writer)
        self._tell_left_out(more + cut, view)
        return view

    def _looks(
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
            view = guard_view(seen, policies, counters, edge=edge, settings=self._settings.of)
            if name in families:
                for layer in view["stack"]:
                    layer["changes"] = []  # they would be those of one key
            return view, troubles_in("guard", seen, counters), guard_rows(seen, counters)

        guards = things(snapshot, "guard")
        looks = [self._turns.look(seen, now, kept, partial(make, seen)) for seen in guards]
        self._turns.forget_others(str(seen.get("name", "")) for seen in guards)
        return looks

    def _tell_left_out(self, left_out: int, view: View) -> None:
        """Report once that not everything is shown, and again when that changes much."""
        if (left_out > 0) != (self._left_out > 0) or left_out > 2 * self._left_out:
            if left_out:
                what = f"there is too much to show: {left_out} guards or rows are left out, or cut"
                self._happenings.note(HERE, "warn", what)
            self._left_out = left_out
            view["happenings"] = self._happenings.latest()[-max(1, len(view["happenings"])) :]

    def _after_fork(self) -> None:
        """Start over in a child process, which is another pod."""
        self._happenings.forget()
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
