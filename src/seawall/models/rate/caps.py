"""What somebody else says is left of a limit: a vendor, in the headers of its answers.

"Only 7 more until 12 s from now" lowers a budget and never raises it: it is one more bound beside
the limit's own rule. Several such words may hold at once (an hour's and a second's, or one that is
about to end and the next), so all are kept that say something: those that last longer allow more.
"""

from __future__ import annotations

from typing import Final

AT_MOST: Final = 4
"""So many words are kept apart; of more, the two that end closest together become one."""


class Caps:
    """How much may still be taken until when. Time is whole microseconds."""

    __slots__ = ("lefts", "sinces", "untils")

    def __init__(self) -> None:
        """Hold nothing back."""
        self.untils: list[float] = []
        """When each ends, soonest first."""
        self.lefts: list[int] = []
        """What may be taken until then: less for those that end sooner. May be below 0."""
        self.sinces: list[float] = []
        """When it was said: what was taken up to then is not given back to it."""

    def lower(self, now: float, remaining: int, until: float) -> None:
        """Let no more than `remaining` be taken until `until`."""
        self._forget(now)
        if until <= now:
            return
        for place in range(len(self.untils)):
            if self.untils[place] >= until and self.lefts[place] <= remaining:
                # It is known already. But what was taken before now is no more to be given back:
                # whoever said it knew of it, or of others who took as much.
                self.sinces[place] = now
                return
        place = 0
        while place < len(self.untils) and self.untils[place] <= until:
            if self.lefts[place] >= remaining:
                self._remove(place)
            else:
                place += 1
        self.untils.insert(place, until)
        self.lefts.insert(place, remaining)
        self.sinces.insert(place, now)
        if len(self.untils) > AT_MOST:
            self._merge()

    def _merge(self) -> None:
        """Make one of two: as strict as the one, for as long as the other."""
        closest = 0
        for place in range(1, len(self.untils) - 1):
            gap = self.untils[place + 1] - self.untils[place]
            if gap < self.untils[closest + 1] - self.untils[closest]:
                closest = place
        self.lefts[closest + 1] = self.lefts[closest]
        self.sinces[closest + 1] = max(self.sinces[closest], self.sinces[closest + 1])
        self._remove(closest)

    def _forget(self, now: float) -> None:
        while self.untils and self.untils[0] <= now:
            self._remove(0)

    def _remove(self, place: int) -> None:
        del self.untils[place], self.lefts[place], self.sinces[place]

    def wait(self, now: float, wanted: int) -> float:
        """Return for how long `wanted` has to wait: 0 if it may go now."""
        for place in reversed(range(len(self.untils))):
            if self.untils[place] > now and self.lefts[place] < wanted:
                return self.untils[place] - now
        return 0.0

    def take(self, cost: int) -> None:
        """Let so much less be left."""
        for place in range(len(self.lefts)):
            self.lefts[place] -= cost

    def give_back(self, unused: int, mark: float) -> None:
        """Let so much more be left that was taken at `mark`, where it was taken under that word."""
        for place in range(len(self.lefts)):
            if self.sinces[place] < mark:
                self.lefts[place] += unused
        # What allows no more than one that ends sooner is all that there is to say.
        for place in reversed(range(len(self.lefts) - 1)):
            if self.lefts[place] >= self.lefts[place + 1]:
                self._remove(place)

    def left(self, now: float, otherwise: int) -> int:
        """Return how much may be taken at once now, of what is left `otherwise`."""
        for place in range(len(self.untils)):
            if self.untils[place] > now:
                return min(otherwise, max(0, self.lefts[place]))
        return otherwise

    def rest(self, now: float) -> float:
        """Return how long until none of it matters any more."""
        return max(0.0, self.untils[-1] - now) if self.untils else 0.0

    def copy(self) -> Caps:
        """Return the same, to be changed apart from it."""
        same = Caps()
        same.untils, same.lefts, same.sinces = self.untils[:], self.lefts[:], self.sinces[:]
        return same
