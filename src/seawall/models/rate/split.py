"""Splitting: each of several pods has its part of a limit, and counts by itself.

    divided(rule, pods) -> the rule for one of them

The parts together are never more than the whole, as long as each pod knows how many there are.
What changes is the hard part, and three rules keep the total in bounds then. A pod that others
do not know of yet has no part, until all of them must have heard of it; nor has one that was silent
for so long that they may have forgotten it. Who hears of more pods shrinks at once; who hears of
fewer grows only when that has lasted, since a store may forget. And whatever a pod gains counts as
taken at that moment: whoever had it before may just have spent it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic

from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.rates import Rate
from seawall.models.rate.rule import Rule, S
from seawall.models.rate.windows import AlignedWindow, FixedWindow, SlidingCounter, SlidingLog

BEAT: Final = 500_000
"""Every so many microseconds a pod says that it lives, and hears how many do."""

LIFE: Final = 3 * BEAT
"""A pod that has not been heard of for so long is gone."""

SETTLED: Final = 2 * BEAT
"""After so long all others have heard of a pod, if they live."""

VALID: Final = 2 * LIFE - BEAT
"""For so long after a beat nobody grows into the part of a pod that is silent."""


class Members:
    """How many pods there are, from what one of them hears. Times are the server's."""

    __slots__ = (
        *("_changed", "_heard", "_since"),
        *("count", "known", "latest", "quiet", "settled", "steady"),
    )

    def __init__(self) -> None:
        """Have heard nothing yet."""
        self._since: float | None = None
        self._heard: deque[tuple[float, int]] = deque()
        self.latest = float("-inf")
        """When it was heard, the last time."""
        self.known = False
        """Whether it has heard anything."""
        self.count = 1
        """How many there are, this one included: the most that was heard of lately.

        Without news, what was heard last stays.
        """
        self.settled = False
        """Whether all others must have heard of this one; at once where there was nobody else."""
        self.quiet: float | None = 0.0
        """For how long nobody else had been there, at the beginning; None: nobody is known of."""
        self._changed = 0.0
        self.steady = 0.0
        """For how long all of this had been so, when it was heard last."""

    def __repr__(self) -> str:
        return f"Members({self.count}{'' if self.known else '?'})"

    def hear(self, now: float, live: int, quiet: float | None, *, forgotten: bool = False) -> None:
        """Hear that so many live, and for how long there was nobody but this one.

        `forgotten`: others may have grown into the part of this one, while it was silent.
        """
        before = self.count, self.settled
        if now < self.latest:
            self._set_back(self.latest - now)
        self.latest = now
        if self._since is None or forgotten:
            self._since, self.quiet = now, 0.0 if forgotten else quiet
            self.settled = False
        heard = self._heard
        if heard and now - heard[-1][0] > 2 * BEAT:
            # There was a silence, of this one or of the store. What came before it still holds.
            heard.clear()
            heard.append((now, self.count))
        while heard and heard[0][0] <= now - LIFE:
            heard.popleft()
        while heard and heard[-1][1] <= live:
            heard.pop()  # from now on this one says more
        heard.append((now, live))
        self.count = heard[0][1]
        alone = self.quiet is None and self.count == 1
        self.settled = self.settled or alone or now - self._since >= SETTLED
        if before != (self.count, self.settled):
            self._changed = now
        self.steady = now - self._changed
        self.known = True

    def _set_back(self, by: float) -> None:
        """Go on by a clock that was set back; what passed meanwhile is not known, so nothing."""
        self._heard = deque((at - by, live) for at, live in self._heard)
        self._changed -= by
        if self._since is not None:
            self._since -= by


class _Part(Rule[S], Generic[S]):
    """The part of a limit that one pod has; what it has gained counts as taken."""

    gain: int = 0
    """So much more it is than what the pod had before."""
    base: Any = None
    """The state of a key that was never heard of; None: nothing taken."""

    def fresh(self, now: float) -> S:
        """Have taken what was gained lately."""
        if self.base is None or not self.rest(self.base, now):
            return super().fresh(now)
        state: S = self.copy(self.base)
        return state

    def adopt(self, state: S, old: Rule[S], now: float) -> S:
        """Count the same, and what is gained."""
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


def divided(rule: Rule[Any], pods: int) -> Rule[Any]:
    """Return the rule for one of `pods`: its part of the limit, rounded down, but at least one.

    Where there are more pods than the limit has in a period, each has one in as many periods as it
    takes: on average it is right, and `pods - limit` more may come at once.
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


def follow(new: Rule[Any], old: Rule[Any] | None, now: float) -> Rule[Any]:
    """Let `new` take the place of `old` at `now`; of nothing, if None: then all of it is gained."""
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


def excess_of(rule: Rule[Any], pods: int) -> int:
    """Return how much more than the limit `pods` may admit at once, each with its part."""
    return max(0, pods - (rule.capacity or 1))


def check_divisible(sharing: str, rules: Sequence[Rule[Any]]) -> None:
    """Raise if one of the limits cannot be shared in parts."""
    if any(isinstance(rule, LeakyBucket) for rule in rules):
        raise ValueError(
            f"sharing={sharing!r}: a leaky bucket keeps all calls apart, and pods that decide by"
            " themselves cannot; write sharing='exact', or algorithm='token_bucket'"
        )
