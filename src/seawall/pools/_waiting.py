"""Who waits for a slot of a pool: for one that comes back, or for one of a resource being closed.

A resource is closed in its own event loop. That may end, or stand still, before it gets to it, and
nobody is told: so who waits looks after that now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any

from seawall.pools._closing import Closing
from seawall.pools._upkeep import LOOK_EVERY, Upkeep
from seawall.runtime.layers import Wait
from seawall.runtime.slots import WAITING, SlotWaiter


class PoolWaiter(SlotWaiter):
    """Waits for a slot that comes back, and keeps its place in the queue while it looks around."""

    __slots__ = ("_end", "_published")

    def __init__(self, *waiting: Any) -> None:
        """Wait as a `SlotWaiter` does, and wake up soon to look around."""
        super().__init__(*waiting)
        self._end = inf if self.until is None else self.until
        self.until = min(self._end, self.since + LOOK_EVERY)
        self._published = False

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queue; or be woken by another waker from now on."""
        if not self._published:
            self._published = True
            super().publish(wake)
            return
        with self._slots.mutex:
            self.wake = wake
            if self.state != WAITING:
                wake()

    def claim(self) -> Any:
        """Return the ticket, say why there is none, or raise `Wait` to go on waiting."""
        with self._slots.mutex:
            if self.state == WAITING:
                self._go_on()
        return super().claim()

    def _go_on(self) -> None:
        """Raise `Wait` unless the time is over: by its clock, or by how long it was waited for."""
        now = max(self.until or 0.0, self.clock.now())
        if now < self._end:
            self.until = min(self._end, now + LOOK_EVERY)
            raise Wait(self)


class ClosingWaiter(PoolWaiter):
    """Waits until a closing is over, to go on with its slot."""

    __slots__ = ("_closing",)

    def __init__(self, closing: Closing, *waiting: Any) -> None:
        """Wait for `closing`; the rest is as for any waiter."""
        super().__init__(*waiting)
        self._closing = closing

    def publish(self, wake: Callable[[], bool]) -> None:
        """Be woken when the closing is over."""
        if self._closing.wakes(wake):
            wake()

    def claim(self) -> Any:
        """Have the slot, or leave it to the closing and say why, or raise `Wait`."""
        if self._closing.done:
            return None
        self._go_on()
        self._closing.disown()
        return self._refuse(self._late)

    def abandon(self) -> None:
        """Leave the slot to the closing, or give it back."""
        self._closing.disown()


def waited(waiter: PoolWaiter, upkeep: Upkeep) -> Generator[PoolWaiter, Any, None]:
    """Wait for a slot, as steps, and look now and then after what ended loops have left."""
    while True:
        try:
            yield waiter
        except Wait:
            try:
                now = waiter.clock.now()
                if now >= upkeep.due:  # else somebody else has just looked
                    upkeep.look(now)
                    upkeep.slots.attend()  # a signal may have come as a slot was given back
            except BaseException:
                waiter.abandon()
                raise
        else:
            return
