"""How long a simulated service takes for one call.

    Latency.constant(0.05)                  always the same
    Latency.exponential(0.05)               mean 0.05 s: with workers, the M/M/c queue
    Latency.normal(0.010, 0.002)            never below 0
    Latency.lognormal(median=0.02, p99=0.3) a long tail, from two numbers that are measured anyway
    Latency.measured(samples)               drawn from what was measured
    Latency.by_concurrency(lambda n: ...)   a function of the calls in progress

Wherever a latency is expected, a plain number means `Latency.constant`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import exp, log
from random import Random
from typing import Final, TypeAlias

from seawall import _checks as check
from seawall.models.histogram import Tally

Draw: TypeAlias = Callable[[Random, int], float]

Z99: Final = 2.3263478740408408  # the 99 % quantile of the standard normal distribution


class Latency:
    """A distribution of seconds; see the module for how to make one."""

    __slots__ = ("_text", "draw", "mean")

    def __init__(self, text: str, mean: float | None, draw: Draw) -> None:
        """Take the seconds of a call from `draw(rng, calls in progress)`."""
        self.draw = check.plain_function("draw", draw)
        self.mean = mean  # the mean in seconds; None if it depends on the load
        self._text = text

    def __repr__(self) -> str:
        return f"Latency.{self._text}"

    @classmethod
    def of(cls, value: LatencyLike) -> Latency:
        """Return `value` as a latency: a number means `constant`."""
        if isinstance(value, Latency):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return cls.constant(value)
        raise TypeError(
            f"latency={value!r}: write seconds, such as 0.05, or Latency.exponential(0.05)"
        )

    @classmethod
    def constant(cls, seconds: float) -> Latency:
        """Take the same time for each call."""
        seconds = check.seconds("seconds", seconds, zero=True)
        return cls(f"constant({seconds:g})", seconds, lambda _rng, _calls: seconds)

    @classmethod
    def exponential(cls, mean: float) -> Latency:
        """Take exponentially distributed times: with c workers, the M/M/c queue."""
        mean = check.seconds("mean", mean)
        rate = 1 / mean
        return cls(f"exponential({mean:g})", mean, lambda rng, _calls: rng.expovariate(rate))

    @classmethod
    def normal(cls, mean: float, deviation: float) -> Latency:
        """Take normally distributed times; what would be below 0 is 0."""
        mean = check.seconds("mean", mean)
        deviation = check.seconds("deviation", deviation, zero=True)
        return cls(
            f"normal({mean:g}, {deviation:g})",
            mean,
            lambda rng, _calls: max(0.0, rng.normalvariate(mean, deviation)),
        )

    @classmethod
    def lognormal(cls, *, median: float, p99: float) -> Latency:
        """Take log-normally distributed times with this median and 99 % quantile."""
        median = check.seconds("median", median)
        p99 = check.seconds("p99", p99)
        if p99 < median:
            raise ValueError(
                f"p99={p99!r} is below median={median!r}: write it the other way round"
            )
        mu, sigma = log(median), log(p99 / median) / Z99
        return cls(
            f"lognormal(median={median:g}, p99={p99:g})",
            exp(mu + sigma * sigma / 2),
            lambda rng, _calls: rng.lognormvariate(mu, sigma),
        )

    @classmethod
    def measured(cls, samples: Sequence[float] | Tally) -> Latency:
        """Draw from samples in seconds, or evenly within the buckets of a histogram's tally."""
        if isinstance(samples, Tally):
            return cls._of_tally(samples)
        values = [check.seconds("sample", sample, zero=True) for sample in samples]
        if not values:
            raise ValueError("measured([]): give at least one sample, in seconds")
        mean = sum(values) / len(values)
        return cls(f"measured({len(values)} samples)", mean, lambda rng, _calls: rng.choice(values))

    @classmethod
    def _of_tally(cls, tally: Tally) -> Latency:
        cumulative = list(accumulate(tally.counts))
        total = cumulative[-1]
        if not total:
            raise ValueError("measured(tally): it is empty; give one with samples")
        edges = [0.0, *tally.bounds, tally.bounds[-1]]

        def draw(rng: Random, _calls: int) -> float:
            bucket = min(bisect_left(cumulative, rng.random() * total), len(cumulative) - 1)
            low, high = edges[bucket], edges[bucket + 1]
            return low + (high - low) * rng.random()

        return cls(f"measured({total:g} samples)", tally.sum / total, draw)

    @classmethod
    def by_concurrency(cls, seconds: Callable[[int], float]) -> Latency:
        """Take `seconds(n)`, with n calls in progress, this one included."""
        check.plain_function("seconds", seconds)
        return cls("by_concurrency(...)", None, lambda _rng, calls: seconds(calls))


LatencyLike: TypeAlias = Latency | float
