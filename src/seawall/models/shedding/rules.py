"""Shedding rules: which calls are shed when not all can be served.

A rule is a set of settings; `start(sources)` returns `sheds(now, *args, **kwargs)`, which decides
for one call by the values of `sources` at that moment. Load is a number: 0 is idle, 1 is at the
limit.

For every rule that considers criticality, a class is affected only when all of the class below it
is shed: at any instant no call is shed while a less critical one is admitted. Calls of `keep` and
above are never shed by load. By key, all calls of one user, for example, are admitted or shed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isnan, sqrt
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

from seawall import _checks as check

CLASSES: Final = 4  # number of criticalities, ranked from 0
CRITICAL_PLUS: Final = 3  # the highest rank. Models know criticalities by their ranks
START: Final = 0.8  # the load at which shedding begins
TIERS: Final[Mapping[str, float]] = {"free": 0.7, "premium": inf}
OTHER_TIERS: Final = 0.9

MOST: Final = 0.9  # maximum share that a latency rule sheds: the others show the latency

Sheds = Callable[..., bool]
"""`sheds(now, *args, **kwargs)`: whether to shed that call."""


class Sources(NamedTuple):
    """Inputs of a rule. Each is read at the moment of a call."""

    load: Callable[[], float]
    signal: Callable[[Callable[[], float]], Callable[[], float]]
    """`signal(read)`: the same as `read`, but returns 0 if it fails."""
    rank: Callable[[], int]  # the call's criticality, 0 for the lowest
    tier: Callable[[], str | None]
    uniform: Callable[[], float]  # A random number from 0 up to 1
    remaining: Callable[[], float | None]  # seconds to the call's deadline, None without one
    service_time: Callable[[float], Callable[[float], float | None]]
    """`service_time(quantile)(now)`: duration of a call once it is served, if known."""
    response_time: Callable[[float], Callable[[float], float | None]]
    """`response_time(quantile)(now)`: the same, including all waiting in inner layers."""


class ShedRule(Protocol):
    """A way to choose which calls are shed, as returned by `by_criticality()` and others."""

    name: str  # A stable name for errors and metrics

    needs_load: bool
    takes_arguments: bool

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""


class Rule:
    """A rule as the functions of this module make it."""

    def __init__(
        self,
        name: str,
        text: str,
        start: Callable[[Sources], Sheds],
        *,
        needs_load: bool = False,
        takes_arguments: bool = False,
        sla: float | None = None,
    ) -> None:
        self.name = name
        self.start = start
        self.needs_load = needs_load
        self.takes_arguments = takes_arguments
        self.sla = sla  # the response time in seconds above which it sheds, if it measures that
        self._text = text

    def __repr__(self) -> str:
        return self._text


# By load


def class_bar(start: float, rank: int) -> float:
    """Return the load above which `rank` is shed: each a quarter nearer to 1 than the last."""
    return start + (1 - start) * rank / CLASSES


def class_degree(start: float, rank: int, load: float) -> float:
    """Return how far calls of `rank` are shed: from 0 to 1, where the next class begins."""
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


def check_start(start: float) -> float:
    """Return the load at which shedding begins, or raise."""
    number = check.ratio("start", start, zero=True)
    if number == 1:
        raise ValueError("start=1: write less than 1, where the limit is; such as start=0.8")
    return number


def by_criticality(start: float = START, *, keep: int | None = CRITICAL_PLUS) -> ShedRule:
    """Shed the least critical calls above a load of `start`, each further class at a higher load.

    The step is a quarter of the distance from `start` to 1: by default 0.8 for SHEDDABLE, 0.85 for
    SHEDDABLE_PLUS and 0.9 for CRITICAL. Calls of `keep` and above are never shed; with `keep=None`
    CRITICAL_PLUS is shed above 0.95.
    """
    begin, bars = check_start(start), criticality_bars(start, keep)
    lowest = bars[0]

    def decide(sources: Sources) -> Sheds:
        load, rank = sources.load, sources.rank
        return lambda _now: (now := load()) > lowest and now > bars[rank()]

    return Rule("criticality", f"by_criticality(start={begin:g})", decide, needs_load=True)


def criticality_bars(start: float, keep: int | None) -> tuple[float, ...]:
    """Return the load above which calls of each rank are shed."""
    kept = check_keep(keep)
    return tuple(class_bar(start, rank) if rank < kept else inf for rank in range(CLASSES))


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
    if not isinstance(bars, Mapping) or not all(isinstance(name, str) for name in bars):
        raise TypeError(f"by_tier({bars!r}): write the bar of each tier, as {{'free': 0.7}}")
    loads: dict[str | None, float] = {name: _bar(name, bar) for name, bar in bars.items()}
    rest, kept = _bar("others", others), check_keep(keep)
    if tier is not None:
        check.plain_function("tier", tier)

    def decide(sources: Sources) -> Sheds:
        load, rank, current = sources.load, sources.rank, sources.tier
        if tier is None:
            return lambda _now: load() > loads.get(current(), rest) and rank() < kept
        return lambda _now, *args, **kwargs: (
            load() > loads.get(tier(*args, **kwargs), rest) and rank() < kept
        )

    text = f"by_tier({loads!r}, others={rest:g})"
    return Rule("tier", text, decide, needs_load=True, takes_arguments=tier is not None)


def _bar(name: str, bar: float) -> float:
    advice = "write a load such as 0.7, or inf for a tier never shed"
    try:
        if isinstance(bar, bool) or not isinstance(bar, (int, float)) or isnan(bar) or bar < 0:
            raise ValueError(f"{name}={bar!r}: {advice}")
        return float(bar)
    except OverflowError:
        raise ValueError(f"{name}: too large; {advice}") from None


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
    check.plain_function("cost", cost)
    most, least = check.at_least("most", most, 0.0), check.at_least("least", least, 0.0)
    if not 0 < least < most:
        raise ValueError(
            f"least={least!r}, most={most!r}: write costs above 0, the larger one as most"
        )
    begin, kept = check_start(start), check_keep(keep)

    def decide(sources: Sources) -> Sheds:
        load, rank = sources.load, sources.rank

        def sheds(_now: float, *args: Any, **kwargs: Any) -> bool:
            level = load()
            if level <= begin:
                return False
            own = rank()
            degree = class_degree(begin, own, level) if own < kept else 0.0
            return cost(*args, **kwargs) > allowed_cost(degree, most, least)

        return sheds

    text = f"by_cost(..., most={most:g}, least={least:g}, start={begin:g})"
    return Rule("cost", text, decide, needs_load=True, takes_arguments=True)


def allowed_cost(degree: float, most: float, least: float) -> float:
    """Return the maximum cost where a class is shed to that degree: inf for any, -inf for none."""
    if not degree > 0:
        return inf
    return most * (least / most) ** degree if degree < 1 else -inf


# By queue and deadline


def by_queue(length: int, *, of: Any) -> ShedRule:
    """Shed while `length` or more wait in a bulkhead, pool, executor, channel or job queue.

    `of` may also be a function that returns a length. The length of a `PriorityQueue` is the one
    its store reported within the last second.
    """
    most, reader = check.count("length", length), _length_of(of)

    def decide(sources: Sources) -> Sheds:
        read = sources.signal(reader)
        return lambda _now: read() >= most

    return Rule("queue", f"by_queue({most})", decide)


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


def by_deadline(*, reserve: float = 0.0, quantile: float = 0.5) -> ShedRule:
    """Refuse calls whose deadline leaves less time than a typical call takes plus `reserve`."""
    reserve = check.seconds("reserve", reserve, zero=True)
    quantile = check.ratio("quantile", quantile)

    def decide(sources: Sources) -> Sheds:
        remaining, expected = sources.remaining, sources.service_time(quantile)

        def sheds(now: float) -> bool:
            left = remaining()
            return left is not None and left < (expected(now) or 0.0) + reserve

        return sheds

    return Rule("deadline", f"by_deadline(reserve={reserve:g}, quantile={quantile:g})", decide)


# By share


class LeastCriticalFirst:
    """Chooses which calls to shed so that a given share is shed, least critical first.

    Classes are placed side by side on a line from 0 to 1, each as wide as its share of recent
    calls, or with `evenly`, all recent classes equally wide. A call is placed within the section of
    its class, at random or by its key; the share to shed is counted from the left. With equal
    widths, calls are denser towards the right, so that only a few calls of a class are shed at
    first.
    """

    FIRST: Final = 16
    LONGEST: Final = 256
    """The widths are measured again after this number of calls, at first and later."""

    def __init__(self, classes: int = CLASSES, *, evenly: bool = False) -> None:
        """Start without counts: all classes are assumed to be equally wide.

        `classes` is the number of classes that may be shed, the least critical ones.
        """
        self._evenly = evenly
        self._counts = [0.0] * classes
        self._counted = 0
        self._enough = self.LONGEST if evenly else self.FIRST
        self._seen = -inf
        self._left = [rank / classes for rank in range(classes)]
        self._width = [1 / classes] * classes

    def sheds(self, share: float, rank: int, place: float, now: float) -> bool:
        """Return whether to shed a call of `rank` at `place` (0 to 1) within its class."""
        # Measure when time has advanced: all decisions at one instant use the same widths.
        if now > self._seen:
            if self._counted >= self._enough:
                self._measure()
            self._seen = now
        self._counts[rank] += 1
        self._counted += 1
        if self._evenly:
            place = sqrt(place)
        return share > self._left[rank] + place * self._width[rank]

    def _measure(self) -> None:
        counts = self._counts
        weights = [float(count >= 1) for count in counts] if self._evenly else counts
        total = sum(weights)
        self._width = [weight / total for weight in weights]
        self._left = [sum(weights[:rank]) / total for rank in range(len(weights))]
        self._counts = [count / 2 for count in counts]
        self._counted = 0
        self._enough = min(2 * self._enough, self.LONGEST)


def place_of(key: object) -> float:
    """Return the position of `key` between 0 and 1: the same in every process and version."""
    if isinstance(key, str):
        data = key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        data = key
    elif isinstance(key, int):
        data = b"%d" % key
    else:
        raise TypeError(f"key {key!r}: return a string, bytes or a whole number from key=")
    mixed = crc32(data)
    for _ in range(2):  # similar keys have similar checksums; mixing separates them
        mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B & 0xFFFFFFFF
    return ((mixed >> 16) ^ mixed) / 2**32


def _start_share(
    shares: Callable[[Sources], Callable[[float], float]],
    key: Callable[..., object] | None,
    kept: int,
    *,
    evenly: bool = False,
) -> Callable[[Sources], Sheds]:
    """Return the `start` of a rule that sheds a share, least critical first, at random or by key.

    `shares(sources)` returns `share(now)`: the share to shed of the calls that may be shed.
    """
    if key is not None:
        check.plain_function("key", key)

    def start(sources: Sources) -> Sheds:
        share, uniform, rank = shares(sources), sources.uniform, sources.rank
        sheds = LeastCriticalFirst(kept, evenly=evenly).sheds

        def by_chance(now: float) -> bool:
            level = rank()
            return level < kept and sheds(share(now), level, uniform(), now)

        if key is None:
            return by_chance

        def by_key(now: float, *args: Any, **kwargs: Any) -> bool:
            name = key(*args, **kwargs)
            if name is None:
                return by_chance(now)
            level = rank()
            return level < kept and sheds(share(now), level, place_of(name), now)

        return by_key

    return start


def by_chance(
    start: float = START,
    *,
    key: Callable[..., object] | None = None,
    keep: int | None = CRITICAL_PLUS,
) -> ShedRule:
    """Shed at random, with a probability that grows with load, least critical first.

    The range from `start` to a load of 1 is divided among the classes of recent calls: a single
    class is shed with a probability that grows over all of it, by the square, so that few are shed
    at first; of two classes, the lower one is shed over the first half. For the first 256 calls all
    classes that may be shed are assumed to be present. Calls of `keep` and above are never shed.
    `key`, a function of the call's arguments, replaces chance: all calls of one user, for example,
    are either admitted or shed, in every process.
    """
    begin, takes_arguments = check_start(start), key is not None

    def shares(sources: Sources) -> Callable[[float], float]:
        load = sources.load
        return lambda _now: (load() - begin) / (1 - begin)

    # Evenly: otherwise many calls of a low class would leave no load range for the next class.
    decide = _start_share(shares, key, check_keep(keep), evenly=True)
    text = f"by_chance(start={begin:g})"
    return Rule("chance", text, decide, needs_load=True, takes_arguments=takes_arguments)


def by_fraction(
    share: float,
    *,
    start: float | None = None,
    key: Callable[..., object] | None = None,
    keep: int | None = CRITICAL_PLUS,
) -> ShedRule:
    """Shed `share` of the calls, least critical first; `key` and `keep` as in `by_chance`.

    With `start`, only while the load is above it; without, at any load. The rule learns the classes
    from the calls: for the first 16 it assumes that those that may be shed are equally frequent, so
    that a `share` up to a third affects SHEDDABLE alone.
    """
    part = check.ratio("share", share, zero=True)
    begin = None if start is None else check_start(start)

    def shares(sources: Sources) -> Callable[[float], float]:
        load = sources.load
        return lambda _now: part if begin is None or load() > begin else 0.0

    decide = _start_share(shares, key, check_keep(keep))
    text = f"by_fraction({part:g}{'' if begin is None else f', start={begin:g}'})"
    loaded, keyed = begin is not None, key is not None
    return Rule("fraction", text, decide, needs_load=loaded, takes_arguments=keyed)


def by_latency(
    sla: float,
    *,
    quantile: float = 0.95,
    key: Callable[..., object] | None = None,
    keep: int | None = CRITICAL_PLUS,
) -> ShedRule:
    """Shed while the 95th percentile of response time is above `sla` seconds.

    The share to shed is the fraction by which it is above, at most nine tenths, least critical
    first; `key` and `keep` as in `by_chance`.
    """
    sla, quantile = check.seconds("sla", sla), check.ratio("quantile", quantile)

    def shares(sources: Sources) -> Callable[[float], float]:
        latency = sources.response_time(quantile)
        return lambda now: excess_share(latency(now), sla)

    decide = _start_share(shares, key, check_keep(keep))
    text = f"by_latency({sla:g}, quantile={quantile:g})"
    return Rule("latency", text, decide, takes_arguments=key is not None, sla=sla)


def excess_share(latency: float | None, sla: float) -> float:
    """Return the share of calls to shed: as far as the latency exceeds `sla`, never all."""
    return 0.0 if latency is None else max(0.0, min(MOST, latency / sla - 1))
