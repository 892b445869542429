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

ITERATIONS_BETWEEN_TURNS: Final = 3
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
        self.slots = _StartRights(1, order="criticality", room=MOST_WAITING, discipline=self)
        self._now = host.clock.now
        self._start(None)
        survives_fork(self)

    def _start(self, loop: AbstractEventLoop | None) -> None:
        """Watch `loop`, with fresh measurements."""
        self._loop = loop
        self._queued = self.slots.queue._lanes
        """Not empty while requests wait. Cheaper to check than the length of the queue."""
        self._in_turn = False  # whether a turn is in progress
        self._turn_scheduled = False  # whether a turn for waiting requests is scheduled
        self._turn_is_open = False  # whether new requests may join the current turn
        self._turn_began_at = self._busy_since = 0.0
        self._started_in_turn = 0
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
        self._calm_seconds = 0.0  # number of seconds for which windows have been calm
        self._is_burst = True
        """Whether the queue is a burst: the loop was idle when it formed, a short time ago."""
        self._is_cheap = False
        self._slice = self.policy.slice
        self._previous_window = 0.0, 0  # CPU time and number of requests of the previous window
        self._open_window(self._now())

    def _open_window(self, now: float) -> None:
        self._window_began_at, self._window_cpu = now, thread_time()
        self._busy_seconds = 0.0
        self._started = 0
        self._held_back = 0  # requests that arrived in this window minus those that started in it
        self._was_empty = not self._queued
        """Whether the queue was empty at some moment of this window."""

    def enter(self, now: float) -> None:
        """Start the request if the turn has time left and no other goes first; else wait."""
        if now < self.unwatched:
            self._started += 1
        elif not self.start_in_turn(now):
            if self.policy.mode != "enforce":
                self._started += 1
                return
            self._held_back += 1
            wait = self._longest_wait()
            raise Wait(_TurnWaiter(self.slots, self.host.clock, now, wait, self.refuse_request))

    def start_in_turn(self, now: float) -> bool:
        """Start a request in a watched turn; return False if no time is left, or others go first.

        If False, nothing has started, and a turn for waiting requests follows.
        """
        loop = get_running_loop()
        if loop is not self._loop and not self._adopt(loop):
            return True
        if not self._in_turn:
            if self._turn_scheduled:
                return False
            if now - self._window_began_at >= WINDOW:
                self._close_window(now)
            self._busy_since = now
            if self.strict:  # refuse excess requests before any computes
                self._turn_scheduled = True
                self._dispatch_after(ITERATIONS_BETWEEN_TURNS)
                return False
            self._in_turn = self._turn_is_open = True
            self._turn_began_at = now
            self._started_in_turn = 1
            loop.call_soon(self._end_turn)
            return True
        if self._turn_is_open and now - self._turn_began_at <= self._slice and not self._queued:
            self._started_in_turn += 1
            return True
        return False

    def refuse_if_full(self, _now: float) -> None:
        """Refuse a new request if enough requests of its criticality wait already.

        Called during overload only. Queueing a request just to refuse it later costs more.
        """
        if self.policy.mode != "enforce" or get_running_loop() is not self._loop:
            return
        rank, waiting = current_criticality(), 0
        for (other, _), waiters in self._queued.items():
            if other >= rank:
                waiting += len(waiters)
        if waiting >= TURNS_AHEAD * self._batch():
            self._held_back += 1
            self.refuse_request("shed")

    def _batch(self) -> int:
        """Return how many waiting requests start in one turn."""
        return max(1, int(self._slice / max(self.cost, 1e-6)))

    def _longest_wait(self) -> float:
        """Return how long a request that arrives now may wait."""
        policy = self.policy
        if self.strict:
            return max(policy.slice, OVERLOAD_WAIT * self.cost)
        if self._is_burst:
            return policy.patience
        return max(policy.target, CHEAP_WAIT if self._is_cheap else BUSY_WAIT * self.cost)

    def _adopt(self, loop: AbstractEventLoop) -> bool:
        """Watch `loop` from now on, unless another running loop is being watched."""
        known = self._loop
        if known is not None and known.is_running():
            return False
        self._start(loop)
        return True

    def refuse_request(self, why: Refusal) -> None:
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

    def _end_turn(self) -> None:
        """Measure the turn, and schedule the waiting requests."""
        self._in_turn = False
        now = self._now()
        self._busy_seconds += now - self._busy_since
        self._busy_since = now
        self._started += self._started_in_turn
        if not self._queued:
            self._was_empty = True
        elif now - self._window_began_at >= WINDOW:
            self._close_window(now)
        else:
            self._update_cost(now)
        if self._queued or now - self._turn_began_at > self._slice:
            # Also if the queue is empty: requests that arrived during a long turn are still in the
            # sockets.
            self._turn_scheduled = True
            self._dispatch_after(ITERATIONS_BETWEEN_TURNS)
        elif self._is_cheap:
            self.unwatched = now + UNWATCHED

    def _close_window(self, now: float) -> None:
        """Close the window: decide from its load and cost whether the loop is overloaded."""
        passed = now - self._window_began_at
        cpu = self._update_cost(now)
        self.busy = min(1.0, max(self._busy_seconds, cpu) / passed)
        self.load = self.busy * (1.0 + self._held_back / max(1, self._started))
        self._is_cheap = self.cost < self.policy.cheap
        self._slice = CHEAP_SLICE if self._is_cheap else self.policy.slice
        self._windows_queued = 0 if self._was_empty else self._windows_queued + 1
        persists = self._windows_queued > BURST_WINDOWS
        if persists or not self._queued:
            self._is_burst = self.load < IDLE
        self._calm_seconds = 0.0 if self.load > CALM else self._calm_seconds + passed
        if self.strict:
            suspect = self._calm_seconds < (CALM_TIME if self.busy < IDLE else WINDOW)
        else:
            suspect = persists and self.load > OVERLOAD
        overloaded = suspect and not self._is_cheap
        if overloaded is not self.strict:
            self.strict, self.free = overloaded, not overloaded
            load = round(self.load, 3)
            emit(OverloadChanged, self.host.name, overloaded=overloaded, load=load)
        self._previous_window = cpu, self._started
        self._open_window(now)

    def _update_cost(self, now: float) -> float:
        """Measure the cost of a request over the last two windows; return this one's CPU time."""
        # Of a long idle time only the last moments count: most of it was spent on other things.
        share = min(1.0, WINDOW / max(1e-9, now - self._window_began_at))
        cpu = (thread_time() - self._window_cpu) * share
        seconds, requests = self._previous_window
        if requests + self._started:
            self.cost = (seconds + cpu) / (requests + self._started)
        return cpu

    def _dispatch_after(self, iterations: int) -> None:
        """Let the loop read its sockets first, so that new requests have joined the queue."""
        loop = get_running_loop()
        if iterations:
            loop.call_soon(self._dispatch_after, iterations - 1)
        else:
            self._start_waiting(loop)

    def _start_waiting(self, loop: AbstractEventLoop) -> None:
        """Start a turn of waiting requests, if there are any."""
        self._turn_scheduled = False
        if not self._queued:
            return
        now = self._now()
        if self.strict:
            # First, so that no request computes before the refusals are sent.
            self._refuse_late(now)
        self._in_turn = True
        self._turn_is_open = False
        self._turn_began_at = now
        self._started_in_turn = 0
        for _ in range(self._batch()):
            if not self._queued:
                break
            self._started_in_turn += 1
            self.slots.give_back()
        self._held_back -= self._started_in_turn
        loop.call_soon(self._end_turn)  # after the requests that were just started

    def _refuse_late(self, now: float) -> None:
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


class _StartRights(AnonymousSlots):
    """Rights to start a request, granted one by one and never returned."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(limit, **options)
        self.free.clear()
        live_slots.discard(self)  # its slots are never held

    def _after_fork(self) -> None:
        super()._after_fork()
        self.free.clear()
