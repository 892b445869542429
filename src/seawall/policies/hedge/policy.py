"""Hedge policy: start a copy of a slow call, and use the first answer.

Promises:
- Copies never add more than `cap` to the load (and `burst` at once).
- Only calls that are safe to repeat are hedged.
- Slow calls are hedged, failed ones are not.
- The first value wins, and all other copies are cancelled and have ended when the call returns (a
  thread cannot be cancelled: it is counted until it ends).
- A value that a loser still returns goes to `dispose`.
- Stopping the call stops all copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from seawall import _checks as check
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.context import current_idempotency_key
from seawall.errors import Rejected
from seawall.events import CallHedged
from seawall.events.bus import emit
from seawall.models.budget import HedgeCap
from seawall.policies.retry import RetryBudget
from seawall.runtime.functions import kind_of
from seawall.runtime.layers import Driver, Host, Kind
from seawall.runtime.mutex import Mutex
from seawall.runtime.policy import Bound, Policy, bindings_of
from seawall.runtime.stats import ENOUGH_SAMPLES
from seawall.runtime.workers import WorkerPool

if TYPE_CHECKING:
    from seawall.clock import Clock

ENOUGH_IN_THE_TAIL = 5
"""Minimum number of calls above a quantile before it is used."""

REFRESH = 1.0


class QuantileDelay:
    """A delay that follows the guard's own latency. Created by `quantile(...)`."""

    def __init__(self, p: float, floor: float) -> None:
        self.p = check.ratio("p", p)
        if self.p >= 1:
            raise ValueError(f"p={p!r}: write a share below 1, such as p=0.95")
        self.floor = check.seconds("floor", floor, zero=True)

    def __repr__(self) -> str:
        return f"quantile({self.p:g}, floor={self.floor:g})"

    def seconds(self, host: Host, now: float) -> float | None:
        """Return the delay for a call that begins now; None while there are too few samples."""
        value = host.stats.quantile(self.p, now)
        enough = max(ENOUGH_SAMPLES, round(ENOUGH_IN_THE_TAIL / (1 - self.p)))
        if value is None or host.stats.latency.count < enough:
            return None
        return max(self.floor, value)


def quantile(p: float, *, floor: float = 0.001) -> QuantileDelay:
    """Hedge a call that takes longer than a share `p` of the guard's recent calls.

    Never sooner than after `floor` seconds. No call is hedged until five recent calls are above the
    quantile: a hundred calls for p=0.95. Choose `p` so that the slow share, 1 - p, stays below the
    hedge's `cap`; otherwise it is used up when many of the slowest calls need it.
    """
    return QuantileDelay(p, floor)


class Hedge(Policy):
    """Start a copy of a call that takes longer than `delay`."""

    kind: ClassVar[str] = "hedge"

    def __init__(
        self,
        delay: float | QuantileDelay,
        *,
        most: int = 2,
        cap: float = 0.05,
        burst: int = 5,
        budget: RetryBudget | None = None,
        dispose: Callable[[Any], Any] | None = None,
        sync: Literal["thread"] | None = None,
        workers: int = 32,
    ) -> None:
        """Start a copy after `delay` seconds (a number, or `quantile(...)`), up to `most` in all.

        At most a share `cap` of calls is copied, and at most `burst` beyond that at once. A
        `budget` must permit copies too, and may be shared with retries. `dispose(value)` receives
        the value of a losing copy, for example to close a response. Plain functions need
        sync="thread": they run in one of `workers` threads.
        """
        super().__init__()
        self.delay = delay if isinstance(delay, QuantileDelay) else check.seconds("delay", delay)
        self.most = check.count("most", most)
        self._cap = HedgeCap(cap, burst)
        if budget is not None and not isinstance(budget, RetryBudget):
            raise TypeError(
                f"budget={budget!r}: write budget=RetryBudget(), or the one that Retry has"
            )
        self.budget = budget
        self.dispose = None if dispose is None else check.function("dispose", dispose)
        if sync is not None:
            check.choice("sync", sync, ("thread",))
        self.sync = sync
        check.count("workers", workers)
        self.pool = WorkerPool(workers, 0, "hedge") if sync == "thread" else None
        self._calls = 0
        self._mutex = Mutex()
        survives_fork(self)

    def __repr__(self) -> str:
        sync = f", sync={self.sync!r}" if self.sync else ""
        budget = "" if self.budget is None else f", budget={self.budget!r}"
        settings = f"most={self.most}, cap={self.cap:g}, burst={self.burst}"
        return f"Hedge({self.delay!r}, {settings}{budget}{sync})"

    @property
    def cap(self) -> float:
        """The share of calls that may be copied."""
        return self._cap.cap

    @property
    def burst(self) -> int:
        """Number of copies that may be made at once beyond that share."""
        return self._cap.burst

    def _bind(self, host: Host) -> HedgeBound:
        return HedgeBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        fresh = Hedge._changed(
            changes, delay=self.delay, most=self.most, cap=self.cap, burst=self.burst
        )
        with self._mutex:
            self._cap.change(fresh.cap, fresh.burst, self._calls)
        self.delay, self.most = fresh.delay, fresh.most
        for bound in bindings_of(self):
            bound.refresh()  # type: ignore[attr-defined]

    def _after_fork(self) -> None:
        self._mutex = Mutex()

    def _try_hedge(self) -> bool:
        with self._mutex:
            return self._cap.try_hedge(self._calls)

    def _give_back(self) -> None:
        with self._mutex:
            self._cap.give_back()


class HedgeBound(Bound):
    """The hedge inside one guard: decides and counts; drivers run the copies."""

    policy: Hedge

    def __init__(self, policy: Hedge, host: Host) -> None:
        super().__init__(policy, host)
        self.calls = 0
        self.hedges = 0
        self.wins = 0
        self.stopped: dict[str, int] = {}
        self.reports_to_budget = policy.budget is not None and _reporter(policy, host) is policy
        self._drivers: dict[Kind, Driver] = {}
        self._delay: float | None = None
        self.refresh()

    def refresh(self) -> None:
        """Apply changed settings."""
        self._stale_at = float("-inf")

    def layer(self, kind: Kind) -> Driver:
        """Return the driver that runs copies of a call of that kind."""
        if kind not in self._drivers:
            self._drivers[kind] = self._new_driver(kind)
        return self._drivers[kind]

    def _new_driver(self, kind: Kind) -> Driver:
        if kind == "async":
            from seawall.policies.hedge.tasks import TaskHedge

            return TaskHedge(self)
        policy = self.policy
        if policy.pool is None:
            return _Unfit(
                f"guard {self.host.name!r}: two copies of a plain function need two threads."
                " Write Hedge(..., sync='thread') to run them in worker threads, or make the"
                " function async"
            )
        if policy.dispose is not None and kind_of(policy.dispose) == "async":
            return _Unfit(
                f"guard {self.host.name!r}: dispose={policy.dispose!r} is async, the guarded"
                " function is not: pass a plain function"
            )
        from seawall.policies.hedge.threads import ThreadHedge

        return ThreadHedge(self, policy.pool)

    def begin(self, host: Host) -> float | None:
        """Count a call. Return after how many seconds to hedge it, or None for never."""
        policy = self.policy
        if not host.idempotent and current_idempotency_key() is None:
            return None
        self.calls += 1
        policy._calls += 1
        if policy.most == 1:
            return None
        delay = policy.delay
        return delay if isinstance(delay, float) else self.delay(self.host.clock.now())

    def delay(self, now: float) -> float | None:
        """Return after how many seconds a call that begins now is hedged, or None."""
        wanted = self.policy.delay
        if not isinstance(wanted, QuantileDelay):
            return wanted
        if now >= self._stale_at:
            self._delay = wanted.seconds(self.host, now)
            self._stale_at = now + REFRESH
        return self._delay

    def permits(self, left: float | None) -> bool:
        """Return whether another copy may be made. If so, it is already paid for."""
        cause = self._obstacle(left, self.host.clock.now())
        if cause is not None:
            self.count_skipped(cause)
        return cause is None

    def count_copy(self, number: int, began: float) -> None:
        """Count and publish a copy that was started. `number` copies are now running."""
        self.hedges += 1
        emit(CallHedged, self.host.name, number=number, delay=self.host.clock.now() - began)

    def count_skipped(self, cause: str) -> None:
        """Count a slow call that got no copy, and why."""
        self.stopped[cause] = self.stopped.get(cause, 0) + 1

    def give_back(self) -> None:
        """Return a permission that was not used."""
        self.policy._give_back()
        self.report_end()

    def _obstacle(self, left: float | None, now: float) -> str | None:
        if left is not None and left <= self.host.stats.typical(now):
            return "deadline"
        if not self.policy._try_hedge():
            return "cap"
        budget = self.policy.budget
        if budget is not None and not budget.try_retry(now):
            self.policy._give_back()
            return "budget"
        return None

    def report_end(self) -> None:
        """Record that a copy beyond the first has ended."""
        self._note("retry_ended")

    def report_hidden_failure(self, error: BaseException) -> None:
        """Record an error that the caller will not see. It is still a failure of the dependency."""
        if isinstance(error, Exception) and not isinstance(error, Rejected):
            self._note("failed")

    def _note(self, what: str) -> None:
        budget = self.policy.budget
        if budget is not None:
            budget._note(what, self.host.clock.now())

    def dispose(self, value: Any) -> Any:
        """Dispose of an unwanted value. Return an awaitable if there is something to await."""
        dispose = self.policy.dispose
        if dispose is None:
            return None
        try:
            return dispose(value)
        except Exception as error:  # noqa: BLE001 - logged: the call has its answer
            log_failure("guard %r: dispose failed", self.host.name, error=error)
            return None

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return calls and copies, why some were not made, and the current delay."""
        policy = self.policy
        with policy._mutex:
            available = policy._cap.available(policy._calls)
        optional: dict[str, Any] = {}
        if (pool := policy.pool) is not None:
            optional |= {
                "workers": pool.size,
                "in_flight": pool.in_use,
                "abandoned": pool.abandoned,
            }
        if policy.budget is not None:
            optional["budget"] = policy.budget.snapshot()
        return {
            "delay": self.delay(now),
            "most": policy.most,
            "cap": policy.cap,
            "burst": policy.burst,
            "available": available,
            "calls": self.calls,
            "hedges": self.hedges,
            "wins": self.wins,
            "stopped": dict(self.stopped),
            **optional,
        }


def _reporter(policy: Hedge, host: Host) -> Policy:
    """Return the policy that reports calls to the budget: a Retry, or the first Hedge."""
    policies: Sequence[Any] = getattr(host, "policies", ())
    sharing = [other for other in policies if getattr(other, "budget", None) is policy.budget]
    return min(sharing, key=lambda other: other.kind != "retry", default=policy)


class _Unfit(Driver):
    """Driver that raises when a function is wrapped, because copies cannot be made."""

    def __init__(self, why: str) -> None:
        self._why = why

    def wrap(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: object
    ) -> Callable[..., Any]:
        raise TypeError(self._why)


class HedgeAccount:
    """Context manager around one call that reports it to a budget without another reporter."""

    def __init__(self, budget: RetryBudget, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock

    def __enter__(self) -> None:
        self._budget._note("started", self._clock.now())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        now = self._clock.now()
        if error is None:
            self._budget._note("succeeded", now)
        elif isinstance(error, Exception) and not isinstance(error, Rejected):
            self._budget._note("failed", now)
        self._budget._note("ended", now)
