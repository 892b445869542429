"""Admission by turns of the event loop: keeps the loop's queue visible and short.

A handler that computes without awaiting starts and finishes in one iteration of the loop. However
many requests wait, no two of them are ever in flight concurrently: the queue forms in the loop's
list of ready tasks and in the sockets, where no limit on concurrent calls can see it.
`LoopAdmission` therefore measures only the loop's time. Requests that await something, open streams
and work in threads cost it nothing.

Promises:

- A turn in which requests have computed for longer than `slice` starts no more of them. The others
  wait for the next turn. The loop reads the sockets in between, and the most critical request goes
  first.
- A loop that was idle refuses no request of its first burst before it has waited for `patience`
  seconds. A burst that the loop can serve within that time is served completely.
- A busy loop lets requests wait for `target` seconds, in FIFO order. By chance, more requests
  arrive than it can serve for a moment, and the queue drains again.
- Overload is a queue that has not been empty for two windows of a quarter of a second, while more
  than 1.5 times as many requests arrived as started in the last window. Then the newest request is
  served first, and a request that has waited for longer than one and a half requests compute (or
  `slice`, if that is more) is refused. A new request is refused immediately, before any limit is
  checked, while enough requests of at least its criticality wait for the next two turns. Overload
  ends when hardly more requests arrive than start. If the loop is mostly idle, that must last for a
  second: clients that only paused all come back together.
- Requests that cost less than `cheap` are not refused as overload: refusing them costs as much as
  serving them. They share a turn of up to `CHEAP_SLICE`, without a limit on their number, and wait
  for up to `CHEAP_WAIT`.

The mechanism: a turn is an iteration of the event loop in which requests start. A gate watches one
loop, the one that serves; requests in another loop pass unwatched. When the watched loop has ended,
the gate watches the next loop that brings a request.

How the gate distinguishes overload from a burst: it counts in windows of `WINDOW` seconds. The load
of a window is the busy share of the loop, times the requests that arrived, divided by those that
started. The window in which a queue forms is not judged, and neither is the next: a burst drains,
however expensive its first requests are (imports, connections, empty caches). But if requests were
waiting at the end of every turn since then, while the load stayed above `OVERLOAD`, the loop is
overloaded. Overload ends when the load was below `CALM`: for one window in which the loop was busy,
or for `CALM_TIME` seconds.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from math import inf
from time import thread_time
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.context import current_criticality
from seawall.errors import DeadlineExceeded, Overloaded
from seawall.events import OverloadChanged
from seawall.events.bus import emit
from seawall.models.shedding.codel import QueueState
from seawall.runtime.layers import Host, Wait
from seawall.runtime.policy import GateBound, GatePolicy, Mode
from seawall.runtime.slots import AnonymousSlots, Refusal, SlotWaiter, live_slots

WINDOW: Final = 0.25
"""Seconds over which load and cost are measured."""

OVERLOAD: Final = 1.5
"""Load above which a persistent queue is an overload.

Where 25 requests of 10 ms fit into a window, 38 arrive by chance in one window of 150.
"""

CALM: Final = 1.25
"""Load below which a window is calm."""

CALM_TIME: Final = 1.0
"""Seconds of calm windows after which an overload ends, if the loop was mostly idle in them.

Clients that pause for a moment all come back together, and it takes three windows to detect an
overload: meanwhile a queue would build up. A calm window in which the loop was busy is not a pause.
"""

BURST_WINDOWS: Final = 1
"""Number of whole windows for which a queue may persist before its load is judged: a burst takes a
moment to drain."""

IDLE: Final = 0.5
"""Load below which the loop is idle: the queue that forms next is considered a burst."""

OVERLOAD_WAIT: Final = 1.5
"""Longest wait of a request during overload, as a multiple of the cost of one request."""

BUSY_WAIT: Final = 4.0
"""Longest wait of a request in a busy loop is at least this multiple of the cost of one request."""

CHEAP_SLICE: Final = 0.05
"""Maximum duration in seconds of a turn of cheap requests."""

CHEAP_WAIT: Final = 0.25
"""Seconds for which cheap requests wait while the loop is busy: enough for hundreds of concurrent
clients."""

HOPS: Final = 3
"""Loop iterations from the end of a turn to the choice of the next waiting requests.

In the first, the loop reads the sockets; in the second, the tasks of those requests run and join
the queue.
"""

UNWATCHED: Final = 0.02
"""Seconds for which cheap requests start unwatched."""

TURNS_AHEAD: Final = 2
"""Maximum queue length during overload, in turns: the next turn is never empty."""

MOST_WAITING: Final = 10_000
"""Maximum number of waiting requests, however cheap they are."""


class LoopAdmission(GatePolicy):
    """Policy that starts requests in turns of the event loop; see the module."""

    kind: ClassVar[str] = "loop_admission"

    def __init__(
        self,
        *,
        slice: float = 0.005,  # noqa: A002 - a slice of time, not of a list
        target: float = 0.1,
        cheap: float = 0.001,
        patience: float = 1.0,
        mode: Mode = "enforce",
    ) -> None:
        """Limit a turn to `slice` seconds; see the module for the other settings."""
        super().__init__(mode)
        self.slice = check.seconds("slice", slice)
        self.target = check.seconds("target", target)
        self.cheap = check.seconds("cheap", cheap, zero=True)
        self.patience = check.seconds("patience", patience)

    def __repr__(self) -> str:
        return (
            f"LoopAdmission(slice={self.slice:g}, target={self.target:g}, cheap={self.cheap:g},"
            f" patience={self.patience:g})"
        )

    def _bind(self, host: Host) -> LoopAdmissionGate:
        return LoopAdmissionGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        names = ("slice", "target", "cheap", "patience", "mode")
        fresh = self._changed(changes, **{name: getattr(self, name) for name in names})
        for name in names:
            setattr(self, name, getattr(fresh, name))


class LoopAdmissionGate(GateBound, QueueState):
    """Gate of one edge's turns. Its slots are not held: each is a right to start in one turn."""

    policy: LoopAdmission

    def __init__(self, policy: LoopAdmission, host: Host) -> None:
        super().__init__(policy, host)
        self.slots = _Rights(1, order="criticality", room=MOST_WAITING, discipline=self)
        self._now = host.clock.now
        self._start(None)
        survives_fork(self)

    def _start(self, loop: AbstractEventLoop | None) -> None:
        """Watch `loop`, with fresh measurements."""
        self._loop = loop
        self._queued = self.slots.queue._lanes
        """Not empty while requests wait. Cheaper to check than the length of the queue."""
        self._turning = False  # whether a turn is in progress
        self._dispatching = False  # whether a turn for waiting requests is scheduled
        self._open = False  # whether new requests may join the current turn
        self._began = self._busy_since = 0.0
        self._begun = 0
        self._windows_queued = 0
        """Number of windows for which requests have been waiting at the end of every turn."""
        self.unwatched = -inf
        """Time until which requests start unwatched."""
        self.busy = 0.0
        """Busy share of the loop."""
        self.load = 0.0
        self.cost = self.policy.cheap
        """CPU time of the loop for one request."""
        self.strict = False
        """Whether the loop is overloaded."""
        self.free = True
        """Whether it is not: otherwise `refuse_if_full` may refuse, as that of a `SlotGate`."""
        self._calm = 0.0  # number of seconds for which windows have been calm
        self._burst = True
        """Whether the queue is a burst: the loop was idle when it formed, a short time ago."""
        self._cheap = False
        self._slice = self.policy.slice
        self._earlier = 0.0, 0  # CPU time and number of requests of the previous window
        self._open_window(self._now())

    def _open_window(self, now: float) -> None:
        self._window, self._cpu = now, thread_time()
        self._took = 0.0
        self.served = 0
        self._held_back = 0  # requests that arrived in this window minus those that started in it
        self._emptied = not self._queued
        """Whether the queue was empty at some moment of this window."""

    def enter(self, now: float) -> None:
        """Start the request if the turn has time left and no other goes first; else wait."""
        if now < self.unwatched:
            self.served += 1
        elif not self.begins(now):
            if self.policy.mode != "enforce":
                self.served += 1
                return
            self._held_back += 1
            wait = self._longest_wait()
            raise Wait(_TurnWaiter(self.slots, self.host.clock, now, wait, self.turned_away))

    def begins(self, now: float) -> bool:
        """Start a request in a watched turn; return False if no time is left, or others go first.

        If False, nothing has started, and a turn for waiting requests follows.
        """
        loop = get_running_loop()
        if loop is not self._loop and not self._adopt(loop):
            return True
        if not self._turning:
            if self._dispatching:
                return False
            if now - self._window >= WINDOW:
                self._measure(now)
            self._busy_since = now
            if self.strict:  # refuse excess requests before any computes
                self._dispatching = True
                self._later(HOPS)
                return False
            self._turning = self._open = True
            self._began = now
            self._begun = 1
            loop.call_soon(self._end)
            return True
        if self._open and now - self._began <= self._slice and not self._queued:
            self._begun += 1
            return True
        return False

    def refuse_if_full(self, _now: float) -> None:
        """Refuse a new request if enough requests of its criticality wait already.

        Called during overload only. Queueing a request just to refuse it later costs more.
        """
        if self.policy.mode != "enforce" or get_running_loop() is not self._loop:
            return
        rank, waiting = current_criticality(), 0
        for (other, _), lane in self._queued.items():
            if other >= rank:
                waiting += len(lane)
        if waiting >= TURNS_AHEAD * self._batch():
            self._held_back += 1
            self.turned_away("shed")

    def _batch(self) -> int:
        """Return how many waiting requests start in one turn."""
        return max(1, int(self._slice / max(self.cost, 1e-6)))

    def _longest_wait(self) -> float:
        """Return how long a request that arrives now may wait."""
        policy = self.policy
        if self.strict:
            return max(policy.slice, OVERLOAD_WAIT * self.cost)
        if self._burst:
            return policy.patience
        return max(policy.target, CHEAP_WAIT if self._cheap else BUSY_WAIT * self.cost)

    def _adopt(self, loop: AbstractEventLoop) -> bool:
        """Watch `loop` from now on, unless another running loop is being watched."""
        known = self._loop
        if known is not None and known.is_running():
            return False
        self._start(loop)
        return True

    def turned_away(self, why: Refusal) -> None:
        """Refuse a request that got no turn."""
        if why == "deadline":
            message = f"guard {self.host.name!r}: the deadline passed while waiting for a turn"
            self.refuse(DeadlineExceeded(message))
            return
        message = f"guard {self.host.name!r}: the event loop has more to do than it gets done"
        error = Overloaded(message, retry_after=max(self.cost, 0.001))
        error.reason = "shed_by_loop_admission"
        try:
            self.refuse(error)
        finally:
            del error

    # At the end of each turn

    def _end(self) -> None:
        """Measure the turn, and schedule the waiting requests."""
        self._turning = False
        now = self._now()
        self._took += now - self._busy_since
        self._busy_since = now
        self.served += self._begun
        if not self._queued:
            self._emptied = True
        elif now - self._window >= WINDOW:
            self._measure(now)
        else:
            self._weigh(now)
        if self._queued or now - self._began > self._slice:
            # Also if the queue is empty: requests that arrived during a long turn are still in the
            # sockets.
            self._dispatching = True
            self._later(HOPS)
        elif self._cheap:
            self.unwatched = now + UNWATCHED

    def _measure(self, now: float) -> None:
        """Close the window: decide from its load and cost whether the loop is overloaded."""
        passed = now - self._window
        burnt = self._weigh(now)
        self.busy = min(1.0, max(self._took, burnt) / passed)
        self.load = self.busy * (1.0 + self._held_back / max(1, self.served))
        self._cheap = self.cost < self.policy.cheap
        self._slice = CHEAP_SLICE if self._cheap else self.policy.slice
        self._windows_queued = 0 if self._emptied else self._windows_queued + 1
        persists = self._windows_queued > BURST_WINDOWS
        if persists or not self._queued:
            self._burst = self.load < IDLE
        self._calm = 0.0 if self.load > CALM else self._calm + passed
        if self.strict:
            suspect = self._calm < (CALM_TIME if self.busy < IDLE else WINDOW)
        else:
            suspect = persists and self.load > OVERLOAD
        overloaded = suspect and not self._cheap
        if overloaded is not self.strict:
            self.strict, self.free = overloaded, not overloaded
            load = round(self.load, 3)
            emit(OverloadChanged, self.host.name, overloaded=overloaded, load=load)
        self._earlier = burnt, self.served
        self._open_window(now)

    def _weigh(self, now: float) -> float:
        """Measure the cost of a request over the last two windows; return this one's CPU time."""
        # Of a long idle time only the last moments count: most of it was spent on other things.
        burnt = (thread_time() - self._cpu) * min(1.0, WINDOW / max(1e-9, now - self._window))
        seconds, requests = self._earlier
        if requests + self.served:
            self.cost = (seconds + burnt) / (requests + self.served)
        return burnt

    def _later(self, hops: int) -> None:
        """Let the loop read its sockets first, so that new requests have joined the queue."""
        loop = get_running_loop()
        if hops:
            loop.call_soon(self._later, hops - 1)
        else:
            self._dispatch(loop)

    def _dispatch(self, loop: AbstractEventLoop) -> None:
        """Start a turn of waiting requests, if there are any."""
        self._dispatching = False
        if not self._queued:
            return
        now = self._now()
        if self.strict:
            self._refuse(now)  # first, so that no request computes before the refusals are sent
        self._turning = True
        self._open = False
        self._began = now
        self._begun = 0
        for _ in range(self._batch()):
            if not self._queued:
                break
            self._begun += 1
            self.slots.give_back()
        self._held_back -= self._begun
        loop.call_soon(self._end)  # after the requests that were just started

    def _refuse(self, now: float) -> None:
        """Refuse requests that have waited too long, the least critical first."""
        slots, longest = self.slots, self._longest_wait()
        with slots.mutex:
            while len(slots.queue) > 1 and slots._longest_wait(now) > longest:
                victim = slots.queue.pop_lowest()
                if victim is not None:
                    victim.turn_away("shed")

    # Queue discipline

    def newest_first(self, now: float) -> bool:
        """Return whether to serve the newest request first: during overload only."""
        return self.strict

    def sheds(self, sojourn: float, now: float, oldest: float = 0.0) -> bool:
        """Return False: the start of each turn sheds."""
        return False

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return busy share, load, cost of a request, overload and number of waiting requests."""
        return {
            **super().snapshot(now),
            "busy": self.busy,
            "load": self.load,
            "cost": self.cost,
            "strict": self.strict,
            "waiting": self.slots.waiting,
        }

    def _after_fork(self) -> None:
        """Start afresh in a child process: it has another loop."""
        self._start(None)


class _TurnWaiter(SlotWaiter):
    """A request that waits for a turn."""

    __slots__ = ()

    def _give_up(self) -> None:
        self._leave_queue()  # a granted turn is lost, not passed on: the next comes soon


class _Rights(AnonymousSlots):
    """Rights to start a request, granted one by one and never returned."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(limit, **options)
        self.free.clear()
        live_slots.discard(self)  # its slots are never held

    def _after_fork(self) -> None:
        super()._after_fork()
        self.free.clear()
