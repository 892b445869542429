"""What a rate limit knows of a store: limits that are kept for all pods, as protocols.

A policy asks a `LimitStore` once for its `LimitShare`. Charges are always one for each limit, in
the order of the limits; what costs 0 is never asked for, unless that is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from seawall.runtime.layers import Kind, Waiter

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.models.rate.rule import Rule


class Wanted(Protocol):
    """What one call takes from one limit."""

    key: Hashable
    cost: int
    estimated: bool
    """Whether the actual cost is told later."""


class Receipt(Protocol):
    """What was taken, for whoever has to give it back: known to the share alone.

    After `LimitShare.see()` it may have `standings`, a `Standing` by the number of each limit.
    """


class Verdict(NamedTuple):
    """What the store says to a call."""

    wait: float | None
    """0: taken. Else so many microseconds until the same would be admitted; None: never."""
    first: int = 0
    """Which limit is the first that is exceeded, where nothing was taken."""
    longest: int = 0
    """Which limit keeps it longest."""
    receipt: Receipt | None = None
    """Where it was taken."""


class Standing(NamedTuple):
    """How one limit stands."""

    left: int
    """How much may be taken at once now."""
    rest: float
    """Microseconds until all that was taken is forgotten; of a receipt, until there is more."""


class Door(Protocol):
    """Where a gate may spend in its success path, in steps that nothing can interrupt."""

    open: Any
    """The lot to spend from; one that holds nothing where the share has to be asked."""
    cost: float
    """What a call costs, set by the policy; infinite where calls have to be looked at."""


class LimitShare(Protocol):
    """The limits of one policy, in a store. Every failure of the store is `StoreUnavailable`."""

    sharing: str
    """How: "exact", "leased" or "split"."""

    door: Door | None
    """Where to spend in a hurry, of a single limit without keys; None if that cannot be."""

    @property
    def excess(self) -> tuple[int, ...]:
        """What may be taken beyond each limit, at most; empty if nothing may."""

    @property
    def mode(self) -> str:
        """What decides: "shared" is the store; else it is what is done while that is away."""

    @property
    def away(self) -> bool:
        """Whether this pod has to decide alone now."""

    @property
    def times(self) -> int:
        """Among how many pods the limits are divided where each decides alone."""

    @property
    def store_name(self) -> str:
        """What the store is called."""

    def spend(self, charges: Sequence[Wanted], now: float) -> Receipt | None:
        """Pay from what this pod was granted before; None if it has to ask. Never blocks."""

    def ask(self, kind: Kind, charges: Sequence[Wanted], clock: Clock) -> Waiter:
        """Return a waiter for the store's `Verdict`: its `claim` returns it."""

    async def answer(self, charges: Sequence[Wanted], clock: Clock) -> Verdict:
        """Return the store's verdict, in the running event loop.

        Charges that come as a tuple are those of every call, and never change.
        """

    def decide(self, charges: Sequence[Wanted]) -> Verdict:
        """Take by reservation: blocks this thread for the store's answer."""

    async def adecide(self, charges: Sequence[Wanted]) -> Verdict:
        """Do the same in the running event loop."""

    def take_up_to(self, most: int, charges: Sequence[Wanted]) -> int:
        """Take up to `most` for those charges that are estimated; blocks this thread.

        Returns how much; 0 also where another charge does not fit.
        """

    async def atake_up_to(self, most: int, charges: Sequence[Wanted]) -> int:
        """Do the same in the running event loop."""

    def peek(self, charges: Sequence[Wanted]) -> tuple[Verdict, Sequence[Standing]]:
        """Take nothing, and tell how each limit stands; blocks this thread."""

    async def apeek(self, charges: Sequence[Wanted]) -> tuple[Verdict, Sequence[Standing]]:
        """Do the same in the running event loop."""

    def count(self, costs: Sequence[tuple[Hashable, int]]) -> None:
        """Count what was admitted without the store's word, a key and a cost for each limit.

        Returns at once.
        """

    def settle(self, receipt: Receipt, used: Sequence[int | None]) -> None:
        """Tell for each limit what was really used; None where it stays. Returns at once."""

    def lower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        """Let no more than `remaining` be taken for so many microseconds. Returns at once."""

    async def alower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        """Do the same, and wait until the store has taken note."""

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> None:
        """Forget what was counted, of these limits and keys; blocks this thread until it is."""

    async def areset(self, places: Sequence[tuple[int, Hashable]]) -> None:
        """Do the same in the running event loop."""

    def see(self) -> None:
        """Let whoever takes be told what is left, where the store was asked."""

    def configure(self, rules: Sequence[Rule[Any]]) -> None:
        """Follow other numbers from now on."""

    def snapshot(self) -> dict[str, Any]:
        """Return what is known of the sharing."""


class LimitStore(Protocol):
    """A store that can keep rate limits."""

    def limits(
        self,
        name: str,
        rules: Sequence[Rule[Any]],
        *,
        sharing: str,
        batch: int | None,
        on_store_failure: str,
        changed: Callable[[str, str, str], None],
        differs: Callable[[str, str], None],
        rerule: Callable[[Iterable[Rule[Any]]], None],
    ) -> LimitShare:
        """Return what is shared under `name`.

        `changed(before, after, cause)` is called at every change of mode, and `differs(own, other)`
        if other pods have other settings. `rerule(rules)` lets the meters in memory follow other
        rules of the same kinds, by their `adopt`: for a share that has a part of the limits. All
        by any thread.
        """
