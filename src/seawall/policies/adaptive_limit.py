"""Adaptive concurrency limit, learned from the latency of calls.

Promises:
- Calls in flight never exceed the current limit, and the limit never leaves its bounds.
- The limit does not grow while it is not used.
- Calls that were dropped, cancelled or failed never count as fast or slow ones.
- Time spent in this gate's own queue does not count.
- With partitions, a class with fewer calls in flight than its reservation is admitted immediately.

The rules are in `seawall.models.concurrency.algorithms` and
`seawall.models.concurrency.partitions`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

from seawall import _checks as check
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.context import current_tier
from seawall.errors import ErrorKinds, Overloaded, Rejected, error_predicate
from seawall.models.concurrency.algorithms import vegas
from seawall.models.concurrency.limit import ConcurrencyLimit
from seawall.models.concurrency.partitions import Partitions
from seawall.models.concurrency.samples import Windows
from seawall.models.shedding.codel import QueueShed
from seawall.models.waiting import Order
from seawall.policies.slots import BEYOND, SlotGate, SlotPolicy
from seawall.runtime.call import STREAMED
from seawall.runtime.layers import FAILED, OK, Host, Inline, Outcome, Wait
from seawall.runtime.policy import GateBound, Mode
from seawall.runtime.slots import GRANTED, Refusal, Slot, SlotWaiter

DropRule = Callable[[Exception | None, Any], bool]
"""`is_drop(error, value)`: whether a call that raised `error`, or returned `value`, was dropped."""


class AdaptiveLimit(SlotPolicy):
    """Admit as many concurrent calls as possible without a growing queue at the dependency."""

    kind: ClassVar[str] = "adaptive_limit"

    def __init__(
        self,
        limit: ConcurrencyLimit | None = None,
        *,
        window: float = 0.1,
        max_wait: float = 0.0,
        max_waiting: int | None = None,
        order: Order = "criticality",
        partitions: Mapping[str, float] | None = None,
        partition: Callable[..., Hashable] | None = None,
        shed: QueueShed | None = None,
        is_drop: DropRule | ErrorKinds | None = None,
        mode: Mode = "enforce",
    ) -> None:
        """Admit as many calls as `limit` allows: `vegas()` by default, `aimd(...)`, `gradient2()`.

        The limit is updated every `window` seconds; less often while calls are slow or few. Other
        calls wait up to `max_wait` seconds, at most `max_waiting` of them (by default as many as
        the limit), in the `order` "criticality", "fifo" or "lifo"; `shed` is that of `Bulkhead`.

        `partitions` reserves a share of the limit for each class of calls, as in
        `{"live": 0.6, "batch": 0.2}`; the rest is for all. A call's class is
        `partition(*args, **kwargs)`, or its tier (see `tier`).

        `is_drop(error, value)`, or types of errors, defines which calls the dependency dropped
        because of overload; calls that timed out always count as dropped.
        """
        if limit is not None and not isinstance(limit, ConcurrencyLimit):
            raise TypeError(f"limit={limit!r}: write vegas(), gradient2() or aimd(slow_after=0.5)")
        self.model = vegas() if limit is None else limit.fresh()
        self.windows = Windows(check.seconds("window", window))
        super().__init__(self.model.limit, max_wait, max_waiting, order, shed, mode)
        self.partitions: Partitions | None = None
        self.partition = None if partition is None else check.plain_function("partition", partition)
        if partitions is not None:
            self.partitions = places = Partitions(partitions, self.model.limit)
            self.slots.fits = lambda waiter: places.admits(waiter.kind)
        elif partition is not None:
            raise TypeError('partition=...: write partitions={"live": 0.6, "batch": 0.2} too')
        self.is_drop = None if is_drop is None else error_predicate("is_drop", is_drop)
        self._crowded = False  # whether a call found all slots in use in this window
        survives_fork(self)

    def __repr__(self) -> str:
        shares = "" if self.partitions is None else f", partitions={self.partitions.shares!r}"
        return f"AdaptiveLimit({self.model!r}, {self._queue_repr()}{shares})"

    def _service_time(self, now: float) -> float | None:
        return self.windows.typical

    def _end_window(self, now: float, rng: Callable[[], float]) -> None:
        """Move the limit, if a window is over. Needs the lock of the slots."""
        window = self.windows.end(now)
        if window is None:
            return
        limit, in_flight = self.slots.limit, self.slots.in_use
        if in_flight < limit:  # the call that ends the window has just left
            in_flight = limit if self._crowded else in_flight + 1
        self._crowded = False
        self.model.on_sample(now, window.rtt, in_flight, window.dropped, rng)
        if self.model.limit != limit:
            self._resize(self.slots.room)

    def _resize(self, room: int | None) -> None:
        limit = self.model.limit
        if self.partitions is not None:
            self.partitions.resize(limit)
        self.slots.resize(limit, room)

    def _bind(self, host: Host) -> GateBound:
        return AdaptiveGate(self, host) if self.partitions is None else PartitionedGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        model, known = self.model.fresh(), self.partitions
        bounds = {"minimum": model.minimum, "maximum": model.maximum}
        settings: dict[str, Any] = {
            "window": self.windows.shortest,
            "max_wait": self.max_wait,
            "max_waiting": self.slots.room,
            "partitions": None if known is None else known.shares,
            "shed": self.shed,
            "mode": self.mode,
        }
        self._reject_unknown(changes, (*bounds, *settings))
        for name, value in changes.items():
            (bounds if name in bounds else settings)[name] = value
        model.bound(**bounds)
        fresh = AdaptiveLimit(model, **settings)
        given = set() if fresh.partitions is None else set(fresh.partitions.shares)
        if given != (set() if known is None else set(known.shares)):
            raise ValueError("update(partitions=...): write new shares for the same classes")
        with self.slots.mutex:
            self._take_over(fresh)
            self.windows.shortest = fresh.windows.shortest
            if known is not None and fresh.partitions is not None:
                known.shares = fresh.partitions.shares
            self.model.bound(**bounds)
            self._resize(fresh.slots.room)

    def _after_fork(self) -> None:
        """Reset in a child process: slots of threads that no longer exist are free again."""
        if self.partitions is not None:
            self.partitions.forget_in_flight()


class _AdaptiveWaiter(SlotWaiter):
    """A call waiting for a slot. Its time starts when it gets one."""

    __slots__ = ()

    def claim(self) -> Any:
        """Return the slot, if the call got one: the call starts now."""
        slot = super().claim()
        if slot is not BEYOND:
            slot.began = self.clock.now()
        return slot


class AdaptiveGate(SlotGate):
    """The limit inside one guard. A ticket is the slot, which stores when its call began."""

    policy: AdaptiveLimit
    waiter_type = _AdaptiveWaiter
    refusal_type = Overloaded

    def __init__(self, policy: AdaptiveLimit, host: Host) -> None:
        super().__init__(policy, host)
        self._windows = windows = policy.windows
        if policy.is_drop is None:
            self.inline = Inline(
                names={
                    "free": self.free,
                    "slots": self.slots,
                    "sample": windows.samples.append,
                    "windows": windows,
                    "look": self._look,
                },
                enter=(
                    "try:",
                    "    {ticket} = {free}.pop()",
                    "    {ticket}.began = now_",
                    "except IndexError_:",
                    "    pass",
                    "if {ticket} is ABSENT_:",
                    "    {ticket} = {enter}(now_)",
                ),
                leave=(
                    "if {left} is not None:",
                    "    {took} = end_ - {left}.began",
                    "    {free}.append({left})",
                    "    if {slots}.attention:",
                    "        {slots}.attend()",
                    "    {sample}({took})",
                    "    if end_ >= {windows}.due:",
                    "        {look}(end_)",
                ),
            )

    def enter(self, now: float, /) -> object:
        """Take a free slot. While calls wait there is none: slots are handed over directly."""
        slot = self.slots.take()
        if slot is None:
            return self._enter_busy(now)
        slot.began = now
        return slot

    def leave(self, ticket: Any, outcome: Outcome, detail: object, now: float) -> None:
        """Return the slot, and learn from the duration of the call."""
        if ticket is not BEYOND:
            began = ticket.began
            self.slots.give_back(ticket)
            self._learn(began, outcome, detail, now)

    def _enter_busy(self, now: float) -> object:
        self.policy._crowded = True
        return super()._enter_busy(now)

    def _learn(self, began: float, outcome: Outcome, detail: Any, now: float) -> None:
        """Count the call as served or dropped. Failed and cancelled calls are not counted."""
        dropped = (outcome is OK or outcome is FAILED) and self._was_dropped(outcome, detail)
        if dropped:
            self._windows.drops.append(now - began)
        elif outcome is OK:
            self._windows.samples.append(now - began)
        else:
            return
        if now >= self._windows.due:
            self._look(now)

    def _was_dropped(self, outcome: Outcome, detail: Any) -> bool:
        failed = outcome is FAILED
        # An error that is not an Exception comes from our own timeout; None from an abandoned
        # thread.
        late = isinstance(detail, TimeoutError) and not isinstance(detail, Rejected)
        if failed and (late or not isinstance(detail, Exception)):
            return True
        is_drop = self.policy.is_drop
        if is_drop is None or detail is STREAMED:
            return False
        try:
            return bool(is_drop(detail, None) if failed else is_drop(None, detail))
        except Exception:  # noqa: BLE001 - logged
            name = self.host.name
            log_failure("is_drop of guard %r failed; the call counts as not dropped", name)
            return False

    def _look(self, now: float) -> None:
        """End the window if it is over; slightly later if called by the garbage collector."""
        rng = self.host.rng.random
        self.slots.mutex.do(lambda: self.policy._end_window(now, rng))

    def typical(self) -> float | None:
        """Return the duration of a typical call."""
        return self._windows.typical

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the limit, its basis, slots in use and waiters."""
        model = self.policy.model
        return {**super().snapshot(now), "algorithm": model.name, "baseline": model.baseline}


class _PartitionWaiter(_AdaptiveWaiter):
    """A call of one class waiting for a slot that its class may have."""

    __slots__ = ("partitions",)

    partitions: Partitions

    def grant(self) -> bool:
        self.slot.kind = self.kind
        self.partitions.take(self.kind)
        if super().grant():
            return True
        self.partitions.give_back(self.kind)
        self.slot.kind = None
        return False

    def claim(self) -> Any:
        slot = super().claim()
        return slot if slot is BEYOND else (slot, self.kind)

    def _give_up(self) -> None:
        if self.state == GRANTED:
            self.partitions.give_back(self.kind)
            self.slot.kind = None
        super()._give_up()


class PartitionedGate(AdaptiveGate):
    """The limit inside one guard, divided among classes. A ticket includes the class."""

    def __init__(self, policy: AdaptiveLimit, host: Host) -> None:
        super().__init__(policy, host)
        assert policy.partitions is not None  # noqa: S101 - for the type checker
        self._partitions = places = policy.partitions
        self.takes_arguments = policy.partition is not None
        self.inline = None
        self._refused = dict.fromkeys(places.in_flight, 0)
        policy.slots.lost = lambda name: None if name is None else places.give_back(name)

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take a free slot that the call's class may have."""
        partition, places = self.policy.partition, self._partitions
        name = places.name(current_tier() if partition is None else partition(*args, **kwargs))
        with self.slots.mutex:
            if places.admits(name) and self.free:
                slot = self.free.pop()  # all takers hold the lock
                slot.began, slot.kind = now, name
                places.take(name)
                return slot, name
            if places.total >= places.limit:
                self.policy._crowded = True
        return self._enter_full(now, name)

    def leave(self, ticket: Any, outcome: Outcome, detail: object, now: float) -> None:
        """Return the slot, and learn from the duration of the call."""
        if ticket is not BEYOND:
            slot, name = ticket
            began = slot.began
            self.slots.mutex.do(lambda: self._give_back(slot, name))
            self._learn(began, outcome, detail, now)

    def refuse_if_full(self, now: float) -> None:
        """Do nothing: only `enter` knows the class of a call."""

    def _give_back(self, slot: Slot, name: str) -> None:
        self._partitions.give_back(name)
        slot.kind = None
        self.slots.free.append(slot)
        if self.slots.attention:
            self.slots.serve()

    def _enter_full(self, now: float, name: str) -> object:
        policy = self.policy
        if policy.mode != "enforce" or not policy.max_wait:
            self._count(name)
            self.refuse(self.full(f"those for {name!r} are in use"))
            return BEYOND
        raise Wait(self.queue(now, (None, name)))

    def waiter(self, now: float, max_wait: float, ticket: Any = None) -> SlotWaiter:
        """Return a waiter for a slot of the class of this call."""
        _, name = ticket

        def turned_away(why: Refusal) -> object:
            self._count(name)
            return self.turned_away(why)

        waiter = _PartitionWaiter(self.slots, self.host.clock, now, max_wait, turned_away, name)
        waiter.partitions = self._partitions
        return waiter

    def _count(self, name: str) -> None:
        self._refused[name] += self.policy.mode == "enforce"

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the limit, and how each class uses its part of it."""
        places = self._partitions
        classes = {
            name: {
                "share": places.shares.get(name, 0.0),
                "reserved": places.reserved[name],
                "in_flight": in_flight,
                "rejected": self._refused[name],
            }
            for name, in_flight in places.in_flight.items()
        }
        return {**super().snapshot(now), "partitions": classes}
