"""A group: what is known of its members, who wants to hear of changes, and the counts for metrics.

`Heartbeats` and `Cluster` find out how members are; both keep it in a `Group`, so that subscribers,
metrics and pages do not care which of them it was.

Promises:
- Each suspicion ends exactly once: cleared, confirmed, or the member has left.
- A subscriber is called for each change, in their order, and never while the group's lock is held;
  one that fails is logged and disturbs nobody.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Any

from seawall.models.detection.gossip import MemberState
from seawall.models.histogram import Histogram, Tally
from seawall.runtime import events
from seawall.runtime.functions import kind_of
from seawall.runtime.member_events import MemberChanged, OwnPause
from seawall.runtime.mutex import Mutex, survives_fork

Subscriber = Callable[[MemberChanged], object]


@dataclass(frozen=True, slots=True)
class MemberView:
    """What is known of one member at one instant."""

    name: str
    state: MemberState
    since: float
    """When it went into this state, by the clock of the group."""
    address: str = ""
    level: float = 0.0
    """How strongly it is suspected; it counts as suspected from `threshold`."""
    threshold: float = 1.0
    round_trip: float | None = None
    """Seconds that its last answer took, if it was asked."""
    metadata: bytes = b""
    reason: str = ""
    by: str = ""
    """The member on whose word it is in this state; empty for this process itself."""

    @property
    def is_present(self) -> bool:
        """Whether it counts as a member: a suspected one does."""
        return self.state in (MemberState.ALIVE, MemberState.SUSPECTED)


class Group:
    """The members of one group as this process sees them."""

    def __init__(self, name: str) -> None:
        """Begin without members."""
        self.name = name
        self._subscribers: tuple[Subscriber, ...] = ()
        self._mutex = Mutex()
        self.suspicions = 0
        self.cleared = 0
        self.confirmed = 0
        self.left = 0
        self.own_pauses = 0
        self.paused_seconds = 0.0
        self.detection_times = Tally()
        """Seconds from the last sign of life to the confirmation."""
        self.round_trips = Histogram()
        survives_fork(self)

    @property
    def false_suspect_rate(self) -> float | None:
        """The share of ended suspicions that were wrong; None before the first has ended."""
        ended = self.cleared + self.confirmed
        return self.cleared / ended if ended else None

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(change)` for each `MemberChanged`; return a function that ends that.

        It is called in the thread that detects, so it must be quick.
        """
        if not callable(subscriber) or kind_of(subscriber) != "sync":
            raise TypeError(
                f"subscribe({subscriber!r}): pass a plain function that takes one MemberChanged"
            )
        entry: Subscriber = lambda change: subscriber(change)  # noqa: E731, PLW0108 - equal ones end apart
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
        """Count a change and hand it to subscribers and events.

        `silence` is for how long a confirmed member had not been heard; if that is not known, the
        detection time is not counted.
        """
        if after is MemberState.SUSPECTED:
            self.suspicions += 1
        elif after is MemberState.LEFT:
            self.left += 1
        elif after is MemberState.CONFIRMED:
            self.confirmed += 1
            if silence is not None:
                self.detection_times.add(silence)
        elif before is MemberState.SUSPECTED:
            self.cleared += 1
        change = MemberChanged(
            self.name,
            member=member,
            before=str(before),
            after=str(after),
            reason=reason,
            level=level,
            duration=duration,
            by=by,
        )
        for subscriber in self._subscribers:
            try:
                subscriber(change)
            except (Exception, CancelledError, SystemExit) as error:
                # A cancellation is that of a task whose result was asked for. `sys.exit()` ends the
                # program in its main thread; in any other it would only end the watch.
                if isinstance(error, SystemExit) and current_thread() is main_thread():
                    raise
                logging.getLogger("seawall").exception(
                    "a subscriber of the group %r failed", self.name
                )
        events.emit(MemberChanged, change.guard, **_without_guard(change))

    def note_own_pause(self, seconds: float) -> None:
        """Count a pause of this process itself."""
        self.own_pauses += 1
        self.paused_seconds += seconds
        events.emit(OwnPause, self.name, seconds=seconds)

    def counts(self) -> dict[str, Any]:
        """Return the counts, for a snapshot."""
        return {
            "suspicions": self.suspicions,
            "cleared": self.cleared,
            "confirmed": self.confirmed,
            "left": self.left,
            "false_suspect_rate": self.false_suspect_rate,
            "own_pauses": self.own_pauses,
            "paused_seconds": self.paused_seconds,
            "detection_times": self.detection_times.snapshot(),
            "round_trips": self.round_trips.tally().snapshot(),
        }

    def _after_fork(self) -> None:
        """Be usable in a child process: the thread that held the lock has not come along."""
        self._mutex = Mutex()


def snapshot_of(view: MemberView, now: float) -> dict[str, Any]:
    """Return `view` as plain data."""
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


def _without_guard(change: MemberChanged) -> dict[str, Any]:
    fields = change.fields()
    del fields["guard"]
    return fields
