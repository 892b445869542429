"""The mechanism of `Turns`: see `seawall.web.admission` for what it promises.

It looks after one event loop, the one that serves: requests that are served in another meanwhile
pass as if it were not there. When that loop has ended, the next one is looked after.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from math import exp
from time import thread_time
from typing import TYPE_CHECKING, Any, Final

from seawall.context import current_criticality
from seawall.errors import DeadlineExceeded, Overloaded
from seawall.runtime.layers import Host, Wait
from seawall.runtime.mutex import survives_fork
from seawall.runtime.policy import GateBound
from seawall.runtime.slots import Refusal, Slots, SlotWaiter, live_slots

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

CALM: Final = 0.7
"""Below this share of `busy` a queue that did not drain is taken to drain again."""

TURNS_AHEAD: Final = 2
"""Turns for which enough wait, while the queue does not drain: the next one is never empty."""

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
        self._now = host.clock.now
        self._begin_afresh(None)
        survives_fork(self)

    def _begin_afresh(self, loop: AbstractEventLoop | None) -> None:
        """Look after `loop`, of which nothing is known yet."""
        now = self._now()
        self._loop = loop
        self._turning = False
        """Whether a turn is under way."""
        self._dispatching = False
        """Whether a turn for those who wait is about to begin."""
        self._open = False
        """Whether the turn under way takes more requests."""
        self._began = 0.0
        self._begun = 0
        self._crowded = False
        """Whether somebody had to wait: then the loop does not idle before the next turn."""
        self._full = False
        """The same for the turn before."""
        self._took = 0.0
        self.served = 0
        self._ended = now
        self._due = float("-inf")
        """When turns are noted again, if nothing happens before."""
        self.unwatched = float("-inf")
        """Until when requests begin unseen: some turns are enough to know cheap ones by."""
        self._cpu = thread_time()
        self._all_burnt = self._all_served = 0.0
        self.share = 0.0
        """How much of the last moments the loop was busy."""
        self.cost = self.policy.cheap
        """What a request costs, in seconds of the loop's own processor time."""
        self.strict = False
        """Whether the queue does not drain."""
        self._slice = self.policy.slice
        self._wait = self.policy.patience

    def enter(self, now: float) -> None:
        """Begin, if the turn has time left and nobody is to go first."""
        if now < self.unwatched:
            self.served += 1
        elif not self.begins(now):
            if self.policy.mode != "enforce":
                self._begun += 1
                return
            self._crowded = self._crowded or self._turning or bool(self._queued)
            raise Wait(_TurnWaiter(self.slots, self.host.clock, now, self._wait, self.turned_away))

    def begins(self, now: float) -> bool:
        """Begin in a turn that is watched; False if it has no time left, or others go first.

        Then nothing has begun; while the queue does not drain, a turn for those who wait comes.
        """
        loop = get_running_loop()
        if loop is not self._loop and not self._adopt(loop):
            return True
        if not self._turning:
            if self._dispatching:
                return False
            if self.strict:  # who came with it is refused first, before anybody computes
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
        """Whether one more would only wait to be refused: enough who matter as much wait already.

        Then it is refused at once: to let it wait costs more than all else that is done for it.
        That it came is noted, as if it had waited.
        """
        if self.policy.mode != "enforce" or get_running_loop() is not self._loop:
            return False
        rank, waiting = current_criticality(), 0
        for (other, _), lane in self._queued.items():
            if other >= rank:
                waiting += len(lane)
        if waiting < TURNS_AHEAD * self._each_turn():
            return False
        self._crowded = True
        return True

    def _each_turn(self) -> int:
        """Return how many begin in one turn of those who wait."""
        return max(1, int(self._slice / max(self.cost, 1e-6)))

    def _adopt(self, loop: AbstractEventLoop) -> bool:
        """Look after `loop` from now on, unless another one is being looked after."""
        known = self._loop
        if known is not None and known.is_running():
            return False
        self._begin_afresh(loop)
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
        """Know what the turn took, and let others begin."""
        self._turning = False
        now = self._now()
        self._took += now - self._began
        self.served += self._begun
        if now < self._due and not self._crowded and not self.strict:
            return  # of short turns many are noted at once
        self._note(now)
        if self._queued:
            self._dispatching = True
            self._later(HOPS if self.strict else 0)

    def _note(self, now: float) -> None:
        """Know how busy the loop was, and what a request costs."""
        passed = max(1e-9, now - self._ended)
        cpu = thread_time()
        # Of a long rest only the end counts: what was computed meanwhile was not for requests.
        burnt = (cpu - self._cpu) * min(1.0, HORIZON / passed)
        took = passed if self._full else min(self._took, passed)
        fade = exp(-passed / HORIZON)
        busy = max(took, min(burnt, passed)) / passed
        self.share = self.share * fade + (1.0 - fade) * busy
        self._all_burnt = self._all_burnt * fade + burnt
        self._all_served = self._all_served * fade + self.served
        if self._all_served:
            self.cost = self._all_burnt / self._all_served
        self._cpu, self._ended, self._due = cpu, now, now + NOTE_EVERY
        self._took, self.served = 0.0, 0
        self._full, self._crowded = self._crowded, False
        self._judge(now)

    def _judge(self, now: float) -> None:
        """Tell whether the queue drains, and set what a turn and a wait may take."""
        policy = self.policy
        cheap = self.cost < policy.cheap
        self.strict = not cheap and self.share > policy.busy * (CALM if self.strict else 1.0)
        self._slice = CHEAP_SLICE if cheap else policy.slice
        self._wait = policy.patience
        if self.strict:
            self._wait = min(policy.patience, max(policy.slice, policy.scale * self.cost))
        if cheap and not self._queued:
            self.unwatched = now + UNSEEN

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
        now = self._now()
        if self.strict:
            self._refuse(now)  # first, so that nobody computes before they are told
        self._turning = True
        self._open = False
        self._began = now
        self._begun = 0
        for _ in range(self._each_turn()):
            if not self._queued:
                break
            self._begun += 1
            self.slots.give_back()
        loop.call_soon(self._end)  # after those who have just been let in

    def _refuse(self, now: float) -> None:
        """Refuse who has waited for too long, the least critical first."""
        slots = self.slots
        with slots.mutex:
            while len(slots.queue) > 1 and slots._longest_wait(now) > self._wait:
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
            "cost": self.cost,
            "strict": self.strict,
            "waiting": self.slots.waiting,
        }

    def _after_fork(self) -> None:
        """Begin anew in a child process: its loop is another."""
        self._begin_afresh(None)


class _TurnWaiter(SlotWaiter):
    """A request that waits for a turn."""

    __slots__ = ()

    def _give_up(self) -> None:
        self._leave_queue()  # a turn that was granted is lost, not handed on: the next comes soon


class _Rights(Slots):
    """The right to begin, which is given one by one and never comes back."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(limit, **options)
        self.free.clear()
        live_slots.discard(self)  # none of them is held

    def _after_fork(self) -> None:
        super()._after_fork()
        self.free.clear()
