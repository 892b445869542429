"""Waiters for a slot of a pool: one that is returned, or that of a resource being closed.

A resource is closed in its own event loop. That loop may end or stop before it closes the resource,
without any notification, so waiters check for that periodically.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any

from seawall.resources.pool.closing import Closing
from seawall.resources.pool.upkeep import LOOK_EVERY, Upkeep
from seawall.runtime.layers import Wait
from seawall.runtime.slots import WAITING, SlotWaiter


class PoolWaiter(SlotWaiter):
    """Waits for a returned slot, and keeps its place in the queue during periodic checks."""

    __slots__ = ("_end", "_published")

    def __init__(self, *waiting: Any) -> None:
        super().__init__(*waiting)
        self._end = inf if self.until is None else self.until
        self.until = min(self._end, self.since + LOOK_EVERY)
        self._published = False

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queue; on later calls, only replace the waker."""
        if not self._published:
            self._published = True
            super().publish(wake)
            return
        with self._slots.mutex:
            self.wake = wake
            if self.state != WAITING:
                wake()

    def claim(self) -> Any:
        """Return the ticket or the refusal, or raise `Wait` to go on waiting."""
        with self._slots.mutex:
            if self.state == WAITING:
                self._go_on()
        return super().claim()

    def _go_on(self) -> None:
        """Raise `Wait` unless the time is over, by the clock or by the time waited for."""
        now = max(self.until or 0.0, self.clock.now())
        if now < self._end:
            self.until = min(self._end, now + LOOK_EVERY)
            raise Wait(self)


class ClosingWaiter(PoolWaiter):
    """Waits for the end of a closing, to take over its slot."""

    __slots__ = ("_closing",)

    def __init__(self, closing: Closing, *waiting: Any) -> None:
        super().__init__(*waiting)
        self._closing = closing

    def publish(self, wake: Callable[[], bool]) -> None:
        """Register to be woken when the closing is over."""
        if self._closing.wakes(wake):
            wake()

    def claim(self) -> Any:
        """Take the slot, or leave it to the closing and refuse, or raise `Wait`."""
        if self._closing.done:
            return None
        self._go_on()
        self._closing.disown()
        return self._refuse(self._late)

    def abandon(self) -> None:
        """Leave the slot to the closing, or give it back."""
        self._closing.disown()


def waited(waiter: PoolWaiter, upkeep: Upkeep) -> Generator[PoolWaiter, Any, None]:
    """Wait for a slot, as steps, and periodically clean up after loops that have ended."""
    while True:
        try:
            yield waiter
        except Wait:
            try:
                now = waiter.clock.now()
                if now >= upkeep.due:  # otherwise another borrower has just done the upkeep
                    upkeep.look(now)
                    upkeep.slots.attend()  # a signal may have interrupted the return of a slot
            except BaseException:
                waiter.abandon()
                raise
        else:
            return
