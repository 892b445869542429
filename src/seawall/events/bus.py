"""Typed events and `subscribe`.

Only transitions and troubles are events. Without a subscriber, none is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from threading import RLock
from typing import Any, ClassVar, Final, TypeVar, overload

from seawall._checks import function_kind
from seawall._failures import log_failure

E = TypeVar("E", bound="Event")


@dataclass(slots=True, eq=False)
class Event:
    """Something happened in the guard called `guard`; `name` is stable, for logs and metrics.

    Objects that belong to no guard (a pool, an executor, `ServiceLevels`) put their own name there.
    """

    name: ClassVar[str] = "event"
    is_change: ClassVar[bool] = False
    """Whether it is a change of state, which is logged even without a subscriber.

    Not `StoreModeChanged`, which comes once for each policy of a store that logs its loss itself,
    and not `LoopBlocked`, which the watchdog logs with the stack. Most others are about single
    calls.
    """

    guard: str

    def fields(self) -> dict[str, Any]:
        """Return the event's own values by name, including the guard's."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


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
    if isinstance(listener, type) or not callable(listener) or function_kind(listener) != "sync":
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
    """Send an event to its subscribers, and to the log if it is a change; build none in vain."""
    heard = any(issubclass(kind, types) for _, types in _listeners)
    if not (heard or kind.is_change) or _muted.get():
        return
    event = kind(guard, **fields)
    if kind.is_change:
        from seawall.events.log import changes

        changes.write(event)
    deliver(event)


def deliver(event: Event) -> None:
    """Send an event that was already built to its subscribers."""
    for listener, types in _listeners:
        if not isinstance(event, types):
            continue
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - logged
            log_failure("a listener failed on %s", event.name)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - the old one may be held by a thread that is gone
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
