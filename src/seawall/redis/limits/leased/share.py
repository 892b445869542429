"""`sharing="leased"`: take batches of the shared limit ahead of time, and spend them in the pod.

Promises:
- Nothing is spent that was not taken from the shared limit before.
- For each key, at most one batch is held unspent, and for at most a lease. Unspent amounts are
  given back.
- A call that finds enough costs no round trip. Other calls wait for the store's answer, in order;
  for each key, one question at a time is pending, for all waiters and a batch.

The rules are in `models.rate.batches`; what is done under the lock is in `purses`.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle, get_running_loop, sleep
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

from seawall.clock import SYSTEM, Clock
from seawall.models.rate.batches import Lot, batch_for, excess_of, lease_of
from seawall.models.rate.rule import RateRule
from seawall.models.rate.split import check_divisible
from seawall.redis.keys import key_part
from seawall.redis.limits.leased.purses import (
    BatchRequest,
    BatchWaiter,
    Holder,
    LotChange,
    Paid,
    PursePath,
    PurseSection,
    join,
    settlement_calls,
)
from seawall.redis.limits.shared import SharedLimits
from seawall.redis.limits.wire import SCRIPT, ScriptCall, script_settings
from seawall.redis.messages import weakly, weakly_awaited
from seawall.redis.store import SLACK
from seawall.runtime.driver import Steps
from seawall.runtime.layers import Kind
from seawall.runtime.mutex import Mutex, Nesting
from seawall.runtime.store import LimitStanding, LimitVerdict, Receipt, WantedCharge

if TYPE_CHECKING:
    from seawall.redis.store import StoreCore

MAX_KEYS: Final = 10_000
"""Maximum number of keys of a limit with a purse; the store decides each call of other keys."""

_SWEEP: Final = 8
_UPKEEP: Final = 0.5
"""Seconds between two checks for expired lots: they are given back even without calls."""

REPEAT_AFTER: Final = 0.005
"""Seconds after which a question that another loop carries is repeated beside it.

A running loop usually has its answer by then. One that is blocked or has ended never has.
"""

SECOND_LOOK: Final = 0.01
"""Seconds between a timer and its action: a loop that was busy first reads what has arrived.

Longer than a store's own second look, which reports the reason; and an answer may lead to another
question.
"""

PURSES_AT_ONCE: Final = 500
"""Maximum number of purses handled in one section: callers wait meanwhile."""


class LeasedLimits(SharedLimits):
    """The limits of one policy in the store, spent in batches: `LimitShare`."""

    sharing = "leased"

    def __init__(
        self,
        store: StoreCore,
        name: str,
        rules: Sequence[RateRule[Any]],
        *,
        batch: int | None = None,
        **options: Any,
    ) -> None:
        """Take up to `batch` ahead, of each limit; None: what keeps the excess at a fifth."""
        self._given = batch
        self.mutex = Mutex()
        self.nesting = Nesting()
        self.shut: list[Holder] = []
        """Holders whose lock-free path is closed, because a section is running."""
        self.holders: list[dict[Hashable, Holder]] = []
        self.spend_path = PursePath(up=store.up) if len(rules) == 1 else None
        """Fast path of a gate, in its success path: for a single limit without keys."""
        self.expiring: deque[tuple[Holder, Lot]] = deque()
        self._sweeps: list[list[Hashable]] = []
        self.clock: Clock = SYSTEM
        self.batches: tuple[int, ...] = ()
        self.leases: tuple[float, ...] = ()
        """Seconds for which a grant may be spent, for each limit."""
        self.granted = self.returned = 0
        self.rechecks: deque[tuple[Holder, BatchRequest]] = deque()
        """Questions of one loop that a caller waits for in another loop, or in a thread."""
        self._timers: dict[AbstractEventLoop, WaitTimer] = {}
        """One for each loop, used only in its thread."""
        self.background: AbstractEventLoop | None = None
        """The store's own event loop, which never blocks."""
        self.patience = store.timeout + SLACK
        """Seconds that a caller waits for an answer."""
        super().__init__(store, name, rules, **options)
        finalize(self, store.pods.watchers.add(weakly(self.pods_changed)))
        finalize(self, store.watch(weakly(self.store_changed)))
        finalize(self, store.every(_UPKEEP, weakly_awaited(self.upkeep)).stop)
        self.recheck_job = store.every(3600.0, weakly_awaited(self.ask_again))
        finalize(self, self.recheck_job.stop)
        store.at_close(self.return_all)

    # Settings

    def configure(self, rules: Sequence[RateRule[Any]]) -> None:
        """Use other numbers from now on; what was granted under the old ones is given back."""
        check_divisible(self.sharing, rules)
        for rule in rules:
            if self._given is not None and rule.capacity and self._given > rule.capacity:
                raise ValueError(
                    f"batch={self._given}: more than {rule.capacity} is never granted at once;"
                    f" write batch={rule.capacity} or less"
                )
        if script_settings(rules) == self._settings:
            return
        calls: Sequence[ScriptCall] = ()
        with self.mutex:
            with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
                changes = section.clear_all()
            if changes:
                calls = self._giving_back(changes)  # under the settings by which it was granted
            super().configure(rules)
            self.leases = tuple(lease_of(rule) / 1e6 for rule in rules)
            waiting = self._forget()
        self.resize()
        for keys, args in calls:
            self.store.post(SCRIPT, keys, args)
        for waiter in waiting:
            waiter.error = "the settings were changed"
            if waiter.wake is not None:
                waiter.wake()

    def _forget(self) -> list[BatchWaiter]:
        """Drop all holders; return the waiters."""
        old = [holder for holders in self.holders for holder in holders.values()]
        waiting = {waiter: None for holder in old for waiter in holder.waiters}
        for holder in old:
            holder.shut()
            holder.waiters.clear()
        self.holders = [{} for _ in self.terms.rules]
        self._sweeps = [[] for _ in self.terms.rules]
        self.expiring.clear()
        self.shut.clear()
        return list(waiting)

    def _after_fork(self) -> None:
        """Hold nothing in a child process: the grants belong to the parent."""
        super()._after_fork()
        self.mutex = Mutex()
        self.nesting = Nesting()
        self._timers = {}
        self.background = None
        if self.spend_path is not None:
            self.spend_path.up = True
        self.rechecks.clear()
        self._forget()
        self.resize()

    def resize(self) -> None:
        """Adjust batches to the number of pods.

        A pod that the others have not heard of yet takes one at a time: their batches are still
        those for fewer pods.
        """
        rules, pods = self.terms.rules, self.store.pods
        if self._given is not None:
            self.batches = (self._given,) * len(rules)
        else:
            known = pods.settled
            self.batches = tuple(batch_for(rule, pods.count) if known else 1 for rule in rules)

    def pods_changed(self) -> None:
        """Adjust batches to the number of pods; give back what then exceeds a batch."""
        before = self.batches
        self.resize()
        if any(new < old for new, old in zip(self.batches, before, strict=True)):
            with self.mutex:
                holders = [holder for some in self.holders for holder in some.values()]
            for first in range(0, len(holders), PURSES_AT_ONCE):
                with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
                    for holder in holders[first : first + PURSES_AT_ONCE]:
                        section.purse_of(holder)

    def store_changed(self, *_news: object) -> None:
        """Let gates spend directly only while the store is reachable."""
        if self.spend_path is not None:
            with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
                self.spend_path.up = self.store.up
                holder = self.holders[0].get(None)
                if holder is not None:
                    section.purse_of(holder)

    @property
    def excess(self) -> tuple[int, ...]:
        """Maximum admissions beyond the algorithm's own bound, for each limit."""
        pods = self.store.pods.count
        together = zip(self.terms.rules, self.batches, strict=True)
        return tuple(excess_of(rule, batch, pods) for rule, batch in together)

    def snapshot(self) -> dict[str, Any]:
        """Return the batches, and what they mean."""
        return {
            **super().snapshot(),
            "pods": self.store.pods.count,
            "batch": self.batches,
            "excess": self.excess,
            "granted": self.granted,
            "returned": self.returned,
            "keys": sum(map(len, self.holders)),
        }

    # Spending

    def spend(self, charges: Sequence[WantedCharge], now: float) -> Receipt | None:
        """Pay from the purses, all or nothing; None if one holds too little."""
        if len(charges) == 1:
            charge = charges[0]
            holder, cost = self.holders[0].get(charge.key), charge.cost
            if holder is not None and cost:
                # From here on nothing can interrupt: see `seawall.runtime.mutex`. A holder of the
                # lock has closed this path before, by an empty lot.
                lot = holder.open
                left = lot.left - cost
                if left >= lot.floor and now < lot.until:
                    lot.left = left
                    return lot, cost
                if holder.waiters:
                    return None  # others wait: queue behind them
        with PurseSection(self, now) as section, self.mutex, section.inside:
            return section.pay(charges)

    def ask(self, kind: Kind, charges: Sequence[WantedCharge], clock: Clock) -> Any:
        """Return a waiter for the verdict: by a grant, or if that does not apply, by the store."""
        if not self._ready:
            self._prepare()
        self.clock = clock
        for number, charge in enumerate(charges):
            exact = charge.cost > self.batches[number] or (charge.estimated and not charge.cost)
            if exact or (charge.cost and self.holder(number, charge.key) is None):
                return super().ask(kind, charges, clock)
        return BatchWaiter(self, kind, charges, clock)

    def holder(self, limit: int, key: Hashable) -> Holder | None:
        """Return the holder of the grants of `key`; None if there is no room for another."""
        holders = self.holders[limit]
        holder = holders.get(key)
        if holder is None:
            key_part(key)  # raises early if it cannot be a key in a store
            with self.mutex:
                if len(holders) >= MAX_KEYS and not self._evict_idle(limit):
                    return None
                made = Holder(self.terms, limit, key, self.batches[limit], self.spend_path)
                holder = holders.setdefault(key, made)
        return holder

    def _evict_idle(self, limit: int) -> bool:
        """Check a few keys and drop one that holds nothing; return whether there was one."""
        holders, keys = self.holders[limit], self._sweeps[limit]
        for _ in range(_SWEEP):
            if not keys:
                keys.extend(holders)
            key = keys.pop()
            holder = holders.get(key)
            if holder is not None and holder.purse.idle and not holder.waiters:
                holder.shut()
                del holders[key]
                return True
        return False

    def wait_for_grant(self, waiter: BatchWaiter, wake: Callable[[], bool]) -> None:
        """Let `waiter` wait until everything it wants is there; ask for what is missing."""
        now, waiter.wake = waiter.clock.now(), wake
        with self.mutex:
            joined = join(self.holders, waiter, now)
        if not joined:
            with PurseSection(self, now, waiter.kind) as section, self.mutex, section.inside:
                if not section.try_serve(waiter):
                    section.enqueue(waiter)
        if waiter.holders and waiter.loop is not None:
            self._timer_of(waiter.loop).add(waiter, self.patience, self)

    def _timer_of(self, loop: AbstractEventLoop) -> WaitTimer:
        """Return the timer of the running loop."""
        timer = self._timers.get(loop)
        if timer is None:
            with self.mutex:
                known = self._timers.items()
                self._timers = {one: kept for one, kept in known if not one.is_closed()}
                timer = self._timers.setdefault(loop, WaitTimer(loop))
        return timer

    def leave(self, waiter: BatchWaiter) -> None:
        """Stop `waiter` from waiting."""
        if waiter.holders:
            self.mutex.do(waiter.leave_queues)

    def abandon(self, waiter: BatchWaiter) -> None:
        """Stop `waiter` from waiting, and take back what was spent for it."""

        def drop() -> None:
            with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
                holders = waiter.holders
                waiter.leave_queues()
                for holder in holders:
                    section.purse_of(holder)
            verdict, waiter.verdict = waiter.verdict, None
            if verdict is not None and verdict.receipt is not None:
                self.settle(verdict.receipt, [0] * len(self.terms.rules))

        self.mutex.do(drop)

    def arrived(self, holder: Holder, grant: BatchRequest, answer: Any) -> None:
        """Process a grant or a refusal, in the thread that got the answer."""
        with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
            section.process_answer(holder, grant, answer)

    # Giving back

    def settle(self, receipt: Any, used: Sequence[int | None]) -> None:
        """Put back what was not used; charge the shared limit for what was used beyond."""
        if isinstance(receipt, tuple):
            lot, cost = receipt
            receipt = Paid([(lot.owner, [(lot, cost)])])
        elif not isinstance(receipt, Paid):
            super().settle(receipt, used)
            return

        def settle() -> None:
            with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
                for holder, spent in receipt.parts:
                    actual = used[holder.limit]
                    if actual is not None:
                        section.settle(holder, spent, actual)

        self.mutex.do(settle)

    def give_back(self, changes: Sequence[LotChange]) -> None:
        """Report unused amounts to the store, in the background."""
        for keys, args in self._giving_back(changes):
            self.store.post(SCRIPT, keys, args)

    def _giving_back(self, changes: Sequence[LotChange]) -> Sequence[ScriptCall]:
        self.returned += sum(change.taken - change.used for change in changes if change.taken)
        return settlement_calls(self.terms, changes)

    async def upkeep(self) -> None:
        """Give back what has expired, even without calls: a job of the background."""
        self.background = get_running_loop()
        self.return_expired()

    def return_expired(self) -> None:
        """Give back what has expired."""
        now, more = self.clock.now(), True
        while more:
            with PurseSection(self, now) as section, self.mutex, section.inside:
                for _ in range(PURSES_AT_ONCE):
                    more = bool(self.expiring) and self.expiring[0][1].until <= now
                    if not more:
                        break
                    holder, _lot = self.expiring.popleft()
                    section.purse_of(holder)

    async def ask_again(self) -> None:
        """Repeat questions that have no answer after a moment: a job of the background."""
        if not self.rechecks:
            return
        due = len(self.rechecks)  # those that come meanwhile trigger another run
        await sleep(REPEAT_AFTER)
        for _ in range(due):
            with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
                section.ask_again(*self.rechecks.popleft())

    async def return_all(self) -> None:
        """Give everything back: the store is closing."""
        with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
            changes = section.clear_all()
        for keys, args in self._giving_back(changes):
            await self.store.acall(SCRIPT, keys, args, 1.0)

    def _lowering(
        self, limit: int, key: Hashable, remaining: int, reset_after: float
    ) -> ScriptCall:
        self._empty(limit, key)
        return super()._lowering(limit, key, remaining, reset_after)

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> Steps[None]:
        """Give back this pod's holdings, then forget the usage of these limits and keys."""
        for limit, key in places:
            self._empty(limit, key)
        yield from super().reset(places)

    def _empty(self, limit: int, key: Hashable) -> None:
        """Give back this pod's holdings, before the limit is lowered or reset."""
        with PurseSection(self, self.clock.now()) as section, self.mutex, section.inside:
            holder = self.holders[limit].get(key)
            if holder is not None:
                section.clear(holder)

    def peek(
        self, charges: Sequence[WantedCharge]
    ) -> Steps[tuple[LimitVerdict, Sequence[LimitStanding]]]:
        """Return the limits' state; this pod's holdings count as left."""
        verdict, standings = yield from super().peek(charges)
        now = self.clock.now()
        with self.mutex:
            found = [self.holders[n].get(charge.key) for n, charge in enumerate(charges)]
            held = [0 if holder is None else holder.purse.usable(now) for holder in found]
        if all(own >= charge.cost for own, charge in zip(held, charges, strict=True)):
            verdict = LimitVerdict(0.0)
        together = zip(standings, held, strict=True)
        return verdict, [LimitStanding(there.left + own, there.rest) for there, own in together]


class WaitTimer:
    """The waiting calls of one event loop.

    All have the same maximum wait, so the first to come is due first, and one timer is enough.
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[float, BatchWaiter]] = deque()
        self._timer: TimerHandle | None = None

    def add(self, waiter: BatchWaiter, patience: float, share: LeasedLimits) -> None:
        """Let `waiter` wait for at most `patience` seconds."""
        waiting = self._waiting
        while waiting and not waiting[0][1].holders:
            waiting.popleft()
        due = self.loop.time() + patience
        waiting.append((due, waiter))
        if self._timer is None:
            self._timer = self.loop.call_at(due, self._look_again, share)

    def _look_again(self, share: LeasedLimits) -> None:
        """Let the loop first read what has arrived: it may have been busy."""
        self._timer = self.loop.call_later(SECOND_LOOK, self._give_up, share)

    def _give_up(self, share: LeasedLimits) -> None:
        self._timer = None
        waiting, now, late = self._waiting, self.loop.time(), []
        while waiting:
            due, waiter = waiting[0]
            if waiter.holders and due > now:
                self._timer = self.loop.call_at(due, self._look_again, share)
                break
            waiting.popleft()
            late.append(waiter)
        with PurseSection(share, share.clock.now()) as section, share.mutex, section.inside:
            section.give_up_waiting(late)
