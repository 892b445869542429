"""Shedding rules: which calls are shed when not all can be served.

A rule is a set of settings; `start(sources)` returns `sheds(now, *args, **kwargs)`, which decides
for one call by the values of `sources` at that moment. Load is a number: 0 is idle, 1 is at the
limit.

For every rule that considers criticality, a class is affected only when all of the class below it
is shed: at any instant no call is shed while a less critical one is admitted. Calls of `keep` and
above are never shed by load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isnan
from typing import Any, Final, NamedTuple, Protocol

from seawall import _checks as check

CLASSES: Final = 4
"""Number of criticalities, ranked from 0."""

CRITICAL_PLUS: Final = 3
"""The highest rank. Models know criticalities by their ranks."""

START: Final = 0.8
"""The load at which shedding begins."""

TIERS: Final[Mapping[str, float]] = {"free": 0.7, "premium": inf}
OTHER_TIERS: Final = 0.9

Sheds = Callable[..., bool]
"""`sheds(now, *args, **kwargs)`: whether to shed that call."""


class Sources(NamedTuple):
    """Inputs of a rule. Each is read at the moment of a call."""

    load: Callable[[], float]
    signal: Callable[[Callable[[], float]], Callable[[], float]]
    """`signal(read)`: the same as `read`, but returns 0 if it fails."""
    rank: Callable[[], int]
    """The call's criticality, 0 for the lowest."""
    tier: Callable[[], str | None]
    uniform: Callable[[], float]
    """A random number from 0 up to 1."""
    remaining: Callable[[], float | None]
    """Seconds to the call's deadline, None without one."""
    service_time: Callable[[float], Callable[[float], float | None]]
    """`service_time(quantile)(now)`: duration of a call once it is served, if known."""
    response_time: Callable[[float], Callable[[float], float | None]]
    """`response_time(quantile)(now)`: the same, including all waiting in inner layers."""


class ShedRule(Protocol):
    """A way to choose which calls are shed, as returned by `by_criticality()` and others."""

    name: str
    """A stable name for errors and metrics."""

    needs_load: bool
    takes_arguments: bool

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""


class Rule:
    """Defaults of most rules."""

    __slots__ = ()
    name = ""
    needs_load = False
    takes_arguments = False


# By load


def class_bar(start: float, rank: int) -> float:
    """Return the load above which calls of `rank` are shed.

    For each class it rises from `start` by a quarter of the distance to 1.
    """
    return start + (1 - start) * rank / CLASSES


def class_degree(start: float, rank: int, load: float) -> float:
    """Return the degree to which calls of `rank` are shed: none at 0 or below, all from 1 on.

    It reaches 1 where the next class begins.
    """
    return (load - class_bar(start, rank)) / ((1 - start) / CLASSES)


def check_keep(keep: int | None) -> int:
    """Return the rank from which on no call is shed, or raise."""
    if keep is None:
        return CLASSES
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise TypeError(
            f"keep={keep!r}: write a Criticality, such as Criticality.CRITICAL, or None"
        )
    if not 0 < keep < CLASSES:
        raise ValueError(f"keep={keep!r}: write a Criticality above SHEDDABLE, or nobody is shed")
    return int(keep)


class ByCriticality(Rule):
    """Rule by criticality; see `by_criticality`."""

    __slots__ = ("bars", "start_at")
    name = "criticality"
    needs_load = True

    def __init__(self, start: float, keep: int | None) -> None:
        self.start_at = check_start(start)
        kept = check_keep(keep)
        self.bars = tuple(class_bar(start, rank) if rank < kept else inf for rank in range(CLASSES))

    def __repr__(self) -> str:
        return f"by_criticality(start={self.start_at:g})"

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""
        load, rank, bars = sources.load, sources.rank, self.bars
        lowest = bars[0]

        return lambda _now: (now := load()) > lowest and now > bars[rank()]


class ByTier(Rule):
    """Rule by tier; see `by_tier`."""

    __slots__ = ("bars", "kept", "others", "takes_arguments", "tier")
    name = "tier"
    needs_load = True

    def __init__(
        self,
        bars: Mapping[str, float],
        others: float,
        tier: Callable[..., str | None] | None,
        keep: int | None,
    ) -> None:
        if not isinstance(bars, Mapping) or not all(isinstance(name, str) for name in bars):
            raise TypeError(f"by_tier({bars!r}): write the bar of each tier, as {{'free': 0.7}}")
        self.bars: dict[str | None, float] = {name: _bar(name, bar) for name, bar in bars.items()}
        self.others = _bar("others", others)
        self.tier = None if tier is None else check.plain_function("tier", tier)
        self.takes_arguments = tier is not None
        self.kept = check_keep(keep)

    def __repr__(self) -> str:
        return f"by_tier({self.bars!r}, others={self.others:g})"

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""
        load, bars, others = sources.load, self.bars, self.others
        rank, kept = sources.rank, self.kept
        tier = self.tier
        if tier is None:
            current = sources.tier
            return lambda _now: load() > bars.get(current(), others) and rank() < kept

        def sheds(_now: float, *args: Any, **kwargs: Any) -> bool:
            return load() > bars.get(tier(*args, **kwargs), others) and rank() < kept

        return sheds


class ByCost(Rule):
    """Rule by cost; see `by_cost`."""

    __slots__ = ("cost", "kept", "least", "most", "start_at")
    name = "cost"
    needs_load = True
    takes_arguments = True

    def __init__(
        self,
        cost: Callable[..., float],
        most: float,
        least: float,
        start: float,
        keep: int | None,
    ) -> None:
        self.cost = check.plain_function("cost", cost)
        self.most = check.at_least("most", most, 0.0)
        self.least = check.at_least("least", least, 0.0)
        if not 0 < self.least < self.most:
            raise ValueError(
                f"least={least!r}, most={most!r}: write costs above 0, the larger one as most"
            )
        self.start_at = check_start(start)
        self.kept = check_keep(keep)

    def __repr__(self) -> str:
        return f"by_cost(..., most={self.most:g}, least={self.least:g}, start={self.start_at:g})"

    def allowed(self, load: float, rank: int) -> float:
        """Return the maximum cost of a call of `rank`: inf for any, -inf for none."""
        degree = class_degree(self.start_at, rank, load)
        if not degree > 0 or rank >= self.kept:
            return inf
        if degree >= 1:
            return -inf
        shrunk: float = self.most * (self.least / self.most) ** degree
        return shrunk

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""
        load, rank, begin = sources.load, sources.rank, self.start_at
        cost, allowed = self.cost, self.allowed

        def sheds(_now: float, *args: Any, **kwargs: Any) -> bool:
            level = load()
            return level > begin and cost(*args, **kwargs) > allowed(level, rank())

        return sheds


# By queue and deadline


class ByQueue(Rule):
    """Rule by queue length; see `by_queue`."""

    __slots__ = ("length", "read")
    name = "queue"

    def __init__(self, length: int, of: Any) -> None:
        self.length = check.count("length", length)
        self.read = _length_of(of)

    def __repr__(self) -> str:
        return f"by_queue({self.length})"

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""
        read, length = sources.signal(self.read), self.length
        return lambda _now: read() >= length


def _length_of(of: Any) -> Callable[[], float]:
    """Return a function that reads the number of waiters of `of`."""
    for part, attribute in (
        (of, "waiting"),  # a bulkhead, a limit, a queue of jobs
        (getattr(of, "slots", None), "waiting"),  # a pool
        (getattr(of, "pool", None), "queued"),  # an executor, a thread bulkhead
        (of, "depth"),  # a channel
    ):
        if hasattr(part, attribute) and not isinstance(part, type):
            return partial(getattr, part, attribute)
    # Policies and guards are callable too: they are decorators.
    if not callable(of) or hasattr(of, "_bind") or hasattr(of, "policies"):
        raise TypeError(
            f"of={of!r}: pass what has a queue (a Bulkhead, Pool, Channel, LocalQueue...), or a"
            " function that returns a length"
        )
    read: Callable[[], float] = check.plain_function("of", of)
    return read


class ByDeadline(Rule):
    """Rule by deadline; see `by_deadline`."""

    __slots__ = ("quantile", "reserve")
    name = "deadline"

    def __init__(self, reserve: float, quantile: float) -> None:
        self.reserve = check.seconds("reserve", reserve, zero=True)
        self.quantile = check.ratio("quantile", quantile)

    def __repr__(self) -> str:
        return f"by_deadline(reserve={self.reserve:g}, quantile={self.quantile:g})"

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""
        remaining, expected = sources.remaining, sources.service_time(self.quantile)
        reserve = self.reserve

        def sheds(now: float) -> bool:
            left = remaining()
            return left is not None and left < (expected(now) or 0.0) + reserve

        return sheds


def check_start(start: float) -> float:
    """Return the load at which shedding begins, or raise."""
    number = check.ratio("start", start, zero=True)
    if number == 1:
        raise ValueError("start=1: write less than 1, where the limit is; such as start=0.8")
    return number


def _bar(name: str, bar: float) -> float:
    advice = "write a load such as 0.7, or inf for a tier never shed"
    try:
        if isinstance(bar, bool) or not isinstance(bar, (int, float)) or isnan(bar) or bar < 0:
            raise ValueError(f"{name}={bar!r}: {advice}")
        return float(bar)
    except OverflowError:
        raise ValueError(f"{name}: too large; {advice}") from None


def by_criticality(start: float = START, *, keep: int | None = CRITICAL_PLUS) -> ShedRule:
    """Shed the least critical calls above a load of `start`, each further class at a higher load.

    The step is a quarter of the distance from `start` to 1: by default 0.8 for SHEDDABLE, 0.85 for
    SHEDDABLE_PLUS and 0.9 for CRITICAL. Calls of `keep` and above are never shed; with `keep=None`
    CRITICAL_PLUS is shed above 0.95.
    """
    return ByCriticality(start, keep)


def by_tier(
    bars: Mapping[str, float] = TIERS,
    *,
    others: float = OTHER_TIERS,
    tier: Callable[..., str | None] | None = None,
    keep: int | None = CRITICAL_PLUS,
) -> ShedRule:
    """Shed calls of each tier above its own load, and those of an unlisted tier above `others`.

    `inf` is for a tier that is never shed. By default "free" is shed above 0.7 and all but
    "premium" above 0.9. `tier`, a function of the call's arguments, returns the tier; without it
    the context decides (`with tier("free"):`). Calls of `keep` and above are never shed, whatever
    their tier.
    """
    return ByTier(bars, others, tier, keep)


def by_cost(
    cost: Callable[..., float],
    *,
    most: float,
    least: float = 1.0,
    start: float = START,
    keep: int | None = CRITICAL_PLUS,
) -> ShedRule:
    """Shed expensive calls first: the maximum cost of a call shrinks as load grows.

    `cost` is a function of the call's arguments. In each class, least critical first, the allowed
    cost shrinks from `most` to `least` over a quarter of the distance from `start` to 1. Calls of
    `keep` and above may cost anything.
    """
    return ByCost(cost, most, least, start, keep)


def by_queue(length: int, *, of: Any) -> ShedRule:
    """Shed while `length` or more wait in a bulkhead, pool, executor, channel or job queue.

    `of` may also be a function that returns a length. The length of a `PriorityQueue` is the one
    its store reported within the last second.
    """
    return ByQueue(length, of)


def by_deadline(*, reserve: float = 0.0, quantile: float = 0.5) -> ShedRule:
    """Refuse calls whose deadline leaves less time than a typical call takes plus `reserve`."""
    return ByDeadline(reserve, quantile)
