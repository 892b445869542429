"""Who has to leave a queue that does not drain: controlled delay, and adaptive LIFO.

A queue that empties now and then is a good one: it takes up bursts. One in which everybody waits
is only delay. Both disciplines here tell the two apart by how long the longest waiting has waited
each time somebody is to be served, and both measure that against what a call takes: where a call
takes 50 ms, a wait of 5 ms is nothing.

`codel(...)` and `adaptive_lifo(...)` are settings; each `start(...)` makes a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Final, Protocol

from seawall import _checks as check

TARGET: Final = 0.005
"""Seconds that a call may always wait, however short calls are."""

INTERVAL: Final = 0.1
"""Seconds for which a queue may stand before it is a bad one, while calls are short."""

REREAD: Final = 0.1
"""Seconds between two looks at how long calls take: the first to end are the shortest."""

LONG: Final = 2
"""The longer span is at least so many times the shorter one."""

MEMORY: Final = 16
"""Intervals within which a queue that stands again is shed from as fast as before."""

FLOOD: Final = 2
"""Intervals for which nobody has to wait in a queue that stands: beyond them it does not drain."""

ServiceTime = Callable[[float], float | None]
"""`service_time(now)`: how many seconds a call typically takes once it is served, if known."""


class QueueState(Protocol):
    """The state of one queue's discipline."""

    def newest_first(self, now: float) -> bool:
        """Tell whether the newest is to be served next, not the one that waits longest."""

    def sheds(self, sojourn: float, now: float) -> bool:
        """Tell whether somebody has to go, when the longest waiting has waited for `sojourn`."""

    def emptied(self, now: float) -> None:
        """Learn that nobody waits any more."""


class QueueShed(Protocol):
    """How a queue sheds: what `codel(...)` and `adaptive_lifo(...)` return."""

    def start(self, service_time: ServiceTime) -> QueueState:
        """Return a fresh state for one queue."""


class _Spans:
    """A short and a long span of time, stretched to what calls take."""

    __slots__ = ("_due", "_long", "_scale", "_service_time", "_short", "long", "short")

    def __init__(self, short: float, long: float, scale: float, service_time: ServiceTime) -> None:
        self._short = self.short = short
        self._long = self.long = long
        self._scale = scale
        self._service_time = service_time
        self._due = float("-inf")
        if scale:
            # A wait is long or short in proportion: until calls are known, none is too long.
            self.short = self.long = float("inf")

    def stretch(self, now: float) -> None:
        """Look now and then at what calls take."""
        if self._scale and now >= self._due:
            typical = self._service_time(now)
            self._due = now + REREAD
            if typical is not None:
                self.short = max(self._short, self._scale * typical)
                self.long = max(self._long, LONG * self.short)


class Codel:
    """See `codel`."""

    __slots__ = ("interval", "scale", "target")

    def __init__(self, target: float, interval: float, scale: float) -> None:
        self.target = check.seconds("target", target)
        self.interval = check.seconds("interval", interval)
        if self.interval <= self.target:
            raise ValueError(
                f"interval={interval!r}: write more than target={target!r}, such as 20 times that"
            )
        self.scale = check.at_least("scale", scale, 0.0)

    def __repr__(self) -> str:
        return f"codel({self.target:g}, interval={self.interval:g}, scale={self.scale:g})"

    def start(self, service_time: ServiceTime) -> CodelState:
        """Return a fresh state for one queue."""
        return CodelState(self, service_time)


class CodelState:
    """Controlled delay by RFC 8289: when it sheds, and how often; and a bound on the wait.

    The bound is our own. The RFC's law adds a drop at a time, which is for senders that slow down
    when they see one; clients that come whatever happens fill any queue long before it has caught
    up.
    """

    __slots__ = (
        "_bad_from",
        "_count",
        "_drop_next",
        "_dropping",
        "_last_count",
        "_spans",
    )

    def __init__(self, settings: Codel, service_time: ServiceTime) -> None:
        self._spans = _Spans(settings.target, settings.interval, settings.scale, service_time)
        self._bad_from: float | None = None
        self._dropping = False
        self._drop_next = float("-inf")
        self._count = 0
        self._last_count = 0

    def newest_first(self, now: float) -> bool:
        """Leave the order as it is."""
        return False

    def sheds(self, sojourn: float, now: float) -> bool:
        """Shed one when the wait has been above target for an interval, then ever more often.

        And by then at once whoever has waited for longer than two intervals.
        """
        self._spans.stretch(now)
        if sojourn < self._spans.short:
            self.emptied(now)
            return False
        interval = self._spans.long
        if self._bad_from is None:
            self._bad_from = now + interval
        if now < self._bad_from:
            return False
        if not self._dropping:
            self._begin(now, interval)
        elif now >= self._drop_next:
            self._count += 1
            self._drop_next += interval / sqrt(self._count)
        else:
            return sojourn > FLOOD * interval
        return True

    def _begin(self, now: float, interval: float) -> None:
        # Bad again so soon: the rate at which it got better is a better start than one.
        since = self._count - self._last_count
        again = since > 1 and now - self._drop_next < MEMORY * interval
        self._count = self._last_count = since if again else 1
        self._dropping = True
        self._drop_next = now + interval / sqrt(self._count)

    def emptied(self, now: float) -> None:
        """Shed no more until the wait has been above target for an interval again."""
        self._bad_from = None
        self._dropping = False


def codel(target: float = TARGET, *, interval: float = INTERVAL, scale: float = 2.0) -> QueueShed:
    """Shed from a queue in which the wait stays above `target` for `interval` seconds.

    First one, then ever more often until the wait is below `target` again (RFC 8289), and at once
    all who have waited for longer than two intervals by then. Where the median call takes longer,
    `target` is `scale` times the median and `interval` at least twice `target`; until there is a
    median nobody is shed. `scale=0` keeps both as they are.
    """
    return Codel(target, interval, scale)


class AdaptiveLifo:
    """See `adaptive_lifo`."""

    __slots__ = ("patience", "scale", "timeout")

    def __init__(self, timeout: float, patience: float, scale: float) -> None:
        self.timeout = check.seconds("timeout", timeout)
        self.patience = check.seconds("patience", patience)
        if self.patience < self.timeout:
            raise ValueError(
                f"patience={patience!r}: write at least timeout={timeout!r}, such as 20 times that"
            )
        self.scale = check.at_least("scale", scale, 0.0)

    def __repr__(self) -> str:
        return f"adaptive_lifo({self.timeout:g}, patience={self.patience:g}, scale={self.scale:g})"

    def start(self, service_time: ServiceTime) -> AdaptiveLifoState:
        """Return a fresh state for one queue."""
        return AdaptiveLifoState(self, service_time)


class AdaptiveLifoState:
    """A short time to wait, and the newest first, in a queue that has stood for too long."""

    __slots__ = ("_since", "_spans")

    def __init__(self, settings: AdaptiveLifo, service_time: ServiceTime) -> None:
        self._spans = _Spans(settings.timeout, settings.patience, settings.scale, service_time)
        self._since: float | None = None

    def newest_first(self, now: float) -> bool:
        """Serve the newest first while a queue stands: the others' callers may have left."""
        return self._since is not None and now - self._since > self._spans.long

    def sheds(self, sojourn: float, now: float) -> bool:
        """Shed who has waited for longer than a queue of this age allows."""
        if self._since is None or now - sojourn < self._since:
            self._since = now - sojourn
        self._spans.stretch(now)
        return sojourn > (self._spans.short if self.newest_first(now) else self._spans.long)

    def emptied(self, now: float) -> None:
        """Be patient again."""
        self._since = None


def adaptive_lifo(
    timeout: float = TARGET, *, patience: float = INTERVAL, scale: float = 2.0
) -> QueueShed:
    """Serve the newest first, and let nobody wait for long, while a queue stands.

    In a queue that was empty within the last `patience` seconds a call may wait for `patience`,
    and who came first is served first; in one that has stood for longer, only for `timeout`, and
    the newest is served first. Where the median call takes longer, `timeout` is `scale` times the
    median and `patience` at least twice `timeout`; until there is a median nobody is shed.
    `scale=0` keeps both as they are. Of several criticalities the lowest is the one that stands:
    the others keep their order.
    """
    return AdaptiveLifo(timeout, patience, scale)
