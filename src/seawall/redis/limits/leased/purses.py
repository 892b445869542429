"""The purses of a pod: granted batches, the calls that wait for them, and the pending question.

A `PurseSection` operates on purses under the lock of their policy. It closes the lock-free path of
every purse that it touches, and reopens it at the end. Questions are sent, grants given back and
waiters woken only after that.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from seawall.errors import StoreUnavailable
from seawall.models.rate.batches import NOTHING, Lot, Purse, Spent
from seawall.redis.limits.wire import (
    MOST_QUESTIONS,
    LimitTerms,
    ScriptCall,
    ScriptKeys,
    TakeRequest,
    numbers,
)
from seawall.runtime.mutex import LOCK_FREE
from seawall.runtime.store import LimitVerdict

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.redis.limits.leased.share import LeasedLimits
    from seawall.runtime.layers import Kind
    from seawall.runtime.store import WantedCharge


class PursePath:
    """Fast path to the purse of a single limit without keys: the gate itself spends from it.

        lot, cost = path.open, path.cost
        left = lot.left - cost
        if left >= lot.floor and now < lot.until:
            lot.left = left
            receipt = lot, cost

    Nothing may interrupt these steps: see `seawall.runtime.mutex`. The path outlives purses and
    settings.
    """

    __slots__ = ("cost", "open", "up")

    def __init__(self, *, up: bool) -> None:
        """Start shut; `up` says whether the store is reachable. If not, it stays shut."""
        self.open: Lot = NOTHING
        self.up = up
        self.cost: float = float("inf")
        """Cost of a call, set by the gate; infinite if each call must be inspected."""


class Holder:
    """The purse of one key of one limit, and its waiters. Modified under the share's lock.

    The exception is `open`: callers spend from that lot without the lock.
    """

    __slots__ = (
        *("_spend_path", "grant", "key", "limit", "lost_at"),
        *("open", "purse", "terms", "waiters"),
    )

    def __init__(
        self, terms: LimitTerms, limit: int, key: Hashable, batch: int, spend_path: PursePath | None
    ) -> None:
        self.terms = terms
        self.limit = limit
        self.key = key
        self.purse = Purse(batch)
        self._spend_path = spend_path if key is None else None
        self.open: Lot = NOTHING
        self.waiters: dict[BatchWaiter, int] = {}
        """The waiters in order, and how much each wants."""
        self.grant: BatchRequest | None = None
        """The pending question."""
        self.lost_at = 0.0
        """When the pending question counts as lost."""

    def __repr__(self) -> str:
        return f"<Holder of {self.key!r}: {self.purse!r}, {len(self.waiters)} waiting>"

    def shut(self) -> None:
        """Stop spending without the lock."""
        self.open = NOTHING
        if self._spend_path is not None:
            self._spend_path.open = NOTHING

    def reopen(self) -> None:
        """Allow spending without the lock again, unless a caller waits."""
        lot = self.purse.lot if LOCK_FREE and not self.waiters else NOTHING
        self.open = lot
        if self._spend_path is not None:
            self._spend_path.open = lot if self._spend_path.up else NOTHING


class Paid:
    """What one call has spent, from several limits or lots: a receipt."""

    def __init__(self, parts: Sequence[tuple[Holder, Spent]]) -> None:
        self.parts = parts


class GrantedBatch(NamedTuple):
    """The store granted `amount`."""

    amount: int
    mark: int


class RefusedBatch(NamedTuple):
    """The store granted nothing: the minimum will be available in `wait` microseconds."""

    wait: float


class BatchRequest:
    """The question how much of a batch is available."""

    def __init__(self, share: LeasedLimits, holder: Holder, asked: float, *, enough: bool) -> None:
        """Ask for the waiters and for a batch; `enough`: what the first waiter needs suffices.

        `asked` is the time of asking, by the pod's clock.
        """
        self._share = share
        self._holder = holder
        self.asked = asked
        self.enough = enough
        self.want = self.least = 1
        self.loop: AbstractEventLoop | None = None
        """The event loop that carries it; None if it is the background's."""
        self.rechecked = False
        """Whether it is checked again, since a caller waits for it in another loop or thread."""

    def start(self, kind: Kind | None) -> None:
        """Ask the store, in the running event loop if there is one; do not wait."""
        share, loop = self._share, running_loop()
        kind = kind or ("async" if loop is not None else "sync")
        if kind == "async" and loop is not share.background:
            self.loop = loop
        question = share.store.ask(kind, self._holder.terms, self, share.clock)

        def wake() -> bool:
            answer: GrantedBatch | RefusedBatch | StoreUnavailable
            try:
                answer = question.claim()
            except StoreUnavailable as error:
                answer = error
            share.arrived(self._holder, self, answer)
            return True

        share.asks += 1
        question.publish(wake)

    # As an item of `LimitTerms`

    def ask(self, names: ScriptKeys) -> str:
        """Return the question.

        The amount is decided only now: more callers may have come meanwhile.
        """
        holder, waiters = self._holder, self._holder.waiters
        with self._share.mutex:
            first, total = next(iter(waiters.values()), 0), sum(waiters.values())
            self.want, self.least = holder.purse.ask(first, total, any_=self.enough)
            self.asked = self._share.clock.now()
        number = holder.limit + 1
        return f'["g",{number},{names.state(number, holder.key)},{self.want},{self.least}]'

    def read(self, answer: str, now: int) -> GrantedBatch | RefusedBatch:
        """Return the store's answer."""
        count, *rest = answer.split(",")
        if count == "0":
            (wait,) = numbers(",".join(rest), 1)
            return RefusedBatch(float(wait))
        taken, mark = numbers(answer, 2)
        if not self.least <= taken <= self.want:
            raise ValueError(answer)
        return GrantedBatch(taken, mark)

    def granted(self, answer: Any) -> None:
        """Give back a late grant: no caller waits for it any more."""
        self._share.arrived(self._holder, self, answer)


class BatchWaiter:
    """A call that waits for a grant: a `Waiter` for the verdict."""

    __slots__ = (
        *("_share", "charges", "clock", "error", "holders"),
        *("kind", "loop", "until", "verdict", "wake"),
    )

    def __init__(
        self,
        share: LeasedLimits,
        kind: Kind,
        charges: Sequence[WantedCharge],
        clock: Clock,
    ) -> None:
        """Want `charges`; wait up to `until`, or if None, as long as the `WaitTimer` allows."""
        self._share = share
        self.kind: Kind = kind
        self.charges = charges
        self.clock = clock
        self.loop = get_running_loop() if kind == "async" else None
        """The loop that it waits in; None: in a thread."""
        self.until = None if self.loop is not None else clock.now() + share.patience
        self.wake: Callable[[], bool] | None = None
        self.holders: list[Holder] = []
        self.verdict: LimitVerdict | None = None
        self.error = ""

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queues; `wake` is called when there is a verdict."""
        self._share.wait_for_grant(self, wake)

    def leave_queues(self) -> None:
        """Leave all queues. Called under the share's lock."""
        for holder in self.holders:
            holder.waiters.pop(self, None)
        self.holders = []

    def claim(self) -> LimitVerdict:
        """Return the verdict, or raise `StoreUnavailable`."""
        self._share.leave(self)
        if self.verdict is None:
            raise StoreUnavailable(self.error or "the store did not answer in time")
        return self.verdict

    def abandon(self) -> None:
        """Stop waiting; give back what was spent for it."""
        self._share.abandon(self)


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return get_running_loop()
    except RuntimeError:
        return None


_LOST: Final = 5.0
"""Seconds after which a question counts as lost: for example, its event loop has ended."""


class LotChange(NamedTuple):
    """How much was taken from a lot, and how much of that was used."""

    holder: Holder
    lot: Lot
    taken: int
    used: int


def settlement_calls(terms: LimitTerms, changes: Sequence[LotChange]) -> list[ScriptCall]:
    """Return keys and arguments of the script calls that report `changes` to the store."""
    calls = []
    for first in range(0, len(changes), MOST_QUESTIONS):
        names = ScriptKeys(terms)
        questions = []
        for holder, lot, taken, actual in changes[first : first + MOST_QUESTIONS]:
            takings = ((holder.limit + 1, holder.key, taken),)
            item = TakeRequest(holder.terms, takings, frozenset(), "")
            item.marks = [lot.mark]
            used: list[int | None] = [None] * len(terms.rules)
            used[holder.limit] = actual
            questions.append(item.settle(names, used))
        calls.append(names.call(*questions))
    return calls


def join(holders: Sequence[dict[Hashable, Holder]], waiter: BatchWaiter, now: float) -> bool:
    """Queue `waiter` for a question that its own loop already carries: the common case."""
    charge = waiter.charges[0]
    holder = holders[0].get(charge.key)
    if holder is None or not holder.waiters or len(waiter.charges) > 1:
        return False
    if holder.grant is None or holder.grant.loop is not waiter.loop or now > holder.lost_at:
        return False
    holder.waiters[waiter] = charge.cost
    waiter.holders.append(holder)
    return True


class _Inside:
    """Entry and exit of a section under the lock."""

    def __init__(self, share: LeasedLimits) -> None:
        self._share = share

    def __enter__(self) -> None:
        self._share.nesting.enter()

    def __exit__(self, *exc: object) -> None:
        share = self._share
        if share.nesting.leave():  # a nested section (of a signal handler) opens nothing
            while share.shut:
                share.shut.pop().reopen()


class PurseSection:
    """`with PurseSection(share, now) as section, share.mutex, section.inside:` is under the lock.

    Work that must not be done under the lock is done at the end.
    """

    def __init__(self, share: LeasedLimits, now: float, kind: Kind | None = None) -> None:
        """Act at `now`; ask questions as `kind`, or as fits where the section ends."""
        self._share = share
        self._now = now
        self._kind = kind
        self.inside = _Inside(share)
        self.changes: list[LotChange] = []
        self._asks: list[BatchRequest] = []
        self._wakes: list[BatchWaiter] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        share = self._share
        if self.changes:
            share.give_back(self.changes)
        for grant in self._asks:
            grant.start(self._kind)
        if share.rechecks:
            share.recheck_job.soon()
        for waiter in self._wakes:
            if waiter.wake is not None and not waiter.wake():
                waiter.abandon()  # its loop is gone

    def purse_of(self, holder: Holder) -> Purse:
        """Close the lock-free path, drop expired lots and return the purse."""
        share, purse = self._share, holder.purse
        if not share.shut or share.shut[-1] is not holder:
            holder.shut()
            share.shut.append(holder)
        purse.batch = share.batches[holder.limit]
        for lot in purse.drop(self._now):
            self._give_back(holder, lot)
        if purse.held > purse.batch:  # batches are smaller now, or its waiters have gone
            self._trim(holder)
        if holder.grant is not None and self._now > holder.lost_at:
            self._give_up(holder)
        return purse

    def _give_back(self, holder: Holder, lot: Lot) -> None:
        self.changes.append(LotChange(holder, lot, lot.taken, lot.taken - lot.left))
        lot.left = 0

    def _trim(self, holder: Holder) -> None:
        """Give back what exceeds a batch and the needs of the waiters."""
        over = holder.purse.trim(sum(holder.waiters.values()))
        self.changes += [LotChange(holder, lot, part, 0) for lot, part in over]

    def _give_up(self, holder: Holder) -> None:
        """Stop waiting for an answer; if it still comes, it is given back."""
        holder.grant = None
        holder.purse.refused()

    def clear(self, holder: Holder) -> None:
        """Give back everything that it holds."""
        for lot in self.purse_of(holder).clear():
            self._give_back(holder, lot)

    def clear_all(self) -> list[LotChange]:
        """Empty all purses; return the changes that the caller must give back."""
        for holders in self._share.holders:
            for holder in holders.values():
                self.clear(holder)
        changes, self.changes = self.changes, []
        return changes

    # Spending

    def pay(self, charges: Sequence[WantedCharge], *, waited: bool = False) -> Paid | None:
        """Spend for all charges; None if a purse holds too little, or others wait for it.

        A call that has `waited` is served in order: it ignores other waiters.
        """
        wanted = []
        for number, charge in enumerate(charges):
            if not charge.cost:
                if charge.estimated:
                    return None  # its actual cost is reported to the store
                continue
            holder = self._share.holders[number].get(charge.key)
            if holder is None or (holder.waiters and not waited):
                return None
            if self.purse_of(holder).held < charge.cost:
                return None
            wanted.append((holder, charge.cost))
        parts = []
        for holder, cost in wanted:
            parts.append((holder, holder.purse.spend(self._now, cost) or []))
            if not holder.waiters and holder.purse.low():
                self._request(holder)
        return Paid(parts)

    def try_serve(self, waiter: BatchWaiter) -> bool:
        """Give `waiter` everything it wants, if available; return whether it was."""
        paid = self.pay(waiter.charges, waited=bool(waiter.holders))
        if paid is not None:
            self._end(waiter, LimitVerdict(0.0, receipt=paid))
        return paid is not None

    def _end(self, waiter: BatchWaiter, verdict: LimitVerdict | None, error: str = "") -> None:
        # Keep this order: a call that is in no queue reads the verdict without the lock.
        waiter.verdict, waiter.error = verdict, error
        waiter.leave_queues()
        self._wakes.append(waiter)

    # Waiting

    def enqueue(self, waiter: BatchWaiter) -> None:
        """Queue `waiter` behind earlier waiters where there is too little, and ask the store."""
        for number, charge in enumerate(waiter.charges):
            if not charge.cost:
                continue
            holder = self._share.holder(number, charge.key)
            if holder is None:  # there was room for it before, but no longer
                self._end(waiter, None, "too many keys at once")
                return
            if holder in waiter.holders:
                continue
            if holder.waiters or self.purse_of(holder).held < charge.cost:
                holder.waiters[waiter] = charge.cost
                waiter.holders.append(holder)
                grant = holder.grant
                if grant is not None and grant.loop is not None:
                    if waiter.loop is None and grant.loop is running_loop():
                        self._give_up(holder)  # that loop is blocked by this very call
                    elif grant.loop is not waiter.loop:
                        self._schedule_recheck(holder, grant)
                if holder.grant is None:
                    self._request(holder)

    def _schedule_recheck(self, holder: Holder, grant: BatchRequest) -> None:
        """Schedule a check of a question: the loop that carries it may not be running."""
        if not grant.rechecked:
            grant.rechecked = True
            self._share.rechecks.append((holder, grant))

    def ask_again(self, holder: Holder, grant: BatchRequest) -> None:
        """Repeat a question that has no answer yet, if a caller waits for it."""
        if holder.grant is grant and grant.loop is not None and holder.waiters:
            self._give_up(holder)
            self._request(holder)

    def _request(self, holder: Holder, *, enough: bool = False) -> None:
        """Ask for more, for the waiters or ahead of time, unless a question is pending.

        `enough`: what the first waiter needs suffices.
        """
        share, purse = self._share, self.purse_of(holder)
        if holder.grant is not None or holder.terms is not share.terms:
            return
        purse.ask()  # the amount is decided when it is sent
        holder.grant = BatchRequest(share, holder, self._now, enough=enough)
        holder.lost_at = self._now + _LOST
        self._asks.append(holder.grant)
        here = running_loop()
        if any(waiter.loop is not here for waiter in holder.waiters):
            self._schedule_recheck(holder, holder.grant)

    def process_answer(self, holder: Holder, grant: BatchRequest, answer: Any) -> None:
        """Serve the waiters with the grant; or refuse them, if there was none."""
        purse = self.purse_of(holder)
        if isinstance(answer, GrantedBatch):
            self._share.granted += answer.amount
        if holder.grant is not grant:
            if isinstance(answer, GrantedBatch):
                self._give_back(holder, Lot(answer.amount, 0.0, answer.mark))
            return
        holder.grant = None
        if isinstance(answer, GrantedBatch):
            until = grant.asked + self._share.leases[holder.limit]
            lot = purse.granted(answer.amount, until, answer.mark)
            lot.owner = holder
            self._share.expiring.append((holder, lot))
            self._serve(holder)
            self._trim(holder)
            return
        purse.refused()
        if isinstance(answer, StoreUnavailable):
            for waiter in list(holder.waiters):
                self._end(waiter, None, str(answer))
        else:
            self._refuse(holder, grant, answer.wait)

    def give_up_waiting(self, late: Sequence[BatchWaiter]) -> None:
        """End calls that have waited too long; the answer is still used if it comes."""
        for waiter in late:
            if waiter.holders:
                self._end(waiter, None, "the store did not answer in time")

    def _serve(self, holder: Holder) -> None:
        """Serve the waiters in order from what is there; ask for more if it was too little."""
        purse = holder.purse
        for waiter, cost in list(holder.waiters.items()):
            lot = purse.lot
            if lot.left <= cost and purse.held < cost:
                self._request(holder)
                return
            if len(waiter.charges) > 1:
                if not self.try_serve(waiter):
                    self.enqueue(waiter)  # now another limit has too little
            elif lot.left > cost:
                lot.left -= cost  # inlined `spend` for a lot that is not used up; keep in sync
                self._end(waiter, LimitVerdict(0.0, 0, 0, (lot, cost)))
            else:
                paid = Paid([(holder, purse.spend(self._now, cost) or [])])
                self._end(waiter, LimitVerdict(0.0, 0, 0, paid))

    def _refuse(self, holder: Holder, grant: BatchRequest, wait: float) -> None:
        """Refuse the waiters: the amount will not be available for a while.

        A fair part of a batch is worth a short wait, but not a long one if less is enough.
        """
        first = next(iter(holder.waiters.values()), 0)
        least_of_all = max(1, first - holder.purse.held)
        fair = grant.least > least_of_all
        if fair and first and wait > self._share.leases[holder.limit] * 1e6:
            self._request(holder, enough=True)
            return
        for waiter, cost in list(holder.waiters.items()):
            if fair or cost >= first:
                verdict = LimitVerdict(None if wait < 0 else wait, holder.limit, holder.limit)
                self._end(waiter, verdict)
        if holder.waiters:
            self._request(holder, enough=True)

    # Settling

    def settle(self, holder: Holder, spent: Spent, actual: int) -> None:
        """Put unused amounts back where they came from; or charge what was used beyond."""
        purse = self.purse_of(holder)
        unused = sum(part for _lot, part in spent) - actual
        if unused < 0:
            self.changes.append(LotChange(holder, spent[-1][0], 0, -unused))
        back: Spent = []
        for lot, part in reversed(spent):
            if unused > 0:
                back.append((lot, min(part, unused)))
                unused -= part
        if back:
            late = purse.put_back(back, self._now)
            self.changes += [LotChange(holder, lot, part, 0) for lot, part in late]
            self._serve(holder)
