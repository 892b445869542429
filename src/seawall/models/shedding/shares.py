"""Rules that shed a share of the calls of a class, at random or by key.

By key, all calls of one user, for example, are either admitted or shed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt
from typing import Any, Final
from zlib import crc32

from seawall import _checks as check
from seawall.models.shedding.rules import (
    CLASSES,
    CRITICAL_PLUS,
    START,
    Rule,
    ShedRule,
    Sheds,
    Sources,
    check_keep,
    check_start,
)

MOST: Final = 0.9
"""Maximum share of calls that a latency rule sheds. The others show the current latency."""


class LeastCriticalFirst:
    """Chooses which calls to shed so that a given share is shed, least critical first.

    Classes are placed side by side on a line from 0 to 1, each as wide as its share of recent
    calls, or with `evenly`, all recent classes equally wide. A call is placed within the section of
    its class, at random or by its key; the share to shed is counted from the left. With equal
    widths, calls are denser towards the right, so that only a few calls of a class are shed at
    first.
    """

    __slots__ = ("_counted", "_counts", "_enough", "_evenly", "_left", "_seen", "_width")

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
        # Only measure when time has advanced, so that all decisions at one instant use the same
        # widths.
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


class _ByShare(Rule):
    """A rule that sheds a share of the calls, least critical first, at random or by key."""

    __slots__ = ("kept", "key", "takes_arguments")
    evenly = False

    def __init__(self, key: Callable[..., object] | None, keep: int | None) -> None:
        self.key = None if key is None else check.plain_function("key", key)
        self.takes_arguments = key is not None
        self.kept = check_keep(keep)

    def shares(self, sources: Sources) -> Callable[[float], float]:
        """Return `share(now)`: the current share to shed of the calls that may be shed."""
        raise NotImplementedError

    def start(self, sources: Sources) -> Sheds:
        """Return the function that decides for the calls of one guard."""
        share, uniform, key = self.shares(sources), sources.uniform, self.key
        rank, kept = sources.rank, self.kept
        sheds = LeastCriticalFirst(kept, evenly=self.evenly).sheds

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


class ByChance(_ByShare):
    """Random shedding by load; see `by_chance`."""

    __slots__ = ("start_at",)
    name = "chance"
    needs_load = True
    # Otherwise many calls of a low class would leave no load range between it and the next.
    evenly = True

    def __init__(self, start: float, key: Callable[..., object] | None, keep: int | None) -> None:
        super().__init__(key, keep)
        self.start_at = check_start(start)

    def __repr__(self) -> str:
        return f"by_chance(start={self.start_at:g})"

    def shares(self, sources: Sources) -> Callable[[float], float]:
        """Return `share(now)`: it grows from 0 at `start` to 1 at the limit."""
        load, start = sources.load, self.start_at
        return lambda _now: (load() - start) / (1 - start)


class ByFraction(_ByShare):
    """Shedding of a fixed share; see `by_fraction`."""

    __slots__ = ("needs_load", "share", "start_at")
    name = "fraction"

    def __init__(
        self,
        share: float,
        start: float | None,
        key: Callable[..., object] | None,
        keep: int | None,
    ) -> None:
        super().__init__(key, keep)
        self.share = check.ratio("share", share, zero=True)
        self.start_at = None if start is None else check_start(start)
        self.needs_load = start is not None

    def __repr__(self) -> str:
        above = "" if self.start_at is None else f", start={self.start_at:g}"
        return f"by_fraction({self.share:g}{above})"

    def shares(self, sources: Sources) -> Callable[[float], float]:
        """Return `share(now)`: zero up to the load it starts at."""
        load, share, start = sources.load, self.share, self.start_at
        if start is None:
            return lambda _now: share
        return lambda _now: share if load() > start else 0.0


class ByLatency(_ByShare):
    """Shedding by latency; see `by_latency`."""

    __slots__ = ("quantile", "sla")
    name = "latency"

    def __init__(
        self,
        sla: float,
        quantile: float,
        key: Callable[..., object] | None,
        keep: int | None,
    ) -> None:
        super().__init__(key, keep)
        self.sla = check.seconds("sla", sla)
        self.quantile = check.ratio("quantile", quantile)

    def __repr__(self) -> str:
        return f"by_latency({self.sla:g}, quantile={self.quantile:g})"

    def share(self, latency: float | None) -> float:
        """Return the share of calls to shed: as far as the latency exceeds `sla`, never all."""
        return 0.0 if latency is None else max(0.0, min(MOST, latency / self.sla - 1))

    def shares(self, sources: Sources) -> Callable[[float], float]:
        """Return `share(now)`, by the latency of recent calls."""
        latency, share = sources.response_time(self.quantile), self.share
        return lambda now: share(latency(now))


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
    return ByChance(start, key, keep)


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
    return ByFraction(share, start, key, keep)


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
    return ByLatency(sla, quantile, key, keep)
