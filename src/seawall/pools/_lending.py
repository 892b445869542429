"""Who gets a resource of a pool, and what becomes of it when it comes back.

The rules are steps that never block (see `seawall.pools._steps`), so they are the same for threads
and tasks. A borrower holds a slot from the moment it may have a resource until that is back or
closed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

from seawall.clock import Clock
from seawall.context import deadline_passed
from seawall.errors import Rejected, matches
from seawall.models.pooling import PoolSettings, lifetime
from seawall.pools._closing import Closing
from seawall.pools._refusals import Refusals
from seawall.pools._resources import Resource
from seawall.pools._steps import NOTHING, Request, Work
from seawall.pools._upkeep import Upkeep
from seawall.pools._waiting import ClosingWaiter, PoolWaiter, waited
from seawall.runtime.degradation import Degradation, source_name

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from types import CodeType


DISCARDED: Final = Exception("discarded by its borrower")
"""The error of a block that ended well, and knows that its resource did not."""

LATE: Final = Exception("took longer than read_timeout")
"""The error of a block that nobody could stop, and that ended after its time."""


_NEVER: Final[Any] = object()

_TO_FILL: Final = "`await pool.afill()`, or `async with pool:`"


class Borrower(Protocol):
    """Who borrows, and what it holds: if it goes without giving that back, it is found.

    What is taken is noted here before a signal is let in, and what is given back is noted just
    before.
    """

    place: tuple[CodeType, int]
    """The place in the program, as its code and the instruction in it."""
    resource: Resource | None
    has_slot: bool


class Lending(Refusals):
    """The rules of one pool."""

    def __init__(
        self,
        upkeep: Upkeep,
        clock: Clock,
        *,
        connect: Callable[[], Any],
        validate: Callable[[Any], Any] | None,
        degraded: Callable[[], Any] | None,
        reusable: tuple[type[Exception], ...],
        chance: Callable[[], float],
    ) -> None:
        """Lend what `connect` makes."""
        super().__init__(upkeep, clock)
        self._slots = upkeep.slots
        self._free = upkeep.slots.free
        self._slot_takes = iter(self._free.pop, _NEVER)
        """Takes a free slot in a `for`, which lets no signal in after it; see `Stack`."""
        self._used = upkeep.used
        self._stock = upkeep.stock
        self._connect = connect
        self._validate = validate
        self._degraded = degraded
        self._reusable = reusable
        self._chance = chance
        self._now = clock.now
        self.follow(upkeep.settings)
        self.as_it_is = validate is None
        """Whether an idle resource may be lent without a look at it."""

    def follow(self, settings: PoolSettings) -> None:
        """Go by these settings from now on."""
        self.settings = self.upkeep.settings = settings
        self._idle_seconds = inf if settings.idle_timeout is None else settings.idle_timeout
        self.keeping = False
        """Whether what comes back in order is kept without a look at whether there are too many."""

    def shorten(self, now: float) -> None:
        """Let what exists already end within the limits of idle time and life, counted from now."""
        for resource in list(self._stock.live):
            dies_at = min(resource.dies_at, now + self._lifetime())
            resource.dies_at = dies_at
            resource.idle_until = min(resource.idle_until, now + self._idle_seconds, dies_at)

    def _lifetime(self) -> float:
        longest = self.settings.max_lifetime
        return inf if longest is None else lifetime(longest, self._chance())

    # --- Lending ---

    def lend_idle(self, borrower: Borrower, loop: AbstractEventLoop | None) -> Resource | None:
        """Lend an idle resource, if there is one that needs no look; else None."""
        if not self.as_it_is:
            return None
        if deadline_passed():
            return None
        stock = self._stock
        stack = stock.stacks.get(loop, stock.anywhere)
        try:
            for _ in self._slot_takes:
                borrower.has_slot = True
                break
            for resource in stack.takes:
                borrower.resource = resource
                break
        except IndexError:
            if borrower.has_slot:
                self._give_up_slot(borrower)
            return None
        now = self._now()
        if now >= resource.idle_until:
            borrower.resource = None
            resource.stack.append(resource)
            self._give_up_slot(borrower)
            return None
        resource.borrower = borrower.place
        resource.since = now
        return resource

    def _give_up_slot(self, borrower: Borrower) -> None:
        """Give a borrower's slot back, to the next waiter."""
        borrower.has_slot = False
        self._free.append(None)
        if self._slots.attention:
            self._slots.attend()

    def checkout(
        self, borrower: Borrower, loop: AbstractEventLoop | None
    ) -> Generator[Request, Any, Resource]:
        """Lend a resource: wait for a slot, find an idle one that is fit, or connect."""
        began = self._now()
        self.check_open()
        self.time_left(None)
        resource = None
        if not self._take_slot(borrower):
            resource = yield from self._exhausted(began, loop, borrower)
        if resource is None:
            resource = yield from self._fit(began, loop, borrower)
        borrower.resource = resource
        resource.borrower = borrower.place
        resource.since = self._now()
        return resource

    def _take_slot(self, borrower: Borrower) -> bool:
        """Take a free slot for `borrower`, if there is one."""
        try:
            for _ in self._slot_takes:
                borrower.has_slot = True
                return True
        except IndexError:
            pass
        return False

    def _exhausted(
        self, began: float, loop: AbstractEventLoop | None, borrower: Borrower
    ) -> Generator[Request, Any, Resource | None]:
        """Get a slot though none is free, and return None; or return a substitute."""
        if self._stock.lost or self._stock.closing or began >= self.upkeep.due:
            self.upkeep.look(began)  # what is lost, or left by a closed loop, may be the reason
        if self._take_slot(borrower):
            return None
        policy = self.settings.when_exhausted
        if policy == "fail":
            self.refuse(self.full("all are in use"))
        if policy == "degrade" and self._degraded is not None:
            self.upkeep.counts["degraded"] += 1
            full = self.full("all are in use")
            Degradation(source_name(self._degraded), 1, full).report(self.name)
            resource = self._stock.substitute()
            yield from self._made(resource, "degraded", self._degraded, loop)
            return resource
        yield from waited(PoolWaiter(*self._waiting(self._now() - began)), self.upkeep)
        borrower.has_slot = True
        self.upkeep.waited.append(self._now() - began)
        return None

    def _waiting(self, so_far: float) -> tuple[Any, ...]:
        longest = max(0.0, self.settings.checkout_timeout - so_far)
        return self._slots, self.clock, self._now(), longest, self.turned_away

    def _fit(
        self, began: float, loop: AbstractEventLoop | None, borrower: Borrower
    ) -> Generator[Request, Any, Resource]:
        """Return a resource that is fit for use, with a slot in hand; give that back if not."""
        visit = _Visit(borrower)
        try:
            while True:
                self.check_open()
                found = yield from self._find(loop, visit)
                if found is None:
                    closing = self._stock.adopt()
                else:
                    resource, trouble = found
                    if trouble is None:
                        return resource
                    closing = self._remove(resource, trouble, loop, visit)
                    borrower.resource = None
                if closing is not None:
                    borrower.has_slot = False
                    waiting = self._waiting(self._now() - began - visit.asked)
                    yield from waited(ClosingWaiter(closing, *waiting), self.upkeep)
                    borrower.has_slot = True
        except BaseException:
            self._drop(borrower)
            raise

    def _drop(self, borrower: Borrower) -> None:
        """Take from a borrower that gets nothing what it has so far."""
        resource = borrower.resource
        if resource is None:
            if borrower.has_slot:
                self._give_up_slot(borrower)
        elif not resource.alive:
            borrower.resource, borrower.has_slot = None, False  # it is being closed, with its slot
        elif resource.connected:
            self._stock.retire(resource, "cancelled", slot=borrower.has_slot)
            borrower.resource, borrower.has_slot = None, False
        else:
            self._stock.forget(resource)
            borrower.resource = None
            if borrower.has_slot:
                self._give_up_slot(borrower)

    def _find(
        self, loop: AbstractEventLoop | None, visit: _Visit
    ) -> Generator[Request, Any, tuple[Resource, str | None] | None]:
        """Return an idle resource or a new one, and what is wrong with it; None without either."""
        trouble = None
        borrower = visit.borrower
        if visit.doubt is None:
            self._stock.lend(loop, borrower)
        resource = borrower.resource
        if resource is None:
            resource = self._stock.reserve(self.settings.max_size, borrower)
            if resource is None:
                evicted = self._stock.evict(loop)
                if evicted is None and visit.doubt is not None:
                    doubtful = self._stock.pop(loop)
                    return None if doubtful is None else (doubtful, visit.doubt)
                return evicted
            yield from self._made(resource, "connect", self._connect, loop, borrower=borrower)
        else:
            trouble = yield from self._trouble(resource, visit)
        return resource, "closed" if self.closed else trouble

    def _remove(
        self, resource: Resource, cause: str, loop: AbstractEventLoop | None, visit: _Visit
    ) -> Closing | None:
        """Close a resource; return the closing if there is nothing to go on with before its end."""
        if cause == "leaked":
            self.upkeep.report(resource)
        stock = self._stock
        another = stock.size < self.settings.max_size or (
            visit.doubt is None and stock.has_idle(loop)
        )
        if another and self._slots.take():
            stock.retire(resource, cause)
            return None
        return stock.retire(resource, cause, owned=True)

    def _made(
        self,
        resource: Resource,
        what: str,
        make: Callable[[], Any],
        loop: AbstractEventLoop | None,
        instead: str | None = None,
        borrower: Borrower | None = None,
    ) -> Generator[Request, Any, None]:
        """Connect `resource`, or forget it, and so does its borrower."""
        work = Work(self.name, what, None, make)
        work.instead = instead or work.instead
        try:
            work.seconds = self.time_left(self.settings.connect_timeout)
        except Rejected:
            self._stock.forget(resource)
            if borrower is not None:
                borrower.resource = None
            raise
        try:
            resource.value = yield work
            resource.connected = True
        except BaseException as error:
            self.note_timeout(work)
            if isinstance(error, Exception):
                self.upkeep.counts["connect_failed"] += 1
            if work.left is NOTHING or loop is None:
                self._stock.forget(resource)
            else:
                resource.value = work.left
                self._stock.belongs_to(resource, loop)
                self._stock.retire(resource, "cancelled", slot=False)
            if borrower is not None:
                borrower.resource = None
            raise
        if work.awaited and loop is not None:
            self._stock.belongs_to(resource, loop)
        self.upkeep.counts["created"] += 1
        if resource.pooled:
            resource.dies_at = self._now() + self._lifetime()

    def _trouble(self, resource: Resource, visit: _Visit) -> Generator[Request, Any, str | None]:
        """Say why an idle resource cannot be lent; None if it can. See to it if that breaks off."""
        now = self._now()
        if now >= resource.dies_at:
            return "lifetime"
        spare = len(self._stock.live) - self.settings.min_size
        if now >= resource.idle_until and spare > 0:
            if spare > 1:
                visit.doubt = "idle"  # those below lie there for longer still
            return "idle"
        if self._validate is None:
            return None
        # All that are asked in one visit share the time: a server that answers no more would
        # else take that time from each of them.
        limit = self.settings.connect_timeout
        try:
            seconds = self.time_left(None if limit is None else limit - visit.asked)
        except Rejected:
            self.lay_down(resource, now, visit.borrower)
            raise
        work = Work(self.name, "validate", seconds, self._validate, resource.value)
        try:
            valid = yield work
        except Exception:  # noqa: BLE001 - whatever it is, the resource is not to be trusted
            self.note_timeout(work)
            valid = False
        except BaseException:
            self._drop(visit.borrower)
            raise
        visit.asked += self._now() - now
        if work.expired or (limit is not None and visit.asked >= limit):
            visit.doubt = "invalid"
        return None if valid else "invalid"

    def fill(self, loop: AbstractEventLoop | None) -> Generator[Request, Any, None]:
        """Connect until there are `min_size`."""
        while self._stock.size < self.settings.min_size and self._slots.take():
            try:
                self.check_open()
                resource = self._stock.reserve(self.settings.min_size)
                if resource is None:
                    self._slots.give_back()
                    return
                yield from self._made(resource, "connect", self._connect, loop, _TO_FILL)
            except BaseException:
                self._slots.give_back()
                raise
            self.take_back(resource, None)

    # --- Taking back ---

    def take_back(
        self, resource: Resource, error: BaseException | None, borrower: Borrower | None = None
    ) -> None:
        """Keep a resource for the next borrower, or close it; its slot comes free."""
        now = self._now()
        if resource.since is not None:
            self._used.append(now - resource.since)
        if error is None and self.keeping and now < resource.dies_at:
            self.lay_down(resource, now, borrower)
        else:
            self._sort_out(resource, error, now, borrower)
        if now >= self.upkeep.due:
            self.upkeep.look(now)

    def lay_down(self, resource: Resource, now: float, borrower: Borrower | None = None) -> None:
        """Let a resource lie idle, and give its slot back."""
        until = now + self._idle_seconds
        dies_at = resource.dies_at
        resource.idle_until = until if until < dies_at else dies_at  # noqa: FURB136 - no call here
        resource.since = None
        if borrower is not None:
            borrower.resource = None
        resource.stack.append(resource)
        if borrower is not None:
            borrower.has_slot = False
        self._free.append(None)
        if self._slots.attention:
            self._slots.attend()
        if self.closed:  # it may have been closed just before this one was laid down
            self.close_idle()

    def close_idle(self) -> None:
        """Close what lies idle in a pool that is closed."""
        while (idle := self._stock.spare()) is not None:
            self._stock.retire(idle, "closed", slot=self._slots.take())

    def _sort_out(
        self,
        resource: Resource,
        error: BaseException | None,
        now: float,
        borrower: Borrower | None,
    ) -> None:
        if error is DISCARDED:
            cause = "discarded"
        elif error is LATE:
            cause = "late"
        elif error is not None and not self._harmless(error):
            cause = "failed" if isinstance(error, Exception) else "cancelled"
        elif not resource.pooled:
            cause = "substitute"
        elif self.closed:
            cause = "closed"
        elif now >= resource.dies_at:
            cause = "lifetime"
        elif len(self._stock.live) > self.settings.max_size:
            cause = "surplus"
        else:
            self.keeping = True
            self.lay_down(resource, now, borrower)
            return
        self._stock.retire(resource, cause, slot=resource.pooled)
        if borrower is not None:
            borrower.resource, borrower.has_slot = None, False

    def _harmless(self, error: BaseException) -> bool:
        """Tell whether a resource is as good as before after `error`. A timeout never is."""
        return not _holds_timeout(error) and matches(error, self._reusable)

    def lose(self, borrower: Borrower) -> None:
        """Learn that the borrower is gone; called by the garbage collector, so little is done."""
        resource = borrower.resource
        if resource is not None and not resource.alive:
            return  # it is being closed, and the slot comes back then
        if resource is not None and resource.connected:
            self._stock.lost.append(resource)
        elif resource is not None:
            self._stock.forget(resource)
        if borrower.has_slot:
            self._slots.give_back()


class _Visit:
    """One borrower with a slot, while it looks for a resource that is fit."""

    __slots__ = ("asked", "borrower", "doubt")

    def __init__(self, borrower: Borrower) -> None:
        self.borrower = borrower
        self.asked = 0.0
        """The seconds that it took to validate so far."""
        self.doubt: str | None = None
        """Why it looks at no more idle ones, as the cause for which they would be closed."""


def _holds_timeout(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_holds_timeout(leaf) for leaf in error.exceptions)
    late = isinstance(error, TimeoutError) and not isinstance(error, Rejected)
    return late or not isinstance(error, Exception)
