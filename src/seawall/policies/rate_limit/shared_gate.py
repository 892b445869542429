"""A shared rate limit inside one guard: ask the store, refuse by a cached refusal, or wait.

Calls that wait for the same key form a FIFO queue in this process. Only the first asks the store,
at the time that the store has named; when it leaves, the next one asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from seawall.errors import StoreUnavailable
from seawall.models.rate.buckets import Bucket, TokenBucket
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.rate_limit.fast_path import awaited_store, granted_batch
from seawall.policies.rate_limit.gate import RateGate, RateWaiter
from seawall.policies.rate_limit.meters import Blocked
from seawall.policies.rate_limit.reservation import Charge, Reservation
from seawall.runtime.driver import wait_sync
from seawall.runtime.layers import UNUSED, Host, Kind, Layer, Outcome, Wait, Waiter
from seawall.runtime.store import LimitVerdict

if TYPE_CHECKING:
    from seawall.policies.rate_limit.policy import RateLimit
    from seawall.policies.rate_limit.sharing import Sharing


ASK: Final = object()  # sentinel for a call for which the store has to be asked


class SharedRateGate(RateGate):
    """The rate limit inside one guard, with its limits in a store."""

    def __init__(self, policy: RateLimit, host: Host, sharing: Sharing) -> None:
        super().__init__(policy, host)
        self.sharing = sharing
        self._sides: dict[Kind, Layer] = {kind: _Side(self, kind) for kind in ("sync", "async")}

    def _success_path(self) -> None:
        """Return None: each side has its own lines."""

    def layer(self, kind: Kind) -> Layer:
        """Return the layer for calls of that kind. It decides how the store is asked."""
        return self._sides[kind]

    def enter_from(self, kind: Kind, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Take what the call costs, refuse it, or let it wait for the store or for its turn."""
        charges = self.policy._charges(args, kwargs)
        ticket = self._at_once(charges, now)
        if ticket is not ASK:
            return ticket
        return self._wait(kind, charges, self.sharing.exhausted.look(charges, now), now)

    async def enter_async(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Async twin of `enter_from`: await the store's reply here."""
        return await self.ask_async(self.sharing.usual or self.policy._charges(args, kwargs), now)

    async def ask_async(self, charges: Sequence[Charge], now: float) -> object:
        """Async entry for given charges, one for each limit."""
        policy, sharing, clock = self.policy, self.sharing, self.host.clock
        ticket = self._at_once(charges, now)
        if ticket is not ASK:
            return ticket
        known = sharing.exhausted.look(charges, now)
        if known is not None or policy._meters.waiting:
            return self._wait("async", sharing.own(charges), known, now)
        number = next(policy._meters.numbers)
        try:
            verdict = await sharing.share.answer(charges, clock)
        except StoreUnavailable:
            return self.alone(charges, clock.now())
        if verdict.wait == 0:
            return self.taken(charges, verdict.receipt)
        waiter = SharedWaiter(self, "async", sharing.own(charges), now)
        waiter.number = number
        return waiter.judge(verdict, clock.now())

    def ask_sync(self, charges: Sequence[Charge], now: float) -> object:
        """Sync twin of `ask_async`: block this thread until the store has answered."""
        sharing, clock = self.sharing, self.host.clock
        ticket = self._at_once(charges, now)
        if ticket is not ASK:
            return ticket
        waiter: Waiter | None = None
        while True:
            try:
                if waiter is not None:
                    return wait_sync(waiter, clock)
                return self._wait(
                    "sync", sharing.own(charges), sharing.exhausted.look(charges, now), now
                )
            except Wait as wait:
                waiter = wait.waiter

    def _at_once(self, charges: Sequence[Charge], now: float) -> object:
        """Return the ticket of a call that need not ask the store, or `ASK`."""
        sharing = self.sharing
        if self.policy.mode == "off":
            return None
        if sharing.share.away:
            return self.alone(charges, now)
        if sharing.spends:
            receipt = sharing.share.spend(charges, now)
            if receipt is not None:
                return self.taken(charges, receipt)
        for charge in charges:
            if charge.cost or charge.estimated:
                return ASK
        return None  # it costs nothing

    def _wait(
        self, kind: Kind, charges: Sequence[Charge], known: Blocked | None, now: float
    ) -> object:
        """Let the call wait, or refuse it by an earlier reply of the store."""
        why = ""
        if known is None or (self.policy.max_wait and self.policy.mode == "enforce"):
            waiter = SharedWaiter(self, kind, charges, now)
            refusal = waiter.begin(known, now)
            if refusal is None:
                raise Wait(waiter)
            known, why = refusal
        self.refuse(self.over(known, now, why))
        return None

    def taken(self, charges: Sequence[Charge], receipt: Any) -> object:
        """Return the ticket for taken `charges`: the receipt, if all calls take those."""
        if charges is self.sharing.usual:
            return receipt
        for charge in charges:
            charge.receipt = receipt
        return self.ticket(charges)

    def ticket(self, charges: Sequence[Charge]) -> Reservation:
        """Return the ticket of a call that has taken `charges`, from the store or from memory."""
        if charges[0].receipt is None:
            self.sharing.tell(charges)
        return super().ticket(charges)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Give back what was not used and settle what is known now.

        A call that was sent keeps it.
        """
        if ticket is None or isinstance(ticket, Reservation):
            super().leave(ticket, outcome, detail, now)
        elif outcome is UNUSED:
            self.sharing.give_back(ticket, self.sharing.usual)

    def alone(self, charges: Sequence[Charge], now: float) -> object:
        """Decide without the store."""
        failing = self.sharing.failing
        if failing == "local":
            return self.ask(self.sharing.own_part(charges), now)
        if failing == "closed":
            self.refuse(self.sharing.closed(f"guard {self.host.name!r}: "))
        else:
            self.sharing.alone += 1
            self.sharing.tell(charges)
        return None

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the limits, the waiters, and how they are shared. The store knows what is left."""
        shown = super().snapshot(now)
        if not self.sharing.share.away:
            for limit in shown["limits"].values():
                limit.pop("left", None)
                limit.pop("keys", None)
        return {**shown, "shared": self.sharing.snapshot()}


class _Side(Layer):
    """The gate for calls of one kind."""

    def __init__(self, gate: SharedRateGate, kind: Kind) -> None:
        self.takes_arguments = gate.takes_arguments
        self.leave = gate.leave
        self.enter = partial(gate.enter_from, kind)
        # If the guard bounds all waits together, the interpreter waits and counts them.
        if kind == "async" and gate.host.max_wait is None:
            self.inline = awaited_store(
                gate.enter_async, takes_arguments=gate.takes_arguments, settles=gate.settles
            )
        path = gate.sharing.share.spend_path
        if path is not None and gate.sharing.usual:
            self.inline = granted_batch(path, self.inline)


class SharedWaiter(RateWaiter):
    """A call on its way into a guard: it waits for the store's reply, or in the queue."""

    _gate: SharedRateGate

    def __init__(
        self, gate: SharedRateGate, kind: Kind, charges: Sequence[Charge], now: float
    ) -> None:
        """Request `charges` within the policy's `max_wait`, and before the deadline."""
        super().__init__(gate, charges, now)
        self._kind = kind
        self._asked_at = now
        self._question: Waiter | None = None
        self._blocked: Blocked | None = None
        self.turn = 0.0  # the time at which it may be admitted, in microseconds, as far as known

    def begin(self, known: Blocked | None, now: float) -> tuple[Blocked, str] | None:
        """Join the queue, or ask the store. Return the refusal if neither is possible.

        `known` is the store's earlier reply.
        """
        self.number = next(self._meters.numbers)
        if known is None and not self._meters.waiting:
            self._state = "asking"
            return None
        us = whole_microseconds(now)
        with self._meters.mutex, self._meters:
            blocked = self._behind(us) or known
            if blocked is None:
                self._state = "asking"
                return None
            if not self._in_time(blocked, us):
                return blocked, self.too_long()
            if self._meters.waiting >= self._meters.max_waiting:
                return blocked, "and no room to wait"
            self._wait_for(blocked, us)
        return None

    def _behind(self, now: float) -> Blocked | None:
        """Return the queue that it has to join, and the minimum wait there."""
        waits: list[tuple[Charge, float | None]] = []
        for charge in self._charges:
            self._meters.remove_late(charge, now, self)
            queue = charge.meter.queues.get(charge.place) if charge.cost else None
            if queue is None or not queue.waiters:
                continue
            # The first goes at its turn. A bucket then has to pay for it, and for all others.
            rule, head = charge.meter.rule, queue.first
            wait = max(1.0, getattr(head, "turn", 0.0) - now)
            if isinstance(rule, TokenBucket):
                wait += rule.amount(queue.total - head.cost + charge.cost)
            elif isinstance(rule, Bucket):
                wait += rule.amount(queue.total)
            waits.append((charge, wait))
        return Blocked.by(waits)

    def _wait_for(self, blocked: Blocked, now: float) -> None:
        self._state = "waiting"
        self._blocked = blocked
        self.turn = now + (blocked.wait or 0.0)
        self._wait_for_longest(blocked, now)

    def publish(self, wake: Callable[[], bool]) -> None:
        """Ask the store, or register to be woken at its turn."""
        if self._state == "asking":
            clock = self._gate.host.clock
            self._asked_at = clock.now()
            share = self._gate.sharing.share
            self._question = question = share.ask(self._kind, self._charges, clock)
            # A store that has not replied when the guard's max_wait is used up counts as silent.
            self.until = question.until
            if self._patience < (inf if self.until is None else self.until):
                self.until = self._patience
            question.publish(wake)
            return
        with self._meters.mutex, self._meters:
            if self._woken:
                self._woken = False
                wake()
            else:
                self._wake = wake

    def claim(self) -> Any:
        """Return the ticket, raise the refusal, or continue to wait."""
        now = self._gate.host.clock.now()
        if self._state == "asking":
            return self._answered(now)
        assert self._blocked is not None  # noqa: S101 - for the type checker
        us = whole_microseconds(now)
        left = self._blocked._replace(wait=max(0.0, self.turn - us))
        with self._meters.mutex, self._meters:
            self._wake, self._woken = None, False
            enforced = self._gate.policy.mode == "enforce"
            if enforced and not self.is_late(us):
                if self.queue is None or self.queue.first is self:
                    self._state = "asking"
                else:
                    self._wait_for_longest(left, us)
            else:
                self._state = "given up"
                self._meters.leave_queue(self)
        if self._state != "given up":
            raise Wait(self)
        self._gate.refuse(self._over(left, now))
        return None

    def _answered(self, now: float) -> Any:
        question, self._question = self._question, None
        assert question is not None  # noqa: S101 - for the type checker
        try:
            verdict = question.claim()
        except StoreUnavailable:
            self._leave()
            return self._gate.alone(self._charges, now)
        return self.judge(verdict, now)

    def judge(self, verdict: LimitVerdict, now: float) -> Any:
        """Return the ticket, raise the refusal, or continue to wait, as the store decides."""
        gate = self._gate
        blocked = gate.sharing.blocked(self._charges, verdict)
        if blocked is None:
            self._leave()
            return gate.ticket(self._charges)
        gate.sharing.note(verdict, self._charges, self._asked_at)
        us = whole_microseconds(now)
        with self._meters.mutex, self._meters:
            waits = gate.policy.mode == "enforce" and self._in_time(blocked, us)
            room = self.queue is not None or self._meters.waiting < self._meters.max_waiting
            if waits and room:
                self._wait_for(blocked, us)
            else:
                self._state = "turned away" if waits else "hopeless"
                self._meters.leave_queue(self)
        if self._state == "waiting":
            raise Wait(self)
        over = self._over if gate.policy.max_wait else gate.over
        gate.refuse(over(blocked, now))
        return None

    def _leave(self) -> None:
        """Leave the queue, if it is in one, so that the next waiter asks."""
        if self.queue is not None:
            with self._meters.mutex, self._meters:
                self._meters.leave_queue(self)

    def abandon(self) -> None:
        """Leave the queue, and give back what was already granted."""
        question, self._question = self._question, None
        if question is not None:
            question.abandon()
        super().abandon()
