"""A pool of resources that are costly to create: connections, sessions, clients.

Promises:
- Connecting, borrowed, idle and closing resources together never exceed `max_size`.
- A resource whose borrower was cancelled, timed out or failed is closed and never lent again.
- Nothing leaks, whatever is cancelled at whatever moment.
- A resource of one event loop is never handed to another.
- Waiters are served in order.
- A resource that is not returned is reported with the line that borrowed it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from operator import itemgetter
from sys import _getframe
from typing import TYPE_CHECKING, Any, Final, Generic, TypedDict, TypeVar, Unpack, overload

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock, new_random
from seawall.events import SettingsChanged
from seawall.events.bus import emit
from seawall.models.pooling import Advice, Exhausted, PoolSettings, advise
from seawall.models.waiting import ORDERS, Order
from seawall.resources.pool.borrowed import Borrowed
from seawall.resources.pool.lending import Lending
from seawall.resources.pool.steps import Request, drive_async, drive_sync
from seawall.resources.pool.stock import Stock
from seawall.resources.pool.upkeep import Upkeep
from seawall.runtime.driver import CallbackWaiter
from seawall.runtime.slots import AnonymousSlots

if TYPE_CHECKING:
    from random import Random

T = TypeVar("T")

COUNTED: Final = ("created", "connect_failed", "rejected", "degraded", "timed_out", "leaked")
BORROWERS_LISTED: Final = 20  # maximum number of borrowers in a snapshot, the longest first


class PoolOptions(TypedDict, Generic[T], total=False):
    """Types of the options of a `Pool`, for both kinds of `connect`."""

    min_size: int
    close: Callable[[T], object] | None
    validate: Callable[[T], bool | Awaitable[bool]] | None
    reusable: type[Exception] | tuple[type[Exception], ...]
    connect_timeout: float | None
    read_timeout: float | None
    idle_timeout: float | None
    checkout_timeout: float
    close_timeout: float
    max_lifetime: float | None
    when_exhausted: Exhausted
    degraded: Callable[[], T | Awaitable[T]] | None
    max_waiting: int | None
    order: Order
    leak_after: float | None
    clock: Clock | None
    rng: Random | None


class Pool(Generic[T]):
    """Lends at most `max_size` resources, created by `connect` as they are needed."""

    @overload
    def __init__(
        self,
        connect: Callable[[], Awaitable[T]],
        *,
        name: str,
        max_size: int,
        **options: Unpack[PoolOptions[T]],
    ) -> None: ...
    @overload
    def __init__(
        self,
        connect: Callable[[], T],
        *,
        name: str,
        max_size: int,
        **options: Unpack[PoolOptions[T]],
    ) -> None: ...
    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        name: str,
        max_size: int,
        min_size: int = 0,
        close: Callable[[T], object] | None = None,
        validate: Callable[[T], bool | Awaitable[bool]] | None = None,
        reusable: type[Exception] | tuple[type[Exception], ...] = (),
        connect_timeout: float | None = 5.0,
        read_timeout: float | None = None,
        idle_timeout: float | None = 300.0,
        checkout_timeout: float = 1.0,
        close_timeout: float = 5.0,
        max_lifetime: float | None = 1800.0,
        when_exhausted: Exhausted = "wait",
        degraded: Callable[[], T | Awaitable[T]] | None = None,
        max_waiting: int | None = None,
        order: Order = "fifo",
        leak_after: float | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Connect nothing yet; `fill()`, or `with pool:`, connects `min_size`.

        `connect`, `close`, `validate` and `degraded` may be async: then borrow with `async with`.
        Without `close`, the resource's own `aclose` or `close` is called. After an error listed in
        `reusable` a resource is kept, after any other error it is closed.

        When all are in use, "wait" lets up to `max_waiting` borrowers (default `max_size`) wait for
        `checkout_timeout` seconds; "fail" refuses; "degrade" lends what `degraded()` creates, for
        one use. A borrower has `read_timeout` seconds for its block. One that takes longer than
        `leak_after` is reported.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Pool(name={name!r}): write a name, such as 'database'")
        settings = PoolSettings(
            max_size=max_size,
            min_size=min_size,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            idle_timeout=idle_timeout,
            checkout_timeout=checkout_timeout,
            close_timeout=close_timeout,
            max_lifetime=max_lifetime,
            when_exhausted=when_exhausted,
            max_waiting=max_waiting,
            leak_after=leak_after,
        )
        self.name = name
        self.clock = current_clock() if clock is None else check_clock(clock)
        self._rng = new_random(name) if rng is None else check.chance("rng", rng)
        self._can_degrade = degraded is not None
        self._check_exhaustion(settings, given=self._can_degrade)
        check.choice("order", order, ORDERS)
        self.slots = AnonymousSlots(
            settings.max_size, order=order, room=settings.max_waiting, owner=self
        )
        closes = _optional("close", close)
        self._stock = Stock(name, self.slots, closes, settings.close_timeout, self.clock.now)
        self._upkeep = Upkeep(name, self.clock, settings, self.slots, self._stock)
        self._lending = Lending(
            self._upkeep,
            self.clock,
            connect=check.function("connect", connect),
            validate=_optional("validate", validate),
            degraded=_optional("degraded", degraded),
            reusable=check.error_types("reusable", reusable),
            chance=self._rng.random,
        )
        registry.enter(self, "pool", name)

    def __repr__(self) -> str:
        return f"<Pool {self.name!r}: {self.in_use} of {self.settings.max_size} in use>"

    @property
    def settings(self) -> PoolSettings:
        """The current settings; `update(...)` changes them."""
        return self._lending.settings

    @property
    def in_use(self) -> int:
        """The number of slots taken now, by borrowed resources and those in transition.

        Resources that are being connected, validated or closed count here, as they do towards
        `max_size`; `snapshot()["in_flight"]` counts only the borrowed ones.
        """
        return self.slots.in_use

    @property
    def waiting(self) -> int:
        """The number of borrowers waiting for a free resource."""
        return self.slots.waiting

    def borrow(self) -> Borrowed[T]:
        """Return a context manager: `with pool.borrow() as resource:`, or `async with`."""
        frame = _getframe(1)
        return Borrowed(self._lending, (frame.f_code, frame.f_lasti))

    # --- Opening and closing ---

    def fill(self) -> None:
        """Connect until there are `min_size` resources."""
        drive_sync(self._lending.fill(None), self.clock)

    async def afill(self) -> None:
        """Async twin of `fill`."""
        from asyncio import get_running_loop

        await drive_async(self._lending.fill(get_running_loop()), self.clock)

    def reap(self) -> int:
        """Close resources that are idle or alive for too long, or lost; return how many.

        Borrowers do this in passing, so it is only needed for a pool that is not being used.
        """
        now = self.clock.now()
        self._upkeep.note(now)
        return self._stock.forget_closed_loops() + self._upkeep.reap(now)

    def close(self, timeout: float = 10.0) -> bool:
        """Stop lending, wait until everything is returned, and close all resources.

        After `timeout` seconds, resources that are still borrowed are closed while in use, and the
        result is False.
        """
        return drive_sync(self._shut(timeout, waits_here=True), self.clock)

    async def aclose(self, timeout: float = 10.0) -> bool:  # noqa: ASYNC109 - as in `close`
        """Async twin of `close`."""
        return await drive_async(self._shut(timeout, waits_here=False), self.clock)

    def _shut(self, timeout: float, *, waits_here: bool) -> Generator[Request, Any, bool]:
        timeout = check.seconds("timeout", timeout, zero=True)
        stock, slots = self._stock, self.slots
        if waits_here and stock.needs_running_loop():
            raise RuntimeError(f"pool {self.name!r}: write `await pool.aclose()` in its event loop")
        self._lending.closed = True
        self._lending.skips_validation = self._lending.keeps_intact = False
        with slots.mutex:
            while (waiter := slots.queue.pop()) is not None:
                waiter.turn_away("no room")
        stock.forget_closed_loops()
        self._upkeep.reap(self.clock.now())
        self._lending.close_idle()
        if stock.empty:
            return True
        if (yield self._emptied_by(self.clock.now() + timeout)):
            return True
        borrowed = stock.borrowed()
        for _, resource in borrowed:
            stock.retire(resource, "closed", slot=False)
        longest = 2 * self.settings.close_timeout
        emptied = stock.empty or (yield self._emptied_by(self.clock.now() + longest))
        return bool(emptied) and not borrowed

    def _emptied_by(self, until: float) -> CallbackWaiter:
        stock = self._stock
        return CallbackWaiter(
            stock.when_empty, leave=stock.forget_waiter, result=lambda: stock.empty, until=until
        )

    def __enter__(self) -> Pool[T]:
        try:
            self.fill()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Pool[T]:
        try:
            await self.afill()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # --- Settings and statistics ---

    def update(self, **changes: Any) -> None:
        """Change settings at run time, by the names of the constructor's arguments.

        Borrowed resources stay borrowed. Shorter `idle_timeout` and `max_lifetime` also apply to
        existing resources, counted from now. Invalid values raise and change nothing.
        """
        known = list(vars(self.settings))
        for name in changes or ("",):
            if name not in known:
                raise TypeError(f"Pool.update({name}): it takes {', '.join(known)}")
        settings = self.settings.changed(changes)
        self._check_exhaustion(settings, given=self._can_degrade)
        self._stock.close_timeout = settings.close_timeout
        closed = self._lending.closed
        self._lending.follow(settings)
        if not changes.keys().isdisjoint(("max_lifetime", "idle_timeout")):
            self._lending.shorten(self.clock.now())
        self.slots.resize(settings.max_size, settings.max_waiting)
        if not closed:
            self._upkeep.reap(self.clock.now())
        emit(SettingsChanged, self.name, policy="pool", changes=changes)

    def advice(self) -> Advice:
        """Return the pool size that recent traffic needs, by Little's law, with an explanation."""
        now = self.clock.now()
        self._upkeep.fold(now)
        return advise(self._upkeep.uses, now, self.settings.max_size)

    def snapshot(self) -> dict[str, Any]:
        """Return the resources, the counts, and the current borrowers with their times."""
        now = self.clock.now()
        upkeep, stock = self._upkeep, self._stock
        upkeep.note(now)
        stock.forget_closed_loops()
        counts = upkeep.counts
        lost = set(stock.lost)
        borrowed = [pair for pair in stock.borrowed() if pair[1] not in lost]
        borrowed.sort(key=itemgetter(0))
        listed = [
            {"borrowed_at": resource.place, "seconds": max(0.0, now - since)}
            for since, resource in borrowed[:BORROWERS_LISTED]
        ]
        return {
            "name": self.name,
            "seconds": max(0.0, now - upkeep.uses.began),
            "limit": self.settings.max_size,
            "in_flight": len(borrowed),
            "idle": stock.idle,
            "closing": len(stock.closing),
            "waiting": self.slots.waiting,
            "queue_wait": self.slots.queue_wait(now),
            "borrowed": upkeep.uses.total,
            **{name: counts[name] for name in COUNTED},
            "closed": dict(sorted(stock.causes.items())),
            "close_failed": stock.close_failed,
            "use": upkeep.uses.latency.snapshot(now),
            "wait": upkeep.waits.latency.snapshot(now),
            "borrowers": listed,
        }

    def _check_exhaustion(self, settings: PoolSettings, *, given: bool) -> None:
        if settings.when_exhausted == "degrade" and not given:
            raise ValueError("when_exhausted='degrade': pass degraded=, which makes a substitute")


def _optional(name: str, value: Callable[..., Any] | None) -> Callable[..., Any] | None:
    return None if value is None else check.function(name, value)
