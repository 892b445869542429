"""A group: its members, the subscribers to changes, and the counts for metrics.

`Heartbeats` and `Cluster` detect the state of members; both keep it in a `Group`, so that
subscribers, metrics and pages need not know which of them it was.

Promises:
- Each suspicion ends exactly once: cleared, confirmed, or the member has left.
- A subscriber is called for each change, in order, and never while the group's lock is held. A
  failing subscriber is logged and does not affect others.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Any, Final

from seawall._forks import survives_fork
from seawall.events import MemberChanged, OwnPause
from seawall.events.bus import emit
from seawall.models.detection.gossip import MemberState
from seawall.models.histogram import Histogram, Tally
from seawall.runtime.functions import kind_of
from seawall.runtime.mutex import Mutex

Subscriber = Callable[[MemberChanged], object]

MOST_SHOWN: Final = 1000
"""Maximum number of members in a snapshot."""
_WORST_FIRST: Final = {
    MemberState.CONFIRMED: 0,
    MemberState.SUSPECTED: 1,
    MemberState.UNKNOWN: 2,
    MemberState.ALIVE: 3,
    MemberState.LEFT: 4,
}


@dataclass(frozen=True, slots=True)
class MemberView:
    """State of one member at one instant."""

    name: str
    state: MemberState
    since: float
    """Time at which it entered this state, by the clock of the group."""
    address: str = ""
    level: float = 0.0
    """Level of suspicion; the member is suspected from `threshold` on."""
    threshold: float = 1.0
    round_trip: float | None = None
    """Round-trip time of its last answer in seconds, if it was probed."""
    metadata: bytes = b""
    reason: str = ""
    by: str = ""
    """The member that reported this state; empty for this process itself."""

    @property
    def is_present(self) -> bool:
        """Whether it counts as a member; a suspected one does."""
        return self.state in (MemberState.ALIVE, MemberState.SUSPECTED)


class Group:
    """The members of one group as this process sees them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._subscribers: tuple[Subscriber, ...] = ()
        self._mutex = Mutex()
        words = ("suspicions", "cleared", "confirmed", "left", "own_pauses")
        self.counts = dict.fromkeys(words, 0)
        self._paused_seconds = 0.0
        self.detection_times = Tally()
        """Seconds from the last sign of life to the confirmation."""
        self.round_trips = Histogram()
        survives_fork(self)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(change)` for each `MemberChanged`; return a function to unsubscribe.

        It is called in the thread that detects the change, so it must be quick.
        """
        if not callable(subscriber) or kind_of(subscriber) != "sync":
            raise TypeError(
                f"subscribe({subscriber!r}): pass a plain function that takes one MemberChanged"
            )
        entry: Subscriber = lambda change: subscriber(change)  # noqa: E731, PLW0108 - lets equal subscribers end separately
        with self._mutex:
            self._subscribers = (*self._subscribers, entry)

        def unsubscribe() -> None:
            with self._mutex:
                self._subscribers = tuple(kept for kept in self._subscribers if kept is not entry)

        return unsubscribe

    def publish(
        self,
        *,
        member: str,
        before: MemberState,
        after: MemberState,
        reason: str,
        level: float,
        duration: float,
        by: str = "",
        silence: float | None = None,
    ) -> None:
        """Count a change and pass it to subscribers and events.

        `silence` is the number of seconds for which a confirmed member had not been heard. Without
        it, no detection time is recorded.
        """
        if after is MemberState.SUSPECTED:
            self.counts["suspicions"] += 1
        elif after is MemberState.LEFT:
            self.counts["left"] += 1
        elif after is MemberState.CONFIRMED:
            self.counts["confirmed"] += 1
            if silence is not None:
                self.detection_times.add(silence)
        elif before is MemberState.SUSPECTED:
            self.counts["cleared"] += 1
        fields: dict[str, Any] = {
            "member": member,
            "before": str(before),
            "after": str(after),
            "reason": reason,
            "level": level,
            "duration": duration,
            "by": by,
        }
        change = MemberChanged(self.name, **fields)
        for subscriber in self._subscribers:
            try:
                subscriber(change)
            except (Exception, CancelledError, SystemExit) as error:
                # A CancelledError comes from a task whose result the subscriber asked for.
                # `sys.exit()` ends the program only in its main thread; in any other thread it
                # would only end detection.
                if isinstance(error, SystemExit) and current_thread() is main_thread():
                    raise
                logging.getLogger("seawall").exception(
                    "a subscriber of the group %r failed", self.name
                )
        emit(MemberChanged, self.name, **fields)

    def note_own_pause(self, seconds: float) -> None:
        """Count a pause of this process."""
        self.counts["own_pauses"] += 1
        self._paused_seconds += seconds
        emit(OwnPause, self.name, seconds=seconds)

    def snapshot(self, views: Iterable[MemberView], now: float) -> dict[str, Any]:
        """Return the members, worst first, the counts and the round-trip times, as plain data."""
        worst = sorted(views, key=lambda view: (_WORST_FIRST[view.state], -view.level, view.name))
        trips = self.round_trips.snapshot()
        del trips["count"]
        cleared = self.counts["cleared"]
        ended = cleared + self.counts["confirmed"]
        return {
            "members": [_as_data(view, now) for view in worst[:MOST_SHOWN]],
            "counts": {
                **self.counts,
                "false_suspect_rate": cleared / ended if ended else None,
                "paused_seconds": self._paused_seconds,
                "detection_times": self.detection_times.snapshot(),
                "round_trips": self.round_trips.tally().snapshot(),
            },
            "round_trip": None if trips["p50"] is None else trips,
        }

    def _after_fork(self) -> None:
        """Replace the lock in a child process: the thread that held it does not exist there."""
        self._mutex = Mutex()


def _as_data(view: MemberView, now: float) -> dict[str, Any]:
    return {
        "name": view.name,
        "state": str(view.state),
        "seconds": max(0.0, now - view.since),
        "address": view.address,
        "level": view.level,
        "threshold": view.threshold,
        "round_trip": view.round_trip,
        "metadata": view.metadata.decode("utf-8", "replace"),
        "reason": view.reason,
        "by": view.by,
    }
