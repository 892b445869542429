"""Ask a second time when the first answer is slow, and take whichever comes first.

Promises: copies never add more than `cap` to the load (and `burst` at once); only calls that are
safe to repeat are hedged; slowness is hedged, failure is not; the first value wins, and all other
copies are cancelled and have ended when the call returns (a thread cannot be cancelled: it is
counted until it ends); what a loser still returns goes to `dispose`; who stops the call stops all
copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from seawall import _checks as check
from seawall.context import current_idempotency_key
from seawall.errors import Rejected
from seawall.models.hedging import HedgeCap
from seawall.policies.retry import RetryBudget
from seawall.runtime.events import CallHedged, emit
from seawall.runtime.functions import kind_of
from seawall.runtime.layers import Driver, Host, Kind
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.policy import Bound, Policy
from seawall.runtime.stats import ENOUGH_SAMPLES
from seawall.runtime.workers import WorkerPool

if TYPE_CHECKING:
    from seawall.clock import Clock

ENOUGH_IN_THE_TAIL = 5
"""Calls that must be known above a quantile before it is believed."""

REFRESH = 1.0


class QuantileDelay:
    """A delay that follows the guard's own latency. Make it with `quantile(...)`."""

    __slots__ = ("floor", "p")

    def __init__(self, p: float, floor: float) -> None:
        """See `quantile`."""
        self.p = check.ratio("p", p)
        if self.p >= 1:
            raise ValueError(f"p={p!r}: write a share below 1, such as p=0.95")
        self.floor = check.seconds("floor", floor, zero=True)

    def __repr__(self) -> str:
        return f"quantile({self.p:g}, floor={self.floor:g})"

    def seconds(self, host: Host, now: float) -> float | None:
        """Return the delay for a call that begins now; None while too little is known."""
        value = host.stats.quantile(self.p, now)
        enough = max(ENOUGH_SAMPLES, round(ENOUGH_IN_THE_TAIL / (1 - self.p)))
        if value is None or host.stats.latency.count < enough:
            return None
        return max(self.floor, value)


def quantile(p: float, *, floor: float = 0.001) -> QuantileDelay:
    """Hedge a call that takes longer than a share `p` of the guard's recent calls did.

    Never sooner than after `floor` seconds. Nothing is hedged until five recent calls lie above
    the quantile: a hundred calls for p=0.95. Choose `p` so that the slow share, 1 - p, stays below
    the hedge's `cap`, or many of the slowest find it spent.
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

        At most a share `cap` of calls is copied, and at most `burst` beyond that at once; a
        `budget` is asked too, and may be one that retries use. `dispose(value)` gets what a losing
        copy returned: to close a response, say. Plain functions need sync="thread": they run in
        one of `workers` threads.
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
        """How many copies may be made at once beyond that share."""
        return self._cap.burst

    def _bind(self, host: Host) -> HedgeBound:
        return HedgeBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self._reject_unknown(changes, ("delay", "most", "cap", "burst"))
        fresh = Hedge(
            changes.get("delay", self.delay),
            most=changes.get("most", self.most),
            cap=changes.get("cap", self.cap),
            burst=changes.get("burst", self.burst),
        )
        with self._mutex:
            self._cap.change(fresh.cap, fresh.burst, self._calls)
        self.delay, self.most = fresh.delay, fresh.most
        for bound in self.bindings:
            bound.refresh()  # type: ignore[attr-defined]

    def _after_fork(self) -> None:
        """Be usable in a child process."""
        self._mutex = Mutex()

    def _try_hedge(self) -> bool:
        with self._mutex:
            return self._cap.try_hedge(self._calls)

    def _give_back(self) -> None:
        with self._mutex:
            self._cap.give_back()


class HedgeBound(Bound):
    """The hedge inside one guard: decides and counts; drivers carry the copies."""

    policy: Hedge

    def __init__(self, policy: Hedge, host: Host) -> None:
        """Nothing hedged yet."""
        super().__init__(policy, host)
        self.calls = 0
        self.hedges = 0
        self.wins = 0
        self.stopped: dict[str, int] = {}
        self.tells_budget = policy.budget is not None and _teller(policy, host) is policy
        self._drivers: dict[Kind, Driver] = {}
        self._delay: float | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take up changed settings."""
        self._stale_at = float("-inf")

    def layer(self, kind: Kind) -> Driver:
        """Return what runs copies of a call of that kind."""
        driver = self._drivers.get(kind)
        if driver is None:
            driver = self._drivers[kind] = self._new_driver(kind)
        return driver

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
        """Count a call; return after how many seconds to hedge it, None for not at all."""
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
        """Return after how many seconds a call that begins now is hedged, if it is."""
        wanted = self.policy.delay
        if not isinstance(wanted, QuantileDelay):
            return wanted
        if now >= self._stale_at:
            self._delay = wanted.seconds(self.host, now)
            self._stale_at = now + REFRESH
        return self._delay

    def permits(self, left: float | None) -> bool:
        """Decide on another copy; it is paid for when this is True."""
        cause = self._against(left, self.host.clock.now())
        if cause is not None:
            self.not_made(cause)
        return cause is None

    def made(self, number: int, began: float) -> None:
        """Count a copy that was started, and tell; `number` are under way with it."""
        self.hedges += 1
        emit(CallHedged, self.host.name, number=number, delay=self.host.clock.now() - began)

    def not_made(self, cause: str) -> None:
        """Count a slow call that got no copy, and why."""
        self.stopped[cause] = self.stopped.get(cause, 0) + 1

    def give_back(self) -> None:
        """Undo a permission of which no use was made."""
        self.policy._give_back()
        self.copy_ended()

    def _against(self, left: float | None, now: float) -> str | None:
        stats = self.host.stats
        if left is not None:
            # The typical call must still fit in.
            typical = stats.quantile(0.5, now)
            known = stats.latency.count >= ENOUGH_SAMPLES
            if left <= (typical if known and typical is not None else 0.0):
                return "deadline"
        if not self.policy._try_hedge():
            return "cap"
        budget = self.policy.budget
        if budget is not None and not budget.try_retry(now):
            self.policy._give_back()
            return "budget"
        return None

    def copy_ended(self) -> None:
        """Note that a copy beyond the first is under way no more."""
        self._note("retry_ended")

    def failure_hidden(self, error: BaseException) -> None:
        """Note an error that the caller will not see: a failure of the dependency all the same."""
        if isinstance(error, Exception) and not isinstance(error, Rejected):
            self._note("failed")

    def _note(self, what: str) -> None:
        budget = self.policy.budget
        if budget is not None:
            budget.tell(getattr(budget.rule, what), self.host.clock.now())

    def dispose(self, value: Any) -> Any:
        """Hand over a value that nobody wants; return what is to be awaited for it, if anything."""
        dispose = self.policy.dispose
        if dispose is None:
            return None
        try:
            return dispose(value)
        except Exception as error:  # noqa: BLE001 - logged: the call has its answer
            disposal_failed(self.host.name, error)
            return None

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return calls and copies, why some were not made, and the delay there is now."""
        policy = self.policy
        with policy._mutex:
            available = policy._cap.available(policy._calls)
        pool, budget = policy.pool, policy.budget
        threads = (
            {}
            if pool is None
            else {"workers": pool.size, "in_flight": pool.in_use, "abandoned": pool.abandoned}
        )
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
            **threads,
            **({} if budget is None else {"budget": budget.snapshot()}),
        }


def _teller(policy: Hedge, host: Host) -> Policy:
    """Return who tells the budget how calls go: a Retry that has it too, or the first Hedge."""
    policies: Sequence[Any] = getattr(host, "policies", ())
    sharing = [other for other in policies if getattr(other, "budget", None) is policy.budget]
    return min(sharing, key=lambda other: other.kind != "retry", default=policy)


class _Unfit(Driver):
    """Stands where copies cannot be made, and says so when a function is given."""

    def __init__(self, why: str) -> None:
        self._why = why

    def wrap(self, inner: Callable[..., Any], kind: Kind, function: object) -> Callable[..., Any]:
        raise TypeError(self._why)


class Account:
    """`with` around one call: tells a budget that nobody else tells how the call goes."""

    __slots__ = ("_budget", "_clock")

    def __init__(self, budget: RetryBudget, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock

    def __enter__(self) -> None:
        self._budget.tell(self._budget.rule.started, self._clock.now())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        rule, now = self._budget.rule, self._clock.now()
        if error is None:
            self._budget.tell(rule.succeeded, now)
        elif isinstance(error, Exception) and not isinstance(error, Rejected):
            self._budget.tell(rule.failed, now)
        self._budget.tell(rule.ended, now)


def disposal_failed(guard: str, error: BaseException) -> None:
    """Log what `dispose` raised."""
    import logging

    logging.getLogger("seawall").error("guard %r: dispose failed", guard, exc_info=error)
