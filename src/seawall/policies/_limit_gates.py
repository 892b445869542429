"""The gates of an adaptive limit: one lock-free, and one that shares the limit out to classes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from seawall.context import current_tier
from seawall.errors import Overloaded, Rejected
from seawall.models.partitions import Partitions
from seawall.policies._slot_gates import SlotGate
from seawall.runtime.call import STREAMED
from seawall.runtime.layers import FAILED, OK, Host, Inline, Outcome, Wait
from seawall.runtime.slots import GRANTED, Refusal, Slot, SlotWaiter

if TYPE_CHECKING:
    from seawall.policies.adaptive_limit import AdaptiveLimit

_BEYOND: Final = None
"""The ticket of a call let in beyond the limit, where it is not enforced. It is no sample."""


class _Waiter(SlotWaiter):
    """A call waiting for a slot; its time begins when it has one."""

    __slots__ = ()

    def claim(self) -> Any:
        """Return the slot, if there is one for it: the call begins now."""
        slot = super().claim()
        if slot is not _BEYOND:
            slot.began = self.clock.now()
        return slot


class Gate(SlotGate):
    """The limit inside one guard. A ticket is the slot, which knows when its call began."""

    policy: AdaptiveLimit
    beyond = _BEYOND

    def __init__(self, policy: AdaptiveLimit, host: Host) -> None:
        super().__init__(policy, host)
        self._slots = policy.slots
        self._free = policy.slots.free
        self._windows = windows = policy.windows
        if policy.is_drop is None:
            self.inline = Inline(
                names={
                    "free": self._free,
                    "slots": self._slots,
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
        """Take a free slot. While others wait there is none: it goes from hand to hand."""
        try:
            slot = self._free.pop()
        except IndexError:
            pass
        else:
            slot.began = now
            return slot
        return self._enter_busy(now)

    def leave(self, ticket: Any, outcome: Outcome, detail: object, now: float) -> None:
        """Give the slot back, and learn from what the call took."""
        if ticket is _BEYOND:
            return
        began = ticket.began
        self._slots.give_back(ticket)
        if outcome is OK and self.policy.is_drop is None:
            windows = self._windows
            windows.samples.append(now - began)
            if now >= windows.due:
                self._look(now)
        else:
            self._learn(began, outcome, detail, now)

    def _enter_busy(self, now: float) -> object:
        policy = self.policy
        policy._crowded = True
        if policy.mode != "enforce" or not policy.max_wait:
            self.refuse(self.full("all are in use"))
            return _BEYOND
        raise Wait(self.queue(now))

    def waiter(self, now: float, max_wait: float, ticket: Any = None) -> SlotWaiter:
        """Return a waiter for a slot."""
        clock = self.host.clock
        return _Waiter(self._slots, clock, now, max_wait, self.turned_away)

    def _learn(self, began: float, outcome: Outcome, detail: Any, now: float) -> None:
        """Count the call as served or dropped; what failed or was cancelled tells nothing."""
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
        # An error that is no Exception is our own timeout's; None is that of an abandoned thread.
        late = isinstance(detail, TimeoutError) and not isinstance(detail, Rejected)
        if failed and (late or not isinstance(detail, Exception)):
            return True
        is_drop = self.policy.is_drop
        if is_drop is None or detail is STREAMED:
            return False
        try:
            return bool(is_drop(detail, None) if failed else is_drop(None, detail))
        except Exception:
            import logging

            logging.getLogger("seawall").exception(
                "is_drop of guard %r failed; the call counts as not dropped", self.host.name
            )
            return False

    def _look(self, now: float) -> None:
        """End the window if it is over. The collector may be who asks: then a little later."""
        rng = self.host.rng.random
        self._slots.mutex.do(lambda: self.policy._end_window(now, rng))

    def typical(self) -> float | None:
        """Return what a typical call takes: then a slot may be free."""
        return self._windows.typical

    def full(self, why: str) -> Overloaded:
        """Return the refusal of a call for which there is no slot."""
        return Overloaded(self.no_slot(why), retry_after=self.typical())

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the limit, what it is based on, use and waiting."""
        model = self.policy.model
        return {**super().snapshot(now), "algorithm": model.name, "baseline": model.baseline}


class _PartitionWaiter(_Waiter):
    """A call of one class waiting for a slot that its class may have."""

    __slots__ = ("partitions",)

    partitions: Partitions

    def grant(self) -> bool:
        """Receive a slot; False if nobody is there to use it."""
        self.slot.kind = self.kind
        self.partitions.take(self.kind)
        if super().grant():
            return True
        self.partitions.give_back(self.kind)
        self.slot.kind = None
        return False

    def claim(self) -> Any:
        """Return the slot, and the class of the call."""
        slot = super().claim()
        return slot if slot is _BEYOND else (slot, self.kind)

    def _give_up(self) -> None:
        if self.state == GRANTED:
            self.partitions.give_back(self.kind)
            self.slot.kind = None
        super()._give_up()


class PartitionedGate(Gate):
    """The limit inside one guard, shared out among classes. A ticket tells the class too."""

    def __init__(self, policy: AdaptiveLimit, host: Host) -> None:
        super().__init__(policy, host)
        assert policy.partitions is not None  # noqa: S101 - for the type checker
        self._partitions = policy.partitions
        self.takes_arguments = policy.partition is not None
        self.inline = None
        self._refused = dict.fromkeys(policy.partitions.in_flight, 0)
        policy.slots.lost = partial(_count_out, policy.partitions)

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take a free slot that the call's class may have."""
        partition, places = self.policy.partition, self._partitions
        name = places.name(current_tier() if partition is None else partition(*args, **kwargs))
        with self._slots.mutex:
            if places.admits(name) and self._free:
                slot = self._free.pop()  # nobody takes one without the lock
                slot.began, slot.kind = now, name
                places.take(name)
                return slot, name
            if places.total >= places.limit:
                self.policy._crowded = True
        return self._enter_full(now, name)

    def leave(self, ticket: Any, outcome: Outcome, detail: object, now: float) -> None:
        """Give the slot back, and learn from what the call took."""
        if ticket is not _BEYOND:
            slot, name = ticket
            began = slot.began
            self._slots.mutex.do(lambda: self._give_back(slot, name))
            self._learn(began, outcome, detail, now)

    def _give_back(self, slot: Slot, name: str) -> None:
        self._partitions.give_back(name)
        slot.kind = None
        self._slots.free.append(slot)
        if self._slots.attention:
            self._slots.serve()

    def _enter_full(self, now: float, name: str) -> object:
        policy = self.policy
        if policy.mode != "enforce" or not policy.max_wait:
            self._count(name)
            self.refuse(self.full(f"those for {name!r} are in use"))
            return _BEYOND
        raise Wait(self.queue(now, (None, name)))

    def waiter(self, now: float, max_wait: float, ticket: Any = None) -> SlotWaiter:
        clock, (_, name) = self.host.clock, ticket
        turned_away = partial(self._turned_away_from, name)
        waiter = _PartitionWaiter(self._slots, clock, now, max_wait, turned_away, name)
        waiter.partitions = self._partitions
        return waiter

    def _turned_away_from(self, name: str, why: Refusal) -> object:
        self._count(name)
        return self.turned_away(why)

    def _count(self, name: str) -> None:
        self._refused[name] += self.policy.mode == "enforce"

    def snapshot(self, now: float) -> dict[str, Any]:
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


def _count_out(partitions: Partitions, name: str | None) -> None:
    """Count a call out whose slot was lost. Under the lock."""
    if name is not None:
        partitions.give_back(name)
