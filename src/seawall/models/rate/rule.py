"""What every rate-limit algorithm can do: the rule, apart from who keeps its state.

    (settings, state, now, cost) -> verdict

Settings are the algorithm object itself, which never changes. Time is whole microseconds on any
clock, and all numbers are whole and below 2**53, so a script in another language that follows the
same lines comes to the same verdicts. A clock that steps back is taken to stand still until it has
caught up: no bound is broken by it.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from seawall.models.rate.rates import EXACT, Rate

S = TypeVar("S")


class Verdict(NamedTuple):
    """What became of one question."""

    state: Any
    """What to keep; unchanged by a refusal."""
    wait: float | None
    """0: admitted. Else so many microseconds until the same would be admitted; None: never."""


class Rule(Generic[S]):
    """One limit. States belong to whoever keeps them, one for each key."""

    capacity: int | None
    """The most that one call may cost, ever; None where any cost is only a matter of time."""

    most: int = EXACT - 1
    """The largest amount that is counted exactly."""

    debt: float = 0.0
    """For how many microseconds `owe` may keep the limit closed; windows forget by themselves."""

    def __init__(self, rate: Rate) -> None:
        """Admit `rate.limit` in each `rate.period`."""
        self.rate = rate

    def fresh(self, now: float) -> S:
        """Return the state of a key that was never heard of, at `now` or later."""
        raise NotImplementedError

    def wait(self, state: S, now: float, cost: int, ahead: int = 0) -> float | None:
        """Return for how long `cost` has to wait: 0 if it may go now, None if it never may.

        With `ahead` to be taken by others before, it is at least so long.
        """
        raise NotImplementedError

    def take(self, state: S, now: float, cost: int) -> tuple[S, float]:
        """Count `cost` without asking; the mark that comes with the state is for `give_back`."""
        raise NotImplementedError

    def owe(self, state: S, now: float, cost: int) -> S:
        """Count `cost` that was used beyond an estimate, and so cannot be refused.

        What has to be paid off is bounded by `debt`: whatever was reported, the limit opens again.
        """
        return self.take(state, now, cost)[0]

    @property
    def overdraft(self) -> int:
        """The most that `owe` counts in full, at once, where nothing was taken before."""
        return 2 * self.rate.limit

    def give_back(self, state: S, now: float, taken: int, used: int, mark: float) -> S:
        """Return the state as if `used`, not `taken`, had been taken at `mark`; never more lenient.

        `used` is at most `taken`, and 0 if all is given back. `now` is no earlier than the latest
        taking: who keeps the states sees to it, where a clock may step back.
        """
        raise NotImplementedError

    def left(self, state: S, now: float) -> int:
        """Return how much may be taken at once now."""
        raise NotImplementedError

    def rest(self, state: S, now: float) -> float:
        """Return how long until nothing that was taken matters any more: then it is as fresh."""
        raise NotImplementedError

    def copy(self, state: S) -> S:
        """Return the same state, to be changed apart from it."""
        return state

    def adopt(self, state: S, old: Rule[S], now: float) -> S:
        """Return what a state under other settings of the same algorithm means under these."""
        return state

    def decide(self, state: S, now: float, cost: int) -> Verdict:
        """Ask, and take if admitted: the whole rule in one step."""
        wait = self.wait(state, now, cost)
        return Verdict(self.take(state, now, cost)[0] if wait == 0 else state, wait)


def check_exact(rate: Rate, most: int) -> None:
    """Raise if numbers of the size of `most` are too large to be exact."""
    if most >= EXACT:
        raise ValueError(
            f"{rate.limit} in {rate.period / 1e6:g} s: too large to count exactly; write a shorter"
            " period, or use algorithm='token_bucket'"
        )
