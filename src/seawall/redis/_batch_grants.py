"""Holders of granted batches, their waiters, and the pending question to the store."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from seawall.errors import StoreUnavailable
from seawall.models.rate.batches import NOTHING, Lot, Purse, Spent
from seawall.redis._limits_wire import numbers
from seawall.runtime.gil import LOCK_FREE

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.redis._batches import LeasedLimits
    from seawall.redis._limits_wire import Names, Terms
    from seawall.runtime.layers import Kind
    from seawall.runtime.limit_share import Verdict, Wanted


class Door:
    """Fast path to the purse of a single limit without keys: the gate itself spends from it.

        lot, cost = door.open, door.cost
        left = lot.left - cost
        if left >= lot.floor and now < lot.until:
            lot.left = left
            receipt = lot, cost

    Nothing may interrupt these steps: see `seawall.runtime.gil`. The door outlives purses and
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

    __slots__ = ("_door", "grant", "key", "limit", "line", "lost_at", "open", "purse", "terms")

    def __init__(
        self, terms: Terms, limit: int, key: Hashable, batch: int, door: Door | None
    ) -> None:
        """Start empty."""
        self.terms = terms
        self.limit = limit
        self.key = key
        self.purse = Purse(batch)
        self._door = door if key is None else None
        self.open: Lot = NOTHING
        self.line: dict[Buying, int] = {}
        """The waiters in order, and how much each wants."""
        self.grant: Grant | None = None
        """The pending question."""
        self.lost_at = 0.0
        """When the pending question counts as lost."""

    def __repr__(self) -> str:
        return f"<Holder of {self.key!r}: {self.purse!r}, {len(self.line)} waiting>"

    def shut(self) -> None:
        """Stop spending without the lock."""
        self.open = NOTHING
        if self._door is not None:
            self._door.open = NOTHING

    def reopen(self) -> None:
        """Allow spending without the lock again, unless a caller waits."""
        lot = self.purse.lot if LOCK_FREE and not self.line else NOTHING
        self.open = lot
        if self._door is not None:
            self._door.open = lot if self._door.up else NOTHING


class Paid:
    """What one call has spent, from several limits or lots: a receipt."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[tuple[Holder, Spent]]) -> None:
        """Record the spent `parts`."""
        self.parts = parts


class Granted(NamedTuple):
    """The store granted `amount`."""

    amount: int
    mark: int


class Refused(NamedTuple):
    """The store granted nothing: the minimum will be available in `wait` microseconds."""

    wait: float


class Grant:
    """The question how much of a batch is available."""

    __slots__ = ("_holder", "_share", "asked", "doubted", "enough", "least", "loop", "want")

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
        self.doubted = False
        """Whether it is checked again, since a caller waits for it in another loop or thread."""

    def start(self, kind: Kind | None) -> None:
        """Ask the store, in the running event loop if there is one; do not wait."""
        share, loop = self._share, running_loop()
        kind = kind or ("async" if loop is not None else "sync")
        if kind == "async" and loop is not share.background:
            self.loop = loop
        asking = share.store.ask(kind, self._holder.terms, self, share.clock)

        def wake() -> bool:
            answer: Granted | Refused | StoreUnavailable
            try:
                answer = asking.claim()
            except StoreUnavailable as error:
                answer = error
            share.arrived(self._holder, self, answer)
            return True

        share.asks += 1
        asking.publish(wake)

    # As an item of `Terms`

    def ask(self, names: Names) -> str:
        """Return the question.

        The amount is decided only now: more callers may have come meanwhile.
        """
        holder, line = self._holder, self._holder.line
        with self._share.mutex:
            first = next(iter(line.values()), 0)
            self.want, self.least = holder.purse.ask(first, sum(line.values()), any_=self.enough)
            self.asked = self._share.clock.now()
        number = holder.limit + 1
        return f'["g",{number},{names.state(number, holder.key)},{self.want},{self.least}]'

    def read(self, answer: str, now: int) -> Granted | Refused:
        """Return the store's answer."""
        count, *rest = answer.split(",")
        if count == "0":
            (wait,) = numbers(",".join(rest), 1)
            return Refused(float(wait))
        taken, mark = numbers(answer, 2)
        if not self.least <= taken <= self.want:
            raise ValueError(answer)
        return Granted(taken, mark)

    def granted(self, answer: Any) -> None:
        """Give back a late grant: no caller waits for it any more."""
        self._share.arrived(self._holder, self, answer)


class Buying:
    """A call that waits for a grant: a `Waiter` for the verdict."""

    __slots__ = (
        *("_share", "charges", "clock", "error", "holders"),
        *("kind", "loop", "until", "verdict", "wake"),
    )

    def __init__(
        self,
        share: LeasedLimits,
        kind: Kind,
        charges: Sequence[Wanted],
        clock: Clock,
    ) -> None:
        """Want `charges`; wait up to `until`, or if None, as long as the `Watch` allows."""
        self._share = share
        self.kind: Kind = kind
        self.charges = charges
        self.clock = clock
        self.loop = get_running_loop() if kind == "async" else None
        """The loop that it waits in; None: in a thread."""
        self.until = None if self.loop is not None else clock.now() + share.patience
        self.wake: Callable[[], bool] | None = None
        self.holders: list[Holder] = []
        self.verdict: Verdict | None = None
        self.error = ""

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queues; `wake` is called when there is a verdict."""
        self._share.buy(self, wake)

    def step_out(self) -> None:
        """Leave all queues. Called under the share's lock."""
        for holder in self.holders:
            holder.line.pop(self, None)
        self.holders = []

    def claim(self) -> Verdict:
        """Return the verdict, or raise `StoreUnavailable`."""
        self._share.leave(self)
        if self.verdict is None:
            raise StoreUnavailable(self.error or "the store did not answer in time")
        return self.verdict

    def abandon(self) -> None:
        """Stop waiting; give back what was spent for it."""
        self._share.drop_out(self)


class Bell:
    """Wakes a task that waits in `loop`, from any thread: it awaits `rung`."""

    __slots__ = ("loop", "rung")

    def __init__(self, loop: AbstractEventLoop) -> None:
        """Start silent."""
        self.loop = loop
        self.rung = loop.create_future()

    def __call__(self) -> bool:
        """Wake the task; return False if the loop is closed."""
        try:
            if running_loop() is self.loop:
                self._ring()
            else:
                self.loop.call_soon_threadsafe(self._ring)
        except RuntimeError:
            return False
        return True

    def _ring(self) -> None:
        if not self.rung.done():
            self.rung.set_result(None)


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return get_running_loop()
    except RuntimeError:
        return None
