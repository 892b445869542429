"""The context of a call: deadline, criticality, tenant, tier, attempt, idempotency key.

Each lives in a context variable, so every task and every thread sees its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Generic, TypeVar

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.errors import TimedOut

__all__ = [
    "Criticality",
    "Deadline",
    "check_deadline",
    "criticality",
    "current_attempt",
    "current_criticality",
    "current_deadline",
    "current_idempotency_key",
    "current_tenant",
    "current_tier",
    "deadline",
    "idempotency_key",
    "tenant",
    "tier",
]

T = TypeVar("T")


class Criticality(IntEnum):
    """Importance of a call when not all can be served: the lowest are dropped first."""

    SHEDDABLE = 0
    SHEDDABLE_PLUS = 1
    CRITICAL = 2
    CRITICAL_PLUS = 3


Scope = list[Any]
"""A deadline in the context: `[at, clock, outer, holder, ...]`.

`at` is the instant, on `clock`. `outer` is the scope around it that was active when it began, or
None. `holder` is the task that will be cancelled at that instant, True if there is none, and None
once the scope has ended: then it has no effect any more, also for tasks and threads that copied the
context while it was active. The remaining items belong to its maker: a count, and the timer, which
implements `has_fired(holder)` and may have a `host`, the guard.

It is a list, and it is not removed from the context when it ends: one is made for each call with a
Timeout, where an object with attributes, or `reset`, would each cost as much as a bare await.
"""

deadline_var: Final[ContextVar[Scope | None]] = ContextVar("seawall_deadline", default=None)
"""The scope that began last in this context. It may have ended: read it with `deadline_scope()`."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A running attempt: of a guard's call, or of the caller whose request is being served.

    Tasks and threads inherit it with their context. It is switched off at the end of the call, so
    that work which the call left running in the background no longer counts as part of it.
    """

    number: int
    guard: str | None  # None for the attempt of this service's caller
    outer: Attempt | None
    over: bool = False

    @property
    def reason(self) -> str:
        """Why nothing inside this attempt retries, as text."""
        if self.guard is not None:
            return f"guard {self.guard!r} around it is retrying"
        if self.number > 1:
            return "the request that it is made for is a retry itself"
        return "the caller retries"


attempt_var: Final[ContextVar[Attempt | None]] = ContextVar("seawall_attempt", default=None)
"""The innermost attempt that the code runs in. A guard's first attempts are not recorded."""

criticality_var: Final[ContextVar[Criticality]] = ContextVar(
    "seawall_criticality", default=Criticality.CRITICAL
)
idempotency_key_var: Final[ContextVar[str | None]] = ContextVar(
    "seawall_idempotency_key", default=None
)
tenant_var: Final[ContextVar[str | None]] = ContextVar("seawall_tenant", default=None)
tier_var: Final[ContextVar[str | None]] = ContextVar("seawall_tier", default=None)


def reset(var: ContextVar[Any], token: Token[Any]) -> None:
    """Undo `set`, even when a dying coroutine is closed from another context."""
    try:
        var.reset(token)
    except ValueError:
        pass  # the context that held the value ended with its task


class Deadline:
    """An instant on a clock after which the caller no longer waits for the answer."""

    __slots__ = ("at", "clock")

    def __init__(self, at: float, clock: Clock) -> None:
        """Hold the instant `at` of `clock`."""
        self.at = check.at_least("instant", at, float("-inf"))
        self.clock = check_clock(clock)

    def __repr__(self) -> str:
        return f"<Deadline {self.remaining():.3f} s left>"

    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self.at - self.clock.now())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.clock.now() >= self.at

    def shrink(self, reserve: float) -> Deadline:
        """Return a deadline that is `reserve` seconds earlier, to leave time for later work."""
        return Deadline(self.at - check.seconds("reserve", reserve, zero=True), self.clock)

    def split(self, steps: int | Sequence[float]) -> list[Deadline]:
        """Divide the time left among steps: evenly among `steps`, or in proportion to weights.

        Each deadline is the instant by which its step must be over, if the steps run in order.
        """
        if isinstance(steps, int):
            weights = [1.0] * check.count("steps", steps)
        elif not isinstance(steps, Sequence) or isinstance(steps, str):
            raise TypeError(f"split({steps!r}): write a number of steps, or weights such as [1, 3]")
        else:
            weights = [check.at_least("weight", weight, 0) for weight in steps]
        total = sum(weights)
        if not total:
            raise ValueError("split() needs at least one weight above 0, such as split([1, 3])")
        now = self.clock.now()
        left = max(0.0, self.at - now)
        used = 0.0
        ends = []
        for weight in weights:
            used += weight
            ends.append(Deadline(min(self.at, now + left * used / total), self.clock))
        return ends


def deadline_scope(age: float = 0.0) -> Scope | None:
    """Return the scope of the deadline that applies here, or None. Always read it this way.

    It applies to work that begins now, or to a call that began `age` seconds ago. A scope that has
    cancelled its task applies only to work that began before that: what begins later is cleanup.
    """
    scope = live_scope(deadline_var.get())
    if scope is None or scope[1].now() - age < scope[0]:
        return scope
    return _binding_scope(scope, age)


class _Borrowed(Scope):
    """A scope that uses the instant of the scope around it, which is earlier than its own."""

    def __init__(self, at: float, clock: Clock, lender: Scope) -> None:
        super().__init__((lender[0], lender[1], lender, lender[3]))
        self.own = at, clock

    def lender_ended(self) -> None:
        """Switch to its own instant, or to that of the next scope around it."""
        outer = live_scope(self[2])
        self[0], self[1] = nearer_scope(*self.own, outer)[:2]
        self[2] = outer


class _Reserved(Scope):
    """A scope that ends a reserve before the one around it; it has no separate instant."""

    def __init__(self, lender: Scope, reserve: float | None) -> None:
        at, clock = lender[:2]
        super().__init__((at - reserve_of(at - clock.now(), reserve), clock, lender, True))

    def lender_ended(self) -> None:
        """End together with the outer scope."""
        end_scope(self)


def live_scope(scope: Scope | None) -> Scope | None:
    """Return `scope` if it has not ended, else the nearest one around it that has not."""
    while scope is not None:
        outer = scope[2]
        if scope[3] is None:
            scope = outer
        elif outer is None or outer[3] is not None:
            return scope
        elif isinstance(scope, (_Borrowed, _Reserved)):
            scope.lender_ended()
        else:
            scope[2] = live_scope(outer)  # keep ended scopes from forming an ever longer chain
    return None


def _binding_scope(scope: Scope | None, age: float) -> Scope | None:
    """Skip scopes that had cancelled their task `age` seconds ago; they still bind older work."""
    while scope is not None and scope[1].now() - age >= scope[0]:
        outer = scope[2]
        if _has_fired(scope):
            scope = live_scope(outer)
            continue
        if not isinstance(scope, (_Borrowed, _Reserved)):
            break
        binding = _binding_scope(outer, age)
        if binding is outer:
            break
        if isinstance(scope, _Borrowed):
            own = nearer_scope(*scope.own, binding)
            own[3:] = scope[3:]
            return own
        scope = binding
    return scope


def _has_fired(scope: Scope) -> bool:
    """Return whether the scope's task was cancelled at its instant."""
    holder = scope[3]
    watch = scope[5] if len(scope) > 5 else None  # noqa: PLR2004 - see `Scope`
    return watch is not None and holder is not None and bool(watch.has_fired(holder))


def nearer_scope(at: float, clock: Clock, outer: Scope | None) -> Scope:
    """Return a scope for `at`, or for the instant of the scope `outer` if that is earlier."""
    if outer is not None:
        # Instants of two clocks cannot be compared, so compare the time left.
        same = outer[1] is clock
        nearer = outer[0] < at if same else outer[0] - outer[1].now() < at - clock.now()
        if nearer:
            return _Borrowed(at, clock, outer)
    return [at, clock, outer, True]


def end_scope(scope: Scope) -> None:
    """End `scope` everywhere, also in contexts it was copied to."""
    scope[3] = None


def seconds_left() -> float | None:
    """Return the seconds until the deadline here, negative after it; None if there is none."""
    held = deadline_scope()
    if held is None:
        return None
    left: float = held[0] - held[1].now()
    return left


class _DeadlineScope:
    """`with` sets the deadline for what runs inside; `async with` also cancels at that instant."""

    __slots__ = ("_clock", "_entered", "_expiry", "_scope", "_seconds", "_token")

    _scope: Scope
    _token: Token[Scope | None]

    def __init__(self, seconds: float | Deadline, clock: Clock | None) -> None:
        self._seconds = seconds
        self._clock = clock
        self._entered = False
        self._expiry: Any = None

    def __enter__(self) -> Deadline:
        if self._entered:
            raise RuntimeError("this deadline(...) is in use: write deadline(...) for each block")
        self._entered = True
        outer = deadline_scope()
        if isinstance(self._seconds, Deadline):
            wanted = self._seconds
        else:
            clock = self._clock or (outer[1] if outer else current_clock())
            wanted = Deadline(clock.now() + self._seconds, clock)
        self._scope = nearer_scope(wanted.at, wanted.clock, outer)
        self._token = deadline_var.set(self._scope)
        return Deadline(self._scope[0], self._scope[1])

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        end_scope(self._scope)
        reset(deadline_var, self._token)
        self._entered = False

    async def __aenter__(self) -> Deadline:
        from seawall._expiry import Expiry, running_task

        task = running_task()
        kept = self.__enter__()
        self._expiry = Expiry(task, kept.remaining())
        self._scope += (0, self._expiry)
        return kept

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        ours = self._expiry.disarm(error)
        self.__exit__(kind, error, traceback)
        if ours:
            raise TimedOut("the deadline passed before the work was done") from error


def deadline(seconds: float | Deadline, *, clock: Clock | None = None) -> _DeadlineScope:
    """Give the code inside `seconds` (or until a `Deadline`); an earlier outer one still applies.

    `with deadline(2.0) as d:` sets the deadline, which guards and clients inside obey. `async with
    deadline(2.0):` also enforces it: the block is cancelled and raises `TimedOut`.
    """
    if not isinstance(seconds, Deadline):
        seconds = check.seconds("deadline", seconds, zero=True)
    if clock is not None:
        check_clock(clock)
    return _DeadlineScope(seconds, clock)


RESERVE_SHARE: Final = 0.1
LEAST_RESERVE: Final = 0.01
MOST_RESERVE: Final = 0.5


def check_reserve(reserve: object) -> float | None:
    """Return the seconds of a `reserve=` setting; None selects the default of `reserve_of`."""
    return None if reserve is None else check.seconds("reserve", reserve, zero=True)


def reserve_of(left: float, seconds: float | None = None) -> float:
    """Return how many of the `left` seconds a layer keeps back from what runs inside it.

    With this reserve, the layer can still answer when the inside runs out of time. It is `seconds`,
    or a tenth of the time left, at least 10 ms and at most 0.5 s. It is never more than half, so
    that work in a caller's last milliseconds is not refused just because of the reserve.
    """
    if seconds is None:
        seconds = min(max(RESERVE_SHARE * left, LEAST_RESERVE), MOST_RESERVE)
    return max(0.0, min(seconds, left / 2))


def reserve_scope(reserve: float | None) -> Scope | None:
    """Begin a scope that ends a reserve before the deadline here; return None if there is none."""
    held = deadline_scope()
    if held is None:
        return None
    scope = _Reserved(held, reserve)
    deadline_var.set(scope)
    return scope


@contextmanager
def keeping_back(reserve: float | None) -> Iterator[None]:
    """Move the deadline inside the block earlier by the reserve, if there is a deadline."""
    scope = reserve_scope(reserve)
    try:
        yield
    finally:
        if scope is not None:
            end_scope(scope)


def current_deadline() -> Deadline | None:
    """Return the deadline that applies here, or None."""
    held = deadline_scope()
    return None if held is None else Deadline(held[0], held[1])


def give_up_at(now: float, seconds: float) -> tuple[float | None, bool]:
    """Return when a wait of `seconds` ends (None: never), and whether the deadline ends it."""
    until = now + seconds
    left = seconds_left()
    limit = float("inf") if left is None else now + left
    late = limit < until
    until = limit if late else until
    return (None if until == float("inf") else until), late


def check_deadline() -> None:
    """Raise `TimedOut` if the deadline that applies here has passed; call it in long loops.

    Cleanup after a cancellation has no deadline of its own: see `deadline_scope`.
    """
    left = seconds_left()
    if left is not None and left <= 0:
        raise TimedOut("the deadline passed before the work was done")


def deadline_passed() -> bool:
    """Return whether the innermost deadline has passed, even if it has cancelled its task."""
    held = live_scope(deadline_var.get())
    return held is not None and bool(held[1].now() >= held[0])


class _Scope(Generic[T]):
    """Sets a context variable for the length of a `with` block."""

    __slots__ = ("_token", "_value", "_var")

    _token: Token[T]

    def __init__(self, var: ContextVar[T], value: T) -> None:
        self._var = var
        self._value = value

    def __enter__(self) -> T:
        self._token = self._var.set(self._value)
        return self._value

    def __exit__(self, *exc: object) -> None:
        reset(self._var, self._token)


def _text_scope(
    var: ContextVar[str | None], call: str, value: str, such: str
) -> _Scope[str | None]:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{call}({value!r}): write a non-empty string, such as {such}")
    return _Scope(var, value)


def criticality(level: Criticality) -> _Scope[Criticality]:
    """Set the criticality of the calls inside a `with` block."""
    if not isinstance(level, Criticality):
        raise TypeError(
            f"criticality({level!r}): write a Criticality, such as Criticality.CRITICAL"
        )
    return _Scope(criticality_var, level)


def current_criticality() -> Criticality:
    """Return the criticality of the current call; CRITICAL unless set."""
    return criticality_var.get()


def current_attempt() -> int:
    """Return the number of the attempt that is running, 1 for the first."""
    own = (one.number for one in attempts_from(attempt_var.get()) if one.guard is not None)
    return next(own, 1)


def attempts_from(innermost: Attempt | None) -> Iterator[Attempt]:
    """Yield the running attempts from `innermost` outwards."""
    held = innermost
    while held is not None:
        if not held.over:
            yield held
        held = held.outer


def retried_above(innermost: Attempt | None, *, edge: bool = False) -> Attempt | None:
    """Return the attempt around a call that forbids retrying it, or None.

    This rule keeps retries from multiplying, within a process and between services: whatever runs
    inside an attempt above the first is not retried. With `edge`, a first attempt of this service's
    caller is enough: the caller is known to retry.
    """
    for one in attempts_from(innermost):
        if one.number > 1 or (edge and one.guard is None):
            return one
    return None


def end_attempt(token: Token[Any]) -> None:
    """Switch off the attempt that was set with `token`, and remove it from the context."""
    held = attempt_var.get()
    try:
        attempt_var.reset(token)
    except ValueError:
        return  # see `reset`; the attempt in this context is another call's
    if held is not None:
        held.over = True


def idempotency_key(key: str) -> _Scope[str | None]:
    """Identify the effect of the calls inside, so that the receiver can deduplicate repeats."""
    return _text_scope(idempotency_key_var, "idempotency_key", key, "an order id")


def current_idempotency_key() -> str | None:
    """Return the idempotency key of the current call, or None."""
    return idempotency_key_var.get()


def tenant(name: str) -> _Scope[str | None]:
    """Set the tenant that the calls inside are made for: a customer, an account, a team."""
    return _text_scope(tenant_var, "tenant", name, "an account's id")


def current_tenant() -> str | None:
    """Return the tenant of the current call, or None."""
    return tenant_var.get()


def tier(name: str) -> _Scope[str | None]:
    """Set the service tier of the calls inside, such as "free" or "premium"."""
    return _text_scope(tier_var, "tier", name, "'free'")


def current_tier() -> str | None:
    """Return the service tier of the current call, or None."""
    return tier_var.get()
