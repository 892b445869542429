"""Rules that shed some of the calls of a class: by chance, or by key.

By key, a user, say, is in or out as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final
from zlib import crc32

from seawall import _checks as check
from seawall.models.shedding import (
    CLASSES,
    START,
    Rule,
    ShedRule,
    Sheds,
    Sources,
    check_start,
    class_degree,
)

MOST: Final = 0.9
"""The share of calls that a rule by latency sheds at most: the others show how it is now."""


class LeastCriticalFirst:
    """Which calls to shed so that a share of all goes, and the least critical first.

    Classes are laid side by side on a line from 0 to 1, each as wide as its share of recent calls.
    A call is somewhere on the stretch of its class, by chance or by its key; the share to shed is
    counted from the left.
    """

    __slots__ = ("_counted", "_counts", "_enough", "_left", "_seen", "_width")

    FIRST: Final = 16
    LONGEST: Final = 256
    """The stretches are measured again after so many calls, at first and later."""

    def __init__(self) -> None:
        """Know nothing of the calls yet: the classes are taken to be equally wide."""
        self._counts = [0.0] * CLASSES
        self._counted = 0
        self._enough = self.FIRST
        self._seen = -inf
        self._left = [rank / CLASSES for rank in range(CLASSES)]
        self._width = [1 / CLASSES] * CLASSES

    def sheds(self, share: float, rank: int, place: float, now: float) -> bool:
        """Tell whether a call of `rank` goes, being at `place` (0 to 1) among its equals."""
        # Between two instants, never at one: what is decided there is decided by the same measure.
        if now > self._seen:
            if self._counted >= self._enough:
                self._measure()
            self._seen = now
        self._counts[rank] += 1
        self._counted += 1
        return share > self._left[rank] + place * self._width[rank]

    def _measure(self) -> None:
        counts = self._counts[:]
        total = sum(counts)
        width = [count / total for count in counts]
        self._left = [sum(counts[:rank]) / total for rank in range(CLASSES)]
        self._width = width
        self._counts = [count / 2 for count in counts]
        self._counted = 0
        self._enough = min(2 * self._enough, self.LONGEST)


def place_of(key: object) -> float:
    """Return where `key` stands between 0 and 1: the same in every process, and for ever."""
    if isinstance(key, str):
        data = key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        data = key
    elif isinstance(key, int):
        data = b"%d" % key
    else:
        raise TypeError(f"key {key!r}: return a string, bytes or a whole number from key=")
    mixed = crc32(data)
    for _ in range(2):  # a checksum of similar keys is similar; this is not
        mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B & 0xFFFFFFFF
    return ((mixed >> 16) ^ mixed) / 2**32


class _ByPlace(Rule):
    """A rule that needs to know where a call stands among its equals: by chance, or by key."""

    __slots__ = ("key", "takes_arguments")

    def __init__(self, key: Callable[..., object] | None) -> None:
        self.key = None if key is None else check.plain_function("key", key)
        self.takes_arguments = key is not None

    def decider(self, sources: Sources) -> Callable[[float, float], bool]:
        """Return `sheds(now, place)`."""
        raise NotImplementedError

    def start(self, sources: Sources) -> Sheds:
        """Return what decides for the calls of one guard."""
        decides, uniform, key = self.decider(sources), sources.uniform, self.key
        if key is None:
            return lambda now: decides(now, uniform())

        def sheds(now: float, *args: Any, **kwargs: Any) -> bool:
            name = key(*args, **kwargs)
            return decides(now, uniform() if name is None else place_of(name))

        return sheds


class ByChance(_ByPlace):
    """See `by_chance`."""

    __slots__ = ("start_at",)
    name = "chance"
    needs_load = True

    def __init__(self, start: float, key: Callable[..., object] | None) -> None:
        super().__init__(key)
        self.start_at = check_start(start)

    def __repr__(self) -> str:
        return f"by_chance(start={self.start_at:g})"

    def decider(self, sources: Sources) -> Callable[[float, float], bool]:
        """Return `sheds(now, place)`."""
        load, rank, start = sources.load, sources.rank, self.start_at
        return lambda _now, place: place < class_degree(start, rank(), load())


class ByFraction(_ByPlace):
    """See `by_fraction`."""

    __slots__ = ("share",)
    name = "fraction"

    def __init__(self, share: float, key: Callable[..., object] | None) -> None:
        super().__init__(key)
        self.share = check.ratio("share", share, zero=True)

    def __repr__(self) -> str:
        return f"by_fraction({self.share:g})"

    def decider(self, sources: Sources) -> Callable[[float, float], bool]:
        """Return `sheds(now, place)`."""
        share, rank, sheds = self.share, sources.rank, LeastCriticalFirst().sheds
        return lambda now, place: sheds(share, rank(), place, now)


class ByLatency(_ByPlace):
    """See `by_latency`."""

    __slots__ = ("quantile", "sla")
    name = "latency"

    def __init__(self, sla: float, quantile: float, key: Callable[..., object] | None) -> None:
        super().__init__(key)
        self.sla = check.seconds("sla", sla)
        self.quantile = check.ratio("quantile", quantile)

    def __repr__(self) -> str:
        return f"by_latency({self.sla:g}, quantile={self.quantile:g})"

    def share(self, latency: float | None) -> float:
        """Return the share of calls to shed: as much as it is over, never all."""
        return 0.0 if latency is None else max(0.0, min(MOST, latency / self.sla - 1))

    def decider(self, sources: Sources) -> Callable[[float, float], bool]:
        """Return `sheds(now, place)`."""
        latency, share = sources.response_time(self.quantile), self.share
        rank, sheds = sources.rank, LeastCriticalFirst().sheds
        return lambda now, place: sheds(share(latency(now)), rank(), place, now)


def by_chance(start: float = START, *, key: Callable[..., object] | None = None) -> ShedRule:
    """Shed by chance, the more probably the higher the load is, and the least critical first.

    The probability of each class grows from 0 to 1 over a quarter of the way from `start` to a
    load of 1, and then that of the next one. With `key`, a function of the call's arguments, the
    key takes the place of chance: a user, say, is in or out as a whole, in every process.
    """
    return ByChance(start, key)


def by_fraction(share: float, *, key: Callable[..., object] | None = None) -> ShedRule:
    """Shed `share` of all calls whatever the load, the least critical first; `key` as elsewhere.

    Which classes there are it learns from the calls: of the first 16 it takes all four for equally
    frequent, and a `share` up to a quarter for SHEDDABLE alone.
    """
    return ByFraction(share, key)


def by_latency(
    sla: float, *, quantile: float = 0.95, key: Callable[..., object] | None = None
) -> ShedRule:
    """Shed while the 95th percentile of response time is above `sla` seconds.

    As large a share of all calls as it is above, at most nine tenths, the least critical first;
    `key` as elsewhere.
    """
    return ByLatency(sla, quantile, key)
