"""What a policy becomes inside a guard: gates that admit, flows that drive, drivers that carry.

A guard is a list of layers, the first outermost. A call goes down through them to the guarded
function and up again. All of a layer's methods return at once: what takes time (waiting for a
slot, a pause before the next attempt, the function itself) is asked of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from random import Random

    from seawall.clock import Clock
    from seawall.models.pressure import Pressure
    from seawall.models.windows import CallCount
    from seawall.runtime.call import Call, Need
    from seawall.runtime.stats import Stats

Kind = Literal["sync", "async"]


class Outcome(Enum):
    """How a call that a gate had admitted ended."""

    OK = "ok"
    FAILED = "failed"
    """It raised, or a timeout or deadline of ours expired while it ran."""
    CANCELLED = "cancelled"
    """It ran and there is no verdict: nobody wanted the answer any more, or it says nothing."""
    UNUSED = "unused"
    """A policy further in refused it: the work never began, all is given back."""


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
    """The most seconds that a call may wait at all of its gates together; None: no bound."""

    @property
    def rng(self) -> Random:
        """The source of chance."""

    def pressure_on(self, call: Call) -> Pressure:
        """Return how hard the dependency is pressed by others than `call`, which asks."""

    def pressure_inside(self) -> Pressure:
        """Return how hard it is pressed by others than a call that is in it."""


class Inline(NamedTuple):
    """A layer's part of the generated success path, as fixed lines of program text.

    They do what `enter` and `leave` do, for the common case only, and call these for the rest: a
    frame saved on each. `{ticket}`, `{enter}` and `{leave}` are the layer's own, `{arguments}`
    those of the call; every other `{name}` is one of `names`, or a variable of the layer's. Where
    `leave` has `{left}` for the ticket, it is left once, also if a signal cuts that short; with
    `{ticket}` it is left again then, as cancelled, and that must change nothing. The
    text's own variables are `now_`, `end_`, `value_` and `held_` (the scope of the deadline: a
    layer that begins one puts it there); see `seawall.runtime.fastpath`.
    """

    names: dict[str, Any]
    enter: tuple[str, ...]
    leave: tuple[str, ...]


DeferredVerdict = Callable[[float], None]
"""Counts a failed attempt, at the instant it is given."""


class Layer:
    """The part that gates and flows share.

    `enter` and `leave` are None where there is nothing to do: the success path then skips them.
    """

    takes_arguments = False
    """Whether `enter` wants the call's own arguments, as `enter(now, *args, **kwargs)`."""

    until_stopped = False
    """Whether `leave` must wait until the work really stops, even if its caller gave up on it."""

    enter: Callable[..., Any] | None = None
    """`enter(now)` gives a ticket, raises a `Rejected`, or raises `Wait`."""

    leave: Callable[[Any, Outcome, Any, float], None] | None = None
    """`leave(ticket, outcome, detail, now)`, once for each `enter` that gave a ticket.

    `detail` is the value, or the error. It never raises.
    """

    attempted: Callable[..., DeferredVerdict | None] | None = None
    """For a gate that counts calls, not attempts: called instead of `leave` if a retry may follow.

    `attempted(ticket, outcome, detail, now, count, defer=...)`; `count` is the same for all
    attempts of a call. With `defer` it may return a failure instead of counting it: that is
    counted later, unless a later attempt returns something. None means that it has no verdict.
    Such a gate has `continued` and `begun` too.
    """

    continued: Callable[[Any, CallCount], None] | None = None
    """`continued(ticket, count)`: another attempt of a call of which one has ended was admitted."""

    begun: Callable[[Any, float, CallCount], None] | None = None
    """`begun(ticket, now, count)`: after such an attempt, a stream or a block was begun."""

    repeats = False
    """Whether it is a flow that may go down again with the same call."""

    seldom_entered = False
    """Whether most calls pass without entering it. Their ticket is None, as if `enter` were."""

    inline: Inline | None = None
    """What to write into the success path instead of calls of `enter` and `leave`."""

    suspend: Callable[[Any], None] | None = None
    """`suspend(ticket)`: until `resume`, the code that runs is not part of the call."""

    resume: Callable[[Any], None] | None = None
    """`resume(ticket)`: the call goes on."""

    again: Callable[[Any], bool] | None = None
    """`again(value)`: whether a flow wants to act on a value that was returned (rare)."""


class Flow(Layer):
    """A layer that decides what happens with the result of what is inside it."""

    passes_refusals = False
    """Whether it has no say in a refusal from further in: then `leave` is all that it needs."""

    def settle(self, call: Call, ticket: Any) -> Next | None:
        """Look at `call.value` or `call.error` on the way up; may replace them.

        None passes the result on outwards. A `Next` goes down again, and the result of that
        comes back here.
        """
        raise NotImplementedError


class Driver:
    """A layer that carries out everything inside it: in a thread, or from memory."""

    def wrap(self, inner: Callable[..., Any], kind: Kind, function: object) -> Callable[..., Any]:
        """Return a function that runs `inner`; for "async" one that returns an awaitable.

        `function` is the user's own, at the very inside.
        """
        raise NotImplementedError

    def wrap_for(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: object
    ) -> Callable[..., Any]:
        """Return `wrap(...)` for `host`: the guard, or the guard with calls marked otherwise."""
        return self.wrap(inner, kind, function)

    def inner_kind(self, kind: Kind) -> Kind:
        """Return how what is inside runs, if this layer itself runs as `kind`."""
        return kind

    def can_run(self, kind: Kind) -> bool:
        """Tell whether a function of that kind can be at the very inside."""
        return self.inner_kind(kind) == kind


class Next:
    """What a flow wants to happen next: after `delay`, either all inside it again, or `instead`."""

    __slots__ = ("delay", "instead", "need")

    def __init__(
        self,
        *,
        delay: float = 0.0,
        instead: Callable[..., Any] | None = None,
        need: Need | None = None,
    ) -> None:
        """Ask for another run of what is inside, or for `instead(*args, **kwargs)` and say why."""
        self.delay = delay
        self.instead = instead
        self.need = need


class Waiter(Protocol):
    """Somebody who waits for a gate. The runner supplies the waker before it is published."""

    until: float | None
    """The instant at which waiting ends without success; None for as long as it takes."""

    def publish(self, wake: Callable[[], bool]) -> None:
        """Join the queue. `wake()` may be called from any thread; False: nobody listens there."""

    def claim(self) -> Any:
        """Return the ticket, or raise the refusal; called once, after waking or `until`.

        May raise `Wait` once more: with another waiter, or with itself and another `until`.
        """

    def abandon(self) -> None:
        """Leave the queue, and give back what was granted already; instead of `claim`."""


class Wait(BaseException):
    """Raised by `enter` when the call has to wait: the runner waits in its own way."""

    def __init__(self, waiter: Waiter) -> None:
        """Hand `waiter` to the runner."""
        super().__init__()
        self.waiter = waiter
