"""Protocols between rate limits and a store that keeps them for all pods.

A policy asks a `LimitStore` once for its `LimitShare`. There is always one charge for each limit,
in the order of the limits. A cost of 0 is never requested, unless it is an estimate.
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
    """Whether the actual cost is reported later."""


class Receipt(Protocol):
    """A record of what was taken, for giving it back; only the share can read it.

    After `LimitShare.see()` it may have `standings`, a `Standing` by the number of each limit.
    """


class Verdict(NamedTuple):
    """The store's decision about a call."""

    wait: float | None
    """0: taken. Otherwise microseconds until the same call would be admitted; None: never."""
    first: int = 0
    """Index of the first exceeded limit, if nothing was taken."""
    longest: int = 0
    """Index of the limit with the longest wait."""
    receipt: Receipt | None = None
    """The receipt, if it was taken."""


class Standing(NamedTuple):
    """The current state of one limit."""

    left: int
    """How much may be taken now."""
    rest: float
    """Microseconds until all usage is forgotten; in a receipt, until there is more to take."""


class Door(Protocol):
    """What a gate may spend from in its success path, in uninterruptible steps."""

    open: Any
    """The lot to spend from; an empty one if the share must be asked."""
    cost: float
    """Cost of a call, set by the policy; infinite if each call must be inspected."""


class LimitShare(Protocol):
    """The limits of one policy, in a store. Every failure of the store is `StoreUnavailable`."""

    sharing: str
    """Mode of sharing: "exact", "leased" or "split"."""

    door: Door | None
    """Fast path for spending, for a single limit without keys; None if there is none."""

    @property
    def excess(self) -> tuple[int, ...]:
        """Maximum amount beyond each limit that may be taken; empty if none."""

    @property
    def mode(self) -> str:
        """What decides: "shared" is the store; otherwise the mode used while the store is away."""

    @property
    def away(self) -> bool:
        """Whether this pod currently has to decide alone."""

    @property
    def times(self) -> int:
        """Number of pods among which the limits are divided when each decides alone."""

    @property
    def store_name(self) -> str:
        """Name of the store."""

    def spend(self, charges: Sequence[Wanted], now: float) -> Receipt | None:
        """Pay from what this pod was granted before; None if it has to ask. Never blocks."""

    def ask(self, kind: Kind, charges: Sequence[Wanted], clock: Clock) -> Waiter:
        """Return a waiter whose `claim` returns the store's `Verdict`."""

    async def answer(self, charges: Sequence[Wanted], clock: Clock) -> Verdict:
        """Return the store's verdict, in the running event loop.

        Charges that come as a tuple are those of every call, and never change.
        """

    def decide(self, charges: Sequence[Wanted]) -> Verdict:
        """Take by reservation; block this thread until the store answers."""

    async def adecide(self, charges: Sequence[Wanted]) -> Verdict:
        """Async twin of `decide`."""

    def take_up_to(self, most: int, charges: Sequence[Wanted]) -> int:
        """Take up to `most` for the estimated charges; block this thread.

        Return the amount; 0 also if another charge does not fit.
        """

    async def atake_up_to(self, most: int, charges: Sequence[Wanted]) -> int:
        """Async twin of `take_up_to`."""

    def peek(self, charges: Sequence[Wanted]) -> tuple[Verdict, Sequence[Standing]]:
        """Return the state of each limit without taking anything; block this thread."""

    async def apeek(self, charges: Sequence[Wanted]) -> tuple[Verdict, Sequence[Standing]]:
        """Async twin of `peek`."""

    def count(self, costs: Sequence[tuple[Hashable, int]]) -> None:
        """Count calls that were admitted without the store: a key and a cost for each limit.

        Does not block.
        """

    def settle(self, receipt: Receipt, used: Sequence[int | None]) -> None:
        """Report the actual use for each limit; None leaves it unchanged. Does not block."""

    def lower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        """Allow at most `remaining` for `reset_after` microseconds. Does not block."""

    async def alower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        """Async twin of `lower`, which waits until the store has confirmed."""

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> None:
        """Forget the usage of these limits and keys; block this thread until done."""

    async def areset(self, places: Sequence[tuple[int, Hashable]]) -> None:
        """Async twin of `reset`."""

    def see(self) -> None:
        """Add the state of the limits to receipts, if the store was asked."""

    def configure(self, rules: Sequence[Rule[Any]]) -> None:
        """Use other numbers from now on."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the sharing."""


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
        if other pods have other settings. `rerule(rules)` makes the meters in memory adopt other
        rules of the same kinds: for a share that has a part of the limits. Any thread may call
        them.
        """
