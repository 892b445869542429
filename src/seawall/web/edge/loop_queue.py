"""The mechanism of `Turns`: see `seawall.web.edge.admission` for what it promises.

A turn is an iteration of the event loop in which requests begin. A gate watches one loop, the one
that serves; requests in another loop pass unwatched. When the watched loop has ended, the gate
watches the next one that brings a request.

How the gate knows an overload from a burst: it counts in windows of `WINDOW` seconds. The load of
a window is the busy share of the loop, times the requests that came, divided by those that began.
The window in which a queue forms says nothing, and neither does the next: a burst drains, however
expensive its first requests are (imports, connections, empty caches). But requests that were
waiting at the end of every turn since, while the load stayed above `OVERLOAD`, are an overload. It
is over when the load was below `CALM`: for a window in which the loop was busy, or for `CALM_TIME`
seconds.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from math import inf
from time import thread_time
from typing import TYPE_CHECKING, Any, Final

from seawall.context import current_criticality
from seawall.errors import DeadlineExceeded, Overloaded
from seawall.runtime.edge_events import OverloadChanged
from seawall.runtime.events import emit
from seawall.runtime.layers import Host, Wait
from seawall.runtime.mutex import survives_fork
from seawall.runtime.policy import GateBound
from seawall.runtime.slots import AnonymousSlots, Refusal, SlotWaiter, live_slots

if TYPE_CHECKING:
    from seawall.web.edge.admission import Turns

WINDOW: Final = 0.25
"""Seconds over which load and cost are measured."""

OVERLOAD: Final = 1.5
"""Load above which a standing queue is an overload.

Where 25 requests of 10 ms fit into a window, 38 come by chance in one window of 150.
"""

CALM: Final = 1.25
"""Load below which a window is calm."""

CALM_TIME: Final = 1.0
"""Seconds of calm windows after which an overload is over, if the loop rested in them.

Clients that pause for a moment all come back at once, and it takes three windows to know an
overload: meanwhile a queue would stand. A calm window in which the loop was busy is no pause.
"""

BURST_WINDOWS: Final = 1
"""Whole windows for which a queue may stand before its load is judged: a burst takes a moment."""

IDLE: Final = 0.5
"""Load below which the loop is idle: the queue that forms next is taken to be a burst."""

OVERLOAD_WAIT: Final = 1.5
"""During overload, a request waits for no longer than so many requests compute."""

BUSY_WAIT: Final = 4.0
"""In a busy loop, a request waits at least for as long as so many requests compute."""

CHEAP_SLICE: Final = 0.05
"""Seconds for which a turn of cheap requests may last."""

CHEAP_WAIT: Final = 0.25
"""Seconds for which cheap requests wait while the loop is busy: hundreds of clients at once."""

HOPS: Final = 3
"""Iterations of the loop from the end of a turn to the choice of who is next in the queue.

In the first the sockets are read, in the second the tasks of those requests run and join the queue.
"""

UNWATCHED: Final = 0.02
"""Seconds for which cheap requests begin without being watched."""

TURNS_AHEAD: Final = 2
"""During overload, no more requests wait than begin in so many turns: the next is never empty."""

MOST_WAITING: Final = 10_000
"""Maximum number of waiting requests, however cheap they are."""


class TurnsGate(GateBound):
    """The turns of one edge. Its slots are not held: each is the right to begin in one turn."""

    policy: Turns

    def __init__(self, policy: Turns, host: Host) -> None:
        super().__init__(policy, host)
        self.slots = _Rights(1, order="criticality", room=MOST_WAITING, discipline=self)
        self._now = host.clock.now
        self._start(None)
        survives_fork(self)

    def _start(self, loop: AbstractEventLoop | None) -> None:
        """Watch `loop`, of which nothing is known yet."""
        self._loop = loop
        self._queued = self.slots.queue._lanes
        """Not empty while requests wait. Cheaper to look at than the length of the queue."""
        self._turning = False
        """Whether a turn is under way."""
        self._dispatching = False
        """Whether a turn for waiting requests is about to begin."""
        self._open = False
        """Whether newcomers may join the turn under way."""
        self._began = self._busy_since = 0.0
        self._begun = 0
        self._stood = 0
        """Windows for which requests have been waiting at the end of every turn."""
        self.unwatched = -inf
        """Until when requests begin without being watched."""
        self.busy = 0.0
        """Busy share of the loop."""
        self.load = 0.0
        self.cost = self.policy.cheap
        """Processor time of the loop for one request."""
        self.strict = False
        """Whether the loop is overloaded."""
        self._calm = 0.0
        """Seconds for which windows have been calm."""
        self._burst = True
        """Whether the queue is a burst: the loop was idle when it formed, which is not long ago."""
        self._cheap = False
        self._slice = self.policy.slice
        self._earlier = 0.0, 0
        """Processor time and requests of the window before."""
        self._open_window(self._now())

    def _open_window(self, now: float) -> None:
        self._window, self._cpu = now, thread_time()
        self._took = 0.0
        self.served = 0
        self._held_back = 0
        """Requests that came in this window less those that began in it."""
        self._emptied = not self._queued
        """Whether at some moment of this window nobody waited."""

    def enter(self, now: float) -> None:
        """Begin if the turn has time left and nobody goes first; else wait."""
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
        """Begin in a watched turn; False if it has no time left, or others go first.

        Then nothing has begun, and a turn for waiting requests follows.
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
            if self.strict:  # refuse first whom this turn has no time for, then compute
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

    def full(self) -> bool:
        """Whether to refuse a newcomer at once: enough requests of its criticality wait already.

        Called during overload only. To let it wait in order to refuse it costs more.
        """
        if self.policy.mode != "enforce" or get_running_loop() is not self._loop:
            return False
        rank, waiting = current_criticality(), 0
        for (other, _), lane in self._queued.items():
            if other >= rank:
                waiting += len(lane)
        if waiting < TURNS_AHEAD * self._batch():
            return False
        self._held_back += 1
        return True

    def _batch(self) -> int:
        """Return how many waiting requests begin in one turn."""
        return max(1, int(self._slice / max(self.cost, 1e-6)))

    def _longest_wait(self) -> float:
        """Return for how long a request that comes now may wait."""
        policy = self.policy
        if self.strict:
            return max(policy.slice, OVERLOAD_WAIT * self.cost)
        if self._burst:
            return policy.patience
        return max(policy.target, CHEAP_WAIT if self._cheap else BUSY_WAIT * self.cost)

    def _adopt(self, loop: AbstractEventLoop) -> bool:
        """Watch `loop` from now on, unless another one is being watched."""
        known = self._loop
        if known is not None and known.is_running():
            return False
        self._start(loop)
        return True

    def turned_away(self, why: Refusal) -> None:
        """Refuse a request that waited in vain."""
        if why == "deadline":
            message = f"guard {self.host.name!r}: the deadline passed while waiting for a turn"
            self.refuse(DeadlineExceeded(message))
            return
        message = f"guard {self.host.name!r}: the event loop has more to do than it gets done"
        error = Overloaded(message, retry_after=max(self.cost, 0.001))
        error.reason = "shed_by_turns"
        try:
            self.refuse(error)
        finally:
            del error

    # At the end of each turn

    def _end(self) -> None:
        """Measure the turn, and let waiting requests begin."""
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
            # Also if nobody waits yet: what came during a long turn is still in the sockets.
            self._dispatching = True
            self._later(HOPS)
        elif self._cheap:
            self.unwatched = now + UNWATCHED

    def _measure(self, now: float) -> None:
        """Close the window: judge by its load and cost whether the loop is overloaded."""
        passed = now - self._window
        burnt = self._weigh(now)
        self.busy = min(1.0, max(self._took, burnt) / passed)
        self.load = self.busy * (1.0 + self._held_back / max(1, self.served))
        self._cheap = self.cost < self.policy.cheap
        self._slice = CHEAP_SLICE if self._cheap else self.policy.slice
        self._stood = 0 if self._emptied else self._stood + 1
        stands = self._stood > BURST_WINDOWS
        if stands or not self._queued:
            self._burst = self.load < IDLE
        self._calm = 0.0 if self.load > CALM else self._calm + passed
        if self.strict:
            suspect = self._calm < (CALM_TIME if self.busy < IDLE else WINDOW)
        else:
            suspect = stands and self.load > OVERLOAD
        overloaded = suspect and not self._cheap
        if overloaded is not self.strict:
            self.strict = overloaded
            load = round(self.load, 3)
            emit(OverloadChanged, self.host.name, overloaded=overloaded, load=load)
        self._earlier = burnt, self.served
        self._open_window(now)

    def _weigh(self, now: float) -> float:
        """Measure the cost of a request over this window and the one before; return this one's."""
        # Of a long rest only the last moments count: most of it was spent on other things.
        burnt = (thread_time() - self._cpu) * min(1.0, WINDOW / max(1e-9, now - self._window))
        seconds, requests = self._earlier
        if requests + self.served:
            self.cost = (seconds + burnt) / (requests + self.served)
        return burnt

    def _later(self, hops: int) -> None:
        """Let the loop read its sockets first, so that newcomers have joined the queue."""
        loop = get_running_loop()
        if hops:
            loop.call_soon(self._later, hops - 1)
        else:
            self._dispatch(loop)

    def _dispatch(self, loop: AbstractEventLoop) -> None:
        """Begin a turn of waiting requests, if there are any."""
        self._dispatching = False
        if not self._queued:
            return
        now = self._now()
        if self.strict:
            self._refuse(now)  # first, so that nobody computes before they are answered
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
        loop.call_soon(self._end)  # after those that have just been let in

    def _refuse(self, now: float) -> None:
        """Refuse requests that have waited for too long, the least critical first."""
        slots, longest = self.slots, self._longest_wait()
        with slots.mutex:
            while len(slots.queue) > 1 and slots._longest_wait(now) > longest:
                victim = slots.queue.pop_lowest()
                if victim is not None:
                    victim.turn_away("shed")

    # What the queue asks

    def newest_first(self, now: float) -> bool:
        """Serve the newest first during overload."""
        return self.strict

    def refuses(self, waiting: int, sojourn: float, now: float) -> bool:
        """Leave that to `full`."""
        return False

    def sheds(self, sojourn: float, now: float) -> bool:
        """Leave that to the start of each turn."""
        return False

    def serves(self, now: float) -> None:
        """Ignore it: turns are counted."""

    def emptied(self, now: float) -> None:
        """Ignore it."""

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return how busy the loop is, what a request costs it, and how many wait."""
        return {
            **super().snapshot(now),
            "busy": self.busy,
            "load": self.load,
            "cost": self.cost,
            "strict": self.strict,
            "waiting": self.slots.waiting,
        }

    def _after_fork(self) -> None:
        """Start again in a child process: its loop is another."""
        self._start(None)


class _TurnWaiter(SlotWaiter):
    """A request that waits for a turn."""

    __slots__ = ()

    def _give_up(self) -> None:
        self._leave_queue()  # a turn that was granted is lost, not handed on: the next comes soon


class _Rights(AnonymousSlots):
    """The right to begin, which is given one by one and never comes back."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(limit, **options)
        self.free.clear()
        live_slots.discard(self)  # none of them is held

    def _after_fork(self) -> None:
        super()._after_fork()
        self.free.clear()
