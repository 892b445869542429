"""A retry budget shared by threads and guards: one of the rules of `seawall.models.budget`."""

from __future__ import annotations

from collections.abc import Callable

from seawall._forks import survives_fork
from seawall.models.budget import Budget, SuccessDeposit
from seawall.runtime.mutex import Mutex


class RetryBudget:
    """Bounds the retries of all calls together. May be shared between guards.

    `RetryBudget()` lets successes pay for retries. Other rules from `seawall.models.budget`:
    `RetryBudget(RequestRatio(0.2))`, `RetryBudget(InFlightRatio(0.2))`.
    """

    def __init__(self, rule: Budget | None = None) -> None:
        """Follow `rule`; `SuccessDeposit()` by default."""
        if rule is not None and not isinstance(rule, Budget):
            raise TypeError(
                f"RetryBudget({rule!r}): write SuccessDeposit(), RequestRatio() or InFlightRatio()"
            )
        self.rule: Budget = SuccessDeposit() if rule is None else rule
        self._mutex = Mutex()
        survives_fork(self)

    def __repr__(self) -> str:
        return f"RetryBudget({self.rule!r})"

    def tell(self, note: Callable[[float], None], now: float) -> None:
        """Report an event to the rule, under the lock."""
        self._mutex.do(lambda: note(now))

    def try_retry(self, now: float) -> bool:
        """Take the permission for one retry."""
        with self._mutex:
            return self.rule.try_retry(now)

    def snapshot(self) -> dict[str, float]:
        """Return the state of the rule."""
        with self._mutex:
            return self.rule.snapshot()

    def _after_fork(self) -> None:
        """Reset in a child process, where nothing is in flight."""
        self._mutex = Mutex()
        self.rule.forget_in_flight()
