"""What vendors said is left, for each key of one limit in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from seawall.models.rate_caps import Caps

_SWEEP: Final = 2

Beside = Callable[[Hashable], Hashable]


class KeyedCaps:
    """The caps of one limit, by the place of their key; false while there are none."""

    __slots__ = ("_beside", "_caps", "_hand")

    def __init__(self, beside: Beside) -> None:
        """Let `beside(place)` be where several keys are kept together with that one."""
        self._beside = beside
        self._caps: dict[Hashable, Caps] = {}
        self._hand: list[Hashable] = []

    def __bool__(self) -> bool:
        return bool(self._caps)

    def at(self, place: Hashable, now: float) -> Caps | None:
        """Return the caps that hold at `place` now, if any."""
        for where in (place, self._beside(place)):
            caps = self._caps.get(where)
            if caps is not None:
                if caps.rest(now):
                    return caps
                del self._caps[where]
        return None

    def lower(self, place: Hashable, now: float, remaining: int, until: float) -> None:
        """Let no more than `remaining` be taken at `place` until `until`."""
        caps = self.at(place, now)
        if caps is None or place not in self._caps:
            caps = self._caps[place] = Caps() if caps is None else caps.copy()
        caps.lower(now, remaining, until)
        self._sweep(now)

    def forget(self, place: Hashable) -> None:
        """Let nothing that was said hold at `place` any more."""
        self._caps.pop(place, None)

    def _sweep(self, now: float) -> None:
        """Look at a few, and forget those that hold no more."""
        for _ in range(_SWEEP):
            if not self._hand:
                self._hand = list(self._caps)
            if self._hand:
                self.at(self._hand.pop(), now)
