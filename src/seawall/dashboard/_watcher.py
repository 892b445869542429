"""The watcher: looks at everything that lives in this process, now and then, and tells how it is.

A sample is one look: it takes the snapshot, computes how fast things move since the last one, finds
what is wrong and since when, and adds a point to the past. It asks no store and no database.

Promises: `sample()` may be called from any thread, one at a time does the work, and it raises for
nothing that a snapshot may hold. A view has JSON's types only, and as JSON at most `MOST_BYTES`:
of a process with too much to show, what is well is shown with less, or is left out first. A
watcher listens to rare events only (see `_happenings`), and one that is forgotten leaves nothing
behind.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.dashboard._bounds import LONGEST_NAME, LONGEST_WORD, MOST_GUARDS, number, shown
from seawall.dashboard._fitting import ViewWriter, fitted, most_wanted
from seawall.dashboard._guard_turns import GuardTurns, Look
from seawall.dashboard._happenings import Happenings
from seawall.dashboard._lately import Seen
from seawall.dashboard._moves import Moves
from seawall.dashboard._rows import Snapshot, guard_rows, sections_of, things
from seawall.dashboard._rules import Found, with_guards
from seawall.dashboard._settings import KnownSettings
from seawall.dashboard._stacks import guard_view
from seawall.dashboard._tracks import Tracks
from seawall.dashboard._troubles import Since, troubles_in, troubles_of
from seawall.dashboard.views import FORMAT, GuardTrack, GuardView, History, Pod, Row, View
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.telemetry._readings import autoscale_load

HERE: Final = "here"
"""Where something is that belongs to the process as a whole."""


class Watcher:
    """Looks at this process; see above."""

    def __init__(
        self,
        *,
        pod: str | None = None,
        every: float = 1.0,
        keep: int = 180,
        wall: Callable[[], float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Be ready to look each `every` seconds, and keep the last `keep` points of the past.

        `pod` is what this process is called; host and process id unless given. `wall` returns unix
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
        self._happenings = Happenings(self._wall)
        self._begin()
        survives_fork(self)

    def _begin(self) -> None:
        """Know of nothing yet, in this process."""
        self._mutex = Mutex()
        self._pid = os.getpid()
        self.pod: str = self._given or shown(f"{self._host}-{self._pid}", LONGEST_NAME)
        self._started = self._clock.now()
        self._moves = Moves(self.every / 2)
        self._settings = KnownSettings()
        self.writer = ViewWriter()
        self._turns = GuardTurns(self.every / 2)
        self._since = Since()
        self._tracks = Tracks(self._keep)
        self._left_out = 0
        self._view: View | None = None

    def __repr__(self) -> str:
        return f"<Watcher of {self.pod!r}: {self._tracks!r}>"

    def close(self) -> None:
        """Listen to no more events; what was seen can still be read."""
        self._happenings.close()

    @property
    def view(self) -> View | None:
        """The last view; None before the first sample."""
        return self._view

    @property
    def history(self) -> History:
        """The past, one point for each sample."""
        with self._mutex:
            return self._tracks.history

    def hours(self, span: float, guard: str) -> tuple[list[float], GuardTrack] | None:
        """Return the times and the past of a guard over `span` seconds; None if it has none."""
        with self._mutex:
            return self._tracks.hours(span, guard)

    def sample(self) -> View:
        """Look now."""
        with self._mutex:
            self._happenings.take_in()
            kept = self._turns.kept(self._happenings.touched)
            view = self._look(registry.snapshot_with(kept), kept)
            self._view = view
            return view

    def _look(self, snapshot: Snapshot, kept: Mapping[str, Seen] = MappingProxyType({})) -> View:
        """Return the view of a snapshot; guards in `kept` are shown as they were before."""
        wall, now = self._wall(), self._clock.now()
        self._moves.begin(now)
        self._settings.begin(self._happenings.changes)
        looks = self._looks(snapshot, kept, now)
        # All were looked at, also those beyond the most: how one is, nobody knows before.
        guards = most_wanted([look.view for look in looks], MOST_GUARDS)
        more_guards = max(0, len(looks) - MOST_GUARDS)
        limits = [row for look in looks for row in look.limits]
        sections, more_rows = sections_of(snapshot, self._moves, limits)
        load = _load(snapshot)
        happenings = self._happenings
        found = [one for look in looks for one in look.found]
        found += troubles_of(snapshot, self._moves, load, happenings.differing)
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
        # The past is that of all; what the view has no room for is left out of it after this.
        if more_guards:
            view["all_guards"] = len(guards) + more_guards
        more = more_guards + more_rows + self._tracks.add(view)
        view["happenings"] = happenings.latest()
        self.writer.begin()
        view, cut = fitted(view, writer=self.writer)
        self._tell_left_out(more + cut, view)
        return view

    def _looks(self, snapshot: Snapshot, kept: Mapping[str, Seen], now: float) -> list[Look]:
        """Return what is seen of each guard."""
        stacks = {guard.name: guard.policies for guard in registry.guards()}
        families = {family.name: family.policies for family in registry.families()}
        edges = {str(edge.get("name", "")) for edge in things(snapshot, "edge")}

        def make(seen: Seen, moves: Moves) -> tuple[GuardView, list[Found], list[Row]]:
            name = str(seen.get("name", ""))
            policies = families.get(name) or stacks.get(name, ())
            edge = name in edges and name not in families
            view = guard_view(seen, policies, moves, edge=edge, settings=self._settings.of)
            if name in families:
                for layer in view["stack"]:
                    layer["changes"] = []  # they would be those of one key
            return view, troubles_in("guard", seen, moves), guard_rows(seen, moves)

        guards = things(snapshot, "guard")
        looks = [self._turns.look(seen, now, kept, partial(make, seen)) for seen in guards]
        self._turns.forget_others(str(seen.get("name", "")) for seen in guards)
        return looks

    def _tell_left_out(self, left_out: int, view: View) -> None:
        """Say once that not all is shown, and once more when that changes much."""
        if (left_out > 0) != (self._left_out > 0) or left_out > 2 * self._left_out:
            if left_out:
                what = f"there is too much to show: {left_out} guards or rows are left out, or cut"
                self._happenings.note(HERE, "warn", what)
            self._left_out = left_out
            view["happenings"] = self._happenings.latest()[-max(1, len(view["happenings"])) :]

    def _after_fork(self) -> None:
        """Begin anew in a child process, which is another pod."""
        self._happenings.forget()
        self._begin()


def _load(snapshot: Snapshot) -> float:
    kinds: Iterable[str] = map(str, snapshot)
    try:
        return max(0.0, number(autoscale_load({kind: things(snapshot, kind) for kind in kinds})))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return 0.0  # of the same kind, yet another shape


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return shown(version("seawall"), LONGEST_WORD)
    except PackageNotFoundError:  # not installed: run from its source
        return ""
