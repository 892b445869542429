"""Typed events and `subscribe`.

Only transitions and troubles are events; a success makes none. Without a subscriber, no event is
built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, Final, TypeVar, overload

from seawall.runtime.functions import kind_of

E = TypeVar("E", bound="Event")


class Event:
    """Something happened in the guard called `guard`; `name` is stable, for logs and metrics.

    Objects that belong to no guard (a pool, an executor, a ladder) put their own name there.
    """

    __slots__ = ("guard",)
    name = "event"
    is_change = False
    """Whether it is a change of state, which is logged even without a subscriber.

    Not `StoreModeChanged`, which comes once for each policy of a store that logs its loss itself,
    and not `LoopBlocked`, which the watchdog logs with the stack. Most others are about single
    calls.
    """

    def __init__(self, guard: str) -> None:
        """Belong to the guard of that name."""
        self.guard = guard

    def fields(self) -> dict[str, Any]:
        """Return the event's own values by name, including the guard's."""
        code = type(self).__init__.__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in self.fields().items())
        return f"{type(self).__name__}({values})"


class BreakerChanged(Event):
    """A breaker went from one state to another."""

    __slots__ = ("after", "before", "cause", "failure", "key", "reason")
    name = "breaker_changed"
    is_change = True

    def __init__(
        self,
        guard: str,
        *,
        before: str,
        after: str,
        cause: str,
        key: object,
        reason: str = "",
        failure: str = "",
    ) -> None:
        """Hold the names of the states, the cause of the change, and the key of a keyed breaker.

        `reason` says how the call that opened it failed, as in `CallRetried`; empty if no call's
        failure opened it, or if that is unknown. `failure` is the type and the message of that
        error, without secrets, on one short line.
        """
        super().__init__(guard)
        self.before = before
        self.after = after
        self.cause = cause
        self.key = key
        self.reason = reason
        self.failure = failure


class CallRejected(Event):
    """A policy refused a call; in shadow mode (`enforced=False`) it would have."""

    __slots__ = ("enforced", "key", "message", "policy", "reason")
    name = "call_rejected"

    def __init__(
        self,
        guard: str,
        *,
        policy: str,
        reason: str,
        enforced: bool,
        key: object = None,
        message: str = "",
    ) -> None:
        """Hold which policy refused, why, and for which key if the policy has keys.

        `message` is the first line of the refusal's text, redacted.
        """
        super().__init__(guard)
        self.policy = policy
        self.reason = reason
        self.enforced = enforced
        self.key = key
        self.message = message


class CallRetried(Event):
    """An attempt failed and another will follow after `delay` seconds."""

    __slots__ = ("attempt", "delay", "failure", "reason")
    name = "call_retried"

    def __init__(
        self, guard: str, *, attempt: int, delay: float, reason: str, failure: str = ""
    ) -> None:
        """Hold which attempt failed, how long the pause is, and why.

        `reason` is a word with few values: the status of an HTTP answer ("503"), the code of a gRPC
        call, the `reason` of a Seawall error, otherwise the name of the error's type; or "value".
        `failure` is a human-readable line about the error ("503 from vendor.example"), redacted.
        """
        super().__init__(guard)
        self.attempt = attempt
        self.delay = delay
        self.reason = reason
        self.failure = failure


class RetryStopped(Event):
    """No further attempt was made although the error is one to retry."""

    __slots__ = ("attempt", "cause", "failure", "reason")
    name = "retry_stopped"

    def __init__(
        self, guard: str, *, attempt: int, cause: str, reason: str, failure: str = ""
    ) -> None:
        """Hold the last attempt's number, and what stopped it: attempts, budget, deadline...

        `reason` and `failure` say how the last attempt failed, as in `CallRetried`.
        """
        super().__init__(guard)
        self.attempt = attempt
        self.cause = cause
        self.reason = reason
        self.failure = failure


class CallTimedOut(Event):
    """A call was stopped because its time was over."""

    __slots__ = ("seconds",)
    name = "call_timed_out"

    def __init__(self, guard: str, *, seconds: float) -> None:
        """Hold the number of seconds the call had been given."""
        super().__init__(guard)
        self.seconds = seconds


class Degraded(Event):
    """A call got a lesser answer than the real one."""

    __slots__ = ("age", "level", "message", "reason", "source")
    name = "degraded"

    def __init__(
        self,
        guard: str,
        *,
        source: str,
        level: int,
        reason: str,
        message: str = "",
        age: float | None = None,
    ) -> None:
        """Hold where the answer came from, at which level (1 is the first), and why.

        `source` is the name of a fallback's function, "static" or "cache: stale". `reason` is that
        of the error which made it necessary, as in `CallRetried`, and `message` the first line of
        its text, redacted. `age` is the age of a stale answer, in seconds.
        """
        super().__init__(guard)
        self.source = source
        self.level = level
        self.reason = reason
        self.message = message
        self.age = age


class ThreadAbandoned(Event):
    """A worker thread keeps running after its caller gave up; `running` such threads exist now."""

    __slots__ = ("running",)
    name = "thread_abandoned"

    def __init__(self, guard: str, *, running: int) -> None:
        """Hold the number of abandoned threads that are running."""
        super().__init__(guard)
        self.running = running


class SettingsChanged(Event):
    """A policy's settings were changed at run time."""

    __slots__ = ("changes", "policy")
    name = "settings_changed"
    is_change = True

    def __init__(self, guard: str, *, policy: str, changes: dict[str, Any]) -> None:
        """Hold the policy and the new values."""
        super().__init__(guard)
        self.policy = policy
        self.changes = changes


class CallHedged(Event):
    """A call was slow, so a second copy was started beside it."""

    __slots__ = ("delay", "number")
    name = "call_hedged"

    def __init__(self, guard: str, *, number: int, delay: float) -> None:
        """Hold the number of running copies, with this one, and after how many seconds it began."""
        super().__init__(guard)
        self.number = number
        self.delay = delay


class LevelChanged(Event):
    """A ladder went from one level of service to another."""

    __slots__ = ("after", "before", "cause")
    name = "level_changed"
    is_change = True

    def __init__(self, guard: str, *, before: str, after: str, cause: str) -> None:
        """Hold the names of the levels, and what caused the change."""
        super().__init__(guard)
        self.before = before
        self.after = after
        self.cause = cause


class ResourceLeaked(Event):
    """A resource has been out of its pool for longer than borrowers are expected to need."""

    __slots__ = ("borrowed_at", "seconds")
    name = "resource_leaked"
    is_change = True

    def __init__(self, guard: str, *, borrowed_at: str, seconds: float) -> None:
        """Hold the line of code that borrowed it, and for how many seconds it has been out."""
        super().__init__(guard)
        self.borrowed_at = borrowed_at
        self.seconds = seconds


class WorkerReplaced(Event):
    """A worker process died and another took its place."""

    __slots__ = ("exit_code", "item")
    name = "worker_replaced"
    is_change = True

    def __init__(self, guard: str, *, item: str, exit_code: int | None) -> None:
        """Hold the item it was working on, and how it ended."""
        super().__init__(guard)
        self.item = item
        self.exit_code = exit_code


class LoopBlocked(Event):
    """An event loop has not completed an iteration for `seconds`; `stack` is what it is doing.

    It comes when the block is noticed, and once more when it is `over`.
    """

    __slots__ = ("over", "seconds", "stack")
    name = "loop_blocked"

    def __init__(self, guard: str, *, seconds: float, stack: str, over: bool) -> None:
        """Hold for how many seconds, and where the loop's thread is, or was."""
        super().__init__(guard)
        self.seconds = seconds
        self.stack = stack
        self.over = over


class StoreModeChanged(Event):
    """A shared policy continues without its store, or with it again."""

    __slots__ = ("after", "before", "cause", "policy", "store")
    name = "store_mode_changed"

    def __init__(
        self, guard: str, *, policy: str, store: str, before: str, after: str, cause: str
    ) -> None:
        """Hold the modes ("shared", or the value of `on_store_failure`) and the cause."""
        super().__init__(guard)
        self.policy = policy
        self.store = store
        self.before = before
        self.after = after
        self.cause = cause


class ImplausibleReport(Event):
    """A limit got an impossible report of a cost or from a vendor, and clipped it."""

    __slots__ = ("counted", "limit", "policy", "reported", "what")
    name = "implausible_report"

    def __init__(
        self, guard: str, *, policy: str, limit: str, what: str, reported: float, counted: float
    ) -> None:
        """Hold `what` was reported ("cost" or "reset_after"), how much, and what part counts."""
        super().__init__(guard)
        self.policy = policy
        self.limit = limit
        self.what = what
        self.reported = reported
        self.counted = counted


class SettingsDiffer(Event):
    """Pods share a policy of the same name but disagree on its settings."""

    __slots__ = ("other", "own", "policy", "shared_name")
    name = "settings_differ"
    is_change = True

    def __init__(self, guard: str, *, policy: str, shared_name: str, own: str, other: str) -> None:
        """Hold this pod's settings and those that another pod has announced."""
        super().__init__(guard)
        self.policy = policy
        self.shared_name = shared_name
        self.own = own
        self.other = other


class LeaseChanged(Event):
    """A lease was acquired, released or lost; `guard` is its name."""

    __slots__ = ("cause", "held", "token")
    name = "lease_changed"
    is_change = True

    def __init__(self, guard: str, *, token: int, held: bool, cause: str) -> None:
        """Hold the fencing token, whether the lease is held now, and why."""
        super().__init__(guard)
        self.token = token
        self.held = held
        self.cause = cause


class JobDied(Event):
    """A job was given up after its last attempt; `guard` is the name of its queue or its `Jobs`.

    Also a call that was stored to be done later; `guard` is then the name of its `Later`.
    """

    __slots__ = ("attempts", "cause", "job", "traceback")
    name = "job_died"
    is_change = True

    def __init__(
        self, guard: str, *, job: str, attempts: int, cause: str, traceback: str = ""
    ) -> None:
        """Hold the job's id, its number of attempts, and why the last attempt failed.

        `traceback` is that of the handler's error, redacted and shortened; empty if none was
        raised.
        """
        super().__init__(guard)
        self.job = job
        self.attempts = attempts
        self.cause = cause
        self.traceback = traceback


class DeadLetterDropped(Event):
    """A dead letter was dropped because there were too many; `guard` is the queue's name."""

    __slots__ = ("job",)
    name = "dead_letter_dropped"
    is_change = True

    def __init__(self, guard: str, *, job: str) -> None:
        """Hold the job's id."""
        super().__init__(guard)
        self.job = job


Listener = Callable[[Any], object]

_lock = RLock()
_muted: Final[ContextVar[bool]] = ContextVar("seawall_muted", default=False)
_listeners: tuple[tuple[Listener, tuple[type[Event], ...]], ...] = ()


@overload
def subscribe(listener: Callable[[Event], object], /) -> Callable[[], None]: ...
@overload
def subscribe(listener: Callable[[E], object], /, *types: type[E]) -> Callable[[], None]: ...
def subscribe(listener: Listener, /, *types: type[Event]) -> Callable[[], None]:
    """Call `listener(event)` for each event of `types` (of any type, if none is given).

    The listener runs synchronously, in the thread where the event happened, so it must be quick.
    Return a function that ends the subscription.
    """
    if not callable(listener) or kind_of(listener) != "sync":
        raise TypeError(f"subscribe({listener!r}): pass a plain function that takes one event")
    for kind in types:
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            raise TypeError(f"subscribe(..., {kind!r}): name event types, such as BreakerChanged")
    entry = (listener, types or (Event,))
    global _listeners  # noqa: PLW0603 - swapped whole, so that emit() can read without the lock
    with _lock:
        _listeners = (*_listeners, entry)

    def unsubscribe() -> None:
        global _listeners  # noqa: PLW0603
        with _lock:
            _listeners = tuple(kept for kept in _listeners if kept is not entry)

    return unsubscribe


@contextmanager
def muted() -> Iterator[None]:
    """Emit nothing in the block: what happens there is only simulated."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def is_muted() -> bool:
    """Return whether this runs inside a block of `muted()`."""
    return _muted.get()


def listening() -> bool:
    """Return whether there is any subscriber; without one, events need not be built."""
    return bool(_listeners)


def emit(kind: type[Event], guard: str, **fields: Any) -> None:
    """Send an event to its subscribers, and to the log if it is a change of state.

    Build nothing if neither applies. A listener that fails is logged and does not harm the call.
    """
    listeners = [listener for listener, types in _listeners if issubclass(kind, types)]
    if not (listeners or kind.is_change) or _muted.get():
        return
    event = kind(guard, **fields)
    if kind.is_change:
        from seawall.runtime.log import changes

        changes.write(event)
    _hand(event, listeners)


def deliver(event: Event) -> None:
    """Send an event that was already built to its subscribers."""
    _hand(event, [listener for listener, types in _listeners if isinstance(event, types)])


def _hand(event: Event, listeners: list[Listener]) -> None:
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            import logging

            logging.getLogger("seawall").exception("a listener failed on %s", event.name)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - the old one may be held by a thread that is gone
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
