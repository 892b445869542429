"""Caps: how much is left of a limit according to a vendor, in the headers of its responses.

"Only 7 more until 12 s from now" lowers a budget and never raises it: it is one more bound besides
the limit's own rule. Several such caps may apply at once (one for an hour and one for a second, or
one that is about to end and the next), so all relevant ones are kept: those that last longer allow
more.
"""

from __future__ import annotations

from typing import Final

AT_MOST: Final = 4  # maximum number of caps. Beyond it, the two that end closest are merged


class Caps:
    """How much may still be taken until when. Times are whole microseconds."""

    __slots__ = ("lefts", "sinces", "untils")

    def __init__(self) -> None:
        self.untils: list[float] = []  # when each cap ends, soonest first
        self.lefts: list[int] = []
        """What may be taken until then: less for caps that end sooner. May be negative."""
        self.sinces: list[float] = []  # when it was reported: nothing taken before is given back

    def lower(self, now: float, remaining: int, until: float) -> None:
        """Allow no more than `remaining` to be taken until `until`."""
        self._forget(now)
        if until <= now:
            return
        for place in range(len(self.untils)):
            if self.untils[place] >= until and self.lefts[place] <= remaining:
                # This cap is already known. But takings before now can no longer be given back: the
                # vendor knew of them, or of others that took as much.
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
        """Merge two caps: as strict as the first, for as long as the second."""
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
        """Return how long `wanted` has to wait: 0 if it may go now."""
        for place in reversed(range(len(self.untils))):
            if self.untils[place] > now and self.lefts[place] < wanted:
                return self.untils[place] - now
        return 0.0

    def take(self, cost: int) -> None:
        """Reduce what is left by `cost`."""
        for place in range(len(self.lefts)):
            self.lefts[place] -= cost

    def give_back(self, unused: int, mark: float) -> None:
        """Give back what was taken at `mark`, in the caps that already applied then."""
        for place in range(len(self.lefts)):
            if self.sinces[place] < mark:
                self.lefts[place] += unused
        # A cap that allows at least as much as one that ends later is redundant.
        for place in reversed(range(len(self.lefts) - 1)):
            if self.lefts[place] >= self.lefts[place + 1]:
                self._remove(place)

    def left(self, now: float, otherwise: int) -> int:
        """Return how much may be taken at once now, given what is left `otherwise`."""
        for place in range(len(self.untils)):
            if self.untils[place] > now:
                return min(otherwise, max(0, self.lefts[place]))
        return otherwise

    def rest(self, now: float) -> float:
        """Return the time until the last cap ends."""
        return max(0.0, self.untils[-1] - now) if self.untils else 0.0

    def copy(self) -> Caps:
        """Return an independent copy."""
        same = Caps()
        same.untils, same.lefts, same.sinces = self.untils[:], self.lefts[:], self.sinces[:]
        return same
