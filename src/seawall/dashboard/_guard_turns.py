"""Selection of the guards in a sample: all if they are few, otherwise some in turn.

Reading a guard costs a fraction of a millisecond, which is much for hundreds of them each second.

Promises:
- Of more than `AT_ONCE` guards, `AT_ONCE` are read in a sample.
- Guards with a recent event come first, then unhealthy ones, up to half of the places. The other
  places go to the guards that have waited longest, so each is read after a while.
- The rates of a guard are those since its own last reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from seawall.dashboard._moves import Moves
from seawall.dashboard._rules import Found
from seawall.dashboard.views import GuardView, Row

AT_ONCE: Final = 16

Seen = Mapping[str, Any]


class Look(NamedTuple):
    """The snapshot of a guard, and what was derived from it."""

    seen: Seen
    view: GuardView
    found: list[Found]
    limits: list[Row]
    moves: Moves


class GuardTurns:
    """The last reading of each guard. Not safe for concurrent use."""

    def __init__(self, apart: float) -> None:
        """Start without guards; `apart` as for `Moves`."""
        self._apart = apart
        self._looks: dict[str, Look] = {}
        """By name, the one that was read longest ago first."""

    def __repr__(self) -> str:
        return f"<GuardTurns of {len(self._looks)} guards>"

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
        make: Callable[[Moves], tuple[GuardView, list[Found], list[Row]]],
    ) -> Look:
        """Return the result of `make` for a guard, or its last result if it is among the `kept`."""
        name = str(seen.get("name", ""))
        last = self._looks.get(name)
        if last is not None and name in kept and last.seen is seen:
            return last
        moves = Moves(self._apart) if last is None else last.moves
        moves.begin(now)
        look = Look(seen, *make(moves), moves)
        self._looks.pop(name, None)
        self._looks[name] = look
        return look

    def forget_others(self, names: Iterable[str]) -> None:
        """Forget the guards that are not among these."""
        alive = set(names)
        for name in [name for name in self._looks if name not in alive]:
            del self._looks[name]
