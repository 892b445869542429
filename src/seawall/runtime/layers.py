"""What a policy becomes inside a guard: a gate (admits), a flow (steers) or a driver (runs).

A guard is a list of layers, the first outermost. A call goes down through them to the guarded
function and up again. None of a layer's methods block: what takes time (waiting for a slot, a pause
before the next attempt, the function itself) is requested from the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from random import Random

    from seawall.clock import Clock
    from seawall.models.pressure import Pressure
    from seawall.models.windows import CallCount
    from seawall.runtime.call import Call, SubstituteCause
    from seawall.runtime.stats import Stats

Kind = Literal["sync", "async"]


class Outcome(Enum):
    """How a call that a gate had admitted ended."""

    OK = "ok"
    FAILED = "failed"  # it raised, or a timeout or deadline of Seawall expired while it ran
    CANCELLED = "cancelled"
    """It ran without a verdict: its caller no longer wanted the answer, or the block ignored it."""
    UNUSED = "unused"  # an inner policy refused it: the work never began, all is given back


OK: Final = Outcome.OK
FAILED: Final = Outcome.FAILED
CANCELLED: Final = Outcome.CANCELLED
UNUSED: Final = Outcome.UNUSED


class Host(Protocol):
    """What a layer may know of the guard it belongs to."""

    name: str
    clock: Clock
    stats: Stats
    idempotent: bool
    keeps_statistics: bool
    max_wait: float | None
    """Maximum total seconds a call may wait at all of its gates; None means no bound."""

    @property
    def rng(self) -> Random:
        """The random number generator."""

    def pressure_on(self, call: Call) -> Pressure:
        """Return the pressure on the dependency from calls other than `call`."""

    def pressure_inside(self) -> Pressure:
        """Return the pressure on the dependency, not counting one call inside the guard."""


class Inline(NamedTuple):
    """A layer's part of the generated success path, as fixed lines of program text.

    They do what `enter` and `leave` do, for the common case only, and call these for the rest; this
    saves a frame on each. `{ticket}`, `{enter}` and `{leave}` are the layer's own, `{arguments}`
    those of the call; every other `{name}` is one of `names`, or a variable of the layer. If
    `leave` uses `{left}` for the ticket, the layer is left once, even if a signal interrupts that.
    If it uses `{ticket}`, the layer is then left again, as cancelled, which must change nothing.
    The text's own variables are `now_`, `end_`, `value_` and `held_` (the scope of the deadline: a
    layer that begins one puts it there); see `seawall.runtime.fastpath`.
    """

    names: dict[str, Any]
    enter: tuple[str, ...]
    leave: tuple[str, ...]


DeferredVerdict = Callable[[float], None]  # counts a failed attempt, at the given instant


class Layer:
    """Base of gates and flows.

    `enter` and `leave` are None where there is nothing to do: the success path then skips them.
    """

    takes_arguments = False  # `enter` takes the call's own: `enter(now, *args, **kwargs)`
    until_stopped = False  # `leave` waits until the work really stops, even if it was given up
    repeats = False  # a flow that may go down again with the same call
    seldom_entered = False  # most calls pass without entering it: their ticket is None
    inline: Inline | None = None  # lines of the success path, in place of `enter` and `leave`

    enter: Callable[..., Any] | None = None
    """`enter(now)` returns a ticket, raises a `Rejected`, or raises `Wait`."""

    leave: Callable[[Any, Outcome, Any, float], None] | None = None
    """`leave(ticket, outcome, detail, now)`, once for each `enter` that returned a ticket.

    `detail` is the value, or the error. It never raises.
    """

    attempted: Callable[..., DeferredVerdict | None] | None = None
    """For a gate that counts calls, not attempts: called instead of `leave` if a retry may follow.

    `attempted(ticket, outcome, detail, now, count, defer=...)`; `count` is the same for all
    attempts of a call. With `defer` it may return a failure instead of counting it: the failure is
    counted later, unless a later attempt replaces it. None means that there is no verdict. Such a
    gate has `continued` and `begun` too.
    """

    continued: Callable[[Any, CallCount], None] | None = None
    """`continued(ticket, count)`: a further attempt of the same call was admitted."""

    begun: Callable[[Any, float, CallCount], None] | None = None
    """`begun(ticket, now, count)`: after a failed attempt, a stream or a block has begun."""

    suspend: Callable[[Any], None] | None = None  # `suspend(ticket)`: other code until `resume`
    resume: Callable[[Any], None] | None = None  # `resume(ticket)`: the call continues
    again: Callable[[Any], bool] | None = None  # `again(value)`: act on a returned value (rare)


class Flow(Layer):
    """A layer that decides what happens with the result of what is inside it."""

    passes_refusals = False  # it ignores refusals from inside: only `leave` must be called

    def settle(self, call: Call, ticket: Any) -> Next | None:
        """Return None to pass `call.value` or `call.error` on outwards, perhaps replaced."""
        raise NotImplementedError


class Driver:
    """A layer that runs everything inside it: in a thread, or answers from memory."""

    def wrap(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: object
    ) -> Callable[..., Any]:
        """Return a function, awaitable if async, that runs `inner` for the user's `function`.

        `host` is the guard, or a marked copy of it.
        """
        raise NotImplementedError

    def inner_kind(self, kind: Kind) -> Kind:
        """Return how the inside runs, if this layer itself runs as `kind`."""
        return kind


@dataclass(slots=True, kw_only=True, eq=False)
class Next:
    """What a flow requests next: after `delay`, run the inside again, or `instead`."""

    delay: float = 0.0
    instead: Callable[..., Any] | None = None  # called with the arguments, because of `cause`
    cause: SubstituteCause | None = None


class Waiter(Protocol):
    """A call that waits at a gate. The runner supplies the waker before it is published."""

    until: float | None  # the instant at which waiting ends without success; None means no limit

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queue. `wake()` works from any thread, and returns False if its loop is gone."""

    def claim(self) -> Any:
        """Return the ticket, or raise the refusal; called once, after waking or `until`.

        May raise `Wait` once more: with another waiter, or with itself and another `until`.
        """

    def abandon(self) -> None:
        """Leave the queue, and give back what was already granted; called instead of `claim`."""


class Wait(BaseException):
    """Raised by `enter` when the call has to wait: the runner blocks or awaits."""

    def __init__(self, waiter: Waiter) -> None:
        super().__init__()
        self.waiter = waiter
