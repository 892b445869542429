"""Pool rules: settings, recent use and recommended size; Little's law, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final, Literal, NamedTuple

from seawall import _checks as check
from seawall.models.histogram import LatencyWindow

Exhausted = Literal["wait", "fail", "degrade"]
EXHAUSTED: Final[tuple[Exhausted, ...]] = ("wait", "fail", "degrade")

MOST: Final = 1_000_000  # maximum size: a slot is kept for each resource
LIFETIME_SPREAD: Final = 0.1  # maximum fraction by which a lifetime is shortened at random
ENOUGH_BORROWS: Final = 20
ENOUGH_SECONDS: Final = 1.0
AT_MOST: Final = 512  # maximum number of samples one batch adds to the histogram. Totals stay exact

CONNECTION_SETTINGS: Final = (
    "SELECT name, setting FROM pg_settings WHERE name IN"
    " ('max_connections', 'superuser_reserved_connections', 'reserved_connections')"
)
"""A query for PostgreSQL: what `pool_advice` must know about the server."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Validated settings of a pool. None means no time limit."""

    max_size: int
    min_size: int
    connect_timeout: float | None
    read_timeout: float | None
    idle_timeout: float | None
    checkout_timeout: float
    close_timeout: float
    max_lifetime: float | None
    when_exhausted: Exhausted
    max_waiting: int | None
    leak_after: float | None

    def __post_init__(self) -> None:
        check.count("max_size", self.max_size)
        if self.max_size > MOST:
            raise ValueError(
                f"max_size={self.max_size!r}: write {MOST} or less; what the other side can take is"
                " the measure, divided by the number of your processes"
            )
        check.count("min_size", self.min_size, minimum=0)
        if self.min_size > self.max_size:
            raise ValueError(
                f"min_size={self.min_size!r}: write at most max_size, {self.max_size!r}"
            )
        for name in _TIMES:
            if getattr(self, name) is not None:
                check.seconds(name, getattr(self, name))
        check.seconds("checkout_timeout", self.checkout_timeout, infinite=True)
        check.seconds("close_timeout", self.close_timeout)
        check.choice("when_exhausted", self.when_exhausted, EXHAUSTED)
        if self.max_waiting is not None:
            check.count("max_waiting", self.max_waiting)

    def changed(self, changes: dict[str, Any]) -> PoolSettings:
        """Return settings with some changes, or raise if they are invalid."""
        return PoolSettings(**{**vars(self), **changes})


_TIMES: Final = ("connect_timeout", "read_timeout", "idle_timeout", "max_lifetime", "leak_after")


def lifetime(longest: float | None, chance: float) -> float:
    """Return how long a resource may live: at most `longest`, and up to a tenth less.

    `chance` is a uniform random number below 1, so that resources created together do not all end
    together.
    """
    return inf if longest is None else longest * (1 - LIFETIME_SPREAD * chance)


class PoolUsage:
    """Number and duration of uses in the last `span` to twice `span` seconds."""

    def __init__(self, now: float, span: float = 30.0) -> None:
        self.latency = LatencyWindow(span)
        self.total = 0  # total number of uses
        self.began = now
        self._span = span
        self._since = now
        self._current = [0.0, 0.0, 0.0]
        self._previous = [0.0, 0.0, 0.0]
        self._previous_since = now

    def add_all(self, uses: Sequence[float], now: float, refused: int = 0) -> None:
        """Record uses that ended about `now`, by their seconds, and the refused requests."""
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


def in_flight(throughput: float, service_time: float) -> float:
    """Return the number of calls in flight at `throughput` per second of `service_time` each."""
    rate = check.at_least("throughput", throughput, 0)
    busy = check.seconds("service_time", service_time, zero=True)
    return check.at_least("throughput * service_time", rate * busy, 0)


def pool_size(throughput: float, service_time: float, headroom: float = 1.5) -> int:
    """Return the size of a pool for that traffic, with headroom, at least one."""
    wanted = in_flight(throughput, service_time) * check.at_least("headroom", headroom, 1)
    # Do not round up because of a rounding error just above a whole number.
    return max(1, ceil(check.at_least("pool size", wanted, 0) * (1 - 1e-12)))


def timeout_for(p99: float, factor: float = 2.5, caller_budget: float | None = None) -> float:
    """Return a timeout for a dependency with that p99, never above the caller's budget."""
    timeout = check.seconds("p99", p99) * check.at_least("factor", factor, 1)
    if caller_budget is None:
        return check.seconds("p99 * factor", timeout)
    return min(timeout, check.seconds("caller_budget", caller_budget))


def pool_advice(settings: Mapping[str, str | int], *, pods: int, size: int) -> str | None:
    """Return what to change if the pools of all pods exceed the server; None if they fit.

    `settings` are the rows of `CONNECTION_SETTINGS` as a dictionary; `size` is the most that one
    pod opens (SQLAlchemy: pool_size + max_overflow).
    """
    pods, size = check.count("pods", pods), check.count("size", size)
    if not isinstance(settings, Mapping) or "max_connections" not in settings:
        raise TypeError(f"settings={settings!r}: write dict(rows of CONNECTION_SETTINGS)")
    known = {name: int(value) for name, value in settings.items()}
    most = known.pop("max_connections")
    usable = most - sum(known.values())
    total = pods * size
    if total <= usable:
        return None
    each = usable // pods
    smaller = f"let each pod open at most {each}, " if each else ""
    return (
        f"{pods} pods with {size} each open up to {total} connections, and the server accepts"
        f" {usable}: {smaller}set max_connections = {total + most - usable}, or put a pooler such"
        " as PgBouncer in front of the server"
    )
