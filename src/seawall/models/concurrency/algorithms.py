"""Concurrency limit algorithms: learn from latencies how many concurrent calls are good.

A limit receives one window after another: the mean latency of its calls, how many ran at once, and
whether calls were dropped (timed out, or were refused because of overload). With `L` the limit,
`rtt` that latency, `base` the latency without a queue, lg = max(1, log10 L) and u = lg, but at most
L/32 and at least 0.5, each window moves the limit as follows:

    Aimd        dropped, or rtt > slow_after: L * shrink; else L + 1
    Vegas       queue = ceil(L * (1 - base/rtt));
                queue <= u: L + beta*u;  queue < alpha*u: L + lg;
                queue > beta*u, or dropped: L - lg
    Gradient2   g = 1.5 * base/rtt within [0.5, 1] (0.5 if dropped); 0.8 * L + 0.2 * (g*L + 4)

Common to all: L stays within its bounds; it does not grow while less than half of it is used; and a
window with drops never trains `base`.

`seawall.models.concurrency.limit` explains how `base` is learned and why a limit grows faster at
first.
"""

from __future__ import annotations

from math import ceil, log10
from typing import ClassVar, Final

from seawall import _checks as check
from seawall.models.backoff import Rng
from seawall.models.concurrency.limit import NOISE, ConcurrencyLimit, Learner

SMALL: Final = 32  # the logarithm counts as at most 1/32 of the limit: 6 * log10(20) would be 40 %


class Aimd(ConcurrencyLimit):
    """Additive increase while calls are fast, multiplicative decrease when they are not."""

    name: ClassVar[str] = "aimd"
    SETTINGS = ("slow_after", "shrink", *ConcurrencyLimit.SETTINGS)

    def __init__(
        self, *, slow_after: float, shrink: float, initial: int, minimum: int, maximum: int
    ) -> None:
        """Treat a window with a mean latency above `slow_after` as overload."""
        self.slow_after = check.seconds("slow_after", slow_after, infinite=True)
        self.shrink = check.ratio("shrink", shrink)
        super().__init__(initial, minimum, maximum)

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Rng) -> None:  # noqa: FBT001 - as above
        """Apply additive increase or multiplicative decrease."""
        if dropped or rtt > self.slow_after:
            self._move_to(self.estimate * self._share_kept(rtt, dropped=dropped))
            self._starting = False
        elif self._starting and self._full(in_flight):
            self._move_to(2 * self.estimate)
        elif not self._unused(in_flight):
            self._move_to(self.estimate + 1)

    def _share_kept(self, rtt: float, *, dropped: bool) -> float:
        """Return the fraction of the limit to keep: down to half at the end of the quick start.

        The limit has just doubled, and the latency exceeds `slow_after` by the same factor as the
        limit is too high.
        """
        if not self._starting:
            return self.shrink
        return min(self.shrink, 0.5 if dropped else max(0.5, self.slow_after / rtt))


class Vegas(Learner):
    """Keep a small queue at the dependency: between `alpha` and `beta` times log10 of the limit."""

    name: ClassVar[str] = "vegas"
    SETTINGS = ("alpha", "beta", *ConcurrencyLimit.SETTINGS)
    MEASURED_TWICE: ClassVar[bool] = True

    def __init__(
        self, *, alpha: float, beta: float, initial: int, minimum: int, maximum: int
    ) -> None:
        """Grow below `alpha`, shrink above `beta`."""
        self.alpha = check.at_least("alpha", alpha, 0)
        self.beta = check.at_least("beta", beta, 0)
        if alpha > beta:
            raise ValueError(f"alpha={alpha!r}: write at most beta, which is {beta!r}")
        super().__init__(initial, minimum, maximum)

    def _learn(self, rtt: float) -> float:
        """Return the baseline, lowered if calls are faster than noise explains."""
        base = rtt if self._base is None else self._base
        return base + (rtt - base) / 4 if rtt < (1 - NOISE) * base else base

    def _with_queue(self, served: float) -> float:
        return served + self.alpha * self._unit()

    def _move(self, base: float, rtt: float) -> None:
        queue = ceil(self.estimate * (1 - base / rtt))
        unit = self._unit()
        if queue <= unit:
            self._move_to(self.estimate + self.beta * unit)
        elif queue < self.alpha * unit:
            self._move_to(self.estimate + self._step())
        elif queue > self.beta * unit:
            self._move_to(self.estimate - self._step())

    def _move_dropped(self) -> None:
        self._move_to(self.estimate - self._step())

    def _step(self) -> float:
        # Below 10 the logarithm is under one, and at 1 it is zero: the limit would never move.
        return max(1.0, log10(self.estimate))

    def _unit(self) -> float:
        """Return the unit of which `alpha` and `beta` are multiples."""
        return max(0.5, min(self._step(), self.estimate / SMALL))


class Gradient2(Learner):
    """Follow the ratio of long-term latency to current latency."""

    name: ClassVar[str] = "gradient2"

    TOLERANCE: ClassVar[float] = 1.5
    """Calls may take this many times the usual latency before the limit shrinks."""
    SMOOTHING: ClassVar[float] = 0.2
    ROOM: ClassVar[int] = 4  # queue that is always allowed, so that the limit can grow
    LONG: ClassVar[int] = 600
    WARM_UP: ClassVar[int] = 10

    _seen = 0

    def _learn(self, rtt: float) -> float:
        """Return a moving average over 600 windows. The first ten have equal weight."""
        self._seen += 1
        base = rtt if self._base is None else self._base
        weight = 1 / self._seen if self._seen <= self.WARM_UP else 2 / (self.LONG + 1)
        base += weight * (rtt - base)
        # If the dependency became twice as fast, forget the slow period sooner.
        return base * 0.95 if base > 2 * rtt else base

    def _with_queue(self, served: float) -> float:
        return self.TOLERANCE * served + self.ROOM

    def _move(self, base: float, rtt: float) -> None:
        self._follow(min(1.0, max(0.5, self.TOLERANCE * base / rtt)))

    def _move_dropped(self) -> None:
        self._follow(0.5)

    def _follow(self, gradient: float) -> None:
        wanted = gradient * self.estimate + self.ROOM
        self._move_to((1 - self.SMOOTHING) * self.estimate + self.SMOOTHING * wanted)


def aimd(
    *,
    slow_after: float,
    shrink: float = 0.9,
    initial: int = 20,
    minimum: int = 1,
    maximum: int = 200,
) -> Aimd:
    """Grow by one per window; multiply by `shrink` on drops or a latency above `slow_after`.

    With `slow_after=inf` only dropped calls count.
    """
    return Aimd(
        slow_after=slow_after, shrink=shrink, initial=initial, minimum=minimum, maximum=maximum
    )


def vegas(
    *,
    alpha: float = 3.0,
    beta: float = 6.0,
    initial: int = 20,
    minimum: int = 1,
    maximum: int = 1000,
) -> Vegas:
    """Keep a queue of `alpha` to `beta` times log10 of the limit, or less for limits below 56."""
    return Vegas(alpha=alpha, beta=beta, initial=initial, minimum=minimum, maximum=maximum)


def gradient2(*, initial: int = 20, minimum: int = 20, maximum: int = 200) -> Gradient2:
    """Allow calls to take up to 1.5 times their usual latency."""
    return Gradient2(initial=initial, minimum=minimum, maximum=maximum)
