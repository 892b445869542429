"""A number of slots, and who waits for one: what bulkheads, adaptive limits and pools share.

Promises: no more slots are out than `limit` (after it was lowered, than are still out); a slot that
comes back while somebody waits goes to who is next in the queue; a waiter that is cancelled or late
takes nothing with it; threads and tasks of any loop share the slots and wake each other; a slot
that nobody holds any more and that never came back (a signal handler raised just then) is found.

In one thread nobody overtakes. Of several threads, one that comes in the very moment between a slot
being put back and being handed on may take it: that one is served out of turn, and who is next gets
the next slot. A lock for each call would be the price of preventing it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, Protocol
from weakref import WeakSet, ref

from seawall.clock import Clock
from seawall.context import current_criticality, give_up_at
from seawall.models.smoothing import Ewma
from seawall.models.waiting import Order, WaitQueue
from seawall.runtime.mutex import Mutex, survives_fork

Refusal = Literal["no room", "too long", "impatient", "deadline", "shed"]
"""Why a waiter gets no slot: the queue is full, its time or deadline is over, or it was shed."""

RECENT: Final = 1.0
"""Seconds for which the wait of the last served caller stands for the wait of the queue."""

AVERAGED: Final = 5.0
"""The half-life of the average wait, in seconds."""

WAITING: Final = "waiting"
GRANTED: Final = "granted"


live_slots: Final[WeakSet[Slots]] = WeakSet()
"""All there are, for those who look for slots that nobody gave back."""


class Discipline(Protocol):
    """What is decided each time somebody joins the queue or is served. It is called in turn."""

    def refuses(self, waiting: int, sojourn: float, now: float) -> bool:
        """Tell whether a newcomer, behind `waiting` others, has to go at once."""

    def newest_first(self, now: float) -> bool:
        """Tell whether the newest is to be served next, not the one that waits longest."""

    def sheds(self, sojourn: float, now: float) -> bool:
        """Tell whether somebody has to go, when the longest waiting has waited for `sojourn`."""

    def serves(self, now: float) -> None:
        """Learn that one of those who wait is served."""

    def emptied(self, now: float) -> None:
        """Learn that nobody waited any more."""


class Slot:
    """One slot: an item of the deque while it is free, the ticket of a call while it is taken.

    When nobody refers to it any more, it was lost: its holder is gone, and never gave it back.
    """

    __slots__ = ("began", "kind", "slots")

    began: float
    """When its call began, where that is of interest."""
    kind: Any
    """What kind of call has it, where there are kinds."""

    def __init__(self, slots: Callable[[], Slots | None]) -> None:
        """Belong to `slots()`."""
        self.slots = slots
        self.kind = None

    def __del__(self) -> None:
        slots = self.slots()
        if slots is not None:
            slots.recover(self)


def _nowhere() -> None:
    """Stand for the slots of a slot that was withdrawn."""


class Slots:
    """`limit` slots, and a queue for them. Free slots are the items of a deque.

    Its `pop` and `append` are atomic, with or without a global interpreter lock, so taking a slot
    and giving it back need no lock while nobody waits: `free.pop()`, and `free.append(slot)`
    followed by `attend()` if `attention` is set, in this order.
    """

    anonymous = False
    """Whether slots are None: where the holder of one is known in another way."""

    def __init__(
        self,
        limit: int,
        *,
        order: Order = "fifo",
        room: int | None = None,
        discipline: Discipline | None = None,
        owner: object = None,
    ) -> None:
        """Have `limit` free slots, and room for `room` to wait: `limit` of them if it is None.

        `owner` is whose slots they are.
        """
        self.limit = limit
        self.room = room
        self.discipline = discipline
        self.fits: Callable[[SlotWaiter], bool] | None = None
        """Whether a waiter may have a free slot now, by its kind; if None, anyone may.

        Asked under the lock.
        """
        self.lost: Callable[[Any], None] | None = None
        """Told, under the lock, of which kind the call was that lost its slot."""
        self.queue: WaitQueue[SlotWaiter] = WaitQueue(order, limit if room is None else room)
        self.mutex = Mutex()
        self._myself = ref(self)
        self.free: deque[Any] = deque(self._new() for _ in range(limit))
        self.recovered = 0
        """How many slots were lost by their holders, and found."""
        self.attention = False
        """True while someone waits or slots are to be withdrawn: giving back takes the slow way."""
        self._excess = 0
        self._waits = Ewma(AVERAGED)
        self._last_wait = (float("-inf"), 0.0)
        # True in a child process: a call that came along by the fork may give back a slot too many.
        self._forked = False
        self.owner: Callable[[], object] = (lambda: None) if owner is None else ref(owner)
        survives_fork(self)
        live_slots.add(self)

    @property
    def in_use(self) -> int:
        """How many slots are out now."""
        return max(0, self.limit + self._excess - len(self.free))

    @property
    def waiting(self) -> int:
        """How many wait for a slot now."""
        return len(self.queue)

    def queue_wait(self, now: float) -> float:
        """Return for how long the longest waiting has waited by now."""
        with self.mutex:
            oldest = min((waiter.since for waiter in self.queue.oldest()), default=now)
            return max(0.0, now - oldest)

    def recent_wait(self, now: float) -> float:
        """Return the longer of `queue_wait` and what the last to leave the queue had waited."""
        at, waited = self._last_wait
        return max(self.queue_wait(now), waited if now - at <= RECENT else 0.0)

    def average_wait(self, now: float) -> float:
        """Return how long those who had to wait did so of late, on average."""
        present = self.queue_wait(now)
        with self.mutex:
            return self._waits.preview(present, now)

    def note_wait(self, since: float, now: float) -> None:
        """Note how long somebody who leaves the queue has waited. Under the lock."""
        waited = max(0.0, now - since)
        self._last_wait = (now, waited)
        self._waits.update(waited, now)

    def _new(self) -> Slot | None:
        return None if self.anonymous else Slot(self._myself)

    def recover(self, lost: Slot) -> None:
        """Have another slot for one whose holder is gone; from a finaliser, at any moment."""
        self.recovered += 1
        if self.lost is not None:
            self.mutex.do(partial(self.lost, lost.kind))
        self.give_back(self._new())

    def take(self) -> Any:
        """Take a free slot, if there is one, or return None. While others wait there is none."""
        try:
            return self.free.pop()
        except IndexError:
            return None

    def give_back(self, slot: Slot | None = None) -> None:
        """Give a slot back, to whoever is next."""
        self.free.append(slot)
        # In this order: who joins the queue sets the flag first and looks at the slots after.
        if self.attention:
            self.attend()

    def attend(self) -> None:
        """Look after withdrawn slots and waiters; safe at any moment."""
        self.mutex.do(self.serve)

    def resize(self, limit: int, room: int | None) -> None:
        """Have `limit` slots from now on. What is out beyond it is withdrawn as it comes back."""
        with self.mutex:
            self.room, self.queue.limit = room, limit if room is None else room
            self._excess += self.limit - limit
            self.limit = limit
            while self._excess < 0:
                self._excess += 1
                self.free.append(self._new())
            self.serve()

    def _withdraw(self) -> bool:
        """Have one slot less, if one is free."""
        try:
            slot = self.free.pop()
        except IndexError:
            return False
        if slot is not None:
            slot.slots = _nowhere
        return True

    def serve(self) -> None:
        """Withdraw slots that are too many, then hand free ones to who waits. Under the lock."""
        while self._excess > 0 and self._withdraw():
            self._excess -= 1
        while len(self.free) > self.limit:  # a call that a fork took along gave its slot back
            self._withdraw()
        while self.queue and self.free:
            try:
                slot = self.free.pop()
            except IndexError:
                break  # another thread was faster
            waiter = self._next()
            if waiter is None:
                self.free.append(slot)
                break
            # Since it left the queue nothing was called: no signal can have lost it.
            waiter.slot = slot
            waiter.state = GRANTED
            try:
                there = waiter.grant()
            except BaseException:
                waiter.wake()
                raise
            if not there:
                waiter.state, waiter.slot = "gone", None
                self.free.append(slot)
        self.attention = bool(self.queue) or self._excess > 0 or self._forked

    def _next(self) -> SlotWaiter | None:
        """Take out of the queue whom to serve: None if nobody who waits may have a slot now.

        By its discipline it first sheds as many as have to go, the least critical first; never
        the last one, for nobody would be served sooner for it.
        """
        discipline = self.discipline
        if discipline is None:
            return self.queue.pop(fits=self.fits)
        now = self.queue.oldest()[0].clock.now()
        while len(self.queue) > 1 and discipline.sheds(self._longest_wait(now), now):
            victim = self.queue.pop_lowest()
            if victim is not None and not self._turn_away(victim, "shed"):
                break
        # Where several classes wait it is the lowest that stands: the others keep their order.
        alone = len(self.queue.oldest()) == 1
        waiter = self.queue.pop(fits=self.fits, newest=alone and discipline.newest_first(now))
        if waiter is not None:
            try:
                discipline.serves(now)
            except BaseException:  # a signal: it goes on waiting
                self.queue.push(waiter, waiter.rank, waiter.kind, always=True)
                raise
        return waiter

    def _longest_wait(self, now: float) -> float:
        """Return how long the longest waiting of all has waited.

        Where the most critical are served first, whoever is next has hardly waited, and where the
        newest are, nobody has: by their wait no queue would ever be seen to stand.
        """
        return max(0.0, now - min(waiter.since for waiter in self.queue.oldest()))

    def join(self, waiter: SlotWaiter) -> None:
        """Let `waiter` wait, if there is room. A queue begins anew with who finds it empty."""
        with self.mutex:
            shed = self.discipline is not None and self._refuses(self.discipline, waiter.since)
            self.attention = True
            turned_away = self.queue.push(
                waiter, waiter.rank, waiter.kind, always=waiter.readmitted, full=shed
            )
            if turned_away is not None:
                self._turn_away(turned_away, "shed" if shed else "no room")
            self.serve()

    def _refuses(self, discipline: Discipline, now: float) -> bool:
        """Tell whether the discipline refuses a new arrival."""
        waiting = len(self.queue)
        if waiting:
            return discipline.refuses(waiting, self._longest_wait(now), now)
        discipline.emptied(now)
        return False

    def _turn_away(self, waiter: SlotWaiter, why: Refusal) -> bool:
        """Refuse a waiter that left the queue; False if it must stay in it. Under the lock."""
        if waiter.readmitted:
            self.queue.push(waiter, waiter.rank, waiter.kind, always=True)
            return False
        waiter.turn_away(why)
        return True

    def leave_queue(self, waiter: SlotWaiter) -> None:
        """Take `waiter` out of the queue, and serve those it held up. Under the lock."""
        self.queue.remove(waiter)
        self.serve()

    def _after_fork(self) -> None:
        """Be usable in a child process: slots of threads that are gone are free again."""
        self.mutex = Mutex()
        self.queue = WaitQueue(self.queue.order, self.queue.limit)
        self._excess = 0
        self._forked = self.attention = True
        self.free.extend(self._new() for _ in range(self.limit - len(self.free)))


class AnonymousSlots(Slots):
    """Slots that are only counted: where the holder of one is known in another way."""

    anonymous = True

    def take(self) -> bool:
        """Take a free slot, if there is one. While others wait there is none."""
        try:
            self.free.pop()
        except IndexError:
            return False
        return True


class SlotWaiter:
    """One call waiting for a slot. Its state changes under the lock of the slots only.

    It claims a slot; without one, `refuse(why)` raises, or returns a ticket where the limit is not
    enforced.
    """

    __slots__ = (
        "_late",
        "_refuse",
        "_slots",
        "clock",
        "kind",
        "rank",
        "readmitted",
        "since",
        "slot",
        "state",
        "until",
        "wake",
    )

    def __init__(
        self,
        slots: Slots,
        clock: Clock,
        now: float,
        max_wait: float,
        refuse: Callable[[Refusal], Any],
        kind: Any = None,
    ) -> None:
        """Wait from `now` on, for `max_wait` seconds at most, and not beyond the deadline."""
        self._slots = slots
        self._refuse = refuse
        self.state: str = WAITING
        self.kind = kind
        self.slot: Any = None
        """The slot that it was granted."""
        self.readmitted = False
        """Whether it was admitted before: then neither a full queue nor shedding refuses it."""
        self.clock = clock
        self.rank: int = current_criticality()
        self.since = now
        self.until, late = give_up_at(now, max_wait)
        self._late: Refusal = "deadline" if late else "too long"

    def bounded_by_guard(self) -> None:
        """Say, when the wait is over, that it was the guard's `max_wait` that ended it."""
        if self._late == "too long":
            self._late = "impatient"

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queue."""
        self.wake = wake
        self._slots.join(self)

    def grant(self) -> bool:
        """Learn of the slot; False if nobody is there to use it, now or when it is abandoned."""
        return self.wake()

    def turn_away(self, why: Refusal) -> None:
        """Learn that there will be no slot."""
        self.state = why
        self.wake()

    def claim(self) -> Any:
        """Return the slot that it was granted, or say why there is none."""
        with self._slots.mutex:
            self._slots.note_wait(self.since, self.clock.now())
            state = self._leave_queue()
        if state == GRANTED:
            return self.slot
        why: Any = self._late if state == WAITING else state
        return self._refuse(why)

    def abandon(self) -> None:
        """Wait no more, and give back what was granted."""
        self._slots.mutex.do(self._give_up)

    def _give_up(self) -> None:
        if self._leave_queue() == GRANTED:
            self.state = "gone"
            self._slots.free.append(self.slot)
            self._slots.serve()

    def _leave_queue(self) -> str:
        if self.state == WAITING:
            self._slots.leave_queue(self)
        return self.state
