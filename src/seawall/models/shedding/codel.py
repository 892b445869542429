"""Queue disciplines for queues that do not drain: controlled delay, and adaptive LIFO.

A queue that empties now and then is a good one: it absorbs bursts. One in which every caller waits
is only delay. Both disciplines distinguish the two by the age of the oldest waiter, and both
compare that with the duration of a call: where a call takes 50 ms, a wait of 5 ms is nothing.

Controlled delay takes the definition of a bad queue from RFC 8289: the wait has been above a target
for an interval. The reaction differs. The RFC drops one, then ever more often, which suits senders
that slow down when they see a drop; clients that keep coming regardless fill any queue long before
that has caught up. Here a new arrival is refused immediately if it would wait for longer than the
target, judged by the recent rate of service. So refused callers have not waited, and waiting
callers are served.

`codel(...)` and `adaptive_lifo(...)` are settings; each `start(...)` creates a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from seawall import _checks as check

TARGET: Final = 0.005  # seconds that a call may always wait, however short calls are
INTERVAL: Final = 0.1  # seconds that a queue may last before it is bad, while calls are short
REREAD: Final = 0.1  # seconds between two readings of the duration: the first are the shortest
LONG: Final = 2  # minimum ratio of the longer span to the shorter one
FLOOD: Final = 3  # intervals after which a caller in a bad queue has waited too long
BURST: Final = 10  # number of calls that may always wait in a queue that is not bad
CALM: Final = 0.1  # refusals per served call up to which a queue is no longer bad
ServiceTime = Callable[[float], float | None]
"""`service_time(now)`: typical seconds that a call takes once it is served, if known."""


class QueueState:
    """State of a queue discipline for one queue."""

    def newest_first(self, now: float) -> bool:
        """Return whether the newest caller is to be served next instead of the oldest."""
        return False

    def refuses(self, waiting: int, sojourn: float, now: float) -> bool:
        """Return whether to refuse a new caller behind `waiting` others immediately.

        `sojourn` is how long the oldest of them has waited.
        """
        return False

    def sheds(self, sojourn: float, now: float, oldest: float = 0.0) -> bool:
        """Return whether to shed a caller, when the oldest waiter has waited for `sojourn`.

        The queue asks this when a caller is to be served, until the result is False. If the next to
        be served is not the oldest, `sojourn` is its wait and `oldest` that of the oldest waiter,
        by which the queue is judged.
        """
        raise NotImplementedError

    def serves(self, now: float) -> None:
        """Record that one of the waiters is served."""

    def emptied(self, now: float) -> None:
        """Record that the queue is empty."""


class QueueShed(Protocol):
    """Settings of a queue discipline, as returned by `codel(...)` and `adaptive_lifo(...)`."""

    def start(self, service_time: ServiceTime) -> QueueState:
        """Return a new state for one queue."""


def check_queue_shed(shed: QueueShed | None) -> QueueShed | None:
    """Return `shed` if it is a queue discipline, or raise."""
    # The rules of Shed have `start` too, but decide for one call, not for a queue.
    if shed is not None and (
        isinstance(shed, type) or not hasattr(shed, "start") or hasattr(shed, "takes_arguments")
    ):
        raise TypeError(f"shed={shed!r}: write codel() or adaptive_lifo()")
    return shed


class _Spans:
    """A short and a long time span, scaled to the duration of calls."""

    def __init__(self, short: float, long: float, scale: float, service_time: ServiceTime) -> None:
        self._short = self.short = short
        self._long = self.long = long
        self._scale = scale
        self._service_time = service_time
        self._due = float("-inf")
        if scale:
            # Until the duration of calls is known, no wait is too long in proportion.
            self.short = self.long = float("inf")

    def stretch(self, now: float) -> None:
        """Update the spans from the call duration at intervals."""
        if self._scale and now >= self._due:
            typical = self._service_time(now)
            self._due = now + REREAD
            if typical is not None:
                self.short = max(self._short, self._scale * typical)
                self.long = max(self._long, LONG * self.short)


class Codel:
    """Settings of controlled delay; see `codel`."""

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
        """Return a new state for one queue."""
        return CodelState(self, service_time)


class CodelState(QueueState):
    """Controlled delay: whether the queue is bad, and how many callers may wait in it.

    Where `refuses` is never called (a worker cannot refuse callers that push), the oldest waiters
    are shed instead, once they have waited for longer than the target.
    """

    def __init__(self, settings: Codel, service_time: ServiceTime) -> None:
        self._spans = _Spans(settings.target, settings.interval, settings.scale, service_time)
        self._door = False  # whether `refuses` is called for new callers
        self._last = float("-inf")
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        """Reset to a new queue at `now`."""
        self.shedding = False
        self._bad_from: float | None = None
        self._rate: float | None = None  # callers served per second, in the last window
        self._open_window(now)

    def _open_window(self, now: float) -> None:
        self._since = now
        self._served = self._gone = 0

    def refuses(self, waiting: int, sojourn: float, now: float) -> bool:
        """Return whether a new caller would wait for too long.

        The bound is the target in a bad queue. In any other it is an interval: a queue that takes
        longer to drain would be a bad one by then.
        """
        self._door = True
        self._judge(sojourn, now)
        spans, stood = self._spans, now - self._since
        rate = self._rate
        if rate is None:
            if stood < spans.short:
                return False
            rate = (self._served + 1) / stood  # optimistic as long as it has seen little
        room = max(1.0, rate * spans.short) if self.shedding else max(BURST, rate * spans.long)
        if waiting < room:
            return False
        self._gone += 1
        return True

    def sheds(self, sojourn: float, now: float, oldest: float = 0.0) -> bool:
        """Return whether to shed a caller that has waited too long to be useful, in a bad queue."""
        self._judge(max(sojourn, oldest), now)
        longest = FLOOD * self._spans.long if self._door else self._spans.short
        if not self.shedding or sojourn <= longest:
            return False
        self._gone += 1
        return True

    def serves(self, now: float) -> None:
        """Count a caller that is served while others wait."""
        self._served += 1
        self._last = now

    def _judge(self, sojourn: float, now: float) -> None:
        """Decide whether the queue is bad, by its longest wait and by the number of refusals."""
        spans = self._spans
        spans.stretch(now)
        if now - self._since >= spans.long:
            if self.shedding and self._gone <= CALM * self._served:
                self.shedding, self._bad_from = False, None
            self._rate = self._served / (now - self._since)
            self._open_window(now)
        if self.shedding:
            return
        if sojourn < spans.short:
            self._bad_from = None
        elif self._bad_from is None:
            self._bad_from = now + spans.long
        elif now >= self._bad_from:
            self.shedding = True

    def emptied(self, now: float) -> None:
        """Start again, unless a bad queue was empty only briefly: then skip that time."""
        idle = max(0.0, now - self._last)
        if self.shedding and idle < self._spans.long:
            self._since += idle
            self._last = now
        else:
            self._begin(now)


def codel(target: float = TARGET, *, interval: float = INTERVAL, scale: float = 2.0) -> QueueShed:
    """Keep the wait in a queue at `target`, once it was above that for `interval` seconds.

    From then on a new arrival that would wait for longer than `target`, by the recent rate of
    service, is refused immediately, until hardly any has to be refused. Before that, only one that
    would wait for longer than `interval` is refused. A caller that waited for three intervals in a
    bad queue is shed too. Where the median call takes longer, `target` is `scale` times the median
    and `interval` at least twice `target`; until there is a median no call is shed. `scale=0` keeps
    both as they are.
    """
    return Codel(target, interval, scale)


class AdaptiveLifo:
    """Settings of adaptive LIFO; see `adaptive_lifo`."""

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
        """Return a new state for one queue."""
        return AdaptiveLifoState(self, service_time)


class AdaptiveLifoState(QueueState):
    """Short waits and newest first in a queue that has not been empty for too long."""

    def __init__(self, settings: AdaptiveLifo, service_time: ServiceTime) -> None:
        self._spans = _Spans(settings.timeout, settings.patience, settings.scale, service_time)
        self._since: float | None = None

    def newest_first(self, now: float) -> bool:
        """Return whether the queue has lasted too long: the oldest callers may be gone."""
        return self._since is not None and now - self._since > self._spans.long

    def sheds(self, sojourn: float, now: float, oldest: float = 0.0) -> bool:
        """Return whether a caller has waited for longer than a queue of this age allows."""
        began = now - max(sojourn, oldest)
        if self._since is None or began < self._since:
            self._since = began
        self._spans.stretch(now)
        return sojourn > (self._spans.short if self.newest_first(now) else self._spans.long)

    def emptied(self, now: float) -> None:
        """Reset to the long patience."""
        self._since = None


def adaptive_lifo(
    timeout: float = TARGET, *, patience: float = INTERVAL, scale: float = 2.0
) -> QueueShed:
    """Serve the newest first, and allow only short waits, while a queue does not drain.

    In a queue that was empty within the last `patience` seconds a call may wait for `patience`, and
    the oldest is served first. In one that has lasted longer, a call may wait only for `timeout`,
    and the newest is served first. Where the median call takes longer, `timeout` is `scale` times
    the median and `patience` at least twice `timeout`; until there is a median no call is shed.
    `scale=0` keeps both as they are. With several criticalities this applies to the lowest one that
    waits: the others keep their order.
    """
    return AdaptiveLifo(timeout, patience, scale)
