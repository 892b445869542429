"""Who gets a resource of a pool, and what becomes of it when it comes back.

The rules are steps that never block (see `seawall.pools._steps`), so they are the same for threads
and tasks. A borrower holds a slot from the moment it may have a resource until that is back or
closed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from seawall.clock import Clock
from seawall.context import deadline_var
from seawall.errors import DeadlineExceeded, PoolExhausted, Rejected, TimedOut, matches
from seawall.models.pooling import PoolSettings, lifetime
from seawall.pools._closing import Closing, ClosingWaiter
from seawall.pools._resources import Resource
from seawall.pools._steps import Request, Work
from seawall.pools._upkeep import Upkeep
from seawall.runtime.events import (
    CallRejected,
    CallTimedOut,
    FallbackUsed,
    emit,
)
from seawall.runtime.slots import Refusal, SlotWaiter

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from types import CodeType


DISCARDED: Final = Exception("discarded by its borrower")
"""The error of a block that ended well, and knows that its resource did not."""


class Borrower(Protocol):
    """Who borrows: the place in the program, as its code and the instruction in it."""

    place: tuple[CodeType, int]


class Lending:
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
        self.name = upkeep.name
        self.clock = clock
        self.upkeep = upkeep
        self._slots = upkeep.slots
        self._free = upkeep.slots.free
        self._used = upkeep.used
        self._stock = upkeep.stock
        self._connect = connect
        self._validate = validate
        self._degraded = degraded
        self._reusable = reusable
        self._chance = chance
        self._now = clock.now
        self.follow(upkeep.settings)
        self.closed = False
        self.as_it_is = validate is None
        """Whether an idle resource may be lent without a look at it."""

    def follow(self, settings: PoolSettings) -> None:
        """Go by these settings from now on."""
        self.settings = self.upkeep.settings = settings
        self._idle_seconds = inf if settings.idle_timeout is None else settings.idle_timeout
        self.keeping = False
        """Whether what comes back in order is kept without a look at whether there are too many."""

    # --- Lending ---

    def lend_idle(self, borrower: Borrower, loop: AbstractEventLoop | None) -> Resource | None:
        """Lend an idle resource, if there is one that needs no look; else None."""
        if not self.as_it_is:
            return None
        held = deadline_var.get()
        if held is not None and held[1].now() >= held[0]:
            return None
        try:
            self._free.pop()
        except IndexError:
            return None
        stock = self._stock
        try:
            resource = stock.stacks.get(loop, stock.anywhere).pop()
        except IndexError:
            self._slots.give_back()
            return None
        now = self._now()
        if now >= resource.idle_until:
            resource.stack.append(resource)
            self._slots.give_back()
            return None
        resource.borrower = borrower.place
        resource.since = now
        return resource

    def checkout(
        self, borrower: Borrower, loop: AbstractEventLoop | None
    ) -> Generator[Request, Any, Resource]:
        """Lend a resource: wait for a slot, find an idle one that is fit, or connect."""
        began = self._now()
        self._check_open()
        self._time_left(None)
        resource = None
        if not self._slots.take():
            resource = yield from self._exhausted(began, loop)
        if resource is None:
            resource = yield from self._fit(began, loop)
        resource.borrower = borrower.place
        resource.since = self._now()
        return resource

    def _exhausted(
        self, began: float, loop: AbstractEventLoop | None
    ) -> Generator[Request, Any, Resource | None]:
        """Get a slot though none is free, and return None; or return a substitute."""
        if self._stock.lost or self._stock.closing or began >= self.upkeep.due:
            self.upkeep.look(began)  # what is lost, or left by a closed loop, may be the reason
        if self._slots.take():
            return None
        policy = self.settings.when_exhausted
        if policy == "fail":
            self._refuse(self._full("all are in use"))
        if policy == "degrade" and self._degraded is not None:
            self.upkeep.counts["degraded"] += 1
            emit(FallbackUsed, self.name, level=1, reason=PoolExhausted.reason)
            resource = self._stock.substitute()
            yield from self._made(resource, "degraded", self._degraded, loop)
            return resource
        yield self._waiter(SlotWaiter, began)
        self.upkeep.waited.append(self._now() - began)
        return None

    def _waiter(self, kind: Callable[..., SlotWaiter], began: float, *first: Any) -> SlotWaiter:
        longest = self.settings.checkout_timeout
        return kind(*first, self._slots, self.clock, began, longest, self._turned_away)

    def _fit(
        self, began: float, loop: AbstractEventLoop | None
    ) -> Generator[Request, Any, Resource]:
        """Return a resource that is fit for use, with a slot in hand; give that back if not."""
        slot = _Slot()
        try:
            while True:
                self._check_open()
                found = yield from self._find(loop, slot)
                if found is None:
                    closing = self._stock.adopt()
                else:
                    resource, trouble = found
                    if trouble is None:
                        return resource
                    closing = self._remove(resource, trouble)
                if closing is not None:
                    slot.in_hand = False
                    yield self._waiter(ClosingWaiter, began, closing)
                    slot.in_hand = True
        except BaseException:
            if slot.in_hand:
                self._slots.give_back()
            raise

    def _find(
        self, loop: AbstractEventLoop | None, slot: _Slot
    ) -> Generator[Request, Any, tuple[Resource, str | None] | None]:
        """Return an idle resource or a new one, and what is wrong with it; None without either."""
        trouble = None
        resource = self._stock.pop(loop)
        if resource is None:
            resource = self._stock.reserve(self.settings.max_size)
            if resource is None:
                return self._stock.evict(loop)
            yield from self._made(resource, "connect", self._connect, loop)
        else:
            slot.in_hand = False  # it goes where the resource goes
            trouble = yield from self._trouble(resource)
            slot.in_hand = True
        return resource, "closed" if self.closed else trouble

    def _remove(self, resource: Resource, cause: str) -> Closing | None:
        """Close a resource, to go on with its slot; return the closing if it takes time."""
        if cause == "leaked":
            self.upkeep.report(resource)
        return self._stock.retire(resource, cause, owned=True)

    def _made(
        self,
        resource: Resource,
        what: str,
        make: Callable[[], Any],
        loop: AbstractEventLoop | None,
    ) -> Generator[Request, Any, None]:
        """Connect `resource`, or forget it."""
        work = Work(self.name, what, None, make)
        try:
            work.seconds = self._time_left(self.settings.connect_timeout)
            resource.value = yield work
        except BaseException:
            self._stock.forget(resource)
            self._note_timeout(work)
            self.upkeep.counts["connect_failed"] += 1
            raise
        if work.awaited and loop is not None:
            self._stock.belongs_to(resource, loop)
        self.upkeep.counts["created"] += 1
        if resource.pooled:
            longest = self.settings.max_lifetime
            chance = 0.0 if longest is None else self._chance()
            resource.dies_at = self._now() + lifetime(longest, chance)

    def _trouble(self, resource: Resource) -> Generator[Request, Any, str | None]:
        """Say why an idle resource cannot be lent; None if it can. See to it if that breaks off."""
        now = self._now()
        if now >= resource.dies_at:
            return "lifetime"
        if now >= resource.idle_until and len(self._stock.live) > self.settings.min_size:
            return "idle"
        if self._validate is None:
            return None
        try:
            seconds = self._time_left(self.settings.connect_timeout)
        except Rejected:
            self.lay_down(resource, now)
            raise
        work = Work(self.name, "validate", seconds, self._validate, resource.value)
        try:
            valid = yield work
        except Exception:  # noqa: BLE001 - whatever it is, the resource is not to be trusted
            self._note_timeout(work)
            return "invalid"
        except BaseException:
            self._stock.retire(resource, "cancelled")
            raise
        return None if valid else "invalid"

    def fill(self, loop: AbstractEventLoop | None) -> Generator[Request, Any, None]:
        """Connect until there are `min_size`."""
        while self._stock.size < self.settings.min_size and self._slots.take():
            try:
                self._check_open()
                resource = self._stock.reserve(self.settings.min_size)
                if resource is None:
                    self._slots.give_back()
                    return
                yield from self._made(resource, "connect", self._connect, loop)
            except BaseException:
                self._slots.give_back()
                raise
            self.take_back(resource, None)

    # --- Taking back ---

    def take_back(self, resource: Resource, error: BaseException | None) -> None:
        """Keep a resource for the next borrower, or close it; its slot comes free."""
        now = self._now()
        if resource.since is not None:
            self._used.append(now - resource.since)
        if error is None and self.keeping and now < resource.dies_at:
            self.lay_down(resource, now)
        else:
            self._sort_out(resource, error, now)
        if now >= self.upkeep.due:
            self.upkeep.look(now)

    def lay_down(self, resource: Resource, now: float) -> None:
        """Let a resource lie idle, and give its slot back."""
        until = now + self._idle_seconds
        dies_at = resource.dies_at
        resource.idle_until = until if until < dies_at else dies_at  # noqa: FURB136 - no call here
        resource.since = None
        resource.stack.append(resource)
        self._free.append(None)
        if self._slots.attention:
            self._slots.attend()

    def _sort_out(self, resource: Resource, error: BaseException | None, now: float) -> None:
        if error is DISCARDED:
            cause = "discarded"
        elif error is not None and not self._harmless(error):
            cause = "failed" if isinstance(error, Exception) else "cancelled"
        elif not resource.pooled:
            cause = "substitute"
        elif self.closed:
            cause = "closed"
        elif now >= resource.dies_at:
            cause = "lifetime"
        elif self._stock.size > self.settings.max_size:
            cause = "surplus"
        else:
            self.keeping = True
            self.lay_down(resource, now)
            return
        self._stock.retire(resource, cause, slot=resource.pooled)

    def _harmless(self, error: BaseException) -> bool:
        """Tell whether a resource is as good as before after `error`. A timeout never is."""
        return not _holds_timeout(error) and matches(error, self._reusable)

    def lose(self, resource: Resource) -> None:
        """Learn that the borrower is gone; called by the garbage collector, so little is done."""
        self._stock.lost.append(resource)
        if resource.pooled:
            self._slots.give_back()

    # --- Refusing ---

    def _turned_away(self, why: Refusal) -> NoReturn:
        self._check_open()
        if why == "deadline":
            self._refuse(DeadlineExceeded(f"pool {self.name!r}: the deadline passed while waiting"))
        if why == "no room":
            self._refuse(self._full("and no room to wait"))
        self._refuse(self._full(f"waited {self.settings.checkout_timeout:g} s"))

    def _full(self, why: str) -> PoolExhausted:
        now = self._now()
        self.upkeep.fold(now)
        borrowed = self._stock.borrowed()
        longest = ""
        if borrowed and borrowed[0].since is not None:
            seconds = now - borrowed[0].since
            longest = f"; the longest borrower, for {seconds:.3g} s, is {borrowed[0].place}"
        return PoolExhausted(
            f"pool {self.name!r}: no free resource of {self.settings.max_size}: {why}{longest}",
            retry_after=self.upkeep.uses.latency.quantile(0.5, now),
        )

    def _check_open(self) -> None:
        if self.closed:
            self._refuse(PoolExhausted(f"pool {self.name!r} is closed"))

    def _time_left(self, limit: float | None) -> float | None:
        """Return the nearer of `limit` and the deadline; refuse if that has passed."""
        held = deadline_var.get()
        if held is None:
            return limit
        left = held[0] - held[1].now()
        if left <= 0:
            self._refuse(DeadlineExceeded(f"pool {self.name!r}: the deadline has passed"))
        return left if limit is None else min(left, limit)

    def _refuse(self, error: Rejected) -> NoReturn:
        self.upkeep.counts["rejected"] += 1
        emit(CallRejected, self.name, policy="pool", reason=error.reason, enforced=True)
        error.guard = self.name
        error.policy = "pool"
        try:
            raise error
        finally:
            del error  # or its own frame would keep it alive

    def overdue(self) -> TimedOut:
        """Count a borrower that took too long, and return its error."""
        seconds = self.settings.read_timeout or 0.0
        self.upkeep.counts["timed_out"] += 1
        emit(CallTimedOut, self.name, seconds=seconds)
        message = f"pool {self.name!r}: the borrower took more than {seconds:g} s"
        return TimedOut(message, guard=self.name, seconds=seconds)

    def _note_timeout(self, work: Work) -> None:
        if work.expired and work.seconds is not None:
            self.upkeep.counts["timed_out"] += 1
            emit(CallTimedOut, self.name, seconds=work.seconds)


class _Slot:
    """A slot that was taken, and whether it is in hand, or with a resource that is looked at."""

    __slots__ = ("in_hand",)

    def __init__(self) -> None:
        self.in_hand = True


def _holds_timeout(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_holds_timeout(leaf) for leaf in error.exceptions)
    return isinstance(error, TimeoutError) or not isinstance(error, Exception)
