"""History of the other pods: kept here, since each of them reports only its present state.

Promises:
- At most `MOST_PASTS` pods are kept, and `MOST_CURVES` curves of all together.
- Nothing is kept of a pod that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from seawall.dashboard._tracks import Tracks
from seawall.dashboard.views import GuardTrack, History, View

MOST_PASTS: Final = 16
"""Maximum number of other pods whose history is kept here."""

MOST_CURVES: Final = 4000
"""Maximum number of curves of all these pods: a pod may report much more than is ever viewed."""


class Pasts:
    """The histories of other pods, for one event loop."""

    def __init__(self) -> None:
        """Start empty."""
        self._pasts: dict[str, Tracks] = {}
        self._last_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Pasts of {len(self._pasts)} pods>"

    def histories(self) -> Iterator[tuple[str, History]]:
        """Yield the name and history of each pod."""
        for name, tracks in self._pasts.items():
            yield name, tracks.history

    def hours(self, span: float, guard: str) -> Iterator[tuple[str, Any]]:
        """Yield the history of a guard over `span` seconds for each pod that has it, by its name.

        It starts with the first viewer here: other pods are fetched only while there are viewers.
        """
        for name, tracks in self._pasts.items():
            known = tracks.hours(span, guard)
            if known is not None:
                yield name, known

    def remember(self, views: Sequence[View]) -> None:
        """Add the new samples of these pods, and forget pods that are gone."""
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
