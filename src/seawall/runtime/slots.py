"""Counted slots with a wait queue, shared by bulkheads, adaptive limits and pools.

Promises:
- No more slots are in use than `limit` (after lowering it, than are still in use).
- A slot that is given back while callers wait goes to the next waiter in the queue.
- A waiter that is cancelled or times out holds nothing.
- Threads and tasks of any loop share the slots and wake each other.
- A slot that its holder lost (because a signal handler raised just then) is recovered.

Within one thread, no caller overtakes another. With several threads, a caller that arrives in the
moment between a slot being put back and being handed on may take it out of turn; the next waiter
then gets the next slot. Preventing that would cost a lock for each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakSet, ref

from seawall._forks import survives_fork
from seawall.clock import Clock
from seawall.context import current_criticality, give_up_at
from seawall.models.smoothing import Ewma
from seawall.models.waiting import Order, WaitQueue
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from seawall.models.shedding.codel import QueueState

Refusal = Literal["no room", "too long", "impatient", "deadline", "shed"]
"""Why a waiter gets no slot: the queue is full, its time or deadline is over, or it was shed."""

RECENT: Final = 1.0  # seconds for which the last served caller's wait represents the queue's wait
AVERAGED: Final = 5.0  # Half-life of the average wait, in seconds

WAITING: Final = "waiting"
GRANTED: Final = "granted"


live_slots: Final[WeakSet[Slots]] = WeakSet()
"""All live instances, for code that looks for slots that were not given back."""


class Slot:
    """One slot: an item of the deque while free, a ticket while taken, lost if collected."""

    __slots__ = ("began", "kind", "slots")

    began: float  # when its call began, if the owner records it
    kind: Any  # kind of the call that holds it, if there are kinds

    def __init__(self, slots: Callable[[], Slots | None]) -> None:
        self.slots = slots
        self.kind = None

    def __del__(self) -> None:
        slots = self.slots()
        if slots is not None:
            slots.recover(self)


def _nowhere() -> None:
    """Stand in for the slots of a withdrawn slot."""


class Slots:
    """`limit` slots, and a queue for them. Free slots are the items of a deque.

    The deque's `pop` and `append` are atomic, with or without a global interpreter lock, so taking
    a slot and giving it back need no lock while no caller waits: `free.pop()`, and
    `free.append(slot)` followed by `attend()` if `attention` is set, in this order.
    """

    anonymous = False  # whether slots are None: for owners that track the holders in another way

    def __init__(
        self,
        limit: int,
        *,
        order: Order = "fifo",
        room: int | None = None,
        discipline: QueueState | None = None,
        owner: object = None,
    ) -> None:
        """Start with `limit` free slots, and room for as many waiters if `room` is None."""
        self.limit = limit
        self.room = room
        self.discipline = discipline
        self.fits: Callable[[SlotWaiter], bool] | None = None
        """Whether a waiter of that kind may have a free slot now; called under the lock."""
        self.lost: Callable[[Any], None] | None = None  # takes a lost call's kind, under the lock
        self.queue: WaitQueue[SlotWaiter] = WaitQueue(order, limit if room is None else room)
        self.mutex = Mutex()
        self._myself = ref(self)
        self.free: deque[Any] = deque(self._new() for _ in range(limit))
        self.recovered = 0  # number of slots lost by their holders and recovered
        self.attention = False  # while a caller waits or slots must be withdrawn
        self._excess = 0
        self._waits = Ewma(AVERAGED)
        self._last_wait = (float("-inf"), 0.0)
        # True in a child process: a call copied by the fork may give back one slot too many.
        self._forked = False
        self.owner: Callable[[], object] = (lambda: None) if owner is None else ref(owner)
        survives_fork(self)
        live_slots.add(self)

    @property
    def in_use(self) -> int:
        """Number of slots in use."""
        return max(0, self.limit + self._excess - len(self.free))

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return len(self.queue)

    def queue_wait(self, now: float) -> float:
        """Return for how long the oldest waiter has waited."""
        with self.mutex:
            return self._longest_wait(now)

    def recent_wait(self, now: float) -> float:
        """Return the longer of `queue_wait` and the wait of the last caller to leave the queue."""
        at, waited = self._last_wait
        return max(self.queue_wait(now), waited if now - at <= RECENT else 0.0)

    def average_wait(self, now: float) -> float:
        """Return the average recent wait of callers that had to wait."""
        present = self.queue_wait(now)
        with self.mutex:
            return self._waits.preview(present, now)

    def note_wait(self, since: float, now: float) -> None:
        """Record the wait of a caller that leaves the queue. Called under the lock."""
        waited = max(0.0, now - since)
        self._last_wait = (now, waited)
        self._waits.update(waited, now)

    def _new(self) -> Slot | None:
        return None if self.anonymous else Slot(self._myself)

    def recover(self, lost: Slot) -> None:
        """Replace a slot whose holder is gone. Called from a finaliser, at any moment."""
        self.recovered += 1
        if self.lost is not None:
            self.mutex.do(partial(self.lost, lost.kind))
        self.give_back(self._new())

    def take(self) -> Any:
        """Take a free slot, or return None. While others wait, none is free."""
        try:
            return self.free.pop()
        except IndexError:
            return None

    def give_back(self, slot: Slot | None = None) -> None:
        """Give a slot back, to the next waiter if there is one."""
        self.free.append(slot)
        # Keep this order: a caller that joins the queue sets the flag, then looks at the slots.
        if self.attention:
            self.attend()

    def attend(self) -> None:
        """Withdraw excess slots and serve waiters. Safe at any moment."""
        self.mutex.do(self.serve)

    def resize(self, limit: int, room: int | None) -> None:
        """Change the number of slots; those in use beyond it are withdrawn when they return."""
        with self.mutex:
            self.room, self.queue.limit = room, limit if room is None else room
            self._excess += self.limit - limit
            self.limit = limit
            while self._excess < 0:
                self._excess += 1
                self.free.append(self._new())
            self.serve()

    def _withdraw(self) -> bool:
        try:
            slot = self.free.pop()
        except IndexError:
            return False
        if slot is not None:
            slot.slots = _nowhere
        return True

    def serve(self) -> None:
        """Withdraw excess slots, then hand free ones to waiters. Called under the lock."""
        while self._excess > 0 and self._withdraw():
            self._excess -= 1
        while len(self.free) > self.limit:  # a call copied by a fork gave its slot back
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
            # No function was called since it left the queue, so no signal handler can have lost it.
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
        """Take the next waiter to serve out of the queue; None if no waiter may have a slot now.

        The discipline first sheds as many as it wants, the least critical first; but never the last
        waiter, since that would serve no other caller sooner.
        """
        discipline = self.discipline
        if discipline is None:
            return self.queue.pop(fits=self.fits)
        now = self.queue.oldest()[0].clock.now()
        while len(self.queue) > 1 and discipline.sheds(self._longest_wait(now), now):
            victim = self.queue.pop_lowest()
            if victim is not None and not self._turn_away(victim, "shed"):
                break
        # If several classes wait, only the lowest has a standing queue; the others keep order.
        alone = len(self.queue.oldest()) == 1
        waiter = self.queue.pop(fits=self.fits, newest=alone and discipline.newest_first(now))
        if waiter is not None:
            try:
                discipline.serves(now)
            except BaseException:  # a signal: put the waiter back
                self.queue.push(waiter, waiter.rank, waiter.kind, always=True)
                raise
        return waiter

    def _longest_wait(self, now: float) -> float:
        """Return the longest wait in the queue; the next to be served may have hardly waited."""
        since = min((waiter.since for waiter in self.queue.oldest()), default=now)
        return max(0.0, now - since)

    def join(self, waiter: SlotWaiter) -> None:
        """Queue `waiter`, if there is room. The discipline restarts if the queue is empty."""
        with self.mutex:
            shed, waiting, now = False, len(self.queue), waiter.since
            if self.discipline is not None and waiting:
                shed = self.discipline.refuses(waiting, self._longest_wait(now), now)
            elif self.discipline is not None:
                self.discipline.emptied(now)
            self.attention = True
            turned_away = self.queue.push(
                waiter, waiter.rank, waiter.kind, always=waiter.readmitted, full=shed
            )
            if turned_away is not None:
                self._turn_away(turned_away, "shed" if shed else "no room")
            self.serve()

    def _turn_away(self, waiter: SlotWaiter, why: Refusal) -> bool:
        """Refuse a waiter that left the queue; False if it must stay. Called under the lock."""
        if waiter.readmitted:
            self.queue.push(waiter, waiter.rank, waiter.kind, always=True)
            return False
        waiter.turn_away(why)
        return True

    def _after_fork(self) -> None:
        """Reset in a child process: slots held by threads of the parent are free again."""
        self.mutex = Mutex()
        self.queue = WaitQueue(self.queue.order, self.queue.limit)
        self._excess = 0
        self._forked = self.attention = True
        self.free.extend(self._new() for _ in range(self.limit - len(self.free)))


class AnonymousSlots(Slots):
    """Slots that are only counted: for owners that track the holders in another way."""

    anonymous = True

    def take(self) -> bool:
        """Take a free slot; return whether there was one. While others wait, none is free."""
        try:
            self.free.pop()
        except IndexError:
            return False
        return True


class SlotWaiter:
    """One call waiting for a slot. Its state changes only under the lock of the slots."""

    wake: Callable[[], bool]

    def __init__(
        self,
        slots: Slots,
        clock: Clock,
        now: float,
        max_wait: float,
        refuse: Callable[[Refusal], Any],
        kind: Any = None,
    ) -> None:
        """Wait from `now` on for at most `max_wait` seconds, and not beyond the deadline."""
        self._slots = slots
        self._refuse = refuse
        self.state: str = WAITING
        self.kind = kind
        self.slot: Any = None  # the granted slot
        self.readmitted = False  # admitted before: neither a full queue nor shedding refuses it
        self.clock = clock
        self.rank: int = current_criticality()
        self.since = now
        self.until, late = give_up_at(now, max_wait)
        self._late: Refusal = "deadline" if late else "too long"

    def bounded_by_guard(self) -> None:
        """Report the guard's `max_wait` as the reason if the wait times out."""
        if self._late == "too long":
            self._late = "impatient"

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queue."""
        self.wake = wake
        self._slots.join(self)

    def grant(self) -> bool:
        """Notify the waiter of its slot; return False if its event loop is gone."""
        return self.wake()

    def turn_away(self, why: Refusal) -> None:
        """Notify the waiter that it gets no slot."""
        self.state = why
        self.wake()

    def claim(self) -> Any:
        """Return the granted slot, or call `refuse` with the reason why there is none."""
        with self._slots.mutex:
            self._slots.note_wait(self.since, self.clock.now())
            state = self._leave_queue()
        if state == GRANTED:
            return self.slot
        why: Any = self._late if state == WAITING else state
        return self._refuse(why)

    def abandon(self) -> None:
        """Stop waiting, and give back a granted slot."""
        self._slots.mutex.do(self._give_up)

    def _give_up(self) -> None:
        if self._leave_queue() == GRANTED:
            self.state = "gone"
            self._slots.free.append(self.slot)
            self._slots.serve()

    def _leave_queue(self) -> str:
        if self.state == WAITING:
            self._slots.queue.remove(self)
            self._slots.serve()
        return self.state
