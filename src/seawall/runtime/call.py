"""The state of one call, once it has left the fast path, and what it reports afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall._failures import attribute_of
from seawall.context import Attempt, deadline_scope, reset
from seawall.models.windows import CallCount
from seawall.runtime.layers import (
    CANCELLED,
    FAILED,
    OK,
    UNUSED,
    DeferredVerdict,
    Host,
    Layer,
    Outcome,
)

if TYPE_CHECKING:
    from seawall.runtime.degradation import Degradation
    from seawall.runtime.workers import ThreadJob

STREAMED: Final = object()  # in place of a value that cannot be looked at: a stream, a block


@dataclass(slots=True, eq=False)
class Trace:
    """What `attempt()` reports in its Result beyond the value, collected while the call runs."""

    guard: str  # inner guards have their own traces
    attempts: int = 0
    degradation: Degradation | None = None
    short_of_time: bool = False  # whether a call was not retried because its deadline was too near


trace_var: Final[ContextVar[Trace | None]] = ContextVar("seawall_trace", default=None)


@dataclass(slots=True, eq=False)
class SubstituteCause:
    """Why a substitute runs instead of the real call, and the age of its answer."""

    error: Exception
    age: float | None = None  # age of the substitute's answer in seconds, if it is a stored one


substitute_var: Final[ContextVar[SubstituteCause | None]] = ContextVar(
    "seawall_substitute", default=None
)


def current_trace(guard: str) -> Trace | None:
    """Return the trace that calls of `guard` report to, if the caller asked for one."""
    trace = trace_var.get()
    return trace if trace is not None and trace.guard == guard else None


@dataclass(slots=True, eq=False)
class WaitTotal:
    """Total seconds one call has waited at the gates of its guard so far."""

    guard: str
    seconds: float = 0.0


wait_total_var: Final[ContextVar[WaitTotal | None]] = ContextVar("seawall_waited", default=None)
"""Wait so far of the call whose gates are being entered; unset while its function runs."""


def patience(host: Host) -> float:
    """Return how many more seconds the call that enters a gate of `host` may wait."""
    most = host.max_wait
    if most is None:
        return float("inf")
    waited = wait_total_var.get()
    if waited is not None and waited.guard == host.name:
        most = max(0.0, most - waited.seconds)
    return most


class Abandoned:
    """Work that keeps running after its caller gave up; callbacks run when it really stops."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._running = True
        self.counted = False  # whether its failure has been counted, by the first observer
        self._callbacks: list[Callable[[], None]] = []

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Run `callback` when the work stops, or now if it already has."""
        with self._lock:
            if self._running:
                self._callbacks.append(callback)
                return
        callback()

    def stopped(self) -> None:
        """Mark the work as stopped and run the callbacks."""
        with self._lock:
            self._running = False
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __reduce__(self) -> tuple[Callable[[], Abandoned], tuple[()]]:
        # Another process, or a copy, knows nothing about it: treat it as stopped.
        return _stopped, ()

    @staticmethod
    def of(error: BaseException) -> Abandoned | None:
        """Return the work that was still running when `error` was raised, if any."""
        work = attribute_of(error, "abandoned_work")
        return work if isinstance(work, Abandoned) else None

    def attach(self, error: BaseException) -> None:
        """Mark `error` with this work, which is still running."""
        error.abandoned_work = self  # type: ignore[attr-defined]


def mark_withdrawn(error: BaseException) -> None:
    """Mark `error`: the work was withdrawn from its queue and never began."""
    error.work_withdrawn = True  # type: ignore[attr-defined]


def was_withdrawn(error: BaseException) -> bool:
    """Return whether `error` ended a call whose work was still waiting for a thread."""
    return attribute_of(error, "work_withdrawn") is True


def _stopped() -> Abandoned:
    work = Abandoned()
    work.stopped()
    return work


class Bypass:
    """A switch for tests: while it is on, guards have no policies. `switch_policies` sets it."""

    def __init__(self) -> None:
        self.on = check.environment("SEAWALL_POLICIES", ("off",)) == "off"
        if self.on:
            from logging import getLogger

            getLogger("seawall").warning("SEAWALL_POLICIES=off: no guard protects anything")


bypass: Final = Bypass()


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function inside of the drivers (a cache, threads...) around it."""
    inside, kind = getattr(function, "seawall_bare", (function, "sync"))
    if kind == "sync":
        return inside
    from seawall.runtime.functions import awaiting

    return awaiting(inside)


PATIENCE: Final = 1.0
"""Seconds after a call's start during which a retry may still make up for a failed attempt.

Such a call counts when it ends, at gates that count calls. One that takes longer, or pauses for
longer, counts as failed immediately: an outage must be known before all retries are over.
"""


class Call:
    """The state of one call in the interpreter: position, result and attempts."""

    __slots__ = (
        *("abandoned", "adapt", "args", "attempt", "attempt_began", "attempts", "began", "block"),
        *("counted", "counts", "deferred", "degradation", "error", "function", "held", "host"),
        *("kwargs", "layers", "memory", "outer_attempt", "own_abandoned", "reached", "streaming"),
        *("tickets", "timed", "value", "waited", "waited_token"),
    )

    def __init__(
        self,
        host: Host,
        layers: Sequence[Layer],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        now: float,
    ) -> None:
        if bypass.on:
            layers, function = (), bare(function)
        self.host = host
        self.layers = layers
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.began = self.attempt_began = now
        self.tickets: list[Any] = []  # one for each entered layer, outermost first
        self.memory: dict[Layer, Any] = {}  # what each flow remembers of this call
        self.value: Any = None
        self.error: BaseException | None = None
        self.reached = False  # whether the function was started since the current layer was entered
        self.attempts = 0
        self.degradation: Degradation | None = None  # the lesser answer, if it got one
        self.attempt: Attempt | None = None  # from the second on; code inside sees it
        self.outer_attempt: Attempt | None = None  # the innermost around the call
        self.streaming = False  # whether gates stay entered, in `held`, after success
        self.block = False  # whether the function is a block of code (`guard.attempts()`)
        self.adapt: Callable[[Any], Any] | None = None  # makes a stream of a substitute's value
        self.counts = True
        """Whether the function is the user's own; if it is a driver, it is not counted."""
        self.timed = True  # whether the function's own time is the call's; not for a `hold`
        self.held: list[tuple[Layer, Any]] = []
        self.abandoned: list[Abandoned] = []
        """Work of all attempts that is still running; this attempt's begins at `own_abandoned`."""
        self.own_abandoned = 0
        self.counted: dict[Layer, CallCount] = {}  # at gates that count calls
        self.deferred: dict[Layer, DeferredVerdict] = {}  # failures that are not counted yet
        self.waited: WaitTotal | None = None  # in all attempts, if the guard bounds the total
        self.waited_token: Token[WaitTotal | None] | None = None

    def begin_attempt(self, now: float) -> None:
        """Record that the function is started."""
        self.attempt_began = now
        self.reached = True
        self.attempts += 1
        if self.counts:
            self.forget_waits()

    def note_wait(self, seconds: float) -> None:
        """Add a wait at a gate to the total that the guard bounds."""
        if self.host.max_wait is None:
            return
        if self.waited is None:
            # Code inside a driver has its own Call, but is part of the same call.
            outer = wait_total_var.get()
            same = outer is not None and outer.guard == self.host.name
            self.waited = outer if same else WaitTotal(self.host.name)
        assert self.waited is not None  # noqa: S101 - for the type checker
        self.waited.seconds += seconds
        self.remember_waits()

    def remember_waits(self) -> None:
        """Make the total wait so far visible to the gates that are entered next."""
        if self.waited is not None and self.waited_token is None:
            self.waited_token = wait_total_var.set(self.waited)

    def forget_waits(self) -> None:
        """Hide the total wait: an inner call of the same guard is another call."""
        token, self.waited_token = self.waited_token, None
        if token is not None:
            reset(wait_total_var, token)

    def outcome(self) -> Outcome:
        """Return the call's outcome, as seen by a gate just outside of its current position."""
        error = self.error
        if error is None:
            return OK
        if not self.reached:
            return UNUSED
        # On the class, so that no user code runs.
        if getattr(type(error), "no_verdict", False) is True:
            return CANCELLED
        if isinstance(error, Exception) or _out_of_time(error):
            return FAILED
        return CANCELLED

    def leave(self, layer: Layer, ticket: Any, now: float) -> None:
        """Leave a layer, now or when abandoned work stops."""
        leave = layer.leave
        if leave is None:
            return
        outcome = self.outcome()
        detail = self.value if outcome is OK else self.error
        running = self.abandoned[self.own_abandoned :] if layer.until_stopped else []
        if running:
            _when_all_stopped(running, lambda: leave(ticket, outcome, None, now))
        else:
            leave(ticket, outcome, detail, now)

    def leave_attempt(self, layer: Layer, ticket: Any, now: float) -> None:
        """Leave a layer; at a gate that counts calls, as an attempt if a retry may follow."""
        repeated = layer.attempted is not None and self.is_repeated(len(self.tickets) - 1)
        if repeated:
            self.counted.setdefault(layer, CallCount())
        self.leave_counted(layer, ticket, now, defer=repeated and now - self.began < PATIENCE)

    def leave_counted(self, layer: Layer, ticket: Any, now: float, *, defer: bool = False) -> None:
        """Leave a layer; if the call was already counted there, change how it counts."""
        count = self.counted.get(layer)
        if count is None or layer.attempted is None:
            self.leave(layer, ticket, now)
            return
        outcome = self.outcome()
        detail = self.value if outcome is OK else self.error
        verdict = layer.attempted(ticket, outcome, detail, now, count, defer=defer)
        if verdict is not None:
            self.deferred[layer] = verdict

    def count_deferred(self, now: float) -> None:
        """Count the failures that no later attempt has made up for."""
        deferred, self.deferred = self.deferred, {}
        for count in deferred.values():
            count(now)

    def foresee_pause(self, seconds: float) -> None:
        """Count failures now if the pause is long: other callers need to know of them."""
        now = self.host.clock.now()
        if self.deferred and now - self.began + seconds >= PATIENCE:
            self.count_deferred(now)

    def hold_layer(self, layer: Layer, ticket: Any, now: float) -> None:
        """Leave a layer later; until then, an earlier failed attempt does not count."""
        self.held.append((layer, ticket))
        self.deferred.pop(layer, None)
        count = self.counted.get(layer)
        if count is not None and layer.begun is not None:
            layer.begun(ticket, now, count)

    def continue_count(self) -> None:
        """Pass the call's earlier attempts to the gate that was just entered."""
        if not self.counted:
            return
        layer = self.layers[len(self.tickets) - 1]
        count = self.counted.get(layer)
        if count is not None and layer.continued is not None:
            layer.continued(self.tickets[-1], count)

    def suspend(self) -> None:
        """Notify the entered layers that code which is not part of the call runs now."""
        for layer, ticket in zip(self.layers, self.tickets, strict=False):
            if layer.suspend is not None:
                layer.suspend(ticket)

    def resume(self) -> None:
        """Notify the entered layers that the call continues."""
        for layer, ticket in zip(self.layers, self.tickets, strict=False):
            if layer.resume is not None:
                layer.resume(ticket)

    def crossed_flow(self, now: float) -> None:
        """Record that the call is now outside of a flow: everything inside counts as one."""
        self.reached = self.attempts > 0
        self.own_abandoned = 0
        if self.deferred and not self.is_repeated(len(self.tickets)):
            self.count_deferred(now)

    def is_repeated(self, depth: int) -> bool:
        """Return whether one of the outermost `depth` layers may repeat what is inside it."""
        return any(layer.repeats for layer in self.layers[:depth])

    def age(self) -> float:
        """Return the seconds since the call began."""
        return self.host.clock.now() - self.began

    def until(self) -> float | None:
        """Return the instant by which the call must end, on the guard's clock, or None."""
        held = deadline_scope(self.age())
        if held is None:
            return None
        at: float = held[0]
        own, clock = self.host.clock, held[1]
        return at if clock is own else own.now() + (at - clock.now())

    def write_trace(self) -> None:
        """Write the outcome into the trace, if the caller asked for one."""
        trace = current_trace(self.host.name)
        if trace is not None:
            if self.counts and not given_up(self.host.name):
                trace.attempts += self.attempts
            if self.degradation is not None:
                trace.degradation = self.degradation
        self.degradation = None  # break the cycle: its error refers to frames that hold this call


further_attempts: Final[ContextVar[Callable[[str], None] | None]] = ContextVar(
    "seawall_further_attempts", default=None
)
"""Called with the guard's name before each further attempt; may raise in place of it."""

job_var: Final[ContextVar[ThreadJob | None]] = ContextVar("seawall_job", default=None)
"""The job of a worker thread, inside that thread."""


def given_up(guard: str) -> bool:
    """Return whether this is in a thread of `guard` whose caller gave up, and counted that."""
    job = job_var.get()
    return job is not None and job.given_up and job.guard == guard


def _when_all_stopped(running: list[Abandoned], callback: Callable[[], None]) -> None:
    first, *rest = running
    if rest:
        first.when_stopped(lambda: _when_all_stopped(rest, callback))
    else:
        first.when_stopped(callback)


def _out_of_time(error: BaseException) -> bool:
    # A CancelledError means that asyncio is loaded; a sync service never pays for the import.
    if type(error).__name__ != "CancelledError":
        return False
    from seawall._expiry import is_expiry

    return is_expiry(error)
