"""The limits of one policy: checked, taken and waited for under one lock."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from seawall._forks import survives_fork
from seawall.policies.rate_limit.meter import SHUT, Meter
from seawall.policies.rate_limit.reservation import Charge
from seawall.policies.rate_limit.waiting import KeyQueue
from seawall.runtime.mutex import Mutex, Nesting

if TYPE_CHECKING:
    from seawall.policies.rate_limit.waiting import RateWaiter


class Blocked(NamedTuple):
    """Why a call cannot go now."""

    first: Charge
    """The first limit that is exceeded, in the order in which they were given."""
    longest: Charge
    """The limit with the longest wait."""
    wait: float | None
    """Minimum wait in microseconds; None if the call can never go."""


class Meters:
    """The limits of one policy, checked and taken together: `with meters.mutex, meters:`.

    Entering the block closes the lock-free success path; leaving it opens the path again.
    """

    def __init__(self, meters: Sequence[Meter], max_waiting: int) -> None:
        """Allow up to `max_waiting` waiters, for all limits and keys together."""
        self.all = tuple(meters)
        self.max_waiting = max_waiting
        self.waiting = 0
        self.numbers = count()
        """Sequence numbers of waiters: a lower number began to wait earlier."""
        self._latest = float("-inf")
        self._nesting = Nesting()
        self.mutex = Mutex()
        survives_fork(self)

    def __enter__(self) -> None:
        self._nesting.enter()
        for meter in self.all:
            meter.slack = SHUT

    def __exit__(self, *exc: object) -> None:
        # A nested section (a signal handler, a key's own comparison) opens nothing.
        if self._nesting.leave():
            for meter in self.all:
                if meter.plain:
                    meter.reopen()

    def do(self, work: Callable[[], None]) -> None:
        """Run `work` under the lock, or slightly later if this thread holds it: see `Mutex`."""

        def shut() -> None:
            with self:
                work()

        self.mutex.do(shut)

    def _after_fork(self) -> None:
        """Reset in a child process, which has none of the waiters of its parent."""
        self.mutex = Mutex()
        self._nesting = Nesting()
        self.waiting = 0
        for meter in self.all:
            meter.queues.clear()
            meter.reopen()

    def look(
        self, charges: Sequence[Charge], now: float, waiter: RateWaiter | None = None
    ) -> Blocked | None:
        """Return why the charges cannot all be taken now; None if they can."""
        for charge in charges:
            meter = charge.meter
            # Look up the place each time, since keys gain and lose room; a waiter keeps its place.
            if meter.limit.key is not None and (waiter is None or waiter.charge is not charge):
                charge.place = meter.place(charge.key, now)
            if meter.queues:
                self._pass_over(charge, now, waiter)
        first = longest = None
        most = 0.0
        for charge in charges:
            if not charge.cost:
                continue
            wait = charge.meter.wait(charge, now, waiter)
            if wait == 0:
                continue
            first = first or charge
            if wait is None:
                return Blocked(charge, charge, None)
            if longest is None or wait > most:
                longest, most = charge, wait
        return None if first is None or longest is None else Blocked(first, longest, most)

    def take(self, charges: Sequence[Charge], now: float) -> None:
        """Take all of the charges."""
        self._latest = max(self._latest, now)
        for charge in charges:
            if charge.cost:
                charge.meter.take(charge, now)

    def settle(self, charge: Charge, used: int, now: float) -> None:
        """Settle `charge` with the actual cost `used`."""
        if charge.meter.settle(charge, used, max(now, self._latest)):
            self.attend(charge.meter, charge.place)

    # Waiting

    def join(self, waiter: RateWaiter, charge: Charge) -> None:
        """Put `waiter` into the queue of `charge`, behind all that began to wait before it."""
        queue = charge.meter.queues.get(charge.place) or KeyQueue()
        waiter.wants = charge.cost
        queue.join(waiter)
        # Nothing is called from here on: a signal cannot leave a queue without a waiter.
        waiter.queue, waiter.charge = queue, charge
        charge.meter.queues[charge.place] = queue
        self.waiting += 1

    def part(self, waiter: RateWaiter) -> None:
        """Remove `waiter` from its queue and wake the next one."""
        charge = waiter.charge
        if charge is not None and self._remove(waiter):
            self.attend(charge.meter, charge.place)

    def _remove(self, waiter: RateWaiter) -> bool:
        """Remove `waiter` from its queue. Return whether it was the first."""
        queue, charge = waiter.queue, waiter.charge
        waiter.queue = waiter.charge = None
        if queue is None or charge is None or charge.meter.queues.get(charge.place) is not queue:
            return False  # in a child process its queue is gone
        first = queue.first is waiter
        del queue.waiters[waiter]
        queue.total -= waiter.wants
        self.waiting -= 1
        if not queue.waiters:
            del charge.meter.queues[charge.place]
        return first

    def _pass_over(self, charge: Charge, now: float, waiter: RateWaiter | None) -> None:
        """Remove late waiters at the front: a blocked event loop must not block others."""
        meter, place = charge.meter, charge.place
        passed = False
        while (queue := meter.queues.get(place)) is not None:
            first = queue.first
            if first is waiter or not first.is_late(now):
                break
            self._remove(first)
            passed = True
        if passed:
            self.attend(meter, place)

    def attend(self, meter: Meter, place: Hashable) -> None:
        """Wake the first waiter at `place`."""
        while (queue := meter.queues.get(place)) is not None:
            first = queue.first
            if first.wake():
                return
            self._remove(first)  # its caller is gone

    def attend_all(self) -> None:
        """Wake the first waiter of each queue: the settings have changed."""
        for meter in self.all:
            for place in list(meter.queues):
                self.attend(meter, place)
