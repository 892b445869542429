"""Splitting: each of several pods has a part of a limit, and counts it locally.

    divided(rule, pods) -> the rule for one of them

The parts together never exceed the whole, as long as each pod knows how many there are. Changes are
the hard part, and three rules keep the total within bounds. A pod that others do not know of yet
has no part until all of them must have heard of it; neither has one that was silent for so long
that they may have forgotten it. A pod that hears of more pods shrinks immediately; one that hears
of fewer grows only when that has lasted, since a store may lose data. And whatever a pod gains
counts as taken at that moment: the previous owner may just have spent it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic

from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.rates import Rate
from seawall.models.rate.rule import RateRule, S
from seawall.models.rate.windows import AlignedWindow, FixedWindow, SlidingCounter, SlidingLog

BEAT: Final = 500_000  # microseconds between heartbeats, with which pods learn of each other
LIFE: Final = 3 * BEAT  # microseconds without a heartbeat after which a pod counts as gone
SETTLED: Final = 2 * BEAT  # microseconds after which all other live pods have heard of a pod
VALID: Final = 2 * LIFE - BEAT  # microseconds after a heartbeat in which the part stays


class SplitMembers:
    """Number of pods, as one of them knows it. Times are the server's."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._reports: deque[tuple[float, int]] = deque()
        self.latest = float("-inf")  # time of the latest report
        self.known = False  # whether there was any report
        self.count = 1  # number of pods with this one: the maximum reported lately
        self.settled = False  # whether all others must have heard of this pod
        self.quiet: float | None = 0.0  # how long it had been alone when it started, or None
        self._changed = 0.0
        self.steady = 0.0  # how long `count` and `settled` had been unchanged at the latest report

    def record(
        self, now: float, live: int, quiet: float | None, *, forgotten: bool = False
    ) -> None:
        """Process a report that `live` pods exist, and for how long there was no other pod.

        `forgotten` means that others may have taken this pod's part while it was silent.
        """
        before = self.count, self.settled
        if now < self.latest:
            self._set_back(self.latest - now)
        self.latest = now
        if self._since is None or forgotten:
            self._since, self.quiet = now, 0.0 if forgotten else quiet
            self.settled = False
        reports = self._reports
        if reports and now - reports[-1][0] > 2 * BEAT:
            # There was a silence, of this pod or of the store. The earlier count still applies.
            reports.clear()
            reports.append((now, self.count))
        while reports and reports[0][0] <= now - LIFE:
            reports.popleft()
        while reports and reports[-1][1] <= live:
            reports.pop()  # superseded by this report
        reports.append((now, live))
        self.count = reports[0][1]
        alone = self.quiet is None and self.count == 1
        self.settled = self.settled or alone or now - self._since >= SETTLED
        if before != (self.count, self.settled):
            self._changed = now
        self.steady = now - self._changed
        self.known = True

    def _set_back(self, by: float) -> None:
        """Follow a clock that was set back. The time that passed is unknown, so assume none."""
        self._reports = deque((at - by, live) for at, live in self._reports)
        self._changed -= by
        if self._since is not None:
            self._since -= by


class _Part(RateRule[S], Generic[S]):
    """The part of a limit that one pod has. What it has gained counts as taken."""

    gain: int = 0  # how much larger it is than the pod's previous part
    base: Any = None  # the state of an unknown key, or None if nothing is taken

    def fresh(self, now: float) -> S:
        """Return a state in which recent gains count as taken."""
        if self.base is None or not self.rest(self.base, now):
            return super().fresh(now)
        state: S = self.copy(self.base)
        return state

    def adopt(self, state: S, old: RateRule[S], now: float) -> S:
        """Convert a state and count the gain as taken."""
        state = super().adopt(state, old, now)
        return self.take(state, now, self.gain)[0] if self.gain > 0 else state


class _TokenPart(_Part[float], TokenBucket):
    pass


class _FixedPart(_Part[tuple[float, int]], FixedWindow):
    pass


class _CounterPart(_Part[tuple[float, int, int]], SlidingCounter):
    pass


class _LogPart(_Part[Any], SlidingLog):
    pass


def divided(rule: RateRule[Any], pods: int) -> RateRule[Any]:
    """Return the rule for one of `pods`: its part of the limit, rounded down, but at least one.

    If there are more pods than the limit per period, each has one in several periods: on average
    the limit holds, and up to `pods - limit` more may come at once.
    """
    limit, period = rule.rate
    if isinstance(rule, TokenBucket):
        return _TokenPart(Rate(limit, period * pods), max(1, rule.capacity // pods), rule.debt)
    if isinstance(rule, LeakyBucket):
        return LeakyBucket(Rate(limit, period * pods), rule.debt)
    part = Rate(max(1, limit // pods), period * max(1, -(-pods // limit)))
    if isinstance(rule, AlignedWindow):
        window = _FixedPart(part) if isinstance(rule, FixedWindow) else _CounterPart(part)
        window.origin = rule.origin
        return window
    return _LogPart(part)


def follow(new: RateRule[Any], old: RateRule[Any] | None, now: float) -> RateRule[Any]:
    """Let `new` replace `old` at `now`. Without `old`, all of it counts as gained."""
    if isinstance(new, _Part):
        had = 0 if old is None else old.capacity
        new.gain = max(0, (new.capacity or 0) - (had or 0))
        new.base = new.fresh(now)
        if old is not None:
            new.base = new.adopt(old.fresh(now), old, now)
        elif new.gain:
            new.base = new.take(new.base, now, new.gain)[0]
        if not new.rest(new.base, now):
            new.base = None  # nothing is taken, by any clock
    return new


def excess_of(rule: RateRule[Any], pods: int) -> int:
    """Return how much more than the limit `pods` may admit at once, each with its part."""
    return max(0, pods - (rule.capacity or 1))


def check_divisible(sharing: str, rules: Sequence[RateRule[Any]]) -> None:
    """Raise if one of the limits cannot be split."""
    if any(isinstance(rule, LeakyBucket) for rule in rules):
        raise ValueError(
            f"sharing={sharing!r}: a leaky bucket keeps all calls apart, and pods that decide by"
            " themselves cannot; write sharing='exact', or algorithm='token_bucket'"
        )
