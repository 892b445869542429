"""The mechanism of `Turns`: see `seawall.web.admission` for what it promises."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from math import exp, inf
from time import process_time
from typing import TYPE_CHECKING, Any, Final

from seawall.errors import DeadlineExceeded, Overloaded
from seawall.runtime.layers import Host, Outcome, Wait
from seawall.runtime.mutex import survives_fork
from seawall.runtime.policy import GateBound
from seawall.runtime.slots import GRANTED, Refusal, Slots, SlotWaiter, live_slots

if TYPE_CHECKING:
    from seawall.web.admission import Turns

HORIZON: Final = 0.25
"""Seconds over which it is known how busy the loop is and what requests cost."""

CHEAP_SLICE: Final = 0.05
"""Seconds for which a turn may last that serves cheap requests."""

HOPS: Final = 3
"""Turns of the loop from the end of a request's computing to the choice of the next one.

In the first the sockets are read, in the second the tasks of those requests run and join the queue.
"""

NOTE_EVERY: Final = 0.005
"""Seconds of short turns that are noted together."""

UNSEEN: Final = 0.02
"""Seconds for which cheap requests begin unseen, until some are looked at again."""

LOOK_EVERY: Final = 0.02
"""Seconds after which the number of requests at once is looked at again."""

SATURATED: Final = 0.8
"""The share of a processor above which it is taken for fully used."""

IDLING: Final = 0.6
"""The share of a processor below which more requests at once would be served sooner."""

CALM: Final = 0.7
"""Below this share of `busy` a queue that did not drain is taken to drain again."""

FIRST: Final = 8.0
"""How many requests at once there may be at first: while the processor idles, ever more."""

MOST_WAITING: Final = 10_000
"""However cheap requests are, no more of them wait."""


class TurnsGate(GateBound):
    """The turns of one edge. Its slots are not held: each is the right to begin in one turn."""

    policy: Turns

    def __init__(self, policy: Turns, host: Host) -> None:
        super().__init__(policy, host)
        self.slots = _Rights(1, order="criticality", room=MOST_WAITING, discipline=self)
        self._queued = self.slots.queue._lanes
        """Not empty while somebody waits: to look at it costs less than to ask the queue."""
        self._begin_afresh()
        survives_fork(self)

    def _begin_afresh(self) -> None:
        self._loop: AbstractEventLoop | None = None
        """The loop whose turn is under way; None between turns."""
        self._began = self._began_cpu = 0.0
        self._begun = 0
        self._ended = self.host.clock.now() - HORIZON
        self._full = False
        """Whether the turn before was crowded."""
        self._crowded = False
        """Whether somebody had to wait: then the loop does not idle before the next turn."""
        self._dispatching = False
        """Whether a turn for those who wait is about to begin."""
        self._due = float("-inf")
        """When turns are noted again, if nothing happens before."""
        self._took = self._computed = 0.0
        self._served = self._watched = 0
        self._all_computed = self._all_burnt = self._all_served = self._all_watched = 0.0
        self._unwatched = float("-inf")
        """Until when requests begin unseen: some turns are enough to know cheap ones by."""
        self._cpu = process_time()
        self._now = self.host.clock.now
        self._window = (float("-inf"), 0.0)
        """When the limit was last looked at, and the processor time by then."""
        self.share = 0.0
        """How much of the last moments the loop was busy."""
        self.cpu_share = 0.0
        """How much of a processor the process has used in these."""
        self.cost = self.policy.cheap
        """What a request costs, in seconds: of the loop, or of the processor if that is more."""
        self.inside = 0
        """How many are being served."""
        self.most = FIRST
        """How many may be, unless they are cheap."""
        self._cap = FIRST
        self._open = False
        """Whether the turn under way takes more of them."""
        self._held_back = False
        """Whether that limit made somebody wait."""
        self._timer: tuple[AbstractEventLoop, Any] | None = None
        self.strict = False
        """Whether the queue does not drain."""
        self._slice = CHEAP_SLICE
        self._wait = self.policy.patience

    def enter(self, now: float) -> None:
        """Begin, if the turn has time left and nobody is to go first."""
        if now < self._unwatched:
            self.inside += 1
            self._served += 1
            return
        loop = get_running_loop()
        if self._loop is not loop:
            if self.inside < self._cap and not self._dispatching:
                self._loop = loop
                self._began, self._began_cpu = now, process_time()
                self._begun = 1
                self.inside += 1
                self._open = not self.strict and self.inside < self._cap
                loop.call_soon(self._end)
                return
        elif self._open and now - self._began <= self._slice and not self._queued:
            self._begun += 1
            self.inside += 1
            self._open = not self.strict and self.inside < self._cap
            return
        if self.policy.mode != "enforce":
            self._begun += 1
            self.inside += 1
            return
        self._crowded = True
        if self._timer is None or self._timer[0] is not loop:
            self._timer = loop, loop.call_later(LOOK_EVERY, self._tick)
        raise Wait(_TurnWaiter(self, now))

    def leave(self, ticket: None, outcome: Outcome, detail: object, now: float) -> None:
        """Count it out; if that is what others wait for, they are next."""
        self.inside -= 1
        if self._queued and self._loop is None and not self._dispatching:
            self._dispatch_soon()

    def turned_away(self, why: Refusal) -> None:
        """Refuse a request that waited in vain."""
        if why == "deadline":
            message = f"guard {self.host.name!r}: the deadline passed while waiting for a turn"
            self.refuse(DeadlineExceeded(message))
        else:
            self.refuse(self._overloaded())

    def _overloaded(self) -> Overloaded:
        message = f"guard {self.host.name!r}: the event loop has more to do than it gets done"
        error = Overloaded(message, retry_after=max(self.cost, 0.001))
        error.reason = "shed_by_turns"
        return error

    # At the end of each turn

    def _end(self) -> None:
        """Know what the turn took, and let others begin."""
        self._loop = None
        now = self._now()
        took = now - self._began
        self._took += took
        # On a busy machine others take time from a turn, which is not the requests' doing.
        self._computed += min(took, process_time() - self._began_cpu)
        self._served += self._begun
        self._watched += self._begun
        if now < self._due and not self._crowded and not self.strict:
            return  # of short turns many are noted at once
        self._note(now)
        if self.strict or self.slots.queue:
            self._dispatch_soon()

    def _note(self, now: float) -> None:
        """Know how busy the loop and the processor were, and what a request costs."""
        passed = max(1e-9, now - self._ended)
        took = passed if self._full else min(self._took, passed)
        cpu = process_time()
        burnt = cpu - self._cpu
        fade = exp(-passed / HORIZON)
        self.share = self.share * fade + (1.0 - fade) * took / passed
        self.cpu_share = self.cpu_share * fade + (1.0 - fade) * burnt / passed
        self._all_computed = self._all_computed * fade + self._computed
        self._all_burnt = self._all_burnt * fade + burnt
        self._all_served = self._all_served * fade + self._served
        self._all_watched = self._all_watched * fade + self._watched
        if self._all_watched:
            of_the_loop = self._all_computed / self._all_watched
            self.cost = max(of_the_loop, self._all_burnt / self._all_served)
        self._cpu, self._ended, self._due = cpu, now, now + NOTE_EVERY
        self._took = self._computed = 0.0
        self._served = self._watched = 0
        self._full, self._crowded = self._crowded, False
        self._judge(now, cpu)

    def _judge(self, now: float, cpu: float) -> None:
        """Tell whether the queue drains, and set what a turn and a wait may take."""
        policy = self.policy
        was, cheap = self.strict, self.cost < policy.cheap
        busy = max(self.share, self.cpu_share / policy.cores)
        self.strict = not cheap and busy > (CALM * policy.busy if was else policy.busy)
        self._slice = CHEAP_SLICE if cheap else policy.slice
        self._wait = max(policy.slice, policy.scale * self.cost) if self.strict else policy.patience
        self._look(now, cpu)
        self._cap = inf if cheap else self.most
        if cheap and not self.slots.queue:
            self._unwatched = now + UNSEEN

    def _look(self, now: float, cpu: float) -> None:
        """Allow as few at once as keep the processor busy: more only make each other late."""
        since, then = self._window
        if now - since < LOOK_EVERY:
            return
        self._window = now, cpu
        used = (cpu - then) / (now - since) / self.policy.cores
        if used > SATURATED:
            self.most = max(1.0, min(self.most, self.inside) / 2)
        elif used < IDLING and self._held_back:
            self.most = max(self.most + 1.0, min(2.0 * self.most, 2.0 * self.inside))
        self._held_back = False

    def _tick(self) -> None:
        """Look again, for as long as somebody waits: it may be only the limit that holds them."""
        self._timer = None
        queue = self.slots.queue
        if not queue:
            return
        loop = get_running_loop()
        self._timer = loop, loop.call_later(LOOK_EVERY, self._tick)
        if self._loop is None and not self._dispatching:
            self._held_back = self._held_back or self.inside >= self._cap
            self._look(self.host.clock.now(), process_time())
            self._cap = inf if self.cost < self.policy.cheap else self.most
            self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        self._dispatching = True
        self._later(HOPS if self.strict else 0)

    def _later(self, hops: int) -> None:
        """Let the loop read its sockets first: by then who has arrived meanwhile has joined."""
        loop = get_running_loop()
        if hops:
            loop.call_soon(self._later, hops - 1)
        else:
            self._dispatch(loop)

    def _dispatch(self, loop: AbstractEventLoop) -> None:
        """Begin a turn for those who wait; refuse those for whom it will be too late."""
        self._dispatching = False
        queue = self.slots.queue
        if self._loop is not None or not queue:
            return
        now = self.host.clock.now()
        number = max(1, int(self._slice / max(self.cost, 1e-6)))
        number = int(min(number, max(0.0, self._cap - self.inside)))
        if self.strict:
            # First, so that nobody computes before they are told.
            self._refuse(now, number)
        if not number:
            self._held_back = True
            return
        self._loop = loop
        self._began, self._began_cpu = now, process_time()
        self._begun = 0
        for _ in range(number):
            if not queue:
                break
            self._begun += 1
            self.slots.give_back()
        loop.call_soon(self._end)  # after those who have just been let in

    def _refuse(self, now: float, number: int) -> None:
        """Refuse who has waited for too long, the least critical first."""
        slots = self.slots
        with slots.mutex:
            while len(slots.queue) > max(number, 1) and slots._longest_wait(now) > self._wait:
                victim = slots.queue.pop_lowest()
                if victim is not None:
                    victim.turn_away("shed")

    # What the queue asks

    def newest_first(self, now: float) -> bool:
        """Serve the newest first while the queue does not drain."""
        return self.strict

    def sheds(self, sojourn: float, now: float) -> bool:
        """Leave that to the end of each turn."""
        return False

    def emptied(self, now: float) -> None:
        """Learn nothing from it."""

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return how busy the loop is, what requests cost it, and who waits."""
        return {
            **super().snapshot(now),
            "busy": self.share,
            "cpu": self.cpu_share,
            "inside": self.inside,
            "cost": self.cost,
            "strict": self.strict,
            "waiting": self.slots.waiting,
        }

    def _after_fork(self) -> None:
        """Begin anew in a child process: its loop is another."""
        self._begin_afresh()


class _Rights(Slots):
    """The right to begin, which is given one by one and never comes back."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(limit, **options)
        self.free.clear()
        live_slots.discard(self)  # none of them is held

    def _after_fork(self) -> None:
        super()._after_fork()
        self.free.clear()


class _TurnWaiter(SlotWaiter):
    """A request that waits for a turn; it is counted in when it has one."""

    __slots__ = ("_gate",)

    def __init__(self, gate: TurnsGate, now: float) -> None:
        clock = gate.host.clock
        super().__init__(gate.slots, clock, now, gate._wait, gate.turned_away)
        self._gate = gate

    def grant(self) -> bool:
        """Receive a turn; False if nobody is there to use it."""
        there = super().grant()
        self._gate.inside += there
        return there

    def _give_up(self) -> None:
        # The turn is lost, not handed on: the next one comes soon.
        if self._leave_queue() == GRANTED:
            self._gate.inside -= 1
