"""When a request is begun: in turns of the event loop, so that a queue is seen and kept short.

The trap that this is about: a handler that computes without awaiting begins and ends in one turn of
the loop. However many wait, no two of them are ever in flight at once: the queue stands in the
loop's list of ready tasks and in the sockets, where no limit on calls at once can see it.

So `Turns` looks at time. Promises: a turn in which requests have computed for longer than `slice`
begins no more of them; who comes later waits for another turn, the sockets are read in between, and
the most critical is served first. While the loop has been busy for less than `busy` of the last
quarter of a second, that is all: nobody is refused before `patience` is over, since the queue will drain.
Above it the queue does not drain. Then the newest is served first, and who has waited for longer
than `scale` requests take (or `slice`, if that is more) is refused. Requests that cost less than
`cheap` are not worth refusing: to say no costs as much as to serve them. They share a turn of
up to `CHEAP_SLICE` and wait for up to `patience`.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from math import exp
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.context import current_criticality
from seawall.errors import Overloaded
from seawall.models.adaptive import vegas
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.shed import Shed
from seawall.runtime.layers import Host, Wait
from seawall.runtime.mutex import survives_fork
from seawall.runtime.policy import GateBound, GatePolicy, Mode
from seawall.runtime.slots import Refusal, Slots, SlotWaiter

HORIZON: Final = 0.25
"""Seconds over which it is known how busy the loop is and what requests cost."""

CHEAP_SLICE: Final = 0.05
"""Seconds for which a turn may last that serves cheap requests."""

MOST_WAITING: Final = 10_000
"""However cheap requests are, no more of them wait."""


class Turns(GatePolicy):
    """Begin requests in turns of the event loop; see above."""

    kind: ClassVar[str] = "turns"

    def __init__(
        self,
        *,
        slice: float = 0.005,  # noqa: A002 - of time, not of a list
        busy: float = 0.7,
        scale: float = 1.0,
        cheap: float = 0.001,
        patience: float = 0.25,
        mode: Mode = "enforce",
    ) -> None:
        """Let a turn last for `slice` seconds; see the module for the others."""
        super().__init__(mode)
        self.slice = check.seconds("slice", slice)
        self.busy = check.ratio("busy", busy)
        self.scale = check.at_least("scale", scale, 0.0)
        self.cheap = check.seconds("cheap", cheap, zero=True)
        self.patience = check.seconds("patience", patience)

    def __repr__(self) -> str:
        return (
            f"Turns(slice={self.slice:g}, busy={self.busy:g}, scale={self.scale:g},"
            f" cheap={self.cheap:g}, patience={self.patience:g})"
        )

    def _bind(self, host: Host) -> TurnsGate:
        return TurnsGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        names = ("slice", "busy", "scale", "cheap", "patience", "mode")
        self._reject_unknown(changes, names)
        fresh = Turns(**{name: changes.get(name, getattr(self, name)) for name in names})
        for name in names:
            setattr(self, name, getattr(fresh, name))


class TurnsGate(GateBound):
    """The turns of one edge. Its slots are not held: each is the right to begin in one turn."""

    policy: Turns

    def __init__(self, policy: Turns, host: Host) -> None:
        super().__init__(policy, host)
        self.slots = Slots(1, order="criticality", room=MOST_WAITING, discipline=self)
        self._begin_afresh()
        survives_fork(self)

    def _begin_afresh(self) -> None:
        self.slots.free.clear()
        self._loop: AbstractEventLoop | None = None
        """The loop whose turn is under way; None between turns."""
        self._began = 0.0
        self._begun = 0
        self._ended = float("-inf")
        self._full = False
        """Whether the turn before was crowded."""
        self._crowded = False
        """Whether somebody had to wait: then the loop does not idle before the next turn."""
        self._spent = 0.0
        self._served = 0.0
        self.share = 0.0
        """How much of the last quarter of a second the loop was busy."""
        self.cost = 0.0
        """What a request costs the loop, in seconds."""
        self.strict = False
        """Whether the queue does not drain."""
        self._slice = CHEAP_SLICE
        self._wait = self.policy.patience

    def enter(self, now: float) -> None:
        """Begin, if the turn has time left and nobody more important waits."""
        loop = get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._began = now
            self._begun = 1
            loop.call_soon(self._end)
            if not self.slots.queue or not self._outranked():
                return
            self._begun = 0
        elif now - self._began <= self._slice and not self.slots.queue:
            self._begun += 1
            return
        elif now - self._began <= self._slice and self.strict and not self._outranked():
            self._begun += 1
            return
        if self.policy.mode != "enforce":
            self._begun += 1
            return
        self._crowded = True
        raise Wait(SlotWaiter(self.slots, self.host.clock, now, self._wait, self._turned_away))

    def _outranked(self) -> bool:
        """Tell whether somebody waits who goes first: by rank, and in good times by age."""
        if not self.strict:
            return True
        rank = current_criticality()
        return any(waiter.rank > rank for waiter in self.slots.queue.oldest())

    def _turned_away(self, why: Refusal) -> None:
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
        now = self.host.clock.now()
        self._loop = None
        self._note(now)
        if self.slots.queue:
            if self.strict:
                self._refuse_late(now)
                self._later(2)
            else:
                self._admit(max(1, int(self._slice / max(self.cost, 1e-6))))

    def _note(self, now: float) -> None:
        took = max(0.0, now - self._began)
        idle = exp(-max(0.0, self._began - self._ended) / HORIZON)
        rest = exp(-took / HORIZON)
        share = 1.0 - (1.0 - self.share) * idle if self._full else self.share * idle
        self.share = 1.0 - (1.0 - share) * rest
        self._full, self._crowded = self._crowded, False
        fade = idle * rest
        self._spent = self._spent * fade + took
        self._served = self._served * fade + self._begun
        self._ended = now
        policy = self.policy
        if self._served:
            self.cost = self._spent / self._served
        cheap = self.cost < policy.cheap
        self._slice = CHEAP_SLICE if cheap else policy.slice
        self.strict = self.share > policy.busy and not cheap
        self._wait = max(policy.slice, policy.scale * self.cost) if self.strict else policy.patience
        room = self._wait / max(self.cost, 1e-6)
        self.slots.queue.limit = int(min(max(room, 1.0), MOST_WAITING))

    def _later(self, turns: int) -> None:
        """Look again after so many turns: by then who has just arrived has begun, or has not."""
        loop = get_running_loop()
        loop.call_soon(self._later, turns - 1) if turns else self._fill(loop)

    def _fill(self, loop: AbstractEventLoop) -> None:
        """Use a turn in which nobody new came for one who waits."""
        if self._loop is None and self.slots.queue:
            self._loop = loop
            self._began = self.host.clock.now()
            self._begun = 0
            loop.call_soon(self._end)
            self._admit(1)

    def _admit(self, number: int) -> None:
        for _ in range(number):
            if not self.slots.queue:
                break
            self._begun += 1
            self.slots.give_back()

    def _refuse_late(self, now: float) -> None:
        """Refuse who has waited for too long, the least critical first."""
        slots = self.slots
        with slots.mutex:
            while slots.queue and slots._longest_wait(now) > self._wait:
                victim = slots.queue.pop_lowest()
                if victim is not None:
                    victim.turn_away("shed")
            slots.serve()

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
        self._begin_afresh()


def default_concurrency() -> AdaptiveLimit:
    """Return the limit on requests at once that an app has unless told otherwise."""
    return AdaptiveLimit(
        vegas(alpha=1.0, beta=2.0, initial=20, minimum=1, maximum=1000), max_wait=1.0
    )


def default_shed() -> Shed | None:
    """Return the shedder that an app has unless told otherwise: none, `Turns` does it."""
    return None
