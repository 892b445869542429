"""Lending: which borrower gets a resource, and what happens to it when it is returned.

The rules are steps that never block (see `steps.py`), so they are the same for threads and tasks.
A borrower holds a slot from when it may have a resource until that is returned or closed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from seawall.clock import Clock
from seawall.context import deadline_passed, seconds_left
from seawall.errors import DeadlineExceeded, PoolExhausted, Rejected, TimedOut, matches
from seawall.events import CallRejected, CallTimedOut
from seawall.events.bus import emit
from seawall.models.pooling import PoolSettings, lifetime
from seawall.resources.pool.closing import Closing
from seawall.resources.pool.steps import NOTHING, Request, Work
from seawall.resources.pool.stock import Resource
from seawall.resources.pool.upkeep import LOOK_EVERY, Upkeep
from seawall.runtime.degradation import Degradation, source_name
from seawall.runtime.layers import Wait
from seawall.runtime.slots import WAITING, Refusal, SlotWaiter

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from types import CodeType


DISCARDED: Final = Exception("discarded by its borrower")  # of a block that succeeded

LATE: Final = Exception("took longer than read_timeout")
"""Error of a sync block, which cannot be interrupted, that ended after its time limit."""


_NEVER: Final[Any] = object()

_TO_FILL: Final = "`await pool.afill()`, or `async with pool:`"


class Borrower(Protocol):
    """A borrower and what it holds; if it is collected without returning that, the pool notices.

    What it takes is recorded before a signal handler can run; what it returns, just before.
    """

    place: tuple[CodeType, int]  # the location in the program, as code object and instruction
    resource: Resource | None
    has_slot: bool


class Lending:
    """The lending rules of one pool."""

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
        self.name = upkeep.name
        self.clock = clock
        self.upkeep = upkeep
        self.settings = upkeep.settings
        self.closed = False
        self._slots = upkeep.slots
        self._free = upkeep.slots.free
        self._slot_takes = iter(self._free.pop, _NEVER)
        """Takes a free slot in a `for`, after which no signal handler can run; see `Stack`."""
        self._used = upkeep.used
        self._stock = upkeep.stock
        self._connect = connect
        self._validate = validate
        self._degraded = degraded
        self._reusable = reusable
        self._chance = chance
        self._now = clock.now
        self.follow(upkeep.settings)
        self.skips_validation = validate is None  # whether an idle resource is lent as it is

    def follow(self, settings: PoolSettings) -> None:
        """Apply these settings from now on."""
        self.settings = self.upkeep.settings = settings
        self._idle_seconds = inf if settings.idle_timeout is None else settings.idle_timeout
        self.keeps_intact = False  # whether an intact resource is kept without a look at the size

    def shorten(self, now: float) -> None:
        """Limit the remaining idle time and life of existing resources, counted from now."""
        for resource in list(self._stock.live):
            dies_at = min(resource.dies_at, now + self._lifetime())
            resource.dies_at = dies_at
            resource.idle_until = min(resource.idle_until, now + self._idle_seconds, dies_at)

    def _lifetime(self) -> float:
        return lifetime(self.settings.max_lifetime, self._chance())

    # --- Lending ---

    def lend_idle(self, borrower: Borrower, loop: AbstractEventLoop | None) -> Resource | None:
        """Lend an idle resource that needs no validation; return None if there is none."""
        if not self.skips_validation:
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
        borrower.has_slot = False
        self._free.append(None)
        if self._slots.attention:
            self._slots.attend()

    def checkout(
        self, borrower: Borrower, loop: AbstractEventLoop | None
    ) -> Generator[Request, Any, Resource]:
        """Lend a resource: wait for a slot, then find a usable idle resource or connect."""
        began = self._now()
        self.check_open()
        self.time_left(None)
        resource = None
        if not self._take_slot(borrower):
            resource = yield from self._exhausted(began, loop, borrower)
        if resource is None:
            resource = yield from self._usable(began, loop, borrower)
        borrower.resource = resource
        resource.borrower = borrower.place
        resource.since = self._now()
        return resource

    def _take_slot(self, borrower: Borrower) -> bool:
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
        """Wait for a slot and return None, or return a substitute resource."""
        if self._stock.lost or self._stock.closing or began >= self.upkeep.due:
            self.upkeep.look(began)  # lost resources, or those of a closed loop, may be the cause
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
        yield from _waited(_PoolWaiter(*self._waiting(self._now() - began)), self.upkeep)
        borrower.has_slot = True
        self.upkeep.waited.append(self._now() - began)
        return None

    def _waiting(self, so_far: float) -> tuple[Any, ...]:
        longest = max(0.0, self.settings.checkout_timeout - so_far)
        return self._slots, self.clock, self._now(), longest, self.turned_away

    def _usable(
        self, began: float, loop: AbstractEventLoop | None, borrower: Borrower
    ) -> Generator[Request, Any, Resource]:
        """Return a usable resource for a borrower with a slot; on failure give the slot back."""
        search = _Search(borrower)
        try:
            while True:
                self.check_open()
                found = yield from self._find(loop, search)
                if found is None:
                    closing = self._stock.adopt()
                else:
                    resource, trouble = found
                    if trouble is None:
                        return resource
                    closing = self._remove(resource, trouble, loop, search)
                    borrower.resource = None
                if closing is not None:
                    borrower.has_slot = False
                    waiting = self._waiting(self._now() - began - search.validating)
                    yield from _waited(_ClosingWaiter(closing, *waiting), self.upkeep)
                    borrower.has_slot = True
        except BaseException:
            self._drop(borrower)
            raise

    def _drop(self, borrower: Borrower) -> None:
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
        self, loop: AbstractEventLoop | None, search: _Search
    ) -> Generator[Request, Any, tuple[Resource, str | None] | None]:
        """Return an idle or new resource and what is wrong with it; None if there is neither."""
        trouble = None
        borrower = search.borrower
        if search.doubt is None:
            self._stock.lend(loop, borrower)
        resource = borrower.resource
        if resource is None:
            resource = self._stock.reserve(self.settings.max_size, borrower)
            if resource is None:
                evicted = self._stock.evict(loop)
                if evicted is None and search.doubt is not None:
                    doubtful = self._stock.pop(loop)
                    return None if doubtful is None else (doubtful, search.doubt)
                return evicted
            yield from self._made(resource, "connect", self._connect, loop, borrower=borrower)
        else:
            trouble = yield from self._trouble(resource, search)
        return resource, "closed" if self.closed else trouble

    def _remove(
        self, resource: Resource, cause: str, loop: AbstractEventLoop | None, search: _Search
    ) -> Closing | None:
        """Close a resource; return the closing if the borrower has to wait for its end."""
        if cause == "leaked":
            self.upkeep.report(resource)
        stock = self._stock
        idle = stock.stacks.get(loop) or stock.anywhere
        another = stock.size < self.settings.max_size or (search.doubt is None and idle)
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
        instead: str = "`async with`",
        borrower: Borrower | None = None,
    ) -> Generator[Request, Any, None]:
        """Connect `resource`; on failure remove it from the stock and the borrower."""
        work = Work(self.name, what, None, make, instead=instead)
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

    def _trouble(self, resource: Resource, search: _Search) -> Generator[Request, Any, str | None]:
        """Return why an idle resource cannot be lent, or None. Clean up if interrupted."""
        now = self._now()
        if now >= resource.dies_at:
            return "lifetime"
        spare = len(self._stock.live) - self.settings.min_size
        if now >= resource.idle_until and spare > 0:
            if spare > 1:
                search.doubt = "idle"  # those below have been idle even longer
            return "idle"
        if self._validate is None:
            return None
        # All validations of one checkout share the time limit: otherwise a server that stopped
        # answering would cost the full limit for each resource.
        limit = self.settings.connect_timeout
        try:
            seconds = self.time_left(None if limit is None else limit - search.validating)
        except Rejected:
            self.put_idle(resource, now, search.borrower)
            raise
        work = Work(self.name, "validate", seconds, self._validate, (resource.value,))
        try:
            valid = yield work
        except Exception:  # noqa: BLE001 - after any error the resource cannot be trusted
            self.note_timeout(work)
            valid = False
        except BaseException:
            self._drop(search.borrower)
            raise
        search.validating += self._now() - now
        if work.expired or (limit is not None and search.validating >= limit):
            search.doubt = "invalid"
        return None if valid else "invalid"

    def fill(self, loop: AbstractEventLoop | None) -> Generator[Request, Any, None]:
        """Connect until there are `min_size` resources."""
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

    # --- Returning ---

    def take_back(
        self, resource: Resource, error: BaseException | None, borrower: Borrower | None = None
    ) -> None:
        """Keep a resource for the next borrower, or close it; its slot becomes free."""
        now = self._now()
        if resource.since is not None:
            self._used.append(now - resource.since)
        if error is None and self.keeps_intact and now < resource.dies_at:
            self.put_idle(resource, now, borrower)
        else:
            self._keep_or_close(resource, error, now, borrower)
        if now >= self.upkeep.due:
            self.upkeep.look(now)

    def put_idle(self, resource: Resource, now: float, borrower: Borrower | None = None) -> None:
        """Put a resource on its idle stack and give its slot back."""
        until = now + self._idle_seconds
        dies_at = resource.dies_at
        resource.idle_until = until if until < dies_at else dies_at  # noqa: FURB136 - avoids a function call
        resource.since = None
        if borrower is not None:
            borrower.resource = None
        resource.stack.append(resource)
        if borrower is not None:
            borrower.has_slot = False
        self._free.append(None)
        if self._slots.attention:
            self._slots.attend()
        if self.closed:  # the pool may have been closed just before the resource became idle
            self.close_idle()

    def close_idle(self) -> None:
        """Close the idle resources of a closed pool."""
        while (idle := self._stock.take_oldest()) is not None:
            self._stock.retire(idle, "closed", slot=self._slots.take())

    def _keep_or_close(
        self, resource: Resource, error: BaseException | None, now: float, borrower: Borrower | None
    ) -> None:
        if error is DISCARDED:
            cause = "discarded"
        elif error is LATE:
            cause = "late"
        elif error is not None and (
            _holds_timeout(error) or not matches(error, self._reusable)  # never after a timeout
        ):
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
            self.keeps_intact = True
            self.put_idle(resource, now, borrower)
            return
        self._stock.retire(resource, cause, slot=resource.pooled)
        if borrower is not None:
            borrower.resource, borrower.has_slot = None, False

    def lose(self, borrower: Borrower) -> None:
        """Handle the loss of a borrower; the garbage collector calls this, so it does little."""
        resource = borrower.resource
        if resource is not None and not resource.alive:
            return  # it is being closed, which returns the slot
        if resource is not None and resource.connected:
            self._stock.lost.append(resource)
        elif resource is not None:
            self._stock.forget(resource)
        if borrower.has_slot:
            self._slots.give_back()

    # --- Refusals and timeouts: their errors, counts and events ---

    def turned_away(self, why: Refusal) -> NoReturn:
        """Refuse a borrower whose wait ended, or that found the queue full."""
        self.check_open()
        if why == "deadline":
            self.refuse(DeadlineExceeded(f"pool {self.name!r}: the deadline passed while waiting"))
        if why == "no room":
            self.refuse(self.full("and no room to wait"))
        self.refuse(self.full(f"waited {self.settings.checkout_timeout:g} s"))

    def full(self, why: str) -> PoolExhausted:
        """Return the error for an exhausted pool: its longest borrower, and when to retry."""
        now = self.clock.now()
        longest = ""
        borrowed = self.upkeep.stock.borrowed()
        if borrowed:
            since, resource = min(borrowed, key=itemgetter(0))
            longest = f"; the longest borrower, for {now - since:.3g} s, is {resource.place}"
        return PoolExhausted(
            f"pool {self.name!r}: no free resource of {self.settings.max_size}: {why}{longest}",
            retry_after=self.upkeep.median(now),
        )

    def check_open(self) -> None:
        """Refuse if the pool is closed."""
        if self.closed:
            self.refuse(PoolExhausted(f"pool {self.name!r} is closed"))

    def time_left(self, limit: float | None) -> float | None:
        """Return the smaller of `limit` and the time to the deadline; refuse if that has passed."""
        left = seconds_left()
        if left is None:
            return limit
        if left <= 0:
            self.refuse(DeadlineExceeded(f"pool {self.name!r}: the deadline has passed"))
        return left if limit is None else min(left, limit)

    def refuse(self, error: Rejected) -> NoReturn:
        """Count a refusal, emit its event, and raise it."""
        self.upkeep.counts["rejected"] += 1
        emit(CallRejected, self.name, policy="pool", reason=error.reason, enforced=True)
        error.guard = self.name
        error.policy = "pool"
        try:
            raise error
        finally:
            del error  # break the reference cycle between the exception and this frame

    def overdue(self) -> TimedOut:
        """Count a borrower that took too long, and return its error."""
        seconds = self.settings.read_timeout or 0.0
        self.upkeep.counts["timed_out"] += 1
        emit(CallTimedOut, self.name, seconds=seconds)
        message = f"pool {self.name!r}: the borrower took more than {seconds:g} s"
        return TimedOut(message, guard=self.name, seconds=seconds)

    def note_timeout(self, work: Work) -> None:
        """Count work that took too long, if it did."""
        if work.expired and work.seconds is not None:
            self.upkeep.counts["timed_out"] += 1
            emit(CallTimedOut, self.name, seconds=work.seconds)


@dataclass(slots=True, eq=False)
class _Search:
    """State of one borrower with a slot while it looks for a usable resource."""

    borrower: Borrower
    validating: float = 0.0  # seconds spent on validation so far
    doubt: str | None = None  # why it skips idle resources: the cause to close them


class _PoolWaiter(SlotWaiter):
    """Waits for a returned slot, and keeps its place in the queue during periodic checks.

    A resource is closed in its own event loop. That loop may end or stop before it closes the
    resource, without any notification, so waiters check for that periodically.
    """

    def __init__(self, *waiting: Any) -> None:
        super().__init__(*waiting)
        self._end = inf if self.until is None else self.until
        self.until = min(self._end, self.since + LOOK_EVERY)
        self._published = False

    def publish(self, wake: Callable[[], bool]) -> None:
        if not self._published:
            self._published = True
            super().publish(wake)
            return
        with self._slots.mutex:
            self.wake = wake
            if self.state != WAITING:
                wake()

    def claim(self) -> Any:
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


class _ClosingWaiter(_PoolWaiter):
    """Waits for the end of a closing, to take over its slot."""

    def __init__(self, closing: Closing, *waiting: Any) -> None:
        super().__init__(*waiting)
        self._closing = closing

    def publish(self, wake: Callable[[], bool]) -> None:
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
        self._closing.disown()


def _waited(waiter: _PoolWaiter, upkeep: Upkeep) -> Generator[_PoolWaiter, Any, None]:
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


def _holds_timeout(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_holds_timeout(leaf) for leaf in error.exceptions)
    late = isinstance(error, TimeoutError) and not isinstance(error, Rejected)
    return late or not isinstance(error, Exception)
