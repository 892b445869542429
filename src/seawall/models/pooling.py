"""Pool rules: the settings, the recent use of its resources, and the recommended size."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final, Literal, NamedTuple

from seawall import _checks as check
from seawall.models.histogram import LatencyWindow
from seawall.models.sizing import in_flight, pool_size

Exhausted = Literal["wait", "fail", "degrade"]
EXHAUSTED: Final[tuple[Exhausted, ...]] = ("wait", "fail", "degrade")

MOST: Final = 1_000_000
"""Maximum size: a slot is kept for each resource."""

LIFETIME_SPREAD: Final = 0.1
"""Maximum fraction by which a lifetime is shortened at random."""

ENOUGH_BORROWS: Final = 20
ENOUGH_SECONDS: Final = 1.0
AT_MOST: Final = 512
"""Maximum number of samples one batch adds to the histogram. Totals stay exact."""


class PoolSettings:
    """Validated settings of a pool. None means no time limit."""

    def __init__(
        self,
        *,
        max_size: int,
        min_size: int,
        connect_timeout: float | None,
        read_timeout: float | None,
        idle_timeout: float | None,
        checkout_timeout: float,
        close_timeout: float,
        max_lifetime: float | None,
        when_exhausted: Exhausted,
        max_waiting: int | None,
        leak_after: float | None,
    ) -> None:
        """Validate each setting, and those that depend on each other."""
        self.max_size = check.count("max_size", max_size)
        if max_size > MOST:
            raise ValueError(
                f"max_size={max_size!r}: write {MOST} or less; what the other side can take is the"
                " measure, divided by the number of your processes"
            )
        self.min_size = check.count("min_size", min_size, minimum=0)
        if self.min_size > self.max_size:
            raise ValueError(f"min_size={min_size!r}: write at most max_size, {max_size!r}")
        self.connect_timeout = _or_none("connect_timeout", connect_timeout)
        self.read_timeout = _or_none("read_timeout", read_timeout)
        self.idle_timeout = _or_none("idle_timeout", idle_timeout)
        self.checkout_timeout = check.seconds("checkout_timeout", checkout_timeout, infinite=True)
        self.close_timeout = check.seconds("close_timeout", close_timeout)
        self.max_lifetime = _or_none("max_lifetime", max_lifetime)
        self.when_exhausted = check.choice("when_exhausted", when_exhausted, EXHAUSTED)
        self.max_waiting = None if max_waiting is None else check.count("max_waiting", max_waiting)
        self.leak_after = _or_none("leak_after", leak_after)

    def changed(self, changes: dict[str, Any]) -> PoolSettings:
        """Return settings with some changes, or raise if they are invalid."""
        return PoolSettings(**{**vars(self), **changes})


def _or_none(name: str, value: float | None) -> float | None:
    return None if value is None else check.seconds(name, value)


def lifetime(longest: float | None, chance: float) -> float:
    """Return how long a resource may live: at most `longest`, and up to a tenth less.

    `chance` is a uniform random number below 1, so that resources created together do not all end
    together.
    """
    return inf if longest is None else longest * (1 - LIFETIME_SPREAD * chance)


class PoolUsage:
    """Number and duration of uses in the last `span` to twice `span` seconds.

    `now` must not go back.
    """

    def __init__(self, now: float, span: float = 30.0) -> None:
        """Start unused at `now`."""
        self.latency = LatencyWindow(span)
        self.total = 0
        """Total number of uses."""
        self.began = now
        self._span = span
        self._since = now
        self._current = [0.0, 0.0, 0.0]
        self._previous = [0.0, 0.0, 0.0]
        self._previous_since = now

    def add_all(self, uses: Sequence[float], now: float, refused: int = 0) -> None:
        """Record uses that ended about `now`, each by its duration in seconds.

        `refused` is the number of refused requests: demand that does not show up as use.
        """
        self._rotate(now)
        self.total += len(uses)
        self._current[2] += refused
        self._current[0] += len(uses)
        self._current[1] += sum(uses)
        stride = -(-len(uses) // AT_MOST) or 1
        self.latency.add_all(uses[::stride], now, stride)

    def seconds(self, now: float) -> float:
        """Return the current length of the window in seconds."""
        self._rotate(now)
        return now - self._previous_since

    def count(self, now: float) -> float:
        """Return how many uses were requested in the window, including refused ones."""
        self._rotate(now)
        return sum(part[0] + part[2] for part in (self._previous, self._current))

    def rate(self, now: float) -> float:
        """Return how many uses were requested per second, including refused ones."""
        wanted, span = self.count(now), self.seconds(now)
        return wanted / span if span > 0 else 0.0

    def mean(self, now: float) -> float | None:
        """Return the mean duration of a use in seconds, or None without uses."""
        self._rotate(now)
        uses = self._previous[0] + self._current[0]
        return (self._previous[1] + self._current[1]) / uses if uses else None

    def _rotate(self, now: float) -> None:
        periods = (now - self._since) // self._span
        if periods < 1:
            return
        self._since += periods * self._span
        self._previous = self._current if periods == 1 else [0.0, 0.0, 0.0]
        self._previous_since = self._since - self._span
        self._current = [0.0, 0.0, 0.0]


class Advice(NamedTuple):
    """Recommended size of a pool by its recent use, as a number (`size`) and as text."""

    size: int
    throughput: float
    use_time: float | None
    text: str

    def __str__(self) -> str:
        """Return the text."""
        return self.text


def advise(usage: PoolUsage, now: float, size: int) -> Advice:
    """Return the size that a pool of `size` needs for its recent traffic, by Little's law."""
    rate, use_time = usage.rate(now), usage.mean(now)
    count = usage.count(now)
    if use_time is None or count < ENOUGH_BORROWS or usage.seconds(now) < ENOUGH_SECONDS:
        text = (
            f"too little is known: {count:g} borrows lately, {ENOUGH_BORROWS} over at least"
            f" {ENOUGH_SECONDS:g} s are needed; keep {size}"
        )
        return Advice(size, rate, use_time, text)
    wanted = pool_size(rate, use_time)
    seen = (
        f"{rate:.3g} borrows a second of {use_time:.3g} s each keep"
        f" {in_flight(rate, use_time):.3g} in use; half as many again make {wanted}"
    )
    if wanted > size:
        what = f"raise max_size from {size}, or hold resources for a shorter time"
    elif wanted < size:
        what = f"max_size={size} is enough, and could be lowered"
    else:
        what = f"max_size={size} is right"
    return Advice(wanted, rate, use_time, f"{seen}: {what}")
