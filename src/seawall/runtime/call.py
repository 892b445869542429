"""One call on its way, once it has left the fast path, and what is told of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Protocol

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

STREAMED: Final = object()
"""Stands for the value where there is none to look at: a generator, a `hold` block."""


class Trace:
    """What `attempt()` tells in its Result beyond the value, gathered while the call runs."""

    __slots__ = ("attempts", "degradation", "guard", "short_of_time")

    def __init__(self, guard: str) -> None:
        """Gather for calls of that guard only: guards further in have traces of their own."""
        self.guard = guard
        self.attempts = 0
        self.degradation: Degradation | None = None
        self.short_of_time = False
        """Whether a call was not retried because its deadline was too near."""


trace_var: Final[ContextVar[Trace | None]] = ContextVar("seawall_trace", default=None)


class Need:
    """Why a substitute runs instead of the real call, and what it tells of its own answer."""

    __slots__ = ("age", "error")

    def __init__(self, error: Exception) -> None:
        """Be needed because of `error`."""
        self.error = error
        self.age: float | None = None
        """How old the substitute's answer is, if it is one that was kept."""


need_var: Final[ContextVar[Need | None]] = ContextVar("seawall_need", default=None)


def current_trace(guard: str) -> Trace | None:
    """Return the trace that calls of `guard` are to tell, if somebody asked for one."""
    trace = trace_var.get()
    return trace if trace is not None and trace.guard == guard else None


class Waited:
    """How long one call has waited at the gates of its guard so far."""

    __slots__ = ("guard", "seconds")

    def __init__(self, guard: str) -> None:
        """Begin with nothing."""
        self.guard = guard
        self.seconds = 0.0


waited_var: Final[ContextVar[Waited | None]] = ContextVar("seawall_waited", default=None)
"""What the call whose gates are being entered has waited; unset while its function runs."""


def patience(host: Host) -> float:
    """Return for how many seconds more the call that enters a gate of `host` may wait."""
    most = host.max_wait
    if most is None:
        return float("inf")
    waited = waited_var.get()
    if waited is not None and waited.guard == host.name:
        most = max(0.0, most - waited.seconds)
    return most


class Abandoned:
    """Work that runs on after its caller gave up; callbacks run when it really stops."""

    def __init__(self) -> None:
        """Begin as running."""
        self._lock = RLock()
        self._running = True
        self.counted = False
        """Whether its failure has been counted, by the first who noticed."""
        self._callbacks: list[Callable[[], None]] = []

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Run `callback` when the work stops, or now if it has."""
        with self._lock:
            if self._running:
                self._callbacks.append(callback)
                return
        callback()

    def stopped(self) -> None:
        """Tell that the work is over."""
        with self._lock:
            self._running = False
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __reduce__(self) -> tuple[Callable[[], Abandoned], tuple[()]]:
        # In another process, or a copy, nothing is known of it: as if it had stopped.
        return _stopped, ()

    @staticmethod
    def of(error: BaseException) -> Abandoned | None:
        """Return the work that was still running when `error` was raised, if any."""
        work = attribute_of(error, "abandoned_work")
        return work if isinstance(work, Abandoned) else None

    def attach(self, error: BaseException) -> None:
        """Let `error` tell on its way out that this work is still running."""
        error.abandoned_work = self  # type: ignore[attr-defined]


def mark_withdrawn(error: BaseException) -> None:
    """Let `error` tell that the work was withdrawn from its queue: it never began."""
    error.work_withdrawn = True  # type: ignore[attr-defined]


def was_withdrawn(error: BaseException) -> bool:
    """Tell whether `error` ended a call whose work was still waiting for a thread."""
    return attribute_of(error, "work_withdrawn") is True


def _stopped() -> Abandoned:
    work = Abandoned()
    work.stopped()
    return work


class Bypass:
    """A switch for tests: while it is on, guards call their functions without any policy.

    See `seawall.testing.policies_off`, and `switch_policies`, which turns it.
    """

    __slots__ = ("on",)

    def __init__(self) -> None:
        """Begin as the environment says."""
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
"""Seconds after its beginning until which a call may make a failed attempt good.

Such a call counts when it ends, at gates that count calls. One that takes longer, or pauses for
longer, counts as failed at once: an outage must be known before all retries are over.
"""


class Call:
    """The state of one call in the interpreter: where it is, what came out, what was tried."""

    __slots__ = (
        "abandoned",
        "adapt",
        "args",
        "attempt",
        "attempt_began",
        "attempts",
        "began",
        "block",
        "counted",
        "counts",
        "deferred",
        "degradation",
        "error",
        "function",
        "held",
        "host",
        "kwargs",
        "layers",
        "memory",
        "outer_attempt",
        "own_abandoned",
        "reached",
        "streaming",
        "tickets",
        "timed",
        "value",
        "waited",
        "waited_token",
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
        """Stand above the first layer at the instant `now`."""
        if bypass.on:
            layers, function = (), bare(function)
        self.host = host
        self.layers = layers
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.began = self.attempt_began = now
        self.tickets: list[Any] = []
        """One for each layer entered, outermost first."""
        self.memory: dict[Layer, Any] = {}
        """What a flow remembers of this call."""
        self.value: Any = None
        self.error: BaseException | None = None
        self.reached = False
        """Whether the function was started since the layer where the call is now was entered."""
        self.attempts = 0
        self.degradation: Degradation | None = None
        """What it was answered with, if that is less than the real answer."""
        self.attempt: Attempt | None = None
        """The attempt that is going on, from the second on: what runs inside it sees it."""
        self.outer_attempt: Attempt | None = None
        """The innermost attempt that the call itself runs in."""
        self.streaming = False
        """Whether gates stay entered after success (a generator, `hold`): then they are `held`."""
        self.block = False
        """Whether the function is a block of code, which its owner runs (`guard.attempts()`)."""
        self.adapt: Callable[[Any], Any] | None = None
        """What makes a substitute's value into a stream's."""
        self.counts = True
        """Whether the function is the user's own; around a driver it is not, and not counted."""
        self.timed = True
        """Whether the time of the function itself is that of the call; not so for a `hold`."""
        self.held: list[tuple[Layer, Any]] = []
        self.abandoned: list[Abandoned] = []
        """Work of all attempts that ran on; this attempt's begins at `own_abandoned`."""
        self.own_abandoned = 0
        self.counted: dict[Layer, CallCount] = {}
        """How the call counts at gates that count calls, once an attempt has ended."""
        self.deferred: dict[Layer, DeferredVerdict] = {}
        """Failures of attempts that a later attempt may soon make good: not counted yet."""
        self.waited: Waited | None = None
        """Where the guard bounds its waits together: those of all attempts so far."""
        self.waited_token: Token[Waited | None] | None = None

    def begin_attempt(self, now: float) -> None:
        """Note that the function is started."""
        self.attempt_began = now
        self.reached = True
        self.attempts += 1
        if self.counts:
            self.forget_waits()

    def note_wait(self, seconds: float) -> None:
        """Add a wait at a gate to those that the guard bounds together."""
        if self.host.max_wait is None:
            return
        if self.waited is None:
            # What is inside a driver has a Call of its own, and is part of the same call.
            outer = waited_var.get()
            same = outer is not None and outer.guard == self.host.name
            self.waited = outer if same else Waited(self.host.name)
        assert self.waited is not None  # noqa: S101 - for the type checker
        self.waited.seconds += seconds
        self.remember_waits()

    def remember_waits(self) -> None:
        """Let the gates that are entered next know what was waited before."""
        if self.waited is not None and self.waited_token is None:
            self.waited_token = waited_var.set(self.waited)

    def forget_waits(self) -> None:
        """Let nobody else know: a call of the same guard further in is another call."""
        token, self.waited_token = self.waited_token, None
        if token is not None:
            reset(waited_var, token)

    def outcome(self) -> Outcome:
        """Say how the call ended, as seen by a gate just outside of where it is now."""
        error = self.error
        if error is None:
            return OK
        if not self.reached:
            return UNUSED
        if getattr(type(error), "no_verdict", False) is True:  # of its class: no user's code runs
            return CANCELLED
        if isinstance(error, Exception) or _out_of_time(error):
            return FAILED
        return CANCELLED

    def leave(self, layer: Layer, ticket: Any, now: float) -> None:
        """Leave a layer, or see to it that it is left when abandoned work stops."""
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
        """Leave a layer; where the call has counted already, by changing how it counts."""
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
        """Count the failures that nothing has made good."""
        deferred, self.deferred = self.deferred, {}
        for count in deferred.values():
            count(now)

    def foresee_pause(self, seconds: float) -> None:
        """Count failures now if the call goes on for long: others should not wait to know."""
        now = self.host.clock.now()
        if self.deferred and now - self.began + seconds >= PATIENCE:
            self.count_deferred(now)

    def hold_layer(self, layer: Layer, ticket: Any, now: float) -> None:
        """Leave a layer later; until then, a failed attempt before it does not count."""
        self.held.append((layer, ticket))
        self.deferred.pop(layer, None)
        count = self.counted.get(layer)
        if count is not None and layer.begun is not None:
            layer.begun(ticket, now, count)

    def continue_count(self) -> None:
        """Let the gate that was just entered know of the earlier attempts of the call."""
        if not self.counted:
            return
        layer = self.layers[len(self.tickets) - 1]
        count = self.counted.get(layer)
        if count is not None and layer.continued is not None:
            layer.continued(self.tickets[-1], count)

    def suspend(self) -> None:
        """Let the layers entered know that code which is not part of the call runs now."""
        for layer, ticket in zip(self.layers, self.tickets, strict=False):
            if layer.suspend is not None:
                layer.suspend(ticket)

    def resume(self) -> None:
        """Let them know that the call goes on."""
        for layer, ticket in zip(self.layers, self.tickets, strict=False):
            if layer.resume is not None:
                layer.resume(ticket)

    def crossed_flow(self, now: float) -> None:
        """Note that the call is now outside of a flow: what its inside did counts as one."""
        self.reached = self.attempts > 0
        self.own_abandoned = 0
        if self.deferred and not self.is_repeated(len(self.tickets)):
            self.count_deferred(now)

    def is_repeated(self, depth: int) -> bool:
        """Tell whether one of the outermost `depth` layers may repeat what is inside it."""
        return any(layer.repeats for layer in self.layers[:depth])

    def age(self) -> float:
        """Return the seconds since the call began."""
        return self.host.clock.now() - self.began

    def until(self) -> float | None:
        """Return the instant by which all of this must be over, on the guard's clock, or None."""
        held = deadline_scope(self.age())
        if held is None:
            return None
        at: float = held[0]
        own, clock = self.host.clock, held[1]
        return at if clock is own else own.now() + (at - clock.now())

    def tell(self) -> None:
        """Write what happened into the trace of whoever asked for one."""
        trace = current_trace(self.host.name)
        if trace is not None:
            if self.counts and not given_up(self.host.name):
                trace.attempts += self.attempts
            if self.degradation is not None:
                trace.degradation = self.degradation
        self.degradation = None  # its error leads to the frames that have this call


job_var: Final[ContextVar[Abandonable | None]] = ContextVar("seawall_job", default=None)
"""The work of a worker thread, inside that thread."""


class Abandonable(Protocol):
    """Work that its caller may have given up on."""

    @property
    def guard(self) -> str:
        """Whose call it is."""

    @property
    def pool(self) -> object:
        """Whose thread it runs in."""

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more."""


def given_up(guard: str) -> bool:
    """Tell whether this runs in a worker thread of `guard` and nobody waits for it any more.

    Then it counts no more: its end was counted when it was given up.
    """
    job = job_var.get()
    return job is not None and job.given_up and job.guard == guard


def _when_all_stopped(running: list[Abandoned], callback: Callable[[], None]) -> None:
    first, *rest = running
    if rest:
        first.when_stopped(lambda: _when_all_stopped(rest, callback))
    else:
        first.when_stopped(callback)


def _out_of_time(error: BaseException) -> bool:
    # asyncio is loaded if the error is a CancelledError; a sync service never pays for it.
    if type(error).__name__ != "CancelledError":
        return False
    from seawall._expiry import is_expiry

    return is_expiry(error)
