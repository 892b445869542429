"""The copies of one call, wherever they run: which value is the answer, and which error, if none.

What is no `Exception` (an exit, an interrupt) is no failure that a value could make good: it ends
the race, and is raised.

Told by tasks of one loop or by threads; whoever made the call watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from seawall.errors import Rejected
from seawall.runtime.call import was_withdrawn
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from seawall.policies.hedge.policy import HedgeBound


class Race:
    """The first value wins; the first real error is raised when no copy has a value."""

    __slots__ = (
        "_bound",
        "_mutex",
        "_watch",
        "began",
        "copies",
        "decided",
        "exit",
        "failure",
        "over",
        "running",
        "value",
        "winner",
    )

    def __init__(self, bound: HedgeBound, began: float) -> None:
        """Begin with the first copy, at the instant `began`."""
        self._bound = bound
        self._mutex = Mutex()
        self._watch: tuple[Watch, Callable[[], bool]] | None = None
        self.began = began
        self.copies = 1
        self.running = 1
        self.over = False
        """Whether a value that comes now is not wanted any more."""
        self.decided = False
        """Whether the winner has ended, or all have."""
        self.winner = 0
        self.value: Any = None
        self.failure: BaseException | None = None
        self.exit: BaseException | None = None
        """What is raised whatever the other copies do."""

    def may_grow(self) -> bool:
        """Tell whether slowness is still answered by a copy: failure is not, that is a retry's."""
        return not self.over and self.failure is None and self.copies < self._bound.policy.most

    def grow(self, left: float | None) -> int:
        """Return the number of a copy to start now, or 0; `left` are the seconds that remain."""
        if not self.may_grow() or not self._bound.permits(left):
            return 0
        with self._mutex:
            if self.may_grow() and not self.decided:
                self.copies += 1
                self.running += 1
                return self.copies
        self._bound.give_back()  # it was answered, or failed, while we asked
        return 0

    def not_started(self, number: int, cause: str) -> None:
        """Take back the copy that was to start now: it cannot, and nobody may wait for it."""
        self._bound.policy._give_back()
        self._bound.not_made(cause)
        self.ended(number)

    def returned(self, number: int, value: Any) -> bool:
        """Take the value of a copy; False if it comes too late, and is to be disposed of."""
        with self._mutex:
            if self.over:
                return False
            self.over, self.value, self.winner = True, value, number
            failure, self.failure = self.failure, None
        if number > 1:
            self._bound.wins += 1
        if failure is not None:
            self._bound.failure_hidden(failure)
        return True

    def failed(self, error: BaseException) -> None:
        """Take the error of a copy."""
        bound = self._bound
        with self._mutex:
            shown = self.failure
            # That something was sent and failed says more than that something was refused.
            better = shown is None or (_refused(bound, shown) and not _refused(bound, error))
            if better and not self.over:
                self.failure, hidden = error, shown
            else:
                hidden = error
        if hidden is not None:
            bound.failure_hidden(hidden)

    def exits(self, error: BaseException) -> bool:
        """Take an error that is no `Exception`: all is over. False if it was so already."""
        with self._mutex:
            if self.over:
                return False
            self.over, self.exit = True, error
            hidden, self.failure = self.failure, None
        if hidden is not None:
            self._bound.failure_hidden(hidden)
        return True

    def ended(self, number: int) -> None:
        """Tell that a copy has ended, whatever way; the caller learns what it waits for."""
        if number > 1:
            self._bound.copy_ended()
        with self._mutex:
            self.running -= 1
            won = self.winner == number or self.exit is not None
            self.decided = self.decided or won or not self.running
            self._ring()

    def close(self) -> bool:
        """Want no value any more; tell whether there was none yet."""
        with self._mutex:
            first, self.over = not self.over, True
            return first

    def take_failure(self) -> BaseException:
        """Return what to raise, and let go of it: an error must not lead to itself."""
        error = self.failure if self.exit is None else self.exit
        self.failure = self.exit = None
        assert error is not None  # noqa: S101 - for the type checker: all copies have failed
        return error

    def _ring(self) -> None:
        if self._watch is not None and self._watch[0].satisfied():
            (_, wake), self._watch = self._watch, None
            wake()


class Watch:
    """Waits until the race is decided, or until all copies have ended; or until an instant."""

    __slots__ = ("_all", "_race", "until")

    def __init__(self, race: Race, until: float | None = None, *, to_the_end: bool = False) -> None:
        self._race = race
        self._all = to_the_end
        self.until = until

    def satisfied(self) -> bool:
        """Tell whether there is nothing (more) to wait for."""
        return not self._race.running if self._all else self._race.decided

    def publish(self, wake: Callable[[], bool]) -> None:
        """Wait for the next change of the race."""
        race = self._race
        with race._mutex:
            race._watch = (self, wake)
            race._ring()

    def claim(self) -> bool:
        """Return whether the race has come so far."""
        self.abandon()
        return self.satisfied()

    def abandon(self) -> None:
        """Wait no more."""
        with self._race._mutex:
            self._race._watch = None


def _refused(bound: HedgeBound, error: BaseException) -> bool:
    """Tell whether that copy never ran: a policy of the same guard, further in, was against it."""
    by_us = isinstance(error, Rejected) and error.guard == bound.host.name
    return by_us or was_withdrawn(error)
