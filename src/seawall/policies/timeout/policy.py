"""Timeout policy: the maximum duration of a call.

Promises:
- An async call is cancelled when its time is over, with the semantics of `asyncio.timeout`: a
  cancellation from elsewhere is never mistaken for a timeout nor swallowed, and the function's own
  TimeoutError passes through unchanged.
- The time is always bounded by the deadline.
- A plain function cannot be stopped from outside: the user chooses how to time it (`sync=`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from seawall import _checks as check
from seawall.context import (
    Scope,
    deadline_scope,
    deadline_var,
    end_scope,
    nearer_scope,
    seconds_left,
)
from seawall.errors import BulkheadFull, DeadlineExceeded, TimedOut
from seawall.events import CallTimedOut
from seawall.events.bus import emit
from seawall.policies.timeout.fast_path import set_deadline
from seawall.runtime.layers import Driver, Flow, Host, Kind, Layer, Outcome
from seawall.runtime.policy import Bound, Policy, bindings_of
from seawall.runtime.stats import ENOUGH_SAMPLES
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.workers import WorkerPool

if TYPE_CHECKING:
    from seawall.policies.timeout.async_flow import AsyncTimeout
    from seawall.runtime.call import Call

Sync = Literal["cooperative", "thread"]

REFRESH = 1.0


class AdaptiveSeconds:
    """A limit that follows the guard's own latency. Created by `adaptive_timeout(...)`."""

    def __init__(self, p: float, factor: float, floor: float, cap: float) -> None:
        self.p = check.ratio("p", p)
        self.factor = check.at_least("factor", factor, 1.0)
        self.floor = check.seconds("floor", floor)
        self.cap = check.seconds("cap", cap)
        if self.cap < self.floor:
            raise ValueError(f"cap={cap!r} is below floor={floor!r}: write a cap of at least that")

    def __repr__(self) -> str:
        settings = f"p={self.p}, factor={self.factor}, floor={self.floor}, cap={self.cap}"
        return f"adaptive_timeout({settings})"

    def seconds(self, host: Host, now: float) -> float:
        """Return the limit for a call that begins now; the cap while there are few samples."""
        typical = host.stats.quantile(self.p, now)
        if typical is None or host.stats.latency.count < ENOUGH_SAMPLES:
            return self.cap
        return min(self.cap, max(self.floor, typical * self.factor))


def adaptive_timeout(
    *, p: float = 0.99, factor: float = 2.5, floor: float, cap: float
) -> AdaptiveSeconds:
    """Limit calls to `factor` times the latency that a share `p` of recent calls stayed below.

    Never below `floor` or above `cap` seconds. Calls that were cut off count with the time they
    had, so the limit rises again when the dependency has become slower.
    """
    return AdaptiveSeconds(p, factor, floor, cap)


class Timeout(Policy):
    """Stop a call after a number of seconds."""

    kind: ClassVar[str] = "timeout"

    def __init__(
        self,
        seconds: float | AdaptiveSeconds,
        *,
        sync: Sync | None = None,
        max_threads: int = 32,
    ) -> None:
        """Limit calls to `seconds`, a number or `adaptive_timeout(...)`.

        `sync` is required for plain functions: "cooperative" sets the deadline that inner guards
        and clients respect, and costs almost nothing; "thread" runs the function in one of
        `max_threads` worker threads (32) and stops waiting for it: the thread itself continues, and
        is counted, until the function returns.
        """
        super().__init__()
        if not isinstance(seconds, AdaptiveSeconds):
            seconds = check.seconds("seconds", seconds)
        if sync is not None:
            check.choice("sync", sync, ("cooperative", "thread"))
        self.seconds = seconds
        self.sync = sync
        check.count("max_threads", max_threads)
        self.pool = WorkerPool(max_threads, 0, "timeout") if sync == "thread" else None

    def __repr__(self) -> str:
        sync = f", sync={self.sync!r}" if self.sync else ""
        limit = self.seconds
        shown = round(limit, 6) if isinstance(limit, float) else limit
        return f"Timeout({shown!r}{sync})"

    @property
    def longest(self) -> float:
        """Maximum number of seconds that a call may get."""
        return self.seconds.cap if isinstance(self.seconds, AdaptiveSeconds) else self.seconds

    def _bind(self, host: Host) -> TimeoutBound:
        return TimeoutBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self.seconds = Timeout._changed(changes, seconds=self.seconds).seconds
        for bound in bindings_of(self):
            bound.refresh()  # type: ignore[attr-defined]


class TimeoutBound(Bound):
    """The timeout inside one guard. `seconds` is the limit of a call that begins now."""

    policy: Timeout

    def __init__(self, policy: Timeout, host: Host) -> None:
        super().__init__(policy, host)
        self.timed_out = 0
        self._layers: dict[Kind, AsyncTimeout | CooperativeTimeout | _InThread] = {}
        self._stale_at = float("-inf")
        self._seconds = 0.0

    def refresh(self) -> None:
        """Apply changed settings."""
        self._stale_at = float("-inf")
        for layer in list(self._layers.values()):
            if not isinstance(layer, _InThread):
                layer.refresh()

    def seconds(self, now: float) -> float:
        """Return the limit for a call that begins now."""
        wanted = self.policy.seconds
        if not isinstance(wanted, AdaptiveSeconds):
            return wanted
        if now >= self._stale_at:
            self._seconds = wanted.seconds(self.host, now)
            self._stale_at = now + REFRESH
        return self._seconds

    def layer(self, kind: Kind) -> Layer | Driver:
        """Return the layer that can stop a call of that kind, or raise if there is none."""
        if kind not in self._layers:
            self._layers[kind] = self._new_layer(kind)
        return self._layers[kind]

    def _new_layer(self, kind: Kind) -> AsyncTimeout | CooperativeTimeout | _InThread:
        if kind == "async":
            from seawall.policies.timeout.async_flow import AsyncTimeout

            return AsyncTimeout(self)
        if self.policy.sync == "cooperative":
            return CooperativeTimeout(self)
        if self.policy.pool is not None:
            return _InThread(self, self.policy.pool)
        raise TypeError(
            f"guard {self.host.name!r}: a plain function cannot be stopped from outside. Write"
            " Timeout(..., sync='cooperative') to set the deadline that clients inside obey,"
            " or sync='thread' to run it in a worker thread, or make the function async."
            " Guard.standard(...) takes sync= as well"
        )

    def expired(self, seconds: float) -> None:
        """Count a call that ran out of time."""
        self.timed_out += 1
        self.host.stats.timed_out += 1
        emit(CallTimedOut, self.host.name, seconds=seconds)

    def error(self, seconds: float, *, began: bool) -> TimedOut | DeadlineExceeded:
        """Return the error: the call timed out, or its time was over before it began."""
        name = self.host.name
        if began:
            return TimedOut(
                f"guard {name!r}: timed out after {seconds:.3f} s", guard=name, seconds=seconds
            )
        return DeadlineExceeded(
            f"guard {name!r}: {seconds:.3f} s were over before the call began",
            guard=name,
            policy="timeout",
        )

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the current limit, and how many calls timed out."""
        shown = {"seconds": self.seconds(now), "timed_out": self.timed_out}
        if (pool := self.policy.pool) is not None:
            shown |= {"threads": pool.size, "in_flight": pool.in_use, "abandoned": pool.abandoned}
        return shown


def refused_for_time(call: Call, ticket: Scope) -> bool:
    """Return whether a call began, and ended because further work was refused for lack of time.

    Then it counts as timed out. If an outer scope ends earlier, that scope reports it.
    """
    at, clock, outer = ticket[:3]
    own = outer is None or at is not outer[0]
    return own and call.reached and isinstance(call.error, DeadlineExceeded) and clock.now() >= at


class CooperativeTimeout(Flow):
    """Sets the deadline for the inner layers, but stops nothing itself."""

    passes_refusals = True

    def __init__(self, bound: TimeoutBound) -> None:
        self._bound = bound
        self._clock = bound.host.clock
        self.refresh()
        self.inline = set_deadline(self, self._clock)

    def refresh(self) -> None:
        """Apply changed settings."""
        wanted = self._bound.policy.seconds
        self.constant = None if isinstance(wanted, AdaptiveSeconds) else wanted

    def enter(self, now: float) -> Scope:
        """Set the deadline, or keep the current one if it is nearer."""
        at = now + self._bound.seconds(now)
        scope = nearer_scope(at, self._clock, deadline_scope())
        deadline_var.set(scope)
        return scope

    def leave(self, ticket: Scope, outcome: Outcome, detail: object, now: float) -> None:
        """End the deadline."""
        end_scope(ticket)

    def settle(self, call: Call, ticket: Scope) -> None:
        """End the deadline, and count a call that it ended."""
        end_scope(ticket)
        error = call.error
        if not isinstance(error, TimeoutError) or not call.reached:
            return
        now = self._clock.now()
        if ticket[1] is self._clock and now >= ticket[0]:
            seconds = self._bound.seconds(now)
            self._bound.expired(seconds)
            if refused_for_time(call, ticket):
                call.error = self._bound.error(seconds, began=True)
                call.error.__cause__ = error


class _InThread(ThreadDriver):
    """Runs the function in a worker thread and waits no longer than its time."""

    def __init__(self, bound: TimeoutBound, pool: WorkerPool) -> None:
        super().__init__(bound.host, pool, "timeout")
        self._bound = bound

    def limit(self, now: float) -> float | None:
        seconds = self._bound.seconds(now)
        left = seconds_left()
        return seconds if left is None else min(seconds, left)

    def full(self) -> BulkheadFull:
        pool = self.pool
        return BulkheadFull(
            f"guard {self.host.name!r}: all {pool.size} timeout threads are busy,"
            f" {pool.abandoned} of them with calls that nobody waits for any more",
            guard=self.host.name,
            policy="timeout",
        )

    def late(self, seconds: float, *, began: bool) -> BaseException:
        if began:
            self._bound.expired(seconds)
        return self._bound.error(seconds, began=began)
