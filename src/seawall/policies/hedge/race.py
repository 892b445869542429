"""The race between the copies of one call: which value is the answer, or which error is raised.

An error that is not an `Exception` (an exit, an interrupt) is not a failure that a value could
replace: it ends the race, and is raised.

Tasks of one loop or threads report to it; the caller waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from seawall.errors import Rejected
from seawall.runtime.call import was_withdrawn
from seawall.runtime.driver import CallbackWaiter
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from seawall.policies.hedge.policy import HedgeBound


class Race:
    """The first value wins; the first real error is raised when no copy has a value."""

    def __init__(self, bound: HedgeBound, began: float) -> None:
        self._bound = bound
        self._mutex = Mutex()
        self._watch: tuple[Callable[[], bool], Callable[[], bool]] | None = None
        """The condition that the caller waits for, and how to wake it."""
        self.began = began
        self.copies = 1
        self.running = 1
        self.over = False  # whether a value that arrives now is no longer wanted
        self.decided = False  # whether the winner has ended, or all copies have
        self.winner = 0
        self.value: Any = None
        self.failure: BaseException | None = None
        self.exit: BaseException | None = None
        """Error that is raised regardless of the other copies."""

    def may_grow(self) -> bool:
        """Return whether a slow call may still get a copy. A failed one needs a retry instead."""
        return not self.over and self.failure is None and self.copies < self._bound.policy.most

    def grow(self, left: float | None) -> int:
        """Return the number of a copy to start now, or 0; `left` is the remaining time."""
        if not self.may_grow() or not self._bound.permits(left):
            return 0
        with self._mutex:
            if self.may_grow() and not self.decided:
                self.copies += 1
                self.running += 1
                return self.copies
        self._bound.give_back()  # it succeeded or failed meanwhile
        return 0

    def not_started(self, number: int, cause: str) -> None:
        """Undo the copy that was to start now: it cannot, and must not be waited for."""
        self._bound.policy._give_back()
        self._bound.count_skipped(cause)
        self.ended(number)

    def returned(self, number: int, value: Any) -> bool:
        """Record the value of a copy. Return False if it is late and must be disposed of."""
        with self._mutex:
            if self.over:
                return False
            self.over, self.value, self.winner = True, value, number
            failure, self.failure = self.failure, None
        if number > 1:
            self._bound.wins += 1
        if failure is not None:
            self._bound.report_hidden_failure(failure)
        return True

    def failed(self, error: BaseException) -> None:
        """Record the error of a copy."""
        bound = self._bound
        with self._mutex:
            shown = self.failure
            # An error of a request that was sent is more informative than a refusal.
            better = shown is None or (_refused(bound, shown) and not _refused(bound, error))
            if better and not self.over:
                self.failure, hidden = error, shown
            else:
                hidden = error
        if hidden is not None:
            bound.report_hidden_failure(hidden)

    def record_exit(self, error: BaseException) -> bool:
        """Record an error that is not an `Exception`: it ends the race. False if already over."""
        with self._mutex:
            if self.over:
                return False
            self.over, self.exit = True, error
            hidden, self.failure = self.failure, None
        if hidden is not None:
            self._bound.report_hidden_failure(hidden)
        return True

    def ended(self, number: int) -> None:
        """Record that a copy has ended, in whatever way, and wake the caller if necessary."""
        if number > 1:
            self._bound.report_end()
        with self._mutex:
            self.running -= 1
            won = self.winner == number or self.exit is not None
            self.decided = self.decided or won or not self.running
            self._ring()

    def close(self) -> bool:
        """Accept no more values. Return whether there was none yet."""
        with self._mutex:
            first, self.over = not self.over, True
            return first

    def take_failure(self) -> BaseException:
        """Return what to raise, and drop the reference, to avoid a reference cycle."""
        error = self.failure if self.exit is None else self.exit
        self.failure = self.exit = None
        assert error is not None  # noqa: S101 - for the type checker: all copies have failed
        return error

    def _ring(self) -> None:
        if self._watch is not None and self._watch[0]():
            (_, wake), self._watch = self._watch, None
            wake()

    def decision(self, until: float = inf) -> CallbackWaiter:
        """Return a waiter for the decision, at most until `until`; it claims whether it came."""
        return self._waiter(lambda: self.decided, until)

    def end_of_all(self) -> CallbackWaiter:
        """Return a waiter for the end of all copies."""
        return self._waiter(lambda: not self.running, inf)

    def _waiter(self, condition: Callable[[], bool], until: float) -> CallbackWaiter:
        def join(wake: Callable[[], bool]) -> None:
            with self._mutex:
                self._watch = condition, wake
                self._ring()

        def leave(_wake: Callable[[], bool]) -> None:
            with self._mutex:
                self._watch = None

        return CallbackWaiter(join, leave=leave, result=condition, until=until)


def _refused(bound: HedgeBound, error: BaseException) -> bool:
    """Return whether that copy never ran, because an inner policy of the same guard refused it."""
    by_us = isinstance(error, Rejected) and error.guard == bound.host.name
    return by_us or was_withdrawn(error)
