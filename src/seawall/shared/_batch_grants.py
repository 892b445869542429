"""Who holds what was granted, who waits for it, and the one question to the store in between."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from seawall.errors import StoreUnavailable
from seawall.models.rate.batches import NOTHING, Lot, Purse, Spent
from seawall.runtime.gil import LOCK_FREE
from seawall.shared._limits_wire import numbers

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.runtime.layers import Kind
    from seawall.runtime.limit_share import Verdict, Wanted
    from seawall.shared._batches import LeasedLimits
    from seawall.shared._limits_wire import Names, Terms


class Door:
    """Where the purse of a single limit without keys is spent from in a hurry: by the gate itself.

        lot, cost = door.open, door.cost
        left = lot.left - cost
        if left >= lot.floor and now < lot.until:
            lot.left = left
            receipt = lot, cost

    Nothing may interrupt that: see `seawall.runtime.gil`. It outlives purses and settings.
    """

    __slots__ = ("cost", "open", "up")

    def __init__(self, *, up: bool) -> None:
        """Be shut; `up`: whether the store is there, without which nobody is in a hurry."""
        self.open: Lot = NOTHING
        self.up = up
        self.cost: float = float("inf")
        """What a call costs; more than there is where each has to be looked at. The gate's."""


class Holder:
    """The purse of one key of one limit, and who waits for it. Changed under the share's lock.

    But for `open`: from that lot, callers spend without the lock.
    """

    __slots__ = ("_door", "grant", "key", "limit", "line", "lost_at", "open", "purse", "terms")

    def __init__(
        self, terms: Terms, limit: int, key: Hashable, batch: int, door: Door | None
    ) -> None:
        """Hold nothing yet."""
        self.terms = terms
        self.limit = limit
        self.key = key
        self.purse = Purse(batch)
        self._door = door if key is None else None
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
        self.open = NOTHING
        if self._door is not None:
            self._door.open = NOTHING

    def reopen(self) -> None:
        """Let callers spend without the lock again, unless somebody waits."""
        lot = self.purse.lot if LOCK_FREE and not self.line else NOTHING
        self.open = lot
        if self._door is not None:
            self._door.open = lot if self._door.up else NOTHING


class Paid:
    """What one call has spent, of several limits or lots: a receipt."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[tuple[Holder, Spent]]) -> None:
        """Have spent `parts`."""
        self.parts = parts


class Granted(NamedTuple):
    """The store gave so much."""

    amount: int
    mark: int


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
        """Whether it is looked after, since somebody waits for it elsewhere."""

    def start(self, kind: Kind | None) -> None:
        """Ask the store, in the running event loop if there is one; nobody waits here."""
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
        taken, mark = numbers(answer, 2)
        if not self.least <= taken <= self.want:
            raise ValueError(answer)
        return Granted(taken, mark)

    def granted(self, answer: Any) -> None:
        """Give back what comes late: nobody waits for it any more."""
        self._share.arrived(self._holder, self, answer)


class Buying:
    """A call that waits for what it wants to be granted: a `Waiter` for the verdict."""

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
        """Want `charges`; wait no longer than `until`, or if None, as long as the `Watch` lets."""
        self._share = share
        self.kind: Kind = kind
        self.charges = charges
        self.clock = clock
        self.loop = get_running_loop() if kind == "async" else None
        """Where it waits; None: in a thread."""
        self.until = None if self.loop is not None else clock.now() + share.patience
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


class Bell:
    """Wakes a task that waits in `loop`, from any thread: it awaits the `rung`."""

    __slots__ = ("loop", "rung")

    def __init__(self, loop: AbstractEventLoop) -> None:
        """Be silent."""
        self.loop = loop
        self.rung = loop.create_future()

    def __call__(self) -> bool:
        """Ring; False if the loop is closed, so that nobody hears it."""
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
    """Return the event loop that this thread is in; None if it is in none."""
    try:
        return get_running_loop()
    except RuntimeError:
        return None
