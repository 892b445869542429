"""The past of the other pods: kept here, since each tells only how it is now.

Promises: of `MOST_PASTS` pods at most, and `MOST_CURVES` curves of all together; of a pod that is
not there any more nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from seawall.dashboard._tracks import Tracks
from seawall.dashboard.views import GuardTrack, History, View

MOST_PASTS: Final = 16
"""Pods beside this one whose past is kept here."""

MOST_CURVES: Final = 4000
"""Curves of all these pods together: a pod may tell of much more than is ever looked at."""


class Pasts:
    """Of one event loop."""

    def __init__(self) -> None:
        """Know of nobody yet."""
        self._pasts: dict[str, Tracks] = {}
        self._last_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Pasts of {len(self._pasts)} pods>"

    def histories(self) -> Iterator[tuple[str, History]]:
        """Return the past of each pod, by its name."""
        for name, tracks in self._pasts.items():
            yield name, tracks.history

    def hours(self, span: float, guard: str) -> Iterator[tuple[str, Any]]:
        """Return the past of a guard over `span` seconds on each pod that has it, by its name.

        It begins when somebody looked here: other pods are asked for only while somebody does.
        """
        for name, tracks in self._pasts.items():
            known = tracks.hours(span, guard)
            if known is not None:
                yield name, known

    def remember(self, views: Sequence[View]) -> None:
        """Add what is new of these pods, and forget who is not there any more."""
        kept: dict[str, View] = {}
        room = MOST_CURVES
        for view in views[:MOST_PASTS]:
            rows = sum(map(len, view["sections"].values()))
            room -= len(GuardTrack.__annotations__) * len(view["guards"]) + rows
            if room >= 0:
                kept[view["pod"]["name"]] = view
        self._pasts = {name: self._pasts.get(name) or Tracks() for name in kept}
        self._last_at = {name: at for name, at in self._last_at.items() if name in kept}
        for name, view in kept.items():
            if view["at"] > self._last_at.get(name, 0.0):
                self._last_at[name] = view["at"]
                self._pasts[name].add(view)
