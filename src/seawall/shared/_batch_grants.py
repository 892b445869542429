"""Who holds what was granted, who waits for it, and the one question to the store in between."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from seawall.errors import StoreUnavailable
from seawall.models.rate_batches import NOTHING, Lot, Purse, Spent
from seawall.runtime.gil import LOCK_FREE
from seawall.shared._limits_wire import Mark, numbers

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.runtime.layers import Kind
    from seawall.runtime.limit_share import Verdict, Wanted
    from seawall.shared._batches import LeasedLimits
    from seawall.shared._limits_wire import Names, Terms


class Door:
    """Where the purse of a limit without keys is spent from in a hurry; it outlives the purse."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        """Be shut."""
        self.open: Lot = NOTHING


class Holder:
    """The purse of one key of one limit, and who waits for it. Changed under the share's lock.

    But for `open`: from that lot, callers spend without the lock.
    """

    __slots__ = ("_door", "grant", "key", "limit", "line", "lost_at", "open", "purse", "terms")

    def __init__(self, terms: Terms, limit: int, key: Hashable, batch: int, door: Door) -> None:
        """Hold nothing yet."""
        self.terms = terms
        self.limit = limit
        self.key = key
        self.purse = Purse(batch)
        self._door = door if key is None else self
        self.open: Lot = NOTHING
        self.line: dict[Buying, int] = {}
        """Who waits, in order, and how much each wants."""
        self.grant: Grant | None = None
        """The question that is under way."""
        self.lost_at = 0.0
        """When it is taken to be lost."""

    def __repr__(self) -> str:
        return f"<Holder of {self.key!r}: {self.purse!r}, {len(self.line)} waiting>"

    def shut(self) -> None:
        """Let nobody spend without the lock."""
        self.open = self._door.open = NOTHING

    def reopen(self) -> None:
        """Let callers spend without the lock again, unless somebody waits."""
        lot = self.purse.lot if LOCK_FREE and not self.line else NOTHING
        self.open = self._door.open = lot


class Paid:
    """What one call has spent, of several limits or lots: a receipt."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[tuple[Holder, Spent]]) -> None:
        """Have spent `parts`."""
        self.parts = parts


class Granted(NamedTuple):
    """The store gave so much."""

    amount: int
    mark: Mark


class Refused(NamedTuple):
    """The store gave nothing: the least that was asked for will be there in so many us."""

    wait: float


class Grant:
    """The question how much of a batch may be had."""

    __slots__ = ("_holder", "_share", "asked", "doubted", "enough", "least", "loop", "want")

    def __init__(self, share: LeasedLimits, holder: Holder, asked: float, *, enough: bool) -> None:
        """Ask for those who wait and for a batch; `enough`: what the first needs will do.

        `asked` is when, by the pod's clock.
        """
        self._share = share
        self._holder = holder
        self.asked = asked
        self.enough = enough
        self.want = self.least = 1
        self.loop: AbstractEventLoop | None = None
        """Which event loop carries it; None if it is the background's."""
        self.doubted = False
        """Whether somebody waits for it in another thread or loop than that."""

    def start(self, kind: Kind | None) -> None:
        """Ask the store, in the running event loop if there is one; nobody waits here."""
        share, loop = self._share, running_loop()
        kind = kind or ("async" if loop is not None else "sync")
        if kind == "async":
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
        """Return the question. How much is known only now: others may have come meanwhile."""
        holder, line = self._holder, self._holder.line
        with self._share.mutex:
            first = next(iter(line.values()), 0)
            self.want, self.least = holder.purse.ask(first, sum(line.values()), any_=self.enough)
            self.asked = self._share.clock.now()
        number = holder.limit + 1
        return f'["g",{number},{names.state(number, holder.key)},{self.want},{self.least}]'

    def read(self, answer: str, now: int) -> Granted | Refused:
        """Return what the store said."""
        count, *rest = answer.split(",")
        if count == "0":
            (wait,) = numbers(",".join(rest), 1)
            return Refused(float(wait))
        taken, mark, account, before = numbers(answer, 4)
        if not self.least <= taken <= self.want:
            raise ValueError(answer)
        return Granted(taken, (mark, account, before))

    def granted(self, answer: Any) -> None:
        """Give back what comes late: nobody waits for it any more."""
        self._share.arrived(self._holder, self, answer)


class Buying:
    """A call that waits for what it wants to be granted: a `Waiter` for the verdict."""

    __slots__ = (
        *("_share", "charges", "clock", "error", "holders"),
        *("kind", "until", "verdict", "wake"),
    )

    def __init__(
        self,
        share: LeasedLimits,
        kind: Kind,
        charges: Sequence[Wanted],
        clock: Clock,
        until: float | None,
    ) -> None:
        """Want `charges`, and wait no longer than `until`; None: the loop's `Watch` looks."""
        self._share = share
        self.kind: Kind = kind
        self.charges = charges
        self.clock = clock
        self.until = until
        self.wake: Callable[[], bool] | None = None
        self.holders: list[Holder] = []
        self.verdict: Verdict | None = None
        self.error = ""

    def publish(self, wake: Callable[[], bool]) -> None:
        """Stand in line, and be woken when there is a verdict."""
        self._share.buy(self, wake)

    def step_out(self) -> None:
        """Stand in no line any more; under the share's lock."""
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
        """Wait no longer; what was spent for it goes back."""
        self._share.drop_out(self)


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop that this thread is in; None if it is in none."""
    try:
        return get_running_loop()
    except RuntimeError:
        return None
