"""Interface of the rate limit algorithms: the rule, separate from the storage of its state.

    wait(state, now, cost) -> how long until that may be taken;  take(state, now, cost) -> state

The settings are the immutable algorithm object itself. Time is in whole microseconds on any clock,
and all numbers are whole and below 2**53, so an equivalent script in another language reaches the
same verdicts. A clock that is set back counts as stopped until it has caught up, so no bound is
broken.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from seawall.models.rate.rates import EXACT, Rate

S = TypeVar("S")


class RateRule(Generic[S]):
    """One limit. Its states, one for each key, are stored elsewhere."""

    capacity: int | None  # maximum cost of one call. None where any cost is only a matter of time

    most: int = EXACT - 1  # the largest amount that is counted exactly

    debt: float = 0.0  # microseconds for which `owe` may keep a bucket closed at most

    def __init__(self, rate: Rate) -> None:
        self.rate = rate

    def fresh(self, now: float) -> S:
        """Return the state of an unknown key, at `now` or later."""
        raise NotImplementedError

    def wait(self, state: S, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return how long `cost` has to wait: 0 if it may go now, None if never.

        If others take `ahead` first, the actual wait is at least this long.
        """
        raise NotImplementedError

    def take(self, state: S, now: float, cost: int) -> tuple[S, float]:
        """Count `cost` without checking. Return the state and a mark for `give_back`."""
        raise NotImplementedError

    def owe(self, state: S, now: float, cost: int) -> S:
        """Count `cost` that was used beyond an estimate, and so cannot be refused.

        The debt is bounded by `debt`: whatever was reported, the limit opens again.
        """
        return self.take(state, now, cost)[0]

    @property
    def overdraft(self) -> int:
        """Maximum that `owe` counts in full, at once, where nothing was taken before."""
        return 2 * self.rate.limit

    def give_back(self, state: S, now: float, taken: int, used: int, mark: float) -> S:
        """Return the state as if `used`, not `taken`, had been taken at `mark`; never more lenient.

        `used` is at most `taken`, and 0 if all is given back. `now` must not be earlier than the
        latest taking; the owner of the states ensures that if a clock may step back.
        """
        raise NotImplementedError

    def left(self, state: S, now: float) -> int:
        """Return how much may be taken at once now."""
        raise NotImplementedError

    def rest(self, state: S, now: float) -> float:
        """Return the time until no taking matters any more, and the state equals a fresh one."""
        raise NotImplementedError

    def copy(self, state: S) -> S:
        """Return an independent copy of the state."""
        return state

    def adopt(self, state: S, old: RateRule[S], now: float) -> S:
        """Convert a state under other settings of the same algorithm to these settings."""
        return state


def check_exact(rate: Rate, most: int) -> None:
    """Raise if numbers of the size of `most` are too large to be exact."""
    if most >= EXACT:
        raise ValueError(
            f"{rate.limit} in {rate.period / 1e6:g} s: too large to count exactly; write a shorter"
            " period, or use algorithm='token_bucket'"
        )
