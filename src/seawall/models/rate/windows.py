"""Windows: count what was admitted in a time span, and admit no more than the limit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic

from seawall.models.rate.rates import Rate
from seawall.models.rate.rule import RateRule, S, check_exact


class AlignedWindow(RateRule[S], Generic[S]):
    """Base of windows that start at multiples of the period."""

    origin: float = 0.0  # time from which these multiples count: 1970, if the clock knows it

    def _begin(self, now: float) -> float:
        """Return the start of the window that contains `now`."""
        return now - (now - self.origin) % self.rate.period


class FixedWindow(AlignedWindow[tuple[float, int]]):
    """At most `limit` between two boundaries, so at most twice that in any period.

    The state is the start of a window, and what was taken in it.
    """

    def __init__(self, rate: Rate) -> None:
        """Start a window at each multiple of the period, counted from `origin`."""
        super().__init__(rate)
        self.capacity: int = rate.limit
        check_exact(rate, rate.period)

    def _current(self, state: tuple[float, int], now: float) -> tuple[float, int]:
        begin, _used = state
        if now < begin + self.rate.period:
            return state
        return self._begin(now), 0

    def fresh(self, now: float) -> tuple[float, int]:
        """Return a state with nothing taken."""
        return self._begin(now), 0

    def wait(self, state: tuple[float, int], now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the time until the next boundary with room."""
        limit = self.rate.limit
        if cost > limit:
            return None
        begin, used = self._current(state, now)
        # Calls ahead fill at least this many windows before there is room. An excess in this window
        # does not carry over to the next.
        windows = -(-(min(used, limit) + ahead + cost - limit) // limit)
        if windows <= 0:
            return 0.0
        return begin + windows * self.rate.period - now

    def take(
        self, state: tuple[float, int], now: float, cost: int
    ) -> tuple[tuple[float, int], float]:
        """Count in the current window."""
        begin, used = self._current(state, now)
        return (begin, used + cost), max(begin, now)

    def give_back(
        self, state: tuple[float, int], now: float, taken: int, used: int, mark: float
    ) -> tuple[float, int]:
        """Reduce the count, if that window is not over."""
        begin, total = self._current(state, now)
        return (begin, max(0, total - taken + used)) if mark >= begin else (begin, total)

    def left(self, state: tuple[float, int], now: float) -> int:
        """Return the room in the current window."""
        return max(0, self.rate.limit - self._current(state, now)[1])

    def rest(self, state: tuple[float, int], now: float) -> float:
        """Return the time until the next boundary, if anything was taken."""
        begin, used = self._current(state, now)
        return begin + self.rate.period - now if used or now < begin else 0.0


Counts = tuple[float, int, int]


class SlidingCounter(AlignedWindow[Counts]):
    """At most `limit` by an estimate: the previous window counts in part, as if evenly filled.

    The error: with `before` admitted in the previous window, up to `before * elapsed / period` more
    than `limit` may be admitted in one period, so less than twice `limit`. A call is never refused
    while both windows together have room for it.

    The state is the start of a window, what was taken in it, and in the previous one.
    """

    def __init__(self, rate: Rate) -> None:
        """Start a window at each multiple of the period, counted from `origin`."""
        super().__init__(rate)
        self.capacity: int = rate.limit
        check_exact(rate, 4 * rate.limit * rate.period)

    def _current(self, state: Counts, now: float) -> Counts:
        begin, used, _before = state
        period = self.rate.period
        if now < begin + period:
            return state
        if now < begin + 2 * period:
            return begin + period, 0, used
        return self._begin(now), 0, 0

    def fresh(self, now: float) -> Counts:
        """Return a state with nothing taken."""
        return self._begin(now), 0, 0

    def wait(self, state: Counts, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the time until enough of the previous window has slid away."""
        limit, period = self.rate
        if cost > limit:
            return None
        begin, used, before = self._current(state, now)
        before = min(before, limit)  # an excess in one window does not carry over to the next
        total = ahead + cost
        if used + total <= limit:
            elapsed = max(0.0, now - begin)
            if before * (period - elapsed) + (used + total) * period <= limit * period:
                return 0.0
            return begin + period - (limit - used - total) * period // before - now
        # Not in this window. However the calls ahead spread over it and the next ones, no window
        # takes more than the limit, and the fuller the previous one, the less is left for the last.
        windows = -(-(min(used, limit) + total - limit) // limit)
        if windows == 1:
            here = max(0, min(ahead, limit - used))
            last, full = total - here, min(limit, used + here)
        else:
            last, full = min(used, limit) + total - windows * limit, limit
        return begin + (windows + 1) * period - (limit - last) * period // full - now

    def take(self, state: Counts, now: float, cost: int) -> tuple[Counts, float]:
        """Count in the current window."""
        begin, used, before = self._current(state, now)
        return (begin, used + cost, before), max(begin, now)

    def give_back(self, state: Counts, now: float, taken: int, used: int, mark: float) -> Counts:
        """Reduce the count of the window in which it was taken."""
        begin, total, before = self._current(state, now)
        if mark >= begin:
            total = max(0, total - taken + used)
        elif mark >= begin - self.rate.period:
            before = max(0, before - taken + used)
        return begin, total, before

    def left(self, state: Counts, now: float) -> int:
        """Return the room by the estimate."""
        limit, period = self.rate
        begin, used, before = self._current(state, now)
        before = min(before, limit)
        elapsed = max(0.0, now - begin)
        return max(0, int((limit * period - before * (period - elapsed)) // period) - used)

    def rest(self, state: Counts, now: float) -> float:
        """Return the time until both windows are empty."""
        begin, used, before = self._current(state, now)
        windows = 2 if used else 1 if before or now < begin else 0
        return begin + windows * self.rate.period - now if windows else 0.0


@dataclass(eq=False, slots=True)
class Log:
    """State of a sliding log as of `latest`: times and costs of takings, oldest first."""

    latest: float
    takings: deque[tuple[float, int]]
    used: int  # the sum of the costs


class SlidingLog(RateRule[Log]):
    """At most `limit` in every period: exact, at the price of memory."""

    def __init__(self, rate: Rate) -> None:
        super().__init__(rate)
        self.capacity: int = rate.limit
        check_exact(rate, rate.period)

    def _forget(self, log: Log, now: float) -> None:
        """Drop takings that have left the window (now - period, now]."""
        takings = log.takings
        log.latest = max(log.latest, now)
        while takings and takings[0][0] <= log.latest - self.rate.period:
            log.used -= takings.popleft()[1]

    def fresh(self, now: float) -> Log:
        """Return a state with nothing taken."""
        return Log(now, deque(), 0)

    def wait(self, state: Log, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return the time until enough of the oldest takings are a period old."""
        limit = self.rate.limit
        if cost > limit:
            return None
        self._forget(state, now)
        # Each unit to be taken comes one period after the one that is `limit` units before it.
        rounds, rest = divmod(ahead + cost - 1, limit)
        later = float(rounds * self.rate.period)
        missing = state.used + rest + 1 - limit
        for at, taken in state.takings:
            if missing <= 0:
                break
            missing -= taken
            if missing <= 0:
                return at + self.rate.period - now + later
        return later

    def take(self, state: Log, now: float, cost: int) -> tuple[Log, float]:
        """Record the taking. Takings in the same microsecond are merged."""
        takings = state.takings
        at = state.latest = max(state.latest, now)
        same = takings.pop()[1] if takings and takings[-1][0] == at else 0
        takings.append((at, same + cost))
        state.used += cost
        return state, at

    def give_back(self, state: Log, now: float, taken: int, used: int, mark: float) -> Log:
        """Reduce the recorded taking, if it is still there."""
        for place in reversed(range(len(state.takings))):  # usually it is among the latest
            at, cost = state.takings[place]
            if at <= mark:
                if at == mark:
                    state.used -= taken - used
                    if cost > taken - used:
                        state.takings[place] = at, cost - taken + used
                    else:
                        del state.takings[place]
                break
        return state

    def left(self, state: Log, now: float) -> int:
        """Return the room in the window that ends now."""
        self._forget(state, now)
        return max(0, self.rate.limit - state.used)

    def rest(self, state: Log, now: float) -> float:
        """Return the time until the latest taking is a period old."""
        last = state.takings[-1][0] + self.rate.period if state.takings else state.latest
        return max(0.0, last - now)

    def copy(self, state: Log) -> Log:
        """Return an independent copy."""
        return Log(state.latest, deque(state.takings), state.used)
